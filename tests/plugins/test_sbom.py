"""The bill of materials has what CycloneDX 1.6 requires, and every locked distribution."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.plugins.discovery import canonical, installed_plugins
from surogate_core.plugins.surroundings import in_scope


def bill(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plugins", "sbom", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def check(found: dict[str, Any]) -> None:
    """What the schema of version 1.6 requires of the parts that are used, and its patterns."""
    assert {"bomFormat", "specVersion"} <= found.keys()
    assert (found["bomFormat"], found["specVersion"], found["version"]) == ("CycloneDX", "1.6", 1)
    uuid = r"urn:uuid:[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    assert re.fullmatch(uuid, found["serialNumber"])
    known = {"$schema", "bomFormat", "specVersion", "serialNumber", "version", "metadata", "components", "dependencies"}
    assert found.keys() <= known
    parts = [found["metadata"]["component"], *found["components"]]
    for part in parts:
        assert {"type", "name"} <= part.keys()
        assert part["type"] in ("application", "library")
        assert part["scope"] in ("required", "optional", "excluded")
        assert re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", part["purl"])
        for entry in part.get("licenses", ()):
            assert entry.keys() in ({"expression"}, {"license"})
            assert all(isinstance(v, str) and v for v in (entry.get("expression") or entry["license"]["name"],))
        for entry in part.get("hashes", ()):
            assert entry["alg"] == "SHA-256"
            assert re.fullmatch("[0-9a-f]{64}", entry["content"])
    references = [part["bom-ref"] for part in parts]
    assert len(set(references)) == len(references)
    assert [d["ref"] for d in found["dependencies"]] == sorted(references, key=lambda r: r.split("@")[0])
    assert all(set(d["dependsOn"]) <= set(references) for d in found["dependencies"])
    assert all(len(set(d["dependsOn"])) == len(d["dependsOn"]) for d in found["dependencies"])


def test_the_bill_lists_core_plugins_and_all_that_they_require(capsys: pytest.CaptureFixture[str]) -> None:
    found = bill(capsys)
    check(found)
    assert found["metadata"]["component"]["name"] == "surogate-core"
    names = {c["name"] for c in found["components"]}
    assert {canonical(p.distribution) for p in installed_plugins()} <= names
    assert names | {"surogate-core"} == in_scope("dependencies", names).keys()
    adamw = next(c for c in found["components"] if c["name"] == "surogate-optimizer-adamw")
    assert adamw["properties"] == [
        {"name": "surogate:entry_point", "value": "optimizer-adamw = surogate_optimizer_adamw"}
    ]
    assert adamw["licenses"] == [{"expression": "Apache-2.0"}]
    uses = next(d for d in found["dependencies"] if d["ref"].startswith("pkg:pypi/surogate-optimizer-adamw@"))
    assert [r.split("@")[0] for r in uses["dependsOn"]] == ["pkg:pypi/surogate-core"]


def test_equal_sets_have_equal_bills(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plain = bill(capsys, "--scope", "plugins")
    check(plain)
    assert "torch" not in {c["name"] for c in plain["components"]}
    assert main(["plugins", "sbom", "--scope", "plugins", "--output", str(tmp_path / "bom.json")]) == 0
    assert json.loads((tmp_path / "bom.json").read_text()) == plain
    assert main(["plugins", "sbom", "--output", str(tmp_path / "no" / "bom.json")]) == 2
