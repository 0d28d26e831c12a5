"""Jobs for launchers that train nothing: what their ranks do is in a function of this module. No torch, so they start
fast."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError
from surogate_core.mesh.lifeline import PeerFailed, Tied
from surogate_core.train.signals import StopSignals

FOREVER = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class RankJob:
    """Every rank writes its pid to ``pid-R`` and calls the function `does`."""

    does: str
    directory: str
    gpus: int = 2
    resumes: bool = False
    task: str = "sft"

    @property
    def config(self) -> Mapping[str, Any]:
        return {"gpus": self.gpus, "device": "cpu", "output_dir": self.directory, "checkpoint_dir": None}

    def to_json(self, *, resume: bool = False, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return {**asdict(self), "resumes": resume}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> RankJob:
        return cls(**values)

    @property
    def place(self) -> Path:
        return Path(self.directory)

    def run(self, *, rank: int = 0, world: int = 1, registry: Any = None, mesh: Any = None) -> int:
        (self.place / f"pid-{rank}").write_text(str(os.getpid()))
        while len(list(self.place.glob("pid-*"))) < world:
            time.sleep(0.01)
        return int(globals()[self.does](self, rank, mesh) or 0)


def lifeline_of(mesh: Any) -> Tied:
    """The lifeline, without the store, whose import takes seconds."""
    found = mesh.args[-1]
    assert isinstance(found, Tied)
    return found


def wait_as_rank_0(job: RankJob, mesh: Any) -> None:
    """Wait as for a collective, and end as a run does."""
    try:
        time.sleep(FOREVER)
    except PeerFailed as error:
        (job.place / "record").write_text(str(lifeline_of(mesh).cause_of(error)))
        raise


def is_killed(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        wait_as_rank_0(job, mesh)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (job.place / "pid-child").write_text(str(child.pid))
    os.write(1, b"the last words of rank 1\n")
    os.kill(os.getpid(), signal.SIGKILL)


def raises(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        wait_as_rank_0(job, mesh)
    os.write(2, b"NCCL WARN about something\n")
    raise RuntimeError("no such luck")


def refuses(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        wait_as_rank_0(job, mesh)
    raise UserError("micro_batches: 3 does not divide 8.")


def all_refuse(job: RankJob, rank: int, mesh: Any) -> None:
    raise UserError("micro_batches: 3 does not divide 8.")


def is_stopped(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        wait_as_rank_0(job, mesh)
    os.kill(os.getpid(), signal.SIGSTOP)


def rank_0_is_stopped(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        wait_as_rank_0(job, mesh)
    time.sleep(FOREVER)


def falls_silent(job: RankJob, rank: int, mesh: Any) -> None:
    for step in range(1, 20 if rank == 0 else 12):
        lifeline_of(mesh).beat(step)
        time.sleep(0.05)
    if rank == 0:
        # What may take any time is no silence.
        lifeline_of(mesh).rest()
        wait_as_rank_0(job, mesh)
    waits_in_vain()


def waits_in_vain() -> None:
    time.sleep(FOREVER)


def is_stuck(job: RankJob, rank: int, mesh: Any) -> None:
    """Rank 0 does not return to Python, as in a collective of a library."""
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    lifeline_of(mesh).on_failure(lambda text: (job.place / "record").write_text(text))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    time.sleep(FOREVER)


def agrees_to_stop(job: RankJob, rank: int, mesh: Any) -> int:
    """Rank 0 receives the signal, and all ranks stop."""
    with StopSignals() as signals:
        (job.place / f"ready-{rank}").touch()
        while not (job.place / "stop").exists():
            if signals.received is not None:
                (job.place / "stop").touch()
            time.sleep(0.01)
    return 128 + signal.SIGTERM


def ignores_signals(job: RankJob, rank: int, mesh: Any) -> None:
    with StopSignals():
        (job.place / f"ready-{rank}").touch()
        time.sleep(FOREVER)


def fails_at_first(job: RankJob, rank: int, mesh: Any) -> None:
    if rank == 0:
        wait_as_rank_0(job, mesh) if not job.resumes else (job.place / "resumed").touch()
    elif not job.resumes:
        (job.place / "checkpoint-3").mkdir()
        (job.place / "checkpoint-3" / "manifest.json").touch()
        os.kill(os.getpid(), signal.SIGKILL)


def leaves_a_thread(job: RankJob, rank: int, mesh: Any) -> int:
    """The work ends, but the process does not."""
    if rank == 1:
        threading.Thread(target=time.sleep, args=(FOREVER,)).start()
    return 3 if rank == 0 else 0


def outlives_its_error(job: RankJob, rank: int, mesh: Any) -> None:
    """Rank 0 has an error after some steps, but a thread of a library keeps its process."""
    _takes_steps(mesh)
    if rank == 0:
        _outlive_soon(job)
        raise RuntimeError("the error of rank 0")
    time.sleep(FOREVER)


def searches_after_its_error(job: RankJob, rank: int, mesh: Any) -> None:
    """As a run does after CUDA is out of memory: it takes a while until rank 1 can propose what fits."""
    _takes_steps(mesh)
    if rank == 0:
        wait_as_rank_0(job, mesh)
    error = UserError("the error of rank 1.")
    lifeline_of(mesh).cause_of(error)
    time.sleep(2.5)
    raise error


def never_reports_its_error(job: RankJob, rank: int, mesh: Any) -> None:
    _takes_steps(mesh)
    if rank == 0:
        wait_as_rank_0(job, mesh)
    lifeline_of(mesh).cause_of(UserError("the error of rank 1."))
    waits_in_vain()


def cannot_end(job: RankJob, rank: int, mesh: Any) -> None:
    """Rank 0 hears of a failure, but a monitor keeps it."""
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)

    def end(text: str) -> None:
        _outlive_soon(job)
        for ready in range(2):
            (job.place / f"ready-{ready}").touch()
        time.sleep(FOREVER)

    lifeline_of(mesh).on_failure(end)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    with StopSignals():
        time.sleep(FOREVER)


def _takes_steps(mesh: Any) -> None:
    for step in range(1, 8):
        lifeline_of(mesh).beat(step)
        time.sleep(0.08)


def _outlive_soon(job: RankJob) -> None:
    """A thread that keeps the process, and leaves a file if the process lives for long."""

    def wait() -> None:
        time.sleep(20)
        (job.place / "outlived").touch()

    threading.Thread(target=wait).start()


def runs(job: RankJob, rank: int, mesh: Any) -> None:
    (job.place / f"ready-{rank}").touch()
    time.sleep(FOREVER)


def dies_in_a_collective(job: RankJob, rank: int, mesh: Any) -> None:
    import torch

    ranks = mesh()
    assert ranks.gather(rank) == [0, 1]
    ranks.connect(torch.device("cpu"))
    assert ranks.largest([rank, -rank]) == [1.0, 0.0]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        ranks.largest([0.0])
    except (RuntimeError, PeerFailed) as error:
        (job.place / "record").write_text(str(ranks.lifeline.cause_of(error)))
        raise
