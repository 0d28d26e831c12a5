"""The tensors that a piece of a model needs, and the parameters that a class declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from surogate_core.dsl.dims import Dim, Setting
from surogate_core.dsl.experts import ExpertSlot
from surogate_core.dsl.inits import Init, InitName
from surogate_core.dsl.slots import LinearSlot

if TYPE_CHECKING:
    from surogate_core.mesh.axes import AxisName

Role = Literal["weight", "norm", "bias", "embedding", "router", "scalar", "adapter"]
UNDECAYED: frozenset[Role] = frozenset({"norm", "bias", "scalar"})
"""Roles of parameters that weight decay leaves alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor that a piece of the model needs."""

    name: str
    """Name within its piece, e.g. ``q.weight``."""
    hf_name: str
    """Name in a safetensors file; for adapters PEFT's, without its ``base_model.model.`` prefix."""
    shape: tuple[int, ...]
    trainable: bool
    role: Role
    init: Init
    declared: str = ""
    """The class and the attribute that declare it, for messages."""
    summed: AxisName = "ranks"
    """The axis (`mesh.axes`) over whose ranks its gradient is summed."""
    parts: int = 1
    """Ranks each of which has as many experts as its first axis says; the tensor of all is as often as long."""
    dtype: Literal["fp32"] | None = None
    """"fp32": masters, compute copies and exports are in fp32 in every run; None: they have the run's dtypes."""

    def dtype_in(self, dtype: torch.dtype) -> torch.dtype:
        """Its dtype where the other tensors have `dtype`."""
        return torch.float32 if self.dtype == "fp32" else dtype

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: matrices yes; norms, biases and scalars no."""
        return self.role not in UNDECAYED


class Param:
    """A parameter that `forward` uses directly, such as a norm's weight.

    `init`: the values that it has in a model from random weights (`surogate_core.dsl.inits`), or a `Setting` of them.

    `role` "router": the matrix that chooses experts. It keeps the model's dtype under every recipe and weight format,
    and `train_router` trains it beside adapters. "embedding": a table with a row for each token. "weight": any other
    matrix. "scalar": numbers that are no matrix and do not decay, such as the decay rates of a recurrence or the sinks
    of attention heads.

    `dtype` "fp32": it stays in fp32 in masters, programs, stores and exports, whatever dtype the model has.

    `trained` false: a buffer, which files have and no run trains.
    """

    def __init__(
        self,
        hf_name: str,
        *dims: Dim | int,
        init: Init | Setting = "ones",
        role: Literal["norm", "weight", "embedding", "router", "scalar"] = "norm",
        dtype: Literal["fp32"] | None = None,
        trained: bool = True,
    ):
        self.trained = trained
        if isinstance(init, str) and init not in get_args(InitName):
            raise TypeError(f"Param({hf_name!r}): init={init!r} is none of {', '.join(get_args(InitName))}")
        if dtype not in (None, "fp32"):
            raise TypeError(f"Param({hf_name!r}): dtype={dtype!r} is neither None nor 'fp32'")
        self.hf_name, self.dims, self.init, self.role, self.dtype = hf_name, dims, init, role, dtype

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name
        self.declared = f"{owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, bound: Any, owner: type) -> Any:
        return self if bound is None else bound.tensors[self.name]


def weight_spec(slot: LinearSlot | ExpertSlot, module: str, shape: tuple[int, ...], *, trainable: bool) -> TensorSpec:
    """The weight of a slot."""
    return TensorSpec(
        name=f"{slot.name}.weight",
        hf_name=f"{module}.weight",
        shape=shape,
        trainable=trainable,
        role="weight",
        init="normal",
    )


def adapter_specs(slot: LinearSlot | ExpertSlot, module: str) -> list[TensorSpec]:
    """The tensors of a slot's adapter; of experts, one A and one B for each."""
    if slot.adapter is None:
        return []
    experts = (slot.count,) if isinstance(slot, ExpertSlot) else ()
    sides: tuple[tuple[str, tuple[int, int], Init], ...] = (
        ("lora_A", (slot.adapter.rank, slot.inputs), "lora_a"),
        ("lora_B", (slot.outputs, slot.adapter.rank), "zeros"),
    )
    return [
        TensorSpec(
            name=f"{slot.name}.{which}",
            hf_name=f"{module}.{which}.weight",
            shape=(*experts, *shape),
            trainable=True,
            role="adapter",
            init=init,
        )
        for which, shape, init in sides
    ]
