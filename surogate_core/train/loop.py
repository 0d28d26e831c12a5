"""The loop: steps, evaluations, checkpoints; events out, controls back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import torch

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Evaluation, RunKeys, Steps, Stopped
from surogate_core.bundles.tasks import is_online
from surogate_core.config.schema import RunConfig
from surogate_core.engine.engine import Engine, StepResult
from surogate_core.errors import SurogateError, UserError
from surogate_core.events import (
    CheckpointSaved,
    Control,
    EvalEnd,
    Event,
    Notice,
    Progress,
    RankStats,
    RolloutEval,
    Samples,
    StepEnd,
)
from surogate_core.mesh.mesh import Mesh
from surogate_core.numbers import significant
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir
from surogate_core.train.flops import ModelFlops
from surogate_core.train.leading import Interrupted, Leader, Order
from surogate_core.train.lr import Schedule, faded
from surogate_core.train.measures import Clock, Mebibytes, not_finite, peak_memory, settled_objects
from surogate_core.train.precision import WINDOW, PrecisionWatch
from surogate_core.train.prefetch import Batches, Made
from surogate_core.train.restore import load_tensors
from surogate_core.train.sides import SideFigures
from surogate_core.train.signals import StopSignals
from surogate_core.train.telemetry import GpuTelemetry

GAP_WINDOW = 20
"""Most training losses that a held-out loss is compared with."""

Reason = Literal["finished", "stopped", "signal"]
Sampler = Callable[[Engine, int, Callable[[], bool]], Samples | Notice | None]
"""(engine, step, whether a signal has come) → the samples, or why there are none; None after a signal."""
Evaluator = Callable[[int], Event | None]
"""Step → the figures of an evaluation that the task does itself; None after a signal."""


class DivergedError(UserError):
    """The loss is no longer finite."""


@dataclass(slots=True)
class LoopState:
    """The loop's state in a checkpoint, as JSON values."""

    step: int = 0
    """Optimizer steps done."""
    total_tokens: int = 0
    lr_scale: float = 1.0
    """Product of the monitors' permanent `Control.lr_scale` that have begun."""
    lr_changes: list[tuple[float, int, int]] = field(default_factory=list)
    """(scale, first step, steps of its return to 1) of the temporary ones that are not over."""
    first_eval_loss: float | None = None
    last_eval_loss: float | None = None
    evaluated_step: int | None = None
    """The step of the last evaluation: one that a signal prevented is made up for by the resumed run."""
    sampled_step: int | None = None
    """The step of the last samples."""
    best_eval_loss: float | None = None
    """The lowest held-out loss, that before the first step included."""
    first_reward: float | None = None
    """The mean held-out reward of the first evaluation."""
    last_reward: float | None = None
    best_reward: float | None = None
    """The highest held-out reward, that before the first step included."""
    best_step: int | None = None
    """The step of the best evaluation; 0 if no step was better than the start. Checkpoints of an earlier version do
    not count step 0.
    """
    recent_losses: list[float] = field(default_factory=list)
    """The last `GAP_WINDOW` training losses since the last evaluation."""


@dataclass(slots=True)
class _Launched:
    """A step that the device may still be working on."""

    step: int
    lr: float
    epoch: float
    flops: float
    making: float
    """Seconds in which its micro-batches were made, if nothing was trained meanwhile."""
    result: StepResult


def total_steps(config: RunKeys, loader: Steps, *, done: int) -> int:
    """Optimizer steps of the whole run when `done` of them have brought the loader where it is.

    `num_epochs` counts rows, so that a run that is resumed with another batch size still sees each as often.
    """
    if config.max_steps > 0:
        return config.max_steps
    left = (config.num_epochs - loader.epoch) * loader.steps_per_epoch
    # The product of two floats may be a hair above a whole number of steps.
    return done + max(0, math.ceil(left - 1e-6))


def most_steps(config: RunKeys, loader: Steps) -> int:
    """The steps of a whole run, or of an epoch if that has more and `epoch_adjustment` may still add some."""
    steps = total_steps(config, loader, done=0)
    return max(steps, math.ceil(loader.steps_per_epoch)) if config.epoch_adjustment else steps


EVALUATIONS = 10
"""Evaluations of a run with ``eval_steps: auto``, besides that before the first step."""


def evaluation_due(done: int, *, total: int, every: int | Literal["auto"]) -> bool:
    """Whether a run evaluates after `done` of `total` steps: at the beginning, after each `every` steps, at the end."""
    if every == "auto":
        every = -(-total // EVALUATIONS)
    return done in (0, total) or (every > 0 and done % every == 0)


class Loop:
    """Trains an engine on a loader for a number of steps."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Steps,
        evaluation: Evaluation | None,
        bus: EventBus,
        checkpoints: CheckpointDir,
        *,
        identity: Mapping[str, Any],
        signals: StopSignals,
        schedule: Schedule,
        checkpoint: Checkpoint | None = None,
        gemm_flops_per_second: float | None = None,
        mesh: Mesh | None = None,
    ):
        """`loader` is where `checkpoint` left it. Raises `UserError` if that does not fit, and as `Schedule.rates`.

        `gemm_flops_per_second`: the device's rate that `StepEnd.speed_of_light` compares with.
        """
        self.config, self.engine, self.loader, self.evaluation = config, engine, loader, evaluation
        self.bus, self.checkpoints, self.identity, self.signals = bus, checkpoints, identity, signals
        self.leader = Leader(mesh or Mesh(), signals)
        self.state = LoopState()
        self.stop_reason = ""
        """Why a monitor stopped the run."""
        self.sampler: Sampler | None = None
        """Generates samples; None if there are no prompts, and after it has failed."""
        self.evaluator: Evaluator | None = None
        """Evaluates what the task evaluates itself."""
        self._online = is_online(loader)
        self._clock = Clock()
        self._gemm_rate = gemm_flops_per_second
        self._work = ModelFlops.of(engine.model, frozen=config.lora)
        self._precision = PrecisionWatch.of(engine)
        self._telemetry = GpuTelemetry.of_device(engine.settings.device) if config.log_gpu_util else None
        self._save_asked = False
        self._best_is_new = False
        """Whether the last evaluation was the best so far, so that its weights must be saved."""
        self._saved_step: int | None = None
        self._started_at = 0
        if checkpoint is not None:
            self._restore(checkpoint)
        self._keep_best()
        self.total_steps = total_steps(config, loader, done=self.state.step)
        self._scheduled = schedule.rates(self.total_steps)
        self._sides = SideFigures.of(engine, steps=self.total_steps, every=config.log_expert_loads)

    def _restore(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.state.get("loop")
        # Keys of a later version are at their defaults.
        if not isinstance(saved, dict) or not saved.keys() <= {f.name for f in fields(LoopState)}:
            raise UserError(
                f"{checkpoint.path}: was saved by another version of Surogate, whose state this one cannot read. "
                f"Fix: install that version, or start anew with resume_from_checkpoint=false."
            )
        load_tensors(self.engine, checkpoint)
        self.bus.load_state(checkpoint.state.get("monitors", {}))
        self.state = LoopState(**saved)
        self._saved_step = self._started_at = checkpoint.step

    def check_room(self) -> None:
        """Raise `MachineError` if the disk has no room for the checkpoints that this run is sure to save and keep."""
        first = [0] if self.config.load_best and not self.state.step and self._evaluates else []
        steps = [s for s in range(self.state.step + 1, self.total_steps) if self._saving_due(s)][
            : self.checkpoints.limit
        ]
        last = [self.total_steps] if self.state.step < self.total_steps else []
        self.checkpoints.check_room([*first, *steps, *last], self.engine.state())

    @property
    def _evaluates(self) -> bool:
        return self.evaluation is not None or self.evaluator is not None

    def run(self) -> Reason:
        """Take the remaining steps; returns why it ended. If a step was taken, a checkpoint of the end is on disk."""
        batches = Batches.of(self.engine, self.loader, self._work)
        try:
            with settled_objects() if self.engine.settings.device.type == "cuda" else nullcontext():
                return self._run(batches)
        except Interrupted:
            # An evaluation before the first step: nothing is new since the checkpoint, if there is one.
            return "signal"
        finally:
            batches.close()
            if self._telemetry is not None:
                self._telemetry.close()

    def _run(self, batches: Batches) -> Reason:
        if self._evaluation_due(self.state.step):
            self._evaluate()
        if self._sampling_due(self.state.step):
            self._sample()
        if self._best_is_new:
            self._save(batches.state, last=False, signalled=False)
        launched: _Launched | None = None
        self._clock.restart()
        while self.state.step < self.total_steps:
            if self.state.step == self._started_at and (ended := self._ended()):
                return ended
            step = self.state.step
            lr = self._learning_rate(step)
            made, making = self._take(batches)
            if made is None:
                return "signal"
            with self.leader.ordering(Order.STEP, lr):
                result = self.engine.train_step(made.batches, step=step, lr=lr)
            self.state.step += 1
            previous, launched = launched, _Launched(step, lr, made.epoch, made.flops, making, result)
            if previous:
                self._report(previous)
            done = self.state.step
            self.leader.step_ends(done)
            # Read once: a later signal belongs to the next step, so that the run never ends without saving.
            signalled = self.signals.received is not None
            evaluating, sampling = self._evaluation_due(done), self._sampling_due(done)
            saving, last = self._saving_due(done), done == self.total_steps
            asked = self._save_asked or bool(self.stop_reason)
            at_border = evaluating or sampling or saving or last or signalled or asked
            if at_border or self._online or self.engine.settings.device.type != "cuda":
                self._report(launched)
                launched = None
            try:
                if (evaluating or self.stop_reason) and not signalled:
                    self._evaluate()
                if (sampling or self.stop_reason) and not signalled:
                    self._sample()
            except Interrupted:
                signalled = True
            if saving or last or signalled or self.stop_reason or self._save_asked or self._best_is_new:
                if launched:
                    self._report(launched)
                    launched = None
                self._save(batches.state, last=last, signalled=signalled)
            if signalled:
                return "signal"
            if self.stop_reason and not last:
                return "stopped"
        if self._saved_step != self.state.step:
            self._save(batches.state, last=True, signalled=False)
        return "finished"

    def _take(self, batches: Batches) -> tuple[Made | None, float]:
        """The next step, and the seconds of making it after the step before; None after a signal, when all is saved."""
        if not self._online:
            return batches.take(), 0.0
        started = time.perf_counter()
        try:
            with self.leader.ordering(Order.MAKE):
                self.engine.freshen()
                made = self._made_together(batches)
        except Stopped:
            if self.signals.received is None:
                raise
            if self.state.step > self._started_at:
                self._save(batches.state, last=False, signalled=True)
            return None, 0.0
        return made, time.perf_counter() - started

    def _made_together(self, batches: Batches) -> Made:
        try:
            return batches.take()
        except Stopped:
            self.leader.hear_signals()
            raise

    def load_best(self) -> int:
        """Load the weights of the best evaluation if the configuration wants them; the step of the weights now."""
        state, checkpoints = self.state, self.checkpoints
        if not self.config.load_best or state.best_step in (None, state.step):
            return state.step
        assert state.best_step is not None
        path = checkpoints.root / f"checkpoint-{state.best_step}"
        try:
            checkpoint = CheckpointDir.load(path)
            if checkpoint.run != checkpoints.run:
                raise UserError(f"{path}: belongs to another run.")
        except SurogateError as error:
            message = f"load_best: the weights of step {state.step} are exported instead of those of the best: {error}"
            self.emit(Notice(level="warning", message=message))
            return state.step
        with self.leader.ordering(Order.LOAD, state.best_step):
            self.leader.load(self.engine, path, self.emit)
        return state.best_step

    def emit(self, event: Event) -> bool:
        """Show the event to the monitors and obey their controls; whether one wants to proceed whatever it says."""
        controls = self.bus.emit(event)
        for control in controls:
            self._obey(control, event)
        return any(control.proceed for control in controls)

    # --------------------------------------------------------------------------- pieces

    def _ended(self) -> Literal["stopped", "signal"] | None:
        """Whether the run is to end before a step is taken, when there is nothing to save."""
        if self.signals.received is not None:
            return "signal"
        return "stopped" if self.stop_reason else None

    def _evaluation_due(self, done: int) -> bool:
        due = evaluation_due(done, total=self.total_steps, every=self.config.eval_steps)
        return due and self.state.evaluated_step != done

    def _sampling_due(self, done: int) -> bool:
        every = self.config.eval_steps if self.config.sample_steps == "auto" else self.config.sample_steps
        due = self.sampler is not None and evaluation_due(done, total=self.total_steps, every=every)
        return due and self.state.sampled_step != done

    def _saving_due(self, done: int) -> bool:
        return self.config.save_steps > 0 and done % self.config.save_steps == 0

    def _learning_rate(self, step: int) -> float:
        rate = self._lr_factor(step) * self._scheduled(step)
        return min(rate, torch.finfo(torch.float32).max)

    def _lr_factor(self, step: int) -> float:
        """Product of the monitors' scales at a step; drops those that are over."""
        state, factor = self.state, 1.0
        kept = []
        for scale, first, steps in state.lr_changes:
            if step < first:
                kept.append((scale, first, steps))
            elif steps == 0:
                state.lr_scale *= scale
            elif step < first + steps:
                factor *= faded(scale, since=step - first, steps=steps)
                kept.append((scale, first, steps))
        state.lr_changes = kept
        return state.lr_scale * factor

    def _report(self, launched: _Launched) -> None:
        loss, norm = launched.result.read()
        seconds = self._clock.lap()
        state, tokens, step = self.state, launched.result.tokens, launched.step + 1
        state.total_tokens += tokens
        if math.isfinite(loss):
            state.recent_losses = [*state.recent_losses, loss][-GAP_WINDOW:]
        sides = launched.result.sides()
        for event in self._sides.events(step, sides, launched.result.micro_steps):
            self.emit(event)
        proceed = self.emit(
            StepEnd(
                step=step,
                epoch=launched.epoch,
                loss=loss,
                grad_norm=norm,
                lr=launched.lr,
                tokens=tokens,
                label_tokens=launched.result.label_tokens,
                total_tokens=state.total_tokens,
                seconds=seconds,
                tokens_per_second=tokens / seconds,
                eta_seconds=(self._clock.average or 0.0) * (self.total_steps - step),
                peak_memory_bytes=peak_memory(self.engine),
                figures=launched.result.figures(),
                speed_of_light=self._speed_of_light(launched.flops / max(seconds - launched.making, 1e-9)),
            )
        )
        self._watch_gpu(step)
        self._watch_ranks(step)
        self._watch_precision(launched, step)
        if not (proceed or (math.isfinite(loss) and math.isfinite(norm))):
            figures = f"the loss is {significant(loss, 6)} and the gradient norm {significant(norm, 6)}"
            what = f"{figures}, so the step was not applied"
            if (layer := self._sides.broken_router(sides)) is not None:
                what += f"; the router of layer {layer} is the first with probabilities that are not finite"
            raise DivergedError(self._divergence(f"step {step}: {what}", at_start=step == self._started_at + 1))

    def _speed_of_light(self, flops_per_second: float) -> float | None:
        """Share of the rate that all devices of the run have together."""
        return flops_per_second / (self._gemm_rate * self.leader.world) if self._gemm_rate else None

    def _watch_gpu(self, step: int) -> None:
        """Tell the reading that is ready, and ask for the next when it is due."""
        if self._telemetry is None:
            return
        if (stats := self._telemetry.take(wait=1.0 if step == self.total_steps else 0.0)) is not None:
            self.emit(stats)
        if step % self.config.log_gpu_util == 0:
            self._telemetry.ask(step)

    def _watch_ranks(self, step: int) -> None:
        """Exchange the ranks' figures when they are due."""
        every = self.config.log_gpu_util
        if self.leader.world == 1 or not every or (step % every and step != self.total_steps):
            return
        with self.leader.ordering(Order.FIGURES):
            memory, seconds = self.leader.figures(peak_memory(self.engine), self.engine.own_work.mean())
        self.emit(RankStats(step=step, peak_memory_bytes=memory, work_seconds=seconds))

    def _watch_precision(self, launched: _Launched, step: int) -> None:
        """Count saturated tensors from the step's figures, and emit the statistics every `WINDOW` steps."""
        if self._precision is None:
            return
        self._precision.observe(launched.result.used_range(self._precision.columns))
        if (step % WINDOW == 0 or step == self.total_steps) and (stats := self._precision.take(step)) is not None:
            self.emit(stats)

    def _suspect(self) -> str:
        """What may make values that are not finite, besides the model: a plugin's loss, and the precision recipe."""
        label, name = self.engine.assembly.objective.label, self.config.recipe.name
        loss = f"; {label} may also be the cause" if label else ""
        recipe = "" if name == "bf16" else f"; recipe {name} may also be the cause: recipe=bf16 shows whether it is"
        return f"{loss}{recipe}"

    def _divergence(self, what: str, *, at_start: bool) -> str:
        saved, rate = self._saved_step, f"learning_rate (now {self.config.learning_rate:g})"
        if at_start and not self._started_at:
            # The others of several ranks would have to serve their shares of the weights.
            spoilt = not_finite(self.engine.parameters.base_tensors()) if self.leader.world == 1 else None
            if spoilt is not None:
                return (
                    f"{what}; nothing has been trained yet, and the model's {spoilt} has values that are not finite. "
                    f"Fix: download or copy the model again; if its files are finite, set a wider torch_dtype"
                    f"{self._suspect()}."
                )
            return (
                f"{what}; nothing has been trained yet. Fix: look for weights of the model that are not finite, "
                f"and for a torch_dtype that is too narrow for them{self._suspect()}."
            )
        if at_start:
            return (
                f"{what}, right after resuming: checkpoint-{saved} itself has diverged. Fix: name an earlier one with "
                f"resume_from_checkpoint=PATH, or start anew with resume_from_checkpoint=false, with a lower {rate}."
            )
        kept = "no checkpoint was saved before" if saved is None else f"checkpoint-{saved} is kept"
        return (
            f"{what}; {kept}. Fix: lower {rate}, lengthen the warm-up, or look at the data{self._suspect()}; "
            f"then run again"
            f"{', which starts anew' if saved is None else ', which resumes from there'}."
        )

    def _evaluate(self) -> None:
        """Evaluate if there is anything held out; raises `Interrupted` when a signal comes."""
        if self.evaluator is not None:
            self._evaluate_task(self.evaluator)
        if self.evaluation is None:
            return
        started = time.perf_counter()
        with self.leader.ordering(Order.EVALUATE):
            loss, label_tokens = self.engine.evaluate(self._evaluation_batches(self.evaluation))
        state = self.state
        if state.first_eval_loss is None:
            state.first_eval_loss = loss
        state.last_eval_loss, state.evaluated_step = loss, state.step
        if math.isfinite(loss) and (state.best_eval_loss is None or loss < state.best_eval_loss):
            state.best_eval_loss = loss
            if self.evaluator is None:
                state.best_step, self._best_is_new = state.step, self.config.load_best
        recent, state.recent_losses = state.recent_losses, []
        self.emit(
            EvalEnd(
                step=state.step,
                loss=loss,
                label_tokens=label_tokens,
                seconds=time.perf_counter() - started,
                gap=loss - sum(recent) / len(recent) if recent else None,
                figures=self.engine.evaluated,
            )
        )
        if not math.isfinite(loss):
            at_start = state.step == self._started_at
            raise DivergedError(self._divergence(f"step {state.step}: the eval loss is {loss}", at_start=at_start))
        self._clock.restart()

    def _evaluate_task(self, evaluator: Evaluator) -> None:
        """Let the task evaluate; raises `Interrupted` when a signal comes."""
        state = self.state
        with self.leader.ordering(Order.PLAY):
            self.engine.freshen()
            found = evaluator(state.step)
            if found is None:
                self.leader.hear_signals()
                raise Interrupted
        state.evaluated_step = state.step
        if isinstance(found, RolloutEval) and found.reward is not None:
            reward = state.last_reward = found.reward.mean
            state.first_reward = reward if state.first_reward is None else state.first_reward
            if state.best_reward is None or reward > state.best_reward:
                state.best_reward, state.best_step = reward, state.step
                self._best_is_new = self.config.load_best
        self.emit(found)
        self._clock.restart()

    def _sample(self) -> None:
        """Generate samples if there are prompts; raises `Interrupted` when a signal comes."""
        if self.sampler is None:
            return
        with self.leader.served(self.engine, Order.SAMPLE):
            self.engine.freshen()
            found = self.sampler(self.engine, self.state.step, lambda: self.signals.received is not None)
        if found is None:
            raise Interrupted
        if isinstance(found, Notice):
            self.sampler = None
        self.state.sampled_step = self.state.step
        self.emit(found)
        self._clock.restart()

    def _evaluation_batches(self, batches: Evaluation) -> Iterator[MicroBatch]:
        for number, batch in enumerate(self.leader.interruptible(batches), start=1):
            yield batch
            self.emit(Progress(task="evaluating", done=number, total=len(batches), unit="batches"))

    def _save(self, loader_state: Mapping[str, Any], *, last: bool, signalled: bool) -> None:
        asked, self._save_asked = self._save_asked, False
        best, self._best_is_new = self._best_is_new, False
        self._keep_best()
        if self._saved_step == self.state.step:
            return
        for event in self._sides.flush(self.state.step):
            self.emit(event)
        started = time.perf_counter()
        controlled = asked or bool(self.stop_reason)
        reason: Literal["schedule", "signal", "control", "end", "best"] = (
            "signal" if signalled else "end" if last else "control" if controlled else "best" if best else "schedule"
        )
        state = {
            **self.identity,
            "loop": asdict(self.state),
            "loader": dict(loader_state),
            "monitors": self.bus.state(),
        }
        progress = Mebibytes(self.emit, "saving a checkpoint")
        with self.leader.served(self.engine):
            tensors = self.engine.state()
            path = self.checkpoints.save(self.state.step, tensors=tensors, state=state, progress=progress.told)
        self._saved_step = self.state.step
        seconds = time.perf_counter() - started
        progress.over()
        self.emit(CheckpointSaved(step=self.state.step, path=str(path), seconds=seconds, reason=reason))
        self._clock.restart()

    def _keep_best(self) -> None:
        if self.config.load_best:
            self.checkpoints.kept_step = self.state.best_step

    def _obey(self, control: Control, event: Event) -> None:
        for answer in control.events:
            self.bus.emit(answer)
        why, scale = control.reason or "asked by a monitor", control.lr_scale
        if scale is not None and not (math.isfinite(scale) and scale >= 0):
            self.bus.emit(Notice(level="warning", message=f"learning rate × {scale}: not obeyed ({why})"))
            scale = None
        if scale is not None:
            first = self.state.step
            if isinstance(event, StepEnd):
                # On CUDA a step is reported after the next was launched, but for one before a checkpoint. The first
                # step of the change is the same in both cases, so that a checkpoint changes no rate.
                first = event.step + (self.engine.settings.device.type == "cuda")
            self.state.lr_changes = [*self.state.lr_changes, (scale, first, control.fade_steps)]
        self._save_asked |= control.save
        if control.stop:
            self.stop_reason = why
        fade = f" for {control.fade_steps} steps, blending back" if control.fade_steps else ""
        told = [
            *([f"learning rate × {scale:g}{fade}"] if scale is not None else []),
            *(["save now"] if control.save else []),
            *(["stop"] if control.stop else []),
        ]
        if told:
            self.bus.emit(Notice(level="info", message=f"{', '.join(told)}: {why}"))
