// Products of bfloat16 by tiles: weights are left factors, as they are or decoded, and rows of activations become right
// factors.
//
// A sum has the same order for any number of rows and columns.

#pragma once

#include "matrices.h"

namespace {

constexpr Int STEP = 2 * TILE;           // the numbers of a row that a factor has
constexpr Int FACTOR = TILE * STEP * 2;  // the bytes of a factor
// Rows of more bytes do not stay in a core's L2 cache while the weights pass by. Then so many numbers of them are
// multiplied with so many pairs of columns' factors before the next ones, and their sums are stored meanwhile.
constexpr Int IN_CACHE = 1 << 20, NUMBERS_AT_ONCE = 2048, PAIRS_AT_ONCE = 16;

// Rows of bfloat16 as right factors. A factor has STEP numbers of TILE rows; its line i has pair i of every row.
struct Factors {
    char* first;
    Int line, step, tile;  // the bytes to the next line, to the factor of the next numbers, and to that of the next rows

    // Of rows that are `size` bytes apart. A factor is contiguous, except if the rows have other numbers, too.
    Factors(const char* rows, Int size, Int length) : first((char*)rows), line(size), step(64), tile(TILE * size) {
        if (size == length * 2) line = 64, step = FACTOR;
    }

    // Write the first TILE rows, which are at `rows`.
    void arrange(const char* rows, Int size, Int length) const {
        for (Int k = 0; k < length / STEP; k++) {
            tile_row pairs[TILE];
            transpose_tile(rows + k * 64, size, pairs);
            for (int i = 0; i < TILE; i++) std::memcpy(first + k * step + i * line, &pairs[i], sizeof pairs[i]);
        }
    }
};

// Four tiles of sums of a pair of columns' factors.
using Sums = float[4][TILE * TILE];

INLINE void begin_sums(const Sums& sums, bool started) {
    if (started) {
        TILE_READ(0, sums[0], 64);
        TILE_READ(1, sums[1], 64);
        TILE_READ(2, sums[2], 64);
        TILE_READ(3, sums[3], 64);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
}

INLINE void write_sums(Sums& sums) {
    TILE_WRITE(0, sums[0], 64);
    TILE_WRITE(1, sums[1], 64);
    TILE_WRITE(2, sums[2], 64);
    TILE_WRITE(3, sums[3], 64);
    write_before_reading();
}

// How many numbers of rows, and how many pairs of factors, are multiplied at a time. `most`: of numbers; 0 if only rows
// that do not stay in the cache are divided.
struct Parts {
    Int length, tiles, numbers, pairs;

    Parts(Int rows, Int length, Int most) : length(length), tiles((rows + TILE - 1) / TILE), numbers(length), pairs(1) {
        const bool in_cache = tiles * TILE * length * 2 <= IN_CACHE;
        if (most || !in_cache) numbers = std::min(length, most ? most : NUMBERS_AT_ONCE);
        if (!in_cache) pairs = PAIRS_AT_ONCE;
    }
    // How many sums are stored for blocks of so many tiles of rows; none if all numbers are multiplied at once.
    Int sums(Int block) const { return numbers < length ? pairs * ((tiles + block - 1) / block) : 0; }

    // Call act(p, place, begin, end) to multiply pair p, whose sums are at `place` of those stored.
    template <class Act>
    void each(Int count, Act act) const {
        for (Int some = 0; some < count; some += pairs)
            for (Int begin = 0; begin < length; begin += numbers)
                for (Int p = some; p < std::min(count, some + pairs); p++)
                    act(p, p - some, begin, std::min(length, begin + numbers));
    }
};

// ---- decoded weights -------------------------------------------------------------------------------------------------

// A panel of a packed matrix, and the place of some of its numbers.
struct Panel {
    const Matrix& matrix;
    const Int number, group;

    Panel(const Matrix& matrix, Int column, Int begin) : matrix(matrix), number(column / PANEL), group(begin / GROUP) {}

    // Call act(v, scale, zero, each) for all spans of group g of all columns: each(act) calls act(i, four codes).
    template <int BITS, class Act>
    INLINE void each_span(Int g, Act act) const {
        constexpr int SPANS = spans(BITS), FOURS = GROUP / 4 / SPANS;
        for (int v = 0; v < PANEL / LANES; v++) {
            const Place at(matrix, number, v * LANES, BITS);
            UNROLL for (int s = 0; s < SPANS; s++) {
                const Int from = group + g, span = from * SPANS + s;
                const floats scale = at.scales.at(span, from);
                act(v, scale, matrix.zeros ? at.zeros.at(span, from) : -float(matrix.offset) * scale, [&](auto act) {
                    UNROLL for (int i = s * FOURS; i < (s + 1) * FOURS; i++)
                        act(i, four_codes<BITS>(at.codes + from * PANEL * BITS * 4, i / 4, i % 4));
                });
            }
        }
    }
};

// Write `length` weights of a panel's columns as bfloat16, one column after the other.
template <int BITS>
void decode(const Panel& panel, Int length, bfloat* to) {
    for (Int g = 0; g < length / GROUP; g++) {
        words of_pairs[GROUP / 2][PANEL / LANES];
        tile_row of_columns[TILE];
        panel.each_span<BITS>(g, [&](int v, floats scale, floats zero, auto each) {
            each([&](int i, words four) {
                auto weight = [&](int b) {
                    return bfloat_bits(scale * __builtin_convertvector((ints)(four >> 8 * b & 255u), floats) + zero);
                };
                of_pairs[2 * i][v] = weight(0) | weight(1) << 16, of_pairs[2 * i + 1][v] = weight(2) | weight(3) << 16;
            });
        });
        transpose_tile(of_pairs, 64, of_columns);
        for (int c = 0; c < PANEL; c++) std::memcpy(to + c * length + g * GROUP, &of_columns[c], sizeof of_columns[c]);
    }
}

// Numbers `begin` to `end` of up to TILE columns of weights, `stride` numbers apart.
struct Left {
    const bfloat* first;
    Int stride, count;

    // From column `c` on, of those before `last`. Packed weights are decoded to `to`.
    static Left of(const Matrix& matrix, Int c, Int last, Int begin, Int end, char* to) {
        const Int count = std::clamp<Int>(last - c, 0, TILE);
        if (!matrix.bits) return {(const bfloat*)matrix.weight + c * matrix.length + begin, matrix.length, count};
        if (count) {
            const Panel panel(matrix, c, begin);
            with_bits(matrix, [&](auto bits) { decode<bits>(panel, end - begin, (bfloat*)to); });
        }
        return {(const bfloat*)to, end - begin, count};
    }
};

// ---- products --------------------------------------------------------------------------------------------------------

// Two left factors; the second one may have no columns.
struct Pair {
    Left first, second;

    // Prefetch the factors at number k of columns `begin` to `end` of the 2 * TILE.
    INLINE void ask_for(Int begin, Int end, Int k) const {
        for (Int i = begin; i < end; i++) {
            const Left& left = i < TILE ? first : second;
            __builtin_prefetch(left.first + i % TILE * left.stride + k, 0, 2);
        }
    }
};

// Add the products of `length` numbers with the rows at x and, if `two`, with the next TILE rows. `sums` are those of the
// first columns with both, and of the second columns, tiles of a column's sums side by side. `ask` prefetches a part of
// the next pair in each step: else its products would wait for memory, which would idle meanwhile.
template <class Ask>
INLINE void add_tiles(const Pair& pair, const Factors& x, const char* from, bool two, Int length, bool started, Sums& sums,
                      Ask ask) {
    const bool both = pair.second.count > 0;
    begin_sums(sums, started);
    for (Int k = 0; k < length; k += STEP, from += x.step) {
        TILE_READ(4, pair.first.first + k, pair.first.stride * 2);
        TILE_READ_ONCE(6, from, x.line);
        TILE_ADD_BFLOATS(0, 4, 6);
        if (two) {
            TILE_READ_ONCE(7, from + x.tile, x.line);
            TILE_ADD_BFLOATS(1, 4, 7);
        }
        if (both) {
            TILE_READ(5, pair.second.first + k, pair.second.stride * 2);
            TILE_ADD_BFLOATS(2, 5, 6);
            if (two) TILE_ADD_BFLOATS(3, 5, 7);
        }
        ask(k);
    }
    write_sums(sums);
}

// Multiply `pairs` pairs, of which left_at(p, i, begin, end, to) returns factor i, with `rows` rows, and call
// act(p, r, sums) for each of them and every 2 * TILE rows from r on. `decodes`: some of the matrices are packed.
template <class At, class Act>
void multiply_tiles(Int pairs, At left_at, bool decodes, const Factors& x, Int rows, Int length, char* room, Act act) {
    const Parts parts(rows, length, decodes ? NUMBERS_AT_ONCE : 0);
    const Int blocks = (parts.tiles + 1) / 2, decoded = TILE * parts.numbers * 2;
    char* columns = room + parts.sums(2) * sizeof(Sums);
    Int configured = 0;
    parts.each(pairs, [&](Int p, Int place, Int begin, Int end) {
        auto pair_at = [&](Int p) {
            auto left = [&](Int i) { return left_at(p, i, begin, end, columns + i * decoded); };
            return Pair{left(0), left(1)};
        };
        const Pair pair = pair_at(p), next = decodes ? Pair{} : pair_at(std::min(p + 1, pairs - 1));
        if (const Int counts = pair.first.count * TILE + pair.second.count; counts != configured)
            configure_tiles({pair.first.count, std::max<Int>(pair.second.count, 1)}), configured = counts;
        for (Int b = 0; b < blocks; b++) {
            alignas(64) Sums here;
            Sums& sums = parts.sums(2) ? ((Sums*)room)[place * blocks + b] : here;
            const char* from = x.first + 2 * b * x.tile + begin / STEP * x.step;
            const Int asked = next.first.count + next.second.count;
            add_tiles(pair, x, from, 2 * b + 1 < parts.tiles, end - begin, begin > 0, sums, [&](Int k) {
                next.ask_for(asked * b / blocks, asked * (b + 1) / blocks, k);
            });
            if (end == length) act(p, 2 * b * TILE, sums);
        }
    });
    release_tiles();
}

// The bytes of `room` for these products.
inline Int room_of_tiles(Int rows, Int length, bool decodes) {
    const Parts parts(rows, length, decodes ? NUMBERS_AT_ONCE : 0);
    return parts.sums(2) * Int(sizeof(Sums)) + (decodes ? 2 * TILE * parts.numbers * 2 : 0);
}

// to[r][c] = x[r] . w[c] for columns `first` to `end`, or += if ADDED.
template <bool ADDED>
void multiply_by_tiles(const Matrix& matrix, const Factors& x, Int rows, Int first, Int end, float* to, Int stride,
                       char* room) {
    auto left_at = [&](Int p, Int i, Int from, Int until, char* decoded) {
        return Left::of(matrix, first + (2 * p + i) * TILE, end, from, until, decoded);
    };
    auto write = [&](Int p, Int r, Sums& sums) {
        for (int i = 0; i < 4; i++) {
            const Int row = r + i % 2 * TILE, c = first + (2 * p + i / 2) * TILE, columns = std::min<Int>(TILE, end - c);
            tile_row of_row[TILE];
            if (columns > 0 && row < rows) transpose_tile((const char*)sums[i], 64, of_row);
            for (Int j = 0; columns > 0 && j < std::min<Int>(TILE, rows - row); j++) {
                float* out = to + (row + j) * stride + c;
                tile_row before = {};
                if (ADDED) std::memcpy(&before, out, columns * sizeof(float)), of_row[j] = before + of_row[j];
                std::memcpy(out, &of_row[j], columns * sizeof(float));
            }
        }
    };
    const Int pairs = (end - first + 2 * TILE - 1) / (2 * TILE);
    multiply_tiles(pairs, left_at, matrix.bits > 0, x, rows, matrix.length, room, write);
}

// Write silu(w1 x) * w3 x of columns `first` to `end`, whole tiles, as the right factors of the next product.
inline void gate_by_tiles(const Matrix& w1, const Matrix& w3, const Factors& x, Int rows, Int first, Int end,
                          const Factors& to, char* room) {
    auto left_at = [&](Int p, Int i, Int from, Int until, char* decoded) {
        return Left::of(i ? w3 : w1, first + p * TILE, end, from, until, decoded);
    };
    auto write = [&](Int p, Int r, Sums& sums) {
        const Int c = first + p * TILE;
        for (int i = 0; i < 2 && r + i * TILE < rows; i++) {
            char* out = to.first + (r / TILE + i) * to.tile + c / STEP * to.step + c % STEP / 2 * to.line;
            for (Int at = 0; at < TILE * TILE; at += 2 * TILE, out += to.line)  // two columns
                for (Int j = at; j < at + TILE; j += LANES) {
                    const float *gate = sums[i] + j, *up = sums[2 + i] + j;
                    const words low = bfloat_bits(gated(widen(gate), widen(up)));
                    store(out + (j - at) * 4, low | bfloat_bits(gated(widen(gate + TILE), widen(up + TILE))) << 16);
                }
        }
    };
    multiply_tiles((end - first) / TILE, left_at, w1.bits || w3.bits, x, rows, w1.length, room, write);
}

}  // namespace
