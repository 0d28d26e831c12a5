"""Weight formats: what frozen weights are stored in under QLoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSettings:
    """The flat QLoRA keys of the configuration that every weight format may read."""

    qlora_block_size: int = 128
    qlora_bnb_block_size: int = 64
    qlora_bnb_double_quant: bool = True
    qlora_four_over_six: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormat:
    """A form that frozen weights rest in; each is made wide again before it is multiplied with, whatever the recipe."""

    name: str
    """The value of `qlora_format`; `nf4`, `fp8` and `nvfp4` have keys of their own."""
    nbytes: Callable[[int, int, WeightSettings], int]
    """(outputs, inputs, keys) → bytes of such a weight."""
    pack: Callable[[Tensor, WeightSettings], Tensor]
    """(weight_OI in the model's dtype, keys) → [nbytes] uint8. Called once a weight, on its device; temporaries are
    smaller than the weight."""
    unpack: Callable[[Tensor, Tensor, WeightSettings], None]
    """(what `pack` made, room_OI, keys): write the weight into the room, whose dtype is the model's and whose rows lie
    apart. Called before each use, in CUDA graphs too: nothing may wait for the device. Equal inputs give equal bits."""
    adopt: Callable[[Mapping[str, Tensor], WeightSettings], Tensor] | None = None
    """(the tensors of a weight of a quantised checkpoint by part, keys) → what `pack` would make, with its own codes.
    ``fp8`` is given codes and scales, ``nvfp4`` codes, scales and decode, as `hf.prequantised` names them."""
    keys: tuple[str, ...] = ()
    """The fields of `WeightSettings` that it reads; a checkpoint is resumed only with equal ones."""
    note: Callable[[torch.device, WeightSettings], str | None] = lambda device, settings: None
    """What the run says of it once, such as that a device has no kernel for it, or None."""
