"""The server under real HTTP: a text is what it is alone, whoever comes and leaves beside it."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import Endless, Letters, Served, Slow, asgi, serving
from tables import table
from tiny import tiny_model

from llama.api import pick_cache
from llama.serve.answers import Answer
from llama.serve.app import App
from llama.serve.engine import Engine, Job, Update, fingerprint_of
from llama.serve.requests import read
from llama.streaming import Completion

WAYS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.3, "seed": 5, "top_k": 40},
    {"temperature": 0.8, "seed": 6, "repetition_penalty": 1.3, "stop": "a"},
    {"seed": 7, "min_p": 0.1, "stop": ["b", "\x05"]},
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tokenizer=Letters(), cache_bytes=4000) as server:
        yield server


NO_CONTENT: list[dict[str, Any]] = [{"content": ""}, {"content": None}, {}, {"content": []}]


def alone(prompt: Any, max_tokens: int, **way: Any) -> dict[str, Any]:
    """Return what the model writes without a server, with OpenAI's defaults."""
    way = {"temperature": 1.0, "top_p": 1.0, **way}
    (made,) = Slow().generate(Letters(), [prompt], max_tokens, logprobs=True, **way)  # type: ignore[arg-type]
    return dict(made)


# ---- texts -----------------------------------------------------------------------------------------------------------


def test_texts_of_many_clients_are_those_of_each_alone(served: Served) -> None:
    """Whole and in pieces, with the cache on and off, with settings of their own, behind common beginnings."""
    asked = [{"prompt": "Once upon a time, " * (i % 3) + str(i), "max_tokens": 9 + i, **WAYS[i % 4]} for i in range(12)]
    got: dict[int, Any] = {}

    def client(i: int) -> None:
        how = {"logprobs": 0, "stream": i % 2 == 0, "kv_caching": i % 5 > 0}
        got[i] = served.ask("/v1/completions", {**asked[i], **how})

    clients = [threading.Thread(target=client, args=[i]) for i in range(len(asked))]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    for i, body in enumerate(asked):
        expected = alone(**body)
        parts = got[i].events if i % 2 == 0 else [got[i].json]
        choices = [choice for part in parts for choice in part["choices"]]
        assert "".join(choice["text"] for choice in choices) == expected["generation"]
        assert [score for choice in choices for score in choice["logprobs"]["token_logprobs"]] == expected["logprobs"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        assert parts[-1]["usage"]["completion_tokens"] == len(expected["ids"])


def test_usage_and_timings_state_the_tokens_that_were_fed_and_reused(served: Served) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 2
    answers = [served.complete(prompt, max_tokens=4, temperature=0, kv_caching=on).json for on in (True, True, False)]
    choices = [answer["choices"][0] for answer in answers]
    assert len({choice["text"] for choice in choices}) == 1
    fed = [(choice["timings"]["fed"], choice["timings"]["reused"]) for choice in choices]
    assert fed == [(90 + 3, 0), (1 + 3, 89), (90 + 91 + 92 + 93, 0)]
    counts = {"prompt_tokens": 90, "completion_tokens": 4, "total_tokens": 94}
    assert answers[1]["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 89}}
    assert min(choices[1]["timings"][name] for name in ("token_ms", "first_token_ms")) > 0


def test_choices_have_consecutive_seeds_and_prompts_keep_their_order(served: Served) -> None:
    answer = served.complete(["ab", [99, 100]], n=2, seed=3, max_tokens=6).json
    made = answer["choices"]
    assert [choice["index"] for choice in made] == [0, 1, 2, 3]
    expected = [alone(prompt, 6, seed=3 + i)["generation"] for i, prompt in enumerate(("ab", "ab", "cd", "cd"))]
    assert [choice["text"] for choice in made] == expected
    equal = served.complete(["ab"] * 3, seed=1, max_tokens=6).json["choices"]
    assert [choice["text"] for choice in equal] == [alone("ab", 6, seed=1 + i)["generation"] for i in range(3)]
    assert answer["usage"]["prompt_tokens"] == 4  # a prompt counts once


def test_a_chat_is_rendered_and_streams_with_its_role_and_usage(served: Served) -> None:
    dialog = [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    body = {"messages": dialog, "seed": 1, "max_completion_tokens": 5, "logprobs": True, "model": "demo"}
    whole = served.ask("/v1/chat/completions", body).json
    prompt = "\x01user\x02\n\nHi\x03\x01assistant\x02\n\n"
    text = alone(prompt, 5, seed=1)["generation"]
    assert whole["choices"][0]["message"]["content"] == text
    assert len(whole["choices"][0]["logprobs"]["content"]) == 5
    answered = [*dialog, whole["choices"][0]["message"], *dialog]  # with "refusal": null, as clients send it back
    assert served.ask("/v1/chat/completions", {**body, "messages": answered}).status == 200
    asked = [{**body, "messages": [*dialog, {"role": "assistant", **said}, *dialog]} for said in NO_CONTENT]
    made = [served.ask("/v1/chat/completions", one).json["choices"][0]["message"] for one in asked]
    assert made == [made[0]] * 4
    named = {**body, "messages": [{**dialog[0], "name": "Ann"}]}
    assert served.ask("/v1/chat/completions", named).json["choices"][0]["message"]["content"] == text
    system, developer = ({**body, "messages": [{"role": role, "content": "a"}]} for role in ("system", "developer"))
    made = [served.ask("/v1/chat/completions", body).json["choices"][0]["message"] for body in (system, developer)]
    assert made[0] == made[1]
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}, "timings_per_token": True}
    *parts, usage = served.ask("/v1/chat/completions", streamed).events
    choices = [part["choices"][0] for part in parts]
    assert "".join(choice["delta"]["content"] for choice in choices) == text
    assert [choice["delta"].get("role") for choice in choices] == ["assistant", None, None, None, None]
    assert [choice["timings"]["made"] for choice in choices] == [1, 2, 3, 4, 5]
    assert (usage["choices"], usage["usage"]) == ([], whole["usage"])
    assert [part["usage"] for part in parts] == [None] * 5  # clients may add the usage of all chunks
    del streamed["stream_options"]
    assert served.ask("/v1/chat/completions", streamed).events[-1]["usage"] == whole["usage"]


def test_a_chat_template_prints_the_day_on_which_the_server_began() -> None:
    class Dated(Letters):
        chat_template, eos_id, pad_id = "{{ strftime_now('%Y-%m-%d') }}", 3, None  # type: ignore[assignment]

    engine: Any = SimpleNamespace(tokenizer=Dated(), day="2000-01-02", longest=None)
    app = App(engine, names=["demo"], key=None, hosts=[], places=1, time_limit=1.0)
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    assert app._encoded(read(body, chat=True, names=["demo"])) == [[*b"2000-01-02"]]


def test_the_first_chunk_of_a_chat_has_the_role_also_if_its_first_token_has_no_text() -> None:
    """A token may be a part of a character, or may begin a stop string."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "stream": True}).encode()
    answer = Answer(read(body, chat=True, names=["demo"]), [Job([1], 3, [], {})], Letters())
    updates = [Update("", ((1, None),)), Update("\u00e9", ((2, None),)), Update("a", ((3, None),), finish="length")]
    chunks = [answer.chunk(0, update) for update in updates]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk is not None]
    assert deltas == [{"role": "assistant", "content": "\u00e9"}, {"content": "a"}]


def test_each_token_of_a_chat_has_its_bytes_which_join_to_the_text() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "Hi"}], "logprobs": True}).encode()
    answer = Answer(read(body, chat=True, names=["demo"]), [Job([1], 3, [], {})], Letters())
    text = " a\u00e9"
    ids = list(text.encode())
    whole: Completion = {"generation": text, "ids": ids, "finish_reason": "stop", "logprobs": [-0.5] * len(ids)}
    answer.latest[0] = Update(finish="stop", whole=whole)
    logprobs = answer.whole()["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in logprobs] == [" ", "a", "\ufffd", "\ufffd"]
    assert bytes(byte for one in logprobs for byte in one["bytes"]).decode() == text


# ---- clients that leave, and places ----------------------------------------------------------------------------------


@table("how", [{"stream": True}, {"stream": False}, {"stream": True, "kv_caching": False}])
def test_a_client_that_leaves_frees_its_row_before_the_next_step(how: dict[str, Any], served: Served) -> None:
    """While its prompt is being fed, and while its text grows."""
    model, engine = served.model, served.engine
    for growing in (False, True):
        model.gate.clear()
        before = model.forwards
        client = served.opened(prompt="Hello", max_tokens=300, seed=1, **how)
        if growing:
            model.seconds = 0.01
            model.gate.set()
            wait_for(lambda: model.forwards >= before + 3)  # noqa: B023
            model.gate.clear()
        wait_for(lambda: bool(engine._jobs or engine._uncached) and model.waits)
        client.close()
        wait_for(lambda: not served.app.replies)  # the engine is told during a forward
        before, model.seconds = model.forwards, 0.0
        model.gate.set()
        served.until("num_requests_running", 0)
        assert model.forwards == before + 1
        assert engine._writer.texts.idle
        assert [*engine._jobs, *engine._uncached] == []


def wait_for(true: Any) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.002)
    raise AssertionError("it did not become true in 6 s")


def test_more_texts_than_places_are_asked_to_try_again() -> None:
    with serving(rows=1, queue=1) as server:
        server.model.gate.clear()
        clients = [server.opened(prompt="a", max_tokens=9) for _ in range(2)]
        wait_for(lambda: len(server.app.replies) == 2)
        got = server.complete("a")
        assert (got.status, got.headers["retry-after"], got.json["error"]["type"]) == (429, "1", "rate_limit_error")
        server.model.gate.set()
        assert all(b'"finish_reason":"length"' in read_all(client) for client in clients)
        wait_for(lambda: not server.app.replies)
        assert server.complete("a").status == 200


# ---- failures and the end --------------------------------------------------------------------------------------------


def test_a_text_that_fails_or_takes_too_long_is_one_sentence() -> None:
    with serving(time_limit=0.2) as server:
        for stream in (True, False):
            server.model.broken = OSError("one\nTraceback (most recent call last):\x1b[2J")
            got = server.complete("a", stream=stream)
            error = (got.events[-1] if stream else got.json)["error"]
            assert error["type"] == "server_error"
            assert error["message"] == r"one\nTraceback (most recent call last):\x1b[2J"
            server.model.seconds = 0.02
            late = server.complete("a", max_tokens=99, stream=stream)
            error = (late.events[-1] if stream else late.json)["error"]
            assert (error["code"], "--time_limit" in error["message"]) == ("timeout", True)
            assert late.status == (200 if stream else 504)
            server.model.seconds = 0.0
            server.until("num_requests_running", 0)


def test_an_error_of_the_engine_ends_all_texts_and_the_next_ones_are_served(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug\n\x1b")

    with monkeypatch.context() as patch:
        patch.setattr(served.engine._writer, "add", broken)
        assert served.complete("a").status == 500
    texts = served.engine._writer.texts  # idle steps go on: one may follow the first request only now
    monkeypatch.setattr(served.engine._writer, "step", lambda **_: () if texts.idle else broken())
    assert served.complete("a").json["error"]["message"] == "the server failed; try again"
    assert [record.getMessage() for record in caplog.records] == [r"all texts are dropped: RuntimeError: a bug\n\x1b"]
    assert served.complete("a").status == 200


def test_a_client_of_a_text_that_was_dropped_ends_no_text_of_the_next_writer() -> None:
    """The numbers of texts begin again at 0, and its client leaves after the next text has come."""
    engine = Engine(lambda: (Slow(), Endless()))
    engine.ready.result(60)
    engine.end()  # its calls follow here, in this thread
    updates: list[Any] = []
    dropped, job = Job([1], 5, [], {}), Job([2], 3, [], {}, deliver=updates.append)
    engine._add(dropped)
    engine._restart()
    engine._add(job)
    engine._cancel(dropped)
    for _ in range(4):
        engine._step()
    assert [update.finish for update in updates] == [None, None, None, "length"]


@table("how", [{"kv_caching": True}, {"kv_caching": False}])
def test_a_step_makes_one_call_of_the_model_also_if_its_token_has_no_text(how: dict[str, Any]) -> None:
    """A token may be a part of a character. Between two steps a client may leave."""

    class Mute(Endless):
        def feed(self, id: int) -> str:
            return ""

    engine = Engine(lambda: (Slow(), Mute()))
    engine.ready.result(60)
    engine.end()  # its calls follow here, in this thread
    updates: list[Update] = []
    engine._add(Job([1], 4, [], {}, **how, deliver=updates.append))
    calls = []
    for _ in range(6):
        engine._step()
        calls.append(engine.model.forwards)
    assert (calls, updates[-1].finish) == ([1, 2, 3, 4, 4, 4], "length")
    assert sum(len(update.tokens) for update in updates) == 4


def test_a_request_for_metrics_that_was_cancelled_ends_no_text() -> None:
    engine = Engine(lambda: (Slow(), Endless()))
    engine.ready.result(60)
    engine.end()  # its calls follow here, in this thread
    cancelled = engine.gauges()
    assert cancelled.cancel()
    engine._measure(cancelled)


def test_at_the_first_signal_texts_may_end_and_the_others_are_cancelled() -> None:
    with serving(grace=0.3) as server:
        server.model.seconds = 0.02
        short, long = server.opened(prompt="a", max_tokens=3), server.opened(prompt="a", max_tokens=300, stream=True)
        wait_for(lambda: len(server.app.replies) == 2)
        server.server.handle_exit(15, None)
        assert (server.complete("b").status, server.ask("/health").json["error"]["code"]) == (503, "ending")
        assert b'"finish_reason":"length"' in read_all(short)
        assert b'"code":"cancelled"' in read_all(long)
        wait_for(lambda: not server.server.servers[0].is_serving())


def read_all(client: Any) -> bytes:
    data = b""
    while b"[DONE]" not in data and b'"usage":{' not in data and b'"error"' not in data:
        data += client.recv(65536)
    return data


def test_while_the_model_loads_health_is_503_and_then_200() -> None:
    loaded = threading.Event()

    def load() -> tuple[Any, Any]:
        loaded.wait()
        return Slow(), Letters()

    engine = Engine(load)
    app = App(engine, names=["demo"], key=None, hosts=["h"], places=1, time_limit=1)
    assert [asgi(app, path)[1]["error"]["code"] for path in ("/health", "/v1/models")] == ["loading", "loading"]
    loaded.set()
    engine.ready.result(60)
    assert asgi(app, "/health") == (200, {"status": "ok", "execution": "scripted"})
    engine.end()


# ---- what it says of itself ------------------------------------------------------------------------------------------


def test_ended_texts_are_generated_again_and_those_that_differ_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    with serving(check=1.0, cache_bytes=4000) as server:
        for seed in range(3):
            server.complete("The same long beginning, which all of them reuse", max_tokens=8, seed=seed)
        server.complete("a", kv_caching=False)
        server.until("texts_checked_total", 3)
        assert server.metric("prefix_cache_hits_total") > 60
        assert server.metric("texts_differed_total") == 0
        drawn, calls = server.model.drawn, iter(range(99))
        server.model.drawn = lambda ids: drawn(ids) + (1e-3 if next(calls) == 1 else 0) * drawn([1])
        server.complete("12345678", max_tokens=3, temperature=0)
        server.until("texts_checked_total", 4)
        assert server.metric("texts_differed_total") == 1
    assert "a text differs from the same text alone" in caplog.text


def test_metrics_count_tokens_and_texts() -> None:
    with serving() as server:
        server.complete("abcdef", max_tokens=3, temperature=0)
        names = ("prompt_tokens_total", "tokens_fed_total", "generation_tokens_total", "request_success_total")
        assert [server.metric(name) for name in names] == [6, 8, 3, 1]
        assert server.metric("time_to_first_token_seconds_count") == 1
        assert b'execution="scripted"' in server.ask("/metrics").body


def test_metrics_count_errors_by_status_and_failed_texts_apart() -> None:
    with serving(key="secret", rows=1, queue=0) as server:
        key = {"Authorization": "Bearer secret"}

        def counted(path: str, status: int) -> float:
            wanted = f'_count{{path="{path}",status="{status}"}}'
            lines = server.ask("/metrics", **key).body.decode().splitlines()
            return sum(float(line.split()[-1]) for line in lines if wanted in line)

        path = "/v1/completions"
        for body, headers in (({"prompt": "a"}, {}), ({"prompt": "a", "n": 0}, key), ({"prompt": [500]}, key)):
            server.ask(path, body, **headers)
        assert server.ask(path, {"prompt": "ab", "max_tokens": 5}, **key).status == 200
        server.ask("/secret/path", **key)
        server.model.broken = OSError("a fault")
        server.ask(path, {"prompt": "ab"}, **key)
        assert [counted(path, status) for status in (200, 400, 401, 500)] == [1, 2, 1, 1]
        assert counted("other", 404) == 1
        text = server.ask("/metrics", **key).body.decode()
        assert 'request_success_total{finished_reason="length"} 1.0' in text
        assert 'request_failure_total{reason="failed"} 1.0' in text
        assert 'request_failure_total{reason="refused"} 1.0' in text
        assert "inter_token_latency_seconds_count 4.0" in text
        assert "secret" not in text


def test_a_log_has_a_line_for_each_request_and_none_of_its_texts() -> None:
    lines: list[str] = []
    with serving(log=lines.append, names=("alias", "demo")) as server:
        server.complete(["sesame"] * 2, max_tokens=3, temperature=0)
        server.ask("/no%1bwhere?sesame")
        assert [server.ask(path).status for path in ("/health", "/metrics")] == [200, 200]  # probes are not logged
        server.ask("/health", Host="evil.example")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(b"sesame\r\n\r\n")
            client.recv(9)
        server.model.seconds = 0.01
        with server.opened(prompt="sesame", max_tokens=300):
            wait_for(lambda: bool(server.app.replies))
        wait_for(lambda: len(lines) == 5)
    ends = [re.sub(r"\d\.\d{3}", "T", line.partition(" 127.0.0.1 ")[2]) for line in lines]
    assert ends[:4] == [
        "POST /v1/completions 200 T s, 12 + 6 tokens, finish length,length",
        r"GET /no\x1bwhere 404 T s",
        "GET /health 403 T s",
        "- - 400 T s",
    ]
    assert re.fullmatch(r"POST /v1/completions 499 T s, 6 \+ \d+ tokens, finish none", ends[4])
    assert "sesame" not in "".join(lines)


def test_a_model_with_an_alias_is_served_by_both_names() -> None:
    with serving(names=("alias", "demo")) as server:
        for name in ("alias", "demo", None):
            got = server.complete("a", model=name, max_tokens=1)
            assert (got.status, got.json["model"]) == (200, "alias")
            assert server.ask(f"/v1/models/{name or 'demo'}").json["id"] == "alias"
        error = server.complete("a", model="a").json["error"]["message"]
        assert error == "the model 'a' is not served; there is 'alias' or 'demo'"


def test_models_names_the_model_and_its_execution(served: Served) -> None:
    (model,) = served.ask("/v1/models").json["data"]
    assert (model["id"], model["max_model_len"], model["execution"]) == ("demo", 400, "scripted")
    assert served.ask("/v1/models/demo").json == model
    for name in ("gpt", "an/other", "demo/"):
        got = served.ask(f"/v1/models/{name}")
        assert (got.status, got.json["error"]["code"]) == (404, "model_not_found")


def test_a_fingerprint_names_the_content_of_the_file_of_a_kind(tmp_path: Path) -> None:
    model = tiny_model().requires_grad_(False)
    vars(model)["_exact"] = model.exact = True
    file, made = tmp_path / "own.py", []
    for ratio in (1, 2, 1):
        file.write_text(
            f"from llama.kv_cache.static import StaticCache\nclass Own(StaticCache, kind='served'): ratio = {ratio}"
        )
        made.append(fingerprint_of(model, Letters(), pick_cache(f"{file}:served"), None))
    assert made[0] == made[2] != made[1]


def test_a_fingerprint_names_weights_kind_and_code_where_other_texts_change_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, made = tiny_model().requires_grad_(False), []
    assert fingerprint_of(model, Letters(), "static", None) is None
    vars(model)["_exact"] = model.exact = True
    base, other_kind, other_weight = ("static", 1, "a", None), ("paged", 1, "a", None), ("static", 1.001, "a", None)
    other_code, other_day = ("static", 1, "b", None), ("static", 1, "a", "2026-11-27")
    for kind, weight, code, day in (base, other_kind, other_weight, other_code, other_day, base):
        monkeypatch.setattr("llama.texts.origin.code_digest", lambda code=code: code)
        model.norm.weight[0] = weight
        made.append(fingerprint_of(model, Letters(), kind, day))
    assert len(set(made)) == 5
    assert made[0] == made[5]
    assert re.fullmatch("fp_[0-9a-f]{32}", str(made[0]))
