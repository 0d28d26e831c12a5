"""What calls from Python share: one at a time in a process, which is afterwards as it was before."""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from surogate_core.errors import ConfigError, Problem
from surogate_core.imports import put_back_objects


def plain(value: Any) -> Any:
    """A value as a YAML file would have it: paths become text, tuples lists, numbers of NumPy Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if type(value).__module__ == "numpy" and not getattr(value, "shape", (1,)):
        return value.item()
    return value


@contextmanager
def contained() -> Iterator[None]:
    """Undo what a run changes in its process: logging and variables; then free its memory."""
    from surogate_core import logs
    from surogate_core.app.starting import NO_EXTENSIONS
    from surogate_core.caches import VARIABLES

    if not _running.acquire(blocking=False):
        message = "a run of this process is not over; one process trains one run at a time."
        raise ConfigError([Problem(key="surogate", message=message, fix="wait for it, or start another process")])
    before = {name: os.environ.get(name) for name in (*NO_EXTENSIONS, *VARIABLES, "TOKENIZERS_PARALLELISM")}
    try:
        os.environ.update(NO_EXTENSIONS)
        with logs.contained():
            yield
    except BaseException as error:
        _drop_frames(error)
        raise
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        put_back_objects()
        # On a CPU too: circles hold the run's files and threads.
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        # Last: the next run chooses what fits by what is free then.
        _running.release()


def _drop_frames(error: BaseException | None) -> None:
    """Forget the variables of the frames that an error passed.

    A notebook keeps its last error, and these variables keep the engine with its GPU memory.
    """
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        found = waiting.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            traceback.clear_frames(found.__traceback__)
            waiting += [found.__cause__, found.__context__]


_running = threading.Lock()
