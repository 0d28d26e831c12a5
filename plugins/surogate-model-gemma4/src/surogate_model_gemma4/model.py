"""Gemma 4's text models that have no inputs of their own for each layer: the dense one and the one with experts.

Shape suffixes: N tokens, D model features, E features of a head, K heads of keys, I features of an expert, M experts,
C experts of a token, R = N·C rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from surogate_core.plugin import UserError, decoder, dsl, ops

I, M, C = dsl.Dim("moe_intermediate_size"), dsl.Dim("num_experts"), dsl.Dim("top_k_experts")  # noqa: E741
GATE_UP, DOWN = "experts.gate_up_proj", "experts.down_proj"
ROPES = {
    decoder.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    decoder.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class Gemma4Attention(decoder.AttentionBlock):
    """What the layers share: attention, norms around both branches, and a factor of the output that no run trains."""

    q, k, v, o = decoder.attention_slots(bias=dsl.Setting("attention_bias"))[:4]
    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, scale=1.0, window=decoder.layer_window)
    q_norm, k_norm = decoder.qk_norms()
    attention_norm = dsl.Param("post_attention_layernorm.weight", decoder.D)
    post_norm = dsl.Param("pre_feedforward_layernorm.weight", decoder.D)
    feedforward_norm = dsl.Param("post_feedforward_layernorm.weight", decoder.D)
    factor = dsl.Param("layer_scalar", 1, role="scalar", trained=False)

    def plainly_normed(self, x: Tensor) -> Tensor:
        """[..., D]: an RMS norm without a weight."""
        return self.normed(x, x.new_ones(x.shape[-1]))

    def projections(self, h_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values have a norm without a weight. Without a projection they are the keys before their norm."""
        k_ND = self.k(h_ND)
        q_NHE, k_NKE, v_NKE = map(self._heads, (self.q(h_ND), k_ND, k_ND if self.v is None else self.v(h_ND)))
        return q_NHE, k_NKE, self.plainly_normed(v_NKE)


class Gemma4Block(Gemma4Attention, decoder.DenseBlock):
    """A layer with a dense feed-forward."""

    def gated(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """[N, F]."""
        return ops.geglu(gate_NF, up_NF)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        return super().forward(x, tables) * self.factor


class KeyedBlock(Gemma4Block):
    """The same as a full layer whose values are its keys."""

    v = None


class SparseBlock(Gemma4Attention):
    """A layer with experts beside its feed-forward. Both read the same rows, and each has norms of its own."""

    choices = C
    gate, up, down = decoder.mlp_slots()
    router = dsl.Param("router.proj.weight", M, decoder.D, init="normal", role="router")
    router_scale = dsl.Param("router.scale", decoder.D)
    expert_scale = dsl.Param("router.per_expert_scale", M, role="scalar")
    expert_gate_up = dsl.Experts(
        "experts.{e}.gate_up_proj", M, C, decoder.D, I + I, region="ffn", fused=GATE_UP, always=True
    )
    expert_down = dsl.Experts("experts.{e}.down_proj", M, C, I, decoder.D, region="ffn", fused=DOWN, always=True)
    dense_norm = dsl.Param("post_feedforward_layernorm_1.weight", decoder.D)
    experts_input_norm = dsl.Param("pre_feedforward_layernorm_2.weight", decoder.D)
    experts_norm = dsl.Param("post_feedforward_layernorm_2.weight", decoder.D)
    tokens, probability, z, mass = dsl.router_sides(M)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        x = self.added(x, self.attention(self.normed(x, self.input_norm), tables), self.attention_norm)
        h = self.plainly_normed(x) * self.router_scale * x.shape[1] ** -0.5
        logits_NM = (h @ self.router.t()).float()
        routes = dsl.Routes.of(logits_NM, self.choices, renormalise=True)
        (rows,) = dsl.project(self.normed(x, self.experts_input_norm), routes, self.expert_gate_up)
        y = dsl.project_combined(ops.geglu(*rows.chunk(2, dim=1)), routes.scaled(self.expert_scale), self.expert_down)
        h = self.normed(x, self.post_norm)
        dense = self.down(ops.geglu(self.gate(h), self.up(h)))
        y = self.normed(y, self.experts_norm) + self.normed(dense, self.dense_norm)
        return self.added(x, y, self.feedforward_norm) * self.factor, dsl.router_figures(logits_NM, routes, tables)


class SparseKeyedBlock(SparseBlock):
    """The same as a full layer whose values are its keys."""

    v = None


class Gemma4(decoder.Decoder):
    """The causal language model."""

    family, architecture = "gemma4", "Gemma4ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": ROPES,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    }
    reads = ("attention_bias", "hidden_act", "final_logit_softcapping", "enable_moe_block", "num_experts")
    computes: ClassVar[Mapping[str, Any]] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": "vision",  # which acts between the parts of a picture alone
    }
    embed = dsl.Embedding(
        "model.embed_tokens.weight",
        decoder.V,
        decoder.D,
        scale=lambda config: config["hidden_size"] ** 0.5,
        rounded=True,
    )
    layers = dsl.Stack(Gemma4Block, decoder.LAYERS, decoder.PREFIX)
    head = replace(decoder.Decoder.head, softcap=dsl.Setting("final_logit_softcapping", default=0.0))

    def default_type(self, number: int) -> str:
        """Every sixth layer is full."""
        return decoder.SLIDING if (number + 1) % 6 else decoder.FULL

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The last layer is full, whatever the key says."""
        return (*super().layer_types[:-1], decoder.FULL)

    def type_config(self, layer_type: str) -> Mapping[str, Any]:
        """Full layers have heads of another size, and another number of keys where these are the values."""
        config = super().type_config(layer_type)
        if layer_type != decoder.FULL:
            return config
        if (given := config.get("per_layer_config")) is not None:
            return {**config, **next(iter(given.values()), {})}
        keys = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {**config, "head_dim": config["global_head_dim"], "num_key_value_heads": keys or decoder.K.size(config)}

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, dsl.Block]]:
        """Every layer as (HF name prefix, block), in order."""
        made: dict[str, dsl.Block] = {}
        for number, kind in enumerate(self.layer_types):
            keyed = kind == decoder.FULL and bool(self.config.get("attention_k_eq_v"))
            if self.config.get("enable_moe_block"):
                block: type[dsl.Block] = SparseKeyedBlock if keyed else SparseBlock
            else:
                block = KeyedBlock if keyed else Gemma4Block
            yield decoder.PREFIX.format(i=number), made.setdefault(kind, block(self.type_config(kind), max_seqlen))

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        full = {str(number) for number, kind in enumerate(self.layer_types) if kind == decoder.FULL}
        if (given := self.config.get("per_layer_config")) is not None:
            own = [one for one in given.values() if one.keys() <= {"head_dim", "num_key_value_heads"}]
            if set(given) not in (set(), full) or len(own) != len(given) or any(one != own[0] for one in own):
                what = "other sizes than those of the heads of all full layers"
                raise dsl.not_computed([f"`per_layer_config` has {what}, which gemma4 does not compute"])
        super().check()
        if self.config.get("enable_moe_block") and (choices := C.size(self.config)) > (count := M.size(self.config)):
            raise UserError(
                f"config.json: `top_k_experts` ({choices}) is larger than `num_experts` ({count}). "
                f"Fix: use the model's own config.json."
            )


build = Gemma4.build
