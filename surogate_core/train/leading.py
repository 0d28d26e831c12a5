"""Rank 0 leads: it decides what a run does next, and the other ranks do the same.

An order is one exchange on the host before each piece of work. In it the other ranks report the signals that reached
them, so a signal to any rank stops all ranks after the same step.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Stopped
from surogate_core.engine.engine import Engine
from surogate_core.errors import SurogateError
from surogate_core.events import Progress
from surogate_core.mesh.mesh import Mesh
from surogate_core.train.at_hand import at_hand
from surogate_core.train.checkpoint import CheckpointDir
from surogate_core.train.restore import load_tensors
from surogate_core.train.signals import StopSignals

_NOTHING = -math.inf


class Order(IntEnum):
    """What all ranks do next; some have a number."""

    END = 0
    """Leave the loop."""
    STEP = 1
    """Take an optimizer step with this learning rate."""
    EVALUATE = 2
    """Evaluate."""
    SERVE = 3
    """Take part in what rank 0 reads from the engine while it writes files."""
    LOAD = 4
    """Load the tensors of the checkpoint of this step."""
    FIGURES = 5
    """Exchange the figures of the ranks."""
    SAMPLE = 6
    """Take part in what rank 0 reads from the engine while it generates samples."""
    MAKE = 7
    """Make the next step together, by sampling from the model."""
    PLAY = 8
    """Do the evaluation of the task together."""


class Interrupted(Exception):  # noqa: N818
    """A signal came during an evaluation."""


class Ranks:
    """The exchanges between the ranks of a run on the host. One rank exchanges nothing."""

    def __init__(self, mesh: Mesh, signals: StopSignals):
        self._mesh, self._signals = mesh, signals
        self.world = mesh.world
        self._steps, self._rests = 0, True

    def interruptible(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The micro-batches of an evaluation, all of which every rank goes through.

        Raises `Interrupted` on all ranks at the same one if a signal reached any of them.
        """
        for number, batch in enumerate(batches):
            # The ranks run `world` of them at a time.
            if number % self.world == 0 and self._agree()[1]:
                raise Interrupted
            yield batch

    def figures(self, peak_memory: int, work: float | None) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """This rank's peak memory in bytes and the mean seconds of its work, exchanged for those of all ranks.

        The second is empty unless all ranks have measured it.
        """
        mine = [_NOTHING] * (2 * self.world)
        mine[self._mesh.rank] = float(peak_memory)
        mine[self.world + self._mesh.rank] = _NOTHING if work is None else work
        found, _ = self._agree(*mine)
        seconds = tuple(found[self.world :])
        return tuple(int(n) for n in found[: self.world]), seconds if _NOTHING not in seconds else ()

    def step_ends(self, step: int) -> None:
        """Report the number of finished steps to the supervisor."""
        self._mesh.lifeline.beat(step)
        self._steps = step

    def step_begins(self) -> None:
        """Report to the supervisor that a step begins, if this rank did other work before."""
        if self._rests:
            self._mesh.lifeline.beat(self._steps)
            self._rests = False

    def rests(self) -> None:
        """Report to the supervisor that the work until the next step may take any time."""
        self._mesh.lifeline.rest()
        self._rests = True

    def load(self, engine: Engine, path: Path, show: Callable[[Progress], object]) -> None:
        """Load the tensors of a checkpoint that rank 0 has verified, on all ranks. `path`: where this rank has it."""
        here = at_hand(self._mesh, path, path.parent, show=show)
        try:
            load_tensors(engine, CheckpointDir.load(here.path, digests=False))
            here.release(self._mesh)
        finally:
            here.remove()

    def hear_signals(self) -> None:
        """All ranks learn of a signal to any of them."""
        self._agree()

    def _agree(self, *values: float) -> tuple[list[float], bool]:
        """The largest of the ranks' values, and whether a signal had reached any rank.

        Every rank gets the same answer, also if a signal reaches this one during the exchange.
        """
        received = self._signals.received
        if self._mesh.fabric is None:
            return list(values), received is not None
        *largest, number = self._mesh.largest([*values, _NOTHING if received is None else float(received)])
        if number > 0 and self._signals.received is None:
            self._signals.received = signal.Signals(int(number))
        return largest, number > 0


class Leader(Ranks):
    """Rank 0."""

    def __init__(self, mesh: Mesh, signals: StopSignals):
        super().__init__(mesh, signals)
        self._waited_for = self.world > 1
        """Whether the other ranks wait for an order. After an error in their work they may be anywhere."""

    @contextmanager
    def ordering(self, order: Order, value: float = 0.0) -> Iterator[None]:
        """Order the work that is done inside."""
        if order == Order.STEP:
            self.step_begins()
        elif order != Order.FIGURES:
            self.rests()
        if self.world == 1:
            yield
            return
        self._agree(float(order), value)
        self._waited_for = False
        try:
            yield
        except (Interrupted, Stopped):
            self._waited_for = True
            raise
        self._waited_for = True

    @contextmanager
    def served(self, engine: Engine, order: Order = Order.SERVE) -> Iterator[None]:
        """While rank 0 does the work of an order inside, the other ranks give it what it reads from the engine."""
        if self.world == 1:
            self.rests()
            yield
            return
        failed: Exception | None = None
        with self.ordering(order):
            try:
                yield
            except (SurogateError, OSError) as error:  # of the disk: the other ranks are still there
                failed = error
            engine.dismiss()
        if failed is not None:
            raise failed

    def end(self) -> None:
        """Let the other ranks leave their loops, if they wait for an order."""
        if self._waited_for:
            self._waited_for = False
            self._agree(float(Order.END), 0.0)


class Led(Ranks):
    """Every other rank."""

    def order(self) -> tuple[Order, float]:
        """The next order of rank 0, and its number."""
        (order, value), _ = self._agree(_NOTHING, _NOTHING)
        return Order(int(order)), value
