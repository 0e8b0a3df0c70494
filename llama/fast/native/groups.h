// Groups of positions in 8 or 4 bits, as kv_cache/quantized.py defines them: attention to them, and quantisation.
//
// A group of one KV head is head_dim x TOKENS codes of keys, each channel with a scale and a zero, and TOKENS x head_dim
// codes of values, every PART of a token with a scale and a zero. A number is code * scale + zero.

#pragma once

#include "vectors.h"

namespace {

constexpr int TOKENS = 32;  // of a group
constexpr int PART = 32;    // of a token's values, which share a scale and a zero
constexpr int RUN = 32;     // codes that are packed together; with 4 bits a byte has one of each half

// One side of a layer's cache, keys or values: (rows, groups, kv_heads, ...).
struct Quantized {
    std::uint8_t* codes;  // (head_dim, TOKENS * bits / 8) of keys, (TOKENS, head_dim * bits / 8) of values
    half *scale, *zero;   // (head_dim,) of keys, (head_dim / PART, TOKENS) of values

    // The group at this place, of rows x groups x kv heads; a group has `shared` scales.
    Quantized at(Int place, Int bytes, Int shared) const {
        return {codes + place * bytes, scale + place * shared, zero + place * shared};
    }
};

// ---- reading ---------------------------------------------------------------------------------------------------------

// LANES numbers from place i on of a run's first half, and as many of its second half.
struct Halves {
    floats of[2];
};

template <int BITS>
INLINE Halves halves(const std::uint8_t* run, Int i) {
    if constexpr (BITS == 8) return {widen(run + i), widen(run + RUN / 2 + i)};
    const ints both = whole(run + i);
    return {__builtin_convertvector(both & 15, floats), __builtin_convertvector(both >> 4, floats)};
}

// to[row][token] = query . key, for ROWS queries, (ROWS, d), and a group's keys. Keys of 4 bits are rotated by cos and
// sin of their positions: `turns`, (d / 2, 2, TOKENS). `own` has 2 x d and ROWS x d numbers.
template <int BITS, int ROWS>
void score_group(const Quantized& group, Int d, const float* queries, const float* turns, float* own, float* to,
                 Int stride) {
    const float *scales = own, *zeros = own + d, *factors = queries;
    float shifts[ROWS] = {};
    if constexpr (BITS == 4) {
        for (Int c = 0; c < d; c += LANES)
            store(own + c, widen(group.scale + c)), store(own + d + c, widen(group.zero + c));
    } else {  // query . (code * scale + zero) = (query * scale) . code + query . zero
        for (int r = 0; r < ROWS; r++) {
            floats shift = {};
            for (Int c = 0; c < d; c += LANES) {
                const floats query = widen(queries + r * d + c);
                store(own + r * d + c, query * widen(group.scale + c));
                shift = multiply_add(shift, query, widen(group.zero + c));
            }
            shifts[r] = sum_of(shift);
        }
        factors = own;
    }
    for (Int i = 0; i < RUN / 2; i += LANES) {
        Halves sums[ROWS];
        for (int r = 0; r < ROWS; r++) sums[r] = {every(shifts[r]), every(shifts[r])};
        for (Int c = 0; c < d; c += 2) {
            Halves x = halves<BITS>(group.codes + c * RUN * BITS / 8, i);
            Halves y = halves<BITS>(group.codes + (c + 1) * RUN * BITS / 8, i);
            for (int h = 0; BITS == 4 && h < 2; h++) {
                const float* turn = turns + c * TOKENS + h * RUN / 2 + i;
                const floats cos = widen(turn), sin = widen(turn + TOKENS);
                const floats a = multiply_add(every(zeros[c]), x.of[h], scales[c]);
                const floats b = multiply_add(every(zeros[c + 1]), y.of[h], scales[c + 1]);
                x.of[h] = multiply_add(a * cos, -b, sin), y.of[h] = multiply_add(b * cos, a, sin);
            }
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < 2; h++) {
                    const float* factor = factors + r * d + c;
                    sums[r].of[h] = multiply_add(multiply_add(sums[r].of[h], x.of[h], factor[0]), y.of[h], factor[1]);
                }
        }
        for (int r = 0; r < ROWS; r++)
            store(to + r * stride + i, sums[r].of[0]), store(to + r * stride + RUN / 2 + i, sums[r].of[1]);
    }
}

// to[row] += the sum of weights[row][token] * value, for ROWS rows and a group's values: the scale and the zero are
// multiplied with the weight. `own` has ROWS x TOKENS numbers.
template <int BITS, int ROWS>
void add_group(const Quantized& group, Int d, const float* weights, Int weights_stride, float* own, float* to,
               Int stride) {
    for (Int part = 0; part < d / PART; part++) {
        const half *scale = group.scale + part * TOKENS, *zero = group.zero + part * TOKENS;
        float shifts[ROWS];
        for (int r = 0; r < ROWS; r++) {
            floats shift = {};
            for (int token = 0; token < TOKENS; token += LANES) {
                const floats weight = widen(weights + r * weights_stride + token);
                store(own + r * TOKENS + token, weight * widen(scale + token));
                shift = multiply_add(shift, weight, widen(zero + token));
            }
            shifts[r] = sum_of(shift);
        }
        for (Int i = 0; i < RUN / 2; i += LANES) {
            Halves sums[ROWS];
            for (int r = 0; r < ROWS; r++) sums[r] = {every(shifts[r]), every(shifts[r])};
            for (int token = 0; token < TOKENS; token++) {
                const Halves x = halves<BITS>(group.codes + (token * d + part * PART) * BITS / 8, i);
                for (int r = 0; r < ROWS; r++)
                    for (int h = 0; h < 2; h++)
                        sums[r].of[h] = multiply_add(sums[r].of[h], x.of[h], own[r * TOKENS + token]);
            }
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < 2; h++) {
                    float* sum = to + r * stride + part * PART + h * RUN / 2 + i;
                    store(sum, widen(sum) + sums[r].of[h]);
                }
        }
    }
}

// ---- making ----------------------------------------------------------------------------------------------------------

// The lowest and highest of numbers; both are nan if one is.
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

// The scale and zero of a range, rounded to float16, and the divisor.
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
    ints codes(floats x) const {
        const floats steps = (x - zero) / divisor, most = every((1 << BITS) - 1);
        floats code = steps > 0.0f ? steps : floats{};
        code = code < most ? code : most;
        return (ints)(code + ROUND) - 0x4b400000;  // to nearest, ties to even
    }
};

// Pack a run of codes.
template <int BITS>
void pack(const std::int32_t* codes, std::uint8_t* to) {
    for (int i = 0; i < RUN * BITS / 8; i++) to[i] = BITS == 8 ? codes[i] : codes[i] | codes[RUN / 2 + i] << 4;
}

// A full group of keys, (TOKENS, d) with `stride` from token to token.
template <int BITS, class T>
void make_keys(const T* from, Int stride, Int d, const Quantized& to) {
    for (Int c = 0; c < d; c += LANES) {
        Range range{widen(from + c), widen(from + c)};
        for (int token = 1; token < TOKENS; token++) range.add(widen(from + token * stride + c));
        const Steps steps = Steps::of<BITS>(range);
        std::memcpy(to.scale + c, steps.scales, sizeof steps.scales);
        std::memcpy(to.zero + c, steps.zeros, sizeof steps.zeros);
        std::int32_t codes[LANES][TOKENS];
        for (int token = 0; token < TOKENS; token++) {
            const ints some = steps.codes<BITS>(widen(from + token * stride + c));
            for (int lane = 0; lane < LANES; lane++) codes[lane][token] = some[lane];
        }
        for (int lane = 0; lane < LANES; lane++) pack<BITS>(codes[lane], to.codes + (c + lane) * TOKENS * BITS / 8);
    }
}

// The same for values.
template <int BITS, class T>
void make_values(const T* from, Int stride, Int d, const Quantized& to) {
    const Int parts = d / PART;
    for (Int i = 0; i < TOKENS * parts; i++) {
        const Int token = i / parts, part = i % parts;
        const T* numbers = from + token * stride + part * PART;
        Range range{widen(numbers), widen(numbers)};
        for (Int c = LANES; c < PART; c += LANES) range.add(widen(numbers + c));
        const Steps steps = Steps::of<BITS>(range.of_all());
        to.scale[part * TOKENS + token] = steps.scales[0], to.zero[part * TOKENS + token] = steps.zeros[0];
        std::int32_t codes[PART];
        for (Int c = 0; c < PART; c += LANES) store(codes + c, steps.codes<BITS>(widen(numbers + c)));
        pack<BITS>(codes, to.codes + (token * d + part * PART) * BITS / 8);
    }
}

}  // namespace
