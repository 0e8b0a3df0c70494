"""Loading takes the memory of the model and little more, whatever the format."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import config_of, meta_params, meta_weights, random_model, write_gguf, write_huggingface, write_meta
from gguf import GGMLQuantizationType as Kind

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status has the peak of resident memory")

# Each measurement has its own process. It loads a small checkpoint first, for what is allocated once in a process, such
# as imports. Pages of the file count, too, until they are released.
MEASURE = """
import json, re, sys
import torch
from llama.checkpoint import load_weights, open_checkpoint

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(rf"{name}:\\s+(\\d+)", file.read())[1]) * 1024

def load(path):
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=getattr(torch, dtype), device="cpu", **how)

small, large, dtype, how = json.loads(sys.argv[1])
load(small)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # resets the peak
before = status("VmRSS")
model = load(large)
print(status("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()))
"""
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
        ("huggingface", "float32", {}, 1.2),
        pytest.param("huggingface", "bfloat16", {}, 1.3, marks=slow),
        pytest.param("pth of 1", "float32", {}, 1.2, marks=slow),
        pytest.param("pth of 2", "float32", {}, 1.2, marks=slow),
        pytest.param("gguf", "float32", {}, 1.2, marks=slow),
        pytest.param("gguf", "float32", {"quantize": "stored"}, 1.4, marks=slow),
        pytest.param("gguf", "float32", {"quantize": "stored", "repack": False}, 0.2, marks=slow),
    ],
)
def test_resident_memory_grows_by_little_more_than_the_model(
    form: str, dtype: str, how: dict[str, Any], most: float, tmp_path: Path
) -> None:
    small, large = (str(write(form, tmp_path, name)) for name in SIZES)
    command = [sys.executable, "-c", MEASURE, json.dumps([small, large, dtype, how])]
    root = Path(__file__).parents[2]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root).stdout
    growth, model = map(int, printed.split())
    assert model > 20 << 20
    assert growth < most * model  # 2.0 with every page of the file
