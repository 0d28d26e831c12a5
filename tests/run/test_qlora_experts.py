"""Whole runs over quantised experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunHere = Callable[..., int]


@pytest.mark.parametrize("key", ["qlora_bnb"])
def test_t(key: str, tmp_path: Path, base: list[str], run_here: RunHere, history: Any) -> None:
    moe = ["model=qwen3-moe", "model.config.hidden_size=64", "model.config.moe_intermediate_size=32"]
    assert run_here(tmp_path / "a", *base, *moe, "lora=true", "lora_rank=4", "max_steps=2", f"{key}=true") == 0
