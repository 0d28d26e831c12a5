"""What ranks must have in common, the steps that a resumed run keeps, and the promises about bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.config.schema import RunConfig
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.errors import ConfigError, UserError
from surogate_core.mesh.axes import Axes
from surogate_core.setup.ranks import (
    check_equal,
    check_none_elsewhere,
    on_one_gpu,
    reduction_notes,
    reduction_of,
    unequal_devices,
    with_kept_steps,
)
from surogate_core.train.checkpoint import Checkpoint
from surogate_testing import tiny


def saved(**state: Any) -> Checkpoint:
    return Checkpoint(path=Path("run/checkpoint-2"), step=2, state=json.loads(json.dumps(state)), groups=())


@pytest.mark.parametrize(
    ("asked", "gpus", "micro_batches", "now", "now_gpus", "own"),
    [
        (2, 4, 8, 2, 1, 8),
        (2, 4, 8, 2, 2, 4),
        (2, 4, 8, 2, 4, 2),
        (2, 1, 8, 2, 4, 2),  # resumed before: the key of the user is still 2
        (2, 1, 8, 8, 2, 4),  # from config.yaml of the run on one GPU
        (2, 4, 8, 3, 2, 3),  # the user asks for other steps
        (4, 1, 4, 8, 1, 8),
    ],
)
def test_a_resumed_run_keeps_its_steps_on_another_number_of_gpus(
    asked: int, gpus: int, micro_batches: int, now: int, now_gpus: int, own: int
) -> None:
    checkpoint = saved(config={"gradient_accumulation_steps": asked}, gpus=gpus, micro_batches=micro_batches)
    config, notes = with_kept_steps(RunConfig(gradient_accumulation_steps=now, gpus=now_gpus), checkpoint)
    assert config.gradient_accumulation_steps == own
    assert bool(notes) == (own != now)
    if notes:
        assert notes == [
            f"gradient_accumulation_steps is {own} instead of {now}: with gpus={now_gpus}, a step keeps the 8 "
            f"micro-batches that it has in run/checkpoint-2."
        ]


@pytest.mark.parametrize(
    ("gpus", "context", "now", "now_gpus", "now_context", "own"),
    [
        (4, 2, 2, 1, 1, 8),  # the user's key
        (4, 2, 4, 1, 1, 8),  # from config.yaml of the run on two groups
        (4, 2, 4, 4, 1, 2),
        (1, 1, 8, 4, 2, 4),
        (1, 1, 8, 4, 4, 8),
        (4, 2, 3, 1, 1, 3),  # the user asks for other steps
    ],
)
def test_groups_that_share_rows_count_as_one_gpu(
    gpus: int, context: int, now: int, now_gpus: int, now_context: int, own: int
) -> None:
    before = {"gradient_accumulation_steps": 2, "context_parallel_size": context}
    config = RunConfig(gradient_accumulation_steps=now, gpus=now_gpus, context_parallel_size=now_context)
    found, _ = with_kept_steps(config, saved(config=before, gpus=gpus, micro_batches=8))
    assert found.gradient_accumulation_steps == own


@pytest.mark.parametrize(("gpus", "micro_batches"), [(0, 3), (1, 3), (4, 12)])
def test_one_gpu_takes_the_steps_of_several(gpus: int, micro_batches: int) -> None:
    config = on_one_gpu(RunConfig(gradient_accumulation_steps=3, gpus=gpus))
    assert (config.gpus, config.gradient_accumulation_steps) == (1, micro_batches)


def test_a_checkpoint_of_a_version_for_one_gpu_keeps_its_steps() -> None:
    old = saved(config={"gradient_accumulation_steps": 4})
    config, notes = with_kept_steps(RunConfig(gradient_accumulation_steps=4, gpus=2), old)
    assert (config.gradient_accumulation_steps, len(notes)) == (2, 1)
    assert with_kept_steps(RunConfig(gradient_accumulation_steps=4, gpus=2), saved())[1] == []


def test_gpus_that_cannot_share_a_step_are_refused() -> None:
    checkpoint = saved(config={"gradient_accumulation_steps": 6}, gpus=1, micro_batches=6)
    with pytest.raises(ConfigError) as caught:
        with_kept_steps(RunConfig(gradient_accumulation_steps=6, gpus=4), checkpoint)
    assert "gpus: is 4, and a step of run/checkpoint-2 has 6 micro-batches" in str(caught.value)
    assert "Fix: gpus=1, 2, 3 or 6, or another gradient_accumulation_steps" in str(caught.value)


def test_what_differs_is_named_with_its_ranks() -> None:
    same = {"torch": "2.11", "key lora": True}
    check_equal([same, same])
    with pytest.raises(UserError) as caught:
        check_equal([same, same | {"plugin x": "1"}, {**same, "torch": "2.12", "key lora": False}])
    text = str(caught.value)
    assert "torch: 2.11 on ranks 0, 1; 2.12 on rank 2" in text
    assert "key lora: True on ranks 0, 1; False on rank 2" in text
    assert "plugin x: None on ranks 0, 2; 1 on rank 1" in text
    with pytest.raises(UserError, match="and 12 more"):
        check_equal([{f"key {i}": 0 for i in range(20)}, {}])


def test_a_checkpoint_on_another_machine_is_not_passed_over() -> None:
    check_none_elsewhere([[], []], Path("run"))
    check_none_elsewhere([["checkpoint-2"], []], Path("run"))
    with pytest.raises(
        UserError, match=r"^run: the machine of rank 0 has no checkpoint here, but that of rank 2 has ch"
    ):
        check_none_elsewhere([[], [], ["checkpoint-2"]], Path("run"))


def test_unequal_devices_get_a_note() -> None:
    assert unequal_devices(["H200", "H200"]) == []
    assert unequal_devices(["H200", "H100"])[0].startswith("The GPUs are not equal: H200 on rank 0; H100 on rank 1.")
    (note,) = unequal_devices(["H200", "H100"], share_experts=True)
    assert note.endswith(
        "Each has as many experts, and on average as many rows, whatever its memory and speed (ep_size)."
    )
    assert unequal_devices(["H200", "H200"], share_experts=True) == []


def settings(**values: Any) -> EngineSettings:
    place = {"device": torch.device("cpu"), "tokens": 1, "borders": 2, "max_seqlen": 1}
    others = {name: values.pop(name) for name in list(values) if name not in tiny.AXES}
    return EngineSettings(axes=plan(**values), **place, **others)


def plan(**values: Any) -> Axes:
    return tiny.axes(**{"ranks": 2, "exact": True, "micro_batches": 8, **values})


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ({}, "gives equal bits on 1, 2, 4 and 8 equal GPUs."),
        ({"micro_batches": 6}, "gives equal bits on 1 and 2 equal GPUs."),
        ({"exact": False}, "Two equal runs on 2 GPUs give equal bits; .* \\(exact_reduction=true gives equal bits\\)."),
        ({"exact": False, "update_on_cpu": True}, "another number of GPUs rounds sums differently.$"),
        ({"exact": False, "ranks": 3, "micro_batches": 3}, "another number of GPUs rounds sums differently.$"),
        ({"ranks": 4, "micro_batches": 12}, "gives equal bits on 1, 2 and 4 equal GPUs."),
    ],
)
def test_the_run_says_which_bits_are_equal(values: dict[str, Any], note: str) -> None:
    (found,) = reduction_notes(settings(**values), None, deterministic=True)
    assert re.search(note, found)
    assert reduction_notes(settings(**values), None, deterministic=False) == [
        "Two equal runs may differ in their last bits: deterministic=false."
    ]


def test_one_gpu_promises_nothing_new() -> None:
    assert reduction_notes(settings(ranks=1), None, deterministic=True) == []


def test_another_order_of_sums_gets_a_note() -> None:
    exact = reduction_of(plan())
    assert reduction_of(plan(ranks=4)) == reduction_of(plan(ranks=1)) == exact
    assert reduction_of(plan(zero_level=2)) != reduction_of(plan(zero_level=1))
    shared = [reduction_of(plan(exact=False, ranks=4, expert=n, expert_rows=n > 2)) for n in (1, 2, 4)]
    assert len({str(order) for order in shared}) == 3
    # The norm, by which gradients are clipped, has other sums at level 0.
    assert reduction_of(plan(zero_level=1)) != exact
    assert reduction_of(plan(zero_level=1, exact=False, ranks=1)) == reduction_of(plan(exact=False, ranks=1))
    other = saved(reduction=reduction_of(plan(exact=False)))
    flat = reduction_of(plan(exact=False, ranks=12))
    assert reduction_of(plan(exact=False, ranks=8), (2, 4)) == reduction_of(plan(exact=False, ranks=8))
    assert reduction_of(plan(exact=False, ranks=12), (4, 3)) != flat
    assert reduction_of(plan(ranks=8), (2, 4)) == reduction_of(plan(ranks=8, shard_ranks=2)) == exact
    second = [reduction_of(plan(exact=False, ranks=8, zero_level=2, shard_ranks=parts)) for parts in (0, 2, 4)]
    assert len({str(order) for order in second}) == 3
    for equal in (True, False):
        first, weights = (plan(zero_level=1, exact=equal, shard_weights=shared) for shared in (False, True))
        assert reduction_of(weights) == reduction_of(first), "weights that are shared out change no sum"
    sharded = settings(exact=False, zero_level=3)
    before = {key: value for key, value in reduction_of(sharded.axes).items() if key != "sharded"}
    notes = [
        reduction_notes(sharded, saved(reduction=r), deterministic=True) for r in (before, reduction_of(sharded.axes))
    ]
    assert ["another order than before" in " ".join(found) for found in notes] == [True, False], (
        "once in every micro-step"
    )
    assert "sharded" not in reduction_of(plan(exact=False, zero_level=3, varying=True))
    assert reduction_notes(settings(ranks=1), saved(reduction=exact), deterministic=True) == []
    assert reduction_notes(settings(ranks=1), saved(), deterministic=True) == []
    assert "another order than before" in reduction_notes(settings(ranks=1), other, deterministic=True)[0]
