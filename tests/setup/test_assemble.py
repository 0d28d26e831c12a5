"""From the configuration's precision keys to dtypes."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from surogate_core.config.flat import no_effect_notes
from surogate_core.config.resolve import load_run_config
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.setup.assemble import engine_settings, resolve_dtype, resolve_recipe
from surogate_core.setup.build import fastest

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
    assert engine_settings(fastest(config), device=CPU, borders=2).dtype == on_cpu


@pytest.mark.parametrize(("key", "dtype"), [("null", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype_of_masters(key: str, dtype: torch.dtype) -> None:
    config = load_run_config([f"master_dtype={key}"], registry=plugins())
    assert engine_settings(fastest(config), device=CPU, borders=2).master_dtype == dtype


def notes(*keys: str) -> tuple[bool, list[str]]:
    """(whether the recipe is plain, what the run says of it and of keys that have no effect)."""
    registry = plugins()
    config = load_run_config([*keys, "device=cpu"], registry=registry)
    recipe = resolve_recipe(config, registry, CPU)
    said = [recipe.note] if recipe.note else []
    return recipe.plain, said + no_effect_notes(config, registry, used=lambda key: False)


def test_recipe_bf16_follows_the_dtypes() -> None:
    assert notes() == (True, [])
    assert notes("matmul_dtype=fp32", "gradient_dtype=fp32") == (True, [])
    plain, (note,) = notes("matmul_dtype=bf16")
    assert not plain
    assert "bf16 × bf16 → fp32" in note


def test_the_dtypes_of_bf16_have_no_effect_in_other_recipes() -> None:
    _, said = notes("recipe=fp8-hybrid", "matmul_dtype=bf16")
    assert [n for n in said if "no effect" in n] == [
        "matmul_dtype=bf16 has no effect: it is an option of recipe=bf16. Leave it out."
    ]
    assert not [n for n in notes("recipe=nvfp4")[1] if "no effect" in n]
