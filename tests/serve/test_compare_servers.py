"""The comparison of servers: what it sends, reads and counts."""

import os
import runpy
from pathlib import Path

import pytest
from serving import Endless, Slow, serving


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="CPU seconds of a process are found in /proc alone")
def test_clients_of_the_comparison_read_whole_texts_and_the_times_of_their_pieces() -> None:
    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "compare_servers.py"))
    requests = script["some_requests"](5, 1)
    assert requests == script["some_requests"](5, 1)
    assert len({len(body["prompt"]) for body in requests}) == 5
    requests = [{**body, "prompt": body["prompt"][:9], "max_tokens": 6 + i} for i, body in enumerate(requests)]
    with serving() as served:
        alone, run = (script["measured"](served.port, os.getpid(), requests, clients) for clients in (1, 4))
    made = Slow().generate(Endless(), [body["prompt"] for body in requests], 10, temperature=0)  # type: ignore[arg-type]
    for i, (one, other, whole) in enumerate(zip(run.answers, alone.answers, made, strict=True)):
        assert one.text == other.text == whole["generation"][: 6 + i]
        assert one.tokens == len(one.arrivals) == 6 + i
        assert 0 < one.arrivals[0] <= one.arrivals[-1] <= run.seconds
    found = script["figures"]([alone, run])
    assert found["tokens/s"] * (alone.seconds + run.seconds) == pytest.approx(80)
    assert found["gap"] <= found["gap p99"]
