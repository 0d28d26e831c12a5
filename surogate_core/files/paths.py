"""Where data and tokenizers are: local paths, ``pkg://`` resources, hub ids and URLs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from surogate_core.errors import UserError

PACKAGE_SCHEME = "pkg://"
"""``pkg://package/relative/path`` is a file or directory that ships in an installed package."""

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")
_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")


def resolve_package_path(path: str) -> str:
    """The local path of a ``pkg://`` path; any other path as it is.

    The package is located without importing it. Raises `UserError` when there is no such
    package or no such file in it.
    """
    if not path.startswith(PACKAGE_SCHEME):
        return path
    package, _, relative = path.removeprefix(PACKAGE_SCHEME).partition("/")
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"{path}: no package {package!r} is installed. Fix: pip install {package.replace('_', '-') or 'it'}"
        )
    for root in map(Path, spec.submodule_search_locations):
        found = root / relative
        if found.exists() and found.resolve().is_relative_to(root.resolve()):
            return str(found)
    raise UserError(f"{path}: package {package!r} has no file {relative!r}.")


def is_url(path: str) -> bool:
    """Whether the path is read through fsspec (``s3://``, ``gs://``, ``https://``, …)."""
    return bool(_URL.match(path)) and not path.startswith(PACKAGE_SCHEME)


def is_hub_id(path: str) -> bool:
    """Whether a path that does not exist locally can be a Hugging Face id (``name`` or ``owner/name``)."""
    return bool(_HUB_ID.match(path))


def too_long(path: str) -> bool:
    """Whether no file can have the path."""
    name = path.encode(errors="replace")
    return len(name) > 4095 or max(map(len, name.split(b"/"))) > 255


def cache_root(data_cache_dir: str | None) -> Path:
    """The directory of the caches of tokenised data and of digests; None is the user's cache directory."""
    if data_cache_dir is not None:
        return Path(data_cache_dir).expanduser()
    import platformdirs

    return Path(platformdirs.user_cache_dir("surogate")) / "data"
