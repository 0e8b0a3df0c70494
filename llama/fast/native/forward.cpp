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

// Tokens of a block that one thread computes, and whose logits are computed at a time. Tiles multiply faster than weights
// are read, so they need more tokens.
constexpr Int BLOCK_TOKENS = 48, SCORED = 64, BLOCK_TOKENS_OF_TILES = 256;

// Tokens that one kind of products multiplies, in blocks.
struct Blocks {
    Int first, tokens, count, rows;  // rows: the most of a block

    Blocks(const Call& call, Int first, Int tokens, Int most) : first(first), tokens(tokens) {
        count = call.one_block ? tokens > 0 : call.threads * ((tokens + call.threads * most - 1) / (call.threads * most));
        rows = call.one_block || !count ? tokens : std::min(most, tokens / count + 2 * TOGETHER);
    }
    Int bound(Int block) const {
        const Int units = (tokens + TOGETHER - 1) / TOGETHER;
        return first + std::min(tokens, units * block / count * TOGETHER);
    }
};

template <class T, class Product>
struct Forward : Call {
    using Tiles = typename Product::Tiles;
    Carver carver;
    const Product usual{model.mixed != 0};
    const Tiles tiles = usual.tiles();
    Int scored = batch.all ? tokens : batch.rows;  // tokens whose logits are computed
    const Blocks tiled_blocks{*this, 0, tiled_tokens, BLOCK_TOKENS_OF_TILES};
    const Blocks blocks{*this, tiled_tokens, tokens - tiled_tokens, usual.direct() ? BLOCK_TOKENS_OF_TILES : BLOCK_TOKENS};
    Int block_rows = std::max(tiled_blocks.rows, blocks.rows), widest = std::max(model.dim, model.hidden);
    // In the workspace, of every token:
    float *h = carver.take<float>(tokens * model.dim), *q = carver.take<float>(tokens * queries);
    const Stored<T> stored{*this, carver};
    const Attention<T> attention{stored, q, carver};
    // Of the tokens of the blocks that are computed at a time:
    Int rows_at_once = one_block ? tokens : threads * block_rows;
    float *k = carver.take<float>(rows_at_once * kv), *v = carver.take<float>(rows_at_once * kv);
    bool apart = (tiled_blocks.count && !tiles.direct()) || (blocks.count && !usual.direct());
    Int wide_floats = apart ? rows_at_once * widest : 0;
    float *gate = carver.take<float>(wide_floats), *up = carver.take<float>(wide_floats);
    Int hidden_bytes = std::max(hidden_bytes_of(tiles, tiled_blocks), hidden_bytes_of(usual, blocks));
    char* hidden_factors = carver.take<char>((one_block ? 1 : threads) * hidden_bytes);  // the rows of w2
    // Each thread's:
    float* scaled_row = carver.take<float>(threads * model.dim);
    Int rounded_bytes = std::max(rounded_bytes_of(tiles, tiled_blocks), rounded_bytes_of(usual, blocks));
    char* rounded = carver.take<char>(threads * rounded_bytes);
    Int panels_bytes = std::max(room_of(tiles, tiled_blocks), room_of(usual, blocks));
    char* panels = carver.take<char>(threads * panels_bytes);  // see `Team`
    Largest* found = batch.choice ? carver.take<Largest>(threads * batch.rows) : nullptr;
    float* penalized_row = carver.take<float>(threads * penalized(batch.choice));

    Forward(const Model& m, const Batch& b, Carver c)
        : Call(m, b, c, Product{m.mixed != 0}.long_by_tiles(m.longest())), carver(c) {}

    // The memory that a kind of products needs.
    template <class Kind>
    Int hidden_bytes_of(const Kind& kind, const Blocks& some) const {
        return kind.direct() ? whole_tiles(some.rows) * kind.bytes(model.hidden) : 0;
    }
    template <class Kind>
    Int rounded_bytes_of(const Kind& kind, const Blocks& some) const {
        return std::max(whole_tiles(some.rows) * kind.bytes(model.longest()),
                        whole_tiles(scored_at_once(some)) * kind.bytes(model.dim));
    }
    template <class Kind>
    Int room_of(const Kind& kind, const Blocks& some) const {
        return kind.room_for(std::max(some.rows, scored_at_once(some)), model.longest());
    }
    Int scored_at_once(const Blocks& some) const { return some.count ? std::min(scored, std::max(SCORED, some.rows)) : 0; }
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
        auto each_of = [&](const Blocks& some, const auto& kind, auto act) {
            const Int step = one_block ? 1 : all.size;
            for (Int b = one_block ? 0 : all.rank; b < some.count; b += step) {
                const Int first = some.bound(b), end = some.bound(b + 1), slot = one_block ? first : all.rank * block_rows;
                if (first < end) act(kind, first, end - first, slot);
            }
        };
        auto each_block = [&](auto act) {  // act(kind, first, count, slot), with the place of the block in its buffers
            each_of(tiled_blocks, tiles, act);
            each_of(blocks, usual, act);
        };
        each_block([&](const auto&, Int first, Int count, Int) {
            for (Int t = team.rank; t < count; t += team.size)
                usual.row_of(model.embedding, token(first + t), h + (first + t) * model.dim);
        });
        if (stored.angles) stored.write_angles(all);
        all.wait();
        for (Int l = 0; l < model.layer_count; l++) {
            const Layer& layer = model.layers[l];
            const LayerCache& cache = batch.caches ? batch.caches[l] : NO_CACHE;
            each_block([&](const auto& kind, Int first, Int count, Int slot) {
                normed(kind, h + first * model.dim, count, team, (const T*)layer.attention_norm, scaled, own);
                product(kind, layer.wq, own, count, team, q + first * queries);
                product(kind, layer.wk, own, count, team, k + slot * kv);
                product(kind, layer.wv, own, count, team, v + slot * kv);
                team.wait();
                for (Int t = team.rank; t < count; t += team.size)
                    store_token(layer, cache, first + t, k + (slot + t) * kv, v + (slot + t) * kv);
            });
            if (grouped()) stored.load_window(cache, all);
            all.wait();
            if (grouped()) stored.store_groups(cache, all, (float*)memory);
            if (batch.kind == QUEST) stored.store_bounds(cache, all);
            each_block([&](const auto& kind, Int first, Int count, Int slot) {
                attention.attend(cache, first, count, team, memory);
                team.wait();
                rows_rounded(kind, q + first * queries, count, team, queries, own);
                added(kind, layer.wo, own, count, team, h + first * model.dim, gate + slot * widest);
                team.wait();
                normed(kind, h + first * model.dim, count, team, (const T*)layer.ffn_norm, scaled, own);
                const char* hidden = hidden_rows(kind, layer, own, count, team, slot);
                added(kind, layer.w2, hidden, count, team, h + first * model.dim, up + slot * widest);
                team.wait();
            });
            if (stored.copies()) all.wait();  // before the next layer's keys overwrite these
        }
        all.wait();
        head(all, scaled, own);
        if (batch.choice) choose(*batch.choice, all, found, penalized_row);
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
    template <class Kind, class Act>
    void write_rows(const Kind& kind, Int count, const Team& team, Int length, char* to, Act act) const {
        const Int size = kind.bytes(length);
        each_row(count, team, [&](Int r) { act(r, to + r * size); });
        if (!kind.arranges()) return;
        each_row(whole_tiles(count) / TILE, team,
                 [&](Int i) { kind.arrange(to + i * TILE * size, size, length, team.room); });
    }

    template <class Kind>
    void rows_rounded(const Kind& kind, const float* x, Int count, const Team& team, Int length, char* to) const {
        write_rows(kind, count, team, length, to, [&](Int r, char* row) { kind.round(x + r * length, length, row); });
    }

    template <class Kind>
    void normed(const Kind& kind, const float* x, Int count, const Team& team, const T* weight, float* scaled,
                char* to) const {
        write_rows(kind, count, team, model.dim, to, [&](Int r, char* row) {
            norm(x + r * model.dim, model.dim, weight, scaled);
            kind.round(scaled, model.dim, row);
        });
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
    template <class Kind>
    void product(const Kind& kind, const Matrix& matrix, const char* x, Int count, const Team& team, float* to) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            kind.multiply(matrix, x, count, first, end, to, matrix.columns, team.room);
        });
    }

    // The same, added to `to`; the product is written to `scratch`, if it is not direct.
    template <class Kind>
    void added(const Kind& kind, const Matrix& matrix, const char* x, Int count, const Team& team, float* to,
               float* scratch) const {
        team.share(matrix.columns, [&](Int first, Int end) {
            if (kind.direct())
                return kind.multiply_direct(matrix, x, count, first, end, to, matrix.columns, team.room);
            kind.multiply(matrix, x, count, first, end, scratch, matrix.columns, team.room);
            for (Int r = 0; r < count; r++)
                for (Int c = first; c < end; c++) to[r * matrix.columns + c] += scratch[r * matrix.columns + c];
        });
    }

    // Compute the MLP's hidden numbers of the rows at `x`, and return them as the rows of the next product.
    template <class Kind>
    const char* hidden_rows(const Kind& kind, const Layer& layer, char* x, Int count, const Team& team, Int slot) const {
        float *g = gate + slot * widest, *u = up + slot * widest;
        char* factors = hidden_factors + (one_block ? 0 : slot / block_rows * hidden_bytes);
        team.share(model.hidden, [&](Int first, Int end) {
            if (kind.direct()) kind.gate_direct(layer.w1, layer.w3, x, count, first, end, factors, team.room);
            else multiply_gated(kind, layer.w1, layer.w3, x, count, first, end, g, u, team.room);
        });
        team.wait();
        if (kind.direct()) return factors;
        rows_rounded(kind, g, count, team, model.hidden, x);
        return x;
    }

    // The logits, by all threads together: of every row's last token, or of all.
    void head(const Team& all, float* scaled, char* own) const {
        auto token_of = [&](Int i) {  // of logits i
            if (!batch.all) return begin[i] + batch.lengths[i] - 1;
            Int r = 0;
            for (; i >= batch.lengths[r]; r++) i -= batch.lengths[r];
            return begin[r] + i;
        };
        auto is_tiled = [&](Int i) { return token_of(i) < tiled_tokens; };
        for (Int first = 0, end; first < scored; first = end) {  // tokens of the same kind of products
            const Int most = scored_at_once(is_tiled(first) ? tiled_blocks : blocks);
            for (end = first + 1; end < std::min(scored, first + most) && is_tiled(end) == is_tiled(first);) end++;
            auto score = [&](const auto& kind) {
                write_rows(kind, end - first, all, model.dim, own, [&](Int i, char* row) {
                    norm(h + token_of(first + i) * model.dim, model.dim, (const T*)model.norm, scaled);
                    kind.round(scaled, model.dim, row);
                });
                product(kind, model.output, own, end - first, all, batch.logits + first * model.output.columns);
            };
            is_tiled(first) ? score(tiles) : score(usual);
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

// What tiles multiply for a model on a CPU with them.
extern "C" const char* multiplied_by_tiles(const Model* model) {
    const PRODUCT usual{model->mixed != 0};
    if (!usual.long_by_tiles(model->longest())) return usual.direct() ? "products by AMX tiles" : "attention by AMX tiles";
    return std::is_same_v<PRODUCT::Tiles, Planes> ? "prompts by AMX tiles (int8 planes)" : "prompts by AMX tiles (bf16)";
}
#endif
