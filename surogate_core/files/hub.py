"""Repositories on the Hugging Face hub: fetched file by file at one commit, into the normal cache."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from surogate_core.errors import MachineError, SurogateError, UserError
from surogate_core.files.paths import is_hub_id

_COMMIT = re.compile(r"[0-9a-f]{40}")


def nearest_directory(path: Path) -> str:
    """A sentence with the directory whose name is nearest to a path that does not exist; empty if none is."""
    parent = path.parent
    if not parent.is_dir():
        return ""
    near = difflib.get_close_matches(path.name, [p.name for p in parent.iterdir() if p.is_dir()], n=1)
    return f" The nearest name is {parent / near[0]}." if near else ""


def split_revision(source: str) -> tuple[str, str | None]:
    """(id, revision) of ``owner/name@revision``; (`source`, None) of a local path or an id without a revision."""
    repo, at, revision = source.partition("@")
    if at and revision and is_hub_id(repo) and not Path(source).expanduser().exists():
        return repo, revision
    return source, None


def one_revision(source: str, revision: str | None, *, key: str) -> tuple[str, str | None]:
    """(id, the revision that `source` or `revision` names); `key` named the source. Raises `UserError` for two."""
    repo, short = split_revision(source)
    if short is not None and revision is not None and short != revision:
        raise UserError(f"{key} {source}: the revision {revision} is given besides. Fix: keep one of the two.")
    return repo, short or revision


def commit_of(directory: Path) -> str | None:
    """The commit of a snapshot in the cache; None for any other directory."""
    if directory.parent.name == "snapshots" and _COMMIT.fullmatch(directory.name):
        return directory.name
    return None


def fetch(repo: str, files: Sequence[str], *, revision: str | None, key: str) -> Path:
    """The snapshot of a repository at a branch, tag or commit (None: the default branch) with those of `files` it has.

    Files in the cache are not downloaded again. With ``HF_HUB_OFFLINE`` or without a network only the cache is used,
    whose snapshot may lack files: the caller checks, and raises `absent`. `key` is the configuration key that named the
    repository. Raises `UserError` if the hub does not have it, and `MachineError` if the hub cannot be reached.
    """
    from huggingface_hub import errors, snapshot_download

    at = f"{key} {repo}" + (f"@{revision}" if revision else "")
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))
    except errors.HFValidationError as error:
        raise UserError(f"{at}: neither a directory here nor a valid Hugging Face id.") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{at}: access to this repository must be requested. "
            f"Fix: accept its terms at https://huggingface.co/{repo}, then run `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{at}: the repository has no such branch, tag or commit. "
            f"Fix: correct the revision; https://huggingface.co/{repo}/tree/main lists them."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{at}: neither a directory here nor a repository on the Hugging Face hub.{nearest_directory(Path(repo))} "
            f"Fix: correct it; a private repository needs `hf auth login`."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        # The library also refuses a snapshot that lacks a file that is not needed, such as a second tokenizer.
        if (cached := _cached(repo, revision)) is not None:
            return cached
        have = _cached_revisions(repo)
        listed = f" The cache has {', '.join(have)}." if have else ""
        here = f" There is no directory {repo} either.{nearest_directory(Path(repo))}"
        raise MachineError(
            f"{at}: not in the local cache, and {_why()}.{listed or here} Fix: {_how(repo, revision)}"
        ) from error
    except Exception as error:  # transport errors are those of the HTTP client, which the library has changed before
        raise MachineError(f"{at}: the Hugging Face hub failed: {error}") from error


def absent(repo: str, snapshot: Path, files: Sequence[str], *, key: str) -> SurogateError:
    """The error for needed files that `fetch` did not find."""
    commit = commit_of(snapshot)
    at = f"{key} {repo}" + (f"@{commit}" if commit else "")
    named = ", ".join(files)
    if _offline():
        return MachineError(f"{at}: {named} not in the local cache, and {_why()}. Fix: {_how(repo, commit)}")
    return UserError(
        f"{at}: the repository has no {named}, or the hub could not be reached for it; pickles are never read. "
        "Fix: name a repository with config.json, tokenizer and safetensors, or go online."
    )


def _offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _why() -> str:
    return "HF_HUB_OFFLINE is set" if _offline() else "the hub cannot be reached"


def _how(repo: str, revision: str | None) -> str:
    command = f"hf download {repo}" + (f" --revision {revision}" if revision else "")
    unset = "unset HF_HUB_OFFLINE, or " if _offline() else ""
    return f"{unset}run `{command}` on a machine that reaches the hub, or give a local directory."


def _repo_cache(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _cached(repo: str, revision: str | None) -> Path | None:
    """The snapshot in the cache, complete or not."""
    root, revision = _repo_cache(repo), revision or "main"
    reference = root / "refs" / revision
    commit = reference.read_text().strip() if reference.is_file() else revision
    snapshot = root / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def _cached_revisions(repo: str) -> list[str]:
    """Branches, tags and bare commits that the cache has."""
    root = _repo_cache(repo)
    refs = root / "refs"
    named: dict[str, list[str]] = {p.name: [] for p in (root / "snapshots").glob("*")}
    for reference in sorted(p for p in refs.rglob("*") if p.is_file()):
        if (commit := reference.read_text().strip()) in named:
            named[commit].append(str(reference.relative_to(refs)))
    return [f"{' = '.join(names)} ({commit})" if names else commit for commit, names in sorted(named.items())]
