// Products of packed weights by tiles of whole numbers: weights and activations in two planes of 8 bits.
//
// A number of 16 bits is 256 * high + low. Sums of high * high, and of high * low + low * high, are exact, and low * low
// is left out. So a row's results depend on nothing but the row and the matrix.

#pragma once

#include "tile_products.h"

namespace {

constexpr Int PLANE_STEP = 4 * TILE, PLANE = TILE * PLANE_STEP;  // the numbers of a row that a factor has; its bytes
// Numbers multiplied at a time: the planes of two panels then stay in the innermost cache for all rows.
constexpr Int PLANE_NUMBERS = 768;
constexpr Int LONGEST_SUM = 1 << 16;  // sums of more numbers may not fit into 32 bits

constexpr Int padded(Int length) { return (length + PLANE_STEP - 1) / PLANE_STEP * PLANE_STEP; }

// A row of activations in planes.
struct PlaneRow {
    static constexpr float MOST = 32512;  // 127 * 256: the high bytes of -MOST to MOST are within -127 to 127
    float* factors;  // two: the product of a number and both is the activation
    std::int8_t *high, *low;

    PlaneRow(const char* at, Int length)
        : factors((float*)at), high((std::int8_t*)at + 64), low(high + padded(length)) {}
    static Int bytes(Int length) { return 64 + 2 * padded(length); }

    void round(const float* x, Int length) const {
        const float largest = largest_of(x, length);
        const float up = largest < 0x1p-64f ? 0x1p64f : 1.0f, most = largest * up;  // as in `Packed`
        const float inverse = most > 0x1p-100f ? MOST / most : 0.0f;
        factors[0] = most / MOST, factors[1] = 1.0f / up;
        for (Int i = 0; i < length; i += LANES) {
            const floats whole = widen(x + i) * up * inverse + ROUND - ROUND;
            const ints number = __builtin_convertvector(whole, ints);
            store(high + i, __builtin_convertvector((number + 128) >> 8, signed_bytes));
            store(low + i, __builtin_convertvector(number, signed_bytes));
        }
        for (Int i = length; i < padded(length); i++) high[i] = low[i] = 0;
    }
};

// ---- weights ---------------------------------------------------------------------------------------------------------

INLINE signed_pairs rounded_high(signed_pairs x, signed_pairs y) {  // x * y / 2**15
#if defined(__AVX512BW__)
    return (signed_pairs)_mm512_mulhrs_epi16((__m512i)x, (__m512i)y);
#else
    const ints even = (((ints)x << 16 >> 16) * ((ints)y << 16 >> 16) + (1 << 14)) >> 15;
    const ints odd = (((ints)x >> 16) * ((ints)y >> 16) + (1 << 14)) >> 15;
    return (signed_pairs)((even & 0xffff) | odd << 16);
#endif
}

// Write the unit of each column: its weights are whole numbers of 16 bits, times this. It is not finite if a scale or a
// zero is not.
template <int BITS>
void write_units(const Panel& panel, float* to) {
    constexpr float MIDDLE = 1 << (BITS - 1);
    floats most[PANEL / LANES] = {}, step[PANEL / LANES] = {}, lost[PANEL / LANES] = {};
    for (Int g = 0; g < panel.matrix.length / GROUP; g++)
        panel.each_span<BITS>(g, [&](int v, floats scale, floats zero, auto) {
            for (const floats x : {zero, zero + scale * (2 * MIDDLE - 1)}) most[v] = larger(x < 0 ? -x : x, most[v]);
            step[v] = larger(scale < 0 ? -scale : scale, step[v]), lost[v] += (zero + scale) * 0.0f;
        });
    for (int v = 0; v < PANEL / LANES; v++)
        store(to + v * LANES, larger(most[v] / 32500.0f, step[v] * (MIDDLE / 32766.0f)) + lost[v]);
}

// Write `length` weights of a panel's columns as right factors: each step has one of high and one of low bytes. A weight
// is off by at most 1.5 units. The last half of a step may have any bytes: rows are padded with zeros.
template <int BITS>
void write_planes(const Panel& panel, Int length, const float* units, char* to) {
    constexpr float MIDDLE = 1 << (BITS - 1);
    constexpr int UP = 16 - BITS;
    const words sign = words{} + 0x80008000u;
    floats inverse[PANEL / LANES];
    for (int v = 0; v < PANEL / LANES; v++) {
        const floats unit = widen(units + v * LANES);
        inverse[v] = unit > 0 ? 1.0f / unit : floats{};
    }
    for (Int g = 0; g < length / GROUP; g++)
        panel.each_span<BITS>(g, [&](int v, floats scale, floats zero, auto each) {
            auto twice = [&](floats x) {  // rounded, in both halves
                const words whole = (words)__builtin_convertvector(x * inverse[v] + ROUND - ROUND, ints);
                return (whole & 0xffffu) | whole << 16;
            };
            const signed_pairs factor = (signed_pairs)twice(scale * MIDDLE);
            const pairs middle = (pairs)twice(zero + scale * MIDDLE) + std::uint16_t(128);
            char* out = to + g / 2 * 2 * PLANE + g % 2 * (PLANE / 2) + v * VECTOR;
            each([&](int i, words four) {
                // (code - MIDDLE) * 2**UP of the even and of the odd codes, and then weights + 128.
                const words even_codes = (words)((pairs)four << UP) ^ sign;
                const words odd_codes = (words)((pairs)(four & 0xff00ff00u) << (UP - 8)) ^ sign;
                const pairs even = (pairs)rounded_high((signed_pairs)even_codes, factor) + middle;
                const pairs odd = (pairs)rounded_high((signed_pairs)odd_codes, factor) + middle;
                store(out + i * 64, (words)(even >> 8) | ((words)odd & 0xff00ff00u));
                store(out + i * 64 + PLANE, (((words)even & 0x00ff00ffu) | (words)(odd << 8)) ^ 0x80808080u);
            });
        });
}

// ---- products --------------------------------------------------------------------------------------------------------

// Sums 0 and 1 are high * high and the mixed ones of the first panel, 2 and 3 those of the second; `x` is the high plane
// of TILE rows of `size` bytes, and `low` bytes later their low plane.
INLINE void add_planes(const char* first, const char* second, const char* x, Int low, Int size, Int length, bool started,
                       Sums& sums) {
    begin_sums(sums, started);
    for (Int k = 0; k < length; k += PLANE_STEP, first += 2 * PLANE, second += 2 * PLANE) {
        TILE_READ_ONCE(4, x + k, size);
        TILE_READ(6, first, 64);
        TILE_ADD_BYTES(0, 4, 6);
        TILE_READ_ONCE(5, x + low + k, size);
        TILE_ADD_BYTES(1, 5, 6);
        TILE_READ(7, second, 64);
        TILE_ADD_BYTES(2, 4, 7);
        TILE_ADD_BYTES(3, 5, 7);
        TILE_READ(6, first + PLANE, 64);
        TILE_ADD_BYTES(1, 4, 6);
        TILE_READ(7, second + PLANE, 64);
        TILE_ADD_BYTES(3, 4, 7);
    }
    write_sums(sums);
}

// Two panels of columns that are multiplied together.
struct Panels {
    const Matrix* matrix[2];
    Int column[2];  // the second one may be behind the last column

    // Write the planes of numbers `begin` to `end`, and first of all the units.
    void write(Int begin, Int end, float* units, char* planes, Int bytes) const {
        for (int i = 0; i < 2; i++, units += PANEL) {
            if (column[i] >= matrix[i]->columns) continue;
            const Panel panel(*matrix[i], column[i], begin);
            with_bits(*matrix[i], [&](auto bits) {
                if (begin == 0) write_units<bits>(panel, units);
                write_planes<bits>(panel, end - begin, units, planes + i * bytes);
            });
        }
    }
};

// Multiply `count` times two panels, which panels_at(p) returns, with `rows` rows of `size` bytes, and call
// act(p, r, lane, x, y) with results of row r and LANES columns of both.
template <class At, class Act>
void multiply_planes(Int count, At panels_at, const char* x, Int size, Int rows, Int length, char* room, Act act) {
    const Parts parts(rows, length, PLANE_NUMBERS);
    float* all_units = (float*)(room + parts.sums(1) * sizeof(Sums));  // of the panels whose sums are stored
    char* planes = (char*)(all_units + parts.pairs * 2 * PANEL);
    const Int bytes = 2 * TILE * padded(parts.numbers);
    configure_tiles({TILE, TILE});
    parts.each(count, [&](Int p, Int place, Int begin, Int end) {
        float* units = all_units + place * 2 * PANEL;
        panels_at(p).write(begin, end, units, planes, bytes);
        for (Int r = 0; r < rows; r += TILE) {
            alignas(64) Sums here;
            Sums& sums = parts.sums(1) ? ((Sums*)room)[place * parts.tiles + r / TILE] : here;
            const PlaneRow row(x + r * size, length);
            add_planes(planes, planes + bytes, (const char*)row.high + begin, row.low - row.high, size, end - begin,
                       begin > 0, sums);
            for (Int j = 0; end == length && j < std::min<Int>(TILE, rows - r); j++)
                for (int lane = 0; lane < PANEL; lane += LANES) {
                    const float* factors = PlaneRow(x + (r + j) * size, length).factors;
                    auto result = [&](int i) {
                        const float *high = sums[2 * i] + j * TILE + lane, *mixed = sums[2 * i + 1] + j * TILE + lane;
                        const floats sum = multiply_add(__builtin_convertvector(load<ints>(mixed), floats),
                                                        __builtin_convertvector(load<ints>(high), floats), 256.0f);
                        return sum * (widen(units + i * PANEL + lane) * 256.0f) * factors[0] * factors[1];
                    };
                    act(p, r + j, lane, result(0), result(1));
                }
        }
    });
    release_tiles();
}

// The bytes of `room` for these products.
inline Int room_of_planes(Int rows, Int length) {
    const Parts parts(rows, length, PLANE_NUMBERS);
    const Int planes = 2 * 2 * TILE * padded(parts.numbers), units = parts.pairs * 2 * PANEL * Int(sizeof(float));
    return parts.sums(1) * Int(sizeof(Sums)) + units + planes;
}

}  // namespace
