"""Whether a directory takes files, asked by several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from surogate_core.files.atomic import ensure_writable


def test_several_may_ask_of_one_directory_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for asked in [pool.submit(partial(ensure_writable, tmp_path / "new", key="output_dir")) for _ in range(400)]:
            asked.result()
    assert list((tmp_path / "new").iterdir()) == []
