"""Figures and sentences of reinforcement learning, and the figures of a task's objective."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from surogate_core.plugin import events, significant
from surogate_monitor_console.text import count, duration, shortened

FIGURES = {
    "rewards/margins": "margin",
    "rewards/accuracies": "acc",
    "accuracy": "acc",
    "agreement": "agreement",
    "entropy": "entropy",
    "kl": "kl",
    "clip_ratio/region": "clip",
    "clip_ratio": "clip",
    "logprob_gap/mean": "gap",
}
"""Figure of an objective → its name in a line. A task without one of these shows its first figures."""

FIRST_FIGURES = 2
"""Figures that are shown for a task without a known one."""

MEAN_STEPS = 20
"""Steps at both ends of a run whose mean rewards are compared."""

LEAST_SHARE = 0.005
"""Share of a step's time below which a phase is not shown."""

PROMPT_WIDTH = 40
"""Characters of a completion's prompt that are shown."""


def figures(event: events.StepEnd | events.EvalEnd) -> list[tuple[str, str]]:
    """(name, value) of the objective's figures that have a column."""
    known = {short: event.figures[name] for name, short in reversed(FIGURES.items()) if name in event.figures}
    order = [short for short in dict.fromkeys(FIGURES.values()) if short in known]
    shown = {short: known[short] for short in order} or dict(list(event.figures.items())[:FIRST_FIGURES])
    return [(name, significant(value)) for name, value in shown.items()]


def columns(event: events.Rollouts) -> list[tuple[str, str]]:
    """(name, value) of the columns about rollouts."""
    found = [("reward", _spread(event.reward)), ("len", count(event.length.mean))]
    found += [("cut", f"{event.truncated:.0%}"), ("no signal", f"{event.without_signal:.0%}")]
    if faults := sum(event.faults.values()):
        found.append(("faults", str(faults)))
    return found


def line(event: events.Rollouts, step: events.StepEnd | None) -> str:
    """What has no column: rewards by name, faults by reason, speed of generation, time by phase."""
    told = []
    if len(event.rewards) > 1:
        told.append(
            "rewards " + ", ".join(f"{name} {significant(spread.mean)}" for name, spread in event.rewards.items())
        )
    told += [faults] if (faults := _faults(event.faults)) else []
    if generating := event.seconds.get("generate") or event.overlapped.get("generate"):
        told.append(f"generates {count(event.tokens / generating)} tok/s")
    told.append(f"time {phases(event, step)}")
    if event.overlapped:
        beside = ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in event.overlapped.items())
        told.append(f"beside the step before: {beside}")
    return " · ".join(told)


def phases(event: events.Rollouts, step: events.StepEnd | None) -> str:
    """The time of each phase of a step; that of the optimizer step if `step` is of the same one."""
    times = dict(event.seconds)
    if step is not None and step.step == event.step:
        times["train"] = max(0.0, step.seconds - sum(event.seconds.values()))
    least = LEAST_SHARE * sum(times.values())
    shown = {phase: seconds for phase, seconds in times.items() if seconds >= least}
    return ", ".join(f"{phase} {duration(seconds)}" for phase, seconds in shown.items()) or "not measured"


def eval_line(event: events.RolloutEval) -> str:
    """An evaluation of held-out problems in one line."""
    told = [f"{event.tasks} problems"]
    if len(event.rewards) > 1:
        told += [f"{name} {significant(spread.mean)}" for name, spread in event.rewards.items()]
    if event.length is not None:
        told.append(f"length {count(event.length.mean)}")
    if event.truncated:
        told.append(f"{event.truncated:.0%} truncated")
    if faults := _faults(event.faults):
        told.append(faults)
    reward = "none"
    if event.reward is not None:
        reward = f"{event.reward.mean:.4f} ± {event.reward.std / math.sqrt(max(1, event.tasks)):.4f}"
    return f"step {event.step}: held-out reward {reward}  ({', '.join(told)} in {duration(event.seconds)})"


def sample_lines(event: events.RolloutSamples, width: int = 110) -> list[str]:
    """The best and the worst completion, and one that has no reward, a line each."""
    rewarded = [one for one in event.samples if one.reward is not None]
    shown = [*(rewarded if len(rewarded) < 3 else (rewarded[0], rewarded[-1]))]
    shown += [one for one in event.samples if one.reward is None][:1]
    return [f"step {event.step}: completions with their rewards", *(_sample(one, width) for one in shown)]


def _sample(sample: events.RolloutSample, width: int) -> str:
    reward = "none" if sample.reward is None else f"{sample.reward:+.3g}"
    prompt = shortened(sample.prompt, PROMPT_WIDTH)
    ended = f" [{sample.reason}]" if sample.reason not in ("", "stop") else ""
    text = shortened(sample.completion, max(10, width - len(prompt) - len(ended))) or "(empty)"
    return f"  {reward:>6}  {prompt} → {text}{ended}"


def _spread(spread: events.Spread | None) -> str:
    return "none" if spread is None else f"{spread.mean:.3f}±{spread.std:.2f}"


def _faults(faults: Mapping[str, int]) -> str:
    return "faults " + ", ".join(f"{reason} {number}" for reason, number in faults.items()) if faults else ""


class Rewards:
    """The rewards of a run's steps: what its summary says of them."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=MEAN_STEPS)
        self._steps = 0

    def add(self, event: events.Rollouts) -> None:
        """Take the reward of a step, if there is one."""
        if event.reward is None or not math.isfinite(event.reward.mean):
            return
        self._steps += 1
        self._last.append(event.reward.mean)
        if len(self._first) < MEAN_STEPS:
            self._first.append(event.reward.mean)

    def lines(self) -> list[str]:
        """The reward at the beginning and at the end; nothing with fewer than two steps."""
        if (each := min(MEAN_STEPS, self._steps // 2)) == 0:
            return []
        first, last = sum(self._first[:each]) / each, sum(list(self._last)[-each:]) / each
        return [f"Reward {first:.4f} → {last:.4f}{f' (means of {each} steps)' if each > 1 else ''}."]
