"""Time the demo model here and in transformers, in one process, on the same threads, turn by turn.

python scripts/compare_speed.py [--batch_size 1] [--input_len 256] [--output_len 32] [--repeats 5] [--kv_caching=False]

Both run eagerly in float32, greedily, on random token ids, and neither stops early. transformers gets a model of the
same shape; its weights are random, on which no time depends. Needs the dev extra.
"""

import platform
import statistics
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from llama import ModelArgs, Transformer, cli, load

Timer = Callable[[], tuple[float, float]]  # seconds of prefill and of all decode steps


class Clock(BaseStreamer):
    """Notes when transformers hands over the prompt and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None: ...


def ours(model: Transformer, prompts: list[list[int]], output_len: int, kv_caching: bool) -> Timer:
    def run() -> tuple[float, float]:
        times: list[float] = []
        model.generate_tokens(
            prompts,
            output_len,
            temperature=0,
            kv_caching=kv_caching,
            on_step=lambda step: times.append(time.perf_counter()),
        )
        return times[1] - times[0], time.perf_counter() - times[1]

    return run


def theirs(model: LlamaForCausalLM, prompts: list[list[int]], output_len: int, use_cache: bool) -> Timer:
    ids = torch.tensor(prompts)

    def run() -> tuple[float, float]:
        clock = Clock()
        with torch.inference_mode():
            started = time.perf_counter()
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=output_len,
                min_new_tokens=output_len,
                do_sample=False,
                use_cache=use_cache,
                pad_token_id=0,
                streamer=clock,
            )
        return clock.times[1] - started, clock.times[-1] - clock.times[1]

    return run


def twin(args: ModelArgs) -> LlamaForCausalLM:
    """Return transformers' model of the same shape."""
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.dim,
        intermediate_size=args.ffn_dim,
        num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads,
        num_key_value_heads=args.n_kv_heads,
        head_dim=args.head_dim,
        rms_norm_eps=args.norm_eps,
        max_position_embeddings=args.max_seq_len,
        tie_word_embeddings=args.tied_head,
        rope_parameters={"rope_type": "default", "rope_theta": args.rope_theta},
    )
    return LlamaForCausalLM(config).eval()


def main(
    *,
    batch_size: int = 1,
    input_len: int = 256,
    output_len: int = 32,
    repeats: int = 5,
    threads: int = 2,
    kv_caching: bool = True,
    peer: bool = True,
) -> int:
    """Print prefill and decode tokens/s of both (`peer=False`: of ours), and the ratios, as medians of the repeats."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    model, _ = load("demo", device="cpu", dtype="fp32")
    prompts = torch.randint(model.args.vocab_size, (batch_size, input_len)).tolist()
    engines = {"llama": ours(model, prompts, output_len, kv_caching)}
    if peer:
        engines["transformers"] = theirs(twin(model.args), prompts, output_len, kv_caching)
    for run in engines.values():
        run()  # warm-up of the same shape
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(repeats):
        for name, run in engines.items():
            times[name].append(run())
    print(
        f"{platform.processor() or platform.machine()}, {threads} threads, torch {torch.__version__}, float32, "
        f"batch {batch_size}, {input_len} in, {output_len} out, cache {'on' if kv_caching else 'off'}, "
        f"median of {repeats}"
    )
    for phase, tokens in enumerate((batch_size * input_len, batch_size * (output_len - 1))):
        speeds = {name: [tokens / run[phase] for run in runs] for name, runs in times.items()}
        words = ", ".join(f"{name} {statistics.median(values):.1f}" for name, values in speeds.items())
        if peer:
            ratios = [a / b for a, b in zip(speeds["llama"], speeds["transformers"], strict=True)]
            words += f"; ratio {statistics.median(ratios):.2f}"
        print(f"{('prefill', 'decode')[phase]} tokens/s: {words}")
    whole = {name: statistics.median(sum(run) for run in runs) for name, runs in times.items()}
    print("whole job: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in whole.items()))
    return 0


if __name__ == "__main__":
    cli.main(main)
