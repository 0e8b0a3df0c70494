"""ONNX Runtime GenAI as an engine of the benchmark, on the CPU, with the weights of our model.

Give it to the benchmark as --engine scripts/engines/onnxruntime.py:OnnxRuntime.
"""

import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import torch

from llama.bench.cell import Cell
from llama.bench.run.batching_engine import BatchingEngine
from llama.bench.run.engines import Prompts, Run, Source, check_on_cpu, needed
from llama.checkpoint.export import save_huggingface
from llama.host.machine import dtype_name
from llama.model import Transformer
from llama.streaming import TextCodec


class OnnxRuntime(BatchingEngine):
    """ONNX Runtime GenAI with the model that its own builder makes. It computes and caches in float32.

    It masks one id of the vocabulary as padding, and one id ends a row. Here both are an id that no prompt has.
    """

    name = "ONNX Runtime"
    quantized = ("int8", "int4")

    @staticmethod
    def package() -> Any:
        with needed("onnxruntime", "onnxruntime-genai"):
            import onnxruntime_genai
        return onnxruntime_genai

    @classmethod
    def load(cls, source: Source, cell: Cell) -> Self:
        return cls(source.build(), source.tokenizer, quantize=cell.quantize)

    def __init__(self, model: Transformer, tokenizer: TextCodec, *, quantize: str | None = None) -> None:
        """Build the model, with `quantize` in int8 or int4, in a folder that exists as long as the engine.

        Raises ValueError for another dtype than float32, and for a model that the builder cannot convert.
        """
        check_on_cpu(self.name, model)
        self._genai = self.package()
        dtype = model.norm.weight.dtype
        if dtype != torch.float32:
            raise ValueError(f"ONNX Runtime is run in fp32 here, not in {dtype_name(dtype)}; use --dtype fp32")
        folder = TemporaryDirectory(prefix="llama-kv-")
        weakref.finalize(self, folder.cleanup)
        self._built = _build(model, Path(folder.name), quantize or "fp32")
        self._model, self._unused = None, -1
        self._chosen: set[int] = set()  # ids of runs that were repeated
        # The builder lets products of packed weights round their activations to 8 bits: accuracy_level=4.
        weights = f"{quantize} weights, accuracy_level=4" if quantize else "fp32"
        path = f"onnxruntime-genai {self._genai.__version__}, {weights}"
        nbytes = sum(file.stat().st_size for file in self._built.glob("model.onnx*"))
        super().__init__(model.args, tokenizer, path=path, weights_bytes=nbytes)

    def prepare(self, prompts: Prompts) -> None:
        """Load the model with an id that no prompt has as padding and as end of text, unless it is loaded so."""
        used = self._chosen.union(*prompts)
        if self._model is not None and self._unused not in used:
            return
        unused = next((id for id in reversed(range(self.args.vocab_size)) if id not in used), None)
        if unused is None:
            raise ValueError("ONNX Runtime needs an id that no prompt has, and the prompts have all; use fewer prompts")
        config = self._genai.Config(str(self._built))
        ends = {"eos_token_id": unused, "pad_token_id": unused}
        options = {"intra_op_num_threads": torch.get_num_threads()}
        config.overlay(json.dumps({"model": {**ends, "decoder": {"session_options": options}}}))
        self._model = None  # frees the memory of the one before
        self._model, self._unused = self._genai.Model(config), unused

    def run(self, prompts: Prompts, output_len: int, *, kv_caching: bool, steps: int | None = None) -> Run:
        """Continue every prompt; see `BatchingEngine`. If a row chose the end of text, repeat all with another one."""
        run = super().run(prompts, output_len, kv_caching=kv_caching, steps=steps)
        while any(self._unused in row for row in run.ids):
            self._chosen.update(*run.ids)
            run = super().run(prompts, output_len, kv_caching=kv_caching, steps=steps)
        return run

    def steps(self, prompts: Prompts, output_len: int) -> Iterator[list[list[int]]]:
        """Yield the tokens that each step made; see `BatchingEngine`. Shorter rows are padded on the right."""
        longest = max(map(len, prompts))
        padded = [[*row, *[self._unused] * (longest - len(row))] for row in prompts]
        generator = self._generator(len(prompts), longest + output_len)
        generator.append_tokens(_batch(padded))
        while not generator.is_done():
            generator.generate_next_token()
            yield [[int(id)] for id in generator.get_next_tokens()]

    def most_likely(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Return the most likely token after every position of a text, and what executed the forwards.

        ONNX Runtime GenAI returns the logits of the last position alone, so the text is fed token by token.
        """
        self.prepare([ids])
        generator, found = self._generator(1, len(ids) + 1), list[int]()
        for id in ids:
            generator.append_tokens(_batch([[id]]))
            found.append(int(generator.get_logits()[0, -1].argmax()))
        return found, self.path

    def _generator(self, rows: int, length: int) -> Any:
        """Return a greedy generator with a cache of `length` positions a row."""
        params = self._genai.GeneratorParams(self._model)
        params.set_search_options(max_length=length, do_sample=False, batch_size=rows)
        return self._genai.Generator(self._model, params)


def _batch(rows: list[list[int]]) -> Any:
    return torch.tensor(rows, dtype=torch.int32).numpy()


def _build(model: Transformer, folder: Path, precision: str) -> Path:
    """Run the package's builder on the model, and return the folder of what it made. Raises ValueError."""
    weights, built = folder / "weights", folder / "built"
    save_huggingface(model, weights)
    _write_tokenizer(weights, model.args.vocab_size)
    command: list[str | Path] = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", weights, "-o", built]
    command += ["-p", precision, "-e", "cpu", "-c", folder / "cache"]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=offline)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        raise ValueError(f"the builder of ONNX Runtime GenAI cannot convert the model: {last}")
    shutil.rmtree(weights)
    return built


def _write_tokenizer(folder: Path, size: int) -> None:
    """Write a vocabulary for the builder. It is never used, because the engine gets ids and returns ids."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = WordLevel({f"t{id}": id for id in range(size)}, unk_token="t0")
    Tokenizer(vocabulary).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t0", "eos_token": "t0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
