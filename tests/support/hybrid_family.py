"""A toy family with every mixer: attention with windows, and a gated delta rule behind a convolution.

`kinds` of the configuration says what each layer is: "full" or "window" attention, or "delta".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, silu

from surogate_core.bundles import ModelFamily
from surogate_core.dsl import (
    Attention,
    Block,
    Convolution,
    Dim,
    Embedding,
    Linear,
    LMHead,
    Model,
    Param,
    Recurrence,
    Setting,
    Stack,
)
from surogate_core.dsl.rope import Rope
from surogate_core.kernels import ops
from surogate_core.kernels.scans import gated_delta_scan
from surogate_testing import tiny

D, F, H = Dim("hidden_size"), Dim("intermediate_size"), Dim("num_attention_heads")
E, C = Dim("head_dim"), Dim("channels")
EPS = Setting("rms_norm_eps", default=1e-6)
CONFIG: Mapping[str, Any] = {
    "model_type": "toy_hybrid",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 8,
    "channels": 3 * 32,
    "kinds": ["window", "delta", "full"],
    "window": 5,
    "softcap": 3.0,
}


class Mixed(Block):
    """What both kinds share: a gated feed-forward."""

    heads, head_dim, eps = H, E, EPS
    norm = Param("norm.weight", D)
    post_norm = Param("post_norm.weight", D)
    o = Linear("o_proj", H * E, D, region="att")
    gate = Linear("gate_proj", D, F, region="ffn")
    up = Linear("up_proj", D, F, region="ffn")
    down = Linear("down_proj", F, D, region="ffn")

    def mixed(self, h: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, H · E]."""
        raise NotImplementedError

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        x = x + self.o(self.mixed(ops.rms_norm(x, self.norm, self.eps), tables))
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Windowed(Mixed):
    """Attention with a window that the layer's configuration gives, a soft cap and sinks."""

    q = Linear("q_proj", D, H * E, region="qkv")
    k = Linear("k_proj", D, H * E, region="qkv")
    v = Linear("v_proj", D, H * E, region="qkv")
    sinks = Param("sinks", H, init="zeros", role="scalar")
    attend = Attention(
        H, H, E, window=Setting("layer_window", default=0), softcap=Setting("softcap", default=0.0), sinks=True
    )

    def mixed(self, h: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        q, k, v = (product(h).unflatten(1, (self.heads, -1)) for product in (self.q, self.k, self.v))
        q, k = (ops.rope(rows, tables["cos"], tables["sin"]) for rows in (q, k))
        return self.attend(q, k, v, sinks=self.sinks).flatten(1)


class Delta(Mixed):
    """The gated delta rule over queries, keys and values that a convolution smooths."""

    qkv = Linear("qkv_proj", D, C, region="qkv")
    beta = Linear("b_proj", D, H, region="qkv")
    decay = Linear("a_proj", D, H, region="qkv")
    kernel = Param("conv1d.weight", C, 4, init="normal", role="weight")
    rate = Param("A_log", H, init="zeros", role="scalar", dtype="fp32")
    conv = Convolution(C, 4)
    scan = Recurrence(gated_delta_scan, (H, E, E))

    def mixed(self, h: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        smooth = silu(self.conv(self.qkv(h), weight_CW=self.kernel))
        q, k, v = smooth.unflatten(1, (3, self.heads, -1)).unbind(1)
        decay = logsigmoid(self.decay(h).float()) * self.rate.exp()
        beta = self.beta(h).float().sigmoid()
        return self.scan(normalize(q, dim=-1), normalize(k, dim=-1), v, decay, beta).flatten(1)


class Hybrid(Model):
    """The causal language model."""

    architecture = "ToyHybridForCausalLM"
    embed = Embedding("embed.weight", Dim("vocab_size"), D)
    layers = Stack(Windowed, Dim("num_hidden_layers", default=lambda c: len(c["kinds"])), "layers.{i}.")
    head = LMHead("head.weight", "final.weight", EPS, tied=Setting("tie_word_embeddings", default=False))

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin."""
        return Rope(self.config, E.size(self.config)).tables(positions_N)

    def layer_config(self, number: int) -> Mapping[str, Any]:
        """The window of one attention."""
        window = self.config["window"] if self.config["kinds"][number] == "window" else 0
        return {**self.config, "layer_window": window}

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        """The blocks of `kinds`."""
        for number, kind in enumerate(self.config["kinds"]):
            made = Delta if kind == "delta" else Windowed
            yield f"layers.{number}.", made(self.layer_config(number), max_seqlen)


FAMILY = ModelFamily(name="toy-hybrid", hf_model_types=("toy_hybrid",), build=Hybrid, presets={"tiny": CONFIG})


def engine(**changes: Any) -> Any:
    """A tiny engine of the family."""
    return tiny.engine(config={**CONFIG, **changes.pop("config", {})}, build=Hybrid, **changes)
