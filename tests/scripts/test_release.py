"""Wheels with their digests and a statement of how they were built."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from environments import Environment
from wheels import unpack

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def release() -> ModuleType:
    spec = importlib.util.spec_from_file_location("release", ROOT / "scripts" / "release.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_statement_is_over_the_wheels_and_the_commit(release: ModuleType, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}-1.0-py3-none-any.whl").write_bytes(name.encode())
    (tmp_path / "note.txt").touch()
    release.attest(tmp_path, commit="c" * 40, clean=True, repository="git+https://host/x", builder="urn:b")
    digests = {f"{n}-1.0-py3-none-any.whl": hashlib.sha256(n.encode()).hexdigest() for n in "ab"}
    assert (tmp_path / "SHA256SUMS").read_text() == "".join(f"{d}  {n}\n" for n, d in digests.items())
    found = json.loads((tmp_path / "provenance.intoto.json").read_text())
    assert found["_type"] == "https://in-toto.io/Statement/v1"
    assert found["predicateType"] == "https://slsa.dev/provenance/v1"
    assert {s["name"]: s["digest"]["sha256"] for s in found["subject"]} == digests
    definition = found["predicate"]["buildDefinition"]
    assert {"buildType", "externalParameters"} <= definition.keys()
    assert definition["resolvedDependencies"] == [{"uri": "git+https://host/x", "digest": {"gitCommit": "c" * 40}}]
    assert found["predicate"]["runDetails"]["builder"] == {"id": "urn:b"}


def test_archives_are_built_twice_with_equal_bytes(
    release: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(release, "source", lambda: ("c" * 40, "1700000000", True))
    project = ROOT / "plugins" / "surogate-command-report"
    sums = []
    for place in ("first", "second"):
        assert release.main(["--output", str(tmp_path / place), "--only", str(project)]) == 0
        sums.append((tmp_path / place / "SHA256SUMS").read_text())
    assert sums[0] == sums[1]
    name = "surogate_command_report-0.1.0"
    assert re.fullmatch(rf"\w{{64}}  {name}-py3-none-any\.whl\n\w{{64}}  {name}\.tar\.gz\n", sums[0])
    assert release.main(["--output", str(tmp_path / "first"), "--only", str(project)]) == 2


def test_the_core_is_packed_from_the_checkout_and_from_its_sdist(release: ModuleType, tmp_path: Path) -> None:
    release.build(ROOT / "core", tmp_path / "dist", "1700000000")
    with tarfile.open(tmp_path / "dist" / "surogate_core-0.1.0.tar.gz") as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in 3.11.0 to 3.11.3
        archive.extractall(tmp_path)
    release.build(tmp_path / "surogate_core-0.1.0", tmp_path / "again", "1700000000")
    wheels = [tmp_path / place / "surogate_core-0.1.0-py3-none-any.whl" for place in ("dist", "again")]
    names = [sorted(zipfile.ZipFile(wheel).namelist()) for wheel in wheels]
    assert names[0] == names[1]
    expected = {"surogate_core/conf/config.yaml", "surogate_core/py.typed", "surogate_core/plugins/catalogue.json"}
    assert expected | {"surogate_core-0.1.0.dist-info/licenses/LICENSE"} <= set(names[0])
    assert not [name for name in names[0] if "__pycache__" in name or name.startswith("tests")]


def test_a_wheel_for_others_names_no_directory_of_the_checkout(release: ModuleType, tmp_path: Path) -> None:
    release.build(ROOT, tmp_path, "1700000000")
    with zipfile.ZipFile(tmp_path / "surogate-0.1.0-py3-none-any.whl") as wheel:
        metadata = wheel.read("surogate-0.1.0.dist-info/METADATA").decode()
    assert "Requires-Dist: surogate-core<0.2,>=0.1\n" in metadata
    assert not [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "file:" in line]


@pytest.mark.slow
def test_the_wheels_alone_train(release: ModuleType, tmp_path: Path) -> None:
    """Beside the dependencies that are installed here, but without this checkout."""
    for project in (ROOT, *(file.parent for file in ROOT.glob("*/pyproject.toml")), *ROOT.glob("plugins/surogate-*")):
        release.build(project, tmp_path / "dist", "1700000000")
    environment = Environment(tmp_path, without="*surogate*")
    for wheel in (tmp_path / "dist").glob("*.whl"):
        unpack(wheel, environment.site)
    work = tmp_path / "work"
    work.mkdir()
    (work / "run.py").write_text(
        "import surogate\n"
        "rows = [{'prompt': f'What is {i}?', 'completion': str(i)} for i in range(40)]\n"
        "tokenizer = 'pkg://surogate_dataset_chat/embedded/tokenizer'\n"
        "run = surogate.sft(model='qwen3', tokenizer=tokenizer, datasets=rows, max_steps=1, quiet=True,\n"
        "                   compiler='fx', sequence_len=64, output_dir='out', device='cpu')\n"
        "print(surogate.__file__, run.outcome)\n"
    )
    said = environment.run("run", cwd=work, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert said.split() == [str(environment.site / "surogate" / "__init__.py"), "finished"]
    assert "surogate-core" in environment.run("surogate", "plugins", "list", cwd=work)
