"""What several GPUs share out, from the keys; contradictions that depend on their number."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from surogate_core.config import sharing
from surogate_core.config.schema import RunConfig
from surogate_core.errors import ConfigError, Problem
from surogate_core.plugins import Registry

Load = Callable[..., RunConfig]
Problems = Callable[..., list[Problem]]


@pytest.mark.parametrize(
    ("keys", "level", "weights"),
    [
        ([], 1, False),
        (["zero_level=0"], 0, False),
        (["shard_gradients=true"], 2, False),
        (["shard_weights=true"], 1, True),
        (["shard_weights=true", "shard_gradients=true"], 3, True),
        (["shard_weights=true", "zero_level=2"], 3, True),
        (["zero_level=3"], 3, True),
        (["cpu_training=true"], 3, True),
        (["cpu_training=true", "shard_weights=true"], 3, True),
        (["lora=true", "cpu_training=true"], 0, False),
        (["lora=true", "zero_level=2"], 0, False),
        (["lora=true", "shard_weights=true"], 0, True),
        (["lora=true", "zero_level=3"], 0, True),
    ],
)
def test_levels(load: Load, keys: list[str], level: int, weights: bool) -> None:
    for gpus in ("gpus=1", "gpus=2"):
        config = load("model=qwen3-0.6b", "lora=false", gpus, *keys)
        plan = sharing.axes(config)
        assert (plan.zero_level, plan.shard_weights) == (level, weights)


def test_replicas(load: Load) -> None:
    found = [sharing.axes(load("model=qwen3-0.6b", f"gpus={gpus}", "dp_shard_size=4")) for gpus in (1, 4, 8)]
    assert [(plan.replicate, plan.shard, plan.ranks) for plan in found] == [(1, 1, 1), (1, 4, 4), (2, 4, 8)]
    six = sharing.axes(load("model=qwen3-0.6b", "gpus=6"))
    assert (six.replicate, six.shard) == (1, 6)


def test_the_plan_has_the_micro_batches_of_all_ranks(load: Load) -> None:
    keys = ("model=qwen3-0.6b", "gpus=4", "context_parallel_size=2", "gradient_accumulation_steps=3")
    config = load(*keys)
    plan = sharing.axes(config)
    assert (plan.context, plan.along("rows").size, plan.micro_batches, plan.varying) == (2, 2, 6, False)
    varying = sharing.axes(config, varying=True)
    assert (varying.micro_batches, varying.varying) == (8, True), "exact sums of any number have eight lanes"
    assert sharing.axes(replace(config, gpus=0, context_parallel_size=1)).ranks == 1, "not known yet"


def test_gpus_that_share_out_experts(load: Load) -> None:
    plan = sharing.axes(load("model=qwen3-moe", "gpus=4", "ep_size=2", "ep_exchange=rows"))
    assert (plan.expert, plan.expert_rows, plan.along("expert_replicate").size) == (2, True, 2)
    plain = sharing.axes(load("model=qwen3-moe", "gpus=4", "ep_size=2"))
    assert (plain.expert_rows, plain.expert_balance) == (False, None)
    even = load(
        "model=qwen3-moe", "gpus=4", "ep_size=2", "ep_load_balance_threshold=1.3", "ep_plan_refresh_interval=16"
    )
    assert sharing.axes(even).expert_balance == 1.3
    assert sharing.sends_no_experts(even) == [{"ep_load_balance_threshold": None}]
    assert sharing.axes(replace(even, ep_size=1)).expert_balance is None
    assert not sharing.sends_no_experts(replace(even, ep_size=1))


def test_exact_sums_are_for_lora_unless_they_are_asked_for(load: Load) -> None:
    def exact(*keys: str, moves: bool = False) -> bool:
        return sharing.axes(load("model=qwen3-0.6b", *keys), moves_gradients=moves).exact

    assert all(exact("lora=true", f"gpus={n}") for n in (1, 2, 4, 8))
    assert not exact("lora=true", "gpus=3")
    assert not exact("lora=true", moves=True)
    assert not exact("lora=false", "gpus=2")
    assert exact("lora=false", "gpus=2", "exact_reduction=true")
    assert not exact("lora=true", "exact_reduction=false")
    assert not exact("lora=true", "gpus=2", "ep_size=2")


def test_whole_matrices_are_not_shared_out(load: Load, problems: Problems, registry: Registry) -> None:
    keys = ("model=qwen3-0.6b", "lora=false", "optimizer=normuon")
    for level in (1, 3):
        (problem,) = problems(*keys, "gpus=2", f"zero_level={level}")
        assert (problem.key, problem.fix) == ("zero_level", "zero_level: 0")
        assert "normuon" in problem.message
    (problem,) = problems(*keys, "gpus=2", "zero_level=0", "cpu_training=true")
    assert (problem.key, problem.fix.split(",")[0]) == ("cpu_training", "gpus: 1")
    assert load(*keys, "gpus=1", "cpu_training=true").zero_level == 1
    # The machine may have one GPU. `check` has the number.
    config = load(*keys, "gpus=0", "cpu_training=true")
    for gpus in (1, 2):
        with pytest.raises(ConfigError, match="cpu_training") if gpus == 2 else nullcontext():
            sharing.check(replace(config, gpus=gpus), registry.get("optimizer", "normuon"))
    assert load(*keys, "gpus=2", "zero_level=0").zero_level == 0


def test_what_every_gpu_has_whole_is_not_moved(load: Load) -> None:
    def wrong(*keys: str, moves: str) -> Problem | None:
        return sharing.misplaced(load("model=qwen3-0.6b", *keys), moves.split())  # type: ignore[arg-type]

    everything = "weights residuals gradients master optimizer"
    for level, moves, fix in ((1, "gradients", 2), (1, everything, 3), (2, "weights master", 3)):
        problem = wrong("lora=false", "gpus=2", f"zero_level={level}", moves=moves)
        assert problem is not None
        assert (problem.key, problem.fix.split(",")[0]) == ("zero_level", f"zero_level: {fix}")
    for keys in (["gpus=1"], ["gpus=2", "zero_level=0"], ["gpus=2", "zero_level=3"]):
        assert wrong("lora=false", *keys, moves=everything) is None
    assert wrong("lora=false", "gpus=2", moves="residuals master optimizer") is None
    assert wrong("lora=false", "gpus=2", "shard_weights=true", moves="weights residuals master optimizer") is None
    problem = wrong("lora=false", "gpus=2", "shard_weights=true", moves=everything)
    assert problem is not None
    assert "whole gradients" in problem.message
    assert problem.fix.startswith("zero_level: 2")
    assert wrong("lora=false", "gpus=2", "shard_weights=true", "zero_level=2", moves=everything) is None
    assert wrong("lora=true", "gpus=2", moves=everything) is None


def test_what_must_stay_on_the_device_is_told_before_a_run_starts(problems: Problems, load: Load) -> None:
    (problem,) = problems("model=qwen3-0.6b", "lora=false", "gpus=2", "offload_grads=true")
    assert (problem.key, "every GPU keeps whole gradients" in problem.message) == ("zero_level", True)
    (problem,) = problems("model=qwen3-0.6b", "lora=true", "offload=host", "exact_reduction=true")
    assert (problem.key, "which offload=host moves" in problem.message) == ("exact_reduction", True)
    assert load("model=qwen3-0.6b", "lora=false", "gpus=2", "zero_level=2", "offload_grads=true").offload_grads
    for moved in ("offload_grads=true", "offload=host"):
        assert load("model=qwen3-0.6b", "lora=false", "gpus=0", moved).gpus == 0, "it may be one GPU"
    assert len(problems("model=qwen3-0.6b", "lora=false", "gpus=2", "offload_grads=true", "learning_rate=-1")) == 2
    (problem,) = problems("model=qwen3-0.6b", "lora=false", "gpus=2", "shard_gradients=true", "offload=host")
    assert "is 1 and acts as 2, with which every GPU keeps whole trained weights" in problem.message


def test_the_fix_fits_the_task(problems: Problems) -> None:
    """A task that samples from the model refuses level 3."""
    keys = ["model=qwen3-0.6b", "environment=copy", "lora=false", "gpus=2", "offload=host"]
    (problem,) = problems(*keys, task="grpo")
    assert problem.fix == "offload_* keys that leave them alone"


def test_the_number_of_gpus_that_torchrun_set_is_shown(load: Load, registry: Registry) -> None:
    config = replace(load("model=qwen3-0.6b", "lora=false", "gpus=2", "dp_shard_size=2"), gpus=3)
    with pytest.raises(ConfigError, match="is 2 and does not divide gpus=3"):
        sharing.check(config, registry.get("optimizer", "adamw"))


def test_what_more_can_be_shared_out(load: Load, registry: Registry) -> None:
    def more(*keys: str, task: str = "sft") -> list[dict[str, Any]]:
        config = load("model=qwen3-0.6b", "lora=false", "gpus=2", *keys)
        return sharing.shares_more(replace(config, task=task), registry)

    weights, second, third = {"shard_weights": True}, {"zero_level": 2}, {"zero_level": 3}
    assert more() == [second, third]
    assert more("zero_level=0") == [{"zero_level": 1}, second, third]
    assert more("shard_weights=true") == more("zero_level=2") == [third]
    assert more("zero_level=3") == more("shard_weights=true", "zero_level=2") == []
    assert more("lora=true") == [weights]
    assert more(task="grpo") == [second], "the model is sampled from"
    assert more("lora=true", task="grpo") == more("zero_level=2", task="grpo") == []


def test_a_number_of_ranks_that_the_environment_sets_is_checked(load: Load, registry: Registry) -> None:
    def check(*keys: str) -> None:
        config = load("model=qwen3-0.6b", "lora=false", *keys)
        sharing.check(config, registry.get("optimizer", config.optimizer.name))
        sharing.check(replace(config, gpus=3), registry.get("optimizer", config.optimizer.name))

    check("optimizer=adamw")
    for keys, match in (("optimizer=normuon", "normuon"), ("exact_reduction=true", "8")):
        with pytest.raises(ConfigError, match=match):
            check(keys)


def test_gradients_off_the_device_get_a_fix_that_holds(load: Load, problems: Problems) -> None:
    keys = ("model=qwen3-moe", "lora=false", "gpus=2", "ep_size=2", "offload=host", "offload_grads=true")
    (problem,) = problems(*keys)
    assert problem.key == "zero_level"
    assert problem.fix.startswith("zero_level: 0, or")
    assert load(*keys, "zero_level=0").offload_grads


def test_an_exchange_without_groups_is_a_note(load: Load) -> None:
    (note,) = sharing.notes(load("model=qwen3-moe", "gpus=2", "lora=false", "ep_exchange=rows"))
    assert note == "ep_exchange=rows: no effect with ep_size=1, every GPU has all experts."
    (note,) = sharing.notes(load("model=qwen3-moe", "gpus=2", "lora=false", "ep_load_balance_threshold=1.3"))
    assert note == "ep_load_balance_threshold: no effect with ep_size=1, every GPU computes all of its tokens."


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["gpus=1"], None),
        (["gpus=1", "zero_level=3", "shard_weights=true"], "zero_level=3, shard_weights: no effect with gpus=1"),
        (["gpus=1", "dp_shard_size=8"], "dp_shard_size=8: no effect with gpus=1"),
        (["gpus=4", "zero_level=3", "dp_shard_size=2"], None),
        (["gpus=4", "lora=true", "dp_shard_size=2"], "dp_shard_size=2: no effect with lora"),
        (["gpus=4", "lora=true", "shard_weights=true", "dp_shard_size=2"], None),
        (["gpus=2", "zero_level=3"], None),
        (["gpus=2", "cpu_training=true"], "as zero_level=3 does"),
        (["gpus=2", "cpu_training=true", "zero_level=3"], None),
        (["gpus=2", "lora=true", "shard_gradients=true"], "shard_gradients: no effect with lora"),
        (["gpus=2", "lora=true", "zero_level=2"], "zero_level=2: no effect with lora"),
        (["gpus=2", "lora=true", "zero_level=3"], None),
    ],
)
def test_keys_without_effect_are_notes(load: Load, keys: list[str], said: Any) -> None:
    found = sharing.notes(load("model=qwen3-0.6b", "lora=false", *keys))
    assert len(found) == (said is not None)
    assert all(said in note for note in found)
