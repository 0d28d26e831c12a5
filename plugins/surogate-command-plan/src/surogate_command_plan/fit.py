"""`surogate plan --fit SIZE`: the cheapest changes of a configuration with which it fits into a GPU's memory."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

from surogate_command_plan.gpus import Gpu, Room
from surogate_command_plan.speed import WireRates, again_rate, step_time
from surogate_command_plan.view import PLACES, totals
from surogate_core.plugin import ConfigError, UserError, atomic, bundles
from surogate_core.service.config import EXACT_RANKS, RULES, RunConfig, Selection, offload, offloader_of_keys, sharing
from surogate_core.service.model import ARITHMETIC
from surogate_core.service.plugins import flat_values

if TYPE_CHECKING:
    from surogate_core.service.engine import Prediction, TensorBytes
    from surogate_core.service.plugins import Registry

UNITS = {"MB": 10**6, "MiB": 2**20, "GB": 10**9, "GiB": 2**30, "G": 2**30, "M": 2**20}
MARGIN = 1.05
"""The prediction times this must fit, because workspaces and fragmentation need memory too."""
BUS = 25e9
"""Bytes a second between host and GPU in one direction where the GPU is not known: PCIe 4.0 x16."""
BUS_SHARE = 0.8
"""Share of the bus's rate that copies reach."""
HOST = 50e9
"""Bytes a second of the optimizer step on a CPU, assumed."""
BUDGETS = (0.75, 0.5, 0.25)
"""The values of `recompute_budget` that are proposed."""
STREAMING = frozenset({"cpu_training", "offload_quants"})
"""Keys beside which no budget is proposed: the bus is what such a run waits for, not the arithmetic."""
FEWEST_TOKENS = 256
"""Tokens of the smallest chunk of the head that is proposed."""
SHOWN = 3
ALIKE = 0.9
"""A further proposal takes at most this share of each one's bytes before it, in one place."""


def parse_size(text: str) -> int:
    """Bytes of ``24GiB``; raises `UserError` with the units."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text)
    if match is None or match[2] not in UNITS:
        raise UserError(f"--fit {text}: not a size. Fix: a number with one of {', '.join(UNITS)}, such as 24GiB.")
    return int(float(match[1]) * UNITS[match[2]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Changes of a configuration, and what they make of it."""

    changes: tuple[str, ...]
    """As overrides; empty where it fits as it is."""
    config: RunConfig
    prediction: Prediction
    seconds: float
    """Estimated time that they add to an optimizer step, nothing overlapped."""


class Predictor:
    """Predicts changes of one configuration, and traces those whose layers differ once."""

    def __init__(
        self, count: Callable[[RunConfig], TensorBytes], place: Callable[[RunConfig, TensorBytes], Prediction]
    ):
        """`count` traces a configuration, `place` predicts it from such counts."""
        self._count, self._place = count, place
        self._traced: dict[tuple[object, ...], TensorBytes] = {}

    def counts(self, config: RunConfig) -> TensorBytes:
        """The counts of a configuration, or of an earlier one with the same layers."""
        gathered = config.lora and sharing.axes(config).shards_weights
        streams = config.cpu_training or config.offload_quants or gathered
        balanced = sharing.axes(config).expert_balance is not None
        key = config.recompute, config.recompute_budget, streams, config.ep_size, config.ep_exchange, balanced
        if key not in self._traced:
            self._traced[key] = self._count(config)
        return self._traced[key]

    def __call__(self, config: RunConfig) -> Prediction:
        """The prediction of a configuration."""
        return self._place(config, self.counts(config))


def shared_out(
    config: RunConfig, registry: Registry, predicted: Predictor, memory: float, *, more: bool
) -> tuple[tuple[str, ...], int] | None:
    """Overrides with which a run that does not fit needs at most `memory` bytes of each GPU, and those bytes.

    First on the run's own GPUs, then, if `more`, on 2, 4 or 8. None if there is no way.
    """
    optimizer = registry.get("optimizer", config.optimizer.name)
    each = math.lcm(config.context_parallel_size, config.ep_size)
    larger = [n for n in EXACT_RANKS if more and n > config.gpus and n % each == 0]
    for gpus in (config.gpus, *larger):
        on_them = replace(config, gpus=gpus)
        as_it_is: list[dict[str, Any]] = [{}] if gpus != config.gpus else []
        for changes in [*as_it_is, *sharing.sends_no_experts(on_them), *sharing.shares_more(on_them, registry)]:
            changed = replace(on_them, **changes)
            try:
                sharing.check(changed, optimizer)
                needed = predicted(changed).total("device")
            except ConfigError:
                continue
            if needed <= memory:
                return _overrides(config, changed), needed
    return None


def proposals(config: RunConfig, registry: Registry, predicted: Predictor, *, rates: GpuRates) -> list[Proposal]:
    """All sound combinations of changes, the cheapest first, then the one with fewer changes. Nothing that the
    configuration asks for is taken back.
    """

    def seconds_more(changed: RunConfig, prediction: Prediction) -> float:
        return seconds_of(changed, registry, prediction, rates) + sum(map(rates.wire.seconds, prediction.sent))

    before, found = seconds_more(config, predicted(config)), []
    for changed in _candidates(config, registry):
        prediction = predicted(changed)
        seconds = seconds_more(changed, prediction) - before
        found.append(
            Proposal(changes=_overrides(config, changed), config=changed, prediction=prediction, seconds=seconds)
        )
    return sorted(found, key=lambda p: (p.seconds, len(p.changes)))


def _candidates(config: RunConfig, registry: Registry) -> Iterator[RunConfig]:
    """The configuration with every set of changes that contradicts nothing."""
    assert config.lmhead_chunks != "auto"
    tokens = sharing.tokens_of_rank(config)
    chunks = [config.lmhead_chunks * n for n in (1, 4, 16)]
    chunks = chunks[:1] + [c for c in chunks[1:] if tokens // c >= FEWEST_TOKENS]
    optimizers = [config.optimizer]
    specs: Mapping[str, bundles.OptimizerSpec] = registry.all("optimizer")
    mine, flat = specs[config.optimizer.name], flat_values(config.optimizer.options)
    for spec in specs.values():
        alike = spec.rule is not None and spec.rule == mine.rule
        trains = (config.master_dtype or "fp32") in spec.master_dtypes and (spec.adapters or not config.lora)
        if alike and trains and spec.state_bytes_per_parameter < mine.state_bytes_per_parameter:
            optimizers.append(Selection(name=spec.name, options=bundles.options_from_flat(spec.options, flat)))
    switches = ["offload_residual", "offload_optimizer", "offload_master", "offload_grads", "cpu_training"]
    if config.lora and (config.weight_format is not None or registry.get("recipe", config.recipe.name).packs):
        switches.append("offload_quants")
    offloaders = registry.all("offload")
    if config.offload.name == "none":
        name = offloader_of_keys()
        able = name in offloaders
        selected = Selection(name=name, options=offloaders[name].options() if able else None)
    else:
        # Chosen without keys it moves all that it can already.
        able, selected = any(getattr(config, s) for s in (*switches, offload.EXPERTS)), config.offload
    free = [s for s in switches if not getattr(config, s)] if able else []
    sets = [chosen for n in range(len(free) + 1) for chosen in combinations(free, n)]
    for (recompute, budget), head, optimizer, chosen, shared in product(
        _policies(config), chunks, optimizers, sets, [{}, *sharing.shares_more(config, registry)]
    ):
        if STREAMING.intersection(chosen) and budget < config.recompute_budget:
            continue
        if shared and not config.lora and "cpu_training" in chosen:
            continue  # it shares out everything by itself
        changes: dict[str, Any] = {**dict.fromkeys(chosen, True), "recompute": recompute, "recompute_budget": budget}
        if "offload_quants" in chosen:
            changes |= {"persistent_quants": True, offload.EXPERTS: False}
        if chosen:
            changes["offload"] = selected
        changes |= shared
        changed = replace(config, lmhead_chunks=head, optimizer=optimizer, **changes)
        values = {f.name: getattr(changed, f.name) for f in fields(RunConfig)}
        sound = not any(rule.wrong(values) for rule in RULES)
        sound = sound and sharing.whole_matrices(specs[changed.optimizer.name], values) is None
        if sound and _placed(changed, registry):
            yield changed


def _placed(config: RunConfig, registry: Registry) -> bool:
    """Whether the offloader places what the keys move."""
    from surogate_core.service.setup import resolve_offloader

    moved = offload.chosen({key: getattr(config, key) for key in offload.KINDS})
    if not moved <= registry.get("offload", config.offload.name).kinds:
        return False
    try:
        resolve_offloader(config, registry)
    except ConfigError:
        return False
    return True


def _policies(config: RunConfig) -> list[tuple[bool, float]]:
    """(recompute, recompute_budget) as it is, and those that keep less."""
    assert config.recompute != "auto"
    if config.recompute:
        return [(True, config.recompute_budget)]
    less = [budget for budget in BUDGETS if budget < config.recompute_budget]
    return [(False, config.recompute_budget), *((False, budget) for budget in less), (True, 1.0)]


def _overrides(config: RunConfig, changed: RunConfig) -> tuple[str, ...]:
    told = []
    for key in (f.name for f in fields(RunConfig)):
        value = getattr(changed, key)
        if value != getattr(config, key) and key != "offload":
            text = value.name if isinstance(value, Selection) else str(value).lower() if value is not None else "null"
            told.append(f"{key}={text}")
    return tuple(told)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRates:
    """How fast a GPU computes again and copies."""

    flops: float
    """FLOP/s of what is computed again."""
    bus: float
    """Bytes a second between host and GPU in one direction."""
    wire: WireRates
    """How fast it exchanges tensors with other GPUs."""

    @classmethod
    def of(cls, gpu: Gpu | None) -> GpuRates:
        """The rates of a GPU of the table, or assumed ones."""
        if gpu is None:
            return cls(flops=ARITHMETIC, bus=BUS, wire=WireRates.of(None, bus=BUS))
        return cls(flops=again_rate(gpu), bus=BUS_SHARE * gpu.bus, wire=WireRates.of(gpu, bus=gpu.bus))


def seconds_of(config: RunConfig, registry: Registry, prediction: Prediction, rates: GpuRates) -> float:
    """Time of an optimizer step that goes into offloading, computing again and the pieces of the head."""
    spec: bundles.OptimizerSpec = registry.get("optimizer", config.optimizer.name)
    cpu_cost, bus = spec.cpu_cost, rates.bus
    assert config.lmhead_chunks != "auto"
    size = {h.kind: h.nbytes for h in prediction.held}
    times = config.gradient_accumulation_steps
    gradients, masters = size.get("gradients", 0), size.get("masters", 0)
    weights = size.get("weights", 0)
    # Each piece of the head is a few launches; a product of fewer rows is slower too.
    seconds = times * config.lmhead_chunks * 2e-5 + times * prediction.again / rates.flops
    if config.offload_residual:
        seconds += times * 2 * size.get("residuals", 0) / bus
    if config.offload_optimizer:
        seconds += 2 * size.get("optimizer state", 0) / bus
    if config.offload_master:
        seconds += 3 * masters / bus
    if config.offload_grads:
        # Written by each micro-step and read by all but the first; read for the norm and the update.
        seconds += (2 * times + 1) * gradients / bus
    if config.offload_quants:
        seconds += times * 2 * weights / bus
    seconds += times * 2 * size.get("experts", 0) / bus
    if config.cpu_training:
        streamed = weights + (size.get("compute copies", 0) or masters)
        update = 2 * masters + gradients + 2 * size.get("optimizer state", 0)
        # All processes share the bandwidth of the host's memory.
        seconds += times * 2 * (streamed + gradients) / bus + cpu_cost * prediction.ranks * update / HOST
    return seconds


def as_text(budget: int, ordered: list[Proposal], *, room: Room, rates: GpuRates) -> str:
    """For people: the cheapest that fit, or the smallest there is."""
    fitting = best(budget, ordered, room=room)
    if not fitting:
        smallest = min(ordered, key=lambda p: p.prediction.total("device"))
        return (
            f"# fit into {atomic.human_bytes(budget)}\nNothing does. The smallest is {_line(smallest, room)}\n"
            f"Fix: a smaller per_device_train_batch_size or sequence_len, or lora=true.\n"
        )
    lines = [f"  {_line(p, room)}" for p in fitting]
    return (
        f"# fit into {atomic.human_bytes(budget)}, with {MARGIN - 1:.0%} to spare, cheapest first\n"
        + "\n".join(lines)
        + f"\nTimes are estimated: {rates.flops / 1e12:.0f} TFLOP/s, {rates.bus / 1e9:.0f} GB/s to the host, "
        "nothing overlapped.\n"
    )


def fits(proposal: Proposal, budget: int) -> bool:
    """Whether its device memory is within the budget."""
    return proposal.prediction.total("device") * MARGIN <= budget


def best(budget: int, ordered: list[Proposal], *, room: Room) -> list[Proposal]:
    """The cheapest that fit, those that this machine's host memory and disk hold before others; none is like one
    before it."""
    found: list[Proposal] = []
    for proposal in sorted(ordered, key=lambda p: bool(room.short_of(p.prediction))):
        mine = proposal.prediction
        differs = all(any(mine.total(at) < ALIKE * p.prediction.total(at) for at in PLACES) for p in found)
        if fits(proposal, budget) and differs and len(found) < SHOWN:
            found.append(proposal)
    return found


def _line(proposal: Proposal, room: Room) -> str:
    parts = (
        f"{' '.join(proposal.changes) or 'the unchanged configuration'}: {totals(proposal.prediction)}, "
        f"about {step_time(proposal.seconds)} more a step",
        *room.short_of(proposal.prediction).values(),
    )
    return "; ".join(parts)


def as_json(budget: int, ordered: list[Proposal], *, room: Room) -> list[dict[str, Any]]:
    """The same as JSON values."""
    return [
        {
            "overrides": list(p.changes),
            "device_bytes": p.prediction.total("device"),
            "host_bytes": p.prediction.total("host"),
            "disk_bytes": p.prediction.total("disk"),
            "seconds": p.seconds,
        }
        for p in best(budget, ordered, room=room)
    ]
