"""Pages whose code is run: their fenced blocks, and a shell to run them in.

On the path of pytest (`pythonpath` in pyproject.toml): ``from pages import Shell, blocks``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

_BLOCK = re.compile(r"(?:<!-- ([^>]+?) -->\n)?```(\w*)\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block, and the HTML comment right above it: what the tests do with it.

    ``file: PATH``: written there. ``run`` / ``run: exits N``: run by a shell. ``output``: its lines are in
    what the last run printed. ``from: PATH``: stands in that file word for word. ``fragment``: only to be read.
    """

    page: Path
    mark: str
    language: str
    text: str
    line: int

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, m[1] or "", m[2], m[3], text[: m.start(3)].count("\n")) for m in _BLOCK.finditer(text)]


class Shell:
    """An environment on top of this one, in which plugins can be installed and removed."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.work = directory / "work"
        self.work.mkdir()
        environment = directory / "environment"
        venv.create(environment, with_pip=False)
        self.bin = environment / "bin"
        ours = [p for p in sys.path if p.endswith("site-packages")]
        site = next((environment / "lib").glob("python*/site-packages"))
        (site / "parent.pth").write_text("".join(f"import site; site.addsitedir({p!r})\n" for p in ours))
        self.site = site
        for name, module in (("surogate", "surogate_core.cli.main"), ("pip", "pip")):
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec "{self.bin}/python" -m {module} "$@"\n')
            script.chmod(0o755)

    def run(self, script: str, *, exits: int = 0) -> str:
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")}
        env |= {"PATH": f"{self.bin}:{env['PATH']}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        env |= {
            "PIP_NO_INPUT": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "XDG_CACHE_HOME": str(self.directory / "cache"),
        }
        result = subprocess.run(
            ["bash", "-euc", script], cwd=self.work, env=env, text=True, capture_output=True, timeout=280, check=False
        )
        printed = result.stdout + result.stderr
        assert result.returncode == exits, f"exit code {result.returncode}, not {exits}:\n{script}\n{printed}"
        return printed

    def follow(self, page: Path) -> None:
        """Do what a page says, block by block; raises `AssertionError` where it is not so."""
        printed = ""
        for block in blocks(page):
            kind, _, argument = block.mark.partition(": ")
            if kind == "file":
                file = self.work / argument
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(block.text, encoding="utf-8")
            elif kind == "run":
                printed = self.run(block.text, exits=int(argument.removeprefix("exits ") or 0))
            elif kind == "output":
                seen = [" ".join(line.split()) for line in printed.splitlines()]
                for line in block.text.splitlines():
                    assert " ".join(line.split()) in seen, f"{block}: {line!r} was not printed:\n{printed}"
            else:
                assert block.language == "text", f"{block} has no mark"
