"""Options of generations, for tests of steppers that must make the plain loop's tokens."""

from hypothesis import strategies as st

from llama.request import Options

GREEDY: Options = {"temperature": 0.0}
WAYS: dict[str, Options] = {
    "greedy": GREEDY,
    "greedy with log-probabilities": {**GREEDY, "logprobs": True},
    "greedy with a penalty": {**GREEDY, "repetition_penalty": 1.7},
    "sampled": {"temperature": 1.3, "top_p": 0.95, "seed": 11},
    "sampled in every way": {
        **{"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
        **{"seed": [4, 5, 6], "logprobs": True, "echo": True},
    },
}


Asked = tuple[list[list[int]], list[int], list[int], Options]


@st.composite
def any_batch(draw: st.DrawFn, vocab_size: int, *, most_stops: int) -> Asked:
    """Draw prompts, their new tokens, stop ids, and one of the first four sets of options."""
    ids = st.integers(0, vocab_size - 1)
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=40), min_size=1, max_size=4))
    room = draw(st.lists(st.integers(0, 40), min_size=len(prompts), max_size=len(prompts)))
    options: Options = draw(st.sampled_from([*WAYS.values()][:4]))
    return prompts, room, draw(st.lists(ids, max_size=most_stops)), options
