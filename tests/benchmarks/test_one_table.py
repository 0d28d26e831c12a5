"""The one table: its commands are ones that the other scripts know, and its rows are what these wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import generate
import gpu_peers
import grpo
import lanes
import one_table
import pytest
import several_gpus
import several_gpus_peers


def none(side: str) -> str:
    return ""


def test_each_part_names_cases_that_its_script_has() -> None:
    known = {
        "gpu_peers.py": gpu_peers.PEERS,
        "several_gpus.py": several_gpus.CASES,
        "several_gpus_peers.py": several_gpus_peers.CASES,
        "generate.py": {*generate.FORMATS, "vllm"},
        "grpo.py": {*grpo.KINDS, *grpo.PEERS},
    }
    for part in one_table.PARTS.values():
        for script, *words in part.of(none):
            (last,) = [n for n, word in enumerate(words) if word in ("--peers", "--only", "--cases")]
            assert words[last + 1 :]
            assert set(words[last + 1 :]) <= set(known[script])
        for work in part.works:
            assert one_table.OURS in work.sides
            assert set(work.sides) - {one_table.OURS, "Surogate, LoRA not merged"} <= one_table.NEEDS.keys()


def test_sides_that_lack_a_package_are_left_out() -> None:
    commands = one_table.PARTS["grpo"].of(lambda side: "not installed (vllm)" if "vLLM" in side else "")
    assert commands[0][-2:] == ["lora", "trl-lora"]
    (row,) = (
        row
        for row in one_table.rows_of("grpo", one_table.PARTS["grpo"], [Path("nowhere")], one_table.lack)
        if row.side == one_table.OURS
    )
    assert row.error == "no result"


def write(script: str, place: Path, command: Sequence[str]) -> None:
    """What a script leaves, in which FSDP2 fails and every peer has half of our speed."""
    place.mkdir(parents=True, exist_ok=True)

    def one(case: str) -> dict[str, Any]:
        ours = case in ("surogate", "bf16", "lora") or "level 1" in case
        found: dict[str, Any] = {"tokens_per_second": 2e3 if ours else 1e3, "memory": 3.0, "peak_gib": 4.0}
        if "FSDP2" in case:
            found = {"error": "log\nout of memory"}
        return {
            "case": case,
            "side": case,
            "again": False,
            "samples": 4,
            "new": 500,
            "seconds": 1 if ours else 2,
        } | found

    cases = [one(case) for case in command[max(n for n, word in enumerate(command) if word[:2] == "--") + 1 :]]
    if script == "gpu_peers.py":
        found: Any = {"lines": [*cases, one("surogate"), one("surogate") | {"again": True, "tokens_per_second": 1.0}]}
    elif script.startswith("several"):
        lines = [json.dumps(case) for case in cases]
        (place / script).with_suffix(".jsonl").write_text("\n".join(lines))
        return
    elif script == "one_table.py":
        place, found = place / "rate", {"card": "a GPU", "tflops": 800.0}
        place.with_suffix(".json").write_text(json.dumps(found))
        return
    else:
        found = cases
    (place / script).with_suffix(".json").write_text(json.dumps(found))


def test_the_table_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(name: str, wanted: Sequence[lanes.Lane], out: Path, until: float, words: lanes.Words) -> Any:
        ((gpus, commands),) = wanted
        assert gpus is None
        for number, command in enumerate(commands):
            words(command, out)
            write(command[0], out / f"{name}.0.{number}", command)
            (out / f"{name}.0.{number}" / "log").write_text("said")
        return [f"{name}.0.{number}" for number in range(len(commands))], ["x: stopped"] if name == "grpo" else []

    monkeypatch.setattr(lanes, "run", run)
    monkeypatch.setattr(one_table, "lack", lambda side: "not installed (unsloth)" if side == "Unsloth" else "")
    assert one_table.main(["--out", str(tmp_path)]) == 1
    report = json.loads((tmp_path / "one_table.json").read_text())
    assert [one["part"] for one in report["rates"]] == [*one_table.PARTS, one_table.END]
    assert "torch" in report["versions"]
    rows = {(row["work"], row["side"]): row for row in report["rows"]}
    assert rows["0.6B LoRA", "transformers + PEFT"]["ours_over_this"] == 2.0
    assert [side for work, side in rows if work == "8B LoRA, a row of 8192"] == ["Surogate", "Unsloth"]
    assert rows["8B all weights, FP8", "torchtitan float8"]["ours_over_this"] == 2.0
    assert rows["8B all weights, FP8", "FSDP2 float8"]["error"].endswith("out of memory")
    assert rows["qwen3-0.6b LoRA, 128 completions", "Surogate"]["tokens_per_second"] == 2000
    assert rows["qwen3-8b, 128 sequences", "vLLM"] == {
        "part": "generation",
        "work": "qwen3-8b, 128 sequences",
        "side": "vLLM",
        "tokens_per_second": 1e3,
        "gib": 3.0,
        "error": None,
        "ours_over_this": 2.0,
    }
    text = (tmp_path / "one_table.md").read_text()
    assert text in capsys.readouterr().out
    assert "a GPU; torch" in text
    assert (
        "800 before lora, 800 before rows, 800 before full, 800 before generation, 800 before grpo, 800 at the end."
        in text
    )
    assert "| 0.6B LoRA | Unsloth | not installed (unsloth) |  |  |" in text
    assert "| 4B all weights, bf16 | FSDP2 | out of memory |  |  |" in text
    assert text.endswith("- x: stopped\n")
    assert {row.count("|") for row in text.splitlines() if row.startswith("|")} == {6}


def test_tables_of_runs_side_by_side_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(part: str, failed: list[str]) -> dict[str, Any]:
        row = one_table.Row(part=part, work=f"work of {part}", side="vLLM", tokens_per_second=5.0)
        rates = [{"part": part, "tflops": 800.0}]
        return {"card": "a GPU", "versions": f"of {part}", "rates": rates, "rows": [asdict(row)], "failed": failed}

    for part, failed in (("grpo", []), ("lora", ["lora.0.1: stopped"])):
        (tmp_path / part).mkdir()
        one_table.write(report(part, failed), tmp_path / part)
    words = ["--out", str(tmp_path), "--join", str(tmp_path / "grpo"), str(tmp_path / "lora")]
    assert one_table.main(words) == 1
    text = (tmp_path / "one_table.md").read_text()
    assert text in capsys.readouterr().out
    assert text.startswith(
        "a GPU; of grpo; of lora.\nProduct of 8192³ in bf16, TFLOP/s: 800 before grpo, 800 before lora."
    )
    assert text.index("work of lora") < text.index("work of grpo") < text.index("- lora.0.1: stopped")


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path), "--device", "cpu", "--tiny", "--budget", "200"]
    assert one_table.main([*words, "--only", "generation"]) == 0
    report = json.loads((tmp_path / "one_table.json").read_text())
    assert all(row["tokens_per_second"] for row in report["rows"] if row["side"].startswith(one_table.OURS))
    assert len(report["rates"]) == 2
