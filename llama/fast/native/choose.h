// How a row's next token is chosen from its logits. Its plain twin, which defines the result, is sampling.py.
//
// A sampled token is settled here only where no rounding could make it another one: sums of tens of thousands of
// probabilities are added up in another order than there, so what comes too near to a limit is left to the plain twin.

#pragma once

#include "team.h"

namespace {

struct Choice {
    const float* logits;  // (rows, vocab)
    Int rows, vocab;
    double temperature, top_p, min_p;  // as sampling.py has them; at temperature 0 the others are not looked at
    Int top_k;                         // 0: all
    const double* draws;               // in [0, 1)
    Int* ids;                          // what was chosen, or one of those below
    const Int* places;                 // (rows,): which of the draws and of the ids are a row's
    Int threads;                       // where no forward's choose
};
constexpr Int NOT_FINITE = -1, TOO_NEAR = -2;

// The largest of some logits, where it stands, the first of equals, and the sum of all: not finite where one is not.
struct Largest {
    float most, total;
    Int at;
};

inline Largest largest_logit(const float* logits, Int first, Int end) {
    constexpr Int SOME = 32 * LANES;  // logits that are looked through once more, for the place
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
    while (std::isfinite(total) && begin < end && logits[begin] != most) begin++;
    return {most, total, begin};
}

// The tokens of a row that may be drawn, and what the others weigh together, against the likeliest.
struct Candidates {
    static constexpr Int MOST = 4096;
    struct Candidate {
        double weight;
        Int id;
        bool operator<(const Candidate& other) const {  // the later to be taken
            return weight < other.weight || (weight == other.weight && id > other.id);
        }
    } all[MOST];
    Int count = 0, taken = 0;
    const float *logits, most, limit;
    const double temperature;
    double weight = 0, rest = 0;  // of all candidates, and of all other tokens but for a ten-thousandth
    bool others = false;          // whether there are other tokens
    bool overflows = false;

    // Candidates are the tokens whose logit, over the temperature, is no farther than `far` from the largest.
    Candidates(const float* x, Int vocab, float largest, double t, double far)
        : logits(x), most(largest), limit(float(largest - far * t)), temperature(t) {
        constexpr Int SOME = 32 * LANES;  // that are added up in float32
        for (Int first = 0; first < vocab && !overflows; first += SOME) {
            const Int end = std::min(vocab, first + SOME);
            floats weights = {};
            for (Int i = first; i < end; i += LANES) {
                const Int lanes = std::min<Int>(LANES, end - i);
                floats some = floats{} - INFINITY;
                std::memcpy(&some, x + i, lanes * sizeof(float));
                const floats least = every(limit);
                const ints near = some >= least;
                if (any(near))
                    for (Int lane = 0; lane < lanes; lane++)
                        if (x[i + lane] >= limit) add(i + lane);
                const floats each = exp_of((some - most) * float(1 / t));
                weights += near ? floats{} : each;
            }
            rest += sum_of(weights);
        }
        others = count < vocab;
        std::make_heap(all, all + count);
    }

    static bool any(ints mask) {
        const longs bits = (longs)mask;
        std::uint64_t found = 0;
        for (int i = 0; i < VECTOR / 8; i++) found |= bits[i];
        return found != 0;
    }

    void add(Int id) {
        if (count == MOST) {
            overflows = true;
            return;
        }
        all[count] = {std::exp((double(logits[id]) - most) / temperature), id};
        weight += all[count++].weight;
    }

    // The candidate that was taken as the k-th; they stand at the end, the first one last.
    const Candidate& operator[](Int k) const { return all[count - 1 - k]; }
    bool empty() const { return taken == count; }
    void take() { std::pop_heap(all, all + count - taken), taken++; }

    // Whether what comes next may stand before the one that was taken last: their weights differ by less than rounding,
    // and not because their logits are the same.
    bool unsettled() const {
        if (!taken) return false;
        const Candidate& last = (*this)[taken - 1];
        if (empty()) return others && double(logits[last.id]) - limit < 1e-6 * temperature;
        return logits[all[0].id] != logits[last.id] && last.weight - all[0].weight <= 1e-12 * last.weight;
    }
};

// Draw a token as sampling.py does, of the likeliest ones that top_k, top_p and min_p leave; these must be candidates.
inline Int drawn(Candidates& tokens, const Choice& how, double draw) {
    if (tokens.overflows) return TOO_NEAR;
    double total = tokens.weight + tokens.rest, doubt = 1e-4 * tokens.rest;
    if (how.top_k) {
        for (total = doubt = 0; tokens.taken < how.top_k && !tokens.empty();) {
            tokens.take();
            total += tokens[tokens.taken - 1].weight;
            if (tokens.unsettled()) return TOO_NEAR;
        }
        if (tokens.taken < how.top_k && tokens.others) return TOO_NEAR;
    }
    const double cut = how.top_p * total;
    doubt = how.top_p * doubt + 1e-12 * total;
    Int kept = 0;
    double sum = 0;  // of what is kept
    for (; kept < tokens.count && (!how.top_k || kept < how.top_k); kept++) {
        if (how.top_p < 1 && kept) {
            if (std::abs(sum - cut) <= doubt) return TOO_NEAR;
            if (sum > cut) break;
        }
        if (kept == tokens.taken) tokens.take();
        if (tokens.unsettled()) return TOO_NEAR;
        sum += tokens[kept].weight;
    }
    if (!how.top_k && kept == tokens.count && tokens.others && sum <= cut + doubt) return TOO_NEAR;
    const double least = how.min_p * tokens[0].weight;
    double left = 0;
    for (Int k = 0; k < kept; k++) {
        if (how.min_p > 0 && std::abs(tokens[k].weight - least) <= 1e-12) return TOO_NEAR;
        if (tokens[k].weight < least)
            kept = k;
        else
            left += tokens[k].weight;
    }
    double passed = 0;
    for (Int k = 0; k < kept; k++) {
        passed += tokens[k].weight;
        if (std::abs(passed - draw * left) <= 1e-12 * left) return TOO_NEAR;
        if (passed > draw * left) return tokens[k].id;
    }
    return TOO_NEAR;
}

inline Int sampled(const float* logits, Int best, const Choice& how, double draw) {
    for (const double far : {12, 6, 24}) {  // where the first are too many or too few
        Candidates tokens(logits, how.vocab, logits[best], how.temperature, far);
        const Int id = drawn(tokens, how, draw);
        if (id != TOO_NEAR) return id;
    }
    return TOO_NEAR;
}

// Choose the next token of every row. `found`: (size, rows); a thread looks first at the columns that it has computed.
inline void choose(const Choice& how, const Team& team, Largest* found) {
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
        const Int place = how.places[r];
        if (!std::isfinite(best.total))
            how.ids[place] = NOT_FINITE;
        else if (how.temperature > 0)
            how.ids[place] = sampled(how.logits + r * how.vocab, best.at, how, how.draws[place]);
        else
            how.ids[place] = best.at;
    }
}

}  // namespace
