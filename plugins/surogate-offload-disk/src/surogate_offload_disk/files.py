"""Memory-mapped files without a name: nothing is left of them when the process ends, however it ends."""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from surogate_core.plugin import MachineError


def mapped(nbytes: int, directory: str) -> Tensor:
    """[nbytes] uint8 zeros on the CPU, which live in a file of the directory for as long as the tensor does.

    All of the file is allocated at once. Raises `MachineError` where the directory has no room for it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        # Named for an instant at most: where the system can, never.
        with tempfile.TemporaryFile(dir=directory, prefix="surogate-offload-") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
            pages = mmap.mmap(file.fileno(), nbytes)
    except OSError as error:
        what = "The disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else "No file can be made"
        raise MachineError(
            f"{what}: {nbytes / 2**30:.2f} GiB for tensors off the device in {directory} ({error.strerror}). "
            f"Fix: free space there, set offload_dir to a directory of another disk, or offload less; "
            f"see `surogate plan`."
        ) from error
    return torch.frombuffer(pages, dtype=torch.uint8)
