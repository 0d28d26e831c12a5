"""Engines whose ranks share out experts: the outputs, gradients and checkpoints of one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from mixture import CONFIG, Mixture
from torch import Tensor

from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.sides import RouterLosses
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.prediction import predict
from surogate_core.errors import UserError
from surogate_core.kernels import begun
from surogate_core.kernels.balancing import moved
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

EIGHT: Mapping[str, Any] = {**CONFIG, "num_experts": 8}
MICRO_BATCHES = 8


def made(fabric: VirtualFabric, expert: int, *, source: Any = None, **changes: Any) -> Engine:
    defaults: dict[str, Any] = {"config": EIGHT, "optimizer": tiny.ADAMW, "max_seqlen": tiny.TOKENS}
    changes = {"build": Mixture, "micro_batches": MICRO_BATCHES, **defaults, **changes}
    assembly = tiny.assembly(changes.pop("config"), ranks=fabric.world, expert=expert, **changes)
    return Engine(assembly, source or tiny.random_source(), mesh=fabric.mesh() if fabric.world > 1 else None)


def steps(engine: Engine, count: int = 2, *, start: int = 0) -> list[float]:
    own = engine.sharing.share(MICRO_BATCHES).numbers
    found: list[float] = []
    for step in range(start, start + count):
        batches = tiny.batches(step, MICRO_BATCHES)
        given: list[Any] = [b if n in own else b.counts() for n, b in enumerate(batches)]
        found += engine.train_step(given, step=step, lr=1e-2).read()
    return found


def on_ranks(world: int, expert: int, work: Callable[[Engine], Any], **changes: Any) -> list[Any]:
    def rank(fabric: VirtualFabric) -> Any:
        engine = made(fabric, expert, **changes)
        try:
            return work(engine)
        finally:
            engine.close()

    return in_threads(world, rank)


def logits(engine: Engine) -> Tensor:
    """The logits of this rank's batch, which differs from those of other ranks."""
    engine.evaluate(tiny.batches(9, MICRO_BATCHES))  # compiles the programs on one rank after another
    return engine.logits(tiny.batches(3, MICRO_BATCHES)[engine.mesh.rank])


def to_two_experts(spec: TensorSpec) -> Tensor:
    """A router that sends every token to the first two experts, whatever it is: a rank has all rows, others none."""
    if spec.hf_name.endswith("router.weight"):
        return torch.zeros(spec.shape)
    return tiny.random_source()(spec)  # type: ignore[return-value]


CASES = [
    pytest.param({}, id="as it comes"),
    pytest.param({"source": to_two_experts}, id="all rows on one rank"),
    pytest.param({"config": {**EIGHT, "num_experts_per_tok": 8}}, id="every expert"),
    pytest.param({"config": {**EIGHT, "num_experts_per_tok": 3}}, id="three of eight"),
    pytest.param({"recompute": True}, id="recompute"),
    pytest.param({"expert_balance": 1.0, "source": to_two_experts}, id="even loads"),
]


@pytest.mark.slow
@pytest.mark.parametrize("changes", CASES)
def test_outputs_are_those_of_one_rank(changes: dict[str, Any]) -> None:
    """With rows to the bit: each rank's own batch, on 2, 4 and 8 ranks."""
    wanted = on_ranks(1, 1, lambda engine: [engine.logits(b) for b in tiny.batches(3, MICRO_BATCHES)], **changes)[0]
    for world, expert in ((2, 2), (8, 8)) if changes else ((4, 2),):
        for rows in (True, False):
            found = on_ranks(world, expert, logits, expert_rows=rows, **changes)
            for mine, one in zip(found, wanted, strict=False):
                if rows:
                    assert torch.equal(mine, one), (world, expert)
                else:
                    assert tiny.relative_error(mine, one) < 1e-6, (world, expert)


def trained(engine: Engine) -> tuple[list[float], dict[str, Tensor]]:
    figures = steps(engine)
    figures.append(engine.evaluate(tiny.batches(7, 3))[0])
    return figures, tiny.whole_state(engine)


@pytest.mark.slow_cases("all rows on one rank", "adapters of experts", "losses of routers", "masters in bf16")
@pytest.mark.slow_cases("all weights", "equal logits")
@pytest.mark.slow_cases("two groups, masters shared out")
@pytest.mark.parametrize(
    ("world", "expert", "changes"),
    [
        pytest.param(2, 2, {"zero_level": 0}, id="all weights"),
        pytest.param(4, 2, {"zero_level": 1, "recompute": True}, id="two groups, masters shared out"),
        pytest.param(4, 4, {"lora": tiny.lora(), "source": to_two_experts}, id="all rows on one rank"),
        pytest.param(2, 2, {"lora": tiny.lora()}, id="adapters"),
        # Without AdamW, which makes steps of the rounding errors that experts without rows have for a gradient.
        pytest.param(4, 2, {"source": to_two_experts, "optimizer": tiny.DESCENT}, id="equal logits"),
        pytest.param(4, 2, {"lora": tiny.lora(targets=("experts",), train_router=True)}, id="adapters of experts"),
        pytest.param(8, 4, {"zero_level": 1, "router_losses": RouterLosses(aux=0.1, z=0.01)}, id="losses of routers"),
        pytest.param(2, 2, {"zero_level": 1, "master_dtype": torch.bfloat16}, id="masters in bf16"),
    ],
)
def test_training_is_that_of_one_rank(world: int, expert: int, changes: dict[str, Any]) -> None:
    """Losses, norms, and after two steps masters and the optimizer's state, by their names on one rank."""
    figures, state = on_ranks(1, 1, trained, **changes)[0]
    for rows in (True, False):
        found, other = on_ranks(world, expert, trained, expert_rows=rows, **changes)[0]
        assert found == pytest.approx(figures, rel=1e-6)
        error, name = tiny.worst(other, state)
        assert error < 1e-6, name


BALANCED: Mapping[str, Any] = {"expert_balance": 1.0, "source": to_two_experts}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "expert", "changes"),
    [
        pytest.param(2, 2, {"lora": tiny.lora(), "source": to_two_experts}, id="adapters"),
        pytest.param(4, 2, {"zero_level": 1}, id="all weights of two groups"),
        pytest.param(4, 4, {"config": {**EIGHT, "num_experts_per_tok": 8}}, id="every expert"),
        pytest.param(4, 4, {"recompute": True, "lora": tiny.lora(), "source": to_two_experts}, id="recompute"),
        pytest.param(8, 8, {"zero_level": 0}, id="eight ranks"),
    ],
)
def test_evened_out_loads_change_no_figure(world: int, expert: int, changes: dict[str, Any]) -> None:
    """Losses, norms, masters and state are those of one rank, and the loads are even."""
    figures, state = on_ranks(1, 1, trained, **changes)[0]

    def work(engine: Engine) -> tuple[list[float], dict[str, Tensor], list[float]]:
        return *trained(engine), loads(engine)

    for rows in (False, True)[: 1 if world == 2 else 2]:
        given = {**changes, "expert_rows": rows, "expert_balance": 1.0}
        found, other, (before, after, rows_moved, count) = on_ranks(world, expert, work, **given)[0]
        assert found == pytest.approx(figures, rel=1e-6)
        error, name = tiny.worst(other, state)
        assert error < 1e-6, name
        assert after <= 1.05
        assert before >= 1.9 if "source" in changes else before > 1.05 or "config" in changes
        assert (rows_moved > 0) == (count > 0) == ("config" not in changes)


def loads(engine: Engine) -> list[float]:
    """The means of `Moved.figures` over layers and micro-batches."""
    own = engine.sharing.share(MICRO_BATCHES).numbers
    given: list[Any] = [b if n in own else b.counts() for n, b in enumerate(tiny.batches(9, MICRO_BATCHES))]
    sides = engine.train_step(given, step=9, lr=0.0).sides()
    (total_LF,) = [total for role, total in sides.values() if role == "rank_loads"]
    return (total_LF.mean(0) / MICRO_BATCHES).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"router_losses": RouterLosses(aux=0.1)}, id="tokens counted first"),
        pytest.param({"lora": tiny.lora(), "recompute": True, "dtype": torch.bfloat16}, id="adapters"),
    ],
)
def test_bytes_of_moved_experts(ranks: int, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that events name are those that ranks send to others."""
    sent: list[int] = []
    exchanged = moved.exchanged

    def counted(sent_C: Tensor, number: int) -> Tensor:
        sent.append(sent_C[1:].nbytes)
        return exchanged(sent_C, number)

    monkeypatch.setattr(moved, "exchanged", counted)

    def named(engine: Engine) -> int:
        steps(engine, 1)
        return engine.plan.moved_bytes(counted=engine.sides.counts_first(MICRO_BATCHES))

    found = on_ranks(ranks, ranks, named, **{**changes, "expert_balance": 1.0})
    assert sum(sent) == MICRO_BATCHES * found[0]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, BALANCED])
def test_two_runs_have_equal_bits(changes: dict[str, Any]) -> None:
    first, second = (on_ranks(4, 2, trained, zero_level=1, **changes)[0] for _ in range(2))
    assert first[0] == second[0]
    tiny.ensure_same_bits(first[1], second[1], "a second run")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Mapping[int, Any]:
    """Exchanges bring nothing before they are awaited, as on a GPU, and what they send must not change until then.
    Returns those that are under way, by address.
    """
    going: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def begin(sent: Tensor, received: Callable[[], Tensor]) -> Tensor:
        found = received()
        going[found.data_ptr()] = found.clone(), sent, sent.clone()
        return found.fill_(torch.nan)

    def wait(begun_C: Tensor) -> None:
        found, sent, before = going.pop(begun_C.data_ptr())
        torch.testing.assert_close(sent, before, rtol=0, atol=0, equal_nan=True)
        begun_C.copy_(found)

    monkeypatch.setattr(begun, "_begin", begin)
    monkeypatch.setattr(begun, "_await", wait)
    return going


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute",
    [
        pytest.param(Recompute(block=False), id="none"),
        pytest.param(Recompute(block=False, regions=frozenset({"ffn"})), id="ffn"),
        pytest.param(Recompute(block=False, budget=0.5), id="half"),
    ],
)
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_what_arrives_late(compiler: str, recompute: Recompute, late: Mapping[int, Any]) -> None:
    """Halves of the tokens are neither read before they are there nor overwritten while they are sent."""
    given: dict[str, Any] = {"lora": tiny.lora(targets=("experts",), train_router=True)}
    figures, state = on_ranks(1, 1, trained, **given)[0]
    found, other = on_ranks(2, 2, trained, **given, compiler=compiler, recompute=recompute)[0]
    assert found == pytest.approx(figures, rel=1e-6)
    assert tiny.worst(other, state)[0] < 1e-6
    assert not late


Checkpoint = dict[str, dict[str, Tensor]]


def saved(engine: Engine) -> Checkpoint:
    """A checkpoint as rank 0 writes it; nothing on the others."""
    if not engine.mesh.leads:
        engine.serve()
        return {}
    found = {file: {name: t.clone() for name, t in tensors.items()} for file, tensors in engine.state().items()}
    if engine.mesh.world > 1:
        engine.dismiss()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"zero_level": 0}, id="all weights"),
        pytest.param({"zero_level": 1}, id="masters shared out"),
        pytest.param({"lora": tiny.lora()}, id="adapters"),
    ],
)
def test_a_run_resumes_with_another_number_of_ranks_that_share_out_experts(changes: dict[str, Any]) -> None:
    """4 → 2 → 1 → 4: what is read is written again, to the bit, and training goes on."""
    kept: Checkpoint = on_ranks(4, 4, lambda e: (steps(e, 1), saved(e))[1], **changes)[0]
    for world, expert in ((4, 2), (2, 2), (1, 1), (4, 4)):

        def resumed(engine: Engine, before: Checkpoint = kept) -> tuple[Checkpoint, list[float], Checkpoint]:
            engine.load_state(before)
            return saved(engine), steps(engine, 1, start=1), saved(engine)

        again, figures, after = on_ranks(world, expert, resumed, **changes)[0]
        for file, tensors in kept.items():
            tiny.ensure_same_bits(again[file], tensors, f"{file} on {world} ranks")
        if world == 4 and expert == 2:
            wanted, state = figures, after
        assert figures == pytest.approx(wanted, rel=1e-6)
        for file, tensors in state.items():
            assert tiny.worst(after[file], tensors)[0] < 1e-6


class OfGroup(tiny.TextbookAdamW):
    """Keeps three numbers for each group too."""

    def state(self) -> dict[str, Tensor]:
        return {**super().state(), **{f"{g.name}.odd": torch.zeros(3) for g in self.groups}}


class Unnamed(tiny.TextbookAdamW):
    """Names its state before the group."""

    def state(self) -> dict[str, Tensor]:
        return {f"of {name}": tensor for name, tensor in super().state().items()}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        pytest.param(OfGroup, "'decayed.odd' does not list the trained tensors one after another", id="of a group"),
        pytest.param(Unnamed, "'of decayed.first' is not named after a group", id="unnamed"),
    ],
)
def test_state_that_cannot_be_put_together_is_refused(kind: Any, message: str) -> None:
    with pytest.raises(UserError, match=f"{message}.*Fix: ep_size=1, or optimizer=adamw"):
        on_ranks(2, 2, lambda engine: None, optimizer=replace(tiny.ADAMW, build=kind), zero_level=0)


def test_parameters_of_all_ranks_are_counted() -> None:
    plans = [tiny.assembly(EIGHT, build=Mixture, ranks=n, expert=n, micro_batches=4, zero_level=1) for n in (1, 4)]
    alone, four = map(predict, plans)
    assert (four.parameters, four.trainable_parameters) == (alone.parameters, alone.trainable_parameters)
    kept = ("masters", "gradients", "optimizer state")
    mine, whole = (sum(h.nbytes for h in plan.held if h.kind in kept) for plan in (four, alone))
    assert mine < 0.4 * whole
