"""Compile native/kernels/*.cu ahead of time by nvcc, for every architecture that is supported: ``make native``.

    python scripts/build_native.py [--arch sm_90a …] [--out native/build] [--jobs 2]

Exit code 1 when nvcc refuses a source, and 3 when there is no nvcc.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surogate_core.kernels.native import ARCHITECTURES, FLAGS, binary_name, names, source_of

NATIVE = Path(__file__).resolve().parents[1] / "native"


def build(name: str, architecture: str, out: Path) -> str:
    """Compile one source for one architecture; what nvcc says, empty when all is well."""
    target = out / binary_name(NATIVE, name, architecture)
    if target.exists():
        return ""
    with tempfile.TemporaryDirectory() as directory:
        source, made = Path(directory, f"{name}.cu"), Path(directory, "made.cubin")
        source.write_text(source_of(NATIVE, name), encoding="utf-8")
        command = [
            "nvcc",
            *FLAGS,
            f"-arch={architecture}",
            "-Werror=all-warnings",
            "-cubin",
            "-o",
            str(made),
            str(source),
        ]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            return f"{name} for {architecture}:\n{result.stderr}"
        for stale in out.glob(f"{name}.{architecture}.*.cubin"):
            stale.unlink()
        shutil.move(made, target)
    return ""


def main() -> int:
    """Build all that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="*", default=ARCHITECTURES)
    parser.add_argument("--out", type=Path, default=NATIVE / "build")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc was not found. Fix: install the CUDA toolkit, or leave it: kernels are compiled at first use.")
        return 3
    options.out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, architecture, options.out) for name in names(NATIVE) for architecture in options.arch]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [message for message in pool.map(lambda job: build(*job), jobs) if message]
    print("\n".join(failed) or f"{len(jobs)} binaries in {options.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
