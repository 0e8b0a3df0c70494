// Products: rows of activations, rounded to the weights' kind, times the columns of a matrix.
//
// Two kinds with the same functions: Plain for float32 and bfloat16, Packed for the weights of quantize.py. A sum is
// added up in the same order however many rows and columns are taken at a time.

#pragma once

#include "vectors.h"

namespace {

// A weight as PyTorch has it, (columns, length); or as quantize.py packs it in 8 or 4 bits, with its scales and zeros.
struct Matrix {
    const void *weight, *scales, *zeros;
    Int columns, length;
    Int bits;
};

// Weights of float32 or bfloat16, and activations rounded to the same.
template <class T>
struct Plain {
    static Int bytes(Int length) { return length * sizeof(T); }

    static void round(const float* x, Int length, char* to) {
        for (Int i = 0; i < length; i += LANES) narrow(widen(x + i), (T*)to + i);
    }

    static void row_of(const Matrix& matrix, Int row, float* to) {
        const T* from = (const T*)matrix.weight + row * matrix.length;
        for (Int i = 0; i < matrix.length; i += LANES) store(to + i, widen(from + i));
    }

    // to[r][c] = x[r] . w[c] for columns `first` to `end`.
    static void multiply(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride) {
        for (Int c = first; c < end; c += PANEL)  // these weights stay in the nearest cache while all rows pass
            all_dots((const T*)x, matrix.length, rows, (const T*)matrix.weight + c * matrix.length, matrix.length,
                     std::min<Int>(PANEL, end - c), matrix.length, to + c, stride);
    }
};

// Packed weights: PANEL columns and GROUP of their weights stand together, as vectors of a word for every column: four
// weights of 8 bits, or eight of 4. Activations are 16-bit integers with one scale a row, in the order 0 2 1 3 of every
// four, in which masks give the weights in pairs.
struct Packed {
    // A rounded row: two factors of its scale, from byte 64 on the sum of every group, then its integers.
    static Int bytes(Int length) { return (64 + length / GROUP * 4 + length * 2 + 63) / 64 * 64; }
    static std::int16_t* integers(char* row, Int length) { return (std::int16_t*)(row + 64 + length / GROUP * 4); }

    static void round(const float* x, Int length, char* to) {
        floats most = {}, lost = {};  // lost: 0, or nan where a number is no finite one, which no integer could tell
        for (Int i = 0; i < length; i += LANES) {
            const floats number = widen(x + i), size = number < 0 ? -number : number;
            most = size > most ? size : most;
            lost += number * 0.0f;
        }
        float largest = 0;
        for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
        // Rows of tiny numbers are computed 2**64 times as large, or the inverse would be past float32.
        const float up = largest < 0x1p-64f ? 0x1p64f : 1.0f;
        largest *= up;
        const float scale = largest / 32767.0f + sum_of(lost), inverse = largest > 0 ? 32767.0f / largest : 0.0f;
        const float header[] = {scale, 1.0f / up};
        std::memcpy(to, header, sizeof header);
        for (Int g = 0; g < length / GROUP; g++) {
            floats sum = {};
            for (Int i = g * GROUP; i < (g + 1) * GROUP; i += LANES) {
                const floats whole = multiply_add(floats{} + ROUND, widen(x + i) * up, inverse) - ROUND;
                store(integers(to, length) + i, swapped(__builtin_convertvector(whole, signed_shorts)));
                sum += whole;
            }
            ((float*)(to + 64))[g] = sum_of(sum);
        }
    }

    static float number(const half* x, Int i) { return widen(x + i / LANES * LANES)[i % LANES]; }

    static void row_of(const Matrix& matrix, Int row, float* to) {
        const Int groups = matrix.length / GROUP, column = row % PANEL, each = 32 / matrix.bits;  // weights of a word
        for (Int g = 0; g < groups; g++) {
            const Int group = (row / PANEL * groups + g) * PANEL;
            const auto* words = (const std::uint32_t*)matrix.weight + group * GROUP / each + column;
            const float scale = number((const half*)matrix.scales + group, column);
            const float zero = number((const half*)matrix.zeros + group, column);
            for (Int i = 0; i < GROUP; i++) {
                const std::uint32_t word = words[i / each * PANEL];
                const Int place = i % each;
                // Of eight, the middle pairs have changed places.
                const Int four = place >= 2 && place < 6 ? place ^ 6 : place;
                const std::uint32_t code = each == 4 ? word >> 8 * place & 255 : word >> 4 * four & 15;
                to[g * GROUP + i] = scale * code + zero;
            }
        }
    }

    // The weights of a word of every column, in pairs.
    template <int BITS>
    static void unpack(const char* at, ints* pairs) {
        const words word = load<words>(at);
        for (int i = 0; i < 16 / BITS; i++) pairs[i] = ints(word >> BITS * i & (BITS == 8 ? 0x00ff00ffu : 0x000f000fu));
    }

    static constexpr int MOST = VECTOR == 64 ? 3 : 1;  // vectors of columns at a time, by the registers there are

    // ROWS rows times VECTORS vectors of columns.
    template <int BITS, int ROWS, int VECTORS>
    static void some(const Matrix& matrix, const char* x, Int c, float* to, Int stride) {
        constexpr int PAIRS = 16 / BITS;  // in a word
        const Int length = matrix.length, groups = length / GROUP, size = bytes(length);
        const char* codes[VECTORS];
        const half *scales[VECTORS], *zeros[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            const Int panel = (c + v * LANES) / PANEL, column = (c + v * LANES) % PANEL;
            codes[v] = (const char*)matrix.weight + panel * PANEL * length * BITS / 8 + column * 4;
            scales[v] = (const half*)matrix.scales + panel * PANEL * groups + column;
            zeros[v] = (const half*)matrix.zeros + panel * PANEL * groups + column;
        }
        floats sums[ROWS][VECTORS] = {};
        for (Int g = 0; g < groups; g++) {
            ints partial[ROWS][VECTORS] = {};
            for (Int i = g * GROUP; i < (g + 1) * GROUP; i += 2 * PAIRS) {
                ints weights[VECTORS][PAIRS];
                for (int v = 0; v < VECTORS; v++) {
                    const char* at = codes[v] + i * PANEL * BITS / 8;
                    if (ROWS == 1) __builtin_prefetch(at + 4096);  // the CPU's own reading ahead ends with a page
                    unpack<BITS>(at, weights[v]);
                }
                for (int r = 0; r < ROWS; r++) {
                    std::int32_t pairs[PAIRS];
                    std::memcpy(pairs, integers((char*)x + r * size, length) + i, sizeof pairs);
                    ints activations[PAIRS];
                    for (int p = 0; p < PAIRS; p++) activations[p] = held(ints{} + pairs[p]);
                    for (int v = 0; v < VECTORS; v++)
                        for (int p = 0; p < PAIRS; p++)
                            partial[r][v] = multiply_add(partial[r][v], activations[p], weights[v][p]);
                }
            }
            for (int v = 0; v < VECTORS; v++) {
                const floats scale = widen(scales[v] + g * PANEL), zero = widen(zeros[v] + g * PANEL);
                for (int r = 0; r < ROWS; r++) {
                    const floats shifted = multiply_add(sums[r][v], zero, ((const float*)(x + r * size + 64))[g]);
                    sums[r][v] = multiply_add(shifted, scale, __builtin_convertvector(partial[r][v], floats));
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            const Int columns = std::clamp<Int>(matrix.columns - c - v * LANES, 0, LANES);
            for (int r = 0; r < ROWS; r++) {
                const float* factors = (const float*)(x + r * size);
                const floats out = sums[r][v] * factors[0] * factors[1];
                std::memcpy(to + r * stride + c + v * LANES, &out, columns * sizeof(float));
            }
        }
    }

    static void multiply(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride) {
        matrix.bits == 4 ? by_columns<4>(matrix, x, rows, first, end, to, stride)
                         : by_columns<8>(matrix, x, rows, first, end, to, stride);
    }

    template <int BITS>
    static void by_columns(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride) {
        for (Int c = first; c < end;) {
            const bool many = rows > 1 && c + MOST * LANES <= end;  // one row reads from as few places as it can
            by_rows(rows, [&](auto n, Int r) {
                constexpr int ROWS = decltype(n)::value;
                const char* from = x + r * bytes(matrix.length);
                many ? some<BITS, ROWS, MOST>(matrix, from, c, to + r * stride, stride)
                     : some<BITS, ROWS, 1>(matrix, from, c, to + r * stride, stride);
            });
            c += many ? MOST * LANES : LANES;
        }
    }
};

}  // namespace
