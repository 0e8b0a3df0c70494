// Products of bfloat16 by tiles: weights are left factors as they are, and rows of activations become right factors.
//
// A sum has the same order for any number of rows and columns.

#pragma once

#include "matrices.h"

namespace {

constexpr Int STEP = 2 * TILE;           // the numbers of a row that a factor has
constexpr Int FACTOR = TILE * STEP * 2;  // the bytes of a factor
// Rows of more bytes do not stay in a core's L2 cache while the weights pass by. Then so many steps of them are multiplied
// with so many pairs of left factors before the next steps, and their sums are stored meanwhile.
constexpr Int IN_CACHE = 1 << 20, STEPS_AT_ONCE = 2048 / STEP, PAIRS_AT_ONCE = 16;

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

    // The floats that `multiply_tiles` needs for sums of so many rows.
    static Int partial_sums(Int rows, Int length) {
        const Int tiles = (rows + TILE - 1) / TILE;
        return tiles * TILE * length * 2 > IN_CACHE ? PAIRS_AT_ONCE * ((tiles + 1) / 2) * 4 * TILE * TILE : 0;
    }
};

// Two left factors of up to TILE columns of weights, `length` numbers apart. The second one may have none.
struct Pair {
    const bfloat *first, *second;
    Int length, first_count, second_count;

    // Prefetch step k of columns `begin` to `end` of the 2 * TILE.
    INLINE void ask_for(Int begin, Int end, Int k) const {
        for (Int i = begin; i < end; i++)
            __builtin_prefetch((i < TILE ? first + i * length : second + (i - TILE) * length) + k * STEP, 0, 2);
    }
};

// The sums of a pair and 2 * TILE rows: four tiles of a column's sums side by side, of the first columns with TILE rows
// and with the next TILE rows, and the same of the second columns.
using Sums = float[4][TILE * TILE];

// Add the products of steps `begin` to `end` with the rows of factor `tile` and, if `two`, of the next one. `ask`
// prefetches a part of the next pair in each step: else its products would wait for memory, which would idle meanwhile.
template <class Ask>
INLINE void add_tiles(const Pair& pair, const Factors& x, Int tile, bool two, Int begin, Int end, bool started, Sums& sums,
                      Ask ask) {
    const bool both = pair.second_count > 0;
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
    for (Int k = begin; k < end; k++) {
        const char* from = x.first + tile * x.tile + k * x.step;
        TILE_READ(4, pair.first + k * STEP, pair.length * 2);
        TILE_READ_ONCE(6, from, x.line);
        TILE_ADD_BFLOATS(0, 4, 6);
        if (two) {
            TILE_READ_ONCE(7, from + x.tile, x.line);
            TILE_ADD_BFLOATS(1, 4, 7);
        }
        if (both) {
            TILE_READ(5, pair.second + k * STEP, pair.length * 2);
            TILE_ADD_BFLOATS(2, 5, 6);
            if (two) TILE_ADD_BFLOATS(3, 5, 7);
        }
        ask(k);
    }
    TILE_WRITE(0, sums[0], 64);
    TILE_WRITE(1, sums[1], 64);
    TILE_WRITE(2, sums[2], 64);
    TILE_WRITE(3, sums[3], 64);
    write_before_reading();
}

// Multiply `pairs` pairs of left factors, each of which pair_at(p) returns, with `rows` rows of `length` numbers, and call
// act(p, r, sums) for each of them and every 2 * TILE rows from r on.
template <class At, class Act>
void multiply_tiles(Int pairs, At pair_at, const Factors& x, Int rows, Int length, char* room, Act act) {
    const Int steps = length / STEP, tiles = (rows + TILE - 1) / TILE, blocks = (tiles + 1) / 2;
    const bool in_parts = Factors::partial_sums(rows, length) > 0;
    const Int at_once = in_parts ? STEPS_AT_ONCE : steps;
    Int configured = 0;
    for (Int some = 0; some < pairs; some += PAIRS_AT_ONCE)
        for (Int begin = 0; begin < steps; begin += at_once)
            for (Int p = some; p < std::min(pairs, some + PAIRS_AT_ONCE); p++) {
                const Pair pair = pair_at(p), next = pair_at(std::min(p + 1, pairs - 1));
                if (const Int counts = pair.first_count * TILE + pair.second_count; counts != configured)
                    configure_tiles({pair.first_count, std::max<Int>(pair.second_count, 1)}), configured = counts;
                for (Int b = 0; b < blocks; b++) {
                    alignas(64) Sums here;
                    Sums& sums = in_parts ? ((Sums*)room)[(p - some) * blocks + b] : here;
                    const Int end = std::min(steps, begin + at_once), asked = next.first_count + next.second_count;
                    add_tiles(pair, x, 2 * b, 2 * b + 1 < tiles, begin, end, begin > 0, sums, [&](Int k) {
                        next.ask_for(asked * b / blocks, asked * (b + 1) / blocks, k);
                    });
                    if (end == steps) act(p, 2 * b * TILE, sums);
                }
            }
    release_tiles();
}

// to[r][c] = x[r] . w[c] for columns `first` to `end`, or += if ADDED.
template <bool ADDED>
void multiply_by_tiles(const Matrix& matrix, const Factors& x, Int rows, Int first, Int end, float* to, Int stride,
                       char* room) {
    const Int length = matrix.length;
    auto pair_at = [&](Int p) {
        const Int c = first + p * 2 * TILE, count = std::min<Int>(TILE, end - c);
        const bfloat* weights = (const bfloat*)matrix.weight + c * length;
        return Pair{weights, weights + TILE * length, length, count, std::clamp<Int>(end - c - TILE, 0, TILE)};
    };
    multiply_tiles((end - first + 2 * TILE - 1) / (2 * TILE), pair_at, x, rows, length, room, [&](Int p, Int r, Sums& sums) {
        for (int i = 0; i < 4; i++) {
            const Int row = r + i % 2 * TILE, c = first + p * 2 * TILE + i / 2 * TILE, columns = std::min<Int>(TILE, end - c);
            tile_row of_row[TILE];
            if (columns > 0 && row < rows) transpose_tile((const char*)sums[i], 64, of_row);
            for (Int j = 0; columns > 0 && j < std::min<Int>(TILE, rows - row); j++) {
                float* out = to + (row + j) * stride + c;
                tile_row before = {};
                if (ADDED) std::memcpy(&before, out, columns * sizeof(float)), of_row[j] = before + of_row[j];
                std::memcpy(out, &of_row[j], columns * sizeof(float));
            }
        }
    });
}

// Write silu(w1 x) * w3 x of columns `first` to `end`, whole tiles, as the right factors of the next product.
inline void gate_by_tiles(const Matrix& w1, const Matrix& w3, const Factors& x, Int rows, Int first, Int end,
                          const Factors& to, char* room) {
    auto pair_at = [&](Int p) {
        const Int at = (first + p * TILE) * w1.length;
        return Pair{(const bfloat*)w1.weight + at, (const bfloat*)w3.weight + at, w1.length, TILE, TILE};
    };
    multiply_tiles((end - first) / TILE, pair_at, x, rows, w1.length, room, [&](Int p, Int r, Sums& sums) {
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
    });
}

}  // namespace
