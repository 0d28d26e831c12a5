"""The report of an unexpected error."""

from __future__ import annotations

import sys


def report_bug(error: BaseException, place: str = "") -> None:
    """Write one line on stderr for an unexpected error, with its plugin; the traceback goes to the log."""
    from surogate_core.logs import record_traceback
    from surogate_core.plugins.isolation import bug_text

    begin = f"surogate: {place}: " if place else "surogate: "
    print(f"{begin}{bug_text(error, record_traceback('a bug ended the run', error))}", file=sys.stderr)
