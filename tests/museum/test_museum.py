"""Every exhibit of the museum is refused, with one exception, at once, and within the memory that its files take."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from museum.exhibits import EXHIBITS
from museum.measure import MIB, gallery, shown

from llama.checkpoint import CheckpointError, open_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def visits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Let one process, which does nothing else, open all exhibits in turn."""
    errors = tmp_path_factory.mktemp("museum") / "errors"
    with errors.open("w") as file:
        command = [sys.executable, "-m", "tests.museum"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True, check=False)
    assert done.returncode == 0, errors.read_text()[-2000:]
    found = map(json.loads, done.stdout.splitlines())
    return {visit["name"]: visit for visit in found}


@pytest.mark.parametrize("name", EXHIBITS)
def test_every_exhibit_is_refused_at_once_with_its_path_and_a_printable_reason(
    name: str, visits: dict[str, dict[str, Any]]
) -> None:
    visit = visits[name]
    assert visit["error"] == "CheckpointError", visit
    assert visit["message"].isprintable()
    assert len(visit["message"]) < 1000
    assert "exhibit" in visit["message"]  # the folder's name: a message says where
    assert visit["seconds"] <= 0.1 + 0.02 * visit["parsed"] / MIB, visit
    if visit["memory"] is not None:
        assert visit["memory"] <= visit["size"] + 64 * MIB, visit


@pytest.fixture(scope="module")
def originals() -> Iterator[Path]:
    with gallery() as folder:
        yield folder


EXPLAINED = {
    "a .gguf path that is a named pipe": "is not a regular file, or is a broken link; a checkpoint is",
    "model.gguf of model.gguf is a named pipe": "it is a named pipe, not a regular file",
    "params.json of meta is a link to a device": "it is a device, not a regular file",
    "params.json of 60,000 keys, one twice": "repeats the key '0000'",
    "config.json with 512 layers, of which the file has 2": " and 4,580 more",
    "config.json with 0 for a flag": "tie_word_embeddings=0 must be true or false",
    "params.json with 10,000 unknown keys of escapes": r"\x1b[2J\n\x00\u202e\u2028\x9b00000, ",
    "an index of 20,000 tensors that no shard holds": "0004 and 19,990 more",
    "model.safetensors with 10,000 tensors that nobody knows": " and 9,990 more",
    "model.safetensors with a tensor twice": "repeats the key 'a'",
    "model.safetensors with a hole": "b begins at byte 8 and must begin at 4: there is an overlap or gap",
    "model.safetensors with true in a shape": "a has [True] where whole numbers from 0 on must be",
    "a .gguf file with 10,000 tensors that nobody knows": r"unexpected: \x1b[0, \x1b[1, \x1b[10, ",
    "a .gguf file with a hole between tensors": "b is at offset 64 and must be at 32, the end of the previous tensor",
    "a .gguf file with a float for BOS": "tokenizer.ggml.bos_token_id=264.0 must be a whole number from 0 on",
    "a .gguf file with true for BOS": "tokenizer.ggml.bos_token_id=True must be a whole number from 0 on",
    "a .gguf file with a negative id for BOS": "tokenizer.ggml.bos_token_id=-1 must be a whole number from 0 on",
    "a .gguf file with text for add_bos_token": "tokenizer.ggml.add_bos_token='false' must be true or false",
    "a .gguf file with an array for a chat template": "the chat template is Unread(count=1) and must be a text",
    "a .gguf file whose BOS is a user's token of no letters": "an added token is empty",
    "a .gguf file with numbers for tokens": "tokenizer.ggml.tokens must be an array, of which each value is text",
    "a .gguf file with an array for a number of heads": "n_kv_heads=Unread(count=2) must be a whole number",
    "a .gguf file of 4 million empty strings": "it has more strings than the limit of 1048576",
}


@pytest.mark.parametrize("name", EXPLAINED)
def test_the_reason_is_named(name: str, originals: Path) -> None:
    with shown(name, originals) as path, pytest.raises(CheckpointError, match=re.escape(EXPLAINED[name])):
        open_checkpoint(path)


def test_the_museum_has_its_sources_and_shows_every_format() -> None:
    assert len(EXHIBITS) >= 80
    assert all(exhibit.source for exhibit in EXHIBITS.values())
    for word in (".pth", "safetensors", ".gguf", "config.json", "params.json", "tokenizer", "index"):
        assert sum(word in name for name in EXHIBITS) >= 8, word
