"""Whole runs on pairs: the reference is computed once, by the run's own forward, and resumed runs read it again."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import World

from surogate_core.engine.engine import Engine
from surogate_core.plugins.registry import Registry
from surogate_core.run import reference

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0", "lora_target_modules=[all]")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that name pairs, and their own cache."""
    directory = tmp_path_factory.mktemp("pairs")
    rows = [
        {"prompt": f"What is {i} plus {i % 7}?", "chosen": f"It is {i + i % 7}.", "rejected": f"No idea about {i}."}
        for i in range(40)
    ]
    (directory / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"datasets=[{{path: '{directory}/pairs.jsonl', type: preference}}]",
        "validation_datasets=[]",
        "validation_split_ratio=0.2",
        f"data_cache_dir={directory}/cache",
        "sequence_len=128",
        "per_device_train_batch_size=1",
        "learning_rate=1e-3",
        "eval_steps=3",
        "save_steps=3",
    ]


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each forward of a reference."""
    found: list[int] = []
    own = Engine.logprobs

    def counted(self: Engine, batch: Any) -> Any:
        found.append(int((batch.input_ids != 0).any()))
        return own(self, batch)

    monkeypatch.setattr(Engine, "logprobs", counted)
    return found


def references(overrides: list[str]) -> list[Path]:
    cache = [text.partition("=")[2] for text in overrides if text.startswith("data_cache_dir=")][-1]
    return sorted(path for path in (Path(cache) / "references").glob("*") if path.is_dir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: list[str], data: list[str], run_here: RunHere) -> Path:
    """A run with adapters to its end."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run_here(output, *base, *data, *LORA, "task=dpo")
    return output


def test_dpo_begins_at_log_2_and_learns(whole: Path, records: Records) -> None:
    steps, evals = records(whole, "step_end"), records(whole, "eval_end")
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evals[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert evals[-1]["loss"] < 0.69
    first, last = steps[0]["figures"], steps[-1]["figures"]
    assert first["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert last["rewards/margins"] > 0.005
    assert last["rewards/margins"] == pytest.approx(last["rewards/chosen"] - last["rewards/rejected"], abs=1e-6)
    assert evals[-1]["figures"]["pairs"] == 8
    assert evals[-1]["figures"]["rewards/accuracies"] > 0.8


def test_a_resumed_run_reads_the_reference_and_equals_the_uninterrupted_one(
    whole: Path,
    tmp_path: Path,
    base: list[str],
    data: list[str],
    run_here: RunHere,
    history: History,
    digests: Digests,
    forwards: list[int],
) -> None:
    copy = Path(shutil.copytree(whole, tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoint-6")
    run_here(copy, *base, *data, *LORA, "task=dpo")
    assert len(forwards) == 2  # a probe of the training rows and of the held-out ones
    assert history(copy) == history(whole)
    assert digests(copy / "checkpoint-6") == digests(whole / "checkpoint-6")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [LORA, ("lora=false",)], ids=["lora", "full"])
def test_a_resumed_run_without_the_cache_computes_the_reference_of_step_0(
    mode: tuple[str, ...],
    tmp_path: Path,
    base: list[str],
    data: list[str],
    run_here: RunHere,
    digests: Digests,
) -> None:
    keys = [*base, *data, *mode, "task=dpo", f"data_cache_dir={tmp_path}/cache"]
    run_here(tmp_path / "whole", *keys)
    copy = Path(shutil.copytree(tmp_path / "whole", tmp_path / "copy"))
    shutil.rmtree(copy / "checkpoint-6")
    shutil.rmtree(tmp_path / "cache" / "references")
    run_here(copy, *keys)
    assert digests(copy / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.slow
def test_a_sweep_over_options_shares_the_reference_and_other_weights_do_not(
    tmp_path: Path, base: list[str], data: list[str], run_here: RunHere
) -> None:
    keys = [*base, *data, *LORA, "task=dpo", f"data_cache_dir={tmp_path}/cache", "max_steps=1"]
    keys += ["validation_split_ratio=0"]
    run_here(tmp_path / "a", *keys)
    (first,) = references(keys)
    run_here(tmp_path / "b", *keys, "dpo_beta=0.5", "learning_rate=1e-4")
    assert references(keys) == [first]
    run_here(tmp_path / "c", *keys, "train_seed=7")
    assert len(references(keys)) == 2


@pytest.mark.slow
def test_a_killed_computation_goes_on_where_it_was_saved(
    tmp_path: Path,
    base: list[str],
    data: list[str],
    run_here: RunHere,
    forwards: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [*base, *data, *LORA, "task=dpo", "max_steps=2", "validation_split_ratio=0"]
    run_here(tmp_path / "whole", *keys, f"data_cache_dir={tmp_path}/whole-cache")
    # The probe, and the rows of two steps of two micro-batches; the data have more.
    assert len(forwards) == 5
    monkeypatch.setattr(reference, "_SAVE_SECONDS", 0)
    keys += [f"data_cache_dir={tmp_path}/cache"]
    counted = Engine.logprobs

    def killed(self: Engine, batch: Any) -> Any:
        if len(forwards) == 3:
            raise KeyboardInterrupt
        return counted(self, batch)

    forwards.clear()
    monkeypatch.setattr(Engine, "logprobs", killed)
    with pytest.raises(KeyboardInterrupt):
        run_here(tmp_path / "run", *keys)
    (partial,) = references(keys)
    with (partial / "logprobs").open("ab") as file:
        file.write(b"torn")
    monkeypatch.setattr(Engine, "logprobs", counted)
    forwards.clear()
    run_here(tmp_path / "run", *keys)
    assert len(forwards) == 3  # the probe, and the two rows that were missing
    (entry,) = references(keys)
    (expected,) = references([f"data_cache_dir={tmp_path}/whole-cache"])
    assert (entry / "logprobs").read_bytes() == (expected / "logprobs").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("mode", [LORA, ("lora=false", "zero_level=3")], ids=["lora", "zero-3"])
def test_two_ranks_compute_the_same_reference_together(
    mode: tuple[str, ...],
    tmp_path: Path,
    base: list[str],
    data: list[str],
    installed: Registry,
    history: History,
    digests: Digests,
) -> None:
    keys = [*base, *data, *mode, "task=dpo"]
    one, two = tmp_path / "one", tmp_path / "two"
    with World(installed) as world:
        world.run(1, one, *keys, f"data_cache_dir={tmp_path}/a", "gradient_accumulation_steps=2")
        beside = tmp_path / "beside"
        ended = world.run(
            2,
            two,
            *keys,
            f"data_cache_dir={tmp_path}/b",
            "gradient_accumulation_steps=1",
            of_rank=lambda rank: [f"output_dir={beside}"] * rank,
        )
    assert ended == (0, [0])
    if mode == LORA:
        assert history(two) == history(one)
        assert digests(two / "checkpoint-6") == digests(one / "checkpoint-6")
    losses = [[event[3] for event in history(run)] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)  # shards add their parts of the gradient norm
    found = [sorted(p.name for p in references([f"data_cache_dir={tmp_path}/{name}"])) for name in "ab"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_the_reference_is_the_start_of_the_run_whatever_it_is(
    tmp_path: Path, base: list[str], data: list[str], base_on: Any, run_here: RunHere, records: Records
) -> None:
    run_here(tmp_path / "base", *base, "lora=false", "learning_rate=2e-3")
    on_base = [*base_on(tmp_path / "base" / "model"), *data, f"data_cache_dir={tmp_path}/cache", *LORA]
    run_here(tmp_path / "first", *on_base, "task=orpo", "learning_rate=1e-2")
    continued = [f"adapter_path={tmp_path}/first", "adapter_init_mode=trainable"]
    loftq = ["qlora_format=nf4", "lora_init=loftq"]
    for name, more in (("continued", continued), ("loftq", loftq)):
        run_here(tmp_path / name, *on_base, "task=dpo", "max_steps=2", *more)
        losses = [step["loss"] for step in records(tmp_path / name, "step_end")]
        assert losses[0] == pytest.approx(math.log(2), abs=1e-6), name
        assert losses[1] < losses[0], name
