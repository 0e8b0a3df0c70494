"""Reports of before, read back: their results.json may lack fields that later ones have.

Knows nothing of how they look.
"""

import json
from pathlib import Path

from llama.bench.cell import Cell
from llama.bench.report.findings import fits
from llama.bench.schema import Report, new_report


def read_report(path: Path) -> Report:
    """Return the report that a results.json holds; no figure in it is changed.

    What was not asked then is what is asked by default, and what follows from other figures is worked out of them.
    """
    found = json.loads(path.read_text("utf-8"))
    report: Report = {**new_report(found["preset"], []), **found}
    for record in report["cells"]:
        record["cell"] = Cell().as_json() | record["cell"]
    for comparison in report["comparisons"]:
        comparison.setdefault("path", "plain")
    if (ceilings := report["ceilings"]) is not None:
        report["ceilings"] = {"read_by": "", "flops_by": "", **ceilings}
    for kind in [] if report["caches"] is None else report["caches"]["kinds"]:
        kind.setdefault("saves", True)  # so that a quality without its bytes is not judged
        kind.setdefault("widens", False)
        if kind["quality"] is not None:
            kind["quality"].setdefault("bytes", [])
    if report["environment"].get("llama_kv") == "not installed":  # a checkout's version, which is unknown now
        del report["environment"]["llama_kv"]
    if (sweep := report["sweep"]) is not None and any("lengths" not in fit for fit in sweep["fits"]):
        sweep["fits"] = fits(sweep["contexts"])
    return report
