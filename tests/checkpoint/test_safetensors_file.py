"""A .safetensors file is read as the safetensors package wrote it, and refused before data where its header lies."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from museum.exhibits import SAFETENSORS, entry, safetensors
from safetensors.torch import load_file, save_file

from llama.checkpoint.base import CheckpointError, Weight
from llama.checkpoint.safetensors_file import DTYPES, parse_header, read_safetensors


def whole(weight: Weight) -> torch.Tensor:
    """Return all of a weight; a single number, which has no dimensions, is read as one row."""
    return weight.rows(0, (*weight.shape, 1)[0]).view(weight.shape)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_tensors_are_those_that_the_package_wrote(tmp_path: Path, dtype: torch.dtype) -> None:
    path = tmp_path / "a.safetensors"
    wanted = {"b": torch.randn(3, 5, 2).to(dtype), "a": torch.tensor(1.5, dtype=dtype), "": torch.randn(7).to(dtype)}
    save_file(wanted, path, metadata={"format": "pt", "é": "\x1b"})
    seen: list[str] = []
    found = read_safetensors(path, seen.extend)
    assert sorted(seen) == sorted(wanted) == sorted(load_file(path))
    for name, tensor in wanted.items():
        assert whole(found[name]).dtype == dtype
        assert torch.equal(whole(found[name]), tensor)


def test_data_that_is_not_aligned_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    data = torch.tensor([1.0, -2.0])
    header = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    assert len(header) % 4
    path.write_bytes(safetensors(header, data.numpy().tobytes()))
    assert torch.equal(whole(read_safetensors(path, lambda names: None)["a"]), data)


@pytest.mark.parametrize("what", [what for what, (_, content) in SAFETENSORS.items()])
def test_headers_that_lie_give_a_printable_reason_and_no_tensor(what: str) -> None:
    content = SAFETENSORS[what][1]
    try:
        spans, _ = parse_header(content)
    except ValueError as error:
        shown = str(error)
    else:  # only a name that no model has
        assert what in ("with escapes in a name", "with a NUL in a name", "with 10,000 tensors that nobody knows")
        shown = ""
        assert spans
    assert shown.isprintable()


def test_more_tensors_than_any_model_has_are_refused() -> None:
    header = {f"{i}": entry([1], 4 * i, 4 * i + 4) for i in range((1 << 14) + 1)}
    with pytest.raises(ValueError, match="16385 tensors are more than the limit of 16384"):
        parse_header(safetensors(header, bytes(4 * len(header))))


def test_names_are_checked_before_anything_is_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(1)}, path)

    def refuse(names: object) -> None:
        raise CheckpointError(path, f"has {list(names)}")  # type: ignore[call-overload]

    with pytest.raises(CheckpointError, match=r"has \['a'\]"):
        read_safetensors(path, refuse)


@given(st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_tensors_may_stand_in_any_order_and_any_change_of_a_border_is_refused(shapes: list[list[int]], dice) -> None:  # type: ignore[no-untyped-def]
    header, end = {}, 0
    for i, shape in enumerate(shapes):
        size = 2 * int(torch.Size(shape).numel())
        header[str(i)] = entry(shape, end, end + size, dtype="F16")
        end += size
    entries = list(header.items())
    dice.shuffle(entries)
    assert len(parse_header(safetensors(dict(entries), bytes(end)))[0]) == len(shapes)
    name = dice.choice(entries)[0]
    begin, stop = header[name]["data_offsets"]
    header[name]["data_offsets"] = dice.choice([[begin + 2, stop + 2], [begin, stop + 2], [begin + 2, stop]])
    with pytest.raises(ValueError, match=r"hole|between|truncated"):
        parse_header(safetensors(header, bytes(end)))
