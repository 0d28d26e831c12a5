"""The cache: atomic, safe between runs, never torn."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from surogate_core.data.cache import META, DataCache, digest_of
from surogate_core.errors import MachineError, UserError
from surogate_core.files.paths import cache_root


def build(directory: Path) -> Mapping[str, Any]:
    """One file of eight bytes."""
    (directory / "values").write_bytes(b"12345678")
    return {"made": 1}


def never(directory: Path) -> Mapping[str, Any]:
    """A builder that must not be called."""
    raise AssertionError("built again")


def test_an_entry_is_built_once_and_found_again(tmp_path: Path) -> None:
    cache = DataCache(tmp_path, "things")
    assert cache.get("k") is None
    first = cache.get_or_build("k", build)
    again = cache.get_or_build("k", never)
    assert first == again
    assert again.facts == {"made": 1}
    assert (again.path / "values").read_bytes() == b"12345678"


@pytest.mark.parametrize("tear", ["shorten", "remove", "break meta", "remove meta", "empty meta"])
def test_a_torn_entry_is_not_used_but_built_again(tmp_path: Path, tear: str) -> None:
    cache = DataCache(tmp_path, "things")
    entry = cache.get_or_build("k", build)
    match tear:
        case "shorten":
            os.truncate(entry.path / "values", 3)
        case "remove":
            (entry.path / "values").unlink()
        case "break meta":
            (entry.path / META).write_text((entry.path / META).read_text()[:-5])
        case "remove meta":
            (entry.path / META).unlink()
        case "empty meta":
            (entry.path / META).write_text(json.dumps([]))
    assert cache.get("k") is None
    assert (cache.get_or_build("k", build).path / "values").read_bytes() == b"12345678"


@pytest.mark.parametrize("name", ["values", "more", META])
def test_a_flipped_bit_anywhere_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr("surogate_core.data.cache._BLOCK", 16)

    def build_two(directory: Path) -> Mapping[str, Any]:
        (directory / "more").write_bytes(bytes(range(40)))
        return build(directory)

    cache, said = DataCache(tmp_path, "things"), []
    path = cache.get_or_build("k", build_two).path / name
    whole = path.read_bytes()
    for at in range(len(whole)):
        for bit in (1, 128):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :])
            said.clear()
            assert cache.get("k", damaged=said.append) is None, (at, bit)
            assert len(said) == 1
            assert name in said[0]
    path.write_bytes(whole)
    assert cache.get("k", damaged=said.append) == cache.get_or_build("k", never)


def test_a_damaged_entry_is_built_anew_or_the_run_stops(tmp_path: Path) -> None:
    cache, said = DataCache(tmp_path, "things"), []
    path = cache.get_or_build("k", build).path
    (path / "values").write_bytes(b"12345679")
    assert (cache.get_or_build("k", build, damaged=said.append).path / "values").read_bytes() == b"12345678"
    assert said == [f"The entry {path} of the data cache was damaged: values is not what was written; it was rebuilt."]
    (path / "values").write_bytes(b"12345679")

    def refuse(directory: Path) -> Mapping[str, Any]:
        raise OSError(errno.EROFS, "Read-only file system")

    with pytest.raises(UserError, match="cannot be written"):
        cache.get_or_build("k", refuse)


def test_an_entry_of_an_earlier_version_has_no_checksums_and_serves(tmp_path: Path) -> None:
    cache = DataCache(tmp_path, "things")
    entry = cache.get_or_build("k", build)
    meta = json.loads((entry.path / META).read_bytes())
    del meta["checksums"], meta["digest"]
    (entry.path / META).write_text(json.dumps(meta))
    assert cache.get_or_build("k", never) == entry


def test_a_check_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_core.data.cache._BLOCK", 3)
    cache, seen = DataCache(tmp_path, "things"), []
    cache.get_or_build("k", build)
    cache.get("k", checked=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 8), (6, 8), (8, 8)]


def test_an_entry_that_may_not_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = DataCache(tmp_path, "things")
    entry = cache.get_or_build("k", build)

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "read_bytes", refuse)
        with pytest.raises(UserError, match="cannot be read: Permission denied"):
            cache.get_or_build("k", never)
    assert cache.get_or_build("k", never) == entry


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> Mapping[str, Any]:
        (directory / "values").write_bytes(b"half")
        raise KeyError("broken row")

    cache = DataCache(tmp_path, "things")
    with pytest.raises(KeyError):
        cache.get_or_build("k", fail)
    assert [path.name for path in (tmp_path / "things").iterdir()] in ([], ["k.lock"])
    cache.get_or_build("k", build)


def test_the_remains_of_a_killed_build_are_removed(tmp_path: Path) -> None:
    remains = tmp_path / "things" / "k.tmp-dead"
    remains.mkdir(parents=True)
    (remains / "values").write_bytes(b"half")
    DataCache(tmp_path, "things").get_or_build("k", build)
    assert not remains.exists()


def _race(root: str, barrier: Any, results: Any) -> None:
    def counted(directory: Path) -> Mapping[str, Any]:
        results.put("built")
        return build(directory)

    barrier.wait()
    entry = DataCache(Path(root), "things").get_or_build("k", counted)
    results.put((entry.path / "values").read_bytes())


def test_two_processes_build_one_entry(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_race, args=(str(tmp_path), barrier, results)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=30) for _ in range(4)]
    for worker in workers:
        worker.join(timeout=30)
        assert worker.exitcode == 0
    assert sorted(map(str, found)) == sorted(map(str, ["built", *[b"12345678"] * 3]))


def test_a_run_that_waits_for_another_says_so(tmp_path: Path) -> None:
    cache, building, go = DataCache(tmp_path, "things"), threading.Event(), threading.Event()

    def slow(directory: Path) -> Mapping[str, Any]:
        building.set()
        go.wait(10)
        return build(directory)

    other = threading.Thread(target=cache.get_or_build, args=("k", slow))
    other.start()
    building.wait(10)
    entry = cache.get_or_build("k", never, waiting=go.set)
    other.join()
    assert go.is_set()
    assert entry.facts == {"made": 1}


@pytest.mark.parametrize(
    ("number", "raised"), [(errno.ENOSPC, MachineError), (errno.EROFS, UserError), (errno.EACCES, UserError)]
)
def test_disk_errors_name_the_key_to_change(tmp_path: Path, number: int, raised: type[Exception]) -> None:
    def full(directory: Path) -> Mapping[str, Any]:
        raise OSError(number, os.strerror(number))

    with pytest.raises(raised, match="data_cache_dir"):
        DataCache(tmp_path, "things").get_or_build("k", full)


def test_a_file_in_the_place_of_the_cache_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match="data_cache_dir"):
        DataCache(tmp_path / "cache", "things").get_or_build("k", build)


def test_the_default_place_is_the_users_cache() -> None:
    assert cache_root(None).parts[-2:] == ("surogate", "data")
    assert cache_root("~/x") == Path.home() / "x"


def test_a_digest_ignores_the_order_of_keys_only() -> None:
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1}) != digest_of({"a": 2, "b": 1})
