"""Checks of tasks: equal data give equal steps, a saved position is restored, every micro-batch has the same shape."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from surogate_core.plugin import (
    EncodeContext,
    Encoded,
    Group,
    MicroBatch,
    PackedRows,
    ReferencedTask,
    UserError,
    bundles,
)
from surogate_core.service.config import RunConfig
from surogate_core.service.data import References, prepare
from surogate_core.service.plugins import next_share
from surogate_testing.chat_templates import byte_tokenizer
from surogate_testing.check import NotApplicable, ensure

STEPS = 7
"""Number of steps that are compared; more than an epoch of the data here has."""


def _encode(row: Mapping[str, Any], options: Any, context: EncodeContext) -> Encoded:
    ids = context.tokenizer(row["text"])["input_ids"]
    return Encoded.from_mask(ids, [place > 0 for place in range(len(ids))])


@dataclasses.dataclass(frozen=True)
class _EncodeGroup:
    """A group of documents of the row, each shorter than the one before."""

    size: int

    def __call__(self, row: Mapping[str, Any], options: Any, context: EncodeContext) -> Group:
        text = row["text"]
        parts = (text[: len(text) // (number + 2) + 2] for number in range(self.size))
        return Group(documents=tuple(_encode({"text": part}, options, context) for part in parts))


@contextmanager
def small(spec: bundles.TaskSpec, *, documents: int = 40) -> Iterator[bundles.Task]:
    """The task on a few rows of 64 tokens, two a micro-batch and two micro-batches a step; an eighth is held out.

    Raises `NotApplicable` for a task that makes its steps with the model.
    """
    if spec.online is not None:
        raise NotApplicable("the task makes its steps with the model")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        rows = (
            json.dumps({"text": f"{i} and {i * 7 % 11} are words " + "and more " * (i % 3)}) for i in range(documents)
        )
        (directory / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
        config = RunConfig(
            task=spec.name,
            datasets=[{"path": str(directory / "rows.jsonl"), "type": "lines"}],
            data_cache_dir=str(directory / "cache"),
            dataloader_num_workers=0,
            sequence_len=64,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            validation_split_ratio=0.125,
        )
        encode = _encode if spec.group == 1 else _EncodeGroup(spec.group)
        tasks = None if spec.group == 1 else (spec.name,)
        lines = bundles.DatasetFormat(name="lines", options=bundles.NoOptions, encode=encode, tasks=tasks)
        data = prepare(config, byte_tokenizer(), {"lines": lines}, trains_prompts=spec.trains_prompts, group=spec.group)
        task = spec.task_of(config, data)
        if isinstance(task, ReferencedTask):
            task.refer([_references(rows, wanted) for rows, wanted in task.referenced(1000)])
        yield task


def _references(rows: PackedRows, wanted_R: NDArray[np.int64]) -> References:
    """Arbitrary log-probabilities."""
    logprobs_RL = -np.random.default_rng(0).random((len(wanted_R), rows.sequence_len), np.float32)
    return References(rows_R=wanted_R, logprobs_RL=logprobs_RL)


def _difference(a: MicroBatch, b: MicroBatch) -> str:
    """The first field in which two micro-batches differ; empty where they are equal."""
    left, right = _values(a), _values(b)
    for name in {**left, **right}:
        one, other = left.get(name), right.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            equal = torch.equal(one, other)
        else:
            equal = type(one) is type(other) and one == other
        if not equal:
            return name
    return ""


def _values(batch: MicroBatch) -> dict[str, Any]:
    """Its fields and columns by name."""
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(MicroBatch)}
    return {**{f"column {name}": column for name, column in values.pop("columns").items()}, **values}


def _ensure_equal(found: list[list[MicroBatch]], expected: list[list[MicroBatch]], when: str) -> None:
    for step, (a, b) in enumerate(zip(found, expected, strict=True)):
        ensure(len(a) == len(b), f"{when}: step {step} has {len(a)} micro-batches, not {len(b)}")
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            differing = _difference(left, right)
            ensure(not differing, f"{when}: micro-batch {number} of step {step} differs in {differing}")


def gives_equal_steps(spec: bundles.TaskSpec) -> None:
    """Two streams over the same data with the same keys have the same micro-batches, and train something."""
    with small(spec) as task:
        first, second = task.steps(), task.steps()
        ensure(first.steps_per_epoch > 0, f"steps_per_epoch is {first.steps_per_epoch!r}")
        ensure(first.epoch == 0, f"epoch is {first.epoch!r} before the first step")
        expected = [first.next_step() for _ in range(STEPS)]
        _ensure_equal([second.next_step() for _ in range(STEPS)], expected, "the same data again")
        ensure(first.epoch > 0, "epoch is 0 after some steps")
        for number, step in enumerate(expected):
            ensure(sum(batch.label_tokens for batch in step) > 0, f"step {number} trains no token")


def shares_its_steps(spec: bundles.TaskSpec) -> None:
    """With `next_share` a rank gets its micro-batches as they are in the whole step, and the figures of the others."""
    with small(spec) as task:
        whole = task.steps()
        expected = [whole.next_step() for _ in range(STEPS)]
        for own in ((), (0,), (1,)):
            steps = task.steps()
            for step, batches in enumerate(expected):
                found = next_share(steps, own)
                ensure(len(found) == len(batches), f"step {step} has {len(found)} micro-batches, not {len(batches)}")
                for number, (batch, left) in enumerate(zip(batches, found, strict=True)):
                    what = f"micro-batch {number} of step {step}, where a rank runs {list(own)}"
                    if isinstance(left, MicroBatch):
                        ensure(number in own, f"{what}: it is made")
                        ensure(not (other := _difference(left, batch)), f"{what}: it differs in {other}")
                    else:
                        ensure(number not in own, f"{what}: it is not made")
                        ensure(left == batch.counts(), f"{what}: its counts are {left}, not {batch.counts()}")
            ensure(steps.state() == whole.state(), f"the state of a rank that runs {list(own)} differs")


def resumes_where_it_was(spec: bundles.TaskSpec) -> None:
    """The state is strict JSON, and a stream that loads it continues with the same micro-batches, after any step."""
    with small(spec) as task:
        for taken in range(STEPS):
            steps = task.steps()
            for _ in range(taken):
                steps.next_step()
            state = json.loads(json.dumps(steps.state(), allow_nan=False))
            resumed = task.steps()
            resumed.load_state(state)
            when = f"resumed after {taken} steps"
            ensure(resumed.epoch == steps.epoch, f"{when}: epoch is {resumed.epoch!r}, not {steps.epoch!r}")
            _ensure_equal([resumed.next_step()], [steps.next_step()], when)


def refuses_the_state_of_other_data(spec: bundles.TaskSpec) -> None:
    """A position in other data cannot be restored: `load_state` raises `UserError`."""
    with small(spec) as task:
        steps = task.steps()
        steps.next_step()
        state = steps.state()
    with small(spec, documents=30) as task:
        try:
            task.steps().load_state(state)
        except UserError:
            return
    raise AssertionError("load_state takes the state of other data")


def has_one_shape(spec: bundles.TaskSpec) -> None:
    """Every micro-batch, trained or held out, has the shapes and dtypes of the sample and is on the host."""
    with small(spec) as task:
        steps, evaluation = task.steps(), task.evaluation()
        expected = _shapes(task.sample())
        batches = [batch for _ in range(STEPS) for batch in steps.next_step()]
        batches += list(evaluation) if evaluation is not None else []
        for batch in batches:
            ensure(_shapes(batch) == expected, f"a micro-batch has {_shapes(batch)}, the sample {expected}")


def evaluates_the_same(spec: bundles.TaskSpec) -> None:
    """Every pass over the held-out rows has the same micro-batches, in the stated number."""
    with small(spec) as task:
        evaluation = task.evaluation()
        ensure(evaluation is not None, "nothing is evaluated, and rows are held out")
        assert evaluation is not None
        first, second = list(evaluation), list(evaluation)
        ensure(len(first) == len(evaluation), f"a pass has {len(first)} micro-batches, not {len(evaluation)}")
        _ensure_equal([second], [first], "the second pass")


def _shapes(batch: MicroBatch) -> dict[str, str]:
    tensors = {name: value for name, value in _values(batch).items() if isinstance(value, torch.Tensor)}
    return {name: f"{list(t.shape)} {t.dtype} {t.device}" for name, t in tensors.items()}


CHECKS = (
    gives_equal_steps,
    shares_its_steps,
    resumes_where_it_was,
    refuses_the_state_of_other_data,
    has_one_shape,
    evaluates_the_same,
)
