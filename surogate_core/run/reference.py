"""The reference of preference training: log-probabilities under the model before its first step, computed once.

They are made by the run's own forward and kept in the data cache, so the reference needs no second model and no forward
in each step, and is right for every start: all weights, new adapters, adapters that are trained further, and adapters
that begin with the rounding errors of the base.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from surogate_core.bundles.options import essential_values
from surogate_core.data.cache import DataCache, digest_of
from surogate_core.data.referenced import ReferencedTask, References
from surogate_core.events import Progress
from surogate_core.files import atomic
from surogate_core.files.paths import cache_root
from surogate_core.setup.task_spec import named_offers
from surogate_core.train.loop import most_steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from surogate_core.batch import MicroBatch
    from surogate_core.config.schema import RunConfig
    from surogate_core.data.shards import PackedRows
    from surogate_core.engine.engine import Engine
    from surogate_core.plugins.registry import Registry

VERSION = 1
"""Incremented when the values or their file change."""
TASK = "reference log-probabilities"

_PROGRESS_SECONDS, _SAVE_SECONDS = 0.2, 5.0
_STATE, _VALUES = "state.json", "logprobs"


def policy_of(
    identity: Mapping[str, Any], config: RunConfig, registry: Registry, files: Mapping[str, str]
) -> dict[str, Any]:
    """What determines the weights before the first step, for the cache: runs that differ in other keys share values.

    `identity`: the ``essential`` facts of `identity_of`. `files`: digests of the base's weight files.
    """
    options = (offer.options_of(config) for offer in named_offers(config, registry))
    of_training = {"objective", "optimizer"}.union(*map(essential_values, options))
    return {**{key: value for key, value in identity.items() if key not in of_training}, "files": dict(files)}


def add_references(
    config: RunConfig,
    engine: Engine,
    task: ReferencedTask,
    *,
    policy: Mapping[str, Any],
    show: Callable[[Progress], None],
) -> None:
    """Give the task the log-probabilities of the rows that the run reads, from the cache if they are there.

    The engine has the weights from before the first step. `policy`: JSON values that identify these weights. All ranks
    call it.
    """
    steps = most_steps(config, task.steps())
    found = [_Reader(config, engine, task, rows, wanted, show).read(policy) for rows, wanted in task.referenced(steps)]
    task.refer(found)


class _Reader:
    """The log-probabilities of some of the packed rows."""

    def __init__(
        self,
        config: RunConfig,
        engine: Engine,
        task: ReferencedTask,
        rows: PackedRows,
        wanted_R: NDArray[np.int64],
        show: Callable[[Progress], None],
    ):
        self._engine, self._task, self._rows, self._wanted_R, self._show = engine, task, rows, wanted_R, show
        self._size = config.per_device_train_batch_size
        self._cache = DataCache(cache_root(config.data_cache_dir), "references")
        self._began = False
        """Whether this rank has begun to compute."""

    def read(self, policy: Mapping[str, Any]) -> References:
        """From the cache, or computed now."""
        mesh = self._engine.mesh
        # The bits of one micro-batch tell apart what no configuration names: kernels, devices, a changed file.
        probe = hashlib.sha256(self._values(0).tobytes()).hexdigest()
        key = digest_of(
            {
                "version": VERSION,
                "rows": self._rows.digest,
                "wanted": hashlib.sha256(self._wanted_R.tobytes()).hexdigest(),
                "micro_batch": self._size,
                "policy": policy,
                "probe": mesh.gather(probe)[0],
            }
        )
        entry = self._cache.get(key) if mesh.leads else None
        if not mesh.gather(entry is not None)[0]:
            if mesh.leads:
                entry = self._cache.get_or_build(key, self._build, waiting=self._waiting, resumable=True)
                if not self._began:  # another run has computed them meanwhile, and the other ranks wait
                    mesh.gather(None)
            else:
                self._build(None)
        path = Path(mesh.gather(None if entry is None else str(entry.path))[0])
        shape = (len(self._wanted_R), self._rows.sequence_len)
        return References(
            rows_R=self._wanted_R,
            logprobs_RL=np.memmap(path / _VALUES, dtype=np.float32, mode="r", shape=shape),
        )

    def _waiting(self) -> None:
        self._show(Progress(task=f"wait for another run to compute {TASK}", done=0, unit="rows"))

    def _batch(self, start: int) -> tuple[MicroBatch, int]:
        """The micro-batch of the wanted rows from `start` on, and their number."""
        indices: list[int | None] = [int(row) for row in self._wanted_R[start : start + self._size]]
        padding: list[int | None] = [None] * (self._size - len(indices))
        return self._task.unreferenced(self._rows, [*indices, *padding]), len(indices)

    def _values(self, start: int) -> NDArray[np.float32]:
        """[rows, L] from `start` on."""
        batch, count = self._batch(start)
        values_N = self._engine.logprobs(batch).to(torch.float32).cpu().numpy()
        values: NDArray[np.float32] = values_N.reshape(self._size, -1)[:count]
        return values

    def _build(self, directory: Path | None) -> Mapping[str, Any]:
        """Compute what is missing in the directory; without one, only take part in the forward."""
        total, mesh = len(self._wanted_R), self._engine.mesh
        self._began = True
        begun = mesh.gather(_rows_done(directory))[0]
        if begun is None:
            return {}
        done = int(begun)
        shown = saved = time.monotonic()
        if directory is None:
            for start in range(done, total, self._size):
                self._values(start)
            return {}
        with (directory / _VALUES).open("ab") as file:
            file.truncate(done * 4 * self._rows.sequence_len)  # what was written after the state was saved
            while done < total:
                values = self._values(done)
                file.write(values.tobytes())
                done += len(values)
                now = time.monotonic()
                if now - saved > _SAVE_SECONDS:
                    saved = now
                    file.flush()
                    os.fsync(file.fileno())
                    atomic.replace_file(directory / _STATE, json.dumps(done).encode(), key="data_cache_dir")
                if now - shown > _PROGRESS_SECONDS or done == total:
                    shown = now
                    self._show(Progress(task=TASK, done=done, total=total, unit="rows"))
        (directory / _STATE).unlink(missing_ok=True)
        return {"rows": total}


def _rows_done(directory: Path | None) -> int:
    """The rows that a build that was killed has saved."""
    if directory is None:
        return 0
    try:
        return int(json.loads((directory / _STATE).read_bytes()))
    except (FileNotFoundError, ValueError, TypeError):
        return 0
