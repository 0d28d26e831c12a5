"""Whether a directory takes files, asked by several at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from surogate_core.files.atomic import ensure_writable, human_bytes


def test_several_may_ask_of_one_directory_at_the_same_time(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for asked in [pool.submit(partial(ensure_writable, tmp_path / "new", key="output_dir")) for _ in range(400)]:
            asked.result()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1023 * 1024, "1023 KiB"), (999.6 * 2**20, "1000 MiB"),
        (999.4 * 2**20, "999 MiB"), (1.5 * 2**30, "1.5 GiB"), (1000 * 2**30, "1000 GiB"), (2**40, "1 TiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)  # fmt: skip
def test_bytes_for_people(count: float, text: str) -> None:
    assert human_bytes(count) == text
