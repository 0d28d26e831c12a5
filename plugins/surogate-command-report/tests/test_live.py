"""The live page of a run: its address, what it shows while the run goes on, and that it ends with it."""

from __future__ import annotations

import json
import stat
import sys
import urllib.request
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import surogate_command_report

from surogate_core.plugin import UserError, events
from surogate_testing.run_events import START, step


def monitor(directory: Path, **options: Any) -> Any:
    spec = surogate_command_report.surogate_monitor()
    info = events.RunInfo(run_name="r", output_dir=str(directory), task="sft", config={}, interactive=False)
    return spec.build(spec.options(**options), info)


def reply(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url.replace("/?", "/figures?"), timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
    return found


def figures(url: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = reply(url)["runs"]
    return found


def test_the_address_is_on_the_terminal_and_in_no_file_that_the_output_goes_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor(tmp_path / "file").close()
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    live = monitor(tmp_path / "terminal")
    url = (tmp_path / "terminal" / "web.url").read_text().strip()
    assert capsys.readouterr() == ("", f"Live page: {url}\n")
    live.close()


def test_a_run_is_shown_while_it_goes_on(tmp_path: Path) -> None:
    live = monitor(tmp_path / "out")
    file = tmp_path / "out" / "web.url"
    url = file.read_text().strip()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    live.on_event(events.Progress(task="loading weights", done=1, total=2))
    assert reply(url)["card"]["verdict"] == "Starting · loading weights 1/2"
    control = live.on_event(START)
    port, token = url.removeprefix("http://127.0.0.1:").split("/?token=")
    notice = events.Notice(level="info", message=f"Live page on port {port}; its address is in {file}")
    assert control.events == (notice,)
    assert token not in str(control)
    shown = [
        step(1, 3.0, speed_of_light=0.25),
        step(2, float("nan"), speed_of_light=0.25),
        events.EvalEnd(step=2, loss=2.5, label_tokens=1, seconds=0.1, gap=None),
        events.PhaseChange(step=2, phase="plateau", previous="warmup", improvement=0.0),
        events.Advice(step=2, rule="plateau", message="It stands.", key="lr", suggestion="turn"),
    ]
    assert [live.on_event(event) for event in shown] == [None] * 5
    (run,) = figures(url)
    card = reply(url)["card"]
    assert (run["title"], run["step"], card["tone"]) == ("r", 2, "busy")
    assert ["phase", "plateau", ""] in card["tiles"]
    assert run["curves"]["loss"] == [[1, 2], [3.0, None]]
    assert run["curves"]["speed_of_light"] == [[1, 2], [25.0, 25.0]]
    assert run["curves"]["eval"] == [[2], [2.5]]
    assert run["marks"] == [2]
    live.on_event(
        events.RunEnd(
            reason="finished", step=2, seconds=1.0, first_eval_loss=None, last_eval_loss=2.5, export_path=None
        )
    )
    assert figures(url)[0]["over"] is True
    assert (live.state(), live.load_state({})) == ({}, None)
    live.close()
    assert not file.exists()
    with pytest.raises(URLError):
        figures(url)


def test_a_resumed_run_shows_what_came_before(tmp_path: Path) -> None:
    lines = [{"event": "step_end", "step": s, "loss": 1.0 * s} for s in range(1, 8)]
    lines += [{"event": "advice", "step": s, "message": str(s)} for s in (3, 7)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    live = monitor(tmp_path)
    url = (tmp_path / "web.url").read_text().strip()
    live.on_event(replace(START, start_step=5))
    live.on_event(step(6, 60.0))
    (run,) = figures(url)
    assert run["curves"]["loss"] == [[1, 2, 3, 4, 5, 6], [1.0, 2.0, 3.0, 4.0, 5.0, 60.0]]
    assert run["marks"] == [3]
    live.close()


def test_a_resumed_run_without_a_history(tmp_path: Path) -> None:
    live = monitor(tmp_path)
    url = (tmp_path / "web.url").read_text().strip()
    live.on_event(replace(START, start_step=5))
    live.on_event(step(6, 60.0))
    assert figures(url)[0]["curves"]["loss"] == [[6], [60.0]]
    live.close()


def test_other_runs_are_laid_under_it(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"event": "step_end", "step": 1, "loss": 4.0}\n')
    live = monitor(tmp_path / "new", compare=[str(tmp_path / "old")])
    url = (tmp_path / "new" / "web.url").read_text().strip()
    assert live._others[0].caught_up.wait(10)
    assert [run["title"] for run in figures(url)] == ["r", "old"]
    assert figures(url)[1]["curves"]["loss"] == [[1], [4.0]]
    live.close()


def test_what_cannot_be_served_is_the_users_to_mend(tmp_path: Path) -> None:
    first = monitor(tmp_path / "a")
    port = first._server.port
    with pytest.raises(UserError, match=rf"monitor.web.port={port}: cannot be listened on: .* Fix: set another"):
        monitor(tmp_path / "b", port=port)
    first.close()
    with pytest.raises(UserError, match="there is no such directory"):
        monitor(tmp_path / "c", compare=[str(tmp_path / "gone")])


def test_the_option_has_the_defaults() -> None:
    from omegaconf import OmegaConf

    spec = surogate_command_report.surogate_monitor()
    yaml = resources.files("surogate_command_report.conf.monitor").joinpath("web.yaml").read_text()
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == spec.name == "web"
    assert spec.options(**values) == spec.options()
