"""Small models with experts: one for the tests of the engine, and a Qwen3-MoE on disk for runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from run_fixtures import EMBEDDED
from torch import Tensor

from surogate_core.dsl import Block, Dim, Experts, Param, Routes, Stack, mixture
from surogate_core.dsl.sides import router_figures, router_sides
from surogate_core.files.paths import resolve_package_path
from surogate_core.kernels import ops
from surogate_testing import tiny

CONFIG: Mapping[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": True,
}
D, I = Dim("hidden_size"), Dim("intermediate_size")  # noqa: E741
E, CHOICES = Dim("num_experts"), Dim("num_experts_per_tok")


class Sparse(Block):
    """Experts without attention."""

    eps, choices = tiny.EPS, CHOICES
    norm = Param("norm.weight", D)
    router = Param("router.weight", E, D, init="normal", role="router")
    gate = Experts("experts.{e}.gate_proj", E, CHOICES, D, I, region="ffn", fused="experts.gate_up_proj")
    up = Experts("experts.{e}.up_proj", E, CHOICES, D, I, region="ffn", fused="experts.gate_up_proj")
    down = Experts("experts.{e}.down_proj", E, CHOICES, I, D, region="ffn", fused="experts.down_proj")
    tokens, probability, z, mass = router_sides(E)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        h = ops.rms_norm(x, self.norm, self.eps)
        logits = h @ self.router.t()
        routes = Routes.of(logits, self.choices, renormalise=True)
        y = mixture(h, routes, (self.gate, self.up), Routes.swiglu, self.down)
        return x + y, router_figures(logits, routes, tables)


class Mixture(tiny.SmallModel):
    """The first layer is dense."""

    layers: ClassVar[Stack] = Stack(Sparse, Dim("num_hidden_layers"), "layers.{i}.")

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        dense, sparse = tiny.SmallBlock(self.config, max_seqlen), self.layers.block(self.config, max_seqlen)
        for i in range(self.config["num_hidden_layers"]):
            yield f"layers.{i}.", sparse if i else dense


def save_qwen3_moe(
    directory: Path, *, hidden_size: int = 32, dense_layers: Sequence[int] = (0,), max_shard_size: str = "5GB"
) -> Path:
    """A random Qwen3-MoE of two layers, as transformers writes it: a tensor for each expert. With the embedded
    tokenizer.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 3 // 2,
        moe_intermediate_size=hidden_size // 2,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=list(dense_layers),
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=hidden_size // 2,
        max_position_embeddings=256,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(directory, max_shard_size=max_shard_size)
    shutil.copytree(resolve_package_path(f"{EMBEDDED}/tokenizer"), directory, dirs_exist_ok=True)
    return directory
