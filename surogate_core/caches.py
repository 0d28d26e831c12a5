"""The caches of compiled code that later processes run: directories that only this user can write to.

By default Inductor uses ``/tmp/torchinductor_NAME``, with NAME from a variable. An attacker who creates that directory
first can put code into the runs of the user with that name.
"""

from __future__ import annotations

import hashlib
import os
import platform
import stat
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from surogate_core.errors import UserError
from surogate_core.files.private import private_directory

VECTOR = ("avx", "fma", "amx", "f16c", "asimd", "neon", "sve", "bf16", "vx")
"""Beginnings of the names of vector instructions in the list of a CPU's features."""
VARIABLES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "CUPY_CACHE_DIR": "cupy"}
"""Variable that the library reads → name of the directory."""


def use_private_caches() -> None:
    """Point Inductor, Triton and CuPy to private caches of the user, unless the user has named others.

    Raises `UserError` if others can write to a directory that the user has named.
    """
    for variable, name in VARIABLES.items():
        given = os.environ.get(variable)
        if not given:
            os.environ[variable] = str(_home() / name)
            continue
        reason = _unsafe(Path(given))
        if reason:
            raise UserError(
                f"{variable}={given}: {reason}, and code is run from it. "
                f"Fix: unset {variable}, or name a directory that only you may write to."
            )


@cache
def _home() -> Path:
    """The directory of all three; a temporary one for this process if the user's cache cannot be used."""
    from platformdirs import user_cache_path

    try:
        return private_directory(user_cache_path("surogate") / "compiled") / _versions()
    except OSError:
        return Path(_temporary().name) / _versions()


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="surogate-compiled-")


@cache
def instructions() -> str:
    """A digest of the vector instructions of the CPU, for which torch writes code and by which it does not key it.

    Code for wider registers than the CPU has gave NaN where two machines share a home directory.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), platform.processor())
    vector = sorted(flag for flag in set(flags.split()) if flag.startswith(VECTOR))
    # What the user has torch's own kernels take, Inductor takes too.
    chosen = [platform.machine(), os.environ.get("ATEN_CPU_CAPABILITY", ""), *vector]
    return hashlib.sha256(" ".join(chosen).encode()).hexdigest()[:8]


def _versions() -> str:
    found = [f"python-{platform.python_version()}", f"cpu-{instructions()}"]
    for name in ("torch", "triton"):
        try:
            found.append(f"{name}-{version(name)}")
        except PackageNotFoundError:
            continue
    return "-".join(found)


def _unsafe(directory: Path) -> str:
    """The reason why others can write to a directory, which is created if missing; empty if they cannot."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        return f"it cannot be made: {error.strerror}"
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to the user with the id {status.st_uid}"
    return "everyone may write to it" if status.st_mode & stat.S_IWOTH else ""
