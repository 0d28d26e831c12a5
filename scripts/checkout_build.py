"""The build backend of the front door: hatchling's, which lets ``pip install .`` find the siblings in a checkout.

``surogate`` requires ``surogate-core`` and the plugins by name. pip would ask an index for them. A wheel built in a
checkout therefore requires the directories (``surogate-core @ file:///…/core``). An sdist, a wheel built from an sdist
and the wheels of scripts/release.py require the names. uv finds the siblings by `tool.uv.sources`.
"""

from __future__ import annotations

import re
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
    from hatchling.builders.wheel import WheelBuilder

    root = Path.cwd()
    builder = WheelBuilder(str(root), config=with_directories(root))
    return Path(next(builder.build(directory=wheel_directory, versions=["standard"]))).name


def with_directories(root: Path) -> dict[str, Any]:
    """The pyproject.toml of a checkout, where each requirement that has a directory here names that directory."""
    config = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    directories = {
        tomllib.loads(file.read_text(encoding="utf-8"))["project"]["name"]: file.parent
        for pattern in config["tool"]["uv"]["workspace"]["members"]
        for file in root.glob(f"{pattern}/pyproject.toml")
    }
    project = config["project"]
    extras = project["optional-dependencies"]
    for table, key in ((project, "dependencies"), *((extras, name) for name in extras)):
        table[key] = [_located(requirement, directories) for requirement in table[key]]
    config["tool"]["hatch"]["metadata"] = {"allow-direct-references": True}
    return config


def _located(requirement: str, directories: dict[str, Path]) -> str:
    name, extras = re.match(r"([\w-]+)(\[[^]]*\])?", requirement).groups(default="")  # type: ignore[union-attr]
    return f"{name}{extras} @ {directories[name].as_uri()}" if name in directories else requirement
