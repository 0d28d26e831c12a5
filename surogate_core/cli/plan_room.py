"""The host memory and disk space of this machine, for `surogate plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.cli.gpus import Gpu
from surogate_core.engine.host_memory import memory_of_machine
from surogate_core.files import atomic
from surogate_core.files.atomic import human_bytes

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.engine.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that this machine has; None if unknown."""

    host: int | None
    """Host memory."""
    disk: int | None
    """Free on the disk of `directory`."""
    directory: str
    """The directory of an offloader's files."""
    device: int | None = None
    """Memory of the GPU that is planned for, or what is free of the one that is here; on a CPU what is free of the
    host's, for each process.
    """

    @classmethod
    def here(cls, config: RunConfig, gpu: Gpu | None = None) -> Room:
        """The free memory and space now; with an assumed GPU its memory."""
        from surogate_core.kernels.native import assumed
        from surogate_core.setup.assemble import resolve_device
        from surogate_core.setup.build import free_memory

        known = gpu.memory if gpu is not None else None
        device = known if assumed() is not None else free_memory(resolve_device(config), ranks=config.gpus)
        directory = config.offload_dir or config.place
        return cls(host=memory_of_machine(), disk=_free(directory), directory=directory, device=device)

    def short_of(self, prediction: Prediction) -> dict[str, str]:
        """Place that does not hold what is predicted there for all GPUs → what this machine has of it."""
        found = {}
        if self.host is not None and prediction.ranks * prediction.total("host") > self.host:
            found["host"] = f"this machine has {human_bytes(self.host)} of host memory"
        if self.disk is not None and prediction.ranks * prediction.total("disk") > self.disk:
            found["disk"] = f"the disk of {self.directory} has {human_bytes(self.disk)} free"
        return found


def _free(directory: str) -> int | None:
    try:
        return atomic.free_bytes(Path(directory))
    except OSError:
        return None
