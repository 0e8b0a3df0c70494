"""CUDA graphs on a CPU: a recording repeats the operations that were executed, on the tensors that they had."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from llama.fast.graph_buffers import Recorder, Replay

# Named as in inference mode. Not seen: `Tensor.tolist` and `Tensor.numpy`, no operations, and masks as indices.
READS = {getattr(torch.ops.aten, name).default for name in ("item", "is_nonzero", "equal", "nonzero", "masked_select")}


class Tape(TorchDispatchMode):
    """The operations under `with`. Refuses READS, by which the host would wait for a number: a capture fails there."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            raise RuntimeError(f"{function} is not permitted when stream is capturing")
        made = function(*args, **(kwargs or {}))
        self._calls.append((function, args, kwargs or {}, made))
        return made

    @torch.inference_mode()
    def replay(self) -> None:
        for function, args, kwargs, made in self._calls:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():  # otherwise a view, or in place
                    old.copy_(new)


class Taped(Recorder):
    """Records on a tape where there is no GPU."""

    def __call__(self, step: Replay) -> Replay:
        if self.device.type != "cpu":
            return super().__call__(step)
        step()
        with torch.inference_mode(), Tape() as tape:
            step()
        return tape.replay
