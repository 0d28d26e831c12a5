"""gpt-oss (arXiv 2508.10925): attention with sinks and alternating windows, and experts with biases in every layer.

Shape suffixes: N tokens, D model features, I features of an expert, E experts, C experts of a token, R = N·C rows
sorted by expert.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from surogate_core.plugin import UserError, decoder, dsl, ops

E = dsl.Dim("num_local_experts")
C = dsl.Dim("num_experts_per_tok")
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
FILES: Mapping[str, bool] = {"always": True, "transposed": True}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""The RoPE of a file that names none, as transformers has it."""


class GptOssBlock(decoder.AttentionBlock):
    """One decoder layer. Every token goes to the C experts of largest score, weighted by their softmax."""

    choices, limit, alpha = C, dsl.Setting("swiglu_limit"), dsl.Setting("swiglu_alpha")
    q, k, v, o = decoder.attention_slots(bias=dsl.Setting("attention_bias"))[:4]
    attend = dsl.Attention(decoder.H, decoder.K, decoder.E, window=decoder.layer_window, sinks=True)
    sinks = dsl.Param("self_attn.sinks", decoder.H, init="normal", role="scalar")
    router = dsl.Param("mlp.router.weight", E, decoder.D, init="normal", role="router")
    router_bias = dsl.Param("mlp.router.bias", E, init="zeros", role="router")
    # Even rows are of the gate, odd ones of up.
    gate_up = dsl.Experts(
        GATE_UP.replace("experts", "experts.{e}"),
        E,
        C,
        decoder.D,
        decoder.F + decoder.F,
        region="ffn",
        fused=GATE_UP,
        **FILES,
    )
    gate_up_bias = dsl.Param("mlp.experts.gate_up_proj_bias", E, decoder.F + decoder.F, init="zeros", role="scalar")
    down = dsl.Experts(
        DOWN.replace("experts", "experts.{e}"), E, C, decoder.F, decoder.D, region="ffn", fused=DOWN, **FILES
    )
    down_bias = dsl.Param("mlp.experts.down_proj_bias", E, decoder.D, init="zeros", role="scalar")
    tokens, probability, z, mass = dsl.router_sides(E)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """[N, D] → [N, D], and what the router reports."""
        x = x + self.attention(self.normed(x, self.input_norm), tables)
        h = self.normed(x, self.post_norm)
        logits_NE = (h @ self.router.t() + self.router_bias).float()
        # The softmax over all experts, divided by its sum over the chosen ones, is that over the chosen ones.
        routes = dsl.Routes.of(logits_NE, self.choices, renormalise=True)
        y_ND = dsl.mixture(h, routes, (self.gate_up,), self.activated, self.down)
        y_ND = y_ND + routes.combined_bias(self.down_bias).to(x.dtype)
        return x + y_ND, dsl.router_figures(logits_NE, routes, tables)

    def activated(self, routes: dsl.Routes, rows_RI: Tensor) -> Tensor:
        """The gated activation of sorted rows, gates and values in turn."""
        rows_RI = routes.biased(rows_RI, self.gate_up_bias)
        return ops.clamped_swiglu(rows_RI[:, ::2], rows_RI[:, 1::2], self.limit, self.alpha)


class GptOss(decoder.Decoder):
    """The causal language model."""

    family, architecture = "gpt-oss", "GptOssForCausalLM"
    layers = dsl.Stack(GptOssBlock, decoder.LAYERS, decoder.PREFIX)
    defaults: ClassVar[Mapping[str, Any]] = {
        "attention_bias": True,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "num_experts_per_tok": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }
    reads = ("attention_bias", "num_local_experts", "swiglu_limit", "swiglu_alpha")

    def default_type(self, number: int) -> str:
        """The first layer slides, and then every second one."""
        return decoder.FULL if number % 2 else decoder.SLIDING

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """`YARN` where the file names none."""
        given = self.config.get("rope_scaling") or self.config.get("rope_parameters")
        return self.config if given else {**self.config, "rope_scaling": YARN}

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        super().check()
        experts, choices = E.size(self.config), C.size(self.config)
        if choices > experts:
            raise UserError(
                f"config.json: `num_experts_per_tok` ({choices}) is larger than `num_local_experts` ({experts}). "
                f"Fix: use the model's own config.json."
            )


build = GptOss.build
