"""A run of Weights & Biases, by the official package, which sends in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from surogate_core.errors import MachineError
from surogate_core.events import (
    Advice,
    Control,
    Event,
    Notice,
    PhaseChange,
    RolloutSamples,
    RunEnd,
    RunInfo,
    RunStart,
    Samples,
)
from surogate_core.train.scalars import SAMPLE_COLUMNS, sample_rows, scalars_of


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbOptions:
    """Options of the Weights & Biases monitor."""

    project: str = "surogate"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; null is the account's own."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """auto sends if there are credentials, and otherwise writes to `output_dir/wandb` for `wandb sync`."""


class WandbMonitor:
    """Scalars over `step`, the configuration, phases, advice and samples; a resumed run continues under the same id."""

    def __init__(self, options: WandbOptions, info: RunInfo):
        # Import now, so that a missing package ends the run before anything slow starts.
        try:
            import wandb
        except ModuleNotFoundError as error:
            raise MachineError(
                "monitor wandb: its package is not installed. Fix: pip install 'surogate-monitor-wandb[client]'"
            ) from error
        self._wandb, self._options, self._info = wandb, options, info
        self._run: Any = None
        self._id: str | None = None

    def on_event(self, event: Event) -> Control | None:
        """Log the event, if there is something to show."""
        if isinstance(event, RunStart):
            return self._begin(event)
        if self._run is None:
            return None
        step, values = scalars_of(event)
        match event:
            case PhaseChange():
                self._log(event.step, {"phase": event.phase})
            case Advice():
                self._log(event.step, {f"advice/{event.rule}": f"{event.message} {event.key}: {event.suggestion}."})
            case Samples():
                rows = [list(pair) for pair in zip(event.prompts, event.texts, strict=True)]
                self._log(event.step, {"samples": self._wandb.Table(columns=["prompt", "text"], data=rows)})
            case RolloutSamples():
                table = self._wandb.Table(columns=list(SAMPLE_COLUMNS), data=sample_rows(event))
                self._log(event.step, {"completions": table})
            case RunEnd():
                self._run.summary["outcome"] = event.reason
                self._finish(failed=event.reason == "failed")
            case _ if values:
                self._log(step, values)
        return None

    def state(self) -> dict[str, Any]:
        """The id under which a resumed run goes on."""
        return {"id": self._id}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        self._id = state["id"]

    def close(self) -> None:
        """Finish a run that sent no `RunEnd`."""
        self._finish(failed=True)

    def _begin(self, event: RunStart) -> Control:
        self._finish(failed=True)
        wandb, options = self._wandb, self._options
        mode = options.mode
        if mode == "auto":
            mode = "online" if wandb.login(prompt=False) else "offline"
        output = Path(self._info.output_dir)
        output.mkdir(parents=True, exist_ok=True)
        # The console is ours, and telemetry of the GPU is in the events.
        settings = wandb.Settings(console="off", silent=True, x_disable_stats=True)
        self._run = wandb.init(
            project=options.project,
            entity=options.entity,
            name=self._info.run_name,
            dir=str(output),
            id=self._id,
            resume="allow",
            config=_plain(self._info.config),
            mode=mode,
            settings=settings,
        )
        self._id = self._run.id
        # Steps may come twice when a run resumes; an axis of our own may go back, wandb's may not.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self._run.summary.update({"model": event.model, "parameters": event.parameters, "device": event.device})
        where = self._run.url if mode == "online" else f"wandb sync {Path(self._run.dir).parent}"
        return Control(events=(Notice(level="info", message=f"Weights & Biases: {where}"),))

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({"step": step, **values})

    def _finish(self, *, failed: bool) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.finish(exit_code=int(failed))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
