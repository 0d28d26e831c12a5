"""Invalid results of a data set format, and the plugin that the error names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from surogate_core.bundles import DatasetFormat, NoOptions
from surogate_core.data import contract
from surogate_core.data.encoded import Encoded, RowError
from surogate_core.errors import UserError
from surogate_testing.datasets import context

IDS = np.array([5, 6, 7], np.int32)
SHIFTED = np.array([6, 7, -100], np.int32)


def spec(encode: Any) -> DatasetFormat:
    return DatasetFormat(name="odd", options=NoOptions, encode=encode)


@pytest.mark.parametrize(
    ("encode", "fault"),
    [
        (lambda *a: {"input_ids": IDS}, "encode returned dict, not Encoded"),
        (lambda *a: None, "encode returned NoneType, not Encoded"),
        (lambda *a: Encoded(input_ids=IDS.astype(np.int64), labels=IDS), "input_ids are int64, not int32"),
        (lambda *a: Encoded(input_ids=IDS, labels=SHIFTED), "a label is not its own token: labels are not shifted"),
        (lambda *a: Encoded.from_mask([5, 70000]), "an id is not in the vocabulary: 70000 of 259 tokens"),
        (lambda *a: Encoded.from_mask([5, -1]), "an id is not in the vocabulary: -1 of 259 tokens"),
        (
            lambda *a: Encoded(input_ids=IDS, labels=IDS[:2]),
            "ValueError: input_ids has shape (3,) and labels (2,): want",
        ),
        (lambda *a: a[0]["absent"], "KeyError: 'absent'"),
    ],
)
def test_what_a_format_must_not_give_back_names_it(encode: Any, fault: str) -> None:
    with pytest.raises(contract.FormatError) as caught:
        contract.encoded(spec(encode), {"a": 1}, NoOptions(), context())
    message = str(caught.value)
    assert message.startswith(f"module {__name__}, data set type 'odd': ")
    assert fault in message
    assert not message.endswith(".")


def test_errors_that_are_meant_come_through() -> None:
    for kind in (RowError, UserError):

        def refuse(*arguments: Any, kind: type[Exception] = kind) -> Any:
            raise kind("as meant")

        with pytest.raises(kind, match="as meant"):
            contract.encoded(spec(refuse), {}, NoOptions(), context())


def test_a_tokenizer_with_gaps_among_its_numbers_is_taken() -> None:
    around = context()
    around.tokenizer.add_special_tokens({"additional_special_tokens": ["<a>", "<b>"]})
    largest = max(around.tokenizer.get_vocab().values())
    found = contract.encoded(spec(lambda *a: Encoded.from_mask([largest, 5])), {}, NoOptions(), around)
    assert found.input_ids.tolist() == [largest, 5]
