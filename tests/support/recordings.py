"""A recording made up to be taken apart: any texts, any size, numbers that belong together."""

from collections.abc import Sequence

from llama.args import ModelArgs
from llama.costs import forward_flops, step_bytes
from llama.watch.record import CacheLayout, Candidate, Moment, Recording, StepWork

DEMO = ModelArgs(
    dim=576, n_layers=30, n_heads=9, n_kv_heads=3, vocab_size=49152, multiple_of=256, tied_head=True, max_seq_len=8192
)
SMALL = ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=40, multiple_of=16, tied_head=True)


def made_up(
    texts: Sequence[str] = ("Once", " upon", " a"),
    *,
    steps: int = 4,
    args: ModelArgs = SMALL,
    notes: Sequence[str] = (),
) -> Recording:
    """Return a recording of a static cache; `texts` are the prompt, and what is drawn goes through them in turn."""
    prompt = len(texts)
    text = tuple(texts[place % prompt] for place in range(prompt + steps))
    position = 2 * args.n_kv_heads * args.head_dim * 4
    moments = []
    for step in range(steps):
        end = prompt + step
        works = []
        for start, fed, cached in ((end - 1 if step else 0, 1 if step else end, end), (0, end, 0)):
            flops = forward_flops(args, seqlen=fed, start_pos=start)
            read = step_bytes(args, rows=1, context=start, itemsize=4)
            held = args.n_layers * position * (prompt + steps) if cached else 0
            works.append(StepWork(start, fed, flops, read, held, ms=1.5 * fed))
        levels = bytes((7 * place) % 256 for place in range(args.n_heads * end))
        likely = tuple(Candidate(text[end], 0.5 / (1 + place), place == 0) for place in range(5))
        moments.append(Moment(*works, (tuple(range(end)),) * args.n_layers, (levels,) * args.n_layers, likely))
    layout = CacheLayout("static", position, position, bits=0, group=0, window=0, block=0, reserved=prompt + steps)
    return Recording(args, layout, "float32 on cpu", 4, prompt, text, text, tuple(moments), tuple(notes))
