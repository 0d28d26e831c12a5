"""Log-probabilities of labels under the engine's weights, for references and for ratios of policies.

Shape suffixes: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL
from surogate_core.bundles import Objective
from surogate_core.kernels import ops
from surogate_testing import tiny


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_they_are_those_of_plain_pytorch(chunks: int, temperature: float) -> None:
    made = tiny.engine(head_chunks=chunks)
    for step, batch in enumerate(tiny.batches(0, 2)):
        made.train_step([batch], step=step, lr=0.1)
        found_N = made.logprobs(batch, temperature=temperature)
        log_NV = (made.logits(batch).double() / temperature).log_softmax(-1)
        trained_N = batch.labels != IGNORE_LABEL
        expected_N = log_NV.gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
        assert found_N.dtype == torch.float32
        torch.testing.assert_close(found_N[trained_N].double(), expected_N[trained_N], rtol=1e-5, atol=1e-6)
        assert not found_N[~trained_N].any()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_ratio_of_a_policy_to_itself_is_one_to_the_bit(temperature: float) -> None:
    """The log-probabilities are those of the training step that follows."""

    def token_loss(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> Tensor:
        tempered_NV = logits_NV if temperature == 1 else ops.wide(logits_NV) / temperature
        return ops.cross_entropy(tempered_NV, labels_N)

    def figures(logits_NV: Tensor, labels_N: Tensor, columns: Mapping[str, Tensor]) -> list[Tensor]:
        return [(columns["old_logprobs"] + token_loss(logits_NV, labels_N, columns)).abs()]

    objective = Objective(
        name="gap",
        token_loss=token_loss,
        columns=("old_logprobs",),
        figures=("gap",),
        token_figures=figures,
        largest=("gap",),
    )
    made = tiny.engine(objective=objective, columns=objective.columns, lora=tiny.lora(), head_chunks=2, recompute=True)
    for step in range(3):
        batch = replace(tiny.batches(step)[0], columns={"old_logprobs": torch.zeros(tiny.TOKENS)})
        batch = replace(batch, columns={"old_logprobs": made.logprobs(batch, temperature=temperature)})
        assert made.train_step([batch], step=step, lr=0.1).figures() == {"gap": 0.0}
