"""What is said when a run starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_core.app.starting import start
from surogate_core.config.resolve import load_run_config
from surogate_core.plugins import load_plugins


def test_default_monitors_that_are_not_installed_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surogate_core.run.job.launch", lambda config, registry, watch: 0)
    registry = load_plugins()
    config = load_run_config([f"output_dir={tmp_path}", "monitor=[]"], registry=registry)
    assert not registry.left_out
    registry.left_out.update({"gauge": "surogate-monitor-gauge", "dial": "surogate-monitor-dial"})
    for note in ("note: without the default monitors gauge, dial, which are not installed. Fix: pip install ", ""):
        capsys.readouterr()
        assert start(config, registry) == 0
        assert capsys.readouterr().err.startswith(note)
    assert "without" not in capsys.readouterr().err
