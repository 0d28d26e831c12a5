"""The options of `grpo`: flat keys, named as in TRL's GRPOConfig where it has them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Interval

from surogate_core.plugin import bundles

Advantage = Literal["group", "batch", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOOptions:
    """Options of reinforcement learning with groups of completions."""

    num_generations: Annotated[int, Interval(ge=2, le=4096), bundles.Flat("num_generations", essential=True)] = 8
    """Completions of each prompt: the group in which rewards are compared."""
    prompts_per_step: Annotated[int, Interval(ge=1, le=2**20), bundles.Flat("prompts_per_step", essential=True)] = 8
    """Prompts of each generation; each has `num_generations` completions."""
    max_completion_length: Annotated[
        int, Interval(ge=1, le=2**24), bundles.Flat("max_completion_length", essential=True)
    ] = 512
    """Most tokens of a completion. With several turns: of all turns together, what the environment says included."""
    max_turns: Annotated[int, Interval(ge=1, le=2**16), bundles.Flat("max_turns", essential=True)] = 16
    """Most replies of the model in one episode; an episode that is not done by then is truncated."""
    temperature: Annotated[float, Interval(gt=0, le=100), bundles.Flat("temperature", essential=True)] = 1.0
    """Divides the logits, when tokens are sampled and in the loss."""
    top_p: Annotated[float, Interval(gt=0, le=1), bundles.Flat("top_p", essential=True)] = 1.0
    """Sample only from the most probable tokens whose probabilities add up to this."""
    top_k: Annotated[int, Interval(ge=0, le=2**24), bundles.Flat("top_k", essential=True)] = 0
    """Sample only from this many most probable tokens; 0 keeps all."""
    min_p: Annotated[float, Interval(ge=0, le=1), bundles.Flat("min_p", essential=True)] = 0.0
    """Sample only tokens with at least this share of the largest probability."""
    loss_type: Annotated[str, bundles.Flat("loss_type", essential=True)] = "dapo"
    """The policy loss, with how it is averaged over tokens and sequences: dapo, grpo, dr_grpo, bnpo, gspo, cispo, rloo,
    dppo, or one of another plugin.
    """
    beta: Annotated[float, Interval(ge=0, le=1000), bundles.Flat("beta", essential=True)] = 0.0
    """Coefficient of the KL divergence to the model of step 0; 0 needs no reference."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"], bundles.Flat("kl_estimator", essential=True)] = "k3"
    """Estimator of that divergence: the log ratio x, half its square, or exp(-x) - 1 + x. The gradient of each is
    unbiased.
    """
    epsilon: Annotated[Annotated[float, Interval(ge=0, le=1000)] | None, bundles.Flat("epsilon", essential=True)] = None
    """How far a probability ratio may fall below 1 before it is clipped. Of dppo it is how far a probability may fall,
    and cispo has no such bound. null takes what the loss type's paper has: 0.0003 for gspo, otherwise 0.2.
    """
    epsilon_high: Annotated[
        Annotated[float, Interval(ge=0, le=1000)] | None, bundles.Flat("epsilon_high", essential=True)
    ] = None
    """How far it may rise above 1; of cispo the largest ratio. null takes `epsilon` if that is set (not for cispo),
    otherwise what the paper has: 0.28 for dapo, 0.0004 for gspo, 5 for cispo, 0.2 for the others.
    """
    scale_rewards: Annotated[Advantage | None, bundles.Flat("scale_rewards", essential=True)] = None
    """What divides a reward minus its group's mean: the standard deviation of the group, of the batch, or nothing. null
    takes what the loss type's paper has: nothing for dr_grpo and dppo, otherwise group.
    """
    advantage: Annotated[str | None, bundles.Flat("advantage", essential=True)] = None
    """Name of the way to compute advantages from rewards; null follows `scale_rewards`, and is what the loss type takes
    where that is null too.
    """
    truncated_completions: Annotated[
        Literal["keep", "mask", "penalty"], bundles.Flat("truncated_completions", essential=True)
    ] = "keep"
    """Completions that reach `max_completion_length`: train on them, leave them out of the loss, or lower the reward by
    up to 1 over the last `overlong_buffer` tokens.
    """
    mask_truncated_completions: Annotated[bool, bundles.Flat("mask_truncated_completions", essential=True)] = False
    """The same as truncated_completions=mask."""
    overlong_buffer: Annotated[
        Annotated[int, Interval(ge=1, le=2**24)] | None, bundles.Flat("overlong_buffer", essential=True)
    ] = None
    """Tokens over which truncated_completions=penalty lowers the reward from 0 to -1; null is a fifth of
    `max_completion_length`.
    """
    max_refills: Annotated[int, Interval(ge=0, le=1000), bundles.Flat("max_refills", essential=True)] = 4
    """Most further generations of a step that replace groups whose rewards are all equal."""
    max_attempts_without_signal: Annotated[
        int, Interval(ge=1, le=10**6), bundles.Flat("max_attempts_without_signal", essential=True)
    ] = 3
    """The run ends with an error if this many generations of a step, each with its refills, bring no group whose
    rewards differ.
    """
    importance_correction: Annotated[
        Literal["token", "sequence", "none"], bundles.Flat("importance_correction", essential=True)
    ] = "token"
    """Weights that make up for a rollout engine whose probabilities differ from the trainer's: for each token, for each
    sequence, or none.
    """
    importance_clip: Annotated[float, Gt(0), bundles.Flat("importance_clip", essential=True)] = 2.0
    """Largest such weight."""
    num_iterations: Annotated[int, Interval(ge=1, le=1000), bundles.Flat("num_iterations", essential=True)] = 1
    """Optimizer steps on each generation."""
    max_staleness: Annotated[int, Interval(ge=0, le=1), bundles.Flat("max_staleness", essential=True)] = 0
    """Generations that may lie between the weights that sample and the weights that are trained. 1 makes the next
    completions while the model is trained on the last ones; a rollout engine with weights of its own can do that:
    dedicated or vllm. Importance weights make up for the difference.
    """
    reward_weights: Annotated[dict[str, float], bundles.Flat("reward_weights", essential=True)] = field(
        default_factory=dict
    )
    """Weight of each reward by its name; a reward that is not named has weight 1."""
    reward_model: Annotated[str | None, bundles.Flat("reward_model")] = None
    """A model of `surogate reward`: a directory, a run, or a hub id. Its score of each completion is the reward
    `reward_model`, beside the environment's rewards; `reward_weights` may give it a weight.
    """
    environment_workers: Annotated[
        Annotated[int, Interval(ge=1, le=4096)] | None, bundles.Flat("environment_workers")
    ] = None
    """Processes of each rank that run environments; null takes one for each of its CPU cores, at most 8."""
    environment_timeout: Annotated[float, Gt(0), bundles.Flat("environment_timeout")] = 10.0
    """Seconds that an environment may take for one reply or for the rewards of an episode; one that takes longer is
    killed, and the reward counts as missing.
    """
    environment_build_timeout: Annotated[float, Gt(0), bundles.Flat("environment_build_timeout")] = 300.0
    """Seconds that a worker process may take to import the plugin of the environment and to build it."""
    eval_environment_tasks: Annotated[int, Ge(0), bundles.Flat("eval_environment_tasks")] = 0
    """Held-out problems of the environment, played with the most probable tokens at each evaluation; 0 for none."""
    log_completions: Annotated[bool, bundles.Flat("log_completions")] = True
    """Whether `rollouts.jsonl` records every completion with its rewards."""


def truncation(options: GRPOOptions) -> Literal["keep", "mask", "penalty"]:
    """What happens to truncated completions."""
    return "mask" if options.mask_truncated_completions else options.truncated_completions


def parts(options: GRPOOptions, registry: bundles.Plugins) -> dict[str, str]:
    """The policy loss and the advantage that options choose, as `TaskSpec.parts` gives them."""
    chosen = {"policy_loss": options.loss_type}
    spec: bundles.PolicyLossSpec | None = registry.all("policy_loss").get(options.loss_type)
    return chosen if spec is None else {**chosen, "advantage": advantage_name(options, spec)}


def advantage_name(options: GRPOOptions, loss: bundles.PolicyLossSpec) -> str:
    """The name of the `AdvantageSpec` that options choose."""
    if options.advantage is not None:
        return options.advantage
    if options.scale_rewards is not None:
        return {"group": "group", "batch": "batch", "none": "mean"}[options.scale_rewards]
    return loss.advantage
