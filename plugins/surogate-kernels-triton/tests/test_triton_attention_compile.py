"""The programs of attention compile for every architecture, as they are launched; no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

from surogate_testing.triton_programs import SHARED, empty, recorded

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets"),
]
EVERYTHING: dict[str, Any] = {"window": 1024, "softcap": 50.0, "sinks": empty(8)}
CASES: tuple[tuple[int, int, dict[str, Any]], ...] = (
    *((size, size, EVERYTHING) for size in (64, 128, 256, 512)),
    (192, 128, {}),
)


def launch(keys: int, values: int, **named: Any) -> None:
    """Forward and backward."""
    from surogate_kernels_triton import attention

    tokens, heads, kv_heads = 4096, 8, 4
    q, k, v = empty(tokens, heads, keys), empty(tokens, kv_heads, keys), empty(tokens, kv_heads, values)
    whole, y = empty(tokens, heads * values + attention.ROOM), empty(tokens, heads, values)
    lse, borders = empty(heads, tokens, dtype=torch.float32), empty(5, dtype=torch.int32)
    attention._forward(q, k, v, borders, 0.1, whole, lse, **named)
    dsinks = {"dsinks": empty(heads)} if "sinks" in named else {}
    out = whole[:, : heads * values].view(y.shape)
    attention._backward(y, q, k, v, out, lse, borders, 0.1, q, k, v, **named, **dsinks)


@pytest.mark.parametrize("capability", [80, 90, 100, 120])
def test_every_program_compiles(capability: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the shared memory of a block."""
    from surogate_kernels_triton import attention

    tiles = attention.HOPPER if capability // 10 in (9, 10) else attention.SMALL
    monkeypatch.setattr(attention, "tiles_for", lambda device, features: tiles[max(features, 64)])
    with recorded(monkeypatch) as launches:
        for keys, values, named in CASES:
            launch(keys, values, **named)
    assert {found.program.__name__ for found in launches} == {
        f"attention_{name}" for name in ("forward", "backward_queries", "backward_keys", "backward_sinks")
    }
    for found in launches:
        # 99 KiB also for sm_80: sm_86 has no more, and the same tiles.
        shared = found.compile(capability).metadata.shared
        assert shared <= SHARED[86 if capability == 80 else capability] * 1024, (
            f"{found.program.__name__} {found.options} needs {shared} bytes"
        )
