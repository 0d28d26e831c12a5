"""The bytes of a run's tensors, for which its layers are traced only once: the numbers are kept in the data cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from surogate_core.config.schema import RunConfig
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.prediction import TensorBytes
from surogate_core.kernels.building.native import assumed
from surogate_core.setup.kept import kept

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry


def counted(config: RunConfig, registry: Registry, assembly: Assembly) -> TensorBytes:
    """`TensorBytes.of` an assembly of the configuration, which is traced only if no process has counted it before."""
    return kept(
        "counts",
        replace(config, run_name=None, output_dir=None),  # each run has its own
        registry,
        lambda: _depends(assembly),
        find=lambda: TensorBytes.of(assembly),
        write=_written,
        read=lambda facts: _read(facts, assembly),
    )


def _depends(assembly: Assembly) -> dict[str, Any]:
    """The configuration and the plugins' code determine the recipe, the objective and the optimizer."""
    device = assembly.settings.device
    on_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "model": [type(assembly.model), assembly.model.config],
        "settings": assembly.settings,
        "lora": assembly.lora,
        "offloader": [assembly.offloader.name, assembly.offload_experts],
        "kernels": [(k.op, k.name, k.priority, k.knows) for k in assembly.kernels.kernels],
        "gpu": [torch.cuda.get_device_name(device) if on_gpu else None, assumed()],
    }


def _written(counts: TensorBytes) -> dict[str, Any]:
    facts = {name: getattr(counts, name) for name in _names()}
    return facts | {"kernels": [[*key, kernel] for key, kernel in counts.kernels.items()]}


def _read(facts: Mapping[str, Any], assembly: Assembly) -> TensorBytes:
    if facts.keys() != set(_names()):
        raise ValueError("other fields")
    values = {name: _tuples(value) for name, value in facts.items()}
    kernels = {(op, dtype): kernel for op, dtype, kernel in values.pop("kernels")}
    return TensorBytes(assembly=assembly, kernels=kernels, **values)


def _names() -> list[str]:
    return [field.name for field in fields(TensorBytes) if field.name != "assembly"]


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
