"""Generation on a GPU: steps in CUDA graphs against steps without, against the CPU, and beside training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from gpu_packs import triton_packs
from surogate_model_nemotron_h import surogate_model_family as nemotron_h
from surogate_model_qwen3_5 import surogate_model_family as qwen3_5
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe
from surogate_recipe_fp8 import FP8Options
from surogate_recipe_fp8.gemm import FP8Hybrid
from tiny_qwen3 import make_engine, tiny_config

from surogate_core.bundles import Completion, Request, RolloutSettings, Sampling
from surogate_core.engine.engine import Engine
from surogate_core.generate.decoding import BLOCK, SteppedRunner
from surogate_core.generate.drafts import Repeats
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny
from surogate_testing.rollouts import Stepwise
from surogate_testing.weight_formats import built

pytestmark = pytest.mark.gpu

CONFIG = tiny_config(hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=512, head_dim=64)
PROMPTS = tiny.documents((5, 17, 300, 16, 1, 5), seed=4, vocabulary=512)
GREEDY = Sampling(temperature=0)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(temperature=1.2),
    "filters": Sampling(temperature=1.2, top_k=20, top_p=0.9),
    "penalty": Sampling(temperature=0, repetition_penalty=1.5),
}
GPU = {"device": "cuda", "compiler": "inductor", "cuda_graphs": True}


def source(spec: Any) -> torch.Tensor:
    """Values that bf16 holds exactly, so that CPU and GPU have the same."""
    return tiny.random_source(std=0.1)(spec).bfloat16().float()


def weights(
    config: Any = CONFIG, *, packs: Sequence[Any] = (TORCH_PACK,), lora: bool = True, **changes: Any
) -> Weights:
    adapters = tiny.lora(16) if lora else tiny.lora(targets=())
    changes = {"build": import_module("surogate_model_qwen3").surogate_model_family().build, **changes}
    return Weights.load(tiny.assembly(config, lora=adapters, packs=list(packs), **changes), source)


def opened(made: Weights, *, slots: int = 6, compiled: bool = True, drafts: bool = True) -> NativeEngine:
    engine = NativeEngine(made, RolloutSettings(slots=slots, context=400), drafts=drafts)
    if compiled and made.device.type == "cuda":
        runner(engine)._layers.compiles = True
    return engine


def runner(engine: NativeEngine) -> SteppedRunner:
    found = engine._runner
    assert isinstance(found, SteppedRunner)
    return found


def requests(sampling: Sampling = GREEDY, *, new: int = 3 * BLOCK, **changes: Any) -> list[Request]:
    return [
        Request(prompt=tuple(ids), max_new_tokens=new + number, number=number, sampling=sampling, **changes)
        for number, ids in enumerate(PROMPTS)
    ]


def same(found: Sequence[Completion], expected: Sequence[Completion], bound: float = 1e-3) -> None:
    assert [(c.ids, c.reason) for c in found] == [(c.ids, c.reason) for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


@pytest.fixture(scope="module")
def in_fp32() -> Weights:
    return weights(**GPU)


@pytest.fixture(scope="module")
def exact() -> NativeEngine:
    return opened(weights())


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_tokens_in_fp32_are_those_of_the_cpu(in_fp32, exact, name):
    expected = exact.generate(requests(SAMPLINGS[name]))
    for slots in (1, 3, 6):
        made = opened(in_fp32, slots=slots)
        same(made.generate(requests(SAMPLINGS[name])), expected)
        assert runner(made).eager is None
        assert runner(made)._graphs


def batches() -> list[list[Request]]:
    """Prompts of three shapes of a pass."""
    return [requests(), requests()[:2], requests()[2:3], requests()[::-1]]


def test_prompts_of_many_shapes_are_those_of_the_cpu(in_fp32, exact):
    """With no kernel for packed documents in fp32 they go through the layers in segments; and log-probabilities of
    whole documents.
    """
    made = opened(in_fp32)
    for batch in batches():
        same(made.generate(batch), exact.generate(batch))
    for one, other in zip(made.logprobs(PROMPTS), exact.logprobs(PROMPTS), strict=True):
        assert one == pytest.approx(other, abs=1e-3)


def test_passes_of_prompts_are_launched_captured_and_replayed_with_equal_bits():
    """Graphs of all shapes share one memory."""
    made = opened(weights(packs=triton_packs(), dtype=torch.bfloat16, **GPU))
    launched = [made.generate(batch) for batch in batches()[:3]]
    for _ in range(2):
        for batch, completions in zip(batches(), launched, strict=False):
            same(made.generate(batch), completions, bound=0)
    assert len(runner(made).prompts.graphs) == 3


def test_ends_inside_of_a_block_and_slots_that_are_filled_again(in_fp32, exact):
    asked = requests(SAMPLINGS["sampled"])
    free = exact.generate(asked)
    asked = [replace(one, stop_ids=frozenset({free[n].ids[BLOCK // 2 + n]})) for n, one in enumerate(asked)]
    same(opened(in_fp32, slots=2).generate(asked), exact.generate(asked))


STEPS = {"delta": "gated_delta_step", "mamba": "ssd_step"}
CASES = {
    "plain": {"lora": False},
    "lora": {},
    "nf4": {"weight_format": "nf4"},
    "fp8": {"weight_format": "fp8"},
    "experts": {
        "config": {**qwen3_moe().presets["tiny"], "vocab_size": 512, "num_hidden_layers": 2},
        "build": qwen3_moe().build,
    },
    "delta": {"config": {**qwen3_5().presets["tiny"], "vocab_size": 512}, "build": qwen3_5().build, "lora": False},
    "mamba": {
        "config": {**nemotron_h().presets["tiny"], "vocab_size": 512},
        "build": nemotron_h().build,
        "lora": False,
    },
    # Its products take whole tiles of rows.
    "fp8-hybrid": {
        "config": {**CONFIG, "hidden_size": 256, "intermediate_size": 512, "num_key_value_heads": 4},
        "recipe": FP8Hybrid.of(FP8Options(), None),
        "tokens": 256,
    },
}


@pytest.mark.parametrize("compiled", [False, True], ids=["operations", "compiled"])
@pytest.mark.parametrize("name", list(CASES))
def test_graphs_give_the_bits_of_steps_without(name, compiled):
    changes = dict(CASES[name])
    if "weight_format" in changes:
        module = import_module(f"surogate_quant_{changes['weight_format']}")
        changes["weight_format"] = built(module.surogate_weight_format())
    made = weights(packs=triton_packs(), dtype=torch.bfloat16, **GPU, **changes)
    captured, eager = opened(made, compiled=compiled), opened(made, compiled=compiled)
    runner(eager).eager = "a test"
    found = captured.generate(requests())
    assert runner(captured)._graphs
    assert found == eager.generate(requests())
    for _ in range(2):  # the second pass of a shape is captured, the third one replays it
        assert captured.generate(requests()) == found
        assert len(runner(captured).prompts.graphs) == 1
    if name in STEPS:
        ops = (STEPS[name], "causal_convolution_step", "causal_convolution", f"{STEPS[name][:-5]}(finals)")
        assert {made.programs.kernels.chosen[op, "bfloat16"] for op in ops} == {"triton"}
    # The cache has what the forward of whole documents computes; bf16 rounds differently in products of other sizes.
    whole = [(*request.prompt, *completion.ids) for request, completion in zip(requests(), found, strict=True)]
    for ids, completion in zip(whole, found, strict=True):
        values = torch.tensor(captured.logprobs([ids])[0][-len(completion.ids) :])
        assert (values - torch.tensor(completion.logprobs)).abs().median() < (0.3 if name == "fp8-hybrid" else 0.05)


@pytest.mark.parametrize("compiled", [False, True], ids=["operations", "compiled"])
@pytest.mark.parametrize("name", ["plain", "lora", "nf4", "fp8"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled", "filters"])
def test_drafts_change_no_bit(name, sampling, compiled, monkeypatch):
    """Most of them are right; one in five is wrong."""
    changes = dict(CASES[name])
    if "weight_format" in changes:
        changes["weight_format"] = built(import_module(f"surogate_quant_{name}").surogate_weight_format())
    made = weights(packs=triton_packs(), dtype=torch.bfloat16, **GPU, **changes)
    asked = requests(SAMPLINGS[sampling], new=60)[:3]
    expected = opened(made, compiled=compiled, drafts=False).generate(asked)
    texts = [(*request.prompt, *completion.ids) for request, completion in zip(asked, expected, strict=True)]

    def guess(self: Repeats, count: int) -> list[int]:
        known = len(self.text)
        text = next(text for text in texts if text[:known] == tuple(self.text))
        return [0 if place % 5 == 0 else token for place, token in enumerate(text[known : known + count], known)]

    monkeypatch.setattr(Repeats, "next", guess)
    drafting = opened(made, compiled=compiled)
    drafts = runner(drafting).drafts
    drafts.pays = lambda rows: -1.0
    for _ in range(3):
        assert drafting.generate(asked) == expected
    assert any(kind.drafted for kind in runner(drafting)._graphs)
    assert drafts.right > 3 * 80 > drafts.steps


def engine(config: Any = CONFIG) -> Engine:
    changes: dict[str, Any] = {**GPU, "dtype": torch.bfloat16, "packs": triton_packs(), "tokens": 256}
    return make_engine(config, lora=tiny.lora(16), source=source, **changes)


def test_generation_beside_training_changes_no_bit_of_it_and_sees_every_step():
    batch = tiny.batch(tiny.documents((100, 90), vocabulary=509), tokens=256)
    alone, beside = engine(), engine()
    made = opened(Weights.of(beside))
    found = []
    for step in range(3):
        found.append(made.generate(requests()))
        for one in (alone, beside):
            one.train_step([batch], step=step, lr=1e-2)
    assert len({completions[0].ids for completions in found}) > 1
    for name, master in alone.parameters.masters().items():
        assert torch.equal(master, beside.parameters.masters()[name]), name
    assert made.generate(requests()) == opened(Weights.of(alone)).generate(requests())


def test_the_graphs_of_a_long_call_are_few(in_fp32):
    made = opened(in_fp32, slots=20)
    asked = [replace(one, sample=n // 6, max_new_tokens=60 - n) for n, one in enumerate(requests() * 3)]
    found = made.generate(asked)
    assert {kind.rows for kind in runner(made)._graphs} == {16, 32}
    count = len(runner(made)._graphs)
    assert count <= 4
    assert made.generate(asked) == found
    assert len(runner(made)._graphs) == count


def held(sampling: Sampling, numbers: Sequence[int] = (1, 2, 4)) -> list[Request]:
    """The requests, those of some numbers with a grammar that ends inside of a block, at its end, and behind it."""
    stop = 511
    return [
        replace(one, grammar=Stepwise(BLOCK - 1 + n, stop, size=512), stop_ids=frozenset({stop}))
        if n in numbers
        else one
        for n, one in enumerate(requests(sampling))
    ]


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_rows_with_a_grammar_are_those_of_the_cpu(in_fp32, exact, name):
    asked = held(SAMPLINGS[name])
    expected = exact.generate(asked)
    for slots in (2, 6):
        made = opened(in_fp32, slots=slots)
        found = made.generate(asked)
        same(found, expected)
        assert {kind.masked for kind in runner(made)._graphs} == {True, False}
    assert all(
        request.grammar.holds(completion.ids)
        for request, completion in zip(asked, found, strict=True)
        if isinstance(request.grammar, Stepwise)
    )


def test_graphs_of_held_rows_give_the_bits_of_steps_without_and_free_calls_keep_theirs():
    made = weights(packs=triton_packs(), dtype=torch.bfloat16, **GPU)
    captured, eager = opened(made), opened(made)
    runner(eager).eager = "a test"
    free = captured.generate(requests(SAMPLINGS["filters"]))
    asked = held(SAMPLINGS["filters"])
    found = captured.generate(asked)
    assert any(kind.masked for kind in runner(captured)._graphs)
    assert found == eager.generate(asked)
    for request, completion in zip(asked, found, strict=True):
        if isinstance(request.grammar, Stepwise):
            assert request.grammar.holds(completion.ids)
        assert all(value <= 0 for value in completion.logprobs)  # no NaN where a part of the vocabulary is forbidden
    assert captured.generate(requests(SAMPLINGS["filters"])) == free
