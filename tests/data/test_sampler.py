"""The stream of rows: whole epochs, and exact continuation."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch

from surogate_core.data.pipeline import prepare
from surogate_core.data.sampler import EvalBatches, StepLoader, epoch_order
from surogate_core.data.shards import PackedRows
from surogate_core.errors import UserError


@pytest.fixture
def rows(write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any) -> PackedRows:
    """About a dozen packed rows."""
    return prepare(make_config(write_rows(document_rows)), tokenizer, formats).train


def loader(rows: PackedRows, seed: int = 1, micro_batches: int = 3) -> StepLoader:
    return StepLoader(rows, rows_per_micro_batch=2, micro_batches=micro_batches, seed=seed)


def same(a: Any, b: Any) -> bool:
    left, right = ({f: getattr(x, f) for f in x.__slots__} for x in (a, b))
    return all(
        torch.equal(left[k], right[k]) if isinstance(left[k], torch.Tensor) else left[k] == right[k] for k in left
    )


@pytest.mark.parametrize("done", [0, 1, 2, 3, 7])
def test_a_resumed_stream_continues_bit_identically(rows: PackedRows, done: int) -> None:
    whole = loader(rows)
    for _ in range(done):
        whole.next_step()
    state = json.loads(json.dumps(whole.state()))
    resumed = loader(rows)
    resumed.load_state(state)
    assert resumed.epoch == whole.epoch
    for _ in range(6):
        assert all(same(a, b) for a, b in zip(whole.next_step(), resumed.next_step(), strict=True))


def test_each_epoch_takes_every_row_once_in_an_order_of_its_own(rows: PackedRows) -> None:
    taken = StepLoader(rows, rows_per_micro_batch=1, micro_batches=len(rows), seed=5)
    epochs = [[tuple(b.input_ids.tolist()) for b in taken.next_step()] for _ in range(2)]
    assert taken.epoch == 2.0
    assert taken.steps_per_epoch == 1.0
    assert Counter(epochs[0]) == Counter(epochs[1])
    assert epochs[0] != epochs[1]
    assert sorted(epoch_order(len(rows), 5, 0)) == list(range(len(rows)))


def test_the_stream_does_not_depend_on_how_rows_are_grouped(rows: PackedRows) -> None:
    three, one = loader(rows), loader(rows, micro_batches=1)
    grouped = three.next_step()
    assert all(same(a, one.next_step()[0]) for a in grouped)
    assert three.state() == one.state()


def test_all_shapes_of_a_run_are_equal(
    write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any
) -> None:
    data = prepare(make_config(write_rows(document_rows), validation_split_ratio=0.2), tokenizer, formats)
    assert data.eval is not None
    stream = loader(data.train)
    batches = [b for _ in range(8) for b in stream.next_step()] + list(EvalBatches(data.eval, rows_per_micro_batch=2))
    assert (
        len({tuple(getattr(b, f).shape for f in ("input_ids", "labels", "positions", "cu_seqlens")) for b in batches})
        == 1
    )
    assert {b.input_ids.dtype for b in batches} == {b.labels.dtype for b in batches} == {torch.int64}
    assert {b.positions.dtype for b in batches} == {b.cu_seqlens.dtype for b in batches} == {torch.int32}


def test_evaluation_sees_every_row_once(rows: PackedRows) -> None:
    batches = EvalBatches(rows, rows_per_micro_batch=5)
    assert len(list(batches)) == len(batches) == -(-len(rows) // 5)
    assert sum(b.tokens for b in batches) == rows.stats.tokens
    assert sum(b.label_tokens for b in batches) == rows.stats.label_tokens


def test_the_order_depends_on_the_seed(rows: PackedRows) -> None:
    assert not same(loader(rows, seed=1).next_step()[0], loader(rows, seed=2).next_step()[0])


@pytest.mark.parametrize("change", [{"seed": 9}, {"rows": 3}, {"digest": "another"}, {"version": 0}])
def test_a_state_of_other_data_is_refused(rows: PackedRows, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"{next(iter(change))} .*resume_from_checkpoint=false"):
        loader(rows).load_state(loader(rows).state() | change)


def test_the_order_is_the_same_on_every_machine() -> None:
    # Written down once: a change here breaks the resumption of every existing checkpoint.
    assert epoch_order(8, 1234, 0).tolist() == ORDER_0
    assert epoch_order(8, 1234, 1).tolist() == ORDER_1


ORDER_0 = [1, 6, 4, 0, 3, 5, 2, 7]
ORDER_1 = [6, 7, 4, 2, 0, 1, 5, 3]
