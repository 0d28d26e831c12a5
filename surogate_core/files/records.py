"""The record of a run, finished or in progress, read from its directory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from surogate_core.errors import UserError
from surogate_core.files.evaluations import read_evaluations
from surogate_core.files.figures import TRAIN_TIME, named_figures
from surogate_core.files.loads import Loads
from surogate_core.files.metrics import METRICS, as_number, parsed, read_lines
from surogate_core.masking import masked_values, masked_yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

STEP_FIELDS = (
    *("loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes", "seconds", "speed_of_light"),
    "total_tokens",
)
EVAL_FIELDS = ("loss", "gap")
ROUTING_FIELDS = (
    *("moe_load_imbalance", "moe_worst_imbalance", "moe_expert_utilization", "moe_entropy", "moe_dead_experts"),
    *("moe_aux_loss_raw", "moe_z_loss_raw"),
    *("moe_rank_imbalance", "moe_rank_imbalance_evened", "moe_moved_rows", "moe_moved_bytes"),
)
GPU_FIELDS = ("utilization", "memory_used_bytes", "power_watts", "temperature_celsius", "sm_clock_mhz")


NAMED = ("rollouts", "rollout_eval", "step_end", "eval_end")
"""Events with figures that have names of their own."""

COUNTED = "rollouts/faults_"
"""Figures that a step without their name has 0 of."""

COMPLETIONS = 64
"""Most steps whose completions are kept; of more, every second one."""


class Table:
    """Columns of figures over rising steps, which grow at the end.

    One thread may add while others read: a row counts once all of it is there.
    """

    def __init__(self, fields: tuple[str, ...] = ()):
        self._fields = fields
        self._steps: NDArray[np.int64] = np.empty(256, np.int64)
        self._values: NDArray[np.float64] = np.empty((len(fields), 256), np.float64)
        self._count = 0

    @property
    def steps(self) -> NDArray[np.int64]:
        """The step of each row."""
        return self._steps[: self._count]

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the columns."""
        return self._fields

    def column(self, name: str) -> NDArray[np.float64]:
        """The values of a field; NaN where a row has none."""
        # The place first: a field that a reader can see has its row of values.
        place, count = self._fields.index(name), self._count
        return self._values[place, :count]

    def widen(self, names: Iterable[str]) -> None:
        """Add the fields that are not there yet, NaN in all rows so far."""
        new = tuple(name for name in names if name not in self._fields)
        if new:
            added = np.full((len(new), self._values.shape[1]), np.nan)
            self._values = np.concatenate([self._values, added])
            self._fields += new

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add the fields of a record. A run that has gone back to an earlier step drops what it had after it."""
        if self._count and step <= self._steps[self._count - 1]:
            self._count = int(np.searchsorted(self.steps, step))
        if self._count == len(self._steps):
            self._steps = np.concatenate([self._steps, np.empty_like(self._steps)])
            self._values = np.concatenate([self._values, np.empty_like(self._values)], axis=1)
        self._steps[self._count] = step
        self._values[:, self._count] = [as_number(record.get(name)) for name in self._fields]
        self._count += 1

    def drop_after(self, step: int) -> None:
        """Drop the rows of later steps."""
        self._count = int(np.searchsorted(self.steps, step, side="right"))


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run: what its events say, and its files."""

    directory: Path
    name: str
    start: Mapping[str, Any] = field(default_factory=dict)
    """The last ``run_start``; empty if the run failed before it."""
    end: Mapping[str, Any] | None = None
    """The last ``run_end``; None if the run was killed or is still going."""
    total_tokens: int = 0
    phases: list[Mapping[str, Any]] = field(default_factory=list)
    advice: list[Mapping[str, Any]] = field(default_factory=list)
    samples: list[Mapping[str, Any]] = field(default_factory=list)
    """Texts that the model generated for `sample_prompts`."""
    completions: list[Mapping[str, Any]] = field(default_factory=list)
    """Completions of reinforcement learning with their rewards: ``rollout_samples`` of at most `COMPLETIONS` steps."""
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    """Figures of `surogate eval --report`."""
    notices: list[Mapping[str, Any]] = field(default_factory=list)
    """Warnings and errors, and what controls did."""
    routing: Mapping[str, Any] = field(default_factory=dict)
    """The last ``routing_stats``; empty for a model without experts."""
    ranks: Mapping[str, Any] = field(default_factory=dict)
    """The last ``rank_stats``; empty for a run on one GPU."""
    live: bool = False
    """Whether the run is going on if no end is recorded: this process is the run, or one holds the run's lock."""
    progress: Mapping[str, Any] | None = None
    """The long work outside the steps that is under way."""
    config_text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``run.json``."""
    group: str = ""
    """Name of the directory under which this run was found with others, such as a sweep's."""
    _medians: dict[str, tuple[int, float]] = field(default_factory=dict)
    _steps: Table = field(default_factory=lambda: Table(STEP_FIELDS))
    _evaluations: Table = field(default_factory=lambda: Table(EVAL_FIELDS))
    _gpu: Table = field(default_factory=lambda: Table(GPU_FIELDS))
    _routing: Table = field(default_factory=lambda: Table(ROUTING_FIELDS))
    _named: dict[str, Table] = field(default_factory=lambda: {kind: Table() for kind in NAMED})
    _phases: tuple[int, float] = (-1, 0.0)
    """The step of the last ``rollouts``, and the seconds that they took."""
    loads: Loads = field(default_factory=Loads)
    """The tokens of each expert."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """The steps that were taken."""
        return self._steps.steps

    @property
    def series(self) -> Mapping[str, NDArray[np.float64]]:
        """Field of ``step_end`` → its values, one a step."""
        return {name: self._steps.column(name) for name in STEP_FIELDS}

    @property
    def eval_losses(self) -> NDArray[np.float64]:
        """Held-out losses."""
        return self._evaluations.column("loss")

    @property
    def names(self) -> list[str]:
        """The figures that have names of their own, as `named_figures` has them, each a curve."""
        return [name for table in list(self._named.values()) for name in table.fields]

    def curve(self, name: str) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """(steps, values) of a field of ``step_end``, of ``eval`` or ``gap``, of ``gpu.FIELD``, of a ``moe_FIELD`` of
        ``routing_stats``, or of one of `names`; equally long, and empty for a name that the run does not have.
        """
        if "/" in name:
            found = [table for table in self._named.values() if name in table.fields]
            if not found:
                return np.empty(0, np.int64), np.empty(0, np.float64)
            values = found[0].column(name)
            if name.startswith(COUNTED):
                values = np.nan_to_num(values, nan=0.0)
            return found[0].steps[: len(values)], values
        if name == "eval":
            table, column = self._evaluations, "loss"
        elif name == "gap":
            table, column = self._evaluations, "gap"
        elif name.startswith("gpu."):
            table, column = self._gpu, name.removeprefix("gpu.")
        elif name.startswith("moe_"):
            table, column = self._routing, name
        else:
            table, column = self._steps, name
        values = table.column(column)
        return table.steps[: len(values)], values

    def along(self, axis: str) -> NDArray[np.float64]:
        """Each step's place on an axis: ``step``, ``tokens`` since the beginning, or ``time`` in seconds of steps."""
        if axis == "step":
            return self.steps.astype(np.float64)
        values = self._steps.column("total_tokens" if axis == "tokens" else "seconds")
        values = np.where(np.isfinite(values), values, 0.0)
        return np.maximum.accumulate(values) if axis == "tokens" else np.cumsum(values)

    def median(self, series: str) -> float | None:
        """The median of a curve's finite values; None without any. It is computed again after further steps only."""
        count, found = self._medians.get(series, (-1, math.nan))
        if count != len(self.steps):
            values = self.curve(series)[1]
            values = values[np.isfinite(values)]
            found = float(np.median(values)) if len(values) else math.nan
            self._medians[series] = (len(self.steps), found)
        return found if math.isfinite(found) else None

    @property
    def best(self) -> tuple[int, float] | None:
        """(step, loss) of the evaluation with the lowest loss; None without a finite one after the first step."""
        steps, losses = self.curve("eval")
        finite = np.isfinite(losses)
        if not (finite & (steps > 0)).any():
            return None
        place = int(np.where(finite, losses, np.inf).argmin())
        return int(steps[place]), float(losses[place])

    @property
    def best_reward(self) -> tuple[int, float] | None:
        """(step, reward) of the evaluation with the highest held-out reward; None without one after the first step."""
        steps, rewards = self.curve("eval/reward/mean")
        finite = np.isfinite(rewards)
        if not (finite & (steps > 0)).any():
            return None
        place = int(np.where(finite, rewards, -np.inf).argmax())
        return int(steps[place]), float(rewards[place])

    @property
    def settings(self) -> Mapping[str, Any]:
        """``config.yaml`` as a mapping; empty where it is missing or cannot be read."""
        return _settings(self.config_text)

    @property
    def outcome(self) -> str:
        """How it ended, in a few words."""
        if self.end is None:
            if self.live:
                return "running" if self.start else "starting"
            return "no end is recorded: killed, or running on another machine"
        words = {"finished": "finished", "stopped": "stopped early", "signal": "interrupted", "failed": "failed"}
        return words.get(str(self.end.get("reason")), str(self.end.get("reason")))

    def add(self, record: Mapping[str, Any]) -> None:
        """Take one event, as ``metrics.jsonl`` has it."""
        self._add_named(record)
        match record.get("event"):
            case "step_end":
                self._steps.add(int(record["step"]), record)
                self.total_tokens = int(record.get("total_tokens", 0))
            case "eval_end":
                self._evaluations.add(int(record["step"]), record)
            case "gpu_stats":
                self._gpu.add(int(record["step"]), record)
            case "routing_stats":
                self._routing.add(int(record["step"]), record)
                self.routing = record
            case "expert_loads":
                self.loads.add(record)
            case "rank_stats":
                self.ranks = record
            case "run_start":
                self.ranks = {}
                self.start, self.end, self.progress = record, None, None
            case "run_end":
                self.end, self.progress = record, None
            case "phase_change":
                self.phases.append(record)
            case "advice":
                self.advice.append(record)
            case "samples":
                self.samples.append(record)
            case "rollout_samples":
                self._add_completions(record)
            case "progress":
                over = 0 < int(record.get("total", 0)) <= int(record.get("done", 0))
                self.progress = None if over else record
            case "notice" if record.get("level") != "info" or "learning rate ×" in str(record.get("message")):
                self.notices.append(record)

    def _add_named(self, record: Mapping[str, Any]) -> None:
        figures, kind = named_figures(record), str(record.get("event"))
        if not figures and kind not in NAMED[:2]:
            return
        step = int(record["step"])
        if kind == "rollouts":
            self._phases = step, sum(value for name, value in figures.items() if name.startswith("time/"))
        elif kind == "step_end" and self._phases[0] == step:
            figures[TRAIN_TIME] = max(0.0, as_number(record.get("seconds")) - self._phases[1])
        self._named[kind].widen(figures)
        self._named[kind].add(step, figures)

    def _add_completions(self, record: Mapping[str, Any]) -> None:
        step = int(record.get("step", 0))
        found = [one for one in self.completions if int(one.get("step", 0)) < step]
        self.completions = [*(found[::2] if len(found) >= COMPLETIONS else found), record]

    def drop_after(self, step: int) -> None:
        """Drop everything after `step`, from which the run continues."""
        for table in (self._steps, self._evaluations, self._gpu, self._routing, *self._named.values()):
            table.drop_after(step)
        self.loads.drop_after(step)
        self.phases = [p for p in self.phases if int(p.get("step", 0)) <= step]
        self.advice = [a for a in self.advice if int(a.get("step", 0)) <= step]
        self.samples = [s for s in self.samples if int(s.get("step", 0)) <= step]
        self.completions = [c for c in self.completions if int(c.get("step", 0)) <= step]

    def read_files(self) -> None:
        """Read the configuration, ``run.json`` and the evaluations, as far as they are there; secrets are masked."""
        self.evaluations = read_evaluations(self.directory)
        self.config_text = masked_yaml(_text(self.directory / "config.yaml"))
        self.facts = masked_values(parsed(_text(self.directory / "run.json")) or {})


@lru_cache(maxsize=64)
def _settings(text: str) -> Mapping[str, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def find_runs(directories: Sequence[Path]) -> list[tuple[Path, str]]:
    """(directory, group) of each run: the directories that are runs, and the runs below the others, in natural order.

    The group is the name of the directory above; empty for a run that is named itself. A directory without any run
    stands for a run that has not begun. Links such as ``latest`` and what is below a run are not followed.
    """
    found: list[tuple[Path, str]] = []
    for directory in directories:
        below = _runs_below(directory)
        if below in ([], [directory]):
            found.append((directory, ""))
        else:
            found += [(run, directory.resolve().name) for run in below]
    return found


def _runs_below(directory: Path) -> list[Path]:
    if metrics_path(directory).is_file():
        return [directory]
    found: list[Path] = []
    for child in sorted(directory.iterdir(), key=lambda path: _natural(path.name)):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            found += _runs_below(child)
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts ``run-10`` behind ``run-9``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def read_run(directory: Path, *, group: str = "") -> RunRecord:
    """The run in `directory`; raises `UserError` when it has no metrics."""
    metrics = metrics_path(directory)
    if not metrics.is_file():
        raise UserError(
            f"surogate report {directory}: there is no {metrics.name} in it or below it. Fix: name the output_dir of "
            f"a run with the monitor jsonl, or a directory of runs."
        )
    run = RunRecord(directory=directory, name=directory.resolve().name, group=group)
    run.read_files()
    for record in read_lines(metrics):
        run.add(record)
    return run


def metrics_path(directory: Path) -> Path:
    """The run's record, which may not be there yet; raises `UserError` for no directory."""
    if not directory.is_dir():
        raise UserError(f"surogate report {directory}: there is no such directory. Fix: name a run's output_dir.")
    return directory / METRICS


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
