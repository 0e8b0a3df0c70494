// Attention of a call's tokens to the positions that `Stored` has of their texts, in chunks of KEYS keys.
//
// A chunk gives each query a part: the largest score, the sum of the weights relative to it, and the weighted values.
// Parts are always merged in the order of the keys, so a token's bits do not depend on how threads divide the work.

#pragma once

#include "cache_slots.h"

namespace {

constexpr Int KEYS = 64;            // keys in a chunk
constexpr Int QUERIES = 48;         // queries of one kv head, but at least those of one token
constexpr Int SCORED_IN_LANES = 8;  // so many have time to transpose a chunk of keys

template <class T>
struct Attention : Call {
    const Stored<T>& stored;
    float* q;  // the queries of every token; attention overwrites them by its output
    float scale = 1.0f / std::sqrt(float(model.head_dim));  // of the scores
    Int chunks;  // of keys, for the longest text; the last chunk of a run may not be full
    Int memory_bytes;
    // In the workspace:
    char* memory;            // each thread's
    float* split_parts;      // of every token, chunk and head, if threads divide the keys
    float* bounds;           // of every row, kv head and page, if rows select pages
    std::int32_t* selected;  // (rows, kv_heads, batch.pages): the pages that are read, in ascending order

    Attention(const Stored<T>& stored, float* q, Carver& carver) : Call(stored), stored(stored), q(q) {
        const Int most_keys = selects_pages && tokens == batch.rows ? batch.pages * PAGE : longest;
        chunks = chunks_for(most_keys) + (batch.kind == COMPRESSED);
        Carver counter{nullptr};
        Scratch counted(*this, counter);
        memory_bytes = counter.used, memory = carver.take<char>(threads * memory_bytes);
        split_parts = carver.take<float>(split_keys ? tokens * chunks * model.heads * part_size() : 0);
        bounds = carver.take<float>(batch.rows * model.kv_heads * most_pages);
        selected = carver.take<std::int32_t>(selects_pages ? batch.rows * model.kv_heads * batch.pages : 0);
    }

    // The memory of a thread, for at most so many queries.
    struct Scratch {
        T *queries, *turned;  // turned: a chunk of keys, see `score_in_lanes`
        float *scores, *parts, *sums, *most, *total;
        float *wide, *group, *keys;  // with groups in the cache: the queries in float32, and memory to read a group
        std::uint8_t* codes;
        float* sums_of_keys;  // else: of LANES keys and all queries
        T* split;             // if rows select pages: the queries of a kv head by sign, and memory for their bounds
        float *bounds, *sorted;

        Scratch(const Attention& of, Carver& carver) {
            const Int n = std::max(QUERIES, of.model.heads), d = of.model.head_dim;
            queries = carver.take<T>(n * d), turned = carver.take<T>(KEYS * d), scores = carver.take<float>(n * KEYS);
            parts = carver.take<float>(n * of.part_size()), sums = carver.take<float>(n * d);
            most = carver.take<float>(n), total = carver.take<float>(n);
            wide = group = keys = sums_of_keys = bounds = sorted = nullptr, codes = nullptr, split = nullptr;
            if (!of.grouped()) sums_of_keys = carver.take<float>(of.model.heads * LANES * LANES);
            if (of.selects_pages) {
                split = carver.take<T>(2 * of.rep * d), bounds = carver.take<float>(2 * of.rep * PAGES);
                sorted = carver.take<float>(of.most_pages);
            }
            if (!of.grouped()) return;
            wide = carver.take<float>(n * d), group = carver.take<float>(TOGETHER * std::max(d, of.groups.tokens));
            keys = carver.take<float>(d * AT_ONCE), codes = carver.take<std::uint8_t>(of.stored.codes_of_group());
        }
    };

    // Keys and values of up to KEYS positions and one kv head, in runs of `run` positions, `stride` apart.
    struct Chunk {
        const T *keys[KEYS / PAGE], *values[KEYS / PAGE];
        Int stride, run;

        const T* key_at(Int i) const { return keys[i / run] + i % run * stride; }
    };

    char* memory_of(const Team& all) const { return memory + all.rank * memory_bytes; }
    static Int chunks_for(Int keys) { return (keys + KEYS - 1) / KEYS; }
    Int part_size() const { return model.head_dim + LANES; }
    float* split_part(Int t, Int head, Int chunk) const {
        return split_parts + ((t * chunks + chunk) * model.heads + head) * part_size();
    }

    // ---- the division of the work among threads ----------------------------------------------------------------------

    // Compute attention for a block's tokens.
    void attend(const LayerCache& cache, Int first, Int count, const Team& team, char* memory) const {
        Carver carver{memory};
        Scratch scratch(*this, carver);
        if (selects_pages) select_pages(cache, first, count, team, scratch);
        for (Int t = first, end; t < first + count; t = end) {
            for (end = t + 1; end < first + count && by_head(end) == by_head(t);) end++;
            if (by_head(t)) attend_by_head(cache, t, end - t, team, scratch);
            else if (split_keys) attend_split_keys(cache, t, end - t, team, scratch);
            else attend_by_row(cache, t, end - t, team, scratch);
        }
    }

    // Whether each kv head of a token reads other positions.
    bool by_head(Int t) const { return batch.kind == COMPRESSED || (selects_pages && batch.lengths[row[t]] == 1); }

    // Threads divide the rows of a block, or the kv heads of each.
    void attend_by_row(const LayerCache& cache, Int first, Int count, const Team& team, Scratch& scratch) const {
        Int task = 0;
        for (Int t = first; t < first + count;) {
            Int end = t;  // the end of the tokens of one row that read its keys together
            while (end < first + count && row[end] == row[t] && (end == t || (end - t + 1) * rep <= QUERIES)) end++;
            // All heads of a token read its keys at once.
            const Int heads = end - t > 1 ? rep : model.heads;
            for (Int head = 0; head < model.heads; head += heads)
                if (task++ % team.size == team.rank) attend_to_all(cache, t, end - t, head, heads, scratch);
            t = end;
        }
    }

    // The same for too few tokens to divide: threads divide the chunks of their keys, each a contiguous range, which is
    // faster than alternating chunks, and then the heads.
    void attend_split_keys(const LayerCache& cache, Int first, Int count, const Team& team, Scratch& scratch) const {
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
                    load_queries(scratch, t, 1, head, heads);
                    attend_chunk(scratch, cache, t, 1, head, heads, from, split_part(t, head, from / KEYS));
                }
        merge_split(first, count, team, scratch, [&](Int t, Int) { return chunks_for(position[t] + 1); });
    }

    // Merge the parts of all threads, of which each has some tokens' heads.
    template <class Chunks>
    void merge_split(Int first, Int count, const Team& team, Scratch& scratch, Chunks chunks_of) const {
        team.wait();
        for (Int i = team.rank; i < count * model.heads; i += team.size) {
            const Int t = first + i / model.heads, head = i % model.heads;
            begin_sums(scratch, 0);
            for (Int chunk = 0; chunk < chunks_of(t, head); chunk++) {
                if (chunk && chunk * KEYS == stored.first_own(row[t])) end_groups(scratch, 0);
                merge(scratch, 0, split_part(t, head, chunk));
            }
            finish(scratch, 0, t, head);
        }
    }

    // Attention of tokens of different rows, of which each kv head reads other positions. Threads divide the chunks of all
    // keys: each has a contiguous range, except of many rows, of which each has whole kv heads.
    void attend_by_head(const LayerCache& cache, Int first, Int count, const Team& team, Scratch& scratch) const {
        Int tasks = 0, task = 0;
        auto each = [&](auto act) {  // the first head and the number of chunks of every token and kv head
            for (Int t = first; t < first + count; t++)
                for (Int head = 0; head < model.heads; head += rep) act(t, head, own_chunks(cache, t, head));
        };
        if (!split_keys)
            return each([&](Int t, Int head, Int chunks) {
                if (task++ % team.size != team.rank) return;
                load_queries(scratch, t, 1, head, rep);
                for (Int i = 0; i < rep; i++) begin_sums(scratch, i);
                for (Int chunk = 0; chunk < chunks; chunk++) {
                    attend_own_chunk(scratch, cache, t, head, chunk, scratch.parts);
                    for (Int i = 0; i < rep; i++) merge(scratch, i, scratch.parts + i * part_size());
                }
                for (Int i = 0; i < rep; i++) finish(scratch, i, t, head + i);
            });
        each([&](Int, Int, Int chunks) { tasks += chunks; });
        const Int begin = tasks * team.rank / team.size, end = tasks * (team.rank + 1) / team.size;
        each([&](Int t, Int head, Int chunks) {
            for (Int chunk = 0; chunk < chunks; chunk++, task++) {
                if (task < begin || task >= end) continue;
                load_queries(scratch, t, 1, head, rep);
                attend_own_chunk(scratch, cache, t, head, chunk, split_part(t, head, chunk));
            }
        });
        merge_split(first, count, team, scratch, [&](Int t, Int head) { return own_chunks(cache, t, head); });
    }

    // ---- what each kv head reads -------------------------------------------------------------------------------------

    // The run of a token's kv head: its first key, and its length.
    Int run_begin(const LayerCache& cache, Int t, Int head) const {
        return cache.runs[row[t] * model.kv_heads + head / rep];
    }
    Int run_length(const LayerCache& cache, Int t, Int head) const {
        return run_begin(cache, t, head + rep) - run_begin(cache, t, head);
    }
    Int own_chunks(const LayerCache& cache, Int t, Int head) const {
        if (selects_pages) return chunks_for(selected_keys(t));
        return chunks_for(run_length(cache, t, head)) + chunks_for(position[t] + 1 - batch.bases[row[t]]);
    }

    // Select the pages that each kv head of a token reads: those with the largest bounds, and the newest.
    void select_pages(const LayerCache& cache, Int first, Int count, const Team& team, Scratch& scratch) const {
        const Int d = model.head_dim;
        for (Int t = first; t < first + count; t++) {
            if (!by_head(t)) continue;
            const Int older = position[t] / PAGE, begin = older * team.rank / team.size;
            const Int pages = older * (team.rank + 1) / team.size - begin;
            for (Int head = 0; head < model.heads; head += rep) {
                const Int at = stored.page_index(row[t], begin) + head / rep * d;
                load_queries(scratch, t, 1, head, rep);
                split_by_sign(scratch.queries, rep * d, scratch.split);
                bound_scores<T>(scratch.split, rep, d, {(const T*)cache.lows + at, (const T*)cache.highs + at, kv}, pages,
                                scratch.bounds, bounds + kv_head_index(t, head) * most_pages + begin);
            }
        }
        team.wait();
        for (Int i = team.rank; i < count * model.kv_heads; i += team.size) {
            const Int t = first + i / model.kv_heads, index = kv_head_index(t, i % model.kv_heads * rep);
            if (!by_head(t)) continue;
            std::int32_t* to = selected + index * batch.pages;
            const Int older = position[t] / PAGE, others = selected_pages(t) - 1;
            write_places_of_largest(bounds + index * most_pages, older, others, scratch.sorted, to);
            to[others] = std::int32_t(older);
        }
        team.wait();
    }

    Int kv_head_index(Int t, Int head) const { return row[t] * model.kv_heads + head / rep; }
    Int selected_pages(Int t) const { return std::min(batch.pages, position[t] / PAGE + 1); }
    Int selected_keys(Int t) const { return (selected_pages(t) - 1) * PAGE + position[t] % PAGE + 1; }

    // ---- chunks ------------------------------------------------------------------------------------------------------

    void load_queries(Scratch& scratch, Int t, Int count, Int head, Int heads) const {  // head by head
        const Int d = model.head_dim;
        for (Int i = 0; i < heads * count; i++) {
            const float* from = q + (t + i % count) * queries + (head + i / count) * d;
            T* to = scratch.queries + i * d;
            for (Int j = 0; j < d; j += LANES) narrow(widen(from + j), to + j);
            for (Int j = 0; grouped() && j < d; j += LANES) store(scratch.wide + i * d + j, widen(to + j));
        }
    }

    // Attention of tokens t .. t + count - 1, of one row, to their past, for `heads` heads of whole kv heads.
    void attend_to_all(const LayerCache& cache, Int t, Int count, Int head, Int heads, Scratch& scratch) const {
        load_queries(scratch, t, count, head, heads);
        for (Int i = 0; i < heads * count; i++) begin_sums(scratch, i);
        for (Int from = 0; from <= position[t + count - 1]; from += KEYS) {
            attend_chunk(scratch, cache, t, count, head, heads, from, scratch.parts);
            for (Int i = 0; i < heads * count; i++) {
                if (from && from == stored.first_own(row[t])) end_groups(scratch, i);
                if (from <= position[t + i % count]) merge(scratch, i, scratch.parts + i * part_size());
            }
        }
        for (Int i = 0; i < heads * count; i++) finish(scratch, i, t + i % count, head + i / count);
    }

    // Attention to the chunk of keys that begins at `from`; the parts of all queries are written to `to` in order.
    void attend_chunk(Scratch& scratch, const LayerCache& cache, Int t, Int count, Int head, Int heads, Int from,
                      float* to) const {
        const Int d = model.head_dim, group = std::min(rep, heads) * count, size = part_size();
        const Int seen = std::min(KEYS, position[t + count - 1] + 1 - from);
        const Int quantized = grouped() ? std::clamp<Int>(stored.first_own(row[t]) - from, 0, seen) : 0;
        const bool at_once = heads == model.heads && count == 1 && !grouped();
        if (at_once) score_all_heads(scratch, cache, row[t], from, seen);
        for (Int i = 0; i < heads * count; i += group) {
            const Int at = (head + i / count) / rep * d;
            float* scores = scratch.scores + i * KEYS;
            const Chunk chunk = load_keys(cache, row[t], from + quantized, from + seen, at);
            for (Int key = 0; key < quantized; key += groups.tokens)
                score_quantized(scratch, cache, row[t], from + key, at / d, group, scratch.wide + i * d, scores + key);
            const Int sinks_here = from == 0 && quantized ? stored.sinks() : 0;
            if (sinks_here)
                all_dots(scratch.queries + i * d, d, group, stored.own_keys + stored.sink_index(row[t], 0) + at, kv,
                         sinks_here, d, scores, KEYS);
            if (count > 1 && group >= SCORED_IN_LANES)
                score_in_lanes(scratch, chunk, seen - quantized, i, group, scores + quantized);
            else for (Int key = quantized; key < seen && !at_once; key += chunk.run)
                all_dots(scratch.queries + i * d, d, group, chunk.keys[(key - quantized) / chunk.run], chunk.stride,
                         std::min(chunk.run, seen - key), d, scores + key, KEYS);
            for (Int j = i; j < i + group; j++)
                softmax_sum(scratch.scores + j * KEYS, std::min(seen, position[t + j % count] + 1 - from), to + j * size);
            by_rows(group, [&](auto rows, Int j) {
                sum_values<decltype(rows)::value>(scores + j * KEYS + quantized, chunk, seen - quantized,
                                                  to + (i + j) * size + LANES, size);
            });
            for (Int j = i; sinks_here && j < i + group; j++)
                add_sinks(scratch, row[t], at, scratch.scores + j * KEYS, to + j * size + LANES);
            for (Int key = 0; key < quantized; key += groups.tokens)
                add_quantized(scratch, cache, row[t], from + key, at / d, group, scores + key, to + i * size + LANES);
        }
    }

    // Attention of a token's heads that share a kv head to a chunk of what it reads: of the selected pages, or of its run
    // and, after these chunks, of the slots behind it.
    void attend_own_chunk(Scratch& scratch, const LayerCache& cache, Int t, Int head, Int number, float* to) const {
        if (selects_pages) {
            const Int seen = std::min(KEYS, selected_keys(t) - number * KEYS);
            return attend_keys(scratch, load_pages(cache, t, head, number * KEYS / PAGE), seen, nullptr, to);
        }
        const Int d = model.head_dim, length = run_length(cache, t, head);
        const Int kept = chunks_for(length), behind = batch.bases[row[t]] + (number - kept) * KEYS;
        const Int seen = std::min(KEYS, number < kept ? length - number * KEYS : position[t] + 1 - behind);
        if (number >= kept)
            return attend_keys(scratch, load_keys(cache, row[t], behind, behind + seen, head / rep * d), seen, nullptr, to);
        const Int from = (run_begin(cache, t, head) + number * KEYS) * d;
        const Chunk chunk{{(const T*)cache.kept_keys + from}, {(const T*)cache.kept_values + from}, d, KEYS};
        attend_keys(scratch, chunk, seen, chunk.values[0], to);
    }

    // `next`: the values, if they are contiguous; they are prefetched.
    void attend_keys(Scratch& scratch, const Chunk& chunk, Int seen, const T* next, float* to) const {
        const Int d = model.head_dim, size = part_size();
        for (Int key = 0; key < seen; key += chunk.run)
            all_dots(scratch.queries, d, rep, chunk.keys[key / chunk.run], chunk.stride, std::min(chunk.run, seen - key), d,
                     scratch.scores + key, KEYS, next);
        for (Int i = 0; i < rep; i++) softmax_sum(scratch.scores + i * KEYS, seen, to + i * size);
        by_rows(rep, [&](auto rows, Int i) {
            sum_values<decltype(rows)::value>(scratch.scores + i * KEYS, chunk, seen, to + i * size + LANES, size);
        });
    }

    // The pages that a kv head reads, from number `from` of the selected ones on.
    Chunk load_pages(const LayerCache& cache, Int t, Int head, Int from) const {
        Chunk chunk{{}, {}, kv, PAGE};
        const std::int32_t* pages = selected + kv_head_index(t, head) * batch.pages;
        for (Int i = 0; i < KEYS / PAGE && from + i < selected_pages(t); i++) {
            const Int at = (row[t] * batch.slots + pages[from + i] * PAGE) * kv + head / rep * model.head_dim;
            chunk.keys[i] = (const T*)cache.keys + at, chunk.values[i] = (const T*)cache.values + at;
        }
        return chunk;
    }

    // The unquantised keys and values of positions `from` to `end`, `at` numbers after a token's first.
    Chunk load_keys(const LayerCache& cache, Int row, Int from, Int end, Int at) const {
        Chunk chunk{{}, {}, kv, batch.kind == PAGED ? PAGE : KEYS};
        for (Int p = from, i = 0; p < end; p += chunk.run, i++) {
            chunk.keys[i] = stored.keys_at(cache, row, p) + at;
            chunk.values[i] = stored.values_at(cache, row, p) + at;
        }
        return chunk;
    }

    // ---- scores ------------------------------------------------------------------------------------------------------

    // The scores of a token's queries, all heads of a key at once: contiguous bytes are faster to read than those of
    // one head. The values are prefetched meanwhile.
    void score_all_heads(Scratch& scratch, const LayerCache& cache, Int row, Int from, Int seen) const {
        for (Int first = 0; first < seen; first += LANES) {
            for (Int key = first; key < std::min(first + LANES, seen); key++) {
                const T* ks = stored.keys_at(cache, row, from + key);
                const T* vs = stored.values_at(cache, row, from + key);
                for (Int i = 0; i < kv; i += 64 / Int(sizeof(T))) __builtin_prefetch(vs + i, 0, 2);
                for (Int head = 0; head < model.heads; head += rep, ks += model.head_dim)
                    by_rows(rep, [&](auto rows, Int r) {
                        float* to = scratch.sums_of_keys + ((head + r) * LANES + key - first) * LANES;
                        key_sums<decltype(rows)::value>(scratch.queries + (head + r) * model.head_dim, ks, to);
                    });
            }
            for (Int head = 0; head < model.heads; head++) {
                floats of_key[LANES];
                for (int i = 0; i < LANES; i++) of_key[i] = widen(scratch.sums_of_keys + (head * LANES + i) * LANES);
                store(scratch.scores + head * KEYS + first, sums_of(of_key));
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

    // The scores of queries i to i + count - 1 of one kv head with `seen` keys, of which a vector has one in each lane: so no
    // lanes of a vector are added. The order of each sum is that of `dots`.
    void score_in_lanes(Scratch& scratch, const Chunk& chunk, Int seen, Int i, Int count, float* to) const {
        const Int d = model.head_dim, numbers = 4 / Int(sizeof(T)), width = d / numbers;  // numbers in a lane; lanes of a key
        float* turned = (float*)scratch.turned;  // (width, KEYS)
        for (Int key = 0; key < seen; key += LANES)
            for (Int at = 0; at < width; at += LANES) {
                floats some[LANES];
                UNROLL for (int lane = 0; lane < LANES; lane++)
                    some[lane] = key + lane < seen ? load<floats>(chunk.key_at(key + lane) + at * numbers) : floats{};
                transpose(some);
                UNROLL for (int lane = 0; lane < LANES; lane++) store(turned + (at + lane) * KEYS + key, some[lane]);
            }
        by_rows(count, [&](auto rows, Int r) {
            constexpr int ROWS = decltype(rows)::value, WIDE = 2;
            for (Int key = 0; key < seen; key += WIDE * LANES) {
                floats sums[ROWS][WIDE];
                add_lanes<1>(scratch.queries + (i + r) * d, turned + key, 0, sums);
                for (int q = 0; q < ROWS; q++)
                    std::memcpy(to + (r + q) * KEYS + key, sums[q], std::min<Int>(WIDE * LANES, seen - key) * sizeof(float));
            }
        });
    }

    // sums = the sums of every STEP-th lane of a query times a key, from `lane` on, as `sums_of` adds lanes.
    template <int STEP, int ROWS, int WIDE>
    INLINE void add_lanes(const T* queries, const float* keys, Int lane, floats (&sums)[ROWS][WIDE]) const {
        if constexpr (STEP == LANES) {
            UNROLL for (int q = 0; q < ROWS; q++) UNROLL for (int v = 0; v < WIDE; v++) sums[q][v] = floats{};
            for (Int at = lane; at < model.head_dim * Int(sizeof(T)) / 4; at += LANES) {
                decltype(take(queries)) some[WIDE];
                UNROLL for (int v = 0; v < WIDE; v++) some[v] = held(take((const T*)(keys + at * KEYS + v * LANES)));
                UNROLL for (int q = 0; q < ROWS; q++) {
                    const auto one = (decltype(take(queries)))every_at((const char*)(queries + q * model.head_dim) + at * 4);
                    UNROLL for (int v = 0; v < WIDE; v++) sums[q][v] = multiply_add(sums[q][v], one, some[v]);
                }
            }
        } else {
            floats others[ROWS][WIDE];
            add_lanes<2 * STEP>(queries, keys, lane, sums);
            add_lanes<2 * STEP>(queries, keys, lane + STEP, others);
            UNROLL for (int q = 0; q < ROWS; q++) UNROLL for (int v = 0; v < WIDE; v++) sums[q][v] += others[q][v];
        }
    }

    // The scores of the group of keys at `p`, for so many queries of a kv head.
    void score_quantized(Scratch& scratch, const LayerCache& cache, Int row, Int p, Int head, Int count,
                         const float* wide, float* to) const {
        const Int d = model.head_dim, size = groups.tokens;
        const Quantized group = stored.key_group(cache, row, p / size, head);
        const std::uint8_t* codes = codes_of(group.codes, groups.key_bits, size, d * size, scratch.codes);
        if (!stored.angles)
            return by_rows(count, [&](auto rows, Int r) {
                score_group<decltype(rows)::value>(group, codes, size, d, wide + r * d, scratch.group, to + r * KEYS, KEYS);
            });
        for (Int i = 0; i < size; i += AT_ONCE) {
            rotated_keys(group, codes + i, size, d, stored.angles + p * d + i, scratch.keys);
            by_rows(count, [&](auto rows, Int r) {
                score_keys<decltype(rows)::value>(scratch.keys, d, wide + r * d, to + r * KEYS + i, KEYS);
            });
        }
    }

    // Convert a query's scores to weights relative to the largest; a part begins with that score and the weights' sum.
    // Keys that the query may not see have weight 0; if it sees none, its part is never read.
    void softmax_sum(float* scores, Int visible, float* part) const {
        const Int end = (std::max<Int>(visible, 0) + LANES - 1) / LANES * LANES;
        for (Int key = std::max<Int>(visible, 0); key < KEYS; key++) scores[key] = key < end ? -INFINITY : 0;
        floats largest = floats{} - INFINITY;
        for (Int key = 0; key < end; key += LANES) largest = larger(widen(scores + key), largest);
        const float most = largest_of(largest);
        floats total = {};
        for (Int key = 0; key < end; key += LANES) {
            const floats weight = exp_of((widen(scores + key) - most) * scale);
            store(scores + key, weight);
            total += weight;
        }
        part[0] = most, part[1] = sum_of(total);
    }

    // ---- values ------------------------------------------------------------------------------------------------------

    // sum[i] = the sum of weights[i][key] * values[key], for ROWS queries and WIDTH vectors of a head from `at` on.
    template <int ROWS, int WIDTH>
    void sum_some(const float* weights, const Chunk& chunk, Int at, Int seen, float* sum, Int stride) const {
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
    void sum_values(const float* weights, const Chunk& chunk, Int seen, float* sum, Int stride) const {
        Int j = 0;
        for (; j + 4 * LANES <= model.head_dim; j += 4 * LANES)
            sum_some<ROWS, 4>(weights, chunk, j, seen, sum + j, stride);
        for (; j < model.head_dim; j += LANES) sum_some<ROWS, 1>(weights, chunk, j, seen, sum + j, stride);
    }

    // Add the values of the group at `p`, times their weights.
    void add_quantized(Scratch& scratch, const LayerCache& cache, Int row, Int p, Int head, Int count,
                       const float* weights, float* to) const {
        const Int d = model.head_dim, size = groups.tokens;
        const Quantized group = stored.value_group(cache, row, p / size, head);
        const std::uint8_t* codes = codes_of(group.codes, groups.value_bits, groups.run(d), d * size, scratch.codes);
        by_rows(count, [&](auto rows, Int r) {
            add_group<decltype(rows)::value>(group, codes, size, d, groups.parts, weights + r * KEYS, KEYS, scratch.group,
                                             to + r * part_size(), part_size());
        });
    }

    // Add the sinks' values, times their weights, to the sums over the first groups, where these weights become 0.
    void add_sinks(Scratch& scratch, Int row, Int at, float* weights, float* to) const {
        const Int d = model.head_dim;
        float* sum = scratch.group;
        std::fill_n(sum, d, 0.0f);
        for (Int p = 0; p < stored.sinks(); p++) {
            const T* vs = stored.own_values + stored.sink_index(row, p) + at;
            for (Int i = 0; i < d; i += LANES)
                store(sum + i, multiply_add(widen(sum + i), widen(vs + i), weights[p]));
            weights[p] = 0;
        }
        if (groups.rotates_values) hadamard(sum, d);
        for (Int i = 0; i < d; i += LANES) store(to + i, widen(to + i) + widen(sum + i));
    }

    // ---- sums over chunks --------------------------------------------------------------------------------------------

    void begin_sums(Scratch& scratch, Int i) const {
        std::fill_n(scratch.sums + i * model.head_dim, model.head_dim, 0.0f);
        scratch.most[i] = -INFINITY, scratch.total[i] = 0;
    }

    // Rotate the sums over all groups back, before those over other positions are added.
    void end_groups(Scratch& scratch, Int i) const {
        if (groups.rotates_values) hadamard(scratch.sums + i * model.head_dim, model.head_dim);
    }

    // Add a part to query i's sums, both rescaled to the larger of their largest scores.
    // Source: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    void merge(Scratch& scratch, Int i, const float* part) const {
        float* sum = scratch.sums + i * model.head_dim;
        const float most = std::max(scratch.most[i], part[0]);
        auto factor = [&](float of) { return of == most ? 1 : exp_of(floats{} + (of - most) * scale)[0]; };
        const float old = factor(scratch.most[i]), now = factor(part[0]);
        scratch.total[i] = scratch.total[i] * old + part[1] * now, scratch.most[i] = most;
        for (Int j = 0; j < model.head_dim; j += LANES)
            store(sum + j, multiply_add(widen(part + LANES + j) * now, widen(sum + j), old));
    }

    // Write the output of query i in the place of the token's query of this head.
    void finish(const Scratch& scratch, Int i, Int t, Int head) const {
        float* to = q + t * queries + head * model.head_dim;
        for (Int j = 0; j < model.head_dim; j += LANES)
            store(to + j, widen(scratch.sums + i * model.head_dim + j) / scratch.total[i]);
    }
};

}  // namespace
