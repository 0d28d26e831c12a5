"""A tiny Qwen3 in an engine, under AdamW and bf16's recipe: what tests of several plugins together train.

On the path of pytest (`pythonpath` in pyproject.toml): ``from tiny_qwen3 import make_engine``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from surogate_model_qwen3.model import build
from surogate_optimizer_adamw import surogate_optimizer
from surogate_recipe_bf16 import gemm
from torch import Tensor

from surogate_core.bundles import Kernel, KernelPack, OffloaderSpec, Store, Stores, TensorKind
from surogate_core.engine.engine import Engine
from surogate_testing import tiny

# Tensors this small are done before a second thread wakes up; on busy cores it is waited for.
torch.set_num_threads(1)

REFERENCES_ONLY = KernelPack(name="none", kernels=tuple[Kernel, ...])
BF16 = gemm.BF16()
ADAMW = surogate_optimizer()


def tiny_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` mapping of a two-layer Qwen3 with grouped queries."""
    return {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "max_position_embeddings": 256,
        "use_sliding_window": False,
        "hidden_act": "silu",
        **changes,
    }


def make_engine(config: Mapping[str, Any] | None = None, **changes: Any) -> Engine:
    """`tiny.engine` of `tiny_config()`; `changes` as there."""
    parts = {"build": build, "recipe": BF16, "optimizer": ADAMW, **changes}
    return tiny.engine(config or tiny_config(), **parts)


@dataclass
class StrictStore(Store):
    """A store as an offloader's would be: fetched tensors are copies, and are poisoned once released."""

    kind: TensorKind
    log: list[tuple[str, str]] = field(default_factory=list)
    held: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)
    out: dict[str, tuple[Tensor, ...]] = field(default_factory=dict)

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        """Keep copies."""
        self.held[key] = tuple(t.clone() for t in tensors)
        self.log.append(("put", key))

    def prefetch(self, key: str) -> None:
        """Noted; the copy is made at fetch."""
        self.log.append(("prefetch", key))

    def fetch(self, key: str) -> tuple[Tensor, ...]:
        """Copies, the same ones until they are released."""
        if key not in self.out:
            self.out[key] = tuple(t.clone() for t in self.held[key])
            self.log.append(("fetch", key))
        return self.out[key]

    def release(self, key: str) -> None:
        """Poison the copies."""
        self.log.append(("release", key))
        for tensor in self.out.pop(key, ()):
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if self.kind == "residuals":
            del self.held[key]

    def nbytes(self) -> Mapping[Any, int]:
        """Bytes of the copies, and of what is held."""
        return {
            "device": sum(t.nbytes for held in self.out.values() for t in held),
            "host": sum(t.nbytes for held in self.held.values() for t in held),
            "disk": 0,
        }


class StrictStores(Stores):
    """`StrictStore`s, which are kept by kind."""

    def __init__(self, made: dict[str, StrictStore]):
        self.made = made

    def store(self, kind: TensorKind) -> StrictStore:
        """A store of the kind."""
        self.made[kind] = StrictStore(kind)
        return self.made[kind]


def strict_offloader() -> tuple[OffloaderSpec, dict[str, StrictStore]]:
    """An offloader of `StrictStore`s, and its stores by kind."""
    stores: dict[str, StrictStore] = {}

    kinds: frozenset[TensorKind] = frozenset({"weights", "residuals"})
    return OffloaderSpec(name="strict", kinds=kinds, place="host", build=lambda *a: StrictStores(stores)), stores
