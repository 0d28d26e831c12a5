"""Engines on several virtual ranks: the same bits as on one, at every level, and checkpoints for any number of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from rank_engines import CASES, alone, engine_of, steps, trained
from surogate_offload_host.store import HostStores
from tiny_qwen3 import StrictStore
from torch import Tensor

from surogate_core.bundles import OffloaderSpec, OptimizerSpec, Store, Stores, TensorKind
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.pieces import InFile
from surogate_core.errors import PluginError, UserError
from surogate_core.mesh import groups
from surogate_testing import tiny
from surogate_testing.virtual import VirtualFabric, in_threads

QUICK = {
    ("lora", 4),
    ("experts, level 1", 2),
    ("level 1", 2),
    ("experts in NF4, sharded", 2),
    ("level 3 in 8 bits, bf16 masters", 2),
    ("level 1, weights", 2),
    ("level 1, weights, in 8 bits, bf16 masters", 4),
    ("fp32 parameters, level 3, bf16 masters", 2),
    ("fp32 parameters, lora on a sharded base", 2),
    ("buffers, level 3", 2),
}
IN_WORLDS = [
    pytest.param(case, world, marks=[] if (case, world) in QUICK else pytest.mark.slow)
    for case in CASES
    for world in (2, 4, 8)
]


@pytest.mark.slow_cases("experts, a counted step, level 1, weights")
@pytest.mark.parametrize(
    ("case", "world"),
    [
        ("experts, level 1", 2),
        ("experts, a counted step, level 1, weights", 2),
        ("experts, a counted step, level 3", 2),
    ],
)
def test_ranks_with_one_micro_step_each_know_the_tokens_of_the_step(case: str, world: int) -> None:
    figures, state = alone(case, micro_batches=world)
    other_figures, other_state = trained(world, exact=True, micro_batches=world, **CASES[case])
    assert other_figures == figures
    tiny.ensure_same_bits(other_state, state, f"{case}, {world} ranks")


@pytest.mark.parametrize(("case", "world"), IN_WORLDS)
def test_any_number_of_ranks_trains_the_same_bits(case: str, world: int) -> None:
    figures, state = alone(case)
    other_figures, other_state = trained(world, exact=True, **CASES[case])
    assert other_figures == figures
    tiny.ensure_same_bits(other_state, state, f"{world} ranks")


QUICK_MACHINES = {("lora", 4, 2), ("level 1", 8, 4), ("level 3", 4, 2)}
ON_MACHINES = [
    pytest.param(case, world, node, marks=[] if (case, world, node) in QUICK_MACHINES else pytest.mark.slow)
    for case in ("lora", "level 0", "level 1", "level 1, weights", "level 2", "level 3", "lora on a sharded base")
    for world, node in ((4, 2), (8, 2), (8, 4))
]


@pytest.mark.parametrize(("case", "world", "node"), ON_MACHINES)
def test_sums_in_two_stages_have_the_bits_of_one_rank(case: str, world: int, node: int) -> None:
    figures, state = alone(case)
    other_figures, other_state = trained(world, node=node, exact=True, **CASES[case])
    assert other_figures == figures
    tiny.ensure_same_bits(other_state, state, f"{world} ranks, {node} on each machine")


QUICK_REPLICAS = {
    ("level 1", 4, 2, 2),
    ("level 1, weights", 4, 2, 2),
    ("level 2", 4, 2, 0),
    ("level 3", 8, 4, 2),
    ("lora on a sharded base", 4, 2, 2),
}
REPLICAS = [
    pytest.param(case, *places, marks=[] if (case, *places) in QUICK_REPLICAS else pytest.mark.slow)
    for case in (
        "level 1",
        "level 1, weights",
        "level 2",
        "level 3",
        "level 3, head not tied",
        "lora on a sharded base",
        "level 1 in 8 bits, bf16 masters",
        "level 1, weights, in 8 bits, bf16 masters",
        "level 3 in 8 bits, bf16 masters",
        "experts, level 3",
        "experts in NF4, sharded",
    )
    for places in ((4, 2, 0), (4, 2, 2), (8, 2, 2), (8, 4, 4), (8, 2, 4), (8, 4, 2))
]


@pytest.mark.parametrize(("case", "world", "shard", "node"), REPLICAS)
def test_replicas_that_share_out_have_the_bits_of_one_rank(case: str, world: int, shard: int, node: int) -> None:
    """`shard`: ranks of a replica."""
    figures, state = alone(case)
    other_figures, other_state = trained(world, shard_ranks=shard, node=node, exact=True, **CASES[case])
    assert other_figures == figures
    tiny.ensure_same_bits(other_state, state, f"{world} ranks, replicas of {shard}, {node} on each machine")


@pytest.mark.parametrize("levels", [(0, 1), (2, 3)])
def test_levels_with_one_order_of_sums_train_the_same_bits(levels: tuple[int, int]) -> None:
    """At level 0 the norm has other sums than above, so steps that are clipped may differ."""
    clip = 0.0 if 0 in levels else 0.01
    one, other = (trained(1, exact=True, max_grad_norm=clip, zero_level=level, micro_batches=4) for level in levels)
    assert [loss for loss, _ in one[0]] == [loss for loss, _ in other[0]]
    assert [norm for _, norm in one[0]] == pytest.approx([norm for _, norm in other[0]], rel=1e-6)
    tiny.ensure_same_bits(other[1], one[1], f"levels {levels[0]} and {levels[1]}")


@pytest.mark.parametrize(
    ("world", "shard"), [(2, 0), pytest.param(3, 0, marks=pytest.mark.slow), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_weights_shared_out_at_level_1_change_no_bit(world: int, shard: int) -> None:
    """Gradients are added as at level 1, in any order of sums."""
    keys: dict[str, Any] = {"micro_batches": 12, "count": 2, "zero_level": 1, "shard_ranks": shard}
    figures, state = trained(world, **keys)
    shared_figures, shared = trained(world, shard_weights=True, **keys)
    assert shared_figures == figures
    tiny.ensure_same_bits(shared, state, "weights shared out")


class _LiveStore(StrictStore):
    """A store that keeps the CPU's tensors of `allocate` as they are, and copies of all others."""

    stores: _HostStores

    def put(self, key: str, tensors: Sequence[Tensor]) -> None:
        live = self.stores.live
        self.held[key] = tuple(t if t.untyped_storage()._cdata in live else t.clone() for t in tensors)


class _HostStores(Stores):
    """Host memory under two addresses, as for a GPU."""

    def __init__(self) -> None:
        self.live: set[int] = set()

    def store(self, kind: TensorKind) -> Store:
        if kind == "gradients":
            return HostStores(torch.device("cpu")).store(kind)
        made = _LiveStore(kind)
        made.stores = self
        return made

    def allocate(self, kind: TensorKind, elements: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        here = torch.zeros(elements * dtype.itemsize, dtype=torch.uint8)
        on_host = torch.from_numpy(here.numpy())
        self.live.add(on_host.untyped_storage()._cdata)
        return here.view(dtype), on_host.view(dtype)


@pytest.mark.slow
@pytest.mark.slow_cases("level 2", "level 3")
@pytest.mark.parametrize(
    "case",
    ["lora on a sharded base", "level 1, weights", "level 2", "level 3", "level 3 in 8 bits, bf16 masters"],
)
def test_what_is_shared_out_may_be_in_host_memory(case: str) -> None:
    """Each rank moves its part. Whole weights and whole gradients stay on the device."""
    kinds: set[TensorKind] = {"master", "optimizer", "residuals"}
    kinds |= {"weights"} if case != "level 2" else set()
    kinds |= {"gradients"} if "level" in case and "level 1" not in case else set()
    host = OffloaderSpec(
        name="host", kinds=frozenset(kinds), place="host", build=lambda *a: _HostStores(), allocates=True
    )
    figures, state = alone(case)
    for world in (2, 4):
        other_figures, other_state = trained(world, exact=True, offloader=host, **CASES[case])
        assert other_figures == figures, f"{world} ranks"
        tiny.ensure_same_bits(other_state, state, f"{world} ranks")


ON_CPU = ("lora", "lora on a sharded base", "level 3", "level 3, head not tied", "level 3 in 8 bits, bf16 masters")
QUICK_ON_CPU = {("lora", 2), ("level 3, head not tied", 2)}


@pytest.mark.parametrize(
    ("case", "world"),
    [
        pytest.param(case, world, marks=[] if (case, world) in QUICK_ON_CPU else pytest.mark.slow)
        for case in ON_CPU
        for world in (1, 2, 4)
    ],
)
def test_each_ranks_cpu_updates_its_part(case: str, world: int) -> None:
    """All that the optimizer reads and writes is in host memory. It runs the kernels of the device here, a CPU."""
    _updated_on_cpu(case, world, shard_ranks=0)


@pytest.mark.slow_cases("lora on a sharded base")
@pytest.mark.parametrize("case", ["lora on a sharded base", "level 3, head not tied"])
def test_each_ranks_cpu_updates_its_part_in_replicas(case: str) -> None:
    _updated_on_cpu(case, 4, shard_ranks=2, node=2)


def _updated_on_cpu(case: str, world: int, **keys: Any) -> None:
    kinds: frozenset[TensorKind] = frozenset({"weights", "gradients", "master", "optimizer"})
    host = OffloaderSpec(name="host", kinds=kinds, place="host", build=lambda *a: _HostStores(), allocates=True)

    def work(fabric: VirtualFabric) -> tuple[Any, dict[str, Tensor], int]:
        engine = engine_of(
            fabric, micro_batches=8, exact=True, offloader=host, update_on_cpu=True, **keys, **CASES[case]
        )
        figures, groups = steps(engine, 3, micro_batches=8), engine.update._groups
        stores = engine.assembly.stores
        assert isinstance(stores, _HostStores)
        for tensor in (t for group in groups for t in (group.master, group.grad)):
            assert tensor.untyped_storage()._cdata in stores.live
        return figures, tiny.whole_state(engine), sum(group.master.numel() for group in groups)

    expected, state = alone(case)
    found = in_threads(world, work)
    assert all(figures == expected for figures, _, _ in found)
    tiny.ensure_same_bits(found[0][1], state, f"{world} ranks")
    if "lora" not in case and world == 4:
        assert max(count for _, _, count in found) < sum(count for _, _, count in found) / 2


@pytest.mark.slow_cases("lora", "level 1", "level 3")
@pytest.mark.slow_cases("level 1", "level 2")
@pytest.mark.parametrize("case", ["lora", "level 1", "level 2", "level 3"])
def test_more_micro_batches_than_lanes(case: str) -> None:
    figures, state = alone(case, micro_batches=16)
    other_figures, other_state = trained(4, exact=True, micro_batches=16, **CASES[case])
    assert other_figures == figures
    tiny.ensure_same_bits(other_state, state, "4 ranks")


@pytest.mark.slow_cases("2-1", "3-2", "4-3")
@pytest.mark.slow_cases("2-1", "3-1")
@pytest.mark.parametrize(("world", "level"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_without_exactness_runs_repeat_and_are_close_to_one_rank(world: int, level: int) -> None:
    figures, _ = trained(1, micro_batches=12, zero_level=level)
    first, state = trained(world, micro_batches=12, zero_level=level)
    again, same = trained(world, micro_batches=12, zero_level=level)
    assert again == first
    tiny.ensure_same_bits(same, state, "a second run")
    torch.testing.assert_close(torch.tensor(first), torch.tensor(figures), rtol=1e-5, atol=1e-6)


@pytest.mark.slow_cases("lora", "level 1 in 8 bits, bf16 masters")
@pytest.mark.slow_cases("level 1 in 8 bits, bf16 masters")
@pytest.mark.parametrize(
    "case",
    [
        "lora",
        "level 1 in 8 bits, bf16 masters",
        "level 1, weights, in 8 bits, bf16 masters",
        "level 3 in 8 bits, bf16 masters",
    ],
)
def test_a_checkpoint_serves_any_number_of_ranks(case: str) -> None:
    """4 → 2 → 1 → 4 is as four on four ranks."""
    _resumed(case, (4, 0, 0), (2, 0, 0), (1, 0, 0), (4, 0, 0))


@pytest.mark.slow_cases("level 1 in 8 bits, bf16 masters")
@pytest.mark.slow_cases("level 1, weights, in 8 bits, bf16 masters")
@pytest.mark.parametrize(
    "case",
    [
        "level 1 in 8 bits, bf16 masters",
        "level 1, weights, in 8 bits, bf16 masters",
        "level 3 in 8 bits, bf16 masters",
    ],
)
def test_a_checkpoint_serves_replicas_of_any_size(case: str) -> None:
    """2 replicas of 2 ranks → one group of 4 → 1 → 4 replicas of 2 are as four steps of one rank."""
    _resumed(case, (4, 2, 2), (4, 0, 0), (1, 0, 0), (8, 2, 4))


def _resumed(case: str, *places: tuple[int, int, int]) -> None:
    """A step on each world has the bits of one rank. `places`: ranks, those of a replica, those of a machine."""
    _, expected = alone(case, count=len(places))
    state: Mapping[str, Tensor] = {}
    for step, (world, shard, node) in enumerate(places):
        keys: dict[str, Any] = {"exact": True, "shard_ranks": shard, "node": node, **CASES[case]}
        state = in_threads(world, partial(_next_step, step=step, state=state, keys=keys))[0]
    tiny.ensure_same_bits(state, expected, "after three resumes")


def _next_step(
    fabric: VirtualFabric, *, step: int, state: Mapping[str, Tensor], keys: Mapping[str, Any]
) -> dict[str, Tensor]:
    engine = engine_of(fabric, micro_batches=8, **keys)
    if step:
        files: dict[str, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            files.setdefault(name.split()[0], {})[name.split(" ", 1)[1]] = tensor
        engine.load_state(files)
    steps(engine, 1, micro_batches=8, start=step)
    return tiny.whole_state(engine)


@pytest.mark.parametrize(("level", "varying"), [(1, False), (2, False), (3, True)])
def test_replicas_without_exactness_repeat_and_are_close_to_one_rank(level: int, varying: bool) -> None:
    """At levels 2 and 3 their sums meet once in a step."""
    figures, _ = trained(1, micro_batches=12, zero_level=level)
    keys: dict[str, Any] = {"micro_batches": 12, "zero_level": level, "shard_ranks": 2, "varying": varying}
    first, state = trained(6, node=2, **keys)
    again, same = trained(6, node=2, **keys)
    assert again == first
    tiny.ensure_same_bits(same, state, "a second run")
    torch.testing.assert_close(torch.tensor(first), torch.tensor(figures), rtol=1e-5, atol=1e-6)


def test_a_rank_holds_its_part_of_masters_and_state() -> None:
    def work(fabric: VirtualFabric) -> tuple[int, int]:
        engine = engine_of(fabric, micro_batches=8, zero_level=1)
        group = engine.parameters.sharded
        assert group is not None
        held = group.master.untyped_storage().nbytes() // 4
        state = sum(t.numel() for n, t in engine.optimizer.state().items() if "@" in n)
        return held, state

    found = in_threads(4, work)
    assert sum(held for held, _ in found) == sum(state for _, state in found) // 2
    assert max(held for held, _ in found) < sum(held for held, _ in found) / 2


@pytest.mark.parametrize(("case", "world"), [("lora", 3), ("level 0", 2), ("level 1", 2)])
def test_gradients_that_all_keep_are_gathered_in_place_by_one_call(case: str, world: int) -> None:
    gathered: list[bool] = []

    class Watched(VirtualFabric):
        def gather(self, parts: Sequence[Tensor]) -> None:
            gathered.append(groups._as_one(parts) is not None)
            super().gather(parts)

    def work(fabric: VirtualFabric) -> None:
        engine = engine_of(Watched(fabric._ranks, fabric.rank), micro_batches=6, **CASES[case])
        whole = sum(group.grad.numel() for group in engine.parameters.groups if "@" not in group.name)
        assert sum(parts_NK.numel() for parts_NK in engine.parameters.flat.kept_by_all) > whole, "nothing is padded"
        steps(engine, 1, micro_batches=6)

    in_threads(world, work)
    assert gathered == [True] * len(gathered) != []


def test_weights_are_gathered_in_place_by_one_call_for_each_piece() -> None:
    def work(fabric: VirtualFabric) -> tuple[set[int], list[bool]]:
        gathered: list[bool] = []

        class Watched(VirtualFabric):
            def gather(self, parts: Sequence[Tensor]) -> None:
                gathered.append(groups._as_one(parts) is not None)

        engine = engine_of(Watched(fabric._ranks, fabric.rank), micro_batches=6, zero_level=1)
        group = engine.parameters.sharded
        assert group is not None
        owned = {stop - start for part in group.parts.values() for start, stop in part.owners}
        gathered.clear()
        for key in group.whole_pieces:
            group.gather(key)
        return owned, gathered

    for owned, gathered in in_threads(3, work):
        assert len(owned) > 1, "3 ranks own unequal parts"
        assert gathered == [True] * len(gathered) != []


@pytest.mark.slow_cases("lora", "level 2")
@pytest.mark.slow_cases("level 1")
@pytest.mark.parametrize("case", ["lora", "level 1", "level 2"])
def test_not_a_number_on_one_rank_skips_the_step_on_all(case: str) -> None:
    def work(fabric: VirtualFabric) -> tuple[bool, list[tuple[float, float]]]:
        engine = engine_of(fabric, micro_batches=2, exact=True, **CASES[case])
        before = {n: m.clone() for n, m in engine.parameters.masters().items()}
        parts = [g.master.clone() for g in engine.parameters.groups]
        if fabric.rank == 1:
            engine.parameters.flat.sums()[0][:1].fill_(float("nan"))
            engine._sums_hold = True
        figures = steps(engine, 1, micro_batches=2)
        same = all(torch.equal(m, before[n]) for n, m in engine.parameters.masters().items())
        same &= all(torch.equal(g.master, p) for g, p in zip(engine.parameters.groups, parts, strict=True))
        return same, figures

    for same, figures in in_threads(2, work):
        assert same
        assert figures[0][1] != figures[0][1]


@pytest.mark.parametrize("weights", [False, True])
def test_evaluation_is_shared_and_its_sum_is_that_of_one_rank(weights: bool) -> None:
    """`weights`: whether they are shared out."""
    batches = [tiny.batch(tiny.documents(seed=i)) for i in range(5)]

    def work(fabric: VirtualFabric) -> list[tuple[float, int]]:
        engine = engine_of(fabric, micro_batches=8, exact=True, zero_level=1, shard_weights=weights)
        with engine.mesh.turn:
            engine.programs.head(engine.plan.head, tiny.TOKENS, training=False)
            for piece in engine.plan.layers:
                engine.programs.evaluation_layer(piece)
        found = [engine.evaluate(batches)]
        steps(engine, 1, micro_batches=8)
        return [*found, engine.evaluate(batches)]

    (expected,) = in_threads(1, work)
    for found in in_threads(4, work):
        assert found == expected


@pytest.mark.parametrize("level", [1, 3])
def test_a_rank_reads_only_what_it_keeps(level: int) -> None:
    """It reads its part of each sharded weight, and every norm."""
    whole = tiny.random_source()

    def work(fabric: VirtualFabric) -> tuple[int, dict[str, Tensor]]:
        read = 0

        def source(spec: TensorSpec) -> InFile:
            def part(first: int, target: Tensor) -> None:
                nonlocal read
                read += target.numel() if spec.decayed else 0
                value = whole(spec)
                assert isinstance(value, Tensor)
                target.copy_(value.flatten()[first : first + target.numel()])

            return InFile(part)

        assembly = tiny.assembly(
            tiny.SMALL_CONFIG, build=tiny.SmallModel, ranks=fabric.world, zero_level=level, micro_batches=8
        )
        engine = Engine(assembly, source, mesh=fabric.mesh())
        return read, tiny.whole_state(engine)

    results = in_threads(4, work)
    trained_elements = sum(read for read, _ in results)
    (alone,) = in_threads(1, lambda fabric: tiny.whole_state(engine_of(fabric, micro_batches=8, zero_level=level)))
    matrices = [t for n, t in alone.items() if n.startswith("trainable") and "norm" not in n and "final" not in n]
    assert trained_elements == sum(t.numel() for t in matrices)
    for name, tensor in alone.items():
        if name.startswith("trainable"):
            assert torch.equal(results[0][1][name], tensor), name


class _NamedBehind(tiny.TextbookAdamW):
    """State named after a group at the end, of which one rank's part would be taken for the whole."""

    def state(self) -> dict[str, Tensor]:
        return {".".join(reversed(name.rsplit(".", 1))): tensor for name, tensor in super().state().items()}


def test_state_that_cannot_be_put_together_is_refused_by_name() -> None:
    spec = OptimizerSpec(name="named", build=_NamedBehind)
    with pytest.raises(PluginError, match=r"first\.decayed@"):
        in_threads(2, lambda fabric: engine_of(fabric, micro_batches=2, zero_level=1, optimizer=spec))


def test_one_rank_takes_steps_of_any_length_and_several_refuse_them() -> None:
    def work(fabric: VirtualFabric) -> list[float]:
        engine = engine_of(fabric, micro_batches=4, exact=True, lora=tiny.lora())
        batches = tiny.batches(0, 2)
        return [engine.train_step(batches, step=step, lr=0.0).read()[0] for step in range(2)]

    (losses,) = in_threads(1, work)
    plain = tiny.engine(tiny.SMALL_CONFIG, build=tiny.SmallModel, lora=tiny.lora())
    expected = plain.train_step(tiny.batches(0, 2), step=0, lr=0.0).read()[0]
    assert losses == pytest.approx([expected] * 2, rel=1e-6)
    with pytest.raises(UserError, match="2 micro-batches, and several GPUs need 4"):
        in_threads(2, work)


def test_accumulating_tells_the_mean_loss_of_all_ranks() -> None:
    def work(fabric: VirtualFabric) -> float:
        engine = engine_of(fabric, micro_batches=4, exact=True, lora=tiny.lora())
        return engine.accumulate(tiny.batches(0, 4))

    (alone,) = in_threads(1, work)
    assert alone > 1
    assert in_threads(2, work) == [alone, alone]


def test_the_largest_figures_of_recipes_keep_their_signs_and_nan() -> None:
    nan = float("nan")
    by_rank = [[-1.0, 2.0, -0.5, nan], [-2.0, 3.0, nan, 1.0]]

    def work(fabric: VirtualFabric) -> list[float]:
        engine = engine_of(fabric, micro_batches=2, lora=tiny.lora())
        values = torch.tensor(by_rank[fabric.rank])
        engine.traffic.largest(values)
        return values.tolist()

    for found in in_threads(2, work):
        assert found[:2] == [-1.0, 3.0]
        assert all(value != value for value in found[2:])


VARYING = ("lora", "level 0", "level 1", "level 2", "experts, level 1", "experts, a counted step, level 3")


@pytest.mark.slow_cases("level 0", "experts, level 1", "experts, a counted step, level 3")
@pytest.mark.parametrize("case", VARYING)
def test_steps_of_any_length_have_the_same_bits(case: str) -> None:
    """Also where a rank has no micro-batch."""
    lengths = (1, 3, 6)

    def work(fabric: VirtualFabric) -> tuple[Any, dict[str, Tensor]]:
        engine = engine_of(fabric, micro_batches=8, varying=True, exact=True, **CASES[case])
        results = [
            engine.train_step(tiny.batches(step, count), step=step, lr=1e-2) for step, count in enumerate(lengths)
        ]
        figures = [(*r.read(), *(total.tolist() for _, total in r.sides().values())) for r in results]
        return figures, tiny.whole_state(engine)

    (alone,) = in_threads(1, work)
    for world in (2, 4):
        figures, tensors = in_threads(world, work)[0]
        assert figures == alone[0], world
        assert tensors.keys() == alone[1].keys()
        assert all(torch.equal(tensor, alone[1][name]) for name, tensor in tensors.items()), world
