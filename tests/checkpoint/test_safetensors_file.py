"""A .safetensors file is read as the safetensors package wrote it. The header has its tests in untrusted/."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tables import table
from untrusted.malformed.cases import safetensors

from llama.checkpoint.assemble import Weight
from llama.checkpoint.huggingface import WEIGHT_DTYPES, read_shard


def whole(weight: Weight) -> torch.Tensor:
    """Return all of a weight; a single number, which has no dimensions, is read as one row."""
    return weight.rows(0, (*weight.shape, 1)[0]).view(weight.shape)


@table("dtype", WEIGHT_DTYPES.values())
def test_tensors_are_those_that_the_package_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "a.safetensors"
    wanted = {"b": torch.randn(3, 5, 2).to(dtype), "a": torch.tensor(1.5, dtype=dtype), "": torch.randn(7).to(dtype)}
    save_file(wanted, path, metadata={"format": "pt", "é": "\x1b"})
    found = read_shard(path, None)
    assert sorted(found) == sorted(wanted) == sorted(load_file(path))
    for name, tensor in wanted.items():
        assert whole(found[name]).dtype == dtype
        assert torch.equal(whole(found[name]), tensor)


def test_data_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = torch.tensor([1.0, -2.0])
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    path.write_bytes(safetensors(header, data.numpy().tobytes()))
    assert torch.equal(whole(read_shard(path, None)["a"]), data)
