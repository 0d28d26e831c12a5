"""The losses of routers in the engine: counting before a step, recomputing, resuming, compiled programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from mixture import CONFIG, Mixture
from tiny_qwen3 import strict_offloader

from surogate_core.dsl.sides import TOKENS, Form, RouterLosses
from surogate_core.engine import graphs
from surogate_core.engine.engine import Engine
from surogate_core.engine.schedule import HEAD, counting_schedule, render
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

BOTH = RouterLosses(aux=0.5, z=0.1)


def engine(**changes: Any) -> Engine:
    return tiny.engine(CONFIG, **{"build": Mixture, "optimizer": tiny.ADAMW, "router_losses": BOTH, **changes})


def test_recomputing_changes_no_bit() -> None:
    def trained(*, recompute: bool) -> dict[str, torch.Tensor]:
        made = engine(recompute=recompute)
        tiny.train(made, 3, micro_batches=2)
        return tiny.snapshot(made)

    tiny.ensure_same_bits(trained(recompute=True), trained(recompute=False), "recomputed")


def test_a_training_with_both_losses_resumes() -> None:
    tiny.ensure_resumes(engine)


def test_the_tokens_that_are_counted_first_are_those_of_the_step() -> None:
    """Also with dropout: both forwards of a micro-batch drop the same values."""
    made = engine(lora=tiny.lora(dropout=0.5, train_router=True))
    for step in range(2):
        sides = made.train_step(tiny.batches(step, 4), step=step, lr=0.1).sides()
        assert torch.equal(made.sides.counted_E, sides[TOKENS][1].sum(0).double())
    made.train_step(tiny.batches(2, 1), step=2, lr=0.1)
    assert not made.sides.counted_E.any(), "one micro-batch needs no count"


@pytest.mark.parametrize(
    ("losses", "micro_batches", "first"),
    [
        (RouterLosses(aux=0.1), 2, True),
        (RouterLosses(aux=0.1), 1, False),
        (RouterLosses(z=0.1), 2, False),
        (RouterLosses(), 2, False),
        (RouterLosses(aux=0.1, form="micro_batch"), 2, False),
        (RouterLosses(aux=0.1, form="layer"), 2, False),
    ],
)
def test_tokens_are_counted_first_where_the_loss_needs_it(
    losses: RouterLosses, micro_batches: int, first: bool
) -> None:
    assert engine(router_losses=losses).sides.counts_first(micro_batches) == first


def test_counting_runs_the_layers_alone() -> None:
    schedule = counting_schedule(3)
    assert [a.key for a in schedule if a.verb == "forward"] == ["embed", "layer 0", "layer 1", "layer 2"]
    assert not any(a.key == HEAD or a.verb in ("put", "loss", "backward") for a in schedule), render(schedule)


def test_counting_reads_weights_from_their_store_and_keeps_nothing() -> None:
    offloader, stores = strict_offloader()
    moved, plain = engine(offloader=offloader), engine()
    batches = tiny.batches(0, 2)
    moved.sides.begin(counted=True)
    moved.inputs.load(batches[0], moved.seeds(0, 0), 0.0)
    moved.step.count()
    weights = [(verb, key) for verb, key in stores["weights"].log if verb in ("fetch", "release")][-6:]
    assert weights == [(verb, key) for key in ("embed", "layer 0", "layer 1") for verb in ("fetch", "release")]
    assert stores["residuals"].log == []
    assert moved.sides.counted_E.sum() == 29 * CONFIG["num_experts_per_tok"]
    for made in (moved, plain):
        made.train_step(batches, step=0, lr=0.1)
    tiny.ensure_same_bits(tiny.snapshot(moved), tiny.snapshot(plain), "offloaded")


def test_counting_runs_before_memory_is_shared_out_to_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that notes what it is asked for."""
    done: list[str] = []
    capturing = mock.MagicMock()
    capturing.return_value.__enter__.side_effect = lambda: done.append("graph")
    for name in ("Stream", "stream", "current_stream", "current_device", "synchronize", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty cache"))
    monkeypatch.setattr(graphs, "_streams_of", lambda device: (mock.MagicMock(), mock.MagicMock()))
    made = engine(micro_batches=2)
    made.settings = replace(made.settings, device=torch.device("cuda"), cuda_graphs=True)
    made.assembly = replace(made.assembly, settings=made.settings)
    for name, owner in {"train": made.step, "run": made.update, "count": made.step}.items():
        monkeypatch.setattr(type(owner), name, lambda *args, name=name, **named: done.append(name))
    made._capture(lambda task, completed, total: None)
    assert done[: done.index("graph")] == ["train", "train", "count", "run", "empty cache"]
    assert done[done.index("graph") :] == ["graph", "train", "graph", "train", "graph", "run", "graph", "count"]


def test_a_counted_step_gathers_copies_once() -> None:
    def work(fabric: VirtualFabric) -> list[int]:
        assembly = tiny.assembly(
            CONFIG, build=Mixture, optimizer=tiny.ADAMW, router_losses=BOTH, ranks=2, zero_level=1, micro_batches=4
        )
        made = Engine(assembly, tiny.random_source(), mesh=fabric.mesh())
        assert made.sides.counts_first(4)
        gathered = mock.Mock(side_effect=made.traffic._gather_copies)
        made.traffic._gather_copies = gathered  # type: ignore[method-assign]
        found = []
        for step in range(3):
            made.train_step(tiny.batches(step, 4), step=step, lr=1e-3)
            found.append(gathered.call_count)
        return found

    assert in_threads(2, work) == [[1, 2, 3]] * 2


@pytest.mark.parametrize("form", ["step", "layer"])
def test_a_step_is_the_mean_of_equal_micro_batches(form: Form) -> None:
    losses = RouterLosses(aux=0.5, z=0.1, form=form)
    (batch,) = tiny.batches(0)
    one, three = (engine(router_losses=losses) for _ in range(2))
    error, name = tiny.worst(tiny.gradients(three, [batch] * 3), tiny.gradients(one, [batch]))
    assert error <= 1e-6, name
    terms = [
        [float(total) for role, total in made.train_step(batches, step=0, lr=0.0).sides().values() if "_loss" in role]
        for made, batches in ((one, [batch]), (three, [batch] * 3))
    ]
    assert len(terms[0]) == 2
    assert terms[1] == pytest.approx(terms[0], rel=1e-6)


def test_each_loss_adds_its_own_gradient() -> None:
    batches = tiny.batches(0)
    plain, aux, z, both = (
        tiny.gradients(engine(router_losses=losses), batches)
        for losses in (RouterLosses(), RouterLosses(aux=0.5), RouterLosses(z=0.1), BOTH)
    )
    added = {name: aux[name] + z[name] - plain[name] for name in both}
    error, name = tiny.worst(added, both)
    assert error <= 1e-5, name
    router = "layers.1.router.weight"
    assert all(tiny.relative_error(one[router], plain[router]) > 1e-2 for one in (aux, z))


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [False, True])
def test_compiled_programs_have_the_same_gradients(recompute: bool) -> None:
    batches = tiny.batches(0, 2)
    expected = tiny.gradients(engine(), batches)
    error, name = tiny.worst(tiny.gradients(engine(compiler="inductor", recompute=recompute), batches), expected)
    assert error <= 1e-5, name


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True])
def test_cuda_graphs_train_with_both_losses(recompute: bool) -> None:
    settings: dict[str, Any] = {"dtype": torch.float32, "recompute": recompute, "micro_batches": 3}
    both = [engine(**settings), engine(device="cuda", cuda_graphs=True, compiler="inductor", **settings)]
    for step, count in enumerate((3, 3, 1)):
        cpu, cuda = (e.train_step(tiny.batches(step, count), step=step, lr=1e-3) for e in both)
        assert cuda.read() == pytest.approx(cpu.read(), rel=1e-3)
        for name, (_, total) in cpu.sides().items():
            torch.testing.assert_close(cuda.sides()[name][1], total, rtol=1e-3, atol=1e-3)
