"""A lock for `with` that no interrupt leaves locked, whichever line it stops. Knows threads only."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, RLock


@contextmanager
def locked(lock: "Lock | RLock", taken: str | None = None) -> Iterator[None]:
    """Lock. If `taken` is given, raise RuntimeError with this message if the Lock is locked.

    Two threads that begin together may both pass this check; the second one then waits. An interrupt between the last
    line under `with` and the release ends this generator, which releases the lock. Put `with` and `yield` on one line:
    an interrupt between two lines of this function could leave the lock locked.
    """
    if taken is not None and lock.locked():  # type: ignore[union-attr]
        raise RuntimeError(taken)
    # fmt: off
    with lock: yield  # noqa: E701
    # fmt: on
