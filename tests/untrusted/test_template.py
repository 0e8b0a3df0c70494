"""Untrusted templates: what they may do is rendered, and anything else ends soon, with an error and without harm."""

import gc
import json
import os
import sys
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from tables import table
from threads import in_threads

from llama.untrusted import template_child
from llama.untrusted.template import MOST_TEMPLATE, DialogRefused, Renderer, TemplateFailed

HI = [{"role": "user", "content": "Hi"}]
unix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limits for a process, but for the clock")
slow = pytest.mark.slow
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a limit of memory")


def render(template: str, **variables: Any) -> str:
    ((text,),) = Renderer(template).render([{"messages": HI, **variables}])
    return text


def answer(template: str) -> dict[str, Any]:
    """Return what the process of a renderer answers, without its limits."""
    request = {"template": template, "now": "2000-01-01", "each": [{"messages": HI, "x": "x"}], "cut_at": []}
    return template_child.answer(json.dumps(request).encode())


@table(
    "template, text",
    [
        ("{{ messages[0].content }}{{ messages[0]['role'] }}", "Hiuser"),
        ("{{ nothing }}{% if nothing is defined %}a{% else %}b{% endif %}", "b"),
        ("{% if true %}\n  a\n{% endif %}\nb\n", "  a\nb"),  # as with trim_blocks and lstrip_blocks
        ("  {% if true %}a{% endif %}", "a"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{{ {'a': '<é\"'} | tojson }}{{ dict(a=1) | tojson(indent=1) }}", '{"a": "<é\\""}{\n "a": 1\n}'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hi!"),
        ("{{ messages | map(attribute='content') | join }}{{ 'a b' | upper | trim }}{{ '%d' % 3 }}", "HiA B3"),
        ("{{ 'a</think>b'.split('</think>')[-1].lstrip('\\n') }}", "b"),
        ("{{ '{} {x}'.format(1, x='ü') }}\U0001f600", "1 ü\U0001f600"),
        ("{% macro m(x) %}[{{ x }}]{% endmacro %}{{ m('a') }}{# nothing #}", "[a]"),
    ],
)
def test_templates_have_the_functions_that_they_use(template: str, text: str) -> None:
    assert answer(template) == {"texts": [[text]]}


def test_the_date_is_that_of_the_renderer_s_making() -> None:
    before = datetime.now()
    renderer = Renderer("{{ strftime_now('%Y-%m-%d %H:%M:%S.%f') }}")
    ((text,),), ((again,),) = renderer.render([{}]), renderer.render([{}])
    assert text == again
    assert before <= datetime.fromisoformat(text) <= datetime.now()


def test_one_process_renders_many_texts_and_keeps_nothing_of_them() -> None:
    renderer = Renderer("{{ x }}{% set x = 'kept' %}")
    assert renderer.render([{"x": str(i)} for i in range(3)] * 2) == [["0"], ["1"], ["2"]] * 2
    process = renderer._process
    assert renderer.render([{"x": "again"}, {}]) == [["again"], [""]]
    assert renderer._process is process


def test_a_text_is_cut_at_words_of_which_the_first_in_the_list_counts() -> None:
    renderer = Renderer("{{ x }}<a><ab>.*{{ x }}")
    assert renderer.render([{"x": "<a"}], ["<ab", "<a", ".*", "nowhere"]) == [
        ["", "<a", "", "<a", ">", "<ab", ">", ".*", "", "<a", ""]
    ]
    assert renderer.render([{"x": "b"}, {}], ["<"]) == [["b", "<", "a>", "<", "ab>.*b"], ["", "<", "a>", "<", "ab>.*"]]


# ---- what none may do ------------------------------------------------------------------------------------------------

ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ x['__class__']['__mro__'] }}",
    "{{ ''|attr('__class__')|attr('__mro__') }}",
    "{{ '{0.__class__.__mro__}'.format(x) }}",
    "{{ '{0.__class__.__mro__}'.format_map({'0': x}) }}",
    "{{ ('{0.__class__.__mro__}'|attr('format'))(x) }}",
    "{{ ['{0.__class__.__mro__}']|map('format', x)|list }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ lipsum.__globals__['os'] }}",
    "{{ dict.__globals__ }}",
    "{{ raise_exception.__globals__['sys'].modules }}",
    "{{ strftime_now.__self__.__class__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(content='other') }}",
    "{% set messages[0].content = 'other' %}",
    "{{ namespace.mro() }}",
    "{% include '/etc/passwd' %}",
    "{% import '/etc/passwd' as p %}",
    "{% extends '/etc/passwd' %}",
    "{{ open('/etc/passwd').read() }}",
    "{{ __import__('os') }}",
]


@table("template", ESCAPES)
def test_no_expression_leaves_the_sandbox(template: str) -> None:
    found = answer(template)
    assert "error" in found or found == {"texts": [[""]]}  # as what is undefined


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param("{{ x * 1000000000 }}", "more than 256 MiB of memory", marks=linux),
        pytest.param("{{ 'folded when compiled' * 100000000 }}", "more than 256 MiB of memory", marks=[linux, slow]),
        pytest.param("{{ '%1000000000d' % 1 }}", "more than 256 MiB of memory", marks=[linux, slow]),
        pytest.param("{{ '{:1000000000}'.format(x) }}", "more than 256 MiB of memory", marks=[linux, slow]),
        ("{% for a in range(99999) %}{{ x * 99 }}{% endfor %}", "gives more than a mebibyte of text"),
        ("{{ " + "(" * 20000 + ")" * 20000 + " }}", "not valid Jinja|fails|ended the process"),
    ],
)
def test_a_template_over_a_limit_is_refused_with_the_limit(template: str, words: str) -> None:
    with pytest.raises(TemplateFailed, match=words) as caught:
        render(template, x="x")
    assert len(str(caught.value)) < 300


@table(
    "template, words",
    [
        ("{{ 'a' * 1048577 }}", "gives more than a mebibyte of text"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "fails: RecursionError"),
        ("{% if %}", "is not valid Jinja: line 1: "),
        ("{{ nothing.nothing }}", "fails: UndefinedError: 'nothing' is undefined"),
        ("{{ ''.__class__.__mro__ }}", "does something that the sandbox forbids: "),
        ("{{ range(1000000) }}", "Range too big"),
    ],
)
def test_an_error_of_a_template_is_one_sentence(template: str, words: str) -> None:
    error = answer(template)["error"]
    assert words in error
    assert len(error) < 300


@slow
def test_a_limit_ends_the_process_and_the_next_text_has_another() -> None:
    renderer = Renderer("{% for a in range(x) %}{% for b in range(x) %}{% endfor %}{% endfor %}done")
    assert renderer.render([{"x": 1}]) == [["done"]]
    with pytest.raises(TemplateFailed, match="more than a second of CPU" if sys.platform != "win32" else "longer than"):
        renderer.render([{"x": 99999}])
    assert renderer.render([{"x": 1}]) == [["done"]]


def test_a_text_of_a_mebibyte_passes() -> None:
    assert render("{{ 'a' * 1048576 }}") == "a" * 2**20


def test_a_template_is_refused_by_its_length_before_anything_is_started() -> None:
    assert Renderer("é" * (MOST_TEMPLATE // 2))._process is None
    with pytest.raises(TemplateFailed, match=r"has 65538 bytes; the limit is 65536"):
        Renderer("é" * (MOST_TEMPLATE // 2 + 1))


def test_the_reason_of_a_refusing_template_is_printable() -> None:
    with pytest.raises(DialogRefused, match="rejects this dialog: ") as caught:
        render("{{ raise_exception('\x1b[31m\x07 \u202e ü ' ~ 'long' * 99999) }}")
    said = str(caught.value)
    assert said.isprintable()
    assert "\\x1b[31m\\x07 \\u202e ü long" in said
    assert len(said) < 300


# ---- the process -----------------------------------------------------------------------------------------------------


@linux
def test_the_process_has_no_file_but_its_pipes_and_little_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "a secret")
    here, there = os.pipe()
    os.set_inheritable(there, True)
    renderer = Renderer("{{ 1 }}")
    renderer.render([{}])
    assert renderer._process is not None
    folder = f"/proc/{renderer._process.pid}"
    assert sorted(os.listdir(f"{folder}/fd")) == ["0", "1", "2"]
    with open(f"{folder}/environ", "rb") as file:
        assert b"A_SECRET" not in file.read()
    with open(f"{folder}/limits") as limits:
        said = {line[:25].strip(): line[26:].split()[0] for line in limits}
    assert said["Max address space"] == str(256 << 20)
    assert [said[f"Max {name}"] for name in ("open files", "processes", "file size", "core file size")] == list("3000")
    os.close(here)
    os.close(there)


def test_the_process_ends_with_its_renderer() -> None:
    renderer = Renderer("{{ 1 }}")
    renderer.render([{}])
    process = renderer._process
    assert process is not None
    del renderer
    gc.collect()
    assert process.poll() is not None


def test_a_process_that_was_ended_is_started_again() -> None:
    renderer = Renderer("{{ x }}")
    assert renderer.render([{"x": "a"}]) == [["a"]]
    assert renderer._process is not None
    renderer._process.kill()
    renderer._process.wait()
    assert renderer.render([{"x": "b"}]) == [["b"]]


def test_threads_get_their_own_texts() -> None:
    renderer = Renderer("{{ x }}")

    def asked(word: str) -> list[Any]:
        return [renderer.render([{"x": word}]) for _ in range(20)]

    assert in_threads(*(partial(asked, word) for word in "abcd")) == [[[[word]]] * 20 for word in "abcd"]


def test_an_interruption_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = Renderer("{{ x }}")
    renderer.render([{"x": "a"}])
    process = renderer._process
    assert process is not None

    def interrupt(*_: object) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("llama.untrusted.template._ask", interrupt)
        with pytest.raises(KeyboardInterrupt):
            renderer.render([{"x": "b"}])
    assert process.poll() is not None
    assert renderer.render([{"x": "c"}]) == [["c"]]


@table(
    "reply",
    [
        *(b"\n", b"[]\n", b'{"texts": [1]}\n', b'{"texts": []}\n', b"{" * 9999 + b"\n", b"\xff\n", b'"texts"\n'),
        *(b'{"texts": [["a", "no word", "b"]]}\n', b'{"texts": [["a", 1, "b"]]}\n', b'{"texts": [[]]}\n'),
    ],
)
def test_a_malformed_reply_is_an_error(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.untrusted.template._ask", lambda *_: reply)
    with pytest.raises(TemplateFailed, match="gave no text"):
        render("{{ 1 }}")


@unix
def test_a_process_that_waits_is_ended_after_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.untrusted.template.WALL_SECONDS", 0.2)
    renderer = Renderer("{{ 1 }}")
    process = renderer._running()
    import signal

    process.send_signal(signal.SIGSTOP)
    with pytest.raises(TemplateFailed, match=r"longer than 0\.2 seconds"):
        renderer.render([{}])
