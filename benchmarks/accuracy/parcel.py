"""`parcel`: splits a directory into numbered parts, or joins them, so that a model fits through small transfers."""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import tarfile
from pathlib import Path

INDEX = "parts.json"


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--split", type=Path, help="directory to split into --to")
    parser.add_argument("--join", type=Path, help="directory of parts to join into --to")
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--megabytes", type=int, default=15, help="size of a part")


TINY: dict[str, int] = {}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Split or join."""
    if (given.split is None) == (given.join is None):
        raise SystemExit("parcel: name either --split or --join.")
    if given.split is not None:
        split(given.split, given.to, given.megabytes << 20)
    else:
        join(given.join, given.to)


def split(source: Path, target: Path, size: int) -> None:
    """Write the files of a directory as ``part-000`` and so on, and their digests as `INDEX`."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as archive:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                archive.add(path, arcname=str(path.relative_to(source)))
    target.mkdir(parents=True, exist_ok=True)
    digests, data = {}, whole.getbuffer()
    for number, first in enumerate(range(0, len(data), size)):
        part = data[first : first + size]
        name = f"part-{number:03}"
        (target / name).write_bytes(part)
        digests[name] = hashlib.sha256(part).hexdigest()
    (target / INDEX).write_text(json.dumps(digests, indent=1) + "\n")
    print(f"{len(digests)} parts in {target}")


def join(source: Path, target: Path) -> None:
    """The reverse of `split`; nothing is written if a part is missing or damaged."""
    digests = json.loads((source / INDEX).read_text())
    whole = io.BytesIO()
    for name, digest in digests.items():
        place = source / name
        data = place.read_bytes() if place.is_file() else b""
        if hashlib.sha256(data).hexdigest() != digest:
            raise SystemExit(f"parcel: {place} is {'damaged' if data else 'missing'}. Fix: copy it again.")
        whole.write(data)
    whole.seek(0)
    with tarfile.open(fileobj=whole) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # not in 3.11.0 to 3.11.3
        archive.extractall(target)
    print(f"{len(digests)} parts joined in {target}")
