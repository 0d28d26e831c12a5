"""A Hugging Face cache directory as the hub's library lays it out, filled from local directories."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path


def add_repository(
    cache: Path, repo: str, commits: Mapping[str, Path], refs: Mapping[str, str], *, leave_out: tuple[str, ...] = ()
) -> Path:
    """`commits`: hash → directory with its files; `refs`: branch or tag → hash. Returns the repository's directory."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "blobs").mkdir(parents=True)
    for commit, source in commits.items():
        snapshot = root / "snapshots" / commit
        snapshot.mkdir(parents=True)
        for file in sorted(p for p in source.iterdir() if p.name not in leave_out):
            content = file.read_bytes()
            blob = root / "blobs" / hashlib.sha256(content).hexdigest()
            blob.write_bytes(content)
            (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    for name, commit in refs.items():
        reference = root / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    return root
