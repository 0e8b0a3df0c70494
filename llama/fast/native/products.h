// Products: rows of activations, rounded for the kind of weights, times the columns of a matrix.
//
// Kinds with the same functions: Plain for float32 and bfloat16, Packed for the weights of packed.py. A sum has the same
// order for any number of rows and columns.

#pragma once

#include "matrices.h"

namespace {

// Weights of float32 or bfloat16, and activations rounded to the same.
template <class T>
struct Plain {
    bool mixed;  // not read

    static Int bytes(Int length) { return length * sizeof(T); }
    static Int room_for() { return 0; }

    static void round(const float* x, Int length, char* to) {
        for (Int i = 0; i < length; i += LANES) narrow(widen(x + i), (T*)to + i);
    }

    static void row_of(const Matrix& matrix, Int row, float* to) {
        const T* from = (const T*)matrix.weight + row * matrix.length;
        for (Int i = 0; i < matrix.length; i += LANES) store(to + i, widen(from + i));
    }

    // to[r][c] = x[r] . w[c] for columns `first` to `end`.
    static void multiply(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride, char*) {
        multiply_rows(matrix, x, bytes(matrix.length), rows, first, end, to, stride);
    }

    // The same for rows `size` bytes apart.
    static void multiply_rows(const Matrix& matrix, const char* x, Int size, Int rows, Int first, Int end, float* to,
                              Int stride) {
        for (Int c = first; c < end; c += PANEL) {  // these weights stay in the innermost cache for all rows
            const T* panel = (const T*)matrix.weight + c * matrix.length;
            all_dots((const T*)x, size / Int(sizeof(T)), rows, panel, matrix.length, std::min<Int>(PANEL, end - c),
                     matrix.length, to + c, stride, rows > 1 ? panel + PANEL * matrix.length : nullptr);
        }
    }
};

// A row of activations rounded for packed weights: integers of 16 bits with one scale for the row, or of 8 bits with a
// scale for every GROUP.
template <int ACTIVATIONS>
struct RoundedRow {
    float* factors;       // two: with 16 bits the scale is their product, with 8 the second multiplies every scale
    float *scales, *sums;  // of every GROUP; the sums of its numbers, with 8 bits times the scale
    std::int32_t* counts;  // the sum of every half of a GROUP, as integers
    char* numbers;         // with 16 bits in the order 0 2 1 3 of every four, which is that of masked codes
    char* widened;         // the same in 16 bits, if codes of 8 bits are multiplied in 16

    RoundedRow(const char* at, Int length) {
        factors = (float*)at, scales = factors + 16, sums = scales + length / GROUP;
        counts = (std::int32_t*)(sums + length / GROUP), numbers = (char*)(counts + length / HALF);
        widened = ACTIVATIONS == 8 ? numbers + length : numbers;
    }
    static Int bytes(Int length) {
        const Int bits = ACTIVATIONS == 8 ? 8 + (SUMS_OF_16_BITS ? 16 : 0) : 16;
        return (64 + length / GROUP * 8 + length / HALF * 4 + length * bits / 8 + 63) / 64 * 64;
    }
};

// Packed weights: GROUP weights of PANEL columns are contiguous, in words of one column each, in turn.
template <int ACTIVATIONS, class T>
struct Packed {
    using Row = RoundedRow<ACTIVATIONS>;
    bool mixed;  // some matrices are plain, of T: then a rounded row ends with the same row for these

    explicit Packed(bool mixed) : mixed(mixed) {}

    Int bytes(Int length) const { return Row::bytes(length) + (mixed ? (length * Int(sizeof(T)) + 63) / 64 * 64 : 0); }

    void round(const float* x, Int length, char* to) const {
        if (mixed) Plain<T>::round(x, length, to + Row::bytes(length));
        constexpr float MOST = ACTIVATIONS == 16 ? 32767.0f : 127.0f;
        const Row row(to, length);
        const float largest = largest_of(x, length);
        // Rows of tiny numbers are computed 2**64 times as large, so that the inverse fits into float32.
        const float up = largest < 0x1p-64f ? 0x1p64f : 1.0f;
        row.factors[0] = ACTIVATIONS == 16 ? largest * up / MOST : 1, row.factors[1] = 1.0f / up;
        for (Int first = 0, groups = length / GROUP; first < groups; first += LANES) {  // as many as a vector has lanes
            const Int count = std::min<Int>(LANES, groups - first), bytes = count * Int(sizeof(float));
            const floats most = (ACTIVATIONS == 16 ? every(largest) : largest_of_groups(x + first * GROUP, count)) * up;
            const floats scale = ACTIVATIONS == 16 ? every(1) : most / MOST;
            const floats inverse = most > 0x1p-100f ? MOST / most : floats{};
            floats halves[2][LANES] = {};  // their sums
            for (Int g = 0; g < count; g++)
                UNROLL for (int h = 0; h < 2; h++)
                    for (Int i = 0; i < HALF; i += LANES) {
                        const Int at = (first + g) * GROUP + h * HALF + i;
                        const floats whole = widen(x + at) * up * inverse[g] + ROUND - ROUND;
                        const ints number = __builtin_convertvector(whole, ints);  // GCC 12 converts floats one by one
                        if (ACTIVATIONS == 8) store(row.numbers + at, __builtin_convertvector(number, signed_bytes));
                        if (ACTIVATIONS == 16 || SUMS_OF_16_BITS)
                            store(row.widened + at * 2, swapped(__builtin_convertvector(number, signed_shorts)));
                        halves[h][g] += whole;
                    }
            floats counts[2];
            for (int h = 0; h < 2; h++) {
                const floats found = sums_of(halves[h]);
                counts[h] = found - found == 0 ? found : floats{};  // else the scale is not finite
                for (Int g = 0; g < count; g++) row.counts[2 * (first + g) + h] = std::int32_t(counts[h][g]);
            }
            const floats sums = (counts[0] + counts[1]) * scale;
            std::memcpy(row.sums + first, &sums, bytes);
            if (ACTIVATIONS == 8) std::memcpy(row.scales + first, &scale, bytes);
        }
    }

    // The largest magnitudes of so many groups, or nan.
    static floats largest_of_groups(const float* x, Int count) {
        ints most[LANES] = {};
        for (Int g = 0; g < count; g++)
            for (Int i = g * GROUP; i < (g + 1) * GROUP; i += LANES) most[g] = larger(magnitudes(x + i), most[g]);
        return finite(combined(most, [](ints x, ints y) { return larger(x, y); }));
    }

    // Whether products with codes of so many bits multiply in 16 bits.
    static constexpr bool in_16_bits(int bits) { return ACTIVATIONS == 16 || (bits == 8 && SUMS_OF_16_BITS); }

    // Products read four codes in so many parts: in 16 bits the even ones and then the odd ones, else all.
    static constexpr int parts(int bits) { return in_16_bits(bits) ? 2 : 1; }
    template <int BITS>
    static INLINE ints part_of(words four, int part) {
        if (parts(BITS) == 1) return ints(four);
        return part ? upper_bytes(four) : ints(four & 0x00ff00ffu);
    }

    // ROWS rows times PANELS panels of columns from `c` on.
    template <int BITS, int ROWS, int PANELS>
    static void some(const Matrix& matrix, const char* x, Int size, Int c, float* to, Int stride) {
        constexpr int EACH = PANEL / LANES, VECTORS = PANELS * EACH;
        constexpr bool IN_16_BITS = in_16_bits(BITS);
        constexpr int PARTS = parts(BITS), SPANS = spans(BITS);
        constexpr int FOURS = GROUP / 4 / SPANS, CHAINS = ROWS == 1 ? 4 / SPANS : 1;  // of independent sums
        constexpr int RUN = fours_at_a_time(BITS);
        const Int length = matrix.length, groups = length / GROUP;
        const std::int32_t offset = matrix.offset;
        Place at[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) at[v] = Place(matrix, c / PANEL + v / EACH, v % EACH * LANES, BITS);
        floats sums[ROWS][VECTORS] = {};
        for (Int g = 0; g < groups; g++)
            UNROLL for (int s = 0; s < SPANS; s++) {
                const Int span = g * SPANS + s;
                ints partial[CHAINS][ROWS][VECTORS] = {}, narrow[ROWS][VECTORS] = {};
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const std::int32_t* counts = Row(x + r * size, length).counts + 2 * g;
                    const ints start = held(ints{} - offset * (SPANS == 2 ? counts[s] : counts[0] + counts[1]));
                    UNROLL for (int v = 0; v < VECTORS; v++) partial[0][r][v] = start;
                }
                UNROLL for (int i = 0; i < FOURS; i++) {
                    const int number = s * FOURS + i, h = number / 4, w = number % 4;
                    words four[VECTORS];
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        const char* group = at[v].codes + g * PANEL * BITS * 4;
                        four[v] = four_codes<BITS>(group, h, w);
                        // The CPU's own prefetching ends with a page; many rows have time to prefetch the next panels.
                        const Int ahead = ROWS == 1 ? 4096 : PANELS * groups * PANEL * BITS * 4;
                        if (number < BITS) __builtin_prefetch(group + number * PANEL * 4 + ahead);
                    }
                    UNROLL for (int part = 0; part < PARTS; part++) {
                        ints codes[VECTORS];
                        UNROLL for (int v = 0; v < VECTORS; v++) codes[v] = held(part_of<BITS>(four[v], part));
                        UNROLL for (int r = 0; r < ROWS; r++) {
                            const Row row(x + r * size, length);
                            const Int place = g * GROUP + 4 * number;
                            ints* total = partial[CHAINS == 4 ? 2 * h + w % 2 : CHAINS == 2 ? w % 2 : 0][r];
                            const char* numbers = IN_16_BITS ? row.widened + place * 2 + part * 4 : row.numbers + place;
                            const ints activations = held(every_at(numbers));
                            UNROLL for (int v = 0; v < VECTORS; v++) {
                                if constexpr (IN_16_BITS) {
                                    total[v] = held(multiply_add(total[v], activations, codes[v]));
                                } else if constexpr (RUN == 0) {
                                    total[v] = held(add_fours<BITS>(total[v], activations, words(codes[v])));
                                } else {
                                    narrow[r][v] = held(add_fours<BITS>(narrow[r][v], activations, words(codes[v])));
                                    if ((number + 1) % RUN == 0)
                                        total[v] += pairs_added(narrow[r][v]), narrow[r][v] = ints{};
                                }
                            }
                        }
                    }
                }
                floats shares[VECTORS];
                if (matrix.zeros) {
                    all_at<&Place::zeros>(at, span, g, shares);
                    UNROLL for (int r = 0; r < ROWS; r++) {
                        const float sum = Row(x + r * size, length).sums[g];
                        UNROLL for (int v = 0; v < VECTORS; v++) sums[r][v] = multiply_add(sums[r][v], shares[v], sum);
                    }
                }
                all_at<&Place::scales>(at, span, g, shares);
                UNROLL for (int r = 0; r < ROWS; r++) {
                    const float scale = ACTIVATIONS == 8 ? Row(x + r * size, length).scales[g] : 1;
                    UNROLL for (int v = 0; v < VECTORS; v++) {
                        ints all = partial[0][r][v];
                        UNROLL for (int i = 1; i < CHAINS; i++) all += partial[i][r][v];
                        const floats product = __builtin_convertvector(all, floats);
                        sums[r][v] = multiply_add(sums[r][v], shares[v], ACTIVATIONS == 8 ? product * scale : product);
                    }
                }
            }
        UNROLL for (int v = 0; v < VECTORS; v++) {
            const Int columns = std::clamp<Int>(matrix.columns - c - v * LANES, 0, LANES);
            UNROLL for (int r = 0; r < ROWS; r++) {
                const float* factors = Row(x + r * size, length).factors;
                const floats out = sums[r][v] * factors[0] * factors[1];
                std::memcpy(to + r * stride + c + v * LANES, &out, columns * sizeof(float));
            }
        }
    }

    // ---- many rows: some columns are read once, a part of their numbers at a time, as the products then read them ------

    static constexpr int MOST = VECTOR == 64 ? 3 : 1;  // panels at a time, by the number of registers
    static constexpr int WIDE = MOST * PANEL / LANES;  // vectors of their columns
    static constexpr Int SHARED_BY = 32, STRIP_BYTES = 36 << 10;  // so many rows at least; of codes, in the innermost cache
    static constexpr Int groups_of_strip(int bits) { return STRIP_BYTES / (WIDE * VECTOR) * 4 / GROUP / parts(bits); }

    // Some groups of a strip's columns: the parts of their codes, and their scales and zeros as float32.
    struct Strip {
        char* codes;
        float *scales, *zeros;
        explicit Strip(char* room) : codes(room), scales((float*)(room + STRIP_BYTES)), zeros(scales + SHARES) {}
        static constexpr Int SHARES = STRIP_BYTES / HALF, BYTES = STRIP_BYTES + 2 * SHARES * Int(sizeof(float));

        template <int BITS>
        void read(const Matrix& matrix, Int c, Int begin, Int end) const {
            constexpr int EACH = PANEL / LANES, SPANS = spans(BITS);
            for (int v = 0; v < WIDE; v++) {
                const Place at(matrix, c / PANEL + v / EACH, v % EACH * LANES, BITS);
                const char* from = at.codes + begin * PANEL * BITS * 4;
                char* to = codes + v * VECTOR;
                Int share = v * LANES;
                for (Int g = begin; g < end; g++, from += PANEL * BITS * 4) {
                    UNROLL for (int i = 0; i < GROUP / 4; i++)
                        for (int part = 0; part < parts(BITS); part++, to += WIDE * VECTOR)
                            store(to, part_of<BITS>(four_codes<BITS>(from, i / 4, i % 4), part));
                    UNROLL for (int s = 0; s < SPANS; s++, share += WIDE * LANES) {
                        store(scales + share, at.scales.at(g * SPANS + s, g));
                        if (matrix.zeros) store(zeros + share, at.zeros.at(g * SPANS + s, g));
                    }
                }
            }
        }
    };

    // Add the products of TOGETHER rows with the groups `begin` to `end` of a strip to `to`, in the order of `some`.
    template <int BITS, bool ZEROS>
    static void add_strip(const Matrix& matrix, const Strip& strip, Int begin, Int end, const char* x, Int size, float* to,
                          Int stride) {
        constexpr bool IN_16_BITS = in_16_bits(BITS);
        constexpr int SPANS = spans(BITS), WORDS = GROUP / 4 * parts(BITS) / SPANS, RUN = fours_at_a_time(BITS);
        const Row row(x, matrix.length);
        const Int next = size / Int(sizeof(float));  // from a row's shares to the next row's
        const char *codes = strip.codes, *numbers = IN_16_BITS ? row.widened + begin * GROUP * 2 : row.numbers + begin * GROUP;
        const float *scales = strip.scales, *zeros = strip.zeros;
        const ints below = ints{} - std::int32_t(matrix.offset);
        floats sums[TOGETHER][WIDE] = {};
        if (begin) UNROLL for (int r = 0; r < TOGETHER; r++)
            UNROLL for (int v = 0; v < WIDE; v++) sums[r][v] = widen(to + r * stride + v * LANES);
        for (Int g = begin; g < end; g++)
            UNROLL for (int s = 0; s < SPANS; s++, scales += WIDE * LANES, zeros += WIDE * LANES) {
                ints partial[TOGETHER][WIDE] = {}, narrow[TOGETHER][WIDE] = {};
                if (!ZEROS) UNROLL for (int r = 0; r < TOGETHER; r++) {
                    const char* counts = (const char*)(row.counts + r * next + 2 * g);
                    const ints count = SPANS == 2 ? every_at(counts + 4 * s) : every_at(counts) + every_at(counts + 4);
                    UNROLL for (int v = 0; v < WIDE; v++) partial[r][v] = held(count * below);
                }
                UNROLL for (int i = 0; i < WORDS; i++, codes += WIDE * VECTOR) {
                    ints some[WIDE];
                    UNROLL for (int v = 0; v < WIDE; v++) some[v] = held(load<ints>(codes + v * VECTOR));
                    UNROLL for (int r = 0; r < TOGETHER; r++) {
                        const ints activations = held(every_at(numbers + r * size + 4 * i));
                        UNROLL for (int v = 0; v < WIDE; v++) {
                            if constexpr (IN_16_BITS) {
                                partial[r][v] = held(multiply_add(partial[r][v], activations, some[v]));
                            } else if constexpr (RUN == 0) {
                                partial[r][v] = held(add_fours<BITS>(partial[r][v], activations, words(some[v])));
                            } else {
                                narrow[r][v] = held(add_fours<BITS>(narrow[r][v], activations, words(some[v])));
                                if ((i + 1) % RUN == 0) partial[r][v] += pairs_added(narrow[r][v]), narrow[r][v] = ints{};
                            }
                        }
                    }
                }
                numbers += WORDS * 4;
                floats scale[WIDE], zero[WIDE] = {};
                UNROLL for (int v = 0; v < WIDE; v++) scale[v] = held(widen(scales + v * LANES));
                if (ZEROS) UNROLL for (int v = 0; v < WIDE; v++) zero[v] = held(widen(zeros + v * LANES));
                UNROLL for (int r = 0; r < TOGETHER; r++) {
                    const float row_scale = ACTIVATIONS == 8 ? row.scales[r * next + g] : 1;
                    UNROLL for (int v = 0; v < WIDE; v++) {
                        const floats product = __builtin_convertvector(partial[r][v], floats);
                        if (ZEROS) sums[r][v] = multiply_add(sums[r][v], zero[v], row.sums[r * next + g]);
                        sums[r][v] = multiply_add(sums[r][v], scale[v], ACTIVATIONS == 8 ? product * row_scale : product);
                    }
                }
            }
        const bool whole = end * GROUP == matrix.length;
        UNROLL for (int r = 0; r < TOGETHER; r++) {
            const float* factors = Row(x + r * size, matrix.length).factors;
            UNROLL for (int v = 0; v < WIDE; v++)
                store(to + r * stride + v * LANES, whole ? sums[r][v] * factors[0] * factors[1] : sums[r][v]);
        }
    }

    // Multiply a multiple of TOGETHER rows with the strip of columns from `c` on. `more`: the next strip follows.
    template <int BITS>
    static void multiply_strip(const Matrix& matrix, Int c, const char* x, Int size, Int rows, float* to, Int stride,
                               char* room, bool more) {
        const Int groups = matrix.length / GROUP, most = groups_of_strip(BITS), strips = (groups + most - 1) / most;
        const Int step = (groups + strips - 1) / strips, tiles = strips * (rows / TOGETHER);
        const Place next(matrix, c / PANEL + MOST, 0, BITS);
        const Int shares = MOST * PANEL * groups * spans(BITS);
        Int tile = 0;
        auto fetch = [&](const void* from, Int bytes) {  // this tile's share: a burst would wait for memory
            for (Int at = bytes * tile / tiles / 64 * 64; at < bytes * (tile + 1) / tiles; at += 64)
                __builtin_prefetch((const char*)from + at, 0, 2);
        };
        const Strip strip(room);
        const auto add = matrix.zeros ? add_strip<BITS, true> : add_strip<BITS, false>;
        for (Int begin = 0; begin < groups; begin += step) {
            const Int end = std::min(groups, begin + step);
            strip.template read<BITS>(matrix, c, begin, end);
            for (Int r = 0; r < rows; r += TOGETHER, tile++) {
                if (more) {
                    fetch(next.codes, MOST * PANEL * groups * BITS * 4);
                    fetch(next.scales.each, shares * (next.scales.units ? 1 : 2));
                    if (matrix.zeros) fetch(next.zeros.each, shares * (next.zeros.units ? 1 : 2));
                }
                add(matrix, strip, begin, end, x + r * size, size, to + r * stride + c, stride);
            }
        }
    }

    template <int BITS>
    void by_columns(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride,
                    char* room) const {
        const Int size = bytes(matrix.length), in_strips = rows >= SHARED_BY ? rows / TOGETHER * TOGETHER : 0;
        for (Int c = first; c < end;) {
            const bool many = rows > 1 && c + MOST * PANEL <= end;  // one row reads from few addresses at a time
            const Int done = many ? in_strips : 0;
            if (done) multiply_strip<BITS>(matrix, c, x, size, done, to, stride, room, c + 2 * MOST * PANEL <= end);
            by_rows<TOGETHER + 1>(rows - done, [&](auto n, Int r) {  // five rows take less time than four and one
                constexpr int ROWS = decltype(n)::value;
                const char* from = x + (done + r) * size;
                float* out = to + (done + r) * stride;
                many ? some<BITS, ROWS, MOST>(matrix, from, size, c, out, stride)
                     : some<BITS, ROWS, 1>(matrix, from, size, c, out, stride);
            });
            c += (many ? MOST : 1) * PANEL;
        }
    }

    // The bytes of `room` that a thread needs.
    static Int room_for() { return Strip::BYTES; }

    void multiply(const Matrix& matrix, const char* x, Int rows, Int first, Int end, float* to, Int stride,
                  char* room) const {
        if (!matrix.bits)
            return Plain<T>::multiply_rows(matrix, x + Row::bytes(matrix.length), bytes(matrix.length), rows, first, end,
                                           to, stride);
        with_bits(matrix, [&](auto bits) { by_columns<bits>(matrix, x, rows, first, end, to, stride, room); });
    }

    static void row_of(const Matrix& matrix, Int row, float* to) {
        if (!matrix.bits) return Plain<T>::row_of(matrix, row, to);
        with_bits(matrix, [&](auto bits) { row_of<bits>(matrix, row, to); });
    }

    template <int BITS>
    static void row_of(const Matrix& matrix, Int row, float* to) {
        constexpr int SPANS = spans(BITS);
        const Place at(matrix, row / PANEL, row % PANEL / LANES * LANES, BITS);
        const int lane = row % LANES;
        for (Int g = 0; g < matrix.length / GROUP; g++)
            for (int i = 0; i < GROUP; i++) {
                const Int span = g * SPANS + i * SPANS / GROUP;
                const float scale = at.scales.at(span, g)[lane];
                const float zero = matrix.zeros ? at.zeros.at(span, g)[lane] : -float(matrix.offset) * scale;
                const words four = four_codes<BITS>(at.codes + g * PANEL * BITS * 4, i / HALF, i % HALF / 4);
                to[g * GROUP + i] = scale * (four[lane] >> i % 4 * 8 & 255) + zero;
            }
    }
};

}  // namespace
