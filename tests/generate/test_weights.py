"""What generation computes of a model is what training computes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import RolloutSettings
from surogate_core.dsl import Dim, Embedding, LMHead, Param, Setting, Stack
from surogate_core.dsl.inits import uniform
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_testing import tiny

D, EPS = Dim("hidden_size"), Setting("rms_norm_eps", default=1e-6)


class GainedBlock(tiny.TinyBlock):
    """The branch of the feed-forward has a gain for each feature, in fp32."""

    gain = Param("gain", D, init=uniform(0.5, 1.5), role="scalar", dtype="fp32")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        """[N, D] → [N, D]."""
        assert self.gain.dtype == torch.float32
        y = super().forward(x, tables)
        return x + ((y - x).float() * self.gain).to(x.dtype)


class Scaled(tiny.TinyModel):
    """A scaled embedding, which the head shares without the factor; an offset, a factor and a soft cap in the head."""

    embed = Embedding("embed.weight", Dim("vocab_size"), D, scale=lambda config: config["hidden_size"] ** 0.5)
    layers = Stack(GainedBlock, Dim("num_hidden_layers"), "layers.{i}.")
    head = LMHead(
        "head.weight", "final.weight", EPS, Setting("tied", default=True), offset=1.0, scale=0.125, softcap=2.0
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_the_training_forward(dtype: torch.dtype) -> None:
    made = tiny.engine(build=Scaled, dtype=dtype)
    tiny.train(made, 3, lr=0.1)
    (document,) = tiny.documents((13,), seed=3)
    expected = torch.log_softmax(made.logits(tiny.batch([document]))[:13].float(), -1)
    (found,) = NativeEngine(Weights.of(made), RolloutSettings(slots=1, context=32)).logprobs([document])
    errors = [abs(expected[i, document[i + 1]].item() - found[i]) for i in range(12)]
    assert max(errors) < (1e-5 if dtype == torch.float32 else 0.05)
