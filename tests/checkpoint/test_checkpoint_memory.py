"""Loading takes the memory of the model and little more, whatever the file holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoints import (
    config_of,
    meta_params,
    meta_weights,
    random_model,
    write_gguf,
    write_huggingface,
    write_meta,
)
from gguf import GGMLQuantizationType as Kind
from transformers import LlamaConfig

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/status says what is anonymous memory")

# Every measurement has a process of its own, whose heap no other one has grown. Small checkpoints are loaded before,
# for what is made once in a process, such as imports.
MEASURE = """
import json, os, re, sys, threading
import torch
from llama.checkpoint import load_weights, open_checkpoint

def anonymous():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s+(\\d+)", file.read())[1]) * 1024

def load(path, dtype):
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=dtype, device="cpu")

def growth(path, dtype):
    before, peak, done = anonymous(), 0, threading.Event()
    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load(path, dtype)
    peak = max(peak, anonymous())
    done.set()
    watcher.join()
    return (peak - before) / sum(parameter.nbytes for parameter in model.parameters())

small, large = json.loads(sys.argv[1])
for path in small:
    load(path, torch.bfloat16)
for path in large:
    for dtype in (torch.float32, torch.bfloat16):
        if os.fork() == 0:
            print(json.dumps([f"{path} to {dtype}", growth(path, dtype)]), flush=True)
            os._exit(0)
        assert os.wait()[1] == 0
"""


def write_kinds(directory: Path, *, vocab_size: int, layers: int, width: int) -> list[str]:
    config = config_of(
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        vocab_size=vocab_size,
        tie_word_embeddings=True,
    )
    paths = []
    model = random_model(config)
    for dtype in (torch.float32, torch.bfloat16):
        model = model.to(dtype)
        weights, params = meta_weights(model), meta_params(config)
        paths.append(write_huggingface(directory / f"huggingface-{dtype}", model))
        paths.append(write_meta(directory / f"meta-{dtype}", weights, params, shards=2))
        kind = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}[dtype]
        paths.append(write_gguf(directory / f"{kind.name}.gguf", weights, config, kind=kind))
    paths.append(write_gguf(directory / "Q6_K.gguf", weights, config, kind=Kind.Q6_K))
    return [str(path) for path in paths]


@pytest.mark.slow
def test_anonymous_memory_grows_by_little_more_than_the_model(tmp_path: Path) -> None:
    small = write_kinds(tmp_path / "small", vocab_size=768, layers=1, width=256)
    large = write_kinds(tmp_path / "large", vocab_size=8192, layers=7, width=512)
    command = [sys.executable, "-c", MEASURE, json.dumps([small, large])]
    root = Path(__file__).parents[2]
    env = os.environ | {"OMP_NUM_THREADS": "1"}  # a process with more threads than one must not fork
    output = subprocess.run(command, check=True, capture_output=True, text=True, cwd=root, env=env).stdout
    growths = dict(map(json.loads, output.splitlines()))
    assert len(growths) == 14
    for what, growth in growths.items():
        assert 0.9 < growth < 1.15, f"{what}: {growth}"  # below 0.9 a parameter would be a view of the file


# What is read of the file counts, too, until its pages are dropped.
RESIDENT = """
import json, re, sys
import torch
from llama.checkpoint import load_weights, open_checkpoint

def status(name):
    with open("/proc/self/status") as file:
        return int(re.search(rf"{name}:\\s+(\\d+)", file.read())[1]) * 1024

def load(path):
    checkpoint = open_checkpoint(path)
    return load_weights(checkpoint, checkpoint.args, dtype=torch.float32, device="cpu", **json.loads(sys.argv[3]))

small, large = sys.argv[1:3]
load(small)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak counts anew
before = status("VmRSS")
model = load(large)
print(status("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


SIZES = {"small": (768, 1, 256), "large": (2048, 12, 512)}


def growth_and_model(small: Path, large: Path, **how: object) -> tuple[int, int]:
    """Return how far resident memory grows while the large one is loaded, and the bytes of the model."""
    command = [sys.executable, "-c", RESIDENT, str(small), str(large), json.dumps(how)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    growth, model = map(int, printed.split())
    assert model > 20 << 20
    return growth, model


def weights_of_sizes(name: str) -> tuple[dict[str, torch.Tensor], LlamaConfig]:
    vocab_size, layers, width = SIZES[name]
    config = config_of(hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, vocab_size=vocab_size)
    return meta_weights(random_model(config)), config


@pytest.mark.slow
@pytest.mark.parametrize("repack", [True, False])
def test_resident_memory_holds_a_stored_file_once(repack: bool, tmp_path: Path) -> None:
    small, large = (
        write_gguf(tmp_path / f"{name}.gguf", *weights_of_sizes(name), kind=Kind.Q4_K) for name in ("small", "large")
    )
    growth, model = growth_and_model(small, large, quantize="stored", repack=repack)
    assert growth < (1.4 * model if repack else 0.2 * model)  # 2.0 with every page that was read


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2])
def test_resident_memory_holds_a_pth_file_once(shards: int, tmp_path: Path) -> None:
    paths = []
    for name in ("small", "large"):
        weights, config = weights_of_sizes(name)
        paths.append(write_meta(tmp_path / name, weights, meta_params(config), shards=shards))
    growth, model = growth_and_model(*paths)
    assert growth < 1.2 * model  # 2.0 with every page that was read


def test_resident_memory_holds_a_safetensors_file_once(tmp_path: Path) -> None:
    paths = []
    for name in ("small", "large"):
        vocab_size, layers, width = SIZES[name]
        sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
        paths.append(write_huggingface(tmp_path / name, random_model(config_of(**sizes, vocab_size=vocab_size))))
    growth, model = growth_and_model(*paths)
    assert growth < 1.2 * model  # 2.0 with every page that was read
