"""A short generation of the measured model to step through, for the report's page: recorded when all is measured."""

from llama.bench.cell import Cell
from llama.bench.presets import Session
from llama.bench.report.files import keep_steps, steps_of

PROMPT, STEPS = "Once upon a time", 32


def watch(session: Session, cell: Cell) -> None:
    """Let the report's folder have such a page of the cell's model, by the plain path; nothing is lost where it fails.

    Its few seconds are not part of the budget.
    """
    if steps_of(session.directory.folder) is not None:
        return
    plain = cell.but(engine="llama", fast=False, exact=False)
    with session.noting_failure("the page to step through"):
        done = session.do("recording", "watch", plain, prompt=PROMPT, steps=STEPS)
        keep_steps(session.directory.folder, done["page"])
