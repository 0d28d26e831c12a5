"""The head of the cluster. Without it, most of Ray's calls do not return, and after a minute Ray ends the process."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from surogate_core.plugin import launching

PATIENCE = 60.0
"""Seconds after which Ray ends a process that does not reach the head, unless `PATIENCE_NAME` says otherwise."""
PATIENCE_NAME = "RAY_gcs_rpc_server_reconnect_timeout_s"
LOOK = 1.0
"""Seconds between looks."""
FEWEST = 5
"""Looks in vain before the head counts as lost: this process may have been stopped between two of them."""
ANSWER_SECONDS = 1.0
"""The time that a look takes at most."""


class HeadProbe:
    """Looks whether the head takes connections, which needs no call of Ray."""

    def __init__(self, address: str, limit: float):
        """`limit`: seconds without an answer after which the head is lost."""
        self._address, self._limit = address, limit
        host, _, port = address.rpartition(":")
        self._place = (host.strip("[]"), int(port))
        self._looked = 0.0
        self._silent_since: float | None = None
        self._in_vain = 0

    @classmethod
    def of(cls, ray: Any, environment: Mapping[str, str]) -> HeadProbe:
        """That of the cluster to which Ray is connected."""
        try:
            patience = float(environment.get(PATIENCE_NAME, ""))
        except ValueError:
            patience = PATIENCE
        # Half, so that the command ends the ranks and names the cause before Ray aborts this process. Not less,
        # because a head that keeps its state may come back.
        return cls(ray.get_runtime_context().gcs_address, patience / 2)

    def look(self) -> launching.Failure | None:
        """The failure of the run if the head is lost. Soon over, and may be called often."""
        now = time.monotonic()
        if now - self._looked > LOOK:
            self._looked = now
            self.answers()
        if self._silent_since is None or self._in_vain < FEWEST or now - self._silent_since <= self._limit:
            return None
        return self._failure(now - self._silent_since)

    def answers(self) -> bool:
        """Whether the head takes a connection now."""
        now = time.monotonic()
        try:
            socket.create_connection(self._place, ANSWER_SECONDS).close()
        except OSError:
            self._silent_since = now if self._silent_since is None else self._silent_since
            self._in_vain += 1
            return False
        self._silent_since, self._in_vain = None, 0
        return True

    def wait(self, check: Callable[[], None] = lambda: None) -> launching.Failure | None:
        """Wait until the head answers, which is at once as a rule, or is lost: its failure. `check` may raise."""
        while not self.answers():
            if (failure := self.look()) is not None:
                return failure
            check()
            time.sleep(LOOK / 2)
        return None

    def _failure(self, seconds: float) -> launching.Failure:
        message = (
            f"the head of the Ray cluster, {self._address}, has not answered for {seconds:.0f} seconds, and without it "
            "Ray ends on all machines."
        )
        advice = (
            "Fix: start Ray again on all machines, then run the same command, which resumes the last checkpoint. "
            "max_restarts does not help."
        )
        return launching.Failure(rank=0, message=message, code=1, at=0.0, may_pass=False, advice=advice)
