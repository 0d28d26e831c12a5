"""The contents of a report, independent of its format: figures, phases, advice, data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_core.report.curves import Band, Mark, figure, kept_places
from surogate_core.report.records import RunRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rows = list[tuple[str, ...]]

CURVES = (
    ("Loss", "loss", ""),
    ("Held-out loss", "eval", ""),
    ("Learning rate", "lr", ""),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("Throughput", "tokens_per_second", "tokens/s"),
    ("Peak memory", "peak_memory_bytes", "GiB"),
)
"""(title, series, unit)."""

MORE_CURVES = (
    ("Speed of light", "speed_of_light", "% of the product rate"),
    ("GPU utilization", "gpu.utilization", "%"),
    ("GPU memory", "gpu.memory_used_bytes", "GiB, all processes"),
    ("GPU power", "gpu.power_watts", "W"),
    ("GPU temperature", "gpu.temperature_celsius", "°C"),
    ("GPU clock", "gpu.sm_clock_mhz", "MHz"),
)
"""Shown for runs that have recorded them."""

SCALES = {
    "peak_memory_bytes": 2.0**-30,
    "gpu.memory_used_bytes": 2.0**-30,
    "speed_of_light": 100.0,
    "gpu.utilization": 100.0,
}


FROM_ZERO = frozenset({"tokens_per_second", "peak_memory_bytes", *(series for _, series, _ in MORE_CURVES)})
"""Series whose axis begins at 0, so that a small change of a large amount looks small."""

COMPARED = ("outcome", "steps", "loss", "held-out loss", "throughput", "peak memory")
"""The rows of the summary that the table of compared runs shows."""


PLUGIN_HEADER = ("plugin", "distribution", "version")


def recorded(run: RunRecord, series: str) -> bool:
    """Whether the run has a finite value of the curve at any step."""
    values = run.curve(series)[1]
    return bool(len(values)) and bool(np.isfinite(values[-1]) or np.isfinite(values).any())


def shown_curves(runs: Sequence[RunRecord]) -> list[tuple[str, str, str]]:
    """(title, series, unit) of the curves that a report of these runs has; none without a step and an evaluation."""
    if not any(len(run.curve(series)[0]) for run in runs for series in ("loss", "eval")):
        return []
    return [*CURVES, *(c for c in MORE_CURVES if any(recorded(run, c[1]) for run in runs))]


def points_of(run: RunRecord, series: str) -> list[tuple[float, float]]:
    """A curve's points, thinned; x is the step."""
    steps, values = run.curve(series)
    places = kept_places(values)
    heights = values[places] * SCALES.get(series, 1.0)
    return list(zip(steps[places].astype(float).tolist(), heights.tolist(), strict=True))


def summary(run: RunRecord) -> Rows:
    """The run's figures, (what, value)."""
    start, end = run.start, run.end or {}
    rows: Rows = [("outcome", run.outcome)]
    if message := str(end.get("message") or ""):
        rows.append(("message", message))
    if start:
        rows += [
            ("model", str(start.get("model"))),
            ("parameters", f"{start.get('parameters', 0):,}, {start.get('trainable_parameters', 0):,} of them trained"),
            ("device", str(start.get("device"))),
            ("steps", f"{run.steps[-1] if len(run.steps) else 0:,} of {start.get('steps', 0):,}"),
        ]
    if len(run.steps):
        losses, seconds, speeds = (_finite(run, name) for name in ("loss", "seconds", "tokens_per_second"))
        shares = _finite(run, "speed_of_light")
        rows.append(("tokens", f"{run.total_tokens:,}"))
        rows.append(("time in steps", f"{seconds.sum():,.1f} s"))
        if len(losses):
            tail = losses[-20:]
            rows.append(("loss", f"{losses[0]:.4f} → {tail.mean():.4f} (mean of the last {len(tail)})"))
        if len(losses) < len(run.steps):
            rows.append(("steps that were not finite", f"{len(run.steps) - len(losses):,}"))
        if len(speeds):
            rows.append(("throughput", f"{np.median(speeds):,.0f} tokens/s (median)"))
        if len(shares):
            rows.append(("speed of light", f"{np.median(shares):.1%} of the measured product rate (median)"))
        if len(peaks := _finite(run, "peak_memory_bytes")):
            rows.append(("peak memory", f"{peaks.max() / 2**30:.2f} GiB"))
    steps, held_out = run.curve("eval")
    if len(held_out) > 1:
        rows.append(("held-out loss", f"{held_out[0]:.4f} → {held_out[-1]:.4f}"))
    elif len(held_out):
        rows.append(("held-out loss", f"{held_out[0]:.4f} (step {steps[0]:,} only)"))
    if end.get("export_path"):
        rows.append(("exported to", str(end["export_path"])))
    return rows


def comparison(runs: Sequence[RunRecord]) -> tuple[tuple[str, ...], Rows]:
    """(header, a row for each run) of the table that compares several runs; columns that no run fills are left out."""
    found = [{what: value for what, value, *_ in summary(run)} for run in runs]
    names = [name for name in COMPARED if any(name in figures for figures in found)]
    rows = [(t, *(f.get(name, "") for name in names)) for t, f in zip(titles(runs), found, strict=True)]
    return ("run", *names), rows


def shared_plugins(runs: Sequence[RunRecord]) -> Rows | None:
    """The plugins of several runs if all have the same, so that they are listed once; otherwise None."""
    first, *others = [plugins(run) for run in runs]
    return first if others and all(rows == first for rows in others) else None


def milestones(run: RunRecord, count: int = 12) -> Rows:
    """(step, loss, learning rate, gradient norm, tokens/s) at `count` steps, the first and the last among them."""
    last = len(run.steps) - 1
    places = sorted({round(i * last / (count - 1)) for i in range(count)}) if last >= 0 else []
    names = ("loss", "lr", "grad_norm", "tokens_per_second")
    return [(f"{run.steps[i]:,}", *(_shown(run.series[name][i]) for name in names)) for i in places]


def phases(run: RunRecord) -> Rows:
    """(step, phase, the phase before, improvement)."""
    return [
        (str(p.get("step")), str(p.get("phase")), str(p.get("previous")), _percent(p.get("improvement")))
        for p in run.phases
    ]


def advice(run: RunRecord) -> Rows:
    """(step, what was seen, key, how to change it, evidence)."""
    return [
        (
            str(a.get("step")),
            str(a.get("message")),
            str(a.get("key")),
            str(a.get("suggestion")),
            _evidence(a.get("evidence")),
        )
        for a in run.advice
    ]


def notices(run: RunRecord) -> list[str]:
    """Notes of the start, warnings, and changes of the learning rate."""
    return [*map(str, run.start.get("notes") or ()), *(str(n.get("message")) for n in run.notices)]


def data(run: RunRecord) -> Rows:
    """The counts of rows by outcome, (outcome, count); empty for a run without a summary."""
    report = run.facts.get("data_report")
    if not isinstance(report, dict):
        return []
    rows: Rows = [("rows read", f"{report['rows_read']:,}"), ("bad rows skipped", f"{report['bad_rows']:,}")]
    names = {
        "documents": "documents",
        "deleted": "documents too long and dropped",
        "truncated": "documents too long and cut",
        "split": "documents too long and split",
        "unlabelled": "parts without a label dropped",
        "rows": "packed rows",
        "tokens": "tokens",
        "label_tokens": "tokens that are trained",
    }
    for part, title in (("train", "training"), ("eval", "held out")):
        if isinstance(counts := report.get(part), dict):
            rows += [(f"{title}: {text}", f"{counts[name]:,}") for name, text in names.items()]
            share = counts["label_tokens"] / max(1, counts["tokens"])
            rows.append((f"{title}: share of the tokens that are trained", f"{share:.1%}"))
    rows += [(f"{d['key']}: {d['path']}", f"{d['rows']:,} rows, {d['bad_rows']:,} bad") for d in report["datasets"]]
    return rows


def plugins(run: RunRecord) -> Rows:
    """(plugin, distribution, version) of the run."""
    found = run.facts.get("plugins")
    rows = [p for p in found if isinstance(p, dict)] if isinstance(found, list) else []
    return [tuple(str(p.get(key, "")) for key in ("name", "distribution", "version")) for p in rows]


def bands(run: RunRecord) -> list[Band]:
    """The phases as stretches of steps."""
    ends = [float(p.get("step", 0)) for p in run.phases[1:]] + [float(run.steps[-1]) if len(run.steps) else 0.0]
    return [
        Band(begin=float(p.get("step", 0)), end=end, label=str(p.get("phase")))
        for p, end in zip(run.phases, ends, strict=False)
    ]


def marks(run: RunRecord) -> list[Mark]:
    """Where advice was given."""
    return [
        Mark(at=float(a.get("step", 0)), label=f"step {a.get('step')}: {a.get('message')} {a.get('key')}")
        for a in run.advice
    ]


def titles(runs: Sequence[RunRecord]) -> list[str]:
    """Names that distinguish the runs."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def _finite(run: RunRecord, series: str) -> NDArray[np.float64]:
    values = run.curve(series)[1]
    return values[np.isfinite(values)]


def _shown(value: float) -> str:
    return figure(value) if math.isfinite(value) else str(value)


def _percent(value: Any) -> str:
    return f"{value:+.2%}" if isinstance(value, (int, float)) else ""


def _evidence(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    shown = (f"{k} {_shown(v) if isinstance(v, float) else v}" for k, v in value.items())
    return ", ".join(shown)
