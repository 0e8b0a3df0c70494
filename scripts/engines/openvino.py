"""OpenVINO GenAI as an engine of the benchmark, on the CPU, with the weights of our model or of a .gguf file.

Give it to the benchmark as --engine scripts/engines/openvino.py:OpenVino.
"""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch

from llama.args import ModelArgs
from llama.bench.cell import Cell
from llama.bench.run.batching_engine import BatchingEngine
from llama.bench.run.engines import Prompts, Source, check_on_cpu, needed
from llama.checkpoint.assemble import Weight
from llama.checkpoint.gguf_writer import planned, write_gguf
from llama.host.machine import dtype_name
from llama.model import Transformer
from llama.streaming import TextCodec
from llama.untrusted.gguf_header import read_gguf_header

# The type of the matrices in the file that is written for it. Its reader has no F32 and no BF16.
_FILE_TYPES = {None: "F16", "int8": "Q8_0", "int4": "Q4_0"}
# dtype: OpenVINO's name of it as a precision, and as a capability of a CPU
_PRECISIONS = {torch.float32: ("f32", "FP32"), torch.bfloat16: ("bf16", "BF16"), torch.float16: ("f16", "FP16")}


class OpenVino(BatchingEngine):
    """OpenVINO GenAI's continuous batching. It computes and caches in the cell's dtype."""

    name = "OpenVINO"
    quantized = ("int8", "int4", "stored")
    whole_in = ("fp16",)  # its reader of files has no other floats

    @staticmethod
    def package() -> Any:
        with needed("openvino", "openvino-genai"):
            import openvino_genai
        return openvino_genai

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        if cell.quantize != "stored":
            return cls.of(source.build(), source.tokenizer, quantize=cell.quantize)
        assert source.file is not None
        return cls(source.file, source.args, source.tokenizer, weights="stored", dtype=source.dtype)

    def __init__(
        self,
        file: Path,
        args: ModelArgs,
        tokenizer: TextCodec,
        *,
        weights: str,
        dtype: torch.dtype,
        resources: ExitStack | None = None,
    ) -> None:
        """Load a .gguf file, whose weights `weights` names. The engine takes over `resources`.

        Raises ValueError for a model that OpenVINO cannot read, or would compute as another one or in another dtype.
        """
        self._genai = self.package()
        resources = ExitStack() if resources is None else resources
        weakref.finalize(self, resources.close)
        if args.rope_scaling is not None:
            raise ValueError("OpenVINO ignores the RoPE scaling of a .gguf file; measure a model without it")
        self._precision, capability = _PRECISIONS.get(dtype, ("", ""))
        core = self._genai.openvino.Core()
        if capability not in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            raise ValueError(f"OpenVINO does not compute in {dtype_name(dtype)} on this CPU; use --dtype fp32")
        self._file = file
        self._pipeline = self._open(prefix_caching=False)
        path = f"openvino-genai {self._genai.__version__.partition('-')[0]}, {weights} weights, "
        path += f"INFERENCE_PRECISION_HINT={self._precision}, KV_CACHE_PRECISION={self._precision}"
        if weights != "F16":  # activations per scale, if the CPU multiplies 8-bit numbers; 0 does not round them
            group = core.get_property("CPU", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
            path += f", DYNAMIC_QUANTIZATION_GROUP_SIZE={group}"
        nbytes = sum(tensor.nbytes for tensor in read_gguf_header(file, arrays=()).tensors.values())
        super().__init__(args, tokenizer, path=path, weights_bytes=nbytes)

    @classmethod
    def of(cls, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> Self:
        """Return an engine with the weights rounded to F16, or with `quantize` to Q8_0 (int8) or Q4_0 (int4)."""
        check_on_cpu("OpenVINO", model)
        cls.package()
        kind, args = _FILE_TYPES[quantize], model.args
        with ExitStack() as stack:
            file = Path(stack.enter_context(TemporaryDirectory(prefix="llama-kv-"))) / "model.gguf"
            parts = planned(args, {name: Weight.of(weight) for name, weight in model.state_dict().items()}, kind)
            write_gguf(file, args, parts, _vocabulary(args.vocab_size))
            dtype = model.norm.weight.dtype
            return cls(file, args, tokenizer, weights=kind, dtype=dtype, resources=stack.pop_all())

    def steps(self, prompts: Prompts, output_len: int) -> Iterator[list[list[int]]]:
        """Yield the tokens that each step made; see `BatchingEngine`."""
        greedy = self._greedy(output_len)
        handles = [self._pipeline.add_request(row, self._tensor(ids), greedy) for row, ids in enumerate(prompts)]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            yield [_read(handle) for handle in handles]

    def cache_bytes(self) -> int:
        """Return the bytes of the cache now."""
        return int(self._pipeline.get_metrics().kv_cache_size_in_bytes)

    def most_likely(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the most likely token after every position of a text, and what executed the forwards.

        OpenVINO shows it only behind a text. So every beginning is a text of its own, with the prefix cache on.
        """
        pipeline, found = self._open(prefix_caching=True), list[int]()
        for end in range(1, len(ids) + 1):
            handle = pipeline.add_request(end, self._tensor(ids[:end]), self._greedy(1))
            pipeline.step()
            found += _read(handle)
        return found, self.path

    def _open(self, *, prefix_caching: bool) -> Any:
        """Return a pipeline over the file, which computes all prompts of a batch in one step."""
        wanted = self._genai.SchedulerConfig()
        wanted.enable_prefix_caching = prefix_caching
        wanted.max_num_batched_tokens = 1 << 20  # the default, 256, cuts prompts into several steps
        wanted.max_num_seqs = 1 << 16
        properties = dict.fromkeys(("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION"), self._precision)
        properties["INFERENCE_NUM_THREADS"] = str(torch.get_num_threads())
        try:
            return self._genai.ContinuousBatchingPipeline(str(self._file), wanted, "CPU", properties)
        except (RuntimeError, IndexError) as error:  # IndexError for a key that it misses in the file
            raise ValueError(f"OpenVINO cannot load {self._file.name}: {error}") from error

    def _tensor(self, ids: Sequence[int]) -> Any:
        return self._genai.openvino.Tensor(torch.tensor([ids]).numpy())

    def _greedy(self, count: int) -> Any:
        """Return the settings for the `count` most likely tokens, past any end-of-text."""
        wanted = self._genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = count, True, False
        return wanted


def _read(handle: Any) -> list[int]:
    """Return the tokens that a row has made since the last call."""
    if not handle.can_read():
        return []
    return [id for output in handle.read().values() for id in output.generated_ids]


def _vocabulary(size: int) -> dict[str, Any]:
    """Return a vocabulary that OpenVINO loads. It is never used, because OpenVINO gets ids and returns ids."""
    ggml: dict[str, Any] = {"model": "gpt2", "pre": "smollm", "bos_token_id": 0, "eos_token_id": 0}
    ggml |= {"tokens": [f"t{id}" for id in range(size)], "merges": ["t 0"]}
    ggml["token_type"] = [3, *[1] * (size - 1)]  # without a control token its tokenizer does not compile
    return {f"tokenizer.ggml.{key}": value for key, value in ggml.items()}
