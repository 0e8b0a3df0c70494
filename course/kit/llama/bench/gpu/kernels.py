"""Stands in for the times of kernels for GPUs."""

from typing import Any


def profile_step(*given: Any) -> Any:
    raise ValueError("the exercise has no kernels for GPUs to profile")


def time_kernels(*given: Any) -> Any:
    raise ValueError("the exercise has no kernels for GPUs to time")
