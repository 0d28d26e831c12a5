"""A checkpoint that rank 0 has, for ranks on machines that do not share its disk.

Rank 0 sends the files to one rank of each machine that lacks them. It writes them beside the machine's checkpoints as
``.received-HOST``, which gets this name when all digests are verified, and is removed when the ranks have loaded it.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from surogate_core.errors import MachineError, SurogateError
from surogate_core.files import atomic
from surogate_core.files.tensorfile import file_digest
from surogate_core.mesh.parcels import CHUNK, received, send
from surogate_core.train.checkpoint import MANIFEST, TornCheckpointError, read_error, read_manifest, verify
from surogate_core.train.measures import Mebibytes

if TYPE_CHECKING:
    from surogate_core.mesh.mesh import Mesh

log = structlog.get_logger(__name__)

Show = Callable[[Any], object]
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class AtHand:
    """Where this rank reads a checkpoint of rank 0."""

    path: Path
    copied: bool = False
    """Whether any machine has received a copy."""
    received: bool = False
    """Whether this rank has received the copy at `path`, which it removes."""

    def release(self, mesh: Mesh) -> None:
        """Remove the copies. All ranks call it, each after it has loaded the checkpoint."""
        if self.copied:
            mesh.gather(None)
            self.remove()

    def remove(self) -> None:
        """Remove the copy of this rank, if there is one, without a word to the others: after an error."""
        if self.received:
            shutil.rmtree(self.path, ignore_errors=True)


def at_hand(mesh: Mesh, path: Path, root: Path, *, show: Show) -> AtHand:
    """Make a checkpoint of rank 0 readable on all machines; every rank calls it. A store connects ranks of several.

    `path`: where this rank would find it. `root`: the directory to which a copy is written. `show` gets the progress
    on rank 0. Raises `MachineError` or `UserError` on the rank that cannot write the copy or has received a torn one,
    and `CalledOff` on the others.
    """
    found = mesh.gather(_contents(path))
    lacking = [rank for rank, contents in enumerate(found) if contents != found[0]]
    if not lacking:
        return AtHand(path=path)
    lacks = mesh.rank in lacking
    return _copied(mesh, path, root, found[0], lacks=lacks, show=show)


def _copied(
    mesh: Mesh, path: Path, root: Path, contents: Mapping[str, Any] | None, *, lacks: bool, show: Show
) -> AtHand:
    places = mesh.gather(_place(root) if lacks else None)
    receivers = [rank for rank, place in enumerate(places) if place is not None and places.index(place) == rank]
    copy = root / f".received-{socket.gethostname()}"
    if mesh.leads:
        machines = f"{len(receivers)} machine{'s' * (len(receivers) > 1)}"
        progress = Mebibytes(show, f"sending the checkpoint to {machines}")
        send(mesh, _chunks(path, progress), receivers)
    elif mesh.rank in receivers:
        assert contents is not None, "rank 0 has what it sends"
        _receive(mesh, copy, contents)
    mesh.gather(None)  # the copies are whole
    if mesh.leads:
        progress.over()
        log.info("a checkpoint was sent to ranks", ranks=receivers, path=str(path))
    return AtHand(path=copy if lacks else path, copied=True, received=mesh.rank in receivers)


def _contents(path: Path) -> dict[str, Any] | None:
    """The manifest's digest and the bytes of the checkpoint; None if it is not here or not whole."""
    with suppress(SurogateError, OSError):
        manifest = read_manifest(path)
        verify(path, manifest, digests=False)
        total = sum(size for size, _ in manifest.files.values())
        return {"manifest": file_digest(path / MANIFEST), "bytes": total}
    return None


def _place(root: Path) -> list[Any]:
    """What is equal for two ranks if they see the same directory on the same machine."""
    atomic.ensure_writable(root, key="checkpoint_dir")
    found = root.stat()
    booted = _BOOT.read_text().strip() if _BOOT.exists() else ""
    return [socket.gethostname(), booted, found.st_dev, found.st_ino]


def _chunks(path: Path, progress: Mebibytes) -> Iterator[bytes]:
    """The manifest, then the files in its order."""
    manifest = read_manifest(path)
    total, done = sum(size for size, _ in manifest.files.values()), 0
    yield (path / MANIFEST).read_bytes()
    for name, (size, _) in manifest.files.items():
        left = size
        try:
            with (path / name).open("rb", buffering=0) as file:
                while left:
                    if not (data := file.read(min(CHUNK, left))):
                        raise TornCheckpointError(f"{path}: {name} ends {left} bytes too early")
                    yield data
                    left -= len(data)
                    done += len(data)
                    progress.told(done, total)
        except OSError as error:
            raise read_error(path, name, error) from error


def _receive(mesh: Mesh, copy: Path, contents: Mapping[str, Any]) -> None:
    """Write what rank 0 sends to `copy`, which appears when all of it is verified."""
    chunks = received(mesh)
    shutil.rmtree(copy, ignore_errors=True)  # that of a start that was killed
    needed = contents["bytes"]
    fix = "free space on this machine, or point checkpoint_dir to another disk"
    with atomic.replaced_directory(copy, what="copy of the checkpoint", needed=needed, fix=fix) as directory:
        atomic.write_file(directory / MANIFEST, next(chunks))
        try:
            if file_digest(directory / MANIFEST) != contents["manifest"]:
                raise TornCheckpointError(f"{MANIFEST} was altered")
            manifest = read_manifest(directory)
            for name, (size, _) in manifest.files.items():
                _write(directory / name, size, chunks)
            verify(directory, manifest, digests=True)
        except TornCheckpointError as error:
            raise MachineError(
                f"{copy}: what this machine received of rank 0's checkpoint is not whole: {error}. Fix: start the run "
                f"again; if that does not help, check the network and this machine's disk."
            ) from error


def _write(file: Path, size: int, chunks: Iterator[bytes]) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        while size:
            chunk = next(chunks)
            if not 0 < len(chunk) <= size:
                raise TornCheckpointError(f"{file.name}: a chunk of {len(chunk)} bytes where {size} are left")
            atomic.write_all(descriptor, memoryview(chunk))
            size -= len(chunk)
    finally:
        os.close(descriptor)
