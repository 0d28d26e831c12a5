"""The directory of a run: `output_dir`, or one of its own under ``runs/``.

A run without `output_dir` gets ``runs/NAME-DATE-TIME``. Its file ``start.json`` has a digest of the configuration and
of the local data files. The same configuration on the same data resumes the run that it began, if that is not done.
Every other one gets a new directory.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from filelock import FileLock, Timeout

from surogate_core.conf_paths import expanded
from surogate_core.config.resolve import to_dict
from surogate_core.errors import MachineError, PluginError, UserError
from surogate_core.files import atomic
from surogate_core.files.foreign import read_json
from surogate_core.files.hub import split_revision
from surogate_core.files.metrics import has_run
from surogate_core.files.paths import PACKAGE_SCHEME, is_url
from surogate_core.files.runs import RUNS, START

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig

WATCHING = frozenset(
    """
    output_dir resume_from_checkpoint monitor report_to log_gpu_util log_expert_loads log_file plugins
    dataloader_num_workers gpus launcher fabric max_restarts
    """.split()  # noqa: SIM905
)
"""Keys that may differ between a run and its resumption: they change neither the training nor the name of the run.

A resumed run keeps the micro-batches of a step on any number of `gpus`.
"""

CONTENT_BYTES = 64 * 2**20
"""Bytes of a data set that are recognised by their contents; files beyond them by their sizes and times."""

_NAMELESS = frozenset({"train", "training", "data", "dataset"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The directory of a run, or of a sweep, while it is being written to."""

    directory: Path
    note: str = ""
    """What the user should know of the choice; empty if there is nothing."""
    digest: str = ""
    """The digest of what was asked for; empty for a directory that the user named."""

    def done(self) -> None:
        """The same request begins anew from now on."""
        if self.digest:
            _write(self.directory, {"asked": self.digest, "done": True})


@contextmanager
def placed(config: RunConfig) -> Iterator[tuple[RunConfig, Place]]:
    """The configuration with the run's directory in it. No other process gets that directory meanwhile.

    Raises `UserError` or `MachineError` where nothing can be written. A new directory is deleted again if the run is
    refused before it trains.
    """
    if config.output_dir is not None:
        yield config, Place(directory=Path(config.output_dir))
        return
    anew = config.resume_from_checkpoint is not True
    with claimed(asked_of([config]), name=_name(config), anew=anew, extend="max_steps or num_epochs") as place:
        yield replace(config, output_dir=str(place.directory)), place


@contextmanager
def claimed(asked: Any, *, name: str, anew: bool = False, extend: str = "") -> Iterator[Place]:
    """A directory under ``runs/`` for what is `asked` (JSON values): that of an equal request that is not done, or new.

    `anew`: always a new one. `extend`: the keys that prolong a run that is done, for the note about it.
    """
    atomic.ensure_writable(RUNS, key="output_dir")
    digest = xxhash.xxh3_128(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
    with FileLock(RUNS / ".lock"):
        claim, note = None, ""
        equal = [] if anew else _equal(digest)
        for directory in (d for d, done in equal if not done):
            if (claim := _claim(directory)) is not None:
                note = f"Resuming {directory}, which the same configuration began. To start anew: output_dir=ANOTHER"
                break
        new = claim is None
        if claim is None:
            directory = _new(name)
            _write(directory, {"asked": digest})
            claim = _claim(directory)
            finished = [d for d, done in equal if done]
            if finished and extend:
                note = f"{finished[0]} has finished with the same configuration; this run is a new one, in {directory}."
                note += f" To train {finished[0].name} on: output_dir={finished[0]} with more {extend}"
    assert claim is not None
    try:
        yield Place(directory=directory, note=note, digest=digest)
    except (UserError, MachineError) as error:
        # The traceback of a plugin's error is in the log.
        if new and not isinstance(error, PluginError) and not began(directory):
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        claim.release()


def asked_of(configs: Sequence[RunConfig]) -> dict[str, Any]:
    """What makes a run, or the runs of a sweep, the same: the configurations, and the data."""
    values = [{key: value for key, value in to_dict(c).items() if key not in WATCHING} for c in configs]
    entries = [entry for config in configs for entry in (*config.datasets, *config.validation_datasets)]
    paths = sorted({str(entry.get("path", "")) for entry in entries})
    return {"configurations": values, "data": {path: _contents(path) for path in paths}}


def _contents(path: str) -> list[Any]:
    """(name, size, digest or time) of each local file of a data set; none for an id or an address."""
    if path.startswith(PACKAGE_SCHEME) or is_url(path):
        return []
    root = Path(expanded(path))
    try:
        files = sorted(p for p in root.rglob("*") if p.is_file()) if root.is_dir() else [root]
    except OSError as error:
        shown = path if len(path) <= 80 else f"{path[:79]}…"
        raise UserError(f"data set {shown}: cannot be read: {error.strerror}.") from error
    found, left = [], CONTENT_BYTES
    for file in files:
        with suppress(OSError):
            stat = file.stat()
            what: str | int = stat.st_mtime_ns
            if stat.st_size <= left:
                left -= stat.st_size
                what = xxhash.xxh3_128(file.read_bytes()).hexdigest()
            found.append([str(file.relative_to(root)), stat.st_size, what])
    return found


def _name(config: RunConfig) -> str:
    """The name of the run, or model, task and data in short."""
    if config.run_name:
        return _short(config.run_name)
    model = config.model
    shape = Path(split_revision(model.path)[0]).name if model.path else f"{model.name}-{model.preset or 'model'}"
    path = str(config.datasets[0].get("path", "")) if config.datasets else ""
    data = Path(path.removeprefix("pkg://").rstrip("/"))
    stem = data.name.partition(".")[0]
    source = data.parent.name if stem.lower() in _NAMELESS and data.parent.name else stem
    return _short("-".join(part for part in (shape, config.task if config.task != "sft" else "", source) if part))


def _short(text: str) -> str:
    """The text as a part of a directory's name."""
    return re.sub(r"[^\w.-]+", "-", text).strip("-.")[:60] or "run"


def _new(name: str) -> Path:
    """Make a directory that no other run has."""
    stem, number = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}", 1
    while True:
        directory = RUNS / (stem if number == 1 else f"{stem}-{number}")
        try:
            directory.mkdir()
        except FileExistsError:
            number += 1
        except OSError as error:
            raise atomic.disk_error(error, what="output_dir", path=directory) from error
        else:
            return directory


def _equal(digest: str) -> list[tuple[Path, bool]]:
    """(directory, whether it is done) of equal requests, the latest first."""
    found = []
    for file in RUNS.glob(f"*/{START}"):
        if file.parent.is_symlink():
            continue
        start = _read(file)
        if start.get("asked") == digest:
            found.append((file.stat().st_mtime_ns, file.parent, bool(start.get("done"))))
    return [(directory, done) for _, directory, done in sorted(found, reverse=True)]


def _claim(directory: Path) -> FileLock | None:
    """A lock on the directory until it is released or the process ends; None if another process has it."""
    # Not the lock of the run itself: a launcher may start that in another process.
    lock = FileLock(directory / ".claim")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    return lock


def began(directory: Path) -> bool:
    """Whether a run has begun in the directory or below it, as the runs of a sweep do."""
    marks = ("run.json", "checkpoint-*")
    return any(any(directory.rglob(mark)) for mark in marks) or any(map(has_run, directory.rglob("metrics.jsonl")))


def _read(file: Path) -> Mapping[str, Any]:
    try:
        values = read_json(file)
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _write(directory: Path, values: Mapping[str, Any]) -> None:
    atomic.replace_file(directory / START, (json.dumps(values) + "\n").encode(), key="output_dir")
