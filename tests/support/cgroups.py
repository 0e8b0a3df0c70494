"""Files of Linux control groups."""

from pathlib import Path


def write_group(folder: Path, **files: str) -> None:
    """Write the files of a control group; in a name, two underscores stand for a point."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
