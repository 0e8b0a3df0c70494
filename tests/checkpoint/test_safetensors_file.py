"""A .safetensors file is read as the safetensors package wrote it, and a .pth file as torch.save did."""

import zipfile
from pathlib import Path

import torch
from forge import safetensors
from safetensors.torch import save_file

from llama.checkpoint.assemble import Weight
from llama.checkpoint.huggingface import read_shard
from llama.checkpoint.meta import read_pth


def whole(weight: Weight) -> torch.Tensor:
    return weight.rows(0, weight.shape[0])


def test_data_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = torch.tensor([1.0, -2.0])
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    path.write_bytes(safetensors(header, data.numpy().tobytes()))
    found = whole(read_shard(path, None)["a"])
    assert torch.equal(found, data)
    assert found.data_ptr() % 4 == 0  # else native code of some CPUs would end the process


def test_a_pth_file_is_mapped_whoever_wrote_the_archive(tmp_path: Path) -> None:
    """Of torch's records most are aligned; those of Python's zipfile are not."""
    wanted = {"norm.weight": torch.arange(5).bfloat16(), "output.weight": torch.arange(12).view(4, 3) / 7}
    torch.save(wanted, tmp_path / "torch.pth")
    with zipfile.ZipFile(tmp_path / "torch.pth") as one, zipfile.ZipFile(tmp_path / "python.pth", "w") as other:
        for name in one.namelist():
            if "/." not in name:  # places of records, of newer versions of torch
                other.writestr(name, one.read(name))
    for path in tmp_path.iterdir():
        found = read_pth(path)
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in found.items())
        assert found.keys() == wanted.keys()


def test_released_pages_are_read_again(tmp_path: Path) -> None:
    numbers = torch.arange(100_000.0).view(1000, 100)
    torch.save({"a": numbers}, tmp_path / "a.pth")
    save_file({"a": numbers}, tmp_path / "a.safetensors")
    for weight in (Weight.mapped(read_pth(tmp_path / "a.pth")["a"]), read_shard(tmp_path / "a.safetensors", None)["a"]):
        for _ in range(2):
            assert torch.equal(weight.rows(10, 990), numbers[10:990])
            weight.drop()
