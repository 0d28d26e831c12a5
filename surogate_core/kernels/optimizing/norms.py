"""Norms of many values: within 1e-6 of float64 however many there are, whatever the number of threads.

Shape suffixes: B tensors, N values of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

RUN = 512
"""Values that a CPU sums in fp32: at most 64 a lane, whose rounding is below 1e-6 even where all values are equal."""


def long_norm(x_BN: Tensor) -> Tensor:
    """[...] fp32: the Euclidean norm over the last dim, which may be as long as a model; contiguous, fp32 or bf16.

    On a CPU `torch.linalg.vector_norm` adds all squares into the few fp32 lanes of one register: the norm of 3e8 normal
    values is 4 % too small, the norm of equal values 30 %. So runs of `RUN` values are added in fp32 and the runs in
    float64, which takes the same time. On a GPU `vector_norm` itself is accurate: it sums at most 256 values in a
    thread and then in a tree.
    """
    if x_BN.device.type != "cpu":
        return torch.linalg.vector_norm(x_BN, dim=-1, dtype=torch.float32)
    if x_BN.dtype != torch.float32:
        x_BN = x_BN.float()  # a norm that converts while it reads adds one value at a time
    whole = x_BN.shape[-1] // RUN * RUN
    runs = torch.linalg.vector_norm(x_BN[..., :whole].unflatten(-1, (whole // RUN, RUN)), dim=-1).double()
    rest = torch.linalg.vector_norm(x_BN[..., whole:], dim=-1).double()
    return (torch.linalg.vector_norm(runs, dim=-1).square() + rest.square()).sqrt().float()
