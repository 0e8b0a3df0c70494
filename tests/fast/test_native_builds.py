"""With every compiler and CPU, the bits of native code depend only on the text, or the code is not used.

The suite makes one build; with --every-build, which .ci/run uses, builds for other CPUs, wrong ones, and builds with
sanitizers.
"""

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from native import compiled_with, cpu_flags, model_of, needs_a_compiler

from llama.fast import native_call
from llama.fast.choose import make_fast
from llama.fast.native_check import check_library
from llama.host.files import cache_dir

pytestmark = needs_a_compiler


def test_a_cpu_without_fused_multiply_add_runs_the_plain_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if "fma" not in cpu_flags():
        pytest.skip("no x86")
    model = model_of("fp32")
    with compiled_with("-march=x86-64", "-Wfatal-errors"), caplog.at_level(logging.WARNING, "llama"):
        make_fast(model, tmp_path)
    assert model.runner is None
    (said,) = (record.getMessage() for record in caplog.records)
    assert "this CPU has no fused multiply-add" in said
    assert "\n" not in said
    assert list(tmp_path.glob("*.so")) == []


# By name: what the sources compute, and what they compute instead if the fault is in effect NOW.
FAULTS = {
    "one sum at a time is rounded twice": (
        "sum = multiply_add(sum, take(x + i), take(w + i));",
        "sum = NOW ? sum + take(x + i) * take(w + i) : multiply_add(sum, take(x + i), take(w + i));",
    ),
    "attention without its scale": (
        "1.0f / std::sqrt(float(model.head_dim))",
        "1.0f / (NOW ? 1.0f : std::sqrt(float(model.head_dim)))",
    ),
    "every row reads the kept keys of the first": ("cache.runs[row[t] * ", "cache.runs[(NOW ? 0 : row[t]) * "),
    "every row reads its pages from the first": (
        "(row[t] * batch.slots + pages",
        "((NOW ? 0 : row[t]) * batch.slots + pages",
    ),
    "the token behind the drawn one is chosen": (
        "return sorted[i].id;",
        "return sorted[NOW ? std::min(i + 1, held_count - 1) : i].id;",
    ),
}
NOW = """#include <cstdlib>
#include <cstring>
inline bool now(const char* fault) {
    const char* asked = std::getenv("LLAMA_FAULT");
    return asked && !std::strcmp(asked, fault);
}
"""


@pytest.mark.usefixtures("every_build")
def test_wrong_code_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One library has all faults; the environment says which one is in effect. Without one, it is used."""
    sources = tmp_path / "sources"
    shutil.copytree(native_call.SOURCE.parent, sources)
    texts = {file: file.read_text() for file in sources.iterdir()}
    for name, (right, wrong) in FAULTS.items():
        (place,) = (file for file, text in texts.items() if right in text)
        assert texts[place].count(right) == 1
        texts[place] = texts[place].replace(right, wrong.replace("NOW", f'now("{name}")'))
    for file, text in texts.items():
        file.write_text(NOW + text if file.name == "vectors.h" else text)
    monkeypatch.setattr(native_call, "SOURCE", sources / native_call.SOURCE.name)
    for fault in (None, *FAULTS):
        monkeypatch.setenv("LLAMA_FAULT", fault or "")
        check_library.cache_clear()
        caplog.clear()
        model = model_of("fp32")
        with compiled_with("-O0"), caplog.at_level(logging.WARNING, "llama"):
            make_fast(model, cache_dir() / "native-tests")
        said = [record.getMessage() for record in caplog.records]
        assert (model.runner is None, len(said)) == (fault is not None,) * 2, fault
        assert all("the native code compiled here" in one and "float32" in one for one in said), fault
    check_library.cache_clear()


def sanitized(*words: str, names: Sequence[str] = ("libasan.so", "libubsan.so")) -> subprocess.CompletedProcess[str]:
    """Run the child with the sanitizers' libraries loaded first, as they require."""
    asked = (["c++", f"-print-file-name={name}"] for name in names)
    found = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip() for words in asked]
    if not all(map(os.path.isabs, found)):
        pytest.skip("this compiler has no sanitizers")
    here = Path(__file__).parents[1] / "support"
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "ignore_noninstrumented_modules=1 halt_on_error=1",
        "PYTHONPATH": f"{here}{os.pathsep}{here.parents[1]}",
    }
    command = [sys.executable, "-W", "ignore", str(here / "sanitized_child.py"), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


# The child prints "clean", and then makes a mistake, which shows that the sanitizer looks. Its first finding ends it.


@pytest.mark.usefixtures("every_build")
def test_native_code_stays_within_its_buffers_and_within_arithmetic() -> None:
    done = sanitized()
    assert done.stdout == "clean\n", done.stderr[-3000:]
    assert done.returncode != 0
    assert "ERROR: AddressSanitizer" in done.stderr


@pytest.mark.usefixtures("every_build")
def test_texts_at_once_share_no_memory_that_one_of_them_writes() -> None:
    done = sanitized("--threads", names=["libtsan.so"])
    assert done.stdout == "clean\n", done.stderr[-3000:]
    assert done.returncode != 0
    assert "WARNING: ThreadSanitizer: data race" in done.stderr
