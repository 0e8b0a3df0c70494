"""The ledger is arithmetic over sizes: every line, note and moment by hand, of a model whose head makes the peak and
of one whose layer does; and what does not fit is refused at the byte.
"""

from typing import Any

import pytest
import torch
from tiny import tiny_args

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run import memory_ledger
from llama.bench.run.memory_ledger import (
    cache_of,
    check_length,
    check_memory,
    make_ledger,
    predict,
    workspace,
)
from llama.bench.schema import Row
from llama.costs import MB

CPU = torch.device("cpu")
CELL = Cell(batch_size=2, input_len=6, output_len=3)
LAYER = tiny_args(dim=32, ffn_dim=256, vocab_size=40, max_seq_len=64)  # its feed-forward is wide, its vocabulary small
HEAD = tiny_args(dim=32, ffn_dim=32, vocab_size=4096, max_seq_len=64)


def ledger_of(
    args: ModelArgs, cell: Cell = CELL, measured: Any = None, *, device_workspace: int = 0, **named: Any
) -> dict[str, Row]:
    """Return the lines of a ledger by name."""
    rows = make_ledger(args, cell, predict(args, cell, workspace=device_workspace), measured, **named)
    return {row["name"]: row for row in rows}


@pytest.mark.parametrize(
    ("args", "kv_caching", "moment", "activations"),
    [
        (LAYER, True, "in a layer of the prefill", 2 * 6 * (3 * 32 + 3 * 256) * 4),
        (LAYER, False, "in a layer of the step", 2 * 8 * (3 * 32 + 3 * 256) * 4),
        (HEAD, True, "at the head of the step", 2 * (1 + 1) * 32 * 4),
        (HEAD, False, "at the head of the step", 2 * (8 + 1) * 32 * 4),
    ],
)
def test_the_peak_is_in_the_layer_or_at_the_head_whichever_is_larger(
    args: ModelArgs, kv_caching: bool, moment: str, activations: int
) -> None:
    lines = ledger_of(args, CELL.but(kv_caching=kv_caching))
    assert lines["peak"]["moment"] == moment
    assert lines["logits"]["counts"] == moment.startswith("at the head")
    assert lines["logits"]["predicted_bytes"] == 2 * args.vocab_size * 4
    assert lines[f"{moment.rpartition(' ')[2]} activations"]["predicted_bytes"] == activations
    counted = [line["predicted_bytes"] for line in lines.values() if line.get("counts")]
    assert sum(counted) == lines["peak"]["predicted_bytes"]


def test_the_logits_of_the_prompt_make_the_prefill_of_a_wide_head_the_peak() -> None:
    """Of one new token there is no step; with all logits the prefill's stand beside nothing else."""
    for cell in (CELL.but(output_len=1), CELL.but(output_len=1, logits="all")):
        assert ledger_of(HEAD, cell)["peak"]["moment"] == "at the head of the prefill"
    assert ledger_of(LAYER, CELL.but(output_len=1))["peak"]["moment"] == "in a layer of the prefill"


def test_lines_of_the_head_are_those_of_the_dtype() -> None:
    """In 16 bits the logits are there twice, once before they are widened; the loop holds those of the step before."""
    names = ["weights", "head", "KV cache", "logits"]
    ends = ["step activations", "workspace", "peak"]
    wide = ledger_of(HEAD, CELL.but(logits="all"))
    assert [*wide] == [*names, "logits of the step before", *ends]
    narrow = ledger_of(HEAD, CELL.but(dtype="bf16"))
    assert [*narrow] == [*names, "logits in 16 bits", "logits of the step before", *ends]
    assert narrow["logits in 16 bits"]["predicted_bytes"] == 2 * 4096 * 2
    assert narrow["logits in 16 bits"]["counts"]
    assert narrow["logits of the step before"]["predicted_bytes"] == 2 * 4096 * 4
    assert {line["measured_bytes"] for line in narrow.values()} == {None}
    first = ledger_of(LAYER, CELL.but(output_len=1, dtype="bf16"))
    assert not first["logits in 16 bits"]["counts"]
    assert "logits of the step before" not in first


def test_a_tied_head_is_named_and_takes_no_memory() -> None:
    tied, untied = (tiny_args(dim=32, vocab_size=40, tied_head=tied) for tied in (True, False))
    embedding = 40 * 32 * 4
    own = ledger_of(untied, measured={"weights": 1000, "head": embedding})
    assert (own["head"]["predicted_bytes"], own["head"]["measured_bytes"], own["head"]["note"]) == (
        embedding,
        embedding,
        "",
    )
    assert own["weights"]["measured_bytes"] == 1000
    shared = ledger_of(tied, measured={"weights": 1000, "tied head": 0})
    assert (shared["tied head"]["predicted_bytes"], shared["tied head"]["measured_bytes"]) == (0, 0)
    assert shared["tied head"]["note"] == "is the embedding; on its own it would take 0.0 MB"
    assert shared["weights"]["predicted_bytes"] == own["weights"]["predicted_bytes"]
    assert shared["weights"]["measured_bytes"] == 1000
    assert "head" not in shared


def test_the_rest_of_the_measured_peak_is_the_activations() -> None:
    predicted = ledger_of(LAYER, device_workspace=500)["peak"]["predicted_bytes"]
    known = {"weights": 85_000, "head": 5_000, "KV cache": 8_000, "logits": 320, "peak": 200_000}
    lines = ledger_of(LAYER, measured=known, measured_by="a trace", device_workspace=500)
    before = lines["logits of the step before"]["predicted_bytes"] if "logits of the step before" in lines else 0
    assert lines["prefill activations"]["measured_bytes"] == 200_000 - 90_000 - 8_000 - 500 - before
    assert lines["prefill activations"]["note"] == "measured is what the other lines leave of the measured peak"
    assert (lines["KV cache"]["measured_bytes"], lines["logits"]["measured_bytes"]) == (8_000, 320)
    assert (lines["workspace"]["predicted_bytes"], lines["workspace"]["measured_bytes"]) == (500, None)
    peak = lines["peak"]
    assert (peak["predicted_bytes"], peak["measured_bytes"], peak["note"]) == (predicted, 200_000, "a trace")


def test_what_was_not_measured_is_none_and_has_no_note() -> None:
    lines = ledger_of(LAYER)
    assert lines.pop("peak")["note"] == "not measured"
    assert {line["measured_bytes"] for line in lines.values()} == {None}
    assert {line["note"] for line in lines.values()} == {""}


def test_the_note_on_activations_says_what_they_were_predicted_for() -> None:
    rest = "measured is what the other lines leave of the measured peak"
    for changes, note in (
        ({}, ""),
        ({"exact": True}, "predicted for the plain path; exact mode pads and copies"),
        ({"fast": True}, "predicted for the plain path; the fast step takes a workspace, or on a GPU a pool"),
        ({"fast": True, "quantize": "int8"}, "predicted for the plain path; the fast step takes a workspace"),
        ({"quantize": "int8"}, "predicted for weights as they are; int8 layers widen some outputs at a time"),
        ({"kv_cache": "concat"}, "predicted for a cache that is read in place; concat may copy what it returns"),
        ({"kv_cache": "concat", "kv_caching": False}, ""),
    ):
        for peak, tied_head in ((None, True), (10**6, False)):
            args = tiny_args(dim=64, n_heads=2, n_kv_heads=1, ffn_dim=96, vocab_size=50, tied_head=tied_head)
            lines = ledger_of(args, CELL.but(**changes), {"peak": peak})
            noted = {name: line["note"] for name, line in lines.items() if name not in ("tied head", "peak")}
            (words,) = [noted.pop(name) for name in list(noted) if name.endswith("activations")]
            if note.startswith(("predicted for the plain path", "predicted for weights")):
                assert words.startswith(note)
            else:
                assert words == "; ".join(filter(None, (rest if peak else "", note)))
            assert set(noted.values()) == {""}, "no other line has the note"


def test_a_position_of_a_cache_is_the_kinds_own_and_a_peers_is_keys_and_values() -> None:
    def position_bytes(kind: str, cell: Cell) -> int:
        return cache_of(tiny_args(kv_cache=kind)).position_bytes(cell.cache_itemsize)

    args = tiny_args()
    one = 2 * args.n_layers * args.n_kv_heads * args.head_dim
    assert position_bytes("static", Cell()) == 4 * one
    assert position_bytes("static", Cell(dtype="bf16")) == 2 * one
    assert position_bytes("static", Cell(engine="llama.cpp", quantize="int8")) == 2 * one
    assert position_bytes("static", Cell(engine="own.py:Own", quantize="int8")) == 4 * one
    assert position_bytes("int8", Cell(engine="transformers")) == position_bytes("int8", Cell())
    assert position_bytes("int8", Cell()) < 4 * one


def test_a_length_up_to_the_models_limit_is_allowed_and_one_more_is_rejected() -> None:
    check_length(CELL, ModelArgs(max_seq_len=9))
    with pytest.raises(
        ValueError, match=r"input_len=6 \+ output_len=3: a text of 9 positions goes past max_seq_len=8; shorten"
    ):
        check_length(CELL, ModelArgs(max_seq_len=8))


def test_a_cell_that_needs_one_byte_too_many_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = predict(LAYER, CELL).total
    for free, ranks, fits in [
        (needed, 1, True),
        (needed - 1, 1, False),
        (2 * needed, 2, True),  # the other rank of this host takes as much
        (2 * needed - 1, 2, False),
        (None, 1, True),
    ]:
        monkeypatch.setattr(memory_ledger, "available_memory", lambda _, free=free: free)
        monkeypatch.setattr(memory_ledger, "local_size", lambda ranks=ranks: ranks)
        if fits:
            check_memory(CELL, LAYER, CPU)
        else:
            with pytest.raises(ValueError, match=r"does not fit: weights .*KV cache .*at the peak, and .* are free on"):
                check_memory(CELL, LAYER, CPU)


def test_an_error_names_only_the_lines_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ledger, "available_memory", lambda _: 0)
    for args, named in ((LAYER, False), (HEAD, True)):
        with pytest.raises(ValueError, match="make batch_size, input_len or output_len smaller") as refused:
            check_memory(CELL, args, CPU)
        assert ("logits 0" in str(refused.value).replace("before 0", "")) == named


def test_cublas_needs_a_workspace_and_a_cpu_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert workspace(CPU) == 0
    for capability, expected in (((8, 9), 8_519_680), ((9, 0), 32 * MB), ((10, 0), 32 * MB)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, capability=capability: capability)
        assert workspace(torch.device("cuda")) == expected


def test_the_ranks_of_a_host_do_not_share_a_gpus_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ledger, "available_memory", lambda _: predict(LAYER, CELL).total)
    monkeypatch.setattr(memory_ledger, "workspace", lambda _: 0)
    monkeypatch.setattr(memory_ledger, "local_size", lambda: 2)
    check_memory(CELL, LAYER, torch.device("cuda"))
