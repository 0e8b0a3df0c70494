"""A file of torch.save is read to the bit, and every other pickle is refused early."""

import io
import pickle
import pickletools
import sys
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import fuzz_pickle
from fuzz.fuzz_pickle import operations, pickle_of, same_bits, saved
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import table

from llama.untrusted.pickle_reader import MAX_OPERATIONS, PickledTensor, Storage, read_pickle

# ---- what torch.save writes ------------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def assert_read_as_torch_does(path: Path) -> None:
    ours, theirs = fuzz_pickle.loaded(path), torch.load(path, weights_only=False)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert same_bits(tensor, theirs[name]), name


names = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=40)
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
kinds = st.sampled_from(("tensor", "wants a gradient", "parameter", "frozen parameter"))


@st.composite
def dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Return tensors of every kind that is read, of which neighbours may lie side by side in one storage."""
    content: dict[str, torch.Tensor] = OrderedDict() if draw(st.booleans()) else {}
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    for dtype in draw(st.lists(st.sampled_from(DTYPES), max_size=3)):
        parts = draw(st.dictionaries(names, st.tuples(shapes, kinds), min_size=1, max_size=3))
        counts = [torch.Size(shape).numel() for shape, _ in parts.values()]
        gap = draw(st.integers(0, 3))  # numbers of the storage that no tensor has
        flat = torch.randn(gap + sum(counts), generator=generator).to(dtype)
        for (name, (shape, kind)), piece in zip(parts.items(), flat[gap:].split(counts), strict=True):
            tensor = piece.view(shape)
            if "parameter" in kind:
                tensor = torch.nn.Parameter(tensor, requires_grad=kind == "parameter")
            elif kind == "wants a gradient":
                tensor = tensor.requires_grad_()
            content[name] = tensor
    return content


@settings(max_examples=25, deadline=None)
@given(content=dicts())
def test_what_torch_saves_is_read_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, content: dict[str, torch.Tensor]
) -> None:
    path = tmp_path_factory.getbasetemp() / "saved.pth"
    torch.save(content, path)
    used = {tensor.untyped_storage().data_ptr() for tensor in torch.load(path, weights_only=False).values()}
    assert len(used) == len({place.storage for place in read_pickle(pickle_of(path.read_bytes())).values()})
    assert_read_as_torch_does(path)


def test_a_state_dict_is_read_without_its_metadata(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4)).bfloat16()
    path = tmp_path / "state.pth"
    state = model.state_dict()
    assert state._metadata[""]
    torch.save(state, path)
    assert_read_as_torch_does(path)
    torch.save(dict(model.named_parameters()), path)
    assert_read_as_torch_does(path)


def test_more_names_than_a_byte_counts_are_read(tmp_path: Path) -> None:
    path = tmp_path / "many.pth"
    torch.save({f"layers.{i}.attention.wq.weight": torch.full((2, 2), float(i)) for i in range(300)}, path)
    assert_read_as_torch_does(path)


def test_sizes_of_more_than_31_bits_are_read() -> None:
    content = {"a": torch.empty(3 << 30, dtype=torch.float16)}  # memory that is never touched
    buffer = io.BytesIO()
    pickler = pickle.Pickler(buffer, protocol=2)
    pickler.persistent_id = lambda value: (  # type: ignore[method-assign]
        ("storage", torch.HalfStorage, "0", "cuda:7", 3 << 30) if torch.is_storage(value) else None
    )
    pickler.dump(content)
    expected = PickledTensor(Storage(torch.float16, "0", 3 << 30), 0, (3 << 30,), (1,))
    assert read_pickle(buffer.getvalue()) == {"a": expected}


def test_an_optimised_pickle_is_read() -> None:
    for content in fuzz_pickle.contents():
        data = pickle_of(saved(content))
        assert read_pickle(pickletools.optimize(data)) == read_pickle(data)


# ---- what torch.save also writes, and is no dict of plain tensors ----------------------------------------------------


OTHERS: dict[str, tuple[Callable[[], object], str]] = {
    "a tensor": (lambda: torch.ones(2), "contains a value of type PickledTensor; save a dict"),
    "a list": (lambda: [torch.ones(2)], r"contains the operation EMPTY_LIST \(list\); a dict of tensors has none"),
    "a model": (lambda: torch.nn.Linear(1, 1), "names 'torch.nn.modules.linear.Linear', which is never run"),
    "numbers as names": (
        lambda: {1: torch.ones(2)},
        "a dict with a value of type int as a key; keys must be the names",
    ),
    "a tuple as a name": (lambda: {("a",): torch.ones(2)}, "a dict with a value of type tuple as a key"),
    "a dict inside": (lambda: {"model": {"a": torch.ones(2)}}, "'model' is a dict and must be a tensor; save the dict"),
    "a number beside": (lambda: {"a": torch.ones(2), "step": 3}, "'step' is a value of type int and must be a tensor"),
    "a float beside": (lambda: {"a": 1.0}, r"the operation BINFLOAT \(float\)"),
    "a large number beside": (lambda: {"a": 1 << 80}, "contains a number of more than 63 bits"),
    "a function": (
        lambda: {"a": torch._utils._rebuild_tensor_v2},
        "'a' is a value of type function and must be a tensor",
    ),
    "whole numbers": (
        lambda: {"a": torch.ones(2).long()},
        "'torch.LongStorage', .*; supported: float32, float16 and bfloat16",
    ),
    "float64": (
        lambda: {"a": torch.ones(2).double()},
        "names 'torch.DoubleStorage'.* supported: float32, float16 and bfloat16",
    ),
    "on the meta device": (lambda: {"a": torch.ones(2, device="meta")}, "_rebuild_meta_tensor_no_storage"),
    "a negative bit": (lambda: {"a": torch._neg_view(torch.ones(2))}, "calls _rebuild_tensor_v2 with other arguments"),
    "transposed": (lambda: {"a": torch.ones(2, 3).T}, r"a is not contiguous; save its .contiguous\(\)"),
    "expanded": (lambda: {"a": torch.ones(1).expand(1 << 40)}, "a is not contiguous"),
    "empty": (lambda: {"a": torch.ones(0, 3)}, "a is empty or a single number"),
    "a single number": (lambda: {"a": torch.tensor(1.0)}, "a is empty or a single number"),
    "five dimensions": (lambda: {"a": torch.ones(1, 1, 1, 1, 2)}, "calls _rebuild_tensor_v2 with other arguments"),
    "a name of 256 bytes": (
        lambda: {"a" * 256: torch.ones(2)},
        "contains a text of 256 characters; the limit is 255 bytes",
    ),
    "a name that acts on a terminal": (
        lambda: {"\x1b[31mred": torch.ones(2)},
        r"the text '\\x1b\[31mred', which cannot",
    ),
}


@table("what", OTHERS)
def test_other_content_than_a_dict_of_tensors_is_refused_by_kind(what: str) -> None:
    make, reason = OTHERS[what]
    with pytest.raises(ValueError, match=reason) as caught:
        read_pickle(pickle_of(saved(make())))
    assert type(caught.value) is ValueError


# ---- one operation at a time -----------------------------------------------------------------------------------------

P = b"\x80\x02"
END = b"."


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return b"X" + len(raw).to_bytes(4, "little") + raw


def storage(key: str = "0", numel: bytes = b"K\x06", kind: bytes = b"FloatStorage", word: str = "storage") -> bytes:
    return b"(" + text(word) + b"ctorch\n" + kind + b"\n" + text(key) + text("cpu") + numel + b"tQ"


HOOKS = b"ccollections\nOrderedDict\n)R"
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
PARAMETER = b"ctorch._utils\n_rebuild_parameter\n"
TENSOR = REBUILD + b"(" + storage() + b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x89" + HOOKS + b"tR"


def tensor(arguments: bytes) -> bytes:
    return P + b"}" + text("a") + REBUILD + b"(" + arguments + b"tRs."


def a_dict(value: bytes, key: bytes = text("a")) -> bytes:
    return P + b"}" + key + value + b"s."


def test_the_pickle_that_the_others_break_is_read() -> None:
    expected = {"a": PickledTensor(Storage(torch.float32, "0", 6), 0, (2, 3), (3, 1))}
    assert read_pickle(a_dict(TENSOR)) == expected
    assert read_pickle(tensor(storage() + b"K\x00K\x02K\x03\x86K\x03K\x01\x86\x88" + HOOKS)) == expected
    assert read_pickle(a_dict(PARAMETER + TENSOR + b"\x88" + HOOKS + b"\x87R")) == expected
    assert read_pickle(P + b"}.") == {}


SHAPE = b"K\x02K\x03\x86K\x03K\x01\x86"
BROKEN: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "does not start as a pickle of protocol 2, the default of torch.save"),
    "no protocol": (b"}.", "does not start as a pickle of protocol 2"),
    "protocol 4": (b"\x80\x04}.", "does not start as a pickle of protocol 2"),
    "a protocol twice": (P + P + b"}.", "contains the operation PROTO; a dict of tensors has none"),
    "two values": (P + b"}}.", "does not contain one value"),
    "no value": (P + b".", "does not contain one value"),
    "an open mark": (P + b"(}.", "does not contain one value"),
    "bytes behind the end": (P + b"}..", "does not contain one value"),
    "a byte that is no operation": (P + b"\xff.", r"is damaged: at position 2, opcode b'.xff' unknown"),
    "an operation that makes nothing": (P + b"0.", "contains the operation POP; a dict of tensors has none"),
    "a text longer than the rest": (
        P + b"X\x09\x00\x00\x00abc",
        "is damaged: expected 9 bytes in a unicodestring4, but only 3 remain",
    ),
    "a text of 4 GB": (P + b"X\xff\xff\xff\xff", "is damaged: expected 4294967295 bytes"),
    "a text that is not UTF-8": (P + text(b"\xff") + END, "is damaged: 'utf-8' codec can't decode"),
    "half a character": (P + text(b"\xed\xa0\x80") + END, "contains the text .*, which cannot be printed"),
    "a tuple of too few": (P + b"N\x86.", "builds a tuple of 2, unlike torch.save"),
    "a tuple of a tuple": (P + b")\x85.", "builds a tuple of 1, unlike torch.save"),
    "a tuple without a mark": (P + b"t.", "TUPLE needs a value, mark or memo entry"),
    "items for a tuple": (P + b")(" + text("a") + b"Nu.", "puts 2 keys and values into a value of type tuple"),
    "a key without a value": (P + b"}(" + text("a") + b"u.", "puts 1 keys and values into a value of type dict"),
    "a key twice": (P + b"}(" + text("a") + b"N" + text("a") + b"Nu.", "repeats the key 'a'"),
    "a place left out": (P + b"}q\x01.", "stores a value in the memo as 1; the next index is 0"),
    "a place used twice": (P + b"}q\x00q\x00.", "stores a value in the memo as 0; the next index is 1"),
    "nothing to remember": (P + b"q\x00.", "BINPUT needs a value"),
    "nothing remembered there": (P + b"}q\x00j\x01\x00\x00\x00.", "LONG_BINGET needs a value, mark or memo entry"),
    "a state of a dict": (P + b"}}" + text("_metadata") + b"Nsb.", "sets the state of a value of type dict"),
    "a state that is no dict": (P + HOOKS + b"Nb.", "sets the state of a value of type OrderedDict"),
    "another state": (P + HOOKS + b"}" + text("keys") + b"Nsb.", "sets the state of a value of type OrderedDict"),
    "more state": (P + HOOKS + b"}" + text("_metadata") + b"Ns" + text("x") + b"Nsb.", "sets the state of a value"),
    "a name without an end": (P + b"ctorch", "is damaged: no newline found"),
    "a long name": (P + b"c" + b"a" * 300 + b"\nb\n.", r"names 'a{60}...', which is never run"),
    "a forbidden function": (P + b"cos\nsystem\n.", "names 'os.system', which is never run"),
    "a name that is not UTF-8": (P + b"c\xff\nb\n.", r"is damaged: '(ascii|utf-8)' codec can't decode"),
    "a name that is escaped": (P + b"c\\x63ollections\nOrderedDict\n.", "names 'collections.OrderedDict', which is"),
    "a name from the stack": (
        P + text("torch") + text("FloatStorage") + b"\x93.",
        "contains the operation STACK_GLOBAL",
    ),
    "a call of a storage": (P + b"ctorch\nFloatStorage\n(K\x06tR.", "calls a value of type dtype with other arguments"),
    "a call with no tuple": (P + b"ccollections\nOrderedDict\n}R.", "calls _ordered_dict with other arguments"),
    "an OrderedDict of something": (
        P + b"ccollections\nOrderedDict\nN\x85R.",
        "calls _ordered_dict with other arguments",
    ),
    "a reference to text": (P + text("0") + b"Q.", "refers to a value of type str that is not a storage"),
    "a reference without a number": (
        P + storage(numel=b"N") + END,
        "refers to a value of type tuple that is not a storage",
    ),
    "a reference to something else": (
        P + storage(word="module") + END,
        "the storage '0' as 'module', or inconsistently",
    ),
    "two dtypes for a storage": (
        P + b"(" + storage() + storage(kind=b"HalfStorage") + b"t.",
        "describes the storage '0' as 'storage', or inconsistently",
    ),
    "two sizes for a storage": (P + b"(" + storage() + storage(numel=b"K\x07") + b"t.", ", or inconsistently"),
    "a tensor of nothing": (tensor(b""), "calls _rebuild_tensor_v2 with other arguments"),
    "no storage": (tensor(b"NK\x00" + SHAPE + b"\x89" + HOOKS), "calls _rebuild_tensor_v2 with other arguments"),
    "an offset that is true": (tensor(storage() + b"\x88" + SHAPE + b"\x89" + HOOKS), "calls _rebuild_tensor_v2"),
    "a negative offset": (
        tensor(storage() + b"J\xff\xff\xff\xff" + SHAPE + b"\x89" + HOOKS),
        "calls _rebuild_tensor_v2",
    ),
    "fewer strides": (tensor(storage() + b"K\x00K\x02K\x03\x86K\x01\x85\x89" + HOOKS), "calls _rebuild_tensor_v2"),
    "a dict as hooks": (tensor(storage() + b"K\x00" + SHAPE + b"\x89}"), "calls _rebuild_tensor_v2"),
    "hooks": (tensor(storage() + b"K\x00" + SHAPE + b"\x89" + HOOKS + text("h") + b"Ns"), "calls _rebuild_tensor_v2"),
    "more arguments": (tensor(storage() + b"K\x00" + SHAPE + b"\x89" + HOOKS + b"}"), "calls _rebuild_tensor_v2"),
    "a parameter of a storage": (
        a_dict(PARAMETER + storage() + b"\x89" + HOOKS + b"\x87R"),
        "calls _rebuild_parameter",
    ),
    "a parameter with hooks": (
        a_dict(PARAMETER + TENSOR + b"\x89" + HOOKS + text("h") + b"Ns\x87R"),
        "calls _rebuild_parameter with other arguments",
    ),
    "a tensor past the end of its storage": (
        tensor(storage() + b"K\x01" + SHAPE + b"\x89" + HOOKS),
        "a ends at number 7 of a storage of 6",
    ),
    "a storage of less than nothing": (
        tensor(storage(numel=b"J\xff\xff\xff\xff") + b"K\x00" + SHAPE + b"\x89" + HOOKS),
        "a ends at number 6 of a storage of -1",
    ),
}


@table("what", BROKEN)
def test_a_broken_pickle_is_refused_with_what_is_wrong(what: str) -> None:
    data, reason = BROKEN[what]
    with pytest.raises(ValueError, match=reason) as caught:
        read_pickle(data)
    assert type(caught.value) is ValueError


def test_a_value_may_contain_itself() -> None:
    """It does no harm, and is no tensor."""
    data = P + b"}q\x00" + text("a") + b"h\x00s."
    with pytest.raises(ValueError, match="'a' is a dict and must be a tensor"):
        read_pickle(data)


@table("archive", range(len(fuzz_pickle.ARCHIVES)))
def test_every_cut_and_every_lacking_operation_is_refused(archive: int) -> None:
    data = pickle_of(fuzz_pickle.ARCHIVES[archive])
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"^data\.pkl") as caught:
            read_pickle(data[:end])
        assert type(caught.value) is ValueError
    parts = operations(data)
    for i in range(len(parts)):
        fuzz_pickle.run(b"".join(parts[:i] + parts[i + 1 :]))


# ---- malicious ones: what they cost ----------------------------------------------------------------------------------

MANY = 300_000  # more than the limit of operations

MALICIOUS: dict[str, tuple[bytes, str]] = {
    "1: a tuple doubled 60 times as a key": (P + b"})" + b"q\x00h\x00\x86" * 60 + b"Ns.", "builds a tuple of 2"),
    "1: a marked tuple doubled 60 times as a key": (
        P + b")q\x00" + b"".join(b"(h%ch%ctq%c" % (i, i, i + 1) for i in range(60)) + b"}h\x3cNs.",
        "contains a dict with a value of type tuple as a key",
    ),
    "2: BYTEARRAY8 of 3 GB": (
        P + b"\x96" + (3 << 30).to_bytes(8, "little") + b".",
        "is damaged: expected 3221225472 bytes",
    ),
    "2: a text of 4 MB": (
        P + text("a" * (4 << 20)) + END,
        "contains a text of 4194304 characters; the limit is 255 bytes",
    ),
    "3: a state replaces untyped_storage": (
        a_dict(TENSOR + b"}" + text("untyped_storage") + b"Nsb"),
        "sets the state of a value of type PickledTensor",
    ),
    "many marks": (P + b"(" * MANY, "has more than 262144 operations"),
    "many values": (P + b"N" * MANY + END, "has more than 262144 operations"),
    "many dicts": (P + b"}" * MANY, "builds more than 32768 dicts"),
    "many OrderedDicts": (P + b"ccollections\nOrderedDict\nq\0" + b"h\0)R" * (MANY // 4), "more than 32768 dicts"),
    "32000 dicts in each other": (
        P + b"}" + (text("a") + b"}") * 32000 + b"s" * 32000 + END,
        "'a' is a dict and must be a tensor",
    ),
    "10000 marked tuples in each other": (
        P
        + b")q\0"
        + b"".join(b"(j%btr%b" % (i.to_bytes(4, "little"), (i + 1).to_bytes(4, "little")) for i in range(10000))
        + END,
        "does not contain one value",
    ),
    "a tuple of 100000, as the shape of many tensors": (
        P + b"(" + b"K\1" * 100000 + b"tq\0}(" + (REBUILD + b"(" + storage() + b"K\0h\0h\0\x89" + HOOKS + b"tR") * 9,
        "calls _rebuild_tensor_v2 with other arguments",
    ),
    "10000 keys, given as a state many times": (
        P + HOOKS + b"}q\0(" + b"".join(text(f"{i:x}") + b"N" for i in range(10000)) + b"ub" + b"h\0b" * 10000 + b".",
        "sets the state of a value of type OrderedDict",
    ),
}


LONG = {what for what in MALICIOUS if "000" in what or what.startswith(("2: a text", "many"))} - {"many dicts"}


@pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_malicious_pickle_is_refused_with_the_reason_and_takes_little_memory(long: bool) -> None:
    for what in MALICIOUS.keys() & LONG if long else MALICIOUS.keys() - LONG:
        data, reason = MALICIOUS[what]
        tracemalloc.start()
        try:
            with pytest.raises(ValueError, match=reason) as caught:
                read_pickle(data)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 32 << 20, what
        assert str(caught.value).isprintable(), what
        assert len(str(caught.value)) < 400, what


# Of what can be repeated, and how often it is here to begin with.
REPEATED: dict[str, Callable[[int], bytes]] = {
    "remembered": lambda count: P + b"N" + b"".join(b"r" + i.to_bytes(4, "little") for i in range(count)),
    "dicts": lambda count: P + b"}" * count,
    "OrderedDicts": lambda count: P + b"ccollections\nOrderedDict\nq\0" + b"h\0)R" * count,
    "names of a class": lambda count: P + b"ctorch\nHalfStorage\n" * count,
    "keys": lambda count: P + b"}(" + b"".join(text(f"{i:x}") + b"N" for i in range(count)) + b"u",
    "keys one by one": lambda count: P + b"}" + b"".join(text(f"{i:x}") + b"Ns" for i in range(count)),
    "states": lambda count: P + HOOKS + b"}" + text("_metadata") + b"Nsq\0b" + b"h\0b" * count,
    "uses of a long tuple": lambda count: P + b"(" + b"N" * count + b"tq\0" + b"(h\0t" * count,
    "storages": lambda count: P + storage() + storage() * count,
    "tensors": lambda count: P + TENSOR * count,
    "dicts in dicts": lambda count: P + b"}" + (text("a") + b"}") * count + b"s" * count,
}


@table("what", REPEATED)
def test_the_work_grows_as_the_length_does(what: str) -> None:
    def calls(data: bytes) -> int:
        made = 0

        def count(_frame: object, event: str, _argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            with pytest.raises(ValueError, match=r"^data\.pkl"):
                read_pickle(data)
        finally:
            sys.setprofile(None)
        return made

    once, twice = calls(REPEATED[what](200)), calls(REPEATED[what](400))
    assert once > 200
    assert twice < 2.1 * once


def test_the_largest_model_that_is_read_stays_below_the_limit() -> None:
    """512 layers are the most that a config may have; a parameter of a state dict takes the most operations."""
    few, many = (
        len(operations(pickle_of(saved({f"{i}": torch.nn.Parameter(torch.ones(1)) for i in range(count)}))))
        for count in (10, 110)
    )
    assert few + (many - few) / 100 * (512 * 9 + 3) < MAX_OPERATIONS
