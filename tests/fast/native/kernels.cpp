// Run every kernel of the native code on seeded numbers, and print a line for each; test_native_kernels.py compares them.
//
//     build  LANES  INSTRUCTIONS
//     exact  NAME  DIGEST               the same for every build
//     sums   NAME  DIGEST  MOST  X ...  the same for builds with vectors of one size; MOST is the largest magnitude, and
//                                       X ... are some of the numbers. Vectors of another size add in another order.
//     wrong  NAME                       two results of this build differ, and the program ends
//
// With -DKERNELS_ALONE, forwards are left out, and with -DFORWARDS_ALONE the kernels, for builds of which only some code
// differs.
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

constexpr Int ROWS[] = {1, 2, 3, 5, 17};
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
    std::vector<char> rounded(rows * size, UNWRITTEN);
    std::vector<char> room(kind.room_for(), UNWRITTEN);
    for (Int r = 0; r < rows; r++) kind.round(x.data() + r * matrix.length, matrix.length, rounded.data() + r * size);
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
    for (const auto& [bits, length] : {std::pair<Int, Int>{4, 2432}, {6, 3072}}) {  // in parts, of which the last is shorter
        const PackedMatrix packed(dice, 67, length, bits, bits == 4, bits == 6);
        products("packed " + std::to_string(bits) + activations + ", in parts", kind, packed.matrix, exact<float>);
    }
    const PackedMatrix packed(dice, 3, 32, 4, true, false);
    products("packed 4" + activations + ", 3 columns", kind, packed.matrix, exact<float>);
    std::vector<float> x = numbers<float>(dice, 2 * 32, 1.0f);
    x[3] = INFINITY;
    exact("packed 4" + activations + ", infinity", product(kind, packed.matrix, x, 2));
}

// In a model whose other matrices are packed, a plain matrix has the products that it has elsewhere.
template <class T>
void mixed_products() {
    Dice dice{21};
    const std::vector<T> weight = numbers<T>(dice, 35 * 96, 1.0f);
    Matrix matrix{};
    matrix.weight = weight.data(), matrix.columns = 35, matrix.length = 96;
    const std::vector<float> x = activations(dice, matrix.length, false), alone = product(Plain<T>{}, matrix, x, MOST_ROWS);
    require(product(Packed<16, T>{true}, matrix, x, MOST_ROWS) == alone, "a plain matrix of many");
}

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
        batch.starts = starts.data(), batch.lengths = lengths.data();
        batch.cos = cos.data(), batch.sin = sin.data(), batch.kind = kind, batch.slots = slots();
        batch.caches = kind == NONE ? nullptr : caches.data(), batch.groups = how, batch.pages = 3;
        batch.bases = kind == COMPRESSED ? bases.data() : nullptr;
        batch.logits = logits.data(), batch.threads = threads, batch.all = 0;
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
    plain_products<float>(), plain_products<bfloat>();
    packed_products<8>(), packed_products<16>();
    mixed_products<float>(), mixed_products<bfloat>(), all_groups();
#endif
#if !defined(KERNELS_ALONE)
    forwards<bfloat, Plain<bfloat>>(0, 0, false, true), forwards<bfloat, Packed<16, bfloat>>(16, 5, true, false);
    forwards<float, Plain<float>>(0, 0, false, true);
    forwards<float, Packed<8, float>>(8, 4, false, false), forwards<float, Packed<16, float>>(16, 8, false, false);
#endif
    choices();
}
