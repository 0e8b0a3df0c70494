"""The command that judges published claims about KV caches by measurements: llama-kv claim NAME."""

from pathlib import Path
from typing import TYPE_CHECKING

from llama.cli.benchmark_inference import DIED
from llama.cli.compare import malformed_refused, read_result
from llama.cli.sweep import LONGEST_PLAN, measure_cells
from llama.host import console
from llama.host.cores import FreeCores
from llama.untrusted.files import read_text

if TYPE_CHECKING:
    from llama.bench.claims import Claim, Verdict
    from llama.bench.schema import Report
    from llama.bench.sweep import Point


def main(*claims: str, out: str = "results/claims") -> int:
    """Judge claims about KV caches by measurements on this machine; without a name, list the published ones.

    A verdict is about the model that was measured, by default the demo. The exit code is 3 if a check of a cell is
    violated, 1 if a claim that can be judged has no verdict, and otherwise 0.

    Args:
        claims: Names of claims, all, or files FILE.toml, all of whose claims are judged; docs/claims.md has an example.
        out: The folder of the cells' files. Cells that are there are not measured again, and claims share them.
    """
    cores = FreeCores()  # looks while torch is loaded
    from llama.bench.claims import HEADS, as_row, judge, read_claims
    from llama.bench.report.columns import Table
    from llama.bench.report.contents import NOISY, byline, is_noisy
    from llama.bench.report.text import markdown
    from llama.bench.sweep import file_of

    published, setups, exit_code = read_claims(), dict[str, None](), 0
    known, names = dict(published), list[str]()
    for name in claims:
        own: dict[str, Claim] = {}
        if name.endswith(".toml"):
            try:
                own = read_claims(read_text(Path(name), limit=LONGEST_PLAN))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            if taken := own.keys() & known.keys():
                raise ValueError(f"{name}: {min(taken)} is a claim already; give it another name")
        known |= own
        names += own or (published if name == "all" else [name])
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"{unknown[0]!r} is not a claim; known are all, FILE.toml, {', '.join(known)}")

    def report_of(point: "Point") -> "Report":
        report: Report = read_result(str(file_of(Path(out), point)))
        if report["environment"]:  # a refused cell has none
            dtype, commit = report["cells"][0]["dtype"], report["environment"]["commit"]
            setups[", ".join([*byline(report)[:-1], f"commit {commit}", dtype, *[NOISY] * is_noisy(report)])] = None
        return report

    verdicts: dict[Claim, Verdict | str] = {known[name]: "" for name in names or known}
    if claims:
        cores.choose_threads(console.note)
        exit_code = measure_cells([*dict.fromkeys(point for claim in verdicts for point in claim.points)], Path(out))
        for claim in (one for one in verdicts if one.rule):
            try:
                with malformed_refused():
                    verdicts[claim] = judge(claim, report_of)
            except ValueError as why:
                verdicts[claim], exit_code = f"no verdict: {why}", max(exit_code, DIED)
    rows = [as_row(*one) for one in verdicts.items()]
    console.put(markdown(Table("Claims about KV caches", HEADS, rows, [*setups])))
    return exit_code
