"""What a report says of a run, apart from its form: figures, phases, advice, data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.report.curves import Band, Mark, figure
from surogate_core.report.records import RunRecord

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


def points_of(run: RunRecord, series: str) -> list[tuple[float, float]]:
    """A curve's points; x is the step."""
    if series == "eval":
        return [(float(at), loss) for at, loss in zip(run.eval_steps, run.eval_losses, strict=True)]
    scale = 2.0**-30 if series == "peak_memory_bytes" else 1.0
    return [(float(at), y * scale) for at, y in zip(run.steps, run.series[series], strict=True)]


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
            ("steps", f"{run.steps[-1] if run.steps else 0:,} of {start.get('steps', 0):,}"),
        ]
    if run.steps:
        losses = [loss for loss in run.series["loss"] if math.isfinite(loss)]
        seconds = math.fsum(s for s in run.series["seconds"] if math.isfinite(s))
        speeds = sorted(s for s in run.series["tokens_per_second"] if math.isfinite(s))
        rows.append(("tokens", f"{run.total_tokens:,}"))
        rows.append(("time in steps", f"{seconds:,.1f} s"))
        if losses:
            tail = losses[-20:]
            rows.append(("loss", f"{losses[0]:.4f} → {math.fsum(tail) / len(tail):.4f} (mean of the last {len(tail)})"))
        if len(losses) < len(run.steps):
            rows.append(("steps that were not finite", f"{len(run.steps) - len(losses):,}"))
        if speeds:
            rows.append(("throughput", f"{speeds[len(speeds) // 2]:,.0f} tokens/s (median)"))
        rows.append(("peak memory", f"{max(run.series['peak_memory_bytes']) / 2**30:.2f} GiB"))
    if run.eval_losses:
        rows.append(("held-out loss", f"{run.eval_losses[0]:.4f} → {run.eval_losses[-1]:.4f}"))
    if end.get("export_path"):
        rows.append(("exported to", str(end["export_path"])))
    return rows


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
    """Notes of the start, warnings, and what became of the learning rate."""
    return [*map(str, run.start.get("notes") or ()), *(str(n.get("message")) for n in run.notices)]


def data(run: RunRecord) -> Rows:
    """What became of the rows, (what, count); empty for a run that left no summary."""
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
    rows += [(f"{d['key']}: {d['path']}", f"{d['rows']:,} rows, {d['bad_rows']:,} bad") for d in report["datasets"]]
    return rows


def plugins(run: RunRecord) -> Rows:
    """(plugin, distribution, version) of the run."""
    found = run.facts.get("plugins")
    rows = [p for p in found if isinstance(p, dict)] if isinstance(found, list) else []
    return [tuple(str(p.get(key, "")) for key in ("name", "distribution", "version")) for p in rows]


def bands(run: RunRecord) -> list[Band]:
    """The phases as stretches of steps."""
    ends = [float(p.get("step", 0)) for p in run.phases[1:]] + [float(run.steps[-1]) if run.steps else 0.0]
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
    """Names that tell the runs apart."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def _shown(value: float) -> str:
    return figure(value) if math.isfinite(value) else str(value)


def _percent(value: Any) -> str:
    return f"{value:+.2%}" if isinstance(value, (int, float)) else ""


def _evidence(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    shown = (f"{k} {_shown(v) if isinstance(v, float) else v}" for k, v in value.items())
    return ", ".join(shown)
