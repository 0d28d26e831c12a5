"""Host memory that a CUDA device reads and writes at the same address."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import MachineError

_MAPPED = 2
"""cudaHostRegisterMapped."""


class HostBlock:
    """Zeroed bytes of host memory, page-locked where the device is a GPU, for as long as one of its tensors lives.

    torch's pinned allocator is not used, because it rounds sizes up to a power of two. Raises `MachineError` if the
    machine does not lock that many pages.
    """

    def __init__(self, nbytes: int, device: torch.device):
        # Private pages: shared ones would count as /dev/shm, which containers keep small.
        pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)  # 512 times fewer pages to lock
        self.on_host: Tensor = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
        """[nbytes] uint8 on the CPU."""
        self.on_device: Tensor = self.on_host
        """The same bytes as a tensor of the device."""
        if device.type == "cuda" and nbytes:
            self.on_device = torch.as_tensor(_Locked(self.on_host), device=device)


class _Locked:
    """What the device's view of a block keeps alive: the pages, and their registration with CUDA."""

    def __init__(self, on_host: Tensor):
        self._on_host = on_host
        address, nbytes = on_host.data_ptr(), on_host.nbytes
        runtime: Any = torch.cuda.cudart()
        torch.cuda.init()
        error = int(runtime.cudaHostRegister(address, nbytes, _MAPPED))
        if error:
            raise MachineError(
                f"{nbytes / 2**30:.1f} GiB of host memory could not be locked for the GPU (CUDA error {error}). "
                f"Fix: free host memory, raise the limit of locked memory (`ulimit -l`), or offload less; "
                f"see `surogate plan`."
            )
        weakref.finalize(self, runtime.cudaHostUnregister, address).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
