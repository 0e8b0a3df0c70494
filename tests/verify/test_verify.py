"""The command: runs add up in a file, the last sentence says what they come to, and every error is one line."""

import io
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import Kind, config_of, meta_weights, random_model, write_gguf
from fakes import NATIVE_SIZES, write_checkpoint
from native import needs_a_compiler
from oracles import tiny_model
from torch import Tensor

from llama import cli
from llama.cli import verify
from llama.fast.native_call import Frame
from llama.fast.native_runner import NativeRunner
from llama.kv_cache import StaticCache
from llama.rows import Rows
from llama.verify import certificate, results, tolerance
from llama.verify.certificate import Figures
from llama.verify.sessions import SESSIONS

SMALL = ("--batch_size=2", "--tokens=4", "--prompt_len=4", "--device=cpu")


class OldestForgotten(StaticCache, kind="oldest_forgotten"):
    """Has the oldest key wrong."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        keys[:, 0] = 0
        return keys, values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("verify") / "model", max_seq_len=32)


class Command:
    """`python -m llama.verify` on the tiny checkpoint, with a file of its own."""

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

    def refused(self, *words: str) -> str:
        given = {word.partition("=")[0] for word in words}
        small = [word for word in SMALL if word.partition("=")[0] not in given]
        code = cli.run(verify.main, ["--ckpt_dir", str(self.checkpoint), "--output", str(self.file), *small, *words])
        out, err = self.capsys.readouterr()
        assert (code, out, err.count("\n")) == (2, "", 1)
        return str(err)

    @property
    def runs(self) -> list[Any]:
        content = json.loads(self.file.read_text("utf-8"))
        assert content["schema"] == results.SCHEMA
        return list(content["runs"])


@pytest.fixture
def command(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(checkpoint, tmp_path / "results" / "verify.json", capsys)


@pytest.fixture(scope="module")
def native_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("native") / "model", **NATIVE_SIZES)


@pytest.fixture
def native_command(native_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(native_checkpoint, tmp_path / "verify.json", capsys)


def last_sentence(printed: str) -> str:
    return re.findall(r"^(?:certified|BUG): .*$", printed, re.MULTILINE)[-1]


# ---- the sum ---------------------------------------------------------------------------------------------------------


def test_a_sound_model_is_certified_with_code_0(command: Command) -> None:
    code, printed = command("--runs", "2")
    assert code == 0
    assert re.fullmatch(
        r"certified: 16 greedy tokens of .*model in fp32, cached and uncached alike; 100\.00 % of positions decided by "
        r"margins above 2 x their bound, at most \d\.\de-0[4-7]; 0 unexplained divergences",
        last_sentence(printed),
    )
    assert "16 of 16 = 100.00 %" in printed
    for way in certificate.PASSES:
        assert f"bit-equal to U: {way} " in printed
    widths = {
        len(line) for line in printed.splitlines() if re.match(r"  [|\w].*  \S", line) and ": cached," not in line
    }
    assert len(widths) == 1, "the values do not end in one column"


def test_a_run_is_kept_with_its_configuration_and_machine(command: Command) -> None:
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
    assert run["exact_cost"] is None
    assert Figures(**run["figures"]).tokens == 8


def test_runs_made_one_by_one_add_up_to_those_made_together(command: Command, tmp_path: Path) -> None:
    for _ in range(3):
        code, one_by_one = command()
        assert code == 0
    apart = command.runs
    command.file = tmp_path / "together.json"
    _, together = command("--runs=3")
    assert [run["seed"] for run in apart] == [run["seed"] for run in command.runs] == [0, 1, 2]
    assert [run["figures"] for run in apart] == [run["figures"] for run in command.runs]
    assert one_by_one.splitlines()[1:] == together.splitlines()[1:]  # the first names the file
    assert results.add_up([Figures(**run["figures"]) for run in apart]).tokens == 24


def test_counts_are_summed_sizes_are_the_largest_and_lists_joined() -> None:
    one = Figures(1, 2, 3, 4, 0.5, 0.25, {"a": 1.0}, {"w": 1}, {"w": 1}, 2.0, {"zero": 3, "-5": 1}, 0.5, 0.75, {"p": 1})
    two = Figures(1, 1, 1, 1, 0.25, 0.5, {"a": 3.0}, {"w": 5}, {"w": 2}, 1.0, {"-5": 2, "7": 1}, 0.25, 0.5, {"p": 2})
    assert asdict(results.add_up([one, two, Figures(violations=["x"])])) == asdict(
        Figures(
            tokens=2,
            alike=3,
            places=4,
            undecided=5,
            bound=0.5,
            strain=0.5,
            errors={"a": 3.0},
            compared={"w": 6},
            equal={"w": 3},
            max_delta=2.0,
            deltas={"zero": 3, "-5": 3, "7": 1},
            kl_sum=0.75,
            kl_max=0.75,
            top1={"p": 3},
            violations=["x"],
        )
    )


def test_no_runs_print_the_sum_of_the_file_and_change_nothing(command: Command) -> None:
    _, made = command("--runs=2")
    before = command.file.read_bytes()
    assert command("--runs=0") == (0, made)
    assert command.file.read_bytes() == before


def test_a_file_of_before_sessions_had_ways_is_read_and_added_to(command: Command) -> None:
    command("--exact")
    (run,) = command.runs
    for figure in ("compared", "equal", "errors"):
        for way in SESSIONS:
            del run["figures"][figure][way]
    results.write_runs(command.file, [run])
    code, printed = command("--runs=0")
    assert code == 0
    assert not [way for way in SESSIONS if f": {way} " in printed]
    pairs = sum(run["figures"]["compared"].values())
    assert f"certified: {pairs} (configuration, position) pairs bit-equal, in 5 ways; 8 greedy" in printed
    code, printed = command("--exact")
    assert code == 0
    before, added = (run["figures"]["compared"] for run in command.runs)
    for way in certificate.PASSES:
        places = before.get(way, 0) + added[way]
        assert re.search(rf"bit-equal to U: {way} +{places} of {places} = 100\.00 %", printed)


def test_what_may_not_be_added_up_is_shown_apart(command: Command) -> None:
    command()
    command("--dtype=bf16")
    command("--kv_cache=concat")
    _, printed = command("--runs=0")
    assert printed.count("certified: ") == 3
    assert "in bf16 on cpu, KV cache static, fast mode; runs: 1" in printed
    assert "in fp32 on cpu, KV cache concat, fast mode; runs: 1" in printed


def test_a_bug_is_code_1_and_the_sentence_names_it(command: Command) -> None:
    code, printed = command("--kv_cache=oldest_forgotten")
    assert code == 1
    assert re.match(
        r"BUG: seed 0: float64 cached step by step: row \d, position \d+: the logits are \S+ off those of float64, and "
        r"rounding explains 1e-09; so at \d+ of \d+ positions \(and \d+ more\)",
        last_sentence(printed),
    )


class Infinite(StaticCache, kind="infinite"):
    """Overflows."""

    def update(self, rows: Rows, xk: Tensor, xv: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().update(rows, xk, xv)
        return keys, values + torch.inf


def test_a_run_that_comes_to_no_numbers_is_a_bug_too(command: Command) -> None:
    code, printed = command("--kv_cache=infinite", "--runs=2")
    assert code == 1
    assert last_sentence(printed).startswith("BUG: seed 0: free cached: the logits of row 0 at step 0 are not finite")
    assert "(and 1 more); found at commit" in last_sentence(printed)


def test_a_bug_in_one_run_makes_the_sum_a_bug_and_stays_one(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command()
    with monkeypatch.context() as patch:
        patch.setattr(tolerance, "TOLERANCE_FACTOR", dict.fromkeys(tolerance.TOLERANCE_FACTOR, 0.01))
        assert command("--seed=7")[0] == 1
    code, printed = command()
    assert code == 1
    assert last_sentence(printed).startswith("BUG: seed 7: ")
    assert command("--runs=0")[0] == 1
    assert command("--dtype=bf16")[0] == 1, "the file as a whole is what the exit code speaks of"


def test_exact_mode_counts_pairs_and_says_what_it_costs(command: Command) -> None:
    code, printed = command("--exact", "--runs=2")
    assert code == 0
    compared = sum(sum(run["figures"]["compared"].values()) for run in command.runs)
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 11 ways; 16 greedy" in printed
    assert re.search(r"a step in exact mode takes +\d+\.\dx\n  a prefill in exact mode takes +\d+\.\dx\n", printed)
    assert "exact mode; runs: 2" in printed


@needs_a_compiler
@pytest.mark.parametrize("words", [(), ("--quantize=int8",), ("--quantize=int4", "--dtype=bf16", "--kv_cache=paged")])
def test_native_code_is_certified_to_the_bit(native_command: Command, words: Sequence[str]) -> None:
    code, printed = native_command("--exact", "--fast", "--tokens=12", *words)
    assert code == 0
    (run,) = native_command.runs
    assert run["config"]["runner"] == "native"
    assert run["figures"]["equal"] == run["figures"]["compared"]
    compared = sum(run["figures"]["compared"].values())
    assert f"certified: {compared} (configuration, position) pairs bit-equal, in 11 ways; 24 greedy" in printed
    weights = f" with {words[0].partition('=')[2]} weights" if words else ""
    assert f", native{weights} on cpu, KV cache {'paged' if len(words) > 1 else 'static'}, exact mode" in printed
    assert run["exact_cost"] is None
    assert "in exact mode takes" not in printed


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
    ways = ["stored weights on", "mapped weights on", "stored weights and 8-bit activations on"]
    assert re.findall(r"native with (.* on) cpu", command("--runs=0")[1]) == ways


@needs_a_compiler
def test_native_code_that_is_off_is_a_bug(native_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that the comparison at the switch does not meet, for it shows past 100 positions alone."""
    native_command("--exact", "--fast", "--tokens=4", "--batch_size=1")  # the library is compared with itself once
    real = NativeRunner.run

    def later(runner: NativeRunner, frame: Frame) -> None:
        real(runner, frame)
        frame.logits += (max(frame._starts) > 100) * 1e-5

    monkeypatch.setattr(NativeRunner, "run", later)
    code, printed = native_command("--exact", "--fast", "--tokens=110", "--batch_size=1")
    assert code == 1
    assert "the bits are not those of the uncached pass, in exact mode" in printed


def test_a_file_of_before_native_code_was_certified_is_read_and_added_to(command: Command) -> None:
    command()
    command("--exact")
    for run in (runs := command.runs):
        del run["config"]["runner"], run["config"]["quantize"], run["config"]["activations"]
    results.write_runs(command.file, runs)
    for words in ((), ("--exact",)):
        assert command(*words)[0] == 0
    assert [run["seed"] for run in command.runs] == [0, 0, 1, 1]
    assert command("--runs=0")[1].count("runs: 2\n") == 2


def test_rows_that_part_are_shown_and_counted_in_the_sentence() -> None:
    parted = {"row": 1, "step": 5, "position": 8, "tokens": [3, 4], "margins": [0.1, None, 0.02], "explained": True}
    figures = asdict(Figures(tokens=20, alike=15, places=30, undecided=10, bound=0.5)) | {"divergences": [parted] * 5}
    config = dict.fromkeys(results._GROUP, "x") | {"model": "demo", "dtype": "bfloat16", "exact": False}
    config |= {"runner": "plain", "quantize": None, "activations": 16}
    machine = {"cpu": "a CPU", "torch": "2", "threads": 1, "commit": "abc"}
    run = {"config": config, "seed": 9, "figures": figures, "environment": machine, "exact_cost": None}
    group: Any = [run]
    assert results.sentence(group) == (
        "certified: 15 of 20 greedy tokens of demo in bf16, cached and uncached alike, up to where rounding parts 5 "
        "rows; 66.66 % of positions decided by margins above 2 x their bound, at most 5.0e-01; "
        "0 unexplained divergences"
    )
    lines = results.table(group).splitlines()
    line = "  seed 9, row 1 parts at step 5: 3 cached, 4 uncached; margins U 0.1, C not finite, R 0.02; "
    assert lines[-4:] == [f"{line}explained by rounding"] * 3 + ["  and 2 more"]


def test_only_all_is_100_percent() -> None:
    assert results.percent(99_999_999, 100_000_000) == "99.99 %"
    assert results.percent(7, 7) == "100.00 %"
    assert results.percent(0, 0) == "0.00 %"


# ---- seeds and prompts -----------------------------------------------------------------------------------------------


def test_a_used_seed_is_refused_and_the_next_free_one_taken(command: Command) -> None:
    command("--seed=1")
    message = command.refused("--seed=0", "--runs=2")
    assert "seed=1 has been run, and would count twice" in message
    assert "from 2 on" in message
    command("--runs=2")
    assert [run["seed"] for run in command.runs] == [1, 0, 2]
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
    model, same = tiny_model(dtype=torch.float32), tiny_model(dtype=torch.float32)
    assert verify.weights_id(model) == verify.weights_id(same)
    with torch.no_grad():
        same.layers[1].attention.wo.weight[0, 0] += 1e-6  # type: ignore[union-attr, index]
    assert verify.weights_id(model) != verify.weights_id(same)


# ---- while it runs ---------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_says_what_is_being_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    assert command("--exact", "--runs=2")[0] == 0
    shown = terminal.getvalue()
    done = ["exact mode: probing products, 1 of ", "exact mode: comparing the model with itself: 100%"]
    done += ["timing what exact mode costs: ", "a copy in float64: ", "run 1 of 2: free cached: "]
    done += ["run 1 of 2: float64 pieces: ", "run 2 of 2: free uncached: "]
    places = [shown.find(words) for words in done]
    assert places == sorted(places)
    assert -1 not in places
    assert "forward 3" in shown
    assert f"{2 + 2 * certificate.STAGES}/{2 + 2 * certificate.STAGES} " not in shown, "it is away when all is done"


def test_the_bar_counts_the_parts_that_there_are(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real, parts = certificate.measure, []

    def listening(*given: Any, on_stage: Any, **options: Any) -> Figures:
        return real(*given, on_stage=lambda part: (parts.append(part), on_stage(part)), **options)

    monkeypatch.setattr(certificate, "measure", listening)
    command()
    assert len(parts) == len(set(parts)) == certificate.STAGES


# ---- the file --------------------------------------------------------------------------------------------------------


def test_an_interruption_keeps_the_runs_that_are_done(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seeds = certificate.measure, []

    def interrupted(*given: Any, seed: int, **options: Any) -> Figures:
        seeds.append(seed)
        if seed == 2:
            raise KeyboardInterrupt
        return real(*given, seed=seed, **options)

    with monkeypatch.context() as patch:
        patch.setattr(certificate, "measure", interrupted)
        assert command("--runs=5")[0] == 130
    assert seeds == [0, 1, 2]
    assert [run["seed"] for run in command.runs] == [0, 1]
    assert command("--runs=2")[0] == 0
    assert [run["seed"] for run in command.runs] == [0, 1, 2, 3]


def test_a_failed_write_leaves_the_file_whole_and_nothing_beside_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    command()
    before = command.file.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert command("--runs=1")[0] == 2
    assert command.file.read_bytes() == before
    assert list(command.file.parent.iterdir()) == [command.file]


def added_meanwhile(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the runs out of the file; another process adds them while the next one is measured."""
    others, real = command.runs, certificate.measure
    command.file.unlink()

    def meanwhile(*given: Any, **options: Any) -> Figures:
        results.write_runs(command.file, others)
        return real(*given, **options)

    monkeypatch.setattr(certificate, "measure", meanwhile)


def test_runs_that_another_process_adds_meanwhile_are_kept(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command("--seed=40")
    added_meanwhile(command, monkeypatch)
    command()
    assert [run["seed"] for run in command.runs] == [40, 0]


def test_the_same_run_of_another_process_counts_once(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    command()
    added_meanwhile(command, monkeypatch)
    command()
    assert [run["seed"] for run in command.runs] == [0]


def test_several_ranks_are_refused(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "certifies one process" in command.refused()


def test_seeds_are_new_to_all_that_is_added_up(command: Command) -> None:
    command("--tokens=4")
    command("--tokens=5")
    assert [(run["seed"], run["config"]["tokens"]) for run in command.runs] == [(0, 4), (1, 5)]


def test_two_processes_do_not_change_the_file_at_once(command: Command) -> None:
    command()
    (run,) = command.runs
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: results.add_run(command.file, {**run, "seed": seed}), range(1, 25)))
    assert sorted(run["seed"] for run in command.runs) == list(range(25))


def broken(how: str, text: str) -> str:
    content = json.loads(text)
    run = content["runs"][0]
    if how == "cut off":
        return text[:-40]
    if how == "a list":
        return "[1, 2]"
    if how == "another schema":
        return json.dumps(content | {"schema": "llama-kv/benchmark/1"})
    if how == "no figure":
        del run["figures"]["tokens"]
        del run["figures"]["compared"]["pieces"]
        run["figures"]["more"] = 1
    if how == "a wrong kind":
        run["figures"]["deltas"] = 3
    if how == "no configuration":
        del run["config"]["dtype"]
    return json.dumps(content)


@pytest.mark.parametrize(
    "how", ["cut off", "a list", "another schema", "no figure", "a wrong kind", "no configuration"]
)
@pytest.mark.parametrize("runs", ["0", "1"])
def test_a_damaged_file_is_refused_and_left_alone(command: Command, how: str, runs: str) -> None:
    command()
    command.file.write_text(broken(how, command.file.read_text("utf-8")), "utf-8")
    before = command.file.read_bytes()
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
        (["--prompt_len=1"], "leaves room for BOS alone"),
        (["--tokens=29"], "prompt_len=4 and tokens=29 together pass max_seq_len=32"),
        (["--runs=-1"], "runs=-1 must be at least 0"),
        (["--seed=-1"], "seed=-1 must not be negative"),
        (["--seed=1", "--runs=0"], "leave one of them out"),
        (["--runs=0"], "holds no runs yet"),
        (["--dtype=int8"], "dtype='int8' is not known"),
        (["--device=abacus"], "device='abacus' is not known"),
        (["--kv_cache=none_such"], "kv_cache='none_such' is not a known kind"),
        (["--kv_cache=nowhere/x.py:never_defined"], "No such file"),
        (["--kv_cache=int8"], "--preset caches --kv_cache int8 measures how far off it is"),
        (["--kv_cache=window:20+4"], "is not equal by design"),
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


def test_what_does_not_fit_is_refused_before_it_is_tried(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "available_memory", lambda device: 2**20)
    message = command.refused()
    assert "2 rows of 8 positions need" in message
    assert "cpu has 1.0 MB left" in message
    assert "smaller batch_size" in message


def test_an_output_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    command.file = tmp_path / "file" / "verify.json"
    monkeypatch.setattr(verify, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert str(tmp_path / "file") in command.refused()


@pytest.mark.parametrize("runs", ["0", "1"])
def test_a_directory_as_output_is_refused_in_words_and_stays_as_it_was(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: str
) -> None:
    command.file = tmp_path / "folder"
    command.file.mkdir()
    monkeypatch.setattr(verify, "load", lambda *_, **__: pytest.fail("it was loaded"))
    assert f"{command.file}: Is a directory" in command.refused(f"--runs={runs}")
    assert list(tmp_path.rglob("*")) == [command.file]
