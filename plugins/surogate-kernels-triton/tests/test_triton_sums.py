"""Sums over ranks against the reference, to the bit: on a GPU or, with TRITON_INTERPRET=1, in the interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from surogate_core.service.kernels import sums
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.triton_programs import SHARED, check_compiled, empty, recorded


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


@devices
@pytest.mark.parametrize("length", [1, 2048, 5000])
@pytest.mark.parametrize("count", range(2, 9))
def test_the_bits_of_the_reference(count: int, length: int, device: str) -> None:
    """Parts may begin anywhere in their memory, and what is behind them stays."""
    import surogate_kernels_triton

    kernel = next(k for k in surogate_kernels_triton.kernels() if k.op == "add_tree_sum")
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, length + 3, generator=generator) * 10.0 ** (torch.arange(count)[:, None] % 3)
    rows[0, length // 2 + 1] = torch.nan
    rows = rows.to(device)
    total = torch.arange(length + 2, dtype=torch.float32, device=device)
    expected = total.clone()
    parts = [row[1 : length + 1] for row in rows]
    assert kernel.takes(total[:length], parts)
    kernel.function(total[:length], parts)
    sums.add_tree_sum(expected[:length], [part.clone() for part in parts])
    torch.testing.assert_close(total, expected, rtol=0.0, atol=0.0, equal_nan=True)


def test_what_it_does_not_take() -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton.updates import _adds

    total = torch.zeros(6)
    assert not _adds(total, [total.clone()])
    assert not _adds(total, [total.clone()] * 9)
    assert not _adds(total, [total.clone(), torch.zeros(12)[::2]])
    assert not _adds(total, [total.clone(), total.bfloat16()])


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(INTERPRETED, reason="Triton interprets")
@pytest.mark.parametrize("capability", SHARED)
def test_it_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from surogate_kernels_triton.updates import add_tree_sum

    with recorded(monkeypatch) as launches:
        for count in range(2, 9):
            add_tree_sum(empty(4096, dtype=torch.float32), [empty(4096, dtype=torch.float32)] * count)
    assert len(launches) == 7
    check_compiled(launches, capability, tmp_path / "program.cubin")
