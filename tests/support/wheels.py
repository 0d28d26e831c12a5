"""Wheels made by hand, in the shape in which packages are published; nothing is built or fetched.

On the path of pytest (`pythonpath` in pyproject.toml): ``from wheels import make_wheel``.
"""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    directory: Path,
    distribution: str,
    files: Mapping[str, str],
    *,
    points: Mapping[str, str],
    version: str = "1.0",
    requires: Sequence[str] = (),
    extras: Sequence[str] = (),
    group: str = "surogate",
) -> Path:
    """A wheel with these files (path → text) and entry points of the group (name → module)."""
    directory.mkdir(parents=True, exist_ok=True)
    name = distribution.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
    metadata += [f"Provides-Extra: {e}" for e in extras] + [f"Requires-Dist: {r}" for r in requires]
    texts = {
        **files,
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[{group}]\n" + "".join(f"{n} = {m}\n" for n, m in points.items()),
    }
    record = [f"{path},sha256={_digest(text)},{len(text.encode())}" for path, text in texts.items()]
    texts[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return wheel


def unpack(wheel: Path, site: Path) -> None:
    """Install a pure wheel: its files are those of site-packages."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
