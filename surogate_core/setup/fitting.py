"""The memory that a configuration needs, and changes with which a configuration that did not fit is predicted to
fit.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import structlog
import torch

from surogate_core.config import sharing
from surogate_core.config.checks import RULES
from surogate_core.config.schema import RunConfig
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.prediction import Prediction, TensorBytes
from surogate_core.errors import ConfigError, MachineError, SurogateError
from surogate_core.files.atomic import human_bytes
from surogate_core.host import memory_of_machine
from surogate_core.setup.assemble import (
    ResolvedModel,
    assemble,
    engine_settings,
    resolve_device,
    resolve_model,
    resolve_offloader,
)
from surogate_core.setup.build import settled, smallest
from surogate_core.setup.counted import counted

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)

BORDERS_PER_ROW = 64
"""Assumed document borders in a row; the real number depends on the packed data and changes little."""
SHARE = 0.9
"""Largest share of a place's memory that a proposal may need, because other programs need some too."""
SHORTEST = 128
"""Tokens of the shortest rows that are proposed."""
OF_TOKENS = frozenset({"residuals", "residuals in use", "working set", "tables and inputs", "freed memory"})
"""Kinds of tensor whose bytes grow with the tokens of a micro-batch."""


def assembly_of(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> Assembly:
    """What the run would be made of, with a number of document borders that is assumed."""
    return assemble(config, registry, resolved, borders=config.per_device_train_batch_size * BORDERS_PER_ROW)


def settled_for(config: RunConfig, registry: Registry, resolved: ResolvedModel, *, room: int | None) -> RunConfig:
    """The configuration with what a run with `room` bytes of memory would choose; None: the fastest choice."""
    borders = config.per_device_train_batch_size * BORDERS_PER_ROW
    return settled(config, registry, resolved, room=room, borders=borders)


def placed(config: RunConfig, registry: Registry, counts: TensorBytes) -> Prediction:
    """The prediction for such counts, with the tensors where the configuration puts them."""
    counted = counts.assembly
    optimizer = registry.get("optimizer", config.optimizer.name)
    offloader = resolve_offloader(config, registry)
    settings = engine_settings(
        config,
        device=counted.settings.device,
        borders=counted.settings.borders,
        columns=counted.settings.columns,
        moves_gradients=offloader.moves("gradients"),
        varying=counted.settings.axes.varying,
    )
    return counts.placed(replace(counted, settings=settings, offloader=offloader, optimizer=optimizer))


class _Search:
    """Changes of a configuration that ran out of memory in one place."""

    def __init__(self, config: RunConfig, registry: Registry, *, on_gpu: bool):
        self.config, self.registry = smallest(config), registry
        self.device = resolve_device(config)
        self.resolved = resolve_model(config, registry, weights_needed=False)
        # Without a GPU the device's memory is the host's.
        self.places = ("device",) if on_gpu else ("host",) if self.device.type == "cuda" else ("device", "host")
        self.room = torch.cuda.get_device_properties(self.device).total_memory if on_gpu else memory_of_machine()
        if self.room is not None and not on_gpu:
            self.room //= max(config.gpus, 1)

    def predicted(self, config: RunConfig) -> Prediction:
        assembly = assembly_of(config, self.registry, self.resolved)
        return counted(config, self.registry, assembly).placed(assembly)

    def total(self, prediction: Prediction) -> int:
        return sum(prediction.total(place) for place in self.places)

    def fits(self, prediction: Prediction) -> bool:
        return self.room is not None and self.total(prediction) <= SHARE * self.room

    def advice(self) -> str:
        """The prediction and the fewest changes with which it fits, in one or two sentences; empty if unknown."""
        prediction = self.predicted(self.config)
        if self.room is None:
            return ""
        largest = max((h for h in prediction.held if h.place in self.places), key=lambda h: h.nbytes)
        said = (
            f"The run is predicted to need {human_bytes(self.total(prediction))} of {human_bytes(self.room)}, "
            f"most of it {largest.kind} ({human_bytes(largest.nbytes)}). Fix: "
        )
        if self.fits(prediction):
            return said + "free memory that other processes hold."
        found = self._changes(prediction)
        if found is None:
            return said + "a smaller model or a machine with more memory: smaller batches alone do not make it fit."
        changes = ", ".join(f"{key}={'null' if value is None else str(value).lower()}" for key, value in found.items())
        total = human_bytes(self.total(self.predicted(replace(self.config, **found))))
        return said + f"{changes}, which is predicted to take {total}."

    def _changes(self, prediction: Prediction) -> dict[str, Any] | None:
        """Keys and values that are predicted to fit; changes that do not affect the result come first."""
        changes: dict[str, Any] = {}
        shared = sharing.shares_more(self.config, self.registry)
        for step in [*sharing.sends_no_experts(self.config), *shared]:
            with suppress(ConfigError):  # the offloader moves what this level keeps whole
                if self.fits(self.predicted(replace(self.config, **step))):
                    return step
        steps: list[dict[str, Any]] = [] if self.config.recompute else [{"recompute": True}]
        steps += shared[-1:]
        if self.config.lora and self.config.lora_rank > 16:
            steps.append({"lora_rank": 16})
        elif not self.config.lora and self.registry.get("task", self.config.task).adapters:
            steps.append({"lora": True})
        for step in [{}, *steps]:
            changes |= step
            changed = replace(self.config, **changes)
            if any(rule.wrong({f: getattr(changed, f) for f in changed.__slots__}) for rule in RULES):
                return None
            try:
                prediction = self.predicted(changed) if step else prediction
            except ConfigError:  # the offloader moves what this level keeps whole
                continue
            if self.fits(prediction):
                return changes
            smaller = self._smaller(changed, prediction)
            if smaller:
                return changes | smaller
        return None

    def _smaller(self, config: RunConfig, prediction: Prediction) -> dict[str, Any] | None:
        """The largest micro-batch that fits, in rows or, if one row is too long, in tokens of one row."""
        assert self.room is not None
        held = [h for h in prediction.held if h.place in self.places]
        moving = sum(h.nbytes for h in held if h.kind in OF_TOKENS)
        free = SHARE * self.room - sum(h.nbytes for h in held) + moving
        rows, length = config.per_device_train_batch_size, config.sequence_len
        tokens = int(free / moving * rows * length) if moving else 0
        while tokens >= SHORTEST:
            changes: dict[str, Any] = {"per_device_train_batch_size": max(1, min(tokens // length, rows))}
            if tokens < length:
                shorter, parts = 1 << (tokens.bit_length() - 1), config.context_parallel_size
                changes["sequence_len"] = max(shorter - shorter % parts, parts)
            if self.fits(self.predicted(replace(config, **changes))):
                return {k: v for k, v in changes.items() if v != getattr(config, k)}
            tokens //= 2
        return None


def out_of_memory(config: RunConfig, registry: Registry, error: BaseException) -> MachineError:
    """The error, with changes that are predicted to make the run fit."""
    first = (str(error).split("\n")[0].split(". ")[0] or type(error).__name__).rstrip(".")
    on_gpu = isinstance(error, torch.OutOfMemoryError)
    try:
        advice = _Search(config, registry, on_gpu=on_gpu).advice()
    except (SurogateError, MemoryError, RuntimeError) as failure:
        # The prediction may run out of memory itself.
        log.warning("no prediction of memory", error=repr(failure))
        advice = ""
    advice = advice or "Fix: a smaller per_device_train_batch_size or sequence_len, recompute=true, or lora=true."
    return MachineError(
        f"Out of {'GPU' if on_gpu else 'host'} memory: {first}. {advice} "
        f"`surogate plan --fit SIZE` proposes other changes."
    )
