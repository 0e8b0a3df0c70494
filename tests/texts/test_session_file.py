"""A session continues from its file as if it had never been saved; other files are rejected with a reason."""

import hashlib
import json
import os
import pickle
import re
import resource
import signal
import stat
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from fakes import Bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny import tiny_args, tiny_model
from torch import Tensor

from llama.kv_cache import KVCache, cache_kind
from llama.model import Transformer
from llama.ops import HAS_ONEDNN
from llama.quant.layers import quantize_layers, quantized_weights
from llama.request import Options
from llama.texts.digest import Digest
from llama.texts.origin import rounding_digest
from llama.texts.session import Session

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
THEIRS = cache_kind(f"{EXAMPLES}/every_second.py:every_second:8")
ARGS = tiny_args(vocab_size=258, head_dim=32, max_seq_len=160)
TEXT = "a text that is long enough to fill a group, and to leave a window of twenty"
GREEDY: Options = {"temperature": 0.0}
SAMPLED: Options = {"temperature": 1.0, "seed": 3, "logprobs": True}


def made_of(*, dtype: torch.dtype = torch.float64, **changes: Any) -> Transformer:
    return tiny_model(replace(ARGS, **changes), dtype=dtype)


def made(kv_cache: str = "static", *, text: str = "", **changes: Any) -> tuple[Transformer, Session]:
    """Return a model and a session of it that was fed `text`."""
    model = made_of(**changes)
    session = model.session(Bytes(), kv_cache=kv_cache)
    if text:
        session.feed(text)
    return model, session


def text_of(session: Session) -> str:
    return session.tokenizer.decode(session.tokens)


def reloaded(session: Session, path: Path) -> Session:
    session.save(path)
    loaded = session.model.load_session(path, Bytes())
    assert isinstance(loaded, Session)
    return loaded


# ---- going on --------------------------------------------------------------------------------------------------------


def fed(session: Session) -> None:
    session.feed(TEXT)


def generated(session: Session) -> None:
    """The newest token is not fed yet."""
    fed(session)
    session.generate(9, **SAMPLED)


def rewound(session: Session) -> None:
    generated(session)
    session.rewind(session.position - 5)


def forked(session: Session) -> None:
    """Its cache is shared with a fork that continues."""
    fed(session)
    session.append(" and")
    session.fork().append(" another end")


def short(session: Session) -> None:
    session.feed("ab")


# Each kind with a history of its own.
HISTORIES: dict[str, Callable[[Session], None]] = {
    **{"static": short, "concat": fed, "paged": forked, "int8": rewound, "int4": generated, "window:20+3": fed},
    **{THEIRS: generated, "h2o:12": rewound, "adakv:0.5": generated},
}
DEFAULT = ("paged", "int8", THEIRS)


@pytest.mark.parametrize(
    ("kv_cache", "history"),
    [
        pytest.param(kind, history, marks=[pytest.mark.slow] * (kind not in DEFAULT))
        for kind, history in HISTORIES.items()
    ],
)
def test_every_kind_continues_after_loading(kv_cache: str, history: Callable[[Session], None], tmp_path: Path) -> None:
    _, kept = made(kv_cache)
    history(kept)
    before = kept.fed
    loaded = reloaded(kept, tmp_path / "session")
    assert (loaded.tokens, loaded.kv_cache) == (kept.tokens, kv_cache)
    assert (loaded.max_seq_len, loaded.fed) == (160, 0)
    for goes_on in (
        *(lambda session: session.generate(8, **SAMPLED), lambda session: session.append(" more")),
        *(lambda session: session.generate(8, **GREEDY), lambda session: session.feed(session.tokens[:-4])),
        lambda session: session.generate(12, **SAMPLED),
    ):
        assert goes_on(loaded) == goes_on(kept)
    assert loaded.tokens == kept.tokens
    assert loaded.fed == kept.fed - before, "as many tokens as are fed to one that was never saved"


def test_the_logits_that_follow_a_text_need_not_be_computed_again(tmp_path: Path) -> None:
    model, session = made(text=TEXT)
    loaded = reloaded(session, tmp_path / "session")
    assert torch.equal(loaded.logits, session.logits)
    assert loaded.feed(TEXT) == loaded.fed == 0
    loaded.fork().generate(1, **GREEDY)
    assert model.generate_tokens([[1]], 3, prefix=loaded, **GREEDY) == model.generate_tokens(
        [[1]], 3, prefix=session, **GREEDY
    )


def test_a_session_without_a_text_and_one_without_a_cache_are_kept_too(tmp_path: Path) -> None:
    model, session = made()
    assert reloaded(session, tmp_path / "session").tokens == []
    session.feed("abc")
    session.rewind(0)
    assert reloaded(session, tmp_path / "session").nbytes == 0
    model.kv_caching = False
    session.feed(TEXT)
    loaded, before = reloaded(session, tmp_path / "session"), session.fed
    assert loaded.generate(5, **GREEDY) == session.generate(5, **GREEDY)
    assert (loaded.nbytes, loaded.fed) == (0, session.fed - before)


def test_keys_of_another_mode_are_not_saved(tmp_path: Path) -> None:
    model, session = made(dtype=torch.float32, text=TEXT)
    model.exact = True
    loaded = reloaded(session, tmp_path / "session")
    assert (loaded.tokens, loaded.nbytes) == (session.tokens, 0)


@pytest.mark.parametrize("kv_cache", ["paged", "int8", THEIRS])
def test_the_caller_may_be_in_inference_mode_or_not(kv_cache: str, tmp_path: Path) -> None:
    _, session = made(kv_cache)
    with torch.inference_mode():
        session.feed(TEXT)
        loaded = reloaded(session, tmp_path / "session")
    assert loaded.append(" more") == 5


@pytest.mark.parametrize("kv_cache", ["poisoned", "poisoned_concat", "paged", "int8", "window:20+3"])
def test_only_the_cached_positions_are_saved(kv_cache: str, tmp_path: Path) -> None:
    """Unwritten buffers may have private contents of earlier memory."""
    path = tmp_path / "session"
    _, session = made(kv_cache, text=TEXT)
    for more in " and":
        session.append(more)  # so that kinds that double have unused capacity
    session.save(path)
    held = safetensors.torch.load_file(path)
    assert all(tensor.isfinite().all() for tensor in held.values())
    largest = max(session.nbytes, 0)
    assert path.stat().st_size < largest + 8 * session.position + 8 * 258 + 4000
    length = session.position - 3
    session.rewind(length)
    session.save(path)
    if KVCache.named(kv_cache).lossless:
        assert safetensors.torch.load_file(path)["layers.1.keys"].shape == (1, length, 2, 32)


def test_ids_alone_need_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "session"
    model, session = made(text=TEXT)
    session.save(path)
    loaded = model.load_session(path)
    assert loaded.append([97, 98]) == 2
    loaded.rewind(loaded.position - 1)
    for asks in (
        *(lambda: text_of(loaded), lambda: loaded.feed("text"), lambda: loaded.feed(""), lambda: loaded.append("x")),
        *(lambda: loaded.generate(3), lambda: loaded.stream(3), lambda: loaded.fork().append("x")),
    ):
        with pytest.raises(ValueError, match=r"loaded without a tokenizer.*model.load_session\(path, tokenizer\)"):
            asks()
    assert model.generate_tokens([[1]], 3, prefix=loaded)[0]
    loaded.save(path)
    assert text_of(model.load_session(path, Bytes())) == TEXT_WITH_BOS + "a"
    with pytest.raises(ValueError, match="another tokenizer"):
        model.load_session(path, Bytes(adds_bos=False))


TEXT_WITH_BOS = "<bos>" + TEXT


def test_a_model_of_other_limits_loads_what_fits(tmp_path: Path) -> None:
    path = tmp_path / "session"
    _, session = made(text=TEXT)
    session.save(path)
    for limit in (100, 300):
        assert made_of(max_seq_len=limit).load_session(path, Bytes()).max_seq_len == min(limit, 160)


# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_file_is_safetensors_that_only_its_owner_may_read(tmp_path: Path) -> None:
    path = tmp_path / "session.safetensors"
    path.write_text("the old one")
    path.chmod(0o644)
    _, session = made(text="abc")
    session.save(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]
    held = safetensors.torch.load_file(path)
    assert held["ids"].tolist() == session.tokens
    assert set(held) == {"ids", "logits", *(f"layers.{i}.{name}" for i in (0, 1) for name in ("keys", "values"))}
    assert all(span["data_offsets"][0] % 8 == 0 for name, span in parts(path)[0].items() if name != "__metadata__")


def test_a_save_that_fails_leaves_the_old_file_whole(tmp_path: Path) -> None:
    path = tmp_path / "session"
    model, session = made(text="abc")
    session.save(path)
    before = path.read_bytes()
    session.append(TEXT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(ValueError, match=f"cannot be saved as {path}: .*File too large"):
            session.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
    assert text_of(model.load_session(path, Bytes())) == "<bos>abc"


def test_a_note_that_no_session_could_be_loaded_with_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "session"
    model, session = made(text="abc")
    session.note = "{" * (1 << 17) + "[,]" * (1 << 20)
    session.save(path)
    assert model.load_session(path, Bytes()).note == session.note
    before = path.read_bytes()
    session.note = "x" * (1 << 24)
    with pytest.raises(ValueError, match=r"header .* 1677\d+ bytes, and the limit is 16777216; shorten session.note"):
        session.save(path)
    for note in (5, {"a": 1}, {1}, True):
        session.note = note  # type: ignore[assignment]
        with pytest.raises(ValueError, match=r"^session.note=.* must be a text or None$"):
            session.save(path)
    assert path.read_bytes() == before


def test_impossible_paths_are_refused_in_one_sentence(tmp_path: Path) -> None:
    _, session = made(text="abc")
    os.mkfifo(tmp_path / "pipe")
    for path, why in (
        (tmp_path, "Is a directory"),
        (tmp_path / "pipe", "it is a named pipe, not a regular file; give another name"),
        (Path("/proc/session"), "No such file or directory|Permission denied|Operation not permitted"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(ValueError, match=f"cannot be saved as {path}: ({why})$"):
            session.save(path)
    assert list(tmp_path.iterdir()) == [tmp_path / "pipe"]
    assert (tmp_path / "pipe").is_fifo()
    session.drop()
    with pytest.raises(ValueError, match="dropped"):
        session.save(tmp_path / "session")


# ---- refusals --------------------------------------------------------------------------------------------------------

Facts = dict[str, Any]
Tensors = dict[str, Tensor]


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a file's header and the bytes behind it."""
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:end]), raw[end:]


def put(path: Path, header: object, rest: bytes) -> None:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + rest)


def digest_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def forge(path: Path, change: Callable[[Facts, Tensors], object]) -> None:
    """Change the file and update its digests."""
    metadata, tensors = parts(path)[0]["__metadata__"], safetensors.torch.load_file(path)
    facts = json.loads(metadata["session"])
    change(facts, tensors)
    digest = Digest()
    for name in sorted(tensors):
        digest.take(name, tensors[name])
    text = json.dumps({**facts, "tensors": digest.hex()})
    safetensors.torch.save_file(tensors, path, {**metadata, "session": text, "digest": digest_of(text)})


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Transformer, Path]:
    """Return a model and the file of one of its sessions."""
    model, session = made(text=TEXT)
    session.save(tmp_path / "session")
    return model, tmp_path / "session"


def refusal(model: Transformer, path: Path, tokenizer: Bytes | None = None) -> str:
    """Return the sentence with which a file is refused, "" if it is loaded."""
    try:
        model.load_session(path, tokenizer)
    except ValueError as error:
        said = str(error)
        assert str(path) in said
        assert said.isprintable()
        assert len(said) < 500 + len(str(path))
        assert model.cache is None
        return said
    return ""


def refused(model: Transformer, path: Path, why: str, tokenizer: Bytes | None = None) -> None:
    assert re.search(why, refusal(model, path, tokenizer))


def test_a_file_that_was_written_by_the_library_of_the_format_is_read(saved: tuple[Transformer, Path]) -> None:
    model, path = saved
    forge(path, lambda facts, tensors: None)
    assert text_of(model.load_session(path, Bytes())) == TEXT_WITH_BOS


def changed(change: Callable[[Transformer], object]) -> Transformer:
    model = made_of()
    change(model)
    return model


def swap_weights(model: Transformer) -> None:
    weight = model.blocks[0].attention_norm.weight.data
    weight[:2] = weight[:2].flip(0)


def round_activations(model: Transformer) -> None:
    for module in model.blocks[1].modules():
        module.activations = 8  # as of packed layers


OTHER_MODELS: list[tuple[Callable[[], Transformer], str]] = [
    (lambda: changed(lambda model: model.blocks[1].attention.wo.weight.data[3, 5].add_(1e-7)), "other weights"),
    (lambda: changed(swap_weights), "other weights"),
    (
        lambda: changed(lambda model: setattr(model, "exact", True)),
        "exact was False, and is True here; set model.exact",
    ),
    (lambda: changed(round_activations), "activations was 16, and is 8 here"),
    (lambda: made_of(n_layers=3), "n_layers was 2, and is 3 here"),
    (lambda: made_of(dtype=torch.float32), "dtype was 'torch.float64', and is 'torch.float32' here; load the model in"),
    (lambda: made_of(rope_theta=5e5), "rope_theta was 10000.0, and is 500000.0 here"),
    (lambda: made_of(rope_theta=None), "rope_theta was 10000.0, and is None here"),
    (lambda: made_of(vocab_size=300), "vocab_size was 258, and is 300 here"),
    (lambda: made_of(max_seq_len=40), "76 tokens, more than max_seq_len=40"),
]


def test_another_model_refuses_it(saved: tuple[Transformer, Path]) -> None:
    said = [(refusal(make(), saved[1]), why) for make, why in OTHER_MODELS]
    assert [(found, why) for found, why in said if not re.search(why, found)] == []


def test_a_mode_is_refused_both_ways_and_so_is_another_machine(tmp_path: Path) -> None:
    path = tmp_path / "session"
    model, session = made(dtype=torch.float32)
    model.exact = True
    session.feed("abc")
    session.save(path)
    forge(path, lambda facts, tensors: facts.update(place="another machine"))
    refused(model, path, "place was 'another machine', and is 'torch .*' here; .* feed the text again")
    session.save(path)
    model.exact = False
    refused(model, path, "exact was True, and is False here")


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # of the flags' other switches
@pytest.mark.skipif(not HAS_ONEDNN, reason="needs two libraries that multiply")
def test_in_exact_mode_products_by_another_library_are_refused(tmp_path: Path) -> None:
    model, session = made(dtype=torch.bfloat16)
    model.exact = True
    session.feed("abc")
    session.save(tmp_path / "session")
    model.load_session(tmp_path / "session", Bytes())
    here = rounding_digest(model.parameters())
    with torch.backends.mkldnn.flags(enabled=False):
        if rounding_digest(model.parameters()) == here:
            pytest.skip("both libraries round alike on this CPU")  # in bf16, without AVX-512
        refused(model, tmp_path / "session", "the bits may differ here; feed the text again")


def test_another_tokenizer_is_refused(saved: tuple[Transformer, Path]) -> None:
    class Other(Bytes):
        def decode(self, ids: Any) -> str:
            return super().decode(ids).upper()

    class Named(Bytes):
        def fingerprint(self) -> str:
            return "a name of its own"

    for tokenizer in (Other(), Named(), Bytes(adds_bos=False)):
        refused(*saved, "another tokenizer", tokenizer)
    model, path = saved
    session = model.session(Named())
    session.feed("abc")
    session.save(path)
    assert text_of(model.load_session(path, Named())) == "<bos>abc"
    refused(model, path, "another tokenizer", Bytes())


def test_a_kind_that_is_not_known_is_named_and_no_code_is_run(saved: tuple[Transformer, Path], tmp_path: Path) -> None:
    class Gone(KVCache.kinds["static"], kind="gone"):  # type: ignore[misc]
        pass

    model, path = saved
    session = model.session(Bytes(), kv_cache="gone")
    session.feed("abc")
    session.save(path)
    del KVCache.kinds["gone"]
    refused(model, path, "kv_cache='gone', a kind that is not known here; register it first")
    code = tmp_path / "evil.py"
    code.write_text(f"open({str(tmp_path / 'was here')!r}, 'w')\n")
    for kind in (f"{code}:static", f"static:{code}:x"):
        forge(path, lambda facts, tensors, kind=kind: facts.update(kv_cache=kind))
        refused(model, path, "names the code of its cache")
    assert not (tmp_path / "was here").exists()


def test_a_kind_whose_file_was_edited_since_is_refused(saved: tuple[Transformer, Path], tmp_path: Path) -> None:
    model, path = saved
    file = tmp_path / "mine.py"
    file.write_text("from llama.kv_cache import StaticCache\n\n\nclass Mine(StaticCache, kind='mine of a file'): ...\n")
    session = model.session(Bytes(), kv_cache=f"{file}:mine of a file")
    session.feed("abc")
    session.save(path)
    file.write_text(file.read_text() + "# edited\n")
    session.save(path)  # its keys are those of the code that ran
    assert model.load_session(path).tokens == session.tokens
    model.session(Bytes(), kv_cache=f"{file}:mine of a file")  # runs the edited file
    refused(model, path, "kv_cache='mine of a file', whose file was edited since; feed the text again")


def test_a_file_of_heads_of_a_session_is_read_with_limits(saved: tuple[Transformer, Path], tmp_path: Path) -> None:
    (tmp_path / "deep.json").write_text("[" * 30_000 + "]" * 30_000)
    os.mkfifo(tmp_path / "pipe.json")
    for name, why in (
        ("deep", "nested too deeply"),
        ("pipe", "a named pipe"),
        ("x" * 3000, "cannot be loaded here: kv_cache='duo-att"),
    ):
        kind = f"duo-attention:{tmp_path / name}.json"
        forge(saved[1], lambda facts, tensors, kind=kind: facts.update(kv_cache=kind))
        refused(*saved, why)


def test_a_window_of_another_size_is_refused(tmp_path: Path) -> None:
    _, session = made("window")  # as many positions as max_seq_len
    session.feed(TEXT)
    session.save(tmp_path / "session")
    refused(made_of(max_seq_len=100), tmp_path / "session", "160 positions .* stores 100 here")
    assert made_of(max_seq_len=200).load_session(tmp_path / "session").position == session.position


def test_paths_that_are_no_files_are_refused(tmp_path: Path, saved: tuple[Transformer, Path]) -> None:
    model, _ = saved
    refused(model, tmp_path / "nothing", "No such file")
    refused(model, tmp_path, "it is a directory, not a regular file")
    os.mkfifo(tmp_path / "pipe")
    refused(model, tmp_path / "pipe", "it is a named pipe, not a regular file")


Edit = Callable[[Path], object]


def by_bytes(change: Callable[[bytes], bytes]) -> Edit:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def by_header(change: Callable[[dict[str, Any]], object]) -> Edit:
    def edit(path: Path) -> None:
        header, rest = parts(path)
        change(header)
        put(path, header, rest)

    return edit


def by_facts(**to: Any) -> Edit:
    """Return an edit that changes facts or, if they are None, takes them away, and updates the digests."""

    def change(facts: Facts, _: Tensors) -> None:
        facts.update(to)
        for name in [name for name, fact in to.items() if fact is None]:
            del facts[name]

    return partial(forge, change=change)


def by_tensors(**to: Tensor) -> Edit:
    return partial(forge, change=lambda facts, tensors: tensors.update(to))


def exchange(header: dict[str, Any]) -> None:
    keys = "layers.0.keys", "layers.1.keys"
    header.update(zip(keys, [header[name] for name in reversed(keys)], strict=True))


EVIL = "\033[2J" * 1200
NO_SESSIONS = (b"", b"\0" * 7, b"\0" * 4096, b"\xff" * 4096, pickle.dumps({"ids": [1, 2]}), os.urandom(999))
HEADERS = (b"[" * 100_000, b'{"a": 1, "a": 2}', b'{"a": ' + b"9" * 5000 + b"}", b"[]", b"7", b"null", b"{}", b"\xff")
OTHER_FACTS: tuple[dict[str, Any], ...] = (
    *({"held": -1}, {"held": True}, {"written": 1}, {"place": None}, {"place": [1] * 5000}, {"more": 1}),
    *({"sizes": [1]}, {"exact": EVIL}),
)
CUTS: tuple[Callable[[bytes], bytes], ...] = (lambda raw: raw[:-1], lambda raw: raw[:-8], lambda raw: raw + b"more")
MALFORMED: list[tuple[Edit, str]] = [
    *((by_bytes(lambda _, content=content: content), "not a session") for content in NO_SESSIONS),  # type: ignore[misc]
    *((partial(put, header=header, rest=b""), "not a session") for header in (*HEADERS, b'{"__metadata__": 3}')),
    (by_bytes(lambda _: (2**40).to_bytes(8, "little") + b"{}"), "not a session"),
    *((by_bytes(lambda raw, n=n: raw[:n]), "not a session, or is") for n in (3000, 1000, 9, 8, 1)),  # type: ignore[misc]
    (by_bytes(lambda raw: raw[: len(raw) // 2]), "not a session, or is damaged"),
    *((by_bytes(change), "not a session, or is damaged: .*file not fully covered") for change in CUTS),
    (lambda path: safetensors.torch.save_file({"ids": torch.zeros(3)}, path), "a safetensors file, but not a session"),
    (by_header(lambda header: header.update(__metadata__={"format": "pt"})), "a safetensors file, but not a session"),
    (
        by_header(lambda header: header["__metadata__"].update(version="2")),
        "version '2', this library reads 1;",
    ),
    (by_header(lambda header: header["__metadata__"].pop("digest")), "is damaged"),
    (by_header(lambda header: header["__metadata__"].update(session="{}", digest=digest_of("{}"))), "is damaged"),
    (by_header(lambda header: header.update({"layers.0.kez": header.pop("layers.0.keys")})), "is damaged"),
    (by_header(lambda header: header.pop("layers.0.keys")), "is damaged"),
    (by_header(exchange), "is damaged"),
    # With right digests.
    *((by_facts(**facts), "damaged: its description") for facts in OTHER_FACTS),
    (by_facts(held=70), "keys of a cache should be"),
    (by_facts(max_seq_len=0), "must be from 1"),
    (by_facts(dtype=EVIL), r"dtype was '\\x1b\[2J"),
    (by_facts(kv_cache="window:20+3"), "ends|stored None positions"),
    (by_facts(kv_cache="static:7"), "takes no parameters"),
    (by_facts(kv_cache=f"window:{EVIL}"), "kv_cache='window:"),
    (by_facts(kv_cache=EVIL), "a kind that is not known"),
    (partial(forge, change=lambda facts, _: facts["sizes"].update(experts=8)), "experts was 8, and is None here"),
    (by_tensors(ids=torch.full((76,), 258)), "ids from .* to 258; the model knows 0 to 257"),
    (by_tensors(ids=torch.full((76,), -1)), "ids from -1 to .*; the model knows"),
    (by_tensors(ids=torch.ones(76, dtype=torch.int32)), "damaged: its ids"),
    (by_tensors(logits=torch.zeros(2, 258)), "damaged: its logits"),
    (by_tensors(more=torch.zeros(1)), "damaged: 'more'"),
    (by_tensors(**{"layers.0": torch.zeros(1)}), "damaged: 'layers.0'"),
    (by_tensors(**{"layers.1.more": torch.zeros(1)}), "more of a cache should be absent"),
    (by_tensors(**{"layers.0.values": torch.zeros(1, 76, 1, 64).double()}), "values"),
    (by_tensors(**{"layers.0.values": torch.zeros(1, 76, 2, 32)}), "values"),  # two dtypes
]


def test_malformed_files_and_forgeries_are_refused(saved: tuple[Transformer, Path]) -> None:
    model, path = saved
    raw, said = path.read_bytes(), []
    for number, (edit, why) in enumerate(MALFORMED):
        path.write_bytes(raw)
        edit(path)
        if not re.search(why, found := refusal(model, path)):
            said.append(f"number {number} should say {why}, and says {found!r}")
    assert said == []


@pytest.mark.parametrize("kv_cache", ["int8", "window:20+3"])
def test_counts_that_do_not_fit_the_tensors_are_refused(kv_cache: str, tmp_path: Path) -> None:
    model, session = made(kv_cache, text=TEXT)
    session.save(path := tmp_path / "session")
    raw = path.read_bytes()
    for change in (
        lambda held: held.update({"layers.0.ends": torch.tensor([75])}),
        lambda held: held.update({"layers.0.ends": torch.tensor([76, 76])}),
        lambda held: held.update({"layers.0.ends": torch.tensor([76.0])}),
        lambda held: held.pop("layers.0.ends"),
        lambda held: held.pop("layers.1.keys"),
        lambda held: held.update({"layers.1.values": held["layers.1.values"].float()}),
        lambda held: held.update({"layers.1.values": held["layers.1.values"][:, 1:].contiguous()}),
    ):
        path.write_bytes(raw)
        forge(path, lambda facts, tensors, change=change: change(tensors))  # type: ignore[misc]
        with pytest.raises(ValueError, match=r"should be|must be the ends|has dropped"):
            model.load_session(path, Bytes()).append("x")


def test_a_damaged_file_is_refused_or_is_the_very_same_session(tmp_path: Path) -> None:
    model, files, path = made()[0], {}, tmp_path / "session"
    for kind in ("static", "int4", "window:20+3", THEIRS):
        session = model.session(Bytes(), kv_cache=kind)
        session.feed(TEXT)
        session.generate(5, **GREEDY)
        session.save(path)
        files[kind] = path.read_bytes(), session

    @settings(max_examples=100, suppress_health_check=list(HealthCheck))
    @given(kind=st.sampled_from(sorted(files)), damage=st.data())
    def check(kind: str, damage: st.DataObject) -> None:
        raw, session = files[kind]
        changed = bytearray(raw)
        header = 8 + int.from_bytes(raw[:8], "little")
        where = damage.draw(st.sampled_from([(0, 8), (8, header), (8, header), (header, len(raw))]), "part")
        for _ in range(damage.draw(st.integers(1, 3), "flips")):
            changed[damage.draw(st.integers(where[0], where[1] - 1))] ^= 1 << damage.draw(st.integers(0, 7))
        if damage.draw(st.booleans(), "cut"):
            del changed[damage.draw(st.integers(0, len(changed))) :]
        path.write_bytes(changed)
        try:
            loaded = model.load_session(path, Bytes())
        except ValueError:
            return
        assert (loaded.tokens, loaded.kv_cache, loaded.max_seq_len) == (session.tokens, session.kv_cache, 160)
        assert loaded.fork().generate(5, **SAMPLED) == session.fork().generate(5, **SAMPLED)

    check()


# ---- int8 weights ----------------------------------------------------------------------------------------------------


def int8_model(dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(tiny_args(vocab_size=258, tied_head=True, max_seq_len=160)).requires_grad_(False)
    for norm in (part for name, part in model.named_parameters() if "norm" in name):
        norm.fill_(1)
    quantize_layers(model, dtype)
    for name, weight in quantized_weights(model).items():
        weight.fill(0, torch.randn(*weight.shape, generator=torch.Generator().manual_seed(len(name))))
    return model.to(dtype)


def test_int8_weights_and_their_activations_dtype_are_distinguished(tmp_path: Path) -> None:
    path = tmp_path / "session"
    model = int8_model()
    session = model.session(Bytes())
    session.feed("abc")
    session.save(path)
    assert text_of(model.load_session(path, Bytes())) == "<bos>abc"
    assert text_of(int8_model().load_session(path, Bytes())) == "<bos>abc"
    refused(int8_model(torch.bfloat16), path, "dtype was 'torch.float32', and is 'torch.bfloat16' here")
    weight = next(iter(quantized_weights(model).values()))
    weight.codes.view(-1)[5] ^= 1
    refused(model, path, "other weights")


def test_a_model_that_several_processes_share_is_refused(saved: tuple[Transformer, Path]) -> None:
    model, path = saved

    class Two(type(model.ranks)):  # type: ignore[misc]
        size = 2

    session = model.session(Bytes())
    model.ranks = Two()
    for call in (partial(session.save, path), partial(model.load_session, path)):
        with pytest.raises(ValueError, match="2 processes share"):
            call()
