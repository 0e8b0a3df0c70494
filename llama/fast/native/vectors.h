// Vectors of numbers: loading, conversion, rounding, and sums of products.
//
// A vector is 64 bytes with AVX-512, 16 on ARM (NEON) and 32 elsewhere, a vector type of the compiler. GCC would keep
// vectors in memory that are larger than the registers.
// Instructions that the compiler does not find by itself are called by name if the machine has them.
// Every fused multiply-add is explicit, and the compiler may fuse no others (-ffp-contract=off): on some CPUs it
// would fuse one loop and not its twin, and the two would round differently.
// All code is in unnamed namespaces: the library exports only its functions.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#if !defined(__FMA__)
#error "this CPU has no fused multiply-add (FMA)"
#endif
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// GCC would call functions that are used more than once, and keep their vectors in memory.
#define INLINE inline __attribute__((always_inline))
// GCC would keep an array of vectors in memory if a loop over it is not unrolled.
#define UNROLL _Pragma("GCC unroll 16")

namespace {

using Int = std::int64_t;
#if defined(__AVX512F__)
#define VECTOR 64
#elif defined(__aarch64__)
#define VECTOR 16
#else
#define VECTOR 32
#endif
typedef float floats __attribute__((vector_size(VECTOR)));
typedef std::int32_t ints __attribute__((vector_size(VECTOR)));
typedef std::uint32_t words __attribute__((vector_size(VECTOR)));
typedef std::uint16_t shorts __attribute__((vector_size(VECTOR / 2)));
typedef std::int16_t signed_shorts __attribute__((vector_size(VECTOR / 2)));
typedef std::int8_t signed_bytes __attribute__((vector_size(VECTOR / 4)));
typedef std::uint16_t pairs __attribute__((vector_size(VECTOR)));
typedef std::int16_t signed_pairs __attribute__((vector_size(VECTOR)));
typedef std::uint64_t longs __attribute__((vector_size(VECTOR)));
typedef std::uint8_t bytes __attribute__((vector_size(VECTOR / 4)));
typedef double doubles __attribute__((vector_size(VECTOR)));
typedef float some_floats __attribute__((vector_size(VECTOR / 2)));  // as many as a vector has doubles

constexpr int LANES = VECTOR / 4;
constexpr int TOGETHER = 4;  // rows that are processed at a time
constexpr int PANEL = 16;    // columns that one thread computes; those of packed weights alternate
constexpr int GROUP = 32;    // contiguous packed weights of a column; packed.py has the layout
constexpr int HALF = 16;     // the fewest weights that share a scale
constexpr int UNIT = 256;    // weights that share the factor of their scales

struct bfloat {
    std::uint16_t bits;
};
struct half {
    std::uint16_t bits;
};
struct short_scale {
    std::uint16_t bits;  // 15 to 30 of a float that is not negative; see `short_scales` in quantized.py
};

template <class V>
INLINE V load(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

template <class V>
INLINE void store(void* to, V v) {
    std::memcpy(to, &v, sizeof v);
}

// sum + x * w, rounded once.
INLINE floats multiply_add(floats sum, floats x, floats w) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)x, (__m512)w, (__m512)sum);
#elif defined(__FMA__)
    return (floats)_mm256_fmadd_ps((__m256)x, (__m256)w, (__m256)sum);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)sum, (float32x4_t)x, (float32x4_t)w);
#else
    for (int lane = 0; lane < LANES; lane++) sum[lane] = __builtin_fmaf(x[lane], w[lane], sum[lane]);
    return sum;
#endif
}

INLINE doubles multiply_add(doubles sum, doubles x, doubles w) {
#if defined(__AVX512F__)
    return (doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)w, (__m512d)sum);
#elif defined(__FMA__)
    return (doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)w, (__m256d)sum);
#elif defined(__aarch64__)
    return (doubles)vfmaq_f64((float64x2_t)sum, (float64x2_t)x, (float64x2_t)w);
#else
    for (int lane = 0; lane < LANES / 2; lane++) sum[lane] = __builtin_fma(x[lane], w[lane], sum[lane]);
    return sum;
#endif
}

// x in every lane; x + 0 would be an addition, for -0 is not 0.
INLINE floats every(float x) { return x - floats{}; }

INLINE floats multiply_add(floats sum, floats x, float w) { return multiply_add(sum, x, every(w)); }

// ---- numbers -------------------------------------------------------------------------------------------------------

INLINE floats widen(const float* x) { return load<floats>(x); }

INLINE floats widen(const bfloat* x) { return (floats)(__builtin_convertvector(load<shorts>(x), words) << 16); }

INLINE floats widen(const short_scale* x) {
    return (floats)(__builtin_convertvector(load<shorts>(x), words) << 15);
}

INLINE floats widen(const half* x) {
#if defined(__AVX512F__)
    return (floats)_mm512_maskz_cvtph_ps(0xffff, load<__m256i>(x));  // GCC 12 warns of the one without a mask
#elif defined(__F16C__)
    return (floats)_mm256_cvtph_ps(load<__m128i>(x));
#elif defined(__aarch64__)
    return (floats)vcvt_f32_f16((float16x4_t)load<shorts>(x));
#else
    words bits = __builtin_convertvector(load<shorts>(x), words);
    floats size = (floats)((bits & 0x7fffu) << 13) * 0x1p112f;  // the exponent's bias of float32 for that of float16
    words endless = (words)((ints)(bits & 0x7c00u) == 0x7c00) & 0x7f800000u;  // infinities and nan
    return (floats)((words)size | endless | (bits & 0x8000u) << 16);
#endif
}

// LANES integers of 8 bits.
INLINE ints whole(const std::uint8_t* x) {
#if defined(__AVX512F__)
    return (ints)_mm512_maskz_cvtepu8_epi32(0xffff, load<__m128i>(x));
#elif defined(__AVX2__)
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x));
#elif defined(__aarch64__)
    return (ints)vmovl_u16(vget_low_u16(vmovl_u8((uint8x8_t)vdup_n_u32(load<std::uint32_t>(x)))));
#else
    return __builtin_convertvector(load<bytes>(x), ints);
#endif
}

INLINE floats widen(const std::uint8_t* x) { return __builtin_convertvector(whole(x), floats); }

INLINE floats widen(const std::int8_t* x) {
#if defined(__AVX512F__)
    return __builtin_convertvector((ints)_mm512_maskz_cvtepi8_epi32(0xffff, load<__m128i>(x)), floats);
#elif defined(__AVX2__)
    return __builtin_convertvector((ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)x)), floats);
#elif defined(__aarch64__)
    const int8x8_t some = (int8x8_t)vdup_n_u32(load<std::uint32_t>(x));
    return __builtin_convertvector((ints)vmovl_s16(vget_low_s16(vmovl_s8(some))), floats);
#else
    return __builtin_convertvector(load<signed_bytes>(x), floats);
#endif
}

INLINE void narrow(floats x, float* to) { store(to, x); }

INLINE words bfloat_bits(floats x) {
    words bits = (words)x;
    words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest, ties to even
    words quiet = (words)(x != x);                                 // a nan stays a nan
    return (rounded & ~quiet) | (0x7fc0u & quiet);
}

INLINE void narrow(floats x, bfloat* to) { store(to, __builtin_convertvector(bfloat_bits(x), shorts)); }

INLINE void narrow(floats x, short_scale* to) {  // to nearest, halves up
    store(to, __builtin_convertvector(((words)x + 0x4000u) >> 15, shorts));
}

INLINE void narrow(floats x, half* to) {
#if defined(__AVX512F__)
    store(to, _mm512_maskz_cvtps_ph(0xffff, (__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    store(to, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__aarch64__)
    store(to, vcvt_f16_f32((float32x4_t)x));
#else
    const words bits = (words)x & 0x7fffffffu, sign = ((words)x >> 16) & 0x8000u;
    const words normal = (bits + 0xfffu + ((bits >> 13) & 1u) - (112u << 23)) >> 13;  // to nearest, ties to even
    const words small = (words)((floats)bits + 0.5f) - 0x3f000000u;  // below 2**-14: a step of 2**-24 is float's at 0.5
    words size = (ints)bits < (113 << 23) ? small : normal;
    size = (ints)bits >= 0x477ff000 ? words{} + 0x7c00u : size;  // numbers that round past 65504
    size = (ints)bits > 0x7f800000 ? words{} + 0x7e00u : size;
    store(to, __builtin_convertvector(size | sign, shorts));
#endif
}

INLINE float sum_of(floats x) {
#if VECTOR == 64
    x += __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
#elif VECTOR == 32
    x += __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3);
#endif
    return (x[0] + x[2]) + (x[1] + x[3]);
}

// The larger of each two; y if x is nan.
template <class V>
INLINE V larger(V x, V y) {
    return x > y ? x : y;
}

template <class V>
INLINE auto largest_of(V x) {
#if VECTOR == 64
    x = larger(x, __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#elif VECTOR == 32
    x = larger(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
    return std::max(std::max(x[0], x[2]), std::max(x[1], x[3]));
}

// Magnitudes as integers, which have the same order; and as numbers again, or nan if they are not finite, which integers
// cannot represent.
INLINE ints magnitudes(const float* x) { return load<ints>(x) & 0x7fffffff; }
INLINE floats finite(ints x) { return x < 0x7f800000 ? (floats)x : floats{} + NAN; }

inline float largest_of(const float* x, Int count) {
    ints most = {};
    for (Int i = 0; i < count; i += LANES) most = larger(magnitudes(x + i), most);
    return finite(ints{} + largest_of(most))[0];
}

constexpr float ROUND = 12582912.0f;  // 1.5 * 2**23: adding it rounds to an integer

// exp, within two units in the last place from -87 to 88, below that 0. Source: the minimax polynomial of Cephes' expf.
INLINE floats exp_of(floats x) {
    words far = (words)(x < -87.0f);
    x = x < -87.0f ? floats{} - 87.0f : x;
    x = x > 88.0f ? floats{} + 88.0f : x;
    floats n = multiply_add(floats{} + ROUND, x, 1.44269504088896341f);
    ints exponent = (ints)n - 0x4b400000;
    n -= ROUND;
    const floats r = multiply_add(multiply_add(x, n, -0.693359375f), n, 2.12194440e-4f);
    floats p = floats{} + 1.9875691500e-4f;
    for (const float factor : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = multiply_add(floats{} + factor, p, r);
    p = multiply_add(r + 1.0f, p * r, r);
    return (floats)((words)(p * (floats)((exponent + 127) << 23)) & ~far);
}

// The hidden number of an MLP: silu(gate) * up.
INLINE floats gated(floats gate, floats up) { return gate / (1.0f + exp_of(-gate)) * up; }

// exp, within two units in the last place from -700 to 0, below that 0. Source: its series, with ln 2 in two parts as in
// fdlibm's e_exp.c.
INLINE doubles exp_of(doubles x) {
    constexpr double TO_WHOLE = 0x1.8p52;  // adding it rounds to an integer, which is in the lowest bits then
    const longs far = (longs)(x < -700.0);
    x = x < -700.0 ? doubles{} - 700.0 : x;
    const doubles zero = {}, shifted = multiply_add(zero + TO_WHOLE, x, zero + 0x1.71547652b82fep0);
    const doubles n = shifted - TO_WHOLE;
    const doubles r = multiply_add(multiply_add(x, n, zero - 0x1.62e42feep-1), n, zero - 0x1.a39ef35793c76p-33);
    doubles p = zero + 1 / 6227020800.0;  // of 13!
    for (const double factor : {1 / 479001600.0, 1 / 39916800.0, 1 / 3628800.0, 1 / 362880.0, 1 / 40320.0, 1 / 5040.0,
                                1 / 720.0, 1 / 120.0, 1 / 24.0, 1 / 6.0, 0.5, 1.0, 1.0})
        p = multiply_add(zero + factor, p, r);
    return (doubles)((longs)(p * (doubles)(((longs)shifted + 1023) << 52)) & ~far);
}

// ---- as many sums at a time as a vector has lanes -------------------------------------------------------------------

// What a product loads at a time: a number for every lane, or a pair.
INLINE floats take(const float* x) { return load<floats>(x); }
INLINE words take(const bfloat* x) { return load<words>(x); }

// The same in a register: GCC would load it again for each use, or compute all products of a sum before it adds the
// first, and then loads and stores take most of the time.
template <class V>
INLINE V held(V v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

// The four bytes at x in every lane.
INLINE ints every_at(const char* x) {
#if defined(__AVX512F__)
    return (ints)_mm512_set1_epi32(load<std::int32_t>(x));
#elif defined(__AVX2__)
    return (ints)_mm256_set1_epi32(load<std::int32_t>(x));
#else
    return ints{} + load<std::int32_t>(x);
#endif
}

// A pair of 16-bit products added to every lane.
INLINE floats multiply_add(floats sum, words x, words w) {
#if defined(__AVX512BF16__)
    return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)w);
#else
    sum = multiply_add(sum, (floats)(x << 16), (floats)(w << 16));
    return multiply_add(sum, (floats)(x & 0xffff0000u), (floats)(w & 0xffff0000u));
#endif
}

// Return every four in the order 0 2 1 3.
INLINE signed_shorts swapped(signed_shorts x) {
#if VECTOR == 64
    return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
#elif VECTOR == 32
    return __builtin_shufflevector(x, x, 0, 2, 1, 3, 4, 6, 5, 7);
#else
    return __builtin_shufflevector(x, x, 0, 2, 1, 3);
#endif
}

// Return every two in the other order.
INLINE floats neighbours(floats x) {
#if VECTOR == 64
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif VECTOR == 32
    return __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    return __builtin_shufflevector(x, x, 1, 0, 3, 2);
#endif
}

// Two 16-bit products added to every lane.
INLINE ints multiply_add(ints sum, ints x, ints w) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)x, (__m512i)w);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ints)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)w);
#elif defined(__AVX512BW__)
    return sum + (ints)_mm512_madd_epi16((__m512i)x, (__m512i)w);
#elif defined(__AVX2__)
    return sum + (ints)_mm256_madd_epi16((__m256i)x, (__m256i)w);
#elif defined(__aarch64__)
    const int16x8_t one = (int16x8_t)x, other = (int16x8_t)w;
    const int32x4_t lower = vmull_s16(vget_low_s16(one), vget_low_s16(other));
    return sum + (ints)vpaddq_s32(lower, vmull_high_s16(one, other));
#else
    return sum + (x << 16 >> 16) * (w << 16 >> 16) + (x >> 16) * (w >> 16);
#endif
}

// Return the upper byte of every 16 bits.
INLINE ints upper_bytes(words x) { return (ints)((pairs)x >> 8); }

// Whether this CPU adds products of 8 bits in 16 bits, with saturation. Then codes of 8 bits are multiplied with
// numbers of 16 bits, and of the others so many fours are added at a time:
#if defined(__AVX2__) && !defined(__AVX512VNNI__) && (defined(__AVX512F__) || !defined(__AVXVNNI__))
constexpr bool SUMS_OF_16_BITS = true;
#else
constexpr bool SUMS_OF_16_BITS = false;
#endif
constexpr int fours_at_a_time(int bits) { return !SUMS_OF_16_BITS ? 0 : bits == 4 ? 8 : bits == 5 ? 4 : 2; }

// The products of four numbers of 8 bits and four codes of BITS bits, added to every lane.
template <int BITS>
INLINE ints add_fours(ints sum, ints x, words codes) {
#if defined(__AVX512VNNI__)
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)x);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)x);
#elif defined(__AVX512BW__)
    return (ints)_mm512_add_epi16((__m512i)sum, _mm512_maddubs_epi16((__m512i)codes, (__m512i)x));
#elif defined(__AVX2__)
    return (ints)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)codes, (__m256i)x));
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return (ints)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)x);
#elif defined(__ARM_FEATURE_DOTPROD)
    if constexpr (BITS < 8) return (ints)vdotq_s32((int32x4_t)sum, (int8x16_t)x, (int8x16_t)codes);
    // Both must have a sign: codes - 128, and then 128 times the numbers, which are at least -127.
    const int8x16_t negative = vnegq_s8((int8x16_t)x);
    const ints rest = (ints)vdotq_s32(int32x4_t{}, negative, vdupq_n_s8(-128));
    return (ints)vdotq_s32((int32x4_t)(sum + rest), (int8x16_t)x, (int8x16_t)(codes ^ 0x80808080u));
#else
#if defined(__aarch64__)
    if constexpr (BITS < 8) {  // two products fit into 16 bits
        const int8x16_t one = (int8x16_t)x, other = (int8x16_t)codes;
        const int16x8_t lower = vmull_s8(vget_low_s8(one), vget_low_s8(other));
        return (ints)vpadalq_s16((int32x4_t)sum, vpaddq_s16(lower, vmull_high_s8(one, other)));
    }
#endif
    sum = multiply_add(sum, (ints)((signed_pairs)x << 8 >> 8), ints(codes & 0x00ff00ffu));
    return multiply_add(sum, (ints)((signed_pairs)x >> 8), upper_bytes(codes));
#endif
}

// The sum of every two numbers of 16 bits.
INLINE ints pairs_added(ints x) { return multiply_add(ints{}, x, ints{} + 0x00010001); }

// Every two runs of STEP lanes: the first ones, or the second ones if SECOND, of x and of y in turn.
template <int STEP, bool SECOND, class V, int... LANE>
INLINE V in_turn(V x, V y, std::integer_sequence<int, LANE...>) {
    return __builtin_shufflevector(x, y, (LANE / STEP % 2 ? LANES - STEP : 0) + LANE + (SECOND ? STEP : 0)...);
}
template <int STEP, class V>
INLINE V firsts(V x, V y) {
    return in_turn<STEP, false>(x, y, std::make_integer_sequence<int, LANES>());
}
template <int STEP, class V>
INLINE V seconds(V x, V y) {
    return in_turn<STEP, true>(x, y, std::make_integer_sequence<int, LANES>());
}

// Return act of all lanes of vector i in lane i, in the order of `sum_of`.
template <int STEP = LANES / 2, class V, class Act>
INLINE V combined(V v[], Act act) {
    UNROLL for (int i = 0; i < STEP; i++) v[i] = act(firsts<STEP>(v[i], v[i + STEP]), seconds<STEP>(v[i], v[i + STEP]));
    if constexpr (STEP > 1) return combined<STEP / 2>(v, act);
    return v[0];
}
INLINE floats sums_of(floats v[]) { return combined(v, [](floats x, floats y) { return x + y; }); }

// Exchange rows and columns: lane j of vector i and lane i of vector j.
template <int STEP = LANES / 2, class V>
INLINE void transpose(V v[]) {
    UNROLL for (int i = 0; i < LANES; i++)
        if (i / STEP % 2 == 0) {
            const V first = firsts<STEP>(v[i], v[i + STEP]);
            v[i + STEP] = seconds<STEP>(v[i], v[i + STEP]), v[i] = first;
        }
    if constexpr (STEP > 1) transpose<STEP / 2>(v);
}

// Memory to prefetch, so many bytes further with every vector that is multiplied. A burst of prefetches would wait for
// memory, and all loads behind it.
struct Ahead {
    const char* at;
    Int step;
    INLINE void next() { __builtin_prefetch(at, 0, 2), at += step; }
};
struct Nothing {
    INLINE void next() {}
};

// to[k * k_step + s * s_step] = kept[k] . streamed[s], for KEPT and STREAMED of them. The kept ones, and the sums, stay
// in registers while the others are loaded.
template <int KEPT, int STREAMED, class Asked, class T>
INLINE void dots(const T* kept, Int k_stride, const T* streamed, Int s_stride, Int length, float* to, Int k_step,
                 Int s_step, Asked ahead) {
    constexpr int SUMS = (KEPT * STREAMED + LANES - 1) / LANES * LANES;
    floats sums[SUMS] = {};
    for (Int i = 0; i < length; i += VECTOR / sizeof(T)) {
        decltype(take(kept)) some[KEPT];
        ahead.next();
        UNROLL for (int k = 0; k < KEPT; k++) some[k] = held(take(kept + k * k_stride + i));
        UNROLL for (int s = 0; s < STREAMED; s++) {
            const auto one = KEPT > 1 ? held(take(streamed + s * s_stride + i)) : take(streamed + s * s_stride + i);
            UNROLL for (int k = 0; k < KEPT; k++)
                sums[s * KEPT + k] = held(multiply_add(sums[s * KEPT + k], some[k], one));
        }
    }
    float all[SUMS];
    UNROLL for (int i = 0; i < SUMS; i += LANES) store(all + i, sums_of(sums + i));
    UNROLL for (int s = 0; s < STREAMED; s++)
        UNROLL for (int k = 0; k < KEPT; k++) to[k * k_step + s * s_step] = all[s * KEPT + k];
}

template <class T>
INLINE float dot(const T* x, const T* w, Int length) {
    floats sum = {};
    for (Int i = 0; i < length; i += VECTOR / sizeof(T)) sum = multiply_add(sum, take(x + i), take(w + i));
    return sum_of(sum);
}

// Call act(ROWS, row) for all rows, with ROWS a compile-time constant: MOST at a time while that leaves none or at
// least 4, then 4 at a time, then the others. With MOST = 5, five at a time only until the others are a multiple of 4.
template <int MOST = TOGETHER, class Act>
void by_rows(Int rows, Act act) {
    Int r = 0;
    if constexpr (MOST == TOGETHER + 1)
        for (Int fives = rows % TOGETHER; fives > 0 && MOST * fives <= rows - r; fives--, r += MOST)
            act(std::integral_constant<int, MOST>(), r);
    else if constexpr (MOST > TOGETHER)
        for (; rows - r == MOST || rows - r >= MOST + TOGETHER; r += MOST) act(std::integral_constant<int, MOST>(), r);
    for (; r + TOGETHER <= rows; r += TOGETHER) act(std::integral_constant<int, TOGETHER>(), r);
    if (rows - r == 3) act(std::integral_constant<int, 3>(), r);
    if (rows - r == 2) act(std::integral_constant<int, 2>(), r);
    if (rows - r == 1) act(std::integral_constant<int, 1>(), r);
}

// The sums that are computed at a time: half as many as the CPU has registers. And the rows whose sums fill them all.
constexpr int SUMS_AT_ONCE = VECTOR == 32 ? 8 : 16;
template <class T>
constexpr int most_rows() {
    return VECTOR == 32 && sizeof(T) == sizeof(float) ? 6 : TOGETHER;
}

// to[r][c] = x[r] . w[c], for any number of rows and columns. The `next` columns, if any, are prefetched, a share by
// each group of rows: else the first rows would wait for memory, which would then idle during the others.
template <class T>
void all_dots(const T* x, Int x_stride, Int rows, const T* w, Int w_stride, Int columns, Int length, float* to,
              Int to_stride, const T* next = nullptr) {
    by_rows<most_rows<T>()>(rows, [&](auto rows_at_a_time, Int r) {
        constexpr int ROWS = decltype(rows_at_a_time)::value, COLUMNS = ROWS > TOGETHER ? 2 : SUMS_AT_ONCE / ROWS;
        const T* from = x + r * x_stride;
        const Int bytes = COLUMNS * w_stride * sizeof(T), begin = bytes * r / rows, end = bytes * (r + ROWS) / rows;
        const Int vectors = length * sizeof(T) / VECTOR, step = (end - begin + vectors - 1) / vectors;
        for (Int c = 0; c < columns; c += COLUMNS)
            if (columns >= COLUMNS) {
                c = std::min<Int>(c, columns - COLUMNS);  // the last columns may be computed twice
                const T* column = w + c * w_stride;
                float* out = to + r * to_stride + c;
                auto some = [&](auto ahead) {
                    if constexpr (ROWS < COLUMNS)
                        dots<ROWS, COLUMNS>(from, x_stride, column, w_stride, length, out, to_stride, 1, ahead);
                    else
                        dots<COLUMNS, ROWS>(column, w_stride, from, x_stride, length, out, 1, to_stride, ahead);
                };
                next ? some(Ahead{(const char*)(next + c * w_stride) + begin, step}) : some(Nothing());
            } else {
                for (Int j = c; j < columns; j++)
                    for (int i = 0; i < ROWS; i++)
                        to[(r + i) * to_stride + j] = dot(from + i * x_stride, w + j * w_stride, length);
            }
    });
}

}  // namespace
