// Run every kernel of the native code on seeded numbers, and print a line for each; test_native_kernels.py compares them.
//
//     build  LANES  INSTRUCTIONS
//     exact  NAME  DIGEST               the same for every build
//     sums   NAME  DIGEST  MOST  X ...  the same for builds with vectors of one size and without tiles; MOST is the largest magnitude, and
//                                       X ... are some of the numbers. Vectors of another size add in another order.
//                                       Names that begin with "tiles" are printed only by builds with tiles.
//     wrong  NAME                       two results of this build differ, and the program ends
//
// With -DKERNELS_ALONE, forwards are left out, and with -DFORWARDS_ALONE the kernels, for builds of which only some code
// differs. With emulated tiles, forwards of float32 are left out: tiles multiply bfloat16 only.
//
// Tabs separate the parts of a line. A digest has the bits of all numbers of a result; all nan count as one number,
// because CPUs make different ones.

#include <cstdio>
#include <string>

#include "common.cpp"
#include "attention.h"
#include "products.h"
#if !defined(KERNELS_ALONE)
#include "forward.cpp"
#endif

namespace {

// Numbers that are the same with every compiler and library.
// Source: splitmix64, https://prng.di.unimi.it/splitmix64.c.
struct Dice {
    std::uint64_t state;

    std::uint64_t word() {
        std::uint64_t x = state += 0x9e3779b97f4a7c15u;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
        x = (x ^ x >> 27) * 0x94d049bb133111ebu;
        return x ^ x >> 31;
    }
    Int between(Int low, Int high) { return low + Int(word() >> 33) % (high - low + 1); }
    float within(float most) { return most * (float(between(-(1 << 23), 1 << 23)) * 0x1p-23f); }
};

template <class T>
std::vector<T> numbers(Dice& dice, Int count, float most, float middle = 0) {
    std::vector<T> made((count + LANES - 1) / LANES * LANES);
    for (Int i = 0; i < count; i += LANES) {
        floats some;
        for (int lane = 0; lane < LANES; lane++) some[lane] = i + lane < count ? middle + dice.within(most) : 0;
        narrow(some, made.data() + i);
    }
    made.resize(count);
    return made;
}

template <class T>
std::vector<T> integers(Dice& dice, Int count, Int low, Int high) {
    std::vector<T> made(count);
    for (T& x : made) x = T(dice.between(low, high));
    return made;
}

// ---- printing ------------------------------------------------------------------------------------------------------

struct Digest {
    std::uint64_t state = 0xcbf29ce484222325u;  // FNV-1a, https://www.rfc-editor.org/rfc/rfc9923

    template <class T>
    void add(T x) {
        if constexpr (std::is_same_v<T, float>)
            if (std::isnan(x)) return add(std::uint32_t(0x7fc00000));
        for (std::size_t i = 0; i < sizeof x; i++)
            state = (state ^ reinterpret_cast<const std::uint8_t*>(&x)[i]) * 0x100000001b3u;
    }
};

template <class T>
unsigned long long digest_of(const std::vector<T>& all) {
    Digest digest;
    for (const T& x : all) digest.add(x);
    return digest.state;
}

template <class T>
void exact(const std::string& name, const std::vector<T>& all) {
    std::printf("exact\t%s\t%016llx\n", name.c_str(), digest_of(all));
}

void sums(const std::string& name, const std::vector<float>& all) {
    float most = 0;
    for (const float x : all) most = std::max(most, std::abs(x));
    std::printf("sums\t%s\t%016llx\t%.9g", name.c_str(), digest_of(all), most);
    const Int count = Int(all.size()), step = std::max<Int>(1, count / 6);
    for (Int i = 0; i < count; i += step) std::printf("\t%.9g", all[i]);
    std::printf("\n");
}

void require(bool right, const std::string& name) {
    if (right) return;
    std::printf("wrong\t%s\n", name.c_str());
    std::exit(1);
}

// Require that `some` has the first numbers of `all`.
void require_start(const std::vector<float>& some, const std::vector<float>& all, const std::string& name) {
    require(digest_of(some) == digest_of(std::vector<float>(all.begin(), all.begin() + Int(some.size()))), name);
}

// Require that every number was written: memory begins as nan.
void require_numbers(const std::vector<float>& all, const std::string& name) {
    require(std::none_of(all.begin(), all.end(), [](float x) { return std::isnan(x); }), name + ", some are nan");
}

template <class T, class V>
void append(std::vector<T>& to, V v) {
    const Int before = Int(to.size());
    to.resize(before + Int(sizeof v / sizeof(T)));
    store(to.data() + before, v);
}

// ---- numbers -------------------------------------------------------------------------------------------------------

const char* name_of(float) { return "float32"; }
const char* name_of(bfloat) { return "bfloat16"; }
const char* name_of(half) { return "float16"; }
const char* name_of(short_scale) { return "a scale of 16 bits"; }

// Widen every number of 16 bits; narrow numbers around each of them, numbers of all sizes, and nan.
template <class T>
void conversions() {
    Dice dice{1};
    std::vector<T> all(1 << 16);
    std::vector<float> wide, between;
    std::vector<std::uint16_t> narrowed;
    for (Int i = 0; i < 1 << 16; i++) all[i].bits = std::uint16_t(i);
    for (Int i = 0; i < 1 << 16; i += LANES) append(wide, widen(all.data() + i));
    for (const float x : wide) {
        const std::uint32_t any = std::uint32_t(dice.word()), middle = load<std::uint32_t>(&x) + 0x1000u;
        for (const float y : {x, x * (1 + dice.within(0x1p-8f)), load<float>(&any), load<float>(&middle)})
            between.push_back(std::isnan(y) ? 0 : y);
    }
    for (Int i = 0; i < Int(between.size()); i += LANES) {
        T some[LANES];
        narrow(widen(between.data() + i), some);
        for (const T& one : some) narrowed.push_back(one.bits);
    }
    const std::string name = name_of(T{});
    exact("widen " + name, wide), exact("narrow to " + name, narrowed);
    T lost[LANES];
    narrow(every(NAN), lost);
    require(std::isnan(widen(lost)[0]), "nan in " + name);
}

// Sums of products of whole numbers, and what they are made of.
void whole_numbers() {
    Dice dice{2};
    std::vector<std::int32_t> pairs, fours, upper, whole_bytes;
    std::vector<float> bytes, signed_bytes;
    for (Int turn = 0; turn < 2048; turn++) {
        const bool extreme = turn % 4 == 0;  // the largest magnitudes alone
        const auto numbers = integers<std::int16_t>(dice, 32, extreme ? 32767 : -32767, 32767);
        const auto codes = integers<std::uint8_t>(dice, 64, extreme ? 255 : 0, 255);
        auto small = integers<std::int8_t>(dice, 64, extreme ? 127 : -127, 127);
        if (turn % 8 == 0)
            for (std::int8_t& x : small) x = std::int8_t(-x);
        const ints start = ints{} + std::int32_t(turn * 1000003);
        for (Int i = 0; i < 16; i += LANES) {
            const words four = load<words>(codes.data() + 4 * i);
            const ints two = load<ints>(numbers.data() + 2 * i), eight = load<ints>(small.data() + 4 * i);
            append(pairs, multiply_add(start, two, ints(four & 0x00ff00ffu)));
            append(upper, upper_bytes(four));
            append(whole_bytes, whole(codes.data() + i));
            append(bytes, widen(codes.data() + i)), append(signed_bytes, widen(small.data() + i));
            // In 16 bits, only codes of less than 8 bits are added, and none before a sum.
            const ints some = add_fours<6>(SUMS_OF_16_BITS ? ints{} : start, eight, four & 0x3f3f3f3fu);
            append(fours, SUMS_OF_16_BITS ? start + pairs_added(some) : some);
            const ints sum = SUMS_OF_16_BITS ? start : add_fours<8>(start, eight, four);
            for (Int lane = 0; lane < (SUMS_OF_16_BITS ? 0 : LANES); lane++) {
                std::int32_t right = start[lane];
                for (Int b = 4 * (i + lane); b < 4 * (i + lane + 1); b++) right += small[b] * codes[b];
                require(sum[lane] == right, "add fours of 8 bits");
            }
        }
    }
    exact("add pairs", pairs), exact("add fours", fours), exact("upper bytes", upper);
    exact("whole", whole_bytes), exact("widen bytes", bytes), exact("widen signed bytes", signed_bytes);
}

void functions() {
    Dice dice{3};
    std::vector<float> of_floats, of_largest, of_sums, of_neighbours;
    std::vector<double> of_doubles;
    std::vector<std::int16_t> of_swapped;
    for (Int turn = 0; turn < 4096; turn++) {
        const auto x = numbers<float>(dice, 16, turn % 2 ? 1.0f : 100.0f);
        floats most = floats{} - INFINITY, sum = {};
        for (Int i = 0; i < 16; i += LANES) {
            append(of_floats, exp_of(widen(x.data() + i))), append(of_neighbours, neighbours(widen(x.data() + i)));
            most = larger(widen(x.data() + i), most), sum += widen(x.data() + i);
            append(of_swapped, swapped(__builtin_convertvector(widen(x.data() + i), signed_shorts)));
        }
        for (Int i = 0; i < 16; i += LANES / 2) {
            doubles some;
            for (Int lane = 0; lane < LANES / 2; lane++) some[lane] = -8.0 * std::abs(x[i + lane]);
            append(of_doubles, exp_of(some));
        }
        of_largest.push_back(largest_of(most));
        of_sums.push_back(sum_of(sum));
    }
    std::vector<float> of_far;
    for (const float far : {-INFINITY, -88.0f, -87.0f, -0.0f, 0.0f, 88.0f, 89.0f, INFINITY, -1e-30f})
        of_far.push_back(exp_of(every(far))[0]);
    exact("exp of float32", of_floats), exact("exp of float64", of_doubles);
    exact("exp of far numbers", of_far);
    exact("largest", of_largest), exact("neighbours", of_neighbours), exact("swapped", of_swapped);
    sums("sum of float32", of_sums);
}

// ---- products ------------------------------------------------------------------------------------------------------

constexpr Int ROWS[] = {1, 2, 3, 5, 17};  // 16 are a tile
constexpr Int MOST_ROWS = 33;
constexpr char UNWRITTEN = -1;  // in every byte, it is nan for each kind of numbers

// Rows of numbers; for packed weights of different magnitudes: ordinary ones, zeros, tiny and large numbers, and one
// number that is far larger.
std::vector<float> activations(Dice& dice, Int length, bool packed) {
    std::vector<float> x = numbers<float>(dice, MOST_ROWS * length, 2.0f);
    if (!packed) return x;
    auto scale_row = [&](Int row, float factor) {
        for (Int i = row * length; i < (row + 1) * length; i++) x[i] *= factor;
    };
    scale_row(1, 0), scale_row(2, 0x1p-90f), scale_row(3, 0x1p60f), x[4 * length + 7] = 1e4f;
    return x;
}

// The product of the first `rows` rows, as `Forward` computes it.
template <class Product>
std::vector<float> product(const Product& kind, const Matrix& matrix, const std::vector<float>& x, Int rows) {
    const Int size = kind.bytes(matrix.length);
    std::vector<char> rounded((rows + TILE - 1) / TILE * TILE * size, UNWRITTEN);
    std::vector<char> room(kind.room_for(rows, matrix.length), UNWRITTEN);
    for (Int r = 0; r < rows; r++) kind.round(x.data() + r * matrix.length, matrix.length, rounded.data() + r * size);
    for (Int r = 0; kind.arranges() && r < rows; r += TILE)
        kind.arrange(rounded.data() + r * size, size, matrix.length, room.data());
    std::vector<float> to(rows * matrix.columns, NAN);
    const Team alone{0, 1, nullptr, room.data()};
    alone.share(matrix.columns, [&](Int first, Int end) {
        kind.multiply(matrix, rounded.data(), rows, first, end, to.data(), matrix.columns, room.data());
    });
    return to;
}

// The product of MOST_ROWS rows, which begins with those of fewer rows, and the matrix's own rows.
template <class Product, class Print>
void products(const std::string& name, const Product& kind, const Matrix& matrix, Print print) {
    Dice dice{5};
    const std::vector<float> x = activations(dice, matrix.length, matrix.bits), all = product(kind, matrix, x, MOST_ROWS);
    for (const Int rows : ROWS)
        require_start(product(kind, matrix, x, rows), all, name + ", " + std::to_string(rows) + " rows");
    print(name, all);
    require_numbers(all, name);
    std::vector<float> own(matrix.columns * matrix.length, NAN);
    for (Int c = 0; c < matrix.columns; c++) kind.row_of(matrix, c, own.data() + c * matrix.length);
    exact(name + ", the matrix", own);
}

template <class T>
void plain_products() {
    Dice dice{4};
    for (const auto& [columns, length] : {std::pair<Int, Int>{67, 96}, {3, 64}, {16, 288}}) {
        const std::vector<T> weight = numbers<T>(dice, columns * length, 1.0f);
        Matrix matrix{};
        matrix.weight = weight.data(), matrix.columns = columns, matrix.length = length;
        const std::string name = std::string("plain ") + name_of(T{}) + " " + std::to_string(columns) + " x " +
                                 std::to_string(length);
        products(name, Plain<T>{}, matrix, sums);
    }
}

// Tiles multiply rows that do not fit into a cache in parts: 33 of these do not, and 17 of them do.
void products_in_parts() {
    Dice dice{12};
    const std::vector<bfloat> weight = numbers<bfloat>(dice, 35 * 11008, 1.0f);
    Matrix matrix{};
    matrix.weight = weight.data(), matrix.columns = 35, matrix.length = 11008;
    const std::vector<float> x = activations(dice, matrix.length, false);
    const Plain<bfloat> kind{};
    require_start(product(kind, matrix, x, 17), product(kind, matrix, x, MOST_ROWS), "products in parts");
}

// A packed matrix of random codes and scales.
struct PackedMatrix {
    std::vector<std::uint8_t> codes;
    std::vector<half> scales, zeros, scale_units, zero_units;
    std::vector<std::int8_t> nested_scales, nested_zeros;
    Matrix matrix{};

    PackedMatrix(Dice& dice, Int columns, Int length, Int bits, bool has_zeros, bool has_units) {
        const Int panels = (columns + PANEL - 1) / PANEL, shares = panels * PANEL * length / GROUP * spans(int(bits));
        const Int units = panels * PANEL * length / UNIT;
        codes = integers<std::uint8_t>(dice, panels * PANEL * length / 8 * bits, 0, 255);
        const float step = 1.0f / float(1 << bits);
        scales = numbers<half>(dice, shares, step, step), zeros = numbers<half>(dice, shares, 1.0f);
        scale_units = numbers<half>(dice, units, step / 32, step / 16), zero_units = numbers<half>(dice, units, 1 / 32.0f);
        nested_scales = integers<std::int8_t>(dice, shares, -64, 63);
        nested_zeros = integers<std::int8_t>(dice, shares, 0, 63);
        matrix.weight = codes.data(), matrix.columns = columns, matrix.length = length, matrix.bits = bits;
        matrix.scales = scales.data();
        if (has_units) matrix.scales = nested_scales.data(), matrix.scale_units = scale_units.data();
        if (!has_zeros) matrix.offset = Int(1) << (bits - 1);
        if (has_zeros) matrix.zeros = zeros.data();
        if (has_zeros && has_units) matrix.zeros = nested_zeros.data(), matrix.zero_units = zero_units.data();
    }
};

template <int ACTIVATIONS>
void packed_products() {
    Dice dice{6};
    const Packed<ACTIVATIONS, float> kind{false};
    const std::string activations = " bits, activations " + std::to_string(ACTIVATIONS);
    for (const Int bits : {4, 5, 6, 8})
        for (const bool zeros : {false, true})
            for (const bool units : {false, true}) {
                const PackedMatrix packed(dice, 83, 512, bits, zeros, units);
                const std::string name = "packed " + std::to_string(bits) + activations;
                products(name + (zeros ? ", zeros" : ", offset") + (units ? ", units" : ""), kind, packed.matrix,
                         exact<float>);
            }
    const PackedMatrix packed(dice, 3, 32, 4, true, false);
    products("packed 4" + activations + ", 3 columns", kind, packed.matrix, exact<float>);
    std::vector<float> x = numbers<float>(dice, 2 * 32, 1.0f);
    x[3] = INFINITY;
    exact("packed 4" + activations + ", infinity", product(kind, packed.matrix, x, 2));
}

// ---- long prompts by tiles -----------------------------------------------------------------------------------------

#if defined(AMX) || defined(EMULATE_TILES)

// Rows of activations as a kind of products reads them; what is behind them is nan, or -1 in planes.
template <class Kind>
struct Rounded {
    const Int size, rows;
    std::vector<char> bytes, room;

    Rounded(const Kind& kind, const float* x, Int rows, Int length)
        : size(kind.bytes(length)), rows(rows), bytes((rows + TILE - 1) / TILE * TILE * size, char(0xff)),
          room(kind.room_for(rows, length), char(0xff)) {
        for (Int r = 0; r < rows; r++) kind.round(x + r * length, length, bytes.data() + r * size);
        for (Int r = 0; kind.arranges() && r < rows; r += TILE)
            kind.arrange(bytes.data() + r * size, size, length, room.data());
    }
    // The products with columns `first` to `end`, of a matrix of `end` columns and more.
    std::vector<float> times(const Kind& kind, const Matrix& matrix, Int first, Int end) {
        std::vector<float> to(rows * (end + 1), 7.0f);
        kind.multiply(matrix, bytes.data(), rows, first, end, to.data(), end + 1, room.data());
        for (Int r = 0; r < rows; r++) require(to[r * (end + 1) + end] == 7, "a product stays within its columns");
        return to;
    }
};

// The whole numbers of a row and of a column in planes.
std::vector<Int> row_in_planes(const char* at, Int length) {
    std::vector<Int> all;
    const PlaneRow row(at, length);
    for (Int i = 0; i < length; i++) all.push_back(256 * row.high[i] + row.low[i]);
    return all;
}

struct ColumnInPlanes {
    std::vector<Int> numbers;
    float unit;

    ColumnInPlanes(const Matrix& matrix, Int c) {
        std::vector<char> planes(2 * TILE * padded(matrix.length));
        const Panel panel(matrix, c / PANEL * PANEL, 0);
        float units[PANEL];
        with_bits(matrix, [&](auto bits) {
            write_units<bits>(panel, units);
            write_planes<bits>(panel, matrix.length, units, planes.data());
        });
        unit = units[c % PANEL];
        for (Int k = 0; k < matrix.length; k++) {
            const char* at = planes.data() + k / 64 * 2 * PLANE + k % 64 / 4 * 64 + c % PANEL * 4 + k % 4;
            numbers.push_back(256 * Int(std::int8_t(at[0])) + Int(std::int8_t(at[PLANE])));
        }
    }
};

// The same product in a loop of whole numbers.
float product_in_planes(const char* at, const ColumnInPlanes& column, Int* largest = nullptr) {
    const Int length = Int(column.numbers.size());
    const PlaneRow row(at, length);
    Int high = 0, mixed = 0;
    for (Int k = 0; k < length; k++) {
        const Int w_high = (column.numbers[k] + 128) >> 8, w_low = column.numbers[k] - 256 * w_high;
        high += row.high[k] * w_high, mixed += row.high[k] * w_low + row.low[k] * w_high;
        if (largest) *largest = std::max({*largest, std::abs(high), std::abs(mixed)});
    }
    return std::fma(float(high), 256.0f, float(mixed)) * (column.unit * 256.0f) * row.factors[0] * row.factors[1];
}

std::vector<float> row_of(const Matrix& matrix, Int c) {
    std::vector<float> row(matrix.length);
    Packed<16, float>::row_of(matrix, c, row.data());
    return row;
}

// Products of a matrix with the first rows, in any number of rows and columns, have the bits of those of all rows.
template <class Kind>
std::vector<float> long_products(const Kind& kind, const Matrix& matrix, const std::vector<float>& x, Int rows,
                                 const std::string& name) {
    const Int length = matrix.length, columns = matrix.columns;
    const std::vector<float> all = Rounded<Kind>(kind, x.data(), rows, length).times(kind, matrix, 0, columns);
    for (const auto& [first, count] : {std::pair<Int, Int>{0, 17}, {0, 31}, {0, 32}, {33, rows - 33}})
        require_start(Rounded<Kind>(kind, x.data() + first * length, count, length).times(kind, matrix, 0, columns),
                      std::vector<float>(all.begin() + first * (columns + 1), all.end()), name + ", some rows");
    Rounded<Kind> rounded(kind, x.data(), rows, length);
    for (Int c = 0; c < columns; c += PANEL) {
        const Int end = std::min(columns, c + PANEL);
        const std::vector<float> some = rounded.times(kind, matrix, c, end);
        for (Int r = 0; r < rows; r++)
            for (Int i = c; i < end; i++)
                require(some[r * (end + 1) + i] == all[r * (columns + 1) + i], name + ", some columns");
    }
    return all;
}

// Every product is the sum of whole numbers, and near the one in float64.
void check_planes(const Matrix& matrix, Int rows, const std::string& name) {
    Dice dice{13};
    const Int length = matrix.length;
    const std::vector<float> x = numbers<float>(dice, rows * length, 2.0f);
    const Planes kind{false};
    const std::vector<float> all = long_products(kind, matrix, x, rows, name);
    exact(name + ", planes", all);
    const Rounded<Planes> rounded(kind, x.data(), rows, length);
    for (Int c = 0; c < matrix.columns; c++) {
        const ColumnInPlanes column(matrix, c);
        const std::vector<float> weights = row_of(matrix, c);
        for (Int r = 0; r < rows; r++) {
            const float found = all[r * (matrix.columns + 1) + c];
            require(found == product_in_planes(rounded.bytes.data() + r * rounded.size, column), name);
            double sum = 0, xx = 0, ww = 0;
            for (Int k = 0; k < length; k++) {
                const double a = x[r * length + k], w = weights[k];
                sum += a * w, xx += a * a, ww += w * w;
            }
            require(std::abs(sum - found) <= 0x1p-13 * std::sqrt(xx * ww), name + ", float64");
        }
    }
}

// Decoded weights have the bits of the same weights as a matrix of bfloat16.
void check_decoded(const Matrix& matrix, Int rows, const std::string& name) {
    Dice dice{14};
    const std::vector<float> x = numbers<float>(dice, rows * matrix.length, 2.0f);
    std::vector<bfloat> narrowed(matrix.columns * matrix.length);
    for (Int c = 0; c < matrix.columns; c++) {
        const std::vector<float> row = row_of(matrix, c);
        for (Int i = 0; i < matrix.length; i += LANES)
            narrow(widen(row.data() + i), narrowed.data() + c * matrix.length + i);
    }
    Matrix plain{};
    plain.weight = narrowed.data(), plain.columns = matrix.columns, plain.length = matrix.length;
    const Plain<bfloat> kind{true};
    const std::vector<float> all = long_products(kind, matrix, x, rows, name);
    require(digest_of(all) == digest_of(long_products(kind, plain, x, rows, name)), name + ", decoded");
    exact(name + ", decoded", all);
}

void tile_products() {
    Dice dice{15};
    bool zeros = false;  // in turn, so that all pairs of bits, zeros and sizes are tried
    for (const Int bits : {4, 5, 6, 8})
        for (const auto& [columns, length] : {std::pair<Int, Int>{16, 32}, {48, 96}, {80, 160}, {35, 288}, {80, 256}}) {
            const PackedMatrix packed(dice, columns, length, bits, zeros = !zeros, length == 256);
            const std::string name = "tiles, " + std::to_string(bits) + (zeros ? " bits, zeros, " : " bits, ") +
                                     std::to_string(columns) + " x " + std::to_string(length);
            check_planes(packed.matrix, 70, name), check_decoded(packed.matrix, 70, name);
        }
    // In parts: of rows that stay in the cache, and of rows that do not.
    for (const auto& [columns, length] : {std::pair<Int, Int>{48, 2208}, {35, 11008}}) {
        const PackedMatrix packed(dice, columns, length, 4, true, false);
        const std::string name = "tiles, in parts of " + std::to_string(length);
        check_planes(packed.matrix, 49, name), check_decoded(packed.matrix, 49, name);
    }
}

// In a model whose other matrices are packed, a plain matrix has the products that it has elsewhere.
template <class T, class Mixed>
void mixed_products(const Mixed& mixed) {
    Dice dice{21};
    const std::vector<T> weight = numbers<T>(dice, 35 * 96, 1.0f);
    Matrix matrix{};
    matrix.weight = weight.data(), matrix.columns = 35, matrix.length = 96;
    const std::vector<float> x = activations(dice, matrix.length, false);
    require(product(mixed, matrix, x, MOST_ROWS) == product(Plain<T>{}, matrix, x, MOST_ROWS), "a plain matrix of many");
}

// Weights in planes are off by at most 1.5 units, for every code and all kinds of scales and zeros.
void planes_of_weights() {
    Dice dice{17};
    const float sizes[] = {0, 6e-8f, 1e-3f, 1, 65504};
    for (const Int bits : {4, 5, 6, 8})
        for (const bool zeros : {false, true})
            for (Int turn = 0; turn < 25; turn++) {  // a size of scales and one of zeros; the odd columns have all of them
                PackedMatrix packed(dice, PANEL, 288, bits, zeros, false);
                auto draw = [&](std::vector<half>& to, float size) {
                    for (Int i = 0; i < Int(to.size()); i += LANES) {
                        floats some;
                        for (int lane = 0; lane < LANES; lane++)
                            some[lane] = (lane % 2 ? sizes[dice.between(0, 4)] : size) * dice.within(1);
                        narrow(some, to.data() + i);
                    }
                };
                draw(packed.scales, sizes[turn % 5]), draw(packed.zeros, sizes[turn / 5]);
                for (Int c = 0; c < PANEL; c++) {
                    const ColumnInPlanes column(packed.matrix, c);
                    const std::vector<float> weights = row_of(packed.matrix, c);
                    for (Int k = 0; k < 288; k++) {
                        const double off = double(column.numbers[k]) * column.unit - weights[k];
                        require(std::abs(off) <= 1.5 * column.unit * (1 + 0x1p-7), "planes of weights");
                    }
                }
            }
}

// Rows in planes: of all magnitudes, of zeros, of one number, and not finite.
void planes_of_rows() {
    constexpr Int LENGTH = 96, COLUMNS = 35, ROWS = 33;
    Dice dice{18};
    const PackedMatrix packed(dice, COLUMNS, LENGTH, 4, true, false);
    const Planes kind{false};
    std::vector<float> x = activations(dice, LENGTH, true);
    for (Int i = 5 * LENGTH; i < 6 * LENGTH; i++) x[i] = -3e38f;
    x[6 * LENGTH + 1] = INFINITY, x[7 * LENGTH + 95] = NAN;
    Rounded<Planes> rounded(kind, x.data(), ROWS, LENGTH);
    const std::vector<float> to = rounded.times(kind, packed.matrix, 0, COLUMNS);
    for (Int r = 0; r < ROWS; r++) {
        const char* at = rounded.bytes.data() + r * rounded.size;
        const PlaneRow row(at, LENGTH);
        for (Int c = 0; c < COLUMNS; c++) {
            const float found = to[r * (COLUMNS + 1) + c];
            require(r == 6 || r == 7 ? std::isnan(found) : r == 1 ? found == 0 : r == 5 || found != 0, "rows in planes");
        }
        double largest = 0;
        for (Int k = 0; k < LENGTH; k++) largest = std::max(largest, std::abs(double(x[r * LENGTH + k])));
        const std::vector<Int> whole = row_in_planes(at, LENGTH);
        for (Int k = 0; k < LENGTH && r != 6 && r != 7; k++) {
            const double right = largest ? x[r * LENGTH + k] / largest * 32512 : 0;
            require(std::abs(double(whole[k]) - right) <= 0.51, "numbers in planes");
        }
        for (Int k = LENGTH; k < padded(LENGTH); k++) require(row.high[k] == 0 && row.low[k] == 0, "padding of planes");
    }
    std::vector<half> scales = packed.scales, zeros = packed.zeros;
    scales[3].bits = zeros[4].bits = 0x7c00, scales[5].bits = zeros[6].bits = 0x7e00;  // infinity, and nan
    Matrix matrix = packed.matrix;
    matrix.scales = scales.data(), matrix.zeros = zeros.data();
    const std::vector<float> lost = rounded.times(kind, matrix, 0, COLUMNS);
    for (Int c = 0; c < COLUMNS; c++)
        require(std::isfinite(lost[c]) == (c < 3 || c > 6), "scales and zeros that are not finite");
}

// The largest sums that there are fit into 32 bits.
void largest_sums() {
    constexpr Int LENGTH = LONGEST_SUM, COLUMNS = PANEL;
    Dice dice{19};
    PackedMatrix packed(dice, COLUMNS, LENGTH, 8, false, false);
    for (Int i = 0; i < Int(packed.codes.size()); i++) {
        const Int column = i / 4 % PANEL;  // the largest and the smallest codes
        packed.codes[i] = std::uint8_t(column % 2 ? column / 2 : 255 - column / 2);
    }
    for (half& scale : packed.scales) scale.bits = 0x3c00;  // 1
    std::vector<float> x(2 * LENGTH, 32384.0f);  // of high = 127 and low = -128
    x[0] = x[LENGTH] = 32512;
    for (Int i = LENGTH + 1; i < 2 * LENGTH; i++) x[i] = -32384 - 127;  // -127 and 1
    const Planes kind{false};
    Rounded<Planes> rounded(kind, x.data(), 2, LENGTH);
    const std::vector<float> to = rounded.times(kind, packed.matrix, 0, COLUMNS);
    Int largest = 0;
    for (Int c = 0; c < COLUMNS; c++) {
        const ColumnInPlanes column(packed.matrix, c);
        for (Int r = 0; r < 2; r++)
            require(to[r * (COLUMNS + 1) + c] ==
                        product_in_planes(rounded.bytes.data() + r * rounded.size, column, &largest),
                    "largest sums");
    }
    require(largest > Int(1) << 29 && largest < Int(1) << 31, "the sums are large");
}

// Tiles of random bits as the instructions add them: with numbers of all sizes, also denormal and not finite ones.
void random_tiles() {
    Dice dice{20};
    std::vector<float> bfloats;
    std::vector<std::int32_t> bytes;
    for (Int turn = 0; turn < 64; turn++) {
        const auto left = integers<std::uint8_t>(dice, PLANE, 0, 255), right = integers<std::uint8_t>(dice, PLANE, 0, 255);
        auto narrow = left, other = right;
        for (Int i = 1; i < PLANE && turn % 2; i += 2)  // of sizes near 1, or near the smallest
            narrow[i] = std::uint8_t(narrow[i] % 128 / (turn % 4 == 1 ? 16 : 64) + 60),
            other[i] = turn % 4 == 1 ? 63 : other[i] % 2;
        std::vector<float> sum = numbers<float>(dice, TILE * TILE, turn % 4 == 3 ? 1e-38f : 1.0f);
        auto whole = integers<std::int32_t>(dice, TILE * TILE, -(1 << 30), 1 << 30);
        configure_tiles({TILE, TILE});
        TILE_READ(0, sum.data(), 64);
        TILE_READ(4, narrow.data(), 64);
        TILE_READ_ONCE(6, other.data(), 64);
        TILE_ADD_BFLOATS(0, 4, 6);
        TILE_WRITE(0, sum.data(), 64);
        TILE_READ(1, whole.data(), 64);
        TILE_READ(5, left.data(), 64);
        TILE_READ_ONCE(7, right.data(), 64);
        TILE_ADD_BYTES(1, 5, 7);
        TILE_WRITE(1, whole.data(), 64);
        release_tiles(), write_before_reading();
        bfloats.insert(bfloats.end(), sum.begin(), sum.end()), bytes.insert(bytes.end(), whole.begin(), whole.end());
    }
    exact("tiles of bfloat16", bfloats), exact("tiles of bytes", bytes);
}

void by_tiles() {
    if (!tiles_allowed()) return;
    mixed_products<bfloat>(Packed<16, bfloat>{true}), mixed_products<bfloat>(Packed<8, bfloat>{true});
    mixed_products<float>(Planes{true}), random_tiles(), tile_products(), planes_of_weights(), planes_of_rows(), largest_sums();
}

#else

void by_tiles() {}

#endif

// ---- groups of a quantised cache -----------------------------------------------------------------------------------

// One group, quantised.
struct Group {
    std::vector<std::uint8_t> codes;
    std::vector<short_scale> scale;
    std::vector<half> zero;

    Group(Int bits, Int tokens, Int d, Int shared) : codes(tokens * d * bits / 8), scale(shared), zero(shared) {}
    Quantized quantized() { return {codes.data(), scale.data(), zero.data()}; }
    void print(const std::string& name) const {
        std::vector<std::uint16_t> shares;
        for (const short_scale& x : scale) shares.push_back(x.bits);
        for (const half& x : zero) shares.push_back(x.bits);
        exact(name + ", codes", codes), exact(name + ", scales", shares);
    }
};

template <class T>
void groups_of(Int bits, Int tokens, Int d) {
    Dice dice{std::uint64_t(100 * bits + tokens + d)};
    constexpr Int MOST = 5;  // queries
    const Int stride = d + 32, parts = d / 32, sinks = bits % 2 ? 3 : 0;
    const Groups how{bits, bits, tokens, 0, sinks, parts, 0, bits % 2};
    const std::string name = std::string(name_of(T{})) + " in " + std::to_string(bits) + " bits, " +
                             std::to_string(tokens) + " tokens of " + std::to_string(d);
    std::vector<T> from = numbers<T>(dice, tokens * stride, 2.0f);
    for (Int token = 0; token < tokens; token++) from[token * stride + 5] = from[5];  // a channel of equal numbers
    const auto queries = numbers<float>(dice, MOST * d, 1.0f), weights = numbers<float>(dice, MOST * KEYS, 0.5f, 0.5f);
    const auto turns = numbers<float>(dice, tokens * d, 1.0f);
    std::vector<float> own(std::max(TOGETHER * std::max(d, tokens), 2 * d));
    std::vector<std::uint8_t> scratch(tokens * d);

    Group keys(bits, tokens, d, d), values(bits, tokens, d, parts * tokens);
    make_keys(from.data(), stride, d, how, sinks, keys.quantized());
    make_values(from.data(), stride, d, how, sinks, own.data(), values.quantized());
    keys.print("make keys, " + name), values.print("make values, " + name);

    const std::uint8_t* key_codes = codes_of(keys.codes.data(), bits, tokens, d * tokens, scratch.data());
    exact("unpack keys, " + name, std::vector<std::uint8_t>(key_codes, key_codes + d * tokens));
    std::vector<float> scores(MOST * KEYS), rotated(d * AT_ONCE), scores_rotated(MOST * KEYS);
    by_rows(MOST, [&](auto rows, Int r) {
        score_group<decltype(rows)::value>(keys.quantized(), key_codes, tokens, d, queries.data() + r * d, own.data(),
                                           scores.data() + r * KEYS, KEYS);
    });
    rotated_keys(keys.quantized(), key_codes, tokens, d, turns.data(), rotated.data());
    by_rows(MOST, [&](auto rows, Int r) {
        score_keys<decltype(rows)::value>(rotated.data(), d, queries.data() + r * d, scores_rotated.data() + r * KEYS,
                                          KEYS);
    });
    sums("score group, " + name, scores);
    exact("rotated keys, " + name, rotated), exact("score keys, " + name, scores_rotated);

    const std::uint8_t* codes = codes_of(values.codes.data(), bits, how.run(d), d * tokens, scratch.data());
    exact("unpack values, " + name, std::vector<std::uint8_t>(codes, codes + d * tokens));
    std::vector<float> added(MOST * d);
    by_rows(MOST, [&](auto rows, Int r) {
        add_group<decltype(rows)::value>(values.quantized(), codes, tokens, d, parts, weights.data() + r * KEYS, KEYS,
                                         own.data(), added.data() + r * d, d);
    });
    sums("add group, " + name, added);
}

void all_groups() {
    for (Int bits = 2; bits <= 8; bits++)
        for (const Int tokens : {32, 64}) groups_of<float>(bits, tokens, bits % 2 ? 96 : 64);
    groups_of<bfloat>(4, 64, 128);
    Dice dice{8};
    std::vector<float> x = numbers<float>(dice, 96, 1.0f);
    hadamard(x.data(), 96);
    exact("hadamard", x);
}

// ---- attention by tiles --------------------------------------------------------------------------------------------

// A text of one kv head and three query heads in a cache, and its attention. Behind the last key there is nan.
template <class T>
struct AttendedText {
    static constexpr Int HEADS = 3, MOST = 200, POOL = MOST / PAGE + 2;
    const Kind kind;
    const Int d;
    std::vector<float> queries;  // of all positions
    std::vector<T> keys, values;
    std::vector<std::int32_t> table;
    Model model{};

    AttendedText(Kind kind, Int d) : kind(kind), d(d) {
        Dice dice{std::uint64_t(13 + d)};
        queries = numbers<float>(dice, MOST * HEADS * d, 2.0f);
        keys = numbers<T>(dice, MOST * d, 2.0f), values = numbers<T>(dice, MOST * d, 1.0f);
        for (Int b = 0; b < POOL; b++) table.push_back(std::int32_t((b * 5 + 2) % POOL));
        model.heads = HEADS, model.kv_heads = 1, model.head_dim = d;
    }

    // That of `count` tokens to `end` positions, of which they are the last, in a call that keeps so many tokens.
    std::vector<float> attended(Int count, Int end, Int kept, bool invariant) const {
        const bool paged = kind == PAGED;
        std::vector<T> own_keys(paged ? POOL * PAGE * d : end * d, nan()), own_values = own_keys;
        for (Int p = 0; p < end; p++) {
            const Int at = paged ? table[p / PAGE] * PAGE + p % PAGE : p;
            std::copy_n(&keys[p * d], d, &own_keys[at * d]), std::copy_n(&values[p * d], d, &own_values[at * d]);
        }
        LayerCache cache{};
        cache.keys = own_keys.data(), cache.values = own_values.data(), cache.table = paged ? table.data() : nullptr;
        const Int start = end - count;
        Batch batch{};
        batch.rows = 1, batch.width = count, batch.starts = &start, batch.lengths = &count, batch.kept = &kept;
        batch.kind = kind, batch.slots = paged ? POOL : end, batch.threads = 1, batch.invariant = invariant;
        std::vector<float> q(queries.begin() + start * HEADS * d, queries.begin() + end * HEADS * d);
        std::vector<char> workspace(1 << 21);
        Carver carver{workspace.data() + 64 - reinterpret_cast<std::uintptr_t>(workspace.data()) % 64};
        const Call call(model, batch, carver, false);
        const Stored<T> stored(call, carver);
        const Attention<T> attention(stored, q.data(), carver);
        require(carver.used + 64 <= Int(workspace.size()), "the workspace of attention");
        call.write_positions(), stored.write_begins();
        attention.attend(cache, 0, count, {0, 1, nullptr, nullptr}, attention.memory);
        return q;
    }

    // The largest difference from attention in float64, of queries in the dtype of the keys.
    double error(const std::vector<float>& found, Int count, Int end) const {
        double most = 0;
        for (Int i = 0; i < count * HEADS; i++) {
            const Int visible = end - count + i / HEADS + 1;
            std::vector<T> query(d);
            for (Int j = 0; j < d; j += LANES) narrow(widen(&queries[((end - count) * HEADS + i) * d + j]), &query[j]);
            std::vector<double> weights, sum(d);
            for (Int p = 0; p < visible; p++) {
                double score = 0;
                for (Int j = 0; j < d; j++) score += double(number(query[j])) * number(keys[p * d + j]);
                weights.push_back(score / std::sqrt(double(d)));
            }
            const double largest = *std::max_element(weights.begin(), weights.end());
            double total = 0;
            for (Int p = 0; p < visible; p++) {
                total += weights[p] = std::exp(weights[p] - largest);
                for (Int j = 0; j < d; j++) sum[j] += weights[p] * number(values[p * d + j]);
            }
            for (Int j = 0; j < d; j++) {
                const double off = std::abs(sum[j] / total - found[i * d + j]);
                most = off <= most ? most : off;
            }
        }
        return most;
    }

    static T nan() {
        if constexpr (std::is_same_v<T, float>) return NAN;
        else return {0x7fc0};
    }
    static float number(float x) { return x; }
    static float number(bfloat x) {
        const std::uint32_t bits = std::uint32_t(x.bits) << 16;
        return load<float>(&bits);
    }
};

// Attention by tiles is close to float64's and that of vectors, and has the same bits in calls of any lengths.
template <class T>
void attention_by_tiles(double bound) {
    for (const Kind kind : {STATIC, PAGED}) {
        const std::string name = std::string("attention by tiles, ") + name_of(T{}) + (kind == PAGED ? ", paged" : "");
        for (const Int count : {1, 2, 5, 10, 11, 16, 17, 31, 32, 33, 48, 65, 70}) {
            const Int end = count + count * 37 % 131;
            const AttendedText<T> text(kind, 32 + count % 3 * 32);
            const std::vector<float> found = text.attended(count, end, LONG_PROMPT, false);
            const std::vector<float> by_vectors = text.attended(count, end, count, true);
            require(text.error(by_vectors, count, end) <= bound, name + ", by vectors");
            require(text.error(found, count, end) <= bound, name + ", " + std::to_string(count));
            require(digest_of(found) != digest_of(by_vectors) || end == 1, name + ", not by tiles");
        }
        const AttendedText<T> text(kind, 32);
        const std::vector<float> whole = text.attended(100, 100, 100, false);
        for (Int cut = LONG_PROMPT; cut <= 100 - LONG_PROMPT; cut += 4) {
            std::vector<float> parts = text.attended(cut, cut, cut, false);
            const std::vector<float> rest = text.attended(100 - cut, 100, 100 - cut, false);
            parts.insert(parts.end(), rest.begin(), rest.end());
            require(digest_of(parts) == digest_of(whole), name + ", cut at " + std::to_string(cut));
        }
    }
}

#if !defined(KERNELS_ALONE)

// ---- a model -------------------------------------------------------------------------------------------------------

// A model of random weights with all parts of the families.
template <class T>
struct TinyModel {
    static constexpr Int DIM = 96, HEADS = 6, KV_HEADS = 2, HEAD_DIM = 32, HIDDEN = 160, VOCAB = 101, LAYERS = 2;
    static constexpr Int KV = KV_HEADS * HEAD_DIM;
    Dice dice{9};
    Int bits;
    std::vector<std::vector<T>> plain;
    std::vector<PackedMatrix> packed;
    std::vector<Layer> layers;
    Model model{};

    // If `mixed`, the embedding and the head stay plain.
    TinyModel(Int activations, Int bits, bool mixed) : bits(bits) {
        for (Int l = 0; l < LAYERS; l++)
            layers.push_back({norm(DIM), norm(DIM), vector(DIM * 2), vector(KV), vector(KV), norm(HEAD_DIM),
                              norm(HEAD_DIM), matrix(HEADS * HEAD_DIM, DIM), matrix(KV, DIM), matrix(KV, DIM),
                              matrix(DIM, HEADS * HEAD_DIM), matrix(HIDDEN, DIM), matrix(DIM, HIDDEN),
                              matrix(HIDDEN, DIM)});
        model.bfloat16 = std::is_same_v<T, bfloat>, model.activations = activations;
        model.dim = DIM, model.heads = HEADS, model.kv_heads = KV_HEADS, model.head_dim = HEAD_DIM;
        model.hidden = HIDDEN, model.layer_count = LAYERS, model.eps = 1e-5f;
        if (mixed) model.mixed = 1, this->bits = 0;
        model.embedding = matrix(VOCAB, DIM), model.output = matrix(VOCAB, DIM), model.norm = norm(DIM);
        model.layers = layers.data();
    }

    const T* vector(Int count, float most = 0.3f, float middle = 0) {
        plain.push_back(numbers<T>(dice, count, most, middle));
        return plain.back().data();
    }
    const T* norm(Int count) { return vector(count, 0.2f, 1.0f); }

    Matrix matrix(Int columns, Int length) {
        if (bits) {
            packed.emplace_back(dice, columns, length, bits, true, false);
            return packed.back().matrix;
        }
        Matrix made{};
        made.weight = vector(columns * length), made.columns = columns, made.length = length;
        return made;
    }
};

// The caches of three texts, and what is fed: prompts, and then a step.
template <class T>
struct Texts {
    using M = TinyModel<T>;
    static constexpr Int ROWS = 3, POSITIONS = 100, PAGES = (POSITIONS + PAGE - 1) / PAGE;
    static constexpr Int PAGES_OF_ALL = ROWS * PAGES, POOL = PAGES_OF_ALL + 1;
    const Kind kind;
    // The end of a chunk of keys; one token; a group of quantised positions more than a chunk.
    std::vector<Int> starts{0, 0, 0}, lengths{64, 1, 97}, bases{0, 0, 0}, runs, tokens;
    std::vector<std::int32_t> table;
    std::vector<std::vector<T>> plain;
    std::vector<Group> groups;
    std::vector<LayerCache> caches;
    std::vector<float> cos, sin;
    Groups how{};
    bool invariant = true;

    explicit Texts(Kind kind, bool before_rope = false) : kind(kind) {
        Dice dice{10};
        tokens = integers<Int>(dice, ROWS * POSITIONS, 0, M::VOCAB - 1);
        for (Int p = 0; p < POSITIONS; p++)
            for (Int i = 0; i < M::HEAD_DIM; i++) {  // a rotation without cos and sin of a library
                const float t = float(p % 31 + 1) / float(i / 2 + 4), size = 1 + t * t;
                cos.push_back((1 - t * t) / size), sin.push_back((i % 2 ? 2 : -2) * t / size);
            }
        if (kind == GROUPED) how = {3, 5, 32, 32, 2, 1, before_rope, before_rope};
        for (Int b = 0; b < PAGES_OF_ALL; b++) table.push_back(std::int32_t((b * 7 + 3) % POOL));
        const Int shares = M::KV_HEADS * ROWS;
        for (Int i = 0; i <= shares; i++) runs.push_back(i * (i + 40));  // of different lengths
        for (Int l = 0; l < M::LAYERS; l++) {
            LayerCache cache{};
            const Int stored = (kind == PAGED ? POOL * PAGE : ROWS * POSITIONS) * M::KV;  // no more than the last text fills
            cache.keys = buffer(dice, stored), cache.values = buffer(dice, stored);
            cache.kept_keys = buffer(dice, runs.back() * M::HEAD_DIM);
            cache.kept_values = buffer(dice, runs.back() * M::HEAD_DIM);
            cache.runs = runs.data();
            if (kind == QUEST) cache.lows = buffer(dice, PAGES_OF_ALL * M::KV), cache.highs = buffer(dice, PAGES_OF_ALL * M::KV);
            if (kind == PAGED) cache.table = table.data();
            if (kind == GROUPED) cache.key = group(how.key_bits), cache.value = group(how.value_bits);
            caches.push_back(cache);
        }
        if (kind == COMPRESSED) bases = starts = {70, 7, 97}, lengths = {1, 1, 1};
    }

    T* buffer(Dice& dice, Int count) {
        plain.push_back(numbers<T>(dice, count, 1.0f));
        return plain.back().data();
    }
    Quantized group(Int bits) {
        const Int places = ROWS * slots() * M::KV_HEADS;
        groups.emplace_back(bits, places * how.tokens, M::HEAD_DIM, places * how.tokens);
        return groups.back().quantized();
    }
    Int slots() const { return kind == GROUPED ? POSITIONS / how.tokens : kind == PAGED ? PAGES : POSITIONS; }

    // The logits of all rows' tokens, of which each row feeds `lengths` from `starts` on.
    template <class Product>
    std::vector<float> fed(const Model& model, Int threads) {
        Int width = 0;
        for (const Int length : lengths) width = std::max(width, length);
        std::vector<float> logits(ROWS * width * M::VOCAB, NAN);
        std::vector<Int> ids(ROWS * width);
        for (Int r = 0; r < ROWS; r++)
            for (Int i = 0; i < lengths[r]; i++) ids[r * width + i] = tokens[r * POSITIONS + starts[r] + i];
        Batch batch{};
        batch.rows = ROWS, batch.width = width, batch.tokens = ids.data();
        batch.starts = starts.data(), batch.lengths = batch.kept = lengths.data();
        batch.cos = cos.data(), batch.sin = sin.data(), batch.kind = kind, batch.slots = slots();
        batch.caches = kind == NONE ? nullptr : caches.data(), batch.groups = how, batch.pages = 3;
        batch.bases = kind == COMPRESSED ? bases.data() : nullptr;
        batch.logits = logits.data(), batch.threads = threads, batch.all = 0;
        batch.invariant = invariant;
        std::vector<char> workspace(forward_of<T, Product>(model, batch, -1) + 64, UNWRITTEN);
        const auto at = reinterpret_cast<std::uintptr_t>(workspace.data());
        batch.workspace = workspace.data() + (64 - at % 64) % 64;
        forward_of<T, Product>(model, batch, Int(workspace.size()));
        logits.resize(ROWS * M::VOCAB);
        return logits;
    }

    template <class Product>
    std::vector<float> prompt_and_steps(const Model& model, Int threads) {
        std::vector<float> all = fed<Product>(model, threads);
        for (const std::vector<Int>& next : {std::vector<Int>{3, 1, 2}, {1, 1, 1}}) {
            for (Int r = 0; r < ROWS; r++) starts[r] += lengths[r], lengths[r] = kind == COMPRESSED ? 1 : next[r];
            const std::vector<float> logits = fed<Product>(model, threads);
            all.insert(all.end(), logits.begin(), logits.end());
        }
        return all;
    }
};

// The logits of the last step.
std::vector<float> last_of(const std::vector<float>& all, Int count) { return {all.end() - count, all.end()}; }

// Attention depends on the kind of cache and the dtype, but not on the kind of products: all caches, or one.
template <class T, class Product>
void forwards(Int activations, Int bits, bool mixed, bool all_caches) {
    const TinyModel<T> tiny(activations, bits, mixed);
    std::string name = std::string("forward, ") + name_of(T{});
    if (bits) name += ", " + std::to_string(bits) + " bits, activations " + std::to_string(activations);
    auto run = [&](const std::string& cache, auto... kind) {
        const std::vector<float> logits = Texts<T>(kind...).template prompt_and_steps<Product>(tiny.model, 1);
        sums(name + cache, logits), require_numbers(logits, name + cache);
        require_start(logits, Texts<T>(kind...).template prompt_and_steps<Product>(tiny.model, 2), name + cache + ", 2 threads");
        return logits;
    };
    Texts<T> whole(NONE);
    whole.lengths = {68, 3, 100};
    const std::vector<float> at_once = whole.template fed<Product>(tiny.model, 1);
    sums(name + ", no cache", at_once);
    require_start(last_of(run(", static", STATIC), Int(at_once.size())), at_once, name + ", without a cache");
    if (!all_caches) return;
    require_start(last_of(run(", paged", PAGED), Int(at_once.size())), at_once, name + ", in pages");
    run(", groups", GROUPED), run(", groups before RoPE", GROUPED, true);
    run(", selected pages", QUEST), run(", compressed", COMPRESSED);
}

// Tiles compute the prompts of rows with at least LONG_PROMPT tokens: their bits are those of the row alone, and of any
// division of it into such parts; the other rows have the bits of an invariant call.
template <class T, class Product>
void long_prompts(Int activations, Int bits, float most_off, const std::vector<Kind>& kinds = {NONE, STATIC, PAGED}) {
    const TinyModel<T> tiny(activations, bits, false);
    constexpr Int VOCAB = TinyModel<T>::VOCAB;
    const std::string name = std::string("long prompts, ") + name_of(T{}) + ", activations " + std::to_string(activations);
    auto logits = [&](Kind kind, std::vector<std::vector<Int>> calls, Int threads, bool invariant = false) {
        Texts<T> texts(kind);
        texts.invariant = invariant;
        std::vector<float> all;
        for (const std::vector<Int>& lengths : calls) {
            texts.lengths = lengths;
            all = texts.template fed<Product>(tiny.model, threads);
            for (Int r = 0; r < 3; r++) texts.starts[r] += lengths[r];
        }
        return all;
    };
    auto same = [&](const std::vector<float>& x, const std::vector<float>& y, std::vector<Int> rows, const char* why) {
        for (const Int r : rows)
            for (Int i = r * VOCAB; i < (r + 1) * VOCAB; i++) require(x[i] == y[i], name + why);
    };
    for (const Kind kind : kinds) {
        const std::vector<float> all = logits(kind, {{70, 5, 90}}, 1), exact = logits(kind, {{70, 5, 90}}, 1, true);
        for (const Int threads : {2, 3, 20}) same(all, logits(kind, {{70, 5, 90}}, threads), {0, 1, 2}, ", threads");
        same(all, logits(kind, {{70, 31, 1}}, 2), {0}, ", beside short rows");
        same(logits(kind, {{33, 5, 1}}, 1), logits(kind, {{33, 3, 2}}, 20), {0}, ", few tokens");
        same(exact, all, {1}, ", a short row");
        if (kind != NONE) same(all, logits(kind, {{32, 1, 40}, {38, 4, 50}}, 2), {0, 1, 2}, ", in parts");
        if (kind != NONE)
            same(logits(kind, {{70, 5, 90}, {1, 1, 1}}, 1), logits(kind, {{70, 5, 90}, {1, 2, 9}}, 2), {0}, ", a step");
        float most = 0, off = 0;
        for (Int i = 0; i < Int(all.size()); i++)
            most = std::max(most, std::abs(exact[i])), off = std::max(off, std::abs(exact[i] - all[i]));
        require(off <= most_off * most && (off > 0 || !tiles_allowed()), name + ", near those of vectors");
    }
}

#endif

// ---- choosing ------------------------------------------------------------------------------------------------------

void choices() {
    constexpr Int ROWS = 40, VOCAB = 2999;
    Dice dice{11};
    std::vector<float> logits = numbers<float>(dice, ROWS * VOCAB, 6.0f);
    for (Int r = 0; r < ROWS; r++) logits[r * VOCAB + dice.between(0, VOCAB - 1)] += 3;
    logits[(ROWS - 1) * VOCAB + 5] = NAN;
    std::vector<double> draws(ROWS);
    for (double& draw : draws) draw = double(dice.word() >> 11) * 0x1p-53;
    const auto marks = integers<std::uint8_t>(dice, ROWS * VOCAB, 0, 99);
    std::vector<char> seen(ROWS * VOCAB);
    for (Int i = 0; i < ROWS * VOCAB; i++) seen[i] = marks[i] < 5;
    auto run = [&](const std::string& name, double temperature, double top_p, double min_p, Int top_k, double penalty) {
        std::vector<Int> ids[2];
        for (const Int threads : {1, 2}) {
            auto& made = ids[threads > 1];
            made.resize(ROWS);
            std::vector<Settings> settings(ROWS, {temperature, top_p, min_p, top_k, penalty, nullptr});
            for (Int r = 0; penalty != 1 && r < ROWS; r++) settings[r].seen = (const bool*)seen.data() + r * VOCAB;
            const Choice how{logits.data(), ROWS, VOCAB, settings.data(), draws.data(), made.data(), threads};
            choose_tokens(&how);
        }
        require(ids[0] == ids[1], name + ", 2 threads");
        exact(name, ids[0]);
    };
    run("choose the most likely", 0, 1, 0, 0, 1), run("choose of all", 1, 1, 0, 0, 1);
    run("choose with top_p", 0.7, 0.9, 0, 0, 1), run("choose with top_k", 1, 1, 0, 9, 1);
    run("choose with min_p", 1, 1, 0.02, 0, 1), run("choose with all of them", 0.8, 0.95, 0.01, 50, 1);
    run("choose with a penalty", 0, 1, 0, 0, 1.3), run("choose with a penalty and top_p", 0.7, 0.9, 0, 0, 1.3);
}

}  // namespace

int main() {
    std::printf("build\t%d\t%s\n", LANES, instructions());
#if !defined(FORWARDS_ALONE)
    conversions<bfloat>(), conversions<half>(), conversions<short_scale>(), whole_numbers(), functions();
    plain_products<float>(), plain_products<bfloat>(), products_in_parts();
    packed_products<8>(), packed_products<16>();
    by_tiles(), all_groups();
    if (TILES) attention_by_tiles<float>(1e-5), attention_by_tiles<bfloat>(3e-6);
#endif
#if !defined(KERNELS_ALONE)
    forwards<bfloat, Plain<bfloat>>(0, 0, false, !TILES), forwards<bfloat, Packed<16, bfloat>>(16, 5, true, false);
#if defined(AMX) || defined(EMULATE_TILES)
#if defined(__SANITIZE_ADDRESS__)  // where a forward by emulated tiles takes seconds
    long_prompts<float, Packed<16, float>>(16, 4, 1e-3f, {STATIC});
#else
    long_prompts<float, Packed<16, float>>(16, 4, 1e-3f), long_prompts<float, Packed<8, float>>(8, 4, 4e-2f);
    long_prompts<bfloat, Packed<16, bfloat>>(16, 4, 4e-2f);
#endif
#endif
#if !defined(EMULATE_TILES)
    forwards<float, Plain<float>>(0, 0, false, true);
    forwards<float, Packed<8, float>>(8, 4, false, false), forwards<float, Packed<16, float>>(16, 8, false, false);
#endif
#endif
    choices();
}
