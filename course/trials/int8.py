"""The exercise `int8`: how far numbers are from what `quantize` and `dequantize` make of them.

Errors are counted in steps. A step is a 255th of a row's range, so the nearest code is at most half a step off.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

NEAR = 0.25  # a scale is stored in 9 bits and may be chosen in other ways: 0.5 and 0.7 steps are the same
# The smallest number is code 0, or the middle of the range is code 127.5. Codes are made from the zero as it is stored,
# or before it is rounded to float16. A zero between 1024 and 2048 is rounded by up to half a step.
FORMS = tuple(
    (*middle, *exact) for middle in ((), ("zero-in-the-middle",)) for exact in ((), ("zero-before-it-is-stored",))
)
MISTAKES = {
    "zero-missing": (
        40,
        "Codes begin at 0 although the numbers do not: what is below their range is lost",
        "Which number does code 0 stand for in a row from 4 to 5? Where is it stored?",
    ),
    "zero-unscaled": (
        40,
        "The zero is counted in scales, and is added as if it were not",
        "TASK.md says in which unit zeros are counted. Do your two functions use that unit?",
    ),
    "zero-rounded": (
        15,
        "The zero is rounded to a whole number: codes do not reach both ends of the range",
        "Print the codes of the smallest and the largest number of a row. Which values can a float16 have?",
    ),
    "zero-too-large": (
        30,
        "If a range is small beside its numbers, the zero is too large for float16",
        "Which is the largest float16? Print the zeros of a row from 299.99 to 300.01.",
    ),
    "codes-signed": (
        40,
        "Codes above 127 come back as negative numbers",
        "Which numbers can torch.int8 store, and which torch.uint8?",
    ),
    "one-scale": (
        30,
        "All rows share one scale: rows of small numbers are lost",
        "Over which axes do you take the smallest and the largest number? Print the shape of the result.",
    ),
    "scale-on-wrong-axis": (
        30,
        "A scale is that of a column, not of a row",
        "x is (..., count, length). Which axis has the numbers that share a scale?",
    ),
    "range-around-zero": (
        20,
        "The range is taken to be symmetric: codes are lost for numbers that do not occur",
        "Print the smallest and the largest code of a row from 4 to 5. Which codes are never used?",
    ),
    "rounded-down": (
        20,
        "Codes are rounded down: errors are up to a whole step, and all of one sign",
        "Print the mean of the errors and the largest one, in scales.",
    ),
    "codes-wrap": (
        40,
        "The largest number of a row gets the code 256, which a byte stores as 0",
        "What does torch.tensor(256.0).to(torch.uint8) return? Print your codes before that step.",
    ),
    "too-many-levels": (
        15,
        "The range has 256 steps: between 256 codes there are 255",
        "How many steps are there from code 0 to code 255?",
    ),
    "half-the-levels": (
        15,
        "The range has 127 or 128 steps: half of the codes are not used",
        "Print the largest code of each row. How many codes can a byte store?",
    ),
    "scale-before-rounding": (
        15,
        "Codes are made by the scale before it was rounded, not by the stored one",
        "Compare wide_scales(short_scales(scale)) with scale. By which one does dequantize multiply?",
    ),
    "divided-by-zero": (
        30,
        "Rows of equal numbers come back as something else: their range is 0",
        "Quantize rows of 0 and rows of 300. What is their range, and what do you divide by?",
    ),
    "computed-in-16-bits": (
        15,
        "Codes of bfloat16 numbers are computed in bfloat16, which has 8 bits itself",
        "Print the dtype of each tensor in quantize for an x in bfloat16.",
    ),
    "codes-not-bytes": (
        15,
        "Codes take more than a byte each",
        "Print codes.dtype and codes.element_size().",
    ),
    "scale-not-stored": (
        40,
        "Scales are returned as floating-point numbers, where the cache stores int16",
        "Which function does TASK.md name that stores scales? Print the dtype of what you return.",
    ),
}
ALSO = (
    ("divided-by-zero", "at-least-1e-8"),  # 300 / 1e-8 is too large for the zero
    ("scale-before-rounding", "with-a-margin"),  # a larger scale may be rounded by more
)


def trials() -> Iterator[tuple[str, Any]]:
    import torch

    from llama.kv_cache.quantized import dequantize, quantize

    def numbers(width: int = 32) -> "Tensor":
        return torch.rand(2, 2, 32, width, generator=torch.Generator().manual_seed(width)) * 2 - 1

    def back(x: "Tensor", parts: int = 1) -> "Tensor":
        return dequantize(*quantize(x, bits=8, parts=parts), bits=8)

    codes, scale, zero = quantize(numbers(), bits=8, parts=1)
    yield "one byte a code", codes.element_size() == 1
    yield "the types of scale and zero", [str(scale.dtype), str(zero.dtype)]
    sizes, two_parts = torch.logspace(-2, 2, 32), numbers(64) * torch.tensor([1.0, 100.0]).repeat_interleave(32)
    for what, x, parts in (
        ("numbers from -1 to 1", numbers(), 1),
        ("numbers from 4 to 5", numbers() / 2 + 4.5, 1),
        ("numbers from -5 to -4", numbers() / 2 - 4.5, 1),
        ("rows from 0.01 to 100", numbers() * sizes[:, None], 1),
        ("rows whose numbers grow from 0.01 to 100", numbers() * sizes, 1),
        ("rows of two parts, the second 100 times as large", two_parts, 2),
        ("bfloat16 numbers from 10 to 12", (numbers() + 11).bfloat16(), 1),
    ):
        yield from _errors(what, x.double(), back(x, parts).double(), parts)
    x = numbers()
    yield "the mean error, in steps, of numbers from -1 to 1", _plain((back(x) - x).mean() * 127.5)
    for what, x in (
        ("0 throughout", numbers() * 0),
        ("300 throughout", numbers() * 0 + 300),
        ("-7 throughout", numbers() * 0 - 7),
        ("from 299.99 to 300.01", numbers() / 100 + 300),
    ):
        share = (back(x) - x).abs().max() / x.abs().max().clamp(min=1) * 100
        yield f"the error, in per cent, of rows that are {what}", _plain(share)
    yield from _of_the_cache(numbers() * torch.where(torch.arange(32) == 3, 50, 1), numbers())


def _errors(what: str, x: "Tensor", back: "Tensor", parts: int = 1) -> Iterator[tuple[str, Any]]:
    """Yield the largest error and the mean one of x, (..., count, length)."""
    import torch

    x, back = (torch.unflatten(each, -1, (parts, -1)) for each in (x, back))
    steps = (back - x) / (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) * 255
    steps = steps.clamp(-100, 100)  # of larger errors the size depends on much else
    yield f"the largest error, in steps up to 100, of {what}", _plain(steps.abs().max())
    yield f"the mean size of an error, in steps up to 100, of {what}", _plain(steps.abs().mean())


def _plain(number: "Tensor") -> float | str:
    return round(float(number), 3) if number.isfinite() else "not a number"


def _of_the_cache(keys: "Tensor", values: "Tensor") -> Iterator[tuple[str, Any]]:
    """Store keys and values, (bsz, n_kv_heads, positions, head_dim), and read them in the next call."""
    import torch

    from llama.args import ModelArgs
    from llama.kv_cache import KVCache
    from llama.rows import Rows

    given = keys.transpose(1, 2), values.transpose(1, 2)
    args = ModelArgs(dim=64, n_layers=1, n_heads=2, n_kv_heads=2, vocab_size=9, max_seq_len=64, kv_cache="int8")
    with torch.inference_mode():
        cache = KVCache.of(args)
        cache.update(Rows.at([0, 0], [32, 32]), *given)
        read = cache.update(Rows.at([32, 32], [1, 1]), *(each[:, :1] for each in given))
    channels, tokens = read[0][:, :32].permute(0, 2, 3, 1), read[1][:, :32].transpose(1, 2)
    yield from _errors("a channel of keys in the cache", keys.mT.double(), channels.double())
    yield from _errors("a token's values in the cache", values.double(), tokens.double())


def install(*wrong: str) -> None:
    import torch

    import llama.kv_cache.quantized as home

    levels = 127 if "half-the-levels" in wrong else 256 if {"too-many-levels", "codes-wrap"} & {*wrong} else 255
    across, floats = "scale-on-wrong-axis" in wrong, "scale-not-stored" in wrong

    def quantize(x: "Tensor", *, bits: int, parts: int, **_: Any) -> tuple["Tensor", "Tensor", "Tensor"]:
        rows = torch.unflatten(x if "computed-in-16-bits" in wrong else home._wide(x), -1, (parts, -1))
        rows = rows.transpose(-3, -1) if across else rows  # (..., count, parts, length)
        low, high = rows.amin(-1), rows.amax(-1)
        if "one-scale" in wrong:
            low, high = low.amin().expand_as(low), high.amax().expand_as(high)
        if "range-around-zero" in wrong:
            high = torch.maximum(high, -low)
            low = -high
        scale = (high - low) / levels
        if "zero-too-large" in wrong:
            scale = scale.where(scale != 0, 1)
        elif "divided-by-zero" not in wrong:
            least = torch.maximum(high.abs(), low.abs()) * 2**-15
            scale = scale + least if "with-a-margin" in wrong else torch.maximum(scale, least)
        elif "at-least-1e-8" in wrong:
            scale = scale.clamp(min=1e-8)
        stored = scale if floats else home.short_scales(scale)
        step = scale if floats or "scale-before-rounding" in wrong else home.wide_scales(stored).to(scale.dtype)
        step = step if "divided-by-zero" in wrong else step.where(step != 0, 1)
        zero = (low + high) / 2 / step - 127.5 if "zero-in-the-middle" in wrong else low / step
        exact, zero = zero, zero.round() if "zero-rounded" in wrong else zero
        zero = (zero * ("zero-missing" not in wrong)).half()
        chosen = exact if "zero-before-it-is-stored" in wrong else zero
        codes = rows / step[..., None] - chosen.to(rows.dtype)[..., None]
        codes = codes.floor() if "rounded-down" in wrong else codes.round()
        codes = codes % 256 if "codes-wrap" in wrong else codes.clamp(0, min(levels, 255))
        codes = (codes.transpose(-3, -1) if across else codes).flatten(-2)
        return codes.to(torch.int16 if "codes-not-bytes" in wrong else torch.uint8), stored.mT, zero.mT

    def dequantize(codes: "Tensor", scale: "Tensor", zero: "Tensor", *, bits: int, **_: Any) -> "Tensor":
        numbers = (codes.to(torch.int8) if "codes-signed" in wrong else codes).float()
        numbers = torch.unflatten(numbers, -1, (scale.shape[-2], -1))
        numbers = numbers.transpose(-3, -1) if across else numbers
        step, zero = (scale if floats else home.wide_scales(scale)).float().mT[..., None], zero.float().mT[..., None]
        numbers = numbers * step + zero if "zero-unscaled" in wrong else (numbers + zero) * step
        return (numbers.transpose(-3, -1) if across else numbers).flatten(-2)

    home.quantize, home.dequantize = quantize, dequantize
