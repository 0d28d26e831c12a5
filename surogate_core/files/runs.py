"""The directory ``runs/``, where a run without an `output_dir` gets a directory of its own, and its ``latest``."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from surogate_core.errors import UserError
from surogate_core.files import atomic

RUNS = Path("runs")
"""Relative to the working directory."""

LATEST = "latest"
"""The link in `RUNS` to the run that began last; a file with its name where links are not possible."""

START = "start.json"
"""Marks a directory that a run did not name: the digest of what was asked for, and whether it is done."""


def point_latest(directory: Path) -> None:
    """Let ``latest`` lead to the run's directory if it is one of its own (or in one, as the runs of a sweep are).

    Several runs may do so at once: each replaces the link in one step. A file system that refuses changes nothing else.
    """
    own = next((p for p in (directory, directory.parent) if (p / START).is_file()), None)
    if own is None:
        return
    root = own.parent
    target, new = os.path.relpath(directory, root), root / f".{LATEST}-{os.getpid()}"
    with suppress(OSError):
        new.unlink(missing_ok=True)
        try:
            new.symlink_to(target, target_is_directory=True)
        except OSError:
            atomic.write_file(new, target.encode())
        new.replace(root / LATEST)
    with suppress(OSError):
        new.unlink(missing_ok=True)


def run_directory(name: str | Path) -> Path:
    """The directory that names a run: ``latest`` and ``runs/latest`` are the one that they lead to."""
    path = Path(name).expanduser()
    if path.name != LATEST or (path.is_dir() and not path.is_symlink()):
        return path
    link = path if os.path.lexists(path) or path.parent != Path() else RUNS / LATEST
    try:
        target = str(link.readlink()) if link.is_symlink() else link.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return link
    return link.parent / target


def among_runs(path: Path) -> bool:
    """Whether a path that is no directory means a run, and not a hub id: it is in ``runs/``, or there are runs beside
    it.
    """
    return path.parent == RUNS or (path.parent != Path() and any(path.parent.glob("*/run.json")))


def config_of_run(name: str | Path) -> Path | None:
    """The config.yaml of a run, or of the run that a checkpoint, an adapter or a model is part of; None without one."""
    path = run_directory(name)
    part = path.name in ("model", "adapter") or path.name.startswith("checkpoint-")
    places = (path, path.absolute().parent) if part else (path,)
    return next((place / "config.yaml" for place in places if (place / "config.yaml").is_file()), None)


def latest_run(*, command: str) -> Path:
    """The directory of the run that began last; raises `UserError` for `command` if there is none."""
    found = run_directory(RUNS / LATEST)
    if not found.is_dir() or found.name == LATEST:
        raise UserError(f"{command}: no run is named and there is no {RUNS / LATEST}. Fix: {command} RUN_DIRECTORY")
    return found
