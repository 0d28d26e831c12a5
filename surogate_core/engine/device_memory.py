"""How torch's allocator asks the GPU for memory."""

from __future__ import annotations

import os

import torch

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""What a user sets torch's allocator by."""


def grow_segments() -> None:
    """Let segments grow where they are, unless the user has set the allocator.

    Else a tensor that lives keeps the whole segment that it was cut from, and what is reserved goes far beyond what
    is used: weights that are rounded at load and pieces that come and go leave such holes.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
