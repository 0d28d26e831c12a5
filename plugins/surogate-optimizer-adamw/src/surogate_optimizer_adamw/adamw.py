"""AdamW (arXiv 1711.05101) over flat groups, one launch a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surogate_core.plugin import bundles, compute
from surogate_optimizer_adamw import AdamWOptions


class AdamW:
    """fp32 first and second moments beside each flat master.

    Decay is applied before the moment's step, as torch.optim.AdamW does:
    ``p *= 1 − lr·wd; p −= lr · m̂ / (√v̂ + ε)``.
    """

    def __init__(self, groups: Sequence[bundles.ParamGroup], options: AdamWOptions):
        self.groups = tuple(groups)
        self.options = options
        self.first = [torch.zeros_like(g.grad) for g in groups]
        self.second = [torch.zeros_like(g.grad) for g in groups]
        device = groups[0].master.device
        # One counter, not one a group: all groups step together.
        self.steps = torch.zeros((), dtype=torch.float32, device=device)

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of every master, in place; see `surogate_core.bundles.Optimizer`."""
        self.steps += 1 - skip
        # At step 0 the bias corrections are 0/0; a skipped first step must still change nothing.
        count = self.steps.clamp(min=1)
        for group, first, second in zip(self.groups, self.first, self.second, strict=True):
            compute.adamw_update(
                first,
                second,
                group,
                count=count,
                lr=lr,
                clip=clip,
                skip=skip,
                beta1=self.options.beta1,
                beta2=self.options.beta2,
                epsilon=self.options.epsilon,
            )

    def state(self) -> dict[str, Tensor]:
        """Live state by name."""
        state = {"steps": self.steps}
        for group, first, second in zip(self.groups, self.first, self.second, strict=True):
            state[f"{group.name}.first"] = first
            state[f"{group.name}.second"] = second
        return state
