"""The table of benchmarks/gpu_recipes.py, with fake processes instead of those that need a GPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gpu_recipes
import pytest

RESULT: dict[str, Any] = {
    "device": "a GPU",
    "gemm_tflops": 700.0,
    "tokens_per_second": 10_000.0,
    "milliseconds": 3.0,
    "peak_gib": 2.0,
    "losses": [3.0, 2.0],
    "profile": None,
}
PROCESS = """
import sys, time
def turn(said):
    print("gpu_recipes: " + said, flush=True)
    sys.stdin.readline()
    with open(sys.argv[1], "a") as log:
        print(said, sys.argv[-1], file=log)
turn("imported")
if "dies" in sys.argv:
    raise SystemExit("out of memory")
print("a library's words", flush=True)
turn("ready")
time.sleep(0.1)
with open(sys.argv[1], "a") as log:
    print("timed", sys.argv[-1], file=log)
print("gpu_recipes: " + sys.argv[2], flush=True)
"""


def lines(place: Path, *names: str) -> list[gpu_recipes.Line]:
    command = [sys.executable, "-c", PROCESS, str(place / "order"), json.dumps(RESULT)]
    return [gpu_recipes.Line([name], place / f"{name}.log", command) for name in names]


def test_lines_are_set_up_side_by_side_and_timed_one_after_another(tmp_path: Path) -> None:
    assert gpu_recipes.run(lines(tmp_path, "a", "b", "c"), together=2) == [RESULT] * 3
    order = (tmp_path / "order").read_text().splitlines()
    assert sorted(order[:2]) == ["imported a", "imported b"]
    assert order[2:6] == ["ready a", "timed a", "ready b", "timed b"]
    assert order[6:] == ["imported c", "ready c", "timed c"]


def test_a_line_that_fails_costs_only_itself(tmp_path: Path) -> None:
    found = gpu_recipes.run(lines(tmp_path, "a", "dies", "c"), together=3)
    assert found == [RESULT, {"error": "out of memory"}, RESULT]


def test_the_table() -> None:
    options = gpu_recipes.make_parser().parse_args(["--sizes", "8b", "--full", "1.7b"])
    wanted = gpu_recipes.configurations(options)
    assert wanted == [
        ("8b", False, "bf16"),
        ("8b", False, "fp8-hybrid"),
        ("1.7b", True, "bf16"),
        ("1.7b", True, "fp8-hybrid"),
    ]
    profile = {"idle": 0.01, "launches": 7, "milliseconds_by_kind": {"products": 2.0}, "kernels": []}
    results: list[dict[str, Any]] = [
        RESULT,
        {**RESULT, "tokens_per_second": 15_000.0, "profile": profile},
        {"error": "a | b"},
        RESULT,
    ]
    rows = [{"size": s, "full": f, "recipe": r, **x} for (s, f, r), x in zip(wanted, results, strict=True)]
    text = gpu_recipes.markdown(rows)
    assert "| 8b | LoRA | bf16 | 10.0k |  | 3.0 | 2.0 | 3.000 … 2.000 |" in text
    assert "| 8b | LoRA | fp8-hybrid | 15.0k | 1.50 | 3.0 | 2.0 | 3.000 … 2.000 |" in text
    assert "| 1.7b | all weights | bf16 | failed: a \\| b |" in text
    assert "| 1.7b | all weights | fp8-hybrid | 10.0k |  |" in text, "nothing to divide by"
    assert "8b, LoRA, fp8-hybrid: idle 1.0%, 7 launches a step" in text
    assert "nothing ran" in gpu_recipes.markdown([{"size": "8b", "full": False, "recipe": "bf16", "error": "no GPU"}])


@pytest.mark.parametrize("written", ["", "Traceback\nValueError: no such thing\n\n"])
def test_what_a_process_wrote_last_is_its_error(tmp_path: Path, written: str) -> None:
    code = f"import sys; sys.stderr.write({written!r}); sys.exit(7)"
    line = gpu_recipes.Line([], tmp_path / "log", [sys.executable, "-c", code])
    assert gpu_recipes.run([line], together=1) == [{"error": written.strip().split("\n")[-1] or "exit status 7"}]
