"""Decays that underflow, and time steps that do: states vanish or stay, and every number is finite."""

from __future__ import annotations

from collections.abc import Mapping

import hybrids
import pytest
import torch
from torch import Tensor

from surogate_testing import tiny

torch.set_num_threads(1)

BATCH = tiny.batch(tiny.documents((20, 1, 10)))


def numbers(name: str, ends: Mapping[str, float]) -> dict[str, Tensor]:
    """Logits and every gradient where tensors of these names are filled with a number."""
    drawn = hybrids.slow()

    def source(spec: hybrids.TensorSpec) -> Tensor:
        filled = [value for end, value in ends.items() if spec.hf_name.endswith(end)]
        return torch.full(spec.shape, filled[0]) if filled else drawn(spec)

    made = tiny.engine(hybrids.CONFIGS[name], build=hybrids.build, source=source)
    return {**tiny.gradients(made, [BATCH]), "logits": made.logits(BATCH).clone()}


@pytest.mark.parametrize("name", ["nemotron-h", "qwen3-5"])
def test_a_decay_beyond_fp32_forgets_everything_and_learns_nothing(name: str) -> None:
    """As the largest that fp32 holds; a rate of e^1000 is infinite, and infinity times a gradient of zero no number."""
    large, largest = (numbers(name, {"A_log": rate}) for rate in (70.0, 1000.0))
    assert all(tensor.isfinite().all() for tensor in largest.values())
    assert torch.equal(largest["logits"], large["logits"])
    assert not any(tensor.any() for end, tensor in largest.items() if end.endswith("A_log"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron-h", "qwen3-5"])
@pytest.mark.parametrize("rate", [-1000.0, 90.0])
def test_a_time_step_that_underflows_changes_no_state(name: str, rate: float) -> None:
    """Whether the rate of the decay underflows too, or is the largest."""
    found = numbers(name, {"A_log": rate, "dt_bias": -1000.0})
    assert all(tensor.isfinite().all() for tensor in found.values())
