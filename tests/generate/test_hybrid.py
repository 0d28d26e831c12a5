"""Models that attend within windows, convolve and recur: documents are apart, and generation equals the forward."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import hybrid_family
import pytest
import torch
from hybrid_family import CONFIG
from peak_bytes import PeakBytes

from surogate_core.bundles import Request, RolloutSettings, Sampling
from surogate_core.dsl import Recurrence
from surogate_core.errors import PluginError
from surogate_core.generate.cache import Carried
from surogate_core.generate.decoding import working_bytes
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.kernels.convolutions import causal_convolution_step
from surogate_core.kernels.scans import gated_delta_scan, gated_delta_step
from surogate_testing import tiny

torch.set_num_threads(1)

LONG = 96
"""Tokens of a micro-batch: more than a chunk of a scan and many windows."""
PROMPTS = tiny.documents((5, 70, 16, 1, 33), seed=5)
KINDS = [["window"], ["delta"], ["window", "delta", "full"]]


@pytest.fixture(scope="module")
def trained() -> Any:
    """After some steps, so that nothing is near zero."""
    made = hybrid_family.engine(tokens=LONG, max_seqlen=LONG, borders=8)
    for step in range(6):
        made.train_step([tiny.batch(tiny.documents((50, 30), seed=step), tokens=LONG)], step=step, lr=0.05).read()
    return made


def logprobs(made: Any, ids: Sequence[int]) -> torch.Tensor:
    """[T, V] by the forward of training, the document alone."""
    return torch.log_softmax(made.logits(tiny.batch([ids], tokens=LONG))[: len(ids)].float(), -1)


@pytest.mark.parametrize("kinds", KINDS)
def test_packed_documents_have_the_bits_that_each_has_alone(kinds: list[str]) -> None:
    """Without a soft cap, with which all pairs of a row are formed at once and sums have other lengths."""
    settings = {"tokens": LONG, "max_seqlen": LONG, "borders": 8}
    made = hybrid_family.engine(config={"kinds": kinds, "softcap": 0.0}, **settings)
    documents = tiny.documents((29, 1, 40, 17), seed=2)
    packed, start = made.logits(tiny.batch(documents, tokens=LONG)), 0
    for ids in documents:
        alone = made.logits(tiny.batch([ids], tokens=LONG))[: len(ids)]
        assert torch.equal(packed[start : start + len(ids)], alone)
        start += len(ids)


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize(("slots", "context"), [(2, 112), (5, 128)])
def test_generated_tokens_have_the_log_probabilities_of_the_forward(
    trained: Any, stepped: bool, slots: int, context: int
) -> None:
    """In a slot of 128 positions the window is a ring."""
    native = NativeEngine(Weights.of(trained), RolloutSettings(slots=slots, context=context), stepped=stepped)
    new = 12
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=new, number=n, sampling=Sampling(temperature=0))
        for n, ids in enumerate([*PROMPTS, PROMPTS[1], PROMPTS[1], PROMPTS[4]])
    ]
    for request, done in zip(asked, native.generate(asked), strict=True):
        ids = [*request.prompt, *done.ids]
        own = logprobs(trained, ids)
        expected = [own[len(request.prompt) - 1 + i, token].item() for i, token in enumerate(done.ids)]
        assert list(done.logprobs) == pytest.approx(expected, abs=2e-5)
        assert list(done.ids) == own[len(request.prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.parametrize("stepped", [False, True])
def test_log_probabilities_of_documents(trained: Any, stepped: bool) -> None:
    native = NativeEngine(Weights.of(trained), RolloutSettings(slots=2, context=128), stepped=stepped)
    for ids, found in zip(PROMPTS, native.logprobs(PROMPTS), strict=True):
        own = logprobs(trained, ids)
        assert found == pytest.approx([own[i, ids[i + 1]].item() for i in range(len(ids) - 1)], abs=2e-5)


def test_on_a_cpu_a_completion_has_its_bits_in_any_company(trained: Any) -> None:
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=9, number=n, sampling=Sampling(temperature=1.0))
        for n, ids in enumerate(PROMPTS)
    ]
    together = NativeEngine(Weights.of(trained), RolloutSettings(slots=5, context=128)).generate(asked)
    few = NativeEngine(Weights.of(trained), RolloutSettings(slots=2, context=128))
    assert few.generate(asked) == together
    assert [few.generate([request])[0] for request in asked] == together


@pytest.mark.parametrize("stepped", [False, True])
def test_prompts_that_slots_keep_begin_again(trained: Any, stepped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding moves states on; the same prompt later begins behind itself, not behind what was decoded."""
    filled: list[int] = []
    native = NativeEngine(Weights.of(trained), RolloutSettings(slots=3, context=128, frozen=True), stepped=stepped)
    prefill = native._prefill
    monkeypatch.setattr(native, "_prefill", lambda fills: filled.append(len(fills)) or prefill(fills))
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=7, number=n, sampling=Sampling(temperature=1.0))
        for n, ids in enumerate(PROMPTS[:3])
    ]
    first, again = native.generate(asked), native.generate(asked)
    assert [done.ids for done in first] == [done.ids for done in again]
    assert sum(filled) == 3
    longer = [Request(prompt=(*PROMPTS[1], 7), max_new_tokens=3, number=0, sampling=Sampling(temperature=0))]
    (done,) = native.generate(longer)
    own = logprobs(trained, [*longer[0].prompt, *done.ids])
    assert list(done.ids) == own[len(longer[0].prompt) - 1 : -1].argmax(-1).tolist()


@pytest.mark.slow
def test_layers_of_two_windows_are_two_programs() -> None:
    made = hybrid_family.engine(config={"kinds": ["window", "full", "window", "delta"]})
    tiny.train(made, 1, lr=0.0)
    assert len(made.programs._layers) == 3
    documents = [tiny.batch(tiny.documents((29,), seed=3))]
    found = {
        w: hybrid_family.engine(config={"kinds": ["window"] * 2, "window": w}).evaluate(documents)[0]
        for w in (2, 5, 40, 64)
    }
    full = hybrid_family.engine(config={"kinds": ["full"] * 2}).evaluate(documents)[0]
    assert len({*found.values()}) == 3
    assert found[40] == found[64] == pytest.approx(full, rel=1e-6)


def test_the_cache_is_sized_by_the_declarations() -> None:
    from surogate_core.generate.cache import Cache, mixers_of

    made = hybrid_family.engine()
    mixers = mixers_of(Weights.of(made))
    position = 2 * 4 * 8 * 4  # keys and values, heads, features, fp32
    states = 2 * 4 * (3 * CONFIG["channels"] + 4 * 8 * 8)
    ring = 32  # of a window of 5 beside a segment, and its copy
    assert Cache.slot_bytes(mixers, 112, torch.float32) == 2 * 112 * position + states
    assert Cache.slot_bytes(mixers, 1024, torch.float32) == (1024 + 2 * ring) * position + states
    cache = Cache(mixers, slots=2, context=1024, dtype=torch.float32, device=torch.device("cpu"))
    tensors = [t for one in cache.layers for kept in one for t in (*kept.now, *kept.behind)]
    assert sum(t.nbytes for t in tensors) == 3 * Cache.slot_bytes(mixers, 1024, torch.float32)


@pytest.mark.slow
def test_compiled_steps_have_the_log_probabilities_of_the_forward() -> None:
    """A layer is one program with ops that stand for its mixers."""
    made = hybrid_family.engine(tokens=LONG, max_seqlen=LONG, borders=8, compiler="inductor")
    native = NativeEngine(Weights.of(made), RolloutSettings(slots=32, context=128), stepped=True)
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=6, number=n, sampling=Sampling(temperature=0))
        for n, ids in enumerate(tiny.documents((3,) * 20, seed=9))
    ]
    for request, done in zip(asked, native.generate(asked), strict=True):
        own = logprobs(made, [*request.prompt, *done.ids])
        expected = [own[len(request.prompt) - 1 + i, token].item() for i, token in enumerate(done.ids)]
        assert list(done.logprobs) == pytest.approx(expected, abs=2e-5)
    assert len(native.weights.compiled) == 3


def test_a_scan_may_have_constants_in_compiled_layers() -> None:
    """Such as no bias, or a chunk. A GPU compiles layers, a CPU's tests run them one operation after the other."""

    class Constant(hybrid_family.Delta):
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            constants = {"conv": {"bias_C": None}, "scan": {"chunk": 16}}.get(name)
            return found if constants is None else partial(found, **constants)

    model = type(
        "M",
        (hybrid_family.Hybrid,),
        {"blocks": lambda self, longest: iter([("layers.0.", Constant(self.layer_config(0), longest))])},
    )
    made = tiny.engine(config={**CONFIG, "kinds": ["delta"]}, build=model, tokens=LONG, max_seqlen=LONG)
    native = NativeEngine(Weights.of(made), RolloutSettings(slots=2, context=128), stepped=True)
    asked = [Request(prompt=(3, 4, 5), max_new_tokens=9, number=0, sampling=Sampling(temperature=0))]
    plain = native.generate(asked)
    native._runner._layers.compiles = True
    compiled = native.generate(asked)
    assert len(native.weights.compiled) == 1
    assert compiled[0].ids == plain[0].ids
    assert compiled[0].logprobs == pytest.approx(plain[0].logprobs, abs=1e-5)


def test_rows_that_do_not_count_leave_no_state(trained: Any) -> None:
    native = NativeEngine(Weights.of(trained), RolloutSettings(slots=3, context=128), stepped=True)
    native.generate([Request(prompt=(3, 4, 5), max_new_tokens=20, number=0, sampling=Sampling(temperature=0))])
    carried = [one for layer in native.cache.layers for one in layer if isinstance(one, Carried)]
    assert carried
    assert all(not state[-1].any() and state.any() for one in carried for state in one.now)


def of_delta(**attributes: Any) -> type:
    """A model with one recurrent layer, whose block has these attributes."""
    kind = type("Odd", (hybrid_family.Delta,), attributes)

    def blocks(self: Any, longest: int) -> Any:
        return iter([("layers.0.", kind(self.layer_config(0), longest))])

    return type("M", (hybrid_family.Hybrid,), {"blocks": blocks})


def test_a_recurrence_that_has_a_scan_alone_is_moved_on_by_it() -> None:
    """To the bit, as one of the core by the op of its step. A plugin may name a step of its own."""
    noted: set[str] = set()

    def scan(*rows: Any, borders: Any, **named: Any) -> Any:
        noted.add("step by the scan" if borders is None else "prompt")
        return gated_delta_scan(*rows, borders=borders, **named)

    def step(*given: Any) -> Any:
        noted.add("step")
        return gated_delta_step(*given)

    sizes = (hybrid_family.H, hybrid_family.E, hybrid_family.E)
    assert hybrid_family.Delta.scan.step is gated_delta_step
    assert hybrid_family.Delta.conv.step is causal_convolution_step
    expected = generated(of_delta(), stepped=True)
    assert generated(of_delta(scan=Recurrence(scan, sizes)), stepped=True) == expected
    assert noted == {"prompt", "step by the scan"}
    noted.clear()
    assert generated(of_delta(scan=Recurrence(scan, sizes, step=step)), stepped=True) == expected
    assert noted == {"prompt", "step"}


@pytest.mark.parametrize("stepped", [False, True])
def test_a_scan_with_other_states_than_declared_is_refused(stepped: bool) -> None:
    """A shape that would broadcast, and a dtype that would lose what rows add."""

    def one_head(*rows: Any, **named: Any) -> Any:
        y, (state,) = gated_delta_scan(*rows, **named)
        return y, (state[:, :1],)

    def halves(*rows: Any, **named: Any) -> Any:
        y, (state,) = gated_delta_scan(*rows, **named)
        return y, (state.bfloat16(),)

    for scan, message in ((one_head, r"shapes \(\(1, 8, 8\),\) in float32"), (halves, "shapes .* in bfloat16")):
        declared = Recurrence(scan, (hybrid_family.H, hybrid_family.E, hybrid_family.E))
        with pytest.raises(PluginError, match=rf"Odd\.scan: its scan gives states of {message}.*Fix: declare"):
            generated(of_delta(scan=declared), stepped)


def generated(model: type, stepped: bool) -> Any:
    """Some tokens of a model with one recurrent layer."""
    made = tiny.engine(config={**CONFIG, "kinds": ["delta"]}, build=model)
    native = NativeEngine(Weights.of(made), RolloutSettings(slots=1, context=32), stepped=stepped)
    return native.generate([Request(prompt=(1, 2, 3), max_new_tokens=4, sampling=Sampling(temperature=0))])


def test_prompts_without_a_kernel_of_attention_take_the_memory_that_is_planned() -> None:
    """A soft cap has no kernel on a CPU, and a ring wants whole prompts; so all pairs of their tokens have scores."""
    made = hybrid_family.engine(config={"kinds": ["window"]})
    weights, settings = Weights.of(made), RolloutSettings(slots=8, context=256)
    native = NativeEngine(weights, settings, stepped=True)
    asked = [
        Request(prompt=tuple(ids), max_new_tokens=1, number=n, sampling=Sampling(temperature=0))
        for n, ids in enumerate(tiny.documents((240,) * 8, seed=1))
    ]
    with PeakBytes() as peak:
        native.generate(asked)
    assert 0.4 < peak.peak / working_bytes(weights, native.cache.mixers, 8, 256) < 1
