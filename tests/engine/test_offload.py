"""Training with tensors in host memory has the bits of training without."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from surogate_offload_disk import surogate_offloader as disk
from surogate_offload_host import surogate_offloader
from surogate_optimizer_adamw_8bit import surogate_optimizer as adamw_8bit
from surogate_optimizer_normuon import surogate_optimizer as normuon
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.bundles import OffloaderSpec, TensorKind
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.engine.graphs import warm_up
from surogate_testing import tiny

KINDS: tuple[TensorKind, ...] = ("residuals", "optimizer", "master", "gradients", "weights")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG = tiny_config(hidden_size=64, num_hidden_layers=3, vocab_size=127)


def host(*kinds: TensorKind) -> OffloaderSpec:
    """Pinned host memory for these kinds."""
    return replace(surogate_offloader(), kinds=frozenset(kinds))


def batches(step: int) -> list[MicroBatch]:
    return [
        tiny.batch(tiny.documents(lengths, vocabulary=127, seed=10 * step + i))
        for i, lengths in enumerate(((20, 1, 9), (13, 17)))
    ]


def engine(device: str, **settings: Any) -> Engine:
    return make_engine(CONFIG, device=device, **{"cuda_graphs": device == "cuda", **settings})


def train(e: Engine, steps: Sequence[int] = range(4)) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    return [e.train_step(batches(step), step=step, lr=1e-2).read() for step in steps]


def bits(e: Engine) -> dict[str, Tensor]:
    return {f"{file}: {n}": t.cpu().clone() for file, named in e.state().items() for n, t in named.items()}


def assert_same(found: Engine, expected: Engine, steps: Sequence[int] = range(4)) -> None:
    assert train(found, steps) == train(expected, steps)
    assert found.evaluate(batches(9)) == expected.evaluate(batches(9))
    mine, theirs = bits(found), bits(expected)
    assert mine.keys() == theirs.keys()
    assert not [name for name, tensor in theirs.items() if not torch.equal(mine[name], tensor)]


CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "8-bit, recomputed": {"optimizer": adamw_8bit(), "recompute": Recompute(block=True)},
    "normuon, bf16": {"optimizer": normuon(), "dtype": torch.bfloat16},
    "bf16 masters": {"dtype": torch.bfloat16, "master_dtype": torch.bfloat16},
    "lora, dropout": {"lora": tiny.lora(dropout=0.2), "dtype": torch.bfloat16},
}


@pytest.mark.slow_cases("bf16 masters-cpu", "normuon, bf16-cpu")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES)
def test_all_kinds_on_the_host_change_no_bit(case: str, device: str) -> None:
    assert_same(engine(device, offloader=host(*KINDS), **CASES[case]), engine(device, **CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["8-bit, recomputed", "lora, dropout"])
def test_what_precedes_a_capture_leaves_no_trace(case: str) -> None:
    """Sums that are not cleared may keep nothing of its gradients, which are not finite."""
    warm = engine("cpu", offloader=host(*KINDS), **CASES[case])
    warm_up(warm.step.train, warm.update.run, warm.update.spoil)
    assert_same(warm, engine("cpu", **CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_each_kind_alone_changes_no_bit(device: str) -> None:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "cuda_graphs": False}
    expected = engine(device, **settings)
    losses, state = train(expected), bits(expected)
    for kind in KINDS:
        found = engine(device, offloader=host(kind), **settings)
        assert train(found) == losses, kind
        assert all(torch.equal(tensor, state[name]) for name, tensor in bits(found).items()), kind


@pytest.mark.slow
def test_the_cpu_takes_the_optimizer_step() -> None:
    """On a CPU it is the same kernel, so the bits are the same too."""
    kinds: tuple[TensorKind, ...] = ("weights", "master", "gradients")
    for settings in ({"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "master_dtype": torch.bfloat16}):
        assert_same(engine("cpu", offloader=host(*kinds), update_on_cpu=True, **settings), engine("cpu", **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_the_cpu_takes_a_gpus_optimizer_step(adapters: bool) -> None:
    """To rounding: the CPU's AdamW orders its operations differently."""
    settings: dict[str, Any] = {"lora": tiny.lora() if adapters else None, "recompute": Recompute(block=True)}
    found = engine(
        "cuda", offloader=host("weights", "master", "gradients", "residuals"), update_on_cpu=True, **settings
    )
    expected = engine("cuda", **settings)
    for mine, theirs in zip(train(found), train(expected), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    assert all(t.device.type == "cpu" for t in found.optimizer.state().values())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_files_have_the_bits_of_host_memory(adapters: bool, device: str) -> None:
    kinds: frozenset[TensorKind] = frozenset({"weights", "master", "gradients", "optimizer"})
    settings = {"lora": tiny.lora() if adapters else None, "update_on_cpu": True, "recompute": Recompute(block=True)}
    found = engine(device, offloader=replace(disk(), kinds=kinds), **settings)
    assert all(t.device.type == "cpu" for t in found.parameters.masters().values())
    expected = engine(device, offloader=host("weights", "master", "gradients"), **settings)
    assert_same(found, expected)


@pytest.mark.parametrize("device", DEVICES)
def test_a_resumed_run_goes_on_bit_for_bit(device: str) -> None:
    def made() -> Engine:
        return engine(device, offloader=host(*KINDS), optimizer=adamw_8bit(), dtype=torch.bfloat16)

    whole, first, second = made(), made(), made()
    train(first, range(2))
    saved = {file: {n: t.cpu().clone() for n, t in named.items()} for file, named in first.state().items()}
    second.load_state(saved)
    train(whole, range(2))
    assert_same(second, whole, range(2, 4))
    # And without offloading from the same checkpoint.
    plain, again = engine(device, optimizer=adamw_8bit(), dtype=torch.bfloat16), made()
    for e in (plain, again):
        e.load_state(saved)
    assert train(plain, range(2, 4)) == train(again, range(2, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_inductors_graphs_change_no_bit(adapters: bool) -> None:
    settings: dict[str, Any] = {"compiler": "inductor", "dtype": torch.bfloat16}
    settings["lora"] = tiny.lora(8, dropout=0.1) if adapters else None
    assert_same(engine("cuda", offloader=host(*KINDS), **settings), engine("cuda", **settings))


def test_tensors_are_where_they_are_said_to_be() -> None:
    """On a GPU by their addresses; on a CPU by whose memory a store counts."""
    e = engine("cpu", offloader=host(*KINDS), dtype=torch.bfloat16)
    assert e.stores.weights.nbytes()["device"] == 0
    train(e, range(1))
    held = e.stores.residuals.nbytes()
    assert held["device"] == 0 < held["host"]
    assert [name for name in e.parameters.specs if name in e.parameters.flat.compute] == []


@pytest.mark.gpu
def test_the_device_holds_less() -> None:
    big = {**tiny_config(hidden_size=512, intermediate_size=2048, num_hidden_layers=6, vocab_size=8192)}
    sizes = []
    for offloader in (None, host(*KINDS)):
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        chosen: dict[str, Any] = {"offloader": offloader} if offloader else {}
        e = make_engine(big, device="cuda", dtype=torch.bfloat16, **chosen)
        sizes.append(torch.cuda.memory_allocated() - before)
        count = sum(g.master.numel() for g in e.parameters.groups)
        del e
    assert sizes[0] > 17 * count
    assert sizes[1] < 1 * count
