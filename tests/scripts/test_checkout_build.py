"""``pip install .`` finds the core and the plugins in the checkout."""

from __future__ import annotations

import zipfile
from email.parser import Parser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_wheel_of_the_checkout_requires_its_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location("checkout_build", ROOT / "scripts" / "checkout_build.py")
    backend = module_from_spec(spec)
    spec.loader.exec_module(backend)
    monkeypatch.chdir(ROOT)
    name = backend.build_wheel(str(tmp_path))
    with zipfile.ZipFile(tmp_path / name) as wheel:
        metadata = Parser().parsestr(wheel.read("surogate-0.1.0.dist-info/METADATA").decode())
    found = metadata.get_all("Requires-Dist")
    assert f"surogate-core@ {(ROOT / 'core').as_uri()}" in [r.replace(" @", "@") for r in found]
    assert [r for r in found if "file:" not in r] == []
    wandb = (ROOT / "plugins" / "surogate-monitor-wandb").as_uri()
    assert any("surogate-monitor-wandb[client]" in r and wandb in r and "trackers" in r for r in found)
