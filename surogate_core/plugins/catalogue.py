"""The plugins that this project publishes, so that a missing one can be named.

``catalogue.json`` is made by ``scripts/make_catalogue.py`` from ``plugins/*/``.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("catalogue.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """The distribution that publishes each bundle; every value is the name of a distribution."""

    options: dict[str, str]
    """``group/option`` of a config option."""
    bundles: dict[str, str]
    """``kind/name`` of a bundle."""
    keys: dict[str, str]
    """Flat key that the plugin's options declare; of several plugins, the first."""

    def distribution_of(self, group: str, name: str) -> str | None:
        """The distribution that offers the config option, or the bundle, of that name."""
        return self.options.get(f"{group}/{name}") or self.bundles.get(f"{group}/{name}")

    def names(self, group: str) -> list[str]:
        """Names of a group's options and of the kind's bundles."""
        prefix = f"{group}/"
        return sorted({k.removeprefix(prefix) for k in (*self.options, *self.bundles) if k.startswith(prefix)})


def install_command(*distributions: str) -> str:
    """What installs plugins of this project: from its checkout where the core runs from one, which needs no index."""
    checkout = Path(__file__).resolve().parents[2] / "plugins"
    directories = [checkout / name for name in distributions]
    if all((directory / "pyproject.toml").is_file() for directory in directories):
        return f"pip install --no-build-isolation {' '.join(map(str, directories))}"
    names = " ".join(distributions)
    wheels = os.environ.get("PIP_FIND_LINKS") or "DIRECTORY_OF_WHEELS"
    return f"pip install {names}; without an index: pip install --no-index --find-links {wheels} {names}"


@cache
def catalogue() -> Catalogue:
    """The catalogue that is shipped with this version."""
    data = json.loads(FILE.read_text(encoding="utf-8"))
    return Catalogue(options=data["options"], bundles=data["bundles"], keys=data["keys"])
