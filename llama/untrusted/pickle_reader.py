"""Read the data.pkl of a .pth file without an unpickler: nothing that it names is imported, called or built.

A pickle is a program for a small machine with a stack and a memo. This machine has only the operations with which
torch.save writes a dict of tensors, and returns names, shapes and positions. Every other operation, function and class
is rejected. Each operation takes constant time, and their number is limited.
Source: Lib/pickletools.py of Python, which describes every operation, and torch.serialization._save.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

REMEDY: Final = "save a dict of tensors with torch.save, or convert the model to safetensors"

# A tensor takes some 35 operations, a parameter of a module some 50. The largest supported models need fewer than the
# limit, and at the limit reading takes a fraction of a second and less than 64 MiB.
MAX_OPERATIONS = 1 << 18
MAX_TEXT = 255
# One for all tensors, one for each tensor, one for each module. While their number grows, Python's garbage collector
# visits all of them again and again.
MAX_DICTS = 1 << 15
_MAX_DIMS = 4
_MAX_INT_BYTES = 8
_MAX_MARKS = 8

_PROTO, _STOP = 0x80, 0x2E
_PROTOCOLS = range(2, 6)


@dataclass(frozen=True, slots=True)
class Storage:
    """The numbers in the record `data/KEY` of the archive: their dtype, KEY, and their count."""

    dtype: torch.dtype
    key: str
    numel: int


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor in a pickle: its storage, the index of its first number there, its shape and its strides."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def read_pickle(data: bytes) -> dict[str, PickledTensor]:
    """Return the tensors, by name, that torch.save wrote into this data.pkl.

    Each has 1 to 4 dimensions, none of them 0, is contiguous, and lies inside its storage. All tensors of a storage
    agree on its dtype and size. Names are printable and at most 255 bytes. Raises only ValueError for other content.
    """
    content = _Machine(data).run()
    if not isinstance(content, dict):
        raise ValueError(f"data.pkl must contain a dict of tensors by name and contains {_kind(content)}; {REMEDY}")
    return {name: _checked(name, value) for name, value in content.items()}


def _checked(name: str, value: object) -> PickledTensor:
    if isinstance(value, dict):
        raise ValueError(f"{name!r} is a dict and must be a tensor; save the dict of tensors alone, not inside another")
    if not isinstance(value, PickledTensor):
        raise ValueError(f"{name!r} is {_kind(value)} and must be a tensor; {REMEDY}")
    if not value.shape or 0 in value.shape:
        raise ValueError(f"{name} is empty or a single number")
    expected = 1
    for length, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        if length > 1 and stride != expected:
            raise ValueError(f"{name} is not contiguous; save its .contiguous()")
        expected *= length
    if value.offset + value.numel > value.storage.numel:
        raise ValueError(f"{name} ends at number {value.offset + value.numel} of a storage of {value.storage.numel}")
    return value


class _OrderedDict(dict[str, Any]):
    """Represents a collections.OrderedDict."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class _Function:
    """A function that torch.save names; `apply` returns its value for arguments of torch.save, and None for others."""

    name: str
    apply: Callable[[tuple[Any, ...]], object]


def _ordered_dict(arguments: tuple[Any, ...]) -> _OrderedDict | None:
    return None if arguments else _OrderedDict()


def _rebuild_tensor(arguments: tuple[Any, ...]) -> PickledTensor | None:
    if list(map(type, arguments[:7])) != [Storage, int, tuple, tuple, bool, _OrderedDict] or arguments[5]:
        return None
    storage, offset, shape, strides, *_ = arguments
    if len(shape) > _MAX_DIMS or len(shape) != len(strides):
        return None
    sizes = (offset, *shape, *strides)
    if not all(type(size) is int and size >= 0 for size in sizes):
        return None
    return PickledTensor(storage, offset, shape, strides)


def _rebuild_parameter(arguments: tuple[Any, ...]) -> PickledTensor | None:
    if list(map(type, arguments[:4])) != [PickledTensor, bool, _OrderedDict] or arguments[2]:
        return None
    tensor: PickledTensor = arguments[0]
    return tensor


_GLOBALS: dict[tuple[str, str], _Function | torch.dtype] = {
    ("collections", "OrderedDict"): _Function("OrderedDict", _ordered_dict),
    ("torch._utils", "_rebuild_tensor_v2"): _Function("_rebuild_tensor_v2", _rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function("_rebuild_parameter", _rebuild_parameter),
    ("torch", "FloatStorage"): torch.float32,
    ("torch", "HalfStorage"): torch.float16,
    ("torch", "BFloat16Storage"): torch.bfloat16,
}
_KINDS: dict[type, str] = {
    dict: "a dict",
    _OrderedDict: "an OrderedDict",
    str: "text",
    int: "a whole number",
    bool: "true or false",
    type(None): "None",
    tuple: "a tuple",
    Storage: "a storage",
    PickledTensor: "a tensor",
    _Function: "a function",
    torch.dtype: "a class",
}


def _kind(value: object) -> str:
    return _KINDS[type(value)]


def quoted(text: str) -> str:
    """Return untrusted text for a message: in quotes, cut, with everything except printable ASCII escaped."""
    return ascii(text if len(text) <= 60 else f"{text[:60]}...")


class _Machine:
    """Runs the operations up to STOP. Values are numbers, short texts, tuples and dicts of these.

    Only short texts are compared or hashed, and no value is traversed, so that values which contain each other, or
    themselves, cost no more than the operations that built them.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.end = len(data)  # or the end of the frame
        self.framed = False
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks beneath the marks
        self.memo: list[Any] = []
        self.storages: dict[str, Storage] = {}
        self.n_dicts = 0

    def run(self) -> object:
        if self.byte() != _PROTO or self.byte() not in _PROTOCOLS:
            raise self.refusal("does not start as a pickle of protocol 2 to 5")
        for _ in range(MAX_OPERATIONS):
            if self.at == self.end:
                self.end, self.framed = len(self.data), False
            code = self.byte()
            if code == _STOP:
                return self.result()
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise self.refusal(f"contains {_described(code)}; a dict of tensors has none")
            operation(self)
        raise self.refusal(f"has more than {MAX_OPERATIONS} operations")

    def result(self) -> object:
        value = self.pop()
        if self.stack or self.below or self.at != len(self.data):
            raise self.refusal("contains more than one value")
        return value

    def refusal(self, what: str) -> ValueError:
        return ValueError(f"data.pkl {what} (before byte {self.at}); {REMEDY}")

    # ---- bytes

    def byte(self) -> int:
        at = self.at
        if at == self.end:
            raise self.cut_off()
        self.at = at + 1
        return self.data[at]

    def take(self, count: int) -> bytes:
        start, end = self.at, self.at + count
        if end > self.end:
            raise self.cut_off()
        self.at = end
        return self.data[start:end]

    def cut_off(self) -> ValueError:
        what = "a frame of it" if self.framed else "it"
        return ValueError(f"data.pkl is damaged: {what} ends at byte {self.end}, in the middle of an operation")

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def push_text(self, width: int) -> None:
        """Push a text, whose length is in the `width` bytes before it."""
        length = self.number(width)
        if length > MAX_TEXT:
            raise self.refusal(f"contains a text of {length} bytes; the limit is {MAX_TEXT}")
        raw = self.take(length)
        try:
            text = raw.decode()
        except UnicodeDecodeError:
            raise self.refusal("contains a text that is not UTF-8") from None
        if not text.isprintable():
            raise self.refusal(f"contains the text {quoted(text)}, which cannot be printed")
        self.stack.append(text)

    def push_integer(self, width: int, *, signed: bool = False) -> None:
        self.stack.append(int.from_bytes(self.take(width), "little", signed=signed))

    def push_long_integer(self) -> None:
        width = self.byte()
        if width > _MAX_INT_BYTES:
            raise self.refusal(f"contains a number of {width} bytes; the limit is {_MAX_INT_BYTES}")
        self.push_integer(width, signed=True)

    def line(self) -> str:
        end = self.data.find(b"\n", self.at, self.at + MAX_TEXT)
        if end < 0:
            raise self.refusal("names a function or class without an end")
        return self.take(end + 1 - self.at)[:-1].decode(errors="backslashreplace")

    def begin_frame(self) -> None:
        """Begin a frame, which readers of streams need. No operation may cross its end."""
        length = self.number(8)
        if self.framed or length > self.end - self.at:
            raise self.refusal(f"begins a frame of {length} bytes beyond the data or inside another frame")
        self.end, self.framed = self.at + length, True

    # ---- the stack and the memo

    def pop(self) -> Any:
        if not self.stack:
            raise self.refusal("takes a value from an empty stack")
        return self.stack.pop()

    def push_mark(self) -> None:
        if len(self.below) == _MAX_MARKS:
            raise self.refusal(f"nests more than {_MAX_MARKS} marks")
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
        if not self.below:
            raise self.refusal("goes back to a mark that does not exist")
        values, self.stack = self.stack, self.below.pop()
        return values

    def push_marked_tuple(self) -> None:
        values = self.pop_to_mark()
        self.stack.append(tuple(values))

    def push_tuple(self, length: int) -> None:
        """Replace `length` values by a tuple of them. torch.save writes nested tuples only with a mark."""
        values = tuple(self.stack[-length:])
        if len(values) < length or tuple in map(type, values):
            raise self.refusal(f"builds a tuple of {length}, unlike torch.save")
        self.stack[-length:] = [values]

    def put(self, index: int) -> None:
        """Store the top value in the memo. All picklers number its entries 0, 1, 2, ..."""
        if index != len(self.memo):
            raise self.refusal(f"stores a value in the memo as {index}; the next index is {len(self.memo)}")
        if not self.stack:
            raise self.refusal("stores a value of an empty stack in the memo")
        self.memo.append(self.stack[-1])

    def get(self, index: int) -> None:
        if index >= len(self.memo):
            raise self.refusal(f"reads entry {index} of a memo of {len(self.memo)}")
        self.stack.append(self.memo[index])

    # ---- dicts

    def push_dict(self, made: dict[str, Any]) -> None:
        self.n_dicts += 1
        if self.n_dicts > MAX_DICTS:
            raise self.refusal(f"builds more than {MAX_DICTS} dicts")
        self.stack.append(made)

    def set_items(self, items: list[Any]) -> None:
        target = self.pop()
        if not isinstance(target, dict) or len(items) % 2:
            raise self.refusal(f"puts {len(items)} keys and values into {_kind(target)}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) is not str:
                raise self.refusal(f"contains a dict with {_kind(key)} as a key; keys must be the names of tensors")
            if key in target:
                raise self.refusal(f"repeats the key {key!r}")
            target[key] = value
        self.stack.append(target)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def build(self) -> None:
        """Drop the `_metadata` of a state dict. No other state is allowed."""
        state, target = self.pop(), self.pop()
        if type(target) is not _OrderedDict or type(state) is not dict or len(state) != 1 or "_metadata" not in state:
            raise self.refusal(f"sets the state of {_kind(target)}")
        self.stack.append(target)

    # ---- functions, classes and storages

    def push_global(self, module: str, name: str) -> None:
        known = _GLOBALS.get((module, name))
        if known is None:
            dtypes = "; supported: float32, float16 and bfloat16" if name.endswith("Storage") else ""
            raise self.refusal(f"names {quoted(f'{module}.{name}')}, which is never run{dtypes}")
        self.stack.append(known)

    def push_global_of_stack(self) -> None:
        name, module = self.pop(), self.pop()
        if type(module) is not str or type(name) is not str:
            raise self.refusal(f"names a function or class by {_kind(module)} and {_kind(name)}")
        self.push_global(module, name)

    def refer(self) -> None:
        """Replace ("storage", class, key, device, numel) by the storage; the device is ignored."""
        value = self.pop()
        if type(value) is not tuple or list(map(type, value[:6])) != [str, torch.dtype, str, str, int]:
            raise self.refusal(f"refers to {_kind(value)} that is not a storage")
        word, dtype, key, _, numel = value
        storage = Storage(dtype, key, numel)
        if word != "storage" or self.storages.setdefault(key, storage) != storage:
            raise self.refusal(f"describes the storage {key!r} as {quoted(word)}, or inconsistently")
        self.stack.append(storage)

    def call(self) -> None:
        arguments, function = self.pop(), self.pop()
        value = None
        if type(function) is _Function and type(arguments) is tuple:
            value = function.apply(arguments)
        if value is None:
            name = function.name if type(function) is _Function else _kind(function)
            raise self.refusal(f"calls {name} with other arguments than torch.save")
        if isinstance(value, _OrderedDict):
            self.push_dict(value)
        else:
            self.stack.append(value)


def _described(code: int) -> str:
    """Return the name of an operation and the kind of value that it would push."""
    known = next((known for known in pickletools.opcodes if known.code == chr(code)), None)
    if known is None:
        return f"the unknown operation 0x{code:02x}"
    made = " and ".join(part.name for part in known.stack_after)
    return f"the operation {known.name}" + (f" ({made})" if made else "")


_OPERATIONS: dict[int, Callable[[_Machine], None]] = {
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.stack.append(machine.byte()),
    ord("M"): lambda machine: machine.push_integer(2),
    ord("J"): lambda machine: machine.push_integer(4, signed=True),
    0x8A: _Machine.push_long_integer,
    ord("X"): lambda machine: machine.push_text(4),
    0x8C: lambda machine: machine.push_text(1),
    ord("("): _Machine.push_mark,
    ord(")"): lambda machine: machine.stack.append(()),
    0x85: lambda machine: machine.push_tuple(1),
    0x86: lambda machine: machine.push_tuple(2),
    0x87: lambda machine: machine.push_tuple(3),
    ord("t"): _Machine.push_marked_tuple,
    ord("}"): lambda machine: machine.push_dict({}),
    ord("s"): _Machine.set_item,
    ord("u"): lambda machine: machine.set_items(machine.pop_to_mark()),
    ord("q"): lambda machine: machine.put(machine.byte()),
    ord("r"): lambda machine: machine.put(machine.number(4)),
    0x94: lambda machine: machine.put(len(machine.memo)),
    ord("h"): lambda machine: machine.get(machine.byte()),
    ord("j"): lambda machine: machine.get(machine.number(4)),
    ord("c"): lambda machine: machine.push_global(machine.line(), machine.line()),
    0x93: _Machine.push_global_of_stack,
    ord("Q"): _Machine.refer,
    ord("R"): _Machine.call,
    ord("b"): _Machine.build,
    0x95: _Machine.begin_frame,
}
