"""`sft`, `pt` and `train`: keyword arguments to a run."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import ConfigError, PluginError, Problem

if TYPE_CHECKING:
    from surogate_core.api.callbacks import Callbacks
    from surogate_core.api.results import Run


def sft(
    config: str | os.PathLike[str] | None = None, /, *, callbacks: Callbacks = (), quiet: bool = False, **keys: Any
) -> Run:
    """Fine-tune a model: ``surogate.sft(model="Qwen/Qwen3-0.6B", datasets=rows, lora_rank=16)``.

    `config`: a YAML file; keyword arguments win over it. `keys`: the keys of the configuration. `datasets` and
    `validation_datasets` may also be rows in memory: a list of dicts, a `datasets.Dataset` or a data frame.
    `callbacks`: functions that receive the run's events, or a mapping from an event's name to a function.
    `quiet`: print no progress. Blocks until the run ends; raises `ConfigError` with every mistake in the keys.
    The same call resumes an interrupted run.
    """
    return train("sft", config, callbacks=callbacks, quiet=quiet, **keys)


def pt(
    config: str | os.PathLike[str] | None = None, /, *, callbacks: Callbacks = (), quiet: bool = False, **keys: Any
) -> Run:
    """Pre-train all weights of a model on text; the arguments are those of `sft`."""
    return train("pt", config, callbacks=callbacks, quiet=quiet, **keys)


def train(
    task: str,
    config: str | os.PathLike[str] | None = None,
    /,
    *,
    callbacks: Callbacks = (),
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Run a task by its name, also one that a plugin offers; the other arguments are those of `sft`."""
    with _contained():
        directory, code = _train(task, config, callbacks, quiet, keys)
    if code > 128 and threading.current_thread() is threading.main_thread():
        # The run has saved and given the signal handlers back. The signal now does what it does without a run.
        signal.raise_signal(code - 128)
    from surogate_core.api.results import Run

    return Run(directory)


def _train(
    task: str,
    config: str | os.PathLike[str] | None,
    callbacks: Callbacks,
    quiet: bool,
    keys: Mapping[str, Any],
) -> tuple[Path, int]:
    """The run's directory and its exit code."""
    from surogate_core.api.callbacks import built
    from surogate_core.api.rows import DATA_KEYS, written
    from surogate_core.cli.arguments import Arguments, load
    from surogate_core.cli.train import require_own_data, start
    from surogate_core.config.yamlfile import read_yaml, with_keywords
    from surogate_core.files.paths import cache_root
    from surogate_core.run.watch import Watch

    file = None if config is None else read_yaml(Path(config).expanduser())
    values = {key: _plain(value) if key not in DATA_KEYS else value for key, value in keys.items()}
    cache = values.get("data_cache_dir") or (file.values.get("data_cache_dir") if file is not None else None)
    for key in DATA_KEYS & values.keys():
        values[key] = written(values[key], key, cache_root(str(cache) if cache else None))
    monitors, places = built(callbacks), [""]
    arguments = Arguments(config_file=with_keywords(file, values))
    checked, registry = load(arguments, task)
    require_own_data(arguments, task, [checked], registry)
    try:
        code = start(checked, registry, Watch(callbacks=monitors, quiet=quiet, placed=places.append))
    except SystemExit as error:
        raise PluginError(f"a plugin ended the process with exit code {error.code}; the run is over.") from error
    return Path(places[-1] or checked.place), code


def _plain(value: Any) -> Any:
    """A value as a YAML file would have it: paths become text, tuples lists, numbers of NumPy Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if type(value).__module__ == "numpy" and not getattr(value, "shape", (1,)):
        return value.item()
    return value


@contextmanager
def _contained() -> Iterator[None]:
    """Undo what a run changes in its process: logging and variables; then free its memory."""
    from surogate_core import logs
    from surogate_core.caches import VARIABLES
    from surogate_core.cli.main import NO_EXTENSIONS

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
