"""A count of the cache is the one that tracing would give."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from surogate_core.config.resolve import load_run_config
from surogate_core.engine.planning.prediction import TensorBytes
from surogate_core.plugins.registry import Registry
from surogate_core.setup import kept
from surogate_core.setup.assemble import resolve_model
from surogate_core.setup.counted import counted
from surogate_core.setup.fitting import assembly_of


def test_the_layers_are_traced_once(installed: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_code", lambda registry: "the code")
    keys = ["model=qwen3", "model.preset=tiny", "device=cpu", "lora=true", "recompute=true", "lmhead_chunks=1"]
    config = load_run_config([*keys, f"data_cache_dir={tmp_path}"], registry=installed)
    assembly = assembly_of(config, installed, resolve_model(config, installed, weights_needed=False))
    first = counted(config, installed, assembly)

    def trace(assembly: object) -> TensorBytes:
        raise AssertionError("traced again")

    monkeypatch.setattr(TensorBytes, "of", trace)
    again = counted(replace(config, output_dir="runs/other"), installed, assembly)
    assert first.residuals
    assert first.kernels
    assert all(getattr(again, f.name) == getattr(first, f.name) for f in fields(TensorBytes))
    assert again.placed(assembly) == first.placed(assembly)
