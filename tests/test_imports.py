"""The imports of every file: only those that the table below allows, no circle, and no work besides.

The files are read, not run: imports inside functions count. Imports under `if TYPE_CHECKING:` do not run, and the table
does not list them. They count for circles: a reader of two files that name each other needs both to understand either.
"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
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

# The core: the model, its cache, the loop. It knows no folder but kv_cache and ranks, except where its row says so.
CORE = (
    "args rope ops layers rows locked kv_cache ranks switches model "
    "batch generation sampling request speculation streaming session stepper scheduler text_caches many"
)

# file, or folder for all files in it -> (what of ours, which packages of others) it may import
MAY_IMPORT = {
    "llama/args.py": ("", ""),
    "llama/rope.py": ("args", "torch"),
    "llama/rows.py": ("", "torch"),
    "llama/ops.py": ("ranks rows", "torch"),
    "llama/layers.py": ("ops ranks", "torch"),
    "llama/locked.py": ("", ""),
    "llama/kv_cache/published.py": ("kv_cache ops rope untrusted.files untrusted.json_object", "torch"),
    "llama/kv_cache/": ("args locked ops rope rows kv_cache", "torch"),
    "llama/sampling.py": ("ops", "torch"),
    "llama/speculation.py": ("", ""),
    "llama/request.py": ("args kv_cache sampling speculation", "torch"),
    "llama/batch.py": ("request sampling speculation", "torch"),
    "llama/streaming.py": ("batch", ""),
    "llama/stepper.py": ("batch kv_cache rows speculation", "torch"),
    "llama/generation.py": ("args batch kv_cache ranks request rows sampling speculation stepper streaming", "torch"),
    "llama/switches.py": ("args exact.switch host.cores kv_cache ops ranks rope rows stepper", "torch"),
    "llama/session.py": (
        "args batch generation kv_cache locked request rows sessions speculation stepper streaming untrusted.words",
        "torch",
    ),
    "llama/text_caches.py": ("batch generation kv_cache request", ""),
    "llama/scheduler.py": ("batch generation request text_caches", "torch"),
    "llama/many.py": ("batch request sampling scheduler streaming", ""),
    "llama/model.py": ("args generation kv_cache layers many ops ranks rope rows session stepper switches", "torch"),
    "llama/ranks/__init__.py": ("", "torch"),
    "llama/ranks/torchrun.py": ("locked ranks", "torch fairscale"),
    # the front door
    "llama/__init__.py": ("", ""),
    "llama/__main__.py": ("cli host.console host.packages host.version", ""),
    "llama/convert.py": ("", ""),
    "llama/perplexity.py": ("", ""),
    "llama/testing.py": ("args kv_cache model request rows", "torch"),
    "llama/api.py": (f"{CORE} checkpoint exact fast host tokenizer", "torch"),
    # what knows no model
    "llama/untrusted/template_child.py": ("", "jinja2"),
    "llama/untrusted/gguf_header.py": ("untrusted", "gguf"),
    "llama/untrusted/": ("untrusted", "torch"),
    "llama/host/console.py": ("untrusted.words", ""),
    "llama/host/cores.py": ("host.cgroups", ""),
    "llama/host/packages.py": ("", ""),
    "llama/host/palette.py": ("", ""),
    "llama/host/progress.py": ("host.console", "tqdm"),
    "llama/host/": ("host ops untrusted.files", "torch"),
    "llama/costs/": ("args untrusted.gguf_sizes", ""),
    "llama/quant/": ("ops quant untrusted.gguf_sizes", "torch"),
    "llama/tokenizer/tiktoken_file.py": ("tokenizer untrusted", "tiktoken"),
    "llama/tokenizer/bpe.py": ("tokenizer", "tokenizers"),
    "llama/tokenizer/sentencepiece_file.py": ("tokenizer untrusted", "sentencepiece"),
    "llama/tokenizer/conversation.py": ("request tokenizer", ""),
    "llama/tokenizer/transcript.py": ("request tokenizer", ""),
    "llama/tokenizer/": ("tokenizer untrusted", ""),
    # what knows the core, and another folder where its name says so
    "llama/exact/triton_kernels.py": ("rows", "torch triton"),
    "llama/exact/": ("args generation kv_cache ops ranks rows exact quant", "torch"),
    "llama/sessions/": (f"{CORE} sessions exact.products host untrusted", "torch"),
    "llama/checkpoint/demo.py": ("host.console host.files", ""),
    "llama/checkpoint/": (
        "args costs host.files model quant ranks rope tokenizer untrusted checkpoint",
        "torch numpy safetensors gguf",
    ),
    "llama/fast/graph_kernels.py": ("ops fast", "torch triton"),
    "llama/fast/native_build.py": ("host.files", ""),
    "llama/fast/": (f"{CORE} exact.batch_invariance fast host.files host.machine quant untrusted.gguf_sizes", "torch"),
    "llama/quality/lm_eval.py": ("api host.progress session tokenizer.chat untrusted.template", "torch lm_eval"),
    "llama/quality/": ("host.progress kv_cache model ops quality session streaming untrusted", "torch"),
    "llama/verify/verdict.py": ("host verify", ""),
    "llama/verify/guesses.py": ("batch generation model request speculation", "torch"),
    "llama/verify/": ("batch many model request scheduler session sessions streaming verify", "torch"),
    "llama/watch/": (f"{CORE} costs host quant untrusted.words watch", "torch"),
    "llama/serve/requests.py": ("request sampling untrusted", ""),
    "llama/serve/metrics.py": ("", "prometheus_client"),
    "llama/serve/engine.py": ("many request serve sessions streaming tokenizer.chat untrusted.words", ""),
    "llama/serve/answers.py": ("serve", ""),
    "llama/serve/app.py": ("host.palette serve streaming tokenizer untrusted.words", "starlette prometheus_client"),
    "llama/serve/server.py": ("serve", "uvicorn"),
    "llama/serve/": ("", ""),
    # the benchmark: a plan knows no torch, a run no report, a report no run
    "llama/bench/run/directory.py": ("bench", ""),
    "llama/bench/run/llama_cpp_engine.py": ("args bench checkpoint model request streaming", "torch llama_cpp"),
    "llama/bench/run/transformers_engine.py": ("bench checkpoint model request streaming", "torch transformers"),
    "llama/bench/run/worker.py": (f"{CORE} bench host quality quant watch", "torch"),
    "llama/bench/run/": (
        f"{CORE} api checkpoint cli costs exact fast host quality quant sessions tokenizer untrusted "
        "bench.cell bench.schema bench.statistics bench.texts bench.run",
        "torch",
    ),
    "llama/bench/report/plots/": ("bench.schema bench.statistics bench.report costs host.palette", "matplotlib"),
    "llama/bench/report/": (
        "bench.cell bench.schema bench.statistics bench.report costs host.files host.palette untrusted",
        "",
    ),
    "llama/bench/sweep.py": ("api bench costs host quality.ruler", ""),
    "llama/bench/": ("args bench costs host kv_cache tokenizer", ""),
    # commands
    "llama/cli/__init__.py": ("host.console host.cores", "fire"),
    "llama/cli/terminal.py": ("cli host.console tokenizer.conversation", ""),
    "llama/cli/inference.py": (f"{CORE} __init__ api cli host tokenizer untrusted watch", ""),
    "llama/cli/benchmark_inference.py": ("bench cli host ranks", ""),
    "llama/cli/compare.py": ("bench cli host untrusted", ""),
    "llama/cli/claim.py": ("bench cli host untrusted", ""),
    "llama/cli/submit.py": ("host.console", "submitit"),
    "llama/cli/sweep.py": ("bench cli host untrusted", ""),
    "llama/cli/prompt_files.py": (f"{CORE} cli host sessions.origin tokenizer untrusted", ""),
    "llama/cli/prompt_lines.py": ("batch many serve.requests untrusted", ""),
    "llama/cli/serve.py": ("api host model serve tokenizer untrusted.words speculation", ""),
    "llama/cli/verify.py": (f"{CORE} api cli host sessions.origin tokenizer verify", ""),
    "llama/cli/": (f"{CORE} api checkpoint cli costs host quality untrusted", ""),
    "benchmark_inference.py": ("bench.single cli host.console host.packages", ""),
    "inference.py": ("cli host.packages", ""),
    # the course kit: what runs a submission imports nothing of ours, and what tries one is given the submission's own
    "course/probe.py": ("model rows", "torch"),
    "course/trials/": ("args kv_cache model rows session speculation", "torch"),
    "course/kit/": ("kv_cache", ""),
    "course/make.py": ("cli", "course"),
    "course/grade.py": ("cli host untrusted.words", "course"),
    "course/": ("", "course"),
    "scripts/kvpress_harness.py": (
        f"{CORE} api checkpoint cli costs host testing untrusted",
        "torch kvpress transformers",
    ),
    "scripts/make_animation.py": ("cli host.files", "selenium PIL"),
    "scripts/mutate.py": ("", "historic_bugs"),
    "scripts/record_mistakes.py": ("api", "course planted torch"),
    "scripts/engines/": (
        "args bench checkpoint host model streaming untrusted",
        "torch tokenizers openvino_genai onnxruntime_genai vllm",
    ),
    "scripts/": (f"{CORE} api bench cli costs host tokenizer untrusted", "torch"),
}


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def row_of(file: str) -> str:
    """Return the key of the table that speaks for the file."""
    return next((key for key in MAY_IMPORT if file == key or (key.endswith("/") and file.startswith(key))), "")


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def modules_imported(file: str) -> set[str]:
    """Return the dotted names of all modules that the file imports when it runs."""
    return set(_modules(tree_of(file), file, types=False))


def _modules(node: ast.AST, file: str, *, types: bool, deferred: bool = True) -> Iterator[str]:
    """Yield the module of every import below the node.

    types: also those under `if TYPE_CHECKING:`. deferred: also those inside functions.
    """
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = file.split("/")[: -node.level] if node.level else []
        source = ".".join([*above, *([node.module] if node.module else [])])
        yield from (_home(source, alias.name) for alias in node.names)
    else:
        skip = not types and isinstance(node, ast.If) and is_type_checking(node)
        for child in node.orelse if skip else ast.iter_child_nodes(node):
            if deferred or not isinstance(child, ast.FunctionDef):
                yield from _modules(child, file, types=types, deferred=deferred)


def _home(source: str, name: str) -> str:
    """Return the module that `from source import name` takes the name out of."""
    if file_of(f"{source}.{name}") is not None:
        return f"{source}.{name}"
    if source == "llama":
        return f"llama.{llama._HOMES.get(name, '__init__')}"
    return source


def file_of(module: str) -> str | None:
    """Return our file that holds the module, or None where it is not ours."""
    stem = module.replace(".", "/")
    return next((file for file in (f"{stem}.py", f"{stem}/__init__.py") if file in FILES), None)


def test_each_file_imports_only_what_the_table_allows() -> None:
    faults = []
    for file in FILES:
        if not row_of(file):
            faults.append(f"{file} is not in the table: add a row to MAY_IMPORT that says what it may import")
            continue
        ours, others = (set(allowed.split()) for allowed in MAY_IMPORT[row_of(file)])
        for module in sorted(modules_imported(file)):
            package, _, rest = module.partition(".")
            if package == "llama":
                allowed = any(rest == name or rest.startswith(f"{name}.") for name in ours)
            else:
                allowed = package in sys.stdlib_module_names or package in others
            if not allowed:
                faults.append(f"{file} imports {module}; its row {row_of(file)!r} does not allow it")
    assert faults == []


def test_every_row_of_the_table_speaks_for_a_file() -> None:
    assert set(MAY_IMPORT) - {row_of(file) for file in FILES} == set()


def test_only_the_package_its_table_of_commands_and_stubs_import_by_name_at_run_time() -> None:
    """A computed import is one that the table cannot see. A stub starts a command, which is above everything else."""
    calls = {
        file
        for file in FILES
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")
    }
    stubs = {
        *("llama/convert.py", "llama/perplexity.py"),
        *(f"llama/{folder}/__main__.py" for folder in ("checkpoint", "costs", "kv_cache", "verify")),
    }
    assert calls == {"llama/__init__.py", "llama/__main__.py", *stubs}


def folder_of(file: str) -> str:
    """Return the folder of llama/ that has the file, or a flat file itself; elsewhere the folder at the top."""
    top, *below = file.split("/")
    return f"llama/{below[0]}" if top == "llama" else top


@pytest.mark.parametrize("part", [str, folder_of], ids=["files", "folders"])
def test_imports_form_no_circle_not_even_for_types(part: Callable[[str], str]) -> None:
    graph: dict[str, set[str]] = {part(file): set() for file in FILES}
    for file in FILES:
        known = {name for module in _modules(tree_of(file), file, types=True) if (name := file_of(module))}
        graph[part(file)] |= {part(name) for name in known if part is str or part(name) != part(file)}
    assert len(list(TopologicalSorter(graph).static_order())) == len(graph)  # CycleError names the circle


def test_importing_the_model_loads_the_core_and_few_helpers() -> None:
    """Exact mode, packed weights, session files, fast paths, checkpoints and tokenizers are not loaded."""
    loaded: set[str] = set()
    waiting = ["llama/model.py"]
    while waiting:
        file = waiting.pop()
        loaded.add(file)
        parents = [f"{parent}/__init__.py" for parent in map(str, Path(file).parents[:-1])]
        modules = _modules(tree_of(file), file, types=False, deferred=False)
        waiting += {*parents, *filter(None, map(file_of, modules))} - loaded
    flat = {file for file in loaded if file.count("/") == 1}
    assert flat == {f"llama/{name}.py" for name in [*CORE.split(), "__init__"] if name not in ("kv_cache", "ranks")}
    assert {file for file in loaded - flat if not file.startswith("llama/kv_cache/")} == {
        *("llama/host/__init__.py", "llama/host/cgroups.py", "llama/host/cores.py", "llama/ranks/__init__.py"),
        *(f"llama/untrusted/{name}.py" for name in ("__init__", "files", "json_object", "words")),
    }


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


# Functions that make a model, some of them by compiling native code.
MAKERS = {"Transformer", "load", "pair", "random_model", "tiny_model", "twins"}
# Tables of cases that are made by calls; what the cases are made of is computed when a test needs it.
TABLES = {"tests/kv_cache/test_faults.py", "tests/untrusted/malformed/cases.py"}


@pytest.mark.slow  # reads all of tests/
def test_collecting_the_tests_runs_no_loop_and_makes_no_model() -> None:
    """A skip of a whole file is allowed, and conftest.py sets up pytest and hypothesis."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/*.py")} - {"tests/conftest.py"}
    assert {file for file in files if any(map(_computes, tree_of(file).body))} == TABLES


def _computes(node: ast.stmt) -> bool:
    if isinstance(node, ast.If):
        return not _only_defines(node) and any(map(_computes, node.body))
    if isinstance(node, ast.Expr):
        return not (_only_defines(node) or "importorskip" in ast.unparse(node))
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
        calls = {ast.unparse(part.func) for part in _evaluated(node.value) if isinstance(part, ast.Call)}
        return not MAKERS.isdisjoint(calls)
    return isinstance(node, ast.For | ast.While | ast.With | ast.Try)


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the node and all below it, except the bodies of lambdas."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _evaluated(child)


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
from llama import Transformer, ModelArgs, Tokenizer, Llama, Dialog, load
after, by_names = state(), sorted(sys.modules)

logging.disable()  # where there is no compiler, the fast step says so
model, tokenizer = load(sys.argv[2], device="cpu", fast=True, quantize="int8")
model.generate(tokenizer, ["ab"], max_gen_len=3)
modules = {"by names": by_names, "by text": sorted(sys.modules)}

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
    some = {"fairscale", "transformers", "fire", "tiktoken", "tokenizers", "sentencepiece"}
    assert some.isdisjoint(found["by names"])
    compilers = {"torch._dynamo", "torch._inductor", "triton", "sympy", "matplotlib"}
    assert compilers.isdisjoint(found["by text"])
