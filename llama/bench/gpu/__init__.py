"""Checks, measures and profiles this library on a GPU; `scripts/gpu_report.py` is the way in."""
