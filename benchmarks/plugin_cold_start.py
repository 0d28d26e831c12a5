"""How long commands take with many plugins installed: median seconds of whole processes, the page cache warm.

Makes `--plugins` distributions in a temporary directory, each with a module of a recipe, a monitor and their options,
and puts them beside what is installed. `surogate --cfg job` loads every plugin, checks the configuration and prints it.

python benchmarks/plugin_cold_start.py [--plugins 100] [--runs 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

COMMANDS = {"--help": 0.6, "plugins list": 1.5, "--cfg job": 1.5}
"""Command → the seconds that it may take."""

MODULE = '''"""A plugin that does nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surogate_core import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options."""

    strength: float = 1.0
    """How much of nothing."""


@hookimpl
def surogate_config_path() -> str:
    """Where the options are."""
    return "pkg://MODULE.conf"


@hookimpl
def surogate_recipe() -> bundles.RecipeSpec:
    """A recipe."""

    def build(options: Any, context: Any) -> Any:
        from MODULE.work import Made

        return Made()

    return bundles.RecipeSpec(name="NAME", build=build, options=Options)


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """A monitor."""

    def build(options: Any, info: Any) -> Any:
        from MODULE.work import Monitor

        return Monitor()

    return bundles.MonitorSpec(name="NAME", build=build, options=Options)
'''

WORK = '''"""What the plugin would do."""

from __future__ import annotations

from typing import Any

import torch
from surogate_core import bundles


class Made(bundles.Recipe):
    """x Wᵀ."""

    name = "NAME"

    def linear(self, x: torch.Tensor, weight: torch.Tensor, slot: Any) -> torch.Tensor:
        """In the dtype of both."""
        return x @ weight.t()


class Monitor:
    """Sees nothing."""

    def on_event(self, event: Any) -> None:
        """Nothing."""

    def state(self) -> dict[str, Any]:
        """None."""
        return {}

    def load_state(self, state: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
'''


def make_plugins(site: Path, count: int) -> None:
    """Distributions ``dummy-000`` … as an installer would leave them."""
    for number in range(count):
        name, module = f"dummy-{number:03}", f"dummy_{number:03}"
        info = site / f"{module}-1.0.dist-info"
        files = {
            site / module / "__init__.py": MODULE.replace("MODULE", module).replace("NAME", name),
            site / module / "work.py": WORK.replace("NAME", name),
            site / module / "conf/__init__.py": "",
            site / module / "conf/recipe/__init__.py": "",
            site / module / f"conf/recipe/{name}.yaml": f"name: {name}\nstrength: 1.0\n",
            site / module / "conf/monitor/__init__.py": "",
            site / module / f"conf/monitor/{name}.yaml": f"# @package monitor.{name}\nname: {name}\n",
            info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\nRequires-Dist: surogate-core>=0.1\n",
            info / "entry_points.txt": f"[surogate]\n{name} = {module}\n",
        }
        for file, text in files.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
        listed = "".join(f"{file.relative_to(site)},,\n" for file in files)
        (info / "RECORD").write_text(listed, encoding="utf-8")


def seconds(command: str, environ: Mapping[str, str]) -> float:
    """Of one process."""
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "surogate_core.cli.main", *command.split()],
        env=dict(environ), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.perf_counter() - begin


def main() -> int:
    """Measure and print; 1 when a command takes longer than it may."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plugins", type=int, default=100)
    parser.add_argument("--runs", type=int, default=7)
    arguments = parser.parse_args()
    late = 0
    with tempfile.TemporaryDirectory() as directory:
        make_plugins(Path(directory), arguments.plugins)
        environ = os.environ | {"PYTHONPATH": directory, "OMP_NUM_THREADS": "1"}
        for command, allowed in COMMANDS.items():
            seconds(command, environ)  # bytecode is written
            found = sorted(seconds(command, environ) for _ in range(arguments.runs))
            median = statistics.median(found)
            late += median >= allowed
            print(f"surogate {command}: {median:.3f} s, {found[0]:.3f} to {found[-1]:.3f}; allowed {allowed} s")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
