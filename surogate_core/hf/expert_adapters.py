"""PEFT's adapters of one tensor of all experts (`target_parameters`), seen as adapters of each expert.

A is [E·r, inputs] with experts in the outer place, B is [outputs, r·E] with experts in the inner place. Up to PEFT 0.18
inputs and outputs are exchanged. gate and up share A where they are one tensor; here each has it. Where `hf.fused`
joined adapters of their own, each gets its part of A and its block of B back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from surogate_core.files.tensorfile import TensorFile, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from surogate_core.dsl.experts import Fused

_ALL = re.compile(r"(.*\.experts(?:\.base_layer)*)\.lora_[AB]\.weight")
_FIRST = (0, 19)
"""The version of PEFT from which A reads what the weight reads."""


def is_of_all_experts(name: str) -> bool:
    """Whether a tensor of an adapter file is of all experts of a layer."""
    return _ALL.fullmatch(name) is not None


class ExpertTensors(TensorFile):
    """The tensors of an adapter file; a tensor of all experts becomes one tensor for each expert."""

    def __init__(self, file: TensorFile, parts: Mapping[str, tuple[str, Callable[[Tensor], Tensor], tuple[int, int]]]):
        """`parts`: name → (name in the file, that tensor → this one, its shape)."""
        self.path, self._file, self._parts = file.path, file, parts
        self.infos = {n: i for n, i in file.infos.items() if not is_of_all_experts(n)} | {
            name: TensorInfo(shape=shape, dtype=file.infos[source].dtype, begin=0, end=0)
            for name, (source, _, shape) in parts.items()
        }
        # A layer has four of them, and its experts are read one after the other.
        self._whole = lru_cache(maxsize=4)(file.__getitem__)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._parts:
            return self._file[name]
        source, take, _ = self._parts[name]
        return take(self._whole(source)).contiguous()


@dataclass(frozen=True, slots=True, kw_only=True)
class OfAllExperts:
    """The adapters of a file that are of all experts, before the base is known."""

    file: TensorFile
    prefix: str
    version: str | None
    """Version of PEFT that wrote the file, if it says so."""
    kind: Callable[[str], tuple[int, float]]
    """Name of a tensor of all experts → rank and scale."""

    @property
    def modules(self) -> tuple[str, ...]:
        """The names before ``.lora_A.weight``, with the prefix, sorted."""
        found = (_ALL.fullmatch(name) for name in self.file.infos)
        return tuple(sorted({match[1] for match in found if match}))

    def apart(self, fused: Mapping[str, Fused]) -> tuple[ExpertTensors, dict[str, float], list[str]]:
        """(the tensors of each expert, module → scale, problems) on a base with these tensors of experts."""
        parts: dict[str, Any] = {}
        scales: dict[str, float] = {}
        problems: list[str] = []
        layouts = [self._layouts(module, fused) for module in self.modules]
        exchanged = {old for options in layouts if len(options) == 1 for _, old in options}
        if not exchanged and self.version is not None:
            exchanged = {_is_older(self.version)}
        for module, options in zip(self.modules, layouts, strict=True):
            chosen = options if len(options) == 1 else [one for one in options if {one[1]} == exchanged]
            if len(chosen) != 1:
                problems.append(self._unclear(module, options))
                continue
            ((name, old),) = chosen
            rank, scale = self.kind(name)
            if (found := self._shape(module, "A")[0] // fused[name].shape[0]) != rank:
                problems.append(f"{module}: is of rank {found}, not {rank}")
            parts |= self._parts(module, fused[name], old=old)
            scales |= {part.removesuffix(".weight"): scale for part, _ in fused[name].parts}
        return ExpertTensors(self.file, parts), scales, problems

    def _shape(self, module: str, side: str) -> tuple[int, ...]:
        info = self.file.infos.get(f"{module}.lora_{side}.weight")
        return info.shape if info is not None else ()

    def _layouts(self, module: str, fused: Mapping[str, Fused]) -> list[tuple[str, bool]]:
        """(tensor of the base, whether inputs and outputs are exchanged) that the shapes of an adapter fit."""
        a, b = self._shape(module, "A"), self._shape(module, "B")
        place = module.removeprefix(self.prefix).removesuffix(".base_layer").removesuffix(".base_layer")
        found = []
        for name, one in fused.items():
            count, rows, columns = one.shape
            if name.rpartition(".")[0] != place or len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % count:
                continue
            # Where the weight is [E, inputs, outputs], all versions of PEFT read it the same way.
            found += [
                (name, old)
                for old in ((False,) if one.transposed else (False, True))
                if (a[1], b[0]) == ((rows, columns) if old else (columns, rows))
            ]
        return found

    def _unclear(self, module: str, options: list[tuple[str, bool]]) -> str:
        a, b = list(self._shape(module, "A")), list(self._shape(module, "B"))
        if not options:
            return f"{module}: A {a} and B {b} fit no tensor of all experts of the base"
        return (
            f"{module}: A {a} and B {b} may be of PEFT up to 0.18, which exchanges inputs and outputs, or of a later "
            f"one, and there is no peft_version"
        )

    def _parts(self, module: str, one: Fused, *, old: bool) -> dict[str, Any]:
        count, rows, columns = one.shape
        a, b = (f"{module}.lora_{side}.weight" for side in "AB")
        rank = self._shape(module, "A")[0] // count
        found: dict[str, Any] = {}
        first = 0
        blocks = self._blocks(module, one, rank) if not old else 1
        rank //= blocks
        for number, (name, (outputs, _)) in enumerate(one.parts):
            expert, span = number * count // len(one.parts), slice(first, first + outputs)
            first = (first + outputs) % rows
            outer, inner = partial(_outer, count=count, expert=expert), partial(_inner, count=count, expert=expert)
            own = self.prefix + name.removesuffix(".weight")
            ranks = slice(number % blocks * rank, (number % blocks + 1) * rank)
            take_a = partial(_turned, take=inner) if old else partial(_rows, take=outer, span=ranks)
            take_b = partial(_rows, take=partial(_turned, take=outer) if old else inner, span=span)
            if blocks > 1:
                take_b = partial(_columns, take=take_b, span=ranks)
            found[f"{own}.lora_A.weight"] = (b if old else a, take_a, (rank, columns))
            found[f"{own}.lora_B.weight"] = (a if old else b, take_b, (outputs, rank))
        return found

    def _blocks(self, module: str, one: Fused, rank: int) -> int:
        """The projections of an expert if B has a block of equal rank for each of them and zeros elsewhere; else 1."""
        each = len(one.parts) // one.shape[0]
        if not one.adapted or each == 1 or rank % each:
            return 1
        b = self.file[f"{module}.lora_B.weight"].unflatten(1, (each, rank // each, one.shape[0])).clone()
        first = 0
        for number, (_, (outputs, _)) in enumerate(one.parts[:each]):
            b[first : first + outputs, number] = 0
            first += outputs
        return 1 if b.any() else each


def _outer(tensor: Tensor, *, count: int, expert: int) -> Tensor:
    """[r, inputs] of one expert of [E·r, inputs]."""
    return tensor.view(count, -1, tensor.shape[1])[expert]


def _inner(tensor: Tensor, *, count: int, expert: int) -> Tensor:
    """[outputs, r] of one expert of [outputs, r·E]."""
    return tensor.view(tensor.shape[0], -1, count)[:, :, expert]


def _turned(tensor: Tensor, *, take: Callable[[Tensor], Tensor]) -> Tensor:
    return take(tensor).t()


def _rows(tensor: Tensor, *, take: Callable[[Tensor], Tensor], span: slice) -> Tensor:
    return take(tensor)[span]


def _columns(tensor: Tensor, *, take: Callable[[Tensor], Tensor], span: slice) -> Tensor:
    return take(tensor)[:, span]


def _is_older(version: str) -> bool:
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    return tuple(numbers) < _FIRST
