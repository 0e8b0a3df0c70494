"""After a call that did not end, a cache and a session give the right result or refuse by name."""

import random

import pytest
import torch
from interrupts import Texts
from oracles import tiny_model

KINDS = ["static", "concat", "paged", "paged:40", "int8", "int4", "window:20+3", "rotated:k4v3+2", "kivi:2+16", "fp8"]
KINDS += ["quest:16", "static@0;int4", "random", "adakv:0.3", "h2o:20", "tova", "knorm", "keydiff", "lagkv"]
KINDS += ["snapkv:30", "pyramidkv", "expected-attention", "duo-attention"]
INTERRUPTS = 10_000  # of all kinds


@torch.inference_mode()
def interrupt(kind: str, count: int) -> None:
    model = tiny_model(head_dim=32, max_seq_len=128, dtype=torch.float32)
    texts, dice = Texts(model, kind), random.Random(kind)
    for _ in range(count):
        texts.interrupt(dice)


@pytest.mark.parametrize("kind", ["static", "paged", "int8", "h2o:20"])
def test_after_an_interrupt_a_cache_is_right_or_refuses(kind: str) -> None:
    interrupt(kind, 6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_after_any_interrupt_a_cache_is_right_or_refuses(kind: str) -> None:
    interrupt(kind, INTERRUPTS // len(KINDS) + 1)
