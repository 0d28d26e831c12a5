"""Rows whose tokens a grammar decides, beside rows that are free."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surogate_core.bundles import Request, RolloutEngineSpec, RolloutSettings, Sampling
from surogate_core.generate.decoding import BLOCK, SteppedRunner
from surogate_core.generate.masks import packed_masks, unpacked
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.sequences import Running
from surogate_core.generate.weights import Weights
from surogate_testing import rollouts, tiny
from surogate_testing.rollouts import Stepwise

STOP = tiny.VOCABULARY - 1
PROMPTS = tiny.documents((5, 17, 3, 16, 1, 5), seed=4)
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "sampled": Sampling(temperature=1.5),
    "hot": Sampling(temperature=1e6),
    "filters": Sampling(temperature=1.5, top_k=3, top_p=0.5, min_p=0.1),
    "penalty": Sampling(temperature=1.2, repetition_penalty=1.5, top_p=0.9),
    "tempered": Sampling(temperature=1.5, tempered_logprobs=True),
}


@pytest.fixture(scope="module")
def shared() -> Weights:
    return Weights.load(tiny.assembly(lora=tiny.lora()), tiny.random_source())


def opened(shared: Weights, *, slots: int = 6, stepped: bool = False) -> NativeEngine:
    return NativeEngine(shared, RolloutSettings(slots=slots, context=64), stepped=stepped)


def requests(sampling: Sampling, held: tuple[int, ...] = ()) -> list[Request]:
    """Two blocks and more of tokens for each prompt; those of some numbers are held to a grammar."""
    return [
        Request(
            prompt=tuple(ids),
            max_new_tokens=2 * BLOCK + 1 + number,
            number=number,
            sampling=sampling,
            grammar=Stepwise(BLOCK + 3 * number, STOP) if number in held else None,
            stop_ids=frozenset({STOP}) if number in held else frozenset(),
        )
        for number, ids in enumerate(PROMPTS)
    ]


@pytest.mark.slow_cases("hot", "tempered", "filters")
@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_held_rows_keep_to_their_grammars_and_free_rows_keep_their_bits(shared, name, stepped):
    held = (1, 3, 5)
    asked = requests(SAMPLINGS[name], held)
    free = opened(shared, stepped=stepped).generate(requests(SAMPLINGS[name]))
    found = opened(shared, slots=4, stepped=stepped).generate(asked)
    for number, (request, completion) in enumerate(zip(asked, found, strict=True)):
        if number not in held:
            assert completion.ids == free[number].ids
            same = completion.logprobs == free[number].logprobs
            assert same if not stepped else completion.logprobs == pytest.approx(free[number].logprobs, abs=1e-5)
            continue
        grammar = request.grammar
        assert isinstance(grammar, Stepwise)
        assert grammar.holds(completion.ids)
        whole = len(completion.ids) == grammar.length + 1
        assert completion.reason == ("stop" if whole else "length")
    # Each was free to be another text without its grammar.
    assert all(found[number].ids != free[number].ids for number in held)
    alone = [opened(shared, stepped=stepped).generate([asked[number]])[0].ids for number in held]
    assert alone == [found[number].ids for number in held]


def test_log_probabilities_are_those_of_all_tokens(shared):
    asked = requests(SAMPLINGS["sampled"], (0, 2))
    engine = opened(shared)
    for request, completion in zip(asked, engine.generate(asked), strict=True):
        whole = [*request.prompt, *completion.ids]
        values = opened(shared).logprobs([whole])[0][-len(completion.ids) :]
        assert completion.logprobs == pytest.approx(values, abs=1e-5)


def test_steps_of_free_rows_alone_are_blocks_again(shared):
    engine = opened(shared, stepped=True)
    runner = engine._runner
    assert isinstance(runner, SteppedRunner)
    steps: list[tuple[int, bool]] = []
    queue = runner._queue

    def noted(kind, count):
        steps.append((count, kind.masked))
        return queue(kind, count)

    runner._queue = noted  # type: ignore[method-assign]
    short = replace(requests(SAMPLINGS["greedy"], (0,))[0], max_new_tokens=4)
    engine.generate([short, requests(SAMPLINGS["greedy"])[1]])
    assert steps[:3] == [(1, True)] * 3
    assert (BLOCK, False) in steps
    assert not any(masked for _, masked in steps[3:])
    steps.clear()
    engine.generate(requests(SAMPLINGS["greedy"]))
    assert steps
    assert not any(masked for _, masked in steps)


@pytest.mark.parametrize("size", [31, 32, 33, 61])
def test_masks_of_any_vocabulary(size):
    stop, words = size - 1, -(-size // 32)
    grammar = Stepwise(4, stop, size=size)
    request = Request(prompt=(0,), max_new_tokens=3, grammar=grammar, stop_ids=frozenset({stop}))
    constraint = grammar.begin()
    constraint.take(4)
    held = Running(index=0, request=request, slot=0, key=(0, 0), constraint=constraint)
    free = Running(index=1, request=Request(prompt=(0,), max_new_tokens=3), slot=1, key=(0, 0))
    assert packed_masks([free], size) is None
    masks_NW = packed_masks([held, free], size)
    assert masks_NW is not None
    assert masks_NW.shape == (2, words)
    allowed_NV = unpacked(masks_NW, size)
    assert allowed_NV[0].nonzero()[:, 0].tolist() == [n for n in range(size) if (n - 4) % 3 == 1 and n != stop]
    assert allowed_NV[1].all()
    assert allowed_NV.dtype == torch.bool


def test_the_contract_of_engines():
    rollouts.holds_completions_to_grammars(RolloutEngineSpec(name="native", open=NativeEngine, constrains=True))
