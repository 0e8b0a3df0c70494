"""The model `llama_kv` of lm-eval: its requests, answered through a kind of cache.

lm-eval 0.4 finds no models of other packages, so this module registers its own and runs lm-eval's command:
`python -m llama.quality.lm_eval --model llama_kv --model_args ckpt_dir=...,kv_cache=snapkv:0.5 --tasks ...`. A program
imports it instead. Texts run one after another.
Source: lm-eval, https://github.com/EleutherAI/lm-evaluation-harness.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from llama.api import load
from llama.host.progress import progress_bar
from llama.texts.session import Session
from llama.tokenizer.chat import ChatFormat
from llama.untrusted.template import DialogRefused

_PIECE = 256  # tokens whose logits are in memory at a time
_MAX_GEN_TOKS = 256  # tokens of an answer if a task does not say, as with lm-eval's `hf`
_SETTINGS = ("temperature", "top_p", "top_k")


@register_model("llama_kv")
class LlamaKV(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A model of this library for lm-eval.

    A context is fed as a prompt, and what follows it is fed through the cache: all at once if the kind is lossless,
    otherwise token by token, so that each token reads what the kind has stored. A lossless kind keeps the beginning
    that two contexts share; a lossy one is fed every distinct context from the start, so no result depends on another.
    """

    def __init__(
        self,
        ckpt_dir: str,
        kv_cache: str = "static",
        device: str = "auto",
        dtype: str = "auto",
        fast: bool = False,
        quantize: str | None = None,
        max_seq_len: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
    ) -> None:
        """Load the model; see `llama.load`. Raises ValueError for a batch size above 1."""
        super().__init__()
        if str(batch_size) != "1" or max_batch_size is not None:
            raise ValueError(f"batch_size={batch_size}: texts run one after another; leave it out")
        options: dict[str, Any] = {"device": device, "dtype": dtype, "fast": fast, "quantize": quantize}
        self.model, self.codec = load(ckpt_dir, kv_cache=kv_cache, max_seq_len=max_seq_len, **options)
        self.limit = self.model.args.max_seq_len
        self._session = self.model.session(self.codec)
        self.lossless = all(layer.lossless for layer in self._session.cache.layers)

    # ---- tokens ------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return int(self.codec.stop_tokens[0])

    @property
    def prefix_token_id(self) -> int:
        return self.eot_token_id if self.codec.bos_id is None else self.codec.bos_id

    @property
    def max_length(self) -> int:
        return self.limit

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        """Return the ids of a text, in which special tokens become their ids.

        If the tokenizer adds BOS, it is added, by default unless the text begins with BOS's own text.
        """
        if add_special_tokens is None:
            bos = self.codec.bos_id
            add_special_tokens = bos is None or not string.startswith(self.codec.decode([bos]))
        bos_added = self.codec.adds_bos and add_special_tokens
        return self.codec.encode(string, bos=bos_added, eos=False, allowed_special="all")

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the ids of a context, and those that the continuation adds to them.

        lm-eval splits the ids of the joined text behind as many as the context has. If the continuation merges into the
        context's last tokens, no id may be left ("hel" + "lo"). lm-eval's `hf` stops there; here the continuation is
        encoded alone.
        """
        before, after = super()._encode_pair(context, continuation)
        if not after:
            spaces = context[len(context.rstrip()) :]  # lm-eval counts them to the continuation
            text = spaces + continuation
            after = self.codec.encode(text, bos=False, eos=False, allowed_special="all", begins=False)
        return before or [self.prefix_token_id], after

    # ---- chats -------------------------------------------------------------------------------------------------------

    @cached_property
    def _format(self) -> ChatFormat:
        return ChatFormat(self.codec)

    @property
    def tokenizer_name(self) -> str:
        """A digest of the tokenizer and its chat template, by which lm-eval names requests that it stores."""
        return self.codec.fingerprint()

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the text of the chat template, which lm-eval writes into its results."""
        return self.codec.chat_template or self._format.name

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a dialog and of the opening of the answer, without system messages if these are rejected.

        Raises ValueError for a task that begins the answer itself.
        """
        if not add_generation_prompt:
            raise ValueError("gen_prefix of the task cannot be used with --apply_chat_template; leave one of them out")
        dialog: Any = chat_history
        try:
            return self._format.render(dialog).text
        except DialogRefused:
            return self._format.render([message for message in dialog if message["role"] != "system"]).text

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], disable_tqdm: bool = False, **_: object
    ) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding writes it."""
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda number: requests[number][1])  # equal beginnings meet
        with progress_bar("scoring", total=len(order), unit="text") as bar:
            for number in order:
                texts, context, continuation = requests[number]
                found[number] = self.score(context, continuation)
                self.cache_hook.add_partial("loglikelihood", texts, found[number])
                bar.update()
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows as long as the model's limit."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.limit,
                context_len=1,
            )
            found.append(sum(self.score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what the model writes after each context, up to a stop string, without special tokens.

        Raises ValueError for a setting that this library does not have.
        """
        found = [""] * len(requests)
        contexts = [self.tok_encode(request.args[0]) for request in requests]
        special = set(self.codec.special_tokens.values())
        with progress_bar("generating", total=len(requests), unit="text") as bar:
            for number in sorted(range(len(requests)), key=lambda number: contexts[number]):
                context, given = requests[number].args
                settings = normalize_gen_kwargs(dict(given), _MAX_GEN_TOKS)
                stop, new = settings.pop("until", None) or [], settings.pop("max_gen_toks")
                sampled = settings.pop("do_sample", False)
                if unknown := settings.keys() - set(_SETTINGS):
                    raise ValueError(f"generation_kwargs {', '.join(sorted(unknown))} is not known; leave it out")
                if not sampled:
                    settings = {"temperature": 0.0}
                if new >= self.limit:
                    raise ValueError(f"max_gen_toks={new} must be below the model's max_seq_len={self.limit}")
                session = self._fed(contexts[number][-(self.limit - new) :])
                ids = session.generate(new, stop=stop, seed=number, **settings)["ids"]
                text = self.codec.decode(id for id in ids if id not in special)
                found[number] = postprocess_generated_text(text, stop, None)
                self.cache_hook.add_partial("generate_until", (context, given), found[number])
                bar.update()
        return found

    # ---- the cache ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether each of its tokens is the most likely one.

        A context that is too long loses its beginning. Raises ValueError for a continuation without tokens, or above
        the model's limit.
        """
        if not continuation:
            text = self.codec.decode(context)[-40:]
            raise ValueError(f"the continuation of {text!r} has no tokens; leave this choice out of the task")
        if len(continuation) > self.limit:
            raise ValueError(f"a continuation has {len(continuation)} tokens, and the model's limit is {self.limit}")
        context = context[-(self.limit + 1 - len(continuation)) :]
        session = self._fed(context)
        assert session.logits is not None  # of the newest token, which `feed` has computed
        ids = torch.tensor(continuation, device=self.model.device)
        total, likely = _scored(session.logits[None], ids[:1])
        cache = session.cache_copy(kv_caching=True) if len(continuation) > 1 else None
        width = _PIECE if self.lossless else 1
        for begin in range(0, len(continuation) - 1, width):
            end = min(begin + width, len(continuation) - 1)
            logits = self.model(ids[None, begin:end], len(context) + begin, cache=cache, logits="all")[0]
            some, all_likely = _scored(logits, ids[begin + 1 : end + 1])
            total, likely = total + some, likely and all_likely
        return total, likely

    def _fed(self, context: list[int]) -> Session:
        """Return a session with the context as its text."""
        if not self.lossless and context != self._session.tokens:
            self._session = self.model.session(self.codec)
        self._session.feed(context)
        return self._session


def _scored(logits: torch.Tensor, ids: torch.Tensor) -> tuple[float, bool]:
    """Return the log-likelihood of ids, (n,), by logits, (n, vocab), and whether each is the most likely one."""
    chosen = logits.float().log_softmax(-1).gather(1, ids[:, None])
    return float(chosen.sum(dtype=torch.float64)), bool((logits.argmax(-1) == ids).all())


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
