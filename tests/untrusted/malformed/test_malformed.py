"""Every malformed checkpoint is rejected at once, within the memory of its files, and with a printable reason."""

import json
import multiprocessing
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, random_model
from untrusted.malformed import measure
from untrusted.malformed.cases import CASES, METADATA, SLOW
from untrusted.malformed.measure import MIB


def write_results(path: Path, slow: bool) -> None:
    path.write_text("".join(json.dumps(asdict(result)) + "\n" for result in measure.results(slow=slow)))


@pytest.fixture(scope="module", params=["quick", pytest.param("slow", marks=pytest.mark.slow)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Open the cases in a fork of this process, which has imported everything already."""
    random_model(config_of())  # imports transformers
    path = tmp_path_factory.mktemp("malformed") / "results"
    with warnings.catch_warnings(action="ignore"):  # of a fork beside threads, which do not matter here
        process = multiprocessing.get_context("fork").Process(
            target=write_results, args=(path, request.param == "slow")
        )
        process.start()
    process.join()
    assert process.exitcode == 0
    return {result["name"]: result for result in map(json.loads, path.read_text().splitlines())}


def test_every_case_is_refused_at_once_with_its_path_and_a_printable_reason(results: dict[str, dict[str, Any]]) -> None:
    faults = []
    for name, result in results.items():
        message, memory = result["message"], result["memory"] or 0
        right = result["error"] == "CheckpointError" and message.isprintable() and len(message) < 1000
        right &= "malformed" in message  # the folder's name: a message has the path
        right &= result["seconds"] <= result["limit"] and memory <= result["size"] + 64 * MIB
        right &= EXPLAINED.get(name, "") in message
        if name.removeprefix("a .gguf file with ") in METADATA:  # refused before tensors are missed
            right &= ("missing: " in message) == (name == VALID_BY_ITSELF)
        if not right:
            faults.append(result)
    assert results
    assert faults == []


VALID_BY_ITSELF = "a .gguf file with 512 layers, of which it has 2"
EXPLAINED = {
    "a .gguf path that is a named pipe": "is not a regular file, or is a broken link; a checkpoint is",
    "model.gguf of model.gguf is a named pipe": "it is a named pipe, not a regular file",
    "params.json of meta is a link to a device": "it is a device, not a regular file",
    "params.json of 60,000 keys, one twice": "repeats the key '0000'",
    "config.json with 512 layers, of which the file has 2": " and 4,580 more",
    "config.json with 0 for a flag": "tie_word_embeddings=0 must be true or false",
    "params.json with 10,000 unknown keys of escapes": r"\x1b[2J\n\x00\u202e\u2028\x9b00000, ",
    "an index of 20,000 tensors that no shard has": "0004 and 19,990 more",
    "model.safetensors with 10,000 unknown tensors": " and 9,995 more",
    "model.safetensors with an empty tensor": "a is empty, a single number or not contiguous",
    "model.safetensors with a hole": "invalid offset for tensor `b`",
    "model.safetensors with 60,000 empty tensors": "60000 tensors are more than the limit of 16384",
    "a .gguf file with 10,000 unknown tensors": r"unexpected: \x1b[0, \x1b[1, \x1b[10, ",
    "a .gguf file with a hole between tensors": "b is at offset 64 and must be at 32, the end of the previous tensor",
    "a .gguf file with a float for BOS": "tokenizer.ggml.bos_token_id=264.0 must be a whole number from 0 on",
    "a .gguf file with a negative id for BOS": "tokenizer.ggml.bos_token_id=-1 must be a whole number from 0 on",
    "a .gguf file with text for add_bos_token": "tokenizer.ggml.add_bos_token='false' must be true or false",
    "a .gguf file with an array for a chat template": "the chat template is Unread(count=1) and must be a text",
    "a .gguf file whose BOS is a user's token of no letters": "token '' has 0 characters",
    "a .gguf file with numbers for tokens": "tokenizer.ggml.tokens must be an array, of which each value is text",
    "a .gguf file with an array for a number of heads": "n_kv_heads=Unread(count=2) must be a whole number",
    "a .gguf file of 4 million empty strings": "it has more strings than the limit of 1048576",
    "params.json with keys of another library": "has unknown keys: lora_args, quantization_args",
    "config.json with -1 words": "vocab_size=-1 must be a whole number of at least 1",
    "a place in the index that leads to the root": "names '/etc/passwd.safetensors', which is not the plain name",
    "a place in the index that is the folder above": "names '..', which is not a .safetensors file",
    "a place in the index that is another shard's": "the file and the index disagree about model.norm.weight",
    "a .gguf file with two RoPE scalings": "has rope_freqs.weight and another RoPE scaling",
    "an index whose map is a list": "lacks weight_map",
    "model.safetensors with whole numbers for weights": "a is torch.int32, ",
    "tokenizer.model of 1,100,000 lines": "1100000 lines are more than the limit of 1048320 tokens",
    "tokenizer.model of 15 million fields": "has more than 1,114,112 fields at byte 2228227; this is not",
    "a .pth file with a record that no tensor has": "its records have other sizes than its tensors",
    "a .pth file with a record whose header has another length of its name": "in directory",
    "a .pth file with two records exchanged": "its records have other sizes than its tensors",
    "a .pth file with a record that is too short": "its records have other sizes than its tensors",
    "a .pth file whose pickle doubles a tuple 60 times": "it has a tuple of 127 values, and the limit is 64",
    "a .pth file whose pickle puts a tuple in tuples a million times": "it has a tuple of 65 values",
    "a .pth file whose pickle puts a list in lists 300,000 times": "more than 262144 operations",
    "a .pth file whose pickle makes 2 GB of bytes": "it names '__builtin__ bytearray'",
    "a .pth file with a tensor in no record": "it names 'torch FloatTensor'",
    "a .pth file with big-endian numbers": "its numbers are not little-endian",
    "a .pth file with numbers that are negated when they are read": "not contiguous",
    "a .pth file with compressed records": "is compressed; save a dict",
}


def test_the_cases_have_sources_and_cover_every_format() -> None:
    assert len(CASES) >= 270
    assert CASES.keys() >= SLOW | EXPLAINED.keys()
    assert all(case.source for case in CASES.values())
    for word in (".pth", "safetensors", ".gguf", "config.json", "params.json", "tokenizer", "index"):
        assert sum(word in name for name in CASES) >= 8, word
