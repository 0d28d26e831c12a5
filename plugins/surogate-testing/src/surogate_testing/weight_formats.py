"""Checks of weight formats: packing and unpacking give the weight back, and training equals that on the rounded
weights.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from surogate_core.plugin import bundles
from surogate_core.service.engine import Source
from surogate_core.service.model import TensorSpec
from surogate_testing import tiny
from surogate_testing.check import ensure

BOUND = 0.25
"""Largest relative error, which four bits can satisfy."""
SHAPES = ((96, 256), (256, 96), (40, 72), (3, 8), (1, 1))
"""Whole blocks of most formats, parts of blocks, and less than one."""


def built(spec: bundles.WeightFormatSpec) -> bundles.WeightFormat:
    """The format with the defaults of its options."""
    weight_format = spec.build(spec.options())
    ensure(
        isinstance(weight_format, bundles.WeightFormat),
        f"build returns {type(weight_format).__name__}, no WeightFormat",
    )
    name = getattr(weight_format, "name", None)
    ensure(name == spec.name, f"what is built has the name {name!r}, the spec {spec.name!r}")
    return weight_format


def _devices() -> list[torch.device]:
    return [tiny.CPU, *([torch.device("cuda")] if torch.cuda.is_available() else [])]


def _weight(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])).to(device, dtype)


def _unpacked(weight_format: bundles.WeightFormat, kept: Tensor, weight_OI: Tensor) -> Tensor:
    """The unpacked weight, in a workspace with gaps between rows, which must not change."""
    outputs, inputs = weight_OI.shape
    panel = weight_OI.new_full((outputs + 2, inputs + 8), 7.0)
    weight_format.unpack(kept, panel[:outputs, :inputs])
    found = panel[:outputs, :inputs].clone()
    panel[:outputs, :inputs] = 7.0
    ensure(bool((panel == 7).all()), "unpack writes outside of the room")
    return found


def gives_back(spec: bundles.WeightFormatSpec) -> None:
    """A weight is unpacked with small errors, in its dtype, from the stated number of bytes, with the same bits
    twice.
    """
    weight_format = built(spec)
    for device in _devices():
        for shape in SHAPES:
            for dtype in (torch.float32, torch.bfloat16):
                where = f"{list(shape)} {dtype} on {device.type}"
                weight = _weight(shape, dtype, device)
                before = weight.clone()
                kept, again = weight_format.pack(weight), weight_format.pack(weight)
                ensure(torch.equal(weight, before), f"{where}: pack changes the weight")
                stated = weight_format.nbytes(*shape)
                ensure(kept.dtype == torch.uint8 and kept.shape == (stated,), f"{where}: not [{stated}] uint8")
                ensure(torch.equal(kept, again), f"{where}: the same weight twice has other bits")
                bits = kept.clone()
                found = _unpacked(weight_format, kept, weight)
                ensure(torch.equal(kept, bits), f"{where}: unpack changes what is kept")
                room = torch.empty_like(weight)
                weight_format.unpack(kept, room)
                ensure(torch.equal(room, found), f"{where}: other values in a room whose rows lie apart")
                error = tiny.relative_error(found, weight)
                ensure(error <= BOUND, f"{where}: relative error {error:.3f} is above {BOUND}")


def unpacks_experts(spec: bundles.WeightFormatSpec) -> None:
    """All experts are unpacked at once as each is alone, bit for bit, in the workspace alone."""
    weight_format = built(spec)
    for device in _devices():
        for shape, dtype in ((SHAPES[0], torch.bfloat16), *((s, torch.float32) for s in SHAPES)):
            outputs, inputs = shape
            weights = [_weight(shape, torch.float32, device).to(dtype) * (e + 1) for e in range(3)]
            rows = [weight_format.pack(weight) for weight in weights]
            packed = torch.stack([pad(row, (0, -len(row) % 16 + 16)) for row in rows])
            room = torch.full((4, outputs, inputs), 7.0, dtype=dtype, device=device)
            weight_format.unpack_experts(packed, room[:3])
            where = f"{list(shape)} {dtype} on {device.type}"
            for number, row in enumerate(rows):
                found = torch.empty_like(weights[number])
                weight_format.unpack(row, found)
                ensure(torch.equal(room[number], found), f"{where}: expert {number} has other bits than alone")
            ensure(bool((room[3] == 7).all()), f"{where}: unpack_experts writes outside of the room")


def is_smaller(spec: bundles.WeightFormatSpec) -> None:
    """A large weight takes less than in bf16."""
    weight_format = built(spec)
    size = weight_format.nbytes(1024, 1024)
    ensure(size < 2 * 1024 * 1024, f"a weight [1024, 1024] takes {size} bytes, in bf16 {2 * 1024 * 1024}")


def keeps_extremes(spec: bundles.WeightFormatSpec) -> None:
    """Zeros stay zeros, tiny and huge weights stay finite, and values that are not finite do not become valid."""
    weight_format = built(spec)
    for device in _devices():
        weight = _weight((32, 64), torch.float32, device)
        for scale in (0.0, 1e-30, 1e30):
            scaled = weight * scale
            found = _unpacked(weight_format, weight_format.pack(scaled), scaled)
            ensure(bool(found.isfinite().all()), f"weights of size {scale:g} come back not finite")
            ensure(scale > 0 or not bool(found.any()), "zeros come back as something else")
        for bad in (float("nan"), float("inf")):
            spoilt = weight.clone()
            spoilt[3, 5] = bad
            found = _unpacked(weight_format, weight_format.pack(spoilt), spoilt)
            ensure(not bool(found.isfinite().all()), f"a weight with {bad} comes back finite")


def rounded(weight_format: bundles.WeightFormat, source: Source) -> Source:
    """The source with the projections' weights packed and unpacked; those of experts one by one."""

    def wrapped(spec: TensorSpec) -> Tensor:
        value = source(spec)
        assert isinstance(value, Tensor)
        # A parameter of role weight, such as a router, is no projection.
        if spec.role != "weight" or not spec.name.endswith(".weight"):
            return value
        room = torch.empty_like(value)
        pairs = zip(value, room, strict=True) if value.dim() == 3 else ((value, room),)
        for weight, place in pairs:
            weight_format.unpack(weight_format.pack(weight), place)
        return room

    return wrapped


def trains_as_on_rounded_weights(spec: bundles.WeightFormatSpec) -> None:
    """Adapters over packed weights: the losses of plain weights that were rounded before, bit for bit."""
    weight_format = built(spec)
    for recompute in (False, True):
        made = tiny.engine(weight_format=weight_format, lora=tiny.lora(), recompute=recompute)
        source = rounded(weight_format, tiny.random_source())
        plain = tiny.engine(source=source, lora=tiny.lora(), recompute=recompute)
        losses, expected = tiny.train(made, 3), tiny.train(plain, 3)
        ensure(losses == expected, f"losses are {losses}, on rounded weights {expected}")
        tiny.ensure_same_bits(tiny.snapshot(made), tiny.snapshot(plain), "with packed weights")


def resumes(spec: bundles.WeightFormatSpec) -> None:
    """A resumed run continues bit for bit."""
    weight_format = built(spec)
    tiny.ensure_resumes(lambda: tiny.engine(weight_format=weight_format, lora=tiny.lora()))


CHECKS = (gives_back, unpacks_experts, is_smaller, keeps_extremes, trains_as_on_rounded_weights, resumes)
