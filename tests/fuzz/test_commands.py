"""A few of the cases through the whole command, in a process of its own: its exit code, its output, what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from surogate_core.plugins import load_plugins

sys.path.insert(0, str(Path(__file__).parent))
from test_configurations import Case, cases

PROGRAM = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"


def _run(case: Case, directory: Path) -> str:
    """Run it; what is wrong, or nothing."""
    home, work = directory / "home", directory / "work"
    home.mkdir(parents=True)
    work.mkdir()
    arguments = [a.encode("utf-8", "surrogatepass").decode("utf-8", "replace") for a in case.arguments]
    if case.file is not None:
        (work / "run.yaml").write_bytes(case.file)
        arguments.insert(0, "run.yaml")
    environment = {**os.environ, "HOME": str(home), "SUROGATE_LOG_DIR": str(home), "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(home / "cache")}
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, "tokenize", *arguments],
        cwd=work, env=environment, capture_output=True, timeout=300, check=False,
    )  # fmt: skip
    error = found.stderr.decode("utf-8", "replace")
    if found.returncode not in (0, 2, 3):
        return f"exit code {found.returncode}: {error[-2000:]}"
    if "Traceback" in error:
        return f"a traceback: {error[-2000:]}"
    odd = {c for c in error if not c.isprintable()} - set("\n\r\t\x1b")
    return f"unprintable characters {odd}" if odd else ""


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_commands(tmp_path: Path) -> None:
    load_plugins()
    wrong, codes = [], 0

    @seed(5)
    @settings(max_examples=10, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases())
    def one(case: Case) -> None:
        nonlocal codes
        codes += 1
        if complaint := _run(case, tmp_path / str(codes)):
            wrong.append(f"{case!r}\n{complaint}")

    one()
    sys.stdout.write(f"\n{codes} commands\n")
    assert not wrong, "\n\n".join(wrong)
