"""Elements of a file on their way to a GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from surogate_core.errors import UserError
from surogate_core.files import staging
from surogate_core.files.staging import READERS, Staging
from surogate_core.files.tensorfile import TensorFile, write_tensors


def reader(source: Tensor, delay: threading.Event | None = None) -> staging.Read:
    """Reads from a tensor, its first elements last."""

    def read(first: int, part: Tensor) -> None:
        if first == 0 and delay is not None:
            delay.wait(5)
        elif delay is not None and first + part.numel() == source.numel():
            delay.set()
        part.copy_(source[first : first + part.numel()])

    return read


@pytest.mark.parametrize("count", [0, 1, 7, 8, 8 * READERS, 8 * READERS + 1, 1000])
def test_every_element_arrives(count: int) -> None:
    through = Staging(pinned=False, buffer_bytes=32)
    source = torch.randn(count, generator=torch.Generator().manual_seed(0))
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.full((count,), -1.0, dtype=dtype)
        through.copy(reader(source), torch.float32, target)
        assert torch.equal(target, source.to(dtype))
    through.close()


def test_reads_may_end_in_any_order() -> None:
    through = Staging(pinned=False, buffer_bytes=32)
    source, target = torch.arange(16.0), torch.zeros(16)
    if through._threads._max_workers > 1:
        through.copy(reader(source, threading.Event()), torch.float32, target)
        assert torch.equal(target, source)
    through.close()


def test_an_error_of_a_read_is_raised_when_all_reads_have_ended() -> None:
    through = Staging(pinned=False, buffer_bytes=32)
    ended: list[int] = []

    def read(first: int, part: Tensor) -> None:
        ended.append(first)
        if first == 8:
            raise UserError("the file became shorter")

    with pytest.raises(UserError, match="shorter"):
        through.copy(read, torch.float32, torch.zeros(8 * READERS + 8))
    assert sorted(ended) == list(range(0, 8 * READERS, 8)), "and the next group is not begun"
    through.close()


@pytest.mark.gpu
def test_a_tensor_of_many_groups_arrives_on_the_gpu(tmp_path: Path) -> None:
    count = 3 * READERS * staging.BUFFER_BYTES // 4 + 5
    source = torch.randn(count, generator=torch.Generator().manual_seed(0))
    write_tensors(tmp_path / "x", {"t": source})
    file = TensorFile(tmp_path / "x")
    for dtype in (torch.float32, torch.bfloat16):
        target = torch.zeros(count, dtype=dtype, device="cuda")
        file.copy_into("t", target)
        assert torch.equal(target.cpu(), source.to(dtype))
        part = torch.zeros(count - 7, dtype=dtype, device="cuda")
        file.read_part("t", 3, part)
        assert torch.equal(part.cpu(), source[3:-4].to(dtype))
    staging.release()
    assert not staging._shared
