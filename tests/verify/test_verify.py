"""The command: runs add up, the last sentence is the verdict, and every error is one line."""

import json
import re
import sys
from collections.abc import Sequence
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
from llama.verify import tolerance
from llama.verify.certificate import SCHEMA, Certificate, add_up, percent, report
from llama.verify.measured_run import PASSES, STAGES, Figures, FirstDivergence

SMALL = ("--batch_size=2", "--tokens=4", "--prompt_len=4", "--device=cpu")


class OldestForgotten(StaticCache, kind="oldest_forgotten"):
    """Returns a wrong oldest key."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        keys[:, 0] = 0
        return keys, values


class Command:
    """`llama-kv verify` on a tiny checkpoint, with an output file of its own."""

    def __init__(self, checkpoint: Path, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.checkpoint, self.file, self.capsys = checkpoint, file, capsys

    def __call__(self, *words: str) -> tuple[int, str]:
        """Return the exit code and what was printed."""
        given = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL if word.partition("=")[0] not in given]
        code = cli.run(verify.main, ["--ckpt_dir", str(self.checkpoint), "--output", str(self.file), *small, *words])
        out, err = self.capsys.readouterr()
        assert (err != "") == (code in (2, 130)), "an error goes to stderr, and nothing else does"
        return code, out + err

    @property
    def written(self) -> Any:
        return json.loads(self.file.read_text("utf-8"))


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


def made_up(runs: dict[int, Figures], **config: Any) -> Certificate:
    """Return a certificate that was never measured."""
    same = {"model": "demo", "dtype": "bfloat16", "device": "cpu", "kv_cache": "static", "runner": "plain"}
    same |= {"quantize": None, "activations": 16, "exact": False}
    return Certificate({**same, **config}, {"cpu": "a CPU", "torch": "2", "threads": 1, "commit": "abc"}, runs)


def last_line(printed: str) -> str:
    return printed.splitlines()[-1]


# ---- runs and their sum ----------------------------------------------------------------------------------------------


def test_a_sound_model_is_certified_with_code_0(command: Command) -> None:
    code, printed = command("--runs", "2")
    assert code == 0
    assert re.fullmatch(
        r"certified: 16 greedy tokens of .*model in fp32, cached and uncached alike; 100\.00 % of positions decided by "
        r"margins above 2 x their bound, at most \d\.\de-0[4-7]; 0 unexplained divergences",
        last_line(printed),
    )
    assert "16 of 16 = 100.00 %" in printed
    for name in PASSES:
        assert f"bit-equal to U: {name} " in printed
    lines = [line for line in printed.splitlines() if re.match(r"  [|\w].*  \S", line) and ": cached," not in line]
    assert len({len(line) for line in lines}) == 1, "the values do not end in one column"
    assert [run["seed"] for run in command.written["runs"]] == [0, 1]


def test_a_report_is_written_with_its_configuration_and_machine_and_replaces_the_one_before(command: Command) -> None:
    command.file.parent.mkdir()
    command.file.write_text(json.dumps({"schema": "llama-kv/verify/3"}))
    command("--seed=3", "--dtype=bf16", "--kv_cache=concat")
    written = command.written
    (run,) = written["runs"]
    assert (written["schema"], run["seed"], written["environment"]["torch"]) == (SCHEMA, 3, torch.__version__)
    assert written["config"] | {"weights": ""} == {
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
    assert Figures(**run["figures"]).tokens == 8


def test_counts_are_summed_sizes_are_the_largest_and_lists_joined() -> None:
    one = Figures(1, 2, 9, 3, 4, 5, 0.5, 0.25, 2.0, 0.75, {"a": 1.0}, {"w": 1}, {"w": 1})
    two = Figures(1, 1, 1, 1, 1, 1, 0.25, 0.5, 1.0, 0.5, {"a": 3.0}, {"w": 5, "v": 7}, {"w": 2})
    assert add_up([one, two, Figures(violations=["x"])]) == Figures(
        tokens=2,
        equal_tokens=3,
        guessed_tokens=10,
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


def test_a_bug_is_code_1_and_the_verdict_names_it(command: Command) -> None:
    code, printed = command("--kv_cache=oldest_forgotten")
    assert code == 1
    assert re.match(
        r"BUG: seed 0: float64 cached step by step: row \d, position \d+: the logits differ from those of float64 by "
        r"\S+, and rounding explains 1e-09; so at \d+ of \d+ positions \(and \d+ more\)",
        last_line(printed),
    )


def test_a_bug_in_one_run_is_the_verdict_of_all() -> None:
    printed = report(made_up({5: Figures(), 7: Figures(violations=["x"]), 8: Figures(violations=["y"])}))
    assert last_line(printed) == "BUG: seed 7: x (and 1 more); found at commit abc"


def test_exact_mode_counts_pairs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, a bar names every stage meanwhile."""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    code, printed = command("--exact", "--runs=2", "--batch_size=1", "--tokens=3")
    assert code == 0
    compared = sum(sum(run["figures"]["compared"].values()) for run in command.written["runs"])
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 8 ways; 6 greedy" in printed
    assert "exact mode; runs: 2" in printed
    shown = terminal.getvalue()
    stages = ["exact mode: probing products, 1 of ", "exact mode: comparing the model with itself: 100%"]
    stages += ["copying the model to float64: ", "run 1 of 2: free cached: "]
    stages += ["run 1 of 2: float64 pieces: ", "run 2 of 2: free uncached: "]
    places = [shown.find(words) for words in stages]
    assert places == sorted(places)
    assert -1 not in places
    total = 1 + 2 * STAGES
    assert f"{total - 1}/{total} " in shown  # the last stage is under way
    assert f"{total}/{total} " not in shown, "the bar is gone when all is done"


@needs_a_compiler
@pytest.mark.parametrize(
    "words", [(), pytest.param(("--quantize=int4", "--dtype=bf16", "--kv_cache=paged"), marks=pytest.mark.slow)]
)
def test_native_code_is_certified_to_the_bit(native_command: Command, words: Sequence[str]) -> None:
    code, printed = native_command("--exact", "--fast", "--tokens=12", *words)
    assert code == 0
    written = native_command.written
    (run,) = written["runs"]
    assert written["config"]["runner"] == "native"
    assert run["figures"]["bit_equal"] == run["figures"]["compared"]
    compared = sum(run["figures"]["compared"].values())
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 8 ways; 24 greedy" in printed
    weights = " with int4 weights" if words else ""
    assert f", native{weights} on cpu, KV cache {'paged' if words else 'static'}, exact mode" in printed


@pytest.mark.slow
@needs_a_compiler
def test_8_bit_activations_are_certified_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_of(hidden_size=64, intermediate_size=96, num_attention_heads=2)
    file = write_gguf(tmp_path / "model.gguf", meta_weights(random_model(config)), config, kind=Kind.Q4_0)
    command = Command(file, tmp_path / "verify.json", capsys)
    stored = ("--exact", "--fast", "--tokens=12", "--quantize=stored")
    for words, said in (
        ((), "stored weights"),
        (("--activations=8",), "stored weights and 8-bit activations"),
    ):
        code, printed = command(*stored, *words)
        assert code == 0
        assert f"native with {said} on cpu" in printed


@needs_a_compiler
def test_a_fault_of_native_code_is_a_bug(native_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault beyond position 100, which the comparison made when exact mode is switched on does not reach."""
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
    run = Figures(tokens=20, equal_tokens=15, positions=30, near_ties=10, bound=0.5, divergences=[divergence] * 5)
    lines = report(made_up({9: run})).splitlines()
    line = "  seed 9, row 1 diverges at step 5: margins U 0.1, C not finite, R 0.02; "
    assert lines[-6:-1] == [f"{line}explained by rounding"] * 3 + ["  and 2 more", ""]
    assert lines[-1] == (
        "certified: 15 of 20 greedy tokens of demo in bf16, cached and uncached alike, up to where rounding lets 5 "
        "rows diverge; 66.66 % of positions decided by margins above 2 x their bound, at most 5.0e-01; "
        "0 unexplained divergences"
    )


def test_only_a_complete_count_is_100_percent() -> None:
    assert percent(99_999_999, 100_000_000) == "99.99 %"
    assert percent(7, 7) == "100.00 %"
    assert percent(0, 0) == "0.00 %"


# ---- prompts and weights ---------------------------------------------------------------------------------------------


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


# ---- the file --------------------------------------------------------------------------------------------------------


def test_an_interruption_keeps_the_runs_that_are_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real = verify.measure_run

    def interrupted(*given: Any, seed: int, **options: Any) -> Figures:
        if seed == 1:
            raise KeyboardInterrupt
        return real(*given, seed=seed, **options)

    monkeypatch.setattr(verify, "measure_run", interrupted)
    assert command("--runs=5")[0] == 130
    assert [run["seed"] for run in command.written["runs"]] == [0]


# ---- bad input -------------------------------------------------------------------------------------------------------


BAD_INPUT = {
    "--tokens=1": "tokens=1 must be at least 2",
    "--batch_size=0": "batch_size=0 must be at least 1",
    "--prompt_len=0": "prompt_len=0 must be at least 1",
    "--prompt_len=1": "fits BOS only",
    "--tokens=29": "prompt_len=4 plus tokens=29 is more than max_seq_len=32",
    "--runs=0": "runs=0 must be at least 1",
    "--seed=-1": "seed=-1 must be at least 0",
    "--kv_cache=int8": "--preset caches --kv_cache int8 measures its quality",
    "--kv_cache=window:20+4": "is lossy",
    "--fast": "native code is certified to the bit",
    "--quantize=int8": "give --exact --fast, too",
}


def test_bad_input_is_one_line_with_code_2_and_writes_nothing(command: Command) -> None:
    answers = {words: command(*words.split()) for words in BAD_INPUT}
    wrong = {
        words: answer
        for words, answer in answers.items()
        if answer[0] != 2 or BAD_INPUT[words] not in answer[1] or answer[1].count("\n") != 1
    }
    assert wrong == {}
    assert not command.file.exists()


def test_several_ranks_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, printed = command()
    assert (code, "certifies one process" in printed) == (2, True)


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "file").write_text("")
    command.file = tmp_path / "file" / "verify.json"
    assert str(tmp_path / "file") in command()[1]
    command.file = tmp_path / "folder"
    command.file.mkdir()
    assert f"{command.file}: Is a directory" in command()[1]
    assert list(command.file.iterdir()) == []
    command.file = tmp_path / "params.json"
    command.file.write_text("{}")
    assert f"{command.file} is not a file of this command" in command()[1]
    assert command.file.read_text() == "{}"
