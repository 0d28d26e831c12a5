"""From the configuration's precision keys to dtypes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from surogate_core.config.resolve import load_run_config
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.run.assemble import engine_settings, prepare_recipe, recipe_notes, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@cache
def plugins() -> Registry:
    return load_plugins()


@pytest.mark.parametrize(
    ("keys", "on_cpu", "on_cuda"),
    [
        ((), torch.float32, torch.bfloat16),
        (("torch_dtype=float32",), torch.float32, torch.float32),
        (("model_dtype=fp32",), torch.float32, torch.float32),
        (("model_dtype=bf16",), torch.bfloat16, torch.bfloat16),
        (("model_dtype=bf16", "torch_dtype=bfloat16"), torch.bfloat16, torch.bfloat16),
    ],
)
def test_dtype_of_weights_and_activations(keys: tuple[str, ...], on_cpu: torch.dtype, on_cuda: torch.dtype) -> None:
    config = load_run_config(keys, registry=plugins())
    assert (resolve_dtype(config, CPU), resolve_dtype(config, CUDA)) == (on_cpu, on_cuda)
    assert engine_settings(config, device=CPU, borders=2).dtype == on_cpu


@pytest.mark.parametrize(("key", "dtype"), [("null", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype_of_masters(key: str, dtype: torch.dtype) -> None:
    config = load_run_config([f"master_dtype={key}"], registry=plugins())
    assert engine_settings(config, device=CPU, borders=2).master_dtype == dtype


def notes(*keys: str) -> tuple[bool, list[str]]:
    """(whether the recipe is plain, what the run says of it)."""
    registry = plugins()
    config = load_run_config([*keys, "device=cpu"], registry=registry)
    recipe, prepared = prepare_recipe(config, registry, CPU)
    return recipe.plain, recipe_notes(config, recipe, prepared)


def test_recipe_bf16_follows_the_dtypes() -> None:
    assert notes() == (True, [])
    assert notes("matmul_dtype=fp32", "gradient_dtype=fp32") == (True, [])
    plain, (note,) = notes("matmul_dtype=bf16")
    assert not plain
    assert "bf16 × bf16 → fp32" in note


def test_other_recipes_force_theirs_and_say_so() -> None:
    _, said = notes("recipe=fp8-hybrid", "matmul_dtype=bf16", "gradient_dtype=e5m2")
    assert [n for n in said if "no effect" in n] == [
        "matmul_dtype=bf16 has no effect: it is e4m3 in recipe fp8-hybrid. Leave it null, or set recipe=bf16."
    ]
    _, said = notes("recipe=nvfp4", "matmul_dtype=e4m3", "gradient_dtype=bf16")
    assert len([n for n in said if "no effect: it is e2m1 in recipe nvfp4" in n]) == 2
    assert not [n for n in notes("recipe=nvfp4")[1] if "no effect" in n]
