// Parts of attention by tiles: scores of queries with a chunk of keys, and weighted sums of its values.
//
// A float32 is two bfloats: rounded, and the rest. The product of two rests is left out. The bits of a query's results
// depend on no other query, because a sum always has KEYS keys: zeros are in the place of those that do not exist.

#pragma once

#include "tile_products.h"

namespace {

constexpr Int KEYS = 64;  // keys in a chunk

template <class T>
constexpr int PARTS = std::is_same_v<T, float> ? 2 : 1;  // bfloats of a number

// The bits of a part of LANES numbers.
INLINE words part_of(const bfloat* x, int) { return __builtin_convertvector(load<shorts>(x), words); }
INLINE words part_of(const float* x, int part) {
    const words rounded = bfloat_bits(widen(x));
    return part ? bfloat_bits(widen(x) - (floats)(rounded << 16)) : rounded;
}

// Write one part of so many numbers.
template <class T>
INLINE void write_part(const T* x, Int count, int part, bfloat* to) {
    for (Int i = 0; i < count; i += LANES) store(to + i, __builtin_convertvector(part_of(x + i, part), shorts));
}

// Left factors: the parts of numbers, `rest` numbers apart.
struct LeftParts {
    bfloat* first;
    Int rest;

    template <class T>
    void write(const T* x, Int count) const {
        for (int part = 0; part < PARTS<T>; part++) write_part(x, count, part, first + part * rest);
    }
};

// Right factors: of each part all columns, TILE of them at a time, and of these STEP numbers at a time.
struct RightParts {
    char* first;
    Int rest;

    char* at(int part, Int column, Int number, Int length) const {
        return first + part * rest + (column / TILE * length + number) / STEP * FACTOR;
    }

    // Of keys, which key_at(i) returns: a key is a column.
    template <class T, class At>
    void write_keys(At key_at, Int count, Int length) const {
        for (Int key = 0; key < count; key += TILE)
            for (Int i = 0; i < length; i += STEP)
                for (int part = 0; part < PARTS<T>; part++) {
                    alignas(64) bfloat rows[TILE][STEP] = {};
                    for (Int r = 0; r < std::min<Int>(TILE, count - key); r++)
                        write_part(key_at(key + r) + i, STEP, part, rows[r]);
                    tile_row pairs[TILE];
                    transpose_tile((const char*)rows, sizeof rows[0], pairs);
                    std::memcpy(at(part, key, i, length), pairs, sizeof pairs);
                }
    }

    // Of values: a key's numbers are a row, and each two rows are interleaved.
    template <class T, class At>
    void write_values(At value_at, Int count, Int columns) const {
        for (Int key = 0; key < KEYS; key += 2) {
            const T *even = key < count ? value_at(key) : nullptr, *odd = key + 1 < count ? value_at(key + 1) : nullptr;
            for (Int c = 0; c < columns; c += LANES)
                for (int part = 0; part < PARTS<T>; part++) {
                    const words low = even ? part_of(even + c, part) : words{},
                                high = odd ? part_of(odd + c, part) : words{};
                    store(at(part, c, key, KEYS) + key % STEP / 2 * 64 + c % TILE * 4, low | high << 16);
                }
        }
    }
};

// Add the products of all parts, except of two rests, to sum `tile`.
#define ADD_PARTS(tile, right)                                       \
    {                                                                \
        const char* from = w.at(0, column + tile * TILE, i, length); \
        TILE_READ(right, from, 64);                                  \
        TILE_ADD_BFLOATS(tile, 4, right);                            \
        if (LEFT == 2) TILE_ADD_BFLOATS(tile, 5, right);             \
        if (RIGHT == 2) {                                            \
            TILE_READ(right, from + w.rest, 64);                     \
            TILE_ADD_BFLOATS(tile, 4, right);                        \
        }                                                            \
    }

// to[r][c] = x[r] . w[c], for TILE rows of so many numbers from `row` on, and all columns, an even number of tiles.
template <int LEFT, int RIGHT>
void multiply_parts(const LeftParts& x, Int row, const RightParts& w, Int columns, Int length, float* to, Int stride) {
    for (Int column = 0; column < columns; column += 4 * TILE, to += 4 * TILE) {
        const bool four = column + 2 * TILE < columns;
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
        for (Int i = 0; i < length; i += STEP) {
            const bfloat* from = x.first + row * length + i;
            TILE_READ(4, from, length * 2);
            if (LEFT == 2) {
                TILE_READ(5, from + x.rest, length * 2);
            }
            ADD_PARTS(0, 6);
            ADD_PARTS(1, 7);
            if (four) {
                ADD_PARTS(2, 6);
                ADD_PARTS(3, 7);
            }
        }
        TILE_WRITE(0, to, stride * 4);
        TILE_WRITE(1, to + TILE, stride * 4);
        if (four) {
            TILE_WRITE(2, to + 2 * TILE, stride * 4);
            TILE_WRITE(3, to + 3 * TILE, stride * 4);
        }
    }
    write_before_reading();
}

}  // namespace
