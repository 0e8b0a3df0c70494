"""Record digests of the library's outputs on one commit and compare them on another, on the same machine.

    python scripts/compare_outputs.py outputs.json              # records; on the next commit, compares
    python scripts/compare_outputs.py outputs.json --record     # records again

For a change that must not change results. All outputs are those of the demo model: exact-mode logits in four dtypes,
in one pass and in steps; greedy and sampled ids of 20 prompts with the cache on and off, in a batch, one by one, after
a shared prefix, and with every kind of cache; logits of native code with four formats of weights; a chat of five turns;
and a session in exact mode, saved to outputs.session when the file is recorded and continued by each later run. Bits
depend on the machine and on the number of threads.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from llama.host import console

    console.quiet_imports()

import torch
from torch import Tensor

from llama import Chat, Transformer, cli, load
from llama.host.files import check_writable, replace_file
from llama.untrusted.files import read_text

SUBJECTS = ("The history of", "In biology,", "She opened", "def main():", "Once, far away,")
PROMPTS = [f"{subject} {word}" for subject in SUBJECTS for word in ("the", "a", "one", "every")]
WORDS = ("rivers", "bread", "the moon", "clocks", "rust")
TOKENS = 48
GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 7}


def main(*prompts: str, record: bool = False) -> int:
    """Record digests of outputs in a JSON file, or compare with those in the file.

    Args:
        prompts: The file.
        record: Record again if the file exists.
    """
    os.environ["LLAMA_NATIVE_TRIAL"] = "off"  # native code runs every call, whichever path is faster here
    if len(prompts) != 1:
        raise ValueError(f"{len(prompts)} files were given; name one, outputs.json for example")
    file = Path(prompts[0])
    before = None if record or not file.exists() else recorded(file)
    if before is None:
        check_writable(file)
    saved = file.with_suffix(".session")
    if before is None:
        saved.unlink(missing_ok=True)
    found = dict(outputs(saved))
    if before is None:
        replace_file(file, (json.dumps(found, indent=2) + "\n").encode())
        print(f"{len(found)} digests recorded in {file}")
        return 0
    different = [name for name in sorted({*before, *found}) if before.get(name) != found.get(name)]
    for name in different:
        print(f"{name}: {before.get(name)} before, {found.get(name)} now")
    print(f"{len(different)} of {len(found)} outputs differ from those in {file}")
    return min(len(different), 1)


def recorded(file: Path) -> dict[str, str]:
    """Return the digests in a file; raise ValueError if it has none."""
    try:
        found = json.loads(read_text(file, limit=10_000_000))
        return {name: found[name] for name in found}
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{file} has no digests ({error}); give another file, or --record to replace it") from None


def outputs(saved: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of every output; `saved` is a session file, which is written if it does not exist."""
    for dtype in ("fp32", "bf16", "fp16", "fp64"):
        count = torch.get_num_threads()  # for all models: by default the load of the machine would decide it
        model, tokenizer = load("demo", dtype=dtype, exact=True, threads=count)
        yield from logits_of(f"exact {dtype}", model, tokens_of(tokenizer))
        if dtype == "fp32":
            yield "a saved session, continued", of_session(model, tokenizer, saved)
    model, tokenizer = load("demo")
    yield from generations(model, tokenizer)
    yield from logits_of("plain fp32", model, tokens_of(tokenizer))
    for dtype, quantize in (("fp32", None), ("bf16", None), ("fp32", "int8"), ("fp32", "stored")):
        model, tokenizer = load("demo", dtype=dtype, fast=True, quantize=quantize or "none")
        name = f"fast {dtype}, quantize={quantize}"
        yield f"{name}: path", str(model.execution)
        yield from logits_of(name, model, tokens_of(tokenizer))
        yield f"{name}: greedy ids", ids_of(model, tokenizer, PROMPTS, **GREEDY)
    yield "a chat of five turns", digest(chat(model, tokenizer))


def generations(model: Transformer, tokenizer: Any) -> Iterator[tuple[str, str]]:
    """Yield digests of the ids and log-probabilities of the plain path."""
    for kv_caching in (True, False):
        cache = f"cache {'on' if kv_caching else 'off'}"
        for name, options in {"greedy": GREEDY, "sampled": SAMPLED}.items():
            yield f"{name} ids, {cache}", ids_of(model, tokenizer, PROMPTS, kv_caching=kv_caching, **options)
            alone = [ids_of(model, tokenizer, [prompt], kv_caching=kv_caching, **options) for prompt in PROMPTS[::5]]
            yield f"{name} ids alone, {cache}", digest(alone)
    behind = [f"{' '.join(PROMPTS)} {prompt}" for prompt in PROMPTS[:4]]
    yield "ids behind a shared prefix", ids_of(model, tokenizer, behind, share_prefix=True, **GREEDY)
    session = model.session(tokenizer)
    session.feed(" ".join(PROMPTS))
    yield "ids behind a session", ids_of(model, tokenizer, PROMPTS[:4], prefix=session, **GREEDY)
    for kind in ("static", "concat", "paged", "int8", "int4", "window:24+4"):
        yield f"ids with {kind}", ids_of(model, tokenizer, behind, kv_cache=kind, **SAMPLED)


def ids_of(model: Transformer, tokenizer: Any, prompts: list[str], **options: Any) -> str:
    results = model.generate(tokenizer, prompts, 24, logprobs=True, **options)
    return digest([(result["ids"], result["logprobs"]) for result in results])


def chat(model: Transformer, tokenizer: Any) -> list[str]:
    conversation = Chat(model, tokenizer, system="You answer in one sentence.")
    return ["".join(conversation.say(f"Tell me about {word}.", 16, temperature=0.0)) for word in WORDS]


def of_session(model: Transformer, tokenizer: Any, saved: Path) -> str:
    if not saved.exists():
        session = model.session(tokenizer)
        session.feed(" ".join(PROMPTS))
        session.generate(8, **GREEDY)
        session.save(saved)
    session = model.load_session(saved, tokenizer)
    ids = session.generate(16, **GREEDY)["ids"]
    session.append(" And then")
    return digest([ids, digest_of(session.logits)])


def tokens_of(tokenizer: Any) -> Tensor:
    ids = [tokenizer.encode(" ".join([prompt] * TOKENS), bos=True, eos=False)[:TOKENS] for prompt in PROMPTS[:3]]
    return torch.tensor(ids)


@torch.inference_mode()
def logits_of(name: str, model: Transformer, tokens: Tensor) -> Iterator[tuple[str, str]]:
    model.kv_caching = False
    yield f"{name} logits, one pass", digest_of(model(tokens))
    model.kv_caching = True
    steps = [model(tokens[:, pos : pos + 1], pos) for pos in range(tokens.shape[1])]
    yield f"{name} logits, in steps", digest_of(torch.cat(steps, dim=1))
    model.free_cache()


def digest_of(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()[:16]


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


if __name__ == "__main__":
    cli.main(main)
