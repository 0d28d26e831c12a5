"""The bill of materials is CycloneDX 1.6, and has every locked distribution and the hash of every file."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import surogate_command_sbom
from surogate_command_sbom import bill as bills

from surogate_core.plugin import surogate as main
from surogate_core.service.plugins import InstalledFiles, canonical, digests, in_scope, installed_plugins, lock

SUROGATE_PLUGIN = "command-sbom"


def test_conformance(surogate_check: Any) -> None:
    surogate_check.run()


def bill(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["plugins", "sbom", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are not read: those of torch are gigabytes. Each distribution has one."""
    files = InstalledFiles(elsewhere=False, digests={"package/module.py": "0" * 64})
    monkeypatch.setattr(lock, "installed_files", lambda dist, modules: files)


def check_references(found: dict[str, Any]) -> None:
    """The parts name each other, and are what their package URLs say."""
    parts = [found["metadata"]["component"], *found["components"]]
    assert all(re.fullmatch(r"pkg:pypi/[a-z0-9-]+@\S+", part["purl"]) for part in parts)
    references = [part["bom-ref"] for part in parts]
    assert len(set(references)) == len(references)
    assert [d["ref"] for d in found["dependencies"]] == sorted(references, key=lambda r: r.split("@")[0])
    assert all(set(d["dependsOn"]) <= set(references) for d in found["dependencies"])


def check_schema(found: dict[str, Any]) -> None:
    """The schema's own rules, which refuse what it does not know; of each part with 20 files at most.

    The validator compares every file of a list with every other.
    """
    pytest.importorskip("jsonschema", reason="needs cyclonedx-python-lib[json-validation]")
    validation = pytest.importorskip("cyclonedx.validation.json", reason="needs cyclonedx-python-lib[json-validation]")
    schema = pytest.importorskip("cyclonedx.schema")
    for part in [found["metadata"]["component"], *found["components"]]:
        part["components"] = part.get("components", [])[:20]
    error = validation.JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(json.dumps(found))
    assert error is None, str(error)[:2000]


def component(found: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in [found["metadata"]["component"], *found["components"]] if c["name"] == name)


def test_the_bill_lists_core_plugins_and_all_that_they_require(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    found = bill(capsys)
    check_references(found)
    assert found["metadata"]["component"]["name"] == "surogate-core"
    names = {c["name"] for c in found["components"]}
    assert {canonical(p.distribution) for p in installed_plugins()} | {"torch"} <= names
    assert names | {"surogate-core"} == in_scope("dependencies", names - {"surogate"}).keys()
    own = component(found, "surogate-command-sbom")
    assert own["properties"] == [{"name": "surogate:entry_point", "value": "command-sbom = surogate_command_sbom"}]
    assert own["licenses"] == [{"expression": "Apache-2.0"}]
    uses = next(d for d in found["dependencies"] if d["ref"].startswith("pkg:pypi/surogate-command-sbom@"))
    assert [r.split("@")[0] for r in uses["dependsOn"]] == ["pkg:pypi/surogate-core"]
    assert component(found, "torch")["components"], "the files of dependencies are listed"


def test_every_file_has_its_hash(capsys: pytest.CaptureFixture[str]) -> None:
    found = bill(capsys, "--scope", "plugins")
    files = {c["name"]: c for c in component(found, "surogate-command-sbom")["components"]}
    module = Path(surogate_command_sbom.__file__)
    assert files["surogate_command_sbom/__init__.py"] == {
        "type": "file",
        "name": "surogate_command_sbom/__init__.py",
        "hashes": [{"alg": "SHA-256", "content": sha256(module.read_bytes()).hexdigest()}],
    }
    core = {c["name"] for c in component(found, "surogate-core")["components"]}
    assert "surogate_core/plugins/lock.py" in core


def test_the_bill_is_valid_by_its_schema(capsys: pytest.CaptureFixture[str], quick: None) -> None:
    found = bill(capsys)
    check_references(found)
    check_schema(found)


@pytest.mark.slow
def test_the_bill_of_a_whole_environment_is_valid_by_its_schema(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "digest_of", lambda file, script=False: "0" * 64)
    check_schema(bill(capsys, "--scope", "environment"))


def test_a_file_that_cannot_be_read_has_the_reason() -> None:
    assert bills._file("a.py", "link " + "1" * 64)["hashes"][0]["content"] == "1" * 64
    file = bills._file("x.dist-info/RECORD", "missing")
    assert file["properties"] == [{"name": "surogate:no_hash", "value": "missing"}]
    assert "hashes" not in file


def test_equal_sets_have_equal_bills(capsys: pytest.CaptureFixture[str], quick: None, tmp_path: Path) -> None:
    plain = bill(capsys, "--scope", "plugins")
    assert "torch" not in {c["name"] for c in plain["components"]}
    assert main(["plugins", "sbom", "--scope", "plugins", "--output", str(tmp_path / "bom.json")]) == 0
    assert json.loads((tmp_path / "bom.json").read_text()) == plain
    assert main(["plugins", "sbom", "--scope", "plugins", "--output", str(tmp_path / "no" / "bom.json")]) == 2
