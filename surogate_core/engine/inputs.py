"""The device tensors that a micro-step reads.

Shape suffixes: N tokens of a micro-batch, S document borders, L layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.dsl.declare import Model
from surogate_core.engine.planning.assembly import EngineSettings


@dataclass(slots=True)
class MicroStepInputs:
    """The device tensors that a micro-step reads; their addresses never change on CUDA."""

    input_ids: Tensor
    labels: Tensor
    whole_positions: Tensor
    """Those of all ranks that share the micro-batch."""
    positions: Tensor
    """This rank's part of them."""
    cu_seqlens: Tensor
    seeds_L8: Tensor
    """[L, 8] int32, as `Engine.seeds` makes them. What a program reads begins at a multiple of 16 bytes: Inductor's
    copy other inputs.
    """
    loss_scale: Tensor
    """0-d fp32: 1 / loss weight of the whole optimizer step, the number of its label tokens where each counts 1."""
    one: Tensor
    """0-d fp32."""
    columns: dict[str, Tensor]
    """Name → [N] fp32: the columns of every micro-batch, in the settings' order."""
    real: Tensor | None
    """[N] bool: which positions are tokens, not padding; None if no block reads it."""
    own: slice
    """This rank's positions of a micro-batch."""

    @classmethod
    def allocate(
        cls, settings: EngineSettings, layers: int, *, reads_real: bool = False, part: int = 0
    ) -> MicroStepInputs:
        """Tensors with the shapes of a run: zeros, and positions and borders of rows with one document each.

        `part`: which part of a micro-batch's positions is this rank's, if several share it.
        """
        n, device = settings.tokens, settings.device
        own = slice(part * n, (part + 1) * n)
        # Programs run on these before the first micro-batch: rows of one document, as an objective may expect.
        total = n * settings.axes.context
        whole = torch.arange(total, dtype=torch.int32, device=device) % settings.max_seqlen
        # Without documents, some kernels would look for the rows of one that is not there.
        borders = torch.arange(settings.borders, dtype=torch.int32, device=device) * settings.max_seqlen
        borders = borders.clamp(max=total)
        borders[-1] = total
        return cls(
            input_ids=torch.zeros(n, dtype=torch.int64, device=device),
            labels=torch.zeros(n, dtype=torch.int64, device=device),
            whole_positions=whole,
            positions=whole[own],
            cu_seqlens=borders,
            seeds_L8=torch.zeros(layers, 8, dtype=torch.int32, device=device),
            loss_scale=torch.zeros((), dtype=torch.float32, device=device),
            one=torch.ones((), dtype=torch.float32, device=device),
            columns={name: torch.zeros(n, dtype=torch.float32, device=device) for name in settings.columns},
            real=torch.ones(n, dtype=torch.bool, device=device) if reads_real else None,
            own=own,
        )

    def tables(self, model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
        """What `model.tables` returns for the micro-batch, at this rank's positions. It is computed from those of whole
        documents, whose lengths may be in it.
        """
        found, whole = model.tables(self.whole_positions, dtype), len(self.whole_positions)
        if whole == len(self.positions):
            return found
        return {name: t[self.own].clone() if t.ndim and len(t) == whole else t for name, t in found.items()}

    def seeds_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """(seed of the layer's dropout masks and number of the first row [2], the layer's other seed 0-d)."""
        seeds_8 = self.seeds_L8[layer]
        return seeds_8[:2], seeds_8[4]

    def load(self, batch: MicroBatch, seeds: Tensor, loss_scale: float) -> None:
        """Copy this rank's positions of a micro-batch in, without waiting for the device."""
        own = self.own
        pairs = [
            (self.input_ids, batch.input_ids[own]),
            (self.labels, batch.labels[own]),
            (self.whole_positions, batch.positions),
            (self.cu_seqlens, batch.cu_seqlens),
            (self.seeds_L8, seeds),
        ]
        assert batch.columns.keys() == self.columns.keys(), f"columns {[*batch.columns]}, not {[*self.columns]}"
        pairs += [(column, batch.columns[name][own]) for name, column in self.columns.items()]
        if self.real is not None and batch.real is not None:
            pairs.append((self.real, batch.real[own]))
        elif self.real is not None:
            self.real.fill_(True)
        for target, value in pairs:
            if target.device.type == "cuda" and not value.is_pinned():
                value = value.pin_memory()
            target.copy_(value, non_blocking=True)
        self.loss_scale.fill_(loss_scale)
