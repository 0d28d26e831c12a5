"""Qwen3 with a mixture of experts (arXiv 2505.09388): Qwen3's attention, and experts or a dense feed-forward.

Shape suffixes: N tokens, D model features, I features of an expert, E experts, C experts of a token, R = N·C rows
sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import Tensor

from surogate_core.plugin import UserError, decoder, dsl


def _local_experts(config: Mapping[str, Any]) -> Any:
    """transformers 5 saves the number of experts under this name."""
    found = config.get("num_local_experts")
    return dsl.read_key(config, "num_experts") if found is None else found


I = dsl.Dim("moe_intermediate_size")  # noqa: E741
E = dsl.Dim("num_experts", default=_local_experts)
C = dsl.Dim("num_experts_per_tok")
SPARSE_STEP = dsl.Dim("decoder_sparse_step", default=1)
RENORMALISE = dsl.Setting("norm_topk_prob", default=False)
DENSE_LAYERS = dsl.Setting("mlp_only_layers", default=(), null=())
BIAS = dsl.Setting("attention_bias", default=False)
OWN = "Fix: use the model's own config.json."


class Qwen3Attention(decoder.AttentionBlock):
    """What the layers share: Qwen3's attention, and the norms."""

    q, k, v, o, attend = decoder.attention_slots(bias=BIAS)
    q_norm, k_norm = decoder.qk_norms()


class PlainBlock(Qwen3Attention, decoder.DenseBlock):
    """A layer with a dense feed-forward."""


class SparseBlock(Qwen3Attention):
    """A layer with experts. Every token goes to its C most probable experts, whatever their load."""

    choices, renormalise = C, RENORMALISE
    router = dsl.Param("mlp.gate.weight", E, decoder.D, init="normal", role="router")
    gate = dsl.Experts("mlp.experts.{e}.gate_proj", E, C, decoder.D, I, region="ffn", fused="mlp.experts.gate_up_proj")
    up = dsl.Experts("mlp.experts.{e}.up_proj", E, C, decoder.D, I, region="ffn", fused="mlp.experts.gate_up_proj")
    down = dsl.Experts("mlp.experts.{e}.down_proj", E, C, I, decoder.D, region="ffn", fused="mlp.experts.down_proj")
    tokens, probability, z, mass = dsl.router_sides(E)

    def scores(self, h: Tensor) -> Tensor:
        """[N, D] → [N, E] fp32: the router's logits, rounded to h's dtype.

        The gradients of routing and of the router's losses are added in fp32: in bf16, rounding would swallow a part of
        the smaller one.
        """
        return (h @ self.router.t()).float()

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        x = x + self.attention(self.normed(x, self.input_norm), tables)
        h = self.normed(x, self.post_norm)
        logits_NE = self.scores(h)
        routes = dsl.Routes.of(logits_NE, self.choices, renormalise=self.renormalise)
        y_ND = dsl.mixture(h, routes, (self.gate, self.up), dsl.Routes.swiglu, self.down)
        return x + y_ND, dsl.router_figures(logits_NE, routes, tables)


class Qwen3Moe(decoder.Decoder):
    """The causal language model."""

    family, architecture = "qwen3-moe", "Qwen3MoeForCausalLM"
    layers = dsl.Stack(SparseBlock, decoder.LAYERS, decoder.PREFIX)
    # The window acts with use_sliding_window, which is refused.
    reads = ("attention_bias", "sliding_window", "num_experts", "num_local_experts")
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-6}

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        step = SPARSE_STEP.size(self.config)
        return (layer + 1) % step == 0 and layer not in DENSE_LAYERS.value(self.config)

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, dsl.Block]]:
        """Every layer as (HF name prefix, block), in order."""
        made = {kind: kind(self.config, max_seqlen) for kind in (PlainBlock, SparseBlock)}
        for layer in range(decoder.LAYERS.size(self.config)):
            yield decoder.PREFIX.format(i=layer), made[SparseBlock if self.is_sparse(layer) else PlainBlock]

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        _check_layers(self)
        super().check()


def _check_layers(model: Qwen3Moe) -> None:
    """Refuse, by the name of the key, layers and experts that cannot be."""
    config, layers = model.config, decoder.LAYERS.size(model.config)
    dense = DENSE_LAYERS.value(config)
    if not isinstance(dense, list | tuple) or any(
        isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < layers for i in dense
    ):
        raise UserError(f"config.json: `mlp_only_layers` is {dense!r}; it lists layers from 0 to {layers - 1}. {OWN}")
    if not any(map(model.is_sparse, range(layers))):
        raise UserError(
            "config.json: no layer has experts: `mlp_only_layers` and `decoder_sparse_step` leave none. "
            'Fix: use the model\'s own config.json. Without experts it is a dense model, of "model_type": "qwen3".'
        )
    experts, choices = E.size(config), C.size(config)
    if choices > experts:
        raise UserError(
            f"config.json: `num_experts_per_tok` ({choices}) is larger than `num_experts` ({experts}). {OWN}"
        )
    if not isinstance(RENORMALISE.value(config), bool):
        raise UserError(
            f"config.json: `norm_topk_prob` is {RENORMALISE.value(config)!r}, and must be true or false. {OWN}"
        )


build = Qwen3Moe.build
