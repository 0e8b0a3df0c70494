// Tiles of a CPU with AMX: products of 16 rows with 16 columns in one instruction.
//
// With -DEMULATE_TILES the same functions run an exact model of the instructions, so every CPU can test the code above
// them. Source: the operations TDPBF16PS and TDPBSSD in Intel's Software Developer's
// Manual, volume 2.

#pragma once

#include "vectors.h"

#if !defined(EMULATE_TILES) && defined(__AMX_INT8__) && defined(__AMX_BF16__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(AMX) || defined(EMULATE_TILES)
constexpr bool TILES = true;
#else
constexpr bool TILES = false;
#endif
constexpr int TILE = 16;  // rows of a tile, and its numbers of 32 bits in a row

typedef float tile_row __attribute__((vector_size(64)));

// Transpose TILE rows of TILE numbers of 32 bits, which are `stride` bytes apart.
INLINE void transpose_tile(const void* from, Int stride, tile_row to[TILE]) {
    tile_row x[TILE], y[TILE];
    UNROLL for (int i = 0; i < TILE; i++) std::memcpy(&x[i], (const char*)from + i * stride, sizeof x[i]);
    UNROLL for (int i = 0; i < TILE; i += 2) {  // columns 0, 1 and 2, 3 of every four, of two rows
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    UNROLL for (int i = 0; i < TILE; i += 4)  // x[i + j]: columns j, 4 + j, 8 + j, 12 + j of four rows
        UNROLL for (int j = 0; j < 2; j++) {
            const tile_row a = y[i + j], b = y[i + 2 + j];
            x[i + 2 * j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
            x[i + 2 * j + 1] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        }
    UNROLL for (int j = 0; j < 4; j++) {
        const tile_row a = x[j], b = x[4 + j], c = x[8 + j], d = x[12 + j];
        const tile_row even = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        const tile_row odd = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        const tile_row also_even = __builtin_shufflevector(c, d, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        const tile_row also_odd = __builtin_shufflevector(c, d, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        to[j] = __builtin_shufflevector(even, also_even, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        to[8 + j] = __builtin_shufflevector(even, also_even, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
        to[4 + j] = __builtin_shufflevector(odd, also_odd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
        to[12 + j] = __builtin_shufflevector(odd, also_odd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
}

// The sizes of all tiles, in the layout of LDTILECFG: 0 to 3 are sums, 4 and 5 left factors, 6 and 7 right factors.
struct TileSizes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    // For two left factors of so many rows; sums 0 and 1 belong to the first one, 2 and 3 to the second.
    TileSizes(Int first, Int second) {
        const Int count[8] = {first, first, second, second, first, second, TILE, TILE};
        for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = std::uint8_t(count[i]);
    }
};

#if defined(AMX)

// Ask the kernel once for the permission to use tiles. It may refuse, and a process without it that uses them ends.
inline bool tiles_allowed() {
    constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    static const bool allowed = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
    return allowed;
}
// GCC's own functions do not say that these instructions read memory, so it could leave out what was written there.
inline void configure_tiles(const TileSizes& sizes) { asm volatile("ldtilecfg %0" : : "m"(sizes)); }
inline void write_before_reading() { asm volatile("" : : : "memory"); }
inline void release_tiles() { _tile_release(); }
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_READ(t, from, stride) \
    write_before_reading();        \
    _tile_loadd(t, from, stride)
#define TILE_READ_ONCE(t, from, stride) /* it leaves the innermost cache to others */ \
    write_before_reading();                                                           \
    _tile_stream_loadd(t, from, stride)
#define TILE_WRITE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_ADD_BFLOATS(sum, left, right) _tile_dpbf16ps(sum, left, right)
#define TILE_ADD_BYTES(sum, left, right) _tile_dpbssd(sum, left, right)

#else

// Hundreds of copies would take minutes to compile.
#define NOT_INLINE __attribute__((noinline))
// Tests emulate tiles in builds without optimisation, which spend most of their time in these functions. With "O3", GCC
// makes the sums of bfloat16 twice as slow.
#if defined(__clang__)
#define OPTIMIZED(level)
#else
#define OPTIMIZED(level) __attribute__((optimize(level)))
#endif

struct EmulatedTiles {
    TileSizes sizes{0, 0};
    std::uint8_t tile[8][TILE][64] = {};

    void configure(const TileSizes& wanted) { *this = {}, sizes = wanted; }

    void zero(int t) { std::memset(tile[t], 0, sizeof tile[t]); }

    NOT_INLINE void read(int t, const void* from, Int stride) {
        zero(t);
        for (int r = 0; r < sizes.rows[t]; r++)
            std::memcpy(tile[t][r], (const char*)from + r * stride, sizes.row_bytes[t]);
    }

    NOT_INLINE void write(int t, void* to, Int stride) const {
        for (int r = 0; r < sizes.rows[t]; r++) std::memcpy((char*)to + r * stride, tile[t][r], sizes.row_bytes[t]);
    }

    // Add the products of bfloat16: the even and the odd ones apart, each with one rounding. Denormal numbers are 0.
    OPTIMIZED("O1") NOT_INLINE void add_bfloats(int sum, int left, int right) {
        for (int r = 0; r < sizes.rows[left]; r++) {
            float parts[2][TILE] = {};
            for (int k = 0; k < sizes.row_bytes[left] / 2; k++)
                for (int c = 0; c < TILE; c++) {
                    const float x = number_at(tile[left][r] + 2 * k);
                    const float w = number_at(tile[right][k / 2] + 4 * c + k % 2 * 2);
                    parts[k % 2][c] = flushed(__builtin_fmaf(x, w, parts[k % 2][c]));
                }
            for (int c = 0; c < TILE; c++) {
                const float before = flushed(load<float>(tile[sum][r] + 4 * c));
                store(tile[sum][r] + 4 * c, flushed(before + flushed(parts[0][c] + parts[1][c])));
            }
        }
    }

    // Add the products of every four bytes, each with a sign.
    OPTIMIZED("O3") NOT_INLINE void add_bytes(int sum, int left, int right) {
        for (int r = 0; r < sizes.rows[left]; r++)
            for (int c = 0; c < TILE; c++) {
                std::int32_t added = 0;
                for (int k = 0; k < sizes.row_bytes[left]; k++)
                    added += std::int8_t(tile[left][r][k]) * std::int8_t(tile[right][k / 4][4 * c + k % 4]);
                store(tile[sum][r] + 4 * c, load<std::uint32_t>(tile[sum][r] + 4 * c) + std::uint32_t(added));
            }
    }

    OPTIMIZED("O1") static float flushed(float x) { return __builtin_fabsf(x) < FLT_MIN ? __builtin_copysignf(0.0f, x) : x; }
    OPTIMIZED("O1") static float number_at(const void* at) {
        const std::uint32_t bits = std::uint32_t(load<std::uint16_t>(at)) << 16;
        return flushed(load<float>(&bits));
    }
};

inline thread_local EmulatedTiles emulated_tiles;

inline bool tiles_allowed() { return TILES; }
inline void configure_tiles(const TileSizes& sizes) { emulated_tiles.configure(sizes); }
inline void write_before_reading() {}
inline void release_tiles() { emulated_tiles.configure({0, 0}); }
#define TILE_ZERO(t) emulated_tiles.zero(t)
#define TILE_READ(t, from, stride) emulated_tiles.read(t, from, stride)
#define TILE_READ_ONCE(t, from, stride) emulated_tiles.read(t, from, stride)
#define TILE_WRITE(t, to, stride) emulated_tiles.write(t, to, stride)
#define TILE_ADD_BFLOATS(sum, left, right) emulated_tiles.add_bfloats(sum, left, right)
#define TILE_ADD_BYTES(sum, left, right) emulated_tiles.add_bytes(sum, left, right)

#endif

}  // namespace
