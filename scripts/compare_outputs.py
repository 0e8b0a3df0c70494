"""What the library computes, as digests: recorded on one commit and compared on another, on the same machine.

    python scripts/compare_outputs.py outputs.json              # records; on the next commit, compares
    python scripts/compare_outputs.py outputs.json --record     # records anew

For a change that must not change results. Of the demo model: exact-mode logits in four dtypes, fed in one pass and in
steps; greedy and sampled ids of 20 prompts with the cache on and off; logits of the fast step in fp32 and int8; and the
shape of a benchmark's report, whose figures are of the hour. Bits belong to a machine and to its count of threads.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from llama import console

    console.quiet_imports()

import torch
from torch import Tensor

from llama import Transformer, cli, load
from llama.bench.single import benchmark_inference
from llama.files import check_writable, keep_file, read_text

SUBJECTS = ("The history of", "In biology,", "She opened", "def main():", "Once, far away,")
PROMPTS = [f"{subject} {word}" for subject in SUBJECTS for word in ("the", "a", "one", "every")]
TOKENS = 48


def main(*prompts: str, record: bool = False) -> int:
    """Record digests of what is computed into a JSON file, or compare with what it holds.

    Args:
        prompts: The file.
        record: Record anew where the file is there.
    """
    if len(prompts) != 1:
        raise ValueError(f"{len(prompts)} files were given; name one, outputs.json for example")
    file = Path(prompts[0])
    before = None if record or not file.exists() else recorded(file)
    if before is None:
        check_writable(file)
    found = dict(outputs())
    if before is None:
        keep_file(file, (json.dumps(found, indent=2) + "\n").encode())
        print(f"{len(found)} digests recorded in {file}")
        return 0
    different = [name for name in sorted({*before, *found}) if before.get(name) != found.get(name)]
    for name in different:
        print(f"{name}: {before.get(name)} before, {found.get(name)} now")
    print(f"{len(different)} of {len(found)} outputs differ from those in {file}")
    return min(len(different), 1)


def recorded(file: Path) -> dict[str, str]:
    """Return the digests in a file; raise ValueError where it holds none."""
    try:
        found = json.loads(read_text(file, limit=10_000_000))
        return {name: found[name] for name in found}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} holds no digests ({error}); give another file, or --record to replace it") from None


def outputs() -> Iterator[tuple[str, str]]:
    """Yield the name of every output, and its digest."""
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        model, tokenizer = load("demo", dtype=dtype, exact=True)
        yield from logits_of(f"exact {dtype}", model, tokens_of(tokenizer))
    model, tokenizer = load("demo")
    for kv_caching in (True, False):
        for name, options in {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 7}}.items():
            results = model.generate(tokenizer, PROMPTS, 24, kv_caching=kv_caching, logprobs=True, **options)
            yield f"{name} ids, cache {'on' if kv_caching else 'off'}", digest([result["ids"] for result in results])
    yield from logits_of("plain fp32", model, tokens_of(tokenizer))
    for quantize in (None, "int8"):
        model, tokenizer = load("demo", fast=True, quantize=quantize)
        yield f"path, quantize={quantize}", str(model.execution)
        yield from logits_of(f"fast {quantize or 'fp32'}", model, tokens_of(tokenizer))
    report = benchmark_inference(batch_size=2, input_len=16, output_len=4, compare=True)
    yield "a benchmark's report", digest(shape_of(report))
    yield "a benchmark's points", digest([point["name"] for point in report["points"]])


def tokens_of(tokenizer: Any) -> Tensor:
    ids = [tokenizer.encode(" ".join([prompt] * TOKENS), bos=True, eos=False)[:TOKENS] for prompt in PROMPTS[:3]]
    return torch.tensor(ids)


@torch.inference_mode()
def logits_of(name: str, model: Transformer, tokens: Tensor) -> Iterator[tuple[str, str]]:
    with model.switched(kv_caching=False):
        yield f"{name} logits, one pass", digest_of(model(tokens))
    steps = [model(tokens[:, pos : pos + 1], pos) for pos in range(tokens.shape[1])]
    yield f"{name} logits, in steps", digest_of(torch.cat(steps, dim=1))
    model.free_cache()


def shape_of(value: Any) -> Any:
    """Return the names in a JSON value, without its figures, of which some may be lacking on a busy machine."""
    if isinstance(value, dict):
        return {name: shape_of(part) for name, part in value.items()}
    return None


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    cli.main(main)
