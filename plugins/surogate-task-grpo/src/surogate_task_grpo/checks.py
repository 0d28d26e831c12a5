"""What a configuration of `grpo` must satisfy before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from surogate_core.plugin import Problem, axes
from surogate_task_grpo.options import GRPOOptions

if TYPE_CHECKING:
    from surogate_core.plugin import bundles
    from surogate_reinforcement.policy import Policy

LARGEST_WEIGHT = 1e18
"""Largest size of a reward's weight; a reward is not larger either."""


def problems(config: bundles.RunKeys, options: GRPOOptions, registry: bundles.Plugins) -> Iterator[Problem]:
    """The mistakes of a configuration, as `TaskSpec.check` reports them."""
    if config.environment is None:
        message = "is not set, and task grpo needs one to learn in."
        yield Problem(key="environment", message=message, fix="environment=copy")
    if options.max_completion_length >= config.sequence_len:
        message = (
            f"a completion of {options.max_completion_length:,} tokens and its prompt do not fit into a row of "
            f"{config.sequence_len:,} tokens."
        )
        fix = f"sequence_len={2 * options.max_completion_length}, or a smaller max_completion_length"
        yield Problem(key="max_completion_length", message=message, fix=fix)
    if options.mask_truncated_completions and options.truncated_completions == "penalty":
        message = "contradicts truncated_completions=penalty."
        yield Problem(key="mask_truncated_completions", message=message, fix="keep one")
    for reward, weight in options.reward_weights.items():
        if not abs(weight) <= LARGEST_WEIGHT:
            message = f"has the weight {weight:g} for {reward}, with which sums of rewards overflow."
            yield Problem(key="reward_weights", message=message, fix=f"a weight of at most {LARGEST_WEIGHT:g}")
    kl = policy_of(config, options, registry).loss.kl
    if options.beta > 0 and kl is None:
        message = f"is {options.beta:g}, and loss_type={options.loss_type} has no divergence from a reference."
        yield Problem(key="beta", message=message, fix="beta=0, or another loss_type")
    if config.gpus > 1:
        yield from _of_several_gpus(config, options, registry)
    if options.max_staleness:
        yield from _of_staleness(config, options, registry, kl)


def policy_of(config: bundles.RunKeys, options: GRPOOptions, registry: bundles.Plugins) -> Policy:
    """The policy loss of a run."""
    from surogate_reinforcement.policy import Policy

    task: bundles.TaskSpec = registry.get("task", config.task)
    return Policy(task.parts_of(config, registry)["policy_loss"], options)


def _of_several_gpus(config: bundles.RunKeys, options: GRPOOptions, registry: bundles.Plugins) -> Iterator[Problem]:
    rollout = config.rollout.name
    if rollout in registry.names("rollout") and registry.get("rollout", rollout).apart:
        message = f"is {rollout}, an engine with weights of its own, which takes those of one GPU."
        yield Problem(key="rollout", message=message, fix="rollout=native, or gpus=1")
    if options.beta > 0 and axes(config).zero_level:
        message = f"is {options.beta:g}, and the reference needs the whole masters on every GPU."
        yield Problem(key="beta", message=message, fix="zero_level=0, lora=true, or beta=0")


def _of_staleness(
    config: bundles.RunKeys, options: GRPOOptions, registry: bundles.Plugins, kl: str | None
) -> Iterator[Problem]:
    rollout, key, fix = config.rollout.name, "max_staleness", "max_staleness=0"
    if not registry.get("rollout", rollout).apart:
        message = f"is {options.max_staleness}, and rollout={rollout} samples with the weights that are being trained."
        yield Problem(key=key, message=message, fix=f"{fix}, or rollout=dedicated with a second GPU")
    # Both need the run's device while it trains.
    if options.reward_model is not None:
        message = f"is {options.max_staleness}, and reward_model scores completions on the device that trains."
        yield Problem(key=key, message=message, fix=fix)
    if kl == "reward" and options.beta > 0:
        message = f"is {options.max_staleness}, and {options.loss_type} with beta needs the reference for its rewards."
        yield Problem(key=key, message=message, fix=f"{fix}, or beta=0")
