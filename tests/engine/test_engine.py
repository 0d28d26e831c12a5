"""The engine on a CPU: what a step computes, whatever way it is cut up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from surogate_offload_host import surogate_offloader as host_offloader
from tiny_qwen3 import REFERENCES_ONLY, make_engine, tiny_config
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, WEIGHTS, MicroBatch
from surogate_core.bundles import OffloaderSpec
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_testing import tiny

Record = Callable[[str, object], None]

DOCUMENTS = tiny.documents([30, 9, 17, 5, 1, 28])


def ragged() -> list[MicroBatch]:
    """Four micro-batches of 27, 0, 2 and 16 label tokens."""
    every = [[True] * len(d) for d in DOCUMENTS]
    few = [[False] * len(d) for d in DOCUMENTS]
    few[3][2:4] = True, True
    return [
        tiny.batch([DOCUMENTS[5]], labelled=[every[5]]),
        tiny.batch([DOCUMENTS[1]], labelled=[few[1]]),
        tiny.batch([DOCUMENTS[3], DOCUMENTS[4]], labelled=[few[3], every[4]]),
        tiny.batch([DOCUMENTS[2]], labelled=[every[2]]),
    ]


def whole() -> MicroBatch:
    """The same documents and labels as `ragged` in one row of four times the length."""
    parts = ragged()
    joined = {name: torch.cat([getattr(b, name) for b in parts]) for name in ("input_ids", "labels", "positions")}
    borders = torch.cat([b.cu_seqlens[:-1] + 32 * i for i, b in enumerate(parts)] + [torch.tensor([128])])
    return MicroBatch(
        **joined,
        cu_seqlens=borders.int(),
        max_seqlen=32,
        tokens=sum(b.tokens for b in parts),
        label_tokens=sum(b.label_tokens for b in parts),
    )


def state_of(engine: Engine) -> dict[str, Tensor]:
    return {f"{file}/{name}": t.clone() for file, found in engine.state().items() for name, t in found.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ------------------------------------------------------------------ how a step is cut up


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_ragged_micro_batches_give_the_gradient_of_one_batch(adapters: bool, record_testsuite_property: Record) -> None:
    """The mean is over the label tokens of all, not a mean of means: those differ by far more."""
    batches, one = ragged(), whole()
    assert [b.label_tokens for b in batches] == [27, 0, 2, 16]
    settings: dict[str, Any] = {"lora": tiny.lora() if adapters else None}
    small = make_engine(max_seqlen=32, **settings)
    big = make_engine(tokens=128, borders=len(one.cu_seqlens), max_seqlen=32, **settings)
    found, expected = tiny.gradients(small, batches), tiny.gradients(big, [one])
    error, name = tiny.worst(found, expected)
    record_testsuite_property(f"ragged micro-batches, {adapters=}", f"{error:.2e} {name}")
    assert error <= 1e-6, name
    results = small.train_step(batches, step=0, lr=0.0), big.train_step([one], step=0, lr=0.0)
    (loss, norm), (one_loss, one_norm) = (r.read() for r in results)
    assert loss == pytest.approx(one_loss, rel=1e-6)
    assert norm == pytest.approx(one_norm, rel=1e-6)
    assert [(r.tokens, r.label_tokens) for r in results] == [(batches[0].tokens + 9 + 6 + 17, 45)] * 2

    of_means = [tiny.gradients(small, [b]) for b in batches if b.label_tokens]
    mean_of_means = {n: torch.stack([g[n] for g in of_means]).mean(0) for n in expected}
    assert tiny.worst(mean_of_means, expected)[0] > 1e-2


@pytest.mark.parametrize("chunks", [1, 3])
def test_loss_weights_weigh_each_token_of_the_whole_step(chunks: int) -> None:
    """The gradient is the weighted mean of those of the single tokens; the loss likewise."""
    (batch,) = [b for b in ragged() if b.label_tokens == 16]
    places = (batch.labels != IGNORE_LABEL).nonzero().flatten().tolist()
    engine = make_engine()

    def alone(place: int) -> MicroBatch:
        labels = torch.full_like(batch.labels, IGNORE_LABEL)
        labels[place] = batch.labels[place]
        return dataclasses.replace(batch, labels=labels, label_tokens=1)

    weights = torch.zeros(len(batch.labels))
    weights[places] = torch.tensor([0.25, 1.0, 2.0, 0.5] * 4)
    single = {place: tiny.gradients(engine, [alone(place)]) for place in places}
    losses = {place: engine.evaluate([alone(place)])[0] for place in places}
    total = weights.sum().item()
    expected = {n: sum(weights[p].item() * single[p][n] for p in places) / total for n in single[places[0]]}
    loss = sum(weights[p].item() * losses[p] for p in places) / total

    halves = [weights.clone(), weights.clone()]
    halves[0][places[8:]] = 0
    halves[1][places[:8]] = 0
    steps = [
        dataclasses.replace(
            batch,
            labels=torch.where(half > 0, batch.labels, IGNORE_LABEL),
            label_tokens=int((half > 0).sum()),
            columns={WEIGHTS: half},
        )
        for half in halves
    ]
    weighted = make_engine(columns=(WEIGHTS,), head_chunks=chunks)
    error, name = tiny.worst(tiny.gradients(weighted, steps), expected)
    assert error <= 1e-5, name
    assert weighted.evaluate(steps)[0] == pytest.approx(loss, rel=1e-6)
    assert weighted.train_step(steps, step=0, lr=0.0).read()[0] == pytest.approx(loss, rel=1e-6)


def test_the_losses_of_many_micro_steps_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 alone 5,000 times 0.1 comes out too large by four in a hundred thousand."""
    engine = make_engine()
    (batch, *_) = ragged()
    monkeypatch.setattr(engine, "_run_micro_step", lambda *kind: engine.losses.add(torch.tensor(0.1)))
    expected = torch.tensor(0.1).double().item() / batch.label_tokens
    assert engine.accumulate([batch] * 5000) == pytest.approx(expected, rel=1e-6)
    assert engine.train_step([batch] * 5000, step=0, lr=0.0).read()[0] == pytest.approx(expected, rel=1e-6)
    assert engine.accumulate([batch]) == pytest.approx(expected, rel=1e-6), "the sum begins again"


def test_the_losses_of_many_chunks_do_not_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tokens=4096, head_chunks=4096, max_seqlen=32)
    monkeypatch.setattr(type(engine.programs), "head", lambda *_, **__: lambda arguments: [torch.tensor(0.1)])
    batch = tiny.batch([DOCUMENTS[0]] * 6, tokens=4096)
    expected = torch.tensor(0.1).double().item() * 4096 / batch.label_tokens
    assert engine.evaluate([batch])[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow_cases("32")
@pytest.mark.parametrize("chunks", [3, 7, 32])
def test_head_chunks_do_not_matter(chunks: int) -> None:
    batches = ragged()
    one, several = make_engine(), make_engine(head_chunks=chunks)
    sizes = [c.stop - c.start for c in several.programs.chunks()]
    assert sum(sizes) == 32
    assert len(sizes) <= chunks
    error, name = tiny.worst(tiny.gradients(several, batches), tiny.gradients(one, batches))
    assert error <= 1e-6, name
    assert several.evaluate(batches)[0] == pytest.approx(one.evaluate(batches)[0], rel=1e-6)
    norms = [e.train_step(batches, step=0, lr=1e-3).read()[1] for e in (one, several)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


POLICIES = {
    "block": Recompute(block=True),
    **{r: Recompute(block=False, regions=frozenset([r])) for r in ("qkv", "att", "ffn", "swiglu", "rmsnorm")},
    **{f"budget {b}": Recompute(block=False, budget=b) for b in (0.0, 0.3, 0.6)},
}


@pytest.mark.slow_cases("qkv", "att", "ffn", "swiglu", "rmsnorm", "budget 0.0", "budget 0.6")
@pytest.mark.parametrize("policy", POLICIES)
def test_recompute_changes_no_bit(policy: str) -> None:
    """Also under dropout: the mask is drawn again, the same."""
    batches = ragged()
    adapters = tiny.lora(dropout=0.3)
    kept = tiny.gradients(make_engine(lora=adapters), batches, step=3)
    assert_equal(tiny.gradients(make_engine(lora=adapters, recompute=POLICIES[policy]), batches, step=3), kept)


def test_kernels_agree_with_the_references() -> None:
    batches = ragged()
    plain, kernels = make_engine(packs=[REFERENCES_ONLY]), make_engine()
    assert set(plain.programs.kernels.chosen.values()) == {"reference"}
    chosen = {op: kernel for (op, _), kernel in kernels.programs.kernels.chosen.items()}
    assert chosen.pop("norm_rope") == "reference", "which calls kernels itself"
    assert set(chosen.values()) == {"torch-cpu"}
    error, name = tiny.worst(tiny.gradients(kernels, batches), tiny.gradients(plain, batches))
    assert error <= 1e-5, name


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_inductor_agrees_with_fx(recompute: bool) -> None:
    settings: dict[str, Any] = {"lora": tiny.lora(dropout=0.3), "recompute": Recompute(block=recompute)}
    fx, inductor = make_engine(**settings), make_engine(compiler="inductor", **settings)
    error, name = tiny.worst(tiny.gradients(inductor, ragged()), tiny.gradients(fx, ragged()))
    assert error <= 1e-5, name


def test_padding_and_what_stands_in_it_do_not_matter() -> None:
    engine = make_engine()
    expected = tiny.gradients(engine, [tiny.batch(DOCUMENTS[1:3])])
    assert_equal(tiny.gradients(engine, [tiny.batch(DOCUMENTS[1:3], padding_id=60)]), expected)


# ----------------------------------------------------------------------------- programs


def test_equal_layers_share_their_programs() -> None:
    said: list[str] = []
    engine = make_engine(tiny_config(num_hidden_layers=5), head_chunks=3)
    programs = [engine.programs.layer(piece) for piece in engine.plan.layers]
    assert len(programs) == 5
    assert all(p is programs[0] for p in programs)
    assert len(engine.programs._heads) == 2, "11 + 11 + 10 tokens: two sizes of chunk"
    assert not engine.programs._evaluations, "evaluation is traced when it is first asked for"
    engine.programs.progress = lambda task, done, total: said.append(f"{task} {done}/{total}")
    engine.evaluate(ragged())
    engine.evaluate(ragged())
    engine.train_step(ragged(), step=0, lr=0.0)
    layer, head = "tracing Qwen3Block for evaluation", "tracing the head for evaluation"
    assert said == [f"{layer} 0/1", f"{layer} 1/1"] + 2 * [f"{head} 0/1", f"{head} 1/1"]


def test_residuals_are_foretold() -> None:
    for recompute in (False, True):
        engine = make_engine(recompute=Recompute(block=recompute), lora=tiny.lora(dropout=0.1))
        piece = engine.plan.layer("layer 0")
        told = engine.programs.layer_footprint(piece).kept
        assert told == engine.programs.layer(piece).kept
        assert (not told) == recompute


# --------------------------------------------------------------------- the optimizer step


def test_clipping_equals_torch() -> None:
    batches = ragged()
    for max_norm in (1e-2, 1e6):
        engine = make_engine(max_grad_norm=max_norm)
        found = tiny.gradients(engine, batches)
        leaves = [torch.nn.Parameter(torch.zeros_like(g)) for g in found.values()]
        for leaf, gradient in zip(leaves, found.values(), strict=True):
            leaf.grad = gradient.clone()
        expected = torch.nn.utils.clip_grad_norm_(leaves, max_norm).item()
        seen: dict[str, Any] = {}
        step = engine.optimizer.step

        def spy(*, lr: Tensor, clip: Tensor, skip: Tensor, step: Any = step, seen: dict[str, Any] = seen) -> None:
            seen.update(clip=clip.item(), skip=skip.item(), lr=lr.item())
            step(lr=lr, clip=clip, skip=skip)

        engine.optimizer.step = spy  # type: ignore[method-assign]
        for group in engine.parameters.groups:
            group.grad.zero_()
        _, norm = engine.train_step(batches, step=0, lr=0.125).read()
        assert norm == pytest.approx(expected, rel=1e-6)
        assert (seen["skip"], seen["lr"]) == (0.0, 0.125)
        assert (seen["clip"] == 1.0) == (max_norm == 1e6)
        for leaf, gradient in zip(leaves, found.values(), strict=True):
            assert leaf.grad is not None
            torch.testing.assert_close(gradient * seen["clip"], leaf.grad, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("offloader", [NO_OFFLOAD, host_offloader()], ids=["device", "host"])
def test_clipping_follows_the_norm_of_thirty_million_gradients(offloader: OffloaderSpec) -> None:
    """In fp32 throughout, a CPU finds a norm that is too small by two in a thousand."""
    config = tiny_config(vocab_size=1_000_003)
    streamed = offloader is not NO_OFFLOAD
    engine = make_engine(
        config, offloader=offloader, update_on_cpu=streamed, source=lambda spec: torch.zeros(spec.shape)
    )
    assert engine.stores.streams_gradients == streamed
    seen: list[float] = []
    engine.optimizer.step = lambda *, lr, clip, skip: seen.append(clip.item())  # type: ignore[method-assign]
    generator = torch.Generator().manual_seed(0)
    for group in engine.parameters.groups:
        group.grad.normal_(generator=generator)
    engine._sums_hold = True  # otherwise sums of layers count as zeros until a micro-step writes them
    parts = [part for group in engine.parameters.groups for part in group.grad.split(1 << 20)]
    squares = sum(part.double().square().sum().item() for part in parts)
    _, norm = engine.train_step([], step=0, lr=0.0).read()
    assert sum(map(len, parts)) > 3e7
    assert norm == pytest.approx(squares**0.5, rel=1e-6)
    assert seen == [pytest.approx(1 / squares**0.5, rel=1e-6)]


def test_a_norm_of_zero_means_no_clipping() -> None:
    clipped, free = make_engine(max_grad_norm=1e-3), make_engine(max_grad_norm=0.0)
    for engine in (clipped, free):
        engine.train_step(ragged(), step=0, lr=1e-2)
    first = {n: t for n, t in free.optimizer.state().items() if n.endswith(".first")}
    assert max(t.abs().max() for t in first.values()) > 10 * max(
        t.abs().max() for n, t in clipped.optimizer.state().items() if n.endswith(".first")
    )


@pytest.mark.slow_cases("full--inf", "lora--inf")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_a_step_of_non_finite_gradients_changes_nothing(adapters: bool, bad: float) -> None:
    engine = make_engine(lora=tiny.lora() if adapters else None)
    twin = make_engine(lora=tiny.lora() if adapters else None)
    for e in (engine, twin):
        e.train_step(ragged(), step=0, lr=1e-2)
    before = state_of(engine)
    name = sorted(engine.parameters.gradients_by_name())[0]
    engine.parameters.gradients_by_name()[name].view(-1)[3] = bad
    _, norm = engine.train_step(ragged(), step=1, lr=1e-2).read()
    assert not math.isfinite(norm)
    assert_equal(state_of(engine), before)
    assert all((sums == 0).all() for sums in engine.update._cleared), "the next step starts clean"
    results = [e.train_step(ragged(), step=2, lr=1e-2).read() for e in (engine, twin)]
    assert results[0] == results[1]
    assert_equal(state_of(engine), state_of(twin))


def test_a_non_finite_weight_shows_in_the_loss_and_spoils_no_other() -> None:
    engine = make_engine()
    engine.train_step(ragged(), step=0, lr=1e-2)
    engine.parameters.masters()["model.layers.0.self_attn.q_norm.weight"][0] = math.nan
    before = {n: t for n, t in state_of(engine).items() if "q_norm" not in n}
    loss, norm = engine.train_step(ragged(), step=1, lr=1e-2).read()
    assert math.isnan(loss)
    assert math.isnan(norm)
    after = {n: t for n, t in state_of(engine).items() if "q_norm" not in n}
    assert_equal(after, before)


def test_a_step_without_labels_is_zero() -> None:
    engine = make_engine(weight_decay=0.0)
    before = state_of(engine)
    loss, norm = engine.train_step([ragged()[1]], step=0, lr=1e-2).read()
    assert (loss, norm) == (0.0, 0.0)
    after = state_of(engine)
    for name in engine.parameters.masters():
        assert torch.equal(after[f"trainable/{name}"], before[f"trainable/{name}"])
    assert engine.evaluate([ragged()[1]]) == (0.0, 0)


def test_training_lowers_the_loss() -> None:
    engine = make_engine(source=tiny.random_source(std=0.05))
    losses = [engine.train_step(ragged(), step=s, lr=1e-2).read()[0] for s in range(30)]
    assert losses[-1] < 0.5 * losses[0]


# ------------------------------------------------------------------------------ dropout


def test_dropout_depends_on_the_seed_the_step_and_the_micro_step_alone() -> None:
    batch = ragged()[0]
    adapters = tiny.lora(dropout=0.5)
    engine, again, other = (make_engine(lora=adapters, seed=s) for s in (1, 1, 2))

    def loss(e: Engine, step: int, count: int = 1) -> float:
        for group in e.parameters.groups:
            group.grad.zero_()
        return e.accumulate([batch] * count, step=step)

    first = loss(engine, 0)
    assert loss(engine, 0) == first == loss(again, 0)
    assert len({first, loss(engine, 1), loss(other, 0), loss(engine, 0, 2)}) == 4
    without = make_engine(lora=tiny.lora())
    assert engine.evaluate([batch]) == without.evaluate([batch])
    assert loss(without, 0) != first


def test_every_layer_and_micro_step_has_a_seed_of_its_own() -> None:
    engine = make_engine(tiny_config(num_hidden_layers=3))
    seeds = [tuple(engine.seeds(step, micro)[:, 0].tolist()) for step in range(20) for micro in range(4)]
    assert all(len(s) == 3 for s in seeds)
    assert len({seed for s in seeds for seed in s}) == 20 * 4 * 3


# ------------------------------------------------------------------------ state, evaluation


def test_state_goes_into_a_fresh_engine_and_continues_bit_for_bit() -> None:
    adapters = tiny.lora(dropout=0.2)
    engine = make_engine(lora=adapters)
    for step in range(3):
        engine.train_step(ragged(), step=step, lr=1e-2)
    saved = {file: {n: t.clone() for n, t in found.items()} for file, found in engine.state().items()}

    def elsewhere(spec: TensorSpec) -> Tensor:
        return tiny.random_source(seed=99 if spec.trainable else 0)(spec)

    other = make_engine(lora=adapters, source=elsewhere)
    assert not torch.equal(state_of(other)["optimizer/steps"], saved["optimizer"]["steps"])
    other.load_state(saved)
    for step in range(3, 6):
        results = [e.train_step(ragged(), step=step, lr=1e-2).read() for e in (engine, other)]
        assert results[0] == results[1]
    assert_equal(state_of(other), state_of(engine))


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("adapters", [True, False])
def test_bf16_masters_continue_bit_for_bit_and_draw_by_seed_and_step_alone(adapters: bool) -> None:
    chosen = tiny.lora(dropout=0.2) if adapters else None

    def make(**settings: Any) -> Engine:
        return make_engine(lora=chosen, master_dtype=torch.bfloat16, **settings)

    engine, twin, other = make(), make(), make(seed=1)
    for step in range(3):
        engine.train_step(ragged(), step=step, lr=1e-2)
        twin.train_step(ragged(), step=step, lr=1e-2)
        twin.evaluate(ragged())
        other.train_step(ragged(), step=step, lr=1e-2)
    assert {t.dtype for t in engine.parameters.masters().values()} == {torch.bfloat16}
    assert_equal(state_of(twin), state_of(engine))
    assert any(not torch.equal(t, state_of(engine)[n]) for n, t in state_of(other).items())
    resumed = make()
    resumed.load_state({file: {n: t.clone() for n, t in found.items()} for file, found in engine.state().items()})
    for step in range(3, 6):
        results = [e.train_step(ragged(), step=step, lr=1e-2).read() for e in (engine, resumed)]
        assert results[0] == results[1]
    assert_equal(state_of(resumed), state_of(engine))


@pytest.mark.slow
def test_updates_below_a_step_of_bf16_are_not_lost() -> None:
    """A rate of 1e-4 moves weights near 1 by an 80th of a step: rounded to nearest none would move."""
    name = "model.norm.weight"
    engines = {d: make_engine(master_dtype=d, weight_decay=0.0) for d in (torch.float32, torch.bfloat16)}
    moved = {}
    for dtype, engine in engines.items():
        engine.parameters.masters()[name].fill_(1.0)
        engine.parameters.refresh()
        for step in range(40):
            engine.train_step(ragged(), step=step, lr=1e-4)
        moved[dtype] = engine.parameters.masters()[name].double() - 1
    assert 1e-3 < moved[torch.float32].abs().max() < 2**-6
    assert bool((moved[torch.bfloat16] != 0).any())
    exact, rounded = moved.values()
    along = float((exact * rounded).sum() / exact.square().sum())
    assert 0.4 < along < 1.6


def test_every_step_rounds_with_a_seed_of_its_own() -> None:
    engine = make_engine()
    seeds = {engine.update.rounding_seed(step) for step in range(1000)}
    assert len(seeds) == 1000
    assert not seeds & {int(s) for step in range(100) for s in engine.seeds(step, 0)[:, 0]}


def test_bf16_compute_copies_follow_a_loaded_state() -> None:
    engine, other = (make_engine(dtype=torch.bfloat16, source=tiny.random_source(seed=s)) for s in (0, 1))
    other.load_state(engine.state())
    assert other.evaluate(ragged()) == engine.evaluate(ragged())


@pytest.mark.parametrize("change", ["missing", "extra", "shape"])
def test_a_state_of_another_run_is_refused(change: str) -> None:
    engine = make_engine(lora=tiny.lora())
    saved = {file: {n: t.clone() for n, t in found.items()} for file, found in engine.state().items()}
    name = sorted(saved["trainable"])[0]
    if change == "missing":
        del saved["trainable"][name]
    elif change == "extra":
        saved["trainable"]["other"] = torch.ones(1)
    else:
        saved["trainable"][name] = torch.ones(1, 1)  # would broadcast
    before = state_of(engine)
    with pytest.raises(ValueError, match="other" if change == "extra" else name):
        engine.load_state(saved)
    assert_equal(state_of(engine), before)


def test_evaluation_between_steps_changes_nothing() -> None:
    engine, twin = make_engine(lora=tiny.lora(dropout=0.2)), make_engine(lora=tiny.lora(dropout=0.2))
    for step in range(3):
        found = engine.train_step(ragged(), step=step, lr=1e-2).read()
        assert found == twin.train_step(ragged(), step=step, lr=1e-2).read()
        loss, labels = engine.evaluate(ragged())
        assert labels == 45
        assert math.isfinite(loss)
    assert_equal(state_of(engine), state_of(twin))


def test_the_loss_of_a_step_is_the_loss_of_evaluation_before_it() -> None:
    engine = make_engine(lora=tiny.lora())
    expected, _ = engine.evaluate(ragged())
    assert engine.train_step(ragged(), step=0, lr=1e-2).read()[0] == pytest.approx(expected, rel=1e-6)


def test_a_scaled_embedding_has_the_gradient_of_its_rows() -> None:
    """Rows that are four times as large, without a factor, are the same model; a tied head has them without it."""

    class Scaled(tiny.SmallModel):
        embed = dataclasses.replace(tiny.SmallModel.embed, scale=4.0)

    embedding, head, drawn = "embed.weight", "head.weight", tiny.random_source()
    config, batches = {**tiny.SMALL_CONFIG, "tie_word_embeddings": False}, tiny.batches(0, 2)

    def source(factors: Mapping[str, float]) -> Callable[[TensorSpec], Tensor]:
        def value(spec: TensorSpec) -> Tensor:
            found = drawn(dataclasses.replace(spec, hf_name=embedding) if spec.hf_name == head else spec)
            assert isinstance(found, Tensor)
            return found * factors.get(spec.hf_name, 1.0)

        return value

    def gradients(build: type[tiny.TinyModel], *, tied: bool = False, **factors: float) -> dict[str, Tensor]:
        keys = {**config, "tie_word_embeddings": tied}
        return tiny.gradients(tiny.engine(keys, build=build, source=source(factors)), batches)

    plain, scaled = gradients(tiny.SmallModel, **{embedding: 4.0}), gradients(Scaled)
    tied = gradients(Scaled, tied=True)
    torch.testing.assert_close(tied[embedding], scaled[embedding] + scaled[head])
    assert torch.equal(scaled.pop(embedding), plain.pop(embedding) * 4)
    tiny.ensure_same_bits(scaled, plain, "the other gradients")


def test_frozen_weights_stay() -> None:
    engine = make_engine(lora=tiny.lora())
    before = {name: t.clone() for name, t in engine.parameters.base_tensors()}
    assert not {n for n in engine.parameters.masters() if "lora" not in n}
    for step in range(3):
        engine.train_step(ragged(), step=step, lr=1e-1)
    assert_equal(dict(engine.parameters.base_tensors()), before)
