"""Qwen3.5's language models and Qwen3-Next: the gated delta rule (arXiv 2412.06464) in most layers, gated attention in
the others, and a dense feed-forward or experts.

Shape suffixes: N tokens, D model features, G heads of keys and H heads of values of the delta rule (H is a multiple of
G), E features of a key, F of a value, C channels of the convolution, W positions of it, I features of an expert, S
features of the shared expert, M experts, K experts of a token, R = N·K rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from surogate_core.plugin import UserError, compute, decoder, dsl, ops


def _local_experts(config: Mapping[str, Any]) -> Any:
    """transformers 5 may save the number of experts under this name."""
    return dsl.read_key(config, "num_local_experts" if config.get("num_local_experts") else "num_experts")


G, H = dsl.Dim("linear_num_key_heads"), dsl.Dim("linear_num_value_heads")
E, F, W = dsl.Dim("linear_key_head_dim"), dsl.Dim("linear_value_head_dim"), dsl.Dim("linear_conv_kernel_dim")
C = G * E + G * E + H * F
PAST = dsl.Dim("_past", default=lambda config: W.size(config) - 1)
I, S = dsl.Dim("moe_intermediate_size"), dsl.Dim("shared_expert_intermediate_size")  # noqa: E741
M, K = dsl.Dim("num_experts", default=_local_experts), dsl.Dim("num_experts_per_tok")
BIAS = dsl.Setting("attention_bias")
SPARSE_STEP = dsl.Dim("decoder_sparse_step", default=1)
DENSE_LAYERS = dsl.Setting("mlp_only_layers", default=(), null=())
RENORMALISE = dsl.Setting("norm_topk_prob", default=True)
LARGEST_RATE = 80.0
"""Larger logarithms of decay rates count as this one: e^80 leaves nothing of a state, and e^89 is infinite in fp32."""
NORM_EPS = 1e-6
"""Added to the sum of the squares of a query or key."""
OWN = "Fix: use the model's own config.json."


class Normed(decoder.AttentionBlock):
    """What all layers share: norms that multiply by 1 + w."""

    norm_offset = 1.0
    input_norm = dsl.Param("input_layernorm.weight", decoder.D, init="zeros")
    post_norm = dsl.Param("post_attention_layernorm.weight", decoder.D, init="zeros")


class GatedAttention(Normed):
    """Attention with norms of queries and keys, RoPE on a part of each head, and an output gate."""

    q, k, v, o, attend = decoder.attention_slots(bias=BIAS, output_gate=True)
    q_norm, k_norm = decoder.qk_norms(init="zeros")


class GatedDelta(Normed):
    """The gated delta rule over queries, keys and values that a convolution smooths, a norm of each head and a gate."""

    q = k = v = attend = None
    key_heads, value_heads, keys, values = G, H, E, F
    in_qkv = dsl.Linear("linear_attn.in_proj_qkv", decoder.D, C, region="qkv")
    in_z = dsl.Linear("linear_attn.in_proj_z", decoder.D, H * F, region="qkv")
    in_b = dsl.Linear("linear_attn.in_proj_b", decoder.D, H, region="qkv")
    in_a = dsl.Linear("linear_attn.in_proj_a", decoder.D, H, region="qkv")
    o = dsl.Linear("linear_attn.out_proj", H * F, decoder.D, region="att")
    kernel = dsl.Param("linear_attn.conv1d.weight", C, 1, W, init="normal", role="weight")
    rate = dsl.Param("linear_attn.A_log", H, init=dsl.inits.log_of_uniform(0.01, 16.0), role="scalar", dtype="fp32")
    step = dsl.Param("linear_attn.dt_bias", H, role="scalar", dtype="fp32")
    norm = dsl.Param("linear_attn.norm.weight", F)
    smooth = dsl.Recurrence(compute.causal_convolution_scan, (PAST, C), multiplications=C * W)
    scan = dsl.Recurrence(compute.gated_delta_scan, (H, E, F))

    def inputs(self, h_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values [N, C], their gates z [N, H, F], and b and a [N, H], of rows after their norm."""
        z_NHF = self.in_z(h_ND).unflatten(1, (-1, self.values))
        return self.in_qkv(h_ND), z_NHF, self.in_b(h_ND), self.in_a(h_ND)

    def attention(self, h_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]: the delta rule of rows after their norm."""
        qkv_NC, z_NHF, b_NH, a_NH = self.inputs(h_ND)
        smooth_NC = silu(self.smooth(qkv_NC, weight_CW=self.kernel.squeeze(1)))
        features = self.key_heads * self.keys
        q, k, v = smooth_NC.split((features, features, self.value_heads * self.values), dim=1)
        q_NGE, k_NGE, v_NHF = (
            x.unflatten(1, (-1, size)) for x, size in ((q, self.keys), (k, self.keys), (v, self.values))
        )
        decay_NH = -self.rate.clamp(max=LARGEST_RATE).exp() * softplus(a_NH.float() + self.step)
        beta_NH = b_NH.float().sigmoid()
        # A query of length one, divided by √E.
        q_NGE, k_NGE = self.of_length(q_NGE, self.keys**-0.5), self.of_length(k_NGE, 1.0)
        y_NHF = self.scan(q_NGE, k_NGE, v_NHF, decay_NH, beta_NH)
        return self.o(ops.gated_rms_norm(y_NHF, z_NHF, self.norm, self.eps).flatten(1))

    def of_length(self, x_NGE: Tensor, length: float) -> Tensor:
        """Queries or keys of this length: x / √(Σ x² + ε) times it, as an RMS norm, whose mean is the sum over E."""
        share = self.keys**-0.5 * length
        return ops.rms_norm(x_NGE, x_NGE.new_zeros(self.keys), NORM_EPS / self.keys, offset=share)


class InterleavedDelta(GatedDelta):
    """The same with the two projections of Qwen3-Next, whose rows are in the order of the heads of keys."""

    in_qkv = in_z = in_b = in_a = None
    in_qkvz = dsl.Linear("linear_attn.in_proj_qkvz", decoder.D, C + H * F, region="qkv")
    in_ba = dsl.Linear("linear_attn.in_proj_ba", decoder.D, H + H, region="qkv")

    def inputs(self, h_ND: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As of the base class."""
        shared = self.value_heads // self.key_heads
        sizes = (self.keys, self.keys, shared * self.values, shared * self.values)
        *qkv, z = self.in_qkvz(h_ND).unflatten(1, (self.key_heads, -1)).split(sizes, dim=2)
        b, a = self.in_ba(h_ND).unflatten(1, (self.key_heads, 2, shared)).unbind(2)
        rows = torch.cat([x.flatten(1) for x in qkv], dim=1)
        return rows, z.reshape(len(z), self.value_heads, self.values), b.flatten(1), a.flatten(1)


def experts(*, adapted: bool) -> tuple[dsl.Experts, dsl.Experts, dsl.Experts]:
    """(gate, up, down). `adapted`: whether PEFT and vLLM have adapters of the tensor of all experts."""
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    own: dict[str, Any] = {"region": "ffn", "adapted": adapted}
    return (
        dsl.Experts("mlp.experts.{e}.gate_proj", M, K, decoder.D, I, fused=gate_up, **own),
        dsl.Experts("mlp.experts.{e}.up_proj", M, K, decoder.D, I, fused=gate_up, **own),
        dsl.Experts("mlp.experts.{e}.down_proj", M, K, I, decoder.D, fused=down, **own),
    )


class SparseLayer(decoder.AttentionBlock):
    """A layer with experts, and one that every token uses behind a gate."""

    choices, renormalise = K, RENORMALISE
    router = dsl.Param("mlp.gate.weight", M, decoder.D, init="normal", role="router")
    gate, up, down = experts(adapted=True)
    shared_gate = dsl.Linear("mlp.shared_expert.gate_proj", decoder.D, S, region="ffn")
    shared_up = dsl.Linear("mlp.shared_expert.up_proj", decoder.D, S, region="ffn")
    shared_down = dsl.Linear("mlp.shared_expert.down_proj", S, decoder.D, region="ffn")
    share = dsl.Param("mlp.shared_expert_gate.weight", 1, decoder.D, init="normal", role="router")
    tokens, probability, z, mass = dsl.router_sides(M)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        x = x + self.attention(self.normed(x, self.input_norm), tables)
        h = self.normed(x, self.post_norm)
        logits_NM = (h @ self.router.t()).float()
        routes = dsl.Routes.of(logits_NM, self.choices, renormalise=self.renormalise)
        y_ND = dsl.mixture(h, routes, (self.gate, self.up), dsl.Routes.swiglu, self.down)
        shared_ND = self.shared_down(ops.swiglu(self.shared_gate(h), self.shared_up(h)))
        y_ND = y_ND + torch.sigmoid(h @ self.share.t()) * shared_ND
        return x + y_ND, dsl.router_figures(logits_NM, routes, tables)


class AttentionLayer(GatedAttention, decoder.DenseBlock):
    """Gated attention and a dense feed-forward."""


class DeltaLayer(GatedDelta, decoder.DenseBlock):
    """The gated delta rule and a dense feed-forward."""


class SparseAttentionLayer(SparseLayer, GatedAttention):
    """Gated attention and experts."""


class SparseDeltaLayer(SparseLayer, GatedDelta):
    """The gated delta rule and experts."""


class InterleavedLayer(InterleavedDelta, decoder.DenseBlock):
    """Qwen3-Next's gated delta rule and a dense feed-forward."""


class NextSparseLayer(SparseLayer):
    """Experts of Qwen3-Next, each of which has adapters of its own."""

    gate, up, down = experts(adapted=False)


class NextAttentionLayer(NextSparseLayer, GatedAttention):
    """Gated attention and Qwen3-Next's experts."""


class NextDeltaLayer(NextSparseLayer, InterleavedDelta):
    """Qwen3-Next's gated delta rule and experts."""


class Qwen35(decoder.Decoder):
    """The causal language model."""

    family, architecture = "qwen3-5", "Qwen3_5ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "full_attention_interval": 4,
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 32_768,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
    }
    kinds = (decoder.LINEAR, decoder.FULL)
    reads: ClassVar[Collection[str]] = (
        "attention_bias",
        "full_attention_interval",
        "linear_num_value_heads",
        "partial_rotary_factor",
    )
    computes: ClassVar[Mapping[str, Any]] = {"attn_output_gate": True}
    layers = dsl.Stack(AttentionLayer, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, offset=1.0)
    carried = ("mtp.",)

    def default_type(self, number: int) -> str:
        """The last of each `full_attention_interval` layers attends."""
        interval = dsl.Dim("full_attention_interval").size(self.config)
        return decoder.LINEAR if (number + 1) % interval else decoder.FULL

    by_type: ClassVar[Mapping[str, tuple[type[Normed], type[Normed]]]] = {
        decoder.FULL: (AttentionLayer, SparseAttentionLayer),
        decoder.LINEAR: (DeltaLayer, SparseDeltaLayer),
    }
    """Type of a layer → its block, dense and with experts."""

    def is_sparse(self, number: int) -> bool:
        """Whether a layer has experts."""
        return False

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, dsl.Block]]:
        """Every layer as (HF name prefix, block), in order."""
        made: dict[type[dsl.Block], dsl.Block] = {}
        for number, layer_type in enumerate(self.layer_types):
            kind = self.by_type[layer_type][self.is_sparse(number)]
            yield decoder.PREFIX.format(i=number), made.setdefault(kind, kind(self.layer_config(number), max_seqlen))

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        keys, values, width = (dim.size(self.config) for dim in (G, H, W))
        if values % keys:
            raise UserError(
                f"config.json: `linear_num_value_heads` ({values}) must be a multiple of `linear_num_key_heads` "
                f"({keys}). {OWN}"
            )
        if width < 2:
            raise UserError(f"config.json: `linear_conv_kernel_dim` must be at least 2, not {width}. {OWN}")
        super().check()


class Qwen35Moe(Qwen35):
    """The causal language model whose layers have experts."""

    architecture = "Qwen3_5MoeForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {**Qwen35.defaults, "shared_expert_intermediate_size": 512}
    reads: ClassVar[Collection[str]] = (
        *Qwen35.reads,
        "num_experts",
        "num_local_experts",
        "shared_expert_intermediate_size",
    )
    computes: ClassVar[Mapping[str, Any]] = {**Qwen35.computes, "norm_topk_prob": True}

    def is_sparse(self, number: int) -> bool:
        """Every layer."""
        return True

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        if (choices := K.size(self.config)) > (experts := M.size(self.config)):
            raise UserError(
                f"config.json: `num_experts_per_tok` ({choices}) is larger than `num_experts` ({experts}). {OWN}"
            )
        super().check()


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next: other projections of the delta rule, and layers that may be dense."""

    architecture = "Qwen3NextForCausalLM"
    computes = Qwen35.computes
    by_type: ClassVar[Mapping[str, tuple[type[Normed], type[Normed]]]] = {
        decoder.FULL: (AttentionLayer, NextAttentionLayer),
        decoder.LINEAR: (InterleavedLayer, NextDeltaLayer),
    }

    def is_sparse(self, number: int) -> bool:
        """Unless ``mlp_only_layers`` or ``decoder_sparse_step`` leave it out."""
        step = SPARSE_STEP.size(self.config)
        return (number + 1) % step == 0 and number not in DENSE_LAYERS.value(self.config)

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        dense, count = DENSE_LAYERS.value(self.config), decoder.LAYERS.size(self.config)
        if not isinstance(dense, list | tuple) or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in dense
        ):
            raise UserError(
                f"config.json: `mlp_only_layers` is {dense!r}; it lists layers from 0 to {count - 1}. {OWN}"
            )
        if not isinstance(renormalise := RENORMALISE.value(self.config), bool):
            raise UserError(f"config.json: `norm_topk_prob` is {renormalise!r}, and must be true or false. {OWN}")
        super().check()


BY_TYPE: Mapping[str, type[Qwen35]] = {
    "qwen3_5_text": Qwen35,
    "qwen3_5_moe_text": Qwen35Moe,
    "qwen3_next": Qwen3Next,
}


def build(config: Mapping[str, Any]) -> Qwen35:
    """The model of a ``config.json``; `UserError` naming the key for what it does not compute."""
    return BY_TYPE.get(config.get("model_type", ""), Qwen35).build(config)
