"""Importing only defines, changes nothing, and loads few packages. `lint-imports` checks which module imports which."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from fakes import NATIVE_SIZES, write_checkpoint

import llama

ROOT = Path(__file__).parents[1]
FILES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("llama/**/*.py", "inference.py", "benchmark_inference.py", "scripts/**/*.py", "course/**/*.py")
    for path in sorted(ROOT.glob(pattern))
]


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        names = (ast.Name, ast.Tuple, ast.expr_context)
        return all(isinstance(part, names) for target in targets for part in ast.walk(target))
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    script = isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"
    definition = isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    return definition or docstring or script or is_type_checking(node)


def test_importing_a_file_only_defines() -> None:
    assert [
        f"{file}:{node.lineno} {ast.unparse(node)[:80]}"
        for file in FILES
        for node in tree_of(file).body
        if not _only_defines(node)
    ] == []


@pytest.mark.parametrize(
    ("file", "functions"),
    [
        ("llama/model.py", ["Attention.forward", "Transformer.forward"]),
        ("llama/switches.py", ["Switches.execution", "Switches.with_kv_caching"]),
        ("llama/generation.py", ["made_cache"]),
    ],
)
def test_the_cache_switch_has_one_branch_that_computes(file: str, functions: list[str]) -> None:
    """It is in Attention.forward; the others choose which model, and which cache, a call has, or name what runs.

    Counted are `if` and ternaries on kv_caching. One that can only raise is a refusal, not a second way through.
    """
    branches = [
        f"{owner.name}.{function.name}" if isinstance(owner, ast.ClassDef) else function.name
        for owner in ast.walk(tree_of(file))
        if isinstance(owner, ast.Module | ast.ClassDef)
        for function in owner.body
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.If | ast.IfExp) and _reads_switch(node.test) and not _only_raises(node)
    ]
    assert sorted(branches) == functions


def _reads_switch(test: ast.expr) -> bool:
    return any("kv_caching" in (getattr(n, "id", ""), getattr(n, "attr", "")) for n in ast.walk(test))


def _only_raises(node: ast.If | ast.IfExp) -> bool:
    return isinstance(node, ast.If) and not node.orelse and all(isinstance(n, ast.Raise) for n in node.body)


def test_every_public_name_resolves() -> None:
    assert [name for name in llama.__all__ if getattr(llama, name, None) is None] == []
    assert set(llama.__all__) <= set(dir(llama))
    with pytest.raises(AttributeError, match="no attribute 'Lama'"):
        _ = llama.Lama


def test_importing_the_package_loads_the_standard_library_and_itself() -> None:
    code = "import sys; before = set(sys.modules); import llama; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {module for module in done.stdout.split() if module.split(".")[0] not in sys.stdlib_module_names}
    assert loaded == {"llama"}


PROBE = """
import json, logging, os, random, sys
import torch

def state():
    return {
        "default dtype": str(torch.get_default_dtype()),
        "default device": str(torch.get_default_device()),
        "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "matmul precision": torch.get_float32_matmul_precision(),
        "gradients": torch.is_grad_enabled(),
        "seeds": [torch.initial_seed(), hash(random.getstate())],
        "root logger": [repr(logging.root.handlers), logging.root.level],
        "standard streams": [id(sys.stdout), id(sys.stderr)],
        "environment": dict(os.environ),
        "where": [os.getcwd(), sys.path],
    }

before = state()
import llama.model
core = sorted(sys.modules)
from llama import Transformer, ModelArgs, Tokenizer, Llama, Dialog, load
after, by_names = state(), sorted(sys.modules)

logging.disable()  # where there is no compiler, the fast step says so
model, tokenizer = load(sys.argv[2], device="cpu", fast=True, quantize="int8")
model.generate(tokenizer, ["ab"], max_gen_len=3)
modules = {"core": core, "by names": by_names, "by text": sorted(sys.modules)}

with open(sys.argv[1], "w") as file:
    json.dump({"before": before, "after": after, **modules}, file)
"""


@pytest.mark.slow  # a process that compiles or loads native code
def test_importing_the_public_names_changes_nothing_and_loads_no_package_that_only_some_need(tmp_path: Path) -> None:
    """A text on a CPU loads no compiler of graphs: with PyTorch's own, a start takes twice as long."""
    checkpoint, report = write_checkpoint(tmp_path / "model", **NATIVE_SIZES), tmp_path / "report.json"
    command = [sys.executable, "-c", PROBE, str(report), str(checkpoint)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout + done.stderr == ""
    found = json.loads(report.read_text())
    assert found["after"] == found["before"]
    loaded = {name.split(".")[1] for name in found["core"] if name.startswith("llama.")}
    assert loaded.isdisjoint({"checkpoint", "exact", "fast", "quant", "sessions", "tokenizer"})
    some = {"fairscale", "transformers", "fire", "tiktoken", "tokenizers"}
    assert some.isdisjoint(found["by names"])
    compilers = {"torch._dynamo", "torch._inductor", "triton", "sympy", "matplotlib"}
    assert compilers.isdisjoint(found["by text"])
