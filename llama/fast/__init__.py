"""Faster ways to run a model: native code on a CPU, CUDA graphs on a GPU. `choose` selects one."""
