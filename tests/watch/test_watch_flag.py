"""`--watch FILE` writes the page of the text that is printed, or is refused in one line before a model is loaded."""

from pathlib import Path

import pytest
from commands import Command
from test_page import data_of

from llama.cli.inference import main


def test_the_page_is_of_the_text_that_is_printed(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    path = tmp_path / "new" / "page.html"
    monkeypatch.chdir(checkpoint)
    words = ["hello the", "other", "--max_gen_len=6", "--seed=3", "--kv_cache=window:4+1", "--share_prefix"]
    printed = command.printed(main, "--ckpt_dir", ".", *words, "--watch", path)
    data = data_of(path.read_text("utf-8"))
    made = "".join(data["texts"][0][data["prompt"] :])
    assert repr(printed.partition("hello the\n> ")[2].partition("\n\n====")[0])[1:-1] == made
    assert printed.splitlines()[-1].startswith(f"{path}: {len(data['steps'])} steps, ")
    assert printed.splitlines()[-1].endswith("it shows the first of 2 prompts")
    byline = path.read_text("utf-8").partition('<p class="byline">')[2]
    assert byline.startswith(f"{checkpoint.name}: 2 layers")
    assert "Cache: window:4+1" in byline


def test_what_cannot_be_shown_or_written_is_refused_before_a_model_is_loaded(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    page = tmp_path / "page.html"
    refused = {
        ("--chat", "--watch", page): "--watch shows one text",
        ("x", "--fast", "--watch", page): "leave out --fast",
        ("x", "--watch", tmp_path): str(tmp_path),
        ("x", "--watch", tmp_path / "file" / "page.html"): "file",
    }
    said = {words: command.refused(main, *words, "--ckpt_dir", "/nowhere") for words in refused}
    assert {words: line for words, line in said.items() if refused[words] not in line or "nowhere" in line} == {}
    assert not page.exists()


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Command) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = "x", "--watch", tmp_path / "page.html", "--ckpt_dir", "/nowhere"
    assert "run it without torchrun" in command.refused(main, *words)
