"""The engine on a GPU of its own: the same completions as with the weights where they are, and runs that repeat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from surogate_core.bundles import RolloutSettings
from surogate_core.engine.engine import Engine
from surogate_core.engine.parameters import Parameters
from surogate_core.errors import MachineError
from surogate_core.generate import dedicated
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_testing import tiny

RunHere = Callable[..., int]
Digests = Callable[[Path], dict[str, str]]
CUDA = torch.device("cuda", 0)
FEW = ("max_steps=3", "save_steps=0")


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
    engine = dedicated.DedicatedEngine(Weights.of(trained), RolloutSettings(slots=1, context=16, frozen=frozen))
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


@pytest.mark.parametrize("lora", [None, tiny.lora()])
def test_the_planned_bytes_are_those_of_the_copy(lora: Any) -> None:
    original = Weights.of(tiny.engine(optimizer=tiny.ADAMW, lora=lora))
    nbytes, _ = dedicated.copied(original)
    copy = dedicated.WeightsCopy.of(original, original.device).weights.parameters
    tensors = [tensor for piece in copy.pieces for tensor in copy.inputs(piece)] + [*copy.masters().values()]
    storages = {storage.data_ptr(): storage.nbytes() for storage in (t.untyped_storage() for t in tensors)}
    assert nbytes == sum(storages.values())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("keys", [("lora=true",), ("lora=false",), ("lora=false", "recipe=fp8-hybrid")])
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


def test_it_needs_a_gpu_that_does_not_train() -> None:
    with mock.patch("torch.cuda.device_count", return_value=1), pytest.raises(MachineError, match="after GPU 0"):
        dedicated._beside(CUDA)
    with mock.patch("torch.cuda.device_count", return_value=2):
        assert dedicated._beside(CUDA) == torch.device("cuda", 1)


def test_weights_that_do_not_fit_are_a_fault_of_the_machine() -> None:
    full = mock.patch.object(dedicated.WeightsCopy, "of", side_effect=torch.OutOfMemoryError)
    with mock.patch("torch.cuda.device_count", return_value=2), full, pytest.raises(MachineError, match="GPU 1 lacks"):
        dedicated.DedicatedEngine(mock.Mock(device=CUDA), mock.Mock())
