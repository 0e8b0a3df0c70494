// Matrices, how packed ones are read, and the conversion of a .gguf file's blocks into packed.py's layout, a few panels at
// a time, when a product needs them. quant/gguf_types.py defines every type of block.
// Source: the structs of https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.

#pragma once

#include "tiles.h"

namespace {

// A plain weight, (columns, length), with bits = 0; or codes of 4 to 8 bits in packed.py's layout, of which zeros and
// units may be null. offset: the code of 0 if there are no zeros. block: 0, or the type number of the file's blocks at
// `weight`; then all others are null.
struct Matrix {
    const void *weight, *scales, *zeros, *scale_units, *zero_units;
    Int columns, length;
    Int bits, offset, block;
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

using byte = std::uint8_t;

// Blocks of four neighbouring columns, and the places of their numbers in a panel.
template <int BITS>
struct Four {
    const byte* block[4];
    byte* codes;
    char *scales, *zeros;
    half *scale_units, *zero_units;

    // Words i to i + 3 of a group, computed by act from a column's block.
    template <class Act>
    INLINE void codes_of(Int group, Int i, Act act) const {
        quad words[4] = {act(block[0]), act(block[1]), act(block[2]), act(block[3])};
        transpose(words);
        for (int w = 0; w < 4; w++) store(codes + (group * BITS + i + w) * PANEL * 4, words[w]);
    }
    // Word i, combined from all words that act computes.
    template <class Act>
    INLINE void code_of(Int group, Int i, Act act) const {
        quad words[4] = {act(block[0]), act(block[1]), act(block[2]), act(block[3])};
        transpose(words);
        store(codes + (group * BITS + i) * PANEL * 4, words[0] | words[1] | words[2] | words[3]);
    }
    // A scale or zero of 16 bits at a byte of the block.
    INLINE void share(char* to, Int at) const {
        for (int lane = 0; lane < 4; lane++) std::memcpy(to + lane * 2, block[lane] + at, 2);
    }
};

// The types of a file: the weights of a block, its bytes, and its layout.

// A float16 scale; with MINIMUM a float16 zero; with 5 bits the fifth bits; and 16 bytes of the lower 4 bits of codes.
template <int CODE_BITS, bool MINIMUM>
struct Nibbles {
    static constexpr int BITS = CODE_BITS, LENGTH = GROUP, LOW = (MINIMUM ? 4 : 2) + (BITS == 5 ? 4 : 0);
    static constexpr int BYTES = LOW + GROUP / 2;

    INLINE static void unpack(const Four<BITS>& to) {
        to.share(to.scales, 0);
        if (MINIMUM) to.share(to.zeros, 2);
        to.codes_of(0, 0, [](const byte* block) { return load<quad>(block + LOW); });
        if constexpr (BITS == 5) {
            quad bits;
            for (int lane = 0; lane < 4; lane++) bits[lane] = load<std::uint32_t>(to.block[lane] + LOW - 4);
            quad fifth = {};
            for (int b = 0; b < 4; b++) {  // bit 4 * i + b goes to bit i of byte b
                quad fourth = bits >> b & 0x11111111u;
                fourth = (fourth | fourth >> 3) & 0x03030303u;
                fourth = (fourth | fourth >> 6) & 0x000f000fu;
                fifth |= ((fourth | fourth >> 12) & 0xffu) << 8 * b;
            }
            store(to.codes + 4 * PANEL * 4, fifth);
        }
    }
};

// A float16 scale, and codes of 8 bits with a sign.
struct Q8_0 {
    static constexpr int BITS = 8, LENGTH = GROUP, BYTES = 2 + GROUP;

    INLINE static void unpack(const Four<BITS>& to) {
        to.share(to.scales, 0);
        for (int h = 0; h < 2; h++)
            to.codes_of(0, 4 * h, [h](const byte* block) { return load<quad>(block + 2 + HALF * h) ^ 0x80808080u; });
    }
};

// The lower 4 bits of a group's codes, in 32 bytes from `at` on, shifted by `up` bits.
INLINE quad halves_at(const byte* at, int up) {
    return (load<quad>(at) >> up & 0x0f0f0f0fu) | (load<quad>(at + HALF) >> up & 0x0f0f0f0fu) << 4;
}

// Two float16; eight scales and zeros of 6 bits; with 5 bits a byte of fifth bits for each place in a span; for every
// two spans 32 bytes: the lower 4 bits of the first span's codes below those of the second.
template <int CODE_BITS>
struct Nested {
    static constexpr int BITS = CODE_BITS, LENGTH = UNIT, LOW = BITS == 5 ? 48 : 16, BYTES = LOW + UNIT / 2;

    INLINE static void unpack(const Four<BITS>& to) {
        for (int lane = 0; lane < 4; lane++) {
            const byte *block = to.block[lane], *six = block + 4;
            to.scale_units[lane] = load<half>(block), to.zero_units[lane] = load<half>(block + 2);
            to.zero_units[lane].bits ^= 0x8000;  // the file's zeros are subtracted
            for (int i = 0; i < 4; i++) {
                char *scale = to.scales + i * PANEL + lane, *zero = to.zeros + i * PANEL + lane;
                scale[0] = six[i] & 63, scale[4 * PANEL] = (six[8 + i] & 15) | six[i] >> 6 << 4;
                zero[0] = six[4 + i] & 63, zero[4 * PANEL] = six[8 + i] >> 4 | six[4 + i] >> 6 << 4;
            }
        }
        for (int s = 0; s < 8; s++) {
            to.codes_of(s, 0, [s](const byte* block) { return halves_at(block + LOW + s / 2 * GROUP, s % 2 * 4); });
            if (BITS == 5)
                to.code_of(s, 4, [s](const byte* block) {
                    const quad first = load<quad>(block + 16) >> s & 0x01010101u;
                    const quad second = load<quad>(block + 32) >> s & 0x01010101u;
                    return first << quad{0, 1, 2, 3} | second << quad{4, 5, 6, 7};
                });
        }
    }
};

// 128 bytes of lower 4 bits, 64 of upper 2 bits, 16 scales and a float16.
struct Q6_K {
    static constexpr int BITS = 6, LENGTH = UNIT, BYTES = 210;

    INLINE static void unpack(const Four<BITS>& to) {
        for (int lane = 0; lane < 4; lane++) {
            to.scale_units[lane] = load<half>(to.block[lane] + 208);
            for (int s = 0; s < 16; s++) to.scales[s * PANEL + lane] = to.block[lane][192 + s];
        }
        for (int g = 0; g < 8; g++) {
            const int part = g / 4, quarter = g % 4;
            to.codes_of(g, 0, [=](const byte* block) {
                return halves_at(block + part * 64 + quarter % 2 * GROUP, quarter / 2 * 4);
            });
            for (int h = 0; h < 2; h++)
                to.code_of(g, 4 + h, [=](const byte* block) {
                    const quad left = load<quad>(block + 128 + part * GROUP + h * HALF) >> 2 * quarter & 0x03030303u;
                    return left << quad{0, 2, 4, 6};
                });
        }
    }
};

// Call act with the type of a file's blocks as a compile-time constant.
template <class Act>
void with_block(Int number, Act act) {
    switch (number) {
        case 2: return act(Nibbles<4, false>());
        case 3: return act(Nibbles<4, true>());
        case 6: return act(Nibbles<5, false>());
        case 7: return act(Nibbles<5, true>());
        case 8: return act(Q8_0());
        case 12: return act(Nested<4>());
        case 13: return act(Nested<5>());
        default: return act(Q6_K());
    }
}

// At least the bytes of so many panels in any format.
constexpr Int room_of(Int panels, Int length) { return panels * PANEL * length * 3 / 2 + 5 * 64; }

// Return `panels` panels of a mapped matrix, from column `first` on, as a matrix in `room`. With `end`, it has the numbers
// `begin` to `end` of each column, whole super-blocks.
inline Matrix unpacked(const Matrix& matrix, Int first, Int panels, char* room, Int begin = 0, Int end = 0) {
    Matrix to = matrix;
    to.columns = matrix.columns - first, to.block = 0, to.length = (end ? end : matrix.length) - begin;
    auto take = [&](Int bytes) {
        char* taken = room;
        room += (bytes + 63) / 64 * 64;
        return taken;
    };
    with_block(matrix.block, [&](auto kind) {
        using Kind = decltype(kind);
        constexpr int BITS = Kind::BITS, SPAN = BITS == 6 ? HALF : GROUP, SHARE = Kind::LENGTH == UNIT ? 1 : 2;
        const Int length = to.length, blocks = length / Kind::LENGTH;
        const Int column_bytes = matrix.length / Kind::LENGTH * Kind::BYTES;
        const Int groups = length / GROUP, spans = length / SPAN, units = length / UNIT;
        byte* codes = (byte*)take(panels * groups * BITS * PANEL * 4);
        char *scales = take(panels * spans * PANEL * SHARE), *zeros = take(panels * spans * PANEL * SHARE);
        half *scale_units = (half*)take(panels * units * PANEL * 2);
        half *zero_units = (half*)take(panels * units * PANEL * 2);
        for (Int lane = 0; lane < panels * PANEL; lane += 4) {
            const Int p = lane / PANEL, place = lane % PANEL;
            Four<BITS> four;
            for (int i = 0; i < 4; i++) {
                const Int column = std::min(first + lane + i, matrix.columns - 1);  // the last column pads its panel
                four.block[i] = (const byte*)matrix.weight + column * column_bytes + begin / Kind::LENGTH * Kind::BYTES;
            }
            for (Int b = 0; b < blocks; b++) {
                four.codes = codes + ((p * blocks + b) * (Kind::LENGTH / GROUP) * BITS * PANEL + place) * 4;
                const Int share = ((p * blocks + b) * (Kind::LENGTH / SPAN) * PANEL + place) * SHARE;
                four.scales = scales + share, four.zeros = zeros + share;
                const Int unit = (p * units + b) * PANEL + place;
                four.scale_units = scale_units + unit, four.zero_units = zero_units + unit;
                for (int i = 0; i < 4; i++) __builtin_prefetch(four.block[i] + 4 * column_bytes);
                Kind::unpack(four);
                for (int i = 0; i < 4; i++) four.block[i] += Kind::BYTES;
            }
        }
        to.weight = codes, to.scales = scales;
        to.zeros = matrix.offset ? nullptr : zeros;
        if (SHARE == 1) to.scale_units = scale_units;
        if (SHARE == 1 && !matrix.offset) to.zero_units = zero_units;
    });
    return to;
}

}  // namespace
