"""The side outputs of a step: their sums, and the gradients of those that are terms of the loss.

Shape suffixes: L layers that have a side output, E experts, M micro-batches of a step, S all values of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.dsl.sides import Role, RouterLosses
from surogate_core.engine.planning.pieces import Piece
from surogate_core.engine.ranks.traffic import Traffic

ALIGNED = 4
"""Rows of gradients begin at multiples of this number of values, because Inductor's programs copy an input that does
not begin at a multiple of 16 bytes.
"""


TERMS: Mapping[Role, Role] = {"router_probability": "router_aux_loss", "router_z": "router_z_loss"}
"""Role of a router's side output → role of the term of the loss that is made of it."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """A side output of several layers."""

    role: Role
    layers: tuple[Piece, ...]
    shape: tuple[int, ...]
    """The shape in one layer."""
    coefficients: tuple[float, ...]
    """By layer, of terms of the loss."""

    @property
    def numel(self) -> int:
        """Values of all layers."""
        return len(self.layers) * math.prod(self.shape)


def _shapes(pieces: Sequence[Piece]) -> dict[str, _Shape]:
    found: dict[str, list[tuple[Piece, int]]] = {}
    for piece in pieces:
        for at, spec in enumerate(piece.sides):
            found.setdefault(spec.name, []).append((piece, at))
    shapes = {}
    for name, members in found.items():
        specs = [piece.sides[at] for piece, at in members]
        assert len({(spec.shape, spec.role) for spec in specs}) == 1, f"side output {name}: layers declare it otherwise"
        layers, coefficients = tuple(piece for piece, _ in members), tuple(spec.coefficient for spec in specs)
        shapes[name] = _Shape(specs[0].role, layers, specs[0].shape, coefficients)
    return shapes


class SideSums:
    """The side outputs of the layers, summed over the micro-steps of an optimizer step.

    After the forward of a micro-step, `settle` adds what its layers reported and sets the gradients with which their
    backward begins.
    """

    def __init__(
        self, pieces: Sequence[Piece], device: torch.device, *, losses: RouterLosses | None = None, numbers: int = 0
    ):
        """`numbers`: M, if the values of each micro-batch are kept by its number, so that several ranks have one
        sum.
        """
        self.losses = losses or RouterLosses()
        self._shapes = _shapes(pieces)
        self.layers = {name: list(shape.layers) for name, shape in self._shapes.items()}
        self.roles: dict[str, Role] = {name: shape.role for name, shape in self._shapes.items()}
        self._terms: list[tuple[str, Role]] = [
            (name, TERMS[role]) for name, role in self.roles.items() if role in TERMS and self.losses.covers(role)
        ]
        """(side output that is a term of the loss, role of the term), of routers. The last values of S are theirs."""
        size = sum(shape.numel for shape in self._shapes.values()) + len(self._terms)
        self._now_S = torch.zeros(size, dtype=torch.float32, device=device)
        self._sums_S = torch.zeros_like(self._now_S)
        self._by_number_MS = torch.zeros(numbers, size, device=device) if numbers and size else None
        self._now = self._views(self._now_S)
        self.sums = self._views(self._sums_S)
        """Name → [L, *its shape] fp32."""
        self._places = {(p.key, name): at for name, shape in self._shapes.items() for at, p in enumerate(shape.layers)}
        self._collected: list[tuple[Tensor, Tensor]] = []
        routers = [role for role in self.roles.values() if role == "router_probability"]
        assert len(routers) <= 1 or not self.losses.aux, "the routers of a model report under one name"
        self._tangents = {
            name: _rows(len(shape.layers), shape.shape, device)
            for name, shape in self._shapes.items()
            if self.losses.covers(shape.role)
        }
        """Name → [L, *its shape] fp32: gradients of the side outputs that are terms of the loss."""
        self._factors = {
            name: torch.tensor(self._shapes[name].coefficients, dtype=torch.float32, device=device)
            for name in self._tangents
            if self.roles[name] == "loss"
        }
        experts = next((shape.shape[0] for shape in self._shapes.values() if shape.role == "expert_tokens"), 0)
        self.counted_E = torch.zeros(experts, dtype=torch.float64, device=device)
        """Tokens of each expert in all layers and micro-batches of the step, if `_known`."""
        self._known = torch.zeros((), dtype=torch.bool, device=device)
        self._exchange: Traffic | None = None
        """Adds up the ranks' counts within the micro-step."""
        self._scales = torch.zeros(3, dtype=torch.float64, device=device)
        """What a micro-step multiplies by: terms of the loss, shares of experts, the router's losses."""

    def _views(self, flat_S: Tensor) -> dict[str, Tensor]:
        *parts, _ = flat_S.split([*(shape.numel for shape in self._shapes.values()), len(self._terms)])
        named = zip(self._shapes.items(), parts, strict=True)
        return {name: part.view(len(shape.layers), *shape.shape) for (name, shape), part in named}

    def _of_role(self, role: Role) -> str | None:
        return next((name for name, found in self.roles.items() if found == role), None)

    # --------------------------------------------------------------------------- the step

    def counts_first(self, micro_batches: int) -> bool:
        """Whether a step of this number of micro-batches counts the tokens of each expert before its first backward."""
        return self._spans_step and micro_batches > 1 and self._exchange is None

    @property
    def _spans_step(self) -> bool:
        """Whether a loss needs the tokens of each expert in the whole step."""
        return bool(self.losses.aux) and self.losses.form == "step"

    def exchange_within(self, traffic: Traffic) -> None:
        """Every rank has one micro-step: if a loss needs their tokens, they exchange them between forward and
        backward.
        """
        if self._spans_step:
            self._exchange = traffic
            traffic.counts = True

    def begin(self, *, counted: bool) -> None:
        """A step begins. `counted`: its tokens are counted first."""
        if not self._shapes:
            return
        self._known.fill_(counted)
        self.counted_E.zero_()

    def count(self) -> None:
        """Count the tokens of a forward, without adding anything to the sums."""
        self._take()
        self.counted_E.add_(self._own_counts())

    def exchange(self, traffic: Traffic) -> None:
        """All micro-batches of this rank are counted: add the other ranks' counts."""
        self.counted_E.copy_(traffic.total(self.counted_E))

    def load(self, *, tokens: int, step_tokens: int, micro_batches: int) -> None:
        """A micro-step begins: the tokens of its micro-batch and of the step, without padding. One without tokens adds
        nothing to the loss.
        """
        if not self._shapes:
            return
        if not tokens:
            self._scales.zero_()
            return
        layers = len(self.layers.get(self._of_role("expert_tokens") or "", ()))
        rows, share = max(1, layers * tokens), 1 / micro_batches
        if self.losses.form == "step":
            rows, share = max(1, layers * step_tokens), 1.0
        elif self.losses.form == "layer":
            rows = max(1, tokens)
        scales = torch.tensor([1 / micro_batches, 1 / rows, share / rows], dtype=torch.float64)
        if self._scales.device.type == "cuda":
            scales = scales.pin_memory()
        self._scales.copy_(scales, non_blocking=True)

    # --------------------------------------------------------------------- the micro-step

    def collect(self, piece: Piece, values: Sequence[Tensor]) -> None:
        """The side outputs of a layer's forward."""
        for spec, value in zip(piece.sides, values, strict=True):
            self._collected.append((self._now[spec.name][self._places[piece.key, spec.name]], value))

    def _take(self) -> None:
        if self._collected:
            targets, values = zip(*self._collected, strict=True)
            torch._foreach_copy_(list(targets), list(values))
            self._collected.clear()

    def _own_counts(self) -> Tensor:
        """[E] float64: the tokens of each expert in all layers of the last forward."""
        name = self._of_role("expert_tokens")
        assert name is not None
        return self._now[name].double().sum(0)

    def settle(self) -> None:
        """All layers have run: add their side outputs, and set the gradients of those that are terms of the loss."""
        if not self._shapes:
            return
        self._take()
        for name, tangent in self._tangents.items():
            match self.roles[name]:
                case "loss":
                    tangent.copy_(self._factors[name] * self._scales[0])
                case "router_z":
                    tangent.copy_((self.losses.z * self._scales[2]).expand(tangent.shape))
                case "router_probability":
                    share = self._shares()
                    tangent.copy_((self.losses.aux * share.shape[-1] * self._scales[2] * share).expand(tangent.shape))
        for at, (name, _) in enumerate(self._terms, start=self._now_S.numel() - len(self._terms)):
            # Both terms are linear in their side output, given the shares of the experts.
            self._now_S[at].copy_((self._tangents[name] * self._now[name]).sum())
        self._sums_S.add_(self._now_S)

    def _shares(self) -> Tensor:
        """[E] or [L, E] float64: tokens of each expert for each token that the loss counts together."""
        name = self._of_role("expert_tokens")
        assert name is not None
        if self.losses.form == "layer":
            tokens_LE = self._now[name].double()
            return tokens_LE / tokens_LE.sum(1, keepdim=True).clamp(min=1)
        own_E = self._own_counts()
        if self._exchange is not None:
            return self._exchange.total(own_E) * self._scales[1]
        return torch.where(self._known, self.counted_E, own_E) * self._scales[1]

    def tangents(self, piece: Piece) -> Iterator[Tensor]:
        """The gradients of a layer's side outputs that are terms of the loss."""
        for spec in piece.sides:
            if spec.name in self._tangents:
                yield self._tangents[spec.name][self._places[piece.key, spec.name]]

    # --------------------------------------------------------------------------- the sums

    def keep(self, place: int) -> None:
        """The values since the last call are those of a micro-batch; `place`: `Sharing.place`."""
        if self._by_number_MS is not None:
            self._by_number_MS[place].add_(self._sums_S)
            self._sums_S.zero_()

    def drop(self) -> None:
        """The values since the last call count nowhere."""
        self._sums_S.zero_()

    def take(self, traffic: Traffic) -> Tensor:
        """[S]: the sums over all micro-batches of all ranks, in the order of their numbers; begins anew."""
        total_S = self._sums_S.clone()
        if self._by_number_MS is not None:
            traffic.add(self._by_number_MS)
            total_S += self._by_number_MS.sum(0)
        self.clear()
        return total_S

    def clear(self) -> None:
        """Begin anew."""
        self._sums_S.zero_()
        if self._by_number_MS is not None:
            self._by_number_MS.zero_()

    def shapes(self) -> Mapping[str, tuple[Role, torch.Size]]:
        """Name → (role, [L, *its shape]), in the order of `take`; the terms of routers are [1]."""
        found = {name: (self.roles[name], total.shape) for name, total in self.sums.items()}
        return found | {f"{name}.loss": (role, torch.Size([1])) for name, role in self._terms}


def _rows(count: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """[count, *shape] zeros in fp32 whose rows are aligned."""
    numel = math.prod(shape)
    wide = torch.zeros(count, -(-numel // ALIGNED) * ALIGNED, dtype=torch.float32, device=device)
    return wide[:, :numel].unflatten(1, shape) if shape else wide[:, 0]
