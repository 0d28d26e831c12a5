"""Runs over quantised bases: their placement changes no bit, and a checkpoint resumes only with its own format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import UserError

RunHere = Callable[..., int]
LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lr_scheduler_type=constant", "max_steps=3")
MOVED = ("offload_quants=true", "persistent_quants=true", "offload_residual=true")


@pytest.mark.parametrize(
    "key", ["qlora_bnb", *(pytest.param(key, marks=pytest.mark.slow) for key in ("qlora_fp8", "qlora_fp4"))]
)
def test_offloading_changes_no_bit(
    key: str, tmp_path: Path, base: list[str], run_here: RunHere, history: Any, digests: Any, records: Any
) -> None:
    runs = {"here": (), "moved": MOVED}
    for name, more in runs.items():
        run_here(tmp_path / name, *base, *LORA, f"{key}=true", "recompute=true", *more)
    assert history(tmp_path / "here") == history(tmp_path / "moved")
    assert digests(tmp_path / "here" / "checkpoint-3") == digests(tmp_path / "moved" / "checkpoint-3")
    # It is that of a quantised base, not that of a plain one.
    run_here(tmp_path / "plain", *base, *LORA, "recompute=true", "max_steps=1")
    assert history(tmp_path / "plain")[0] != history(tmp_path / "here")[0]


@pytest.mark.slow
def test_a_checkpoint_goes_on_with_its_format_alone(
    tmp_path: Path, base: list[str], run_here: RunHere, history: Any
) -> None:
    keys = [*base, *LORA, "qlora_bnb=true"]
    run_here(tmp_path / "a", *keys, "max_steps=2")
    for change, named in [
        (("qlora_bnb=false",), 'weight_format: "nf4" in the checkpoint, absent in this run'),
        (("qlora_bnb=false", "qlora_fp8=true"), 'weight_format: "nf4" in the checkpoint, "fp8" in this run'),
        (("qlora_bnb_block_size=128",), "qlora_bnb_block_size: 64 in the checkpoint, 128 in this run"),
        (("qlora_bnb_double_quant=false",), "qlora_bnb_double_quant: true in the checkpoint, false in this run"),
    ]:
        with pytest.raises(UserError) as caught:
            run_here(tmp_path / "a", *keys, *change)
        assert named in str(caught.value)
    # Where tensors rest is no part of it; nor are the keys of other formats.
    run_here(tmp_path / "a", *keys, *MOVED, "qlora_block_size=64")
    run_here(tmp_path / "whole", *keys)
    steps = [[h for h in history(tmp_path / name) if h[0] == "step_end"] for name in ("a", "whole")]
    assert len(steps[0]) == 3
    assert steps[0] == steps[1]
