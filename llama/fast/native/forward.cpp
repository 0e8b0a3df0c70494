// The forward of a Llama on a CPU as one function of loops. model.py defines the results.
//
// Activations between two products, and their sums, are float32. A position is computed in the same order, whatever is
// computed beside it. Threads divide the tokens if there are many, else the columns of every product. Nothing here
// allocates memory: a call returns the bytes that it needs.
//
// A library has one kind of numbers and of products, NUMBER and PRODUCT: all of them take a compiler most of a minute.

#include "attention.h"
#include "products.h"

namespace {

// Tokens of a block that one thread computes, and whose logits are computed at a time.
constexpr Int BLOCK_TOKENS = 128, SCORED = 64;

template <class T, class Product>
struct Forward : Call {
    Carver carver;
    const Product kind{model.mixed != 0};
    // All threads compute one block, or each has blocks of its own.
    Int blocks = one_block ? tokens > 0 : threads * ((tokens + threads * BLOCK_TOKENS - 1) / (threads * BLOCK_TOKENS));
    Int block_rows = one_block || !blocks ? tokens : std::min(BLOCK_TOKENS, tokens / blocks + 2 * TOGETHER);
    Int scored = batch.all ? tokens : batch.rows;  // tokens whose logits are computed, and so many of them at a time
    Int scored_at_once = std::min(scored, std::max(SCORED, block_rows)), widest = std::max(model.dim, model.hidden);
    // In the workspace, of every token:
    float *h = carver.take<float>(tokens * model.dim), *q = carver.take<float>(tokens * queries);
    const Stored<T> stored{*this, carver};
    const Attention<T> attention{stored, q, carver};
    // Of the tokens of the blocks that are computed at a time:
    Int rows_at_once = one_block ? tokens : threads * block_rows;
    float *k = carver.take<float>(rows_at_once * kv), *v = carver.take<float>(rows_at_once * kv);
    float *gate = carver.take<float>(rows_at_once * widest), *up = carver.take<float>(rows_at_once * widest);
    // Each thread's:
    float* scaled_row = carver.take<float>(threads * model.dim);
    Int rounded_bytes = std::max(block_rows * kind.bytes(model.longest()), scored_at_once * kind.bytes(model.dim));
    char* rounded = carver.take<char>(threads * rounded_bytes);
    Int panels_bytes = kind.room_for();
    char* panels = carver.take<char>(threads * panels_bytes);  // see `Team`
    Largest* found = batch.choice ? carver.take<Largest>(threads * batch.rows) : nullptr;
    float* penalized_row = carver.take<float>(threads * penalized(batch.choice));

    Forward(const Model& m, const Batch& b, Carver c) : Call(m, b, c), carver(c) {}

    Int bound(Int block) const {
        const Int units = (tokens + TOGETHER - 1) / TOGETHER;
        return std::min(tokens, units * block / blocks * TOGETHER);
    }

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
        auto each_block = [&](auto act) {  // act(first, count, slot), with the place of the block in its buffers
            for (Int b = one_block ? 0 : all.rank; b < blocks; b += one_block ? 1 : all.size) {
                const Int first = bound(b), end = bound(b + 1), slot = one_block ? first : all.rank * block_rows;
                if (first < end) act(first, end - first, slot);
            }
        };
        each_block([&](Int first, Int count, Int) {
            for (Int t = team.rank; t < count; t += team.size)
                kind.row_of(model.embedding, token(first + t), h + (first + t) * model.dim);
        });
        if (stored.angles) stored.write_angles(all);
        all.wait();
        for (Int l = 0; l < model.layer_count; l++) {
            const Layer& layer = model.layers[l];
            const LayerCache& cache = batch.caches ? batch.caches[l] : NO_CACHE;
            each_block([&](Int first, Int count, Int slot) {
                normed(h + first * model.dim, count, team, (const T*)layer.attention_norm, scaled, own);
                each_read(l, first, count, [&](Int t, Int n) {
                    product(layer.wq, own + (t - first) * kind.bytes(model.dim), n, team, q + t * queries);
                });
                product(layer.wk, own, count, team, k + slot * kv);
                product(layer.wv, own, count, team, v + slot * kv);
                team.wait();
                for (Int t = team.rank; t < count; t += team.size) {
                    if (is_read(l, first + t)) complete_queries(layer, first + t);
                    store_token(layer, cache, first + t, k + (slot + t) * kv, v + (slot + t) * kv);
                }
            });
            if (grouped()) stored.load_window(cache, all);
            all.wait();
            if (grouped()) stored.store_groups(cache, all, (float*)memory);
            if (batch.kind == QUEST) stored.store_bounds(cache, all);
            each_block([&](Int first, Int count, Int slot) {
                each_read(l, first, count, [&](Int t, Int n) {
                    attention.attend(cache, t, n, team, memory);
                    team.wait();
                    rows_rounded(q + t * queries, n, team, queries, own);
                    added(layer.wo, own, n, team, h + t * model.dim, gate + slot * widest);
                    team.wait();
                    normed(h + t * model.dim, n, team, (const T*)layer.ffn_norm, scaled, own);
                    hidden_rows(layer, own, n, team, gate + slot * widest, up + slot * widest);
                    added(layer.w2, own, n, team, h + t * model.dim, up + slot * widest);
                    team.wait();
                });
            });
            if (stored.copies()) all.wait();  // before the next layer's keys overwrite these
        }
        all.wait();
        head(all, scaled, own);
        if (batch.choice) choose(*batch.choice, all, found, penalized_row);
    }

    // Whether the next layer or the head reads layer l's result of a token: the head those whose logits are computed.
    bool is_read(Int l, Int t) const {
        return batch.all || l + 1 < model.layer_count || t + 1 == begin[row[t]] + batch.lengths[row[t]];
    }

    // Call act(first, count) for the runs of such tokens, and the tokens of short gaps between them: computing these takes
    // less time than reading the layer's weights once more.
    template <class Act>
    void each_read(Int l, Int first, Int count, Act act) const {
        constexpr Int GAP = 8;
        for (Int t = first, end; t < first + count; t = end) {
            end = t + 1;
            if (!is_read(l, t)) continue;
            for (Int i = end; i < first + count && i - end < GAP; i++)
                if (is_read(l, i)) end = i + 1;
            act(t, end - t);
        }
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

    // Round `count` rows of so many numbers at x for products.
    void rows_rounded(const float* x, Int count, const Team& team, Int length, char* to) const {
        each_row(count, team, [&](Int r) { kind.round(x + r * length, length, to + r * kind.bytes(length)); });
    }

    void normed(const float* x, Int count, const Team& team, const T* weight, float* scaled, char* to) const {
        each_row(count, team, [&](Int r) { norm_rounded(x + r * model.dim, weight, scaled, to + r * kind.bytes(model.dim)); });
    }

    void norm_rounded(const float* x, const T* weight, float* scaled, char* to) const {
        norm(x, model.dim, weight, scaled);
        kind.round(scaled, model.dim, to);
    }

    void norm(const float* x, Int length, const T* weight, float* to) const {
        floats squares = {};
        for (Int i = 0; i < length; i += LANES) squares = multiply_add(squares, widen(x + i), widen(x + i));
        const float factor = 1.0f / std::sqrt(sum_of(squares) / float(length) + model.eps);
        for (Int i = 0; i < length; i += LANES) store(to + i, widen(x + i) * factor * widen(weight + i));
    }

    // ---- the parts of a layer ----------------------------------------------------------------------------------------

    // Complete a token's queries, and rotate them by its position.
    void complete_queries(const Layer& layer, Int t) const {
        complete(q + t * queries, model.heads, layer.q_bias, layer.q_norm);
        stored.rotate(q + t * queries, model.heads, position[t]);
    }

    // Complete a token's keys and values, and store them.
    void store_token(const Layer& layer, const LayerCache& cache, Int t, float* k, float* v) const {
        complete(k, model.kv_heads, layer.k_bias, layer.k_norm);
        complete(v, model.kv_heads, layer.v_bias, nullptr);
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
            kind.multiply(matrix, x, count, first, end, to, matrix.columns, team.room);
        });
    }

    // The same, added to `to`; the product is written to `scratch`.
    void added(const Matrix& matrix, const char* x, Int count, const Team& team, float* to, float* scratch) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            kind.multiply(matrix, x, count, first, end, scratch, matrix.columns, team.room);
            for (Int r = 0; r < count; r++)
                for (Int c = first; c < end; c++) to[r * matrix.columns + c] += scratch[r * matrix.columns + c];
        });
    }

    // Replace the rows at `x` by the MLP's hidden numbers of them, rounded for the next product.
    void hidden_rows(const Layer& layer, char* x, Int count, const Team& team, float* gate, float* up) const {
        const Int stride = model.hidden;
        team.share(stride, [&](Int first, Int end) {
            kind.multiply(layer.w1, x, count, first, end, gate, stride, team.room);
            kind.multiply(layer.w3, x, count, first, end, up, stride, team.room);
            for (Int r = 0; r < count; r++)
                for (Int i = r * stride + first; i < r * stride + end; i += LANES)
                    store(gate + i, gated(widen(gate + i), widen(up + i)));
        });
        team.wait();
        rows_rounded(gate, count, team, stride, x);
    }

    // The logits, by all threads together: of every row's last token, or of all.
    void head(const Team& all, float* scaled, char* own) const {
        auto token_of = [&](Int i) {  // of logits i
            if (!batch.all) return begin[i] + batch.lengths[i] - 1;
            Int r = 0;
            for (; i >= batch.lengths[r]; r++) i -= batch.lengths[r];
            return begin[r] + i;
        };
        for (Int first = 0; first < scored; first += scored_at_once) {
            const Int count = std::min(scored_at_once, scored - first);
            each_row(count, all, [&](Int i) {
                const float* x = h + token_of(first + i) * model.dim;
                norm_rounded(x, (const T*)model.norm, scaled, own + i * kind.bytes(model.dim));
            });
            product(model.output, own, count, all, batch.logits + first * model.output.columns);
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
