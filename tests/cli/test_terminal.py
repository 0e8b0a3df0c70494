"""A conversation is its ids: fed, decoded, cut, undone and refused; in Python, in a pipe and on a terminal."""

import io
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from commands import Command
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from tables import table
from tiny import failing, tiny_model, watched
from torch import Tensor
from vocabularies import plain

from llama import Chat, Tokenizer, Transformer
from llama.cli.inference import main
from llama.cli.terminal import TerminalChat, terminal_lines
from llama.host import console
from llama.tokenizer.chat import ChatFormat, Dialog
from llama.tokenizer.conversation import MIN_ANSWER

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "inference.py"
GREEDY: dict[str, Any] = {"temperature": 0}
ANSWERS = ["Hello.", "Twelve, I think", "No"]


def small_model(tokenizer: Tokenizer, *, max_seq_len: int = 256) -> Transformer:
    model = tiny_model(vocab_size=tokenizer.n_words, max_seq_len=max_seq_len, dtype=torch.float32)
    return model.eval().requires_grad_(False)


Talk = Callable[..., tuple[int, str, str]]


@contextmanager
def saying(model: Transformer, *answers: list[int]) -> Iterator[None]:
    """Make the model give these answers, one after each prompt. Needs the cache: a wider forward is a new prompt."""
    texts = iter(answers)
    rest: Iterator[int] = iter(())

    def speak(_: object, given: tuple[Any, ...], logits: Tensor) -> Tensor:
        nonlocal rest
        if given[0].shape[1] > 1:
            rest = iter(next(texts))
        forced = torch.zeros_like(logits)
        forced[..., next(rest)] = 50.0
        return forced

    hook = model.register_forward_hook(speak)
    try:
        yield
    finally:
        hook.remove()


def scripted(tokenizer: Tokenizer, *texts: str) -> list[list[int]]:
    return [[*plain(tokenizer, text), tokenizer.stop_tokens[0]] for text in texts]


def said(*texts: str) -> Dialog:
    """Return a dialog in which a user begins."""
    roles: list[Any] = ["user", "assistant"]
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


# ---- ids and messages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "system"), [("spelling", None), ("demo", "Be brief."), pytest.param("meta", None, marks=pytest.mark.slow)]
)
def test_the_ids_are_those_of_the_dialog(name: str, system: str | None, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(name)
    model = small_model(tokenizer)
    chat = Chat(model, tokenizer, system=system)
    dialog: Dialog = [] if system is None else [{"role": "system", "content": system}]
    assert chat.messages == dialog
    with saying(model, *scripted(tokenizer, *ANSWERS)):
        for question, answer in zip(["Hi", "How many are there?\n\n", "More?"], ANSWERS, strict=True):
            assert "".join(chat.say(question, **GREEDY)) == answer
            dialog.append({"role": "user", "content": question})
            prompt = ChatFormat(tokenizer).encode_dialog_prompt(dialog)
            assert chat.session.tokens == prompt + plain(tokenizer, answer)
            dialog.append({"role": "assistant", "content": answer})
            assert chat.messages == dialog


def test_the_template_s_own_system_message_is_fed_and_not_listed(demo: Tokenizer) -> None:
    chat = Chat(small_model(demo), demo)
    "".join(chat.say("Hi", 2))
    assert "You are a helpful AI assistant named SmolLM" in demo.decode(chat.session.tokens)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_only_new_tokens_are_fed(spelling: Tokenizer) -> None:
    model = small_model(spelling)
    chat = Chat(model, spelling)
    with watched(model) as watch, saying(model, *scripted(spelling, "Y", "N")):
        "".join(chat.say("Hi", **GREEDY))
        first = len(chat.session.tokens)
        "".join(chat.say("Ho", **GREEDY))
    assert chat.last is not None
    new = chat.last.context - first
    assert watch.widths == [first - 1, 1, new, 1]  # the stop token is never fed, so the second turn brings it along
    assert (chat.last.fed, chat.last.made, chat.last.finish_reason) == (new, 1, "stop")
    assert chat.session.fed == sum(watch.widths)


def test_the_last_answer_has_its_times_and_counts(spelling: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(spelling)
    now = [0.0]  # a forward takes two seconds, and the caller a hundred

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("llama.tokenizer.conversation.time", SimpleNamespace(perf_counter=lambda: now[0]))
    hook = model.register_forward_pre_hook(lambda *_: pass_by(2))
    chat, begun = Chat(model, spelling), []
    try:
        assert chat.last is None
        pieces = chat.say("Hi", 5, seed=0)
        assert chat.last is None
        pass_by(100)
        for _ in pieces:
            begun.append(chat.last)
            pass_by(100)
    finally:
        hook.remove()
    assert chat.last is not None
    assert (chat.last.made, chat.last.finish_reason, chat.last.fed) == (5, "length", chat.last.context)
    assert begun[0] is not None
    assert chat.last.first == 2 * begun[0].made  # of the prompt's forward, and of each token's behind the first
    assert chat.last.per_second == 0.5


# ---- answers that end early, and turns that are taken back -----------------------------------------------------------


class Gone(Exception):
    pass


def test_a_message_without_any_answer_is_not_stored(spelling: Tokenizer) -> None:
    model = small_model(spelling)
    chat = Chat(model, spelling)
    "".join(chat.say("Hi", 3, seed=1))
    before = list(chat.session.tokens)
    with failing(model.layers[1], Gone), suppress(Gone):
        "".join(chat.say("Ho"))
    assert chat.session.tokens == before
    chat.say("an iterator that is never advanced")
    assert chat.messages == said("Hi", spelling.decode(before[-3:]))
    "".join(chat.say("Ho", 3, seed=1))
    again = Chat(model, spelling)
    for question in ("Hi", "Ho"):
        "".join(again.say(question, 3, seed=1))
    assert chat.session.tokens == again.session.tokens


# ---- errors ----------------------------------------------------------------------------------------------------------


@table("text", ["", "  \n", None, b"Hi"])
def test_an_empty_message_is_refused(text: Any, spelling: Tokenizer) -> None:
    chat = Chat(small_model(spelling), spelling)
    with pytest.raises(ValueError, match="a message must be a text that is not empty"):
        chat.say(text)
    assert chat.messages == []


@table(
    "options, words",
    [
        ({"temperature": -1}, "temperature"),
        ({"max_gen_len": 0}, "max_gen_len=0"),
        ({"max_gen_len": None}, "max_gen_len=None"),
        ({"kv_caching": False}, "model.kv_caching"),
        ({"echo": True}, "chat.messages"),
    ],
)
def test_bad_options_are_refused_before_anything_is_fed(
    options: dict[str, Any], words: str, spelling: Tokenizer
) -> None:
    chat = Chat(small_model(spelling), spelling)
    with pytest.raises(ValueError, match=words):
        chat.say("Hi", **options)
    assert (chat.messages, chat.session.fed) == ([], 0)


def test_a_message_that_does_not_fit_is_refused_before_it_is_stored(spelling: Tokenizer) -> None:
    model = small_model(spelling, max_seq_len=90)
    chat = Chat(model, spelling)
    with saying(model, plain(spelling, "a") * 90):
        assert "".join(chat.say("Hi", **GREEDY))
    assert chat.last is not None
    assert chat.last.made == 90 - chat.last.context  # cut to what fits
    assert chat.left == 0
    before = chat.messages
    with pytest.raises(ValueError, match=r"max_seq_len=90; undo an exchange, or .* kv_cache='window:45\+4'"):
        chat.say("Ho")
    assert chat.messages == before
    chat.undo()
    assert chat.left == 90
    "".join(chat.say("Ho", MIN_ANSWER))
    with pytest.raises(ValueError, match="would exceed max_seq_len=90"):
        chat.say("long " * 90)
    with saying(model, plain(spelling, "a") * 90):
        assert "".join(chat.say("H", MIN_ANSWER, **GREEDY))


def test_a_window_has_no_limit_and_undo_works(spelling: Tokenizer) -> None:
    chat = Chat(small_model(spelling, max_seq_len=64), spelling, kv_cache="window:40+4")
    assert chat.left is None
    for _ in range(4):
        "".join(chat.say("Hi", 30, **GREEDY))
    assert len(chat.session.tokens) > 128
    chat.undo()
    "".join(chat.say("Ho", 3))
    assert [message["content"] for message in chat.messages if message["role"] == "user"] == ["Hi", "Hi", "Hi", "Ho"]
    chat.model.kv_caching = False  # which limits the text
    with pytest.raises(ValueError, match="would exceed max_seq_len=64"):
        chat.say("Ho")


# ---- any template ----------------------------------------------------------------------------------------------------

_TURNS = (
    "{{ bos_token }}%s{%% for m in messages %%}"
    "<|start_header_id|>{{ m.role }}<|end_header_id|>%s<|eot_id|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|start_header_id|>assistant<|end_header_id|>{%% endif %%}"
)
TEMPLATES = {
    "keeps all": _TURNS % ("", "{{ m.content }}"),
    "leaves out": _TURNS % ("", "{{ m.content.split('h')[-1] if m.role == 'assistant' else m.content }}"),
    "counts": _TURNS % ("{{ messages | length }}", "{{ m.content }}"),
    "leaves out all but the last exchange": _TURNS.replace("messages %%}<", "messages[-3:] %%}<")
    % ("", "{{ m.content }}"),
    "plain text": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:",
}


@pytest.fixture(scope="module")
def spelling(checkpoint: Path) -> Tokenizer:
    """Return a tokenizer of all bytes, some words, and Llama 3's marks."""
    return Tokenizer.from_huggingface(checkpoint)


def with_template(tokenizer: Tokenizer, template: str) -> Tokenizer:
    other = copy(tokenizer)
    other.chat_template = template
    return other


THINKS = _TURNS % ("", "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}")


def test_a_thought_that_the_template_leaves_out_is_rewound_and_the_text_before_it_stays_cached(
    spelling: Tokenizer,
) -> None:
    tokenizer = with_template(spelling, THINKS)
    model, format = small_model(tokenizer), ChatFormat(tokenizer)
    chat = Chat(model, tokenizer, system="Be brief.")
    answers = ["hm</think>Yes", "No", "so</think>hello"]
    dialog: Dialog = [{"role": "system", "content": "Be brief."}]
    with watched(model) as watch, saying(model, *scripted(tokenizer, *answers)):
        for question, answer in zip(["Hi", "Ho", "Hu"], answers, strict=True):
            before = list(chat.session.tokens)
            del watch.widths[:]
            assert "".join(chat.say(question, **GREEDY)) == answer
            dialog.append({"role": "user", "content": question})
            prompt = format.encode_dialog_prompt(dialog)
            same = next((i for i, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), len(before))
            assert chat.session.tokens == prompt + plain(tokenizer, answer)
            assert watch.widths[0] <= len(prompt) - same + 1  # an answer's newest token was never fed
            dialog.append({"role": "assistant", "content": answer})
            assert chat.messages == dialog
    chat.undo()
    chat.undo()
    assert chat.messages == dialog[:3]
    with saying(model, *scripted(tokenizer, "No")):
        "".join(chat.say("Ho", **GREEDY))
    assert chat.messages == dialog[:5]
    assert chat.session.tokens == format.encode_dialog_prompt(dialog[:4]) + plain(tokenizer, "No")


def test_an_answer_that_the_template_trims_keeps_its_ids(spelling: Tokenizer) -> None:
    tokenizer = with_template(spelling, _TURNS % ("", "{{ m.content | trim }}"))
    model = small_model(tokenizer)
    chat = Chat(model, tokenizer)
    spelled = [id for letter in " hello\n" for id in plain(tokenizer, letter)]  # not the ids that the text encodes to
    with saying(model, [*spelled, tokenizer.stop_tokens[0]], *scripted(tokenizer, "Yes")):
        "".join(chat.say("Hi", **GREEDY))
        before = list(chat.session.tokens)
        assert before[-len(spelled) :] == spelled
        "".join(chat.say("Ho", **GREEDY))
    assert chat.session.tokens[: len(before)] == before
    assert chat.messages == said("Hi", " hello\n", "Ho", "Yes")


def test_a_message_that_the_template_refuses_is_not_stored(spelling: Tokenizer) -> None:
    strict = "{{ raise_exception('mind your words') if 'bad' in messages[-1].content }}"
    tokenizer = with_template(spelling, strict + TEMPLATES["keeps all"])
    chat = Chat(small_model(tokenizer), tokenizer)
    "".join(chat.say("Hi", 3))
    before, tokens = chat.messages, list(chat.session.tokens)
    with pytest.raises(ValueError, match="rejects this dialog: mind your words"):
        chat.say("bad")
    assert (chat.messages, chat.session.tokens) == (before, tokens)
    "".join(chat.say("good", 3))
    assert len(chat.messages) == 4


class Turns(RuleBasedStateMachine):
    """A conversation by some template, beside the messages that it should have; an answer is what was streamed."""

    tokenizer: Tokenizer
    model: Transformer

    def __init__(self) -> None:
        super().__init__()
        self.chat = Chat(self.model, self.tokenizer, system="hello")
        self.format = ChatFormat(self.tokenizer)
        self.said: Dialog = [{"role": "system", "content": "hello"}]

    def note(self, text: str, answer: str | None) -> None:
        if answer is not None:
            self.said += said(text, answer)

    @rule(text=st.sampled_from(["Hi", "hh", " x ", "<|eot_id|>"]), count=st.integers(1, 5), seed=st.integers(0, 9))
    def say(self, text: str, count: int, seed: int) -> None:
        self.note(text, "".join(self.chat.say(text, count, seed=seed, temperature=1.0)))

    @rule(count=st.integers(0, 3), seed=st.integers(0, 9), close=st.booleans())
    def say_and_leave(self, count: int, seed: int, close: bool) -> None:
        pieces = self.chat.say("Well?", seed=seed)
        for _, _ in zip(range(count), pieces, strict=False):
            pass
        if close:
            pieces.close()
        self.note("Well?", self.chat.messages[-1]["content"] if count else None)

    @rule(after=st.integers(0, 3), error=st.sampled_from([Gone, KeyboardInterrupt]))
    def fail(self, after: int, error: type[BaseException]) -> None:
        with failing(self.model.layers[1], error, after=after), suppress(error):
            "".join(self.chat.say("Why?", 6, seed=0))
        self.note("Why?", self.chat.messages[-1]["content"] if after else None)

    @precondition(lambda self: len(self.said) > 1)
    @rule()
    def undo(self) -> None:
        taken = self.said[-2:]
        del self.said[-2:]
        assert self.chat.undo() == taken

    @rule(on=st.booleans())
    def switch(self, on: bool) -> None:
        self.model.kv_caching = on

    @invariant()
    def the_ids_stand_for_the_dialog_as_the_template_has_it(self) -> None:
        assert self.chat.messages == self.said
        begin, tokens = self.chat._transcript.begin, self.chat.session.tokens
        if begin is not None:
            assert self.tokenizer.decode(tokens[begin:]) == self.said[-1]["content"]
            assert self.tokenizer.decode(tokens[:begin]) == self.format.render(self.said[:-1]).text


@pytest.mark.parametrize(
    "name",
    [
        "leaves out",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ["demo", *TEMPLATES] if name != "leaves out"),
    ],
)
def test_any_turns_by_any_template_leave_the_ids_of_the_dialog(
    name: str, spelling: Tokenizer, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue("demo") if name == "demo" else with_template(spelling, TEMPLATES[name])
    machine = type("Machine", (Turns,), {"tokenizer": tokenizer})
    machine.model = small_model(tokenizer, max_seq_len=2048)
    run_state_machine_as_test(
        machine, settings=settings(max_examples=5, stateful_step_count=8, deadline=None, derandomize=True)
    )


# ---- in lines --------------------------------------------------------------------------------------------------------


@pytest.fixture
def talk(checkpoint: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> Talk:
    """Pipe lines into inference.py --chat, and return the exit code and what it printed."""

    def talk(lines: str | bytes, *words: str) -> tuple[int, str, str]:
        stream = io.StringIO(lines) if isinstance(lines, str) else io.TextIOWrapper(io.BytesIO(lines), "utf-8")
        monkeypatch.setattr(sys, "stdin", stream)
        return command(main, "--chat", "--fast=False", "--ckpt_dir", checkpoint, "--device=cpu", *words)

    return talk


DIM = r"fed (\d+) of (\d+) tokens, first token after \d+\.\d\d s, [\d.]+ tokens/s, cut after 4 tokens"


def test_piped_lines_are_messages_and_answered_one_by_one(talk: Talk) -> None:
    code, out, err = talk("hello\n\n \nthe hello\r\nlast", "--max_gen_len=4")
    assert (code, err) == (0, "")
    turns = [(int(fed), int(context)) for fed, context in re.findall(f"^{DIM}$", out, re.MULTILINE)]
    assert len(turns) == 3
    assert turns[0][0] == turns[0][1]
    assert all(fed < context for fed, context in turns[1:])
    assert turns[2][1] == turns[1][1] + 3 + turns[2][0]  # three tokens of the answer were fed when it was made
    assert "> " not in out
    assert "\033" not in re.sub(r"(?s)^.*?(?=fed )", "", out)


def test_answers_are_the_same_without_the_cache_and_everything_is_fed(talk: Talk) -> None:
    lines = ("hello\nthe\n", "--max_gen_len=4")
    cached, plain = (talk(*lines, *more)[1] for more in ((), ("--kv_caching=False",)))
    assert re.sub("(?m)^fed .*$", "", cached) == re.sub("(?m)^fed .*$", "", plain)
    assert [fed == context for fed, context in re.findall(DIM, plain)] == [True, True]
    assert [fed == context for fed, context in re.findall(DIM, cached)] == [True, False]


def test_commands_do_what_they_say_and_wrong_ones_are_one_line(talk: Talk) -> None:
    lines = ["/undo", "/stats", "hello", "the", "/undo", "/stats"]
    lines += ["/undo now", "/etc/hosts is what?", " /etc/hosts is what?", "/quit", "never read"]
    code, out, err = talk("\n".join(lines), "--max_gen_len=4")
    assert code == 0
    assert "0 messages, 0 tokens, 32" in out
    assert "taken back: the\n" in out
    assert "2 messages, " in out
    assert "KV cache static, 0.0 MB" in out
    assert len(re.findall(DIM, out)) == 3
    errors = err.splitlines()
    assert "there is nothing to undo" in errors[0]
    assert "/undo now is not known" in errors[1]
    assert "/etc/hosts is what? is not known: there are /undo, /stats, /quit; put a space before" in errors[2]
    assert [line.startswith("error: ") for line in errors] == [True] * 3


def test_a_full_context_is_announced_with_the_remedy_and_the_conversation_continues(talk: Talk) -> None:
    code, out, err = talk("hello\nhello hello\n/undo\nhello\n", "--max_seq_len=50")
    assert code == 0
    assert out.count(", 0 of 50 tokens left\n") == 2
    assert out.count("tokens/s, cut after") == 2
    assert err.startswith("error: the conversation has 50 tokens, and with ")
    assert err.count("\n") == 1
    code, out, err = talk("hello\nhello\n", "--max_seq_len=50", "--kv_cache=window:40+4", "--max_gen_len=20")
    assert (code, err, "left" in out) == (0, "", False)


@table(
    "words, ranks, expected",
    [
        (["--trace"], "1", "--chat without prompts and --trace"),
        (["--max_gen_len=0"], "1", "max_gen_len=0"),
        ([], "2", "--chat without prompts needs one process"),
    ],
)
def test_flags_that_exclude_a_conversation_are_refused_before_a_model_is_loaded(
    words: list[str], ranks: str, expected: str, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    code, out, err = talk("hello\n", *words)
    assert (code, out, err.count("\n"), expected in err) == (2, "", 1, True)


def test_a_line_that_is_not_utf_8_is_refused_and_the_next_is_answered(talk: Talk) -> None:
    code, out, err = talk(b"hello\nbr\xffken\nhello\n", "--max_gen_len=4")
    assert code == 0
    assert len(re.findall(DIM, out)) == 2
    assert err.startswith("error: character 2 of the text")
    assert err.count("\n") == 1


# ---- as a process ----------------------------------------------------------------------------------------------------


class Conversation:
    """inference.py --chat in a process with a terminal of its own."""

    def __init__(self, checkpoint: Path) -> None:
        import pty

        words = ("--chat", "--ckpt_dir", str(checkpoint), "--device=cpu", "--max_gen_len=30000")

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(TERM="xterm")
            os.execv(sys.executable, [sys.executable, str(SCRIPT), *words])

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def read(self, until: str, again: str = "") -> str:
        """Return what is shown up to and with `until`; type `again` where nothing comes for 5 seconds."""
        shown, end, idle = b"", time.monotonic() + 60, 0
        while not shown.endswith(until.encode()):
            assert time.monotonic() < end, f"{until!r} did not come after {shown[-300:]!r}"
            if select.select([self.fd], [], [], 0.5)[0]:
                shown, idle = shown + os.read(self.fd, 1), 0
            elif (idle := idle + 1) % 10 == 0:
                self.type(again)
        return shown.decode(errors="replace")

    def ask(self, keys: str) -> None:
        """Type what shows as "hello" and the return key; return when an answer, of minutes, has begun."""
        self.type(keys)
        self.read("hello")
        self.type("\r")
        self.read("\r\n")
        os.read(self.fd, 1)

    def wait(self) -> int:
        with suppress(OSError):  # a terminal whose process has ended reads as an error
            while os.read(self.fd, 1024):
                pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(checkpoint: Path) -> Iterator[Conversation]:
    if sys.platform == "win32":
        pytest.skip("Windows has no pseudo-terminals")
    conversation = Conversation(checkpoint)
    yield conversation
    with suppress(ProcessLookupError):
        os.kill(conversation.pid, signal.SIGKILL)
    os.close(conversation.fd)


def test_ctrl_c_ends_an_answer_after_its_step_and_a_second_one_at_once(
    spelling: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    model = small_model(spelling)
    talk = TerminalChat(model, spelling, seed=1, max_gen_len=9)
    talk.interactive = True

    def press(times: int) -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    for times in (1, 2):
        hook = model.register_forward_hook(lambda *_, n=times: press(n))
        with suppress(KeyboardInterrupt):
            talk.answer("Hi")
        hook.remove()
        assert ("ended by Ctrl-C" in capsys.readouterr().out) == (times == 1)
        assert len(talk.chat.messages) == 2  # the second message has no answer, so it is removed
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def test_at_the_prompt_ctrl_c_is_a_hint_and_other_signals_end_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers, notes = [signal.SIGINT, signal.SIGTERM], list[str]()
    monkeypatch.setattr("builtins.input", lambda _: console.stop(numbers.pop(0), None))
    with pytest.raises(console.Stopped):
        next(terminal_lines(notes.append))
    assert (notes, numbers) == (["/quit or Ctrl-D ends the conversation"], [])


@pytest.mark.slow
def test_on_a_terminal_ctrl_c_ends_the_answer_and_sigterm_the_conversation(terminal: Conversation) -> None:
    assert "Ctrl-C ends an answer" in terminal.read("\r\n> ")
    terminal.ask("hello")
    terminal.type("\x03")
    assert "\033[2mfed " in terminal.read("ended by Ctrl-C\033[0m\r\n\r\n> ")
    time.sleep(0.3)  # Python looks for signals once it waits for a line
    terminal.type("\x03")
    # A signal that comes before Python waits is seen with the next thing that is typed.
    terminal.read("/quit or Ctrl-D ends the conversation\033[0m\r\n> ", again="\x03")
    time.sleep(0.3)
    terminal.ask("\x1b[A")  # the message again, out of the history
    terminal.type("\x03")
    terminal.read("ended by Ctrl-C\033[0m\r\n\r\n> ")
    terminal.type("/stats\r")
    assert "4 messages" in terminal.read("MB\033[0m\r\n> ")
    terminal.ask("hello")
    os.kill(terminal.pid, signal.SIGTERM)
    assert terminal.read("terminated\r\n")
    assert terminal.wait() == 143
