// The forward of a Llama on a CPU as one function of loops. model.py defines the results.
//
// Activations between two products, and their sums, are float32. A position is computed in the same order, whatever is
// computed beside it. Threads share the tokens if there are many, else the columns of every product. Nothing here
// allocates memory: a call returns the bytes that it needs.
//
// A library has one kind of numbers and of products, NUMBER and PRODUCT: all of them take a compiler most of a minute.

#include <vector>

#include "choose.h"
#include "groups.h"
#include "pages.h"
#include "products.h"

namespace {

struct Layer {
    const void *attention_norm, *ffn_norm;
    const void *q_bias, *k_bias, *v_bias, *q_norm, *k_norm;  // or null; a norm has the weights of one head
    Matrix wq, wk, wv, wo, w1, w2, w3;
};

struct LayerCache {  // the buffers of a text's cache in one layer; null if its kind does not use them
    void *keys, *values;         // (rows, slots, kv_heads, head_dim); those of GROUPED are in full precision
    Quantized key, value;        // (rows, slots, kv_heads, ...)
    const std::int32_t* table;   // (rows, slots) of PAGED: the blocks of keys and values, (blocks, PAGE, ...), of a row
    const void *kept_keys, *kept_values;  // (kept, head_dim) of COMPRESSED: a run for every row and kv head, in this order
    const Int* runs;                      // (rows * kv_heads + 1,): where each run begins, and the end of the last one
    void *lows, *highs;                   // (rows, pages, kv_heads, head_dim) of QUEST, see pages.h
};

constexpr LayerCache NO_CACHE{};

// The kinds of cache. Between two steps, the plain path may read and write the same buffers.
enum Kind : Int {
    NONE,        // nothing
    STATIC,      // a slot for every position
    GROUPED,     // groups of positions in few bits, see groups.h, and some positions in full precision
    PAGED,       // blocks of PAGE positions anywhere in a pool, and a table of each row's blocks
    COMPRESSED,  // some positions for every kv head, and a slot for every position behind them; a call feeds one per row
    QUEST,       // a slot for every position; a row of one token reads some pages of them
};

struct Model {
    Int bfloat16;  // 1: norms, cache and plain matrices are bfloat16; 0: float32
    Int activations;  // their bits in products with packed matrices, 8 or 16; 0: all matrices are plain
    Int mixed;        // 1: some matrices are plain and others are packed
    Int mapped;       // 1: some matrices are the blocks of a file
    Int dim, heads, kv_heads, head_dim, hidden, layer_count;
    float eps;
    Matrix embedding, output;
    const void* norm;
    const Layer* layers;
};

struct Batch {
    Int rows, width;
    const Int* tokens;            // (rows, width)
    const Int *starts, *lengths;  // (rows,)
    Int all;                 // 1: compute the logits of all positions, (rows, width, vocab); 0: (rows, vocab)
    const float *cos, *sin;  // (positions, head_dim), in the layout of rope.py
    Int kind, slots;         // of the cache; slots: its capacity in positions, groups or blocks
    const LayerCache* caches;  // of each layer; null if the kind is NONE
    Groups groups;    // of GROUPED
    const Int* bases;  // (rows,) of COMPRESSED: the position of the first slot; else null
    Int pages;         // of QUEST: how many each kv head reads
    const Int* kept;  // (rows,): the number of a row's tokens to store in the cache, at least one
    float* logits;
    const Choice* choice;  // how to choose from these logits, or null
    Int threads;
    char* workspace;
};

struct Carver {  // allocates from the workspace, or only counts
    char* base;
    Int used = 0;
    template <class T>
    T* take(Int count) {
        T* taken = (T*)(base + used);
        used += (count * Int(sizeof(T)) + 63) / 64 * 64;
        return taken;
    }
};

// Sizes of what is processed at a time, to fit into the inner CPU caches:
constexpr Int BLOCK = 48;    // tokens of a block of one thread
constexpr Int PAGE = 16;     // positions in a block of a paged cache, and in a page of QUEST
constexpr Int KEYS = 64;     // keys in a chunk of attention
constexpr Int QUERIES = 48;  // queries of one kv head, but at least those of one token
constexpr Int SCORED = 64;   // tokens whose logits are computed
constexpr Int SHARED = 64;   // tokens of a block that all threads compute, each with its own rounded copy

template <class T, class Product>
struct Forward {
    const Model& model;
    const Batch& batch;
    const Groups& groups;  // of a cache that is GROUPED
    const Product product_of;
    Int threads, tokens, scored;
    Int queries, kv, rep;  // the numbers of a token's queries, and of its keys; query heads per kv head
    float scale;           // of attention's scores
    bool together;         // all threads compute one block of all tokens and share columns; else each its own
    bool apart;            // so few tokens that their keys are shared out; else, of one block, rows are
    Int blocks, block_rows;
    bool chooses;          // some row of one token reads not all pages
    Int chunks;  // of keys, for the longest text
    Int most_pages;  // of the longest text that is fed one token, if rows choose
    // In the workspace:
    std::int32_t *row, *position;  // of every token
    Int* begin;                    // the first token of every row
    float *h, *q;                  // of every token
    // What attention reads unquantised, row after row: the rotated keys, and the values, of every token; with groups in
    // the cache, also of earlier positions in full precision, the sinks first.
    T *keys, *values;
    T* unturned;  // the same keys before RoPE, if the cache stores these
    Int* own;     // where each row begins in them
    float* turns;  // then also cos and sin of every group's positions, (groups, head_dim / 2, 2, tokens)
    float *k, *v, *gate, *up;  // of a block's tokens
    char *rounded, *attention;     // each thread's
    float* parts;                  // of every token, chunk and head, if threads share the keys
    float* bounds;                 // of every row, kv head and page, if rows choose
    std::int32_t* chosen;          // (rows, kv_heads, batch.pages): the pages that are read, in ascending order
    float* scaled_row;             // each thread's
    char* rooms;                   // each thread's
    Largest* found;                // each thread's, of every row, if tokens are chosen
    float* penalized_row;          // each thread's, with a penalty
    Int rounded_bytes, attention_bytes, room_bytes, workspace_size;

    Forward(const Model& m, const Batch& b) : model(m), batch(b), groups(b.groups), product_of{m.mixed != 0} {
        threads = std::max<Int>(1, batch.threads);
        tokens = 0;
        for (Int r = 0; r < batch.rows; r++) tokens += batch.lengths[r];
        scored = batch.all ? tokens : batch.rows;
        queries = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim,
        rep = model.heads / model.kv_heads;
        scale = 1.0f / std::sqrt(float(model.head_dim));
        together = threads > 1 && tokens < std::min(threads * 16, SHARED);
        blocks = together ? 1 : threads * ((tokens + threads * BLOCK - 1) / (threads * BLOCK));
        block_rows = together ? tokens : BLOCK;
        apart = together && tokens < 2 * threads;
        Int longest = 0, longest_step = 0;
        for (Int r = 0; r < batch.rows; r++) {
            longest = std::max(longest, batch.starts[r] + batch.lengths[r]);
            if (batch.lengths[r] == 1) longest_step = std::max(longest_step, batch.starts[r] + 1);
        }
        chooses = batch.kind == QUEST && longest_step > batch.pages * PAGE;
        most_pages = chooses ? (longest_step + PAGE - 1) / PAGE : 0;
        chunks = chunks_for(chooses && tokens == batch.rows ? batch.pages * PAGE : longest);
        chunks += batch.kind == COMPRESSED;  // the last chunk of a run may not be full
        Carver carver{batch.workspace};
        row = carver.take<std::int32_t>(tokens), position = carver.take<std::int32_t>(tokens);
        begin = carver.take<Int>(batch.rows + 1);
        scaled_row = carver.take<float>(threads * model.dim);
        h = carver.take<float>(tokens * model.dim);
        q = carver.take<float>(tokens * queries);
        const Int held = together ? block_rows : threads * block_rows;
        k = carver.take<float>(held * kv), v = carver.take<float>(held * kv);
        gate = carver.take<float>(held * widest()), up = carver.take<float>(held * widest());
        keys = values = unturned = nullptr, own = carver.take<Int>(batch.rows + 1);
        if (owns()) keys = carver.take<T>(owned() * kv), values = carver.take<T>(owned() * kv);
        turns = nullptr;
        if (grouped() && groups.before_rope)
            unturned = carver.take<T>(owned() * kv), turns = carver.take<float>(turned() * model.head_dim);
        rounded_bytes = whole_tiles(block_rows) * product_of.bytes(std::max(queries, widest()));
        rounded_bytes = std::max(rounded_bytes, whole_tiles(scored_rows()) * product_of.bytes(model.dim));
        rounded = carver.take<char>(threads * rounded_bytes);
        const Int floats_of_query = KEYS + part_size() + model.head_dim + 2;
        attention_bytes = most_queries() * (model.head_dim * sizeof(T) + floats_of_query * sizeof(float));
        const Int of_keys = model.head_dim * AT_ONCE;
        if (grouped())
            attention_bytes += (most_queries() * model.head_dim + of_group() + of_keys) * sizeof(float) + codes_of_group();
        else attention_bytes += model.heads * LANES * LANES * sizeof(float);
        if (chooses)
            attention_bytes += 2 * rep * (model.head_dim * sizeof(T) + PAGES * sizeof(float)) + most_pages * sizeof(float);
        attention_bytes = (attention_bytes + 10 * 64) / 64 * 64;
        attention = carver.take<char>(threads * attention_bytes);
        room_bytes = product_of.room_for(std::max(queries, widest()), model.mapped);
        rooms = carver.take<char>(threads * room_bytes);
        parts = apart ? carver.take<float>(tokens * chunks * model.heads * part_size()) : nullptr;
        bounds = carver.take<float>(batch.rows * model.kv_heads * most_pages);
        chosen = carver.take<std::int32_t>(chooses ? batch.rows * model.kv_heads * batch.pages : 0);
        found = batch.choice ? carver.take<Largest>(threads * batch.rows) : nullptr;
        penalized_row = carver.take<float>(threads * penalized(batch.choice));
        workspace_size = carver.used;
    }

    bool grouped() const { return batch.kind == GROUPED; }
    bool owns() const { return batch.kind == NONE || grouped(); }
    // The first position behind the sinks that attention reads unquantised, and the number of such positions, and of
    // sinks, of all rows.
    Int first_own(Int row) const { return grouped() ? groups.quantized(batch.starts[row]) : 0; }
    Int sinks() const { return grouped() ? groups.sinks : 0; }
    Int owned() const {
        Int count = tokens + sinks() * batch.rows;
        for (Int r = 0; r < batch.rows; r++) count += batch.starts[r] - first_own(r);
        return count;
    }

    Int turned() const {  // positions
        Int longest = 0;
        for (Int r = 0; r < batch.rows; r++) longest = std::max(longest, first_own(r));
        return longest;
    }
    // The numbers of scratch memory for reading a group, and its codes.
    Int of_group() const { return TOGETHER * std::max(model.head_dim, groups.tokens); }
    Int codes_of_group() const { return model.head_dim * groups.tokens; }

    static Int whole_tiles(Int rows) { return (rows + TILE - 1) / TILE * TILE; }
    Int widest() const { return std::max(model.dim, model.hidden); }
    Int most_queries() const { return std::max(QUERIES, model.heads); }
    Int scored_rows() const { return std::min(scored, SCORED); }

    void run() {
        Int t = 0, held = 0;
        for (Int r = 0; r < batch.rows; r++) {
            begin[r] = t, own[r] = held;
            held += sinks() + batch.starts[r] + batch.lengths[r] - first_own(r);
            for (Int i = 0; i < batch.lengths[r]; i++, t++) row[t] = r, position[t] = batch.starts[r] + i;
        }
        begin[batch.rows] = t;
        in_team(threads, [&](Team& all) {
            all.room = rooms + all.rank * room_bytes;
            work(all);
        });
    }

    void work(const Team& all) {
        const Team alone{0, 1, nullptr, all.room}, &team = together ? all : alone;
        char* own = rounded + (rows_shared() ? 0 : all.rank * rounded_bytes);
        float* scaled = scaled_row + all.rank * model.dim;
        const Int slot = together ? 0 : all.rank * block_rows;
        auto each_block = [&](auto act) {
            const Int step = together ? 1 : all.size;
            for (Int b = together ? 0 : all.rank; b < blocks; b += step) {
                const Int first = bound(b), end = bound(b + 1);
                if (first < end) act(first, end - first);
            }
        };
        each_block([&](Int first, Int count) {
            for (Int t = team.rank; t < count; t += team.size)
                product_of.row_of(model.embedding, token(first + t), h + (first + t) * model.dim, team.room);
        });
        if (turns) group_turns(all);
        all.wait();
        for (Int l = 0; l < model.layer_count; l++) {
            const Layer& layer = model.layers[l];
            const LayerCache& cache = batch.caches ? batch.caches[l] : NO_CACHE;
            each_block([&](Int first, Int count) {
                normed(h + first * model.dim, count, team, (const T*)layer.attention_norm, scaled, own);
                product(layer.wq, own, count, team, q + first * queries);
                product(layer.wk, own, count, team, k + slot * kv);
                product(layer.wv, own, count, team, v + slot * kv);
                team.wait();
                for (Int t = team.rank; t < count; t += team.size)
                    place(layer, cache, first + t, k + (slot + t) * kv, v + (slot + t) * kv);
            });
            if (grouped()) recall(cache, all);
            all.wait();
            if (grouped()) keep(cache, all, attention + all.rank * attention_bytes);
            if (batch.kind == QUEST) bound_pages(cache, all);
            each_block([&](Int first, Int count) {
                attend(cache, first, count, team, attention + all.rank * attention_bytes);
                team.wait();
                rows_rounded(q + first * queries, count, team, queries, own);
                added(layer.wo, own, count, team, h + first * model.dim, gate + slot * widest());
                team.wait();
                normed(h + first * model.dim, count, team, (const T*)layer.ffn_norm, scaled, own);
                gated(layer, own, count, team, gate + slot * widest(), up + slot * widest());
                team.wait();
                rows_rounded(gate + slot * widest(), count, team, model.hidden, own);
                added(layer.w2, own, count, team, h + first * model.dim, up + slot * widest());
                team.wait();
            });
            if (owns()) all.wait();  // before the next layer's keys overwrite these
        }
        all.wait();
        head(all, scaled, own);
        if (batch.choice) choose(*batch.choice, all, found, penalized_row);
    }

    Int bound(Int block) const {
        const Int units = (tokens + TOGETHER - 1) / TOGETHER;
        return std::min(tokens, units * block / blocks * TOGETHER);
    }

    Int token(Int t) const { return batch.tokens[row[t] * batch.width + position[t] - batch.starts[row[t]]]; }

    // With few rows, every thread has its own rounded copy; with more, threads share the work and one copy.
    bool rows_shared() const { return together && !apart; }

    template <class Act>
    void each_row(Int count, const Team& team, Act act) const {
        const Int first = rows_shared() ? team.rank : 0, step = rows_shared() ? team.size : 1;
        for (Int r = first; r < count; r += step) act(r);
        if (rows_shared()) team.wait();
    }

    // Call act for each row, which writes it to `to`, and arrange the rows as the products read them.
    template <class Act>
    void write_rows(Int count, const Team& team, Int length, char* to, Act act) const {
        const Int size = product_of.bytes(length);
        each_row(count, team, [&](Int r) { act(r, to + r * size); });
        if (!product_of.arranges()) return;
        each_row(whole_tiles(count) / TILE, team, [&](Int i) { product_of.arrange(to + i * TILE * size, size, length); });
    }

    void rows_rounded(const float* x, Int count, const Team& team, Int length, char* to) const {
        write_rows(count, team, length, to, [&](Int r, char* row) { product_of.round(x + r * length, length, row); });
    }

    void normed(const float* x, Int count, const Team& team, const T* weight, float* scaled, char* to) const {
        write_rows(count, team, model.dim, to,
                   [&](Int r, char* row) { norm_of(x + r * model.dim, weight, scaled, row); });
    }

    void norm_of(const float* x, const T* weight, float* scaled, char* to) const {
        norm(x, model.dim, weight, scaled);
        product_of.round(scaled, model.dim, to);
    }

    void norm(const float* x, Int length, const T* weight, float* to) const {
        floats squares = {};
        for (Int i = 0; i < length; i += LANES) squares = multiply_add(squares, widen(x + i), widen(x + i));
        const float factor = 1.0f / std::sqrt(sum_of(squares) / float(length) + model.eps);
        for (Int i = 0; i < length; i += LANES) store(to + i, widen(x + i) * factor * widen(weight + i));
    }

    // Add the bias to a token's heads and norm each head, if the model has them.
    void complete(float* x, Int heads, const void* bias, const void* weight) const {
        const Int d = model.head_dim;
        for (Int i = 0; bias && i < heads * d; i += LANES) store(x + i, widen(x + i) + widen((const T*)bias + i));
        for (Int head = 0; weight && head < heads; head++) norm(x + head * d, d, (const T*)weight, x + head * d);
    }

    // The team's share of a product.
    void product(const Matrix& matrix, const char* x, Int count, const Team& team, float* to) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            product_of.multiply(matrix, x, count, first, end, to, matrix.columns, team.room);
        });
    }

    // The same, added to `to`; the product is written to `scratch`.
    void added(const Matrix& matrix, const char* x, Int count, const Team& team, float* to, float* scratch) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            product_of.multiply(matrix, x, count, first, end, scratch, matrix.columns, team.room);
            for (Int r = 0; r < count; r++)
                for (Int c = first; c < end; c++) to[r * matrix.columns + c] += scratch[r * matrix.columns + c];
        });
    }

    // Write the MLP's hidden numbers, silu(w1 x) * w3 x, to `g`, and w3 x to `u`.
    void gated(const Layer& layer, const char* x, Int count, const Team& team, float* g, float* u) const {
        team.share(model.hidden, [&](Int first, Int end) {
            product_of.multiply(layer.w1, x, count, first, end, g, model.hidden, team.room);
            product_of.multiply(layer.w3, x, count, first, end, u, model.hidden, team.room);
            for (Int r = 0; r < count; r++)
                for (Int i = r * model.hidden + first; i < r * model.hidden + end; i += LANES) {
                    const floats number = widen(g + i);
                    store(g + i, number / (1.0f + exp_of(-number)) * widen(u + i));
                }
        });
    }

    // The address of a position's keys or values: in the layer's cache, or unquantised in `own_side`.
    T* place_of(const std::int32_t* table, void* cache, T* own_side, Int row, Int position) const {
        if (owns()) return own_side + place_of_own(row, position);
        if (batch.bases) position -= batch.bases[row];
        if (table) position = table[row * batch.slots + position / PAGE] * PAGE + position % PAGE;
        else position += row * batch.slots;
        return (T*)cache + position * kv;
    }
    Int place_of_own(Int row, Int position) const { return (own[row] + sinks() + position - first_own(row)) * kv; }
    Int place_of_sink(Int row, Int position) const { return (own[row] + position) * kv; }
    // The place of a slot of the keys or values that the cache stores in full precision: of a sink, or of the window.
    Int place_of_slot(Int row, Int slot) const {
        return (row * (groups.sinks + groups.window + groups.tokens) + slot) * kv;
    }
    Int place_in_window(Int row, Int position) const {
        return place_of_slot(row, groups.sinks + position % (groups.window + groups.tokens));
    }

    // Rotate pairs of neighbours by the token's position.
    void turn(float* x, Int count, Int position) const {
        const float *cos = batch.cos + position * model.head_dim, *sin = batch.sin + position * model.head_dim;
        for (Int head = 0; head < count; head++, x += model.head_dim)
            for (Int i = 0; i < model.head_dim; i += 2) {
                const float a = x[i], b = x[i + 1];
                x[i] = a * cos[i] + b * sin[i];
                x[i + 1] = b * cos[i + 1] + a * sin[i + 1];
            }
    }

    // The same for numbers of the cache's dtype, rounded to it again.
    void turn_rounded(const T* x, T* to, Int count, Int position) const {
        for (Int i = 0; i < count; i += LANES) {
            const Int at = position * model.head_dim + i % model.head_dim;
            const floats number = widen(x + i);
            narrow(number * widen(batch.cos + at) + neighbours(number) * widen(batch.sin + at), to + i);
        }
    }

    // Write cos and sin of every group's positions in the order in which its keys are read.
    void group_turns(const Team& all) const {
        const Int d = model.head_dim, size = groups.tokens, count = turned() / size;
        for (Int g = count * all.rank / all.size; g < count * (all.rank + 1) / all.size; g++)
            for (Int c = 0; c < d; c += 2)
                for (Int token = 0; token < size; token++) {
                    const Int at = (g * size + token) * d + c;
                    float* to = turns + (g * d + c) * size + token;
                    to[0] = batch.cos[at], to[size] = batch.sin[at + 1];  // the first of two has -sin
                }
    }

    // Rotate a token's queries and keys by its position, and store its keys and values.
    void place(const Layer& layer, const LayerCache& cache, Int t, float* k, float* v) const {
        complete(q + t * queries, model.heads, layer.q_bias, layer.q_norm);
        complete(k, model.kv_heads, layer.k_bias, layer.k_norm);
        complete(v, model.kv_heads, layer.v_bias, nullptr);
        turn(q + t * queries, model.heads, position[t]);
        if (unturned) {  // stored keys are rounded before the rotation
            T* to = unturned + place_of_own(row[t], position[t]);
            for (Int i = 0; i < kv; i += LANES) narrow(widen(k + i), to + i), store(k + i, widen(to + i));
        }
        turn(k, model.kv_heads, position[t]);
        T *to_keys = place_of(cache.table, cache.keys, keys, row[t], position[t]),
          *to_values = place_of(cache.table, cache.values, values, row[t], position[t]);
        for (Int i = 0; i < kv; i += LANES) narrow(widen(k + i), to_keys + i), narrow(widen(v + i), to_values + i);
    }

    // Copy the positions in full precision from the cache to where attention reads unquantised positions.
    void recall(const LayerCache& cache, const Team& all) const {
        auto copy = [&](Int position, Int from, Int to) {
            std::memcpy(values + to, (const T*)cache.values + from, kv * sizeof(T));
            std::memcpy((unturned ? unturned : keys) + to, (const T*)cache.keys + from, kv * sizeof(T));
            if (unturned) turn_rounded(unturned + to, keys + to, kv, position);
        };
        for (Int r = 0; r < batch.rows; r++) {
            for (Int p = all.rank; first_own(r) && p < sinks(); p += all.size)
                copy(p, place_of_slot(r, p), place_of_sink(r, p));
            for (Int p = first_own(r) + all.rank; p < batch.starts[r]; p += all.size)
                copy(p, place_in_window(r, p), place_of_own(r, p));
        }
    }

    // Quantise the groups that this call pushed out of the window, and store what is in it, and new sinks.
    void keep(const LayerCache& cache, const Team& all, char* scratch) const {
        const T* ks = unturned ? unturned : keys;
        Int task = 0;
        for (Int r = 0; r < batch.rows; r++) {
            const Int start = batch.starts[r], end = start + batch.kept[r];
            for (Int group = first_own(r) / groups.tokens; group < groups.quantized(end) / groups.tokens; group++)
                for (Int head = 0; head < model.kv_heads; head++)
                    if (task++ % all.size == all.rank) keep_group(cache, ks, r, group, head, scratch);
            auto copy = [&](Int p, Int to) {
                if (task++ % all.size != all.rank) return;
                std::memcpy((T*)cache.keys + to, ks + place_of_own(r, p), kv * sizeof(T));
                std::memcpy((T*)cache.values + to, values + place_of_own(r, p), kv * sizeof(T));
            };
            // From `end` - 1 on, because the tokens of a full group may be fed again.
            for (Int p = std::max(groups.quantized(end - 1), start); p < end; p++) copy(p, place_in_window(r, p));
            for (Int p = start; p < std::min(sinks(), end); p++) copy(p, place_of_slot(r, p));
        }
    }

    void keep_group(const LayerCache& cache, const T* ks, Int row, Int group, Int head, char* scratch) const {
        const Int d = model.head_dim, from = place_of_own(row, group * groups.tokens) + head * d;
        const Int skipped = group ? 0 : groups.sinks;
        make_keys(ks + from, kv, d, groups, skipped, key_group(cache, row, group, head));
        make_values(values + from, kv, d, groups, skipped, (float*)scratch, value_group(cache, row, group, head));
    }

    Quantized key_group(const LayerCache& cache, Int row, Int group, Int head) const {
        return cache.key.at(place_of_group(row, group, head), codes_of_group() * groups.key_bits / 8, model.head_dim);
    }
    Quantized value_group(const LayerCache& cache, Int row, Int group, Int head) const {
        const Int bytes = codes_of_group() * groups.value_bits / 8;
        return cache.value.at(place_of_group(row, group, head), bytes, groups.tokens * groups.parts);
    }
    Int place_of_group(Int row, Int group, Int head) const {
        return (row * batch.slots + group) * model.kv_heads + head;
    }

    // Attention for a block's tokens; the output overwrites the queries.
    void attend(const LayerCache& cache, Int first, Int count, const Team& team, char* scratch) const {
        if (chooses) choose_pages(cache, first, count, team, scratch);
        for (Int t = first, end; t < first + count; t = end) {
            for (end = t + 1; end < first + count && by_head(end) == by_head(t);) end++;
            if (by_head(t)) attend_by_head(cache, t, end - t, team, scratch);
            else if (apart) attend_apart(cache, t, end - t, team, scratch);
            else attend_by_row(cache, t, end - t, team, scratch);
        }
    }

    // Whether each kv head of a token reads other positions.
    bool by_head(Int t) const { return batch.kind == COMPRESSED || (chooses && batch.lengths[row[t]] == 1); }

    // Threads share the rows of a block, or the kv heads of each.
    void attend_by_row(const LayerCache& cache, Int first, Int count, const Team& team, char* scratch) const {
        Int task = 0;
        for (Int t = first; t < first + count;) {
            Int end = t;  // the end of the tokens of one row that read its keys together
            while (end < first + count && row[end] == row[t] && (end == t || (end - t + 1) * rep <= QUERIES)) end++;
            // All heads of a token read its keys at once.
            const Int heads = end - t > 1 ? rep : model.heads;
            for (Int head = 0; head < model.heads; head += heads)
                if (task++ % team.size == team.rank) look(cache, t, end - t, head, heads, scratch);
            t = end;
        }
    }

    // The same for too few tokens to share: threads share the chunks of their keys, each a contiguous range, which is
    // faster than alternating chunks, and then the heads.
    void attend_apart(const LayerCache& cache, Int first, Int count, const Team& team, char* scratch) const {
        const Int d = model.head_dim;
        Look it(*this, scratch);
        Int tasks = 0;
        for (Int t = first; t < first + count; t++) tasks += position[t] / KEYS + 1;
        // A task has all heads of a chunk, because reading a position's keys at once is fastest. It has the heads of one kv
        // head if the cache stores these separately, or if there are fewer chunks than threads.
        const Int heads = grouped() || tasks < team.size ? rep : model.heads;
        tasks *= model.heads / heads;
        const Int begin = tasks * team.rank / team.size, end = tasks * (team.rank + 1) / team.size;
        Int task = 0;
        for (Int t = first; t < first + count; t++)
            for (Int from = 0; from <= position[t]; from += KEYS)
                for (Int head = 0; head < model.heads; head += heads, task++) {
                    if (task < begin || task >= end) continue;
                    begin_look(it, t, 1, head, heads);
                    look_at(it, cache, t, 1, head, heads, from, parts + place_of_part(t, head, from));
                }
        team.wait();
        for (Int i = team.rank; i < count * model.heads; i += team.size) {
            const Int t = first + i / model.heads, head = i % model.heads;
            begin_sums(it, 0);
            for (Int from = 0; from <= position[t]; from += KEYS) {
                if (from && from == first_own(row[t])) end_groups(it, 0);
                merge(it, 0, parts + place_of_part(t, head, from));
            }
            finish(it, 0, q + t * queries + head * d);
        }
    }

    // Attention of tokens of different rows, of which each kv head reads other positions. Threads share the chunks of all
    // keys: each has a contiguous range, except of many rows, of which each has whole kv heads.
    void attend_by_head(const LayerCache& cache, Int first, Int count, const Team& team, char* scratch) const {
        Look it(*this, scratch);
        Int tasks = 0, task = 0;
        auto each = [&](auto act) {  // the first head and the number of chunks of every token and kv head
            for (Int t = first; t < first + count; t++)
                for (Int head = 0; head < model.heads; head += rep) act(t, head, chunks_of(cache, t, head));
        };
        if (!apart)
            return each([&](Int t, Int head, Int chunks) {
                if (task++ % team.size != team.rank) return;
                begin_look(it, t, 1, head, rep);
                for (Int i = 0; i < rep; i++) begin_sums(it, i);
                for (Int chunk = 0; chunk < chunks; chunk++) {
                    look_at_chunk(it, cache, t, head, chunk, it.parts);
                    for (Int i = 0; i < rep; i++) merge(it, i, it.parts + i * part_size());
                }
                for (Int i = 0; i < rep; i++) finish(it, i, q + t * queries + (head + i) * model.head_dim);
            });
        each([&](Int, Int, Int chunks) { tasks += chunks; });
        const Int begin = tasks * team.rank / team.size, end = tasks * (team.rank + 1) / team.size;
        each([&](Int t, Int head, Int chunks) {
            for (Int chunk = 0; chunk < chunks; chunk++, task++) {
                if (task < begin || task >= end) continue;
                begin_look(it, t, 1, head, rep);
                look_at_chunk(it, cache, t, head, chunk, parts + place_of_part(t, head, chunk * KEYS));
            }
        });
        team.wait();
        for (Int i = team.rank; i < count * model.heads; i += team.size) {
            const Int t = first + i / model.heads, head = i % model.heads;
            begin_sums(it, 0);
            for (Int chunk = 0; chunk < chunks_of(cache, t, head); chunk++)
                merge(it, 0, parts + place_of_part(t, head, chunk * KEYS));
            finish(it, 0, q + t * queries + head * model.head_dim);
        }
    }

    // The run of a token's kv head: its first key, and its length.
    Int run_begin(const LayerCache& cache, Int t, Int head) const {
        return cache.runs[row[t] * model.kv_heads + head / rep];
    }
    Int run_length(const LayerCache& cache, Int t, Int head) const {
        return run_begin(cache, t, head + rep) - run_begin(cache, t, head);
    }
    static Int chunks_for(Int keys) { return (keys + KEYS - 1) / KEYS; }
    Int chunks_of(const LayerCache& cache, Int t, Int head) const {
        if (chooses) return chunks_for(chosen_keys(t));
        return chunks_for(run_length(cache, t, head)) + chunks_for(position[t] + 1 - batch.bases[row[t]]);
    }

    // Compute the bounds of the pages that this call writes to.
    void bound_pages(const LayerCache& cache, const Team& all) const {
        Int task = 0;
        for (Int r = 0; r < batch.rows; r++) {
            const Int start = batch.starts[r], end = start + batch.kept[r];
            for (Int from = start / PAGE * PAGE; from < end; from += PAGE) {
                if (task++ % all.size != all.rank) continue;
                const Int place = place_of_page(r, from / PAGE);
                const T* ks = place_of(nullptr, cache.keys, keys, r, from);
                write_extremes(ks, std::min(PAGE, end - from), kv, (T*)cache.lows + place, (T*)cache.highs + place);
            }
        }
    }

    // Choose the pages that each kv head of a token reads: those with the largest bounds, and the newest.
    void choose_pages(const LayerCache& cache, Int first, Int count, const Team& team, char* scratch) const {
        const Int d = model.head_dim;
        Look it(*this, scratch);
        for (Int t = first; t < first + count; t++) {
            if (!by_head(t)) continue;
            const Int older = position[t] / PAGE, begin = older * team.rank / team.size;
            const Int pages = older * (team.rank + 1) / team.size - begin;
            for (Int head = 0; head < model.heads; head += rep) {
                const Int at = place_of_page(row[t], begin) + head / rep * d;
                begin_look(it, t, 1, head, rep);
                split_by_sign(it.queries, rep * d, it.split);
                bound_scores<T>(it.split, rep, d, {(const T*)cache.lows + at, (const T*)cache.highs + at, kv}, pages,
                                it.bounds, bounds + place_of_choice(t, head) * most_pages + begin);
            }
        }
        team.wait();
        for (Int i = team.rank; i < count * model.kv_heads; i += team.size) {
            const Int t = first + i / model.kv_heads, place = place_of_choice(t, i % model.kv_heads * rep);
            if (!by_head(t)) continue;
            std::int32_t* to = chosen + place * batch.pages;
            const Int older = position[t] / PAGE, others = chosen_pages(t) - 1;
            write_places_of_largest(bounds + place * most_pages, older, others, it.sorted, to);
            to[others] = std::int32_t(older);
        }
        team.wait();
    }

    Int place_of_page(Int row, Int page) const { return (row * ((batch.slots + PAGE - 1) / PAGE) + page) * kv; }
    Int place_of_choice(Int t, Int head) const { return row[t] * model.kv_heads + head / rep; }
    Int chosen_pages(Int t) const { return std::min(batch.pages, position[t] / PAGE + 1); }
    Int chosen_keys(Int t) const { return (chosen_pages(t) - 1) * PAGE + position[t] % PAGE + 1; }

    // Attention of tokens t .. t + count - 1, of one row, to their past, for `heads` heads of whole kv heads.
    void look(const LayerCache& cache, Int t, Int count, Int head, Int heads, char* scratch) const {
        Look it(*this, scratch);
        begin_look(it, t, count, head, heads);
        for (Int i = 0; i < heads * count; i++) begin_sums(it, i);
        for (Int from = 0; from <= position[t + count - 1]; from += KEYS) {
            look_at(it, cache, t, count, head, heads, from, it.parts);
            for (Int i = 0; i < heads * count; i++) {
                if (from && from == first_own(row[t])) end_groups(it, i);
                if (from <= position[t + i % count]) merge(it, i, it.parts + i * part_size());
            }
        }
        for (Int i = 0; i < heads * count; i++)
            finish(it, i, q + (t + i % count) * queries + (head + i / count) * model.head_dim);
    }

    // The memory of attention for at most so many queries. A part is a query's result for a chunk of keys: the largest
    // score, the sum of the weights relative to it, and the weighted values.
    struct Look {
        T* queries;
        float *scores, *parts, *sums, *most, *total;
        float *wide, *own, *keys;  // with groups in the cache: the queries in float32, and memory to read a group
        std::uint8_t* codes;
        float* sums_of_keys;  // else: of LANES keys and all queries
        T* split;             // if rows choose pages: the queries of a kv head by sign, and memory for their bounds
        float *bounds, *sorted;

        Look(const Forward& f, char* scratch) {
            Carver carver{scratch};
            const Int n = f.most_queries(), d = f.model.head_dim;
            queries = carver.take<T>(n * d), scores = carver.take<float>(n * KEYS);
            parts = carver.take<float>(n * f.part_size()), sums = carver.take<float>(n * d);
            most = carver.take<float>(n), total = carver.take<float>(n);
            wide = own = keys = sums_of_keys = bounds = sorted = nullptr, codes = nullptr, split = nullptr;
            if (!f.grouped()) sums_of_keys = carver.take<float>(f.model.heads * LANES * LANES);
            if (f.chooses) {
                split = carver.take<T>(2 * f.rep * d), bounds = carver.take<float>(2 * f.rep * PAGES);
                sorted = carver.take<float>(f.most_pages);
            }
            if (!f.grouped()) return;
            wide = carver.take<float>(n * d), own = carver.take<float>(f.of_group());
            keys = carver.take<float>(d * AT_ONCE), codes = carver.take<std::uint8_t>(f.codes_of_group());
        }
    };

    // Keys and values of up to KEYS positions and one kv head, in runs of `run` positions, `stride` apart.
    struct Chunk {
        const T *keys[KEYS / PAGE], *values[KEYS / PAGE];
        Int stride, run;
    };

    Int part_size() const { return model.head_dim + LANES; }
    Int place_of_part(Int t, Int head, Int from) const {
        return ((t * chunks + from / KEYS) * model.heads + head) * part_size();
    }

    void begin_look(Look& it, Int t, Int count, Int head, Int heads) const {  // head by head
        const Int d = model.head_dim;
        for (Int i = 0; i < heads * count; i++) {
            const float* from = q + (t + i % count) * queries + (head + i / count) * d;
            for (Int j = 0; j < d; j += LANES) narrow(widen(from + j), it.queries + i * d + j);
            for (Int j = 0; grouped() && j < d; j += LANES) store(it.wide + i * d + j, widen(it.queries + i * d + j));
        }
    }

    void begin_sums(Look& it, Int i) const {
        std::fill_n(it.sums + i * model.head_dim, model.head_dim, 0.0f);
        it.most[i] = -INFINITY, it.total[i] = 0;
    }

    // Attention to the chunk of keys that begins at `from`; the parts of all queries are written to `to` in order.
    void look_at(Look& it, const LayerCache& cache, Int t, Int count, Int head, Int heads, Int from, float* to) const {
        const Int d = model.head_dim, group = std::min(rep, heads) * count, size = part_size();
        const Int seen = std::min(KEYS, position[t + count - 1] + 1 - from);
        const Int quantized = grouped() ? std::clamp<Int>(first_own(row[t]) - from, 0, seen) : 0;
        const bool at_once = heads == model.heads && count == 1 && !grouped();
        if (at_once) score_all(it, cache, row[t], from, seen);
        for (Int i = 0; i < heads * count; i += group) {
            const Int at = (head + i / count) / rep * d;
            const Chunk chunk = chunk_at(cache, row[t], from + quantized, from + seen, at);
            for (Int key = 0; key < quantized; key += groups.tokens)
                score(it, cache, row[t], from + key, at / d, group, it.wide + i * d, it.scores + i * KEYS + key);
            const Int sinks_here = from == 0 && quantized ? sinks() : 0;
            if (sinks_here)
                all_dots(it.queries + i * d, d, group, keys + place_of_sink(row[t], 0) + at, kv, sinks_here, d,
                         it.scores + i * KEYS, KEYS);
            for (Int key = quantized; key < seen && !at_once; key += chunk.run)
                all_dots(it.queries + i * d, d, group, chunk.keys[(key - quantized) / chunk.run], chunk.stride,
                         std::min(chunk.run, seen - key), d, it.scores + i * KEYS + key, KEYS);
            for (Int j = i; j < i + group; j++)
                weigh(it.scores + j * KEYS, std::min(seen, position[t + j % count] + 1 - from), to + j * size);
            by_rows(group, [&](auto rows, Int j) {
                sums<decltype(rows)::value>(it.scores + (i + j) * KEYS + quantized, chunk, seen - quantized,
                                            to + (i + j) * size + LANES, size);
            });
            for (Int j = i; sinks_here && j < i + group; j++)
                add_sinks(it, row[t], at, it.scores + j * KEYS, to + j * size + LANES);
            for (Int key = 0; key < quantized; key += groups.tokens)
                add(it, cache, row[t], from + key, at / d, group, it.scores + i * KEYS + key, to + i * size + LANES);
        }
    }

    // Attention of a token's heads that share a kv head to a chunk of what it reads: of the chosen pages, or of its run
    // and, after these chunks, of the slots behind it.
    void look_at_chunk(Look& it, const LayerCache& cache, Int t, Int head, Int number, float* to) const {
        if (chooses) {
            const Int seen = std::min(KEYS, chosen_keys(t) - number * KEYS);
            return look_at_keys(it, chunk_of_pages(cache, t, head, number * KEYS / PAGE), seen, nullptr, to);
        }
        const Int d = model.head_dim, length = run_length(cache, t, head);
        const Int kept = chunks_for(length), behind = batch.bases[row[t]] + (number - kept) * KEYS;
        const Int seen = std::min(KEYS, number < kept ? length - number * KEYS : position[t] + 1 - behind);
        if (number >= kept)
            return look_at_keys(it, chunk_at(cache, row[t], behind, behind + seen, head / rep * d), seen, nullptr, to);
        const Int from = (run_begin(cache, t, head) + number * KEYS) * d;
        const Chunk chunk{{(const T*)cache.kept_keys + from}, {(const T*)cache.kept_values + from}, d, KEYS};
        look_at_keys(it, chunk, seen, chunk.values[0], to);
    }

    // `next`: the values, if they are contiguous; they are prefetched.
    void look_at_keys(Look& it, const Chunk& chunk, Int seen, const T* next, float* to) const {
        const Int d = model.head_dim, size = part_size();
        for (Int key = 0; key < seen; key += chunk.run)
            all_dots(it.queries, d, rep, chunk.keys[key / chunk.run], chunk.stride, std::min(chunk.run, seen - key), d,
                     it.scores + key, KEYS, next);
        for (Int i = 0; i < rep; i++) weigh(it.scores + i * KEYS, seen, to + i * size);
        by_rows(rep, [&](auto rows, Int i) {
            sums<decltype(rows)::value>(it.scores + i * KEYS, chunk, seen, to + i * size + LANES, size);
        });
    }

    // The pages that a kv head reads, from place `from` of the chosen ones on.
    Chunk chunk_of_pages(const LayerCache& cache, Int t, Int head, Int from) const {
        Chunk chunk{{}, {}, kv, PAGE};
        const std::int32_t* pages = chosen + place_of_choice(t, head) * batch.pages;
        for (Int i = 0; i < KEYS / PAGE && from + i < chosen_pages(t); i++) {
            const Int at = (row[t] * batch.slots + pages[from + i] * PAGE) * kv + head / rep * model.head_dim;
            chunk.keys[i] = (const T*)cache.keys + at, chunk.values[i] = (const T*)cache.values + at;
        }
        return chunk;
    }

    // The unquantised keys and values of positions `from` to `end`, `at` numbers after a token's first.
    Chunk chunk_at(const LayerCache& cache, Int row, Int from, Int end, Int at) const {
        Chunk chunk{{}, {}, kv, batch.kind == PAGED ? PAGE : KEYS};
        for (Int p = from, i = 0; p < end; p += chunk.run, i++) {
            chunk.keys[i] = place_of(cache.table, cache.keys, keys, row, p) + at;
            chunk.values[i] = place_of(cache.table, cache.values, values, row, p) + at;
        }
        return chunk;
    }

    // The scores of a token's queries, all heads of a key at once: contiguous bytes are faster to read than those of
    // one head. The values are prefetched meanwhile.
    void score_all(Look& it, const LayerCache& cache, Int row, Int from, Int seen) const {
        for (Int first = 0; first < seen; first += LANES) {
            for (Int key = first; key < std::min(first + LANES, seen); key++) {
                const T* ks = place_of(cache.table, cache.keys, keys, row, from + key);
                const T* vs = place_of(cache.table, cache.values, values, row, from + key);
                for (Int i = 0; i < kv; i += 64 / Int(sizeof(T))) __builtin_prefetch(vs + i, 0, 2);
                for (Int head = 0; head < model.heads; head += rep, ks += model.head_dim)
                    by_rows(rep, [&](auto rows, Int r) {
                        float* to = it.sums_of_keys + ((head + r) * LANES + key - first) * LANES;
                        key_sums<decltype(rows)::value>(it.queries + (head + r) * model.head_dim, ks, to);
                    });
            }
            for (Int head = 0; head < model.heads; head++) {
                floats of_key[LANES];
                for (int i = 0; i < LANES; i++) of_key[i] = widen(it.sums_of_keys + (head * LANES + i) * LANES);
                store(it.scores + head * KEYS + first, sums_of(of_key));
            }
        }
    }

    // The sums of `dots` for ROWS queries and a key, before the lanes are added.
    template <int ROWS>
    void key_sums(const T* queries, const T* key, float* to) const {
        floats sums[ROWS] = {};
        for (Int i = 0; i < model.head_dim; i += VECTOR / Int(sizeof(T))) {
            const auto some = held(take(key + i));
            UNROLL for (int r = 0; r < ROWS; r++)
                sums[r] = multiply_add(sums[r], take(queries + r * model.head_dim + i), some);
        }
        UNROLL for (int r = 0; r < ROWS; r++) store(to + r * LANES * LANES, sums[r]);
    }

    // The scores of the group of keys at `p`, for so many queries of a kv head.
    void score(Look& it, const LayerCache& cache, Int row, Int p, Int head, Int count, const float* wide, float* to) const {
        const Int d = model.head_dim, size = groups.tokens;
        const Quantized group = key_group(cache, row, p / size, head);
        const std::uint8_t* codes = codes_of(group.codes, groups.key_bits, size, d * size, it.codes);
        if (!turns)
            return by_rows(count, [&](auto rows, Int r) {
                score_group<decltype(rows)::value>(group, codes, size, d, wide + r * d, it.own, to + r * KEYS, KEYS);
            });
        for (Int i = 0; i < size; i += AT_ONCE) {
            rotated_keys(group, codes + i, size, d, turns + p * d + i, it.keys);
            by_rows(count, [&](auto rows, Int r) {
                score_keys<decltype(rows)::value>(it.keys, d, wide + r * d, to + r * KEYS + i, KEYS);
            });
        }
    }

    // Add the values of the group at `p`, times their weights.
    void add(Look& it, const LayerCache& cache, Int row, Int p, Int head, Int count, const float* weights, float* to) const {
        const Int d = model.head_dim, size = groups.tokens;
        const Quantized group = value_group(cache, row, p / size, head);
        const std::uint8_t* codes = codes_of(group.codes, groups.value_bits, groups.run(d), d * size, it.codes);
        by_rows(count, [&](auto rows, Int r) {
            add_group<decltype(rows)::value>(group, codes, size, d, groups.parts, weights + r * KEYS, KEYS, it.own,
                                             to + r * part_size(), part_size());
        });
    }

    // Add the sinks' values, times their weights, to the sums over the first groups, where these weights become 0.
    void add_sinks(Look& it, Int row, Int at, float* weights, float* to) const {
        const Int d = model.head_dim;
        std::fill_n(it.own, d, 0.0f);
        for (Int p = 0; p < sinks(); p++) {
            const T* vs = values + place_of_sink(row, p) + at;
            for (Int i = 0; i < d; i += LANES)
                store(it.own + i, multiply_add(widen(it.own + i), widen(vs + i), weights[p]));
            weights[p] = 0;
        }
        if (groups.rotates_values) hadamard(it.own, d);
        for (Int i = 0; i < d; i += LANES) store(to + i, widen(to + i) + widen(it.own + i));
    }

    // Rotate the sums over all groups back, before those over other positions are added.
    void end_groups(Look& it, Int i) const {
        if (groups.rotates_values) hadamard(it.sums + i * model.head_dim, model.head_dim);
    }

    // Convert a query's scores to weights relative to the largest; a part begins with that score and the weights' sum.
    // Keys that the query may not see have weight 0; if it sees none, its part is never read.
    void weigh(float* scores, Int visible, float* part) const {
        for (Int key = std::max<Int>(visible, 0); key < KEYS; key++) scores[key] = -INFINITY;
        floats largest = floats{} - INFINITY;
        for (Int key = 0; key < KEYS; key += LANES) {
            const floats some = widen(scores + key);
            largest = larger(some, largest);
        }
        const float most = largest_of(largest);
        floats total = {};
        for (Int key = 0; key < KEYS; key += LANES) {
            const floats weight = exp_of((widen(scores + key) - most) * scale);
            store(scores + key, weight);
            total += weight;
        }
        part[0] = most, part[1] = sum_of(total);
    }

    // Add a part to query i's sums, both rescaled to the larger of their largest scores.
    // Source: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    void merge(Look& it, Int i, const float* part) const {
        float* sum = it.sums + i * model.head_dim;
        const float most = std::max(it.most[i], part[0]);
        const float old = exp_of(floats{} + (it.most[i] - most) * scale)[0];
        const float now = exp_of(floats{} + (part[0] - most) * scale)[0];
        it.total[i] = it.total[i] * old + part[1] * now, it.most[i] = most;
        for (Int j = 0; j < model.head_dim; j += LANES)
            store(sum + j, multiply_add(widen(part + LANES + j) * now, widen(sum + j), old));
    }

    void finish(const Look& it, Int i, float* to) const {
        for (Int j = 0; j < model.head_dim; j += LANES)
            store(to + j, widen(it.sums + i * model.head_dim + j) / it.total[i]);
    }

    // sum[i] = the sum of weights[i][key] * values[key], for ROWS queries and WIDTH vectors of a head from `at` on.
    template <int ROWS, int WIDTH>
    void some_sums(const float* weights, const Chunk& chunk, Int at, Int seen, float* sum, Int stride) const {
        floats part[ROWS][WIDTH] = {};
        for (Int first = 0; first < seen; first += chunk.run) {
            const T* vs = chunk.values[first / chunk.run] + at;
            const Int end = std::min(seen, first + chunk.run);
            for (Int key = first; key < end; key++, vs += chunk.stride)
                for (int j = 0; j < WIDTH; j++) {
                    const floats value = widen(vs + j * LANES);
                    for (int r = 0; r < ROWS; r++)
                        part[r][j] = multiply_add(part[r][j], value, weights[r * KEYS + key]);
                }
        }
        for (int r = 0; r < ROWS; r++)
            for (int j = 0; j < WIDTH; j++) store(sum + r * stride + j * LANES, part[r][j]);
    }

    template <int ROWS>
    void sums(const float* weights, const Chunk& chunk, Int seen, float* sum, Int stride) const {
        Int j = 0;
        for (; j + 4 * LANES <= model.head_dim; j += 4 * LANES)
            some_sums<ROWS, 4>(weights, chunk, j, seen, sum + j, stride);
        for (; j < model.head_dim; j += LANES) some_sums<ROWS, 1>(weights, chunk, j, seen, sum + j, stride);
    }

    // The logits, by all threads together: of every row's last token, or of all.
    void head(const Team& all, float* scaled, char* own) const {
        for (Int done = 0; done < scored; done += scored_rows()) {
            const Int count = std::min(scored_rows(), scored - done);
            write_rows(count, all, model.dim, own, [&](Int i, char* row) {
                const Int t = batch.all ? done + i : begin[done + i + 1] - 1;
                norm_of(h + t * model.dim, (const T*)model.norm, scaled, row);
            });
            product(model.output, own, count, all, batch.logits + done * model.output.columns);
            if (rows_shared()) all.wait();  // before the next ones overwrite these
        }
    }
};

#if defined(NUMBER)
template <class Act>
void with_types(const Model&, Act act) {
    act(NUMBER{}, PRODUCT{});
}
#else
template <class Act>
void with_types(const Model& model, Act act) {
    auto choose_product = [&](auto number) {
        using T = decltype(number);
        if (model.activations == 8)
            act(number, Packed<8, T>{});
        else if (model.activations)
            act(number, Packed<16, T>{});
        else
            act(number, Plain<T>{});
    };
    model.bfloat16 ? choose_product(bfloat{}) : choose_product(float{});
}
#endif

}  // namespace

extern "C" {

// Return the bytes of workspace that it needs; if `room` is less, compute nothing.
Int forward(const Model* model, const Batch* batch, Int room) {
    Int size = 0;
    with_types(*model, [&](auto number, auto product) {
        Forward<decltype(number), decltype(product)> it(*model, *batch);
        size = it.workspace_size;
        if (size <= room) it.run();
    });
    return size;
}
}
