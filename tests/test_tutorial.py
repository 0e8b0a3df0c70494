"""The tutorial runs, and prints its recorded outputs. CONTRIBUTING.md has the line that records them again."""

import re
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the tutorial is run by nbclient and ipykernel, of the extra dev")
nbclient = pytest.importorskip("nbclient", reason="the tutorial is run by nbclient and ipykernel, of the extra dev")
pytest.importorskip("ipykernel", reason="the tutorial is run by nbclient and ipykernel, of the extra dev")

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.ipynb"
RECORDED = nbformat.read(TUTORIAL, as_version=4)


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream")


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Run the tutorial in a new kernel, and return its code cells; nbclient raises the error of a cell."""
    book = deepcopy(RECORDED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "IPYTHONDIR", str(tmp_path_factory.mktemp("ipython"))
        )  # otherwise IPython writes its history into the home directory
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("runtime")))
        nbclient.NotebookClient(book, timeout=300, record_timing=False).execute(cwd=str(TUTORIAL.parent))
    return [cell for cell in book.cells if cell.cell_type == "code"]


@pytest.mark.slow
def test_the_tutorial_prints_what_is_recorded_in_it(cells: list[Any]) -> None:
    recorded = [cell for cell in RECORDED.cells if cell.cell_type == "code"]
    assert [printed(cell) for cell in cells] == [printed(cell) for cell in recorded]
    assert [output.data.keys() & {"image/png"} for output in cells[3].outputs] == [{"image/png"}]


def test_the_tutorial_is_short_and_right() -> None:
    cells = [cell for cell in RECORDED.cells if cell.cell_type == "code"]
    assert "the same text: True" in printed(cells[2])
    held = {kind: int(n.replace(",", "")) for kind, n in re.findall(r"^(\w+) +held ([\d,]+)", printed(cells[5]), re.M)}
    assert held["half"] * 2 == held["static"]
    assert "kept: A row gives what its text gives alone" in printed(cells[5])
    assert len(RECORDED.cells) == 12
    assert TUTORIAL.stat().st_size < 200_000
