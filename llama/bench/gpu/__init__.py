"""Checks and times the kernels of a GPU, which no cell of a table shows; `scripts/gpu_report.py` runs them."""
