"""Logging, configured in one place: JSON lines in the run's log, short lines on stderr.

Everything below warning, and everything of other libraries below error, goes to the log only. Records are kept in
memory until the path of the log is known, and are then written. Secrets are masked in both places.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, TextIO

import structlog

from surogate_core.files.private import private
from surogate_core.masking import masked

_MEMORY_RECORDS = 10_000
_state: dict[str, Any] = {"memory": None, "file": None, "path": None}


class _Stderr(logging.StreamHandler[TextIO]):
    """Writes to the `sys.stderr` of the moment, which a live view may have replaced."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name.startswith("surogate")
        quiet = getattr(record, "log_only", False)
        return (ours or record.levelno >= logging.ERROR) and not quiet and bool(super().filter(record))


def _short(logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
    for key in ("timestamp", "logger", "exception", "exc_info", "stack", "_record", "_from_structlog"):
        event.pop(key, None)
    level, text = event.pop("level", name), event.pop("event", "")
    rest = " ".join(f"{k}={v}" for k, v in event.items())
    return masked(f"{level}: {text}" + (f" ({rest})" if rest else ""))


def configure() -> None:
    """Set logging up; safe to call again."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    # A log that cannot be written (a full disk) must not print tracebacks over the run.
    logging.raiseExceptions = False
    root = logging.getLogger()
    root.setLevel(logging.INFO)
    for handler in [h for h in root.handlers if isinstance(h, _Stderr)]:
        root.removeHandler(handler)
    stderr = _Stderr()
    stderr.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=[_short]))
    root.addHandler(stderr)
    if _state["memory"] is None and _state["file"] is None:
        _state["memory"] = MemoryHandler(_MEMORY_RECORDS, flushLevel=logging.CRITICAL + 1, flushOnClose=False)
    for handler in (_state["memory"], _state["file"]):
        if handler is not None and handler not in root.handlers:
            root.addHandler(handler)


class _LogFile(logging.FileHandler):
    """A log that only its owner may read, because tracebacks may contain anything."""

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding=self.encoding, opener=private)


def open_log(path: Path, *, follow: bool = False) -> None:
    """Write the log to a file from now on, beginning with what was kept. Raises `OSError`.

    `follow`: the user has named the file, which may be a link or a device such as ``/dev/stderr``.
    """
    close_log()
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = (logging.FileHandler if follow else _LogFile)(path, encoding="utf-8")
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(default=str, ensure_ascii=False),
                lambda logger, name, line: masked(str(line)),
            ],
        )
    )
    root = logging.getLogger()
    memory = _state["memory"]
    if memory is not None:
        memory.setTarget(handler)
        memory.flush()
        root.removeHandler(memory)
        memory.close()
    root.addHandler(handler)
    logging.captureWarnings(True)
    _state.update(memory=None, file=handler, path=path)


def close_log() -> None:
    """Close the log's file."""
    handler = _state["file"]
    if handler is not None:
        logging.getLogger().removeHandler(handler)
        handler.close()
        logging.captureWarnings(False)
    _state.update(file=None, path=None)


@contextmanager
def contained() -> Iterator[None]:
    """Undo, at the end, what a run changes in the logging of the process: for Python code that calls a run."""
    root = logging.getLogger()
    handlers, level, raising = list(root.handlers), root.level, logging.raiseExceptions
    before = structlog.get_config() if structlog.is_configured() else None
    try:
        yield
    finally:
        close_log()
        if _state["memory"] is not None and _state["memory"] not in handlers:
            _state["memory"].close()
            _state["memory"] = None
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = raising
        structlog.reset_defaults()
        if before is not None:
            structlog.configure(**before)


def record_traceback(event: str, error: BaseException) -> Path:
    """Put an exception with its traceback into the log, and say where that is.

    Without a run's log it is the file ``surogate.log`` in the user's log directory.
    """
    if _state["path"] is None:
        from platformdirs import user_log_path

        fallback = os.environ.get("SUROGATE_LOG_DIR")
        configure()
        try:
            open_log((Path(fallback) if fallback else user_log_path("surogate")) / "surogate.log")
        except OSError:
            import tempfile

            # A new directory: a name in the shared one could be guessed, and someone could have put a link there.
            open_log(Path(tempfile.mkdtemp(prefix="surogate-")) / "surogate.log")
    logging.getLogger("surogate_core").error(event, exc_info=error, extra={"log_only": True})
    path = _state["path"]
    assert isinstance(path, Path)
    return path
