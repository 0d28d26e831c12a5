"""Engines with a copy of the weights: the same completions as with the weights where they are, and runs that repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from surogate_recipe_fp8.gemm import FP8Hybrid
from tiny_qwen3 import BF16, build, make_engine, tiny_config

from surogate_core.bundles import Request, RolloutSettings
from surogate_core.engine.engine import Engine
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.planning.plan import EnginePlan
from surogate_core.errors import MachineError
from surogate_core.generate import copies
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.kernels.registry import KernelTable
from surogate_testing import tiny
from surogate_testing.weight_formats import built

RunHere = Callable[..., int]
Digests = Callable[[Path], dict[str, str]]
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FEW = ("max_steps=3", "save_steps=0")
MOE = ("model=qwen3-moe", "model.preset=tiny", "from_scratch=true")


def result(run: Path, digests: Digests) -> tuple[bytes, dict[str, str]]:
    (trained,) = (place for name in ("adapter", "model") if (place := run / name).is_dir())
    return (run / "rollouts.jsonl").read_bytes(), digests(trained)


@pytest.mark.parametrize(
    "keys",
    [
        ("lora=true",),
        pytest.param(("lora=false", "recipe=fp8-hybrid"), marks=pytest.mark.slow),
        pytest.param(("lora=false",), marks=pytest.mark.slow),
        pytest.param(("lora=true", "qlora_bnb=true"), marks=pytest.mark.slow),
        pytest.param(("lora=true", "recipe=fp8-hybrid", "beta=0.1"), marks=pytest.mark.slow),
        pytest.param(("lora=true", "offload=host"), marks=pytest.mark.slow),
        pytest.param(("lora=false", "offload=host", "cpu_training=true"), marks=pytest.mark.slow),
    ],
)
def test_completions_are_those_of_the_weights_themselves(
    tmp_path: Path, run_here: RunHere, grpo_keys: list[str], digests: Digests, keys: tuple[str, ...]
) -> None:
    for name in ("native", "dedicated"):
        assert run_here(tmp_path / name, *grpo_keys, *FEW, *keys, f"rollout={name}") == 0
    assert result(tmp_path / "dedicated", digests) == result(tmp_path / "native", digests)


def test_runs_that_generate_ahead_repeat(
    tmp_path: Path, run_here: RunHere, grpo_keys: list[str], digests: Digests, records: Callable[..., Any]
) -> None:
    keys = [*grpo_keys, *FEW, "rollout=dedicated", "max_staleness=1"]
    for name in ("one", "other"):
        assert run_here(tmp_path / name, *keys) == 0
    assert result(tmp_path / "one", digests) == result(tmp_path / "other", digests)
    beside = [one["overlapped"].get("generate") for one in records(tmp_path / "one", "rollouts")]
    assert beside[0] is None
    assert all(beside[1:])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("lora", [None, tiny.lora()])
def test_the_copy_follows_weights_that_may_change(frozen: bool, lora: Any) -> None:
    """At every call if they are not said to stay as they are; of a model with adapters only these are read."""
    trained: Engine = tiny.engine(optimizer=tiny.ADAMW, lora=lora)
    engine = copies.DedicatedEngine(Weights.of(trained), RolloutSettings(slots=1, context=16, frozen=frozen))
    document = [list(range(1, 9))]
    before = engine.logprobs(document)
    trained.train_step(tiny.batches(0), step=0, lr=1e-1)
    assert (engine.logprobs(document) == before) is frozen
    engine.forget()
    native = NativeEngine(Weights.of(trained), RolloutSettings(slots=1, context=16))
    expected = native.logprobs(document)
    unread = mock.patch.object(Parameters, "inputs", side_effect=AssertionError("a piece without trained weights"))
    if lora is not None:
        with unread:
            engine._copy.refresh()
    assert engine.logprobs(document) == expected != before


@pytest.mark.parametrize(("lora", "form"), [(None, None), (tiny.lora(), None), (tiny.lora(), "nf4")])
def test_the_planned_bytes_are_those_of_the_copy(lora: Any, form: str | None) -> None:
    original = Weights.of(of_format(form) if form else tiny.engine(optimizer=tiny.ADAMW, lora=lora))
    nbytes, _ = copies.copied(original)
    copy = copies.WeightsCopy.of(original, original.device).weights.parameters
    tensors = [tensor for piece in copy.pieces for tensor in (*copy.weights.fetch(piece.key), *copy.inputs(piece))]
    tensors += [*copy.masters().values(), *copy.gradients_by_name().values(), *copy.shared]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    assert nbytes == sum(storages.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "keys",
    [
        ("lora=true",),
        ("lora=false",),
        ("lora=false", "recipe=fp8-hybrid"),
        ("lora=true", "qlora_bnb=true"),
        ("lora=true", "qlora_bnb=true", "recipe=fp8-hybrid"),
    ],
)
def test_on_a_second_gpu(
    tmp_path: Path, run_here: RunHere, grpo_keys: list[str], digests: Digests, keys: tuple[str, ...]
) -> None:
    more = [*grpo_keys, "device=cuda", *keys]
    for name in ("native", "dedicated"):
        assert run_here(tmp_path / name, *more, f"rollout={name}") == 0
    assert result(tmp_path / "dedicated", digests) == result(tmp_path / "native", digests)
    for name in ("one", "other"):
        assert run_here(tmp_path / name, *more, "rollout=dedicated", "max_staleness=1") == 0
    assert result(tmp_path / "one", digests) == result(tmp_path / "other", digests)


FORMATS = ["nf4", "fp8", "nvfp4", "mxfp4"]


def of_format(name: str) -> Engine:
    """An engine with adapters on a base in a weight format."""
    return make_engine(
        tiny_config(vocab_size=64, num_hidden_layers=2),
        lora=tiny.lora(),
        weight_format=built(import_module(f"surogate_quant_{name}").surogate_weight_format()),
        source=tiny.random_source(std=0.3),
        optimizer=tiny.ADAMW,
    )


SPARING = RolloutSettings(slots=2, context=32, frozen=True, spares=True)
REQUESTS = [Request(prompt=(1, 2, number + 3), max_new_tokens=12, number=number) for number in range(3)]


@pytest.mark.parametrize("name", FORMATS)
def test_a_base_is_unpacked_once_where_memory_is_spared(name: str) -> None:
    trained = of_format(name)
    engine, expected = copies.native(Weights.of(trained), SPARING), NativeEngine(Weights.of(trained), SPARING)
    assert isinstance(engine, copies.CopyEngine)
    assert not engine._copy.weights.parameters.packed
    document, found = [list(range(1, 20))], []
    for step in range(2):
        assert engine.generate(REQUESTS) == expected.generate(REQUESTS)
        found.append(engine.logprobs(document))
        assert found[-1] == expected.logprobs(document)
        trained.train_step([tiny.batch(tiny.documents([9, 14]))], step=step, lr=1e-2)
        for one in (engine, expected):
            one.forget()
    assert found[0] != found[1]


@pytest.mark.parametrize("name", FORMATS[:1])
def test_it_stays_packed_where_memory_is_not_spared_or_short(name: str) -> None:
    weights = Weights.of(of_format(name))
    assert isinstance(copies.native(weights, replace(SPARING, spares=False)), NativeEngine)
    nbytes, _ = copies.copied(weights)
    with mock.patch.object(copies, "free_memory", return_value=nbytes):
        assert isinstance(copies.native(weights, SPARING), NativeEngine)
    with mock.patch.object(copies.WeightsCopy, "of", side_effect=torch.OutOfMemoryError):
        assert isinstance(copies.native(weights, SPARING), NativeEngine)
    plain = Weights.of(tiny.engine(lora=tiny.lora()))
    assert isinstance(copies.native(plain, SPARING), NativeEngine), "nothing is packed"


def test_a_dedicated_copy_is_packed_if_an_unpacked_one_does_not_fit_after_all() -> None:
    weights, of = Weights.of(of_format("nf4")), copies.WeightsCopy.of

    def short(original: Weights, device: torch.device, *, unpacked: bool = False) -> copies.WeightsCopy:
        if unpacked:
            raise torch.OutOfMemoryError
        return of(original, device)

    def packs(settings: RolloutSettings) -> bool:
        return bool(copies.DedicatedEngine(weights, settings)._copy.weights.parameters.packed)

    assert not packs(SPARING)
    assert packs(replace(SPARING, spares=False))
    with mock.patch.object(copies.WeightsCopy, "of", short):
        assert packs(SPARING)


def test_a_recipe_multiplies_with_unpacked_weights_as_with_packed_ones() -> None:
    """Panels of a recipe have its own codes, and joined products may round otherwise: neither is in the copy alone."""
    config = tiny_config(hidden_size=256, intermediate_size=512)
    for recipe in (BF16, FP8Hybrid(native=True, margin=0, history=16, note="")):
        form = built(import_module("surogate_quant_nf4").surogate_weight_format())
        made = tiny.assembly(
            config, build=build, recipe=recipe, tokens=1024, compiler="inductor", lora=tiny.lora(16), weight_format=form
        )
        with mock.patch.object(KernelTable, "offers", return_value=True):
            plans = [
                EnginePlan.of(one, device=CPU).weights
                for one in (made, copies._assembly(made, CPU, unpacked=True), replace(made, weight_format=None))
            ]
        packed, unpacked, plain = plans
        assert packed.packed
        assert not unpacked.packed
        assert (unpacked.panels, unpacked.joins) == (packed.panels, packed.joins)
        assert recipe is BF16 or plain.panels != unpacked.panels, "without a weight format the recipe has its own"


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
@pytest.mark.parametrize("more", [("recipe=bf16",), ("recipe=fp8-hybrid",), MOE])
def test_a_run_has_the_same_bits_with_little_memory(
    tmp_path: Path, run_here: RunHere, grpo_keys: list[str], digests: Digests, more: tuple[str, ...], device: str
) -> None:
    keys = [*grpo_keys, *FEW, "lora=true", "qlora_bnb=true", f"device={device}", *more]
    for name, room in (("much", None), ("little", 0)):
        with mock.patch.object(copies, "free_memory", return_value=room) as asked:
            assert run_here(tmp_path / name, *keys) == 0
        asked.assert_called()
    assert result(tmp_path / "much", digests) == result(tmp_path / "little", digests)


def test_it_needs_a_gpu_that_does_not_train() -> None:
    with mock.patch("torch.cuda.device_count", return_value=1), pytest.raises(MachineError, match="after GPU 0"):
        copies._beside(CUDA)
    with mock.patch("torch.cuda.device_count", return_value=2):
        assert copies._beside(CUDA) == torch.device("cuda", 1)


def test_weights_that_do_not_fit_are_a_fault_of_the_machine() -> None:
    full = mock.patch.object(copies.WeightsCopy, "of", side_effect=torch.OutOfMemoryError)
    with mock.patch("torch.cuda.device_count", return_value=2), full, pytest.raises(MachineError, match="GPU 1 lacks"):
        copies.DedicatedEngine(mock.Mock(device=CUDA), mock.Mock())
