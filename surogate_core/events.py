"""The typed events that a run emits, and the controls that a monitor may answer with.

Times are seconds. Losses are natural-log cross-entropies per label token, unless the task has another objective.
Passwords, tokens and signatures are masked in the fields that contain text from the user or from a library, because
monitors write and send what they receive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple

from surogate_core.masking import masked_values
from surogate_core.outcome import verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of the run that do not change, given to every monitor when it is built."""

    run_name: str
    """The run's name, given or generated."""
    output_dir: str
    """The directory that the run writes to."""
    task: str
    """Name of the run's task, such as sft or pt."""
    config: Mapping[str, Any]
    """The resolved configuration, with secrets masked."""
    interactive: bool
    """Whether standard output is a terminal that a live view may use."""

    def __post_init__(self) -> None:
        _mask(self, "config")


def _mask(event: Any, *names: str) -> None:
    for name in names:
        object.__setattr__(event, name, masked_values(getattr(event, name)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    @property
    def name(self) -> str:
        """The event's type as written in ``metrics.jsonl``, e.g. ``step_end``."""
        return _with_underscores(type(self).__name__)


@cache
def _with_underscores(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def strict_json(value: Any) -> Any:
    """The value for strict JSON: NaN and infinities become text, dataclasses and named tuples become mappings, keys of
    mappings become text, and so does any other type.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(name): strict_json(item) for name, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: strict_json(item) for name, item in zip(value._fields, value, strict=True)}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: strict_json(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [strict_json(item) for item in value]
    return str(value)


def event_fields(event: Event) -> dict[str, Any]:
    """The event as a mapping for strict JSON: its name under ``event``, then its fields."""
    return {"event": event.name} | {f.name: strict_json(getattr(event, f.name)) for f in fields(event)}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart(Event):
    """The run is set up and about to take its first step."""

    model: str
    """The model's title, such as its path or preset."""
    parameters: int
    """All parameters, frozen ones included."""
    trainable_parameters: int
    """Trained parameters, adapters included."""
    train_tokens: int
    """Tokens of one epoch, without padding."""
    steps: int
    """Optimizer steps of the whole run."""
    start_step: int
    """Steps already done, by a resumed checkpoint."""
    tokens_per_step: int
    """Positions of one optimizer step, padding included; 0 if steps are sampled from the model, so that it varies."""
    epochs: float
    """Epochs of the whole run."""
    device: str
    """The device in words."""
    gpus: int = 1
    """Number of devices, with a process each."""
    gemm_flops_per_second: float | None = None
    """Measured rate of a large matrix product in the dtype of the weights, on one device; `StepEnd.speed_of_light` is
    relative to it.
    """
    active_parameters: int | None = None
    """Parameters that a token uses, in a model with experts; None if every token uses all."""
    objective: str = "cross_entropy"
    """Name of the objective. The exponential of a loss of `cross_entropy` is a perplexity."""
    notes: tuple[str, ...] = ()
    """Notes for the user, one sentence each."""

    def __post_init__(self) -> None:
        _mask(self, "model", "notes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Long work outside the steps: loading, tokenising, tracing, compiling, saving.

    `total` 0 means unknown; `done == total` ends the stage.
    """

    task: str
    """The stage in words, e.g. `loading weights`."""
    done: int
    """Finished part, in `unit`."""
    total: int = 0
    """The whole, in `unit`; 0 if unknown."""
    unit: str = ""
    """Unit of `done` and `total`, e.g. `B` for bytes; empty for plain counts."""

    def __post_init__(self) -> None:
        _mask(self, "task")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(Event):
    """One optimizer step has been taken. On CUDA it is emitted one step late, without a sync."""

    step: int
    """Number of the step; the first is 1."""
    epoch: float
    """Epochs done, with a fraction."""
    loss: float
    """Mean over the label tokens of the step."""
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    """Learning rate of the step."""
    tokens: int
    """Tokens of the step, without padding."""
    label_tokens: int
    """Tokens of the step that carry loss."""
    total_tokens: int
    """Tokens since the beginning of the run, resumed parts included."""
    seconds: float
    """Wall time of the step."""
    tokens_per_second: float
    """`tokens` divided by `seconds`."""
    eta_seconds: float
    """Estimated seconds to the end of the run."""
    peak_memory_bytes: int
    """Peak of the device allocator on CUDA, peak resident set on a CPU; of rank 0 if there are several."""
    speed_of_light: float | None = None
    """MFU against a measured product: rate of the step's necessary FLOPs as a share (0 to 1) of that product's rate on
    all devices.
    """
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the task's objective by name, such as `rewards/margins` or `entropy`; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStats(Event):
    """GPU telemetry of the driver, every `log_gpu_util` steps. A thread reads it, so it may be one step late."""

    step: int
    """Optimizer steps done."""
    utilization: float
    """Share of recent time, 0 to 1, in which a kernel ran."""
    memory_used_bytes: int
    """Memory used on the whole device, other processes included."""
    memory_total_bytes: int
    """Total memory of the device."""
    power_watts: float
    """Power drawn."""
    temperature_celsius: float
    """Temperature of the chip."""
    sm_clock_mhz: float
    """Clock of the multiprocessors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStats(Event):
    """Figures of each rank of a run on several GPUs, every `log_gpu_util` steps and at the end."""

    step: int
    """Optimizer steps done."""
    peak_memory_bytes: tuple[int, ...]
    """By rank: peak of the device allocator on CUDA, peak resident set on a CPU."""
    work_seconds: tuple[float, ...] = ()
    """By rank: mean time of a micro-step that needs no other rank; empty if each needs the others."""

    @property
    def slowest(self) -> tuple[int, float] | None:
        """The rank whose micro-steps take longest, and by which share they take longer than the mean of all ranks."""
        if not self.work_seconds:
            return None
        longest = max(self.work_seconds)
        mean = sum(self.work_seconds) / len(self.work_seconds)
        return self.work_seconds.index(longest), longest / max(mean, 1e-12) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEnd(Event):
    """An evaluation over the held-out rows."""

    step: int
    """Optimizer steps done."""
    loss: float
    """Mean over the label tokens of the held-out rows."""
    label_tokens: int
    """Number of label tokens in the mean."""
    seconds: float
    """Wall time of the evaluation."""
    gap: float | None
    """Held-out loss minus the mean training loss of the last min(20, steps since the last evaluation) steps."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Figures of the task's objective over the held-out rows, by name; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples(Event):
    """Texts that the model generated for `sample_prompts`."""

    step: int
    """Optimizer steps done."""
    prompts: tuple[str, ...]
    """The prompts, in the user's order; of a conversation its last message."""
    texts: tuple[str, ...]
    """What the model generated for each prompt."""
    ended: tuple[bool, ...] = ()
    """For each text whether the model ended it, rather than `sample_max_new_tokens`."""
    tokens: int = 0
    """Generated tokens, of all texts together."""
    seconds: float = 0.0
    """Wall time of generating."""

    def __post_init__(self) -> None:
        _mask(self, "prompts", "texts")


class Spread(NamedTuple):
    """Mean, standard deviation (of the population) and extremes of some values; a mapping in JSON."""

    mean: float
    std: float
    min: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts(Event):
    """What the model generated for one optimizer step of reinforcement learning, and how it was rewarded.

    It comes before the `StepEnd` of its step. Completions of refills count everywhere but in `kept`.
    """

    step: int
    """Number of the optimizer step that trains on them."""
    prompts: int
    """Prompts that completions were generated for; each is the prompt of one group."""
    completions: int
    """Generated completions."""
    reward: Spread | None
    """Rewards of the completions, each the weighted sum of its named rewards; None if no completion has a reward."""
    rewards: Mapping[str, Spread] = field(default_factory=dict)
    """Name of a reward → its values, as the environment gave them."""
    without_signal: float = 0.0
    """Share, 0 to 1, of the groups whose rewards are all equal, so that they teach nothing."""
    refills: int = 0
    """How often further prompts were taken because groups had no signal."""
    kept: float = 1.0
    """Share, 0 to 1, of the completions that the step trains on."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of completions that got no reward for it, such as a time limit or an exception."""
    length: Spread
    """Tokens of a completion that the model generated."""
    terminated_length: Spread | None = None
    """The same for completions that the model ended itself; None if there is none."""
    truncated: float = 0.0
    """Share, 0 to 1, of the completions that reached `max_completion_length`."""
    tokens: int
    """Tokens that the model generated, in all completions."""
    turns: float = 1.0
    """Mean number of the model's replies in a completion."""
    prefix_breaks: int = 0
    """Completions of several turns that were divided, because the chat template changed their earlier turns."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Phase → its wall time, such as `generate`, `score` or `reference`; the optimizer step is not among them."""
    overlapped: Mapping[str, float] = field(default_factory=dict)
    """Phase → its wall time in the thread that works ahead while the model trains on the completions before. `seconds`
    then has the phase `wait`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSample:
    """One completion as text."""

    prompt: str
    """The prompt; of a conversation its last message."""
    completion: str
    """What the model generated, with the environment's replies if there are several turns."""
    reward: float | None
    """The weighted sum of the named rewards; None if the environment gave none."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """Name of a reward → its value."""
    advantage: float | None = None
    """The advantage; None if the completion is not trained on."""
    reason: str = ""
    """How the completion ended: `stop`, `length`, or the reason of a fault."""
    length: int = 0
    """Tokens that the model generated."""

    def __post_init__(self) -> None:
        _mask(self, "prompt", "completion", "reason")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSamples(Event):
    """A few completions of one optimizer step: the best, the worst, and one that failed if any did."""

    step: int
    """Number of the optimizer step that trains on them."""
    samples: tuple[RolloutSample, ...]
    """The completions, the highest reward first, and behind them the one that failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutEval(Event):
    """An evaluation of reinforcement learning: the reward of held-out problems, without sampling."""

    step: int
    """Optimizer steps done."""
    tasks: int
    """Number of held-out problems."""
    reward: Spread | None
    """Rewards of the completions; None if no completion has a reward."""
    rewards: Mapping[str, Spread] = field(default_factory=dict)
    """Name of a reward → its values."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Reason → number of completions that got no reward for it."""
    length: Spread | None = None
    """Tokens of a completion that the model generated."""
    truncated: float = 0.0
    """Share, 0 to 1, of the completions that reached `max_completion_length`."""
    tokens: int = 0
    """Tokens that the model generated, in all completions."""
    seconds: float
    """Wall time of the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    step: int
    """Optimizer steps done."""
    path: str
    """Its directory."""
    seconds: float
    """Wall time of saving."""
    reason: Literal["schedule", "signal", "control", "end", "best"]
    """Why it was saved; ``best`` with `load_best`, after the best evaluation so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """A message for the user."""

    level: Literal["info", "warning", "error"]
    """Severity."""
    message: str
    """The message, in one or a few sentences."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Figures and names that the message is based on."""

    def __post_init__(self) -> None:
        _mask(self, "message", "data")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionStats(Event):
    """How well the delayed scales of a recipe fitted the values of recent steps, by role (activation, weight,
    gradient).

    The shares count tensors: one for each projection, role and step whose values were scaled by the history of earlier
    steps.
    """

    step: int
    """The last of the steps."""
    steps: int
    """Number of steps."""
    saturated: Mapping[str, float]
    """Role → share, 0 to 1, of the tensors whose largest value exceeded the format's, and was clipped."""
    underflowed: Mapping[str, float]
    """Role → share of the tensors whose largest value was below the format's smallest normal number."""
    worst: str
    """The tensor that exceeded its format most, such as ``layer 3 self_attn.q_proj activation``; empty if none."""
    worst_excess: float
    """Its largest value divided by the largest of the format; 0 if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFigures(Event):
    """What blocks returned beside their output in one step: the side outputs that a model family declares."""

    step: int
    """Optimizer steps done."""
    figures: Mapping[str, float]
    """Name of a side output → its mean over layers, micro-steps and elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats(Event):
    """How a mixture-of-experts model routed the tokens of one step to its experts. Means are over its sparse layers."""

    step: int
    """Optimizer steps done."""
    moe_load_imbalance: float
    """Tokens of the busiest expert divided by the mean of the layer's experts, mean over the layers; 1 is even."""
    moe_expert_utilization: float
    """Share of the experts that received a token, 0 to 1, mean over the layers."""
    moe_worst_imbalance: float
    """The largest imbalance of a layer."""
    moe_worst_layer: int
    """Number of that layer in the model, from 0."""
    moe_entropy: float
    """Entropy of the experts' shares of the tokens divided by log E, mean over the layers; 1 is even."""
    moe_cv: float
    """Standard deviation of the experts' tokens divided by their mean, mean over the layers; 0 is even."""
    moe_top_mass: float | None = None
    """Sum of the probabilities of a token's experts, mean over tokens and layers; None if the family reports none."""
    moe_dead_experts: int | None = None
    """Experts of all layers that received no token in the last 50 steps; None in the first 49 of a start."""
    moe_aux_loss: float | None = None
    """Load-balancing loss as it was added to the loss, its coefficient included; None if it is no part of the loss."""
    moe_aux_loss_raw: float | None = None
    """Load-balancing loss before its coefficient, over the whole step if it is no part of the loss. With even loads it
    is K, and with `router_aux_loss_form: layer` the number of layers. None if the family does not report its parts.
    """
    moe_z_loss: float | None = None
    """Router z loss as it was added to the loss, its coefficient included; None if it is no part of the loss."""
    moe_z_loss_raw: float | None = None
    """Mean over tokens and layers of the squared log-sum-exp of the router's logits, with `router_aux_loss_form: layer`
    summed over the layers; None if the family does not report it.
    """
    moe_experts: int = 0
    """Experts of a layer."""
    moe_experts_per_token: int | None = None
    """Experts that each token goes to; None if the family does not report the router's probabilities."""
    moe_rank_imbalance: float | None = None
    """Rows of the busiest GPU of `ep_size` by their mean, as routed; None without `ep_load_balance_threshold`."""
    moe_rank_imbalance_evened: float | None = None
    """The same of the rows that each GPU then computes; both are means over layers and micro-batches."""
    moe_moved_rows: float | None = None
    """Share of all rows that another GPU than their expert's computes."""
    moe_moved_bytes: int | None = None
    """Bytes that a GPU sends in the step for it: weights and adapters of experts, and gradients of trained ones."""
    moe_dropped: int = 0
    """Choices of experts that were not computed. Routing is exact, so it is always 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertLoads(Event):
    """Tokens of each expert of each layer, every `log_expert_loads` steps, at each `save_steps` and at the end."""

    step: int
    """The last of the steps."""
    steps: int
    """Number of steps that are counted. A run that resumes between two records counts from there on."""
    layers: tuple[int, ...]
    """Numbers of the layers with experts, from 0."""
    tokens: tuple[tuple[int, ...], ...]
    """By layer: tokens of each expert."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChange(Event):
    """The training has entered a new phase."""

    step: int
    """Optimizer steps done."""
    phase: Literal["warmup", "converging", "plateau", "diverging", "unstable"]
    """The new phase."""
    previous: Literal["warmup", "converging", "plateau", "diverging", "unstable"]
    """The previous phase."""
    improvement: float
    """Relative decrease of the mean loss between the two halves of the window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice(Event):
    """Advice: the key that the user could change, and why."""

    step: int
    """Optimizer steps done."""
    rule: str
    """Name of the rule that fired."""
    message: str
    """The observation, in one sentence."""
    key: str
    """The configuration key to change."""
    suggestion: str
    """How to change it."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """The figures that made the rule fire."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd(Event):
    """The run is over."""

    reason: Literal["finished", "stopped", "signal", "failed"]
    """How it ended."""
    step: int
    """Optimizer steps done."""
    seconds: float
    """Wall time of the whole run."""
    first_eval_loss: float | None
    """Loss of the first evaluation; None without one."""
    last_eval_loss: float | None
    """Loss of the last evaluation; None without one."""
    export_path: str | None
    """The directory of the export; None if nothing was exported."""
    last_eval_step: int | None = None
    """Step of `last_eval_loss`."""
    best_eval_loss: float | None = None
    """Lowest held-out loss, that before the first step included; None without a finite one."""
    first_reward: float | None = None
    """Mean held-out reward of the first evaluation of reinforcement learning; None without one."""
    last_reward: float | None = None
    """Mean held-out reward of the last evaluation."""
    best_reward: float | None = None
    """Highest mean held-out reward, that before the first step included."""
    best_step: int | None = None
    """Step of `best_reward`, or else of `best_eval_loss`; 0 if no step was better than the start."""
    export_step: int | None = None
    """Step of the exported weights; None if nothing was exported."""
    next_commands: tuple[tuple[str, str], ...] = ()
    """(purpose, command line) of what can be done with the result, in the order to show."""
    message: str = ""
    """The reason of the end, or how to resume; may be empty."""

    def __post_init__(self) -> None:
        _mask(self, "message", "next_commands")

    @property
    def verdict(self) -> str:
        """A sentence if the held-out measure ended worse than it began, or was never better; otherwise empty."""
        if self.first_reward is not None:
            rewards = (self.first_reward, self.last_reward, self.best_reward, self.best_step)
            return verdict("held-out reward", *rewards, higher=True) if self.step else ""
        return verdict("eval loss", self.first_eval_loss, self.last_eval_loss, self.best_eval_loss, self.best_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportWritten(Event):
    """The report was written; the only event after `RunEnd`. A run without the monitor `jsonl` has no report."""

    path: str
    """The HTML file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A monitor's answer; the loop applies it before the next step."""

    lr_scale: float | None = None
    """Multiply the schedule's learning rate by this from now on."""
    fade_steps: int = 0
    """Steps over which `lr_scale` returns to 1, linearly; 0 makes it permanent."""
    proceed: bool = False
    """Continue after a step with a value that was not finite (it was not applied) instead of ending the run."""
    stop: bool = False
    """End the run: save, export, end."""
    save: bool = False
    """Write a checkpoint now."""
    events: tuple[Event, ...] = ()
    """Events for all monitors, emitted after the answered one; answers to them are ignored."""
    reason: str = ""
    """The reason, shown in the run's notice."""
