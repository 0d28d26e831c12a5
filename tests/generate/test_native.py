"""The core's rollout engine, on a tiny Qwen3 and a tiny mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from surogate_model_qwen3 import surogate_model_family as qwen3
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe
from tiny_qwen3 import make_engine, tiny_config
from transformers import Qwen3Config, Qwen3ForCausalLM

from surogate_core.bundles import Completion, Request, RolloutSettings, Sampling
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.pieces import Source
from surogate_core.errors import UserError
from surogate_core.generate import passes
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.passes import tiled_product
from surogate_core.generate.weights import Weights
from surogate_testing import models, tiny

PROMPTS = tiny.documents((5, 17, 40, 16, 1, 5), seed=4)
SAMPLED = Sampling(temperature=1.5, top_p=0.95)


def weights(config: Mapping[str, Any], *, source: Source | None = None, **changes: Any) -> Weights:
    return Weights.load(tiny.assembly(config, **changes), source or tiny.random_source())


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(lora=tiny.lora(), tokens=64)


@pytest.fixture(scope="module")
def shared(engine: Engine) -> Weights:
    return Weights.of(engine)


def opened(shared: Weights, *, slots: int, context: int = 80) -> NativeEngine:
    return NativeEngine(shared, RolloutSettings(slots=slots, context=context))


def requests(samples: int = 1, *, new: int = 7, sampling: Sampling = SAMPLED, **changes: Any) -> list[Request]:
    return [
        Request(
            prompt=tuple(ids), max_new_tokens=new + number, number=number, sample=sample, sampling=sampling, **changes
        )
        for number, ids in enumerate(PROMPTS)
        for sample in range(samples)
    ]


@pytest.mark.parametrize("family", [qwen3(), qwen3_moe()], ids=["qwen3", "qwen3-moe"])
def test_greedy_completions_are_transformers(family):
    models.generates_as_transformers(family)


def test_bits_do_not_depend_on_slots_or_neighbours(shared):
    expected = opened(shared, slots=40).generate(requests(2))
    assert len({completion.ids for completion in expected}) > 9
    for slots in (1, 17):
        assert opened(shared, slots=slots, context=64).generate(requests(2)) == expected
    some = requests(2)[::-3]
    assert opened(shared, slots=5).generate(some) == expected[::-3]


def test_bits_do_not_depend_on_the_experts_of_neighbours():
    config = {**qwen3_moe().presets["tiny"], "vocab_size": 61, "num_hidden_layers": 2}
    made = weights(config, build=qwen3_moe().build, lora=tiny.lora())
    expected = opened(made, slots=20).generate(requests(2))
    assert opened(made, slots=2).generate(requests(2)) == expected
    assert [opened(made, slots=1).generate([r])[0] for r in requests()[:2]] == expected[:4:2]


def test_equal_prompts_are_prefilled_once(shared, monkeypatch):
    filled: list[tuple[int, ...]] = []
    prefill = NativeEngine._prefill

    def counted(self, fills):
        filled.extend(fill.ids[fill.start :] for fill in fills)
        return prefill(self, fills)

    monkeypatch.setattr(NativeEngine, "_prefill", counted)
    opened(shared, slots=4).generate(requests(5))
    # The last prompt equals none before it; each is filled once, in whichever slots its samples are.
    assert filled == [tuple(ids) for ids in PROMPTS]


def test_prompts_share_the_segments_that_they_begin_with(shared, monkeypatch):
    begin = tuple(PROMPTS[2])
    two = [Request(prompt=(*begin, *more), max_new_tokens=4, sampling=SAMPLED) for more in ((1, 2), (3,))]
    expected = [opened(shared, slots=1).generate([request])[0] for request in two]
    starts: list[int] = []
    prefill = NativeEngine._prefill

    def noted(self, fills):
        starts.extend(fill.start for fill in fills)
        return prefill(self, fills)

    monkeypatch.setattr(NativeEngine, "_prefill", noted)
    assert opened(shared, slots=1).generate(two) == expected
    assert starts == [0, 32]


def test_the_weights_are_those_of_the_next_step():
    engine = make_engine()
    made = opened(Weights.of(engine), slots=2)
    before = made.generate(requests(sampling=Sampling(temperature=0)))
    engine.train_step(tiny.batches(0), step=0, lr=0.1)
    after = made.generate(requests(sampling=Sampling(temperature=0)))
    assert before != after
    assert opened(Weights.of(engine), slots=3).generate(requests(sampling=Sampling(temperature=0))) == after


def test_log_probabilities_are_those_of_the_training_forward(engine, shared):
    for request, completion in zip(requests()[:3], opened(shared, slots=3).generate(requests()[:3]), strict=True):
        whole = [*request.prompt, *completion.ids]
        expected = torch.log_softmax(logits_of(engine, whole), -1)[len(request.prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(completion.logprobs), atol=1e-5)


def test_tempered_log_probabilities_are_those_of_the_logits_over_the_temperature(engine, shared):
    """Only requests that ask for them get them; filters and greedy choices change nothing."""
    samplings = [
        Sampling(temperature=0.7, tempered_logprobs=True, top_k=5),
        Sampling(temperature=0.7),
        Sampling(temperature=0, tempered_logprobs=True),
        Sampling(temperature=2.0, tempered_logprobs=True, repetition_penalty=1.3),
    ]
    asked = [replace(one, sampling=sampling) for one, sampling in zip(requests(new=3) * 2, samplings, strict=False)]
    for request, completion, heat in zip(
        asked, opened(shared, slots=4).generate(asked), (0.7, 1.0, 1.0, 2.0), strict=True
    ):
        whole = [*request.prompt, *completion.ids]
        expected = torch.log_softmax(logits_of(engine, whole) / heat, -1)[len(request.prompt) - 1 : -1]
        chosen = expected.gather(1, torch.tensor(completion.ids)[:, None])[:, 0]
        assert torch.allclose(chosen, torch.tensor(completion.logprobs), atol=1e-5)


def logits_of(engine: Engine, document: Sequence[int]) -> torch.Tensor:
    return engine.logits(tiny.batch([document], tokens=64))[: len(document)]


def test_the_penalty_avoids_what_is_there(shared):
    plain, strong = (
        opened(shared, slots=2).generate(requests(sampling=Sampling(temperature=0, repetition_penalty=p))[:1])[0]
        for p in (1.0, 1e6)
    )
    assert len(set(strong.ids)) == len(strong.ids)
    assert not set(strong.ids) & set(PROMPTS[0])
    assert plain != strong


def test_logits_that_are_not_numbers_are_an_error():
    source = tiny.random_source()
    made = weights(tiny.CONFIG, lora=tiny.lora(), source=lambda spec: source(spec) * float("nan"))
    with pytest.raises(UserError, match=r"the model.s logits are not numbers: embed\.weight has NaN"):
        opened(made, slots=1).generate(requests()[:1])


def test_stop_tokens_and_lengths(shared):
    (free,) = opened(shared, slots=1).generate(requests()[:1])
    stop = free.ids[3]
    cut = free.ids[: free.ids.index(stop) + 1]
    (stopped,) = opened(shared, slots=1).generate([replace(requests()[0], stop_ids=frozenset({stop}))])
    assert stopped == Completion(ids=cut, logprobs=free.logprobs[: len(cut)], reason="stop")
    assert free.reason == "length"
    assert len(free.ids) == 7


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + 2 * i for i in range(8)],
    "original_max_position_embeddings": 24,
}


@pytest.mark.parametrize(
    "rope", [{"rope_type": "dynamic", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0}, LONGROPE]
)
def test_scaled_positions_are_transformers(rope):
    config = tiny_config(
        max_position_embeddings=24, rope_parameters={"rope_theta": 10_000.0, **rope}, tie_word_embeddings=True
    )
    config.pop("rope_theta")
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
    with torch.no_grad():
        for tensor in state.values():
            tensor.add_(torch.randn_like(tensor) * 0.2)
    made = weights(
        model.config.to_dict(), build=qwen3().build, lora=tiny.lora(targets=()), source=tiny.tensor_source(state)
    )
    ids = PROMPTS[1]
    (found,) = opened(made, slots=1).generate(
        [Request(prompt=tuple(ids), max_new_tokens=20, sampling=Sampling(temperature=0))]
    )
    given = torch.tensor([ids])
    theirs = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        max_new_tokens=20,
        do_sample=False,
        eos_token_id=None,
        use_cache=rope is not LONGROPE,  # its cache keeps the keys of the short factors
    )
    assert list(found.ids) == theirs[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def long() -> Weights:
    """A model whose angles change beyond 24 tokens."""
    config = tiny_config(rope_parameters={"rope_theta": 10_000.0, **LONGROPE}, initializer_range=0.3)
    return weights(config, build=qwen3().build, lora=tiny.lora(targets=()))


@pytest.mark.parametrize("stepped", [False, True])
def test_a_text_that_grows_beyond_the_short_factors_has_the_long_ones(stepped, long):
    """Every token is chosen with the angles of the text before it, whatever was in the slot and runs beside it."""
    prompts = [PROMPTS[1], PROMPTS[3], (*PROMPTS[1], *PROMPTS[3][:7]), PROMPTS[1][:9], PROMPTS[2]]
    penalty = Sampling(temperature=1.2, repetition_penalty=1.5, top_p=0.9)
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=13 + n, number=n, sampling=penalty if n % 2 else SAMPLED)
        for n, ids in enumerate(prompts)
    ]
    settings = RolloutSettings(slots=2, context=64, frozen=True)
    engine = NativeEngine(long, settings, stepped=stepped)
    found = engine.generate(asked)
    assert [len(one.ids) for one in found] == [13, 14, 15, 16, 17]
    other = NativeEngine(long, settings)
    for request, one in zip(asked, found, strict=True):
        for count, (token, logprob) in enumerate(zip(one.ids, one.logprobs, strict=True)):
            (logprobs,) = other.logprobs([(*request.prompt, *one.ids[:count], token)])
            if len(request.prompt) + count != 24:  # this document is longer than the text that the token was chosen by
                assert logprob == pytest.approx(logprobs[-1], abs=1e-4)
    # A second time, where slots have keys of the same texts with either factors.
    for one, again in zip(found, engine.generate(asked), strict=True):
        assert (again.ids, again.reason) == (one.ids, one.reason)
        assert again.logprobs == pytest.approx(one.logprobs, abs=1e-4)


def test_prompts_share_nothing_if_their_angles_differ(long, monkeypatch):
    starts: list[int] = []
    prefill = NativeEngine._prefill

    def noted(self, fills):
        starts.extend(fill.start for fill in fills)
        return prefill(self, fills)

    monkeypatch.setattr(NativeEngine, "_prefill", noted)
    ids = tuple(PROMPTS[2])
    engine = NativeEngine(long, RolloutSettings(slots=1, context=64, frozen=True))
    for length in (20, 24, 30, 40):
        engine.generate([Request(prompt=ids[:length], max_new_tokens=1, sampling=SAMPLED)])
    assert starts == [0, 16, 0, 16]


def test_a_tiled_product_is_the_plain_one():
    x, w = torch.randn(50, 8), torch.randn(4, 6, 8)
    ends = torch.tensor([20, 20, 37, 50], dtype=torch.int32)
    expected = torch.cat([x[:20] @ w[0].t(), x[20:37] @ w[2].t(), x[37:] @ w[3].t()])
    assert torch.allclose(tiled_product(x, w, ends), expected, atol=1e-5)
    # A row's bits are those that it has among other rows of its expert.
    other = torch.cat([x[5:9], x[20:37]])
    found = tiled_product(other, w, torch.tensor([4, 4, 21, 21], dtype=torch.int32))
    assert torch.equal(found[:4], tiled_product(x, w, ends)[5:9])
    assert passes.ROWS == 16


def test_log_probabilities_of_documents(engine, shared):
    documents = [PROMPTS[0], PROMPTS[1], PROMPTS[4]]
    found = opened(shared, slots=2).logprobs(documents)
    for document, values in zip(documents, found, strict=True):
        expected = torch.log_softmax(logits_of(engine, document), -1)
        wanted = [expected[i, token].item() for i, token in enumerate(document[1:])]
        assert values == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("name", ["nf4", "fp8", "nvfp4", "host"])
def test_weights_in_a_format_or_elsewhere(name, installed):
    kind = "offload" if name == "host" else "quant"
    offered = installed.get(kind, name)
    changes = {"offloader": offered} if kind == "offload" else {"weight_format": offered.build(offered.options())}
    engine = tiny.engine(lora=tiny.lora(), **changes)
    document = PROMPTS[1]
    expected = torch.log_softmax(engine.logits(tiny.batch([document])), -1)
    wanted = [expected[i, token].item() for i, token in enumerate(document[1:])]
    loaded = Weights.load(tiny.assembly(lora=tiny.lora(), **changes), tiny.random_source())
    found = opened(Weights.of(engine), slots=1).logprobs([document])
    assert found[0] == pytest.approx(wanted, abs=1e-5)
    assert opened(loaded, slots=2).logprobs([document]) == found
