"""Plain lines, for pipes and logs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from surogate_core.plugin import events
from surogate_monitor_console import rewards, text
from surogate_monitor_console.options import ConsoleOptions

PROGRESS_SECONDS = 5.0
"""Time between two lines of one long task; a shorter task has none."""


class PlainView:
    """One line for what matters, aligned, flushed."""

    def __init__(
        self,
        options: ConsoleOptions,
        info: events.RunInfo,
        *,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._options, self._info, self._clock = options, info, clock
        self._stream = stream if stream is not None else sys.stdout
        self._start: events.RunStart | None = None
        self._seen = 0
        self._phase = ""
        self._routing: events.RoutingStats | None = None
        self._pace = text.Pace()
        self._rollouts: events.Rollouts | None = None
        self._rewards = rewards.Rewards()
        self._last_samples = float("-inf")
        self._last_line = float("-inf")
        self._stages: dict[str, list[float]] = {}

    def on_event(self, event: events.Event) -> events.Control | None:
        """Print the event, if it is worth a line."""
        match event:
            case events.RunStart():
                self._start = event
                self._print(*text.run_facts(event, self._info), *event.notes)
            case events.StepEnd():
                self._step(event)
            case events.EvalEnd():
                self._print(text.eval_line(event, rewards.figures(event)))
            case events.Samples():
                self._print(*text.sample_lines(event))
            case events.CheckpointSaved():
                self._print(text.saved_line(event))
            case events.PhaseChange():
                self._phase = event.phase
                self._print(text.phase_line(event))
            case events.Advice():
                self._print(text.advice_line(event))
            case events.GpuStats():
                self._print(f"step {event.step}: {text.gpu_line(event)}")
            case events.RoutingStats():
                self._routing = event
            case events.Rollouts():
                self._rollouts = event
                self._rewards.add(event)
            case events.RolloutSamples():
                if self._clock() - self._last_samples >= self._options.completions_seconds:
                    self._last_samples = self._clock()
                    self._print(*rewards.sample_lines(event))
            case events.RolloutEval():
                self._print(rewards.eval_line(event))
            case events.RankStats():
                self._print(f"step {event.step}: {text.ranks_line(event)}")
            case events.PrecisionStats():
                self._print(*filter(None, [text.precision_line(event)]))
            case events.Notice():
                self._print(event.message if event.level == "info" else f"{event.level}: {event.message}")
            case events.Progress():
                self._progress(event)
            case events.RunEnd():
                self._print(*text.summary(event, self._pace, self._rewards.lines(), start=self._start))
            case events.ReportWritten():
                self._print(f"Report: {event.path}")
        return None

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Every line is flushed already."""

    def _print(self, *lines: str) -> None:
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()

    def _step(self, event: events.StepEnd) -> None:
        options, now, start = self._options, self._clock(), self._start
        steps, epochs = (start.steps, start.train_tokens > 0) if start is not None else (0, True)
        self._pace.add(event)
        self._seen += 1
        due = (
            self._seen <= options.first
            or event.step % options.every == 0
            or event.step == steps
            or now - self._last_line >= options.seconds
        )
        if not due:
            return
        self._last_line = now
        width, share = len(str(steps)), text.utilization(event.speed_of_light)
        rollouts = self._rollouts if self._rollouts is not None and self._rollouts.step == event.step else None
        about = [*(rewards.columns(rollouts) if rollouts else ()), *rewards.figures(event)]
        about += text.routing(self._routing) if self._routing is not None else ()
        self._print(
            f"step {event.step:>{width}}/{steps}"
            f"  loss {event.loss:>8.4f}"
            f"  grad {event.grad_norm:>8.3g}"
            f"  lr {event.lr:.2e}"
            f"{f'  epoch {event.epoch:>5.2f}' if epochs else ''}"
            f"  {text.count(self._pace.tokens_per_second):>6} tok/s"
            f"{f'  {share}' if share else ''}"
            f"{''.join(f'  {name} {value:>6}' for name, value in about)}"
            f"  mem {text.size(event.peak_memory_bytes):>9}"
            f"  eta {text.duration(event.eta_seconds):>7}"
            f"{f'  {self._phase}' if self._phase else ''}"
        )
        if rollouts is not None:
            self._print(f"     {'':>{2 * width}} {rewards.line(rollouts, event)}")

    def _progress(self, event: events.Progress) -> None:
        now = self._clock()
        # Task → (time of its beginning, time of its last line).
        times = self._stages.setdefault(event.task, [now, now])
        done = 0 < event.total <= event.done
        if now - times[1] >= PROGRESS_SECONDS or (done and times[1] > times[0]):
            times[1] = now
            of = f"/{event.total}" if event.total else ""
            self._print(f"{event.task}: {event.done}{of} {event.unit}".rstrip() + f"  {text.duration(now - times[0])}")
        if done:
            del self._stages[event.task]
