"""The plan of a run's ranks, from the keys, and its contradictions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import OffloaderSpec, OptimizerSpec, TensorKind
from surogate_core.bundles.handed import RunKeys, whole
from surogate_core.config import offload
from surogate_core.config.checks import EXACT_RANKS, SEVERAL, row_groups, several
from surogate_core.config.schema import KEYS, RunConfig
from surogate_core.errors import ConfigError, Problem
from surogate_core.mesh.axes import Axes
from surogate_core.mesh.sums import lanes_for

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry


def axes(given: RunKeys, *, moves_gradients: bool = False, varying: bool = False) -> Axes:
    """The plan of the run's ranks; of one rank while their number is not known yet (``gpus=0``).

    `moves_gradients`: whether the offloader keeps gradients off the device, where exact sums are not possible;
    `off_the_device` refuses to ask for both. `varying`: whether the task, not the configuration, decides how many
    micro-batches a step has.
    """
    config = whole(RunConfig, given)
    ranks, size, level = max(config.gpus, 1), config.context_parallel_size, _level(config)
    return Axes.of(
        ranks,
        shard=config.dp_shard_size if 0 < config.dp_shard_size < ranks else 0,
        context=size,
        expert=config.ep_size,
        expert_rows=config.ep_exchange == "rows",
        expert_balance=config.ep_load_balance_threshold if config.ep_size > 1 else None,
        zero_level=level,
        shard_weights=config.shard_weights or 3 in (config.zero_level, level),
        exact=_exact(config, moves_gradients=moves_gradients),
        micro_batches=lanes_for(ranks) if varying else config.gradient_accumulation_steps * row_groups(ranks, size),
        varying=varying,
    )


def _level(config: RunConfig) -> int:
    """The ZeRO level of the trained state; 0 with `lora`, whose trained state every rank keeps.

    It does not depend on the number of GPUs, because the order of an exact sum follows it. With `cpu_training` each
    process keeps its part of everything in host memory, and its CPU updates that part. Level 1 may share out the
    weights too, which changes no sum.
    """
    if config.lora:
        return 0
    if config.cpu_training:
        return 3
    asked = max(config.zero_level, 2 if config.shard_gradients else 0)
    return 3 if asked == 2 and config.shard_weights else asked


def _exact(config: RunConfig, *, moves_gradients: bool) -> bool:
    """Whether gradients are added in an order that does not depend on the number of ranks."""
    if config.exact_reduction == "auto" and (config.context_parallel_size > 1 or config.ep_size > 1):
        return False  # the sum over the tokens of a row, or of an expert, has another order than on one GPU
    if config.exact_reduction == "auto":
        return config.lora and not moves_gradients and config.gpus in EXACT_RANKS
    return config.exact_reduction


def copies(config: RunConfig) -> bool:
    """Whether copy engines move what the GPUs of one machine send each other."""
    return config.fabric.name in ("auto", "copy_engines")


def tokens_of_rank(config: RunConfig) -> int:
    """Tokens of a micro-batch that one rank computes: ranks that share rows have a part of each."""
    return config.per_device_train_batch_size * config.sequence_len // config.context_parallel_size


def shares_more(config: RunConfig, registry: Registry) -> list[dict[str, Any]]:
    """Changes with which several GPUs share out more, from the cheapest to the one that needs least memory."""
    if config.gpus == 1:
        return []
    optimizer: OptimizerSpec = registry.get("optimizer", config.optimizer.name)
    now = axes(config)
    # A task that samples from the model needs whole weights.
    online = registry.get("task", config.task).online is not None
    if config.context_parallel_size > 1 or config.ep_size > 1:
        return [{"zero_level": 1}] if not config.lora and now.zero_level == 0 and not optimizer.whole_matrices else []
    if config.lora:
        return [] if online or now.shard_weights else [{"shard_weights": True}]
    if optimizer.whole_matrices:
        return []
    if now.shard_weights:
        return [{"zero_level": 3}] if now.zero_level < 3 else []
    # Level 2 needs less memory than level 1 with shared weights, which no measurement has shown to be faster.
    return [{"zero_level": further} for further in ((1, 2) if online else (1, 2, 3)) if further > now.zero_level]


def sends_no_experts(config: RunConfig) -> list[dict[str, Any]]:
    """The change with which GPUs that share out experts need no room for those of others; none if they have none."""
    return [] if axes(config).expert_balance is None else [{"ep_load_balance_threshold": None}]


def whole_matrices(optimizer: OptimizerSpec, values: Mapping[str, Any]) -> Problem | None:
    """The mistake of sharing out the masters of an optimizer that needs whole matrices."""
    level, on_cpu = values["zero_level"], values["cpu_training"] is True
    if not optimizer.whole_matrices or not several(values) or values["lora"] is True or not (level or on_cpu):
        return None
    if on_cpu:
        message = f"shares out the masters among several GPUs, and optimizer {optimizer.name} needs whole matrices."
        return Problem(key="cpu_training", message=message, fix="gpus: 1, or cpu_training: false with zero_level: 0")
    message = f"is {level}, which shares out the masters, and optimizer {optimizer.name} needs whole matrices."
    return Problem(key="zero_level", message=message, fix="zero_level: 0")


def online_problems(task: str, values: Mapping[str, Any]) -> list[Problem]:
    """The mistakes of sharing out the weights where `task` samples from the model on every rank."""
    if values["ep_size"] > 1:
        why = f"is {values['ep_size']}, and task {task} samples from the model on every GPU, which needs all experts."
        return [Problem(key="ep_size", message=why, fix="ep_size: 1")]
    if not several(values):
        return []
    why = f"and task {task} samples from the model on every GPU, which needs whole weights."
    found = []
    if values["shard_weights"]:
        found.append(Problem(key="shard_weights", message=f"is true, {why}", fix="shard_weights: false"))
    if values["zero_level"] == 3:
        found.append(Problem(key="zero_level", message=f"is 3, {why}", fix="zero_level: 2"))
    if values["cpu_training"] is True and values["lora"] is False:
        message = f"shares out the weights among several GPUs, {why}"
        found.append(Problem(key="cpu_training", message=message, fix="gpus: 1, or lora: true"))
    return found


OFF_THE_DEVICE = frozenset(
    {
        *("gpus", "task", "lora", "zero_level", "shard_gradients", "shard_weights"),
        *("exact_reduction", "offload", *offload.KINDS, offload.EXPERTS),
    }
)
"""The keys that `off_the_device` reads."""


def off_the_device(config: RunConfig, offloader: OffloaderSpec, *, online: bool) -> list[Problem]:
    """The mistakes of moving what several GPUs, or exact sums, need on the device.

    `online`: whether the task samples its steps from the model.
    """
    moves = offload.kinds_of(config, offloader)
    if offloader.place == "device":
        return []
    found = [wrong] if (wrong := misplaced(config, moves, online=online)) is not None else []
    if config.exact_reduction is True and "gradients" in moves:
        name = config.offload.name
        message = f"is true, and exact sums need the gradients on the device, which offload={name} moves."
        fix = "exact_reduction: auto, or an offload_* key that leaves gradients alone"
        found.append(Problem(key="exact_reduction", message=message, fix=fix))
    return found


def misplaced(config: RunConfig, moves: Collection[TensorKind], *, online: bool = False) -> Problem | None:
    """The mistake of moving tensors that every GPU needs whole on the device. `moves`: what the offloader moves.

    With ``gpus=0`` the number is not known yet, and the answer is None.
    """
    plan = axes(config)
    if not plan.shards:
        return None
    shared = plan.zero_level
    acts = f" and acts as {shared}" if shared != config.zero_level else ""
    kinds: tuple[tuple[TensorKind, bool, int, str], ...] = (
        ("weights", plan.shards_weights, 3, "trained weights"),
        ("gradients", plan.shards_gradients, 2, "gradients"),
    )
    for kind, parted, least, what in kinds:
        if kind in moves and not parted:
            name = config.offload.name
            message = (
                f"is {config.zero_level}{acts}, with which every GPU keeps whole {what}, and offload={name} moves them."
            )
            fix = "offload_* keys that leave them alone"
            if plan.exchanges:  # nothing but masters and optimizer state is shared out then
                fix = f"zero_level: 0, or {fix}"
            elif least == 2 or not online:  # a task that samples from the model needs whole weights
                fix = f"zero_level: {least}, with which each GPU moves its part, or {fix}"
            return Problem(key="zero_level", message=message, fix=fix)
    return None


def check(config: RunConfig, optimizer: OptimizerSpec) -> None:
    """Raise `ConfigError` if the keys contradict the number of ranks, which torchrun or SLURM may have set."""
    values = {key: getattr(config, key) for key in KEYS}
    problems = [rule.problem(values) for rule in SEVERAL if rule.wrong(values)]
    if problem := whole_matrices(optimizer, values):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)


def notes(config: RunConfig) -> list[str]:
    """Notes about keys of several GPUs that have no effect."""
    found = []
    shards = [key for key in ("shard_gradients", "shard_weights") if getattr(config, key)]
    if config.ep_exchange != "sums" and config.ep_size == 1:
        found.append(f"ep_exchange={config.ep_exchange}: no effect with ep_size=1, every GPU has all experts.")
    if config.ep_load_balance_threshold is not None and config.ep_size == 1:
        found.append("ep_load_balance_threshold: no effect with ep_size=1, every GPU computes all of its tokens.")
    if config.gpus == 1:
        shards = [f"zero_level={config.zero_level}"] * (config.zero_level > 1) + shards
        shards += [f"dp_shard_size={config.dp_shard_size}"] * (config.dp_shard_size > 0)
        if shards:
            found.append(f"{', '.join(shards)}: no effect with gpus=1, nothing is shared out.")
    elif config.lora:
        whole = [f"zero_level={config.zero_level}"] * (config.zero_level == 2)
        whole += ["shard_gradients"] * config.shard_gradients
        no_groups = config.dp_shard_size > 0 and not axes(config).shard_weights
        whole += [f"dp_shard_size={config.dp_shard_size}"] * no_groups
        if whole:
            found.append(
                f"{', '.join(whole)}: no effect with lora, every GPU keeps the adapters and their optimizer state. "
                f"shard_weights=true shares out the frozen base."
            )
    elif config.cpu_training and config.zero_level != 3:
        found.append(
            "cpu_training: with several GPUs it shares out weights, gradients, masters and optimizer state, "
            "as zero_level=3 does."
        )
    return found
