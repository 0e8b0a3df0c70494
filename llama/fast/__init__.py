"""Faster ways to run a model: native code on a CPU, CUDA graphs and Triton kernels on a GPU; `choose` is the way in."""
