"""Reports of runs that are over, by the plugins that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from surogate_core.app.reports import write_reports
from surogate_core.bundles import ReportSpec
from surogate_core.errors import PluginError
from surogate_core.plugins.discovery import core_plugin
from surogate_core.plugins.registry import Offered, Registry


def test_every_installed_report_is_written(
    installed: Registry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    specs = [ReportSpec(name=name, write=lambda runs, name=name: [runs[0] / name]) for name in ("a", "b")]
    offered = {spec.name: Offered(bundle=spec, plugin=core_plugin()) for spec in specs}
    monkeypatch.setitem(installed._offers, "report", offered)
    monkeypatch.setattr("surogate_core.app.reports.load_plugins", lambda: installed)
    assert write_reports([tmp_path]) == [tmp_path / "a", tmp_path / "b"]


def test_without_one_the_distribution_is_named(installed: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(installed._offers, "report", {})
    monkeypatch.setattr("surogate_core.app.reports.load_plugins", lambda: installed)
    with pytest.raises(PluginError, match=r"no installed plugin writes reports\. Fix: pip install .*surogate-"):
        write_reports([Path()])
