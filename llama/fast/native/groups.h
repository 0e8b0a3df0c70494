// Groups of positions in 8 or 4 bits, as kv_cache/quantized.py defines them: read into floats, and made of full ones.
//
// A group of one KV head is GROUP tokens x head_dim codes. Keys share a scale and a zero among the tokens of a channel,
// values among PART numbers of a token. A number is code * scale + zero, each step rounded by itself.

#pragma once

#include "vectors.h"

namespace {

constexpr int TOKENS = 32;  // of a group
constexpr int PART = 32;    // numbers of a token's values that share a scale and a zero

// One side of a layer's cache, keys or values: (rows, groups, kv_heads, ...).
struct Quantized {
    std::uint8_t* codes;  // (TOKENS, head_dim * bits / 8), low bits first
    half *scale, *zero;   // (head_dim,) of keys, (TOKENS, head_dim / PART) of values

    // The group at this place, of rows x groups x kv heads; `shared` scales stand for a group.
    Quantized at(Int place, Int bytes, Int shared) const {
        return {codes + place * bytes, scale + place * shared, zero + place * shared};
    }
};

template <int BITS>
INLINE floats code_numbers(const std::uint8_t* codes) {
    if constexpr (BITS == 8) return widen(codes);
    else return widen_halves(codes);
}

// ---- reading ---------------------------------------------------------------------------------------------------------

// Numbers rounded to the cache's kind, and turned: cos and sin as rope.py has them, both of the same pair side by side.
template <class T>
INLINE floats turned(floats x, const float* cos, const float* sin) {
    T rounded[LANES];
    narrow(x, rounded);
    x = widen(rounded);
    return x * widen(cos) + neighbours(x) * widen(sin);
}

// The group's keys, (TOKENS, d), to `to`. Those of 4 bits are turned by cos and sin, (TOKENS, d); others need neither.
template <int BITS, class T>
void read_keys(const Quantized& group, Int d, const float* cos, const float* sin, T* to) {
    for (Int c = 0; c < d; c += LANES) {
        const floats scale = widen(group.scale + c), zero = widen(group.zero + c);
        for (Int i = c; i < TOKENS * d; i += d) {
            const floats numbers = code_numbers<BITS>(group.codes + i * BITS / 8) * scale + zero;
            if constexpr (BITS == 4)
                narrow(turned<T>(numbers, cos + i, sin + i), to + i);
            else
                narrow(numbers, to + i);
        }
    }
}

// The group's values, (TOKENS, d), to `to`.
template <int BITS, class T>
void read_values(const Quantized& group, Int d, T* to) {
    float scales[LANES], zeros[LANES];
    for (Int i = 0; i < TOKENS * d / PART; i += LANES) {
        store(scales, widen(group.scale + i)), store(zeros, widen(group.zero + i));
        for (int part = 0; part < LANES; part++)
            for (Int c = (i + part) * PART; c < (i + part + 1) * PART; c += LANES)
                narrow(code_numbers<BITS>(group.codes + c * BITS / 8) * scales[part] + zeros[part], to + c);
    }
}

// ---- making ----------------------------------------------------------------------------------------------------------

// The lowest and highest of numbers; both are no numbers where one is none.
struct Range {
    floats low, high;

    void add(floats x) {
        low = x < low ? x : low, high = x > high ? x : high;
        low = x == x ? low : x, high = x == x ? high : x;
    }

    Range of_all() const {
        Range all{floats{} + low[0], floats{} + high[0]};
        for (int lane = 1; lane < LANES; lane++) all.add(floats{} + low[lane]), all.add(floats{} + high[lane]);
        return all;
    }
};

// The scale and zero of a range, rounded to float16, and as they are divided by.
struct Steps {
    half scales[LANES], zeros[LANES];
    floats divisor, zero;

    template <int BITS>
    static Steps of(const Range& range) {
        Steps it;
        narrow((range.high - range.low) / float((1 << BITS) - 1), it.scales);
        narrow(range.low, it.zeros);
        const floats scale = widen(it.scales);
        it.divisor = scale < 0x1p-14f ? floats{} + 0x1p-14f : scale, it.zero = widen(it.zeros);
        return it;
    }

    template <int BITS>
    void code(floats x, std::uint8_t* to) const {
        const floats steps = (x - zero) / divisor, most = floats{} + float((1 << BITS) - 1);
        floats code = steps > 0.0f ? steps : floats{};
        code = code < most ? code : most;
        const ints whole = (ints)(code + ROUND) - 0x4b400000;  // to nearest, ties to even
        for (int lane = 0; lane < LANES; lane += 8 / BITS)
            *to++ = std::uint8_t(BITS == 8 ? whole[lane] : whole[lane] | whole[(lane + 1) % LANES] << 4);
    }
};

// A full group of keys, (TOKENS, d) with `stride` from token to token.
template <int BITS, class T>
void make_keys(const T* from, Int stride, Int d, const Quantized& to) {
    for (Int c = 0; c < d; c += LANES) {
        Range range{widen(from + c), widen(from + c)};
        for (int token = 1; token < TOKENS; token++) range.add(widen(from + token * stride + c));
        const Steps steps = Steps::of<BITS>(range);
        std::memcpy(to.scale + c, steps.scales, sizeof steps.scales);
        std::memcpy(to.zero + c, steps.zeros, sizeof steps.zeros);
        for (int token = 0; token < TOKENS; token++)
            steps.code<BITS>(widen(from + token * stride + c), to.codes + (token * d + c) * BITS / 8);
    }
}

// The same of values.
template <int BITS, class T>
void make_values(const T* from, Int stride, Int d, const Quantized& to) {
    const Int parts = d / PART;
    for (Int i = 0; i < TOKENS * parts; i++) {
        const T* part = from + i / parts * stride + i % parts * PART;
        Range range{widen(part), widen(part)};
        for (Int c = LANES; c < PART; c += LANES) range.add(widen(part + c));
        const Steps steps = Steps::of<BITS>(range.of_all());
        to.scale[i] = steps.scales[0], to.zero[i] = steps.zeros[0];
        for (Int c = 0; c < PART; c += LANES) steps.code<BITS>(widen(part + c), to.codes + (i * PART + c) * BITS / 8);
    }
}

}  // namespace
