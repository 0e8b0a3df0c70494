// Tiles of a CPU with AMX: products of 16 rows with 16 columns in one instruction.
//
// With -DEMULATE_TILES the same functions run an exact model of the instructions, so every CPU can test the code above
// them. Source: the operations TDPBF16PS, TDPBSUD and TDPBUUD in Intel's Software Developer's Manual, volume 2.

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

typedef std::uint32_t quad __attribute__((vector_size(16)));

// Transpose four rows of four numbers.
INLINE void transpose(quad x[4]) {
    const quad a = __builtin_shufflevector(x[0], x[1], 0, 4, 1, 5), b = __builtin_shufflevector(x[2], x[3], 0, 4, 1, 5);
    const quad c = __builtin_shufflevector(x[0], x[1], 2, 6, 3, 7), d = __builtin_shufflevector(x[2], x[3], 2, 6, 3, 7);
    x[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5), x[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    x[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5), x[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
}

// Transpose TILE rows of TILE numbers of 32 bits in place; the rows are `stride` bytes apart.
inline void transpose_tile(char* tile, Int stride) {
    for (int i = 0; i < TILE; i += 4)
        for (int j = 0; j <= i; j += 4) {
            quad below[4], above[4];
            for (int k = 0; k < 4; k++) below[k] = load<quad>(tile + (i + k) * stride + j * 4);
            for (int k = 0; k < 4; k++) above[k] = load<quad>(tile + (j + k) * stride + i * 4);
            transpose(below), transpose(above);
            for (int k = 0; k < 4; k++) store(tile + (i + k) * stride + j * 4, above[k]);
            for (int k = 0; k < 4; k++) store(tile + (j + k) * stride + i * 4, below[k]);
        }
}

// The sizes of all tiles, in the layout of LDTILECFG: 0 to 3 are sums, 4 is a left factor, the others right factors.
struct TileSizes {
    std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
    std::uint16_t row_bytes[16] = {};
    std::uint8_t rows[16] = {};

    // For left factors of `count` rows of `bytes` bytes, and right factors of TILE columns.
    TileSizes(Int count, Int bytes) {
        for (int i = 0; i < 8; i++) row_bytes[i] = 64, rows[i] = std::uint8_t(i < 4 ? count : bytes / 4);
        row_bytes[4] = std::uint16_t(bytes), rows[4] = std::uint8_t(count);
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
#define TILE_WRITE(t, to, stride) _tile_stored(t, to, stride)
#define TILE_ADD_BFLOATS(sum, left, right) _tile_dpbf16ps(sum, left, right)
#define TILE_ADD_SIGNED(sum, left, right) _tile_dpbsud(sum, left, right)
#define TILE_ADD_UNSIGNED(sum, left, right) _tile_dpbuud(sum, left, right)

#else

// Hundreds of copies would take minutes to compile.
#define NOT_INLINE __attribute__((noinline))

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

    // Add the products of bytes; the numbers of the left factor have a sign if Left has one.
    template <class Left>
    NOT_INLINE void add_bytes(int sum, int left, int right) {
        for (int r = 0; r < sizes.rows[left]; r++)
            for (int k = 0; k < sizes.row_bytes[left]; k++)
                for (int c = 0; c < TILE; c++) {
                    char* total = (char*)tile[sum][r] + 4 * c;
                    store(total, load<std::int32_t>(total) + Left(tile[left][r][k]) * tile[right][k / 4][4 * c + k % 4]);
                }
    }

    // Add the products of bfloat16: the even and the odd ones apart, each with one rounding. Denormal numbers are 0.
    NOT_INLINE void add_bfloats(int sum, int left, int right) {
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

    static float flushed(float x) { return __builtin_fabsf(x) < FLT_MIN ? __builtin_copysignf(0.0f, x) : x; }
    static float number_at(const void* at) {
        const std::uint32_t bits = std::uint32_t(load<std::uint16_t>(at)) << 16;
        return flushed(load<float>(&bits));
    }
};

inline thread_local EmulatedTiles emulated_tiles;

inline bool tiles_allowed() { return TILES; }
inline void configure_tiles(const TileSizes& sizes) { emulated_tiles.configure(sizes); }
inline void release_tiles() { emulated_tiles.configure({0, 0}); }
#define TILE_ZERO(t) emulated_tiles.zero(t)
#define TILE_READ(t, from, stride) emulated_tiles.read(t, from, stride)
#define TILE_WRITE(t, to, stride) emulated_tiles.write(t, to, stride)
#define TILE_ADD_BFLOATS(sum, left, right) emulated_tiles.add_bfloats(sum, left, right)
#define TILE_ADD_SIGNED(sum, left, right) emulated_tiles.add_bytes<std::int8_t>(sum, left, right)
#define TILE_ADD_UNSIGNED(sum, left, right) emulated_tiles.add_bytes<std::uint8_t>(sum, left, right)

#endif

// to[r][c] = x[r] . w[c] for `rows` rows and `columns` columns of bfloat16. The rows are arranged: see arrange_rows.
inline void tile_dots(const bfloat* x, Int x_stride, Int rows, const bfloat* w, Int w_stride, Int columns, Int length,
                      float* to, Int to_stride) {
    constexpr Int MOST = 4 * TILE;
    configure_tiles({columns, 64});
    for (Int r = 0; r < rows; r += MOST) {
        const Int blocks = (std::min(rows - r, MOST) + TILE - 1) / TILE, block = TILE * x_stride;
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (Int k = 0; k < length; k += 2 * TILE) {
            const bfloat* from = x + r * x_stride + k;
            TILE_READ(4, w + k, w_stride * 2);
            TILE_READ(5, from, x_stride * 2);
            TILE_ADD_BFLOATS(0, 4, 5);
            if (blocks == 1) continue;
            TILE_READ(6, from + block, x_stride * 2);
            TILE_ADD_BFLOATS(1, 4, 6);
            if (blocks == 2) continue;
            TILE_READ(7, from + 2 * block, x_stride * 2);
            TILE_ADD_BFLOATS(2, 4, 7);
            if (blocks == 3) continue;
            TILE_READ(5, from + 3 * block, x_stride * 2);
            TILE_ADD_BFLOATS(3, 4, 5);
        }
        alignas(64) char sums[4][TILE * 64];
        TILE_WRITE(0, sums[0], 64);
        TILE_WRITE(1, sums[1], 64);
        TILE_WRITE(2, sums[2], 64);
        TILE_WRITE(3, sums[3], 64);
        for (Int b = 0; b < blocks; b++) {
            transpose_tile(sums[b], 64);
            const Int count = std::min<Int>(TILE, rows - r - b * TILE);
            for (Int i = 0; i < count; i++)
                std::memcpy(to + (r + b * TILE + i) * to_stride, sums[b] + i * 64, columns * sizeof(float));
        }
    }
    release_tiles();
}

// Arrange TILE rows of bfloat16 as right factors: row i has pair i of every row, of each 2 * TILE numbers.
inline void arrange_rows(char* rows, Int stride, Int length) {
    for (Int k = 0; k < length * 2; k += 64) transpose_tile(rows + k, stride);
}

}  // namespace
