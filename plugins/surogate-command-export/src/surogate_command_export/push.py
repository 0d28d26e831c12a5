"""An export on its way out: as files that say nothing of this machine, to another directory or to the hub."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from surogate_core.plugin import MachineError, SurogateError, UserError, is_hub_id
from surogate_core.service.config import masked, masked_values
from surogate_core.service.files import CONFIG, MARKER, read_json, without_places

SCHEME = "hub://"

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REWRITTEN = (CONFIG, MARKER, "config.json")
"""JSON files that may name a path of this machine."""
_LOADED = (CONFIG, "config.json", "generation_config.json", "base_config_overrides.json")
_TEXTS = ("README.md", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A file of an export."""

    name: str
    """Its path in the repository."""
    path: Path
    content: bytes | None = None
    """What is sent instead of the file; None sends the file."""

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if self.content is not None else self.path.stat().st_size


def parse_repo(target: str) -> str:
    """USER/NAME of ``hub://USER/NAME``; raises `UserError`."""
    repo = target.removeprefix(SCHEME).strip("/")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith((".git", ".", "-")):
        raise UserError(
            f"--to {target}: must be hub://USER/NAME, of letters, digits, '-', '_' and '.'. "
            f"Fix: --to hub://USER/{re.sub(r'[^A-Za-z0-9._]+', '-', repo.rpartition('/')[2]).strip('-.') or 'NAME'}"
        )
    return repo


def export_in(directory: Path) -> Path:
    """The export in a run's directory, or the export that `directory` is; raises `UserError` if there is none.

    The whole model before the adapter.
    """
    if not directory.is_dir():
        raise UserError(f"surogate export {directory}: there is no such directory. Fix: name a run's directory.")
    for place in (directory, directory / "model", directory / "adapter"):
        if (place / MARKER).is_file():
            return place
    raise UserError(
        f"surogate export {directory}: there is no export in it: the run has not finished. "
        f"Fix: run its command again, which resumes it."
    )


def outgoing(export: Path, *, base_model: str | None = None, repo: str = "") -> list[Outgoing]:
    """The files of an export, those that name this machine or a secret rewritten.

    `base_model`: the hub id to name as the base of an adapter. `repo`: the id that the card's example loads. Raises
    `UserError` for a text with a path of this machine that cannot be rewritten.
    """
    found = []
    for path in sorted(p for p in export.rglob("*") if p.is_file()):
        name = path.relative_to(export).as_posix()
        if any(part.startswith(".") for part in Path(name).parts):
            continue
        content = None
        if path.name in _REWRITTEN:
            content = _rewritten(path, base_model)
        elif path.name in _TEXTS or path.suffix == ".jinja":
            content = _text(path, repo)
        found.append(Outgoing(name=name, path=path, content=content))
    return found


def _rewritten(path: Path, base_model: str | None) -> bytes:
    try:
        values = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}. Fix: export it again.") from error
    base = values.get("base_model_name_or_path") if path.name == CONFIG else None
    if isinstance(base, str) and base_model is not None:
        values["base_model_name_or_path"] = base_model
    elif isinstance(base, str) and not _is_on_the_hub(base):
        raise UserError(
            f"{path}: names the base {base}, a directory of this machine, where nobody else can load it. "
            f"Fix: --base-model HUB_ID, or export a merged model: surogate merge"
        )
    return (json.dumps(without_places(masked_values(values)), indent=2) + "\n").encode()


def _is_on_the_hub(base: str) -> bool:
    return is_hub_id(base) and base.count("/") == 1 and not Path(base).exists()


def _text(path: Path, repo: str) -> bytes:
    text = masked(path.read_text(encoding="utf-8"))
    for place in {str(Path.home()), str(Path.cwd())} - {"/"}:
        if f"{place}/" in text:
            raise UserError(f"{path}: contains {place}/…, a path of this machine. Fix: remove it from the file.")
    if repo and path.name == "README.md":
        text = text.replace('place = "."  # this directory, or its id on the hub', f'place = "{repo}"')
    return text.encode()


def push(files: Sequence[Outgoing], repo: str, *, public: bool, overwrite: bool, message: str) -> str:
    """Upload the files as one commit of a repository, which is made if it is not there; its address.

    The commit deletes what an earlier export left there and a loader would take for a part of this one. An existing
    repository must be one of Surogate, unless `overwrite`, and must not be public, unless `public`, which makes it so
    after the upload. Raises `UserError` (no token, no right, name taken) or `MachineError` (no network).
    """
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    at = f"--to {SCHEME}{repo}"
    if huggingface_hub.get_token() is None:
        raise UserError(f"{at}: no token of the Hugging Face hub. Fix: hf auth login, or set HF_TOKEN")
    api = HfApi()
    try:
        there = _existing(api, repo)
        gone = set()
        if there is not None:
            gone = {name for name in there.files if _is_loaded(name)} - {f.name for f in files}
            _check_existing(there, at, public=public, overwrite=overwrite)
        else:
            api.create_repo(repo, private=not public)
        operations = [
            CommitOperationAdd(path_in_repo=f.name, path_or_fileobj=f.content if f.content is not None else str(f.path))
            for f in files
        ]
        deletions = [CommitOperationDelete(path_in_repo=name) for name in sorted(gone)]
        api.create_commit(repo, [*operations, *deletions], commit_message=message)
        if there is not None and there.private and public:
            api.update_repo_settings(repo, private=False)
    except SurogateError:
        raise
    except Exception as error:
        raise _explained(error, at, repo) from error
    return f"{api.endpoint}/{repo}"


def _is_loaded(name: str) -> bool:
    """Whether a file of a repository is weights, an adapter or a configuration, which a loader finds by its name."""
    directory, _, last = name.rpartition("/")
    own = last.endswith((".safetensors", ".safetensors.index.json")) or last in _LOADED
    return own and (not directory or directory.startswith("stacked_on"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _There:
    """A repository of the hub."""

    private: bool
    files: tuple[str, ...]


def _existing(api: object, repo: str) -> _There | None:
    """The repository; None if there is none that the token may see."""
    from huggingface_hub import HfApi, errors

    assert isinstance(api, HfApi)
    try:
        info = api.model_info(repo)
    except errors.GatedRepoError:
        raise
    except errors.RepositoryNotFoundError:
        return None
    return _There(private=bool(info.private), files=tuple(s.rfilename for s in info.siblings or ()))


def _check_existing(there: _There, at: str, *, public: bool, overwrite: bool) -> None:
    if not there.private and not public:
        raise UserError(f"{at}: the repository is there and is public. Fix: add --public, or choose another name")
    if MARKER not in there.files and set(there.files) - {".gitattributes"} and not overwrite:
        raise UserError(
            f"{at}: the name is taken by a repository that Surogate did not write. "
            f"Fix: choose another name, or add --overwrite to commit on top of it"
        )


def _explained(error: Exception, at: str, repo: str) -> SurogateError:
    """The error with its cause and a fix."""
    from huggingface_hub import errors

    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled):
        return MachineError(f"{at}: HF_HUB_OFFLINE is set. Fix: unset HF_HUB_OFFLINE")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"{at}: not a valid name of a repository. Fix: --to hub://USER/NAME")
    if status == 401:
        return UserError(f"{at}: the hub does not accept the token. Fix: hf auth login, or set HF_TOKEN to a valid one")
    if status == 403:
        user = repo.partition("/")[0]
        return UserError(f"{at}: the token may not write there. Fix: a token of {user} with the right to write")
    if status == 409:
        return UserError(f"{at}: the name is taken. Fix: choose another name")
    if status is not None:
        return MachineError(f"{at}: the Hugging Face hub answered {status}: {error}. Fix: try again later")
    # The library has changed its HTTP client before: such an error is recognised by the names of its classes.
    names = " ".join(kind.__name__ for kind in type(error).__mro__)
    if isinstance(error, OSError) or any(word in names for word in ("Connect", "Timeout", "Transport", "Network")):
        fix = "check the network and HF_ENDPOINT"
        return MachineError(f"{at}: the Hugging Face hub cannot be reached: {error}. Fix: {fix}")
    return MachineError(f"{at}: the upload failed: {error}")
