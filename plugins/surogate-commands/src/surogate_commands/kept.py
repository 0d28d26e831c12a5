"""Lines of JSON that a long command keeps while it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Take = Callable[[Mapping[str, Any]], None]


def json_line(row: Mapping[str, Any]) -> str:
    """A row as a line of JSON."""
    return json.dumps(row, ensure_ascii=False) + "\n"


@contextmanager
def kept_lines(output: Path | None, *, key: str) -> Iterator[Take | None]:
    """Takes rows to ``OUTPUT.partial``, which stays if the command is interrupted. The caller writes `output`, which
    `key` named; None keeps nothing.
    """
    if output is None:
        yield None
        return
    from surogate_core.plugin import atomic

    partial, count = output.with_name(f"{output.name}.partial"), 0

    def take(row: Mapping[str, Any]) -> None:
        nonlocal count
        try:
            with partial.open("a", encoding="utf-8") as file:
                file.write(json_line(row))
        except OSError as error:
            raise atomic.disk_error(error, what=key, path=partial) from error
        count += 1

    try:
        atomic.replace_file(partial, b"", key=key)
        yield take
    except BaseException:
        if count:
            print(f"note: the {count:,} completions that were done are in {partial}", file=sys.stderr)
        else:
            partial.unlink(missing_ok=True)
        raise
    partial.unlink(missing_ok=True)
