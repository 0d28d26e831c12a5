"""The memory of this process: waking a GPU, torch's allocator, what is free, and giving back what is not used."""

from __future__ import annotations

import gc
import os
from contextlib import suppress
from threading import Thread

import torch

from surogate_core.engine.planning.prediction import CUDA_CONTEXT
from surogate_core.host import free_host_memory

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables by which a user configures torch's allocator."""


def free_memory(device: torch.device, *, ranks: int = 1) -> int | None:
    """Bytes that this process may take on a device, with CUDA's own as the prediction counts them. For a CPU, its part
    of the host's memory, which all `ranks` share. None if unknown.
    """
    if device.type != "cuda":
        return free_host_memory() // ranks
    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    # The context exists by now, and torch's limit does not count it. The allocator's cache is this process's already,
    # but for what captured graphs work in.
    taken = torch.cuda.memory_allocated(device) + _of_graphs(device)
    return CUDA_CONTEXT + min(free + reserved, allowed) - taken


def _of_graphs(device: torch.device) -> int:
    """Bytes that torch keeps for captured graphs and does not count as allocated: no other tensor gets them."""
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        segments = torch.cuda.memory_snapshot()
    except RuntimeError:  # another allocator than torch's own, such as cudaMallocAsync
        return 0
    own = (s for s in segments if s["device"] == index and tuple(s["segment_pool_id"]) != (0, 0))
    return sum(segment["total_size"] - segment["allocated_size"] for segment in own)


def wake_gpu() -> Thread:
    """Have a thread create CUDA's context, while this one imports modules.

    The thread ends by itself. Who uses the GPU first gets its error, if there is one. Nothing is multiplied:
    cuBLAS would keep a workspace for the thread.
    """

    def work() -> None:
        with suppress(Exception):
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda")

    # No daemon: the interpreter must not end while the driver works.
    thread = Thread(target=work, name="surogate-wake-gpu")
    thread.start()
    return thread


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
