import fcntl

import pytest

from surogate_core.errors import UserError
from surogate_core.files.run_lock import LOCK, is_running
from surogate_core.run.record import locked


def test_a_run_is_going_on_while_it_holds_its_lock(tmp_path):
    assert not is_running(tmp_path), "no run was here"
    with locked(tmp_path, key="output_dir"):
        assert is_running(tmp_path)
    assert (tmp_path / LOCK).exists()
    assert not is_running(tmp_path)


def test_a_run_that_begins_while_somebody_asks_waits_a_moment(tmp_path, monkeypatch):
    (tmp_path / LOCK).touch()
    asked = []

    def shared(descriptor, operation):
        real(descriptor, operation)
        if not asked:
            asked.append(operation)
            with (tmp_path / LOCK).open() as other, pytest.raises(BlockingIOError):
                real(other, fcntl.LOCK_EX | fcntl.LOCK_NB)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", shared)
    assert not is_running(tmp_path)
    monkeypatch.undo()
    again = pytest.raises(UserError, match="another run is writing there")
    with locked(tmp_path, key="output_dir"), again, locked(tmp_path, key="output_dir"):
        pass


def test_a_lock_that_cannot_be_read_is_no_run(tmp_path):
    (tmp_path / LOCK).mkdir()
    assert not is_running(tmp_path)
    assert not is_running(tmp_path / "gone")
