"""Data files of any bytes, by scripts/fuzz_data.py: read, or refused by name, and the second reading is the first."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import fuzzing
import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fuzz_data.py"


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", fuzzing.numbers(0, 250, 2500)[1:])
def test_data_files(number: int) -> None:
    spec = importlib.util.spec_from_file_location("fuzz_data_many", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    fuzz_data = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fuzz_data
    spec.loader.exec_module(fuzz_data)
    counts = fuzz_data.fuzz(number, start=4)
    sys.stdout.write(f"\n{counts.summary()}\n")
    shown = "\n\n".join(f"{times} times: {what}\n{first}" for what, (times, first) in counts.failures.items())
    assert not counts.failures, shown
    assert counts.cases >= number
    assert counts.successes.total() >= number / 10, "the cases are too broken to say much"
