"""The kernels of native code compute the same numbers on every CPU.

native/kernels.cpp runs them all and prints digests. With --every-build, which .ci/run uses, it is built for many CPUs.
"""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from native import cpu_flags, needs_a_compiler

from llama.fast import native_library
from llama.fast.native_build import FLAGS

pytestmark = needs_a_compiler
PROGRAM = Path(__file__).with_name("native") / "kernels.cpp"
OF_LIBRARIES = {"-shared", "-fPIC"}
SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-Wall", "-Wextra", "-Werror")
# How far sums may be if vectors have another size, and so another order of sums, as a share of the largest number.
# Sums of bfloat16 are rounded to 8 bits between products, and activations of 8 bits to 7.
ROUNDING = {"float32": 1e-5, "bfloat16": 3e-2, "activations 8": 3e-2}


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


def built(folder: Path, *flags: str, compiler: str = "c++") -> Path:
    """Return the program compiled with the library's flags and then these, which override them."""
    program = folder / "kernels"
    usual = [flag for flag in FLAGS if flag not in OF_LIBRARIES]
    command = [compiler, *usual, *flags, "-I", str(native_library.SOURCE.parent), str(PROGRAM), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return program


def run(*command: str | Path) -> Printed:
    """Run the program and read what it printed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout[-500:], done.stderr[-3000:])
    (_, lanes, instructions), *others = (line.split("\t") for line in done.stdout.splitlines())
    lines = {name: Line(digest, kind == "exact", tuple(map(float, numbers))) for kind, name, digest, *numbers in others}
    assert len(lines) == len(others), "two kernels have one name"
    return Printed(int(lanes), instructions, lines)


@pytest.fixture(scope="module")
def with_avx2(every_build: None, tmp_path_factory: pytest.TempPathFactory) -> Printed:
    """Return what all builds are compared with: their vectors are 32 bytes, as those without AVX-512."""
    if "avx2" not in cpu_flags():
        pytest.skip("this CPU does not run AVX2")
    return run(built(tmp_path_factory.mktemp("avx2"), "-march=x86-64-v3", "-O1"))


def check_same(found: Printed, expected: Printed) -> None:
    """Assert that all numbers have the same bits, except sums in another order, which are close.

    Vectors of another size add in another order, and so do tiles.
    """
    assert found.lines.keys() == expected.lines.keys()
    same_order = found.lanes == expected.lanes and "AMX" not in found.instructions
    for name, line in expected.lines.items():
        if line.same_everywhere or same_order:
            assert found.lines[name] == line, name
        else:
            bound = max(share for word, share in ROUNDING.items() if word in name or word == "float32")
            assert found.lines[name].numbers == pytest.approx(line.numbers, rel=0, abs=bound * line.numbers[0]), name


# The instructions that each build may use, its flags, and the flags of the CPU that it needs.
BUILDS = {
    "AVX without AVX2": (("-march=x86-64", "-mfma"), {"fma"}),
    "AVX2 with VNNI": (("-march=x86-64-v3", "-mavxvnni"), {"avx2", "avx_vnni"}),
    "AVX-512": (("-march=x86-64-v4",), {"avx512vl"}),
    "AVX-512 with VNNI": (("-march=x86-64-v4", "-mavx512vnni"), {"avx512_vnni"}),
    "emulated tiles": (("-march=x86-64-v3", "-O1", "-DEMULATE_TILES"), {"avx2"}),
    "this CPU's own": (("-march=native",), {"fma"}),
}


@pytest.mark.parametrize("build", BUILDS)
def test_an_x86_cpu_computes_the_numbers_of_avx2(build: str, tmp_path: Path, with_avx2: Printed) -> None:
    flags, needed = BUILDS[build]
    if not needed <= cpu_flags():
        pytest.skip(f"this CPU does not run {build}")
    check_same(run(built(tmp_path, *flags)), with_avx2)


def test_the_kernels_stay_within_their_buffers_and_within_arithmetic(tmp_path: Path, with_avx2: Printed) -> None:
    for tiles in ((), ("-DEMULATE_TILES",)):
        check_same(run(built(tmp_path, "-march=x86-64-v3", *SANITIZED, *tiles)), with_avx2)
