// Threads that compute together: how they share the work, and where they wait for each other.

#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "vectors.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace {

// A barrier, used six or seven times a layer; OpenMP's own is slower.
struct Barrier {
    alignas(64) std::atomic<Int> arrived{0};
    alignas(64) std::atomic<Int> passed{0};

    void wait(Int size) {
        const Int before = passed.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived.store(0, std::memory_order_relaxed);
            passed.store(before + 1, std::memory_order_release);
            return;
        }
        for (Int turns = 0; passed.load(std::memory_order_acquire) == before; turns++)
            if (turns < 10000)
                pause();
            else
                std::this_thread::yield();  // another process may use the core of a thread that is late
    }

    static void pause() {
#if defined(__x86_64__)
        _mm_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }
};

// Threads that compute together; a single one never waits. room: each thread's memory for the panels of a product.
struct Team {
    Int rank, size;
    Barrier* barrier;
    char* room;

    void wait() const {
        if (size > 1) barrier->wait(size);
    }

    // Call act(first, end) with this thread's share of so many columns: whole panels, except the last.
    template <class Act>
    void share(Int columns, Act act) const {
        const Int panels = (columns + PANEL - 1) / PANEL;
        auto bound = [&](Int part) { return std::min(columns, panels * part / size * PANEL); };
        act(bound(rank), bound(rank + 1));
    }
};

// Run act(team) in so many threads. Compilers without OpenMP, such as that of macOS, start them for every call.
template <class Act>
void in_team(Int threads, Act act) {
    Barrier barrier;
#if defined(_OPENMP)
#pragma omp parallel num_threads(threads)
    {
        Team team{omp_get_thread_num(), omp_get_num_threads(), &barrier, nullptr};
        act(team);
    }
#else
    auto run = [&](Int rank) {
        Team team{rank, threads, &barrier, nullptr};
        act(team);
    };
    std::vector<std::thread> others;
    for (Int rank = 1; rank < threads; rank++) others.emplace_back(run, rank);
    run(0);
    for (std::thread& other : others) other.join();
#endif
}

}  // namespace
