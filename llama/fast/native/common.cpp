// What native code does beside the forward, for all kinds of numbers and products.

#include <vector>

#include "choose.h"
#include "matrices.h"

extern "C" {

// The names of the instructions that it was compiled for.
const char* instructions() {
#if defined(__AVX512BF16__)
    return "AVX-512 with VNNI and bf16";
#elif defined(__AVX512VNNI__)
    return "AVX-512 with VNNI";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    return "NEON with i8mm";
#elif defined(__ARM_FEATURE_DOTPROD)
    return "NEON with dot products";
#elif defined(__aarch64__)
    return "NEON";
#else
    return "the compiler's own vectors";
#endif
}

// Choose the next token of every row, see choose.h.
void choose_tokens(const Choice* choice) {
    std::vector<Largest> found(choice->threads * choice->rows);
    std::vector<float> room(choice->threads * penalized(choice));
    in_team(choice->threads, [&](Team& team) { choose(*choice, team, found.data(), room.data()); });
}
}
