"""Build wheels and sdists of all distributions, with their digests and a statement of how they were built.

    python scripts/release.py [--output dist] [--only DIRECTORY …] [--repository URL] [--builder ID]

The output has the archives, ``SHA256SUMS`` (for ``sha256sum --check``) and ``provenance.intoto.json``: an in-toto
statement (https://in-toto.io/Statement/v1) with SLSA provenance (https://slsa.dev/provenance/v1) over the same digests.
``pip install surogate --find-links dist`` installs
from it. Nothing is fetched: hatchling must be installed. The statement is not signed; whoever publishes signs it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]
SUMS = "SHA256SUMS"
PROVENANCE = "provenance.intoto.json"
TOOLS = ("hatchling",)
PATTERNS = ("*.whl", "*.tar.gz")


def main(argv: Sequence[str] | None = None) -> int:
    """Build and attest; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("dist"), help="default: %(default)s; must be empty or new")
    parser.add_argument("--only", type=Path, nargs="+", help="directories to build; default: all")
    parser.add_argument("--repository", default="urn:surogate:source", help="what the statement calls the source")
    parser.add_argument("--builder", default="urn:surogate:builder:local", help="who builds; default: %(default)s")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    if any(output.iterdir()):
        print(f"{output} is not empty. Fix: --output another directory", file=sys.stderr)
        return 2
    projects = arguments.only or [
        ROOT,
        ROOT / "core",
        ROOT / "native",
        *(p.parent for p in sorted(ROOT.glob("plugins/*/pyproject.toml"))),
    ]
    commit, seconds, clean = source()
    for project in projects:
        build(project, output, seconds)
    attest(output, commit=commit, clean=clean, repository=arguments.repository, builder=arguments.builder)
    print((output / SUMS).read_text(), end="")
    if not clean:
        print("the working tree has changes that are not committed; the statement says so", file=sys.stderr)
    return 0


def source() -> tuple[str, str, bool]:
    """The commit that is built, its time in seconds since 1970, and whether the working tree is equal to it."""
    commit, seconds = _git("log", "-1", "--format=%H %ct").split()
    return commit, seconds, not _git("status", "--porcelain")


def build(project: Path, output: Path, seconds: str) -> None:
    """Wheel and sdist of one directory. Files have the commit's time, so that equal sources give equal archives."""
    os.environ["SOURCE_DATE_EPOCH"] = seconds
    # Hatchling itself, not the project's backend: scripts/checkout_build.py would name directories of this machine.
    for builder in (WheelBuilder(str(project.resolve())), SdistBuilder(str(project.resolve()))):
        list(builder.build(directory=str(output.resolve()), versions=["standard"]))


def attest(directory: Path, **origin: Any) -> None:
    """Write ``SHA256SUMS`` and the statement for the archives of a directory; `origin` as of `statement`."""
    archives = sorted(file for pattern in PATTERNS for file in directory.glob(pattern))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in archives}
    (directory / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    (directory / PROVENANCE).write_text(json.dumps(statement(digests, **origin), indent=1) + "\n")


def statement(digests: dict[str, str], *, commit: str, clean: bool, repository: str, builder: str) -> dict[str, Any]:
    """The statement over file name → SHA-256."""
    source_of = {"uri": repository, "digest": {"gitCommit": commit}}
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": digest}} for name, digest in digests.items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:surogate:build:archives:1",
                "externalParameters": {"script": "scripts/release.py", "uncommittedChanges": not clean},
                "internalParameters": {"python": platform.python_version(), **{t: version(t) for t in TOOLS}},
                "resolvedDependencies": [source_of],
            },
            "runDetails": {"builder": {"id": builder}},
        },
    }


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
