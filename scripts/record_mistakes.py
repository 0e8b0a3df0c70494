"""Record what the course's mistakes do to a text of the demo model: python scripts/record_mistakes.py

Writes llama/watch/mistakes.json, which every page of `--watch` shows. Each mistake is planted into a copy of llama/, as
the test of the grader plants it (tests/course/mistakes.txt). A process feeds the right text to the copy's model: the
prompt in two calls, then one token a call. The probabilities of each next token are compared with those of the same
model with its cache off. Then the copy generates a text of its own, greedily. In float32 on the CPU.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "course"))

from planted import Plant, plants

from course.mistakes import MISTAKES

ROOT = Path(__file__).resolve().parents[1]
PATHS = [str(ROOT / folder) for folder in ("scripts", "tests/course", ".")]
FILE = ROOT / "llama" / "watch" / "mistakes.json"
# Fed in two calls, as a conversation is.
PROMPT = ("Once upon a time, in a small village,", " there was a little girl named Lily. She loved to")
NEW = 40  # tokens
RIGHT = Plant("right")
# In the order of the page.
SHOWN = (
    "index-early", "index-zero", "values-forgotten", "past-ignored", "mask-forgotten", "mask-at-first-key",
    "rope-start-ignored", "rope-twice", "swapped", "heads-order",
)  # fmt: skip


def main() -> None:
    """Record the right text and all mistakes that are shown, and write the file."""
    named = {plant.name: plant for plant in plants("mistakes.txt")}
    right = symptom(RIGHT)
    runs = [run("right", "No mistake", right)]
    runs += [run(name, MISTAKES[name].title, symptom(named[name], right["ids"])) for name in SHOWN]
    commit = subprocess.check_output(["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"], text=True)
    made = {
        "command": "python scripts/record_mistakes.py",
        "model": "SmolLM2-135M-Instruct, the demo model",
        "dtype": "float32",
        "commit": commit.strip(),
    }
    lines = ",\n".join(json.dumps(one) for one in runs)
    head = f'"made": {json.dumps(made)},\n"calls": {right["calls"]},\n"ids": {right["ids"]}'
    FILE.write_text(f'{{{head},\n"runs": [\n{lines}\n]}}\n', "utf-8")


def run(name: str, title: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return what the page shows of a run, and print a line about it."""
    wrong = found["wrong"]
    print(f"{name}: {wrong.count('1')} of {len(wrong)} wrong, KL up to {max(found['kl'])}", flush=True)
    return {"name": name, "title": title, **{part: found[part] for part in ("text", "wrong", "kl")}}


def symptom(plant: Plant, right: Sequence[int] = ()) -> dict[str, Any]:
    """Return the result of `feed` for a copy of llama/ with a mistake, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "llama", Path(folder, "llama"), ignore=shutil.ignore_patterns("__pycache__"))
        plant.put_into(Path(folder))
        code = f"import json, record_mistakes; print(json.dumps(record_mistakes.feed({list(right)})))"
        environment = {"PYTHONPATH": os.pathsep.join([folder, *PATHS]), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-P", "-c", code]
        return json.loads(subprocess.check_output(command, env=os.environ | environment, text=True))


def feed(right: list[int]) -> dict[str, Any]:
    """Feed the right text to the demo model with its cache on, and then generate a text.

    `right` has the ids of the right text; the result has them too, and makes them if there are none.
    calls: the ends of the calls that feed the prompt. text: the generated text, prompt included, by token.
    kl: for each position of the right text the KL divergence, in nats, of the next token's probabilities from those of
    the model with its cache off. wrong: 1 for each position after which another token is the most likely, else 0.
    """
    import torch

    from llama import load

    model, tokenizer = load("demo", device="cpu", dtype="fp32")
    torch.empty = torch.zeros  # what a mistake has never written is 0 in each run
    parts = [tokenizer.encode(part, bos=False, eos=False) for part in PROMPT]
    prompt, calls = [*parts[0], *parts[1]], [len(parts[0]), len(parts[0]) + len(parts[1])]
    if not right:
        right = prompt + model.generate_tokens([prompt], NEW, temperature=0.0, kv_caching=False)[0][0]
    cuts = [0, *calls, *range(calls[-1] + 1, len(right))]
    with torch.inference_mode():
        tokens, cache = torch.tensor([right[:-1]]), model.new_cache(rows=1, length=len(right))
        wanted = model.with_kv_caching(False)(tokens)[0].double().log_softmax(-1)
        got = torch.cat([model(tokens[:, a:b], a, cache=cache)[0] for a, b in pairwise(cuts)]).double().log_softmax(-1)
        cache, ids = model.new_cache(rows=1, length=len(right)), list(prompt)
        for a, b in pairwise(cuts):
            logits = model(torch.tensor([ids[a:b]]), a, cache=cache)[0, -1]
            ids += [int(logits.argmax())] if b >= calls[-1] else []
    pieces = tokenizer.stream()
    return {
        "ids": right,
        "calls": calls,
        "text": [pieces.feed(id) for id in ids],
        "kl": [float(f"{one:.3g}") for one in (wanted.exp() * (wanted - got)).sum(-1).clamp(min=0).tolist()],
        "wrong": "".join(str(int(one)) for one in wanted.argmax(-1) != got.argmax(-1)),
    }


if __name__ == "__main__":
    main()
