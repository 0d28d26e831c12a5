"""A run of Weights & Biases, by the official package, which sends in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surogate_core.plugin import events, trackers


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbOptions:
    """Options of the Weights & Biases monitor."""

    project: str = "surogate"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; null is the account's own."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto sends if there are credentials, and otherwise writes to `output_dir/wandb` for `wandb sync`."""


class WandbMonitor(trackers.Tracker):
    """Scalars over `step`, the configuration, phases, advice and samples; a resumed run continues under the same id."""

    title = "Weights & Biases"

    def __init__(self, options: WandbOptions, info: events.RunInfo):
        super().__init__(options, info)
        self._wandb = trackers.package("wandb", monitor="wandb", install="surogate-monitor-wandb[client]")

    def begin(self, event: events.RunStart) -> tuple[Any, str]:
        """A run, and its page or the command that sends it."""
        wandb, options = self._wandb, self.options
        mode = options.mode
        if mode == "auto":
            mode = "online" if wandb.login(prompt=False) else "offline"
        output = Path(self.info.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        # The console is ours, and telemetry of the GPU is in the events.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=self.info.run_name,
            dir=str(output),
            id=self.id,
            resume="allow",
            config=trackers.plain(self.info.config),
            mode=mode,
            settings=settings,
        )
        self.id = run.id
        # Steps may come twice when a run resumes; an axis of our own may go back, wandb's may not.
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        run.summary.update({"model": event.model, "parameters": event.parameters, "device": event.device})
        return run, run.url if mode == "online" else f"wandb sync {Path(run.dir).parent}"

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values, or tables."""
        if values:
            self.run.log({"step": step, **values})

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text."""
        self.log(step, {name: text})

    def samples(self, event: events.Samples | events.RolloutSamples) -> None:
        """Log a table."""
        if isinstance(event, events.RolloutSamples):
            name, columns, rows = "completions", list(trackers.SAMPLE_COLUMNS), trackers.sample_rows(event)
        else:
            name, columns = "samples", ["prompt", "text"]
            rows = [list(pair) for pair in zip(event.prompts, event.texts, strict=True)]
        self.log(event.step, {name: self._wandb.Table(columns=columns, data=rows)})

    def finish(self, run: Any, ended: trackers.Ended) -> None:
        """Wait until wandb's process has the rest."""
        if ended != "unknown":
            run.summary["outcome"] = ended
        run.finish(exit_code=int(ended in ("failed", "unknown")))
