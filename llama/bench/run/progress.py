"""A progress bar in seconds that were expected: the library tells what is left by how those that passed went."""

from tqdm import tqdm


def progress_bar(what: str = "") -> "tqdm[None]":
    """Return a bar, drawn on a terminal only; its `total` is the seconds that all is expected to take."""
    look = "{desc} |{bar}| {elapsed}, about {remaining} left"
    return tqdm(desc=what, total=1.0, disable=None, leave=False, bar_format=look)
