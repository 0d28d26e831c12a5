"""Checkpoints: safetensors and JSON in a directory that is either whole or never chosen.

``checkpoint-<step>/`` holds ``<group>.safetensors`` for each group of tensors, ``state.json``, and
``manifest.json`` with every file's size and digest. The newest checkpoint is the one saved last, by
the manifest's sequence number: a run that started anew or went back to an earlier step overtakes
checkpoints of higher steps that an earlier run left.

A save deletes only older checkpoints of its own run, by the run id of the manifest, and only those
that it could read. Everything else stays under its name, or is renamed when a new checkpoint needs the name.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import xxhash

from surogate_core.errors import MachineError, SurogateError, UserError, printable
from surogate_core.files import atomic
from surogate_core.files.tensorfile import Deferred, TensorFile, file_digest, nbytes, write_tensors

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Version of the directory's layout."""

_NAME = re.compile(r"checkpoint-(\d{1,18})")
_KEPT = re.compile(r"checkpoint-\d{1,18}\.kept-\d+")
_HIDDEN = re.compile(r"\.(checkpoint-\d+)\.surogate-(?:tmp|old|trash)")
_DAMAGE = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.ELOOP)
_REFUSED = (errno.EACCES, errno.EPERM)
MANIFEST = "manifest.json"
_STATE = "state.json"
_DIGEST = "xxh3_128"
_FIX = "free space, point checkpoint_dir to another disk, or lower save_total_limit"
LONGEST_REASON = 2000
"""Characters of the reason why a checkpoint is not whole."""

log = structlog.get_logger(__name__)


class TornCheckpointError(UserError):
    """A checkpoint directory that is not what its manifest says; the message is the reason."""

    def __init__(self, message: str):
        super().__init__(printable(message)[:LONGEST_REASON])  # a manifest may hold any text


class UnreadableCheckpointError(UserError):
    """A checkpoint that this user may not read; it may be whole."""


class FailedReadError(MachineError):
    """A checkpoint that the disk did not give; it may be whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of a complete checkpoint directory."""

    step: int
    sequence: int
    """Order of saving in the directory, over all runs."""
    files: Mapping[str, tuple[int, str]]
    """File name → (bytes, xxh3-128 digest)."""
    run: str = ""
    """Id of the run that saved it; empty where a version before run ids did."""


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
    run: str = ""
    """Id of the run that saved it; empty where a version before run ids did."""

    def tensors(self, group: str) -> TensorFile:
        """The group's tensors by name; each is read from disk when it is looked up."""
        return TensorFile(self.path / f"{group}.safetensors")


class CheckpointDir:
    """The checkpoints under one directory; a run keeps the newest `limit` of its own."""

    def __init__(self, root: Path, *, limit: int, run: str = ""):
        """`run`: the id that saves write, whose older checkpoints they delete."""
        assert limit >= 1
        self.root = root
        self.limit = limit
        self.run = run
        self.kept_step: int | None = None
        """A step of this run whose checkpoint is kept beyond `limit`."""
        self.skipped: list[str] = []
        """Why the last `latest_good` did not choose a directory, one sentence each."""
        self._unusable: set[Path] = set()
        self._recovered = False

    def save(
        self,
        step: int,
        *,
        tensors: Mapping[str, Mapping[str, Tensor | Deferred]],
        state: Mapping[str, Any],
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Path:
        """Write ``checkpoint-<step>`` from groups of named tensors (any device) and a JSON state.

        `progress` receives the bytes of tensors written so far, and their total.

        When this returns the checkpoint is durable and this run's older ones beyond `limit` are gone. When it
        raises (`MachineError`: disk full or failing; `UserError`: not writable), nothing has changed.
        """
        if not self._recovered:
            self.recover()
        final = self.root / f"checkpoint-{step}"
        # Python's NaN and Infinity are kept: only this module reads the file back.
        state_bytes = json.dumps(state, indent=1).encode()
        needed = _bytes_on_disk(tensors) + len(state_bytes)
        total, done = sum(nbytes(t) for group in tensors.values() for t in group.values()), 0

        def wrote(count: int) -> None:
            nonlocal done
            done += count
            progress(done, total)

        sequence = 1 + max((manifest.sequence for _, manifest in self._ours()), default=0)
        self._set_aside(final)
        with atomic.replaced_directory(
            final, what="checkpoint", needed=needed, fix=f"{_FIX}; older checkpoints are kept"
        ) as directory:
            files: dict[str, tuple[int, str]] = {}
            for group, named in tensors.items():
                files[f"{group}.safetensors"] = write_tensors(directory / f"{group}.safetensors", named, wrote=wrote)
            atomic.write_file(directory / _STATE, state_bytes)
            files[_STATE] = (len(state_bytes), file_digest(directory / _STATE))
            _write_manifest(directory, Manifest(step=step, sequence=sequence, files=files, run=self.run))
        self._rotate(final)
        return final

    def check_room(self, steps: Sequence[int], tensors: Mapping[str, Mapping[str, Tensor | Deferred]]) -> None:
        """Raise `MachineError` if the disk has no room for the checkpoints of these coming steps.

        An old one is deleted when the new one is complete, so there is one more than `limit` for a while.
        """
        if not steps:
            return
        here = sum(self._is_own_and_whole(path, manifest) for path, manifest in self._ours())
        count = max(1, min(here + len(steps), self.limit + 1) - here)
        size = _bytes_on_disk(tensors)
        if count * size > atomic.free_bytes(self.root):
            several = f" ({count} more of {atomic.human_bytes(size)} each, before one is deleted)" if count > 1 else ""
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            final = self.root / f"checkpoint-{steps[0]}"
            raise atomic.disk_error(full, what="checkpoint", path=final, needed=count * size, fix=f"{_FIX}{several}")

    def latest_good(self) -> Checkpoint | None:
        """The checkpoint saved last that is whole, every digest verified; None where there is no checkpoint.

        Settles what killed runs left in the directory first. `skipped` then says which directories were not chosen
        and why. Raises `UserError`, or `MachineError` for a failing disk, with the reason
        for each if there are checkpoints here and none can be used.
        """
        self.skipped = []
        self.recover()
        readable: list[tuple[Path, Manifest]] = []
        refused: list[tuple[Path, SurogateError]] = []
        for path in self._named(_NAME):
            try:
                readable.append((path, read_manifest(path)))
            except SurogateError as error:
                refused.append((path, error))
        chosen, newer = None, set()
        for path, _ in sorted(readable, key=_newest_last, reverse=True):
            try:
                chosen = self.load(path)
                break
            except SurogateError as error:
                refused.append((path, error))
                newer.add(path)
        self._unusable = {path for path, _ in refused}
        if chosen is None and refused:
            raise self._none_usable([error for _, error in sorted(refused, reverse=True, key=_by_step)])
        if chosen is not None:
            for path, reason in sorted(refused, reverse=True, key=_by_step):
                # Without a manifest only the name says when it was saved.
                earlier = path in newer or _step(path) > chosen.step
                then = f"an earlier checkpoint is used, {chosen.path.name}" if earlier else "it is left as it is"
                self.skipped.append(f"{reason}; {then}.")
        return chosen

    def _none_usable(self, errors: list[SurogateError]) -> SurogateError:
        kind = MachineError if any(isinstance(e, MachineError) for e in errors) else UserError
        reasons = "\n".join(f"  - {error}" for error in errors)
        several = f"there are {len(errors)} checkpoints, but none can be used"
        what = several if len(errors) > 1 else "there is a checkpoint, but it cannot be used"
        return kind(
            f"{self.root}: {what}:\n{reasons}\n"
            "Fix: make one readable, restore an intact copy, or start anew with resume_from_checkpoint=false, "
            "which deletes none of them."
        )

    def names(self) -> list[str]:
        """The names of the checkpoints here by step, whole or not."""
        return [path.name for path in sorted(self._named(_NAME), key=_step)]

    def left_over(self) -> list[Path]:
        """The directories here that a save of this run will never delete: another run's, unusable and renamed ones."""
        found = self._named(_KEPT)
        for path in self._named(_NAME):
            try:
                own = read_manifest(path).run == self.run and path not in self._unusable
            except SurogateError:
                own = False
            if not own:
                found.append(path)
        return sorted(found, key=_by_step_and_name)

    def recover(self) -> None:
        """Settle what killed runs left; for the run that owns the directory, not for readers."""
        self._recovered = True
        names = {match[1] for p in self._named(_HIDDEN) if (match := _HIDDEN.fullmatch(p.name))}
        for name in sorted(names):
            try:
                atomic.recover(self.root / name)
            except OSError as error:
                raise atomic.disk_error(error, what="leftovers of checkpoint", path=self.root / name) from error

    @staticmethod
    def load(path: Path, *, digests: bool = True) -> Checkpoint:
        """The checkpoint at `path`, every digest verified unless another rank has done that.

        Raises `UserError` with the reason if it is not whole or may not be read, `MachineError` if the disk fails.
        """
        if not os.path.lexists(path):
            raise UserError(f"{path}: there is no checkpoint here.")
        if not os.path.lexists(path / MANIFEST) and (inside := sorted(p.name for p in path.glob("checkpoint-*"))):
            raise UserError(f"{path}: not a checkpoint; it holds {', '.join(inside)}. Fix: name one of them.")
        manifest = read_manifest(path)
        verify(path, manifest, digests=digests)
        try:
            state = json.loads((path / _STATE).read_bytes())
        except OSError as error:
            raise read_error(path, _STATE, error) from error
        except ValueError as error:
            raise TornCheckpointError(f"{path}: {_STATE} cannot be read: {error}") from error
        if not isinstance(state, dict):
            raise TornCheckpointError(f"{path}: {_STATE} does not hold a JSON object")
        groups = tuple(n.removesuffix(".safetensors") for n in manifest.files if n.endswith(".safetensors"))
        return Checkpoint(path=path, step=manifest.step, state=state, groups=groups, run=manifest.run)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        """Every entry of the directory with such a name, of any kind."""
        try:
            return [path for path in self.root.iterdir() if pattern.fullmatch(path.name)]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise read_error(self.root, "the directory", error) from error

    def _ours(self) -> list[tuple[Path, Manifest]]:
        """The directories here that have a manifest that can be read, whole or torn, of any run."""
        found: list[tuple[Path, Manifest]] = []
        for path in self._named(_NAME):
            with suppress(SurogateError):
                found.append((path, read_manifest(path)))
        return found

    def _is_own_and_whole(self, path: Path, manifest: Manifest) -> bool:
        """Whether this run saved it, and nothing is wrong with it that shows without reading all its bytes."""
        if manifest.run != self.run or path in self._unusable:
            return False
        try:
            verify(path, manifest, digests=False)
        except SurogateError:
            return False
        return True

    def _rotate(self, newest: Path) -> None:
        """Delete this run's whole checkpoints before the newest `limit`; what is torn or not its own stays."""
        own = [(path, manifest) for path, manifest in self._ours() if self._is_own_and_whole(path, manifest)]
        assert any(path == newest for path, _ in own), f"{newest} was complete a moment ago"
        for path, manifest in sorted(own, key=_newest_last)[: -self.limit]:
            if manifest.step == self.kept_step:
                continue
            try:
                atomic.remove_directory(path)
            except OSError as error:
                log.warning("an old checkpoint could not be deleted", path=str(path), reason=str(error))

    def _set_aside(self, final: Path) -> None:
        """Rename what has the name of a new checkpoint, unless it is this run's own and whole, which is replaced."""
        if not os.path.lexists(final):
            self._unusable.discard(final)  # what was here before has been deleted by hand
            return
        with suppress(SurogateError):
            if self._is_own_and_whole(final, read_manifest(final)):
                return
        number = 1
        while os.path.lexists(aside := final.with_name(f"{final.name}.kept-{number}")):
            number += 1
        log.warning("the name of a new checkpoint was taken; the old directory was renamed", to=str(aside))
        try:
            final.rename(aside)
        except OSError as error:
            raise atomic.disk_error(error, what="checkpoint", path=final) from error
        self._unusable.discard(final)


def _bytes_on_disk(tensors: Mapping[str, Mapping[str, Tensor | Deferred]]) -> int:
    """What the files of a checkpoint take, but for the state."""
    return sum(nbytes(t) + 256 for group in tensors.values() for t in group.values()) + 4096


def _newest_last(item: tuple[Path, Manifest]) -> tuple[int, int]:
    return item[1].sequence, item[1].step


def _step(path: Path) -> int:
    """The step in a checkpoint's name."""
    return int(path.name.removeprefix("checkpoint-").partition(".")[0])


def _by_step(item: tuple[Path, object]) -> int:
    return _step(item[0])


def _by_step_and_name(path: Path) -> tuple[int, str]:
    return _step(path), path.name


def read_error(path: Path, name: str, error: OSError) -> SurogateError:
    """The error to raise for a failed read: damage, no permission, or a fault of the disk."""
    message = f"{path}: {name} cannot be read: {error.strerror or error}"
    if error.errno in _DAMAGE:
        return TornCheckpointError(message)
    return (UnreadableCheckpointError if error.errno in _REFUSED else FailedReadError)(message)


def _write_manifest(directory: Path, manifest: Manifest) -> None:
    value = {
        "format": FORMAT,
        "step": manifest.step,
        "sequence": manifest.sequence,
        "run": manifest.run,
        "files": {name: {"bytes": size, "xxh3_128": digest} for name, (size, digest) in manifest.files.items()},
    }
    atomic.write_file(directory / MANIFEST, json.dumps({**value, _DIGEST: manifest_digest(value)}, indent=1).encode())


def manifest_digest(value: Mapping[str, Any]) -> str:
    """The xxh3-128 digest of a manifest's values, its own digest left out; a flipped digit would name another step."""
    others = {key: item for key, item in value.items() if key != _DIGEST}
    return str(xxhash.xxh3_128(json.dumps(others, sort_keys=True).encode()).hexdigest())


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint directory `path`.

    Raises `TornCheckpointError`, `UnreadableCheckpointError` or `FailedReadError`.
    """
    try:
        _require_file(path, MANIFEST)
        value = json.loads((path / MANIFEST).read_bytes())
        if value["format"] != FORMAT:
            raise TornCheckpointError(
                f"{path}: {MANIFEST} is of layout {value['format']}, and this version reads layout {FORMAT}"
            )
        # Manifests of earlier versions have no digest of their own.
        if _DIGEST in value and value[_DIGEST] != manifest_digest(value):
            raise TornCheckpointError(f"{path}: {MANIFEST} was altered: its digest is not that of its values")
        files = {str(name): (int(entry["bytes"]), str(entry["xxh3_128"])) for name, entry in value["files"].items()}
        manifest = Manifest(
            step=int(value["step"]), sequence=int(value["sequence"]), files=files, run=str(value.get("run", ""))
        )
    except FileNotFoundError as error:
        raise TornCheckpointError(f"{path}: not a complete checkpoint: {MANIFEST} is missing") from error
    except TornCheckpointError:
        raise
    except OSError as error:
        raise read_error(path, MANIFEST, error) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TornCheckpointError(f"{path}: {MANIFEST} cannot be read: {type(error).__name__}: {error}") from error
    if _STATE not in files or any(Path(name).name != name for name in files):
        raise TornCheckpointError(f"{path}: {MANIFEST} is not one of a checkpoint: it lists {sorted(files)[:5]}")
    return manifest


def verify(path: Path, manifest: Manifest, *, digests: bool) -> None:
    """Check that each file opens and has its size, and with `digests` every byte.

    Raises `TornCheckpointError`, `UnreadableCheckpointError` or `FailedReadError`.
    """
    for name, (size, digest) in manifest.files.items():
        try:
            _require_file(path, name)
            with (path / name).open("rb") as file:
                found = os.fstat(file.fileno()).st_size
            if found != size:
                raise TornCheckpointError(f"{path}: {name} has {found} bytes, not {size}")
            if digests and file_digest(path / name) != digest:
                raise TornCheckpointError(f"{path}: {name} was altered: its digest differs from the manifest's")
        except FileNotFoundError as error:
            raise TornCheckpointError(f"{path}: {name} is missing") from error
        except OSError as error:
            raise read_error(path, name, error) from error


def _require_file(path: Path, name: str) -> None:
    """Raise `TornCheckpointError` if it exists but is not a file: opening a pipe would wait forever."""
    if not stat.S_ISREG((path / name).stat().st_mode):
        raise TornCheckpointError(f"{path}: {name} cannot be read: it is no regular file")


def check_compatible(saved: Mapping[str, Any], current: Mapping[str, Any], *, path: Path) -> list[str]:
    """Refuse to resume a run that is not this one; returns warnings about what may differ.

    Both mappings have ``essential`` (dotted key → JSON value that shapes the weights or the optimizer's
    state: the model's fingerprint, LoRA settings, the optimizer's name) and ``plugins`` (name → version).
    A differing essential value or set of plugin names raises one `UserError` that lists every
    difference; a differing version is a warning. Another base model is the cause of its configuration's differences,
    which are then left out.
    """
    differences = []
    before, now = _as_json(saved.get("essential", {})), _as_json(current["essential"])
    other_base = before.get("model") != now.get("model") and saved.get("base_model") is not None
    if other_base:
        differences.append(_bases(saved.get("base_model"), current.get("base_model")))
    for key in sorted(before.keys() | now.keys()):
        if other_base and (key == "model" or key.startswith("model.")):
            continue
        if key not in before or key not in now or before[key] != now[key]:
            differences.append(f"{key}: {shown(before, key)} in the checkpoint, {shown(now, key)} in this run")
    had, has = saved.get("plugins", {}), current["plugins"]
    differences += [f"plugin {name}: used by the checkpoint, not by this run" for name in sorted(had.keys() - has)]
    differences += [f"plugin {name}: used by this run, not by the checkpoint" for name in sorted(has.keys() - had)]
    if differences:
        listed = "\n".join(f"  - {line}" for line in differences)
        # An optimizer is named even by who never chose one: the default may be another than when the run began.
        name = before.get("optimizer")
        other = name is not None and now.get("optimizer") != name
        raise UserError(
            f"{path}: this checkpoint belongs to another run, which differs in:\n{listed}\n"
            "Fix: set resume_from_checkpoint=false to start anew, choose another output_dir, or restore the settings"
            f"{f': optimizer={name}' if other else ''}."
        )
    return [
        f"plugin {name} was version {had[name]} when the checkpoint was saved and is {has[name]} now"
        for name in sorted(has)
        if had[name] != has[name]
    ]


def _bases(before: Any, now: Any) -> str:
    if before == now:
        return f"the weights in {now} are other ones than when the checkpoint was made"
    return f"the base model: {before} in the checkpoint, {now or 'random weights'} in this run"


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """As the values are after a round trip through a checkpoint: tuples are lists."""
    restored: dict[str, Any] = json.loads(json.dumps(values))
    return restored


def shown(values: Mapping[str, Any], key: str) -> str:
    """The value of a key for a message, as JSON of at most 60 characters; ``absent`` where there is none."""
    if key not in values:
        return "absent"
    text = json.dumps(values[key], ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:59]}…"
