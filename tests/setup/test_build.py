"""What `auto` chooses: the fastest setting whose predicted memory fits, and the next one after an out-of-memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from run_fixtures import SMALL

from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.engine.device_memory import free_memory
from surogate_core.engine.planning.prediction import predict
from surogate_core.mesh.mesh import Mesh
from surogate_core.plugins.registry import Registry
from surogate_core.setup import build
from surogate_core.setup.assemble import resolve_model
from surogate_core.setup.build import MemorySettings, choices, fastest, is_open, needed, settled, smallest, upper_bound
from surogate_core.setup.fitting import assembly_of

CPU = torch.device("cpu")
Load = Callable[..., RunConfig]


@pytest.fixture(scope="module")
def load(installed: Registry) -> Load:
    """A configuration of a small model from random weights."""

    def loaded(*overrides: str) -> RunConfig:
        shape = () if any(o.startswith("model=") for o in overrides) else SMALL
        return load_run_config(["device=cpu", "sequence_len=512", *shape, *overrides], registry=installed)

    return loaded


def bytes_of(config: RunConfig, registry: Registry) -> int:
    """What the prediction says of a closed configuration."""
    return needed(predict(assembly_of(config, registry, resolve_model(config, registry))), CPU)


def test_what_is_set_is_not_chosen(load: Load) -> None:
    config = load("recompute=false", "lmhead_chunks=3")
    assert not is_open(config)
    assert fastest(config) is smallest(config) is config
    config = load("lmhead_chunks=3")
    assert {c.lmhead_chunks for c in choices(config)} == {3}
    config = load("recompute=true")
    assert all(c.recompute and c.recompute_budget == 1 for c in choices(config))


def test_named_parts_and_a_budget_bound_the_choices(load: Load) -> None:
    named = choices(load("recompute_att=true"))
    assert not any(c.recompute for c in named)
    capped = choices(load("recompute_budget=0.5"))
    assert max(c.recompute_budget for c in capped if not c.recompute) == 0.5
    assert capped[-1].recompute


@pytest.mark.slow
def test_less_memory_chooses_more_recomputation_and_it_fits(
    load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BUDGETS", (1.0, 0.5))
    config = load("lora=true", "lmhead_chunks=1")
    resolved = resolve_model(config, installed)
    most, least = bytes_of(fastest(config), installed), bytes_of(smallest(config), installed)
    assert least < most
    ranks = []
    for share in (1.0, 0.0):
        room = int((least + share * (most - least)) * build.MARGIN) + 1
        found = settled(config, installed, resolved, room=room, borders=2 * 64)
        assert bytes_of(found, installed) * build.MARGIN <= room
        ranks.append(choices(config).index(MemorySettings.taken(assembly_of(found, installed, resolved).settings)))
    assert ranks == sorted(ranks)
    assert ranks[0] == 0
    assert ranks[-1] > 0


def test_nothing_that_fits_is_the_smallest_and_an_unknown_room_the_fastest(load: Load, installed: Registry) -> None:
    config = load("lora=true", "recompute_budget=0.1", "lmhead_chunks=1")
    resolved = resolve_model(config, installed)
    assert settled(config, installed, resolved, room=1000, borders=8) == smallest(config)
    assert settled(config, installed, resolved, room=None, borders=8) == fastest(config)


@pytest.mark.slow_cases("qwen2", "llama")
@pytest.mark.parametrize("model", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("method", ["lora=true", "lora=false"])
def test_the_bound_is_above_the_prediction(load: Load, installed: Registry, model: str, method: str) -> None:
    config = fastest(load(f"model={model}", method, "per_device_train_batch_size=4", "sequence_len=1024"))
    assert upper_bound(config, resolve_model(config, installed)) > bytes_of(config, installed)


SHARED_ROWS = ("gpus=2", "context_parallel_size=2", "sequence_len=2048", "per_device_train_batch_size=1")
"""Two ranks, each with 1024 tokens of a row."""


def test_chunks_of_the_head_are_of_a_ranks_own_tokens(load: Load) -> None:
    config = load(*SHARED_ROWS)
    assert {c.lmhead_chunks for c in choices(config)} == {1, 2, 4}, "1024 tokens in chunks of at least 256"
    assert choices(config) == choices(load("sequence_len=1024", "per_device_train_batch_size=1"))


@pytest.mark.parametrize("method", ["lora=true", pytest.param("lora=false", marks=pytest.mark.slow)])
def test_the_bound_counts_a_ranks_own_tokens(load: Load, installed: Registry, method: str) -> None:
    shared = fastest(load(method, *SHARED_ROWS))
    resolved = resolve_model(shared, installed)
    alone = fastest(load(method, "sequence_len=1024", "per_device_train_batch_size=1"))
    assert upper_bound(shared, resolved) == upper_bound(alone, resolved) > bytes_of(shared, installed)


def test_plenty_of_memory_traces_nothing(load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("lora=true")
    monkeypatch.setattr(build, "TensorBytes", SimpleNamespace(of=lambda assembly: pytest.fail("traced")))
    found = settled(config, installed, resolve_model(config, installed), room=2**45, borders=8)
    assert found == fastest(config)


class Attempts:
    """Stands for the engine: fails with an out-of-memory the first few times."""

    def __init__(self, failures: int):
        self.failures = failures
        self.tried: list[MemorySettings] = []

    def __call__(self, config: RunConfig, *_: Any, **__: Any) -> Any:
        assert config.recompute != "auto"
        assert config.lmhead_chunks != "auto"
        self.tried.append(
            MemorySettings(
                recompute=config.recompute,
                recompute_budget=config.recompute_budget,
                lmhead_chunks=config.lmhead_chunks,
            )
        )
        if len(self.tried) <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.tried[-1]


def built(config: RunConfig, registry: Registry, **keys: Any) -> Any:
    """`build_engine` with a sample of no column."""
    sample = SimpleNamespace(cu_seqlens=torch.zeros(9, dtype=torch.int32), columns={})
    return build.build_engine(
        config,
        registry,
        resolve_model(config, registry),
        sample=sample,  # type: ignore[arg-type]
        progress=lambda task, done, total: None,
        **keys,
    )


def test_out_of_memory_at_the_start_tries_the_next_choice(
    load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, attempts, notes = load("lora=true"), Attempts(2), []
    monkeypatch.setattr(build, "_engine", attempts)
    assert built(config, installed, notes=notes) == choices(config)[2]
    assert attempts.tried == choices(config)[:3]
    assert notes == [f"Out of memory with {choices(config)[1]}: the run uses {choices(config)[2]}."]


def test_out_of_memory_with_the_smallest_choice_is_raised(
    load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, attempts = load("lora=true", "recompute_att=true", "recompute_budget=0.1"), Attempts(1000)
    monkeypatch.setattr(build, "_engine", attempts)
    with pytest.raises(torch.OutOfMemoryError):
        built(config, installed)
    assert attempts.tried == choices(config)


class Answers(Mesh):
    """One of two ranks, whose gatherings have been answered already."""

    def __init__(self, rank: int, *answers: list[Any]):
        super().__init__(rank=rank, world=2, local_world=2)
        self.answers = list(answers)
        self.sent: list[Any] = []

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        found = self.answers.pop(0)
        found[self.rank] = value
        return found


def test_ranks_build_what_rank_0_chose_for_the_smallest_memory(
    load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load("lora=true", "gpus=2", "recompute_budget=0.1", "lmhead_chunks=1")
    monkeypatch.setattr(build, "_engine", Attempts(0))
    first = Answers(0, [None, 1000], [None, None])
    assert built(config, installed, mesh=first) == choices(config)[-1], "nothing fits beside rank 1's memory"
    assert first.sent[0] == pytest.approx(free_memory(CPU, ranks=2), rel=0.2)
    second = Answers(1, [None, None], [choices(config)[0].record(), None])
    assert built(config, installed, mesh=second) == choices(config)[0]
    assert second.sent[1] is None

    monkeypatch.setattr(build, "_engine", Attempts(1))
    with pytest.raises(torch.OutOfMemoryError):
        built(config, installed, mesh=Answers(0, [None, 2**45], [None, None]))


def test_a_resumed_run_keeps_the_choice_of_its_checkpoint(
    load: Load, installed: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, notes = load("lora=true"), []
    recorded = choices(config)[4]
    monkeypatch.setattr(build, "_engine", Attempts(0))
    assert built(config, installed, prefer=MemorySettings.of(recorded.record()), notes=notes) == recorded
    assert notes == []
    monkeypatch.setattr(build, "_engine", Attempts(1))
    assert built(config, installed, prefer=recorded, notes=notes) == choices(config)[5]
    assert "sums may round differently" in notes[-1]


@pytest.mark.parametrize("values", [None, "x", {"recompute": True}, {"other": 1}])
def test_a_record_that_cannot_be_read_is_no_choice(values: Any) -> None:
    assert MemorySettings.of(values) is None


def test_the_choice_leaves_other_keys(load: Load) -> None:
    config = load("lora=true")
    taken = choices(config)[3]
    assert replace(taken.applied(config), recompute="auto", lmhead_chunks="auto") == replace(
        config, recompute_budget=taken.recompute_budget
    )
