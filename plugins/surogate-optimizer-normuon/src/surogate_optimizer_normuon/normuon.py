"""NorMuon (arXiv 2510.05491) for hidden matrices, 8-bit AdamW for the rest.

B matrices [R rows = outputs, C columns = inputs] of one shape are treated together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.plugin import adamw_8bit, bundles, compute
from surogate_optimizer_normuon import NorMuonOptions

POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
)
"""(a, b, c) of five steps (arXiv 2505.16932, algorithm 1), before the safety factor."""
SAFETY = 1.01
"""Each polynomial is evaluated at x / 1.01: rounding to bf16 may lift a singular value above 1."""
EPSILON = 1e-8
"""Added to the root of a row's second moment."""


def polar(m_BRC: Tensor) -> Tensor:
    """About U Vᵀ of each matrix M = U S Vᵀ, in bf16, by Polar Express: every S becomes about 1.

    Singular values above about a thousandth of ‖M‖_F become values between 0.79 and 1.12; 0 stays 0.
    """
    tall = m_BRC.shape[1] > m_BRC.shape[2]
    x = m_BRC.mT if tall else m_BRC
    norm = compute.long_norm(m_BRC.flatten(1))[:, None, None]
    x = (x / (SAFETY * norm + 1e-7)).bfloat16()
    for a, b, c in POLAR_EXPRESS:
        square = x @ x.mT
        inner = torch.baddbmm(square, square, square, beta=b / SAFETY**3, alpha=c / SAFETY**5)
        x = torch.baddbmm(x, inner, x, beta=a / SAFETY)
    return x.mT if tall else x


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """Matrices of one shape of one group: views, and their state."""

    matrices: compute.Matrices
    momentum_BRC: Tensor
    variance_BR: Tensor
    weight_decay: float
    scale: float
    """√max(1, rows / columns)."""


class NorMuon:
    """Per step, of each hidden matrix W with gradient G::

        M = β1·M + (1−β1)·G;  O = polar(M);  v = β2·v + (1−β2)·mean over columns of O²
        Ô = O / (√v + ε), scaled to ‖O‖_F;  W −= lr · (√max(1, R/C)·Ô + wd·W)

    With `cautious_wd` (arXiv 2510.12402) only elements with Ô ⊙ W ≥ 0 decay. All other parameters use 8-bit
    AdamW. A gradient element that is not finite counts as 0, and a skipped step changes nothing.
    """

    def __init__(self, groups: Sequence[bundles.ParamGroup], options: NorMuonOptions):
        self.options = options
        hidden = frozenset(name for group in groups for name in group.hidden)
        self.rest = adamw_8bit.BlockwiseAdamW(
            groups,
            beta1=options.adamw_beta1,
            beta2=options.adamw_beta2,
            epsilon=options.adamw_epsilon,
            chosen=lambda name: name not in hidden,
        )
        self._state = {f"rest.{name}": tensor for name, tensor in self.rest.state().items()}
        self._stacks: list[_Stack] = []
        for group in groups:
            by_shape: dict[tuple[int, int], list[int]] = {}
            for name, (offset, shape) in group.shapes.items():
                if name in group.hidden:
                    # A parameter of all experts [E, R, C] is E matrices, which follow each other.
                    *_, rows, columns = shape
                    starts = range(offset, offset + math.prod(shape), rows * columns)
                    by_shape.setdefault((rows, columns), []).extend(starts)
            for matrix, offsets in by_shape.items():
                self._add(group, matrix, offsets)

    def _add(self, group: bundles.ParamGroup, shape: tuple[int, int], offsets: list[int]) -> None:
        device, (rows, columns) = group.master.device, shape
        momentum_BRC = torch.zeros(len(offsets), rows, columns, device=device)
        variance_BR = torch.zeros(len(offsets), rows, device=device)
        name = f"{group.name}.{rows}x{columns}"
        self._state |= {f"{name}.momentum": momentum_BRC, f"{name}.variance": variance_BR}
        count = math.prod(shape)
        # A stack's temporary tensors are bounded as those of 8-bit AdamW are, but a matrix is not cut.
        together = max(1, adamw_8bit.CHUNK["cuda"] // count)
        for start in range(0, len(offsets), together):
            part = slice(start, start + together)
            self._stacks.append(
                _Stack(
                    matrices=compute.Matrices.of(group, offsets[part], (rows, columns)),
                    momentum_BRC=momentum_BRC[part],
                    variance_BR=variance_BR[part],
                    weight_decay=group.weight_decay,
                    scale=math.sqrt(max(1.0, rows / columns)),
                )
            )

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of every master, in place; see `surogate_core.bundles.Optimizer`."""
        self.rest.step(lr=lr * self.options.rest_lr_factor, clip=clip, skip=skip)
        for stack in self._stacks:
            self._update(stack, lr=lr * (1 - skip), clip=clip, skip=skip)

    def _update(self, stack: _Stack, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        beta1, beta2 = self.options.momentum, self.options.beta2
        compute.matrix_momentum(stack.momentum_BRC, stack.matrices, clip=clip, skip=skip, beta=beta1)
        o_BRC = polar(stack.momentum_BRC)
        squares_BR = compute.long_norm(o_BRC).square_()
        stack.variance_BR.lerp_(squares_BR / o_BRC.shape[2], (1 - beta2) * (1 - skip))
        # All elements of a row have the same factor, so its norm and the matrix's norm need no second pass over the
        # elements.
        inverse_BR = 1 / (stack.variance_BR.sqrt() + EPSILON)
        norm_B = squares_BR.sum(dim=1).sqrt()
        # clamp: of a matrix whose gradients were all 0, both norms are.
        scaled_norm_B = (squares_BR * inverse_BR.square()).sum(dim=1).sqrt().clamp(min=EPSILON)
        compute.matrix_update(
            o_BRC,
            inverse_BR * (norm_B / scaled_norm_B)[:, None] * stack.scale,
            stack.matrices,
            lr=lr,
            weight_decay=stack.weight_decay,
            cautious=self.options.cautious_wd,
        )

    def state(self) -> dict[str, Tensor]:
        """Live state by name."""
        return dict(self._state)
