"""The monitor jsonl: its hook, its options, and that it hands the events to the core's writer."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path

import surogate_monitor_jsonl
from surogate_monitor_jsonl.monitor import JsonlMonitor, JsonlOptions

from surogate_core.plugin import events, read_metrics

END = events.RunEnd(reason="failed", step=0, seconds=1.0, first_eval_loss=None, last_eval_loss=None, export_path=None)


def monitor(directory: Path, options: JsonlOptions) -> JsonlMonitor:
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config={}, interactive=False)
    return JsonlMonitor(options, info)


def test_events_are_in_the_record_progress_only_when_asked(tmp_path: Path) -> None:
    for asked in (False, True):
        directory = tmp_path / str(asked)
        watching = monitor(directory, JsonlOptions(progress=asked))
        watching.on_event(events.Progress(task="loading", done=1, total=2))
        watching.on_event(events.EvalEnd(step=0, loss=2.0, label_tokens=5, seconds=0.1, gap=None))
        assert watching.on_event(END) is None
        watching.close()
        found = [record["event"] for record in read_metrics(directory / "metrics.jsonl")]
        assert found == [*(["progress"] if asked else []), "eval_end", "run_end"]


def test_state_is_empty(tmp_path: Path) -> None:
    watching = monitor(tmp_path, JsonlOptions())
    assert watching.state() == {}
    watching.load_state({})
    watching.close()
    assert list(tmp_path.iterdir()) == []


def test_hooks_and_options() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_jsonl.surogate_monitor()
    assert spec.name == "jsonl"
    assert spec.keeps_record
    assert surogate_monitor_jsonl.surogate_config_path() == "pkg://surogate_monitor_jsonl.conf"
    text = resources.files("surogate_monitor_jsonl.conf.monitor").joinpath("jsonl.yaml").read_text()
    assert text.startswith("# @package monitor.jsonl\n")
    values = dict(OmegaConf.create(text))
    assert values.pop("name") == "jsonl"
    assert spec.options(**values) == spec.options()


def test_importing_is_cheap() -> None:
    program = "import sys, surogate_monitor_jsonl; print(*[m for m in ('torch', 'rich', 'hydra') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
