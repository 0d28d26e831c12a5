"""Ranks that no supervisor of ours watches, as under torchrun and srun: rank 0 hears which rank failed, and shows it.

The ranks have a store. A rank that fails leaves its message there and calls the run off, for the others that wait for
it by the store. Its end breaks their collectives.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress

from torch.distributed import DistBackendError, DistError

from surogate_core.errors import SurogateError, printable
from surogate_core.mesh.lifeline import Lifeline, RankError
from surogate_core.mesh.mesh import Mesh

_FAILURE = "the failure of a rank"
PATIENCE = 1.0
"""Seconds in which rank 0 waits for the message of the rank whose end broke a collective."""
RANK_0_IS_GONE = "rank 0 has ended before the first step. Its own output says why."
A_RANK_IS_GONE = "another rank has ended or cannot be reached. Its own output, or that of its launcher, says why."


def announce(mesh: Mesh, error: BaseException) -> None:
    """Leave an error of this rank to rank 0."""
    if not _alone(mesh):
        return
    assert mesh.store is not None
    message = str(error) if isinstance(error, SurogateError) else f"{type(error).__name__}: {error}"
    code = error.exit_code if isinstance(error, SurogateError) else 1
    with suppress(DistError):
        # The first failure is the cause.
        mesh.store.compare_set(_FAILURE, "", json.dumps([mesh.rank, message, code]))
        mesh.call_off()


def failure_of_another(mesh: Mesh) -> RankError | None:
    """On rank 0, the failure that another rank left; None if there is none."""
    if not mesh.leads or not _alone(mesh):
        return None
    assert mesh.store is not None
    if not mesh.store.check([_FAILURE]):
        return None
    rank, message, code = json.loads(mesh.store.get(_FAILURE))
    return RankError(f"rank {rank}: {message}", exit_code=code) if rank else None


def cause_of(mesh: Mesh, error: BaseException) -> BaseException:
    """The error to show for an error of this rank: that of another rank if it broke an exchange between them."""
    if not _alone(mesh) or not _of_an_exchange(error):
        return error
    gone = RankError(A_RANK_IS_GONE)
    if isinstance(error, DistBackendError):
        # NCCL's own faults, such as too little memory, have the same type as the end of another rank.
        gone = RankError(f"{A_RANK_IS_GONE} The error of NCCL on rank {mesh.rank}: {_last_line(error)}")
    elif not mesh.leads and mesh.fabric is None:
        gone = RankError(RANK_0_IS_GONE)
    if not mesh.leads:
        return gone
    end = time.monotonic() + PATIENCE
    while (found := failure_of_another(mesh)) is None and time.monotonic() < end:
        time.sleep(0.05)
    return found or gone


def _alone(mesh: Mesh) -> bool:
    """Whether there are several ranks, and no supervisor."""
    return type(mesh.lifeline) is Lifeline and mesh.store is not None


def _last_line(error: BaseException) -> str:
    """The line in which NCCL gives the cause."""
    return next((printable(line.strip()) for line in reversed(str(error).splitlines()) if line.strip()), "unknown")


def _of_an_exchange(error: BaseException) -> bool:
    """gloo has no error of its own."""
    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo/transport" in str(error))
