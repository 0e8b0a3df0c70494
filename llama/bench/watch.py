"""A short generation of the measured model to step through, for the report's page: recorded when all is measured."""

from llama.bench.presets import RECORDING, WATCHED_STEPS, Session
from llama.bench.report.files import keep_steps, steps_of

PROMPT = "Once upon a time"


def watch(session: Session) -> None:
    """Record a generation of the watched cell's model by the plain path into the report's folder, if the budget allows.

    A failure is noted, and nothing else is lost.
    """
    if session.watched is None or steps_of(session.directory.folder) is not None:
        return
    session.reserved = 0.0
    if session.has_room(RECORDING, must=True):
        plain = session.watched.but(engine="llama", fast=False, exact=False)
        with session.noting_failure(RECORDING):
            done = session.do(RECORDING, "watch", plain, prompt=PROMPT, steps=WATCHED_STEPS)
            keep_steps(session.directory.folder, done["page"])
