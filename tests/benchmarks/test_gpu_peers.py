"""The table of benchmarks/gpu_peers.py, on a CPU: what is run, what a failure costs, what is written."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_lora
import gpu_peers
import peers
import pytest
import torch
from surogate_model_qwen3.presets import PRESETS

from surogate_core.batch import IGNORE_LABEL, MicroBatch

LINE = gpu_peers.Line(
    size="tiny",
    mode="lora",
    documents="row",
    recompute=False,
    side=gpu_peers.OURS,
    steps=1,
    device="cpu",
    tiny=True,
    attention="sdpa",
    ours="",
    profile=False,
)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    for name, value in gpu_peers.TINY.items():
        monkeypatch.setattr(gpu_lora, name, value)


def line(**changes: Any) -> gpu_peers.Line:
    return dataclasses.replace(LINE, **changes)


def work(batches: list[MicroBatch], **changes: Any) -> peers.Work:
    settings: dict[str, Any] = {
        "preset": "tiny",
        "config": PRESETS["tiny"],
        "full": False,
        "recompute": False,
        "rank": 4,
        "scale": 2.0,
        "rows": gpu_lora.ROWS,
        "attention": "sdpa",
        "device": torch.device("cpu"),
        "batches": batches,
    }
    return peers.Work(**{**settings, **changes})


def test_ours_comes_first_in_every_group() -> None:
    options = gpu_peers.make_parser().parse_args(["--sizes", "0.6b", "8b", "--recompute", "off", "on", "--again"])
    lines = gpu_peers.plan(options, ["transformers"])
    assert [str(one) for one in lines[:3]] == [
        "0.6b lora 2x2048 row recompute off surogate",
        "0.6b lora 2x2048 row recompute off surogate again",
        "0.6b lora 2x2048 row recompute off transformers",
    ]
    assert len(lines) == 2 * 2 * 3
    only = gpu_peers.make_parser().parse_args(["--only", "full:1.7b", "pretrain:0.6b"])
    assert [(one.mode, one.size) for one in gpu_peers.plan(only, [])] == [("full", "1.7b"), ("pretrain", "0.6b")]
    more = gpu_peers.make_parser().parse_args(["--sizes", "8b", "--batches", "8x512", "1x8192"])
    assert [one.batch for one in gpu_peers.plan(more, ["unsloth"])] == ["8x512"] * 2 + ["1x8192"] * 2


def test_rows_of_another_length() -> None:
    found = gpu_peers.work_line(line(batch="3x64", documents="tiny"), started=0.0)
    assert found["tokens_per_step"] == 2 * 3 * 64


@pytest.mark.parametrize(("side", "mode"), [("surogate", "lora"), ("transformers", "lora"), ("transformers", "full")])
def test_a_line_is_measured(side: str, mode: str) -> None:
    found = gpu_peers.work_line(line(side=side, mode=mode, recompute=side == "transformers"), started=0.0)
    json.dumps(found)
    assert found["tokens_per_step"] == 2 * 2 * 64
    assert len(found["losses"]) == gpu_peers.WARM_UP + 1
    assert found["losses"][-1] < found["losses"][0] == pytest.approx(6.93, abs=0.1)
    trained = found["facts"]["trained"] / found["facts"]["parameters"]
    assert trained == 1 if mode == "full" else trained < 0.2


@pytest.mark.slow
def test_both_sides_train_as_many_adapters() -> None:
    counts = [gpu_peers.work_line(line(side=s), started=0.0)["facts"]["trained"] for s in ("surogate", "transformers")]
    assert counts[0] == counts[1]


def test_peers_get_the_same_labels() -> None:
    """transformers moves labels by one itself: what it then predicts is what ours does."""
    (batch, *_) = gpu_lora.make_batches("lognormal", 1024, 64)
    given = peers.arguments(batch, work([batch]))
    moved = torch.nn.functional.pad(given["labels"], (0, 1), value=IGNORE_LABEL)[:, 1:]
    assert torch.equal(moved.flatten(), batch.labels)
    assert int((moved != IGNORE_LABEL).sum()) == batch.label_tokens
    assert "position_ids" not in peers.arguments(gpu_lora.make_batches("row", 1024, 3)[0], work([batch]))


def test_documents_do_not_attend_to_each_other_in_transformers() -> None:
    (batch, *_) = gpu_lora.make_batches("row", 1024, 4)
    positions = torch.cat([torch.arange(n, dtype=torch.int32) for n in (20, 44, 64)])
    batch = dataclasses.replace(batch, positions=positions)
    other = dataclasses.replace(batch, input_ids=batch.input_ids.clone())
    other.input_ids[:20] = (other.input_ids[:20] + 1) % 1024
    model = peers.random_model(work([batch])).eval()
    with torch.no_grad():
        a, b = (model(**peers.arguments(one, work([batch]))).logits[0] for one in (batch, other))
    assert torch.equal(a[20:], b[20:])
    assert not torch.equal(a[:20], b[:20])


@pytest.mark.slow
def test_the_command_writes_both_files(tmp_path: Path) -> None:
    command = [sys.executable, gpu_peers.__file__, "--device", "cpu", "--tiny", "--sizes", "tiny", "--steps", "1"]
    subprocess.run([*command, "--peers", "--out", str(tmp_path)], check=True, capture_output=True, timeout=120)
    report = json.loads((tmp_path / "gpu_peers.json").read_text())
    assert [row.get("error") for row in report["lines"]] == [None]
    assert report["lines"][0]["setup_seconds"] > report["lines"][0]["import_seconds"] > 0
    assert "| tiny | lora | 2x64 | row | off | Surogate |" in (tmp_path / "gpu_peers.md").read_text()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import time; time.sleep(600)", "stopped after 1 s"),
        ("raise ValueError('no such thing')", "ValueError: no such thing"),
        ("raise MemoryError('CUDA out of memory. Tried to allocate')", "out of memory"),
        ("import os; os._exit(7)", "exit status 7"),
    ],
    ids=["hangs", "fails", "memory", "silent"],
)
def test_a_line_that_fails_says_why(code: str, error: str) -> None:
    found = gpu_peers.start(LINE, 1.0 if "sleep" in code else 60.0, os.environ, script=[sys.executable, "-c", code])
    assert found["error"] == error


def test_a_line_that_was_measured_counts_though_its_process_fails() -> None:
    code = "import sys; open(sys.argv[sys.argv.index('--result') + 1], 'w').write('{\"a\": 1}'); raise SystemExit(3)"
    assert gpu_peers.start(LINE, 60.0, os.environ, script=[sys.executable, "-c", code]) == {"a": 1}


def result(tokens_per_second: float, gemm: float) -> dict[str, Any]:
    return {
        "gpu": "a GPU",
        "gemm_tflops": gemm,
        "tokens_per_second": tokens_per_second,
        "milliseconds": 1.0,
        "gflop_per_token": 4.0,
        "peak_gib": 5.0,
        "planned_gib": None,
        "setup_seconds": 6.0,
        "losses": [7.0, 6.0],
        "profile": None,
    }


def test_the_table() -> None:
    """80k tokens a second of 4 GFLOP are 320 TFLOP/s, 40 % of the median of the ceilings."""
    found = [
        (LINE, result(80e3, 800.0)),
        (line(again=True), result(1e3, 810.0)),
        (line(side="transformers"), result(20e3, 790.0)),
        (line(side="liger"), {"error": "out of memory", "log": ""}),
        (line(side="transformers", size="8b"), result(1e3, 800.0)),
    ]
    ceiling, rows = gpu_peers.finish(found)
    assert ceiling == 800
    assert rows[0]["speed_of_light"] == pytest.approx(0.4)
    assert rows[2]["ours_over_this"] == pytest.approx(4)
    assert "speed_of_light" not in rows[1]
    assert "ours_over_this" not in rows[4]
    gemms = [800.0, 810.0]
    text = gpu_peers.markdown(
        {
            "versions": "torch 1",
            "gemm_tflops": ceiling,
            "gemm_tflops_each": gemms,
            "absent": {"Unsloth": "not installed"},
            "lines": rows,
        }
    )
    table = [row for row in text.splitlines() if row.startswith("|")]
    assert {row.count("|") for row in table} == {15}
    assert "| Surogate | 80.0k |  | 1.0 | 40.0% | 5.0 |  | 6.0 s | 7.000 … 6.000 |" in text
    assert "failed: out of memory" in text
    assert "- Unsloth: not installed." in text


def test_absent_peers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_peers.PEERS, "unsloth", ("json", "no_such_package"))
    assert gpu_peers.lacking(["unsloth"]) == {"unsloth": "not installed (no_such_package)"}
    monkeypatch.setitem(gpu_peers.PEERS, "unsloth", ("json",))
    assert gpu_peers.lacking(["unsloth"]) == {}
