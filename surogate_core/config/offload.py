"""The keys that move tensors off the device: which kinds each moves, and what contradicts what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import OffloaderSpec, TensorKind

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig

KINDS: Mapping[str, frozenset[TensorKind]] = {
    "offload_residual": frozenset({"residuals"}),
    "offload_optimizer": frozenset({"optimizer"}),
    "offload_master": frozenset({"master"}),
    "offload_grads": frozenset({"gradients"}),
    "offload_quants": frozenset({"weights"}),
    # The optimizer's state is there too: it is built on the CPU, with the masters.
    "cpu_training": frozenset({"weights", "master", "gradients", "optimizer"}),
}
"""Key → the kinds of tensor that it moves."""


EXPERTS = "qlora_offload_experts"
"""The key that moves the frozen experts, which are a part of a kind."""


def kinds_of(config: RunConfig, offloader: OffloaderSpec) -> frozenset[TensorKind]:
    """The kinds that the keys move; if no such key is set, all that the offloader places."""
    keys = {key: getattr(config, key) for key in (*KINDS, EXPERTS)}
    return chosen(keys) if asked(keys) else offloader.kinds


def asked(values: Mapping[str, Any]) -> bool:
    """Whether a key of a configuration moves anything."""
    return bool(chosen(values)) or values.get(EXPERTS) is True


def chosen(values: Mapping[str, Any]) -> frozenset[TensorKind]:
    """The kinds that the keys of a configuration move; empty where none is set."""
    return frozenset[TensorKind]().union(*(kinds for key, kinds in KINDS.items() if values.get(key) is True))
