"""Write docker/*.Dockerfile from docker/template.Dockerfile, one for each kind of machine.

With --check nothing is written: exit 1 if one is not current.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = ROOT / "docker" / "template.Dockerfile"
INDEX = "https://download.pytorch.org/whl"

IMAGES = {
    "cpu": ("ubuntu:24.04", "2.13.0", "cpu", ""),
    "cuda12.8": ("nvidia/cuda:12.8.1-devel-ubuntu24.04", "2.11.0", "cu128", "[cuda12]"),
    "cuda12.9": ("nvidia/cuda:12.9.1-devel-ubuntu24.04", "2.11.0", "cu129", "[cuda12]"),
    "cuda13": ("nvidia/cuda:13.0.0-devel-ubuntu24.04", "2.13.0", "cu130", "[cuda13]"),
}
"""Name → (base image, version of torch, its index, extras). torch 2.11 is the last with wheels for CUDA 12.8."""


def make() -> dict[Path, str]:
    """File → its text."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    files = {}
    for name, (base, torch, index, extra) in IMAGES.items():
        values = {
            "MADE": "Made by scripts/make_dockerfiles.py from docker/template.Dockerfile; change those.",
            "NAME": name,
            "BASE": base,
            "TORCH": torch,
            "INDEX": f"{INDEX}/{index}",
            "EXTRA": extra,
            "VERSION": project["version"],
            "RUN": "--gpus all " if extra else "",
        }
        text = TEMPLATE.read_text(encoding="utf-8")
        for key, value in values.items():
            text = text.replace(f"@{key}@", value)
        files[ROOT / "docker" / f"{name}.Dockerfile"] = text
    return files


def main() -> int:
    """Write the files, or check them."""
    files = make()
    old = [file for file, text in files.items() if not file.is_file() or file.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for file in old:
            print(f"{file.relative_to(ROOT)} is not current; run: python scripts/make_dockerfiles.py", file=sys.stderr)
        return 1 if old else 0
    for file, text in files.items():
        file.write_text(text, encoding="utf-8")
        print(f"wrote {file.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
