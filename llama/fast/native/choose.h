// Choose a row's next token from its logits. sampling.py defines the results.
//
// A token is drawn here only if no rounding could change it: sums of tens of thousands of probabilities have another
// order than in sampling.py, so draws that come too close to a limit are left to it. Sorting a vocabulary takes longer
// than a step, so tokens are put into buckets by their logits, and only buckets that contain a limit are sorted.

#pragma once

#include "team.h"

namespace {

// How a row's token is chosen, as in sampling.py; at temperature 0 the next three numbers are not read.
struct Settings {
    double temperature, top_p, min_p;
    Int top_k;         // 0: all
    double penalty;    // of tokens marked in `seen`, (vocab,); null: no penalty
    const bool* seen;
};

struct Choice {
    const float* logits;  // (rows, vocab)
    Int rows, vocab;
    const Settings* settings;  // of each row
    const double* draws;       // in [0, 1), of each row; not read if all are greedy
    Int* ids;                  // the chosen ids, or one of those below
    Int threads;               // unless a forward chooses
};
constexpr Int NOT_FINITE = -1, TOO_NEAR = -2;

// The largest of some logits, its place (the first of equals), and the sum of all, which shows logits not finite.
struct Largest {
    float most, total;
    Int at;
};

inline Largest largest_logit(const float* logits, Int first, Int end) {
    constexpr Int SOME = 32 * LANES;  // logits that are scanned again for the place
    float most = -INFINITY, total = 0;
    Int begin = first;
    floats totals = {};
    for (Int some = first; some < end; some += SOME) {
        const Int until = std::min(end, some + SOME);
        floats largest = floats{} - INFINITY;
        Int i = some;
        for (; i + LANES <= until; i += LANES) {
            const floats each = widen(logits + i);
            largest = larger(each, largest);
            totals += each;
        }
        float here = largest_of(largest);
        for (; i < until; i++) here = std::max(here, logits[i]), total += logits[i];
        if (here > most) most = here, begin = some;
    }
    total += sum_of(totals);
    while (begin < end && logits[begin] != most) begin++;
    return {most, total, begin};
}

// The weights of tokens relative to the most likely one: exp((logit - most) / temperature).
struct Weights {
    static constexpr Int SOME = LANES / 2;
    const float* logits;
    const Int vocab;
    const float most;
    const double temperature, inverse = std::min(1 / temperature, 1e300);
    const double doubt = double(vocab + 1000) * 0x1p-51;  // how much two sums may differ, as a share of all

    // Those of SOME tokens from i on; 0 behind the last token.
    INLINE doubles from(Int i) const {
        some_floats x = some_floats{} - INFINITY;
        if (i + SOME <= vocab)
            x = load<some_floats>(logits + i);
        else if (i < vocab)
            std::memcpy(&x, logits + i, (vocab - i) * sizeof(float));
        return exp_of((__builtin_convertvector(x, doubles) - double(most)) * inverse);
    }
};

inline double sum_of(doubles x) {
    double sum = 0;
    for (Int lane = 0; lane < Weights::SOME; lane++) sum += x[lane];
    return sum;
}

template <class V>
bool any(V mask) {
    const longs bits = (longs)mask;
    std::uint64_t found = 0;
    for (Int i = 0; i < Weights::SOME; i++) found |= bits[i];
    return found != 0;
}

// A row's tokens in buckets, the most likely first: each has the logits of one interval, down to `reach` temperatures
// below the largest.
class Buckets {
    static constexpr Int COUNT = 512, MOST = 4096, TABLES = 4;
    struct Token {
        double weight;
        Int id;
        bool operator<(const Token& other) const {  // the order in which they are drawn
            return weight > other.weight || (weight == other.weight && id < other.id);
        }
    };
    const Weights& all;
    const float of_logit;                     // buckets per logit
    double weights[TABLES][COUNT + 1] = {};   // of a bucket's tokens; behind the last bucket, of all others
    std::int32_t counts[TABLES][COUNT + 1] = {};
    Token sorted[MOST];
    Int held = -1, held_count = 0;  // the bucket that is in `sorted`

  public:
    double total = 0;
    bool unsettled = false;  // whether rounding may have changed the result, or it is out of reach

    Buckets(const Weights& given, double reach)
        : all(given), of_logit(float(std::clamp(COUNT / (reach * all.temperature), 1e-37, 1e38))) {
        doubles far = {};
        for (Int first = 0; first < all.vocab; first += LANES) {
            const ints at = buckets_from(first);
            const doubles some = all.from(first), others = all.from(first + Weights::SOME);
            if (!any(at < std::int32_t(COUNT))) {
                far += some + others;
                continue;
            }
            std::int32_t bucket[LANES];
            double weight[LANES];
            store(bucket, at), store(weight, some), store(weight + Weights::SOME, others);
            for (Int i = 0; i < std::min<Int>(LANES, all.vocab - first); i++) {  // independent sums
                weights[i % TABLES][bucket[i]] += weight[i];
                counts[i % TABLES][bucket[i]]++;
            }
        }
        weights[0][COUNT] += sum_of(far);
        for (Int b = 0; b <= COUNT; b++) {
            for (Int t = 1; t < TABLES; t++) weights[0][b] += weights[t][b], counts[0][b] += counts[t][b];
            total += weights[0][b];
        }
    }

    // The weight of the most likely tokens: at most `most`, up to a sum of `cut`, each of at least `least`; but at least
    // one token.
    double kept(Int most, double cut, double least) {
        const double near = all.doubt * total;
        const Int thin = least > 0 ? bucket_of(all.most + std::log(least) * all.temperature) - 1 : COUNT;
        Int count = 0;
        double sum = 0;
        auto ended = [&] {
            if (count && std::abs(sum - cut) <= near) unsettled = true;
            return unsettled || count == most || (count && sum > cut);
        };
        for (Int b = 0; b < COUNT && !ended(); b++) {
            if (count + counts[0][b] <= most && sum + weights[0][b] + near < cut && b < thin) {
                count += counts[0][b], sum += weights[0][b];
                continue;
            }
            sort(b);
            for (Int i = 0; i < held_count && !ended(); i++) {
                const double weight = sorted[i].weight;
                if (count && std::abs(weight - least) <= 1e-12 * least) unsettled = true;
                if (count && weight < least) return sum;
                count++, sum += weight;
            }
        }
        if (ended()) return sum;
        const double rest = weights[0][COUNT];
        if (cut == INFINITY && !least && most == all.vocab) return sum + rest;
        if (rest > near) unsettled = true;
        return sum;
    }

    // The token at which the sum of all weights passes `target`.
    Int passing(double target) {
        const double near = all.doubt * total;
        double sum = 0;
        for (Int b = 0; b < COUNT && !unsettled; b++) {
            if (sum + weights[0][b] + near < target) {
                sum += weights[0][b];
                continue;
            }
            sort(b);
            for (Int i = 0; i < held_count; i++) {
                sum += sorted[i].weight;
                if (std::abs(sum - target) <= near) unsettled = true;
                if (sum > target) {
                    unsettled |= tied(b, sorted[i]);
                    return sorted[i].id;
                }
            }
        }
        unsettled = true;
        return -1;
    }

  private:
    ints buckets_from(Int i) const {
        floats x = floats{} - INFINITY;
        if (i + LANES <= all.vocab)
            x = widen(all.logits + i);
        else
            std::memcpy(&x, all.logits + i, (all.vocab - i) * sizeof(float));
        const floats at = (all.most - x) * of_logit;
        return __builtin_convertvector(at < float(COUNT) ? at : floats{} + float(COUNT), ints);
    }
    Int bucket_of(double logit) const {
        return Int(std::clamp((all.most - float(logit)) * of_logit, 0.0f, float(COUNT)));
    }

    void sort(Int bucket) {
        if (counts[0][bucket] > MOST) unsettled = true;
        if (held == bucket || unsettled) return;
        held = bucket, held_count = 0;
        for (Int first = 0; first < all.vocab && held_count < counts[0][bucket]; first += LANES) {
            const ints here = buckets_from(first) == std::int32_t(bucket);
            if (!any(here)) continue;
            double weight[LANES];
            store(weight, all.from(first)), store(weight + Weights::SOME, all.from(first + Weights::SOME));
            for (Int i = 0; i < LANES; i++)
                if (here[i]) sorted[held_count++] = {weight[i], first + i};
        }
        std::sort(sorted, sorted + held_count);
    }

    // Whether a token of a sorted bucket has the weight of another up to rounding, although their logits differ: then
    // either may come first.
    bool tied(Int bucket, const Token& token) const {
        const double logit = all.logits[token.id], apart = 1e-11 * all.temperature;
        for (Int i = 0; i < held_count; i++)
            if (all.logits[sorted[i].id] != all.logits[token.id] &&
                std::abs(sorted[i].weight - token.weight) <= 1e-12 * token.weight)
                return true;
        return bucket_of(logit - apart) != bucket || bucket_of(logit + apart) != bucket;
    }
};

// Draw a token of those that top_k, top_p and min_p keep, in the order of their weights.
inline Int drawn(Buckets& tokens, Int vocab, const Settings& how, double draw) {
    const Int most = how.top_k ? std::min(how.top_k, vocab) : vocab;
    const double total = how.top_k ? tokens.kept(most, INFINITY, 0) : tokens.total;
    return tokens.passing(draw * tokens.kept(most, how.top_p < 1 ? how.top_p * total : INFINITY, how.min_p));
}

// Draw a token of all, or of those that min_p keeps, in the order of their ids.
inline Int drawn_of_all(const Weights& all, double least, double draw) {
    bool unsettled = false;
    auto left = [&](Int i) {
        const doubles weights = all.from(i), over = weights - least;
        if (least > 0) unsettled |= any((over < 0 ? -over : over) <= 1e-12 * least);
        return weights < least ? doubles{} : weights;
    };
    constexpr Int MANY = 64 * Weights::SOME;  // that are summed at a time
    auto sum_from = [&](Int first) {
        doubles sums = {};
        for (Int i = first; i < std::min(first + MANY, all.vocab); i += Weights::SOME) sums += left(i);
        return sum_of(sums);
    };
    double total = 0, sum = 0;
    for (Int first = 0; first < all.vocab; first += MANY) total += sum_from(first);
    const double target = draw * total, near = all.doubt * total;
    for (Int first = 0; first < all.vocab && !unsettled; first += MANY) {
        if (const double some = sum_from(first); sum + some + near < target) {
            sum += some;
            continue;
        }
        for (Int i = first; i < std::min(first + MANY, all.vocab); i += Weights::SOME)
            for (Int lane = 0; lane < Weights::SOME; lane++) {
                sum += left(i)[lane];
                if (std::abs(sum - target) <= near) return TOO_NEAR;
                if (sum > target) return i + lane;
            }
    }
    return TOO_NEAR;
}

inline Int sampled(const float* logits, Int vocab, Int best, const Settings& how, double draw) {
    const Weights weights{logits, vocab, logits[best], how.temperature};
    if (!how.top_k && how.top_p >= 1) return drawn_of_all(weights, how.min_p, draw);
    for (const double reach : {12, 48}) {  // few weigh less, except in a flat distribution or with a large top_k
        Buckets tokens(weights, reach);
        const Int id = drawn(tokens, vocab, how, draw);
        if (!tokens.unsettled) return id;
    }
    return TOO_NEAR;
}

// Make the tokens of `seen` less likely.
inline void penalize(const float* logits, const bool* seen, Int vocab, float penalty, float* to) {
    constexpr Int SOME = sizeof(std::uint64_t);
    std::memcpy(to, logits, vocab * sizeof(float));
    for (Int first = 0; first < vocab; first += SOME) {
        std::uint64_t marks = 0;
        std::memcpy(&marks, seen + first, std::min(SOME, vocab - first));
        if (!marks) continue;
        for (Int i = first; i < std::min(first + SOME, vocab); i++) {
            if (!seen[i]) continue;
            const float less = logits[i] > 0 ? logits[i] / penalty : logits[i] * penalty;
            to[i] = std::isnan(less) ? 0.0f : std::clamp(less, -FLT_MAX, FLT_MAX);  // a penalty may be past float32
        }
    }
}

// The memory that `choose` needs for each thread: a row's logits, if some are penalized.
inline Int penalized(const Choice* how) {
    for (Int r = 0; how && r < how->rows; r++)
        if (how->settings[r].seen) return how->vocab;
    return 0;
}

// Choose the next token of every row. `found`: (size, rows); a thread first scans the columns that it has computed.
inline void choose(const Choice& how, const Team& team, Largest* found, float* room) {
    team.share(how.vocab, [&](Int first, Int end) {
        for (Int r = 0; r < how.rows; r++)
            found[team.rank * how.rows + r] = largest_logit(how.logits + r * how.vocab, first, end);
    });
    team.wait();
    for (Int r = team.rank; r < how.rows; r += team.size) {
        Largest best = found[r];
        for (Int part = 1; part < team.size; part++) {
            const Largest& other = found[part * how.rows + r];
            if (other.most > best.most) best.most = other.most, best.at = other.at;
            best.total += other.total;
        }
        const float* logits = how.logits + r * how.vocab;
        if (!std::isfinite(best.total)) {
            how.ids[r] = NOT_FINITE;
            continue;
        }
        const Settings& own = how.settings[r];
        if (own.seen) {
            float* less = room + team.rank * how.vocab;
            penalize(logits, own.seen, how.vocab, float(own.penalty), less);
            best = largest_logit(less, 0, how.vocab), logits = less;
        }
        how.ids[r] = own.temperature > 0 ? sampled(logits, how.vocab, best.at, own, how.draws[r]) : best.at;
    }
}

}  // namespace
