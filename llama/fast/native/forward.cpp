// The forward of a Llama on a CPU as one function of loops. model.py defines the results.
//
// Activations between two products, and their sums, are float32. A position is computed in the same order, whatever is
// computed beside it. Threads divide the tokens if there are many, else the columns of every product. Nothing here
// allocates memory: a call returns the bytes that it needs.
//
// A library has one kind of numbers and of products, NUMBER and PRODUCT: all of them take a compiler most of a minute.

#include <vector>

#include "attention.h"
#include "products.h"

namespace {

constexpr Int SCORED = 64;  // tokens whose logits are computed at a time
// Tokens of a block that one thread computes. Tiles multiply faster than weights are read, so they need more tokens.
constexpr Int BLOCK_TOKENS = 48, BLOCK_TOKENS_OF_TILES = 256;

template <class T, class Product>
struct Forward : Call {
    Carver carver;
    const Product product_of{model.mixed != 0};
    Int scored = batch.all ? tokens : batch.rows;  // tokens whose logits are computed
    bool direct = product_of.direct();
    Int most_rows = direct ? BLOCK_TOKENS_OF_TILES : BLOCK_TOKENS;
    Int blocks = one_block ? 1 : threads * ((tokens + threads * most_rows - 1) / (threads * most_rows));
    Int block_rows = one_block ? tokens : std::min(most_rows, tokens / blocks + 2 * TOGETHER);  // the most of a block
    Int widest = std::max(model.dim, model.hidden), scored_rows = std::min(scored, SCORED);
    // In the workspace, of every token:
    float *h = carver.take<float>(tokens * model.dim), *q = carver.take<float>(tokens * queries);
    const Stored<T> stored{*this, carver};
    const Attention<T> attention{stored, q, carver};
    // Of the tokens of the blocks that are computed at a time:
    Int rows_at_once = one_block ? block_rows : threads * block_rows;
    float *k = carver.take<float>(rows_at_once * kv), *v = carver.take<float>(rows_at_once * kv);
    Int wide_floats = direct ? 0 : rows_at_once * widest;
    float *gate = carver.take<float>(wide_floats), *up = carver.take<float>(wide_floats);
    Int hidden_bytes = direct ? whole_tiles(block_rows) * product_of.bytes(model.hidden) : 0;
    char* hidden_factors = carver.take<char>((one_block ? 1 : threads) * hidden_bytes);  // the rows of w2
    // Each thread's:
    float* scaled_row = carver.take<float>(threads * model.dim);
    Int rounded_bytes = std::max(whole_tiles(block_rows) * product_of.bytes(std::max(queries, widest)),
                                 whole_tiles(scored_rows) * product_of.bytes(model.dim));
    char* rounded = carver.take<char>(threads * rounded_bytes);
    Int panels_bytes = product_of.room_for(std::max(block_rows, scored_rows), std::max(queries, widest), model.mapped);
    char* panels = carver.take<char>(threads * panels_bytes);  // see `Team`
    Largest* found = batch.choice ? carver.take<Largest>(threads * batch.rows) : nullptr;
    float* penalized_row = carver.take<float>(threads * penalized(batch.choice));

    Forward(const Model& m, const Batch& b, Carver c) : Call(m, b, c), carver(c) {}

    static Int whole_tiles(Int rows) { return (rows + TILE - 1) / TILE * TILE; }

    void run() const {
        write_positions();
        stored.write_begins();
        in_team(threads, [&](Team& all) {
            all.room = panels + all.rank * panels_bytes;
            work(all);
        });
    }

    void work(const Team& all) const {
        const Team alone{0, 1, nullptr, all.room}, &team = one_block ? all : alone;
        char *own = rounded + (rows_shared() ? 0 : all.rank * rounded_bytes), *memory = attention.memory_of(all);
        float* scaled = scaled_row + all.rank * model.dim;
        const Int slot = one_block ? 0 : all.rank * block_rows;
        auto each_block = [&](auto act) {
            const Int step = one_block ? 1 : all.size;
            for (Int b = one_block ? 0 : all.rank; b < blocks; b += step) {
                const Int first = bound(b), end = bound(b + 1);
                if (first < end) act(first, end - first);
            }
        };
        each_block([&](Int first, Int count) {
            for (Int t = team.rank; t < count; t += team.size)
                product_of.row_of(model.embedding, token(first + t), h + (first + t) * model.dim, team.room);
        });
        if (stored.angles) stored.write_angles(all);
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
                    store_token(layer, cache, first + t, k + (slot + t) * kv, v + (slot + t) * kv);
            });
            if (grouped()) stored.load_window(cache, all);
            all.wait();
            if (grouped()) stored.store_groups(cache, all, (float*)memory);
            if (batch.kind == QUEST) stored.store_bounds(cache, all);
            each_block([&](Int first, Int count) {
                attention.attend(cache, first, count, team, memory);
                team.wait();
                rows_rounded(q + first * queries, count, team, queries, own);
                added(layer.wo, own, count, team, h + first * model.dim, gate + slot * widest);
                team.wait();
                normed(h + first * model.dim, count, team, (const T*)layer.ffn_norm, scaled, own);
                const char* hidden = hidden_rows(layer, own, count, team, slot);
                added(layer.w2, hidden, count, team, h + first * model.dim, up + slot * widest);
                team.wait();
            });
            if (stored.copies()) all.wait();  // before the next layer's keys overwrite these
        }
        all.wait();
        head(all, scaled, own);
        if (batch.choice) choose(*batch.choice, all, found, penalized_row);
    }

    Int bound(Int block) const {
        const Int units = (tokens + TOGETHER - 1) / TOGETHER;
        return std::min(tokens, units * block / blocks * TOGETHER);
    }

    // ---- rows, rounded for products ----------------------------------------------------------------------------------

    // With few rows, every thread has its own rounded copy; with more, threads divide the work and share one copy.
    bool rows_shared() const { return one_block && !split_keys; }

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
        each_row(whole_tiles(count) / TILE, team,
                 [&](Int i) { product_of.arrange(to + i * TILE * size, size, length, team.room); });
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

    // ---- the parts of a layer ----------------------------------------------------------------------------------------

    // Complete a token's queries, keys and values, rotate them by its position, and store its keys and values.
    void store_token(const Layer& layer, const LayerCache& cache, Int t, float* k, float* v) const {
        complete(q + t * queries, model.heads, layer.q_bias, layer.q_norm);
        complete(k, model.kv_heads, layer.k_bias, layer.k_norm);
        complete(v, model.kv_heads, layer.v_bias, nullptr);
        stored.rotate(q + t * queries, model.heads, position[t]);
        stored.store_token(cache, t, k, v);
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

    // The same, added to `to`; the product is written to `scratch`, if it is not direct.
    void added(const Matrix& matrix, const char* x, Int count, const Team& team, float* to, float* scratch) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            if (direct)
                return product_of.multiply_direct(matrix, x, count, first, end, to, matrix.columns, team.room);
            product_of.multiply(matrix, x, count, first, end, scratch, matrix.columns, team.room);
            for (Int r = 0; r < count; r++)
                for (Int c = first; c < end; c++) to[r * matrix.columns + c] += scratch[r * matrix.columns + c];
        });
    }

    // Compute the MLP's hidden numbers of the rows at `x`, and return them as the rows of the next product.
    const char* hidden_rows(const Layer& layer, char* x, Int count, const Team& team, Int slot) const {
        float *g = gate + slot * widest, *u = up + slot * widest;
        char* factors = hidden_factors + slot / block_rows * hidden_bytes;
        team.share(model.hidden, [&](Int first, Int end) {
            if (direct) return product_of.gate_direct(layer.w1, layer.w3, x, count, first, end, factors, team.room);
            product_of.multiply(layer.w1, x, count, first, end, g, model.hidden, team.room);
            product_of.multiply(layer.w3, x, count, first, end, u, model.hidden, team.room);
            for (Int r = 0; r < count; r++)
                for (Int i = r * model.hidden + first; i < r * model.hidden + end; i += LANES)
                    store(g + i, gated(widen(g + i), widen(u + i)));
        });
        team.wait();
        if (direct) return factors;
        rows_rounded(g, count, team, model.hidden, x);
        return x;
    }

    // The logits, by all threads together: of every row's last token, or of all.
    void head(const Team& all, float* scaled, char* own) const {
        for (Int done = 0; done < scored; done += scored_rows) {
            const Int count = std::min(scored_rows, scored - done);
            write_rows(count, all, model.dim, own, [&](Int i, char* row) {
                const Int t = batch.all ? done + i : begin[done + i + 1] - 1;
                norm_of(h + t * model.dim, (const T*)model.norm, scaled, row);
            });
            product(model.output, own, count, all, batch.logits + done * model.output.columns);
            if (rows_shared()) all.wait();  // before the next ones overwrite these
        }
    }
};

// Return the bytes of workspace that the call needs; if `room` is less, compute nothing.
template <class T, class Product>
Int forward_of(const Model& model, const Batch& batch, Int room) {
    const Forward<T, Product> forward(model, batch, Carver{batch.workspace});
    if (forward.carver.used <= room) forward.run();
    return forward.carver.used;
}

}  // namespace

#if defined(NUMBER)
extern "C" Int forward(const Model* model, const Batch* batch, Int room) {
    return forward_of<NUMBER, PRODUCT>(*model, *batch, room);
}
#endif
