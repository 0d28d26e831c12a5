"""Runs on several ranks: the same rows and bits as on one, resumed on any number of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_world import World, of_step

from surogate_core.engine.ranks.stages import Stages
from surogate_core.errors import MachineError, UserError
from surogate_core.plugins.registry import Registry

History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]
Records = Callable[..., list[dict[str, Any]]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]")
KEYS = ("max_steps=4", "save_steps=2", "eval_steps=2", "save_total_limit=9", "lr_scheduler_type=cosine")


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    """Processes that the runs of this module share."""
    with World(installed) as world:
        yield world


def notes(records: Records, run: Path) -> str:
    return "\n".join(records(run, "run_start")[-1]["notes"])


def test_a_run_on_two_ranks_is_the_run_on_one(
    tmp_path: Path, base: list[str], ranks: World, history: History, digests: Digests, records: Records
) -> None:
    one, two, beside = (tmp_path / name for name in ("one", "two", "beside"))
    keys = [*base, *LORA, *KEYS, "sample_prompts=[The chain]", "sample_max_new_tokens=4"]
    ranks.run(1, one, *keys, "gradient_accumulation_steps=4")
    ended = ranks.run(2, two, *keys, "gradient_accumulation_steps=2", of_rank=lambda r: [f"output_dir={beside}"] * r)
    assert ended == (0, [0])
    assert not beside.exists(), "a rank other than 0 has written something"
    assert history(two) == history(one)
    for step in (2, 4):
        assert digests(two / f"checkpoint-{step}") == digests(one / f"checkpoint-{step}")
    assert digests(two / "adapter") == digests(one / "adapter")
    assert [s["texts"] for s in records(two, "samples")] == [s["texts"] for s in records(one, "samples")]
    assert len(records(two, "samples")) == 3

    facts = json.loads((two / "run.json").read_text())
    assert (facts["gpus"], facts["micro_batches"]) == (2, 4)
    assert facts["reduction"] == json.loads((one / "run.json").read_text())["reduction"]
    (start,) = records(two, "run_start")
    assert (start["gpus"], start["tokens_per_step"]) == (2, records(one, "run_start")[0]["tokens_per_step"])
    assert "equal bits on 1, 2 and 4 equal GPUs" in notes(records, two)
    (figures,) = records(two, "rank_stats")
    assert (figures["step"], len(figures["peak_memory_bytes"]), len(figures["work_seconds"])) == (4, 2, 2)
    assert records(one, "rank_stats") == []

    # The same command on one rank: a step keeps its four micro-batches.
    resumed = of_step(two, 2, tmp_path / "resumed")
    ranks.run(1, resumed, *keys, "gradient_accumulation_steps=2")
    assert "gradient_accumulation_steps is 4 instead of 2: with gpus=1, a step keeps the 4" in notes(records, resumed)
    assert history(resumed) == history(one)
    assert digests(resumed / "checkpoint-4") == digests(one / "checkpoint-4")


FULL = ("lora=false", "exact_reduction=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        LORA,
        (*FULL, "zero_level=1"),
        (*FULL, "shard_weights=true"),
        (*FULL, "zero_level=3"),
        (*FULL, "shard_weights=true", "dp_shard_size=2"),
        (*FULL, "zero_level=2", "dp_shard_size=2"),
        (*FULL, "zero_level=3", "dp_shard_size=2"),
        (*LORA, "shard_weights=true", "dp_shard_size=2"),
    ],
)
def test_two_machines_of_two_ranks_are_the_run_on_one(
    keys: tuple[str, ...],
    tmp_path: Path,
    base: list[str],
    ranks: World,
    history: History,
    digests: Digests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four processes over gloo, which take each other for two machines."""
    sizes: list[Sequence[int]] = []
    connect = Stages.connect

    def watched(self: Stages) -> None:
        sizes.append(self.sizes)
        connect(self)

    monkeypatch.setattr(Stages, "connect", watched)
    one, four = tmp_path / "one", tmp_path / "four"
    ranks.run(1, one, *base, *keys, *KEYS, "gradient_accumulation_steps=4")
    ended = ranks.run(4, four, *base, *keys, *KEYS, "gradient_accumulation_steps=1", local_world=2)
    assert ended == (0, [0, 0, 0])
    assert sizes == [(), (2, 2)]
    assert history(four) == history(one)
    for step in (2, 4):
        assert digests(four / f"checkpoint-{step}") == digests(one / f"checkpoint-{step}")
    assert json.loads((four / "run.json").read_text())["reduction"]["exact"]
    if "dp_shard_size=2" in keys:
        for run, count in ((one, 1), (four, 2)):
            more = ("dp_shard_size=0", "max_steps=6", f"gradient_accumulation_steps={4 // count}")
            ranks.run(count, run, *base, *keys, *KEYS, *more)
        assert digests(four / "checkpoint-6") == digests(one / "checkpoint-6"), "resumed with another group"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(LORA, id="lora"),
        pytest.param(("exact_reduction=true", "optimizer=adamw", "zero_level=0"), id="level-0"),
        pytest.param(("exact_reduction=true", "optimizer=adamw"), id="level-1"),
        pytest.param(("exact_reduction=true", "optimizer=adamw_8bit", "master_dtype=bf16"), id="level-1-8bit-bf16"),
        pytest.param(
            ("exact_reduction=true", "optimizer=adamw_8bit", "master_dtype=bf16", "shard_weights=true"),
            id="level-1-weights-8bit-bf16",
        ),
        pytest.param(("exact_reduction=true", "optimizer=adamw", "zero_level=2"), id="level-2"),
        pytest.param(("exact_reduction=true", "optimizer=adamw", "zero_level=3"), id="level-3"),
        pytest.param((*LORA, "shard_weights=true", "recipe=fp8-hybrid"), id="sharded-base-fp8"),
    ],
)
def test_every_checkpoint_continues_on_any_number_of_ranks(
    mode: tuple[str, ...], tmp_path: Path, base: list[str], ranks: World, history: History, digests: Digests
) -> None:
    keys = [*base, *mode, *KEYS, "max_steps=4", "save_steps=1"]
    ranks.run(1, tmp_path / "whole", *keys, "gradient_accumulation_steps=4")
    here = tmp_path / "run"
    for last, world in enumerate((4, 2, 1, 4), start=1):
        if here.exists():
            for path in here.glob("checkpoint-*"):
                if int(path.name.removeprefix("checkpoint-")) >= last:
                    shutil.rmtree(path)
        # The command of the first run, which trained with one micro-batch on each of four ranks.
        ended = ranks.run(world, here, *keys, "gradient_accumulation_steps=1")
        assert ended == (0, [0] * (world - 1))
        assert history(here) == history(tmp_path / "whole")
        for step in (last, 4):
            found, expected = here / f"checkpoint-{step}", tmp_path / "whole" / f"checkpoint-{step}"
            assert digests(found) == digests(expected)
    for export in ("adapter", "model"):
        if (tmp_path / "whole" / export).is_dir():
            assert digests(here / export) == digests(tmp_path / "whole" / export)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", [LORA, ("lora=false", "optimizer=adamw", "master_dtype=bf16")], ids=["lora", "all weights"]
)
def test_the_cpu_of_each_rank_updates_its_part(
    mode: tuple[str, ...], tmp_path: Path, base: list[str], ranks: World, history: History, digests: Digests
) -> None:
    """Two equal runs are equal, and one rank continues them without `cpu_training`."""
    first, second = tmp_path / "first", tmp_path / "second"
    keys = [*base, *mode, *KEYS, "gradient_accumulation_steps=2"]
    for run in (first, second):
        assert ranks.run(2, run, *keys, "cpu_training=true") == (0, [0])
    assert history(second) == history(first)
    assert digests(second / "checkpoint-4") == digests(first / "checkpoint-4")
    alone = of_step(first, 2, tmp_path / "alone")
    ranks.run(1, alone, *keys)
    for mine, theirs in zip(history(alone), history(first), strict=True):
        assert mine[0] == theirs[0]
        numbers = [number for number in theirs[1:] if number is not None]
        assert [number for number in mine[1:] if number is not None] == pytest.approx(numbers, rel=1e-3)


@pytest.mark.slow
def test_the_best_weights_are_those_of_one_rank(
    tmp_path: Path, base: list[str], ranks: World, digests: Digests, records: Records
) -> None:
    keys = [*base, "optimizer=adamw", "exact_reduction=true", *KEYS, "eval_steps=1", "load_best=true"]
    keys += ["learning_rate=0.5", "save_total_limit=1", "save_steps=0", "lr_scheduler_type=linear", "warmup_steps=4"]
    ranks.run(1, tmp_path / "one", *keys, "gradient_accumulation_steps=4")
    ranks.run(2, tmp_path / "two", *keys, "gradient_accumulation_steps=2")
    (end,) = records(tmp_path / "two", "run_end")
    assert 0 < end["export_step"] < 4, "the case is made so that neither the start nor the last step is the best"
    assert digests(tmp_path / "two" / "model") == digests(tmp_path / "one" / "model")


@pytest.mark.slow
def test_ranks_with_other_data_or_keys_are_refused(tmp_path: Path, base: list[str], ranks: World) -> None:
    keys = [*base, *LORA, "gradient_accumulation_steps=2"]
    with pytest.raises(UserError, match=r"key learning_rate: 0\.001 on rank 0; 0\.002 on rank 1"):
        ranks.run(2, tmp_path / "run", *keys, of_rank=lambda rank: [f"learning_rate={0.001 * (rank + 1)}"])
    assert not (tmp_path / "run" / "run.json").exists()
    with pytest.raises(UserError, match=r"the training rows: .* on rank 0; .* on rank 1"):
        ranks.run(2, tmp_path / "run", *keys, of_rank=lambda rank: ["sequence_len=96"] * rank)


@pytest.mark.slow
def test_what_is_not_finite_on_one_rank_ends_all(
    tmp_path: Path, base: list[str], installed: Registry, records: Records
) -> None:
    """The norm is that of the whole run, so rank 0 sees it, and no rank applies the step."""
    with World(installed) as ranks, pytest.raises(UserError, match="gradient norm nan, so the step was not applied"):
        ranks.run(2, tmp_path, *base, *LORA, *KEYS, "gradient_accumulation_steps=2", of_others=SPOILT)
    assert ranks.ends == [0], "rank 0 lets the others go"
    (end,) = records(tmp_path, "run_end")
    assert (end["reason"], end["step"]) == ("failed", 3)
    assert "checkpoint-2 is kept" in end["message"]


@pytest.mark.slow
def test_a_full_disk_of_rank_0_ends_all_ranks(
    tmp_path: Path, base: list[str], ranks: World, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While rank 0 saves, the others wait to give it their parts."""

    def full(*_: Any, **__: Any) -> None:
        raise MachineError("the disk is full")

    monkeypatch.setattr("surogate_core.train.checkpoint.CheckpointDir.save", full)
    with pytest.raises(MachineError, match="the disk is full"):
        ranks.run(2, tmp_path, *base, "optimizer=adamw", *KEYS, "gradient_accumulation_steps=2")
    assert ranks.ends == [0]
    assert records(tmp_path, "run_end")[-1]["reason"] == "failed"


SPOILT = """
from surogate_core.engine.engine import Engine

accumulate = Engine._accumulate

def spoilt(self, batches, *, step, loss_weight):
    accumulate(self, batches, step=step, loss_weight=loss_weight)
    if step == 2:
        self.parameters.groups[0].grad[:1].fill_(float("nan"))

Engine._accumulate = spoilt
"""
