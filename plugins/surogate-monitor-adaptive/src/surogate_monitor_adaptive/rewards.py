"""Reinforcement learning: what rewards, entropy, lengths and held-out rewards say together.

The loss is no measure here: its sign and size follow the advantages. A run whose reward is near the highest that it has
seen has learnt its problems, so a low entropy and groups without signal are then no fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from surogate_core.plugin import events
from surogate_monitor_adaptive.windows import Detector, mean, push

WINDOW = 10
"""Steps whose mean is judged, and the first ones that it is compared with."""

BEFORE = 40
"""Steps between the window and the one that its reward is compared with."""

SOLVED = 0.9
"""Share of the way from the lowest to the highest reward above which the problems are learnt."""

RISEN = 0.02
"""Share of that way by which a reward must rise to count as risen."""

COLLAPSED, LOW = 0.2, 0.1
"""Entropy has collapsed if it is below this share of its first values and below this many nats a token."""

LONGER = 2.0
"""Growth of the mean length since the beginning."""

SILENT = 0.8
"""Share of the groups without signal."""

CUT = 0.3
"""Share of truncated completions."""

FAULTY = 0.1
"""Share of completions without a reward."""

APART = 0.05
"""Mean difference of log-probabilities between rollout engine and trainer."""

CLIPPED = 0.3
"""Share of clipped tokens."""

ERRORS, IN_A_ROW = 2.0, 2
"""Standard errors by which held-out rewards must be below the best one, and how many in a row."""

CLIP = ("clip_ratio/region", "clip_ratio")
GAP = ("logprob_gap/mean", "logprob_gap")
"""Names that the share of clipped tokens and the gap of log-probabilities have among an objective's figures."""


@dataclass(slots=True)
class RewardMonitor(Detector):
    """Windows over the steps of reinforcement learning."""

    rewards: list[float] = field(default_factory=list)
    """Mean rewards of the last `BEFORE` + `WINDOW` steps; the other lists have `WINDOW` values."""
    entropies: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    silent: list[float] = field(default_factory=list)
    cut: list[float] = field(default_factory=list)
    faulty: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    clipped: list[float] = field(default_factory=list)
    first_entropy: float | None = None
    """Mean of the first window, and so the next."""
    first_length: float | None = None
    lowest: float | None = None
    """The lowest reward of a completion, and the highest."""
    highest: float | None = None
    best_held_out: list[float] = field(default_factory=list)
    """Highest held-out reward, its variance, and the mean training reward at that time; empty before the first that
    came after a step.
    """
    falling: int = 0
    """Evaluations in a row that fell below it while the training reward rose."""
    active: bool = False
    """Whether the run has rollouts."""

    def observe(self, event: events.Rollouts) -> list[tuple[str, dict[str, float]]]:
        """Take the rollouts of a step: the rules that fire, with their evidence."""
        self.active = True
        if event.reward is not None and math.isfinite(event.reward.mean):
            push(self.rewards, event.reward.mean, BEFORE + WINDOW)
            lowest, highest = (event.reward.min if value is None else value for value in (self.lowest, self.highest))
            self.lowest, self.highest = min(lowest, event.reward.min), max(highest, event.reward.max)
        push(self.lengths, event.length.mean, WINDOW)
        push(self.silent, event.without_signal, WINDOW)
        push(self.cut, event.truncated, WINDOW)
        push(self.faulty, sum(event.faults.values()) / max(1, event.completions), WINDOW)
        if self.first_length is None and len(self.lengths) == WINDOW:
            self.first_length = mean(self.lengths)
        rules: dict[str, Callable[[], dict[str, float] | None]] = {
            "length_explosion": self._explodes,
            "no_signal": lambda: None if self.solved else self._above(self.silent, SILENT, "without_signal"),
            "problems_too_easy": lambda: self._above(self.silent, SILENT, "without_signal") if self.solved else None,
            "completions_truncated": lambda: self._above(self.cut, CUT, "truncated"),
            "environment_faults": lambda: self._above(self.faulty, FAULTY, "share_with_faults"),
        }
        return [(rule, found) for rule, fires in rules.items() if (found := fires()) is not None]

    def observe_step(self, event: events.StepEnd) -> list[tuple[str, dict[str, float]]]:
        """Take the objective's figures of a step."""
        found = []
        entropy = event.figures.get("entropy")
        if entropy is not None and math.isfinite(entropy):
            push(self.entropies, entropy, WINDOW)
            if self.first_entropy is None and len(self.entropies) == WINDOW:
                self.first_entropy = mean(self.entropies)
            if (evidence := self._collapses()) is not None:
                found.append(("entropy_collapse", evidence))
        limits = (("clipped_tokens", self.clipped, CLIPPED, CLIP), ("logprob_gap", self.gaps, APART, GAP))
        for rule, window, limit, names in limits:
            value = next((event.figures[name] for name in names if name in event.figures), None)
            if value is not None and math.isfinite(value):
                push(window, value, WINDOW)
                if (evidence := self._above(window, limit, names[0])) is not None:
                    found.append((rule, evidence))
        return found

    def observe_eval(self, event: events.RolloutEval) -> dict[str, float] | None:
        """Take a held-out reward: the evidence if it has fallen while that of training has risen."""
        if event.reward is None or not math.isfinite(event.reward.mean):
            return None
        held_out, variance = event.reward.mean, event.reward.std**2 / max(1, event.tasks)
        if not self.rewards:
            return None
        trained = mean(self.rewards[-WINDOW:])
        if not self.best_held_out or held_out >= self.best_held_out[0]:
            self.best_held_out, self.falling = [held_out, variance, trained], 0
            return None
        best, of_best, before = self.best_held_out
        falls = best - held_out > ERRORS * math.sqrt(variance + of_best) and trained > before + RISEN * self._span
        self.falling = self.falling + 1 if falls else 0
        if self.falling < IN_A_ROW:
            return None
        return {"held_out": held_out, "best_held_out": best, "reward": trained, "reward_at_best": before}

    @property
    def _span(self) -> float:
        return 0.0 if self.lowest is None or self.highest is None else self.highest - self.lowest

    @property
    def solved(self) -> bool:
        """Whether the rewards of the last steps are near the highest one."""
        if not self.rewards or not self._span or self.lowest is None:
            return False
        return mean(self.rewards[-WINDOW:]) >= self.lowest + SOLVED * self._span

    @property
    def rises(self) -> bool:
        """Whether the reward has risen in the last `BEFORE` steps, or as long as there are rewards."""
        half = min(WINDOW, len(self.rewards) // 2)
        return half > 0 and mean(self.rewards[-half:]) > mean(self.rewards[:half]) + RISEN * self._span

    def _above(self, window: list[float], limit: float, name: str) -> dict[str, float] | None:
        if len(window) < WINDOW or mean(window) <= limit:
            return None
        return {name: mean(window), **self._reward()}

    def _explodes(self) -> dict[str, float] | None:
        first, learns = self.first_length, self.rises or self.solved
        if first is None or learns or mean(self.lengths) <= LONGER * first:
            return None
        return {"length": mean(self.lengths), "length_at_the_beginning": first, **self._reward()}

    def _collapses(self) -> dict[str, float] | None:
        first, now = self.first_entropy, mean(self.entropies)
        if first is None or now > min(LOW, COLLAPSED * first) or self.solved or self.rises:
            return None
        return {"entropy": now, "entropy_at_the_beginning": first, **self._reward()}

    def _reward(self) -> dict[str, float]:
        return {"reward": mean(self.rewards[-WINDOW:])} if self.rewards else {}
