"""Packs surogate_core and conf, which are one directory up in a checkout and beside this file in an sdist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CoreFiles(BuildHookInterface):
    """Adds the two directories to wheels and sdists; an editable install imports them from where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files; `version` is the kind of wheel, for example ``editable``."""
        if version == "editable":
            return
        root = Path(self.root)
        sources = root if (root / "surogate_core").is_dir() else root.parent
        conf = "surogate_core/conf" if self.target_name == "wheel" else "conf"
        build_data["force_include"][str(sources / "conf")] = conf
        if sources != root:
            # Beside this file hatchling finds the package itself.
            build_data["force_include"][str(sources / "surogate_core")] = "surogate_core"
