"""The CPU's share of `cpu_training`: AdamW of bf16 masters in one pass over memory, on all cores.

torch's fused AdamW takes fp32 masters alone. bf16 ones would be widened, updated, hashed and rounded by a dozen
operations a piece, 11 ns a parameter on one core where this takes 1.3. Inductor makes C++ of it, vectorised and
threaded, without contracting a product and a sum.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import Kernel, KernelPack, ParamGroup
from surogate_core.kernels.ops import hashed
from surogate_core.kernels.optimizing.rounding import PERIOD, master_key, place, stochastic_bf16
from surogate_core.kernels.registry import KernelTable


def _no_compiler(device: torch.device) -> str | None:
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return None
    return "it needs a C++ compiler (g++, clang++ or c++)"


def _narrow(first: Tensor, second: Tensor, group: ParamGroup, **more: Any) -> bool:
    return group.master.dtype == torch.bfloat16


@cache
def _compiled() -> Any:
    # Sizes differ between the two groups and their last ranges; one program covers all.
    return torch.compile(_update, dynamic=True)


def _update(
    master: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    rates: Tensor,
    key: Tensor,
    at: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    clip, lr, c1, root, weight_decay, skip = rates.unbind()
    keep = skip > 0
    gradient = grad * clip
    m = first + (gradient - first) * (1 - beta1)
    v = second * beta2 + gradient * gradient * (1 - beta2)
    wide = master.float() * (1 - lr * weight_decay)
    wide = wide - lr / c1 * m / (v.sqrt() / root + epsilon)
    counter = torch.arange(master.numel(), dtype=torch.int32) + at
    rounded = stochastic_bf16(wide, hashed(counter ^ key))
    first.copy_(torch.where(keep, first, m))
    second.copy_(torch.where(keep, second, v))
    master.copy_(torch.where(keep, master, rounded))


def adamw_update(
    first: Tensor,
    second: Tensor,
    group: ParamGroup,
    *,
    count: Tensor,
    lr: Tensor,
    clip: Tensor,
    skip: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> None:
    """As `kernels.updates.adamw_update` on bf16 masters: equal to the rounding of fp32, with the same random bits."""
    c1, c2 = (1 - torch.tensor([beta1, beta2], dtype=torch.float64) ** count).unbind()
    rates = torch.stack([clip, lr, c1, c2.sqrt(), torch.tensor(group.weight_decay), skip]).float()
    first_number = place(group, 0)[1]
    assert first_number == 0 or first_number + group.master.numel() <= PERIOD, "a part is within one period"
    at = torch.tensor(first_number, dtype=torch.int32)
    for start in range(0, group.master.numel(), PERIOD):
        part = slice(start, start + PERIOD)
        _compiled()(
            group.master[part],
            group.grad[part],
            first[part],
            second[part],
            rates,
            master_key(group, start),
            at,
            beta1,
            beta2,
            epsilon,
        )


def _kernels() -> Iterable[Kernel]:
    return [
        Kernel(
            op="adamw_update",
            name="inductor",
            function=adamw_update,
            supports=lambda device, dtype: device.type == "cpu",
            takes=_narrow,
        )
    ]


COMPILED_UPDATES = KernelPack(name="inductor", kernels=_kernels, unavailable=_no_compiler)
"""For an engine whose programs are Inductor's."""


def host_kernels(*, compiled: bool) -> KernelTable:
    """The kernels of an optimizer step that the CPU takes; `compiled`: whether the engine's programs are Inductor's."""
    return KernelTable.build(torch.device("cpu"), [COMPILED_UPDATES] if compiled else [])
