// The keys and values of all positions of a call: where they are, and how a token's are stored. T: the cache's dtype.
//
// Attention reads unquantised positions in the cache, or, without a cache and with GROUPED, in a copy in the workspace.

#pragma once

#include "call.h"
#include "pages.h"

namespace {

template <class T>
struct Stored : Call {
    // The copy, row after row: the rotated keys, and the values, of every token; with groups in the cache, also of
    // earlier positions in full precision, the sinks first.
    T *own_keys = nullptr, *own_values = nullptr;
    T* before_rope = nullptr;  // the same keys before RoPE, if the cache stores these
    Int* own_begin;            // where each row begins in the copy
    float* angles = nullptr;   // then also cos and sin of every group's positions, (groups, head_dim / 2, 2, tokens)

    Stored(const Call& call, Carver& carver) : Call(call) {
        own_begin = carver.take<Int>(batch.rows + 1);
        const Int count = own_count() * kv;
        if (copies()) own_keys = carver.take<T>(count), own_values = carver.take<T>(count);
        if (!grouped() || !groups.before_rope) return;
        before_rope = carver.take<T>(count), angles = carver.take<float>(most_quantized() * model.head_dim);
    }

    void write_begins() const {
        for (Int r = 0, begin = 0; r < batch.rows; r++) {
            own_begin[r] = begin;
            begin += sinks() + batch.starts[r] + batch.lengths[r] - first_own(r);
        }
    }

    bool copies() const { return batch.kind == NONE || grouped(); }
    // The first position behind the sinks that attention reads unquantised, and the number of such positions, and of
    // sinks, of all rows.
    Int first_own(Int row) const { return grouped() ? groups.quantized(batch.starts[row]) : 0; }
    Int sinks() const { return grouped() ? groups.sinks : 0; }
    Int own_count() const {
        Int count = tokens + sinks() * batch.rows;
        for (Int r = 0; r < batch.rows; r++) count += batch.starts[r] - first_own(r);
        return count;
    }

    Int most_quantized() const {  // positions of a row
        Int most = 0;
        for (Int r = 0; r < batch.rows; r++) most = std::max(most, first_own(r));
        return most;
    }

    // ---- where numbers are -------------------------------------------------------------------------------------------

    T* keys_at(const LayerCache& cache, Int row, Int position) const {
        return address(cache.table, cache.keys, own_keys, row, position);
    }
    T* values_at(const LayerCache& cache, Int row, Int position) const {
        return address(cache.table, cache.values, own_values, row, position);
    }

    // The address of a position's keys or values: in the layer's cache, or in the copy.
    T* address(const std::int32_t* table, void* cache, T* own, Int row, Int position) const {
        if (copies()) return own + own_index(row, position);
        if (batch.bases) position -= batch.bases[row];
        if (table) position = table[row * batch.slots + position / PAGE] * PAGE + position % PAGE;
        else position += row * batch.slots;
        return (T*)cache + position * kv;
    }
    Int own_index(Int row, Int position) const { return (own_begin[row] + sinks() + position - first_own(row)) * kv; }
    Int sink_index(Int row, Int position) const { return (own_begin[row] + position) * kv; }
    // The index of a slot of the keys or values that the cache stores in full precision: of a sink, or of the window.
    Int slot_index(Int row, Int slot) const {
        return (row * (groups.sinks + groups.window + groups.tokens) + slot) * kv;
    }
    Int window_index(Int row, Int position) const {
        return slot_index(row, groups.sinks + position % (groups.window + groups.tokens));
    }
    Int page_index(Int row, Int page) const { return (row * ((batch.slots + PAGE - 1) / PAGE) + page) * kv; }

    Quantized key_group(const LayerCache& cache, Int row, Int group, Int head) const {
        return cache.key.at(group_index(row, group, head), codes_of_group() * groups.key_bits / 8, model.head_dim);
    }
    Quantized value_group(const LayerCache& cache, Int row, Int group, Int head) const {
        const Int bytes = codes_of_group() * groups.value_bits / 8;
        return cache.value.at(group_index(row, group, head), bytes, groups.tokens * groups.parts);
    }
    Int group_index(Int row, Int group, Int head) const { return (row * batch.slots + group) * model.kv_heads + head; }
    Int codes_of_group() const { return model.head_dim * groups.tokens; }

    // ---- rotation ----------------------------------------------------------------------------------------------------

    // Rotate pairs of neighbours by the token's position.
    void rotate(float* x, Int count, Int position) const {
        const float *cos = batch.cos + position * model.head_dim, *sin = batch.sin + position * model.head_dim;
        for (Int head = 0; head < count; head++, x += model.head_dim)
            for (Int i = 0; i < model.head_dim; i += 2) {
                const float a = x[i], b = x[i + 1];
                x[i] = a * cos[i] + b * sin[i];
                x[i + 1] = b * cos[i + 1] + a * sin[i + 1];
            }
    }

    // The same for numbers of the cache's dtype, rounded to it again.
    void rotate_rounded(const T* x, T* to, Int count, Int position) const {
        for (Int i = 0; i < count; i += LANES) {
            const Int at = position * model.head_dim + i % model.head_dim;
            const floats number = widen(x + i);
            narrow(number * widen(batch.cos + at) + neighbours(number) * widen(batch.sin + at), to + i);
        }
    }

    // Write cos and sin of every group's positions in the order in which its keys are read.
    void write_angles(const Team& all) const {
        const Int d = model.head_dim, size = groups.tokens, count = most_quantized() / size;
        for (Int g = count * all.rank / all.size; g < count * (all.rank + 1) / all.size; g++)
            for (Int c = 0; c < d; c += 2)
                for (Int token = 0; token < size; token++) {
                    const Int at = (g * size + token) * d + c;
                    float* to = angles + (g * d + c) * size + token;
                    to[0] = batch.cos[at], to[size] = batch.sin[at + 1];  // the first of two has -sin
                }
    }

    // ---- the tokens of a call ----------------------------------------------------------------------------------------

    // Rotate a token's keys, and store them and its values.
    void store_token(const LayerCache& cache, Int t, float* k, float* v) const {
        if (before_rope) {  // stored keys are rounded before the rotation
            T* to = before_rope + own_index(row[t], position[t]);
            for (Int i = 0; i < kv; i += LANES) narrow(widen(k + i), to + i), store(k + i, widen(to + i));
        }
        rotate(k, model.kv_heads, position[t]);
        T *to_keys = keys_at(cache, row[t], position[t]), *to_values = values_at(cache, row[t], position[t]);
        for (Int i = 0; i < kv; i += LANES) narrow(widen(k + i), to_keys + i), narrow(widen(v + i), to_values + i);
    }

    // With groups: copy the positions in full precision from the cache.
    void load_window(const LayerCache& cache, const Team& all) const {
        auto copy = [&](Int position, Int from, Int to) {
            std::memcpy(own_values + to, (const T*)cache.values + from, kv * sizeof(T));
            std::memcpy((before_rope ? before_rope : own_keys) + to, (const T*)cache.keys + from, kv * sizeof(T));
            if (before_rope) rotate_rounded(before_rope + to, own_keys + to, kv, position);
        };
        for (Int r = 0; r < batch.rows; r++) {
            for (Int p = all.rank; first_own(r) && p < sinks(); p += all.size)
                copy(p, slot_index(r, p), sink_index(r, p));
            for (Int p = first_own(r) + all.rank; p < batch.starts[r]; p += all.size)
                copy(p, window_index(r, p), own_index(r, p));
        }
    }

    // Quantise the groups that this call pushed out of the window, and store what is in it, and new sinks. `scratch` has
    // 2 x head_dim numbers.
    void store_groups(const LayerCache& cache, const Team& all, float* scratch) const {
        const T* ks = before_rope ? before_rope : own_keys;
        Int task = 0;
        for (Int r = 0; r < batch.rows; r++) {
            const Int start = batch.starts[r], end = start + batch.lengths[r];
            for (Int group = first_own(r) / groups.tokens; group < groups.quantized(end) / groups.tokens; group++)
                for (Int head = 0; head < model.kv_heads; head++)
                    if (task++ % all.size == all.rank) quantize(cache, ks, r, group, head, scratch);
            auto copy = [&](Int p, Int to) {
                if (task++ % all.size != all.rank) return;
                std::memcpy((T*)cache.keys + to, ks + own_index(r, p), kv * sizeof(T));
                std::memcpy((T*)cache.values + to, own_values + own_index(r, p), kv * sizeof(T));
            };
            // From `end` - 1 on, because the tokens of a full group may be fed again.
            for (Int p = std::max(groups.quantized(end - 1), start); p < end; p++) copy(p, window_index(r, p));
            for (Int p = start; p < std::min(sinks(), end); p++) copy(p, slot_index(r, p));
        }
    }

    void quantize(const LayerCache& cache, const T* ks, Int row, Int group, Int head, float* scratch) const {
        const Int d = model.head_dim, from = own_index(row, group * groups.tokens) + head * d;
        const Int skipped = group ? 0 : groups.sinks;
        make_keys(ks + from, kv, d, groups, skipped, key_group(cache, row, group, head));
        make_values(own_values + from, kv, d, groups, skipped, scratch, value_group(cache, row, group, head));
    }

    // With QUEST: compute the bounds of the pages that this call writes to.
    void store_bounds(const LayerCache& cache, const Team& all) const {
        Int task = 0;
        for (Int r = 0; r < batch.rows; r++) {
            const Int start = batch.starts[r], end = start + batch.lengths[r];
            for (Int from = start / PAGE * PAGE; from < end; from += PAGE) {
                if (task++ % all.size != all.rank) continue;
                const Int at = page_index(r, from / PAGE);
                write_extremes(keys_at(cache, r, from), std::min(PAGE, end - from), kv, (T*)cache.lows + at,
                               (T*)cache.highs + at);
            }
        }
    }
};

}  // namespace
