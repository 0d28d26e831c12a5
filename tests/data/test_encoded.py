"""One document: its tokens, its labels, and what they weigh."""

from __future__ import annotations

import numpy as np
import pytest

from surogate_core.batch import IGNORE_LABEL
from surogate_core.data.encoded import Encoded

IDS = np.array([5, 6, 7, 8], np.int32)


def test_a_mask_says_what_is_trained() -> None:
    assert Encoded.from_mask([5, 6, 7]).labels.tolist() == [5, 6, 7]
    document = Encoded.from_mask([5, 6, 7], [True, 0, 1])
    assert document.labels.tolist() == [5, IGNORE_LABEL, 7]
    assert (document.input_ids.dtype, document.labels.dtype, document.weights) == (np.int32, np.int32, None)
    assert document.label_tokens == 1  # nothing predicts the first


def test_weights_of_nothing_train_nothing() -> None:
    document = Encoded.from_mask([5, 6, 7, 8], [True, True, True, False], [2.0, 0.0, 0.5, 3.0])
    assert document.weights is not None
    assert document.weights.dtype == np.float32
    assert document.weights.tolist() == [2, 0, 0.5, 0]
    assert document.labels.tolist() == [5, IGNORE_LABEL, 7, IGNORE_LABEL]


def test_weights_that_are_all_one_are_none() -> None:
    document = Encoded.from_mask([5, 6, 7], None, [1.0, 0.0, 1.0])
    assert document.weights is None
    assert document.labels.tolist() == [5, IGNORE_LABEL, 7]


@pytest.mark.parametrize(
    ("labels", "weights", "reason"),
    [
        ([5, 6, 7], None, "want equal 1-D shapes"),
        ([5, 6, 7, 8], [1, 1], "weights has shape"),
        ([5, 6, 7, 8], [1, 1, 1, np.nan], "negative or not finite"),
        ([5, 6, 7, 8], [1, 1, 1, np.inf], "negative or not finite"),
        ([5, 6, 7, 8], [1, 1, 1, -1], "negative or not finite"),
        ([5, 6, 7, 8], [1, 1, 1, 0], "must be 0 where labels is IGNORE_LABEL"),
        ([5, 6, 7, IGNORE_LABEL], [1, 1, 1, 1], "must be 0 where labels is IGNORE_LABEL"),
    ],
)
def test_what_does_not_fit_together(labels: list[int], weights: list[float] | None, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Encoded(
            input_ids=IDS,
            labels=np.array(labels, np.int32),
            weights=None if weights is None else np.array(weights, np.float32),
        )
