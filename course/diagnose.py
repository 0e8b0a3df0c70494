"""Find the mistakes of a submission by comparing its facts with those of the real package.

Knows the facts of course/probe.py, and how each mistake shows in them; runs nothing, and imports neither torch nor a
submission. In a chain of causes only the first mistake is named: its consequences are not judged.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from course.probe import HEADS, KEY_AT, KV_HEADS, LENGTH, MAX_ROWS, MAX_SEQ_LEN, SCALE, THETA, TILT, VOCAB, key_size

Facts = dict[str, Any]
NEAR = 1e-6  # for shares of attention in float64; RoPE's table is float32
NEAR_ANGLES = 5e-3  # larger, so that a cache in 16 bits is not taken for a wrong angle
ABOUT_SHARING = re.compile(r"layers of its own, and the model \d")  # a message of the model
ABOUT_DTYPES = re.compile(r"dtype|scalar type|cannot take torch\.")  # messages of PyTorch and `KVCache.check`
NOT_WORKING = ("rows-do-not-grow", "length-does-not-grow")  # mistakes that any error shows
ABOUT_SHAPES = re.compile(r"\b(shapes?|sizes?|dimensions?|broadcast)\b", flags=re.IGNORECASE)


@dataclass(frozen=True)
class Finding:
    """The name of a mistake, and where it showed."""

    name: str
    where: str


def diagnose(facts: Facts, right: Facts) -> list[Finding]:
    """Return the mistakes of a submission, the worst first; `right` are the facts of the real package."""
    try:
        found = list(_findings(facts, right))
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:  # not the probe's facts
        return [Finding("unknown", f"the notes of the run cannot be read ({type(error).__name__})")]
    return list({finding.name: finding for finding in reversed(found)}.values())[::-1]


def _findings(facts: Facts, right: Facts) -> Iterator[Finding]:
    if facts["steps"].get("error", {}).get("type") == "NotImplementedError":
        yield Finding("todo-left", facts["steps"]["error"]["words"])
        return
    switched = not any(facts["uncached"].get("switches", []))
    uncached = _first_difference(facts["uncached"], right["uncached"], "with the cache off") if switched else None
    values = list(_values(facts, right))
    found = [Finding("uncached-changed", uncached.where)] if uncached else []
    found += [*values, *_loop(facts["loop"], right["loop"]), *_switch(facts, switched)]
    if not values:
        found += [*(_memory(facts) if switched else ()), *_limits(facts["limits"])]
    yield from found
    if not found:
        yield from _generations(facts, right)


# ---- what attention attends to ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Query:
    """The attention of one query in each head: {token, by its number in the texts of a layer: share}."""

    layer: int
    row: int
    call: int
    index: int
    heads: Sequence[dict[int, float]]

    @property
    def seen(self) -> dict[int, float]:
        return self.heads[0]

    @property
    def total(self) -> float:
        return sum(self.seen.values())


def _queries(calls: Sequence[Any]) -> Iterator[Query]:
    """Yield all queries, call by call, layer 0 first: a mistake there changes the layers above."""
    for call, layers in enumerate(calls):
        for layer, rows in enumerate(layers):
            for row, queries in enumerate(rows):
                for index, heads in enumerate(queries):
                    yield Query(layer, row, call, index, [_shares(head, i) for i, head in enumerate(heads)])


def _shares(head: Sequence[Sequence[float]], index: int) -> dict[int, float]:
    return {int(place): share / (1 + index * KV_HEADS // HEADS) for place, share in head}  # head 1's values are doubled


def _values(facts: Facts, right: Facts) -> Iterator[Finding]:
    """Compare the attended tokens: the plain case first, and the others only if it is right."""
    plain = _first_difference(facts["steps"], right["steps"], "token by token")
    if plain:
        yield plain
        return
    turned = _angles(facts["turned"], right["turned"])
    yield from [turned] if turned else []
    for name, where, says in (
        ("chunk", "in a chunk after a prompt", ""),
        ("ragged", "with rows of 3 and 5 tokens", "rows-at-one-position"),
        ("again", "in a second text", "stale-text"),
        ("rewound", "after going back to position 4", "own-counter"),
        ("more_rows", "with two rows after one", "rows-do-not-grow"),
        ("longer", "past the room that was reserved", "length-does-not-grow"),
        ("unreserved", "where no room was reserved", "length-does-not-grow"),
    ):
        found = _first_difference(facts[name], right[name], where, says)
        if found:
            yield found
            if found.name in ("stale-text", "wrong-axis"):
                return  # the others are consequences


def _first_difference(facts: Facts, right: Facts, where: str, says: str = "") -> Finding | None:
    """Return a finding on the first query with wrong attention; `says` names the mistake that is to be expected."""
    ours, wanted = list(_queries(facts.get("calls", []))), list(_queries(right["calls"]))
    for one, other in zip(ours, wanted, strict=False):
        if _place(one) != _place(other):
            return Finding(says or "wrong-axis", f"{where}: attention has another shape than was fed")
        if not _same(one, other) and not _is_padding(one, other, where):
            name = says if _shows(says, one, other) else "unknown" if says else _name(one, other, ours, wanted)
            return Finding(name, f"{where}, {_tell(one, other)}")
    if "error" in facts:
        return Finding(_error_name(facts["error"], says), _error(facts, where))
    if len(ours) != len(wanted):
        return Finding("unknown", f"{where}: {len(ours)} of {len(wanted)} queries go through wo, where they are seen")
    return None


def _shows(name: str, one: Query, other: Query) -> bool:
    """Return True if a query shows the mistake that is to be expected: tokens of before, or none of its own."""
    strange, missing = one.seen.keys() - other.seen.keys(), other.seen.keys() - one.seen.keys()
    return bool(name and (strange if name in ("stale-text", "own-counter") else missing))


def _place(query: Query) -> tuple[int, int, int, int]:
    return query.layer, query.row, query.call, query.index


def _is_padding(one: Query, other: Query, where: str) -> bool:
    """Return whether a query is padding of the rows of 3 and 5 tokens, which may attend to anything."""
    return where.startswith("with rows of") and (one.call, one.row) == (0, 0) and one.index >= 3


def _same(one: Query, other: Query) -> bool:
    return all(_alike(a, b, NEAR) for a, b in zip(one.heads, other.heads, strict=True))


def _alike(one: dict[int, float], other: dict[int, float], near: float) -> bool:
    return all(abs(one.get(place, 0.0) - other.get(place, 0.0)) <= near for place in one.keys() | other.keys())


def _name(query: Query, wanted: Query, ours: Sequence[Query], all_wanted: Sequence[Query]) -> str:
    """Return the name of a mistake by the attended tokens and their shares; `ours` are all queries."""
    seen, right = query.seen, wanted.seen
    first, newest = min(right), max(right)  # the row's own text begins at `first`
    expected, whole = len(right), abs(query.total - 1) < NEAR
    missing = set(right) - set(seen) if set(seen) <= set(right) else None  # None: others are seen
    slots = {1 / share for share in seen.values()}  # all keys have the same score
    unwritten = not whole and len({round(count, 4) for count in slots}) == 1 and _near(max(slots), round(max(slots)))
    same_call = [(a, b) for a, b in zip(ours, all_wanted, strict=False) if a.call == query.call]
    row0_right = all(_same(a, b) for a, b in same_call if a.row == 0)
    nothing = not any(a.seen for a, _ in same_call if (a.row, a.layer) == (query.row, query.layer))
    past = query.call > 0
    rules: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("swapped", lambda: any(place >= KEY_AT for place in seen)),
        ("shared-by-layers", lambda: any(place // VOCAB != query.layer for place in seen)),
        ("first-row-only", lambda: query.row > 0 and row0_right and not set(seen) & set(right)),
        ("rows-mixed", lambda: any(place // LENGTH != first // LENGTH for place in seen)),
        ("mask-forgotten", lambda: any(place > newest for place in seen)),
        ("heads-order", lambda: _alike(seen, right, NEAR) and _of_other_heads(query)),
        ("values-forgotten", lambda: nothing),
        ("past-ignored", lambda: set(seen) == {newest} and whole and expected > 1),
        ("values-forgotten", lambda: set(seen) == {newest} and expected > 2 and unwritten),
        ("mask-at-first-key", lambda: past and whole and set(seen) == set(range(first, first + query.index + 1))),
        ("newest-hidden", lambda: missing == {newest} and whole),
        ("index-late", lambda: missing == {newest}),
        ("index-zero", lambda: missing == {first} and expected > 2 and unwritten),
        ("index-early", lambda: missing == {newest - 1} and unwritten),
        ("unwritten-read", lambda: missing == set() and query.total < 1 and unwritten),
    )
    return next((name for name, holds in rules if holds()), "unknown")


def _of_other_heads(query: Query) -> bool:
    """Return True if each head has the values of a KV head: those of the second one are twice as large."""
    return all(any(_near(sum(head.values()), times) for times in (0.5, 1, 2)) for head in query.heads)


def _tell(query: Query, wanted: Query) -> str:
    """Return the expected and the real attention of a query, as text."""
    base = min(wanted.seen)
    own = sorted(place - base for place in query.seen if base <= place < base + LENGTH)
    strange = len(query.seen) - len(own)
    more = f", and at {strange} of another text, row or layer" if strange else ""
    shares = ", with other shares than it should" if query.seen.keys() == wanted.seen.keys() else ""
    return (
        f"row {query.row}, layer {query.layer}: the token at position {max(wanted.seen) - base} should look at the "
        f"positions 0 to {max(wanted.seen) - base}, and looks at {own or 'none of them'}{more}{shares}"
    )


def _error_name(error: dict[str, str], says: str = "") -> str:
    if ABOUT_DTYPES.search(error["words"]):
        return "wrong-dtype"
    if ABOUT_SHARING.search(error["words"]):
        return "shared-by-layers"
    of_tensors = error["type"] in ("RuntimeError", "IndexError", "ValueError")
    of_shapes = of_tensors and ABOUT_SHAPES.search(error["words"])
    if says and (of_shapes or says in NOT_WORKING):
        return says
    return "wrong-axis" if of_shapes else "raises"


def _error(facts: Facts, where: str) -> str:
    error = facts["error"]
    return f"{where}: {error['type']} at {error['where'] or 'a place outside'}: {error['words']}"


# ---- the angles of keys ----------------------------------------------------------------------------------------------

# The rotations of a key at position j, fed in a call that began at c, and of a query at p in a call that began at s.
Angle = Callable[[int, int, int, int], tuple[float, float] | None]
ANGLES: tuple[tuple[str, Angle], ...] = (
    ("rope-twice", lambda j, c, p, s: (2 * j, p)),
    ("rope-twice", lambda j, c, p, s: (2 * j, 2 * p)),
    ("rope-twice", lambda j, c, p, s: (j + p, p)),
    ("rope-start-ignored", lambda j, c, p, s: (j - c, p - s)),
    ("rope-start-ignored", lambda j, c, p, s: (j, p - s)),
    ("rope-start-ignored", lambda j, c, p, s: (j - c, p)),
    ("rope-missing", lambda j, c, p, s: (0, p)),
    ("rope-missing", lambda j, c, p, s: (p, p)),
    ("rope-missing", lambda j, c, p, s: (j if c == s else 0, p)),
    ("keys-forgotten", lambda j, c, p, s: None),
    ("keys-forgotten", lambda j, c, p, s: (j, p) if c == s else None),
)
CUTS = (0, 5, 6)  # of the experiment


def _angles(facts: Facts, right: Facts) -> Finding | None:
    """Return a finding on wrong angles in a text whose values are right."""
    where = "with keys that draw by their angle"
    if "error" in facts:
        return Finding(_error_name(facts["error"]), _error(facts, where))
    pairs = list(zip(_queries(facts["calls"]), _queries(right["calls"]), strict=False))
    wrong = [(one, other) for one, other in pairs if not _alike(one.seen, other.seen, NEAR_ANGLES)]
    if not wrong:
        return None
    if any(one.seen.keys() != other.seen.keys() for one, other in wrong):
        return None  # another mask, which the chunk experiment names
    steps = [one for one, _ in pairs if one.call > 0]
    for queries in (steps, [one for one, _ in wrong if one.call > 0]):  # a mistake may show only in a step of one token
        for name, angle in ANGLES:
            if all(_alike(one.seen, _predicted(one, angle), NEAR_ANGLES) for one in queries):
                return Finding(name, _tell_angles(*wrong[0]))
    name = "rope-wrong" if all(_is_rotated(one) for one, _ in wrong) else "unknown"
    return Finding(name, _tell_angles(*wrong[0]))


def _is_rotated(query: Query) -> bool:
    """Return True if the shares are those of keys that are rotated by some number of positions each."""
    sizes = {place: SCALE * key_size(place % VOCAB) for place in query.seen}
    newest = max(sizes)
    draws = [_draw(apart) for apart in range(-MAX_SEQ_LEN, MAX_SEQ_LEN)]
    for own in draws:  # how far the query's own key is rotated is not known either
        base = own * sizes[newest] - math.log(query.seen[newest])
        wanted = [(math.log(share) + base) / sizes[place] for place, share in query.seen.items()]
        if all(any(abs(draw - want) < NEAR_ANGLES for draw in draws) for want in wanted):
            return True
    return False


def _predicted(query: Query, angle: Angle) -> dict[int, float]:
    """Return the shares of a query with keys rotated in this way."""
    base = query.layer * VOCAB + query.row * LENGTH
    start = CUTS[query.call]
    position = start + query.index
    scores = {}
    for j in range(position + 1):
        angles = angle(j, max(cut for cut in CUTS if cut <= j), position, start)
        turn = 0.0 if angles is None else SCALE * key_size(base % VOCAB + j) * _draw(angles[1] - angles[0])
        scores[base + j] = math.exp(turn)
    total = sum(scores.values())
    return {place: score / total for place, score in scores.items()}


def _draw(apart: float) -> float:
    """Return how a key draws a query that is rotated so many positions further."""
    pairs = KEY_AT + 2
    return math.cos(apart * THETA ** (-KEY_AT / pairs) - TILT)


def _tell_angles(query: Query, wanted: Query) -> str:
    position = CUTS[query.call] + query.index
    return (
        f"row {query.row}, layer {query.layer}: the token at position {position} looks at the right tokens, but gives "
        f"position 0 the share {query.seen[min(query.seen)]:.3f}, where {wanted.seen[min(wanted.seen)]:.3f} is right"
    )


# ---- the loop, the switch, memory, limits ----------------------------------------------------------------------------


def _loop(facts: Facts, right: Facts) -> Iterator[Finding]:
    """Look at what each step of a generation was fed; which error ended it, `_generations` tells."""
    error = facts["on"].get("error", {})
    if error.get("type") == "NotImplementedError":
        yield Finding("loop-todo-left", error["words"])
    for mode in ("on", "off"):
        ours, wanted = facts[mode], right[mode]["fed"]
        step = next((i for i, (a, b) in enumerate(zip(ours["fed"], wanted, strict=False)) if a != b), None)
        if step is not None:
            fed = ours["fed"][step]
            where = f"cache {mode}, step {step}: rows were fed {fed[1]} tokens from positions {fed[0]} on"
            yield Finding(_loop_name(mode, fed, right["off"]["fed"][step]), where)
        elif len(ours["fed"]) != len(wanted) and "error" not in ours:
            yield Finding(
                "cached-fed-wrong" if mode == "on" else "uncached-changed", f"cache {mode}: steps are missing"
            )


def _loop_name(mode: str, fed: list[list[int]], prefix: list[list[int]]) -> str:
    if mode == "on":
        return "cached-fed-prefix" if fed == prefix else "cached-fed-wrong"
    return "uncached-fed-newest" if max(fed[1]) == 1 else "uncached-changed"


def _switch(facts: Facts, switched: bool) -> Iterator[Finding]:
    if not switched:
        yield Finding(
            "switch-first-layer", f"after model.kv_caching = False the layers have {facts['uncached']['switches']}"
        )
    left = {name: part for name, part in facts["left_behind"].items() if name != "error"}
    thrown = [name for name, part in left.items() if not part["switch"]]
    if thrown or facts["loop"]["off"].get("switch") is False:
        yield Finding("switch-not-put-back", "after a generation with kv_caching=False, or one that an error ended")
    memory = facts["memory"]
    off = memory.get("off", 0)
    if not left.get("whole", {}).get("bytes", 0):  # else what a generation left behind is still there
        off = max(off, memory.get("switched_off", 0))
    if off > 0:
        yield Finding("written-while-off", f"{off:,} bytes are held while the cache is off")


def _memory(facts: Facts) -> Iterator[Finding]:
    left, memory = facts["left_behind"], facts["memory"]
    if left.get("whole", {}).get("bytes", 0) > 0:
        yield Finding("kept-after-generation", f"{left['whole']['bytes']:,} bytes are still held")
    elif left.get("broken", {}).get("bytes", 0) > 0:
        yield Finding("kept-after-error", f"{left['broken']['bytes']:,} bytes are still held")
    if facts["gradients"].get("kept", 0) > 0:
        yield Finding("gradients-kept", "after two calls outside of inference mode, without a refusal")
    if "error" in memory:
        yield Finding(_error_name(memory["error"]), _error(memory, "with a model in bfloat16"))
        return
    dtypes = memory["dtypes"]
    if dtypes != ["bfloat16"]:
        yield Finding("wrong-dtype", f"a model in bfloat16 has a cache in {', '.join(dtypes) or 'no tensor'}")
    times = memory["filling"][-1] / _itemsize(dtypes) / memory["right"]
    where = f"2 rows of {LENGTH} positions take {times:.1f} times the numbers that they need"
    if abs(times - HEADS / KV_HEADS) < 0.05:
        yield Finding("heads-expanded", where)
    elif times > 2:
        sizes = (rows * length / 2 / LENGTH for rows, length in ((2, MAX_SEQ_LEN), (MAX_ROWS, MAX_SEQ_LEN)))
        yield Finding("limits-sized" if any(abs(times - size) < 0.05 for size in sizes) else "unknown", where)


def _itemsize(dtypes: Sequence[str]) -> int:
    return max((int(dtype[-2:]) // 8 for dtype in dtypes if dtype[-2:].isdigit()), default=8)


def _limits(facts: Facts) -> Iterator[Finding]:
    """Look at a write past the limits; a solution that does not use the cache's own update is not judged by it."""
    if facts.get("error", {}).get("type") == "ValueError" and _error_name(facts["error"]) == "raises":
        yield Finding("limits-ignored", _error(facts, f"a text of all {MAX_SEQ_LEN} positions"))
    for name, limit in (("length", MAX_SEQ_LEN), ("rows", MAX_ROWS)):
        outcome = facts.get(name)
        if outcome is None or outcome["raised"] == "ValueError" or outcome["raised"] == "NotImplementedError":
            continue
        if outcome["raised"] is not None:
            yield Finding("limits-ignored", f"{name} past {limit}: {outcome['raised']}: {outcome['words']}")
        elif name == "length" and (outcome["shape"][1] <= limit or outcome["first"] != 1.0):
            yield Finding("overflow-silent", f"token {limit + 1} of {limit} is nowhere, and nothing is said")
        else:
            yield Finding("limits-ignored", f"{name} past {limit}: accepted")


def _generations(facts: Facts, right: Facts) -> Iterator[Finding]:
    """Compare ids and logits with the real ones: the last word, where nothing else was found."""
    ours, wanted = facts["generations"], right["generations"]
    if ours.get("together") == wanted["together"] and ours.get("first") != wanted["first"]:
        where = "the other row of two differs after the first has ended"
        yield Finding("rows-not-moved", _error(ours, where) if "error" in ours else where)
        return
    if ours.get("first") == wanted["first"] and ours.get("second") != wanted["second"]:
        yield Finding("stale-text", _error(ours, "second") if "error" in ours else "a second generation differs")
        return
    for part, keys in (("generations", ("together",)), ("logits", ("off", "on"))):
        for key in keys:
            if not _near(facts[part].get(key), right[part][key]):
                error = facts[part].get("error")
                where = f"{part}, {key}: the numbers are others" if error is None else _error(facts[part], part)
                yield Finding("unknown" if error is None else _error_name(error), where)
                return


def _near(ours: Any, wanted: Any, near: float = NEAR) -> bool:
    """Return True if numbers differ by at most `near` of the larger one or of 1, and all else is equal."""
    return _apart(ours, wanted) <= near


def _apart(ours: Any, wanted: Any) -> float:
    """Return the largest difference of numbers, as a share of the larger one or of 1; inf if anything else differs."""
    if isinstance(wanted, list):
        pairs = zip(ours, wanted, strict=True) if isinstance(ours, list) and len(ours) == len(wanted) else None
        return math.inf if pairs is None else max((_apart(a, b) for a, b in pairs), default=0.0)
    if isinstance(ours, int | float) and isinstance(wanted, int | float):
        apart = abs(ours - wanted) / max(1, abs(ours), abs(wanted))
        return math.inf if math.isnan(apart) else apart
    return 0.0 if ours == wanted else math.inf


# ---- the other exercises ---------------------------------------------------------------------------------------------


def explain(facts: Facts, right: Facts) -> list[Finding]:
    """Return the mistake of a submission that was tried with a file of course/trials/, the first if it has several.

    A submission is right if it does in all trials what the answer does in one of its forms. A mistake is named only if
    the submission does in all trials what a version of the answer with it does: of several, the nearest. If an error
    ended the trials, that means those before it, where something was wrong already, or else the same error.
    """
    try:
        ours, near, error = facts["trials"], right["near"], facts["trials"].get("error")
        forms = [right["trials"], *(version for name, version in right["versions"] if not name)]
        wanted = min(forms, key=lambda form: _apart_so_far(ours, form))
        seen = _apart_so_far(ours, wanted) > near
        if not seen and _end(ours) == _end(wanted):
            return []
        if not seen and error and error["type"] == "NotImplementedError":
            return [Finding("todo-left", error["words"])]
        alike = [
            (_apart_so_far(ours, version), name)
            for name, version in right["versions"]
            if name and ((seen and error) or _end(ours) == _end(version))
        ]
        apart, name = min(alike, key=lambda one: one[0], default=(math.inf, ""))
        name = name if apart <= near else "unknown" if seen else "raises"
        return [Finding(name, _observed(ours, wanted, near))]
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:  # not the probe's facts
        return [Finding("unknown", f"the notes of the run cannot be read ({type(error).__name__})")]


def _apart_so_far(ours: Facts, wanted: Facts) -> float:
    """Return the largest difference of our trials from these, of as many as ended."""
    one, other = ([[what, came] for what, came in of.items() if what != "error"] for of in (ours, wanted))
    return _apart(one, other[: len(one)])


def _end(facts: Facts) -> tuple[int, str | None]:
    """Return how many trials there are, and the words of the error that ended them, if any."""
    return len(facts), facts["error"]["words"] if "error" in facts else None


def _observed(ours: Facts, wanted: Facts, near: float) -> str:
    """Return what differs first, as text."""
    for what, value in wanted.items():
        if what not in ours and "error" in ours:
            return _error(ours, what)
        if not _near(ours.get(what), value, near):
            return f"{what}: {ours.get(what)}, where {value} is right"
    return _error(ours, "after all trials")
