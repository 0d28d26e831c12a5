"""The run of all figures that need four GPUs: its commands are ones that the other scripts know."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import equal_bits
import four_gpus
import kill_rank
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
            makers = {"several_gpus.py": several_gpus.make_parser, "equal_bits.py": equal_bits.make_parser}
            if script in makers:
                makers[script]().parse_args(words)
            if "--only" in words:
                assert set(words[words.index("--only") + 1 :]) <= known[script].keys()


LANE = """
import os, subprocess, sys, time
print(os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1], flush=True)
if sys.argv[2] == "600":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""


def test_lanes_run_side_by_side_and_each_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stopped leaves no process behind, also none in a session of its own."""
    monkeypatch.setattr(four_gpus, "words_of", lambda command, place, options: [sys.executable, "-c", LANE, *command])
    monkeypatch.setitem(four_gpus.PARTS, "lanes", [[["a", "0"], ["b", "3"]], [["c", "600"], ["d", "0"]]])
    begun, failed = four_gpus.run_part("lanes", options_of(tmp_path), time.monotonic() + 3)
    assert sorted(begun) == ["lanes.0.0", "lanes.0.1", "lanes.1.0"]
    assert failed == ["lanes.0.1: exit status 3", "lanes.1.0: stopped", "lanes.1.1: no time"]
    logs = {log.parent.name: log.read_text().split() for log in tmp_path.glob("*/log")}
    *said, child = logs.pop("lanes.1.0")
    assert said == ["1", "c"]
    assert not kill_rank.is_running(int(child))
    assert logs == {"lanes.0.0": ["0", "a"], "lanes.0.1": ["0", "b"]}
