"""Adapters that start from the rounding errors of the frozen weights (LoftQ, arXiv 2310.08659, one iteration).

A frozen weight W that programs multiply as Q leaves the error W − Q. Its best approximation of rank r, U S Vᵀ, becomes
the adapter: with the adapter's scale s, A = n Vᵀ and B = U S / (s n), so that Q + s B A is as near to W as rank r
allows. n is the norm that rows of A usually start with. LoftQ gives √S to both, which makes A so small that B learns
slowly.

Suffixes: O outputs, I inputs, R the rank, P the size of the sketched subspace, E experts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import InFile, Kept, OneByOne, Source, distinct, pieces
from surogate_core.engine.planning.weight_formats import plan_format
from surogate_core.engine.planning.weight_plan import plain_layers

if TYPE_CHECKING:
    from surogate_core.engine.planning.pieces import Piece

ITERATIONS = 6
"""Multiplications with the error and its transpose; the spectrum of rounding errors is nearly flat."""
ROW_NORM = 3**-0.5
"""Norm of a row of A that is uniform in ±1/√inputs."""
_A, _B = ".lora_A.weight", ".lora_B.weight"

Rounding = Callable[[Tensor], Tensor]
"""The weight of a slot or of one expert, in the model's dtype → what is multiplied instead."""


def low_rank(error_OI: Tensor, rank: int, *, name: str) -> tuple[Tensor, Tensor]:
    """(U S / n [O, R], n Vᵀ [R, I]) of the largest singular values, fp32, by subspace iteration; n is `ROW_NORM`.

    The random start is a function of the name, so a run on the same device gives the same bits again.
    """
    outputs, inputs = error_OI.shape
    error = error_OI.float()
    size = min(2 * rank + 8, outputs, inputs)
    digest = hashlib.sha256(f"error start:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    y_OP = error @ torch.randn(inputs, size, generator=generator).to(error.device)
    for _ in range(ITERATIONS):
        y_OP = error @ torch.linalg.qr(error.t() @ torch.linalg.qr(y_OP).Q).Q
    q_OP = torch.linalg.qr(y_OP).Q
    u_PP, s_P, vt_PI = torch.linalg.svd(q_OP.t() @ error, full_matrices=False)
    b_OR = error.new_zeros(outputs, rank)
    a_RI = error.new_zeros(rank, inputs)
    found = min(rank, len(s_P))  # a rank above the sides of the weight is filled with zeros
    b_OR[:, :found] = (q_OP @ u_PP)[:, :found] * (s_P[:found] / ROW_NORM)
    a_RI[:found] = vt_PI[:found] * ROW_NORM
    return b_OR, a_RI


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStart:
    """The values of another source; an adapter on a rounded weight starts from the error. A `Source`."""

    source: Source
    weights: Mapping[str, TensorSpec]
    """HF name of a module → the spec of its frozen weight."""
    roundings: Mapping[str, Rounding]
    """HF name of a module → how its weight is rounded; others start as the source says."""
    scale: float
    """The adapters' alpha / r."""
    _waiting: dict[str, Tensor] = field(default_factory=dict)
    """HF name of a B → its value, from when its A is asked for until it is."""

    def __call__(self, spec: TensorSpec) -> Tensor | Kept | InFile | OneByOne:
        module = spec.hf_name.removesuffix(_A).removesuffix(_B)
        if spec.role != "adapter" or module not in self.roundings:
            return self.source(spec)
        if spec.hf_name.endswith(_B) and (found := self._waiting.pop(spec.hf_name, None)) is not None:
            return found
        rank = spec.shape[-2] if spec.hf_name.endswith(_A) else spec.shape[-1]
        made = self._pair(module, rank)
        if made is None:
            return self.source(spec)
        b, a = made
        if spec.hf_name.endswith(_B):
            return b
        self._waiting[module + _B] = b
        return a

    def _pair(self, module: str, rank: int) -> tuple[Tensor, Tensor] | None:
        """(B, A) of a module, of all experts if it has them; None if its weight is quantised already in the files."""
        value = self.source(self.weights[module])
        if isinstance(value, Tensor) and value.ndim == 2:
            return self._of_one(module, value, rank, module)
        count = self.weights[module].shape[0]
        read = value.read if isinstance(value, OneByOne) else value.__getitem__ if isinstance(value, Tensor) else None
        pairs = []
        for number in range(count) if read is not None else ():
            expert = read(number) if read is not None else None
            if not isinstance(expert, Tensor):
                return None
            pairs.append(self._of_one(module, expert, rank, f"{module}.{number}"))
        return (torch.stack([b for b, _ in pairs]), torch.stack([a for _, a in pairs])) if pairs else None

    def _of_one(self, module: str, weight_OI: Tensor, rank: int, name: str) -> tuple[Tensor, Tensor]:
        error_OI = weight_OI.float() - self.roundings[module](weight_OI.contiguous()).float()
        return low_rank(error_OI / self.scale, rank, name=name)


def started_from_errors(source: Source, assembly: Assembly) -> Source:
    """The source, with adapters that start from the errors of the weights that are rounded."""
    assert assembly.lora is not None
    settings, weight_format = assembly.settings, assembly.weight_format
    found = pieces(assembly.model, lora=assembly.lora, max_seqlen=settings.max_seqlen)
    plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
    kept = plan_format(found, weight_format, assembly.keeps_as_it_is)

    def unpacked(weight_OI: Tensor) -> Tensor:
        assert weight_format is not None
        # Programs multiply the weight in the model's dtype.
        room_OI = torch.empty_like(weight_OI, dtype=settings.dtype, device=settings.device)
        weight_format.unpack(weight_format.pack(weight_OI.to(settings.device, settings.dtype)), room_OI)
        return room_OI

    roundings: dict[str, Rounding] = {}
    for piece in found:
        for module, is_expert in _modules(piece):
            steps: list[Rounding] = [unpacked] if f"{module}.weight" in kept else []
            if piece.key not in plain:
                steps += _of_recipe(assembly, is_expert=is_expert)
            if steps:
                roundings[module] = _chain(steps)
    weights = {s.hf_name.removesuffix(".weight"): s for s in distinct(found) if s.role == "weight"}
    return ErrorStart(source=source, weights=weights, roundings=roundings, scale=assembly.lora.adapter.scale)


def _modules(piece: Piece) -> list[tuple[str, bool]]:
    """(HF name of the module, whether it is of experts) of each slot with an adapter."""
    experts = {slot.name for slot in piece.experts}
    return [
        (spec.hf_name.removesuffix(_A), spec.name.removesuffix(".lora_A") in experts)
        for spec in piece.specs
        if spec.role == "adapter" and spec.hf_name.endswith(_A)
    ]


def _of_recipe(assembly: Assembly, *, is_expert: bool) -> list[Rounding]:
    recipe = assembly.recipe
    of_experts, of_slots = recipe.rounded_experts, recipe.rounded
    if is_expert:
        return [] if of_experts is None else [lambda w_OI: of_experts(w_OI[None], "weight")[0][0].to(w_OI.dtype)]
    return [] if of_slots is None else [lambda w_OI: of_slots(w_OI, "weight")[0]]


def _chain(steps: list[Rounding]) -> Rounding:
    def rounded(weight_OI: Tensor) -> Tensor:
        for step in steps:
            weight_OI = step(weight_OI)
        return weight_OI

    return rounded
