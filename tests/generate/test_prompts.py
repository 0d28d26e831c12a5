"""Prompts as a GPU prefills them, on a CPU: passes of few shapes that graphs replay, and the exact runner's tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hybrid_family
import pytest
import torch
from surogate_model_qwen3 import surogate_model_family as qwen3
from surogate_model_qwen3_moe import surogate_model_family as qwen3_moe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surogate_core.bundles import Completion, Request, RolloutSettings, Sampling
from surogate_core.engine.planning.plan import EnginePlan
from surogate_core.generate import decoding, prompts
from surogate_core.generate.cache import AttentionCache, WholePrompts, mixers_of
from surogate_core.generate.decoding import SteppedRunner, working_bytes
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.prompts import Prompts, captured_rows, padded
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import KernelTable
from surogate_testing import tiny

PROMPTS = tiny.documents((5, 17, 40, 16, 1, 5), seed=4)
GREEDY = Sampling(temperature=0)
MOE = {**qwen3_moe().presets["tiny"], "vocab_size": 61, "num_hidden_layers": 2}
MODELS: Mapping[str, Callable[[], Weights]] = {
    "plain": lambda: loaded(lora=tiny.lora(targets=())),
    "adapters": lambda: loaded(lora=tiny.lora()),
    "experts": lambda: loaded(MOE, build=qwen3_moe().build, lora=tiny.lora()),
    "delta": lambda: Weights.of(hybrid_family.engine(config={"kinds": ["delta", "full"]})),
    "window": lambda: Weights.of(hybrid_family.engine(config={"kinds": ["window"]})),
}


def loaded(config: Any = None, **changes: Any) -> Weights:
    return Weights.load(tiny.assembly(*([] if config is None else [config]), **changes), tiny.random_source())


@pytest.fixture(scope="module")
def shared() -> Weights:
    return MODELS["adapters"]()


def opened(made: Weights, *, slots: int = 6, stepped: bool = True) -> NativeEngine:
    return NativeEngine(made, RolloutSettings(slots=slots, context=80), stepped=stepped)


def requests(documents: Sequence[Sequence[int]] = PROMPTS, *, new: int = 5) -> list[Request]:
    return [
        Request(prompt=tuple(ids), max_new_tokens=new + number, number=number, sampling=GREEDY)
        for number, ids in enumerate(documents)
    ]


def same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [(c.ids, c.reason) for c in found] == [(c.ids, c.reason) for c in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@dataclass
class Recorder:
    """Stands for CUDA graphs: a replay runs what was captured, and `events` has what happened."""

    events: list[str] = field(default_factory=list)

    def __call__(self, forward: Callable[[], None]) -> Any:
        self.events.append("capture")
        forward()
        recorder = self

        class Graph:
            def replay(self) -> None:
                recorder.events.append("replay")
                forward()

        return Graph()


def captures(engine: NativeEngine, rows: int = 96) -> tuple[Prompts, Recorder]:
    """Let the engine's passes of up to that many rows be captured, as on a GPU."""
    runner, recorder = engine._runner, Recorder()
    assert isinstance(runner, SteppedRunner)
    runner.prompts = Prompts(runner.weights, runner.cache, kernel=True, captured=rows, capture=recorder)
    return runner.prompts, recorder


@pytest.mark.slow_cases("delta")
@pytest.mark.parametrize("name", list(MODELS))
def test_equal_passes_are_captured_with_adapters_and_without(name):
    made = MODELS[name]()
    engine = opened(made)
    found, recorder = captures(engine)
    for documents in (PROMPTS, PROMPTS[::-1], PROMPTS[1:] + PROMPTS[:1]):
        same(engine.generate(requests(documents)), opened(made, stepped=False).generate(requests(documents)))
    assert [(kind.rows, kind.documents, kind.longest) for kind in found.graphs] == [(96, 7, 96)]
    assert recorder.events == ["capture", "replay"]
    # Prompts of another shape follow: a graph's buffers have nothing of the ones before.
    short = requests([PROMPTS[0], PROMPTS[4]])
    for _ in range(3):
        same(engine.generate(short), opened(made, stepped=False).generate(short))
    assert recorder.events == ["capture", "replay"] * 2


def test_what_a_replay_gives_outlives_the_next_one(shared):
    engine = opened(shared, slots=2)
    captures(engine)
    expected = opened(shared, slots=2).logprobs(PROMPTS)
    for _ in range(3):
        for one, other in zip(engine.logprobs(PROMPTS), expected, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_passes_with_many_rows_are_launched_by_the_host(shared):
    engine = opened(shared)
    found, recorder = captures(engine, rows=64)
    for _ in range(3):
        same(engine.generate(requests()), opened(shared, stepped=False).generate(requests()))
    assert not found.graphs
    assert not recorder.events


def test_without_memory_for_graphs_and_with_many_of_them_passes_run_all_the_same(shared, monkeypatch):
    engine = opened(shared)
    found, recorder = captures(engine)
    expected = opened(shared, stepped=False).generate(requests())
    found._capture = lambda forward: None
    for _ in range(3):
        same(engine.generate(requests()), expected)
    found._capture = recorder
    monkeypatch.setattr(prompts, "MOST_GRAPHS", 0)
    same(engine.generate(requests()), expected)
    assert not recorder.events


class NoHost(TorchDispatchMode):
    """Refuses what a graph cannot contain: values for the host, and tensors from there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "lift_fresh"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lora", [True, False], ids=["adapters", "plain"])
def test_a_captured_pass_reads_nothing_on_the_host(monkeypatch, lora):
    made = loaded(lora=tiny.lora() if lora else tiny.lora(targets=()))
    engine = opened(made)
    found, _ = captures(engine)
    refused = []

    def capture(forward: Callable[[], None]) -> None:
        with NoHost():
            forward()
        refused.append(False)

    # The attention of a CPU reads the borders, that of a GPU does not.
    def attend(
        self: WholePrompts, spec: Any, kept: AttentionCache, q: Tensor, k: Tensor, v: Tensor, sinks: Any
    ) -> Tensor:
        kept.write(self.slots_N, self.positions_N, k, v)
        return q

    monkeypatch.setattr(WholePrompts, "attend", attend)
    monkeypatch.setattr(found, "_capture", capture)
    for _ in range(2):
        engine.logprobs(PROMPTS)
    assert refused == [False]


def test_shapes_of_passes():
    rows = [padded(n) for n in range(1, 8193)]
    assert all(n <= r <= max(n + 15, 1.25 * n) and not r % 16 for n, r in enumerate(rows, start=1))
    assert len(set(rows)) == 8 + 4 * 6
    assert padded(64) == 64
    assert padded(8192) == 8192


def test_large_models_are_captured_for_fewer_rows(shared):
    assert captured_rows(shared.plan) == prompts.PREFILL_ROWS
    config = {**qwen3().presets["8b"], "num_hidden_layers": 1}
    large = EnginePlan.of(tiny.assembly(config, build=qwen3().build), device=torch.device("meta"))
    assert 2000 < captured_rows(large) < 4000
    # Otherwise passes just below it would each have a shape of their own, and their graphs would be many.
    assert padded(captured_rows(large)) == captured_rows(large)


def test_memory_of_captured_passes_is_planned(shared, monkeypatch):
    mixers = mixers_of(shared)
    before = working_bytes(shared, mixers, 6, 80)
    monkeypatch.setattr(decoding, "why_eager", lambda assembly: None)
    assert working_bytes(shared, mixers, 6, 80) > before + 480 * 6 * shared.model.width * 4


def test_prompts_are_prefilled_in_several_passes_and_shared(shared, monkeypatch):
    monkeypatch.setattr(prompts, "PREFILL_ROWS", 40)
    monkeypatch.setattr(prompts, "BATCH_ROWS", 50)
    monkeypatch.setattr(prompts, "SCORES", 1)
    monkeypatch.setattr(SteppedRunner, "least_shared", 16)
    asked = [replace(one, sampling=Sampling(temperature=1.5)) for one in requests()]
    asked += [replace(one, sample=1) for one in asked]
    # These begin as others that are in slots already.
    asked += [Request(prompt=(*PROMPTS[2][:33], *more), max_new_tokens=4, sampling=GREEDY) for more in ((1, 2), (3,))]
    for rows in (0, 32):
        engine = opened(shared, slots=7)
        captures(engine, rows)
        same(engine.generate(asked), opened(shared, stepped=False).generate(asked))


def test_without_a_kernel_of_attention_prompts_are_read_from_their_slots(shared, monkeypatch):
    monkeypatch.setattr(KernelTable, "offers", lambda self, op, dtype, named=(): False)
    monkeypatch.setattr(Prompts, "_packed", lambda self, fills: 1 / 0)
    asked = requests(new=4)
    same(opened(shared, slots=3).generate(asked), opened(shared, stepped=False).generate(asked))
