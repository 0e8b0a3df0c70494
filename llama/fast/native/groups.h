// Groups of positions in 2 to 8 bits, as kv_cache/quantized.py defines them: attention to them, and quantisation.
//
// A group of one KV head is head_dim x tokens codes of keys, each channel with a scale and a zero, and tokens x head_dim
// codes of values, every part of a token with a scale and a zero. A number is (code + zero) * scale.

#pragma once

#include "vectors.h"

namespace {

constexpr int MOST_TOKENS = 64;       // of a group
constexpr int AT_ONCE = 32;           // tokens whose keys are read at a time
// The vectors of sums of ROWS queries that fit into registers.
template <int ROWS>
constexpr int VECTORS = LANES == 16 ? 2 : ROWS > 3 ? 2 : 4;

constexpr float CLIPPED = 0.75f;      // as in quantized.py

// How a quantised cache stores positions.
struct Groups {
    Int key_bits, value_bits;
    Int tokens;          // of a group: 32 or 64
    Int window, sinks;   // positions that stay in full precision: the newest, and the first
    Int parts;           // of a token's values, each with a scale and a zero
    Int before_rope;     // 1: keys are stored before RoPE
    Int rotates_values;  // 1: values are quantised after `hadamard`

    // The share of the range of a token's values that their codes cover.
    float value_share() const { return rotates_values && value_bits == 2 ? CLIPPED : 1; }

    // The positions that a call at the position `end` reads quantised.
    Int quantized(Int end) const { return std::max<Int>(end - window, 0) / tokens * tokens; }

    // The codes that are packed together, of `length` codes.
    Int run(Int length) const { return length % tokens ? 32 : tokens; }
};

// One side of a layer's cache, keys or values: (rows, groups, kv_heads, ...).
struct Quantized {
    std::uint8_t* codes;  // (head_dim, tokens * bits / 8) of keys, (tokens, head_dim * bits / 8) of values
    short_scale* scale;   // (head_dim,) of keys, (parts, tokens) of values
    half* zero;           // as many

    // The group at this place, of rows x groups x kv heads; a group has `shared` scales.
    Quantized at(Int place, Int bytes, Int shared) const {
        return {codes + place * bytes, scale + place * shared, zero + place * shared};
    }
};

// x times the orthonormal Hadamard matrix, block by block; the sums have the order of `hadamard` in quantized.py.
inline void hadamard(float* x, Int length) {
    const Int size = length & -length;
    const float factor = float(1 / std::sqrt(double(size)));
    for (Int i = 0; i < length; i++) x[i] *= factor;
    for (Int step = 1; step < size; step *= 2)
        for (Int i = 0; i < length; i += 2 * step)
            for (Int j = i; j < i + step; j++) {
                const float first = x[j], second = x[j + step];
                x[j] = first + second, x[j + step] = first - second;
            }
}

// ---- reading ---------------------------------------------------------------------------------------------------------

// The bits from `LOW` on of 8 x lanes codes of a run, which begin at code 8 x `first`: those of a plane of WIDTH bits.
template <int WIDTH, int LOW, int RUN>
INLINE longs plane_bits(const std::uint8_t* plane, int first) {
    constexpr int WORDS = RUN * WIDTH / 64;  // of 8 bytes
    constexpr std::uint64_t MASK = 0x0101010101010101u * ((1 << WIDTH) - 1);
    longs words, places;
    UNROLL for (int lane = 0; lane < LANES / 2; lane++) {
        const int at = first + lane;
        if constexpr (WORDS) {
            words[lane] = load<std::uint64_t>(plane + at % WORDS * 8), places[lane] = at / WORDS * WIDTH;
        } else {  // 4 bytes, whose next bits are those of the next 4 codes
            const std::uint64_t bits = load<std::uint32_t>(plane);
            words[lane] = bits | bits >> 1 << 32, places[lane] = 2 * at;
        }
    }
    return (words >> places & MASK) << LOW;
}

// Write the codes of runs, a byte each.
template <int BITS, int RUN>
void unpack(const std::uint8_t* from, Int runs, std::uint8_t* to) {
    constexpr int FOUR = BITS & 4 ? RUN / 2 : 0, TWO = BITS & 2 ? RUN / 4 : 0;  // bytes of a plane
    for (Int run = 0; run < runs; run++, from += RUN * BITS / 8, to += RUN)
        UNROLL for (int i = 0; i < RUN / 8; i += LANES / 2) {
            longs codes = {};
            if constexpr (BITS & 4) codes |= plane_bits<4, 0, RUN>(from, i);
            if constexpr (BITS & 2) codes |= plane_bits<2, BITS & 4, RUN>(from + FOUR, i);
            if constexpr (BITS & 1) codes |= plane_bits<1, BITS & 6, RUN>(from + FOUR + TWO, i);
            std::memcpy(to + 8 * i, &codes, std::min(RUN - 8 * i, VECTOR));
        }
}

// The codes of a group, a byte each: in `scratch`, or where they are if they have 8 bits.
inline const std::uint8_t* codes_of(const std::uint8_t* from, Int bits, Int run, Int count, std::uint8_t* scratch) {
    if (bits == 8) return from;
    const Int runs = count / run;
    auto with_run = [&](auto width) {
        constexpr int BITS = decltype(width)::value;
        run == 64 ? unpack<BITS, 64>(from, runs, scratch) : unpack<BITS, 32>(from, runs, scratch);
    };
    if (bits == 2) with_run(std::integral_constant<int, 2>());
    if (bits == 3) with_run(std::integral_constant<int, 3>());
    if (bits == 4) with_run(std::integral_constant<int, 4>());
    if (bits == 5) with_run(std::integral_constant<int, 5>());
    if (bits == 6) with_run(std::integral_constant<int, 6>());
    if (bits == 7) with_run(std::integral_constant<int, 7>());
    return scratch;
}

// to[row][token] = query . key, for ROWS queries, (ROWS, d), and a group's keys, whose codes are (d, tokens) bytes. `own`
// has ROWS x d numbers.
template <int ROWS>
void score_group(const Quantized& group, const std::uint8_t* codes, Int tokens, Int d, const float* queries, float* own,
                 float* to, Int stride) {
    float shifts[ROWS];
    for (int r = 0; r < ROWS; r++) {  // query . ((code + zero) * scale) = (query * scale) . code + (query * scale) . zero
        floats shift = {};
        for (Int c = 0; c < d; c += LANES) {
            const floats scaled = widen(queries + r * d + c) * widen(group.scale + c);
            store(own + r * d + c, scaled);
            shift = multiply_add(shift, scaled, widen(group.zero + c));
        }
        shifts[r] = sum_of(shift);
    }
    for (Int i = 0; i < tokens; i += VECTORS<ROWS> * LANES) {
        floats sums[ROWS][VECTORS<ROWS>];
        for (int r = 0; r < ROWS; r++)
            for (floats& sum : sums[r]) sum = every(shifts[r]);
        for (Int c = 0; c < d; c++)
            UNROLL for (int v = 0; v < VECTORS<ROWS>; v++) {
                const floats x = widen(codes + c * tokens + i + v * LANES);
                UNROLL for (int r = 0; r < ROWS; r++) sums[r][v] = multiply_add(sums[r][v], x, own[r * d + c]);
            }
        for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS<ROWS>; v++) store(to + r * stride + i + v * LANES, sums[r][v]);
    }
}

// The keys of AT_ONCE tokens of a group, (d, AT_ONCE), from codes before RoPE, (d, tokens), rotated by cos and sin of
// their positions: `turns`, (d / 2, 2, tokens).
inline void rotated_keys(const Quantized& group, const std::uint8_t* codes, Int tokens, Int d, const float* turns,
                         float* to) {
    for (Int c = 0; c < d; c += LANES) {
        float scales[LANES], zeros[LANES];
        store(scales, widen(group.scale + c)), store(zeros, widen(group.zero + c) * widen(group.scale + c));
        for (int i = 0; i < LANES; i += 2, codes += 2 * tokens, turns += 2 * tokens, to += 2 * AT_ONCE)
            UNROLL for (int h = 0; h < AT_ONCE; h += LANES) {
                const floats cos = widen(turns + h), sin = widen(turns + tokens + h);
                const floats a = multiply_add(every(zeros[i]), widen(codes + h), scales[i]);
                const floats b = multiply_add(every(zeros[i + 1]), widen(codes + tokens + h), scales[i + 1]);
                store(to + h, multiply_add(a * cos, -b, sin)), store(to + AT_ONCE + h, multiply_add(b * cos, a, sin));
            }
    }
}

// to[row][token] = query . key, for ROWS queries, (ROWS, d), and the keys of AT_ONCE tokens, (d, AT_ONCE).
template <int ROWS>
void score_keys(const float* keys, Int d, const float* queries, float* to, Int stride) {
    for (Int i = 0; i < AT_ONCE; i += VECTORS<ROWS> * LANES) {
        floats sums[ROWS][VECTORS<ROWS>] = {};
        for (Int c = 0; c < d; c++)
            UNROLL for (int v = 0; v < VECTORS<ROWS>; v++) {
                const floats key = widen(keys + c * AT_ONCE + i + v * LANES);
                UNROLL for (int r = 0; r < ROWS; r++) sums[r][v] = multiply_add(sums[r][v], key, queries[r * d + c]);
            }
        for (int r = 0; r < ROWS; r++)
            UNROLL for (int v = 0; v < VECTORS<ROWS>; v++) store(to + r * stride + i + v * LANES, sums[r][v]);
    }
}

// to[row] += the sum of weights[row][token] * value, for ROWS rows and a group's values, whose codes are (tokens, d)
// bytes: the scale and the zero are multiplied with the weight. `own` has ROWS x tokens numbers.
template <int ROWS>
void add_group(const Quantized& group, const std::uint8_t* codes, Int tokens, Int d, Int parts, const float* weights,
               Int weights_stride, float* own, float* to, Int stride) {
    for (Int part = 0; part < parts; part++) {
        const short_scale* scale = group.scale + part * tokens;
        const half* zero = group.zero + part * tokens;
        float shifts[ROWS];
        for (int r = 0; r < ROWS; r++) {
            floats shift = {};
            for (Int token = 0; token < tokens; token += LANES) {
                const floats scaled = widen(weights + r * weights_stride + token) * widen(scale + token);
                store(own + r * tokens + token, scaled);
                shift = multiply_add(shift, scaled, widen(zero + token));
            }
            shifts[r] = sum_of(shift);
        }
        for (Int i = d / parts * part; i < d / parts * (part + 1); i += 2 * LANES) {
            floats sums[ROWS][2];
            for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = every(shifts[r]);
            for (Int token = 0; token < tokens; token++)
                UNROLL for (int h = 0; h < 2; h++) {
                    const floats x = widen(codes + token * d + i + h * LANES);
                    UNROLL for (int r = 0; r < ROWS; r++)
                        sums[r][h] = multiply_add(sums[r][h], x, own[r * tokens + token]);
                }
            UNROLL for (int r = 0; r < ROWS; r++)
                UNROLL for (int h = 0; h < 2; h++) {
                    float* sum = to + r * stride + i + h * LANES;
                    store(sum, widen(sum) + sums[r][h]);
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

// The scale and zero of codes from 0 to `most`, as they are stored and as numbers; see `quantize` in quantized.py.
struct Steps {
    short_scale scales[LANES];
    half zeros[LANES];
    floats middle, divisor, zero;
    float most;

    Steps(const Range& range, Int bits, float share) : most(float((1 << bits) - 1)) {
        middle = range.high / 2.0f + range.low / 2.0f;
        const floats half = (range.high / 2.0f - range.low / 2.0f) * share;
        const floats size = larger(range.high, -range.low);
        const float wide = most / 2 + 0.25f;
        set(larger(larger(half / (most / 2), half / wide + size / wide * 0x1p-11f), size * 0x1p-15f));
    }

    void set(floats scale) {
        narrow(scale, scales);
        const floats stored = widen(scales);
        divisor = stored == 0.0f ? every(1) : stored;
        narrow(middle / divisor - most / 2, zeros);
        zero = widen(zeros);
    }

    ints codes(floats x) const {
        const floats steps = x / divisor - zero, last = every(most);
        floats code = steps > 0.0f ? steps : floats{};
        code = code < last ? code : last;
        return (ints)(code + ROUND) - 0x4b400000;  // to nearest, ties to even
    }

    // Correct the scale and the zero, which all lanes share; see `_unbiased` in quantized.py.
    void unbias(const float* numbers, const std::int32_t* codes, Int count) {
        double squares = 0, products = 0;
        for (Int i = 0; i < count; i++) {
            const double x = numbers[i] - middle[0];
            squares += x * x, products += x * (float(codes[i]) - most / 2);
        }
        if (products > 0) set(every(float(squares / products)));
    }
};

// Pack codes, in runs, as `packed` in quantized.py does.
inline void pack(const std::int32_t* codes, Int bits, Int run, Int length, std::uint8_t* to) {
    for (Int first = 0; first < length; first += run) {
        int low = 0;
        for (const int width : {8, 4, 2, 1}) {
            if (!(bits & width)) continue;
            const Int count = run * width / 8;
            for (Int i = 0; i < count; i++) {
                int byte = 0;
                for (int place = 0; place < 8 / width; place++)
                    byte |= (codes[first + i + place * count] >> low & ((1 << width) - 1)) << place * width;
                *to++ = std::uint8_t(byte);
            }
            low += width;
        }
    }
}

// A group of keys, (tokens, d) with `stride` from token to token. The first `sinks` have the codes of the next token:
// they are stored elsewhere.
template <class T>
void make_keys(const T* from, Int stride, Int d, const Groups& groups, Int sinks, const Quantized& to) {
    const Int tokens = groups.tokens;
    for (Int c = 0; c < d; c += LANES) {
        Range range{widen(from + sinks * stride + c), widen(from + sinks * stride + c)};
        for (Int token = sinks + 1; token < tokens; token++) range.add(widen(from + token * stride + c));
        const Steps steps(range, groups.key_bits, 1);
        std::memcpy(to.scale + c, steps.scales, sizeof steps.scales);
        std::memcpy(to.zero + c, steps.zeros, sizeof steps.zeros);
        std::int32_t codes[LANES][MOST_TOKENS];
        for (Int token = 0; token < tokens; token++) {
            const ints some = steps.codes(widen(from + std::max(token, sinks) * stride + c));
            for (int lane = 0; lane < LANES; lane++) codes[lane][token] = some[lane];
        }
        const Int bytes = tokens * groups.key_bits / 8;
        for (int lane = 0; lane < LANES; lane++)
            pack(codes[lane], groups.key_bits, tokens, tokens, to.codes + (c + lane) * bytes);
    }
}

// The same for values. `own` has d numbers and d codes.
template <class T>
void make_values(const T* from, Int stride, Int d, const Groups& groups, Int sinks, float* own, const Quantized& to) {
    const Int tokens = groups.tokens, size = d / groups.parts;
    std::int32_t* codes = (std::int32_t*)(own + d);
    for (Int token = 0; token < tokens; token++) {
        for (Int c = 0; c < d; c += LANES) store(own + c, widen(from + std::max(token, sinks) * stride + c));
        if (groups.rotates_values) hadamard(own, d);
        for (Int part = 0; part < groups.parts; part++) {
            const float* numbers = own + part * size;
            Range range{widen(numbers), widen(numbers)};
            for (Int c = LANES; c < size; c += LANES) range.add(widen(numbers + c));
            Steps steps(range.of_all(), groups.value_bits, groups.value_share());
            for (Int c = 0; c < size; c += LANES) store(codes + part * size + c, steps.codes(widen(numbers + c)));
            if (groups.value_share() < 1) steps.unbias(numbers, codes + part * size, size);
            to.scale[part * tokens + token] = steps.scales[0], to.zero[part * tokens + token] = steps.zeros[0];
        }
        pack(codes, groups.value_bits, groups.run(d), d, to.codes + token * d * groups.value_bits / 8);
    }
}

}  // namespace
