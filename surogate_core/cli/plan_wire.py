"""The time that several GPUs spend on sending tensors to each other, for `surogate plan`.

The shares of NVLink's rate, what computation hides, and the wait are those of H200s: for seven trainings on two of them
the estimated share of the speed of two single GPUs is within one percentage point (tests/cli/test_plan_wire.py). With
the measured speed of one GPU they also fit four H100s (tests/cli/test_plan_cluster.py). GPUs without NVLink have not
been measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from surogate_core.cli.gpus import Gpu

if TYPE_CHECKING:
    from surogate_core.engine.ranks.shares import Sent

LINKED: Mapping[str, float] = {"exchange": 0.51, "gather": 0.65}
"""Share of NVLink's rate in one direction that collectives of a layer's size reach."""
UNLINKED = 0.5
"""Share of the bus's rate that they reach without NVLink, assumed."""
CALL = 40e-6
"""Seconds of a small collective."""
HIDDEN = 0.78
"""Share of the time of transfers that the computation beside them hides, where copy engines move the data."""
HIDDEN_NCCL = 0.41
"""The same where NCCL's kernels move it, which take multiprocessors from the computation: 0.37 at level 1 and 0.46 at
level 3 for 8B with one micro-step on two H200s (benchmarks/evidence/several-gpus.md)."""
WAIT = 2e-3
"""Seconds of a step in which a GPU waits for the slowest one and for the host's exchange."""
FORWARD = 1 / 3
"""Share of a micro-step's time that its forward takes."""


class Timed(Protocol):
    """Tells how long transfers take."""

    def seconds(self, sent: Sent) -> float:
        """Time of all calls of a step, with nothing beside them."""
        ...

    def hidden(self, sent: Sent) -> float:
        """Share of it that computation beside it hides at most."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRates:
    """How fast one GPU exchanges tensors with the others."""

    exchange: float
    """Bytes a second in one direction."""
    gather: float
    copies: bool = True
    """Whether copy engines move the data, and not NCCL."""

    @classmethod
    def of(cls, gpu: Gpu | None, *, bus: float, copies: bool = True) -> WireRates:
        """The rates of a GPU of the table; `bus`: bytes a second of the bus where it has no NVLink, or is not known."""
        if gpu is None or gpu.link is None:
            return cls(exchange=UNLINKED * bus, gather=UNLINKED * bus, copies=copies)
        return cls(exchange=LINKED["exchange"] * gpu.link, gather=LINKED["gather"] * gpu.link, copies=copies)

    def seconds(self, sent: Sent) -> float:
        """Time of all calls of a step, with nothing beside them."""
        return sent.nbytes / (self.exchange if sent.how == "exchange" else self.gather) + CALL * sent.calls

    def hidden(self, sent: Sent) -> float:
        """As `Timed.hidden`."""
        return HIDDEN if self.copies else HIDDEN_NCCL


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """The transfers of an optimizer step."""

    nbytes: int
    """Bytes that each GPU sends, and as many that it receives."""
    seconds: float
    """Their time, with nothing beside them."""
    hidden: float
    """How much of it computation hides."""
    wait: float
    """The time in which a GPU waits for the others."""

    @property
    def exposed(self) -> float:
        """The time that the other GPUs add to a step."""
        return self.seconds - self.hidden + self.wait


def wire_of(sent: Sequence[Sent], rates: Timed, *, computing: float, micro_steps: int) -> Wire:
    """The transfers beside micro-steps that take `computing` seconds each."""
    windows = {"forward": FORWARD, "backward": 1 - FORWARD, "both": 1.0, "": 0.0}
    hideable = hidden = 0.0
    for one in sent:
        fits = min(rates.seconds(one), windows[one.beside] * one.micro_steps * computing)
        hideable += fits
        hidden += rates.hidden(one) * fits
    room = min(micro_steps * computing / hideable, 1.0) if hideable else 0.0
    return Wire(
        nbytes=sum(one.nbytes for one in sent),
        seconds=sum(map(rates.seconds, sent)),
        hidden=hidden * room,
        wait=WAIT if sent else 0.0,
    )
