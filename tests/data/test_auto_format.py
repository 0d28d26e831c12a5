"""The format `auto` through the pipeline, with the formats that it chooses: nothing of a row is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import DatasetFormat
from surogate_core.config.schema import RunConfig
from surogate_core.data.entries import choose_format, parse_entries
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.rows.sources import open_source
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import UserError
from surogate_core.plugins import import_policy, load_plugins

OPENAI = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
SHAREGPT = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
ALPACA = {"instruction": "Add.", "input": "1 2", "output": "3"}
PREFERENCE = {"prompt": "Hi", "chosen": "Hello", "rejected": "Go"}
TEXT = {"text": "Rome."}


@pytest.fixture(scope="module")
def formats() -> dict[str, DatasetFormat]:
    """Those of the installed plugins."""
    return dict(load_plugins(import_policy()).all("dataset"))


def prepared(tmp_path: Path, rows: Any, formats: Any, **entry: Any) -> PreparedData:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    keys: Any = {"sequence_len": 64, "data_cache_dir": str(tmp_path / "cache"), "validation_split_ratio": 0.0}
    config = RunConfig(datasets=[{"path": str(path), "type": "auto", **entry}], **keys)
    return prepare(config, load_tokenizer("pkg://surogate_dataset_chat/embedded/tokenizer"), formats)


@pytest.mark.parametrize(
    ("row", "entry"),
    [
        (OPENAI, {"type": "conversation"}),
        (
            ALPACA,
            {
                "type": "instruction",
                "instruction_field": "instruction",
                "output_field": "output",
                "input_field": "input",
            },
        ),
        (TEXT, {"type": "text"}),
    ],
)
def test_the_result_is_that_of_the_type(tmp_path: Path, formats: Any, row: Any, entry: Any) -> None:
    found, named = prepared(tmp_path, [row] * 3, formats), prepared(tmp_path, [row] * 3, formats, **entry)
    assert found.digest == named.digest
    assert [d.cached for d in named.report.datasets] == [True]
    assert f"rows.jsonl) is read as type {entry['type']} (" in found.report.summary()
    assert "since 3 of 3 sampled rows" in found.report.summary()
    assert "is read as" not in named.report.summary()


def test_sharegpt_equals_openai(tmp_path: Path, formats: Any) -> None:
    assert prepared(tmp_path, [SHAREGPT], formats).digest == prepared(tmp_path, [OPENAI], formats).digest


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "has no readable row among those sampled"),
        ([3], r"has no readable row among those sampled\. Bad rows: \S+rows\.jsonl:1: .*object.* Fix: mend the rows"),
        ([{"a": 1}], "no type fits the 1 sampled rows, whose fields are 'a'"),
    ],
)
def test_rows_without_a_type_stop_the_run(tmp_path: Path, formats: Any, rows: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        prepared(tmp_path, rows, formats)


def test_preferences_are_found_and_refused(tmp_path: Path, formats: Any) -> None:
    with pytest.raises(UserError, match="is of type preference, which task sft cannot train on"):
        prepared(tmp_path, [PREFERENCE], formats)


# ------------------------------------------------------------------------------- nothing is lost

SYSTEM = {"role": "system", "content": "Be brief."}


def text_of(data: PreparedData) -> str:
    """All that is trained on, as text."""
    tokenizer = load_tokenizer("pkg://surogate_dataset_chat/embedded/tokenizer")
    return "".join(tokenizer.decode(data.train.row(i).input_ids) for i in range(len(data.train)))


@pytest.mark.parametrize("name", ["system", "system_prompt"])
def test_a_system_field_is_used_though_some_rows_have_a_system_message(tmp_path: Path, formats: Any, name: str) -> None:
    rows = [{"messages": [SYSTEM, *OPENAI["messages"]]}, {**OPENAI, name: "Be long."}, {**OPENAI, name: ""}]
    data = prepared(tmp_path, rows, formats)
    assert data.report.bad_row_count == 0
    assert text_of(data).count("Be brief.") == text_of(data).count("Be long.") == 1


def test_a_system_prompt_in_two_places_must_be_one(tmp_path: Path, formats: Any) -> None:
    rows = [{"messages": [SYSTEM, *OPENAI["messages"]], "system": prompt} for prompt in ("Be brief.", "Be long.")]
    data = prepared(tmp_path, rows, formats)
    (bad,) = data.report.bad_rows
    assert "field 'system' and the messages have different system prompts" in bad.reason
    assert text_of(data).count("Be brief.") == 1


@pytest.mark.parametrize(
    ("row", "late", "fields"),
    [
        (OPENAI, {"tools": [{"name": "clock"}]}, "tools_field: tools"),
        (OPENAI, {"system_prompt": "Be brief."}, "system_field: system_prompt"),
        (ALPACA | {"input": ""}, {"context": "1 2"}, "input_field: context"),
    ],
)
def test_a_field_that_comes_late_is_found(tmp_path: Path, formats: Any, row: Any, late: Any, fields: str) -> None:
    """At row 1,500, and in the second megabyte."""
    path = tmp_path / "rows.jsonl"
    for rows in ([row] * 1500 + [{**row, **late}], [{**row, "note": "x" * 2000}] * 600 + [{**row, **late}] * 600):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (entry,) = parse_entries([{"path": str(path), "type": "auto"}], formats, key="datasets")
        assert fields in choose_format(entry, open_source(entry.source), formats).chosen


def test_fields_that_nobody_reads_are_named(tmp_path: Path, formats: Any) -> None:
    rows = [{**OPENAI, "source": "web", "score": 3, "notes": None, "tags": []}, {**OPENAI, "source": "web"}]
    report = prepared(tmp_path, rows, formats).report
    note = (
        f"Type conversation does not read 'score' (in 1 of 2 rows), 'source' of datasets[0] ({tmp_path}/rows.jsonl) "
        f"(messages_field, system_field, tools_field choose what is read)."
    )
    assert report.datasets[0].unread_note == note
    assert note in report.summary()
    again = prepared(tmp_path, rows, formats).report.datasets[0]
    assert (again.cached, again.unread_note) == (True, note)
    many = prepared(tmp_path, [{**OPENAI, f"{i:03} {'x' * 99}": 1} for i in range(300)], formats).report.datasets[0]
    assert len(many.unread) == 100
    assert "'000 xxx" in many.unread_note
    assert " and 90 more of datasets[0]" in many.unread_note
    assert len(many.unread_note) < 1500
    for row, name in ((ALPACA, "score"), (TEXT, "source")):
        data = prepared(tmp_path, [{**row, name: "x"}], formats)
        assert f"does not read '{name}' of" in data.report.summary()
