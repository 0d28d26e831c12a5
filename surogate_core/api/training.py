"""`sft`, `pt` and `train`: keyword arguments to a run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.api.process import contained, plain
from surogate_core.errors import PluginError, UserError

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
    task: str | None = None,
    config: str | os.PathLike[str] | None = None,
    /,
    *,
    callbacks: Callbacks = (),
    quiet: bool = False,
    **keys: Any,
) -> Run:
    """Run a task by its name, also one that a plugin offers; the other arguments are those of `sft`."""
    if task is None:
        task = keys.pop("task", None)
    if not isinstance(task, str):
        raise UserError('surogate.train: there is no task. Fix: surogate.train("grpo", model=…)')
    with contained():
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
    from surogate_core.app.arguments import Arguments, load
    from surogate_core.app.starting import require_own_data, start
    from surogate_core.config.yamlfile import read_yaml, with_keywords
    from surogate_core.files.paths import cache_root
    from surogate_core.run.watch import Watch

    file = None if config is None else read_yaml(Path(config).expanduser())
    values = {key: plain(value) if key not in DATA_KEYS else value for key, value in keys.items()}
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
