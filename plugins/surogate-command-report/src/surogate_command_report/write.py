"""Writing reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from surogate_command_report import html, markdown
from surogate_core.plugin import UserError, atomic, read_run
from surogate_core.service.files import RunRecord, find_runs, is_running

FORMS: Mapping[str, Callable[[Sequence[RunRecord]], str]] = {".html": html.render, ".md": markdown.render}
"""Suffix → the form of the report."""


def write_report(directories: Sequence[Path], *, output: Path | None = None) -> list[Path]:
    """The report of the runs in or below `directories`; returns the files, each the old one or whole.

    Without `output`, ``report.html`` and ``report.md``: in the directory, or here for several directories. Raises
    `UserError` for a directory without metrics or a suffix of `output` that is neither.
    """
    if output is not None and output.suffix not in FORMS:
        raise UserError(f"--output {output}: the name must end in .html or .md. Fix: {output.with_suffix('.html')}")
    runs = [read_run(directory, group=group) for directory, group in find_runs(directories)]
    for run in runs:
        run.live = is_running(run.directory)
    home = directories[0] if len(directories) == 1 else Path()
    files = [output] if output is not None else [home / f"report{suffix}" for suffix in FORMS]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = FORMS[file.suffix](runs)
        atomic.replace_file(file, text.encode(errors="replace"), key="--output" if output else "output_dir")
    return files
