"""Commands in lanes: each in its order, side by side, until the time is up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import kill_rank
import lanes
import pytest

LANE = """
import os, subprocess, sys, time
print(os.environ["CUDA_VISIBLE_DEVICES"], sys.argv[1], flush=True)
if sys.argv[2] == "600":
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    print(child.pid, flush=True)
    time.sleep(600)
sys.exit(int(sys.argv[2]))
"""


def test_lanes_run_side_by_side_and_each_in_its_order(tmp_path: Path) -> None:
    """What is stopped leaves no process behind, also none in a session of its own."""
    wanted: list[lanes.Lane] = [([0], [["a", "0"], ["b", "3"]]), ([1], [["c", "600"], ["d", "0"]])]
    until = time.monotonic() + 3
    begun, failed = lanes.run(
        "lanes", wanted, tmp_path, until, lambda command, place: [sys.executable, "-c", LANE, *command]
    )
    assert sorted(begun) == ["lanes.0.0", "lanes.0.1", "lanes.1.0"]
    assert failed == ["lanes.0.1: exit status 3", "lanes.1.0: stopped", "lanes.1.1: no time"]
    logs = {log.parent.name: log.read_text().split() for log in tmp_path.glob("*/log")}
    *said, child = logs.pop("lanes.1.0")
    assert said == ["1", "c"]
    assert not kill_rank.is_running(int(child))
    assert logs == {"lanes.0.0": ["0", "a"], "lanes.0.1": ["0", "b"]}
    assert lanes.said(tmp_path / "lanes.0.0") == "0 a"


@pytest.mark.parametrize("script", ["grpo.py", "generate.py", "kill_rank.py", "gpu_peers.py", "several_gpus.py"])
def test_scripts_write_into_their_place_and_are_tiny_if_asked(script: str, tmp_path: Path) -> None:
    for tiny in (False, True):
        _, file, *words = lanes.words_of([script, "--some", "word"], tmp_path, tiny=tiny, cache=tmp_path / "cache")
        assert Path(file).name == script
        assert any(word.startswith(str(tmp_path)) for word in words)
        assert bool({"--tiny", "--small"} & set(words)) == tiny
        assert ("--cache" in words) == (script == "several_gpus.py")
