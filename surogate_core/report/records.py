"""What a run has left in its directory, read into one value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surogate_core.errors import UserError

METRICS = "metrics.jsonl"

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
"""How numbers that JSON lacks are written."""

STEP_FIELDS = ("loss", "grad_norm", "lr", "tokens_per_second", "peak_memory_bytes", "seconds")


@dataclass(slots=True, kw_only=True)
class RunRecord:
    """One run. `steps` and the columns of `series` have equal lengths, in the order of the steps."""

    directory: Path
    name: str
    start: Mapping[str, Any] = field(default_factory=dict)
    """The last ``run_start``; empty if the run failed before it."""
    end: Mapping[str, Any] | None = None
    """The last ``run_end``; None if the run was killed or is still going."""
    steps: Sequence[int] = ()
    series: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Field of ``step_end`` → its values."""
    total_tokens: int = 0
    eval_steps: Sequence[int] = ()
    eval_losses: Sequence[float] = ()
    phases: Sequence[Mapping[str, Any]] = ()
    advice: Sequence[Mapping[str, Any]] = ()
    notices: Sequence[Mapping[str, Any]] = ()
    """Warnings and errors, and what controls did."""
    config_text: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """``run.json``."""

    @property
    def outcome(self) -> str:
        """How it ended, in a few words."""
        if self.end is None:
            return "no end is recorded: killed, or still running"
        words = {"finished": "finished", "stopped": "stopped early", "signal": "interrupted", "failed": "failed"}
        return words.get(str(self.end.get("reason")), str(self.end.get("reason")))


def read_run(directory: Path) -> RunRecord:
    """The run in `directory`; raises `UserError` when it has no metrics."""
    if not directory.is_dir():
        raise UserError(f"surogate report {directory}: there is no such directory. Fix: name a run's output_dir.")
    config_text = _text(directory / "config.yaml")
    metrics = directory / _metrics_file(config_text)
    if not metrics.is_file():
        raise UserError(
            f"surogate report {directory}: there is no {metrics.name}. Fix: name the output_dir of a run with the "
            f"monitor jsonl."
        )
    run = RunRecord(directory=directory, name=directory.resolve().name, config_text=config_text)
    facts = _parsed(_text(directory / "run.json"))
    run.facts = facts if isinstance(facts, dict) else {}
    _read_metrics(metrics, run)
    return run


def _read_metrics(path: Path, run: RunRecord) -> None:
    # A resumed run may have written a step twice; the last counts.
    steps: dict[int, tuple[float, ...]] = {}
    evaluations: dict[int, float] = {}
    phases, advice, notices = [], [], []
    for record in _lines(path):
        match record.get("event"):
            case "step_end":
                steps[int(record["step"])] = tuple(_number(record.get(name)) for name in STEP_FIELDS)
                run.total_tokens = int(record.get("total_tokens", 0))
            case "eval_end":
                evaluations[int(record["step"])] = _number(record.get("loss"))
            case "run_start":
                run.start, run.end = record, None
            case "run_end":
                run.end = record
            case "phase_change":
                phases.append(record)
            case "advice":
                advice.append(record)
            case "notice" if record.get("level") != "info" or "learning rate ×" in str(record.get("message")):
                notices.append(record)
    ordered = sorted(steps)
    run.steps = ordered
    run.series = {name: [steps[at][i] for at in ordered] for i, name in enumerate(STEP_FIELDS)}
    run.eval_steps = sorted(evaluations)
    run.eval_losses = [evaluations[at] for at in run.eval_steps]
    run.phases, run.advice, run.notices = phases, advice, notices


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parsed(line)
            if isinstance(record, dict):
                yield record


def _parsed(text: str) -> Any:
    """The JSON value, or None for a torn line, which a killed run may leave."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def _number(value: Any) -> float:
    if isinstance(value, str):
        return NOT_FINITE.get(value, float("nan"))
    return float("nan") if value is None else float(value)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _metrics_file(config_text: str) -> str:
    """The name that the monitor jsonl was given."""
    try:
        config = yaml.safe_load(config_text)
    except yaml.YAMLError:
        config = None
    for monitor in (config.get("monitor") or []) if isinstance(config, dict) else []:
        if isinstance(monitor, dict) and monitor.get("name") == "jsonl" and isinstance(monitor.get("file"), str):
            return str(monitor["file"])
    return METRICS
