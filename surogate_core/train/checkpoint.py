"""Checkpoints: safetensors and JSON in a directory that is either whole or never chosen.

``checkpoint-<step>/`` holds ``<group>.safetensors`` for each group of tensors, ``state.json``, and
``manifest.json`` with every file's size and digest. The newest checkpoint is the one saved last, by
the manifest's sequence number: a run that started anew or went back to an earlier step overtakes
checkpoints of higher steps that an earlier run left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from surogate_core.errors import UserError
from surogate_core.train import atomic
from surogate_core.train.tensorfile import TensorFile, file_digest, nbytes, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Version of the directory's layout."""

_NAME = re.compile(r"checkpoint-(\d+)")
_HIDDEN = re.compile(r"\.(checkpoint-\d+)\.surogate-(?:tmp|old|trash)")
_MANIFEST = "manifest.json"
_STATE = "state.json"

log = structlog.get_logger(__name__)


class TornCheckpointError(UserError):
    """A checkpoint directory that is not what its manifest says; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a complete checkpoint directory holds."""

    step: int
    sequence: int
    """Order of saving in the directory, over all runs."""
    files: Mapping[str, tuple[int, str]]
    """File name → (bytes, xxh3-128 digest)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files were found whole."""

    path: Path
    step: int
    """Optimizer steps done."""
    state: Mapping[str, Any]
    """The JSON state that was saved."""
    groups: tuple[str, ...]
    """Names of the groups of tensors."""

    def tensors(self, group: str) -> TensorFile:
        """The group's tensors by name; each is read from disk when it is looked up."""
        return TensorFile(self.path / f"{group}.safetensors")


class CheckpointDir:
    """The checkpoints of a run under one directory, the newest `limit` of them kept."""

    def __init__(self, root: Path, *, limit: int):
        assert limit >= 1
        self.root = root
        self.limit = limit
        self.skipped: list[str] = []
        """Why the last `latest_good` passed over a directory, one sentence each."""
        self._recovered = False

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Write ``checkpoint-<step>`` from groups of named tensors (any device) and a JSON state.

        `progress` is told the bytes of tensors that are written, and all.

        When this returns the checkpoint is durable and older ones beyond `limit` are gone. When it
        raises (`MachineError`: disk full or failing; `UserError`: not writable), nothing has changed.
        """
        if not self._recovered:
            self.recover()
        final = self.root / f"checkpoint-{step}"
        # Python's NaN and Infinity are kept: only this module reads the file back.
        state_bytes = json.dumps(state, indent=1).encode()
        needed = sum(nbytes(t) + 256 for group in tensors.values() for t in group.values()) + len(state_bytes) + 4096
        total, done = sum(nbytes(t) for group in tensors.values() for t in group.values()), 0

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        fix = "free space, point checkpoint_dir to another disk, or lower save_total_limit; older checkpoints are kept"
        sequence = 1 + max((manifest.sequence for _, manifest in self._ours()), default=0)
        self._set_aside_foreign(final)
        with atomic.replaced_directory(final, what="checkpoint", needed=needed, fix=fix) as directory:
            files: dict[str, tuple[int, str]] = {}
            for group, named in tensors.items():
                files[f"{group}.safetensors"] = write_tensors(directory / f"{group}.safetensors", named, wrote=wrote)
            atomic.write_file(directory / _STATE, state_bytes)
            files[_STATE] = (len(state_bytes), file_digest(directory / _STATE))
            _write_manifest(directory, Manifest(step=step, sequence=sequence, files=files))
        self._rotate(final)
        return final

    def latest_good(self) -> Checkpoint | None:
        """The checkpoint saved last that is whole, every digest verified; None if there is none.

        Settles what killed runs left in the directory first. `skipped` then says which directories
        were passed over and why; directories of other programs are not listed and never touched.
        """
        self.skipped = []
        self.recover()
        for path, _ in sorted(self._ours(), key=_newest_last, reverse=True):
            try:
                return self.load(path)
            except TornCheckpointError as error:
                self.skipped.append(str(error))
        return None

    def recover(self) -> None:
        """Settle what killed runs left; for the run that owns the directory, not for readers."""
        self._recovered = True
        if not self.root.is_dir():
            return
        names = {match[1] for p in self.root.iterdir() if (match := _HIDDEN.fullmatch(p.name))}
        for name in sorted(names):
            try:
                atomic.recover(self.root / name)
            except OSError as error:
                raise atomic.disk_error(error, what="leftovers of checkpoint", path=self.root / name) from error

    @staticmethod
    def load(path: Path) -> Checkpoint:
        """The checkpoint at `path`, every digest verified; raises `UserError` with the reason if it is not whole."""
        if not path.is_dir():
            raise UserError(f"{path}: there is no checkpoint here.")
        if not (path / _MANIFEST).exists() and (inside := sorted(p.name for p in path.glob("checkpoint-*"))):
            raise UserError(f"{path}: not a checkpoint; it holds {', '.join(inside)}. Fix: name one of them.")
        manifest = read_manifest(path)
        verify(path, manifest, digests=True)
        state = json.loads((path / _STATE).read_bytes())
        groups = tuple(n.removesuffix(".safetensors") for n in manifest.files if n.endswith(".safetensors"))
        return Checkpoint(path=path, step=manifest.step, state=state, groups=groups)

    def _ours(self) -> list[tuple[Path, Manifest]]:
        """The directories here that have a manifest of ours, whole or torn."""
        found: list[tuple[Path, Manifest]] = []
        if self.root.is_dir():
            for path in self.root.iterdir():
                if _NAME.fullmatch(path.name) and path.is_dir():
                    with suppress(TornCheckpointError):
                        found.append((path, read_manifest(path)))
        return found

    def _rotate(self, newest: Path) -> None:
        """Delete the checkpoints before the newest `limit` good ones."""
        good = []
        ours = sorted(self._ours(), key=_newest_last)
        for path, manifest in ours:
            with suppress(TornCheckpointError):
                verify(path, manifest, digests=False)
                good.append((path, manifest))
        assert good, f"{newest} was complete a moment ago"
        oldest_kept = good[-self.limit :][0][1].sequence
        for path, manifest in ours:
            if manifest.sequence < oldest_kept and path != newest:
                try:
                    atomic.remove_directory(path)
                except OSError as error:
                    log.warning("an old checkpoint could not be deleted", path=str(path), reason=str(error))

    def _set_aside_foreign(self, final: Path) -> None:
        """Move a directory that no save of ours made out of the way, rather than delete a stranger's files."""
        if not final.is_dir():
            return
        try:
            read_manifest(final)
        except TornCheckpointError:
            number = 1
            while (aside := final.with_name(f"{final.name}.kept-{number}")).exists():
                number += 1
            log.warning("the name of a new checkpoint was taken; the old directory was renamed", to=str(aside))
            try:
                final.rename(aside)
            except OSError as error:
                raise atomic.disk_error(error, what="checkpoint", path=final) from error


def _newest_last(item: tuple[Path, Manifest]) -> tuple[int, int]:
    return item[1].sequence, item[1].step


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    value = {
        "format": FORMAT,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "files": {name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in manifest.files.items()},
    }
    atomic.write_file(directory / _MANIFEST, json.dumps(value, indent=1).encode())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`; raises `TornCheckpointError`."""
    try:
        value = json.loads((path / _MANIFEST).read_bytes())
        if value["format"] != FORMAT:
            raise TornCheckpointError(
                f"{path}: layout {value['format']} is not known to this version, which reads {FORMAT}"
            )
        files = {str(name): (int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in value["files"].items()}
        return Manifest(step=int(value["step"]), sequence=int(value["sequence"]), files=files)
    except FileNotFoundError as error:
        raise TornCheckpointError(f"{path}: not a complete checkpoint: {_MANIFEST} is missing") from error
    except TornCheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TornCheckpointError(f"{path}: {_MANIFEST} cannot be read: {error}") from error


def verify(path: Path, manifest: Manifest, *, digests: bool) -> None:
    """Hold the files against the manifest: sizes, and with `digests` every byte; raises `TornCheckpointError`."""
    for name, (size, digest) in manifest.files.items():
        file = path / name
        try:
            found = file.stat().st_size
            if found != size:
                raise TornCheckpointError(f"{path}: {name} has {found} bytes, not {size}")
            if digests and file_digest(file) != digest:
                raise TornCheckpointError(f"{path}: {name} was altered: its digest is not the manifest's")
        except OSError as error:
            raise TornCheckpointError(f"{path}: {name} cannot be read: {error.strerror}") from error


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any], *, path: Path) -> list[str]:
    """Refuse to resume a run that is not this one; returns warnings about what may differ.

    Both mappings have ``essential`` (dotted key → JSON value that shapes the weights or the optimizer's
    state: the model's fingerprint, LoRA settings, the optimizer's name) and ``plugins`` (name → version).
    A differing essential value or set of plugin names raises one `UserError` that lists every
    difference; a differing version is a warning.
    """
    differences = []
    before, now = _as_json(saved.get("essential", {})), _as_json(current["essential"])
    for key in sorted(before.keys() | now.keys()):
        if key not in before or key not in now or before[key] != now[key]:
            differences.append(f"{key}: {_shown(before, key)} in the checkpoint, {_shown(now, key)} in this run")
    had, has = saved.get("plugins", {}), current["plugins"]
    differences += [f"plugin {name}: used by the checkpoint, not by this run" for name in sorted(had.keys() - has)]
    differences += [f"plugin {name}: used by this run, not by the checkpoint" for name in sorted(has.keys() - had)]
    if differences:
        listed = "\n".join(f"  - {line}" for line in differences)
        # An optimizer is named even by who never chose one: the default may be another than when the run began.
        name = before.get("optimizer")
        other = name is not None and now.get("optimizer") != name
        raise UserError(
            f"{path}: this checkpoint is of another run, which differs in:\n{listed}\n"
            "Fix: set resume_from_checkpoint=false to start anew, choose another output_dir, or restore the settings"
            f"{f': optimizer={name}' if other else ''}."
        )
    return [
        f"plugin {name} was version {had[name]} when the checkpoint was saved and is {has[name]} now"
        for name in sorted(has)
        if had[name] != has[name]
    ]


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """As the values are after a round trip through a checkpoint: tuples are lists."""
    restored: dict[str, Any] = json.loads(json.dumps(values))
    return restored


def _shown(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "absent"
    text = json.dumps(values[key])
    return text if len(text) <= 60 else f"{text[:57]}…"
