"""A model with parameters that are always in fp32: numbers that do not decay, and a matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from surogate_core.dsl import Dim, Param, Stack
from surogate_core.dsl.inits import constant, log_of_uniform, uniform
from surogate_core.kernels import ops
from surogate_testing import tiny

D = Dim("hidden_size")
FP32 = ("decay", "mix.weight")
"""Ends of the names of the parameters in fp32."""


class DecayingBlock(tiny.SmallBlock):
    """Two projections between a matrix and the rates of its features, which are computed in fp32."""

    decay = Param("decay", D, init=log_of_uniform(1, 4), role="scalar", dtype="fp32")
    mix = Param("mix.weight", D, D, init="normal", role="weight", dtype="fp32")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        assert self.decay.dtype == self.mix.dtype == torch.float32
        h = ops.rms_norm(x, self.norm, self.eps)
        mixed = h.float() @ self.mix.t() * torch.exp(-self.decay.exp())
        return x + self.down(torch.relu(self.up(h + mixed.to(x.dtype))))


class Decaying(tiny.SmallModel):
    """Two of these blocks."""

    layers = Stack(DecayingBlock, Dim("num_hidden_layers"), "layers.{i}.")


class BufferedBlock(DecayingBlock):
    """With numbers that no run trains, in the model's dtype and in fp32."""

    factor = Param("factor", 1, init=constant(0.5), role="scalar", trained=False)
    shift = Param("shift", D, init=uniform(-1, 1), role="scalar", dtype="fp32", trained=False)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        return (super().forward(x, tables) * self.factor + self.shift).to(x.dtype)


class Buffered(tiny.SmallModel):
    """Two of these blocks."""

    layers = Stack(BufferedBlock, Dim("num_hidden_layers"), "layers.{i}.")
