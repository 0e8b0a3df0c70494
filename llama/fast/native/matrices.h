// Matrices, and how packed ones are read.

#pragma once

#include "vectors.h"

namespace {

// A plain weight, (columns, length), with bits = 0; or codes of 4 to 8 bits in packed.py's layout, of which zeros and
// units may be null. offset: the code of 0 if there are no zeros.
struct Matrix {
    const void *weight, *scales, *zeros, *scale_units, *zero_units;
    Int columns, length;
    Int bits, offset;
};

// The codes of four neighbouring weights of LANES columns, a byte each, from HALF * h + 4 * w on in a GROUP. Up to 6
// bits, a group has four words of the lower 4 bits of codes, and then their upper bits.
template <int BITS>
INLINE words four_codes(const char* group, int h, int w) {
    constexpr Int WORD = PANEL * 4;
    if constexpr (BITS == 8) return load<words>(group + (4 * h + w) * WORD);
    const words low = load<words>(group + w * WORD) >> 4 * h & 0x0f0f0f0fu;
    if constexpr (BITS == 4) return low;
    const words high = load<words>(group + (4 + (BITS == 6 ? h : 0)) * WORD);
    const int at = BITS == 5 ? 4 * h + w : 2 * w;
    return low | ((at < 4 ? high << (4 - at) : high >> (at - 4)) & (BITS == 5 ? 0x10101010u : 0x30303030u));
}

constexpr int spans(int bits) { return bits == 6 ? 2 : 1; }  // scales of a column in a GROUP

// Scales or zeros of LANES columns, one span after the other: float16, or integers times a float16 of every UNIT.
struct Shares {
    const void* each;
    const half* units;

    INLINE floats plain_at(Int span) const { return widen((const half*)each + span * PANEL); }
    INLINE floats nested_at(Int span, Int group) const {
        return widen((const std::int8_t*)each + span * PANEL) * widen(units + group / (UNIT / GROUP) * PANEL);
    }
    INLINE floats at(Int span, Int group) const { return units ? nested_at(span, group) : plain_at(span); }
};

// The addresses of LANES columns of a packed matrix.
struct Place {
    const char* codes;
    Shares scales, zeros;

    Place() = default;
    Place(const Matrix& matrix, Int panel, Int lane, int bits) {
        const Int panels = panel * PANEL, share = panels * (matrix.length / GROUP) * spans(bits) + lane;
        const Int unit = panels * (matrix.length / UNIT) + lane;
        codes = (const char*)matrix.weight + (panels * (matrix.length / GROUP) * bits + lane) * 4;
        auto shares = [&](const void* all, const void* units) {
            if (!units) return Shares{(const half*)all + share, nullptr};
            return Shares{(const std::int8_t*)all + share, (const half*)units + unit};
        };
        scales = shares(matrix.scales, matrix.scale_units), zeros = shares(matrix.zeros, matrix.zero_units);
    }
};

// The scales, or zeros, of neighbouring places.
template <Shares Place::*SIDE, int COUNT>
INLINE void all_at(const Place (&places)[COUNT], Int span, Int group, floats* to) {
    if ((places[0].*SIDE).units)
        UNROLL for (int v = 0; v < COUNT; v++) to[v] = (places[v].*SIDE).nested_at(span, group);
    else
        UNROLL for (int v = 0; v < COUNT; v++) to[v] = (places[v].*SIDE).plain_at(span);
}

// Call act with the bits of the codes as a compile-time constant.
template <class Act>
void with_bits(const Matrix& matrix, Act act) {
    switch (matrix.bits) {
        case 4: return act(std::integral_constant<int, 4>());
        case 5: return act(std::integral_constant<int, 5>());
        case 6: return act(std::integral_constant<int, 6>());
        default: return act(std::integral_constant<int, 8>());
    }
}

}  // namespace
