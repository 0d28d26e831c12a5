"""The decoder of the Llama line: its block, its model, and what they refuse.

`DenseBlock` and `Decoder` are Llama without biases; a family is a subclass of each that declares what differs.

Shape suffixes: N tokens, D model features, H query heads, K key/value heads, E head features, P rotated pairs of
them, F feed-forward features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from surogate_core.dsl.declare import Block, Embedding, Linear, Model, Param, Stack
from surogate_core.dsl.dims import Dim, Number, Setting, not_computed, number_of, read_key, size_of
from surogate_core.dsl.heads import LMHead
from surogate_core.dsl.inits import Init
from surogate_core.dsl.known_keys import check_keys
from surogate_core.dsl.mixers import Attention
from surogate_core.dsl.rope import Rope, of_layer_type, rotated
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
EPS = Setting("rms_norm_eps")
"""The eps of all norms of a model. Families differ in what an absent key means, and say it in `Decoder.defaults`."""
TIED = Setting("tie_word_embeddings", default=False)
PREFIX = "model.layers.{i}."


def attention_slots(
    heads: Dim = H,
    kv_heads: Dim = K,
    head_dim: Dim = E,
    *,
    bias: bool | Setting = False,
    out_bias: bool | Setting | None = None,
    output_gate: bool = False,
    **attention: Any,
) -> tuple[Linear, Linear, Linear, Linear, Attention]:
    """(q, k, v, o, attend). `bias`: whether q, k and v have one; `out_bias`: whether o has one, by default as they.

    `output_gate`: whether q gives each head, behind the query, as many features of a gate. The sigmoid of the gate
    multiplies what the head gives to o (arXiv 2505.06708). `attention`: further arguments of `Attention`, such as
    `window` and `scale`.
    """
    queries = heads * head_dim
    return (
        Linear("self_attn.q_proj", D, queries + queries if output_gate else queries, region="qkv", bias=bias),
        Linear("self_attn.k_proj", D, kv_heads * head_dim, region="qkv", bias=bias),
        Linear("self_attn.v_proj", D, kv_heads * head_dim, region="qkv", bias=bias),
        Linear("self_attn.o_proj", heads * head_dim, D, region="att", bias=bias if out_bias is None else out_bias),
        Attention(heads, kv_heads, head_dim, **attention),
    )


def fused_attention_slots(
    heads: Dim = H, kv_heads: Dim = K, head_dim: Dim = E, *, bias: bool | Setting = False, **attention: Any
) -> tuple[None, None, None, Linear, Linear, Attention]:
    """(q, k, v, qkv, o, attend) of a family with one projection for queries, keys and values, in this order.

    `attention`: as in `attention_slots`.
    """
    qkv = Linear("self_attn.qkv_proj", D, (heads + kv_heads + kv_heads) * head_dim, region="qkv", bias=bias)
    o = Linear("self_attn.o_proj", heads * head_dim, D, region="att", bias=False)
    return None, None, None, qkv, o, Attention(heads, kv_heads, head_dim, **attention)


def qk_norms(head_dim: Dim = E, *, init: Init = "ones") -> tuple[Param, Param]:
    """(q_norm, k_norm): RMS norms of the features of each query and key. Of all heads together, see `whole_qk_norms`.

    `init`: "zeros" beside a `norm_offset`.
    """
    q, k = (Param(f"self_attn.{which}_norm.weight", head_dim, init=init) for which in "qk")
    return q, k


def whole_qk_norms(heads: Dim = H, kv_heads: Dim = K, head_dim: Dim = E) -> tuple[Param, Param]:
    """(q_norm, k_norm): RMS norms over the features of all heads together, before they are split."""
    return (
        Param("self_attn.q_norm.weight", heads * head_dim),
        Param("self_attn.k_norm.weight", kv_heads * head_dim),
    )


def mlp_slots(*, bias: bool | Setting = False) -> tuple[Linear, Linear, Linear]:
    """(gate, up, down) of a SwiGLU feed-forward."""
    return (
        Linear("mlp.gate_proj", D, F, region="ffn", bias=bias),
        Linear("mlp.up_proj", D, F, region="ffn", bias=bias),
        Linear("mlp.down_proj", F, D, region="ffn", bias=bias),
    )


def fused_mlp_slots() -> tuple[None, None, Linear, Linear]:
    """(gate, up, gate_up, down) of a family with one projection for gate and up, in this order."""
    return (
        None,
        None,
        Linear("mlp.gate_up_proj", D, F + F, region="ffn"),
        Linear("mlp.down_proj", F, D, region="ffn"),
    )


LAYER_TYPE = "layer_type"
"""Key of the configuration of a layer's block: the layer's type in a family that reads ``layer_types``."""
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"


def layer_window(config: Mapping[str, Any]) -> int:
    """``sliding_window`` in a layer of type ``sliding_attention``, and 0 in others: the window of its `Attention`."""
    return config["sliding_window"] if config.get(LAYER_TYPE) == SLIDING else 0


_ROPE_KEYS = frozenset({"rope_parameters", "rope_scaling", "rope_theta"})
"""Keys that are the same null and absent, because each may be in another one."""
_NULL_MEANS = frozenset({"sliding_window", "partial_rotary_factor"})
"""Keys whose null the readers of windows and RoPE understand or refuse."""


class AttentionBlock(Block):
    """A layer without its feed-forward: attention with grouped queries, and the norms before both.

    A subclass with other sizes or biases declares the five of `attention_slots` anew, one with norms of queries and
    keys the two of `qk_norms` or `whole_qk_norms`, one with a fused projection the six of `fused_attention_slots`;
    `rope` may be a `Setting`. Norms that are None are not there. One whose `Attention` borrows keys and values has None
    for `k`, `v` and `k_norm`.
    """

    eps = EPS
    rope: bool | Setting = True
    """Whether queries and keys are rotated by their positions."""
    interleaved: bool = False
    """Whether RoPE rotates neighbouring features against each other, instead of the two halves."""
    residual: float | Setting = 1.0
    """Factor of what attention and feed-forward add to the rows."""
    norm_offset: float = 0.0
    """Number that is added to the weights of all norms; see `ops.rms_norm`. Their `Param`s then begin from zeros."""
    input_norm: Param | None = Param("input_layernorm.weight", D)
    q_norm: Param | None = None
    k_norm: Param | None = None
    attention_norm: Param | None = None
    """Norm of what attention adds."""
    post_norm: Param | None = Param("post_attention_layernorm.weight", D)
    feedforward_norm: Param | None = None
    """Norm of what the feed-forward adds."""
    sinks: Param | None = None
    """Sinks of the heads, of an `Attention` that is declared with them."""
    qkv: Linear | None = None
    q, k, v, o, attend = attention_slots()

    @property
    def head_dim(self) -> int:
        """E."""
        return size_of(type(self).attend.features, self.config)

    def attention(self, h_ND: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]: the attention of rows after their norm."""
        attend = type(self).attend
        q_NHE, *own = (self.queries(h_ND),) if attend.borrows else self.projections(h_ND)
        gate_NHE = None
        if q_NHE.shape[1] != size_of(attend.heads, self.config):
            q_NHE, gate_NHE = q_NHE.unflatten(1, (-1, 2)).unbind(2)
        if own:
            q_NHE, *own = self.positioned(q_NHE, own[0], own[1], tables)
        else:
            q_NHE = self._placed(q_NHE, self.q_norm, tables)
        y_NHE = self.attend(q_NHE, *own, sinks=self.sinks)
        return self.o((y_NHE if gate_NHE is None else y_NHE * torch.sigmoid(gate_NHE)).flatten(1))

    def queries(self, h_ND: Tensor) -> Tensor:
        """[N, H, E], or [N, 2·H, E] as `projections`: the queries of a layer that borrows keys and values."""
        return self._of_heads(self.q(h_ND), self.q_norm)

    def projections(self, h_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, H, E], keys [N, K, E] and values [N, K, E] of rows after their norm; with an output gate
        [N, 2·H, E], each query followed by its gate.
        """
        if self.qkv is None:
            q, k, v = (slot(h_ND) for slot in (self.q, self.k, self.v))
        else:
            attend = type(self).attend
            heads = [size_of(count, self.config) for count in (attend.heads, attend.kv_heads, attend.kv_heads)]
            q, k, v = self.qkv(h_ND).split([count * self.head_dim for count in heads], dim=1)
        return self._of_heads(q, self.q_norm), self._of_heads(k, self.k_norm), self._heads(v)

    def positioned(
        self, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, tables: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys after the norms of their heads and RoPE, and the values."""
        is_plain = self.rope and not self.interleaved and not self.norm_offset
        if is_plain and self.q_norm is not None and self.k_norm is not None and not self._norms_whole:
            cos_NP, sin_NP = self.angles(tables)
            if 2 * cos_NP.shape[1] == self.head_dim:
                return ops.norm_rope(q_NHE, k_NKE, v_NKE, self.q_norm, self.k_norm, self.eps, cos_NP, sin_NP)
        return self._placed(q_NHE, self.q_norm, tables), self._placed(k_NKE, self.k_norm, tables), v_NKE

    def _of_heads(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[N, heads, E] of a projection's rows, after their norm if that is over all heads together."""
        return self._heads(self.normed(x, norm) if self._norms_whole else x)

    def _placed(self, x_NHE: Tensor, norm: Tensor | None, tables: Mapping[str, Tensor]) -> Tensor:
        """Queries or keys after the norm of their heads and RoPE, where the block has them."""
        normed = x_NHE if self._norms_whole else self.normed(x_NHE, norm)
        return rotated(normed, *self.angles(tables), interleaved=self.interleaved) if self.rope else normed

    def angles(self, tables: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """cos and sin [N, P] of this layer, which may be those of its type."""
        kind = self.config.get(LAYER_TYPE)
        return (
            (tables[f"cos_{kind}"], tables[f"sin_{kind}"])
            if f"cos_{kind}" in tables
            else (tables["cos"], tables["sin"])
        )

    def normed(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """[..., D] → [..., D]: `x` after a norm of the block, and `x` itself where the norm is not there."""
        return x if norm is None else ops.rms_norm(x, norm, self.eps, offset=self.norm_offset)

    def added(self, x_ND: Tensor, branch_ND: Tensor, norm: Tensor | None) -> Tensor:
        """[N, D]: `x` with what attention or feed-forward give, after its norm and factor."""
        y_ND = self.normed(branch_ND, norm)
        return x_ND + (y_ND if self.residual == 1 else y_ND * self.residual)

    @property
    def _norms_whole(self) -> bool:
        """Whether the norms of queries and keys are over all heads together."""
        return self.q_norm is not None and len(self.q_norm) != self.head_dim

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.head_dim))


class DenseBlock(AttentionBlock):
    """One decoder layer: attention, then a SwiGLU feed-forward, each on normed rows and added to them.

    A subclass with one projection for gate and up declares the four of `fused_mlp_slots`.
    """

    gate_up: Linear | None = None
    gate, up, down = mlp_slots()

    def gated(self, gate_NF: Tensor, up_NF: Tensor) -> Tensor:
        """[N, F]: the activation of the feed-forward."""
        return ops.swiglu(gate_NF, up_NF)

    def mlp(self, h_ND: Tensor) -> Tensor:
        """[N, D] → [N, D]: the feed-forward of rows after their norm."""
        if self.gate_up is None:
            return self.down(self.gated(self.gate(h_ND), self.up(h_ND)))
        gate_NF, up_NF = self.gate_up(h_ND).chunk(2, dim=1)
        return self.down(self.gated(gate_NF, up_NF))

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = self.added(x, self.attention(self.normed(x, self.input_norm), tables), self.attention_norm)
        return self.added(x, self.mlp(self.normed(x, self.post_norm)), self.feedforward_norm)


class Decoder(Model):
    """A causal language model whose layers are `AttentionBlock`s; `build` makes it and refuses what it lacks."""

    family: ClassVar[str]
    """Name of the family in messages."""
    embed = Embedding("model.embed_tokens.weight", V, D)
    layers = Stack(DenseBlock, LAYERS, PREFIX)
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=TIED)
    reads: ClassVar[Collection[str]] = ()
    """Keys of known meaning that the family reads, as `check_keys` takes them."""
    computes: ClassVar[Mapping[str, Any]] = {}
    """Keys of which the family computes one value, as `check_keys` takes them."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of keys that a ``config.json`` of the family may leave out, as transformers has them, such as
    ``rms_norm_eps`` and ``rope_theta``. The model's `config` has them, and so has that of an export. Null is refused
    for them, as transformers does, except for the window and the keys of RoPE.
    """
    kinds: ClassVar[tuple[str, ...]] = (FULL, SLIDING)
    """Types that ``layer_types`` may have. Layers of type ``linear_attention`` have a block of the family's own."""
    default_window: ClassVar[int | None] = None
    """``sliding_window`` where the key is absent; null is no window."""

    def __init__(self, config: Mapping[str, Any]):
        absent = _ROPE_KEYS & self.defaults.keys()
        given = {key: value for key, value in config.items() if value is not None or key not in absent}
        super().__init__({**self.defaults, **given})
        for key in sorted(self.defaults.keys() - _NULL_MEANS):
            read_key(self.config, key)

    @classmethod
    def build(cls, config: Mapping[str, Any]) -> Self:
        """The model of a ``config.json``; `UserError` naming the key for what it does not compute."""
        model = cls(config)
        model.check()
        return model

    def check(self) -> None:
        """Refuse, by the name of the key, what the model does not compute."""
        attend = self._block.attend
        normed = dict.fromkeys(("qk_norm", "use_qk_norm"), True) if self._block.q_norm is not None else {}
        layered = ("layer_types", "sliding_window") if self.default_type(0) is not None else ()
        check_decoder(
            self,
            family=self.family,
            heads=attend.heads,
            kv_heads=attend.kv_heads,
            head_dim=attend.features,
            reads=(*self.reads, *layered),
            computes={**normed, **self.computes},
        )
        for eps in (self._block.eps, self.head.eps):
            number_of(eps, self.config, "the norms' eps", least=0)
        numbers: dict[str, Number] = {"the embedding": self.embed.scale, "the branches": self._block.residual}
        if isinstance(self.head, LMHead):
            numbers |= {"the logits": self.head.scale, "the soft cap": self.head.softcap}
        for what, number in numbers.items():
            number_of(number, self.config, f"the factor of {what}", absent=0.0 if what == "the soft cap" else None)

    def complete_config(self) -> dict[str, Any]:
        """`config` with the sizes of attention and the eps of norms, which it may leave out."""
        attend, eps = self._block.attend, self._block.eps
        sizes = {"num_key_value_heads": attend.kv_heads, "head_dim": attend.features}
        return {
            **self.config,
            **{key: size_of(size, self.config) for key, size in sizes.items()},
            "rms_norm_eps": eps.value(self.config) if isinstance(eps, Setting) else eps,
        }

    def default_type(self, number: int) -> str | None:
        """The type of a layer where ``layer_types`` is absent; None in a family that does not read it.

        The block of a layer finds its type as ``layer_type`` in its configuration, and its window by `layer_window`.
        """
        return None

    @property
    def layer_types(self) -> tuple[str, ...]:
        """The type of each layer; empty in a family that does not read them. `UserError` for what cannot be."""
        count, given = LAYERS.size(self.config), self.config.get("layer_types")
        defaults = [self.default_type(number) for number in range(count)]
        if None in defaults:
            return ()
        return _checked_types(self.kinds, self.window, defaults if given is None else given, count)

    @property
    def window(self) -> Any:
        """The positions that layers with a window see; None without."""
        return self.config.get("sliding_window", self.default_window)

    def layer_config(self, number: int) -> Mapping[str, Any]:
        """With the layer's type and the window, in a family that reads them."""
        types = self.layer_types
        return self.type_config(types[number]) if types else self.config

    def type_config(self, layer_type: str) -> Mapping[str, Any]:
        """The configuration of the layers of one type. A family whose types differ in sizes gives them here."""
        return {**self.config, LAYER_TYPE: layer_type, "sliding_window": self.window}

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """The ``config.json`` from which the RoPE of the layers of one type is read; the type is empty if a family does
        not read them.
        """
        return of_layer_type(self.config, layer_type)

    def ropes(self) -> dict[str, Rope]:
        """The end of the tables' names → the RoPE. The end is empty if all layers have one."""
        features = self._block.attend.features
        found = {
            kind: (self.rope_config(kind), size_of(features, self.type_config(kind)))
            for kind in dict.fromkeys(self.layer_types or ("",))
        }
        first = next(iter(found.values()))
        if all(one == first for one in found.values()):
            return {"": Rope(*first)}
        return {f"_{kind}": Rope(*one) for kind, one in found.items()}

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, [N, P] fp32; with the type of layers behind their names where these differ."""
        found = {end: rope.tables(positions_N) for end, rope in self.ropes().items()}
        return {f"{name}{end}": table for end, tables in found.items() for name, table in tables.items()}

    @property
    def _block(self) -> type[AttentionBlock]:
        """The block of the first layers. All have its sizes of attention."""
        stack = self.layers[0] if isinstance(self.layers, tuple) else self.layers
        assert issubclass(stack.block, AttentionBlock)
        return stack.block


def _checked_types(kinds: tuple[str, ...], window: Any, given: Any, count: int) -> tuple[str, ...]:
    """The types of `count` layers. Raises `UserError` for another number, another type, or a window that is missing."""
    if not isinstance(given, list | tuple) or len(given) != count:
        found = f"has {len(given)} entries" if isinstance(given, list | tuple) else f"is {given!r}"
        raise UserError(
            f"config.json: `layer_types` {found}, and the model has {count} layers (`num_hidden_layers`). "
            f"Fix: use the model's own config.json."
        )
    if other := sorted({str(kind) for kind in given} - set(kinds)):
        raise not_computed(
            [f"`layer_types` has layers of type `{other[0]}`, and only {' and '.join(kinds)} are available"]
        )
    if SLIDING in given and (not isinstance(window, int) or isinstance(window, bool) or window < 1):
        raise UserError(
            f"config.json: `layer_types` has layers with a sliding window, and `sliding_window` is {window!r}. "
            f"Fix: use the model's own config.json."
        )
    return tuple(given)


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
    ropes = model.ropes().values() if isinstance(model, Decoder) else [Rope(config, size_of(head_dim, config))]
    for rope in ropes:
        if rope.rotary != rope.head_dim and "partial_rotary_factor" not in reads:
            raise not_computed(
                [f"`partial_rotary_factor` is {rope.partial!r}: RoPE on a part of each head, which {family} does not "
                 f"compute"]
            )  # fmt: skip
    for prefix, block in {b.identity: (p, b) for p, b in model.blocks(0)}.values():
        block.mixer_specs()
        block.tensor_specs(prefix, block.linear_slots(None), train_base=False, experts=block.expert_slots(None))
    model.embed_specs(train_base=False)
    model.head_specs(train_base=False)
