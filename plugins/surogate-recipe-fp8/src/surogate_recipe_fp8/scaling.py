"""Delayed scales of FP8 tensors: the values of earlier steps determine the scale of the next step.

The rule is Transformer Engine's (`DelayedScaling`, amax_compute_algo "max"); formats are those of
arXiv 2209.05433. A scale multiplies a value before it is rounded to FP8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from surogate_core.plugin import bundles, fp8

ROLES = ("activation", "weight", "gradient")
"""Columns of a slot's row, in order."""
LIMITS = (fp8.E4M3_MAX, fp8.E4M3_MAX, fp8.E5M2_MAX)
"""The largest value of each role's format."""
NORMALS = (2.0**-6, 2.0**-6, 2.0**-14)
"""The smallest normal number of each role's format."""


class DelayedScaling(bundles.RecipeState):
    """A ring buffer (history) of the largest absolute values of each slot and role, and the scales computed from it.

    `rows`: [P, 3] fp32 scales, in the order of `ROLES`; 0 means none yet, and then a tensor's own largest value
    determines its scale. The ring is [history, P, 3] fp32.
    """

    def __init__(self, slots: int, *, history: int, margin: int, device: torch.device):
        self.rows = torch.zeros(slots, len(ROLES), dtype=torch.float32, device=device)
        self.ring = torch.zeros(history, slots, len(ROLES), dtype=torch.float32, device=device)
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.limits = torch.tensor(LIMITS, dtype=torch.float32, device=device)
        self.margin = margin
        self.formats = {role: least / most for role, least, most in zip(ROLES, NORMALS, LIMITS, strict=True)}

    def used_range(self, observed: Tensor) -> Tensor:
        """[P, 3]: the scaled largest values divided by those of the formats; 0 without a scale. See `RecipeState`."""
        return observed * self.rows / self.limits

    def update(self, observed: Tensor, skip: Tensor) -> None:
        """Enter a step's values and compute the scales of the next step; see `RecipeState.update`.

        A value that is not finite does not change its scale and enters the ring as 0. Otherwise it would determine the
        scale for a whole history.
        """
        finite = torch.isfinite(observed)
        kept = self.ring.index_select(0, self.position)[0]
        entry = torch.where(finite, observed, 0.0)
        self.ring.index_copy_(0, self.position, torch.where(skip > 0, kept, entry)[None])
        scales = fp8.scale_of(self.ring.amax(0), self.limits, margin=self.margin, old=self.rows)
        self.rows.copy_(torch.where(finite & (skip == 0), scales, self.rows))
        self.position.copy_((self.position + (skip == 0).long()) % self.ring.shape[0])

    def state(self) -> dict[str, Tensor]:
        """The live tensors: scales, ring, and the index of the ring's next entry."""
        return {"scales": self.rows, "amax_history": self.ring, "amax_position": self.position}
