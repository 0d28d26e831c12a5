"""Weight formats: how frozen weights are stored under QLoRA.

Suffixes: E experts, B bytes of a packed weight, O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightFormat:
    """A storage format of frozen weights; `WeightFormatSpec.build` returns it. Each weight is unpacked before it is
    multiplied, under every recipe.
    """

    name: str
    """The spec's name."""

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a weight of this shape."""
        raise NotImplementedError

    def pack(self, weight_OI: Tensor) -> Tensor:
        """[nbytes] uint8 of a weight in the model's dtype. Called once per weight, on its device; temporaries are
        smaller than the weight.
        """
        raise NotImplementedError

    def unpack(self, packed: Tensor, room_OI: Tensor) -> None:
        """Write the weight into the workspace `room_OI`, which has the model's dtype and may have gaps between rows.

        Called before each use, in CUDA graphs too, so it must not wait for the device. Equal inputs give equal bits.
        """
        raise NotImplementedError

    def unpack_experts(self, packed_EB: Tensor, room_EOI: Tensor) -> None:
        """`unpack` for the weight of each expert. Row e of `packed_EB`, aligned to 16 bytes, begins with the result of
        `pack` for expert e. A format with a kernel for all of them overrides this.
        """
        _, outputs, inputs = room_EOI.shape
        nbytes = self.nbytes(outputs, inputs)
        for packed, room_OI in zip(packed_EB, room_EOI, strict=True):
            self.unpack(packed[:nbytes], room_OI)

    def note(self, device: torch.device) -> str | None:
        """A note that the run shows once, such as that a device has no kernel for it, or None."""
        return None

    def adopts(self, block: tuple[int, int] | None) -> bool:
        """Whether `adopt` supports checkpoints whose scales belong to blocks of this size (None: blocks are not
        square).

        Asked for checkpoints of the formats that the spec's `adopts` names.
        """
        return True

    def adopt(self, parts: Mapping[str, Tensor]) -> Tensor:
        """A weight of a quantised checkpoint in the form of `pack`, with the checkpoint's own codes.

        `parts`: the weight's tensors by part: codes and scales, for NVFP4 also decode, as `hf.prequantised` names them.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFormatSpec:
    """A weight format."""

    name: str
    """The value of `qlora_format`."""
    build: Callable[[Any], WeightFormat]
    """Options → the format."""
    options: type = NoOptions
    """Dataclass of its own options; every field has a default."""
    flag: str | None = None
    """A flat key that selects the format if it is true, such as ``qlora_bnb``; None if only `qlora_format` does."""
    adopts: tuple[str, ...] = ()
    """Schemes of quantised checkpoints whose tensors `WeightFormat.adopt` takes, by their names in `hf.prequantised`:
    ``fine-grained FP8``, ``ModelOpt NVFP4``, ``compressed-tensors NVFP4``, ``MXFP4``."""
