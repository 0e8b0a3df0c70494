// Threads that compute together: how they share the work, and where they wait for each other.

#pragma once

#include <atomic>
#include <thread>

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
#endif
    }
};

// Threads that compute together; a single one never waits. room: memory of each thread, for panels of
// mapped matrices.
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

// Run act(team) in so many threads.
template <class Act>
void in_team(Int threads, Act act) {
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
        Team team{0, 1, nullptr, nullptr};
#if defined(_OPENMP)
        team.rank = omp_get_thread_num(), team.size = omp_get_num_threads(), team.barrier = &barrier;
#endif
        act(team);
    }
}

}  // namespace
