"""Runs of a family with windows, a convolution and a recurrence: resume, ranks, adapters, exports and generation."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.errors import UserError
from surogate_core.plugins.registry import Registry, load_plugins

RunHere = Callable[..., int]
SUPPORT = Path(__file__).parents[1] / "support"
PLUGIN = f"""
import sys

sys.path.insert(0, {str(SUPPORT)!r})
from hybrid_family import FAMILY

from surogate_core import hookimpl

@hookimpl
def surogate_model_family():
    return FAMILY
"""


@pytest.fixture
def registry(install_plugin: Callable[..., Path]) -> Registry:
    """The plugins of this environment, and the toy family."""
    install_plugin("model-toy-hybrid", PLUGIN)
    return load_plugins()


@pytest.fixture
def keys(base: list[str]) -> list[str]:
    """A small run of the family from random weights."""
    own = [key for key in base if not key.startswith("model.")]
    return [*own, "model.name=toy-hybrid", "model.preset=tiny", "model.config.vocab_size=1024", "learning_rate=0.01"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [("lora=false",), ("lora=true", "lora_rank=4", "lora_dropout=0.1")], ids=["full", "lora"]
)
def test_every_checkpoint_continues_bit_identically(
    mode: tuple[str, ...],
    tmp_path: Path,
    keys: list[str],
    registry: Registry,
    run_here: RunHere,
    history: Callable[[Path], list[tuple[Any, ...]]],
    digests: Callable[[Path], dict[str, str]],
) -> None:
    keys = [*keys, *mode, "save_steps=1", "save_total_limit=9", "eval_steps=2"]
    run_here(tmp_path / "whole", *keys, registry=registry)
    losses = [line[3] for line in history(tmp_path / "whole") if line[0] == "step_end"]
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    copy = Path(shutil.copytree(tmp_path / "whole", tmp_path / "cut"))
    for step in (4, 5, 6):
        shutil.rmtree(copy / f"checkpoint-{step}")
    run_here(copy, *keys, registry=registry)
    assert history(copy) == history(tmp_path / "whole")
    assert digests(copy / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.slow
def test_two_ranks_train_as_one_and_cannot_share_rows(
    tmp_path: Path, keys: list[str], registry: Registry, run_here: RunHere, records: Callable[..., list[dict[str, Any]]]
) -> None:
    keys = [*keys, "lora=false", "max_steps=2"]
    run_here(tmp_path / "one", *keys, registry=registry)
    run_here(tmp_path / "two", *keys, "gpus=2", "gradient_accumulation_steps=1", registry=registry)
    one, two = ([line["loss"] for line in records(tmp_path / run, "step_end")] for run in ("one", "two"))
    assert two == pytest.approx(one, rel=1e-4)
    with pytest.raises(UserError, match=r"context_parallel_size is 2, and (conv|scan) is a recurrence"):
        run_here(tmp_path / "shared", *keys, "gpus=2", "context_parallel_size=2", registry=registry)


@pytest.mark.slow
def test_what_a_run_exports_generates_and_loads_again(
    tmp_path: Path,
    keys: list[str],
    registry: Registry,
    run_here: RunHere,
    records: Callable[..., list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_here(tmp_path / "base", *keys, "lora=false", "max_steps=4", registry=registry)
    keys = [key for key in keys if not key.startswith("model.")]
    keys += [f"model={tmp_path / 'base' / 'model'}", "lora=true", "lora_rank=4", "merge_adapter=true", "eval_steps=3"]
    run_here(tmp_path / "run", *keys, registry=registry)
    assert [line["loss"] < 10 for line in records(tmp_path / "run", "eval_end")]

    def text(directory: Path) -> str:
        capsys.readouterr()
        words = ["generate", str(directory), "--max-new-tokens=30", "--temperature=0", "--prompt=The", "device=cpu"]
        assert main(words) == 0
        return capsys.readouterr().out

    exports = [tmp_path / "run" / name for name in ("adapter", "model")]
    adapter, merged = map(text, exports)
    assert adapter == merged != text(tmp_path / "base" / "model")
