"""The files that are read, compressed or not, and the notes about others."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from surogate_core.data.rows import chunks, json_rows
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.errors import UserError

ROWS = [{"text": f"row {i}"} for i in range(40)]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, "zstd", asbytes=True)  # type: ignore[no-any-return]


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstd,
}
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
CSV = b"text\n" + b"".join(f"row {i}\n".encode() for i in range(40))


def read(path: Path | str, **fields: Any) -> list[Any]:
    return [row for _, row in open_source(SourceSpec(path=str(path), **fields)).rows()]


@pytest.mark.parametrize("scheme", ["", "file://"])
@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize(
    ("name", "content"), [("r.jsonl", LINES), ("r.JSON", json.dumps(ROWS).encode()), ("r.csv", CSV), ("r.tsv", CSV)]
)
def test_compressed_files_are_read_from_any_border(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, suffix: str, name: str, content: bytes
) -> None:
    monkeypatch.setattr(json_rows, "_BLOCK", 100)
    monkeypatch.setattr(chunks, "CHUNK_ROWS", 7)
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(COMPRESS[suffix](content))
    source = open_source(SourceSpec(path=f"{scheme}{path}"))
    found = list(source.chunks())
    assert [row for chunk in found for _, row in chunk.rows()] == ROWS
    rest = [row for chunk in source.chunks(found[1].after) for row in chunk.rows()]
    assert rest == [row for chunk in found[2:] for row in chunk.rows()]


@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_compressed_file_cut_short_is_named(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](LINES * 50)[:-20])
    with pytest.raises(UserError, match=rf"rows\.jsonl\{suffix}: cannot be"):
        read(path)
    path.write_bytes(LINES)
    with pytest.raises(UserError, match=rf"rows\.jsonl\{suffix}: cannot be"):
        read(path)


def test_a_directory_reads_all_it_can_and_names_the_rest(tmp_path: Path) -> None:
    root = tmp_path / "data"
    (root / "more").mkdir(parents=True)
    (root / "_tmp").mkdir()
    files = {
        "a.jsonl": b'{"text": "a"}',
        "b.jsonl.gz": gzip.compress(b'{"text": "b"}'),
        "a.jsonl.gz": gzip.compress(b'{"text": "a"}'),
        "more/c.csv.zst": zstd(b"text\nc\n"),
        "val.jsonl": b'{"text": "v"}',
        "test.json.xz": lzma.compress(b'[{"text": "t"}]'),
        "notes.txt": b"x",
        "d.parquet.gz": b"x",
        "e.zip": b"x",
        "README.md": b"x",
        "LICENSE": b"x",
        "dataset_infos.json": b"{}",
        ".gitattributes": b"x",
        "_tmp/f.jsonl": b"x",
    }
    for name, content in files.items():
        (root / name).write_bytes(content)
    (root / "gone.jsonl").symlink_to(root / "absent.jsonl")
    (root / "again").symlink_to(root)
    source = open_source(SourceSpec(path=str(root)))
    assert [row["text"] for _, row in source.rows()] == ["a", "b", "c"]  # type: ignore[call-overload]
    assert source.left_out == (
        "a.jsonl.gz (a.jsonl beside it is read instead)",
        "again (a link to a directory, which is not followed)",
        "d.parquet.gz (a compressed .parquet file cannot be read)",
        "e.zip (files ending in '.zip' cannot be read)",
        "gone.jsonl (a broken link)",
        "notes.txt (files ending in '.txt' cannot be read)",
    )
    assert source.other_splits == ("test.json.xz (split test)", "val.jsonl (split validation)")
    assert [row["text"] for _, row in open_source(SourceSpec(path=str(root), split="test")).rows()] == ["t"]  # type: ignore[call-overload]


def test_a_directory_of_nothing_that_is_read_says_what_it_has(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UserError, match=r"holds no data files; it has notes\.txt"):
        read(tmp_path)


def test_a_part_that_cannot_be_listed_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    (tmp_path / "a.jsonl").write_text('{"text": "a"}')
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def refusing(path: Any) -> Any:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(UserError, match="closed: cannot be listed: Permission denied"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["rows.parquet.gz", "rows.txt", "rows.tar.gz"])
def test_a_single_file_that_is_not_read_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UserError, match=r"cannot be read\. Fix: use one of"):
        read(tmp_path / name)


def test_a_missing_compressed_file_is_not_taken_for_a_hub_id() -> None:
    with pytest.raises(UserError, match="no such file or directory"):
        read("missing.jsonl.gz")
