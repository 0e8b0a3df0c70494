"""What is refused, and how: by the field's name, with a sentence, as OpenAI's JSON, before anything runs."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from threading import Event
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native import needs_a_compiler, twins
from refusals import unrefused
from serving import Letters, Served, Slow, asgi, serving
from tables import table
from tiny import tiny_model

from llama.cli import serve
from llama.host import console, cores
from llama.schemas import WAITING


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as server:
        yield server


@table(
    "fields, status, param, sentence",
    [
        ({"foo": 1}, 400, "foo", "unknown field foo; leave it out"),
        ({"temprature": 1}, 400, "temprature", "unknown field temprature; did you mean temperature?"),
        ({"messages": []}, 400, "messages", "unknown field messages"),
        ({"prompt": None}, 400, "prompt", "prompt is missing"),
        ({"prompt": []}, 400, "prompt", "a text, a list of token ids"),
        ({"prompt": [1, "a"]}, 400, "prompt", "a text, a list of token ids"),
        ({"prompt": "\u00e9"}, 400, "prompt", "not ASCII"),
        ({"prompt": [500]}, 400, "prompt", "token id 500"),
        ({"prompt": ["a"] * 9, "n": 2}, 400, "n", "9 prompts x n=2 are more than 16"),
        ({"model": "gpt"}, 404, "model", "'gpt' is not served; there is 'demo'"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens=0 must be a whole number of at least 1"),
        ({"max_tokens": True}, 400, "max_tokens", "true must be a whole number"),
        ({"max_tokens": 400}, 400, "max_tokens", "1 tokens and max_tokens=400: more than the 400"),
        ({"prompt": "a" * 400}, 400, "prompt", "at least 400 tokens and max_tokens=1"),
        ({"prompt": [1] * 400}, 400, "prompt", "at least 400 tokens and max_tokens=1"),
        ({"stream": 1}, 400, "stream", "true or false"),
        ({"temperature": "hot"}, 400, "temperature", "temperature='hot' must be"),
        ({"temperature": -1}, 400, "temperature", "must be a finite number of at least 0"),
        ({"temperature": 1e-9}, 400, "temperature", "must be from 0.01 to 100"),
        ({"top_p": 2}, 400, "top_p", "top_p=2 must be between 0 and 1"),
        ({"top_k": 0}, 400, "top_k", "top_k=0 must be a whole number"),
        ({"seed": 1.5}, 400, "seed", "seed=1.5 must be a whole number"),
        ({"seed": 2**64 - 1, "n": 2}, 400, "seed", "seed=18446744073709551616 must be"),
        ({"stop": ["a", ""]}, 400, "stop", "each of 1 to 256 characters"),
        ({"stop": ["a"] * 65}, 400, "stop", "at most 64 texts"),
        ({"stop": "a" * 257}, 400, "stop", "each of 1 to 256 characters"),
        ({"stop": 3}, 400, "stop", "a text, or a list of at most"),
        ({"logprobs": 3}, 400, "logprobs", "logprobs=3 is not supported; leave it out, or send 0"),
        ({"top_logprobs": 2}, 400, "top_logprobs", "top_logprobs=2 is not supported; leave it out, or send 0"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "frequency_penalty=0.5 is not supported"),
        ({"frequency_penalty": False}, 400, "frequency_penalty", "=false is not supported"),
        (
            {"response_format": {"type": "grammar"}},
            400,
            "response_format",
            "the type text, json_object, or json_schema",
        ),
        ({"tools": [{}]}, 400, "tools", "tools=[{}] is not supported; leave it out"),
        ({"echo": True}, 400, "echo", "not supported"),
        ({"stream_options": {"x": 1}}, 400, "stream_options", "must be an object with include_usage"),
        ({"stream_options": 3}, 400, "stream_options", "must be an object"),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: Any, status: int, param: str, sentence: str, served: Served) -> None:
    got = served.ask("/v1/completions", {"prompt": "a", **fields})
    error = got.json["error"]
    assert (got.status, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert sentence in error["message"]


def test_values_that_ask_for_nothing_are_accepted(served: Served) -> None:
    neutral = {"frequency_penalty": 0.0, "n": 1, "best_of": 1, "logit_bias": {}, "user": "me", "metadata": {"a": "b"}}
    more = {"echo": False, "suffix": "", "response_format": {"type": "text"}, "stream_options": None, "logprobs": None}
    more |= {"some_new_field": None, "stream_options": {"include_usage": None}}
    assert served.complete("a", **neutral, **more).status == 200
    assert [served.complete("a", service_tier=tier).status for tier in ("auto", "default", "flex")] == [200, 200, 400]


# llguidance builds more and more of such a pattern while the text grows, up to a limit.
GROWING = "|".join(f"((a|b)*{'ab'[i % 2]}(a|b){{{400 + 7 * i}}}{'ba'[i % 2]})+" for i in range(100))
FORMS = {"json_object": {"type": "json_object"}} | {
    name: {"type": "json_schema", "json_schema": {"name": "one", "schema": schema}}
    for name, schema in {
        "const": {"const": ["a", 1]},
        "wrong": {"type": "foo"},
        "late": {"type": "string", "pattern": f"^({GROWING})+$"},
    }.items()
}


def test_an_answer_has_the_form_that_response_format_asks_for() -> None:
    with serving(tokenizer=Letters()) as server:
        server.model.vocab_size = 128
        for stream in (False, True):
            got = server.complete("a", response_format=FORMS["const"], max_tokens=60, stream=stream)
            parts = got.events if stream else [got.json]
            assert json.loads("".join(part["choices"][0]["text"] for part in parts)) == ["a", 1]
            assert parts[-1]["choices"][0]["finish_reason"] == "stop"
        cut = server.complete("a", response_format=FORMS["json_object"], max_tokens=1).json["choices"][0]
        assert (cut["text"][0], cut["finish_reason"]) == ("{", "length")
        error = server.complete("a", response_format=FORMS["wrong"]).json["error"]
        assert (error["param"], error["type"]) == ("response_format", "invalid_request_error")
        assert error["message"].endswith("is refused by llguidance: Invalid type: foo")


@pytest.mark.parametrize("kv_caching", [True, False])
def test_a_schema_that_becomes_too_complex_in_the_middle_of_a_text_is_the_client_s_error(kv_caching: bool) -> None:
    with serving(tokenizer=Letters()) as server:
        server.model.vocab_size = 128
        late = {"response_format": FORMS["late"], "kv_caching": kv_caching, "max_tokens": 390, "seed": 1}
        stream, whole = (server.complete("a", stream=stream, **late) for stream in (True, False))
        assert (whole.status, stream.status) == (400, 200)
        *parts, end = stream.events
        assert len(parts) > 50
        assert whole.json == end, "the text before has used up nothing"
        assert (end["error"]["param"], end["error"]["type"]) == ("response_format", "invalid_request_error")
        assert end["error"]["message"].startswith("response_format: llguidance cannot go on at token ")
        assert b'request_failure_total{reason="refused"} 2' in server.ask("/metrics").body


def test_schemas_of_many_requests_are_compiled_one_at_a_time_and_few_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, refused = 0, 0, Event()

    def tried(_: str) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        refused.wait(9)
        running -= 1
        return ""

    forms = [{"type": "json_schema", "json_schema": {"name": "a", "schema": {"const": n}}} for n in range(WAITING + 2)]
    with serving(tokenizer=Letters()) as server, ThreadPoolExecutor(len(forms)) as threads:
        server.model.vocab_size = 128
        known = {"response_format": FORMS["json_object"], "max_tokens": 1}
        assert server.complete("a", **known).status == 200
        monkeypatch.setattr("llama.schemas._over_limit", tried)
        asked = [threads.submit(server.complete, "a", response_format=form, max_tokens=1) for form in forms]
        ended = as_completed(asked, timeout=20)
        assert [next(ended).result().status for _ in range(2)] == [429, 429]
        assert server.complete("a", **known).status == 200, "a schema that is compiled waits for none"
        refused.set()
        assert [one.result().status for one in ended] == [200] * WAITING
    assert most == 1


@table(
    "messages, sentence",
    [
        (None, "messages is missing: it must be a list of at least one object"),
        ([{"role": "user"}], "a message has the keys 'role' and 'content'"),
        ([{"role": "robot", "content": "a"}], "unknown role 'robot'"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of the type 'image_url'; only parts of text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part without a text; only parts of text are supported"),
        ([{"role": "user", "content": [1]}], "a part of the type None; only parts of text are supported"),
        ([{"role": "user", "content": 5}], "content=5 of a message must be a text, or a list of parts of text"),
        ([{"role": "user", "content": "a", "name": 5}], "name of a message must be a text"),
        ([{"role": "user", "content": []}], "content=[] of a message must be a text"),
        (["a"], "a list of at least one object"),
    ],
)
def test_a_malformed_dialog_is_refused(messages: Any, sentence: str, served: Served) -> None:
    error = served.ask("/v1/chat/completions", {"messages": messages}).json["error"]
    assert (error["param"], sentence in error["message"]) == ("messages", True)


@table(
    "body, status, sentence",
    [
        (b"{", 400, "not one object of JSON"),
        (b"[]", 400, "not a list"),
        (b"\xff", 400, "UTF-8"),
        (b'{"prompt": "a", "prompt": "b"}', 400, "repeats the key"),
        (b'{"temperature": NaN}', 400, "NaN is not a number"),
        (b"[" * 100_000, 400, "100,000 times"),
        (b" " * 1_000_001, 413, "more than 1,000,000 bytes"),
        (b'{"\\u001b[31m\\u202e": 1, "prompt": "a"}', 400, r"unknown field \x1b[31m\u202e"),
    ],
)
def test_a_body_that_is_not_one_object_is_refused(body: bytes, status: int, sentence: str, served: Served) -> None:
    got = served.ask("/v1/completions", body)
    message = got.json["error"]["message"]
    assert (got.status, sentence in message, message.isprintable()) == (status, True, True)


@table("path, method, status", [("/v1/nope", "GET", 404), ("/v1/completions", "GET", 405), ("/", "DELETE", 405)])
def test_other_paths_and_methods_are_refused(path: str, method: str, status: int, served: Served) -> None:
    got = served.ask(path, method=method)
    assert (got.status, "/v1/chat/completions" in got.json["error"]["message"]) == (status, True)


def test_without_a_key_only_this_machine_s_names_and_pages_are_served(served: Served) -> None:
    assert served.ask("/v1/models", Host="evil.example").status == 403
    assert served.ask("/health", Host="127.0.0.1:99").status == 200
    own = f"http://127.0.0.1:{served.port}"
    for origin, status in (("https://evil.example", 403), ("null", 403), ("http://[", 403), (own, 200)):
        assert served.ask("/v1/models", Origin=origin).status == status


def test_more_texts_than_there_are_places_are_refused_for_good() -> None:
    with serving(rows=1, queue=1) as server:
        assert server.complete("a", n=2, max_tokens=1).status == 200
        got = server.complete(["a", "b", "c"], max_tokens=1)
        error = got.json["error"]
        assert (got.status, error["param"]) == (400, "n")
        assert "3 prompts x n=1 are more than the 2 texts that run and wait here (--rows, --queue)" in error["message"]


def test_a_text_that_no_cache_can_store_is_refused_in_openai_s_words() -> None:
    with serving(cache_bytes=100) as server:
        got = server.complete("a", max_tokens=300)
        error = got.json["error"]
        assert (got.status, error["param"], error["code"]) == (400, "max_tokens", None)
        assert error["message"].startswith("a prompt of 1 tokens with max_tokens=300 needs ")


def test_every_path_but_the_page_and_health_needs_the_key() -> None:
    wrong = [{}, *({"Authorization": value} for value in ("Bearer secre", "secret", "Bearer secrets", "Bearer \xff"))]
    right = {"Authorization": "Bearer secret", "Host": "any.name"}
    with serving(key="secret") as server:
        for path in ("/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions", "/v1/nope", "//"):
            for headers in wrong:
                got = server.ask(path, {"prompt": "a"} if "completions" in path else None, **headers)
                assert (got.status, got.json["error"]["code"]) == (401, "invalid_api_key"), (path, headers)
        assert [server.ask("/v1/models", **right).status, server.ask("/metrics", **right).status] == [200, 200]
        assert server.ask("/v1/completions", {"prompt": "a"}, **right).status == 200
        assert [server.ask(path).status for path in ("/", "/health")] == [200, 200]


NAMES = ["prompt", "messages", "max_tokens", "n", "seed", "stop", "stream", "logprobs", "temperature", "top_k", "x"]
KEYS = st.sampled_from(["role", "content", "text", "type"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner),
    max_leaves=5,
)
RIGHT = st.fixed_dictionaries({}, optional={"prompt": st.just("a"), "max_tokens": st.integers(1, 3)})


@given(chat=st.booleans(), right=RIGHT, wrong=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=3))
@settings(max_examples=80)
def test_every_answer_is_200_or_openai_s_error(chat: bool, right: Any, wrong: Any, served: Served) -> None:
    body = json.dumps({**right, **wrong}).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    status, content = asgi(served.app, path, body, method="POST", host=b"127.0.0.1")
    if status == 200 and isinstance(content, dict):
        assert content["choices"]
    elif status != 200:
        error = content["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert 400 <= status < 500, error
        assert error["message"].isprintable()
        assert "Traceback" not in error["message"]


def test_flags_that_would_open_the_machine_or_make_no_sense_are_refused(served: Served) -> None:
    calls: list[tuple[Any, str]] = [
        (lambda: serve.main(host="0.0.0.0"), "can be reached by other machines: give --key"),
        (lambda: serve.main(host="192.168.0.9"), "give --key"),
        (lambda: serve.main(rows=0), "--rows 0 must be from 1"),
        (lambda: serve.main(check=2), "--check 2 must be from 0 to 1"),
        *(
            (partial(serve.main, name=n), "--name .* must be 1 to 80 printable characters")
            for n in ("", "a\n", "a" * 81)
        ),
        (lambda: serve.main(max_pause_ms=0), "--max_pause_ms 0 must be from 1"),
        (lambda: serve.main(cache_gb=0), "--cache_gb 0 must be from 0.001"),
        (lambda: serve.main(kv_cache="snapvk"), "did you mean snapkv"),
        *((partial(serve.main, key=k, port=served.port), "must be printable ASCII") for k in ("", "a ", "é", "\n")),
        (lambda: serve.main(port=served.port), r"--port \d+: .*in use.*; choose another one"),
    ]
    assert unrefused(calls) == []


def test_a_gb_of_the_command_is_2_to_the_30_bytes_and_a_pause_is_in_ms(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def engine(*_: Any, cache_bytes: Any, max_pause: float, **__: Any) -> None:
        asked.extend([cache_bytes(tiny_model()), max_pause])
        raise ValueError("enough")

    monkeypatch.setattr("llama.serve.engine.Engine", engine)
    monkeypatch.setattr("llama.serve.server.bind", lambda *_: None)
    with pytest.raises(ValueError, match="enough"):
        serve.main(port=0, cache_gb=0.5, max_pause_ms=50)
    assert asked == [2**29, 0.05]


def test_with_require_fast_nothing_is_served_by_the_plain_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.cli.serve.load", lambda *_, **__: (Slow(), Letters()))
    with pytest.raises(ValueError, match="--require_fast: demo has no fast path here: the plain path would run it"):
        serve.main(port=0, kv_cache="static", require_fast=True)


@needs_a_compiler
def test_with_require_fast_a_kind_without_a_native_step_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = twins("fp32")[1]
    monkeypatch.setattr("llama.cli.serve.load", lambda *_, **__: (model, Letters()))
    with pytest.raises(ValueError, match="native code has no step for --kv_cache concat; choose another kind"):
        serve.main(port=0, kv_cache="concat", require_fast=True)


def test_a_server_computes_with_all_its_threads_whatever_else_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[Any] = []

    def load(*_: Any, threads: int, **__: Any) -> tuple[Any, Any]:
        cores.choose_once(print, threads)
        counts.append(torch.get_num_threads())
        raise ValueError("enough")

    before = torch.get_num_threads()
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cores.FreeCores, "chosen", False)
    monkeypatch.setattr(cores.OtherLoad, "stop", lambda _: float(os.cpu_count() or 1))  # all cores are busy
    monkeypatch.setattr("llama.cli.serve.load", load)
    try:
        torch.set_num_threads(3)
        with pytest.raises(ValueError, match="enough"):
            serve.main(port=0, kv_cache="static")
    finally:
        torch.set_num_threads(before)
    assert counts == [3]


def test_a_signal_between_the_address_and_the_start_of_uvicorn_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.cli.serve.load", lambda *_, **__: (Slow(), Letters()))
    monkeypatch.setattr(console, "put", lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.signal(signal.SIGTERM, console.stop)
    try:
        assert serve.main(port=0, kv_cache="static") == 0
    except KeyboardInterrupt:
        pytest.fail("the signal was raised as an exception")
    finally:
        assert signal.signal(signal.SIGTERM, before) is console.stop
