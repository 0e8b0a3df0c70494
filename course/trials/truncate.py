"""The exercise `truncate`: what a session feeds again when its text changes."""

from collections.abc import Iterator
from functools import cache
from typing import Any

NEAR = 1e-6
MISTAKES = {
    "all-fed-again": (
        40,
        "The whole text is fed again: right, but nothing is saved",
        "How many tokens of the text are cached before it grows by one? Print what `_begin` returns.",
    ),
    "one-more-fed": (
        20,
        "One token more than needed is fed again",
        "Positions count from 0. If 5 tokens are cached, which position has the next one?",
    ),
    "one-skipped": (
        40,
        "The first token that is not cached is not fed",
        "Positions count from 0. If 5 tokens are cached, which position has the next one?",
    ),
    "newest-not-fed": (
        40,
        "When all of the text is cached nothing is fed, and no call returns the logits behind it",
        "Which call returns the logits behind the text, and which token must it be fed?",
    ),
    "logits-not-dropped": (
        30,
        "After the text was cut, the logits are still those behind the old text",
        "Which fields of the session describe the text as it was before the cut?",
    ),
    "old-keys-used": (
        40,
        "After the text was cut, the old tokens still count as cached: their keys are used",
        "After the cut, how many of the tokens of the text are cached? Which field has that number?",
    ),
    "cut-too-late": (
        40,
        "One token behind the cut stays",
        "A text is cut at position 3. How many tokens remain, and which position has the last one?",
    ),
    "text-not-cut": (
        30,
        "The cut removes nothing from the text",
        "Print `session.tokens` before `rewind` and after it.",
    ),
    "kind-not-asked": (
        20,
        "The cache is not asked whether it can go back: some kinds have dropped or rounded keys",
        "Cut a text of 70 tokens at 50 with the kind int8. Which keys can that cache still return?",
    ),
    "start-not-searched": (
        15,
        "If a cache cannot go back to the cut, all is fed again: it may go back to a start before",
        "Read `Cache.last_start`. Compare what it returns with the position that you return.",
    ),
    "memory-not-freed": (
        10,
        "A text that is fed from its beginning keeps the memory of the text before it",
        "Print `session.nbytes` after a long text, and after a short one that replaces it.",
    ),
    "not-recorded": (
        15,
        "Fields are not set before the text is fed: after a call that failed they are wrong",
        "If the call of the model fails, which fields have been set by then? What does the next call read?",
    ),
}
ALSO = tuple(("not-recorded", name) for name in ("_cached_len", "_logits", "_written"))  # one of them, not all
MANY = [n % 29 for n in range(70)]
# the kind of cache, or "off", and what is done with a session
SESSIONS: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (
    ("static", (("feed", [1, 2, 3, 4, 5]), ("append", [6]), ("append", [7, 8]), ("feed", [1, 2, 3, 4, 5, 6, 7, 8]))),
    (
        "static",
        (("feed", [1, 2, 3, 4, 5, 6]), ("feed", [1, 2, 9, 8, 7, 6, 5]), ("feed", [11, 12, 13]), ("append", [15])),
    ),
    ("static", (("feed", [1, 2, 3, 4, 5, 6, 7]), ("feed", [1, 2, 3, 4]), ("append", [9, 9]))),
    ("static", (("feed", [1, 2, 3, 4, 5, 6, 7]), ("rewind", 4), ("append", []), ("append", [9]), ("rewind", 5))),
    ("static", (("feed", [1, 2, 3, 4, 5, 6]), ("rewind", 2), ("append", [8, 7]), ("rewind", 0), ("feed", [4, 3]))),
    ("static", (("feed", MANY), ("feed", [5, 6]))),
    ("int8", (("feed", MANY), ("rewind", 50), ("append", [5]))),
    ("window:8+2", (("feed", MANY), ("rewind", 60), ("append", [5]))),
    ("off", (("feed", [1, 2, 3, 4]), ("append", [5]), ("rewind", 3), ("append", [6]))),
    (
        "static",
        (
            ("feed", [1, 2, 3]),
            ("feed_by_a_failing_call", [1, 2, 3, 4, 5, 6, 7]),
            ("feed", [1, 2, 3, 4, 5, 6, 7]),
            ("feed_by_a_failing_call", [1, 2, 3, 4]),
            ("append", [9]),
        ),
    ),
)


@cache
def _model(on: bool) -> Any:
    import torch

    from llama.model import ModelArgs, Transformer

    model = Transformer(ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=29, max_seq_len=128))
    stream = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight.data.normal_(0, 0.5, generator=stream)
    model = model.to(torch.float64).eval().requires_grad_(False)
    model.kv_caching = on
    return model


def trials() -> Iterator[tuple[str, Any]]:
    for kind, steps in SESSIONS:
        session = _model(kind != "off").session(None, kv_cache="static" if kind == "off" else kind)
        done = f"a session, cache {kind}"
        for step, given in steps:
            fed, fails = session.fed, step == "feed_by_a_failing_call"
            _feed_by_a_failing_call(session, given) if fails else getattr(session, step)(given)
            done += f", {step}({f'{len(given)} tokens' if given == MANY else given})"
            logits = None if session.logits is None else session.logits[:3].tolist()
            found = [session.fed - fed, session.position, session.nbytes, logits]
            yield f"[tokens fed, length of the text, bytes of the cache, logits behind it] of {done}", found
            if fails:
                found = [session._cached_len, session._written >= len(given)]
                yield f"[_cached_len, whether _written is at least {len(given)}] of {done}", found


class _Stop(Exception):
    pass


def _feed_by_a_failing_call(session: Any, ids: list[int]) -> None:
    """Feed a text by a call of the model that fails in the last layer, when the others have written their keys."""

    def fail(*_: object) -> None:
        raise _Stop

    hook = session.model.blocks[-1].register_forward_pre_hook(fail)
    try:
        session.feed(ids)
    except _Stop:
        pass
    finally:
        hook.remove()


def install(*wrong: str) -> None:
    from llama.texts.session import Session

    def _begin(self: Any, end: int) -> int:
        begin: int = min(self._cached_len, end - ("newest-not-fed" not in wrong)) + ("one-skipped" in wrong)
        begin = 0 if "all-fed-again" in wrong else max(begin - ("one-more-fed" in wrong), 0)
        if begin < self._written and "kind-not-asked" not in wrong:
            searches = "start-not-searched" not in wrong
            begin = self.cache.last_start(begin) if searches else begin * self.cache.truncate(begin)
        if not begin and "memory-not-freed" not in wrong:
            self._forget()
        now = {"_cached_len": begin, "_logits": None, "_written": max(self._written, end)}
        lost = now.keys() & {*wrong} or now if "not-recorded" in wrong else ()
        vars(self).update({name: value for name, value in now.items() if name not in lost})
        return begin

    def _cut(self: Any, position: int) -> None:
        if position < len(self.tokens):
            position += "cut-too-late" in wrong
            self._logits = self._logits if "logits-not-dropped" in wrong else None
            self._cached_len = self._cached_len if "old-keys-used" in wrong else min(self._cached_len, position)
            self.tokens = self.tokens if "text-not-cut" in wrong else self.tokens[:position]

    Session._begin, Session._cut = _begin, _cut  # type: ignore[method-assign]
