"""Which charts a report has: their lines, titles and units, by what the runs have recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from surogate_commands import palette
from surogate_commands.curves import kept_places, smoothed
from surogate_core.service.files import TRAIN_TIME, RunRecord

if TYPE_CHECKING:
    from surogate_commands.curves import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a chart."""

    series: str
    label: str = ""
    """Its name in a chart with several lines."""
    dots: bool = False
    """Also mark every point, because they are few."""
    alone: str = ""
    """Title of a chart that has only this line; empty: the chart's own, with the label behind it."""
    style: int | None = None
    """Place in the palette; None: the place among the chart's lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart; one of several runs has one line, which each run is drawn by."""

    title: str
    unit: str = ""
    lines: tuple[Line, ...]
    zero: bool = False
    """Whether the axis begins at 0, so that a small change of a large amount looks small."""
    log: bool = False
    """Whether the log switch is for it."""
    rare: bool = False
    """Whether a line that is always 0 is left out."""


def _one(title: str, series: str, unit: str = "", *, zero: bool = True, log: bool = False) -> Chart:
    return Chart(title=title, unit=unit, lines=(Line(series=series),), zero=zero, log=log)


HELD_OUT_STYLE = 1
"""Style of what is measured on held-out data, in a chart with the same figure of training."""

LOSS = Chart(
    title="Loss",
    lines=(
        Line(series="loss", label="train", alone="Loss"),
        Line(series="eval", label="eval", dots=True, alone="Eval loss", style=HELD_OUT_STYLE),
    ),
    log=True,
)

FIXED = (
    LOSS,
    _one("Learning rate", "lr", zero=False, log=True),
    _one("Grad norm", "grad_norm", "before clipping", zero=False, log=True),
    _one("Throughput", "tokens_per_second", "tokens/s"),
    _one("Peak memory", "peak_memory_bytes", "GiB"),
    _one("MFU", "speed_of_light", "% of a measured matmul"),
    _one("Expert load imbalance", "moe_load_imbalance", "busiest / mean"),
    _one("Worst layer's imbalance", "moe_worst_imbalance", "busiest / mean"),
    _one("Experts used", "moe_expert_utilization", "% in a step"),
    _one("Entropy of expert loads", "moe_entropy", "share of log E", zero=False),
    Chart(
        title="Load of GPUs that share out experts",
        unit="busiest / mean",
        lines=(
            Line(series="moe_rank_imbalance", label="as routed"),
            Line(series="moe_rank_imbalance_evened", label="evened out"),
        ),
    ),
    _one("Rows that other GPUs compute", "moe_moved_rows", "% of all"),
    _one("Sent for moved experts", "moe_moved_bytes", "GiB a step"),
    _one("Dead experts", "moe_dead_experts", "in 50 steps"),
    _one("Load-balancing loss", "moe_aux_loss_raw", "raw", zero=False),
    _one("Router z loss", "moe_z_loss_raw", "raw", zero=False),
    _one("GPU utilization", "gpu.utilization", "%"),
    _one("GPU memory", "gpu.memory_used_bytes", "GiB, all processes"),
    _one("GPU power", "gpu.power_watts", "W"),
    _one("GPU temperature", "gpu.temperature_celsius", "°C"),
    _one("GPU clock", "gpu.sm_clock_mhz", "MHz"),
)
"""Charts of figures that every run may have. A line that no run recorded is left out."""

FIXED_SERIES = tuple(line.series for chart in FIXED for line in chart.lines)

SCALES = {
    "peak_memory_bytes": 2.0**-30,
    "gpu.memory_used_bytes": 2.0**-30,
    "speed_of_light": 100.0,
    "moe_expert_utilization": 100.0,
    "moe_moved_rows": 100.0,
    "moe_moved_bytes": 2.0**-30,
    "gpu.utilization": 100.0,
    "rollouts/without_signal": 100.0,
    "rollouts/kept": 100.0,
    "completions/truncated": 100.0,
    "eval/completions/truncated": 100.0,
}

OF_THE_SUM = ("mean", "std", "min", "max")
"""Figures of the sum of all rewards; other names are those of rewards."""

OWN_CHART = ("accuracies", "margins", "truncated")
"""Figures of an objective whose scale is not that of the others of their group."""

COUNTS = ("pairs", "answers", "completions", "chosen", "rejected", "mismatched")
"""Figures of an objective that say how many sequences the others are means over; they have no chart."""

TITLES = {
    "entropy": ("Entropy", "nats per token"),
    "kl": ("KL divergence", "nats"),
    "ce": ("Cross-entropy", "nats per token"),
    "agreement": ("Agreement with the teacher", "share of tokens"),
    "clip_ratio": ("Clipped tokens", "share"),
    "logprob_gap": ("Log-probability gap", "engine to trainer"),
    "importance/mean": ("Importance weights", "mean"),
    "importance/truncated": ("Truncated importance weights", "share"),
    "rewards": ("Rewards of the objective", ""),
    "rewards/margins": ("Reward margin", "chosen − rejected"),
    "rewards/accuracies": ("Reward accuracy", "share"),
    "logps": ("Log-probabilities", "per sequence"),
}
"""Figure of an objective, or group of figures → (title, unit) of its chart; the others have their names."""

SMOOTHED = ("loss", "grad_norm", "reward/mean")
"""Curves that are noisy, beside the figures of objectives. A mean of the others would show what was never there, such
as a later learning rate.
"""


def smooths(series: str) -> bool:
    """Whether the curve has a mean."""
    return series in SMOOTHED or series.startswith("train/")


def recorded(run: RunRecord, series: str) -> bool:
    """Whether the run has a finite value of the curve at any step."""
    values = run.curve(series)[1]
    return bool(len(values)) and bool(np.isfinite(values[-1]) or np.isfinite(values).any())


def charts_of(runs: Sequence[RunRecord]) -> list[Chart]:
    """The charts that a report of these runs has; none without a step and an evaluation."""
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    if not names and not any(len(run.curve(series)[0]) for run in runs for series in ("loss", "eval")):
        return []
    found = []
    for chart in (*_of_rollouts(names), *FIXED[:1], *_of_objective(names), *FIXED[1:]):
        lines = tuple(line for line in chart.lines if any(_shown(run, line, chart) for run in runs))
        split = [(line,) for line in lines] if len(runs) > 1 else [lines] if lines else []
        found += [_titled(replace(chart, lines=part)) for part in split]
    return found


def _titled(chart: Chart) -> Chart:
    """A chart with one line of several has that line's title."""
    (line, *others) = chart.lines
    if others or not (line.alone or line.label):
        return chart
    return replace(chart, title=line.alone or f"{chart.title}: {line.label}")


def _shown(run: RunRecord, line: Line, chart: Chart) -> bool:
    if line.series == "loss":
        # Losses that are all not finite have a chart too, which says so.
        return bool(len(run.steps))
    if chart.rare:
        return bool(np.nan_to_num(run.curve(line.series)[1]).any())
    return recorded(run, line.series)


def _of_rollouts(names: Sequence[str]) -> Iterable[Chart]:
    """The charts of reinforcement learning."""
    if not any(name.startswith(("rollouts/", "eval/rollouts/")) for name in names):
        return
    reward = Line(series="eval/reward/mean", label="held-out", dots=True, alone="Held-out reward", style=HELD_OUT_STYLE)
    yield Chart(title="Reward", lines=(Line(series="reward/mean", label="train", alone="Reward"), reward))
    for group, title in (("reward/", "Rewards by name"), ("eval/reward/", "Held-out rewards by name")):
        of_group = [name.removeprefix(group) for name in names if name.startswith(group)]
        by_name = [name for name in of_group if name not in OF_THE_SUM and f"{name}_std" in of_group]
        if len(by_name) > 1:
            yield from _divided(title, group, by_name, dots=group != "reward/")
    yield _one("Reward spread", "reward/std", "std")
    signal = Line(series="rollouts/without_signal", label="groups without signal", alone="Groups without signal")
    kept = Line(series="rollouts/kept", label="completions trained on", alone="Completions trained on")
    yield Chart(title="Signal", unit="%", lines=(signal, kept), zero=True)
    lengths = {"length_mean": "mean", "terminated_length_mean": "ended by the model", "length_max": "longest"}
    lines = tuple(Line(series=f"completions/{name}", label=label) for name, label in lengths.items())
    yield Chart(title="Completion length", unit="tokens", lines=lines, zero=True)
    of_eval = Line(series="eval/completions/truncated", label="held-out", dots=True, style=HELD_OUT_STYLE)
    cut = Line(series="completions/truncated", label="train", alone="Truncated completions")
    yield Chart(title="Truncated completions", unit="%", lines=(cut, of_eval), zero=True)
    faults = [name.removeprefix("rollouts/faults_") for name in names if name.startswith("rollouts/faults_")]
    yield from _divided("Faults", "rollouts/faults_", faults, unit="completions", rare=True)
    for name, title in (("refills", "Refills"), ("prefix_breaks", "Completions divided by the chat template")):
        yield replace(_one(title, f"rollouts/{name}"), rare=True)
    phases = [name.removeprefix("time/") for name in names if name.startswith("time/") and name != TRAIN_TIME]
    phases += ["train"] if TRAIN_TIME in names else []
    yield from _divided("Time by phase", "time/", phases, unit="s")
    yield _one("Generation", "rollouts/tokens_per_second", "tokens/s")


def _divided(
    title: str, group: str, names: Sequence[str], *, unit: str = "", dots: bool = False, rare: bool = False
) -> Iterable[Chart]:
    """Charts of a group of figures, each with no more lines than there are styles."""
    most = len(palette.LIGHT)
    for begin in range(0, len(names), most):
        lines = tuple(Line(series=group + name, label=name, dots=dots) for name in names[begin : begin + most])
        zero = bool(unit)
        yield Chart(title=title, unit=unit, lines=lines, zero=zero, rare=rare)


def _of_objective(names: Sequence[str]) -> Iterable[Chart]:
    """A chart for each figure of the objective, with that of the evaluation; one for each group of a common scale."""
    others = ("reward/", "completions/", "rollouts/")
    found = [name.removeprefix("train/") for name in names if name.startswith("train/")]
    evaluated = [name.removeprefix("eval/") for name in names if name.startswith("eval/")]
    found += [name for name in evaluated if not name.startswith(others)]
    found = [name for name in dict.fromkeys(found) if name not in COUNTS]
    groups: dict[str, list[str]] = {}
    for name in found:
        group, _, leaf = name.rpartition("/")
        groups.setdefault(group if group and leaf not in OWN_CHART else name, []).append(name)
    for group, members in groups.items():
        known = TITLES.get(members[0] if len(members) == 1 else group) or TITLES.get(group)
        title, unit = known or (group.replace("_", " ").capitalize(), "")
        lines = []
        for place, name in enumerate(members):
            leaf = name.rpartition("/")[2] if len(members) > 1 else ""
            own = f"{title}: {leaf}" if leaf else title
            held = 2 * place + HELD_OUT_STYLE
            lines += [
                Line(series=f"train/{name}", label=leaf or "train", alone=own, style=2 * place),
                Line(series=f"eval/{name}", label=f"{leaf} eval".strip(), dots=True, alone=f"{own}, eval", style=held),
            ]
        yield Chart(title=title, unit=unit, lines=tuple(lines), log=group == "logprob_gap")


def points_of(run: RunRecord, series: str, *, smooth: float = 0.0, limit: int) -> list[Point]:
    """A curve's points, or those of its mean where `smooth` is not 0, at most `limit`; x is the step."""
    steps, values = run.curve(series)
    places = kept_places(values, limit)
    shown = smoothed(values, smooth, places) if smooth else values[places]
    heights = shown * SCALES.get(series, 1.0)
    return list(zip(steps[places].astype(float).tolist(), heights.tolist(), strict=True))
