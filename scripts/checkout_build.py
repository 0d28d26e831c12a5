"""The build backend of the front door: hatchling's, which lets ``pip install .`` find the siblings in a checkout.

``surogate`` requires ``surogate-core`` and the plugins by name, and pip would ask an index for them. In a checkout this
builds their wheels, which takes two seconds for all of them, and requires these files. Each has a label in its version,
``0.1.0+g1a2b3c4d``, that changes with its contents: pip replaces no wheel by one of the same version.

An sdist, a wheel that is built from an sdist, and the wheels of scripts/release.py require the names. uv finds the
siblings by `tool.uv.sources`.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from hatchling.build import (
    build_editable,
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
)
from hatchling.builders.wheel import WheelBuilder

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel of the working directory; its file name."""
    root = Path.cwd()
    return _build(root, Path(wheel_directory), with_files(root)).name


def with_files(root: Path) -> dict[str, Any]:
    """The pyproject.toml of a checkout; each requirement that has a directory here names the wheel of it."""
    config = _read(root)
    projects = [
        f.parent for p in config["tool"]["uv"]["workspace"]["members"] for f in root.glob(f"{p}/pyproject.toml")
    ]
    wheels = {_read(project)["project"]["name"]: _labelled(project, _place(root)) for project in projects}
    project = config["project"]
    extras = project.get("optional-dependencies", {})
    for table, key in ((project, "dependencies"), *((extras, name) for name in extras)):
        table[key] = [_located(requirement, wheels) for requirement in table[key]]
    config["tool"].setdefault("hatch", {})["metadata"] = {"allow-direct-references": True}
    return config


def _place(root: Path) -> Path:
    """Where the wheels are kept: pip reads them after this backend has ended."""
    place = root / "build" / "wheels"
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        place = Path(tempfile.mkdtemp(prefix="surogate-wheels-"))
    return place


def _labelled(project: Path, place: Path) -> Path:
    """The wheel of a directory, with the digest of its contents in its version."""
    config = _read(project)
    with tempfile.TemporaryDirectory() as plain:
        digest = hashlib.sha256(_build(project, Path(plain), config).read_bytes()).hexdigest()
    config["project"]["version"] += f"+g{digest[:8]}"
    return _build(project, place, config)


def _build(project: Path, place: Path, config: dict[str, Any]) -> Path:
    builder = WheelBuilder(str(project), config=config)
    return Path(next(builder.build(directory=str(place), versions=["standard"])))


def _read(project: Path) -> dict[str, Any]:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))


def _located(requirement: str, wheels: dict[str, Path]) -> str:
    name, extras = re.match(r"([\w-]+)(\[[^]]*\])?", requirement).groups(default="")  # type: ignore[union-attr]
    return f"{name}{extras} @ {wheels[name].as_uri()}" if name in wheels else requirement
