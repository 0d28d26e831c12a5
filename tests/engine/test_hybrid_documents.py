"""A changed token of one document changes no bit of another: training, evaluation and generation of the hybrids.

Documents are packed, and only those of one group have labels. Whatever the others contain, the loss and every gradient
keep their bits; experts round by the number of their rows, and are compared within `ROUNDING`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import hybrids
import pytest
import torch
from surogate_task_preference.objectives import PREFERRED, dpo
from surogate_task_preference.options import DPOOptions
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, MicroBatch
from surogate_core.bundles import Request, RolloutSettings, Sampling
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_testing import tiny

torch.set_num_threads(1)

TOKENS = 160
LENGTHS = (65, 1, 2, 63, 20)
"""Around a chunk of a scan, and as short as documents are."""
TRAINED = (2, 3)
"""The documents with labels, a pair of DPO: two tokens behind a document of one, and a token less than a chunk."""
SIDES = {2: 1.0, 3: -1.0}
ROUNDING = 1e-5
NAMES = list(hybrids.CONFIGS)
"""Names of the models."""


def documents() -> list[list[int]]:
    return tiny.documents(LENGTHS, seed=3)


def changed(ids: Sequence[Sequence[int]], number: int, place: int) -> list[list[int]]:
    """The documents with another token in one of them."""
    found = [list(document) for document in ids]
    found[number][place] = (found[number][place] + 1) % tiny.VOCABULARY
    return found


def neighbours(ids: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """Each document without labels changed at its first token and at its last, which is next to a border."""
    others = [number for number in range(len(ids)) if number not in TRAINED]
    return [changed(ids, number, place) for number in others for place in (0, len(ids[number]) - 1)]


def batch(ids: Sequence[Sequence[int]], columns: Sequence[str] = ()) -> MicroBatch:
    """The packed documents; labels and columns are those of the trained ones."""
    wanted = [[number in TRAINED] * len(document) for number, document in enumerate(ids)]
    made = tiny.batch(ids, tokens=TOKENS, labelled=wanted)
    trained_N = made.labels != IGNORE_LABEL
    drawn = torch.rand(TOKENS, generator=torch.Generator().manual_seed(1)) - 2
    sides = torch.cat([torch.full((len(d),), SIDES.get(n, 0.0)) for n, d in enumerate(ids)])
    side_N = torch.cat([sides, torch.zeros(TOKENS - len(sides))])
    values: Mapping[str, Tensor] = {PREFERRED: side_N, WEIGHTS: trained_N.float()}
    return replace(made, columns={name: values.get(name, drawn.masked_fill(~trained_N, 0.0)) for name in columns})


def grpo() -> Any:
    """GRPO's objective of two iterations, against a reference."""
    from surogate_task_grpo.policy_losses import POLICY_LOSSES

    from surogate_core.bundles import part_of
    from surogate_reinforcement.policy import Policy
    from surogate_testing.policy_losses import LossSettings

    spec = next(one for one in POLICY_LOSSES if one.name == "grpo")
    return Policy(part_of("policy_loss", spec), LossSettings(num_iterations=2, beta=0.1)).objective()


OBJECTIVES = {"sft": lambda: tiny.CROSS_ENTROPY, "dpo": lambda: dpo(DPOOptions()), "grpo": grpo}


def trained(made: Any, ids: Sequence[Sequence[int]], columns: Sequence[str]) -> dict[str, Tensor]:
    """The loss and every gradient."""
    found = tiny.gradients(made, [batch(ids, columns)])
    loss = made.evaluate([batch(ids, columns)])[0]
    return {**found, "loss": torch.tensor([loss], dtype=torch.float64)}


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_of_a_document_do_not_see_its_neighbours(name: str, objective: str) -> None:
    chosen = OBJECTIVES[objective]()
    columns = [*chosen.columns, *([WEIGHTS] if objective == "grpo" else [])]
    made = hybrids.engine(name, tokens=TOKENS, objective=chosen, columns=columns)
    ids = documents()
    expected = trained(made, ids, columns)
    for other in neighbours(ids):
        same(trained(made, other, columns), expected, exact="experts" not in name)
    own = trained(made, changed(ids, TRAINED[1], 0), columns)
    error, _ = tiny.worst({"loss": own["loss"]}, {"loss": expected["loss"]})
    assert error > ROUNDING, "a token of its own must matter"


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, exact: bool) -> None:
    if exact:
        tiny.ensure_same_bits(found, expected, "with another neighbour")
    else:
        error, where = tiny.worst(found, expected)
        assert error <= ROUNDING, where


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_and_completions_of_a_document_do_not_see_its_neighbours(name: str) -> None:
    """By the forward that evaluates and that computes references, and by the engine that generates."""
    made = hybrids.engine(name, tokens=TOKENS)
    native = NativeEngine(Weights.of(made), RolloutSettings(slots=5, context=128))
    ids, starts = documents(), [sum(LENGTHS[:n]) for n in range(len(LENGTHS))]

    def found(ids: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        asked = [
            Request(prompt=tuple(one), max_new_tokens=8, number=n, sampling=Sampling(temperature=1.0))
            for n, one in enumerate(ids)
        ]
        done, scored = native.generate(asked), native.logprobs(ids)
        whole = made.logprobs(tiny.batch(ids, tokens=TOKENS)).double()
        parts: dict[str, Tensor] = {}
        for n in TRAINED:
            parts |= {
                f"{n}: ids": torch.tensor(done[n].ids),
                f"{n}: of completion": torch.tensor(done[n].logprobs, dtype=torch.float64),
                f"{n}: of prompt": torch.tensor(scored[n], dtype=torch.float64),
                f"{n}: packed": whole[starts[n] : starts[n] + LENGTHS[n]].clone(),
            }
        return parts

    expected = found(ids)
    for other in neighbours(ids):
        same(found(other), expected, exact="experts" not in name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_state_that_crossed_a_border_would_show(name: str) -> None:
    """Two documents as one: the first token changes what is far beyond the convolution by more than 1e-3."""
    made = hybrids.engine(name, tokens=TOKENS)
    first, second = tiny.documents((63, 40), seed=4)
    apart, together = (
        made.logits(tiny.batch(parts, tokens=TOKENS))[63 + 20 : 103].clone()
        for parts in ([first, second], [[*first, *second]])
    )
    assert tiny.relative_error(together, apart) > 1e-3
