"""Texts are whole: stop strings, characters of several tokens, and streams that equal `generate`.

A scripted model generates a given text byte by byte, with a tokenizer of bytes, so that characters span tokens.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from fakes import Bytes, Scripted, limits
from hypothesis import given, settings
from hypothesis import strategies as st

from llama.streaming import Completion

EOS, BOS, HELLO = 257, 256, 300
few = settings(max_examples=10, derandomize=True, deadline=None)
GREEDY: dict[str, Any] = {"temperature": 0}


def saying(*texts: str | bytes | Sequence[int], end: bool = True) -> Scripted:
    """Return a model whose row b generates texts[b], a text or its ids, and then ends, or else repeats its last id."""
    scripts = [list(text.encode() if isinstance(text, str) else text) + [EOS] * end for text in texts]
    return Scripted(scripts, limits(max_seq_len=80))


def one(model: Scripted, prompt: str | Sequence[int] = "p", max_gen_len: int = 60, **options: Any) -> Completion:
    """Return the completion of one prompt, and check that a stream generates the same."""
    ids = prompt if isinstance(prompt, str) else [prompt]
    (result,) = model.generate(Bytes(), ids, max_gen_len, **{**GREEDY, **options})
    stream = model.stream(Bytes(), ids, max_gen_len, **{**GREEDY, **options})
    pieces = list(stream)
    assert "".join(piece for _, piece in pieces) == result["generation"]
    assert "" not in [piece for _, piece in pieces]
    assert stream.results == [result]
    return result


# ---- streams ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["hello", "日本語", "😀 and 👩‍🚀", "naïve — é", "\x00\x7f", "a\u0301", ""])
def test_a_stream_s_pieces_are_whole_characters_and_together_the_text(text: str) -> None:
    assert [piece for _, piece in saying(text).stream(Bytes(), "p", 60, **GREEDY)] == list(text)
    assert one(saying(text)) == {"generation": text, "ids": list(text.encode()), "finish_reason": "stop"}


def test_bytes_that_are_no_text_become_the_replacement_character() -> None:
    broken = (b"\xff", b"a\x80b", b"\xe6\x97", b"ab\xf0\x9f\x98", b"\xe6\x97a", b"\xf0\x9f\xe6\x97\xa5")
    for data in (*broken, b"\xc0\xaf\xed\xa0\x80"):
        assert one(saying(data))["generation"] == data.decode(errors="replace")
        assert one(saying(data, end=False), max_gen_len=len(data))["generation"] == data.decode(errors="replace")


@few
@given(st.text(max_size=12), st.integers(1, 40), st.lists(st.text("ab日😀", min_size=1, max_size=3), max_size=2))
def test_a_stream_equals_generate_wherever_the_text_ends(text: str, max_gen_len: int, stop: list[str]) -> None:
    result = one(saying(text), max_gen_len=max_gen_len, stop=stop)
    whole = text.encode()[:max_gen_len].decode(errors="replace")
    cuts = [whole.index(s) for s in stop if s in whole]
    assert result["generation"] == whole[: min(cuts, default=None)]


def test_pieces_of_several_rows_come_as_they_are_made() -> None:
    pieces = list(saying("ab", "日", "xyz").stream(Bytes(), ["p", "q", "r"], 9, **GREEDY))
    assert pieces == [(0, "a"), (2, "x"), (0, "b"), (2, "y"), (1, "日"), (2, "z")]


def test_a_piece_is_out_before_the_next_token_is_made() -> None:
    model = saying("abc")
    stream = model.stream(Bytes(), "p", 9, **GREEDY)
    for n, letter in enumerate("abc"):
        assert next(stream) == (0, letter)
        assert len(model.calls) == n + 1


def test_results_of_a_closed_stream_have_the_tokens_so_far() -> None:
    model = saying("abc", "xyz")
    stream = model.stream(Bytes(), ["p", "q"], 9, logprobs=True, **GREEDY)
    assert [next(stream) for _ in range(3)] == [(0, "a"), (1, "x"), (0, "b")]
    stream.close()
    assert [result["generation"] for result in stream.results] == ["ab", "x"]
    assert [len(result["logprobs"]) for result in stream.results] == [2, 1]
    assert [result["finish_reason"] for result in stream.results] == [None, None]
    assert list(stream) == []


def test_a_closed_stream_returns_its_delayed_text() -> None:
    stream = saying("ab-cd").stream(Bytes(), "p", 9, stop="-!", **GREEDY)
    assert [next(stream), next(stream)] == [(0, "a"), (0, "b")]
    for _ in range(2):
        stream.close()
        assert stream.results[0]["generation"] == "ab"
    model = saying("ab--")
    with model.stream(Bytes(), "p", 4, stop="--!", **GREEDY) as stream:
        for _ in stream:
            break
    assert list(stream) == []


# ---- stop strings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one two three", "two", "one "),
        ("one two three", [" three"], "one two"),
        ("two at the start", "two", ""),
        ("never found", "zzz", "never found"),
        ("nearly the en", "end", "nearly the en"),
        ("aaab", "aab", "a"),
        ("aabaabaaab", "aabaaa", "aab"),
        ("ababac", "abac", "ab"),
        ("abcabd", ["abd", "abx"], "abc"),
        ("abcd", ["bcd", "cd"], "a"),
        ("abcd", ["abcx", "cd"], "ab"),
        ("abcd", ["bc", "abcd"], "a"),
        ("ab", ["ab", "abc"], ""),
        ("日本語です", "語", "日本"),
        ("x😀y😁z", ["😁"], "x😀y"),
        ("line\n\nnext", "\n\n", "line"),
        ("a.b", ".", "a"),
        ("a\ufffdb", "\ufffd", "a"),
    ],
)
def test_the_text_ends_before_a_stop_string_across_token_borders(text: str, stop: Any, expected: str) -> None:
    result = one(saying(text), stop=stop)
    assert result["generation"] == expected
    assert result["finish_reason"] == "stop"


def test_only_text_that_may_begin_a_stop_string_is_delayed() -> None:
    model = saying("abXabc!")
    pieces = [piece for _, piece in model.stream(Bytes(), "p", 60, stop="abc", **GREEDY)]
    assert pieces == ["abX"]
    pieces = [piece for _, piece in model.stream(Bytes(), "p", 5, stop="abc", **GREEDY)]
    assert pieces == ["abX", "ab"]  # the last piece comes at the end


def test_delayed_text_is_yielded_when_its_row_ends() -> None:
    pieces = list(saying("ab", "wxyz").stream(Bytes(), ["p", "q"], 9, stop="bc", **GREEDY))
    assert pieces.index((0, "b")) < pieces.index((1, "z"))


def test_a_stop_string_inside_one_token_cuts_that_token_s_text_and_keeps_its_id() -> None:
    result = one(saying([HELLO, 33, HELLO]), stop="ll")
    assert result == {"generation": "he", "ids": [HELLO], "finish_reason": "stop"}
    result = one(saying([HELLO, HELLO]), stop="loh")
    assert result == {"generation": "hel", "ids": [HELLO, HELLO], "finish_reason": "stop"}
    assert one(saying([HELLO]), stop=["lo", "el"])["generation"] == "h", "the first one in the text"


def test_a_stop_string_that_only_the_end_completes_is_a_stop() -> None:
    result = one(saying(b"ab\xe6\x97", end=False), max_gen_len=4, stop="b\ufffd")
    assert (result["generation"], result["finish_reason"]) == ("a", "stop")


def test_a_stop_string_ends_its_row_alone_and_its_model_steps() -> None:
    model = saying("ab.cd", "longer than that", "x")
    results = model.generate(Bytes(), ["p", "q", "r"], 8, stop=".", **GREEDY)
    assert [result["generation"] for result in results] == ["ab", "longer t", "x"]
    assert [result["finish_reason"] for result in results] == ["stop", "length", "stop"]
    model = saying("ab.cd")
    model.generate(Bytes(), "p", 60, stop=".", **GREEDY)
    assert len(model.calls) == 3


def test_a_stop_string_in_the_prompt_or_over_its_border_is_not_one() -> None:
    result = one(saying("def"), "abc", stop=["abc", "cd"], echo=True)
    assert result["generation"] == "abcdef"


def test_an_empty_stop_string_is_refused() -> None:
    model = saying("abc")
    for stop in ("", ["a", ""]):
        with pytest.raises(ValueError, match="not empty"):
            model.generate(Bytes(), "p", 5, stop=stop)
    assert not model.calls


# ---- why it ended ----------------------------------------------------------------------------------------------------


def test_finish_reason_tells_a_stop_token_from_a_full_length() -> None:
    results = saying("abc", "abcd", "").generate(Bytes(), ["p", "q", "r"], [3, 9, 4], **GREEDY)
    assert [result["finish_reason"] for result in results] == ["length", "stop", "stop"]


# ---- prompts ---------------------------------------------------------------------------------------------------------


def fed(prompts: Any, *, adds_bos: bool = True, bos_id: int | None = BOS) -> list[list[int]]:
    """Return the ids that prompts become."""
    tokenizer = Bytes(adds_bos=adds_bos)
    tokenizer.bos_id = bos_id
    model = saying(*["x"] * (1 if isinstance(prompts, str) else len(prompts)))
    model.generate(tokenizer, prompts, 1)
    return model.calls[0].fed


def test_bos_comes_once_where_the_file_asks_for_it() -> None:
    assert fed(["ab", "c"]) == [[BOS, 97, 98], [BOS, 99]]
    assert fed(["ab", "c"], adds_bos=False) == [[97, 98], [99]]


def test_prompts_are_texts_or_ids_as_they_are() -> None:
    assert fed("ab") == fed(["ab"]) == [[BOS, 97, 98]]
    assert fed("<bos>")[0] == [BOS, *b"<bos>"]
    assert fed([[97, 98], [BOS, 99]]) == [[97, 98], [BOS, 99]]
    assert fed(["a", [98]]) == [[BOS, 97], [98]]
    assert fed([range(3)]) == [[0, 1, 2]]
    with pytest.raises(ValueError, match=r"not bytes: b'hello'; decode it first"):
        saying("x").generate(Bytes(), [b"hello"], 4, **GREEDY)  # type: ignore[list-item]


def test_an_empty_text_is_a_bos_alone_or_an_error() -> None:
    assert fed("") == fed("", adds_bos=False) == [[BOS]]
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        fed("", adds_bos=False, bos_id=None)
    with pytest.raises(ValueError, match="prompt 1 has no tokens"):
        fed([[1], []])


# ---- echo and logprobs -----------------------------------------------------------------------------------------------


def test_echo_begins_with_the_prompt_as_it_was_typed() -> None:
    for text in ("ab", "日本 ", "<bos>", "\x00"):
        result = one(saying("cd"), text, echo=True)
        assert result["generation"] == text + "cd"
        assert result["ids"] == [BOS, *text.encode(), *b"cd"]
    assert one(saying("cd"), [97, HELLO], echo=True)["generation"] == "ahellocd"


def test_the_echo_of_half_a_character_does_not_join_with_what_follows() -> None:
    assert one(saying(b"\xa5"), [*b"\xe6\x97"], echo=True)["generation"] == "\ufffd\ufffd"


@pytest.mark.parametrize(
    ("max_gen_len", "stop", "echo"), [(1, (), True), (4, "c", False), (30, "日", True), (30, (), False)]
)
def test_there_is_one_logprob_for_each_id(max_gen_len: int, stop: Any, echo: bool) -> None:
    model = saying("abcde日x", "日")
    results = model.generate(Bytes(), ["pq", "r"], max_gen_len, echo=echo, stop=stop, logprobs=True, **GREEDY)
    for result, prompt in zip(results, ([BOS, *b"pq"], [BOS, *b"r"]), strict=True):
        assert len(result["logprobs"]) == len(result["ids"]) > 0
        assert (result["logprobs"][0] is None) == echo
        assert not echo or result["ids"][: len(prompt)] == prompt
