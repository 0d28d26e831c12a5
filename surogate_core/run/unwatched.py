"""Ranks that no supervisor of ours watches, as under torchrun and srun: before the first step, each hears of a failure.

The ranks wait for one another by the mesh's store until they have collectives. A rank that fails leaves its message in
the store and calls the run off, so that the others end too, and rank 0 shows the message and records it.
"""

from __future__ import annotations

import json
from contextlib import suppress

from torch.distributed import DistError

from surogate_core.errors import SurogateError
from surogate_core.mesh.lifeline import Lifeline, RankError
from surogate_core.mesh.mesh import Mesh

_FAILURE = "the failure of a rank"
LOST = "rank 0 has ended before the first step. Its own output says why."


def announce(mesh: Mesh, error: BaseException) -> None:
    """Call the run off because of an error of this rank, which rank 0 then knows."""
    if not _waits(mesh):
        return
    assert mesh.store is not None
    message = str(error) if isinstance(error, SurogateError) else f"{type(error).__name__}: {error}"
    code = error.exit_code if isinstance(error, SurogateError) else 1
    with suppress(DistError):
        # The first failure is the cause.
        mesh.store.compare_set(_FAILURE, "", json.dumps([mesh.rank, message, code]))
        mesh.call_off()


def failure_of_another(mesh: Mesh) -> RankError | None:
    """On rank 0, the failure because of which the run was called off; None if no rank failed."""
    if not mesh.leads or not _waits(mesh):
        return None
    assert mesh.store is not None
    if not mesh.store.check([_FAILURE]):
        return None
    rank, message, code = json.loads(mesh.store.get(_FAILURE))
    return RankError(f"rank {rank}: {message}", exit_code=code)


def without_rank_0(mesh: Mesh, error: BaseException) -> BaseException:
    """The error to show: rank 0 keeps the store, so without it the other ranks get errors of the network."""
    return RankError(LOST) if isinstance(error, DistError) and not mesh.leads and _waits(mesh) else error


def _waits(mesh: Mesh) -> bool:
    """Whether the ranks have a store and nothing else yet, and no supervisor."""
    return type(mesh.lifeline) is Lifeline and mesh.store is not None and mesh.fabric is None
