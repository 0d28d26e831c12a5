"""Compile the CUDA C++ of every pack ahead of time by nvcc, for every architecture that is supported: ``make native``.

    python scripts/build_native.py [--arch sm_90a …] [--jobs 2]

A binary is in the directory ``native/build`` of its pack's package. Exit code 1 when nvcc refuses a source, and 3 when
there is no nvcc.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from surogate_core.kernels.building.native import ARCHITECTURES, FLAGS, Sources, binary_name, names, source_of

PACKS = sorted(Path(__file__).resolve().parents[1].glob("plugins/*/src/*/native"))


def build(sources: Sources, name: str, architecture: str) -> str:
    """Compile one source for one architecture; what nvcc says, empty when all is well."""
    out = sources.directory / "build"
    target = out / binary_name(sources, name, architecture)
    if target.exists():
        return ""
    out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as directory:
        source, made = Path(directory, f"{name}.cu"), Path(directory, "made.cubin")
        source.write_text(source_of(sources, name), encoding="utf-8")
        flags = [*FLAGS, f"-arch={architecture}", "-Werror=all-warnings"]
        command = ["nvcc", *flags, "-cubin", "-o", str(made), str(source)]
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
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if shutil.which("nvcc") is None:
        print("nvcc was not found. Fix: install the CUDA toolkit, or leave it: kernels are compiled at first use.")
        return 3
    found = [Sources(directory=pack, shared=("surogate_native",)) for pack in PACKS]
    jobs = [(pack, name, architecture) for pack in found for name in names(pack) for architecture in options.arch]
    with ThreadPoolExecutor(options.jobs) as pool:
        failed = [message for message in pool.map(lambda job: build(*job), jobs) if message]
    print("\n".join(failed) or f"{len(jobs)} binaries of {len(found)} packs")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
