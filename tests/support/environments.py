"""Environments on top of this one, into which packages can be installed; nothing is fetched.

On the path of pytest (`pythonpath` in pyproject.toml): ``from environments import Environment``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from fnmatch import fnmatch
from pathlib import Path


class Environment:
    """A virtual environment below a directory, that sees what is installed here.

    `without`: it does not see distributions of these names, however they are installed; ``surogate*`` is all of ours.
    """

    def __init__(self, directory: Path, *, without: str | None = None):
        venv.create(directory / "environment", with_pip=False)
        self.python = str(directory / "environment" / "bin" / "python")
        self.site = next((directory / "environment" / "lib").glob("python*/site-packages"))
        parents = [p for p in sys.path if p.endswith("site-packages")]
        if without is None:
            (self.site / "parent.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in parents))
            return
        for entry in (entry for parent in parents for entry in Path(parent).iterdir()):
            # A .pth file is what makes an editable install visible.
            if entry.suffix != ".pth" and not fnmatch(entry.name, without) and not (self.site / entry.name).exists():
                (self.site / entry.name).symlink_to(entry)

    def run(self, *arguments: str, cwd: Path, code: int = 0, **variables: str) -> str:
        """Run a module of the environment, which must end with that exit code; its output."""
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")}
        env |= {"OMP_NUM_THREADS": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables}
        command = [self.python, "-m", *arguments]
        result = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False)
        assert result.returncode == code, f"{arguments}:\n{result.stdout}{result.stderr}"
        return result.stdout if code == 0 else result.stdout + result.stderr
