"""Read the data.pkl of a .pth file without an unpickler: nothing that it names is imported, called or built.

A pickle is a program for a small machine with a stack and a memo. `pickletools` of Python cuts it into operations. This
machine has only the operations with which torch.save writes a dict of tensors (protocol 2, its default), and returns
names, shapes and positions. Every other operation, function and class is rejected. Each operation takes constant time,
and their number is limited.
Source: Lib/pickletools.py of Python, which describes every operation, and torch.serialization._save.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from llama.untrusted.words import printable

REMEDY: Final = "save a dict of tensors with torch.save, or convert the model to safetensors"

# A tensor takes some 35 operations, a parameter of a module some 50. The largest supported models need fewer than the
# limit, and at the limit reading takes a fraction of a second and less than 64 MiB.
MAX_OPERATIONS = 1 << 18
MAX_TEXT = 255
# One for all tensors, one for each tensor, one for each module. While their number grows, Python's garbage collector
# visits all of them again and again.
MAX_DICTS = 1 << 15
_MAX_DIMS = 4
_MAX_INT = (1 << 63) - 1
_PROTOCOL = b"\x80\x02"


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


# The functions that torch.save names. Each returns None for arguments that torch.save does not write.


def _ordered_dict(arguments: tuple[Any, ...]) -> _OrderedDict | None:
    return None if arguments else _OrderedDict()


def _rebuild_tensor_v2(arguments: tuple[Any, ...]) -> PickledTensor | None:
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


# By the bytes of the operation that names them.
_GLOBALS: dict[bytes, Callable[[tuple[Any, ...]], object] | torch.dtype] = {
    b"ccollections\nOrderedDict\n": _ordered_dict,
    b"ctorch._utils\n_rebuild_tensor_v2\n": _rebuild_tensor_v2,
    b"ctorch._utils\n_rebuild_parameter\n": _rebuild_parameter,
    b"ctorch\nFloatStorage\n": torch.float32,
    b"ctorch\nHalfStorage\n": torch.float16,
    b"ctorch\nBFloat16Storage\n": torch.bfloat16,
}


def _kind(value: object) -> str:
    return f"a value of type {type(value).__name__.lstrip('_')}"


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
        self.at = 0  # the first byte of the operation
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # the stacks beneath the marks
        self.memo: list[Any] = []
        self.storages: dict[str, Storage] = {}
        self.n_dicts = 0

    def run(self) -> object:
        if not self.data.startswith(_PROTOCOL):
            raise self.refusal("does not start as a pickle of protocol 2, the default of torch.save")
        operations = pickletools.genops(self.data)
        next(operations)  # the protocol
        for _ in range(MAX_OPERATIONS):
            try:
                opcode, argument, at = next(operations)
            except ValueError as error:
                raise self.refusal(f"is damaged: {printable(str(error), 200)}") from None
            self.at = at or 0
            if opcode.name == "STOP":
                return self.result()
            operation = _OPERATIONS.get(opcode.name)
            if operation is None:
                raise self.refusal(f"contains {_described(opcode)}; a dict of tensors has none")
            try:
                operation(self, argument)
            except IndexError:
                raise self.refusal(f"is damaged: {opcode.name} needs a value, mark or memo entry") from None
        raise self.refusal(f"has more than {MAX_OPERATIONS} operations")

    def result(self) -> object:
        if len(self.stack) != 1 or self.below or self.at + 1 != len(self.data):
            raise self.refusal("does not contain one value")
        return self.stack[0]

    def refusal(self, what: str) -> ValueError:
        return ValueError(f"data.pkl {what} (at byte {self.at}); {REMEDY}")

    # ---- numbers and texts

    def push_text(self, text: str) -> None:
        if len(text.encode(errors="surrogatepass")) > MAX_TEXT:
            raise self.refusal(f"contains a text of {len(text)} characters; the limit is {MAX_TEXT} bytes")
        if not text.isprintable():
            raise self.refusal(f"contains the text {quoted(text)}, which cannot be printed")
        self.stack.append(text)

    def push_integer(self, number: int) -> None:
        if not -_MAX_INT <= number <= _MAX_INT:
            raise self.refusal("contains a number of more than 63 bits")
        self.stack.append(number)

    # ---- the stack and the memo

    def push_mark(self) -> None:
        self.below.append(self.stack)
        self.stack = []

    def pop_to_mark(self) -> list[Any]:
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
        self.memo.append(self.stack[-1])

    # ---- dicts

    def push_dict(self, made: dict[str, Any]) -> None:
        self.n_dicts += 1
        if self.n_dicts > MAX_DICTS:
            raise self.refusal(f"builds more than {MAX_DICTS} dicts")
        self.stack.append(made)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack.pop()
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
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])

    def build(self) -> None:
        """Drop the `_metadata` of a state dict. No other state is allowed."""
        state, target = self.stack.pop(), self.stack.pop()
        if type(target) is not _OrderedDict or type(state) is not dict or len(state) != 1 or "_metadata" not in state:
            raise self.refusal(f"sets the state of {_kind(target)}")
        self.stack.append(target)

    # ---- functions, classes and storages

    def push_global(self, name: str) -> None:
        end = self.data.index(b"\n", self.data.index(b"\n", self.at) + 1) + 1
        known = _GLOBALS.get(self.data[self.at : end])
        if known is None:
            dtypes = "; supported: float32, float16 and bfloat16" if name.endswith("Storage") else ""
            raise self.refusal(f"names {quoted(name.replace(' ', '.'))}, which is never run{dtypes}")
        self.stack.append(known)

    def refer(self) -> None:
        """Replace ("storage", class, key, device, numel) by the storage; the device is ignored."""
        value = self.stack.pop()
        if type(value) is not tuple or list(map(type, value[:6])) != [str, torch.dtype, str, str, int]:
            raise self.refusal(f"refers to {_kind(value)} that is not a storage")
        word, dtype, key, _, numel = value
        storage = Storage(dtype, key, numel)
        if word != "storage" or self.storages.setdefault(key, storage) != storage:
            raise self.refusal(f"describes the storage {key!r} as {quoted(word)}, or inconsistently")
        self.stack.append(storage)

    def call(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        value = function(arguments) if callable(function) and type(arguments) is tuple else None
        if value is None:
            name = function.__name__ if callable(function) else _kind(function)
            raise self.refusal(f"calls {name} with other arguments than torch.save")
        if isinstance(value, _OrderedDict):
            self.push_dict(value)
        else:
            self.stack.append(value)


def _described(opcode: pickletools.OpcodeInfo) -> str:
    """Return the name of an operation and the kind of value that it would push."""
    made = " and ".join(part.name for part in opcode.stack_after)
    return f"the operation {opcode.name}" + (f" ({made})" if made else "")


_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "NONE": lambda machine, _: machine.stack.append(None),
    "NEWTRUE": lambda machine, _: machine.stack.append(True),
    "NEWFALSE": lambda machine, _: machine.stack.append(False),
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine.push_integer),
    "BINUNICODE": _Machine.push_text,
    "MARK": lambda machine, _: machine.push_mark(),
    "EMPTY_TUPLE": lambda machine, _: machine.stack.append(()),
    "TUPLE1": lambda machine, _: machine.push_tuple(1),
    "TUPLE2": lambda machine, _: machine.push_tuple(2),
    "TUPLE3": lambda machine, _: machine.push_tuple(3),
    "TUPLE": lambda machine, _: machine.push_marked_tuple(),
    "EMPTY_DICT": lambda machine, _: machine.push_dict({}),
    "SETITEM": lambda machine, _: machine.set_item(),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), _Machine.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda machine, index: machine.stack.append(machine.memo[index])),
    "GLOBAL": _Machine.push_global,
    "BINPERSID": lambda machine, _: machine.refer(),
    "REDUCE": lambda machine, _: machine.call(),
    "BUILD": lambda machine, _: machine.build(),
}
