"""Checks that dense decoders of the Llama line share: which `config.json` they support."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from surogate_core.dsl.declare import Model
from surogate_core.dsl.dims import Dim, not_computed, read_key
from surogate_core.dsl.known_keys import check_keys
from surogate_core.dsl.rope import Rope
from surogate_core.errors import UserError


def even_share(config: Mapping[str, Any]) -> int:
    """A head's features where ``head_dim`` is absent: ``hidden_size / num_attention_heads``."""
    width, heads = (Dim(key).size(config) for key in ("hidden_size", "num_attention_heads"))
    if width % heads:
        raise UserError(
            f"config.json: `hidden_size` ({width}) must be a multiple of `num_attention_heads` ({heads}), "
            f"or `head_dim` given."
        )
    return width // heads


def check_decoder(
    model: Model,
    *,
    family: str,
    heads: Dim,
    kv_heads: Dim,
    head_dim: Dim,
    reads: Collection[str] = (),
    computes: Mapping[str, Any] | None = None,
) -> None:
    """Refuse, by the name of the key, what no such block computes, and read every size once.

    A missing or impossible size is an error here, before data are read. `reads`, `computes`: what the family computes
    beyond a plain decoder, as `check_keys` takes them.
    """
    config = model.config
    check_keys(config, family=family, reads=reads, computes=computes)
    if (activation := read_key(config, "hidden_act", "silu")) not in ("silu", "swish") and "hidden_act" not in reads:
        raise not_computed([f"`hidden_act` is {activation!r}, and {family} computes silu alone"])
    if heads.size(config) % kv_heads.size(config):
        raise UserError(
            f"config.json: `num_attention_heads` ({heads.size(config)}) must be a multiple of "
            f"`num_key_value_heads` ({kv_heads.size(config)})."
        )
    Rope(config, head_dim.size(config))
    for prefix, block in {b.identity: (p, b) for p, b in model.blocks(0)}.values():
        block.mixer_specs()
        block.tensor_specs(prefix, block.linear_slots(None), train_base=False, experts=block.expert_slots(None))
    model.embed_specs(train_base=False)
    model.head_specs(train_base=False)
