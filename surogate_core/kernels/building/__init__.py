"""Kernels of packs: compiled, loaded and launched."""
