"""Which rank has finished no step for too long."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from surogate_core.mesh.lifeline import Pulse

CONNECTING = "NCCL_DEBUG=INFO shows how far NCCL gets, and NCCL_P2P_DISABLE=1 helps where peer access is broken"
SLOWER = 20
"""Times the median step after which a rank without a new step counts as silent."""


class Silence:
    """Watches the reports of the ranks. A rank may be silent before its first step and whenever it rests."""

    def __init__(self, seconds: float, ranks: int, *, first: int = 0):
        """`seconds`: the shortest silence that counts; 0 for no watch. `ranks`: those of this machine, from `first`."""
        self._seconds, self._first = seconds, first
        self._last: list[Pulse | None] = [None] * ranks
        self._advanced = [False] * ranks
        """Whether a rank has finished a step here. The first one compiles, and may begin at a resumed step."""
        self._steps: deque[float] = deque(maxlen=64)
        self._since = 0.0

    def forget(self, now: float) -> None:
        """Count from now: the supervisor was stopped, and perhaps the ranks too."""
        self._since = now
        self._last = [None] * len(self._last)

    def limit(self) -> float:
        """The longest silence that is allowed, in seconds; infinite before the second step."""
        return max(self._seconds, SLOWER * median(self._steps)) if self._seconds and self._steps else float("inf")

    def late(self, pulses: Sequence[Pulse], now: float) -> tuple[int, str] | None:
        """The number in `pulses` of the rank that is silent for too long, and the fact as a phrase; None if none is."""
        for rank, pulse in enumerate(pulses):
            last = self._last[rank]
            if last is not None and last.limit < 0 and pulse.limit < 0 and pulse.step > last.step:
                if self._advanced[rank]:
                    self._steps.append((pulse.at - last.at) / (pulse.step - last.step))
                self._advanced[rank] = True
            self._last[rank] = pulse
        late = [rank for rank, pulse in enumerate(pulses) if self._is_late(pulse, now)]
        if not late:
            return None
        rank = min(late, key=lambda rank: (pulses[rank].step, pulses[rank].at))
        pulse = pulses[rank]
        if pulse.limit > 0:
            return rank, f"has been connecting to the other ranks for {now - pulse.at:.0f} seconds. {CONNECTING}"
        ahead = [str(self._first + other) for other, p in enumerate(pulses) if p.step > pulse.step]
        where = f"; rank {', '.join(ahead)} had finished it" if ahead else ""
        return rank, f"has been in step {pulse.step + 1} for {now - pulse.at:.0f} seconds{where}"

    def _is_late(self, pulse: Pulse, now: float) -> bool:
        if not self._seconds or not pulse.limit:
            return False
        return now - max(pulse.at, self._since) > (pulse.limit if pulse.limit > 0 else self.limit())
