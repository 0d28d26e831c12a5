"""Compiled code is cached in a directory that no other user can write to."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surogate_core import caches
from surogate_core.caches import VARIABLES, use_private_caches
from surogate_core.errors import UserError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's cache directory, with no variable set and nothing found before."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches._home.cache_clear()
    caches._temporary.cache_clear()
    yield tmp_path / "cache"
    caches._home.cache_clear()
    caches._temporary.cache_clear()


def test_the_caches_are_the_users_own_and_keyed_by_versions(home: Path) -> None:
    use_private_caches()
    for name, kind in VARIABLES.items():
        place = Path(os.environ[name])
        assert place.is_relative_to(home / "surogate" / "compiled")
        assert place.name == kind
        assert "python-" in place.parent.name
        assert "torch-" in place.parent.name
        assert f"cpu-{caches.instructions()}" in place.parent.name
    assert stat.S_IMODE((home / "surogate" / "compiled").stat().st_mode) == 0o700


def test_they_are_keyed_by_the_vector_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with AVX-512 and one without may share a home directory."""

    def key(flags: str, capability: str = "") -> str:
        monkeypatch.setattr(Path, "read_text", lambda *args, **named: f"processor: 0\nflags\t\t: {flags}\n")
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
        caches.instructions.cache_clear()
        return caches.instructions()

    try:
        wide = key("fpu sse4_2 avx avx2 avx512f")
        assert wide == key("avx512f avx2 fpu avx rdseed")
        assert len({wide, key("fpu sse4_2 avx avx2"), key("fpu avx avx2 avx512f", "avx2")}) == 3
    finally:
        monkeypatch.undo()
        caches.instructions.cache_clear()


@pytest.mark.parametrize("trap", ["writable", "link", "parent", "file"])
def test_a_cache_that_somebody_else_could_fill_is_not_used(home: Path, tmp_path: Path, trap: str) -> None:
    made = home / "surogate" / "compiled"
    made.parent.mkdir(parents=True)
    if trap == "link":
        (tmp_path / "theirs").mkdir(mode=0o755)
        made.symlink_to(tmp_path / "theirs")
    elif trap == "file":
        made.touch()
    else:
        made.mkdir()
        (made if trap == "writable" else made.parent).chmod(0o777)
    use_private_caches()
    place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert not place.is_relative_to(home)
    own = place.parents[1]
    assert own.name.startswith("surogate-compiled-")
    assert (stat.S_IMODE(own.stat().st_mode), own.stat().st_uid) == (0o700, os.geteuid())


def test_a_directory_that_the_user_names_is_used_or_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "named"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(named))
    use_private_caches()
    assert os.environ["TRITON_CACHE_DIR"] == str(named)
    assert stat.S_IMODE(named.stat().st_mode) == 0o700
    named.chmod(0o777)
    with pytest.raises(UserError, match=r"TRITON_CACHE_DIR=.*everyone may write to it.* Fix: unset TRITON_CACHE_DIR"):
        use_private_caches()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_named_directory_of_another_user_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "theirs"))
    with pytest.raises(UserError, match="belongs to the user with the id 65534"):
        use_private_caches()


@pytest.mark.slow
def test_the_name_of_the_user_decides_nothing(tmp_path: Path) -> None:
    """torch alone takes the directory from LOGNAME; with a compiled graph nothing of it is touched."""
    environ = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    environ |= {"LOGNAME": "victim", "TMPDIR": str(tmp_path / "tmp"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    (tmp_path / "tmp" / "torchinductor_victim").mkdir(parents=True)
    code = (
        "from surogate_core.plugins import load_plugins\nload_plugins()\n"
        "from torch._inductor.runtime.cache_dir_utils import cache_dir\nprint(cache_dir())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "cache" / "surogate" / "compiled")
    assert list((tmp_path / "tmp" / "torchinductor_victim").iterdir()) == []
