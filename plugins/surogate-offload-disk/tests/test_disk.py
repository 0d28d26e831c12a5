"""Tensors in files: the bits of a run without, nothing left behind, a full disk said at once, a GPU's copies."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from surogate_offload_disk import surogate_offloader
from surogate_offload_disk.files import mapped
from surogate_offload_disk.store import BUFFER, DiskGradientStore, DiskWeightStore
from torch import Tensor

from surogate_core.plugin import MachineError, bundles
from surogate_testing import offloaders, tiny

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def in_directory(directory: Path) -> bundles.OffloaderSpec:
    """The offloader, with its files in this directory wherever it is to put them."""
    offloader = surogate_offloader()
    return replace(offloader, build=lambda options, _, device: offloader.build(options, str(directory), device))


def mapped_files(directory: Path) -> int:
    """Mappings of this process whose file is, or was, in the directory."""
    return sum(str(directory) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_zeros_in_a_file_that_has_no_name(tmp_path: Path) -> None:
    tensor = mapped(5000, str(tmp_path / "made"))
    assert tensor.shape == (5000,)
    assert not tensor.any()
    tensor.fill_(7)
    assert (tensor == 7).all()
    assert list((tmp_path / "made").iterdir()) == []
    assert mapped_files(tmp_path) == 1
    view = tensor[10:20]
    del tensor
    assert (view == 7).all()
    del view
    assert mapped_files(tmp_path) == 0
    assert mapped(0, str(tmp_path)).numel() == 0


@contextmanager
def largest_file(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_disk_without_room_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    with largest_file(1 << 20), pytest.raises(MachineError) as caught:
        mapped(1 << 21, str(tmp_path))
    assert "The disk is full: 0.00 GiB" in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    assert "offload_dir" in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(MachineError, match="No file can be made"):
        mapped(10, os.devnull)


def test_an_engine_has_its_tensors_in_files_and_resumes(tmp_path: Path) -> None:
    offloader = in_directory(tmp_path)
    made, plain = tiny.engine(offloader=offloader), tiny.engine()
    assert mapped_files(tmp_path) >= 4
    assert tiny.train(made, 2) == tiny.train(plain, 2)
    state = {file: {n: t.clone() for n, t in tensors.items()} for file, tensors in made.state().items()}
    for other in (offloader, tiny.NO_OFFLOAD):
        resumed = tiny.engine(offloader=other)
        resumed.load_state(state)
        whole = tiny.engine()
        tiny.train(whole, 2)
        assert tiny.train(resumed, 2, start=2) == tiny.train(whole, 2, start=2)
        tiny.ensure_same_bits(tiny.snapshot(resumed), tiny.snapshot(whole), "after a resume")
    assert list(tmp_path.iterdir()) == []


def homes(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("device", DEVICES)
def test_sums_are_added_to_and_begin_anew_in_a_first_micro_step(device: str, tmp_path: Path) -> None:
    """More than two buffers' bytes in a tensor; the last key has the first one's tensor too, as a tied head."""
    count = (2 * BUFFER + 4096) // 4 if device == "cuda" else 1000
    tensors = homes((count,), (3, 5), ())
    store = DiskGradientStore(torch.device(device), str(tmp_path))
    keys = {"head": [tensors[0]], "layer 0": [tensors[1], tensors[2]], "embed": [tensors[0]]}
    for key, given in keys.items():
        store.put(key, given)
    for first, expected in ((True, (2.0, 1.0)), (False, (4.0, 2.0)), (True, (2.0, 1.0))):
        store.begin(first=first, last=True)
        for key in keys:
            store.prefetch(key)
            for tensor in store.fetch(key):
                assert tensor.device.type == device
                tensor.add_(1.0)
            store.release(key)
        store.finish()
        assert (tensors[0] == expected[0]).all()
        assert all((t == expected[1]).all() for t in tensors[1:])
    assert store.nbytes()["device"] == 0


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_back_and_live_ones_are_live(device: str, tmp_path: Path) -> None:
    store = DiskWeightStore(torch.device(device), str(tmp_path))
    live, frozen = homes((40,), (17, 3))
    store.put("a", [live, frozen.to(device), frozen.t().to(device)])
    for value in (1.0, 2.0):
        live.fill_(value)
        store.prefetch("a")
        found = store.fetch("a")
        assert (found[0] == value).all()
        assert torch.equal(found[1].cpu(), frozen)
        assert torch.equal(found[2].cpu(), frozen.t())
        store.release("a")
    assert store.nbytes()["device"] == 0
    assert store.nbytes()["disk"] == (2 if device == "cuda" else 1) * frozen.nbytes


@pytest.mark.gpu
def test_large_tensors_pass_the_lane_whole() -> None:
    store = DiskWeightStore(torch.device("cuda"), None)
    given = [torch.randint(0, 255, (n,), dtype=torch.uint8) for n in (5 * BUFFER + 3, 1, BUFFER)]
    store.put("a", given)
    store.put("b", given[::-1])
    for key, expected in (("a", given), ("b", given[::-1]), ("a", given)):
        store.prefetch(key)
        assert all(torch.equal(f.cpu(), e) for f, e in zip(store.fetch(key), expected, strict=True))
        store.release(key)


@pytest.mark.parametrize("check", offloaders.CHECKS)
def test_conforms(check: object) -> None:
    assert callable(check)
    check(surogate_offloader())
