"""The table of benchmarks/gpu_qlora.py, and its peer on a CPU."""

from __future__ import annotations

import shlex
from typing import Any

import bench
import gpu_lora
import gpu_peers
import gpu_qlora
import peers
import pytest
import torch
from surogate_model_qwen3.presets import PRESETS


def row(rate: float, projections: float) -> dict[str, Any]:
    sizes = dict.fromkeys(("peak_gib", "reserved_gib", "device_gib", "frozen_gib"), 2.0)
    return {
        **sizes,
        "tokens_per_second": rate,
        "milliseconds": 10.0,
        "projections_gib": projections,
        "losses": [2.0, 1.0],
    }


def test_every_line_is_one_that_gpu_lora_takes() -> None:
    for name, words in gpu_qlora.OURS.items():
        options = gpu_lora.make_parser().parse_args(shlex.split(words))
        assert options.base == name.partition(",")[0]
        assert bool(options.recompute) == any(word in name for word in ("recompute", "lean"))
        assert bench.registry().get("offload", "host").kinds >= set(options.offload)
    assert set(gpu_qlora.LIKE.values()) <= set(gpu_qlora.OURS)
    assert {like for like, _ in gpu_qlora.PEERS.values()} <= set(gpu_qlora.OURS)


def test_the_table_compares_with_what_was_measured() -> None:
    found = {
        "bf16": row(2000.0, 8.0),
        "nf4": row(1800.0, 2.0),
        "bitsandbytes": row(900.0, 2.0),
        "bitsandbytes, checkpointing": row(700.0, 2.0),
        "fp8": {"error": "OutOfMemoryError: no room"},
    }
    cells = {line.split("|")[1].strip(): line.split("|") for line in gpu_qlora.markdown(found).splitlines()[2:]}
    assert [cell.strip() for cell in cells["nf4"][2:6]] == ["1,800", "0.900", "", "10.0"]
    assert cells["nf4"][-3].strip() == "0.250"
    assert cells["bitsandbytes"][4].strip() == "2.000"
    assert cells["bitsandbytes, checkpointing"][4].strip() == ""
    assert "no room" in cells["fp8"][2]
    assert len({len(line) for line in cells.values()}) == 1


@pytest.mark.parametrize("recompute", [False, True])
def test_the_peer_trains(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    for name, value in gpu_peers.TINY.items():
        monkeypatch.setattr(gpu_lora, name, value)
    work = peers.Work(
        preset="tiny",
        config=PRESETS["tiny"],
        full=False,
        recompute=recompute,
        rank=4,
        scale=2.0,
        rows=gpu_lora.ROWS,
        attention="sdpa",
        device=torch.device("cpu"),
        batches=gpu_lora.make_batches("row", 1024, gpu_lora.ROWS + 1),
    )
    side = peers.build_peer("bitsandbytes", work)
    losses = [side.step()() for _ in range(3)]
    assert losses[2] < losses[0]
    assert side.facts["trained_dtypes"] == ["float32"]
    weights = 4 * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 384)
    assert 0.5 <= side.facts["projections_gib"] * 2**30 / weights <= 0.53
