// Pages of keys, and the choice of those that a query reads, as kv_cache/quest.py defines them.
//
// A page has the smallest and the largest number of each channel of its keys. They bound the score of a query with any
// of these keys. Between equal bounds the earlier page is chosen.

#pragma once

#include <functional>

#include "vectors.h"

namespace {

constexpr Int PAGES = 64;  // whose bounds are computed at a time

// Write the smallest and the largest number of each channel of contiguous keys with `length` channels.
template <class T>
void write_extremes(const T* keys, Int count, Int length, T* low, T* high) {
    for (Int i = 0; i < length; i += LANES) {
        floats least = widen(keys + i), most = least;
        for (Int key = 1; key < count; key++) {
            const floats number = widen(keys + key * length + i);
            least = number < least ? number : least, most = larger(number, most);
        }
        narrow(least, low + i), narrow(most, high + i);
    }
}

// Write the positive numbers of x, and behind them its negative numbers; 0 in the place of the others.
template <class T>
void split_by_sign(const T* x, Int count, T* to) {
    for (Int i = 0; i < count; i += LANES) {
        const floats number = widen(x + i);
        narrow(number > 0.0f ? number : floats{}, to + i);
        narrow(number < 0.0f ? number : floats{}, to + count + i);
    }
}

// The extremes of contiguous pages for one kv head, `stride` numbers apart.
template <class T>
struct Extremes {
    const T *lows, *highs;
    Int stride;
};

// Write for each page the largest bound of the scores of ROWS queries of `length` numbers, which are `split_by_sign`.
// `scratch` has 2 x rows x PAGES numbers.
template <class T>
void bound_scores(const T* split, Int rows, Int length, Extremes<T> of, Int pages, float* scratch, float* to) {
    float* negative = scratch + rows * PAGES;
    for (Int first = 0; first < pages; first += PAGES) {
        const Int count = std::min(PAGES, pages - first), at = first * of.stride;
        all_dots(split, length, rows, of.highs + at, of.stride, count, length, scratch, PAGES);
        all_dots(split + rows * length, length, rows, of.lows + at, of.stride, count, length, negative, PAGES);
        for (Int page = 0; page < count; page++) {
            float most = -INFINITY;
            for (Int i = page; i < rows * PAGES; i += PAGES) {
                const float bound = scratch[i] + negative[i];
                most = std::max(most, bound == bound ? bound : INFINITY);  // a page with an infinite key is read
            }
            to[first + page] = most;
        }
    }
}

// Write the places of the `count` largest numbers, in ascending order. `scratch` has as many numbers.
inline void write_places_of_largest(const float* numbers, Int length, Int count, float* scratch, std::int32_t* to) {
    if (count == 0) return;
    std::copy_n(numbers, length, scratch);
    std::nth_element(scratch, scratch + count - 1, scratch + length, std::greater<>());
    const float least = scratch[count - 1];
    Int equal = count - std::count_if(numbers, numbers + length, [&](float number) { return number > least; });
    for (Int i = 0; i < length; i++)
        if (numbers[i] > least || (numbers[i] == least && equal-- > 0)) *to++ = std::int32_t(i);
}

}  // namespace
