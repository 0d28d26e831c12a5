"""The typed events that a run emits, and the controls that a monitor may answer with.

Times are seconds, losses natural-log cross-entropies per label token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Facts of the run that do not change, given to every monitor when it is built."""

    run_name: str
    output_dir: str
    task: str
    config: Mapping[str, Any]
    """The resolved configuration."""
    interactive: bool
    """Whether standard output is a terminal that a live view may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    @property
    def name(self) -> str:
        """The event's type as written in ``metrics.jsonl``, e.g. ``step_end``."""
        words = "".join(f"_{c.lower()}" if c.isupper() else c for c in type(self).__name__)
        return words.lstrip("_")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart(Event):
    """The run is set up and about to take its first step."""

    model: str
    parameters: int
    trainable_parameters: int
    train_tokens: int
    """Tokens of one epoch, padding not counted."""
    steps: int
    """Optimizer steps of the whole run."""
    start_step: int
    """Steps already done, by a resumed checkpoint."""
    tokens_per_step: int
    """Token slots of one optimizer step, padding counted."""
    epochs: float
    device: str
    notes: tuple[str, ...] = ()
    """Things the owner of the run should know, one sentence each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Long work outside the steps: loading, tokenising, tracing, compiling, saving.

    `total` 0 means unknown; `done == total` ends the task.
    """

    task: str
    done: int
    total: int = 0
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnd(Event):
    """One optimizer step has been taken. On CUDA it is emitted one step late, without a sync."""

    step: int
    """1 for the first."""
    epoch: float
    loss: float
    grad_norm: float
    """Global norm before clipping."""
    lr: float
    tokens: int
    """Tokens of the step, padding not counted."""
    label_tokens: int
    total_tokens: int
    """Tokens since the beginning of the run, resumed parts included."""
    seconds: float
    tokens_per_second: float
    eta_seconds: float
    peak_memory_bytes: int
    """Peak of the device allocator on CUDA, peak resident set on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalEnd(Event):
    """An evaluation over the held-out rows."""

    step: int
    loss: float
    label_tokens: int
    seconds: float
    gap: float | None
    """Held-out loss less the mean training loss of the last min(20, steps since the last evaluation) steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    step: int
    path: str
    seconds: float
    reason: Literal["schedule", "signal", "control", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Something the owner of the run should see."""

    level: Literal["info", "warning", "error"]
    message: str
    data: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd(Event):
    """The run is over."""

    reason: Literal["finished", "stopped", "signal", "failed"]
    step: int
    seconds: float
    first_eval_loss: float | None
    last_eval_loss: float | None
    export_path: str | None
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A monitor's answer; the loop applies it before the next step."""

    lr_scale: float | None = None
    """Multiply the schedule's learning rate by this from now on."""
    stop: bool = False
    """Finish: save, export, end."""
    save: bool = False
    """Write a checkpoint now."""
    reason: str = ""
