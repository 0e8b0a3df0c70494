"""Loading takes the memory of the model and little more, whatever the format."""

import multiprocessing
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import config_of, meta_params, meta_weights, random_model, write_gguf, write_huggingface, write_meta
from gguf import GGMLQuantizationType as Kind

from llama.checkpoint import load_weights, open_checkpoint
from llama.model import Transformer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status has the peak of resident memory")

# Each measurement is in a fork of this process. It loads a small checkpoint first, for what is allocated once. Pages of
# the file count, too, until they are released.


def grown(send: Any, small: Path, large: Path, dtype: torch.dtype, how: dict[str, Any]) -> None:
    """Send the growth of resident memory at its peak while the large checkpoint is loaded, and the model's bytes."""
    load(small, dtype, how)
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    model = load(large, dtype, how)
    send.send((status("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters())))


def load(path: Path, dtype: torch.dtype, how: dict[str, Any]) -> Transformer:
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu", **how)


def status(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


SIZES = {"small": (768, 1, 256), "large": (2048, 12, 512)}


def write(form: str, folder: Path, name: str) -> Path:
    vocab_size, layers, width = SIZES[name]
    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    model = random_model(config_of(**sizes, vocab_size=vocab_size))
    if form == "huggingface":
        return write_huggingface(folder / name, model)
    weights = meta_weights(model)
    if form == "gguf":
        return write_gguf(folder / f"{name}.gguf", weights, model.config, kind=Kind.Q4_K)
    return write_meta(folder / name, weights, meta_params(model.config), shards=int(form[-1]))


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "dtype", "how", "most"),
    [
        ("huggingface", torch.float32, {}, 1.2),
        pytest.param("huggingface", torch.bfloat16, {}, 1.3, marks=slow),
        pytest.param("pth of 1", torch.float32, {}, 1.2, marks=slow),
        pytest.param("pth of 2", torch.float32, {}, 1.2, marks=slow),
        pytest.param("gguf", torch.float32, {}, 1.2, marks=slow),
        pytest.param("gguf", torch.float32, {"quantize": "stored"}, 1.4, marks=slow),
    ],
)
def test_resident_memory_grows_by_little_more_than_the_model(
    form: str, dtype: torch.dtype, how: dict[str, Any], most: float, tmp_path: Path
) -> None:
    small, large = (write(form, tmp_path, name) for name in SIZES)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    with warnings.catch_warnings(action="ignore"):  # of a fork beside threads, which do not matter here
        process = context.Process(target=grown, args=(send, small, large, dtype, how))
        process.start()
    send.close()
    growth, model = receive.recv()
    process.join()
    assert model > 20 << 20
    assert growth < most * model  # 2.0 with every page of the file
