"""The live view: a few lines at the bottom of a terminal, what has happened above them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from surogate_core.plugin import events, significant
from surogate_monitor_console import rewards, text
from surogate_monitor_console.options import ConsoleOptions

LEVELS = {"info": "cyan", "warning": "bold yellow", "error": "bold red"}
TREND_STYLES = {"↓": "green", "↑": "red", "→": "yellow", " ": ""}
KEPT_LOSSES = 200
LONG_STAGE_SECONDS = 2.0
"""A task that took at least this long leaves a line."""


class LiveView:
    """Header, bars and figures, redrawn in place; the last state stays on the screen."""

    def __init__(
        self,
        options: ConsoleOptions,
        info: events.RunInfo,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._options, self._info, self._clock = options, info, clock
        self._console = console if console is not None else Console()
        self._start: events.RunStart | None = None
        self._started = clock()
        self._step: events.StepEnd | None = None
        self._losses: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._evals: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._phase = ""
        self._pace = text.Pace()
        self._rollouts: events.Rollouts | None = None
        self._stepped: events.Rollouts | None = None
        self._rewards = rewards.Rewards()
        self._mean_rewards: deque[float] = deque(maxlen=KEPT_LOSSES)
        self._last_samples = float("-inf")
        self._gpu: events.GpuStats | None = None
        self._ranks: events.RankStats | None = None
        self._routing: events.RoutingStats | None = None
        self._stages: dict[str, tuple[float, events.Progress]] = {}
        self._live: Live | None = Live(
            console=self._console, get_renderable=self.render, refresh_per_second=options.refresh_per_second
        )
        self._live.start()
        # A process that is killed cannot bring a hidden cursor back.
        self._console.show_cursor(True)

    def on_event(self, event: events.Event) -> events.Control | None:
        """Take the event into the view."""
        match event:
            case events.RunStart():
                self._start, self._started = event, self._clock()
                facts = "\n".join(escape(line) for line in text.run_facts(event, self._info))
                self._console.print(
                    Panel(facts, title=f"[bold]{escape(self._info.run_name)}", title_align="left", border_style="blue")
                )
                for note in event.notes:
                    self._say(note)
            case events.StepEnd():
                # Rollouts come long before their step, which their times need.
                self._step, self._stepped = event, self._rollouts
                self._pace.add(event)
                self._losses.append(event.loss)
            case events.EvalEnd():
                self._evals.append(event.loss)
                self._say(text.eval_line(event, rewards.figures(event)))
            case events.Samples():
                for line in text.sample_lines(event):
                    self._say(line)
            case events.CheckpointSaved():
                self._say(text.saved_line(event), style="dim")
            case events.PhaseChange():
                self._phase = event.phase
            case events.GpuStats():
                self._gpu = event
            case events.Rollouts() | events.RolloutSamples() | events.RolloutEval():
                self._reinforce(event)
            case events.RankStats():
                self._ranks = event
            case events.RoutingStats():
                self._routing = event
            case events.Advice():
                self._say(text.advice_line(event), style="yellow")
            case events.PrecisionStats():
                if line := text.precision_line(event):
                    self._say(line)
            case events.Notice():
                self._console.print(Text.assemble((f"{event.level}: ", LEVELS[event.level]), event.message))
            case events.Progress():
                self._progress(event)
            case events.RunEnd():
                self._stop()
                style = "bold green" if event.reason == "finished" else "bold yellow"
                for line in text.summary(event, self._pace, self._rewards.lines(), start=self._start):
                    self._say(line, style=style)
                    style = ""
            case events.ReportWritten():
                self._say(f"Report: {event.path}")
        return None

    def state(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        """Give the terminal back."""
        self._stop()

    def _reinforce(self, event: events.Rollouts | events.RolloutSamples | events.RolloutEval) -> None:
        if isinstance(event, events.RolloutSamples):
            if self._clock() - self._last_samples >= self._options.completions_seconds:
                self._last_samples = self._clock()
                for line in rewards.sample_lines(event):
                    self._say(line)
            return
        if isinstance(event, events.RolloutEval):
            self._say(rewards.eval_line(event))
            return
        self._rewards.add(event)
        self._rollouts = event
        if event.reward is not None:
            self._mean_rewards.append(event.reward.mean)

    def _stop(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            self._stages = {}
            live.stop()

    def _say(self, line: str, *, style: str = "") -> None:
        self._console.print(Text(line, style=style))

    def _progress(self, event: events.Progress) -> None:
        now = self._clock()
        began, _ = self._stages.get(event.task, (now, event))
        if 0 < event.total <= event.done:
            self._stages = {task: value for task, value in self._stages.items() if task != event.task}
            if now - began >= LONG_STAGE_SECONDS:
                self._say(f"{event.task}: {event.done} {event.unit} in {text.duration(now - began)}", style="dim")
        else:
            self._stages = {**self._stages, event.task: (began, event)}

    # --------------------------------------------------------------------------- drawing

    def render(self) -> RenderableType:
        """The view as it is now; called from Live's thread too, so it only reads."""
        parts: list[RenderableType] = []
        if self._start is not None:
            parts += [self._bars(self._start), self._figures()]
        if stages := self._stage_bars():
            parts.append(stages)
        return Group(*parts)

    def _bars(self, start: events.RunStart) -> RenderableType:
        step = self._step
        done = step.step if step else start.start_step
        row = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None, None):
            row.add_column(ratio=ratio, no_wrap=True)
        row.add_row(
            Text(f"step {done}/{start.steps}", style="bold"),
            ProgressBar(total=max(start.steps, 1), completed=done),
            f"{100 * done / max(start.steps, 1):3.0f} %",
            f"{text.duration(self._clock() - self._started)} gone",
            f"{text.duration(step.eta_seconds) if step else '?'} to go",
        )
        return row

    def _figures(self) -> RenderableType:
        step, losses = self._step, list(self._losses)
        if step is None:
            return Text("the first step is under way …", style="dim")
        arrow = text.trend(losses)
        grid = Table.grid(padding=(0, 2))
        loss = Text.assemble(
            ("loss ", "dim"),
            (f"{step.loss:.4f} ", "bold"),
            (f"{arrow} ", TREND_STYLES[arrow]),
            (text.sparkline(losses), "cyan"),
        )
        held_out = Text.assemble(("eval loss ", "dim"), f"{self._evals[-1]:.4f}" if self._evals else "–")
        epoch = Text.assemble(("epoch ", "dim"), f"{step.epoch:.2f}")
        speed = Text.assemble(f"{text.count(self._pace.tokens_per_second)} ", ("tok/s", "dim"))
        memory = Text.assemble(("memory ", "dim"), text.size(step.peak_memory_bytes))
        grad = Text.assemble(("grad norm ", "dim"), significant(step.grad_norm))
        rate = Text.assemble(("lr ", "dim"), f"{step.lr:.2e}")
        data = self._start is None or self._start.train_tokens > 0
        grid.add_row(loss, *([held_out] if data or self._evals else []), *([epoch] if data else []))
        second = Table.grid(padding=(0, 2))
        phase = Text.assemble(("phase ", "dim"), self._phase) if self._phase else Text()
        share = text.utilization(step.speed_of_light)
        routing = self._routing
        experts = text.routing(routing) if routing is not None else []
        about = [*rewards.figures(step), *experts]
        columns = [Text.assemble((f"{name} ", "dim"), value) for name, value in about]
        second.add_row(rate, grad, speed, *([share] if share else []), memory, *columns, phase)
        rows: list[RenderableType] = [grid, *self._reward_rows(step), second]
        if routing is not None:
            rows.append(Text(text.experts_line(routing), style="dim"))
        if self._gpu is not None:
            rows.append(Text(text.gpu_line(self._gpu), style="dim"))
        if self._ranks is not None:
            rows.append(Text(text.ranks_line(self._ranks), style="dim"))
        return Group(*rows)

    def _reward_rows(self, step: events.StepEnd) -> list[RenderableType]:
        event = self._stepped
        if event is None:
            return []
        values = list(self._mean_rewards)
        grid = Table.grid(padding=(0, 2))
        (name, reward), *others = rewards.columns(event)
        first = Text.assemble((f"{name} ", "dim"), (f"{reward} ", "bold"), (text.sparkline(values), "cyan"))
        grid.add_row(first, *(Text.assemble((f"{name} ", "dim"), value) for name, value in others))
        return [grid, Text(rewards.line(event, step), style="dim")]

    def _stage_bars(self) -> RenderableType | None:
        stages = self._stages
        if not stages:
            return None
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(width=30)
        grid.add_column(no_wrap=True)
        for began, event in stages.values():
            known = event.total > 0
            of = f"/{event.total}" if known else ""
            grid.add_row(
                event.task,
                ProgressBar(total=event.total if known else None, completed=event.done, pulse=not known),
                Text(f"{event.done}{of} {event.unit}  {text.duration(self._clock() - began)}", style="dim"),
            )
        return grid
