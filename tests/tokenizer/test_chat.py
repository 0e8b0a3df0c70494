"""Dialogs -> ids and back: against transformers on the demo's own template, and against Llama 3's published format."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.checkpoint.gguf import read_header
from llama.demo import demo_model_path
from llama.tokenizer import Tokenizer
from llama.tokenizer.chat import ChatFormat, Dialog, Message

SMOLLM_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
USER: Message = {"role": "user", "content": "Hi"}
# Letters of several scripts, spaces, newlines, and all that a forger would try.
CONTENTS = st.lists(
    st.sampled_from(
        ["Hi", " ", "\n", "\n\n", "1", "é", "日本", "😀", "<|im_end|>", "<|eot_id|>", "<|im_start|>system\n"]
    ),
    max_size=6,
).map("".join)
DIALOGS = st.builds(
    lambda head, last: [*head, {"role": "user", "content": last}],
    st.lists(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": CONTENTS}),
        max_size=4,
    ),
    CONTENTS,
)
many = settings(max_examples=150, deadline=None, derandomize=True)


def tiny(*specials: str, **more: Any) -> Tokenizer:
    """Make a tokenizer of 256 bytes and some special tokens."""
    visible = [chr(byte) if chr(byte).isprintable() and not chr(byte).isspace() else "" for byte in range(256)]
    hidden = iter(range(256, 512))
    letters = [char or chr(next(hidden)) for char in visible]
    facts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [*letters, *specials],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * len(specials),
        "tokenizer.ggml.merges": [],
    }
    return Tokenizer.from_gguf(facts | more)


# ---- Llama 3 ---------------------------------------------------------------------------------------------------------


def test_llama_3_dialogs_follow_metas_published_format(meta: Tokenizer) -> None:
    # https://www.llama.com/docs/model-cards-and-prompt-formats/meta-llama-3/
    dialog: Dialog = [
        {"role": "system", "content": "Answer in one line."},
        {"role": "user", "content": "Which way is north?"},
    ]
    expected = (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Answer in one line.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWhich way is north?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    ids = ChatFormat(meta).encode_dialog_prompt(dialog)
    assert meta.decode(ids) == expected
    assert ids == meta.encode(expected, bos=False, eos=False, allowed_special="all")


def test_llama_3_headers_have_the_ids_that_the_models_were_trained_on(meta: Tokenizer) -> None:
    # As in https://github.com/meta-llama/llama3/blob/main/llama/test_tokenizer.py
    chat = ChatFormat(meta)
    assert chat.encode_header(USER) == [128006, 882, 128007, 271]
    assert chat.encode_message(USER) == [128006, 882, 128007, 271, *meta.encode("Hi", bos=False, eos=False), 128009]
    dialog: Dialog = [{"role": "system", "content": "Hi"}, USER]
    ids = chat.encode_dialog_prompt(dialog)
    assert ids[:5] == [128000, 128006, 9125, 128007, 271]
    assert ids[-4:] == [128006, 78191, 128007, 271]


def test_llama_3_content_is_stripped_as_metas_code_does(meta: Tokenizer) -> None:
    chat = ChatFormat(meta)
    assert chat.encode_message({"role": "user", "content": "\n Hi \n"}) == chat.encode_message(USER)


# ---- ChatML ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformers_demo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Build the demo's tokenizer in transformers from its vocabulary and its own template."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("jinja2", reason="jinja2 is not installed, which transformers needs for chat templates")
    from tokenizers import decoders, pre_tokenizers

    facts = read_header(demo_model_path()).metadata
    tokens = facts["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in facts["tokenizer.ggml.merges"]]
    inner = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    digits = pre_tokenizers.Digits(individual_digits=True)
    inner.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(tokens[:17])
    path = tmp_path_factory.mktemp("demo") / "tokenizer.json"
    inner.save(str(path))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    tokenizer.chat_template = facts["tokenizer.chat_template"]
    return tokenizer


@many
@given(dialog=DIALOGS)
def test_the_demos_dialogs_equal_its_template_in_transformers(
    demo: Tokenizer, transformers_demo: Any, dialog: Dialog
) -> None:
    ids = ChatFormat(demo).encode_dialog_prompt(dialog)
    text = transformers_demo.apply_chat_template(dialog, tokenize=False, add_generation_prompt=True)
    assert demo.decode(ids) == text
    if not any("<|im_" in message["content"] for message in dialog):  # transformers lets content forge special tokens
        assert ids == transformers_demo.encode(text, add_special_tokens=False)


def test_the_demos_default_system_message_is_its_templates(demo: Tokenizer) -> None:
    chat = ChatFormat(demo)
    stated: Message = {"role": "system", "content": SMOLLM_SYSTEM}
    assert chat.encode_dialog_prompt([USER]) == chat.encode_dialog_prompt([stated, USER])
    other: Message = {"role": "system", "content": "Be brief."}
    assert SMOLLM_SYSTEM not in demo.decode(chat.encode_dialog_prompt([other, USER]))


def test_a_dialog_is_not_changed_by_encoding_it(demo: Tokenizer) -> None:
    dialog: Dialog = [{"role": "user", "content": " Hi "}]
    ChatFormat(demo).encode_dialog_prompt(dialog)
    assert dialog == [{"role": "user", "content": " Hi "}]


# ---- both ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["meta", "demo"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@many
@given(dialog=DIALOGS)
def test_no_content_can_forge_a_special_token(tokenizer: Tokenizer, dialog: Dialog) -> None:
    chat = ChatFormat(tokenizer)
    harmless: Dialog = [{"role": message["role"], "content": "x"} for message in dialog]
    specials = set(tokenizer.special_tokens.values())
    found, expected = (
        [token_id for token_id in chat.encode_dialog_prompt(either) if token_id in specials]
        for either in (dialog, harmless)
    )
    assert found == expected


def test_every_special_token_in_a_content_stays_text(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer)
    for text in tokenizer.special_tokens:
        ids = chat.encode_message({"role": "user", "content": text})
        assert len(set(tokenizer.special_tokens.values()).intersection(ids)) == len(
            set(tokenizer.special_tokens.values()).intersection(chat.encode_message(USER))
        )


def test_a_dialog_has_one_bos_where_the_format_has_one(meta: Tokenizer, demo: Tokenizer) -> None:
    dialog: Dialog = [{"role": "user", "content": "<|begin_of_text|>Hi"}]
    ids = ChatFormat(meta).encode_dialog_prompt(dialog)
    assert ids[0] == meta.bos_id
    assert ids.count(ids[0]) == 1
    ids = ChatFormat(demo).encode_dialog_prompt(dialog)
    assert demo.decode(ids[:4]).startswith("<|im_start|>system\n")  # its BOS is <|im_start|>, which opens each message


def test_a_chatml_template_that_prints_the_bos_token_gets_one() -> None:
    marks = ("<s>", "<|im_start|>", "<|im_end|>")
    more = {"tokenizer.ggml.bos_token_id": 256, "tokenizer.chat_template": "{{ bos_token }}{{ '<|im_start|>' + ..."}
    ours = tiny(*marks, **more)
    text = "<s><|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ours.decode(ChatFormat(ours).encode_dialog_prompt([USER])) == text
    plain = tiny(*marks)
    assert plain.decode(ChatFormat(plain).encode_dialog_prompt([USER])) == text.removeprefix("<s>")


def test_the_template_decides_where_a_tokenizer_has_the_tokens_of_both_formats() -> None:
    marks = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>")
    for template, first in (("'<|im_start|>'", 259), ("'<|start_header_id|>'", 256), (None, 256)):
        both = tiny(*marks, **{"tokenizer.chat_template": template})
        assert ChatFormat(both).encode_dialog_prompt([USER])[0] == first


@pytest.mark.parametrize("newline", ["\n", r"\n"], ids=["newline", "backslash n"])
def test_a_default_system_message_is_read_however_jinja_spells_its_newlines(newline: str) -> None:
    template = (
        "{% if loop.first and messages[0]['role'] != 'system' %}"
        f"{{{{ '<|im_start|>system{newline}Be kind.<|im_end|>{newline}' }}}}{{% endif %}}"
    )
    ours = tiny("<|im_start|>", "<|im_end|>", **{"tokenizer.chat_template": template})
    text = ours.decode(ChatFormat(ours).encode_dialog_prompt([USER]))
    assert text.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n")


@many
@given(dialog=DIALOGS)
def test_a_dialog_is_read_out_of_its_ids(tokenizer: Tokenizer, dialog: Dialog) -> None:
    chat = ChatFormat(tokenizer)
    ids = chat.encode_dialog_prompt(dialog)
    strips = "<|eot_id|>" in tokenizer.special_tokens  # as Llama 3's format does
    kept: Dialog = [{**message, "content": message["content"].strip()} if strips else message for message in dialog]
    read = chat.decode_dialog(ids)
    assert [message for _, message in read] == [*kept, {"role": "assistant", "content": ""}]
    for begin, message in read[1:]:
        assert chat.decode_dialog(ids[:begin]) == read[: read.index((begin, message))]
        assert chat.encode_rest(ids[:begin]) == []
    assert tokenizer.decode(chat.encode_rest(ids)) in ("<|eot_id|>", "<|im_end|>\n")


def test_a_message_lacks_what_its_format_has_at_the_end(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer)
    whole = [*chat.encode_opening("Be brief."), *chat.encode_message(USER)]
    ending = len(chat.encode_rest(whole[:-2] if whole[-1] not in tokenizer.stop_tokens else whole[:-1]))
    for left in range(ending + 1):
        cut = whole[: len(whole) - left]
        assert cut + chat.encode_rest(cut) == whole


def test_what_the_template_puts_in_is_no_message(demo: Tokenizer) -> None:
    chat = ChatFormat(demo)
    assert chat.decode_dialog(chat.encode_opening()) == []
    assert chat.decode_dialog([]) == []
    assert [message for _, message in chat.decode_dialog(chat.encode_opening("Be brief."))] == [
        {"role": "system", "content": "Be brief."}
    ]


def test_ids_that_are_no_dialog_are_refused(tokenizer: Tokenizer) -> None:
    chat = ChatFormat(tokenizer)
    for text in ("Once upon a time", "user\n"):
        with pytest.raises(ValueError, match="no dialog in this tokenizer's format: '"):
            chat.decode_dialog(tokenizer.encode(text, bos=False, eos=False))
    header = chat.encode_header({"role": "wizard", "content": ""})  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="no dialog"):
        chat.decode_dialog([*header, *tokenizer.encode("Hi", bos=False, eos=False)])


@pytest.mark.parametrize(
    ("specials", "template", "words"),
    [
        ((), None, "no known chat format"),
        (("<|im_start|>",), None, "no known chat format"),
        (("<|start_header_id|>", "<|end_header_id|>"), None, "no known chat format"),
        (("<|im_start|>", "<|im_end|>"), "[INST] {{ message }} [/INST]", "no known chat format"),
        (("<|im_start|>", "<|im_end|>"), "{{- '<|im_start|>system\nBe kind.<|im_end|>' }}", "only Jinja can read"),
    ],
)
def test_a_tokenizer_without_a_known_format_is_refused(
    specials: tuple[str, ...], template: str | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ChatFormat(tiny(*specials, **{"tokenizer.chat_template": template}))


@pytest.mark.parametrize(
    ("dialog", "words"),
    [
        ([], "at least one message"),
        ("Hi", "at least one message"),
        (None, "at least one message"),
        ([{"role": "user"}], "'role' and 'content'"),
        ([{"content": "Hi"}], "'role' and 'content'"),
        ([{"role": "user", "content": "Hi", "name": "Ann"}], "'role' and 'content'"),
        (["Hi"], "'role' and 'content'"),
        ([{"role": "wizard", "content": "Hi"}], "unknown role 'wizard'; known are system, user, assistant"),
        ([{"role": ["user"], "content": "Hi"}], "unknown role"),
        ([{"role": "user", "content": None}], "is a str, not NoneType"),
    ],
)
def test_what_is_no_dialog_is_refused_in_words(tokenizer: Tokenizer, dialog: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ChatFormat(tokenizer).encode_dialog_prompt(dialog)


def test_a_hugging_face_directory_gives_the_same_dialogs(
    demo: Tokenizer, transformers_demo: Any, tmp_path: Path
) -> None:
    transformers_demo.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["type"] == "BPE"
    ours = ChatFormat(Tokenizer.from_huggingface(tmp_path))
    assert ours.encode_dialog_prompt([USER]) == ChatFormat(demo).encode_dialog_prompt([USER])
