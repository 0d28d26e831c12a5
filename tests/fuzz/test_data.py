"""Data files of any bytes, by scripts/fuzz_data.py: read, or refused by name, and the second reading is the first."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/fuzz_data.py"


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_data_files() -> None:
    spec = importlib.util.spec_from_file_location("fuzz_data_many", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    fuzz_data = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = fuzz_data
    spec.loader.exec_module(fuzz_data)
    counts = fuzz_data.fuzz(2500, start=4)
    sys.stdout.write(f"\n{counts.summary()}\n")
    shown = "\n\n".join(f"{times} times: {what}\n{first}" for what, (times, first) in counts.failures.items())
    assert not counts.failures, shown
    assert counts.cases >= 2500
    assert counts.successes.total() >= 250, "the cases are too broken to say much"
