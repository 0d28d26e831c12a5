"""`surogate report`: curves, phases, advice and figures of runs, from the files that they left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surogate_core.errors import UserError

USAGE = """\
usage: surogate report DIR… [--output FILE]

  DIR…                 output directories of runs: finished, stopped, crashed or still going
  --output FILE        write FILE.html or FILE.md; without it report.html and report.md, in DIR for one run
                       and in the current directory for several, whose curves are overlaid

A run writes its own report when it ends. After a kill this command does.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    directories: list[Path] = []
    output: Path | None = None
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            print(USAGE, end="")
            return 0
        if flag == "--output":
            if not equals and not words:
                raise UserError("surogate report --output: a file must follow. Fix: --output report.html")
            output = Path(value if equals else words.pop(0)).expanduser()
        elif word.startswith("-"):
            raise UserError(f"surogate report: {word} is not known. Fix: `surogate report --help` shows the form")
        else:
            directories.append(Path(word).expanduser())
    if not directories:
        raise UserError("surogate report: no run is named. Fix: surogate report OUTPUT_DIR")
    from surogate_core.report.write import write_report

    for file in write_report(directories, output=output):
        print(file)
    return 0
