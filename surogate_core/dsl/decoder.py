"""The decoder of the Llama line: its block, its model, and what they refuse.

`DenseBlock` and `Decoder` are Llama without biases; a family is a subclass of each that declares what differs.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, E head features,
F feed-forward features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from surogate_core.dsl.declare import Block, Embedding, Linear, Model, Param, Stack
from surogate_core.dsl.dims import Dim, Setting, not_computed, read_key, size_of
from surogate_core.dsl.heads import LMHead
from surogate_core.dsl.known_keys import check_keys
from surogate_core.dsl.mixers import Attention
from surogate_core.dsl.rope import Rope
from surogate_core.errors import UserError
from surogate_core.kernels import ops


def even_share(config: Mapping[str, Any]) -> int:
    """A head's features where ``head_dim`` is absent: ``hidden_size / num_attention_heads``."""
    width, heads = (Dim(key).size(config) for key in ("hidden_size", "num_attention_heads"))
    if width % heads:
        raise UserError(
            f"config.json: `hidden_size` ({width}) must be a multiple of `num_attention_heads` ({heads}), "
            f"or `head_dim` given."
        )
    return width // heads


D = Dim("hidden_size")
H = Dim("num_attention_heads")
K = Dim("num_key_value_heads")
E = Dim("head_dim", default=even_share)
F = Dim("intermediate_size")
V = Dim("vocab_size")
LAYERS = Dim("num_hidden_layers")
EPS = Setting("rms_norm_eps", default=1e-6)
TIED = Setting("tie_word_embeddings", default=False)
PREFIX = "model.layers.{i}."


def attention_slots(
    heads: Dim = H,
    kv_heads: Dim = K,
    head_dim: Dim = E,
    *,
    bias: bool | Setting = False,
    out_bias: bool | Setting | None = None,
) -> tuple[Linear, Linear, Linear, Linear, Attention]:
    """(q, k, v, o, attend). `bias`: whether q, k and v have one; `out_bias`: whether o has one, by default as they."""
    return (
        Linear("self_attn.q_proj", D, heads * head_dim, region="qkv", bias=bias),
        Linear("self_attn.k_proj", D, kv_heads * head_dim, region="qkv", bias=bias),
        Linear("self_attn.v_proj", D, kv_heads * head_dim, region="qkv", bias=bias),
        Linear("self_attn.o_proj", heads * head_dim, D, region="att", bias=bias if out_bias is None else out_bias),
        Attention(heads, kv_heads, head_dim),
    )


def qk_norms(head_dim: Dim = E) -> tuple[Param, Param]:
    """(q_norm, k_norm): RMS norms of the features of each query and key."""
    return Param("self_attn.q_norm.weight", head_dim), Param("self_attn.k_norm.weight", head_dim)


def mlp_slots(*, bias: bool | Setting = False) -> tuple[Linear, Linear, Linear]:
    """(gate, up, down) of a SwiGLU feed-forward."""
    return (
        Linear("mlp.gate_proj", D, F, region="ffn", bias=bias),
        Linear("mlp.up_proj", D, F, region="ffn", bias=bias),
        Linear("mlp.down_proj", F, D, region="ffn", bias=bias),
    )


class AttentionBlock(Block):
    """A layer without its feed-forward: attention with grouped queries, and the norms before both.

    A subclass with other sizes or biases declares the five of `attention_slots` anew, one with norms of queries and
    keys the two of `qk_norms`; `rope` may be a `Setting`.
    """

    eps = EPS
    rope: bool | Setting = True
    """Whether queries and keys are rotated by their positions."""
    input_norm = Param("input_layernorm.weight", D)
    q_norm: Param | None = None
    k_norm: Param | None = None
    post_norm = Param("post_attention_layernorm.weight", D)
    q, k, v, o, attend = attention_slots()

    @property
    def head_dim(self) -> int:
        """E."""
        return size_of(type(self).attend.features, self.config)

    def attention(self, h_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]: the attention of rows after their norm."""
        q_NHE, k_NKE, v_NKE = (self._heads(slot(h_ND)) for slot in (self.q, self.k, self.v))
        return self.o(self.attend(*self._rotated(q_NHE, k_NKE, v_NKE, tables)).flatten(1))

    def _rotated(
        self, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, tables: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after their norms and RoPE, and the values."""
        if self.q_norm is not None and self.k_norm is not None:
            if self.rope:
                cos, sin = tables["cos"], tables["sin"]
                return ops.norm_rope(q_NHE, k_NKE, v_NKE, self.q_norm, self.k_norm, self.eps, cos, sin)
            q_NHE = ops.rms_norm(q_NHE, self.q_norm, self.eps)
            k_NKE = ops.rms_norm(k_NKE, self.k_norm, self.eps)
        elif self.rope:
            q_NHE, k_NKE = (ops.rope(x, tables["cos"], tables["sin"]) for x in (q_NHE, k_NKE))
        return q_NHE, k_NKE, v_NKE

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(-1, x.shape[1] // self.head_dim, self.head_dim)


class DenseBlock(AttentionBlock):
    """One decoder layer: attention, then a SwiGLU feed-forward, each on normed rows and added to them."""

    gate, up, down = mlp_slots()

    def mlp(self, h_ND: Tensor) -> Tensor:
        """[N, D] → [N, D]: the feed-forward of rows after their norm."""
        return self.down(ops.swiglu(self.gate(h_ND), self.up(h_ND)))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = x + self.attention(ops.rms_norm(x, self.input_norm, self.eps), tables)
        return x + self.mlp(ops.rms_norm(x, self.post_norm, self.eps))


class Decoder(Model):
    """A causal language model whose layers are `AttentionBlock`s; `build` makes it and refuses what it lacks."""

    family: ClassVar[str]
    """Name of the family in messages."""
    embed = Embedding("model.embed_tokens.weight", V, D)
    layers = Stack(DenseBlock, LAYERS, PREFIX)
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=TIED)
    reads: ClassVar[Collection[str]] = ()
    """Keys of known meaning that the family reads, as `check_keys` takes them."""

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        """The model of a ``config.json``; `UserError` naming the key for what it does not compute."""
        model = cls(config)
        model.check()
        return model

    def check(self) -> None:
        """Refuse, by the name of the key, what the model does not compute."""
        attend = self._block.attend
        check_decoder(
            self,
            family=self.family,
            heads=attend.heads,
            kv_heads=attend.kv_heads,
            head_dim=attend.features,
            reads=self.reads,
            computes=dict.fromkeys(("qk_norm", "use_qk_norm"), True) if self._block.q_norm is not None else None,
        )

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, [N, E/2] fp32."""
        return Rope(self.config, size_of(self._block.attend.features, self.config)).tables(positions_N)

    @property
    def _block(self) -> type[AttentionBlock]:
        """The block of the first layers. All have its sizes of attention."""
        stack = self.layers[0] if isinstance(self.layers, tuple) else self.layers
        assert issubclass(stack.block, AttentionBlock)
        return stack.block


def check_decoder(
    model: Model,
    *,
    family: str,
    heads: Dim | int,
    kv_heads: Dim | int,
    head_dim: Dim | int,
    reads: Collection[str] = (),
    computes: Mapping[str, Any] | None = None,
) -> None:
    """Refuse, by the name of the key, what no such block computes, and read every size once.

    A missing or impossible size is an error here, before data are read. `reads`, `computes`: what the family computes
    beyond a plain decoder, as `check_keys` takes them.
    """
    config = model.config
    check_keys(config, family=family, reads=reads, computes=computes, positions=model.positions)
    if (activation := read_key(config, "hidden_act", "silu")) not in ("silu", "swish") and "hidden_act" not in reads:
        raise not_computed([f"`hidden_act` is {activation!r}, and {family} computes silu alone"])
    queries, keys = size_of(heads, config), size_of(kv_heads, config)
    if queries % keys:
        raise UserError(
            f"config.json: `num_attention_heads` ({queries}) must be a multiple of `num_key_value_heads` ({keys})."
        )
    Rope(config, size_of(head_dim, config))
    for prefix, block in {b.identity: (p, b) for p, b in model.blocks(0)}.values():
        block.mixer_specs()
        block.tensor_specs(prefix, block.linear_slots(None), train_base=False, experts=block.expert_slots(None))
    model.embed_specs(train_base=False)
    model.head_specs(train_base=False)
