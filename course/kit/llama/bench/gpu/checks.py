"""Stands in for the checks of kernels for GPUs."""

from typing import Any


def run_checks(*given: Any) -> Any:
    raise ValueError("the exercise has no kernels for GPUs to check")
