"""Benchmark files: what is read, what is refused with its line, and which answers are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from surogate_command_eval.benchmarks import BenchmarkOptions, Question, judged, read_benchmarks

from surogate_core.plugin import UserError


def row(match: str, *answers: str, pattern: str | None = None) -> Question:
    values: dict[str, Any] = {"name": "a:1", "prompt": "?", "messages": (), "choices": (), "right": -1}
    return Question(**values, answers=answers, match=match, pattern=pattern)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        (" Paris\n", "Paris", True),
        ("New \n York", "New York", True),
        ("Cafe\u0301", "Caf\u00e9", True),
        ("paris", "Paris", False),
        ("Paris.", "Paris", False),
    ],
)
def test_exact_compares_texts_without_their_white_space(text: str, answer: str, right: bool) -> None:
    assert judged(row("exact", answer), text).right is right
    assert judged(row("exact", "other", answer), text).right is right, "any accepted answer"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("16 - 3 - 4 = 9", "9"),
        ("10-4", "4"),
        ("it is -4.50 degrees", "-4.5"),
        ("1,234,500.00 in all,", "1234500"),
        ("x = \u221212", "-12"),
        ("about .5", "0.5"),
        ("-$5", "-5"),
        ("-0", "0"),
        ("version 1.2.3", "1.2"),
        ("123456789012345678901234567890123", "123456789012345678901234567890123"),
        ("none", None),
    ],
)
def test_number_takes_the_last_number(text: str, found: str | None) -> None:
    assert judged(row("number", "7"), text).extracted == found


def test_numbers_are_equal_by_value_and_the_answers_solution_is_read_too() -> None:
    solution = "16 - 3 - 4 = <<16-3-4=9>>9 eggs.\nShe makes 9 * 2 = $18.\n#### 18"
    for text in ("#### 18", "It is 18.0", "$18.00"):
        assert judged(row("number", solution), text).right
    assert not judged(row("number", solution), "#### 19").right


def test_regex_compares_the_group_of_the_last_match() -> None:
    letter = row("regex", "B", pattern=r"answer is \(?([A-D])\)?")
    assert judged(letter, "The answer is A. No, the answer is (B).").right
    assert judged(letter, "The answer is B. No, the answer is A.").extracted == "A"
    assert judged(letter, "B").extracted is None
    either = row("regex", "7", pattern=r"= (\d+)|is (\d+)")
    assert judged(either, "= 5, so it is 7").right, "the group that took part"
    assert judged(row("regex", "no", pattern=r"(?i)\b(yes|no)\b"), "Is it? No.").right, "a pattern that ignores case"
    assert not judged(row("regex", "no", pattern=r"\b(yes|No)\b"), "No.").right
    assert judged(row("regex", "12", pattern=r"\d+"), "11 12").right, "without a group the whole match"


def write(place: Path, *rows: object) -> str:
    place.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in rows))
    return str(place)


def test_a_file_is_read(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "answer": "1"},
        "",
        {"messages": [{"role": "user", "content": "b"}], "answer": 2.5, "match": "number"},
        {"prompt": "c", "choices": ["x", "y"], "answer": "y", "more": [1]},
        {"prompt": "d", "answer": ["one", "two"], "pattern": "(o|t).*"},
    ]
    (benchmark,) = read_benchmarks([write(tmp_path / "mixed.jsonl", *rows)], BenchmarkOptions(shots=1))
    assert benchmark.name == "mixed"
    assert [one.match for one in (*benchmark.shots, *benchmark.rows)] == ["exact", "number", "choice", "regex"]
    assert [one.name.rpartition(":")[2] for one in benchmark.rows] == ["3", "4", "5"]
    number, choice, regex = benchmark.rows
    assert number.answers == ("2.5",)
    assert number.messages == ({"role": "user", "content": "b"},)
    assert (choice.right, choice.shown) == (1, "y")
    assert regex.answers == ("one", "two")
    (benchmark,) = read_benchmarks([str(tmp_path / "mixed.jsonl")], BenchmarkOptions(shots=1, limit=2))
    assert benchmark.rows == (number, choice)


def test_a_template_makes_prompts_and_flags_are_defaults(tmp_path: Path) -> None:
    file = write(tmp_path / "g.jsonl", {"question": "2+2?", "answer": "#### 4"}, {"question": 5, "answer": "x 7"})
    (benchmark,) = read_benchmarks([file], BenchmarkOptions(prompt="Q: {question}\nA:", match="number"))
    assert [one.prompt for one in benchmark.rows] == ["Q: 2+2?\nA:", "Q: 5\nA:"]
    (benchmark,) = read_benchmarks([file], BenchmarkOptions(prompt="{question}", pattern=r"(\d+)"))
    assert [one.match for one in benchmark.rows] == ["regex", "regex"]


def test_files_of_one_name_have_their_paths_as_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [write(tmp_path / name, {"prompt": "a", "answer": "1"}) for name in ("a.jsonl", "b/a.jsonl", "c.jsonl")]
    assert [benchmark.name for benchmark in read_benchmarks(files, BenchmarkOptions())] == [*files[:2], "c"]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"prompt": "a\\ud800", "answer": "b"}', "has half of a surrogate pair, which is not text. Fix: remove it."),
        ("[1]", "is no object"),
        ({"answer": "1"}, 'has neither a text "prompt" nor a list "messages"; its keys: \'answer\''),
        ({"prompt": " ", "answer": "1"}, "the prompt is empty"),
        ({"prompt": "a", "messages": [], "answer": "1"}, 'has both "prompt" and "messages"'),
        ({"messages": "a", "answer": "1"}, "`messages` is no list of messages"),
        ({"prompt": "a"}, "has no `answer`"),
        ({"prompt": "a", "answer": []}, "`answer` is empty"),
        ({"prompt": "a", "answer": None}, "None is no text or number"),
        ({"prompt": "a", "answer": True}, "True is no text or number"),
        ({"prompt": "a", "answer": "four", "match": "number"}, "'four' has no number"),
        ({"prompt": "a", "answer": "4", "match": "close"}, "'close' is not known. Fix: choose from exact, number"),
        ({"prompt": "a", "answer": "4", "match": "regex"}, "match regex needs a `pattern`"),
        ({"prompt": "a", "answer": "4", "pattern": "("}, "is not a regular expression"),
        ({"prompt": "a", "answer": "4", "match": "exact", "pattern": "a"}, "`pattern` is for match regex"),
        ({"prompt": "a", "choices": ["x"], "answer": 0}, "`choices` is no list of two texts or more"),
        (
            {"prompt": "a", "choices": ["x", "y"], "answer": 2},
            "2 is no choice. Fix: the number of the right one, from 0",
        ),
        ({"prompt": "a", "choices": ["x", "y"], "answer": "z"}, "'z' is no choice"),
        ({"prompt": "a", "choices": ["x", "x"], "answer": "x"}, "'x' is no choice"),
        ({"prompt": "a", "answer": "x", "match": "choice"}, "`choices` is no list"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path: Path, bad: object, message: str) -> None:
    file = write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "1"}, bad)
    with pytest.raises(UserError) as error:
        read_benchmarks([file], BenchmarkOptions())
    assert str(error.value).startswith(f"{file}:2: ")
    assert message in str(error.value)
    assert "Fix: " in str(error.value)


def test_several_mistakes_are_reported_together(tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", *[{"prompt": "a"}] * 8)
    with pytest.raises(UserError) as error:
        read_benchmarks([file], BenchmarkOptions())
    lines = str(error.value).splitlines()
    assert [line.partition(": ")[0] for line in lines[:5]] == [f"{file}:{n}" for n in range(1, 6)]
    assert lines[5:] == ["and 3 more"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"match": "close"}, "match 'close': is not known"),
        ({"pattern": "("}, "is not a regular expression"),
        ({"pattern": "a", "match": "number"}, "match number reads no pattern"),
        ({"shots": -1}, "shots -1: must be a whole number of at least 0"),
        ({"limit": 0}, "limit 0: must be a whole number of at least 1"),
        ({"shots": 1}, "has 1 rows, and the first 1 are examples. Fix: fewer --shots"),
        ({"prompt": "{b}"}, "the row has no key 'b'"),
        ({"prompt": "{"}, "--prompt '{'"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        read_benchmarks([write(tmp_path / "t.jsonl", {"prompt": "a", "answer": "1"})], BenchmarkOptions(**options))
    assert message in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for file, message in ((tmp_path / "gone.jsonl", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UserError, match=message):
            read_benchmarks([str(file)], BenchmarkOptions())
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="has no row"):
        read_benchmarks([str(tmp_path / "empty.jsonl")], BenchmarkOptions())
