import numpy as np
import torch
from surogate_task_grpo.packing import Document, Shape, arranged, first_fit, micro_batch

from surogate_core.plugin import IGNORE_LABEL

SHAPE = Shape(rows=2, sequence_len=10, documents=3, columns=("weights", "advantages"), padding_id=7)


def document(length, *, prompt=1, first=100, advantage=1.0):
    return Document(
        ids_T=np.arange(first, first + length),
        trained_T=np.arange(length) >= prompt,
        columns={
            "weights": np.ones(length, np.float32),
            "advantages": np.arange(length, dtype=np.float32) * np.float32(advantage),
        },
    )


def micro_batches(documents, shape, *, divisor):
    chosen = arranged([len(document) for document in documents], shape)
    return [micro_batch([[documents[i] for i in row] for row in rows], shape, divisor=divisor) for rows in chosen]


def test_first_fit():
    assert first_fit([6, 5, 4, 5, 1], room=10, most=9) == [[0, 2], [1, 3], [4]]
    assert first_fit([1, 1, 1], room=10, most=2) == [[0, 1], [2]]
    assert first_fit([], room=10, most=2) == []


def test_a_position_carries_what_belongs_to_the_token_that_it_predicts():
    (batch,) = micro_batches([document(4, prompt=2), document(5, first=200)], SHAPE, divisor=6.0)
    assert batch.input_ids.tolist() == [100, 101, 102, 103, 200, 201, 202, 203, 204, 7, *[7] * 10]
    ignored = IGNORE_LABEL
    labels = [ignored, 102, 103, ignored, 201, 202, 203, 204, ignored, ignored]
    assert batch.labels.tolist() == labels + [ignored] * 10
    assert batch.columns["advantages"].tolist() == [0, 2, 3, 0, 1, 2, 3, 4, 0, 0, *[0] * 10]
    assert batch.columns["weights"].tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 0, 0, *[0] * 10]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, *range(10)]
    assert batch.cu_seqlens.tolist() == [0, 4, 9, 10, 20, 20, 20, 20, 20]
    assert (batch.tokens, batch.label_tokens, batch.pairs, batch.loss_weight) == (9, 6, 25, 6.0)
    assert batch.real.tolist() == [True] * 9 + [False] * 11


def test_the_number_of_micro_batches_varies_and_their_shapes_do_not():
    few = micro_batches([document(9)], SHAPE, divisor=8.0)
    many = micro_batches([document(9) for _ in range(5)], SHAPE, divisor=16.0)
    none = micro_batches([], SHAPE, divisor=0.0)
    assert [len(found) for found in (few, many, none)] == [1, 3, 1]
    assert sum(batch.loss_weight for batch in many) == 48.0
    shapes = {
        tuple(tuple(t.shape) for t in (b.input_ids, b.labels, b.positions, b.cu_seqlens, *b.columns.values()))
        for b in (*few, *many, *none)
    }
    assert len(shapes) == 1
    assert torch.equal(many[2].labels[10:], torch.full((10,), IGNORE_LABEL))
