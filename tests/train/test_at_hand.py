"""A checkpoint of rank 0 on machines that lack it: copied whole, or refused. The ranks are threads of this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from stores import tcp_meshes

from surogate_core.errors import MachineError
from surogate_core.events import Progress
from surogate_core.files import atomic
from surogate_core.mesh import parcels
from surogate_core.mesh.mesh import CalledOff, Mesh
from surogate_core.train import at_hand as module
from surogate_core.train.at_hand import AtHand, at_hand
from surogate_core.train.checkpoint import CheckpointDir

NAME = "checkpoint-4"


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 1000)


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """The directories of three machines, of which the first has a checkpoint."""
    weights = {"a": torch.arange(2500, dtype=torch.float32), "b": torch.zeros(0)}
    state = CheckpointDir(tmp_path / "0", limit=1, run="r")
    state.save(4, tensors={"trainable": weights, "optimizer": {"m": torch.ones(7)}}, state={"x": 1})
    return [tmp_path / str(number) for number in range(3)]


def together(meshes: Sequence[Mesh], work: Callable[[Mesh], Any]) -> list[Any]:
    """What the work gives on each rank: a value or an error. An error ends the run, as in `run.unwatched`."""

    def one(mesh: Mesh) -> Any:
        try:
            return work(mesh)
        except Exception as error:
            mesh.call_off()
            return error

    with ThreadPoolExecutor(len(meshes)) as pool:
        return list(pool.map(one, meshes, timeout=60))


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_machines_that_lack_it_receive_a_copy_until_it_is_loaded(roots: list[Path]) -> None:
    """Ranks 1 and 3 are on one machine, and so are 2 and 4."""
    shown: list[Progress] = []
    seen: dict[int, dict[str, bytes]] = {}
    places = [roots[rank] for rank in (0, 1, 2, 1, 2)]

    def work(mesh: Mesh) -> AtHand:
        here = at_hand(mesh, places[mesh.rank] / NAME, places[mesh.rank], show=shown.append)
        assert CheckpointDir.load(here.path).tensors("trainable")["a"][-1] == 2499
        seen[mesh.rank] = files(here.path)
        here.release(mesh)
        return here

    with tcp_meshes(5) as meshes:
        found = together(meshes, work)
        assert all(isinstance(one, AtHand) for one in found), found
        assert meshes[0].store is not None
        assert not any(meshes[0].store.check([f"parcel {number}"]) for number in range(20))
    assert found[0] == AtHand(path=roots[0] / NAME, copied=True)
    assert [one.received for one in found] == [False, True, True, False, False]
    assert found[1].path == found[3].path != found[2].path == found[4].path
    assert all(seen[rank] == files(roots[0] / NAME) for rank in range(5))
    assert [list(root.iterdir()) for root in roots[1:]] == [[], []]
    task = "sending the checkpoint to 2 machines"
    assert [(one.task, one.done, one.total) for one in shown] == [(task, 0, 1), (task, 1, 1)]


def test_nothing_is_sent_where_all_have_it(roots: list[Path]) -> None:
    def work(mesh: Mesh) -> AtHand:
        return at_hand(mesh, roots[0] / NAME, roots[0], show=lambda event: pytest.fail("sent"))

    with tcp_meshes(2) as meshes:
        assert together(meshes, work) == [AtHand(path=roots[0] / NAME)] * 2
    one = Mesh()
    assert at_hand(one, roots[0] / NAME, roots[0], show=print) == AtHand(path=roots[0] / NAME)


def test_another_checkpoint_of_the_same_name_stays_and_is_not_used(roots: list[Path]) -> None:
    CheckpointDir(roots[1], limit=1, run="other").save(4, tensors={"trainable": {"a": torch.ones(2)}}, state={})
    before = files(roots[1] / NAME)
    # A start that was killed has left its copy.
    (roots[1] / f".received-{os.uname().nodename}").mkdir()

    def work(mesh: Mesh) -> str:
        here = at_hand(mesh, roots[mesh.rank] / NAME, roots[mesh.rank], show=lambda event: None)
        run = CheckpointDir.load(here.path).run
        here.remove()
        return run

    with tcp_meshes(2) as meshes:
        assert together(meshes, work) == ["r", "r"]
    assert files(roots[1] / NAME) == before
    assert [path.name for path in roots[1].iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (0, lambda chunk: chunk.replace(b"4", b"5"), r"manifest\.json was altered"),
        (3, lambda chunk: chunk[:-1] + b"\1", r"trainable\.safetensors was altered: its digest differs"),
        (11, lambda chunk: chunk * 2, r"a chunk of \d+ bytes where \d+ are left"),
        (3, lambda chunk: b"", "a chunk of 0 bytes where"),
    ],
    ids=["manifest", "flipped", "too long", "empty"],
)
def test_a_torn_copy_is_refused(
    roots: list[Path], monkeypatch: pytest.MonkeyPatch, number: int, change: Callable[[bytes], bytes], message: str
) -> None:
    def altered(mesh: Mesh) -> Any:
        for index, chunk in enumerate(parcels.received(mesh)):
            yield change(chunk) if index == number else chunk

    monkeypatch.setattr(module, "received", altered)
    first, second = _fails(roots)
    assert isinstance(first, CalledOff)
    assert isinstance(second, MachineError)
    with pytest.raises(MachineError, match=rf"received of rank 0's checkpoint is not whole: .*{message}.*Fix: start"):
        raise second


def test_a_full_disk_is_one_clear_error(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 12)
    first, second = _fails(roots)
    assert isinstance(first, CalledOff)
    assert str(second).startswith(f"copy of the checkpoint {roots[1]}/.received-")
    assert ": the disk is full: " in str(second)
    assert str(second).endswith("12 B free. Fix: free space on this machine, or point checkpoint_dir to another disk.")

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.undo()
    monkeypatch.setattr(module, "CHUNK", 1000)
    monkeypatch.setattr(atomic, "write_all", full)
    assert ": the disk is full: " in str(_fails(roots)[1])


def test_an_error_of_rank_0_leaves_no_copy(roots: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (roots[0] / NAME / "trainable.safetensors").rename(roots[0] / "gone")
    monkeypatch.setattr(module, "verify", lambda *given, **keys: None)
    first, second = _fails(roots)
    assert "trainable.safetensors cannot be read: No such file" in str(first)
    assert isinstance(second, CalledOff)


def _fails(roots: list[Path]) -> list[Any]:
    """The errors of two ranks of two machines; the second one has no copy."""

    def work(mesh: Mesh) -> AtHand:
        return at_hand(mesh, roots[mesh.rank] / NAME, roots[mesh.rank], show=lambda event: None)

    with tcp_meshes(2) as meshes:
        found = together(meshes, work)
    assert list(roots[1].iterdir()) == []
    return found
