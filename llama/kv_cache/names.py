"""The grammar of a cache's name: KIND for all layers, or KIND@LAYERS;...;KIND.

KIND is NAME, NAME:PARAMS, FILE.py:NAME or FILE.py:NAME:PARAMS. LAYERS are numbers and Python ranges, joined by commas:
`static@:2,-1;int4` is static in the first two layers and the last one, and int4 in the others. The first part that
names a layer applies. A part without @ comes last and names all remaining layers. `streaming-llm` is another name of
`window`.
"""

import hashlib
import os
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

_LAST_RUN: dict[str, str] = {}  # the path of a user's file -> its module
SOURCE = "llama_kv_source"  # the attribute of a user's module with the digest of the code that ran
ALIASES = {"streaming-llm": "window"}  # names from papers for kinds that have another name here


class Kind(NamedTuple):
    """The parts of one KIND; `file` and `params` are "" if they are left out."""

    file: str
    name: str
    params: str


def kinds_named(text: str) -> list[tuple[str, str | None]]:
    """Return each KIND and its LAYERS; None for all remaining layers.

    Raises ValueError for an empty KIND or LAYERS, and for a part behind one without @.
    """
    named: list[tuple[str, str | None]] = []
    for part in text.split(";"):
        kind, at, layers = part.rpartition("@") if "@" in part else (part, "", "")
        if not kind or (at and not layers):
            raise ValueError(f"kv_cache={text!r}: the part {part!r} must be KIND or KIND@LAYERS, such as int4@2:,0")
        if named and named[-1][1] is None:
            raise ValueError(f"kv_cache={text!r}: {named[-1][0]!r} has all layers, so none is left for {part!r}")
        name, colon, params = kind.partition(":")
        named.append((f"{ALIASES.get(name, name)}{colon}{params}", layers if at else None))
    return named


def kinds_by_layer(text: str, n_layers: int) -> list[str]:
    """Return the kind of each layer, NAME or NAME:PARAMS, of a model of `n_layers`.

    Raises ValueError for a layer that no part names, and for LAYERS that the model does not have.
    """
    kinds: dict[int, str] = {}
    for kind, layers in kinds_named(text):
        for layer in range(n_layers) if layers is None else _numbers(text, layers, n_layers):
            kinds.setdefault(layer, kind)
    left = [layer for layer in range(n_layers) if layer not in kinds]
    if left:
        raise ValueError(
            f"kv_cache={text!r} names no kind for layers {', '.join(map(str, left))} of {n_layers}; end it with ;KIND"
        )
    return [kinds[layer] for layer in range(n_layers)]


def _numbers(text: str, layers: str, n_layers: int) -> list[int]:
    """Return the layers that LAYERS names."""
    found: list[int] = []
    for one in layers.split(","):
        if re.fullmatch(r"-?\d{1,9}|(-?\d{1,9})?:(-?\d{1,9})?(:(-?[1-9]\d{0,8})?)?", one) is None:
            raise ValueError(
                f"kv_cache={text!r}: {one!r} names no layers; give a number or a range, such as 3, :2, 1:-1"
            )
        bounds = [int(number) if number else None for number in one.split(":")]
        reach = n_layers if len(bounds) > 1 else n_layers - 1  # a range may end behind the last layer
        if any(bound is not None and not -n_layers <= bound <= reach for bound in bounds[:2]):
            raise ValueError(f"kv_cache={text!r}: {one} is outside of the model's {n_layers} layers")
        named = range(n_layers)[slice(*bounds)] if len(bounds) > 1 else [range(n_layers)[bounds[0] or 0]]
        if not named:
            raise ValueError(f"kv_cache={text!r}: {one} names none of the model's {n_layers} layers")
        found += named
    return found


def read_kind(text: str) -> Kind:
    """Return the parts of one KIND."""
    head, dot, rest = text.rpartition(".py:")
    file = f"{head}.py" if dot else ""
    name, _, params = (rest if dot else text).partition(":")
    return Kind(file, name, params)


def cache_kind(text: str) -> str:
    """Run each FILE.py of `text`, and return `text` with NAME in place of FILE.py:NAME.

    Raises ValueError for a file that cannot be run, and as `kinds_named` does.
    """
    parts = []
    for named, layers in kinds_named(text):
        kind = read_kind(named)
        if kind.file:
            run_file(Path(kind.file), f"kv_cache={text!r}")
        name = f"{kind.name}:{kind.params}" if kind.params else kind.name
        parts.append(name if layers is None else f"{name}@{layers}")
    return ";".join(parts)


def run_file(path: Path, setting: str) -> ModuleType:
    """Run a user's file, and again once it was edited; return its module. `setting` named it, and begins each error.

    Raises ValueError for a file that cannot be run.
    """
    # os.path raises no error for names that are too long, or links in a circle; reading the file then does.
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would block
        raise ValueError(f"{setting}: {path} is no regular file")
    name = ""
    try:
        source, place = path.read_bytes(), os.path.realpath(path)
        digest = hashlib.sha256(place.encode() + b"\0" + source).hexdigest()
        name = f"llama_kv_kind_{digest[:16]}"
        if _LAST_RUN.get(place) != name:  # also if an edit was taken back: its classes have the names of the kinds
            spec = spec_from_file_location(name, path)
            assert spec is not None
            sys.modules[name] = module_from_spec(spec)  # pickle finds its classes by this name
            vars(sys.modules[name])[SOURCE] = hashlib.sha256(source).hexdigest()
            exec(compile(source, path, "exec"), vars(sys.modules[name]))  # a file of bytecode may be of the last edit
            _LAST_RUN[place] = name
        return sys.modules[name]
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a user's file may raise anything
        sys.modules.pop(name, None)
        if isinstance(error, KeyboardInterrupt) and type(error) is not KeyboardInterrupt:
            raise  # a command's own error for a pressed key, not one of the file
        raise ValueError(f"{setting}: {path} cannot be run: {type(error).__name__}: {error}") from error
