"""How a kind of cache is named: NAME, NAME:PARAMS, FILE.py:NAME or FILE.py:NAME:PARAMS."""

import hashlib
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    """The parts of a kind's name; `file` and `params` are "" where they are left out."""

    file: str
    name: str
    params: str


def read_kind(text: str) -> Kind:
    """Return the parts of a kind's name."""
    head, dot, rest = text.rpartition(".py:")
    file = f"{head}.py" if dot else ""
    name, _, params = (rest if dot else text).partition(":")
    return Kind(file, name, params)


def cache_kind(text: str) -> str:
    """Return NAME or NAME:PARAMS of what is named; of FILE.py:NAME after running the file, which defines it.

    A file is run once. Raises ValueError, in a sentence, for one that cannot be run.
    """
    kind = read_kind(text)
    if kind.file:
        _run(text, Path(kind.file))
    return f"{kind.name}:{kind.params}" if kind.params else kind.name


def _run(text: str, path: Path) -> None:
    module = f"llama_kv_kind_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:16]}"
    if module in sys.modules:
        return
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise ValueError(f"kv_cache={text!r}: {path} is no regular file")
    spec = spec_from_file_location(module, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = sys.modules[module] = module_from_spec(spec)  # by name, so that what it defines can be pickled
    try:
        spec.loader.exec_module(loaded)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever a user's file may raise
        del sys.modules[module]
        if isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt:
            raise  # not the file's: commands raise one of their own for a key that was pressed
        raise ValueError(f"kv_cache={text!r}: {path} cannot be run: {type(error).__name__}: {error}") from error
