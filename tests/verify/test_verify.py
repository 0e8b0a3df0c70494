"""The command: runs add up in a file, the last sentence is the verdict, and every error is one line."""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from commands import Terminal
from fakes import NATIVE_SIZES, write_checkpoint
from native import needs_a_compiler
from tiny import tiny_model
from torch import Tensor

from llama import cli
from llama.cli import verify
from llama.fast.native_call import NativeCall
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import StaticCache
from llama.rows import Rows
from llama.verify import certificate, tolerance
from llama.verify.certificate import Figures, FirstDivergence
from llama.verify.verdict import (
    _CONFIG_KEYS,
    RUNS_SCHEMA,
    CertificateRun,
    add_up,
    group_table,
    percent,
    read_runs,
    verdict,
    write_runs,
)

SMALL = ("--batch_size=2", "--tokens=4", "--prompt_len=4", "--device=cpu")


class OldestForgotten(StaticCache, kind="oldest_forgotten"):
    """Returns a wrong oldest key."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        keys[:, 0] = 0
        return keys, values


class Infinite(StaticCache, kind="infinite"):
    """Overflows."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, values + torch.inf


class Command:
    """`python -m llama.verify` on a tiny checkpoint, with an output file of its own."""

    def __init__(self, checkpoint: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.checkpoint, self.file, self.capsys = checkpoint, file, capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """Return the exit code and what was printed."""
        code, out, err = self._run(words)
        assert (err != "") == (code in (2, 130)), "an error goes to stderr, and nothing else does"
        return code, out + err

    def refused(self, *words: str) -> str:
        """Return the one line with which the command is refused."""
        code, out, err = self._run(words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        return err

    def _run(self, words: Sequence[str]) -> tuple[int, str, str]:
        given = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL if word.partition("=")[0] not in given]
        code = cli.run(verify.main, ["--ckpt_dir", str(self.checkpoint), "--output", str(self.file), *small, *words])
        return code, *self.capsys.readouterr()

    @property
    def runs(self) -> list[Any]:
        content = json.loads(self.file.read_text("utf-8"))
        assert content["schema"] == RUNS_SCHEMA
        return list(content["runs"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify") / "model", max_seq_len=32)


@pytest.fixture
def command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(checkpoint, tmp_path / "results" / "verify.json", capsys)


@pytest.fixture(scope="module")
def native_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("native") / "model", **NATIVE_SIZES)


@pytest.fixture
def native_command(native_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(native_checkpoint, tmp_path / "verify.json", capsys)


def made_up_run(seed: int = 0, *, config: dict[str, Any] | None = None, **figures: Any) -> CertificateRun:
    """Return a run that was never measured."""
    same = {"runner": "plain", "quantize": None, "activations": 16, "exact": False}
    machine = {"cpu": "a CPU", "torch": "2", "threads": 1, "commit": "abc"}
    return CertificateRun(dict.fromkeys(_CONFIG_KEYS, "x") | same | (config or {}), seed, machine, Figures(**figures))


def last_verdict(printed: str) -> str:
    return re.findall(r"^(?:certified|BUG): .*$", printed, re.MULTILINE)[-1]


# ---- runs and their sum ----------------------------------------------------------------------------------------------


def test_a_sound_model_is_certified_with_code_0(command: Command) -> None:
    code, printed = command("--runs", "2")
    assert code == 0
    assert re.fullmatch(
        r"certified: 16 greedy tokens of .*model in fp32, cached and uncached alike; 100\.00 % of positions decided by "
        r"margins above 2 x their bound, at most \d\.\de-0[4-7]; 0 unexplained divergences",
        last_verdict(printed),
    )
    assert "16 of 16 = 100.00 %" in printed
    for name in certificate.PASSES:
        assert f"bit-equal to U: {name} " in printed
    lines = [line for line in printed.splitlines() if re.match(r"  [|\w].*  \S", line) and ": cached," not in line]
    assert len({len(line) for line in lines}) == 1, "the values do not end in one column"
    before = command.file.read_bytes()
    assert command("--runs=0") == (0, printed)
    assert command.file.read_bytes() == before


def test_a_run_is_stored_with_its_configuration_and_machine(command: Command) -> None:
    command("--seed=3", "--dtype=bf16", "--kv_cache=concat")
    (run,) = command.runs
    assert run["seed"] == 3
    assert run["config"] | {"weights": ""} == {
        "model": str(command.checkpoint),
        "weights": "",
        "dtype": "bfloat16",
        "device": "cpu",
        "batch_size": 2,
        "tokens": 4,
        "prompt_len": 4,
        "exact": False,
        "runner": "plain",
        "quantize": None,
        "activations": 16,
        "kv_cache": "concat",
        "slack": tolerance.TOLERANCE_FACTOR[2],
    }
    assert run["environment"]["torch"] == torch.__version__
    assert Figures(**run["figures"]).tokens == 8


def test_runs_made_one_by_one_add_up_to_those_made_together(command: Command, tmp_path: Path) -> None:
    for _ in range(2):
        code, one_by_one = command()
        assert code == 0
    apart = command.runs
    command.file = tmp_path / "together.json"
    _, together = command("--runs=2")
    assert [run["seed"] for run in apart] == [run["seed"] for run in command.runs] == [0, 1]
    assert [run["figures"] for run in apart] == [run["figures"] for run in command.runs]
    assert one_by_one.splitlines()[1:] == together.splitlines()[1:]  # the first line names the file


def test_counts_are_summed_sizes_are_the_largest_and_lists_joined() -> None:
    one = Figures(1, 2, 3, 4, 5, 0.5, 0.25, 2.0, 0.75, {"a": 1.0}, {"w": 1}, {"w": 1})
    two = Figures(1, 1, 1, 1, 1, 0.25, 0.5, 1.0, 0.5, {"a": 3.0}, {"w": 5, "v": 7}, {"w": 2})
    assert add_up([one, two, Figures(violations=["x"])]) == Figures(
        tokens=2,
        equal_tokens=3,
        positions=4,
        near_ties=5,
        same_top=6,
        bound=0.5,
        error_ratio=0.5,
        max_delta=2.0,
        kl_max=0.75,
        errors={"a": 3.0},
        compared={"w": 6, "v": 7},
        bit_equal={"w": 3},
        violations=["x"],
    )


def test_runs_that_may_not_be_added_up_are_shown_apart(command: Command) -> None:
    runs = [made_up_run(config={"dtype": "bfloat16"}), made_up_run(1), made_up_run(2)]
    write_runs(command.file, [*runs, made_up_run(config={"kv_cache": "concat"})])
    _, printed = command("--runs=0")
    assert printed.count("certified: ") == 3
    assert "x in bf16 on x, KV cache x, default mode; runs: 1" in printed
    assert "x in x on x, KV cache x, default mode; runs: 2" in printed
    assert "x in x on x, KV cache concat, default mode; runs: 1" in printed


def test_a_bug_is_code_1_and_the_verdict_names_it(command: Command) -> None:
    code, printed = command("--kv_cache=oldest_forgotten")
    assert code == 1
    assert re.match(
        r"BUG: seed 0: float64 cached step by step: row \d, position \d+: the logits differ from those of float64 by "
        r"\S+, and rounding explains 1e-09; so at \d+ of \d+ positions \(and \d+ more\)",
        last_verdict(printed),
    )


def test_a_run_whose_logits_are_not_finite_is_a_bug_too(command: Command) -> None:
    code, printed = command("--kv_cache=infinite", "--runs=2")
    assert code == 1
    assert last_verdict(printed).startswith("BUG: seed 0: free cached: the logits of row 0 at step 0 are not finite")
    assert "(and 1 more); found at commit" in last_verdict(printed)


def test_a_bug_in_one_run_makes_the_sum_a_bug_and_stays_one(command: Command) -> None:
    write_runs(command.file, [made_up_run(5), made_up_run(7, violations=["x"])])
    code, printed = command("--runs=0")
    assert (code, last_verdict(printed)) == (1, "BUG: seed 7: x; found at commit abc")
    assert command("--dtype=bf16")[0] == 1, "the exit code is that of the whole file"


def test_exact_mode_counts_pairs(command: Command) -> None:
    code, printed = command("--exact", "--runs=2")
    assert code == 0
    compared = sum(sum(run["figures"]["compared"].values()) for run in command.runs)
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 11 ways; 16 greedy" in printed
    assert "exact mode; runs: 2" in printed


@needs_a_compiler
@pytest.mark.parametrize("words", [(), ("--quantize=int4", "--dtype=bf16", "--kv_cache=paged")])
def test_native_code_is_certified_to_the_bit(native_command: Command, words: Sequence[str]) -> None:
    code, printed = native_command("--exact", "--fast", "--tokens=12", *words)
    assert code == 0
    (run,) = native_command.runs
    assert run["config"]["runner"] == "native"
    assert run["figures"]["bit_equal"] == run["figures"]["compared"]
    compared = sum(run["figures"]["compared"].values())
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 11 ways; 24 greedy" in printed
    weights = " with int4 weights" if words else ""
    assert f", native{weights} on cpu, KV cache {'paged' if words else 'static'}, exact mode" in printed


@needs_a_compiler
def test_8_bit_activations_and_mapped_weights_are_certified_and_add_up_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    file = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.Q4_0)
    command = Command(file, tmp_path / "verify.json", capsys)
    stored = ("--exact", "--fast", "--tokens=12", "--quantize=stored")
    for words in ((), ("--repack=False",), ("--activations=8",)):
        assert command(*stored, *words)[0] == 0
    assert [run["seed"] for run in command.runs] == [0, 0, 0]
    weights = ["stored weights on", "mapped weights on", "stored weights and 8-bit activations on"]
    assert re.findall(r"native with (.* on) cpu", command("--runs=0")[1]) == weights


@needs_a_compiler
def test_native_code_that_is_off_is_a_bug(native_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault beyond position 100, which the comparison made when exact mode is switched on does not reach."""
    native_command("--exact", "--fast", "--tokens=4", "--batch_size=1")  # the library is compared with itself once
    real = NativeRunner.run

    def later(runner: NativeRunner, call: NativeCall) -> None:
        real(runner, call)
        call.logits += (max(call._starts) > 100) * 1e-5

    monkeypatch.setattr(NativeRunner, "run", later)
    code, printed = native_command("--exact", "--fast", "--tokens=110", "--batch_size=1")
    assert code == 1
    assert "the bits are not those of the uncached pass, in exact mode" in printed


def test_rows_that_diverge_are_shown_and_counted_in_the_verdict() -> None:
    divergence = FirstDivergence(row=1, step=5, position=8, tokens=[3, 4], margins=[0.1, None, 0.02], explained=True)
    counts = {"tokens": 20, "equal_tokens": 15, "positions": 30, "near_ties": 10}
    config = {"model": "demo", "dtype": "bfloat16"}
    group = [made_up_run(9, config=config, **counts, bound=0.5, divergences=[divergence] * 5)]
    assert verdict(group) == (
        "certified: 15 of 20 greedy tokens of demo in bf16, cached and uncached alike, up to where rounding lets 5 "
        "rows diverge; 66.66 % of positions decided by margins above 2 x their bound, at most 5.0e-01; "
        "0 unexplained divergences"
    )
    lines = group_table(group).splitlines()
    line = "  seed 9, row 1 diverges at step 5: margins U 0.1, C not finite, R 0.02; "
    assert lines[-4:] == [f"{line}explained by rounding"] * 3 + ["  and 2 more"]


def test_only_a_complete_count_is_100_percent() -> None:
    assert percent(99_999_999, 100_000_000) == "99.99 %"
    assert percent(7, 7) == "100.00 %"
    assert percent(0, 0) == "0.00 %"


# ---- seeds and prompts -----------------------------------------------------------------------------------------------


def test_seeds_are_new_to_the_runs_that_are_added_up(command: Command) -> None:
    command("--seed=1")
    message = command.refused("--seed=0", "--runs=2")
    assert "seed=1 has been run, and would count twice" in message
    assert "from 2 on" in message
    command("--runs=2", "--tokens=5")  # a size is not what keeps runs apart
    assert [(run["seed"], run["config"]["tokens"]) for run in command.runs] == [(1, 4), (0, 5), (2, 5)]
    command("--seed=1", "--dtype=bf16")  # another configuration
    assert command.runs[-1]["seed"] == 1


def test_prompts_follow_from_the_seed_with_bos_first_and_never_alone() -> None:
    drawn = verify.draw_prompts(4, 200, 5, 40, bos=39)
    assert drawn == verify.draw_prompts(4, 200, 5, 40, bos=39)
    assert drawn != verify.draw_prompts(5, 200, 5, 40, bos=39)
    assert {len(prompt) for prompt in drawn} == {2, 3, 4, 5}
    assert {prompt[0] for prompt in drawn} == {39}
    plain = verify.draw_prompts(4, 200, 5, 40, bos=None)
    assert {len(prompt) for prompt in plain} == {1, 2, 3, 4, 5}
    assert {id for prompt in plain for id in prompt} == set(range(40))


def test_other_weights_are_another_model() -> None:
    model, other = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    other.output.weight.data[0, 0] += 1
    assert verify.facts_of(model)["weights"] != verify.facts_of(other)["weights"]


# ---- the bar ---------------------------------------------------------------------------------------------------------


def test_on_a_terminal_a_bar_names_every_stage(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert command("--exact", "--runs=2")[0] == 0
    shown = terminal.getvalue()
    stages = ["exact mode: probing products, 1 of ", "exact mode: comparing the model with itself: 100%"]
    stages += ["copying the model to float64: ", "run 1 of 2: free cached: "]
    stages += ["run 1 of 2: float64 pieces: ", "run 2 of 2: free uncached: "]
    places = [shown.find(words) for words in stages]
    assert places == sorted(places)
    assert -1 not in places
    total = 1 + 2 * certificate.STAGES
    assert f"{total - 1}/{total} " in shown  # the last stage is under way
    assert f"{total}/{total} " not in shown, "the bar is gone when all is done"


# ---- the file --------------------------------------------------------------------------------------------------------


def test_an_interruption_keeps_the_runs_that_are_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = certificate.measure_run

    def interrupted(*given: Any, seed: int, **options: Any) -> Figures:
        if seed == 1:
            raise KeyboardInterrupt
        return real(*given, seed=seed, **options)

    monkeypatch.setattr(certificate, "measure_run", interrupted)
    assert command("--runs=5")[0] == 130
    assert [run["seed"] for run in command.runs] == [0]


def test_a_failed_write_leaves_the_file_whole_and_nothing_beside_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_runs(command.file, [made_up_run()])
    before = command.file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert command("--runs=1")[0] == 2
    assert command.file.read_bytes() == before
    assert list(command.file.parent.iterdir()) == [command.file]


@pytest.mark.parametrize(("theirs", "kept"), [(40, [40, 0]), (0, [0])])
def test_runs_of_another_process_are_kept_and_the_same_run_counts_once(
    command: Command, monkeypatch: pytest.MonkeyPatch, theirs: int, kept: list[int]
) -> None:
    command(f"--seed={theirs}")
    others, real = read_runs(command.file), certificate.measure_run
    command.file.unlink()

    def meanwhile(*given: Any, **options: Any) -> Figures:
        write_runs(command.file, others)
        return real(*given, **options)

    monkeypatch.setattr(certificate, "measure_run", meanwhile)
    command()
    assert [run["seed"] for run in command.runs] == kept


def broken(how: str) -> str:
    run = asdict(made_up_run())
    if how == "a list":
        return "[1, 2]"
    if how == "no figure":
        del run["figures"]["tokens"]
        run["figures"]["more"] = 1
    if how == "a wrong type":
        run["figures"]["errors"] = 3
    if how == "no configuration":
        del run["config"]["dtype"]
    if how == "no seed":
        del run["seed"]
    schema = "llama-kv/benchmark/1" if how == "another schema" else RUNS_SCHEMA
    text = json.dumps({"schema": schema, "runs": [run]})
    return text[:-40] if how == "cut off" else text


@pytest.mark.parametrize(
    "how", ["cut off", "a list", "another schema", "no figure", "a wrong type", "no configuration", "no seed"]
)
def test_a_damaged_file_is_refused_and_left_alone(command: Command, how: str) -> None:
    command.file.parent.mkdir()
    command.file.write_text(broken(how), "utf-8")
    before = command.file.read_bytes()
    for runs in (0, 1):
        message = command.refused(f"--runs={runs}")
        assert "verify.json is damaged, or is not a file of this command" in message
        assert "--output" in message
    assert command.file.read_bytes() == before


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tokens=1"], "tokens=1 must be at least 2"),
        (["--batch_size=0"], "batch_size=0 must be at least 1"),
        (["--prompt_len=0"], "prompt_len=0 must be at least 1"),
        (["--prompt_len=1"], "fits BOS only"),
        (["--tokens=29"], "prompt_len=4 plus tokens=29 is more than max_seq_len=32"),
        (["--runs=-1"], "runs=-1 must be at least 0"),
        (["--seed=-1"], "seed=-1 must not be negative"),
        (["--seed=1", "--runs=0"], "leave one of them out"),
        (["--runs=0"], "has no runs yet"),
        (["--dtype=int8"], "dtype='int8' is not known"),
        (["--device=abacus"], "device='abacus' is not known"),
        (["--kv_cache=none_such"], "kv_cache='none_such' is not a known kind"),
        (["--kv_cache=nowhere/x.py:never_defined"], "No such file"),
        (["--kv_cache=int8"], "--preset caches --kv_cache int8 measures its quality"),
        (["--kv_cache=window:20+4"], "is lossy"),
        (["--token=4"], "did you mean --tokens?"),
        (["--fast"], "native code is certified to the bit"),
        (["--quantize=int8"], "give --exact --fast, too"),
        (["--exact", "--quantize=int8"], "by native code alone; ask for fast, too"),
        (["--activations=8"], "activations=8 goes with packed weights"),
        (["--exact", "--fast", "--repack=False"], "ask for quantize stored, too"),
    ],
)
def test_bad_input_is_one_line_with_code_2_and_writes_nothing(command: Command, words: list[str], says: str) -> None:
    assert says in command.refused(*words)
    assert not command.file.exists()


def test_several_ranks_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "certifies one process" in command.refused()


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("")
    command.file = tmp_path / "file" / "verify.json"
    assert str(tmp_path / "file") in command.refused()
    command.file = tmp_path / "folder"
    command.file.mkdir()
    for runs in (0, 1):
        assert f"{command.file}: Is a directory" in command.refused(f"--runs={runs}")
    assert list(command.file.iterdir()) == []
