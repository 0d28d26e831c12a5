"""The head of a report and of the live page: what a run is, how it stands, its figures, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from surogate_command_report import charts, compare, contents
from surogate_commands.curves import figure
from surogate_core.service.files import RunRecord

RECENT_STEPS = 20
"""Steps whose median time and rate a running run's figures are made of."""

Rows = list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The head, ready to be shown."""

    title: str
    subtitle: str
    """Model, method, device."""
    verdict: str
    """How it stands, in a line."""
    tone: str
    """``good``, ``bad``, ``busy`` or ``plain``."""
    message: str = ""
    """What the run said at its end: the reason of a failure, otherwise a hint."""
    progress: float | None = None
    """Share of the steps, 0 to 1; None where there is nothing to show."""
    tiles: Sequence[tuple[str, str, str]] = ()
    """(figure, value, remark). A figure that was not measured has no tile."""
    places: Sequence[tuple[str, str]] = ()
    """(what, path)."""
    commands: Sequence[tuple[str, str]] = ()
    """(purpose, command) of what to do next."""


def card_of(runs: Sequence[RunRecord]) -> Card:
    """The head of a report of these runs."""
    return _of_run(compare.titles(runs)[0], runs[0]) if len(runs) == 1 else _of_runs(runs)


def _of_runs(runs: Sequence[RunRecord]) -> Card:
    counts: dict[str, int] = {}
    for run in runs:
        counts[run.outcome] = counts.get(run.outcome, 0) + 1
    said = ", ".join(f"{count} {what}" for what, count in counts.items())
    best = compare.best(runs)
    tone = "good" if set(counts) == {"finished"} else "plain"
    if best is not None:
        (place, word), title = best, compare.titles(runs)[best[0]]
        rewarded = word == "highest"
        step, value = (runs[place].best_reward if rewarded else runs[place].best) or (0, 0.0)
        what = "held-out reward" if rewarded else "eval loss"
        said += f". {word.capitalize()} {what}: {value:.4f}, {title}, step {step:,}"
    group = runs[0].group if len({run.group for run in runs}) == 1 else ""
    models = dict.fromkeys(_subtitle(run) for run in runs)
    return Card(
        title=f"{group or 'comparison'}: {len(runs)} runs",
        subtitle=next(iter(models)) if len(models) == 1 else "",
        verdict=said,
        tone=tone,
    )


def _of_run(title: str, run: RunRecord) -> Card:
    going_on = run.end is None and run.live
    planned, last = int(run.start.get("steps") or 0), _last_step(run)
    reason = str((run.end or {}).get("reason"))
    tones = {"finished": "good", "stopped": "good", "failed": "bad"}
    return Card(
        title=title,
        subtitle=_subtitle(run),
        verdict=verdict(run),
        tone="busy" if going_on else tones.get(reason, "plain"),
        message=str((run.end or {}).get("message") or ""),
        progress=min(1.0, last / planned) if planned and (last or going_on) else None,
        tiles=_running(run) if going_on else _ended(run),
        places=_places(run),
        commands=[] if going_on else commands(run),
    )


def method(run: RunRecord) -> str:
    """What is trained, in the words of the field, such as ``SFT, LoRA r=16 on nf4``; empty if it is not known."""
    settings = run.settings
    if "lora" not in settings:
        return str(settings.get("task", "")).upper()
    found = [str(settings.get("task", "")).upper()]
    if settings.get("lora"):
        base = settings.get("qlora_format")
        of_experts = settings.get("lora_expert_rank")
        rank = f"{settings.get('lora_rank')}{f' (experts {of_experts})' if of_experts else ''}"
        found.append(f"{'QLoRA' if base else 'LoRA'} rank {rank}{f' on {base}' if base else ''}")
    else:
        found.append("from scratch" if settings.get("from_scratch") else "all weights")
    recipe = settings.get("recipe")
    if isinstance(recipe, dict) and recipe.get("name"):
        found.append(str(recipe["name"]))
    return ", ".join(word for word in found if word)


def _subtitle(run: RunRecord) -> str:
    words = (run.start.get("model"), method(run), run.start.get("device"))
    return " · ".join(str(word) for word in words if word)


def _last_step(run: RunRecord) -> int:
    return int(run.steps[-1]) if len(run.steps) else 0


def verdict(run: RunRecord) -> str:
    """How the run stands, in a line."""
    outcome, last, planned = run.outcome, _last_step(run), run.start.get("steps")
    if run.end is not None and not last:
        return f"{outcome.capitalize()} before its first step"
    at = f"step {last:,} of {planned:,}" if planned else f"step {last:,}"
    if run.end is None and run.live:
        words = [f"{outcome.capitalize()}: {at}" if run.start else outcome.capitalize()]
        if (left := _seconds_left(run)) is not None:
            words.append(f"{duration(left)} to go")
        if (task := run.progress) is not None:
            total = f"/{task['total']}" if task.get("total") else ""
            words.append(f"{task.get('task')} {task.get('done')}{total}")
        return " · ".join(words)
    said = f"{outcome.capitalize()}: {at}" if run.end is not None else f"{at.capitalize()}. {outcome.capitalize()}"
    if run.end is not None and run.end.get("reason") == "finished" and last == planned:
        said = f"Finished after {last:,} steps"
    if change := _reward_change(run):
        return f"{said}. {change}"
    change = _eval_change(run)
    return f"{said}. Eval loss {change}" if change else said


def _reward_change(run: RunRecord) -> str:
    """``Held-out reward rose from 0.1 to 0.8``; of training if tasks were held out less than twice."""
    if len(values := contents.finite(run, "eval/reward/mean")) > 1:
        first, last, what, remark = float(values[0]), float(values[-1]), "Held-out reward", ""
    elif len(values := contents.finite(run, "reward/mean")) > 1:
        each = min(RECENT_STEPS, len(values) // 2)
        first, last, what = float(values[:each].mean()), float(values[-each:].mean()), "Reward"
        remark = f" (means of {each} steps)" if each > 1 else ""
    else:
        return ""
    word = "fell" if last < first else "rose" if last > first else "stayed"
    if (best := run.best_reward) and best[0] == 0 and not remark:
        remark = ", never above the start"
    return f"{what} {word} from {first:.4f} to {last:.4f}{remark}"


def _eval_change(run: RunRecord) -> str:
    steps, losses = run.curve("eval")
    if len(losses) < 2 or not np.isfinite(losses[[0, -1]]).all():
        return ""
    first, last = float(losses[0]), float(losses[-1])
    word = "fell" if last < first else "rose" if last > first else "stayed"
    best = run.best
    lowest = f", lowest {best[1]:.4f} at step {best[0]:,}" if best and best[0] != int(steps[-1]) else ""
    if best and best[0] == 0:
        lowest = ", never below the start"
    return f"{word} from {first:.4f} to {last:.4f}{lowest}"


def _recent(run: RunRecord, series: str) -> float | None:
    values = run.series[series][-RECENT_STEPS:]
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _seconds_left(run: RunRecord) -> float | None:
    seconds, planned = _recent(run, "seconds"), run.start.get("steps")
    return None if seconds is None or not planned else max(0.0, (int(planned) - _last_step(run)) * seconds)


def duration(seconds: float) -> str:
    """``0:01:30``."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def _shown(value: float) -> str:
    return figure(value) if np.isfinite(value) else "not finite"


def _running(run: RunRecord) -> list[tuple[str, str, str]]:
    """The latest figures."""
    found: list[tuple[str, str, str]] = []
    latest = {name: float(column[-1]) for name, column in run.series.items() if len(column)}

    def add(name: str, series: str, remark: str = "") -> None:
        if series in latest and (np.isfinite(latest[series]) or charts.recorded(run, series) or series == "loss"):
            found.append((name, _shown(latest[series]), remark))

    found += _reward_tiles(run, last=1)
    if not len(run.curve("reward/mean")[0]):
        add("train loss", "loss")
    found += _eval_tiles(run)
    add("learning rate", "lr")
    add("grad norm", "grad_norm")
    found += _rate_tiles(_recent(run, "tokens_per_second"), _recent(run, "seconds"))
    found += _amount_tiles(run, peak=latest.get("peak_memory_bytes"))
    found += _routing_tiles(run, last=1)
    if run.phases:
        found.append(("phase", str(run.phases[-1].get("phase")), ""))
    if (share := _recent(run, "speed_of_light")) is not None:
        found.append(("MFU", f"{share:.1%}", "of a measured matmul"))
    used, watts = (run.curve(f"gpu.{name}")[1] for name in ("utilization", "power_watts"))
    if len(used) and np.isfinite(used[-1]):
        found.append(("GPU", f"{used[-1]:.0%}", f"{watts[-1]:.0f} W" if np.isfinite(watts[-1]) else ""))
    return found


def _ended(run: RunRecord) -> list[tuple[str, str, str]]:
    """The figures of the whole run."""
    found = _reward_tiles(run, last=RECENT_STEPS) + _eval_tiles(run)
    # The loss of reinforcement learning follows the advantages, so its change says nothing.
    if len(losses := contents.finite(run, "loss")) and not len(run.curve("reward/mean")[0]):
        tail = losses[-20:]
        remark = f"mean of the last {len(tail)}" if len(tail) > 1 else ""
        found.append(("train loss", f"{figure(float(losses[0]))} → {figure(float(tail.mean()))}", remark))
    if not len(run.steps):
        return found
    planned = int(run.start.get("steps") or 0)
    found.append(("steps", f"{_last_step(run):,}", f"of {planned:,}" if planned > _last_step(run) else ""))
    found += _rate_tiles(run.median("tokens_per_second"), run.median("seconds"))
    peaks = contents.finite(run, "peak_memory_bytes")
    found += _amount_tiles(run, peak=float(peaks.max()) if len(peaks) else None)
    found += _routing_tiles(run, last=20)
    if (share := run.median("speed_of_light")) is not None:
        found.append(("MFU", f"{share:.1%}", "of a measured matmul"))
    return found


def _eval_tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    steps, losses = run.curve("eval")
    if not len(losses):
        return []
    if len(losses) == 1:
        return [("eval loss", _shown(losses[0]), f"step {steps[0]:,} only")]
    best, last = run.best, int(steps[-1])
    remark = f"step {last:,}, the best" if best and best[0] == last else f"step {last:,}"
    found = [("eval loss", f"{_shown(losses[0])} → {_shown(losses[-1])}", remark)]
    if best and best[0] != last:
        found.append(("best eval loss", figure(best[1]), f"step {best[0]:,}" if best[0] else "before the first step"))
    return found


def _rate_tiles(speed: float | None, seconds: float | None) -> list[tuple[str, str, str]]:
    rate = f"{figure(1 / seconds)} steps/s" if seconds else ""
    if speed is None:
        return [("steps/s", rate.removesuffix(" steps/s"), "median")] if rate else []
    return [("tokens/s", figure(speed), f"median, {rate}" if rate else "median")]


def _amount_tiles(run: RunRecord, *, peak: float | None) -> list[tuple[str, str, str]]:
    seconds = run.along("time")
    found = [("tokens", figure(float(run.total_tokens)), "")] if run.total_tokens else []
    if len(seconds) and seconds[-1]:
        found.append(("training time", duration(float(seconds[-1])), ""))
    if peak is not None and np.isfinite(peak):
        remark = f"rank 0 of {len(others)}" if (others := contents.ranks(run)) else ""
        found.append(("peak memory", contents.gibibytes(peak), remark))
    return found


def _routing_tiles(run: RunRecord, *, last: int) -> list[tuple[str, str, str]]:
    """How even the loads of experts are: the mean of the last steps."""
    loads = contents.finite(run, "moe_load_imbalance")
    if not len(loads):
        return []
    tail, first = loads[-last:], f"{loads[0]:.2f} → " if last > 1 and len(loads) > 1 else ""
    worst = contents.finite(run, "moe_worst_imbalance")
    remark = f"worst layer {float(worst[-last:].mean()):.2f}" if len(worst) else ""
    found = [("expert imbalance", f"{first}{float(tail.mean()):.2f}", remark)]
    routed, evened = (contents.finite(run, f"moe_rank_imbalance{what}")[-last:] for what in ("", "_evened"))
    if len(routed) and len(evened):
        found.append(("load of GPUs", f"{float(evened.mean()):.2f}", f"evened out from {float(routed.mean()):.2f}"))
    return found


MEASURES = (
    ("completion length", "completions/length_mean", "tokens", 1.0),
    ("truncated", "completions/truncated", "of completions", 100.0),
    ("without signal", "rollouts/without_signal", "of groups", 100.0),
    ("entropy", "train/entropy", "nats per token", 1.0),
    ("reward margin", "train/rewards/margins", "chosen − rejected", 1.0),
    ("reward accuracy", "train/rewards/accuracies", "", 100.0),
    ("KL divergence", "train/kl", "nats", 1.0),
    ("agreement", "train/agreement", "with the teacher", 100.0),
)
"""(tile, series, remark, factor) of reinforcement learning and preference training; 100 for shares."""


def _reward_tiles(run: RunRecord, *, last: int) -> list[tuple[str, str, str]]:
    """Rewards, and other measures of the last steps, each as its first value → the mean of the last ones."""
    found: list[tuple[str, str, str]] = []
    evaluated = contents.finite(run, "eval/reward/mean")
    if len(evaluated):
        first = f"{evaluated[0]:.3f} → " if len(evaluated) > 1 else ""
        remark = f"highest {best[1]:.3f}, step {best[0]:,}" if (best := run.best_reward) else ""
        found.append(("held-out reward", f"{first}{evaluated[-1]:.3f}", remark))
    for name, series, remark, factor in (("reward", "reward/mean", "", 1.0), *MEASURES):
        values = factor * contents.finite(run, series)
        if not len(values):
            continue
        mean = float(values[-last:].mean())
        first = f"{_measure(float(values[0]), factor)} → " if last > 1 and len(values) > 1 else ""
        found.append((name, f"{first}{_measure(mean, factor)}", remark))
    if len(run.curve("rollouts/faults")[1]) and (faults := contents.finite(run, "rollouts/faults").sum()):
        found.append(("faults", f"{faults:,.0f}", "completions without a reward"))
    return [*found, *_phase_tiles(run)]


def _measure(value: float, factor: float) -> str:
    return f"{value:.1f}%" if factor == 100.0 else figure(float(f"{value:.3g}"))


def _phase_tiles(run: RunRecord) -> list[tuple[str, str, str]]:
    """The phase of a step that takes longest, and its share of the recent steps' time."""
    sums = {
        name.removeprefix("time/"): float(contents.finite(run, name)[-RECENT_STEPS:].sum())
        for name in run.names
        if name.startswith("time/")
    }
    total = sum(sums.values())
    if not total:
        return []
    longest = max(sums, key=lambda name: sums[name])
    others = ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in sums.items() if name != longest)
    return [("longest phase", f"{longest} {sums[longest] / total:.0%}", others)]


def _places(run: RunRecord) -> Rows:
    found: Rows = [("run", str(run.directory))]
    end = run.end or {}
    if path := end.get("export_path"):
        older = end.get("export_step") not in (None, end.get("step"))
        found.append(("export", f"{path}, the weights of step {end['export_step']:,}" if older else str(path)))
    return found


def commands(run: RunRecord) -> Rows:
    """(purpose, command) of what a user does next with a run that is over."""
    end = run.end or {}
    found = [(str(purpose), str(command)) for purpose, command in end.get("next_commands") or ()]
    # The reader has the report.
    found = [(purpose, command) for purpose, command in found if not command.startswith("surogate report ")]
    if end.get("reason") in (None, "signal", "failed") and len(run.steps) and run.settings:
        config = shlex.quote(str(run.directory / "config.yaml"))
        found.insert(0, ("resume", f"surogate {run.settings.get('task', 'sft')} {config}"))
    return found
