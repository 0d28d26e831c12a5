"""The report of an unexpected error."""

from __future__ import annotations

import sys


def report_bug(error: BaseException, place: str = "") -> None:
    """Write one line on stderr for an unexpected error, with its plugin; the traceback goes to the log."""
    from surogate_core.logs import record_traceback
    from surogate_core.masking import masked
    from surogate_core.plugins.isolation import culprit

    path = record_traceback("a bug ended the run", error)
    plugin = culprit(error)
    where = f" in {plugin.label}" if plugin is not None else ""
    text = masked(" ".join(str(error).split())).rstrip(".")
    begin = f"surogate: {place}: " if place else "surogate: "
    print(f"{begin}a bug{where}: {type(error).__name__}: {text}. The traceback is in {path}", file=sys.stderr)
