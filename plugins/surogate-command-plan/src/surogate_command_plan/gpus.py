"""What a run has to go with: GPUs by name (compute capability, rates of products, memory and bandwidths, from
``gpus.yaml``), and the memory and disk space of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from surogate_core.plugin import UserError, atomic
from surogate_core.service.engine import memory_of_machine

if TYPE_CHECKING:
    from surogate_core.service.config import RunConfig
    from surogate_core.service.engine import Prediction

FILE = Path(__file__).with_name("gpus.yaml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU, as its vendor describes it."""

    title: str
    capability: tuple[int, int]
    bf16: float
    """FLOP/s of dense products."""
    fp8: float | None = None
    fp4: float | None = None
    memory: int | None
    """Bytes; None if unknown."""
    bandwidth: float
    """Bytes a second of its memory."""
    bus: float
    """Bytes a second from or to the host, in one direction."""
    link: float | None = None
    """Bytes a second to other GPUs over NVLink, in one direction; None if they are reached over the bus."""
    peers: bool = True
    """Whether two of them can write into each other's memory."""
    source: str
    """Where the rates are from."""
    halved: bool = False
    """Whether the vendor states the rates with sparsity, of which half is here."""
    note: str = ""

    def rate(self, products: str) -> float:
        """FLOP/s of products in bf16, fp8 or fp4; those of a wider format if the GPU has no such units."""
        widest = {"fp4": (self.fp4, self.fp8, self.bf16), "fp8": (self.fp8, self.bf16)}.get(products, (self.bf16,))
        return next(rate for rate in widest if rate is not None)


@cache
def gpus() -> Mapping[str, Gpu]:
    """Every GPU by its short name."""
    return {name: _gpu(row) for name, row in yaml.safe_load(FILE.read_text(encoding="utf-8")).items()}


def _gpu(row: Mapping[str, Any]) -> Gpu:
    scale = {"bf16": 1e12, "fp8": 1e12, "fp4": 1e12, "bandwidth": 1e9, "bus": 1e9, "link": 1e9}
    values = {key: value * scale[key] if key in scale else value for key, value in row.items()}
    values |= {"capability": tuple(row["capability"]), "memory": int(row["memory"] * 2**30)}
    return Gpu(**values)


def find(text: str) -> Gpu | tuple[int, int]:
    """A GPU by its name, or the compute capability of ``sm_90``; raises `UserError` with the names."""
    capability = re.fullmatch(r"sm_?(\d+)(\d)", text.lower())
    if capability is not None:
        return int(capability[1]), int(capability[2])
    found = _named(text)
    if found is None:
        raise UserError(f"--gpu {text}: not known. Fix: one of {', '.join(gpus())}, or a capability such as sm_90.")
    return found


def of_device(name: str, memory: int) -> Gpu | None:
    """The row of a GPU of this machine, by the name that the driver gives and its bytes; None if it is not known."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if "laptop" in words:
        return None
    rows = [(_words(gpu.title), gpu) for gpu in gpus().values()]
    fitting = [(len(wanted), gpu) for wanted, gpu in rows if wanted <= words]
    most = max((count for count, _ in fitting), default=0)
    best = [gpu for count, gpu in fitting if count == most]
    return min(best, key=lambda gpu: abs((gpu.memory or 0) - memory), default=None)


def _words(title: str) -> set[str]:
    """The words of a title that the driver's name has too."""
    return set(re.findall(r"[a-z0-9]+", re.sub(r"\d+ gb|sxm", "", title.lower())))


def _named(text: str) -> Gpu | None:
    wanted = _plain(text)
    names = {_plain(short): gpu for short, gpu in gpus().items()}
    names |= {_plain(gpu.title): gpu for gpu in gpus().values()}
    aliases = {"a10080gb": "a100", "h100sxm": "h100", "h100sxm5": "h100", "rtxa6000": "a6000", "v100sxm2": "v100"}
    return names.get(wanted) or names.get(aliases.get(wanted, ""))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


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
        from surogate_core.plugin import compute
        from surogate_core.service.setup import free_memory, resolve_device

        known = gpu.memory if gpu is not None else None
        device = known if compute.assumed() is not None else free_memory(resolve_device(config), ranks=config.gpus)
        directory = config.offload_dir or config.place
        return cls(host=memory_of_machine(), disk=_free(directory), directory=directory, device=device)

    def short_of(self, prediction: Prediction) -> dict[str, str]:
        """Place that does not hold what is predicted there for all GPUs → what this machine has of it."""
        found = {}
        if self.host is not None and prediction.ranks * prediction.total("host") > self.host:
            found["host"] = f"this machine has {atomic.human_bytes(self.host)} of host memory"
        if self.disk is not None and prediction.ranks * prediction.total("disk") > self.disk:
            found["disk"] = f"the disk of {self.directory} has {atomic.human_bytes(self.disk)} free"
        return found


def _free(directory: str) -> int | None:
    try:
        return atomic.free_bytes(Path(directory))
    except OSError:
        return None
