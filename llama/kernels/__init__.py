"""Kernels of our own, each a drop-in for a plain function; imported only where they are asked for."""
