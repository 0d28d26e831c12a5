"""Checks of data set formats: the trained tokens are those of the row, and a bad row has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from surogate_core.plugin import EncodeContext, Encoded, Group, RowError, UserError, bundles
from surogate_core.service.data import fault_of, members
from surogate_testing.chat_templates import byte_tokenizer
from surogate_testing.check import NotApplicable, ensure


def context(*, template: bool = True) -> EncodeContext:
    """A tokenizer of single bytes, with a chat template or without."""
    tokenizer = byte_tokenizer()
    if not template:
        tokenizer.chat_template = None
    return EncodeContext(tokenizer=tokenizer, sequence_len=4096)


def _examples(spec: bundles.DatasetFormat) -> list[tuple[Mapping[str, Any], Any]]:
    if not spec.examples:
        raise NotApplicable("the format has no `examples` to try it with")
    return [(row, spec.options(**fields)) for row, fields in spec.examples]


def _encode(
    spec: bundles.DatasetFormat, row: Mapping[str, Any], options: Any, around: EncodeContext
) -> tuple[Encoded, ...]:
    assert spec.encode is not None
    found = spec.encode(row, options, around)
    ensure(isinstance(found, Encoded | Group), f"encode returned {type(found).__name__}, not Encoded or Group")
    return members(found)


def labels_are_inputs(spec: bundles.DatasetFormat) -> None:
    """Labels are the token itself or -100, something is trained, and the same row gives the same document."""
    if spec.encode is None:
        raise NotApplicable("the format chooses another")
    for row, options in _examples(spec):
        for around in (context(), context(template=False)):
            try:
                found = _encode(spec, row, options, around)
            except (RowError, UserError):
                if around.tokenizer.chat_template:
                    raise
                continue
            again = _encode(spec, row, options, around)
            ensure(len(again) == len(found), "the same row gives another number of documents")
            for document, same in zip(found, again, strict=True):
                fault = fault_of(document, 1 + max(around.tokenizer.get_vocab().values()))
                ensure(not fault, fault)
                ensure(document.label_tokens > 0, "no token is trained")
                ensure(np.array_equal(same.input_ids, document.input_ids), "the same row gives other tokens")
                ensure(np.array_equal(same.labels, document.labels), "the same row gives other labels")


def refuses_bad_rows(spec: bundles.DatasetFormat) -> None:
    """A row without its fields is a `RowError` with a reason; a row with odd values is a `RowError` or a document."""
    for row, options in _examples(spec):
        variants: list[dict[str, Any]] = [{}] if spec.encode is not None else []
        odd: tuple[Any, ...] = (None, 3, [], {"a": 1})
        variants += [{**row, name: value} for name in row for value in odd]
        for number, bad in enumerate(variants):
            try:
                if spec.encode is not None:
                    _encode(spec, bad, options, context())
                else:
                    assert spec.choose is not None
                    spec.choose([bad], options)
            except RowError as error:
                ensure(bool(str(error)), "a RowError has no reason")
                continue
            ensure(bool(number) or spec.encode is None, "a row without fields is not refused")


def chooses(spec: bundles.DatasetFormat) -> None:
    """A format that chooses names a type and why, and refuses rows that show none."""
    if spec.choose is None:
        raise NotApplicable("the format encodes by itself")
    for row, options in _examples(spec):
        choice = spec.choose([row] * 4, options)
        ensure(isinstance(choice, bundles.FormatChoice), f"choose returned {type(choice).__name__}, not FormatChoice")
        ensure(bool(choice.type and choice.reason), "a choice without a type or a reason")
        try:
            spec.choose([{}], options)
        except RowError:
            continue
        raise AssertionError("rows without fields are not refused")


CHECKS = (labels_are_inputs, refuses_bad_rows, chooses)
