// The likeliest of a row's tokens. Its plain twin is `_choose` of generation.py.

#pragma once

#include "vectors.h"

namespace {

// Where the largest of so many logits stands, the first of equals; -1 where their sum is not finite, as it is not where
// one of them is a nan or an infinity.
inline Int likeliest_of(const float* logits, Int count) {
    constexpr Int SOME = 32 * LANES;  // logits that are looked through once more, for the place
    float most = -INFINITY, total = 0;
    Int begin = 0;
    floats totals = {};
    for (Int first = 0; first < count; first += SOME) {
        const Int end = std::min(count, first + SOME);
        floats largest = floats{} - INFINITY;
        Int i = first;
        for (; i + LANES <= end; i += LANES) {
            const floats some = widen(logits + i);
            largest = some > largest ? some : largest;
            totals += some;
        }
        float here = -INFINITY;
        for (int lane = 0; lane < LANES; lane++) here = std::max(here, largest[lane]);
        for (; i < end; i++) here = std::max(here, logits[i]), total += logits[i];
        if (here > most) most = here, begin = first;
    }
    if (!std::isfinite(total + sum_of(totals))) return -1;
    while (logits[begin] != most) begin++;
    return begin;
}

}  // namespace
