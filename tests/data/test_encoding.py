"""Tokenising: one process or several, at one go or killed and resumed, the shards are the same bytes."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from surogate_dataset_chat import EMBEDDED_TOKENIZER

from surogate_core.bundles import DatasetFormat
from surogate_core.config.schema import RunConfig
from surogate_core.data import encoding, pipeline
from surogate_core.data.contract import FormatError
from surogate_core.data.encoded import EncodeContext, Encoded, RowError
from surogate_core.data.encoding import RowEncoder, encode_chunks, process_count
from surogate_core.data.pipeline import prepare
from surogate_core.data.rows import json_rows
from surogate_core.data.rows.sources import SourceSpec, open_source
from surogate_core.data.text.tokenizer import load_tokenizer
from surogate_core.errors import MachineError
from surogate_core.plugins import load_plugins


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of 64 KiB, so that a megabyte is many."""
    monkeypatch.setattr(json_rows, "_BLOCK", 1 << 16)


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,600 texts, about 1.6 MB; every 200th row is malformed."""
    path = tmp_path_factory.mktemp("big") / "big.jsonl"
    with path.open("w") as file:
        for i in range(1600):
            row = {"text": f"text {i} " + "why and so " * 90}
            file.write("broken\n" if i % 200 == 7 else json.dumps(row) + "\n")
    return path


def config_of(path: Path, cache: Path, **keys: Any) -> RunConfig:
    return RunConfig(
        datasets=[{"path": str(path), "type": "text"}],
        data_cache_dir=str(cache),
        validation_split_ratio=0.0,
        **keys,
    )


def shard_bytes(cache: Path) -> dict[str, bytes]:
    (entry,) = [p for p in (cache / "documents").iterdir() if p.is_dir()]
    return {p.name: p.read_bytes() for p in entry.iterdir()}


@pytest.mark.slow
def test_the_number_of_processes_changes_nothing(big: Path, tmp_path: Path) -> None:
    tokenizer, formats = load_tokenizer(EMBEDDED_TOKENIZER), load_plugins().all("dataset")
    digests, shards = [], []
    for processes in (0, 2):
        cache = tmp_path / str(processes)
        data = prepare(config_of(big, cache, dataloader_num_workers=processes), tokenizer, formats)
        assert data.report.bad_row_count == 8
        assert data.report.bad_rows[0].where.endswith("big.jsonl:8")
        digests.append(data.digest)
        shards.append(shard_bytes(cache))
    assert digests[0] == digests[1]
    assert shards[0] == shards[1]


class _Stop(BaseException):
    """Stands for a kill."""


def test_a_stopped_tokenisation_goes_on_where_it_was_saved(
    big: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, formats = load_tokenizer(EMBEDDED_TOKENIZER), load_plugins().all("dataset")
    monkeypatch.setattr(pipeline, "_SAVE_SECONDS", -1.0)
    encoded: list[int] = []
    limit = [10**9]
    real = RowEncoder.__call__

    def counting(self: RowEncoder, chunk: Any) -> Any:
        if len(encoded) == limit[0]:
            raise _Stop
        encoded.append(chunk.after[2])
        return real(self, chunk)

    monkeypatch.setattr(RowEncoder, "__call__", counting)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = prepare(config_of(big, whole, dataloader_num_workers=0), tokenizer, formats)
    chunks, encoded[:] = encoded[:], []
    assert len(chunks) > 20
    config = config_of(big, parts, dataloader_num_workers=0)
    for limit[0] in (2, 3):
        with pytest.raises(_Stop):
            prepare(config, tokenizer, formats)
        assert [p.suffix for p in (parts / "documents").iterdir() if p.is_dir()] == [".partial"]
    limit[0] = 10**9
    data = prepare(config, tokenizer, formats)
    assert encoded == chunks, "no chunk was encoded twice"
    assert data.digest == expected.digest
    assert data.report.bad_rows == expected.report.bad_rows
    assert shard_bytes(parts) == shard_bytes(whole)


@pytest.mark.slow
def test_a_killed_tokenisation_leaves_nothing_that_is_read_and_no_process(big: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    script = tmp_path / "tokenise.py"
    script.write_text(
        "from surogate_core.data import pipeline\n"
        "from surogate_core.data.rows import json_rows\n"
        "from surogate_core.data.text.tokenizer import load_tokenizer\n"
        "from surogate_core.plugins import load_plugins\n"
        "from surogate_core.config.schema import RunConfig\n"
        "if __name__ == '__main__':\n"
        "    pipeline._SAVE_SECONDS, json_rows._BLOCK = -1.0, 1 << 14\n"
        f"    config = RunConfig(datasets=[dict(path={str(big)!r}, type='text')], dataloader_num_workers=2,\n"
        f"        data_cache_dir={str(cache)!r}, validation_split_ratio=0.0)\n"
        f"    pipeline.prepare(config, load_tokenizer({EMBEDDED_TOKENIZER!r}), load_plugins().all('dataset'))\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 120
    while not list(cache.glob("documents/*.partial/state.json")):
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    while _running(process.pid):
        assert time.monotonic() < deadline, "its workers live on"
        time.sleep(0.05)
    tokenizer, formats = load_tokenizer(EMBEDDED_TOKENIZER), load_plugins().all("dataset")
    resumed = prepare(config_of(big, cache, dataloader_num_workers=0), tokenizer, formats)
    fresh = prepare(config_of(big, tmp_path / "fresh", dataloader_num_workers=0), tokenizer, formats)
    assert resumed.digest == fresh.digest
    assert shard_bytes(cache) == shard_bytes(tmp_path / "fresh")
    assert not list(cache.glob("documents/*.partial"))


def _running(session: int) -> bool:
    """Whether a process of the session lives."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            return True
    return False


def _die(row: Mapping[str, Any], options: Any, context: EncodeContext) -> Encoded:
    if multiprocessing.parent_process() is None:
        raise RowError("the tests' own process must live")
    os._exit(9)


def _fail(row: Mapping[str, Any], options: Any, context: EncodeContext) -> Encoded:
    raise KeyError("a mistake of the format")


@dataclasses.dataclass(frozen=True)
class _NoOptions:
    pass


@pytest.mark.parametrize(("encode", "expected"), [(_die, MachineError), (_fail, FormatError)])
def test_what_happens_in_a_process_is_told(big: Path, encode: Any, expected: type[Exception]) -> None:
    row_format = DatasetFormat(name="broken", options=_NoOptions, encode=encode)
    context = EncodeContext(tokenizer=load_tokenizer(EMBEDDED_TOKENIZER), sequence_len=64)
    encoder = RowEncoder(format=row_format, options=_NoOptions(), context=context)
    chunks = list(open_source(SourceSpec(path=str(big))).chunks())
    with pytest.raises(expected):
        list(encode_chunks(encoder, chunks, 1))


def test_processes_are_started_for_large_data_only() -> None:
    assert process_count(3, 10) == 3
    assert process_count("auto", encoding.WORTH_PROCESSES - 1) == 0
    assert 0 <= process_count("auto", 1 << 40) <= encoding.MOST_PROCESSES


def test_a_bad_row_of_a_format_is_counted_wherever_it_is_made(big: Path) -> None:
    def refuse(row: Mapping[str, Any], options: Any, context: EncodeContext) -> Encoded:
        raise RowError("refused")

    row_format = DatasetFormat(name="refusing", options=_NoOptions, encode=refuse)  # a closure: cannot be sent
    context = EncodeContext(tokenizer=load_tokenizer(EMBEDDED_TOKENIZER), sequence_len=64)
    encoder = RowEncoder(format=row_format, options=_NoOptions(), context=context)
    source = open_source(SourceSpec(path=str(big)))
    chunks = list(encode_chunks(encoder, source.chunks(), 2))
    assert sum(chunk.bad_row_count for chunk in chunks) == sum(chunk.rows for chunk in chunks) == 1600


@pytest.mark.parametrize("emptied", [True, False], ids=["emptied", "sealed, not yet named"])
def test_work_that_cannot_be_taken_up_is_done_again(big: Path, tmp_path: Path, emptied: bool) -> None:
    tokenizer, formats = load_tokenizer(EMBEDDED_TOKENIZER), load_plugins().all("dataset")
    config = config_of(big, tmp_path / "cache", dataloader_num_workers=0)
    whole = prepare(config, tokenizer, formats)
    (entry,) = [p for p in (tmp_path / "cache" / "documents").iterdir() if p.is_dir()]
    partial = entry.rename(entry.with_name(f"{entry.name}.partial"))
    if emptied:  # as a crash of the machine may leave it
        (partial / "state.json").write_text("")
    assert prepare(config, tokenizer, formats).digest == whole.digest
    assert not partial.exists()


def test_arguments_nested_past_what_a_template_can_render_are_a_bad_row(tmp_path: Path) -> None:
    def line(arguments: str) -> str:
        call = f'{{"type": "function", "function": {{"name": "f", "arguments": {{"x": {arguments}}}}}}}'
        turns = f'{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b", "tool_calls": [{call}]}}'
        return f'{{"messages": [{turns}]}}\n'

    path = tmp_path / "rows.jsonl"
    plain = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    path.write_text(plain + line("[" * 700 + "]" * 700) + plain)
    config = RunConfig(
        datasets=[{"path": str(path), "type": "conversation"}],
        data_cache_dir=str(tmp_path / "cache"),
        validation_split_ratio=0.0,
    )
    report = prepare(config, load_tokenizer(EMBEDDED_TOKENIZER), load_plugins().all("dataset")).report
    assert report.rows_read == 3
    assert [(bad.where, bad.reason) for bad in report.bad_rows] == [(f"{path}:2", "nested too deeply")]
