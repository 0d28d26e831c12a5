"""Adapters that start from the rounding errors of the frozen weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from surogate_command_export.merge import _dtype_warnings
from torch import Tensor

from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import Kept, Source, distinct, pieces
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry
from surogate_core.run.prepare import _init_notes
from surogate_core.setup.assemble import assemble, resolve_model
from surogate_core.setup.error_start import ErrorStart, low_rank
from surogate_core.setup.initial_weights import weights_source

SMALL = (
    "model=qwen3",
    "lora=true",
    "device=cpu",
    "lora_rank=4",
    "lora_alpha=12",
    "lora_init=loftq",
    "model.config.num_hidden_layers=2",
)


@pytest.fixture
def opened(installed: Registry) -> Callable[..., tuple[Source, Assembly, dict[str, TensorSpec]]]:
    """Overrides → the source of the initial values, the assembly, and the specs by HF name."""

    def open_(*overrides: str) -> tuple[Source, Assembly, dict[str, TensorSpec]]:
        config = load_run_config([*SMALL, *overrides], config_file=None, registry=installed)
        config = replace(config, recompute=False, lmhead_chunks=1)
        resolved = resolve_model(config, installed)
        assembly = assemble(config, installed, resolved, borders=2)
        found = pieces(assembly.model, lora=assembly.lora, max_seqlen=8)
        specs = {spec.hf_name: spec for spec in distinct(found)}
        return weights_source(config, installed, resolved, assembly), assembly, specs

    return open_


def tensor(source: Source, spec: TensorSpec) -> Tensor:
    value = source(spec)
    assert isinstance(value, Tensor)
    return value


def best(error: Tensor, rank: int) -> float:
    """Squared norm of what no matrix of the rank approximates."""
    return float(torch.linalg.svdvals(error.double())[rank:].square().sum())


def test_low_rank_is_nearly_the_best_and_repeats() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape, rank in (((96, 160), 8), ((200, 64), 16), ((6, 40), 8)):
        error = torch.rand(shape, generator=generator) - 0.5
        b, a = low_rank(error, rank, name="x")
        assert (b.shape, a.shape) == ((shape[0], rank), (rank, shape[1]))
        rest = float((error - b @ a).double().square().sum())
        assert rest < best(error, rank) * 1.02 + 1e-9
        assert rest < float(error.square().sum())
        again = low_rank(error, rank, name="x")
        assert torch.equal(b, again[0])
        assert torch.equal(a, again[1])
        usual = (2 * torch.rand(4096, generator=generator) - 1) / 64
        norms = a.norm(dim=1)[: min(shape)]
        torch.testing.assert_close(norms, usual.norm().expand(len(norms)), rtol=0.05, atol=0)


@pytest.mark.parametrize("key", ["qlora_format=nf4", "qlora_format=nvfp4", "recipe=nvfp4"])
def test_adapters_make_up_for_the_rounding(key: str, opened: Callable[..., tuple[Source, Assembly, dict]]) -> None:
    source, assembly, specs = opened(key)
    modules = [name.removesuffix(".lora_A.weight") for name in specs if name.endswith("lora_A.weight")]
    assert len(modules) == 2 * 7
    for module in modules[::3]:
        weight = tensor(source, specs[f"{module}.weight"])
        if assembly.weight_format is not None:
            rounded = torch.empty_like(weight)
            assembly.weight_format.unpack(assembly.weight_format.pack(weight), rounded)
        else:
            assert assembly.recipe.rounded is not None
            rounded, _ = assembly.recipe.rounded(weight, "weight")
        a, b = (tensor(source, specs[f"{module}.lora_{side}.weight"]) for side in "AB")
        error = weight - rounded
        rest = float((error - 3 * b @ a).double().square().sum())
        assert rest < best(error, 4) * 1.02
    own = specs[f"{modules[0]}.lora_B.weight"]
    assert torch.equal(tensor(source, own), tensor(source, own)), "whichever is asked for first"


def test_weights_that_are_not_rounded_have_the_usual_start(
    opened: Callable[..., tuple[Source, Assembly, dict]],
) -> None:
    source, _, specs = opened("recipe=nvfp4", "skip_quant_first_layers=1")
    plain, _, _ = opened("lora_init=default", "recipe=nvfp4")
    for name, spec in specs.items():
        if spec.role != "adapter" or name.startswith("model.layers.0."):
            assert torch.equal(tensor(source, spec), tensor(plain, spec)), name
        elif name.endswith("lora_B.weight"):
            assert tensor(source, spec).any()
    usual, _, _ = opened("recipe=bf16")
    assert not isinstance(usual, ErrorStart) or not usual.roundings


def test_each_expert_has_the_start_of_its_own_error(opened: Callable[..., tuple[Source, Assembly, dict]]) -> None:
    source, assembly, specs = opened("model=qwen3-moe", "qlora_format=nf4", "lora_target_modules=[experts]")
    name = next(n for n, s in specs.items() if n.endswith("lora_A.weight") and len(s.shape) == 3)
    module = name.removesuffix(".lora_A.weight")
    a, b = (tensor(source, specs[f"{module}.lora_{side}.weight"]) for side in "AB")
    weights = tensor(source, specs[f"{module}.weight"])
    assert assembly.weight_format is not None
    for weight, a_RI, b_OR in zip(weights, a, b, strict=True):
        rounded = torch.empty_like(weight)
        assembly.weight_format.unpack(assembly.weight_format.pack(weight.contiguous()), rounded)
        error = weight - rounded
        assert float((error - 3 * b_OR @ a_RI).double().square().sum()) < best(error, 4) * 1.02


def test_a_weight_that_the_files_have_quantised_leaves_the_usual_start() -> None:
    weight = TensorSpec(
        name="q.weight", hf_name="m.weight", shape=(8, 8), trainable=False, role="weight", init="normal"
    )
    b = TensorSpec(
        name="q.lora_B", hf_name="m.lora_B.weight", shape=(8, 2), trainable=True, role="adapter", init="zeros"
    )
    drawn = torch.zeros(8, 2)

    def source(spec: TensorSpec) -> Tensor | Kept:
        return drawn if spec is b else Kept(torch.zeros(8))

    start = ErrorStart(source=source, weights={"m": weight}, roundings={"m": lambda w: w}, scale=1.0)
    assert start(b) is drawn


def test_notes_and_mistakes(installed: Registry, opened: Callable[..., tuple[Source, Assembly, dict]]) -> None:
    def notes(*overrides: str) -> list[str]:
        config = load_run_config([*SMALL, *overrides], config_file=None, registry=installed)
        _, assembly, _ = opened(*overrides)
        return _init_notes(config, assembly.recipe, assembly.weight_format)

    assert notes() == ["lora_init=loftq: no effect, because nothing rounds the frozen weights."]
    assert notes("lora_init=default", "recipe=nvfp4") == []
    assert "belong to the base in nf4." in notes("qlora_format=nf4")[0]
    assert "belong to the base under recipe nvfp4." in notes("recipe=nvfp4")[0]
    assert RunConfig().lora_init == "default"
    words = [*SMALL, "adapter_path=a", "adapter_init_mode=trainable", "from_scratch=false"]
    with pytest.raises(ConfigError) as caught:
        load_run_config(words, config_file=None, registry=installed)
    assert any(p.key == "lora_init" for p in caught.value.problems)


def test_merging_into_unrounded_weights_says_so() -> None:
    model: Any = SimpleNamespace(scheme=None)
    (found,) = _dtype_warnings("base", model, Path("a"), {"configuration": {"lora_init": "loftq"}})
    assert "lora_init=loftq" in found
    assert not list(_dtype_warnings("base", model, Path("a"), {"configuration": {"lora_rank": 4}}))
