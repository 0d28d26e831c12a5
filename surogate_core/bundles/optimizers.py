"""Optimizers, and the parameter groups that they update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    from torch import Tensor


FLAT_ALIGNMENT = 256
"""Alignment in elements of a parameter's offset in a flat group (1 KiB of fp32), so that a block of 8-bit state never
has two parameters.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamGroup:
    """Trainable parameters that share hyper-parameters, as flat tensors.

    `master` (fp32, or bf16 with `master_dtype=bf16`; parameters that a family declares in fp32 stay there) and `grad`
    (fp32) are 1-D of equal length; `shapes` maps each parameter's name to its (offset in elements, shape) in them, in
    order. Offsets and the length are multiples of `FLAT_ALIGNMENT`. The padding between parameters is zero, and an
    update must not change that.
    """

    name: str
    """Unique among the groups of the run; state is named after it."""
    master: Tensor
    """[P] fp32 or bf16: the weights that are trained."""
    grad: Tensor
    """[P] fp32: their gradients, summed over the step and not clipped yet."""
    shapes: Mapping[str, tuple[int, tuple[int, ...]]]
    """Parameter's name → (offset in elements, shape)."""
    weight_decay: float
    """Decay of every parameter of the group."""
    hidden: frozenset[str] = frozenset()
    """Names of the matrices [outputs, inputs] within blocks: no embedding, no LM head, no adapter, no filters of a
    convolution. Those of all experts of a layer are one parameter [experts, outputs, inputs].
    """
    seed: Tensor | None = None
    """Rounding seed of bf16 masters: 0-d int32, different in every optimizer step; `kernels.rounding.write_master` uses
    it.
    """
    number: int = 0
    """Index among the run's groups; separates their random numbers."""
    first: int = 0
    """Number of the group's first element, where it is one rank's part of a larger group; rounding draws by it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Name of a parameter of which only a part is here → elements of the whole one."""

    def elements(self, name: str) -> int:
        """Elements of the whole parameter."""
        return self.sizes.get(name, math.prod(self.shapes[name][1]))


class Optimizer(Protocol):
    """The optimizer that an `OptimizerSpec` builds: state as named tensors, and a step that a CUDA graph can
    capture.
    """

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """Update every group's master in place, with no host synchronisation.

        `lr`: 0-d fp32. `clip`: 0-d fp32, the factor that gradients are multiplied by.
        `skip`: 0-d fp32, 1 when the gradients are not finite: nothing may change then.
        """

    def state(self) -> dict[str, Tensor]:
        """The live state tensors by name; loading copies into them in place.

        State of a group is named ``GROUP.…``, and what all groups share has no group's name in it.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSpec:
    """An optimizer."""

    name: str
    """The value of `optimizer`."""
    build: Callable[[Sequence[ParamGroup], Any], Optimizer]
    """(groups, options) → the optimizer with zeroed state."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    state_bytes_per_parameter: float = 8.0
    """Bytes of state per parameter, for the prediction of `surogate plan`."""
    master_dtypes: tuple[Literal["fp32", "bf16"], ...] = ("fp32",)
    """The `master_dtype`s that it supports; bf16 by `surogate_core.kernels.optimizing.rounding.write_master`."""
    rule: str | None = None
    """Name of its update rule. Optimizers with the same rule train alike, and `surogate plan --fit` proposes the one
    with less state. None: no other has this rule.
    """
    cpu_cost: float = 1.0
    """Time of its step on a CPU as a multiple of the time of fused AdamW; for `surogate plan --fit`."""
    rate_scale: float = 1.0
    """Its usual learning rates as a multiple of AdamW's, for the warning about a rate far outside of them."""
    adapters: bool = True
    """Whether it supports adapters; otherwise it is refused with `lora`."""
    whole_matrices: bool = True
    """Whether an update needs the whole matrix: then several GPUs keep masters and state whole (`zero_level=0`). False
    promises that each rank may update any range of a parameter, in units of `FLAT_ALIGNMENT` elements, with the same
    result, and that state which is named ``GROUP.…`` lists the group's elements in order along its first dimension.
    """
