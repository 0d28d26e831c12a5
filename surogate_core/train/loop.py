"""The loop: steps, evaluations, checkpoints; events out, controls back."""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from surogate_core.config.schema import RunConfig
from surogate_core.data.batch import MicroBatch
from surogate_core.data.sampler import EvalBatches, StepLoader
from surogate_core.engine.engine import Engine, StepResult
from surogate_core.errors import UserError
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir
from surogate_core.train.events import CheckpointSaved, Control, EvalEnd, Event, Notice, Progress, StepEnd
from surogate_core.train.lr import learning_rate, warmup_length
from surogate_core.train.signals import StopSignals

SPEED_SMOOTHING = 0.1
"""Weight of the newest step in the moving average that the ETA is made from."""


class DivergedError(UserError):
    """The loss is no longer finite."""


@dataclass(slots=True)
class LoopState:
    """What a checkpoint keeps of the loop, as JSON values."""

    step: int = 0
    """Optimizer steps done."""
    total_tokens: int = 0
    lr_scale: float = 1.0
    """Product of the monitors' `Control.lr_scale`."""
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    loss_sum: float = 0.0
    """Of the training losses since the last evaluation."""
    loss_count: int = 0


@dataclass(slots=True)
class _Launched:
    """A step that the device may still be working on."""

    step: int
    lr: float
    epoch: float
    result: StepResult


@dataclass(slots=True)
class _Clock:
    """Time of steps, without evaluations and saves."""

    mark: float = field(default_factory=time.perf_counter)
    average: float | None = None

    def lap(self) -> float:
        """Seconds since the mark, which moves here."""
        now = time.perf_counter()
        seconds, self.mark = now - self.mark, now
        self.average = (
            seconds if self.average is None else (1 - SPEED_SMOOTHING) * self.average + SPEED_SMOOTHING * seconds
        )
        return seconds

    def restart(self) -> None:
        """Do not count what has passed since the mark."""
        self.mark = time.perf_counter()


class _Prefetcher:
    """Makes the next step's micro-batches in a thread; the loader's state is as of what was taken."""

    def __init__(self, loader: StepLoader):
        self._loader = loader
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="surogate-batches")
        self.state: dict[str, Any] = loader.state()
        self.epoch = loader.epoch
        self._next: Future[tuple[list[MicroBatch], dict[str, Any], float]] = self._pool.submit(self._make)

    def _make(self) -> tuple[list[MicroBatch], dict[str, Any], float]:
        batches = self._loader.next_step()
        return batches, self._loader.state(), self._loader.epoch

    def take(self) -> list[MicroBatch]:
        """The next step's micro-batches."""
        batches, self.state, self.epoch = self._next.result()
        self._next = self._pool.submit(self._make)
        return batches

    def close(self) -> None:
        """Let the thread end."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class Loop:
    """Trains an engine on a loader for a number of steps."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: StepLoader,
        evaluation: EvalBatches | None,
        bus: EventBus,
        checkpoints: CheckpointDir,
        *,
        identity: Mapping[str, Any],
        total_steps: int,
        signals: StopSignals,
    ):
        self.config, self.engine, self.loader, self.evaluation = config, engine, loader, evaluation
        self.bus, self.checkpoints, self.identity = bus, checkpoints, identity
        self.total_steps, self.signals = total_steps, signals
        self.state = LoopState()
        self._clock = _Clock()
        self._stop_reason = ""
        self._save_asked = False
        self._saved_step: int | None = None

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint."""
        self.engine.load_state({group: checkpoint.tensors(group) for group in checkpoint.groups})
        self.loader.load_state(checkpoint.state["loader"])
        self.bus.load_state(checkpoint.state["monitors"])
        self.state = LoopState(**checkpoint.state["loop"])
        self._saved_step = checkpoint.step

    def run(self) -> Literal["finished", "stopped", "signal"]:
        """Take the remaining steps; returns why it ended. A checkpoint of the end is on disk then."""
        batches = _Prefetcher(self.loader)
        try:
            return self._run(batches)
        finally:
            batches.close()

    def _run(self, batches: _Prefetcher) -> Literal["finished", "stopped", "signal"]:
        if self.state.step == 0:
            self._evaluate()
        launched: _Launched | None = None
        self._clock.restart()
        while self.state.step < self.total_steps:
            step = self.state.step
            lr = self._learning_rate(step)
            result = self.engine.train_step(batches.take(), step=step, lr=lr)
            self.state.step += 1
            previous, launched = launched, _Launched(step, lr, batches.epoch, result)
            if previous:
                self._report(previous)
            if self.engine.settings.device.type != "cuda":
                self._report(launched)
                launched = None
            done = self.state.step
            last = done == self.total_steps
            stopping = self.signals.received is not None or bool(self._stop_reason)
            evaluate = self.config.eval_steps > 0 and done % self.config.eval_steps == 0
            save = self._save_asked or (self.config.save_steps > 0 and done % self.config.save_steps == 0)
            if launched and (evaluate or save or last or stopping):
                self._report(launched)
                launched = None
            if (evaluate or last) and self.signals.received is None:
                self._evaluate()
            if save or last or stopping:
                self._save(batches.state, last=last)
            if self.signals.received is not None:
                return "signal"
            if stopping:
                return "stopped"
        if self._saved_step != self.state.step:
            self._save(batches.state, last=True)
        return "finished"

    # --------------------------------------------------------------------------- pieces

    def _learning_rate(self, step: int) -> float:
        config = self.config
        warmup = warmup_length(
            total_steps=self.total_steps, warmup_steps=config.warmup_steps, warmup_ratio=config.warmup_ratio
        )
        return self.state.lr_scale * learning_rate(
            step,
            total_steps=self.total_steps,
            peak=config.learning_rate,
            kind=config.lr_scheduler_type,
            warmup_steps=warmup,
            cooldown_steps=config.cooldown_steps,
            final_fraction=config.final_lr_fraction,
        )

    def _report(self, launched: _Launched) -> None:
        loss, norm = launched.result.read()
        seconds = self._clock.lap()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DivergedError(self._divergence(launched.step + 1, loss, norm))
        state, tokens = self.state, launched.result.tokens
        state.total_tokens += tokens
        state.loss_sum += loss
        state.loss_count += 1
        self._emit(
            StepEnd(
                step=launched.step + 1,
                epoch=launched.epoch,
                loss=loss,
                grad_norm=norm,
                lr=launched.lr,
                tokens=tokens,
                label_tokens=launched.result.label_tokens,
                total_tokens=state.total_tokens,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                eta_seconds=(self._clock.average or 0.0) * (self.total_steps - launched.step - 1),
                peak_memory_bytes=peak_memory(self.engine.settings.device),
            )
        )

    def _divergence(self, step: int, loss: float, norm: float) -> str:
        kept = "no checkpoint was saved before" if self._saved_step is None else f"checkpoint-{self._saved_step} is kept"
        return (
            f"step {step}: the loss is {loss} and the gradient norm {norm}; the step was not applied and {kept}. "
            f"Fix: lower learning_rate (now {self.config.learning_rate:g}), lengthen the warm-up, or look at the data; "
            f"then run again, which resumes from the last checkpoint."
        )

    def _evaluate(self) -> None:
        if self.evaluation is None:
            return
        started = time.perf_counter()
        total = len(self.evaluation)

        def counted() -> Any:
            for number, batch in enumerate(self.evaluation or (), start=1):
                yield batch
                self.bus.emit(Progress(task="evaluating", done=number, total=total, unit="batches"))

        loss, label_tokens = self.engine.evaluate(counted())
        state = self.state
        if state.first_eval_loss is None:
            state.first_eval_loss = loss
        state.last_eval_loss = loss
        gap = loss - state.loss_sum / state.loss_count if state.loss_count else None
        state.loss_sum, state.loss_count = 0.0, 0
        self._emit(
            EvalEnd(
                step=state.step,
                loss=loss,
                label_tokens=label_tokens,
                seconds=time.perf_counter() - started,
                gap=gap,
            )
        )
        self._clock.restart()

    def _save(self, loader_state: Mapping[str, Any], *, last: bool) -> None:
        if self._saved_step == self.state.step:
            return
        started = time.perf_counter()
        reason: Literal["schedule", "signal", "control", "end"] = (
            "signal"
            if self.signals.received is not None
            else "end"
            if last
            else "control"
            if self._save_asked or self._stop_reason
            else "schedule"
        )
        state = {
            **self.identity,
            "loop": asdict(self.state),
            "loader": dict(loader_state),
            "monitors": self.bus.state(),
        }
        path = self.checkpoints.save(self.state.step, tensors=self.engine.state(), state=state)
        self._saved_step, self._save_asked = self.state.step, False
        seconds = time.perf_counter() - started
        self._emit(CheckpointSaved(step=self.state.step, path=str(path), seconds=seconds, reason=reason))
        self._clock.restart()

    def _emit(self, event: Event) -> None:
        for control in self.bus.emit(event):
            self._obey(control)

    def _obey(self, control: Control) -> None:
        if control.lr_scale is not None:
            self.state.lr_scale *= control.lr_scale
        self._save_asked |= control.save
        if control.stop:
            self._stop_reason = control.reason or "a monitor asked for it"
        told = [
            *([f"learning rate × {control.lr_scale:g}"] if control.lr_scale is not None else []),
            *(["save now"] if control.save else []),
            *(["stop"] if control.stop else []),
        ]
        self.bus.emit(Notice(level="info", message=f"{', '.join(told)}: {control.reason or 'asked by a monitor'}"))


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak of the device allocator on CUDA, the peak resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
