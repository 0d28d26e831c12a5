"""Checks of fabrics: two processes that it connects have the bits of virtual ranks.

``python -m surogate_core.testing.fabrics FILE RANK`` is such a process.

Shape suffixes: N ranks, K elements.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import Fabric, FabricSpec
from surogate_core.launch.gpus import visible
from surogate_core.launch.local import environment
from surogate_core.mesh.mesh import Mesh
from surogate_core.mesh.virtual import in_threads
from surogate_core.testing.check import NotApplicable, ensure

WORLD = 2
TURNS = 3
"""How often every collective runs with new values: first outside of a CUDA graph, then in replays of one."""
SIZES = (1, 1000, 2**17 + 256)
"""Elements."""
SECONDS = 120.0
"""Time limit of the processes."""

Zeros = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) → zeros."""


# ---------------------------------------------------------------------------- the collectives


class Buffers:
    """Tensors of one size for every collective, which a CUDA graph reads and writes in place."""

    def __init__(self, size: int, world: int, device: torch.device, zeros: Zeros):
        """`zeros`: allocates what other ranks write to."""

        def parts(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return list(zeros(sum(lengths), dtype).split(list(lengths)))

        self.sent = [torch.zeros(size, device=device) for _ in range(world)]
        self.received_NK = zeros(world * size, torch.float32).view(world, size)
        self.unequal = parts([size + 3 if rank == 0 else size for rank in range(world)], torch.bfloat16)
        self.one_only = parts([size if rank == 0 else 0 for rank in range(world)])
        self.equal = parts([size] * world, torch.uint8)
        self.scattered = [torch.zeros(size, device=device) for _ in range(world)]
        self.added = [torch.zeros(world, size, dtype=t, device=device) for t in (torch.float32, torch.float64)]
        self.most = torch.zeros(2, size, device=device)
        self._gathered = (self.unequal, self.one_only, self.scattered)

    def are_zeros(self) -> bool:
        """Whether new buffers are zeros."""
        return not any(bool(t.any()) for t in (self.received_NK, *self.unequal, *self.one_only, *self.equal))

    def fill(self, rank: int, turn: int) -> None:
        """Values that each rank draws by itself."""
        random = torch.Generator().manual_seed(100 * turn + rank)

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=random)

        for part in (*self.sent, *(parts[rank] for parts in self._gathered)):
            part.copy_(normal(part))
        self.equal[rank].copy_(normal(self.equal[rank]).mul(64).abs().clamp(max=255))
        for added in self.added:
            added.zero_()
            added[rank].copy_(normal(added[rank]))
        self.most.copy_(normal(self.most).abs())
        if rank == turn % len(self.sent):
            self.most[1, :1].fill_(float("nan"))

    def run(self, fabric: Fabric) -> None:
        """Every collective once."""
        fabric.exchange(self.sent, self.received_NK)
        for parts in (*self._gathered, self.equal):
            fabric.gather(parts)
        for added in self.added:
            fabric.add(added)
        fabric.maximum(self.most.view(torch.int32))

    def results(self, rank: int) -> dict[str, int]:
        """Collective → a checksum of its result: the weighted sum of its bytes as integers."""
        received = [row for r, row in enumerate(self.received_NK) if r != rank]
        gathered = [part for parts in (*self._gathered, self.equal) for part in parts]
        found = {"exchange": received, "gather": gathered, "add": self.added, "maximum": [self.most]}
        return {name: sum((n + 1) * _checksum(t) for n, t in enumerate(tensors)) for name, tensors in found.items()}


def _checksum(tensor: Tensor) -> int:
    values = tensor.cpu().contiguous().view(torch.uint8).view(-1).long()
    return int((values * (torch.arange(values.numel()) % 1009 + 1)).sum())


def _numbers(rank: int) -> list[float]:
    return [rank, -rank, 1e300 * (rank - 0.5), -torch.inf if rank else 0.25]


def _of_turns(size: int, fabric: Fabric, device: torch.device, zeros: Zeros) -> dict[str, Any]:
    """Collective → its checksums, one for each turn; and whether the buffers were zeros at first."""
    buffers = Buffers(size, fabric.world, device, zeros)
    found: dict[str, Any] = {"zeros": buffers.are_zeros()}
    graph = None
    for turn in range(TURNS):
        buffers.fill(fabric.rank, turn)
        if graph is None:
            buffers.run(fabric)
        else:
            graph.replay()
        for name, checksum in buffers.results(fabric.rank).items():
            found.setdefault(name, []).append(checksum)
        if device.type == "cuda" and graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                buffers.run(fabric)
    return found


@cache
def _expected() -> list[dict[str, Any]]:
    """By rank: what `_rank` writes."""

    def zeros(elements: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(elements, dtype=dtype)

    def work(fabric: Fabric) -> dict[str, Any]:
        sizes = {str(size): _of_turns(size, fabric, torch.device("cpu"), zeros) for size in SIZES}
        place = [fabric.rank, fabric.world]
        return {"sizes": sizes, "place": place, "largest": fabric.largest(_numbers(fabric.rank))}

    return in_threads(WORLD, work)


# ------------------------------------------------------------------------------ the processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What the processes wrote, by rank, or why they did not."""

    ranks: Sequence[Mapping[str, Any]] = ()
    failure: str = ""


def _rank(given: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The results of one process."""
    from torch.distributed import FileStore

    torch.set_num_threads(1)
    device = torch.device(given["device"], *([0] if given["device"] == "cuda" else []))
    mesh = Mesh(rank=rank, world=WORLD, store=FileStore(given["store"], WORLD), local_world=WORLD)
    from surogate_core.mesh.offers import FABRICS

    mesh.choose(partial(_object(given["build"]), _object(given["options"])()), device, FABRICS)
    early = mesh.zeros(SIZES[0], torch.float32, device)
    mesh.connect(device)
    assert mesh.fabric is not None
    zeros = partial(mesh.zeros, device=device)
    sizes = {str(size): _of_turns(size, mesh.fabric, device, zeros) for size in SIZES}
    for found in sizes.values():
        found["zeros"] = found["zeros"] and not bool(early.any())
    largest = [float(value) for value in mesh.largest(_numbers(rank))]
    place = [mesh.fabric.rank, mesh.fabric.world]
    mesh.close()
    return {"sizes": sizes, "place": place, "largest": largest}


def _object(path: str) -> Any:
    module, _, name = path.partition(":")
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _path_of(value: Any, what: str) -> str:
    """``module:name`` of a function or class, by which other processes find it."""
    path = f"{getattr(value, '__module__', '')}:{getattr(value, '__qualname__', '')}"
    with suppress(ImportError, AttributeError, ValueError):
        if _object(path) is value:
            return path
    raise AssertionError(f"`{what}` must be a function or class of a module, so that other processes find it")


def _device(spec: FabricSpec) -> str:
    """The device of the processes; raises `NotApplicable` if the fabric has none here."""
    if spec.supports("cuda", True) and len(visible(os.environ)) >= WORLD:
        return "cuda"
    if not spec.supports("cpu", True):
        raise NotApplicable(f"it needs {WORLD} GPUs")
    return "cpu"


def _of(spec: FabricSpec) -> Sequence[Mapping[str, Any]]:
    """What two ranks in processes of their own write, by rank."""
    device = _device(spec)
    found = _processes(_path_of(spec.build, "build"), _path_of(spec.options, "options"), device)
    ensure(not found.failure, found.failure)
    return found.ranks


@cache
def _processes(build: str, options: str, device: str) -> _Found:
    """One pair of processes serves all checks of a fabric."""
    gpus = visible(os.environ) if device == "cuda" else []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        given = {"build": build, "options": options, "device": device, "path": sys.path, "store": f"{place}/store"}
        (place / "given").write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-m", "surogate_core.testing.fabrics", f"{place}/given"]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(WORLD):
                with (place / f"said {rank}").open("wb") as said:
                    own = environment(os.environ, rank, WORLD, gpus)
                    started.append(subprocess.Popen([*command, str(rank)], env=own, stdout=said, stderr=said))
            failure = _wait(started, place)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failure:
            return _Found(failure=failure)
        return _Found(ranks=[json.loads((place / f"found {rank}").read_bytes()) for rank in range(WORLD)])


def _wait(started: Sequence[subprocess.Popen[bytes]], place: Path) -> str:
    """Wait for the processes; the first failure, or nothing."""
    end = time.monotonic() + SECONDS
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                said = (place / f"said {rank}").read_text(encoding="utf-8", errors="replace").strip().splitlines()
                return f"rank {rank} of {len(codes)} ends with {code}: {said[-1] if said else 'it says nothing'}"
        if None not in codes:
            return ""
        if time.monotonic() > end:
            return f"the ranks hang: they are not done after {SECONDS:g} s"
        time.sleep(0.05)


def _main(file: str, rank: int) -> None:
    given = json.loads(Path(file).read_bytes())
    sys.path[:] = given["path"]
    found = _rank(given, rank)
    (Path(file).parent / f"found {rank}").write_text(json.dumps(found), encoding="utf-8")


# -------------------------------------------------------------------------------- the checks


def opens_between_processes(fabric: FabricSpec) -> None:
    """It is built, connects two processes, knows their number and its own, and closes."""
    for found, expected in zip(_of(fabric), _expected(), strict=True):
        ensure(found["place"] == expected["place"], f"rank and world are {found['place']}, not {expected['place']}")


def allocates_zeros(fabric: FabricSpec) -> None:
    """Memory of `zeros`, if it has such, is of zeros, before and after `connect`."""
    for rank, found in enumerate(_of(fabric)):
        for size, results in found["sizes"].items():
            ensure(results["zeros"], f"on rank {rank}, {size} elements of its memory are not zeros")


def _agrees(fabric: FabricSpec, name: str) -> None:
    for rank, (found, expected) in enumerate(zip(_of(fabric), _expected(), strict=True)):
        for size, results in found["sizes"].items():
            for turn, (ours, right) in enumerate(zip(results[name], expected["sizes"][size][name], strict=True)):
                how = "" if turn == 0 else f" the {'second' if turn == 1 else 'third'} time"
                ensure(ours == right, f"rank {rank} has wrong values for {size} elements{how}")


def exchanges_parts(fabric: FabricSpec) -> None:
    """`exchange` sends part r to rank r, for one element and for many, again and again."""
    _agrees(fabric, "exchange")


def gathers_parts_of_any_length(fabric: FabricSpec) -> None:
    """`gather` fills parts of equal, unequal and no length, of several dtypes, adjacent and apart."""
    _agrees(fabric, "gather")


def adds_values_of_one_rank_each(fabric: FabricSpec) -> None:
    """`add` gives every rank the one value of each element that is not zero."""
    _agrees(fabric, "add")


def keeps_nan_in_the_maximum(fabric: FabricSpec) -> None:
    """`maximum` compares int32, so the pattern of a NaN is above all numbers."""
    _agrees(fabric, "maximum")


def finds_the_largest_on_the_host(fabric: FabricSpec) -> None:
    """`largest` takes the maximum of each float64, infinities too."""
    for rank, (found, expected) in enumerate(zip(_of(fabric), _expected(), strict=True)):
        right = expected["largest"]
        ensure(found["largest"] == right, f"rank {rank} has {found['largest']}, not {right}")


CHECKS = (
    opens_between_processes,
    allocates_zeros,
    exchanges_parts,
    gathers_parts_of_any_length,
    adds_values_of_one_rank_each,
    keeps_nan_in_the_maximum,
    finds_the_largest_on_the_host,
)

if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
