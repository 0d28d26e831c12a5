"""Statistics on how well a recipe's delayed scales fit, from figures that are read with each step.

Shape suffixes: P slots, K roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surogate_core.engine.engine import Engine
from surogate_core.events import PrecisionStats

WINDOW = 50
"""Steps between two events."""

FULL = 1 + 2.0**-20
"""Used range above which values were clipped: a scale is rounded, so a value as large as before may exceed 1."""


class PrecisionWatch:
    """Counts tensors that saturated or underflowed since the last `take`."""

    def __init__(self, names: Sequence[str], formats: Mapping[str, float]):
        """`names`: names of the slots, [P]; `formats`: see `RecipeState`, [K]."""
        self._names, self._roles = names, tuple(formats)
        self._floors_K = torch.tensor(list(formats.values()), dtype=torch.float32)
        self._clear()

    @classmethod
    def of(cls, engine: Engine) -> PrecisionWatch | None:
        """The watch of an engine; None if its recipe has no delayed scales."""
        state = engine.recipe_state
        return cls(engine.slot_names(), state.formats) if state is not None and state.formats else None

    def _clear(self) -> None:
        self._steps = 0
        self._counts_3K = torch.zeros(3, len(self._roles), dtype=torch.int64)
        self._worst = (0.0, "")

    @property
    def columns(self) -> int:
        """K."""
        return len(self._roles)

    def observe(self, used_PK: Tensor) -> None:
        """Take a step's used ranges, on the host. A value that is not finite belongs to a step that is not applied."""
        scaled = torch.isfinite(used_PK) & (used_PK > 0)
        counted = (scaled, scaled & (used_PK > FULL), scaled & (used_PK < self._floors_K))
        self._steps += 1
        self._counts_3K += torch.stack([found.sum(0) for found in counted])
        largest, place = torch.where(scaled, used_PK, 0.0).view(-1).max(0)
        if float(largest) > max(FULL, self._worst[0]):
            slot, role = divmod(int(place), self.columns)
            self._worst = float(largest), f"{self._names[slot]} {self._roles[role]}"

    def take(self, step: int) -> PrecisionStats | None:
        """The event of the steps up to `step` since the last one; None if nothing was scaled in them."""
        seen, saturated, underflowed = self._counts_3K.tolist()
        (excess, worst), steps = self._worst, self._steps
        self._clear()
        if not any(seen):
            return None

        def shares(counts: Sequence[int]) -> dict[str, float]:
            return {role: n / of for role, n, of in zip(self._roles, counts, seen, strict=True) if of}

        return PrecisionStats(
            step=step,
            steps=steps,
            saturated=shares(saturated),
            underflowed=shares(underflowed),
            worst=worst,
            worst_excess=excess,
        )
