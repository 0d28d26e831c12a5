"""Surogate: train language models at the practical limit of NVIDIA GPUs."""

from surogate_core import __version__

__all__ = ["__version__"]
