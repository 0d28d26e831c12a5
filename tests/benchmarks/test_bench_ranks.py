"""Groups of ranks of the benchmarks: what they return, what a failure costs, and that none is left."""

from __future__ import annotations

import io
import os
from pathlib import Path

import bench_ranks
import pytest

RANK = f"""
import json, os, sys, time
sys.path.insert(0, {str(Path(bench_ranks.__file__).parent)!r})
place, rank, world = json.loads(os.environ["BENCH_RANK"])
work = json.loads(open(place + "/work").read())
sys.stdin.readline()
print("library's words")
if work["fails"] == rank:
    raise ValueError("no such thing")
if work["killed"] == rank:
    os.kill(os.getpid(), 9)
if work["waits"] or work["fails"] == 1 - rank:
    time.sleep(60)
open(place + "/result-" + str(rank), "w").write(json.dumps([rank, world, os.environ.get("CUDA_VISIBLE_DEVICES")]))
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(bench_ranks, "GRACE", 0.0)
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    return str(file)


def begin(script: str, world: int = 2, **changes: object) -> bench_ranks.Group:
    return bench_ranks.begin({"fails": None, "killed": None, "waits": False} | changes, world, script=script)


def test_every_rank_returns_something_and_sees_its_own_gpu_first(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_ranks, "visible", lambda environment: ["3", "5", "7"])
    group = begin(script)
    group.go()
    assert group.wait(60) == {"ranks": [[0, 2, "3,5,7"], [1, 2, "5,7,3"]]}
    assert not Path(group.place.name).exists()


@pytest.mark.parametrize(
    ("changes", "limit", "said"),
    [
        ({"fails": 1}, 60, "rank 1: ValueError: no such thing"),
        ({"killed": 0}, 60, "rank 0: killed by SIGKILL"),
        ({"waits": True}, 0.1, "took longer than its limit"),
    ],
)
def test_a_failure_ends_the_group(script: str, changes: dict[str, object], limit: float, said: str) -> None:
    group = begin(script, **changes)
    group.go()
    assert group.wait(limit)["error"] == said
    for process in group.processes:
        assert process.returncode is not None
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)


def test_a_rank_ends_if_its_parent_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").write_text("{}")
    monkeypatch.setenv(bench_ranks.VARIABLE, f'["{tmp_path}", 0, 1]')

    def ended(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", ended)
    with pytest.raises(SystemExit) as found:
        bench_ranks.run_rank(lambda work, mesh: pytest.fail("it has work to do"), stdin=io.StringIO(""))
    assert found.value.code == 1
    assert not bench_ranks.is_rank()


def test_the_cause_of_a_failure() -> None:
    assert bench_ranks.cause("[rank1]: Traceback\n[rank1]: TypeError: no\nwarning\n\n") == "TypeError: no"
    assert bench_ranks.cause("torch.OutOfMemoryError: CUDA out of memory\nValueError: x") == "out of memory"
    assert bench_ranks.cause("first\nlast\n") == "last"
    assert bench_ranks.cause("") == ""


def test_a_world_of_one_shares_nothing(tmp_path: Path) -> None:
    assert bench_ranks.make_mesh(tmp_path / "store", 0, 1).store is None
