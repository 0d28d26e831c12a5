"""Blocks of steps, as a GPU runs them, on a CPU: the exact runner's tokens, and nothing that waits for the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from replayed_steps import replays
from surogate_model_qwen3 import surogate_model_family as qwen3
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe
from tiny_qwen3 import tiny_config
from torch.utils._python_dispatch import TorchDispatchMode

from surogate_core.bundles import Completion, Request, RolloutEngineSpec, RolloutSettings, Sampling
from surogate_core.generate import decoding
from surogate_core.generate.cache import mixers_of
from surogate_core.generate.decoding import BLOCK, StepKind, SteppedRunner, why_eager, working_bytes
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.passes import tables_of
from surogate_core.generate.prompts import longest_of
from surogate_core.generate.sampling import filtered, tempered
from surogate_core.generate.weights import Weights
from surogate_testing import rollouts, tiny

PROMPTS = tiny.documents((5, 17, 40, 16, 1, 5), seed=4)
GREEDY = Sampling(temperature=0)
SAMPLINGS = {
    "plain": Sampling(temperature=1.5),
    "tempered": Sampling(temperature=1.5, tempered_logprobs=True),
    "filters": Sampling(temperature=1.5, top_k=20, top_p=0.9, min_p=0.01),
    "penalty": Sampling(temperature=1.2, repetition_penalty=1.5, top_p=0.9),
}


def weights(**changes: Any) -> Weights:
    return Weights.load(tiny.assembly(lora=tiny.lora(), **changes), tiny.random_source())


@pytest.fixture(scope="module")
def shared() -> Weights:
    return weights()


def opened(shared: Weights, *, slots: int = 6, context: int = 80, stepped: bool = True) -> NativeEngine:
    return NativeEngine(shared, RolloutSettings(slots=slots, context=context), stepped=stepped)


def requests(sampling: Sampling, *, new: int = 2 * BLOCK + 1, **changes: Any) -> list[Request]:
    return [
        Request(prompt=tuple(ids), max_new_tokens=new + number, number=number, sampling=sampling, **changes)
        for number, ids in enumerate(PROMPTS)
    ]


def same(found: list[Completion], expected: list[Completion]) -> None:
    assert [(c.ids, c.reason) for c in found] == [(c.ids, c.reason) for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_tokens_are_those_of_the_exact_runner(shared, name):
    asked = requests(SAMPLINGS[name])
    asked[1] = replace(asked[1], sampling=GREEDY)
    expected = opened(shared, stepped=False).generate(asked)
    assert len({c.ids for c in expected}) == len(asked)
    for slots in (1, 3, 6) if name == "plain" else (3,):
        same(opened(shared, slots=slots).generate(asked), expected)


@pytest.mark.parametrize("check", rollouts.CHECKS, ids=lambda check: check.__name__)
def test_the_contract_of_engines(check):
    check(RolloutEngineSpec(name="stepped", open=partial(NativeEngine, stepped=True), constrains=True))


def test_a_mixture_of_experts():
    config = {**qwen3_moe().presets["tiny"], "vocab_size": 61, "num_hidden_layers": 2}
    made = Weights.load(tiny.assembly(config, build=qwen3_moe().build, lora=tiny.lora()), tiny.random_source())
    asked = requests(GREEDY)
    same(opened(made, slots=4).generate(asked), opened(made, stepped=False).generate(asked))


def test_working_memory_counts_what_a_pass_has(shared):
    vocabulary, width = shared.plan.assembly.model.vocab_size, shared.plan.assembly.model.width
    mixers = mixers_of(shared)
    many = working_bytes(shared, mixers, 256, 2048)
    assert many > 256 * vocabulary * 40 + 2 * 65536 * width * 4
    assert many > working_bytes(shared, mixers, 16, 2048) > working_bytes(shared, mixers, 1, 8)
    # A prompt of a million tokens is one pass.
    assert working_bytes(shared, mixers, 1, 2**20) > 2**20 * 6 * width * 4
    config = {**qwen3_moe().presets["tiny"], "num_hidden_layers": 2}
    made = Weights.load(tiny.assembly(config, build=qwen3_moe().build), tiny.random_source())
    (piece, *_) = made.plan.layers
    features = sum(slot.outputs for slot in piece.slots)
    features += sum(slot.outputs * config["num_experts_per_tok"] for slot in piece.experts)
    assert (
        working_bytes(made, mixers_of(made), 1, 8192) > 8192 * (2 * features + 6 * made.plan.assembly.model.width) * 4
    )


def test_tokens_behind_an_end_are_dropped(shared):
    free = opened(shared).generate(requests(SAMPLINGS["plain"]))
    place = BLOCK // 2 + 1  # inside of the first block
    stop = free[0].ids[place]
    asked = requests(SAMPLINGS["plain"])
    asked[0] = replace(asked[0], stop_ids=frozenset({stop}))
    seen: list[tuple[int, int]] = []

    def on_token(index: int, token: int) -> bool:
        seen.append((index, token))
        return index == 1 and sum(i == 1 for i, _ in seen) == BLOCK + 3

    found = opened(shared, slots=2).generate(asked, on_token=on_token)
    cut = free[0].ids.index(stop) + 1
    assert found[0].ids == free[0].ids[:cut]
    assert found[0].reason == found[1].reason == "stop"
    assert found[1].ids == free[1].ids[: BLOCK + 3]
    # The slots of both are filled again, and the caller sees exactly the tokens that count, in order.
    same(found[2:], free[2:])
    for index, completion in enumerate(found):
        assert tuple(token for i, token in seen if i == index) == completion.ids


def test_the_last_tokens_of_a_full_slot(shared):
    asked = [Request(prompt=tuple(PROMPTS[2]), max_new_tokens=new, sampling=GREEDY) for new in (8, 1, 2)]
    # A block goes past the end of every slot.
    same(opened(shared, slots=2, context=48).generate(asked), opened(shared, stepped=False).generate(asked))


def test_a_block_is_started_before_the_last_one_is_read(shared, monkeypatch):
    events: list[str] = []
    queue, read = SteppedRunner._queue, decoding.StartedSteps.read

    def queued(self, kind, steps):
        events.append(f"queue {steps}")
        return queue(self, kind, steps)

    def noted(self):
        events.append("read")
        return read(self)

    monkeypatch.setattr(SteppedRunner, "_queue", queued)
    monkeypatch.setattr(decoding.StartedSteps, "read", noted)
    opened(shared).generate([Request(prompt=(1, 2), max_new_tokens=2 * BLOCK + 3, sampling=GREEDY)])
    # The first token follows from the prompt.
    assert events == [f"queue {BLOCK}", f"queue {BLOCK}", "read", "queue 2", "read", "read"]


class NoHost(TorchDispatchMode):
    """Refuses what reads a value on the host, and shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", list(SAMPLINGS))
def test_a_step_reads_nothing_on_the_host(shared, name):
    engine = opened(shared)
    runner = engine._runner
    assert isinstance(runner, SteppedRunner)
    sampling = SAMPLINGS[name]
    engine.generate(requests(sampling, new=2))
    kind = StepKind(
        rows=16,
        longest=80,
        filters=filtered([sampling]),
        tempered=tempered([sampling]),
        penalty=sampling.repetition_penalty != 1,
        masked=name == "filters",
        drafted=name == "plain",
    )
    with torch.no_grad(), NoHost():
        runner._state.done.zero_()
        for _ in range(BLOCK):
            runner.step(kind)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), NoHost():
        runner._state.done.item()


def test_one_traced_program_serves_prompts_steps_and_all_layers(shared):
    asked = requests(GREEDY)
    engine = opened(shared, slots=3)
    runner = engine._runner
    assert isinstance(runner, SteppedRunner)
    runner._layers.compiles = True
    same(engine.generate(asked), opened(shared, stepped=False).generate(asked))
    assert [rows for _, rows in shared.compiled] == [16]
    assert len(runner._layers._by_key) == 2
    again = opened(shared, slots=5)
    again._runner._layers.compiles = True
    again.generate(asked[:1])
    assert len(shared.compiled) == 1


def test_tables_have_the_layout_of_training():
    config = tiny_config()
    made = Weights.load(tiny.assembly(config, build=qwen3().build, lora=tiny.lora(targets=())), tiny.random_source())
    positions = torch.tensor([3, 0, 7])
    found = tables_of(made, torch.zeros(3, dtype=torch.int64), positions, torch.tensor([3, 5, 9]))
    signatures = made.plan.tables
    assert len(found) == len(signatures)
    for table, (name, signature) in zip(found, signatures.items(), strict=True):
        assert table.is_contiguous(), name
        assert (table.dtype, table.shape[1:]) == (signature.dtype, signature.shape[1:]), name
    whole = made.plan.assembly.model.tables(torch.arange(8, dtype=torch.int32), torch.float32)
    assert torch.equal(found[0], next(iter(whole.values()))[positions])


def test_log_probabilities_of_documents(shared):
    found = opened(shared, slots=2).logprobs(PROMPTS[:4])
    for one, other in zip(found, opened(shared, slots=2, stepped=False).logprobs(PROMPTS[:4]), strict=True):
        assert one == pytest.approx(other, abs=1e-5)


def test_the_kind_of_a_step_depends_on_the_requests_alone(shared, monkeypatch):
    """Whatever was captured before; one with a new kind may come while a block is not read yet."""
    monkeypatch.setattr(decoding, "SHORTEST", 64)
    engine = opened(shared, slots=20)
    _, used = replays(engine, monkeypatch)
    asked = [replace(one, sample=n // 6, max_new_tokens=40 - n) for n, one in enumerate(requests(GREEDY) * 3)]
    expected = opened(shared, stepped=False).generate(asked)
    kinds = []
    for _ in range(2):
        used.clear()
        same(engine.generate(asked), expected)
        kinds.append([*used])
    assert kinds[0] == kinds[1]
    assert {(kind.rows, kind.longest) for kind in kinds[0]} == {(32, 64), (32, 80), (16, 80)}


def test_a_block_that_was_not_captured_in_time_is_that_of_its_sequences(shared, monkeypatch):
    """Not of a later call with more of them than it has rows."""
    monkeypatch.setattr(decoding, "SHORTEST", 64)
    engine = opened(shared, slots=20)
    runner, _ = replays(engine, monkeypatch)
    one = Request(prompt=tuple(PROMPTS[2][:26] * 2), max_new_tokens=28, sampling=GREEDY)
    (text,) = opened(shared, stepped=False).generate([one])
    engine.generate([replace(one, stop_ids=frozenset({text.ids[5]}))])
    assert runner._late, "the next block would reach position 64"
    asked = [replace(r, sample=n // 6) for n, r in enumerate(requests(GREEDY) * 3)]
    same(engine.generate(asked), opened(shared, stepped=False).generate(asked))


def test_lengths_of_steps():
    assert [longest_of(n, 4096, shortest=256) for n in (5, 257, 3000)] == [256, 512, 4096]
    assert longest_of(5, 80, shortest=256) == longest_of(5, 80, shortest=4096) == 80


def test_slots_are_filled_together(shared, monkeypatch):
    begun: list[int] = []
    begin = NativeEngine._begin

    def noted(self, waiting, free):
        found = begin(self, waiting, free)
        begun.append(len(found))
        return found

    monkeypatch.setattr(NativeEngine, "_begin", noted)
    monkeypatch.setattr(decoding, "GATHER", 2)
    engine = opened(shared, slots=4)
    asked = [replace(one, max_new_tokens=2 + 3 * n) for n, one in enumerate([*requests(GREEDY)] * 2)]
    found = engine.generate(asked)
    monkeypatch.undo()
    same(found, opened(shared, stepped=False).generate(asked))
    assert begun[0] == 4
    assert sum(begun) == 12
    assert 1 not in begun


def test_the_reasons_to_run_without_graphs(shared, installed):
    assembly = shared.plan.assembly
    assert why_eager(assembly) == "the device is no GPU"

    def on_gpu(**changes: Any) -> Any:
        settings = replace(assembly.settings, device=torch.device("cuda"), **{"cuda_graphs": True, **changes})
        return replace(assembly, settings=settings)

    assert why_eager(on_gpu()) is None
    assert why_eager(on_gpu(cuda_graphs=False)) == "use_cuda_graphs is off"
    assert why_eager(on_gpu(axes=tiny.axes(ranks=2, shard_weights=True))) == "the GPUs share out the weights"
    offloaded = replace(on_gpu(), offloader=installed.get("offload", "host"))
    assert why_eager(offloaded) == "weights are offloaded to the host"
