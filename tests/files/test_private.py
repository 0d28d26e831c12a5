"""Files of one's own in directories that others may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from surogate_core.files.private import private, private_directory, regular

WRITE = os.O_WRONLY | os.O_CREAT


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("kept")
    for name, to in (("link", target), ("dangling", tmp_path / "gone")):
        (tmp_path / name).symlink_to(to)
        for opener in (regular, private):
            with pytest.raises(OSError, match="it is a symbolic link"):
                opener(tmp_path / name, WRITE | os.O_TRUNC)
    assert target.read_text() == "kept"
    assert not (tmp_path / "gone").exists()


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for flags in (WRITE, os.O_RDONLY):
        with pytest.raises(OSError, match="it is not a regular file"):
            regular(tmp_path / "pipe", flags)
    with pytest.raises(OSError, match="it is not a regular file"):
        regular(tmp_path, os.O_RDONLY)


def test_private_files_are_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with open(tmp_path / "new", "w", opener=private) as file:
            file.write("x")
        (tmp_path / "old").touch(mode=0o666)
        os.close(private(tmp_path / "old", WRITE))
        os.close(regular(tmp_path / "plain", WRITE))
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("new", "old", "plain")] == [0o600, 0o600, 0o666]


def test_a_private_directory_is_made_or_refused(tmp_path: Path) -> None:
    made = private_directory(tmp_path / "a" / "b")
    assert mode(made) == 0o700
    made.chmod(0o755)
    assert mode(private_directory(made)) == 0o700, "that others could read is no danger"
    made.chmod(0o777)
    with pytest.raises(OSError, match="others may write to it"):
        private_directory(made)
    (tmp_path / "link").symlink_to(made)
    with pytest.raises(OSError, match="it is not a directory"):
        private_directory(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir(mode=0o700)
    os.chown(tmp_path / "other", 65534, 65534)
    with pytest.raises(OSError, match="it belongs to the user with the id 65534"):
        private_directory(tmp_path / "other")
