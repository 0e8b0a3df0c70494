// What a call of the forward reads, as native_structs.py declares it, and the sizes that follow from it.

#pragma once

#include "choose.h"
#include "groups.h"
#include "matrices.h"

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
    Int dim, heads, kv_heads, head_dim, hidden, layer_count;
    float eps;
    Matrix embedding, output;
    const void* norm;
    const Layer* layers;

    Int longest() const { return std::max({dim, hidden, heads * head_dim}); }  // of the columns of all matrices
};

struct Batch {
    Int rows, width;
    const Int* tokens;            // (rows, width)
    const Int *starts, *lengths;  // (rows,)
    Int all;                 // 1: compute the logits of all tokens, (tokens, vocab), row by row; 0: (rows, vocab)
    const float *cos, *sin;  // (positions, head_dim), in the layout of rope.py
    Int kind, slots;         // of the cache; slots: its capacity in positions, groups or blocks
    const LayerCache* caches;  // of each layer; null if the kind is NONE
    Groups groups;    // of GROUPED
    const Int* bases;  // (rows,) of COMPRESSED: the position of the first slot; else null
    Int pages;         // of QUEST: how many each kv head reads
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
constexpr Int PAGE = 16;           // positions in a block of a paged cache, and in a page of QUEST
constexpr Int SHARED_TOKENS = 64;  // of blocks that all threads compute, each with its own rounded copy

// The sizes of a call, and the row and the position of each of its tokens.
struct Call {
    const Model& model;
    const Batch& batch;
    const Groups& groups;  // of a cache that is GROUPED
    Int threads, tokens = 0;
    Int queries, kv, rep;  // the numbers of a token's queries, and of its keys; query heads per kv head
    bool one_block;   // all threads compute a block, and divide the columns of matrices; otherwise each has its own blocks
    bool split_keys;  // few tokens: the threads divide the keys; otherwise they divide the rows
    bool selects_pages;  // some row of one token reads not all pages
    Int longest = 0;     // positions of a text, with the tokens of this call
    Int most_pages;      // of the longest text that is fed one token, if rows select pages
    std::int32_t *row, *position;  // of every token
    Int* begin;                    // the first token of every row

    Call(const Model& m, const Batch& b, Carver& carver) : model(m), batch(b), groups(b.groups) {
        threads = std::max<Int>(1, batch.threads);
        Int longest_step = 0;
        for (Int r = 0; r < batch.rows; r++) {
            tokens += batch.lengths[r];
            longest = std::max(longest, batch.starts[r] + batch.lengths[r]);
            if (batch.lengths[r] == 1) longest_step = std::max(longest_step, batch.starts[r] + 1);
        }
        queries = model.heads * model.head_dim, kv = model.kv_heads * model.head_dim;
        rep = model.heads / model.kv_heads;
        one_block = threads > 1 && tokens < std::min(threads * 16, SHARED_TOKENS);
        split_keys = one_block && tokens < 2 * threads;
        selects_pages = batch.kind == QUEST && longest_step > batch.pages * PAGE;
        most_pages = selects_pages ? (longest_step + PAGE - 1) / PAGE : 0;
        row = carver.take<std::int32_t>(tokens), position = carver.take<std::int32_t>(tokens);
        begin = carver.take<Int>(batch.rows);
    }

    void write_positions() const {
        for (Int r = 0, t = 0; r < batch.rows; r++) {
            begin[r] = t;
            for (Int i = 0; i < batch.lengths[r]; i++, t++) row[t] = r, position[t] = batch.starts[r] + i;
        }
    }

    bool grouped() const { return batch.kind == GROUPED; }
    Int token(Int t) const { return batch.tokens[row[t] * batch.width + position[t] - batch.starts[row[t]]]; }
};

}  // namespace
