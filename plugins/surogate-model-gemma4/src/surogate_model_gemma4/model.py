"""Gemma 4's text models: dense ones, with an input for each layer or without, and the one with experts.

Shape suffixes: N tokens, D model features, E features of a head, K heads of keys, I features of an expert, M experts,
C experts of a token, R = N·C rows sorted by expert, L layers, P features of a layer's input, W rows of their table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from surogate_core.plugin import UserError, decoder, dsl, ops

I, M, C = dsl.Dim("moe_intermediate_size"), dsl.Dim("num_experts"), dsl.Dim("top_k_experts")  # noqa: E741
P, W = dsl.Dim("hidden_size_per_layer_input"), dsl.Dim("vocab_size_per_layer_input")
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

    def finished(self, x_ND: Tensor) -> Tensor:
        """[N, D]: the output of the layer."""
        return x_ND * self.factor


class Gemma4Block(Gemma4Attention, decoder.DenseBlock):
    """A layer with a dense feed-forward."""

    def gated(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """[N, F]."""
        return ops.geglu(gate_NF, up_NF)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        return self.finished(super().forward(x, tables))


def _activated(routes: dsl.Routes, rows_RI: Tensor) -> Tensor:
    """The gated activation of sorted rows that have the gates first."""
    return ops.geglu(*rows_RI.chunk(2, dim=1))


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
        scaled, h = routes.scaled(self.expert_scale), self.normed(x, self.experts_input_norm)
        y = dsl.mixture(h, scaled, (self.expert_gate_up,), _activated, self.expert_down)
        h = self.normed(x, self.post_norm)
        dense = self.down(ops.geglu(self.gate(h), self.up(h)))
        y = self.normed(y, self.experts_norm) + self.normed(dense, self.dense_norm)
        x = self.finished(self.added(x, y, self.feedforward_norm))
        return x, dsl.router_figures(logits_NM, routes, tables)


class Keyed(Gemma4Attention):
    """A layer whose values are its keys."""

    v = None


class Lending(Gemma4Attention):
    """The last layer of its type with keys and values of its own, which later ones have too."""

    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, scale=1.0, window=decoder.layer_window, lends=True)


class Borrowing(Gemma4Attention):
    """A layer without keys and values of its own."""

    k = v = k_norm = None
    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, scale=1.0, window=decoder.layer_window, borrows=True)


class WithInput(Gemma4Attention):
    """A layer that multiplies a gate of its rows with its own input, and adds the projection of that."""

    own = dsl.Received(P)
    input_gate = dsl.Linear("per_layer_input_gate", decoder.D, P, region="ffn")
    input_projection = dsl.Linear("per_layer_projection", P, decoder.D, region="ffn")
    own_norm = dsl.Param("post_per_layer_input_norm.weight", decoder.D)

    def finished(self, x_ND: Tensor) -> Tensor:
        """[N, D]: the output of the layer."""
        branch_ND = self.input_projection(ops.geglu(self.input_gate(x_ND), self.own))
        return super().finished(self.added(x_ND, branch_ND, self.own_norm))


class LayerInputs(dsl.Block):
    """Before the first layer: the inputs of all layers, from the tokens and from their embedding, which it returns."""

    reads_ids = True
    inputs = dsl.Given(P, count=decoder.LAYERS)
    table = dsl.Param("embed_tokens_per_layer.weight", W, decoder.LAYERS * P, role="embedding", init="normal")
    projection = dsl.Linear("per_layer_model_projection", decoder.D, decoder.LAYERS * P, region="ffn")
    norm = dsl.Param("per_layer_projection_norm.weight", P)
    eps = decoder.EPS
    layers, features = decoder.LAYERS, P

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        sizes, scale = (self.layers, self.features), torch.tensor(self.features**0.5, dtype=x.dtype).item()
        projected_NLP = (self.projection(x) * x.shape[1] ** -0.5).unflatten(1, sizes)
        tokens_NLP = torch.nn.functional.embedding(tables["input_ids"], self.table).unflatten(1, sizes) * scale
        self.inputs((ops.rms_norm(projected_NLP, self.norm, self.eps) + tokens_NLP) * 2**-0.5)
        return x


@cache
def _block(parts: tuple[type[Gemma4Attention], ...]) -> type[dsl.Block]:
    """The block of a layer that is all of these."""
    return type("".join(part.__name__ for part in parts), parts, {})


class Gemma4(decoder.Decoder):
    """The causal language model."""

    family, architecture = "gemma4", "Gemma4ForCausalLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": False,
        "global_head_dim": 512,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "max_position_embeddings": 131_072,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": ROPES,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "tie_word_embeddings": True,
        "vocab_size": 262_144,
    }
    reads = (
        *("attention_bias", "hidden_act", "final_logit_softcapping", "enable_moe_block", "num_experts"),
        *("hidden_size_per_layer_input", "num_kv_shared_layers"),
    )
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
        if "per_layer_config" in config:  # null is no sizes of their own
            return {**config, **next(iter((config["per_layer_config"] or {}).values()), {})}
        keys = config.get("num_global_key_value_heads") if config.get("attention_k_eq_v") else None
        return {**config, "head_dim": config["global_head_dim"], "num_key_value_heads": keys or decoder.K.size(config)}

    @property
    def own(self) -> int:
        """The number of layers with keys and values of their own, which are the first."""
        return decoder.LAYERS.size(self.config) - int(self.config.get("num_kv_shared_layers") or 0)

    @property
    def lenders(self) -> dict[str, int]:
        """Type → the last layer of it with keys and values of its own, if later ones borrow them."""
        kinds = self.layer_types
        return {kind: number for number, kind in enumerate(kinds[: self.own]) if kind in kinds[self.own :]}

    @property
    def before(self) -> int:
        """The number of blocks before the first layer."""
        return 1 if self.config["hidden_size_per_layer_input"] else 0

    def source(self, number: int, name: str) -> tuple[int, str]:
        """The layer that gives `name` to a layer. One block before the first makes the inputs of all."""
        layer = number - self.before
        return (0, f"inputs.{layer}") if name == "own" else (self.before + self.lenders[self.layer_types[layer]], name)

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, dsl.Block]]:
        """What makes the layers' inputs, if they have some, and every layer as (HF name prefix, block), in order."""
        if self.before:
            yield "model.", LayerInputs(self.config, max_seqlen)
        made: dict[Any, dsl.Block] = {}
        for number, kind in enumerate(self.layer_types):
            borrows = number >= self.own
            parts: list[type[Gemma4Attention]] = [WithInput] if self.before else []
            if borrows:
                parts.append(Borrowing)
            elif self.lenders.get(kind) == number:
                parts.append(Lending)
            if not borrows and kind == decoder.FULL and self.config.get("attention_k_eq_v"):
                parts.append(Keyed)
            parts.append(SparseBlock if self.config.get("enable_moe_block") else Gemma4Block)
            config = self.type_config(kind)
            if borrows and self.config.get("use_double_wide_mlp"):
                config = {**config, "intermediate_size": 2 * decoder.F.size(config)}
            block = made.setdefault((kind, *parts), _block(tuple(parts))(config, max_seqlen))
            yield decoder.PREFIX.format(i=number), block

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        full = {str(number) for number, kind in enumerate(self.layer_types) if kind == decoder.FULL}
        if (given := self.config.get("per_layer_config")) is not None:
            own = [one for one in given.values() if one.keys() <= {"head_dim", "num_key_value_heads"}]
            if set(given) not in (set(), full) or len(own) != len(given) or any(one != own[0] for one in own):
                what = "other sizes than those of the heads of all full layers"
                raise dsl.not_computed([f"`per_layer_config` has {what}, which gemma4 does not compute"])
        self._check_shared()
        super().check()
        if self.config.get("enable_moe_block") and (choices := C.size(self.config)) > (count := M.size(self.config)):
            raise UserError(
                f"config.json: `top_k_experts` ({choices}) is larger than `num_experts` ({count}). "
                f"Fix: use the model's own config.json."
            )

    def _check_shared(self) -> None:
        """Refuse keys of shared layers and of layers' inputs that make no model."""
        shared = self.config.get("num_kv_shared_layers") or 0
        if (
            not isinstance(shared, int)
            or isinstance(shared, bool)
            or not 0 <= shared < decoder.LAYERS.size(self.config)
        ):
            raise UserError(
                f"config.json: `num_kv_shared_layers` is {shared!r}, and the model has "
                f"{decoder.LAYERS.size(self.config)} layers (`num_hidden_layers`), of which one at least has keys and "
                f"values of its own. Fix: use the model's own config.json."
            )
        kinds = self.layer_types
        if missing := sorted(set(kinds[self.own :]) - set(kinds[: self.own])):
            raise UserError(
                f"config.json: `num_kv_shared_layers` is {shared}, and no layer of type `{missing[0]}` is before them "
                f"whose keys and values they could use (`layer_types`). Fix: use the model's own config.json."
            )
        if self.before and (rows := W.size(self.config)) < (tokens := decoder.V.size(self.config)):
            raise dsl.not_computed(
                [f"`vocab_size_per_layer_input` is {rows}, and `vocab_size` {tokens}: tokens without an input of each "
                 f"layer, which gemma4 does not compute"]
            )  # fmt: skip


build = Gemma4.build
