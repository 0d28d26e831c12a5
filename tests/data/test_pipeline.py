"""From a configuration to packed rows: the report, the digest, the split, and bad input."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from surogate_core.bundles import DatasetFormat, NoOptions
from surogate_core.data.contract import FormatError
from surogate_core.data.encoded import RowError
from surogate_core.data.entries import parse_entries
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.report import BadRow
from surogate_core.errors import ConfigError, UserError
from surogate_core.events import Progress

Prepare = Callable[..., PreparedData]


@pytest.fixture
def run(write_rows: Any, make_config: Any, tokenizer: Any, formats: Any) -> Prepare:
    """Writes rows and prepares them."""

    def prepare_rows(rows: list[Any], *, name: str = "rows.jsonl", **keys: Any) -> PreparedData:
        return prepare(make_config(write_rows(rows, name), **keys), tokenizer, formats)

    return prepare_rows


def tokens_of(data: Any) -> set[tuple[int, ...]]:
    """The documents of packed rows."""
    found = set()
    for i in range(len(data)):
        row, at = data.row(i), 0
        for length in row.lengths:
            found.add(tuple(row.input_ids[at : at + length].tolist()))
            at += length
    return found


def test_the_report_counts_what_became_of_the_rows(run: Prepare, tmp_path: Path) -> None:
    rows = [{"text": "w3 w4 w5"}, "{broken", {"txt": "w3"}, {"text": "w9"}, {"text": "w5 " * 20}, {"text": "w5 w6"}]
    data = run(rows)
    report = data.report
    assert (report.rows_read, report.bad_row_count) == (6, 3)
    path = tmp_path / "rows.jsonl"
    assert [bad.where for bad in report.bad_rows] == [f"{path}:2", f"{path}:3", f"{path}:4"]
    assert [re.split(r"[ ,;]", bad.reason)[0] for bad in report.bad_rows] == ["not", "field", "no"]
    assert (report.train.documents, report.train.deleted, report.train.tokens, report.train.label_tokens) == (
        3,
        1,
        5,
        3,
    )
    assert report.trained_share == 3 / 5
    summary = report.summary()
    assert "\n" not in summary
    for part in ("6 rows read", "3 bad rows skipped", "1 too long and dropped", "60.0% of them trained"):
        assert part in summary
    assert any(f"3 of 6 rows were malformed and skipped: {path}:2: not JSON" in w for w in report.warnings)


@pytest.mark.parametrize(
    ("strategy", "pieces", "field"), [("left", 1, "truncated"), ("right", 1, "truncated"), ("split", 2, "split")]
)
def test_long_documents_are_treated_as_asked(run: Prepare, strategy: str, pieces: int, field: str) -> None:
    data = run([{"text": " ".join(f"w{i}" for i in range(3, 23))}], truncation_strategy=strategy)
    assert len(data.train) == pieces
    assert getattr(data.report.train, field) == 1
    assert f"1 too long and {'cut' if field == 'truncated' else 'split'}" in data.report.summary()


def test_a_second_run_reads_the_cache_and_gets_the_same(run: Prepare, document_rows: Any) -> None:
    first, second = run(document_rows), run(document_rows)
    assert [d.cached for d in first.report.datasets] == [False]
    assert [d.cached for d in second.report.datasets] == [True]
    assert first.digest == second.digest
    assert tokens_of(first.train) == tokens_of(second.train)
    assert dataclasses.replace(second.report, datasets=first.report.datasets) == first.report


def test_the_digest_does_not_depend_on_where_the_data_lie(run: Prepare, document_rows: Any) -> None:
    assert run(document_rows).digest == run(document_rows, name="elsewhere.jsonl").digest


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_len": 20},
        {"truncation_strategy": "split"},
        {"sample_packing": False},
        {"validation_split_ratio": 0.5},
        {"entry": {"prompt_words": 2}},
        {"entry": {"samples": 30}},
    ],
)
def test_the_digest_changes_with_what_shapes_the_rows(run: Prepare, document_rows: Any, change: dict[str, Any]) -> None:
    assert run(document_rows, sequence_len=14).digest != run(document_rows, **{"sequence_len": 14} | change).digest


def test_the_cache_is_not_used_for_another_tokenizer_template_or_format_version(
    write_rows: Any, make_config: Any, make_tokenizer: Any, words: Any, document_rows: Any
) -> None:
    config = make_config(write_rows(document_rows))

    def cached(tokenizer: Any, format_: Any = words) -> bool:
        return prepare(config, tokenizer, {"words": format_}).report.datasets[0].cached

    assert [cached(make_tokenizer()), cached(make_tokenizer())] == [False, True]
    assert not cached(make_tokenizer(101))
    assert not cached(make_tokenizer(chat_template="{{ messages }}"))
    assert not cached(make_tokenizer(additional_special_tokens=["<x>"]))
    assert not cached(make_tokenizer(), dataclasses.replace(words, version=2))
    padded = make_tokenizer()
    padded(["w3 w4", "w3"], padding=True)  # the last call's settings are not the tokenizer's
    assert cached(padded)


def test_a_torn_shard_is_made_again(run: Prepare, document_rows: Any, tmp_path: Path) -> None:
    documents = tokens_of(run(document_rows).train)
    for file in (tmp_path / "cache").glob("*/*/*s"):
        file.write_bytes(file.read_bytes()[:-4])
    second = run(document_rows)
    assert not second.report.datasets[0].cached
    assert tokens_of(second.train) == documents


def test_the_held_out_split_is_by_document_and_seed(run: Prepare) -> None:
    rows = [{"text": " ".join(f"w{(i * 7 + j * 11) % 97}" for j in range(4 + i % 25))} for i in range(30)]
    keys = {"validation_split_ratio": 0.2, "truncation_strategy": "split"}
    data, again, other = run(rows, **keys), run(rows, **keys), run(rows, **keys, eval_seed=5)
    assert data.eval is not None
    assert again.eval is not None
    assert other.eval is not None
    assert data.report.eval is not None
    assert (data.report.train.documents, data.report.eval.documents) == (24, 6)
    assert not tokens_of(data.train) & tokens_of(data.eval)
    assert tokens_of(data.eval) == tokens_of(again.eval) != tokens_of(other.eval)
    assert data.digest == again.digest != other.digest
    assert data.train.max_documents == data.eval.max_documents


def test_validation_data_sets_are_kept_apart(run: Prepare, write_rows: Any, document_rows: Any) -> None:
    held = write_rows(document_rows[:7], "held.jsonl")
    data = run(document_rows, validation_datasets=[{"path": str(held), "type": "words"}], validation_split_ratio=0.5)
    assert data.report.eval is not None
    assert (data.report.train.documents, data.report.eval.documents) == (40, 7)
    assert [d.key for d in data.report.datasets] == ["datasets[0]", "validation_datasets[0]"]


def test_several_data_sets_are_joined(
    make_config: Any, write_rows: Any, tokenizer: Any, formats: Any, document_rows: Any
) -> None:
    config = make_config(write_rows(document_rows[:20]))
    more = {"path": str(write_rows(document_rows[20:], "more.jsonl")), "type": "words"}
    joined = prepare(dataclasses.replace(config, datasets=[*config.datasets, more]), tokenizer, formats)
    alone = prepare(make_config(write_rows(document_rows, "all.jsonl")), tokenizer, formats)
    assert tokens_of(joined.train) == tokens_of(alone.train)


def test_progress_ends(write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any) -> None:
    events: list[Progress] = []
    prepare(make_config(write_rows(document_rows)), tokenizer, formats, progress=events.append)
    assert events[-2:] == [
        Progress(task="tokenise rows.jsonl", done=40, total=40, unit="rows"),
        Progress(task="pack", done=40, total=40, unit="documents"),
    ]


# ------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        ([], {}, r"datasets\[0\]: data set .*rows\.jsonl has no rows"),
        (["", ""], {}, "has no rows"),
        ([{"txt": "w3"}] * 3, {}, r"no usable row among 3.*rows\.jsonl:1: field 'text' is missing"),
        ([{"text": "w3 w4"}, *["x"] * 4], {"max_bad_rows": 3}, r"more than max_bad_rows=3 .*rows\.jsonl:2: not JSON"),
        ([{"text": "w3 " * 20}], {}, "none of the 1 documents fits into sequence_len=16.*truncation_strategy"),
        (
            [{"text": "w3 " * 60}],
            {"entry": {"prompt_words": 40}, "truncation_strategy": "right"},
            "none of the 1 documents has a trained token left within sequence_len=16 .* truncation_strategy to left",
        ),
    ],
)
def test_unusable_data_are_one_clear_line(run: Prepare, rows: Any, keys: Any, expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=expected) as caught:
        run(rows, **keys)
    assert "Fix: " in str(caught.value)
    assert "\n" not in str(caught.value)
    left = [path.name for path in (tmp_path / "cache").rglob("*.tmp-*")]
    assert left == []


def test_bad_rows_count_over_all_data_sets_and_from_the_cache(run: Prepare, write_rows: Any) -> None:
    held = write_rows([{"text": "w3 w4"}, "x", "x"], "held.jsonl")
    rows = [{"text": "w3 w4"}, "x", "x"]
    keys = {"validation_datasets": [{"path": str(held), "type": "words"}]}
    assert run(rows, max_bad_rows=4, **keys).report.bad_row_count == 4
    assert run(rows, max_bad_rows=4, **keys).report.bad_row_count == 4
    with pytest.raises(UserError, match="max_bad_rows=3"):
        run(rows, max_bad_rows=3, **keys)


def test_a_format_that_fails_is_not_a_bad_row(write_rows: Any, make_config: Any, tokenizer: Any, words: Any) -> None:
    def broken(row: Any, options: Any, context: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(FormatError, match="data set type 'words': ZeroDivisionError"):
        prepare(make_config(write_rows([{}])), tokenizer, {"words": dataclasses.replace(words, encode=broken)})


def test_a_reason_is_one_short_line_that_can_be_logged() -> None:
    reason = BadRow.of("a:1", RowError("the row has\n\ud800" + "x" * 1000)).reason
    assert reason.startswith("the row has \\ud800xxx")
    assert len(reason) < 400
    reason.encode()


def test_no_data_sets_at_all(make_config: Any, tokenizer: Any, formats: Any) -> None:
    with pytest.raises(UserError, match=r"`datasets` is empty\. Fix"):
        prepare(dataclasses.replace(make_config("x"), datasets=[]), tokenizer, formats)


def test_a_task_of_groups_refuses_single_documents(make_config: Any, tokenizer: Any, formats: Any) -> None:
    pairs = DatasetFormat(name="pairs", options=NoOptions, encode=formats["words"].encode, tasks=("sft",))
    with pytest.raises(UserError, match=r"type words, whose rows are single documents; .* Fix: data of type pairs\."):
        prepare(make_config("x"), tokenizer, {**formats, "pairs": pairs}, group=2)


def test_all_mistakes_of_entries_are_reported_together(formats: Any) -> None:
    entries = [
        {"path": "a.jsonl", "type": "wrds"},
        {"type": "words", "feild": "x"},
        {"path": "b.jsonl", "type": "words", "samples": "many", "prompt_words": "two"},
        {"path": "c.jsonl"},
        {"path": "d.jsonl", "type": "words", "splt": "train", "samples": -1},
    ]
    with pytest.raises(ConfigError) as caught:
        parse_entries(entries, formats, key="datasets")
    found = {problem.key: str(problem) for problem in caught.value.problems}
    assert set(found) == {
        "datasets[0].type", "datasets[1].path", "datasets[1].feild", "datasets[2].samples",
        "datasets[2].prompt_words", "datasets[3].type", "datasets[4].splt", "datasets[4].samples",
    }  # fmt: skip
    assert "did you mean words?" in found["datasets[0].type"]
    assert "did you mean field?" in found["datasets[1].feild"]
    assert "did you mean split?" in found["datasets[4].splt"]


# -------------------------------------------------------------------------------- warnings


@pytest.mark.parametrize(
    ("prompt_words", "expected"), [(0, "every token is trained"), (199, "only 0.50% of the tokens are trained")]
)
def test_everything_or_nothing_trained_is_warned_of(run: Prepare, prompt_words: int, expected: str) -> None:
    data = run([{"text": "w3 " * 200}], sequence_len=300, entry={"prompt_words": prompt_words})
    assert any(expected in warning for warning in data.report.warnings)


def test_many_dropped_documents_are_warned_of(run: Prepare) -> None:
    data = run([{"text": "w3 " * 20}, {"text": "w3 w4 <e>"}])
    assert any("1 of 2 training documents are longer than sequence_len=16" in w for w in data.report.warnings)


def test_documents_of_which_no_trained_token_is_left_are_warned_of(
    write_rows: Any, make_config: Any, tokenizer: Any, formats: Any
) -> None:
    path = write_rows([{"text": f"{'w3 ' * 40}<e>"}])
    config = make_config(path, truncation_strategy="right")
    late = {**config.datasets[0], "prompt_words": 30}
    both = dataclasses.replace(config, datasets=[*config.datasets, late])
    warning = "1 of 2 training documents have no trained token within sequence_len=16 and were dropped"
    assert any(warning in w for w in prepare(both, tokenizer, formats).report.warnings)
    left = dataclasses.replace(both, truncation_strategy="left")
    assert not any("no trained token" in w for w in prepare(left, tokenizer, formats).report.warnings)


def test_documents_without_a_trained_end_are_warned_of(run: Prepare) -> None:
    assert any("learn to stop" in w for w in run([{"text": "w3 w4 w5"}]).report.warnings)
    assert not run([{"text": "w3 w4 <e>"}], entry={"prompt_words": 2}).report.warnings


def test_weights_mix_data_sets(write_rows: Any, make_config: Any, tokenizer: Any, formats: Any) -> None:
    sizes = {"a": 40, "b": 20}
    words = {"a": 3, "b": 4}
    paths = [write_rows([{"text": f"w{words[n]} w{i + 10}"} for i in range(sizes[n])], f"{n}.jsonl") for n in sizes]

    def mixed(*weights: float, **keys: Any) -> PreparedData:
        sets = [{"path": str(p), "type": "words", "weight": w} for p, w in zip(paths, weights, strict=True)]
        config = dataclasses.replace(make_config("unused", **keys), datasets=sets)
        return prepare(config, tokenizer, formats)

    def counts(data: PreparedData) -> tuple[int, ...]:
        ids = np.concatenate([data.train.row(i).input_ids for i in range(len(data.train))])
        return tuple(int((ids == word).sum()) for word in words.values())

    assert counts(mixed(1, 1)) == (40, 20)
    assert counts(mixed(0.5, 2.25)) == (20, 45)
    report = mixed(0.5, 2.25).report
    assert report.mixture == pytest.approx((20 / 65, 45 / 65))
    assert "30.8% datasets[0]" in report.summary()
    assert mixed(1, 1).report.mixture == pytest.approx((40 / 60, 20 / 60))
    assert mixed(0.5, 2.25).digest == mixed(0.5, 2.25).digest
    assert len({d.digest for d in (mixed(1, 1), mixed(0.5, 2.25), mixed(0.5, 2.25, train_seed=7))}) == 3
    held = [mixed(*weights, validation_split_ratio=0.25).eval for weights in ((1, 1), (1, 3))]
    assert held[0] is not None
    assert held[1] is not None
    assert held[0].stats.documents == 15
    assert held[0].digest == held[1].digest


def test_a_held_out_data_set_has_no_weight(formats: Any) -> None:
    entry = {"path": "x.jsonl", "type": "words", "weight": 2}
    with pytest.raises(ConfigError, match=r"validation_datasets\[0\]\.weight"):
        parse_entries([entry], formats, key="validation_datasets")
    with pytest.raises(ConfigError, match="weight"):
        parse_entries([{**entry, "weight": 0}], formats, key="datasets")


def test_max_length_cuts_shorter_than_a_row(run: Prepare) -> None:
    rows = [{"text": " ".join(f"w{3 + i}" for i in range(12))}]
    data = run(rows * 3, max_length=8, truncation_strategy="right")
    assert data.train.row(0).lengths == (8, 8)
    assert run(rows * 3, max_length=8, truncation_strategy="split").train.row(0).lengths == (8, 8)
    assert run(rows * 3, max_length=12).train.row(0).lengths == (12,)
    with pytest.raises(UserError, match="fits into max_length=8"):
        run(rows * 3, max_length=8)


def test_files_that_are_not_read_are_named_once(
    write_rows: Any, make_config: Any, tokenizer: Any, formats: Any, document_rows: Any, tmp_path: Path
) -> None:
    write_rows(document_rows[:6], "d/rows.jsonl")
    write_rows(document_rows[:2], "d/test.jsonl")
    (tmp_path / "d" / "notes.txt").write_text("x")
    for _ in range(2):  # the second time from the cache
        report = prepare(make_config(tmp_path / "d"), tokenizer, formats).report
        (warning,) = [text for text in report.warnings if "notes.txt" in text]
        assert "1 file is not read: notes.txt (files ending in '.txt' cannot be read)." in warning
        assert "leaves out test.jsonl (split test)." in report.summary()


@pytest.mark.parametrize("kind", ["documents", "rows"])
def test_a_flipped_byte_of_the_cache_is_mended_with_a_notice(
    run: Prepare, document_rows: Any, tmp_path: Path, kind: str
) -> None:
    first = run(document_rows)
    expected = tokens_of(first.train)
    path = next(p for name in ("tokens", "pieces") for p in tmp_path.rglob(f"{kind}/*/{name}"))
    content = bytearray(path.read_bytes())
    content[8] ^= 1
    path.write_bytes(content)
    again = run(document_rows)
    (notice, *others) = again.report.warnings
    assert tuple(others) == first.report.warnings
    assert f"{path.name} is not what was written; it was rebuilt" in notice
    assert tokens_of(again.train) == expected
    assert run(document_rows).report.warnings == first.report.warnings


def test_copies_of_a_document_are_on_one_side_of_the_split_and_counted(run: Prepare) -> None:
    rows = [{"text": f"w{3 + i // 3} w{40 + i // 3} w5"} for i in range(60)]
    data = run(rows, validation_split_ratio=0.2)
    assert data.eval is not None
    assert not tokens_of(data.train) & tokens_of(data.eval)
    assert data.report.copies == 40
    assert "40 documents are copies of others, all on one side of the split" in data.report.summary()


def test_the_split_of_documents_that_differ_is_what_it_was(run: Prepare) -> None:
    """The digest names the rows in checkpoints; it was recorded before copies were kept together."""
    data = run([{"text": f"w{3 + i} w{40 - i} w5"} for i in range(30)], validation_split_ratio=0.2)
    assert data.report.copies == 0
    assert "copies" not in data.report.summary()
    assert data.digest == "b828732f6f34b0221cdc78eae44ec01258ea3e338287f7e36d510eaa5f591eeb"


def test_validation_documents_that_are_trained_on_are_counted(
    run: Prepare, write_rows: Any, document_rows: Any
) -> None:
    held = write_rows([*document_rows[:3], {"text": "w3 w9 w4"}], "held.jsonl")
    data = run(document_rows, validation_datasets=[{"path": str(held), "type": "words"}])
    (warning,) = [text for text in data.report.warnings if "are in datasets too" in text]
    assert warning.startswith("3 of 4 documents of validation_datasets")
