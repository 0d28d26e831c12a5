"""scripts/fuzz_data.py: broken data is read or refused cleanly, whatever it is."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fuzz_data.py"


@pytest.fixture(scope="module")
def fuzz_data() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz_data"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("cases", "least_read", "least_refused"), [(30, 3, 10), pytest.param(500, 50, 200, marks=pytest.mark.slow)]
)
def test_no_data_set_breaks_the_pipeline(
    cases: int, least_read: int, least_refused: int, fuzz_data: ModuleType
) -> None:
    counts = fuzz_data.fuzz(cases, start=1)
    shown = "\n\n".join(f"{key}\n{first}" for key, (_, first) in counts.failures.items())
    assert not counts.failures, shown
    assert counts.cases >= cases
    assert counts.successes.total() >= least_read, "cases are too broken to say much"
    assert counts.refusals.total() >= least_refused, "cases are too tame to say much"


@pytest.mark.parametrize("special", ["loop", "broken link", "link to itself", "broken link inside", "absent"])
def test_things_that_are_no_files(special: str, fuzz_data: ModuleType) -> None:
    directory = special in ("loop", "broken link inside")
    case = fuzz_data.Case(
        kind=special,
        special=special,
        files=(("d/in.jsonl", b'{"text": "some text"}\n'),) if directory else (),
        path="d" if directory else "f.jsonl",
        entry={"type": "text"},
        keys={"sequence_len": 64, "validation_split_ratio": 0.0},
        template="own",
    )
    counts = fuzz_data.Counts()
    fuzz_data.run_case(case, counts)
    assert not counts.failures, counts.failures
    assert counts.successes.total() == int(directory)


def test_the_check_finds_what_it_is_for(fuzz_data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> object:
        return fuzz_data.Case(
            kind="text",
            files=(("f.jsonl", b'{"text": "some text"}\n'),),
            path="f.jsonl",
            entry={"type": "text"},
            keys={"sequence_len": 64, "validation_split_ratio": 0.0},
            template="own",
        )

    from surogate_core.data import pipeline
    from surogate_core.errors import UserError

    def raising(error: Exception) -> None:
        def prepare(*args: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(pipeline, "prepare", prepare)

    for error, words in (
        (KeyError("x"), "KeyError in"),
        (UserError("two\nlines in f.jsonl"), "unprintable"),
        (UserError("something is wrong"), "does not name the data"),
    ):
        raising(error)
        counts = fuzz_data.Counts()
        fuzz_data.run_case(case(), counts)
        assert [key for key in counts.failures if words in key], counts


def test_the_check_finds_a_lost_row(fuzz_data: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    case = fuzz_data.Case(
        kind="text",
        files=(("f.jsonl", b'{"text": "one"}\n[{"text": "two"}, {"text": "three"}]\n'),),
        path="f.jsonl",
        entry={"type": "text"},
        keys={"sequence_len": 64, "validation_split_ratio": 0.0},
        template="own",
    )
    counts = fuzz_data.Counts()
    fuzz_data.run_case(case, counts)
    assert not counts.failures, counts.failures
    monkeypatch.setattr("surogate_core.data.rows.json_rows._line_rows", lambda line: iter(()))
    fuzz_data.run_case(case, counts)
    ((_, detail),) = counts.failures.values()
    assert "3 rows in the file, 1 read" in detail
