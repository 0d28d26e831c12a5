"""The run of all figures that need four GPUs: its commands are ones that the other scripts know."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import equal_bits
import four_gpus
import pytest
import several_gpus
import several_gpus_peers


def options_of(place: Path) -> argparse.Namespace:
    return argparse.Namespace(out=place, cache=None, tiny=False)


@pytest.mark.parametrize("name", four_gpus.PARTS)
def test_each_part_names_cases_that_its_script_has(name: str, tmp_path: Path) -> None:
    known = {
        "several_gpus.py": several_gpus.CASES,
        "several_gpus_peers.py": several_gpus_peers.CASES,
        "equal_bits.py": equal_bits.CASES,
    }
    for _, commands in four_gpus.lanes_of(four_gpus.PARTS[name]):
        for script, *words in commands:
            python, file, *_ = four_gpus.words_of((script, *words), tmp_path, options_of(tmp_path))
            assert python == sys.executable
            assert Path(file).is_file()
            if "--only" in words:
                assert set(words[words.index("--only") + 1 :]) <= known[script].keys()


def test_lanes_run_side_by_side_and_each_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = "import os, sys, time; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1]); time.sleep(int(sys.argv[2]))"
    monkeypatch.setattr(four_gpus, "words_of", lambda command, place, options: [sys.executable, "-c", said, *command])
    monkeypatch.setitem(four_gpus.PARTS, "lanes", [[["a", "0"], ["b", "0"]], [["c", "600"], ["d", "0"]]])  # type: ignore[index]
    failed = four_gpus.run_part("lanes", options_of(tmp_path), time.monotonic() + 3)
    assert failed == ["lanes.1.0: stopped", "lanes.1.1: no time"]
    logs = {log.parent.name: log.read_text().split() for log in tmp_path.glob("*/log")}
    assert logs.pop("lanes.1.0") in ([], ["1", "c"])
    assert logs == {"lanes.0.0": ["0", "a"], "lanes.0.1": ["0", "b"]}
