"""Checks of fabrics: the processes that it connects have the bits of virtual ranks.

``python -m surogate_testing.fabrics FILE RANK`` is such a process.

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
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surogate_core.plugin import bundles, launching
from surogate_core.service.engine import Mesh
from surogate_testing.check import NotApplicable, ensure
from surogate_testing.virtual import in_threads

WORLD = 2
GROUPED = 4
"""Ranks for groups of them; `WORLD` where there are fewer GPUs, and the fabric needs some."""
GROUPS = (2, 4)
"""Ranks of a group."""
TURNS = 3
"""How often every collective runs with new values: first outside of a CUDA graph, then in replays of one."""
SIZES = (1, 1000, 2**17 + 256)
"""Elements."""
SECONDS = 120.0
"""Time limit of the processes."""

Zeros = Callable[[int, torch.dtype], Tensor]
"""(elements, dtype) → zeros."""


# ---------------------------------------------------------------------------- the collectives


def _length(size: int, sender: int, receiver: int) -> int:
    """Elements that one rank sends to another one in an exchange of unequal lengths."""
    return (0, size, size + 5)[(sender + 2 * receiver) % 3]


class Buffers:
    """Tensors of one size for every collective, which a CUDA graph reads and writes in place."""

    def __init__(self, size: int, fabric: bundles.Fabric, device: torch.device, zeros: Zeros, *, unequal: bool):
        """`zeros`: allocates what other ranks write to. `unequal`: whether `exchange_unequal` runs too."""
        rank, world = fabric.rank, fabric.world

        def parts(lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
            return list(zeros(sum(lengths), dtype).split(list(lengths)))

        self.sent = [torch.zeros(size, device=device) for _ in range(world)]
        self.received_NK = zeros(world * size, torch.float32).view(world, size)
        self.unequal = parts([size + 3 if rank == 0 else size for rank in range(world)], torch.bfloat16)
        self.one_only = parts([size if rank == 0 else 0 for rank in range(world)])
        self.equal = parts([size] * world, torch.uint8)
        self.scattered = [torch.zeros(size, device=device) for _ in range(world)]
        # Ranks that share rows exchange bytes, whatever their dtype is.
        self.sent_bytes = list(torch.zeros(world, size, dtype=torch.uint8, device=device).unbind())
        self.received_bytes_NK = zeros(world * size, torch.uint8).view(world, size)
        self.added = [torch.zeros(world, size, dtype=t, device=device) for t in (torch.float32, torch.float64)]
        self.most = torch.zeros(2, size, device=device)
        self._gathered = (self.unequal, self.one_only, self.scattered)
        self._exchanges_unequal, ranks = unequal, range(world)
        to, of = [_length(size, rank, r) for r in ranks], [_length(size, r, rank) for r in ranks]
        back, backwards = [_length(size, r + 1, rank) for r in ranks], [_length(size, rank + 1, r) for r in ranks]
        self.sent_unequal = [
            [torch.zeros(n, dtype=dtype, device=device) for n in lengths]
            for dtype, lengths in ((torch.float32, to), (torch.bfloat16, backwards))
        ]
        self.received_unequal = [parts(of), parts(back, torch.bfloat16)]

    def are_zeros(self) -> bool:
        """Whether new buffers are zeros."""
        received = (self.received_NK, self.received_bytes_NK)
        return not any(bool(t.any()) for t in (*received, *self.unequal, *self.one_only, *self.equal))

    def fill(self, rank: int, turn: int, *, drawn_by: int) -> None:
        """Values that each rank draws by itself. `drawn_by`: its number among all ranks."""
        random = torch.Generator().manual_seed(100 * turn + drawn_by)

        def normal(like: Tensor) -> Tensor:
            return torch.randn(like.shape, generator=random)

        unequal = (part for parts in self.sent_unequal for part in parts)
        for part in (*self.sent, *unequal, *(parts[rank] for parts in self._gathered)):
            part.copy_(normal(part))
        for part in (self.equal[rank], *self.sent_bytes):
            part.copy_(normal(part).mul(64).abs().clamp(max=255))
        for added in self.added:
            added.zero_()
            added[rank].copy_(normal(added[rank]))
        self.most.copy_(normal(self.most).abs())
        if rank == turn % len(self.sent):
            self.most[1, :1].fill_(float("nan"))

    def run(self, fabric: bundles.Fabric) -> None:
        """Every collective once."""
        fabric.exchange(self.sent, self.received_NK)
        fabric.exchange(self.sent_bytes, self.received_bytes_NK)
        if self._exchanges_unequal:
            for sent, received in zip(self.sent_unequal, self.received_unequal, strict=True):
                fabric.exchange_unequal(sent, received)
        for parts in (*self._gathered, self.equal):
            fabric.gather(parts)
        for added in self.added:
            fabric.add(added)
        fabric.maximum(self.most.view(torch.int32))

    def results(self, rank: int) -> dict[str, int]:
        """Collective → a checksum of its result: the weighted sum of its bytes as integers."""
        received = [
            rows[r] for rows in (self.received_NK, self.received_bytes_NK) for r in range(len(rows)) if r != rank
        ]
        unequal = [part for parts in self.received_unequal for r, part in enumerate(parts) if r != rank]
        gathered = [part for parts in (*self._gathered, self.equal) for part in parts]
        found = {"exchange": received, "gather": gathered, "add": self.added, "maximum": [self.most]}
        found |= {"exchange_unequal": unequal} if self._exchanges_unequal else {}
        return {name: sum((n + 1) * _checksum(t) for n, t in enumerate(tensors)) for name, tensors in found.items()}


def _checksum(tensor: Tensor) -> int:
    values = tensor.cpu().contiguous().view(torch.uint8).view(-1).long()
    return int((values * (torch.arange(values.numel()) % 1009 + 1)).sum())


def _largest(fabric: bundles.Fabric, drawn_by: int) -> list[float]:
    numbers = [drawn_by, -drawn_by, 1e300 * (drawn_by - 0.5), -torch.inf if drawn_by else 0.25]
    return [float(value) for value in fabric.largest(numbers)]


def _of_turns(
    size: int, fabric: bundles.Fabric, device: torch.device, zeros: Zeros, *, drawn_by: int, unequal: bool
) -> dict[str, Any]:
    """Collective → its checksums, one for each turn; and whether the buffers were zeros at first."""
    lacks = unequal and type(fabric).exchange_unequal is bundles.Fabric.exchange_unequal
    ensure(not lacks, "it has no `exchange_unequal`, and its spec says unequal=True")
    buffers = Buffers(size, fabric, device, zeros, unequal=unequal)
    found: dict[str, Any] = {"zeros": buffers.are_zeros()}
    graph = None
    for turn in range(TURNS):
        buffers.fill(fabric.rank, turn, drawn_by=drawn_by)
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


def _of_all(fabric: bundles.Fabric, device: torch.device, zeros: Zeros, *, unequal: bool = True) -> dict[str, Any]:
    """What the collectives among all ranks give."""
    of: dict[str, Any] = {"drawn_by": fabric.rank, "unequal": unequal}
    sizes = {str(size): _of_turns(size, fabric, device, zeros, **of) for size in SIZES}
    place = [fabric.rank, fabric.world]
    return {"sizes": sizes, "place": place, "largest": _largest(fabric, fabric.rank)}


def _of_groups(mesh: Mesh, device: torch.device, *, across: bool = True, unequal: bool = True) -> dict[str, Any]:
    """The places of this rank in its groups, and what the collectives in each give; then those among all ranks again.

    Groups of the wrong ranks would hang, so that they have places only.
    """
    fabric, rank, zeros = mesh.fabric, mesh.rank, partial(_plain_zeros, device=device)
    assert fabric is not None
    ensure(type(fabric).within is not bundles.Fabric.within, "it has no `within`, and its spec says groups=True")
    places: dict[str, str] = {}
    results: dict[str, Any] = {}
    for name, group, members in _groups_of(mesh, fabric, across=across):
        last, first = group.largest([rank, -rank])
        places[name] = _place(group.rank, group.world, int(-first), int(last))
        every = [members(other) for other in range(mesh.world)]
        right = [_place(of.index(other), len(of), of[0], of[-1]) for other, of in enumerate(every)]
        if mesh.gather(places[name]) != right:
            return {"places": places}
        # Groups do not wait for each other, so every other one goes through the sizes from the end.
        order = SIZES if sorted({of[0] for of in every}).index(every[rank][0]) % 2 == 0 else SIZES[::-1]
        sizes = {str(n): _of_turns(n, group, device, zeros, drawn_by=rank, unequal=unequal) for n in order}
        results[name] = {"sizes": sizes, "largest": _largest(group, rank)}
    results["all, after its groups"] = _of_all(fabric, device, zeros, unequal=unequal)
    return {"places": places, "results": results}


Members = Callable[[int], Sequence[int]]
"""A rank → the ranks of its group, in order."""


def _groups_of(mesh: Mesh, fabric: bundles.Fabric, *, across: bool) -> Iterator[tuple[str, bundles.Fabric, Members]]:
    """(name, this rank's group, the groups of all ranks), one after the other. `across`: also of distant ranks."""

    def neighbours(rank: int, ranks: int) -> range:
        return range(rank - rank % ranks, rank - rank % ranks + ranks)

    for ranks in (n for n in GROUPS if n <= mesh.world):
        yield f"its group of {ranks}", fabric.within(ranks), partial(neighbours, ranks=ranks)
    if across:
        ensure(type(fabric).across is not bundles.Fabric.across, "it has no `across`, and its spec says across=True")
        half, everyone = mesh.world // 2, range(mesh.world)
        yield f"its group across {half}", fabric.across(half), lambda rank: everyone[rank % half :: half]


def _place(number: int, world: int, first: int, last: int) -> str:
    return f"number {number} of {world}, which are ranks {first} to {last}"


def _plain_zeros(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(elements, dtype=dtype, device=device)


@cache
def _expected(world: int, groups: bool = False) -> list[dict[str, Any]]:
    """By rank: what `_rank` writes."""
    cpu = torch.device("cpu")
    zeros = partial(_plain_zeros, device=cpu)
    return in_threads(world, lambda f: _of_groups(f.mesh(), cpu) if groups else _of_all(f, cpu, zeros))


# ------------------------------------------------------------------------------ the processes


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ranks:
    """What the processes wrote, by rank, or why they did not."""

    ranks: Sequence[Mapping[str, Any]] = ()
    failure: str = ""


def _rank(given: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The results of one process."""
    from torch.distributed import FileStore

    torch.set_num_threads(1)
    world = given["world"]
    device = torch.device(given["device"], *([0] if given["device"] == "cuda" else []))
    mesh = Mesh(rank=rank, world=world, store=FileStore(given["store"], world), local_world=world)
    from surogate_core.service.engine import FABRICS

    mesh.choose(partial(_object(given["build"]), _object(given["options"])()), device, FABRICS)
    early = mesh.zeros(SIZES[0], torch.float32, device)
    mesh.connect(device)
    assert mesh.fabric is not None
    if given["groups"]:
        found = _of_groups(mesh, device, across=given["across"], unequal=given["unequal"])
    else:
        found = _of_all(mesh.fabric, device, partial(mesh.zeros, device=device), unequal=given["unequal"])
        for results in found["sizes"].values():
            results["zeros"] = results["zeros"] and not bool(early.any())
    mesh.close()
    return found


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


def _device(spec: bundles.FabricSpec, world: int = WORLD) -> str:
    """The device of the processes; raises `NotApplicable` if the fabric has none here."""
    if spec.supports("cuda", world, world) and len(launching.visible(os.environ)) >= world:
        return "cuda"
    if not spec.supports("cpu", world, world):
        raise NotApplicable(f"it needs {world} GPUs")
    return "cpu"


def _of(spec: bundles.FabricSpec, world: int = WORLD, *, groups: bool = False) -> Sequence[Mapping[str, Any]]:
    """What ranks in processes of their own write, by rank."""
    device = _device(spec, world)
    build, options = _path_of(spec.build, "build"), _path_of(spec.options, "options")
    found = _processes(build, options, device, world, groups, spec.across, spec.unequal)
    ensure(not found.failure, found.failure)
    return found.ranks


@cache
def _processes(build: str, options: str, device: str, world: int, groups: bool, across: bool, unequal: bool) -> _Ranks:
    """One pair of processes serves all checks of a fabric but that of its groups."""
    gpus = launching.visible(os.environ) if device == "cuda" else []
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        given = {
            "build": build,
            "options": options,
            "device": device,
            "world": world,
            "groups": groups,
            "across": across,
            "unequal": unequal,
            "path": sys.path,
            "store": f"{place}/store",
        }
        (place / "given").write_text(json.dumps(given), encoding="utf-8")
        command = [sys.executable, "-m", "surogate_testing.fabrics", f"{place}/given"]
        started: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world):
                with (place / f"said {rank}").open("wb") as said:
                    own = launching.environment(os.environ, rank, world, gpus)
                    started.append(subprocess.Popen([*command, str(rank)], env=own, stdout=said, stderr=said))
            failure = _wait(started, place)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failure:
            return _Ranks(failure=failure)
        return _Ranks(ranks=[json.loads((place / f"found {rank}").read_bytes()) for rank in range(world)])


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
    try:
        found = _rank(given, rank)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        # At an ordinary exit the threads of a group that is still open can abort the process, and hide the error.
        os._exit(1)
    (Path(file).parent / f"found {rank}").write_text(json.dumps(found), encoding="utf-8")


# -------------------------------------------------------------------------------- the checks


def opens_between_processes(fabric: bundles.FabricSpec) -> None:
    """It is built, connects two processes, knows their number and its own, and closes."""
    for found, expected in zip(_of(fabric), _expected(WORLD), strict=True):
        ensure(found["place"] == expected["place"], f"rank and world are {found['place']}, not {expected['place']}")


def allocates_zeros(fabric: bundles.FabricSpec) -> None:
    """Memory of `zeros`, if it has such, is of zeros, before and after `connect`."""
    for rank, found in enumerate(_of(fabric)):
        for size, results in found["sizes"].items():
            ensure(results["zeros"], f"on rank {rank}, {size} elements of its memory are not zeros")


def _agrees(fabric: bundles.FabricSpec, name: str) -> None:
    for rank, (found, expected) in enumerate(zip(_of(fabric), _expected(WORLD), strict=True)):
        _same(found, expected, name, f"rank {rank} has wrong values")


def _same(found: Mapping[str, Any], expected: Mapping[str, Any], name: str, said: str) -> None:
    """The checksums of a collective are the expected ones."""
    for size, results in found["sizes"].items():
        for turn, (ours, right) in enumerate(zip(results[name], expected["sizes"][size][name], strict=True)):
            how = "" if turn == 0 else f" the {'second' if turn == 1 else 'third'} time"
            ensure(ours == right, f"{said} for {size} elements{how}")


def exchanges_parts(fabric: bundles.FabricSpec) -> None:
    """`exchange` sends part r to rank r, for one element and for many, again and again."""
    _agrees(fabric, "exchange")


def exchanges_parts_of_unequal_lengths(fabric: bundles.FabricSpec) -> None:
    """`exchange_unequal`, which a spec with `unequal` has: part r goes to rank r, any lengths, 0 too."""
    if not fabric.unequal:
        raise NotApplicable("its spec does not say unequal=True")
    _agrees(fabric, "exchange_unequal")


def gathers_parts_of_any_length(fabric: bundles.FabricSpec) -> None:
    """`gather` fills parts of equal, unequal and no length, of several dtypes, adjacent and apart."""
    _agrees(fabric, "gather")


def adds_values_of_one_rank_each(fabric: bundles.FabricSpec) -> None:
    """`add` gives every rank the one value of each element that is not zero."""
    _agrees(fabric, "add")


def keeps_nan_in_the_maximum(fabric: bundles.FabricSpec) -> None:
    """`maximum` compares int32, so the pattern of a NaN is above all numbers."""
    _agrees(fabric, "maximum")


def finds_the_largest_on_the_host(fabric: bundles.FabricSpec) -> None:
    """`largest` takes the maximum of each float64, infinities too."""
    for rank, (found, expected) in enumerate(zip(_of(fabric), _expected(WORLD), strict=True)):
        right = expected["largest"]
        ensure(found["largest"] == right, f"rank {rank} has {found['largest']}, not {right}")


def connects_groups_of_neighbouring_ranks(fabric: bundles.FabricSpec) -> None:
    """`within`, which a spec with `groups` has: its fabrics are of neighbouring ranks, each group works by itself, and
    all ranks work on. A spec with `across` has groups of distant ranks too.
    """
    if not fabric.groups:
        raise NotApplicable("its spec does not say groups=True, so ranks cannot share rows through it")
    enough = fabric.supports("cpu", GROUPED, GROUPED) or len(launching.visible(os.environ)) >= GROUPED
    world = GROUPED if enough else WORLD
    by_rank = list(enumerate(zip(_of(fabric, world, groups=True), _expected(world, True), strict=True)))
    for rank, (found, expected) in by_rank:
        for where, place in found["places"].items():
            right = expected["places"][where]
            ensure(place == right, f"in {where}, rank {rank} of {world} is {place}, not {right}")
    for rank, (found, expected) in by_rank:
        for where, right in ((where, expected["results"][where]) for where in found["results"]):
            ours, who = found["results"][where], f"in {where}, rank {rank} of {world}"
            largest = ours["largest"]
            ensure(largest == right["largest"], f"{who} finds the largest {largest}, not {right['largest']}")
            unequal = ("exchange_unequal",) if fabric.unequal else ()
            for name in ("exchange", *unequal, "gather", "add", "maximum"):
                _same(ours, right, name, f"{who} has wrong values of `{name}`")


CHECKS = (
    opens_between_processes,
    allocates_zeros,
    exchanges_parts,
    exchanges_parts_of_unequal_lengths,
    gathers_parts_of_any_length,
    adds_values_of_one_rank_each,
    keeps_nan_in_the_maximum,
    finds_the_largest_on_the_host,
    connects_groups_of_neighbouring_ranks,
)

if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
