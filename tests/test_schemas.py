"""Texts satisfy their JSON Schemas, whatever the model makes of them, and are what they are alone.

The models are random and sampled at a high temperature: without a mask no text would be JSON.
"""

import gc
import json
import random
import sys
import weakref
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from fakes import Bytes, Ids, piece
from jsonschema import Draft202012Validator
from native import ARGS, FOLDER, needs_a_compiler
from refusals import unrefused
from tiny import tiny_model

from llama.batch import SchemaFailed
from llama.fast.choose import make_fast
from llama.model import Transformer
from llama.sampling import Sampler, Sampling
from llama.schemas import Matcher, schema_of
from llama.texts.many import Writer
from llama.tokenizer.tokenizer import TextStream

HOT: dict[str, Any] = {"temperature": 5.0, "top_p": 1.0}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


WORDS = {258: b'{"', 259: b'": ', 260: b"null", 261: b"\xc3", 262: "日".encode(), 263: b'"}', 264: b"  "}


class Pieces(Bytes):
    """Bytes, marks of which no text consists, and tokens of several bytes."""

    special_tokens = MappingProxyType({"<bos>": 256, "<eos>": 257})

    def decode_bytes(self, ids: Any, *, begins: bool = True) -> bytes:
        return b"".join(WORDS.get(id) or piece(id) for id in ids)

    def decode(self, ids: Any) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def stream(self) -> Any:
        return TextStream(self)  # type: ignore[arg-type]


def hot(**changes: Any) -> Transformer:
    return tiny_model(replace(ARGS, vocab_size=265, max_seq_len=1200), **changes).requires_grad_(False)


# ---- the table -------------------------------------------------------------------------------------------------------


def some_schema(draw: random.Random, depth: int = 3) -> Any:
    """Return a random schema of the keywords that public schemas mostly have."""
    leaves: list[Any] = [
        {"type": "string", "maxLength": draw.randint(0, 8)},
        {"type": "string", "minLength": 2, "maxLength": 5},
        {"type": "string", "pattern": draw.choice(["^[a-z]{2,4}$", r"^\d{3}-\d{2}$", "^(yes|no)$", "^[A-Z]{2}$"])},
        {"type": "string", "format": draw.choice(["date", "time", "uuid", "ipv4"])},
        {"type": "integer", "minimum": draw.randint(-9, 0), "maximum": draw.randint(1, 999)},
        {"type": "number", "minimum": 0, "exclusiveMaximum": 10},
        {"type": "integer", "multipleOf": draw.randint(2, 7), "minimum": 0, "maximum": 200},
        {"type": ["boolean", "null"]},
        {"type": ["string", "null"], "maxLength": 3},
        {"enum": draw.sample(["a", "b\n", "\u00fc\u65e5", 'q"', 1, 2.5, None, True, [1], {"a": 1}], 3)},
        {"const": draw.choice(["\u20ac\\", 7, {"x": [None, False]}, "\t"])},
    ]
    if depth == 0 or draw.random() < 0.2:
        return draw.choice(leaves)
    inner = [some_schema(draw, depth - 1) for _ in range(3)]
    names = draw.sample(["name", "id", "a b", "\u00e4", 'quote"d', "list"], 3)
    properties = dict(zip(names, inner, strict=True))
    required = names[: draw.randint(0, 3)]
    return draw.choice(
        [
            {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
            {"type": "object", "properties": properties, "required": names, "additionalProperties": False},
            {"type": "object", "additionalProperties": inner[0], "maxProperties": 3},
            {"type": "array", "items": inner[0], "minItems": draw.randint(0, 2), "maxItems": 3},
            {"type": "array", "prefixItems": inner[:2], "items": False, "minItems": 2},
            {"anyOf": inner[:2]},
            {"$defs": {"of": inner[0]}, "type": "array", "items": {"$ref": "#/$defs/of"}, "maxItems": 2},
        ]
    )


def rooted(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema with its $defs at the root, where references look for them."""
    found: dict[str, Any] = {}

    def moved(part: Any) -> Any:
        if isinstance(part, dict):
            part = {name: moved(value) for name, value in part.items()}
            if "$defs" in part:
                name = f"of{len(found)}"
                found[name] = part.pop("$defs")["of"]
                part["items"] = {"$ref": f"#/$defs/{name}"}
            return part
        return [moved(one) for one in part] if isinstance(part, list) else part

    return {**moved(schema), "$defs": found} if "$defs" in json.dumps(schema) else schema


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_a_text_parses_and_satisfies_its_schema_or_ends_at_its_length(count: int) -> None:
    draw, writer = random.Random(4), Writer(hot(), Pieces(), rows=16)
    table = [rooted(some_schema(draw)) for _ in range(count)]
    texts = [writer.add("p", 900, schema=schema, seed=seed, **HOT) for seed, schema in enumerate(table)]
    while not writer.texts.idle:
        list(writer.step(maybe_changed=False))
    whole = 0
    for text, schema in zip(texts, table, strict=True):
        made = text.read.completion
        assert text.error is None
        assert made["finish_reason"] == "stop" or len(made["ids"]) == 900
        if made["finish_reason"] == "stop":
            Draft202012Validator(schema).validate(json.loads(made["generation"]))
            whole += 1
    assert whole >= 0.9 * count


def test_a_text_whose_length_ends_first_says_so() -> None:
    (made,) = hot().generate(Pieces(), "p", 5, schema=PERSON, seed=1, **HOT)
    assert (made["finish_reason"], len(made["ids"])) == ("length", 5)
    assert made["generation"].startswith("{")


def test_a_text_may_end_only_where_its_schema_does_and_ends_where_nothing_can_follow() -> None:
    matcher = schema_of({"type": "integer"}, Pieces(), 300).matcher()  # type: ignore[union-attr]
    assert not matcher.mask()[257]
    matcher.accept(ord("4"))
    assert matcher.mask()[257]
    assert not matcher.mask()[[256, 299]].any()
    assert not matcher.ended
    (made,) = hot().generate(Pieces(), "p", 99, schema={"const": "a"}, temperature=0)
    assert (made["generation"], made["finish_reason"]) == ('"a"', "stop")
    endless = Pieces()
    endless.stop_tokens = ()  # type: ignore[assignment]
    (made,) = hot().generate(endless, "p", 99, schema={"const": "a"}, temperature=0)
    assert (made["generation"], made["finish_reason"]) == ('"a"', "stop")
    matcher = schema_of({"type": "string"}, Pieces(), 300).matcher()  # type: ignore[union-attr]
    matcher.accept(ord('"'))
    assert matcher.mask()[[ord("<"), 262]].all()
    assert not matcher.mask()[[256, 257]].any()


def test_the_mask_applies_at_greedy_with_a_penalty_and_with_candidates_only() -> None:
    for how in (
        {"temperature": 0},
        {"temperature": 1e300, "repetition_penalty": 1e30},
        {**HOT, "top_k": 2},
        {"min_p": 0.9},
    ):
        made = hot().generate(Pieces(), ['{"x":', "q"], 200, schema=PERSON, seed=3, **how)
        for one in made:
            assert one["finish_reason"] == "length" or json.loads(one["generation"]).keys() == {"name", "age"}


def test_rows_of_other_settings_have_their_own_masks() -> None:
    model, writer = hot(), Writer(hot(), Pieces(), rows=3)
    how: list[dict[str, Any]] = [
        {**HOT, "schema": PERSON},
        {"temperature": 0},
        {"temperature": 3.0, "schema": {"const": "ab"}},
    ]
    texts = [writer.add("p", 60, seed=1, **one) for one in how]
    while not writer.texts.idle:
        list(writer.step())
    alone = [model.generate(Pieces(), "p", 60, seed=1, **one)[0] for one in how]
    assert [text.read.completion for text in texts] == alone


# ---- other doors -----------------------------------------------------------------------------------------------------


@needs_a_compiler
@pytest.mark.parametrize("mode", ["plain", "native", "exact"])
@pytest.mark.parametrize("kv_cache", ["static", "paged", "int8", "snapkv:0.5"])
def test_by_every_door_a_text_with_a_schema_is_the_text_alone(mode: str, kv_cache: str) -> None:
    model = hot(dtype=torch.float64 if mode == "plain" else torch.float32)
    lossless = kv_cache in ("static", "paged")
    if mode == "native":
        make_fast(model, FOLDER)
        assert model.runner is not None
    if mode == "exact":
        if not lossless:
            return
        model.exact = True
    codec, prompts, how = Pieces(), ["a prompt", "another", "b"], {"kv_cache": kv_cache, "logprobs": True, **HOT}
    alone = [model.generate(codec, one, 90, schema=PERSON, seed=i, **how)[0] for i, one in enumerate(prompts)]
    ids = [one["ids"] for one in alone]
    assert len(set(map(tuple, ids))) == 3
    assert [one["ids"] for one in model.generate(codec, prompts, 90, schema=PERSON, seed=0, **how)] == ids
    many = dict(model.generate_many(codec, prompts, 90, rows=2, schema=json.dumps(PERSON), seed=0, **how))
    assert [many[number]["ids"] for number in range(3)] == ids
    session = model.session(codec, kv_cache=kv_cache)
    session.feed(prompts[0])
    assert session.generate(90, schema=PERSON, seed=0, **HOT)["ids"] == ids[0]
    if lossless:
        off = model.generate(codec, prompts[1], 90, schema=PERSON, seed=1, kv_caching=False, **HOT)
        assert off[0]["ids"] == ids[1]
        stream = model.stream(codec, prompts[2], 90, schema=PERSON, seed=2, speculate=lambda: Right(ids[2]), **how)
        stream.finish()
        assert stream.results[0]["ids"] == ids[2]
        assert stream.guesses[1] > 0
    assert mode != "native" or (model.runner is not None and model.runner.forwards > 90)


class Right:
    """Guesses the text, and behind it and now and then what no schema allows."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids

    def propose(self, ids: Any, count: int) -> list[int]:
        done = len(ids) - 2  # the prompt is BOS and a letter
        return [*self.ids[done : done + count - done % 3], 256, 256][:count]


def test_a_fork_and_a_stream_share_no_state_of_a_schema() -> None:
    model = hot()
    session = model.session(Pieces())
    session.feed("p")
    whole = session.fork().generate(90, schema=PERSON, seed=5, **HOT)
    stream = session.stream(90, schema=PERSON, seed=5, **HOT)
    begun = [next(stream) for _ in range(3)]
    other = session.fork()
    other.rewind(2)
    assert other.generate(90, schema=PERSON, seed=5, **HOT) == whole
    assert "".join([*begun, *stream]) == whole["generation"]


def test_samplers_behind_a_guess_leave_their_row_as_it_is() -> None:
    schema = schema_of(PERSON, Pieces(), 265)
    assert schema is not None
    sampler = Sampler(Sampling(), torch.Generator(), [], 265, schema.matcher())
    assert sampler.matcher is not None
    before = sampler.matcher.mask()
    samplers = sampler.ahead([258, ord("n"), 256, ord("a")])
    masks = [one.matcher.mask() for one in samplers if one.matcher is not None]
    assert torch.equal(masks[0], before)
    assert [bool(mask.any()) for mask in masks] == [True, True, True, False, False]
    assert torch.equal(sampler.matcher.mask(), before)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_what_is_no_schema_is_refused_with_llguidance_s_words() -> None:
    model = hot()
    of = partial(schema_of, tokenizer=Pieces(), vocab_size=265)
    assert (
        unrefused(
            [
                (
                    lambda: model.generate(Pieces(), "p", schema={"type": "foo"}),
                    "refused by llguidance: Invalid type: foo",
                ),
                (
                    lambda: model.generate(Pieces(), "p", schema={"not": {}, "x-guidance": {"lenient": True}}),
                    "Unimplem",
                ),
                (lambda: of("{"), "refused by llguidance: EOF"),
                (lambda: of({"$ref": "#"}), "refused by llguidance: .*"),
                (lambda: of({"const": "a" * 70_000}), "a schema of 70,0.. characters is too long"),
                (lambda: of("true"), "an object in braces"),
                (lambda: of({"a": object()}), "must be a JSON Schema: Object of"),
                (lambda: model.generate(Ids(), "1", schema=PERSON), "a tokenizer with decode_bytes"),
                (lambda: model.generate_tokens([[1]], schema=PERSON), "ids have none"),
            ]
        )
        == []
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 20_000_003},  # in the lexer, which the first mask builds
        {"allOf": [{"type": "string", "pattern": f"[a-z]{i}"} for i in range(30)]},
    ],
    ids=["multiples", "patterns"],
)
def test_a_schema_that_takes_too_long_to_compile_is_refused_within_the_limit_and_at_once_later(
    schema: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = Pieces()
    assert schema_of(PERSON, codec, 265, limited=True)
    monkeypatch.setattr("llama.schemas.SECONDS", 0.3)
    words = r"schema=.* takes more than 0.3 s of CPU time or 1024 MiB to compile; use fewer or simpler patterns"
    with pytest.raises(ValueError, match=words):
        schema_of(schema, codec, 265, limited=True)
    monkeypatch.setattr("subprocess.run", None)
    with pytest.raises(ValueError, match=words):
        schema_of(schema, codec, 265, limited=True)


def test_a_process_for_schemas_that_cannot_run_is_the_server_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Pieces()
    with pytest.raises(ValueError, match="refused by llguidance: Invalid type: foo"):
        schema_of({"type": "foo"}, codec, 265, limited=True)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/python")
        with pytest.raises(RuntimeError, match=r"compiles schemas could not be started: .*No such file"):
            schema_of(PERSON, codec, 265, limited=True)
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RuntimeError, match=r"(?s)schemas ended with 1: .*No module named"):
        schema_of(PERSON, codec, 265, limited=True)


def test_a_schema_whose_every_text_fails_is_refused_and_leaves_others_compiled() -> None:
    """The first mask is computed; a further one passes a limit that the copies of a matcher share."""
    codec = Pieces()
    other = schema_of(PERSON, codec, 265)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"schema=.*a\{1000\}.* is (too complex for|refused by) llguidance"):
            schema_of({"type": "string", "pattern": "^(a{1000}){1000}$"}, codec, 265)
    assert schema_of(PERSON, codec, 265) is other


def test_a_schema_keeps_no_tokenizer_alive() -> None:
    tokenizer = Pieces()
    schema_of(PERSON, tokenizer, 265)
    alive = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert alive() is None


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"schema needs llguidance: pip install 'llama-kv\[json\]'"):
        hot().generate(Pieces(), "p", schema=PERSON)


def test_a_schema_that_becomes_too_complex_fails_its_own_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, codec = hot(), Pieces()
    writer = Writer(model, codec, rows=2)
    bad, good = (writer.add("p", 90, schema=PERSON, seed=seed, **HOT) for seed in (1, 2))
    expected = model.generate(codec, "p", 90, schema=PERSON, seed=2, **HOT)[0]
    list(writer.step())
    assert bad.row is not None
    matcher = bad.row.sampler.matcher
    assert isinstance(matcher, Matcher)
    matcher.accept(256)  # what no schema allows: llguidance goes no further
    while not writer.texts.idle:
        list(writer.step())
    assert isinstance(bad.error, SchemaFailed)
    assert "\n" not in str(bad.error)
    assert good.read.completion == expected
