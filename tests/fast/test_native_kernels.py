"""The kernels of native code compute the same numbers on every CPU.

native/kernels.cpp runs them all and prints digests. With --every-build, which .ci/run uses, it is built for many CPUs.
Macros alone decide which branches of the sources are compiled, so these builds are not optimised, which would take a
compiler most of the time. Two builds test the optimiser, with the library's -O3. Forwards that are emulated are
optimised a little: otherwise they run for longer than the compiler takes.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from native import cpu_flags, needs_a_compiler
from once import once

from llama.fast import native_call
from llama.fast.native_build import FLAGS

pytestmark = needs_a_compiler
PROGRAM = Path(__file__).with_name("native") / "kernels.cpp"
AVX2 = ("-march=x86-64-v3", "-O0")
SANITIZED = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")
# How far sums may be if vectors have another size, and so another order of sums, as a share of the largest number. A
# forward in few bits may round one of its numbers to the neighbouring one.
ROUNDING, OF_FEW_BITS = 5e-6, 1e-2


@dataclass(frozen=True)
class Line:
    digest: str
    same_everywhere: bool
    numbers: tuple[float, ...] = ()  # the largest magnitude, and some of the numbers


@dataclass(frozen=True)
class Printed:
    lanes: int
    instructions: str
    lines: dict[str, Line]


def built(folder: Path, *flags: str, compiler: Sequence[str] = ("c++",)) -> Path:
    """Return the program compiled with the library's flags, except those for this CPU, and then with these."""
    program = folder / "kernels"
    usual = [flag for flag in FLAGS if flag not in ("-shared", "-fPIC") and "native" not in flag]
    files = ["-I", str(native_call.SOURCE.parent), str(PROGRAM), "-o", str(program)]
    done = subprocess.run([*compiler, *usual, *flags, *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def run(*command: str | Path) -> Printed:
    """Run the program and read what it printed."""
    return read(output_of(*command))


def output_of(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-3000:])
    return done.stdout


def read(output: str) -> Printed:
    (_, lanes, instructions), *others = (line.split("\t") for line in output.splitlines())
    lines = {name: Line(digest, kind == "exact", tuple(map(float, numbers))) for kind, name, digest, *numbers in others}
    assert len(lines) == len(others), "two kernels have one name"
    return Printed(int(lanes), instructions, lines)


@pytest.fixture(scope="module")
def with_avx2(every_build: None, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Return what all builds are compared with."""
    if "avx2" not in cpu_flags():
        pytest.skip("this CPU does not run AVX2")
    return read(once(tmp_path_factory, "avx2", lambda folder: output_of(built(folder, *AVX2))))


def check_same(found: Printed, expected: Printed) -> None:
    """Assert that all numbers have the same bits, except sums of vectors of another size, which are close."""
    assert found.lines.keys() <= expected.lines.keys()
    for name in found.lines:
        line = expected.lines[name]
        if line.same_everywhere or found.lanes == expected.lanes:
            assert found.lines[name] == line, name
        else:
            in_few_bits = name.startswith("forward") and ("bfloat16" in name or "activations 8" in name)
            bound = (OF_FEW_BITS if in_few_bits else ROUNDING) * line.numbers[0]
            assert found.lines[name].numbers == pytest.approx(line.numbers, rel=0, abs=bound), name


# The instructions that each build may use, its flags, and the flags of the CPU that it needs.
BUILDS = {
    "AVX, without AVX2 and F16C": (("-march=x86-64", "-mfma", "-O0"), {"fma"}),
    "AVX2 with VNNI": ((*AVX2, "-mavxvnni"), {"avx2", "avx_vnni"}),
    "AVX-512": (("-march=x86-64-v4", "-O0"), {"avx512vl"}),
    "AVX-512 with VNNI": (("-march=x86-64-v4", "-mavx512vnni", "-O0"), {"avx512_vnni"}),
    "this CPU's own": (("-march=native", "-O0"), {"fma"}),
}


def branches(*flags: str) -> set[str]:
    """Return those macros that the sources test and the compiler defines. They decide which branches are compiled."""
    sources = (file.read_text() for file in native_call.SOURCE.parent.iterdir() if file.is_file())
    asked = set(re.findall(r"defined\((\w+)\)", "".join(sources)))
    command = ["c++", *flags, "-dM", "-E", "-x", "c++", os.devnull]
    defined = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return asked & {line.split()[1] for line in defined.splitlines()}


@pytest.mark.parametrize("build", BUILDS)
def test_an_x86_cpu_computes_the_numbers_of_avx2(build: str, tmp_path: Path, with_avx2: Printed) -> None:
    flags, needed = BUILDS[build]
    if not needed <= cpu_flags():
        pytest.skip(f"this CPU does not run {build}")
    if branches(*flags) == branches(*AVX2):
        pytest.skip(f"for {build} instructions, the sources have no other branches than for AVX2")
    check_same(run(built(tmp_path, *flags)), with_avx2)


@pytest.mark.parametrize(("architecture", "needed"), [("x86-64-v3", "avx2"), ("x86-64-v4", "avx512vl")])
def test_code_tuned_for_any_cpu_computes_the_same_numbers_however_a_text_is_fed(
    architecture: str, needed: str, tmp_path: Path, with_avx2: Printed
) -> None:
    """Without -ffp-contract=off, GCC fuses products and sums under the generic tune, but not all of them for Zen."""
    if needed not in cpu_flags():
        pytest.skip(f"this CPU does not run {architecture}")
    first, second = [run(built(tmp_path, f"-march={architecture}", f"-mtune={tune}")) for tune in ("generic", "znver3")]
    assert first.lines == second.lines
    check_same(first, with_avx2)


def test_threads_without_openmp_compute_the_same_numbers(tmp_path: Path, with_avx2: Printed) -> None:
    check_same(run(built(tmp_path, *AVX2, "-fno-openmp", "-fsanitize=thread", "-DFORWARDS_ALONE")), with_avx2)


@pytest.mark.usefixtures("every_build")
def test_the_kernels_stay_within_their_buffers_and_within_arithmetic(tmp_path: Path, with_avx2: Printed) -> None:
    check_same(run(built(tmp_path, *AVX2, *SANITIZED)), with_avx2)


# ---- ARM, emulated ---------------------------------------------------------------------------------------------------

GCC = ("aarch64-linux-gnu-g++",)
CLANG = ("clang++", "--target=aarch64-linux-gnu")
NEON = ("-march=armv8-a", "-O1")
# By the name that the library has for the instructions, which products alone use.
MORE_THAN_NEON = {
    "NEON with dot products": ("-march=armv8.2-a+dotprod", "-O0", "-DKERNELS_ALONE"),
    "NEON with i8mm": ("-march=armv8.6-a+i8mm+bf16", "-O0", "-DKERNELS_ALONE"),
}


def emulated(folder: Path, compiler: Sequence[str], *flags: str) -> str:
    """Return what the program prints, built for ARM and emulated; skip the test if a tool for that is missing."""
    for needed in (GCC[0], compiler[0], "qemu-aarch64"):  # clang uses the libraries of GCC
        if shutil.which(needed) is None:
            pytest.skip(f"there is no {needed}, so no code for ARM is built and run")
    program = built(folder, *flags, compiler=compiler)
    return output_of("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu", "-cpu", "max", program)


@pytest.fixture(scope="module")
def with_neon(every_build: None, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    return read(once(tmp_path_factory, "neon", lambda folder: emulated(folder, GCC, *NEON)))


def test_arm_computes_the_numbers_of_avx2(with_neon: Printed, with_avx2: Printed) -> None:
    """Vectors of 16 bytes add in another order than those of 32: these sums are close, and all other bits the same."""
    assert (with_neon.lanes, with_avx2.lanes) == (4, 8)
    check_same(with_neon, with_avx2)


@pytest.mark.parametrize("instructions", MORE_THAN_NEON)
def test_arm_computes_the_same_numbers_with_all_its_instructions(
    instructions: str, tmp_path: Path, with_neon: Printed
) -> None:
    found = read(emulated(tmp_path, GCC, *MORE_THAN_NEON[instructions]))
    assert found.instructions == instructions
    check_same(found, with_neon)


def test_clang_without_openmp_computes_the_same_numbers_on_arm(tmp_path: Path, with_neon: Printed) -> None:
    """Build as on macOS, which has no OpenMP, for the oldest CPU there."""
    check_same(read(emulated(tmp_path, CLANG, "-mcpu=apple-m1", "-fno-openmp", "-O1")), with_neon)
