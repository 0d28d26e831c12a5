"""What the ranks of a run must have in common, and what a resumed run keeps on another number of them."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_core import __version__
from surogate_core.config.checks import EXACT_RANKS, row_groups
from surogate_core.config.schema import RunConfig
from surogate_core.config.sharing import axes
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.errors import ConfigError, Problem, UserError, printable
from surogate_core.mesh.axes import Axes
from surogate_core.mesh.sums import lanes_of
from surogate_core.setup.changes import flat_values, recorded
from surogate_core.train.checkpoint import Checkpoint

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.prepare import Base, Material

SHOWN = 8
"""Differences between ranks that a message lists."""


def micro_batches_of(config: RunConfig) -> int:
    """M, micro-batches of an optimizer step of all ranks together."""
    return axes(config).micro_batches


def tokens_per_step(config: RunConfig) -> int:
    """Token slots of an optimizer step of all ranks, padding counted."""
    return config.per_device_train_batch_size * micro_batches_of(config) * config.sequence_len


def on_one_gpu(config: RunConfig) -> RunConfig:
    """The configuration with which one GPU takes the same optimizer steps."""
    return replace(
        config, gpus=1, context_parallel_size=1, ep_size=1, gradient_accumulation_steps=micro_batches_of(config)
    )


def with_kept_steps(config: RunConfig, checkpoint: Checkpoint) -> tuple[RunConfig, list[str]]:
    """The configuration whose steps have as many micro-batches as the checkpoint's, and a note if that changes a key.

    A user who changed `gradient_accumulation_steps` asks for other steps, and gets them. Raises `ConfigError` if the
    GPUs cannot share a step equally.
    """
    before = checkpoint.state.get("config", {})
    asked = before.get("gradient_accumulation_steps")
    kept = checkpoint.state.get("micro_batches", asked)
    groups_before = row_groups(checkpoint.state.get("gpus", 1), before.get("context_parallel_size", 1))
    now = config.gradient_accumulation_steps
    # The key as the user gave it, and as `config.yaml` of the interrupted run has it.
    if kept is None or now not in (asked, kept // groups_before) or kept == micro_batches_of(config):
        return config, []
    groups = row_groups(config.gpus, config.context_parallel_size)
    if kept % groups:
        *few, most = (str(n) for n in range(1, kept + 1) if kept % n == 0)
        message = (
            f"is {config.gpus}, and a step of {checkpoint.path} has {kept} micro-batches, which {config.gpus} GPUs "
            f"cannot share equally."
        )
        divisors = f"{', '.join(few)} or {most}" if few else most
        of_each = f" times {config.context_parallel_size}" if config.context_parallel_size > 1 else ""
        fix = f"gpus={divisors}{of_each}, or another gradient_accumulation_steps, which trains on with other steps"
        raise ConfigError([Problem(key="gpus", message=message, fix=fix)])
    own = kept // groups
    note = (
        f"gradient_accumulation_steps is {own} instead of {now}: with gpus={config.gpus}, a step keeps the {kept} "
        f"micro-batches that it has in {checkpoint.path}."
    )
    return replace(config, gradient_accumulation_steps=own), [note]


def facts_of(base: Base, material: Material, registry: Registry, checkpoint: Checkpoint | None) -> dict[str, Any]:
    """What must be equal on all ranks, by its name in a message: JSON values."""
    data = material.data
    facts: dict[str, Any] = {
        "surogate": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "the model": base.resolved.fingerprint,
        "the training rows": data.train.digest if data is not None else None,
        "the held-out rows": data.eval.digest if data is not None and data.eval is not None else None,
        "the step of the checkpoint": checkpoint.step if checkpoint is not None else None,
    }
    for plugin in registry.plugin_set(digests=True):
        facts[f"plugin {plugin['name']}"] = f"{plugin['version']}, code {plugin.get('sha256', 'unknown')[:12]}"
    return facts | {f"key {key}": value for key, value in flat_values(recorded(base.config))}


def check_equal(facts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UserError` with everything in which the facts, by rank, differ."""
    names = dict.fromkeys(name for fact in facts for name in fact)
    different = [name for name in names if any(fact.get(name) != facts[0].get(name) for fact in facts)]
    if not different:
        return
    lines = [f"  - {name}: {_by_rank([fact.get(name) for fact in facts])}" for name in different[:SHOWN]]
    lines += [f"  - and {len(different) - SHOWN} more"] * (len(different) > SHOWN)
    listed = "\n".join(lines)
    raise UserError(
        f"The ranks of this run would not train the same model on the same rows. They differ in:\n{listed}\n"
        "Fix: start all ranks with the same configuration, files, plugins and versions."
    )


def check_none_elsewhere(names: Sequence[Sequence[str]], root: Path) -> None:
    """Raise `UserError` if a machine has a checkpoint when rank 0, which has none, would start from step 0.

    `names`: the names of checkpoints in `root`, by rank.
    """
    rank = next((rank for rank, found in enumerate(names) if rank and found), None)
    if rank is not None:
        raise UserError(
            f"{root}: the machine of rank 0 has no checkpoint here, but that of rank {rank} has {names[rank][-1]}. "
            f"Fix: start the run so that rank 0 is on the machine that has the checkpoints, copy them to the machine "
            f"of rank 0, or start anew with resume_from_checkpoint=false."
        )


def unequal_devices(names: Sequence[str], *, share_experts: bool = False) -> list[str]:
    """A note if the ranks' devices, by rank, are not equal. `share_experts`: whether they share out experts."""
    if len(set(names)) == 1:
        return []
    all_alike = " Each has as many experts, and on average as many rows, whatever its memory and speed (ep_size)."
    return [
        f"The GPUs are not equal: {_by_rank(names)}. The slowest one sets the pace, and another number or order of "
        f"them may give other bits.{all_alike if share_experts else ''}"
    ]


def _by_rank(values: Sequence[Any]) -> str:
    """Each value with its ranks, such as ``a on rank 0; b on ranks 1, 2``."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(printable(str(value))[:60], []).append(str(rank))
    return "; ".join(f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items())


SHARDED_ORDER = 2
"""Counts the orders in which levels 2 and 3 have added up gradients that are not exact. Old checkpoints have no such
number: the embedding's and the head's gradients were reduced in every micro-step."""


def reduction_of(plan: Axes, stages: Sequence[int] = ()) -> dict[str, Any]:
    """The order of the sums over gradients, as a checkpoint records it: runs of one order have equal bits.

    `stages`: `Stages.sizes`; those of powers of two have the order of one stage. At level 0 every rank sums all squares
    for the norm; above, the norm has one sum for each part of a layer.
    """
    if not plan.exact:
        return (
            {"exact": False, "ranks": plan.ranks, "level": plan.zero_level if plan.shards else 0}
            | ({"context": plan.context} if plan.context > 1 else {})
            | ({"experts": plan.expert, "rows": plan.expert_rows} if plan.expert > 1 else {})
            | ({"balance": plan.expert_balance} if plan.expert_balance is not None else {})
            | ({"shard": plan.shard} if plan.replicate > 1 and plan.shards else {})
            | ({"sharded": SHARDED_ORDER} if plan.reduces_later else {})
            | ({"stages": list(stages)} if any(size & (size - 1) for size in stages) and len(stages) > 1 else {})
        )
    order = "interleaved" if plan.reduces_each_micro_step else "neighbours"
    norm = "parts" if plan.zero_level else "whole"
    return {"exact": True, "lanes": lanes_of(plan.micro_batches), "order": order, "norm": norm}


def reduction_notes(
    settings: EngineSettings, checkpoint: Checkpoint | None, *, deterministic: bool, stages: Sequence[int] = ()
) -> list[str]:
    """Which equal bits the run promises on several GPUs, and whether it continues those of the checkpoint.

    `stages`: `Stages.sizes`.
    """
    plan = settings.axes
    notes, now = [], reduction_of(plan, stages)
    if plan.ranks > 1:
        equal = [n for n in EXACT_RANKS if now["exact"] and n <= now["lanes"]]
        if not deterministic:
            notes.append("Two equal runs may differ in their last bits: deterministic=false.")
        elif plan.ranks in equal:
            others = " and ".join([", ".join(str(n) for n in equal[:-1]), str(equal[-1])])
            notes.append(f"Gradients are added in an order that gives equal bits on {others} equal GPUs.")
        else:
            notes.append(
                f"Two equal runs on {plan.ranks} GPUs give equal bits; another number of GPUs rounds sums "
                f"differently{_how_to_be_exact(settings)}."
            )
    before = checkpoint.state.get("reduction") if checkpoint is not None else None
    if before not in (None, now):
        notes.append(
            "Sums over gradients have another order than before the checkpoint, and round differently from here on."
        )
    return notes


def _how_to_be_exact(settings: EngineSettings) -> str:
    plan = settings.axes
    possible = plan.ranks in EXACT_RANKS and not plan.exchanges and lanes_of(plan.micro_batches) % plan.ranks == 0
    offered = possible and not (plan.exact or settings.update_on_cpu)
    return " (exact_reduction=true gives equal bits)" if offered else ""
