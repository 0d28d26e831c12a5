"""What runs on each machine, in an actor: the core's supervisor with this machine's share of the ranks.

The actor answers short questions. The supervisor has a thread of its own, and no rank ever waits for Ray.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surogate_core.plugin import SurogateError, atomic, launching
from surogate_launcher_ray.facts import Facts, installed_in
from surogate_launcher_ray.output import Output
from surogate_launcher_ray.sockets import free_port, interface_of

VERDICT_SECONDS = 60.0
"""The time in which the driver says which failure of all machines was the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a machine needs to start its share of the ranks."""

    job: Mapping[str, Any]
    """As `surogate_core.launch.local.sent` makes it; the path is that of the machine."""
    world: int
    first: int
    """The first rank of this machine."""
    here: int
    """Number of ranks on this machine."""
    address: str
    """Where rank 0 listens."""
    port: int
    logs: str
    silence: float
    host: str
    environment: Mapping[str, str]
    """Variables of the driver that the ranks get too."""
    on_gpus: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedMachine:
    """A machine that is about to start its ranks."""

    wrong: str = ""
    """Why it cannot."""
    port: int = 0
    """A free port of it."""
    shares: bool = False
    """Whether it sees the files that the driver writes to the output directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """What has happened on a machine since the last report."""

    output: Sequence[tuple[int, bytes]]
    """(1 or 2, what rank 0 has printed there)."""
    failures: Sequence[launching.Failure] = ()
    """Failures of its ranks; their `at` is the number of seconds before this report."""
    result: int | launching.Failure | None = None
    """How the share of this machine has ended; None while it runs."""


class FailuresElsewhere(launching.Elsewhere):
    """Failures of other machines, as the driver reports them."""

    def __init__(self) -> None:
        self.failures: Sequence[launching.Failure] = ()
        """The failures of this machine, which wait for the verdict."""
        self._first: launching.Failure | None = None
        self._known = threading.Event()

    def failure(self) -> launching.Failure | None:
        """As `Elsewhere.failure`."""
        return self._first

    def first(self, found: Sequence[launching.Failure]) -> launching.Failure:
        """As `Elsewhere.first`: waits for the driver."""
        self.failures = found
        self._known.wait(VERDICT_SECONDS)
        return self._first or launching.first_of(found)

    def set(self, first: launching.Failure | None) -> None:
        """The driver's word; None: it does not wait for more failures."""
        self._first = first
        self._known.set()


class Node:
    """The supervisor of one machine; its methods are called by the driver, one at a time, and return soon."""

    def __init__(self, node: str, address: str):
        # Ctrl-C is the driver's, and reaches ranks through `receive` only.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._node, self._address = node, address
        self._signals, self._verdict, self._output = launching.Forwarding(), FailuresElsewhere(), Output()
        self._result: int | launching.Failure | None = None
        self._thread: threading.Thread | None = None

    def facts(self, policy: launching.PluginPolicy | None) -> Facts:
        """This machine, with what is installed on it. Raises `PluginError` or `UserError` as loading plugins does."""
        from surogate_core.plugin import import_policy, load_plugins

        return Facts(
            node=self._node,
            address=self._address,
            host=socket.gethostname(),
            installed=installed_in(load_plugins(import_policy(policy))),
            gpus=launching.visible(os.environ),
        )

    def prepare(self, directory: str, shared: str, content: str) -> PreparedMachine:
        """Enter the directory of the run.

        `shared`: a file of the logs' directory, which has the content here too if this machine shares the disk.
        Otherwise the directory is made here.
        """
        try:
            os.chdir(directory)
        except OSError as error:
            fix = "Fix: start the run in a directory that all machines have."
            return PreparedMachine(wrong=f"cannot enter {directory} ({error.strerror}). {fix}")
        try:
            found = Path(shared).read_text(encoding="utf-8")
        except OSError:
            found = ""
        try:
            if found != content:
                atomic.ensure_writable(Path(shared).parent, key="output_dir")
            return PreparedMachine(port=free_port(self._address), shares=found == content)
        except SurogateError as error:
            return PreparedMachine(wrong=f"has no place for logs: {error}")
        except OSError as error:
            fix = "Fix: `ray start --node-ip-address=` with one of its own."
            return PreparedMachine(
                wrong=f"cannot listen at {self._address}, its address in Ray ({error.strerror}). {fix}"
            )

    def start(self, start: Start) -> None:
        """Start the ranks."""
        self._thread = threading.Thread(target=self._run, args=(start,), name="supervisor")
        self._thread.start()

    def look(self) -> MachineReport:
        """What has happened."""
        result, now = self._result, time.monotonic()
        over = self._thread is not None and not self._thread.is_alive()
        failures = [replace(failure, at=now - failure.at) for failure in self._verdict.failures]
        return MachineReport(output=self._output.take(), failures=failures, result=result if over else None)

    def receive(self, number: int) -> None:
        """Pass a signal of the driver on to the first rank here."""
        self._signals.receive(number)

    def end(self, first: launching.Failure) -> None:
        """End the ranks here after the run's first failure; rank 0 ends the record before."""
        self._verdict.set(first)

    def stop(self) -> None:
        """Kill the ranks here."""
        self._signals.at_once = True
        self._verdict.set(None)

    def _run(self, start: Start) -> None:
        # The ranks inherit the mask of this thread, and Ray blocks signals in some of its processes.
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        try:
            with self._output as descriptors:
                self._result = launching.supervise(
                    plan(start, self._address, descriptors), self._signals, self._verdict
                )
        except SurogateError as error:
            self._result = self._failed(start, str(error), error)
        except BaseException as error:
            self._result = self._failed(start, f"a bug of its supervisor: {type(error).__name__}: {error}", None)
        if isinstance(self._result, launching.Failure) and not self._verdict.failures:
            self._verdict.failures = [self._result]

    @staticmethod
    def _failed(start: Start, message: str, error: SurogateError | None) -> launching.Failure:
        kind = {} if error is None else {"kind": type(error), "code": error.exit_code}
        values: dict[str, Any] = {"code": 1, **kind}
        return launching.Failure(
            rank=start.first, message=message, at=time.monotonic(), may_pass=error is None, host=start.host, **values
        )


def plan(start: Start, address: str, descriptors: tuple[int, int] | None) -> launching.LaunchPlan:
    """The supervisor's plan for this machine, which has the address. `descriptors`: take what rank 0 prints."""
    # Ray sets it to the CPUs of the actor, which only watches.
    before = {name: value for name, value in os.environ.items() if name != launching.THREADS}
    before |= start.environment
    before |= {"MASTER_ADDR": start.address, "MASTER_PORT": str(start.port)}
    if start.here < start.world and (interface := interface_of(address)):
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            before.setdefault(name, interface)
    gpus = launching.visible(os.environ) if start.on_gpus else []
    return launching.LaunchPlan(
        job={**start.job, "path": sys.path},
        environments=[
            launching.environment(before, start.first + number, start.world, gpus, first=start.first, here=start.here)
            for number in range(start.here)
        ],
        first=start.first,
        host=start.host,
        output=descriptors,
        logs=Path(start.logs),
        silence=start.silence,
    )
