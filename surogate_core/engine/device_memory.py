"""GPU memory: the setting of torch's allocator, and giving back what is no longer used."""

from __future__ import annotations

import gc
import os

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables by which a user configures torch's allocator."""


def grow_segments() -> None:
    """Let segments of memory grow in place, unless the user has configured the allocator.

    Otherwise a long-lived tensor keeps the whole segment that it was cut from, and far more memory is reserved than
    used: quantising weights at load and streaming pieces leave such holes.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def give_back() -> None:
    """Free what dropped engines have left on the GPU: they are circles, which only the collector finds."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()
