"""Packed weights: the matrices, the layers that hold them, and the types of a .gguf file."""
