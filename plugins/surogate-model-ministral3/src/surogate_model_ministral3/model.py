"""Ministral 3 (mistralai/Ministral-3-8B-Base-2512), its language model: Mistral with YaRN and scaled queries.

Shape suffixes: N tokens, H query heads, K key/value heads, E head features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from surogate_core.plugin import decoder, dsl

E = dsl.Dim("head_dim", default=128)
SCALE, BETA = "query_scale", "llama_4_scaling_beta"
ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""Where a file has no RoPE."""


class Ministral3Block(decoder.DenseBlock):
    """One decoder layer."""

    q, k, v, o, attend = decoder.attention_slots(head_dim=E, window=dsl.Setting("sliding_window", default=0))

    def positioned(
        self, q_NHE: Tensor, k_NKE: Tensor, v_NKE: Tensor, tables: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The queries grow with the logarithm of the position, beyond the original ones."""
        q_NHE, k_NKE, v_NKE = super().positioned(q_NHE, k_NKE, v_NKE, tables)
        return q_NHE * tables[SCALE].to(q_NHE.dtype)[:, None, None], k_NKE, v_NKE


class Ministral3(decoder.Decoder):
    """The causal language model."""

    family, architecture = "ministral3", "Ministral3ForCausalLM"
    layers = dsl.Stack(Ministral3Block, decoder.LAYERS, decoder.PREFIX)
    reads = ("sliding_window", BETA)
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}

    def rope_config(self, layer_type: str) -> Mapping[str, Any]:
        """With the family's own RoPE where the file has none."""
        given = any(self.config.get(key) for key in ("rope_parameters", "rope_scaling"))
        return self.config if given else {**self.config, "rope_parameters": ROPE}

    def check(self) -> None:
        """Refuse, by the name of the key, what the blocks do not compute."""
        super().check()
        self._beta()

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        """RoPE's cos and sin, and the scale of the queries [N] fp32."""
        steps_N = (positions_N.float() / self.ropes()[""].original).floor()
        return {**super().tables(positions_N, dtype), SCALE: 1 + self._beta() * torch.log(1 + steps_N)}

    def _beta(self) -> float:
        return dsl.number_of(self.ropes()[""].parameters.get(BETA), self.config, f"`rope_parameters.{BETA}`", least=0)


build = Ministral3.build
