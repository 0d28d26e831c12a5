"""From the configuration's precision keys to dtypes."""

from __future__ import annotations

import pytest
import torch

from surogate_core.config.resolve import load_run_config
from surogate_core.plugins.registry import load_plugins
from surogate_core.train.setup import engine_settings, resolve_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


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
    config = load_run_config(keys, registry=load_plugins())
    assert (resolve_dtype(config, CPU), resolve_dtype(config, CUDA)) == (on_cpu, on_cuda)
    assert engine_settings(config, device=CPU, borders=2).dtype == on_cpu


@pytest.mark.parametrize(("key", "dtype"), [("null", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dtype_of_masters(key: str, dtype: torch.dtype) -> None:
    config = load_run_config([f"master_dtype={key}"], registry=load_plugins())
    assert engine_settings(config, device=CPU, borders=2).master_dtype == dtype
