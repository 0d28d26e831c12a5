"""An environment on top of this one, into which packages can be installed; nothing is fetched.

On the path of pytest (`pythonpath` in pyproject.toml): ``from environments import Environment``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path


class Environment:
    """A virtual environment below a directory, that sees what is installed here."""

    def __init__(self, directory: Path):
        venv.create(directory / "environment", with_pip=False)
        self.python = str(directory / "environment" / "bin" / "python")
        site = next((directory / "environment" / "lib").glob("python*/site-packages"))
        parents = [p for p in sys.path if p.endswith("site-packages")]
        (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in parents))

    def run(self, *arguments: str, cwd: Path, code: int = 0, **variables: str) -> str:
        """Run a module of the environment, which must end with that exit code; its output."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")}
        env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
        command = [self.python, "-m", *arguments]
        result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert result.returncode == code, f"{arguments}:\n{result.stdout}{result.stderr}"
        return result.stdout if code == 0 else result.stdout + result.stderr
