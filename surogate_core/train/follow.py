"""The loop of every rank but rank 0: it does what rank 0 orders, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from surogate_core.bundles import Evaluation, Steps, Stopped
from surogate_core.config.schema import RunConfig
from surogate_core.engine.engine import Engine, StepResult
from surogate_core.mesh.mesh import Mesh
from surogate_core.train.checkpoint import Checkpoint
from surogate_core.train.flops import ModelFlops
from surogate_core.train.leading import Interrupted, Led, Order
from surogate_core.train.measures import peak_memory, settled_objects
from surogate_core.train.prefetch import Batches, Made
from surogate_core.train.restore import load_tensors
from surogate_core.train.signals import StopSignals


class Follower:
    """Trains this rank's share of every step."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        loader: Steps,
        evaluation: Evaluation | None,
        checkpoints: Path,
        *,
        mesh: Mesh,
        signals: StopSignals,
        checkpoint: Checkpoint | None = None,
        evaluator: Callable[[int], object] | None = None,
    ):
        """`loader` is where `checkpoint` left it. `checkpoints`: the directory in which rank 0 saves, which
        another machine may have of its own. `evaluator`: the
        evaluation that the task does itself, as the loop has it.
        """
        self._engine, self._loader, self._evaluation, self._checkpoints = engine, loader, evaluation, checkpoints
        self._ranks = Led(mesh, signals)
        self._work = ModelFlops.of(engine.model, frozen=config.lora)
        self._evaluator = evaluator
        self._made: Made | None = None
        """The next step, which all ranks have made together."""
        self._step = 0
        if checkpoint is not None:
            load_tensors(engine, checkpoint)
            self._step = checkpoint.step

    def run(self) -> None:
        """Follow rank 0's orders to the last one."""
        batches = Batches.of(self._engine, self._loader, self._work)
        try:
            with settled_objects() if self._engine.settings.device.type == "cuda" else nullcontext():
                self._follow(batches)
        finally:
            batches.close()

    def _follow(self, batches: Batches) -> None:
        launched: StepResult | None = None
        while True:
            order, value = self._ranks.order()
            if order == Order.END:
                if launched is not None:
                    launched.read()  # rank 0 may end with an error while a step is on its way
                return
            if order == Order.STEP:
                self._ranks.step_begins()
                made, self._made = self._made or batches.take(), None
                previous, launched = launched, self._engine.train_step(made.batches, step=self._step, lr=value)
                self._step += 1
                if previous is not None:
                    previous.read()  # stay at most one step ahead of the device, as rank 0 does
                self._ranks.step_ends(self._step)
            elif order == Order.FIGURES:
                self._ranks.figures(peak_memory(self._engine), self._engine.own_work.mean())
            elif order == Order.MAKE:
                self._ranks.rests()
                self._make(batches)
            else:
                self._ranks.rests()
                self._do(order, value)

    def _make(self, batches: Batches) -> None:
        """Take part in making the next step."""
        self._engine.freshen()
        try:
            self._made = batches.take()
        except Stopped:
            self._ranks.hear_signals()

    def _do(self, order: Order, value: float) -> None:
        if order == Order.EVALUATE:
            assert self._evaluation is not None
            try:
                self._engine.evaluate(self._ranks.interruptible(self._evaluation))
            except Interrupted:
                return
        elif order == Order.PLAY:
            assert self._evaluator is not None
            self._engine.freshen()
            if self._evaluator(self._step) is None:
                self._ranks.hear_signals()
        elif order == Order.SERVE:
            self._engine.serve()
        elif order == Order.SAMPLE:
            self._engine.freshen()
            self._engine.serve()
        elif order == Order.LOAD:
            self._ranks.load(self._engine, self._checkpoints / f"checkpoint-{int(value)}", lambda event: None)
