"""A text is the text alone, by every door and in every kind of cache; support/crossings.py has the table."""

import pytest
from crossings import DOORS, LENGTHS, MODES, OFFERS, Crossing, differences, kinds, model_of, text_of
from native import needs_a_compiler, served
from tables import cases

from llama.generation import Generation
from llama.request import Options

EACH = {  # by default: prompts that every kind cuts, and short ones of each base
    *(("plain", kind, 300) for kind in kinds()),
    *(("plain", kind, 5) for kind in ("static", "compactor", "own-window")),
    *(("native", kind, 257) for kind in ("static", "paged", "int8", "adakv", "paged@0;static")),
    ("exact", "paged", 257),
}
ALL = [(mode, kind, length) for mode in MODES for kind in kinds() for length in LENGTHS]


@pytest.mark.parametrize(("mode", "kind", "length"), cases(ALL, *EACH))
@needs_a_compiler
def test_a_text_is_the_text_alone_by_every_door(mode: str, kind: str, length: int) -> None:
    found = {name: differences(Crossing(mode, kind, length), name) for name in DOORS}
    assert {name: said for name, said in found.items() if said} == {}


OTHERS = {"generate"}  # `generate_tokens` as text
CHOICE = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"}  # of tokens, not of what is fed
REPORTS = {"logprobs", "echo", "on_step", "device"}


def test_every_method_and_option_by_which_texts_are_fed_is_in_the_table() -> None:
    methods = {name for name, of in vars(Generation).items() if callable(of)}
    options = Options.__annotations__.keys() - CHOICE - REPORTS
    assert {name for name in methods if name[0] != "_"} - OTHERS | options == OFFERS


@needs_a_compiler
def test_the_execution_names_what_runs_with_a_kind_of_cache() -> None:
    model = model_of("native")
    for kind in kinds():
        execution, before = model.execution_with(kind), served(model)
        model.generate_tokens([text_of(40)], 3, temperature=0.0, kv_cache=kind)
        named = execution.runner == "native"
        assert served(model) - before == named * (3 - execution.plain_prompts), (kind, str(execution))
