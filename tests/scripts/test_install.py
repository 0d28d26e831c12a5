"""install.sh, the Dockerfiles, the lock of uv and CITATION.cff."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("c*.Dockerfile"))
TABLE = "| NVIDIA-SMI 580.1   Driver Version: 580.1   CUDA Version: {version}  |"


def linter(name: str) -> str:
    """The path of a linter; skips the test where it is not installed."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed: make setup")
    return found


def install(*arguments: str, path: Path, code: int = 0) -> str:
    command = ["/bin/sh", str(ROOT / "install.sh"), *arguments]
    environ = {"PATH": f"{path}:/usr/bin:/bin", "PYTHON": sys.executable}
    done = subprocess.run(command, cwd=path, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


def program(directory: Path, name: str, says: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (directory / name).chmod(0o755)


@pytest.mark.parametrize(
    ("version", "cuda", "torch"),
    [
        ("13.0", "cuda13", "torch==2.13.0"),
        ("14.1", "cuda13", "torch==2.13.0"),
        ("12.8", "cuda12", "torch==2.11.0 --index-url https://download.pytorch.org/whl/cu128"),
        ("11.8", "cpu", "torch==2.13.0"),
        ("N/A", "cpu", "torch==2.13.0"),
    ],
)
def test_the_driver_chooses_torch_and_the_extra(tmp_path: Path, version: str, cuda: str, torch: str) -> None:
    program(tmp_path, "nvidia-smi", TABLE.format(version=version))
    assert install("--cuda", path=tmp_path).strip() == cuda
    assert install("--torch", path=tmp_path).strip() == torch
    said = install("--dry-run", "--extra", "trackers", path=tmp_path)
    extras = "[trackers]" if cuda == "cpu" else f"[{cuda},trackers]"
    assert f"pip install {torch}\n" in said
    assert f"pip install {ROOT}{extras}\n" in said


def test_without_a_gpu_and_with_uv_and_wheels(tmp_path: Path) -> None:
    (tmp_path / "dist").mkdir()
    assert install("--cuda", path=tmp_path).strip() == "cpu"
    program(tmp_path, "uv", "uv")
    said = install("--dry-run", "--wheels", "dist", "--dir", "here", path=tmp_path)
    assert f"uv venv --python {sys.executable} here\n" in said
    assert "uv pip install --python here/bin/python --find-links dist surogate\n" in said
    assert not (tmp_path / "here").exists()


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    assert "Fix: make dist" in install("--wheels", "none", path=tmp_path, code=2)
    assert "a value must follow" in install("--dir", path=tmp_path, code=2)
    assert "is not known" in install("--cudda", path=tmp_path, code=2)


def test_shellcheck_finds_nothing() -> None:
    subprocess.run([linter("shellcheck"), str(ROOT / "install.sh")], check=True, timeout=60)


def test_hadolint_finds_nothing() -> None:
    assert len(DOCKERFILES) == 4
    subprocess.run([linter("hadolint"), *map(str, DOCKERFILES)], check=True, timeout=60)


def test_images_have_what_the_distributions_require() -> None:
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    front = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lowest = next(re.match(r"torch>=([\d.]+)", r)[1] for r in core["dependencies"] if r.startswith("torch>="))
    for file in DOCKERFILES:
        text = file.read_text()
        torch = re.search(r"torch==(\d+)\.(\d+)", text)
        assert tuple(map(int, torch.groups())) >= tuple(map(int, lowest.split(".")))
        extra = re.search(r'"surogate(?:\[(\w+)\])?==([\d.]+)"', text)
        assert extra[2] == front["version"]
        assert extra[1] is None or extra[1] in front["optional-dependencies"]
        assert file.name.startswith(extra[1] or "cpu")
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored == ["*", "!dist/*.whl"]


def test_the_lock_of_uv_is_of_these_distributions_and_of_the_public_index() -> None:
    text = (ROOT / "uv.lock").read_text()
    assert set(re.findall(r"https?://([^/\"]+)", text)) == {"pypi.org", "files.pythonhosted.org"}
    locked = {package["name"]: package for package in tomllib.loads(text)["package"]}
    for file in (ROOT / "pyproject.toml", *ROOT.glob("core/pyproject.toml"), *ROOT.glob("*/*/pyproject.toml")):
        project = tomllib.loads(file.read_text())["project"]
        metadata = locked[project["name"]]["metadata"]
        required = {re.match(r"[\w.-]+", text)[0] for text in project["dependencies"]}
        required |= {re.match(r"[\w.-]+", t)[0] for ts in project.get("optional-dependencies", {}).values() for t in ts}
        found = {entry["name"] for entry in metadata["requires-dist"]}
        assert {name.lower() for name in required} - {"surogate"} == found - {"surogate"}, f"{file}: run: uv lock"
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    for group, texts in groups.items():
        found = {entry["name"] for entry in locked["surogate"]["metadata"]["requires-dev"][group]}
        assert {re.match(r"[\w.-]+", text)[0].lower() for text in texts} == found, f"{group}: run: uv lock"


def test_the_citation_has_the_fields_of_its_format() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0"
    assert (cited["version"], cited["license"]) == (project["version"], project["license"])
    assert [author["name"] for author in cited["authors"]] == [author["name"] for author in project["authors"]]
    assert cited["type"] == "software"
