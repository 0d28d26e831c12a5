"""Files and directories that a configuration names: what must be there, and what a run must not write into.

Reads only names and small JSON files, no weights and no data, and writes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.conf_paths import expanded
from surogate_core.config.schema import RunConfig
from surogate_core.errors import ConfigError, Problem
from surogate_core.files.foreign import read_json
from surogate_core.files.paths import is_url, too_long

_WRITTEN = ("output_dir", "checkpoint_dir", "offload_dir", "data_cache_dir")
"""Keys of the directories that a run writes into."""

_PATHS = (*_WRITTEN, "log_file", "adapter_path", "tokenizer")
PLACES_READ = frozenset({*_PATHS, "model", "datasets", "validation_datasets", "lora", "merge_adapter"})
"""Keys that must be sound before their places are looked at."""


def expand_home(config: RunConfig) -> RunConfig:
    """`~` in the paths of a file, where no shell has replaced it."""
    given = {key: getattr(config, key) for key in _PATHS}
    changed: dict[str, Any] = {k: expanded(v) for k, v in given.items() if isinstance(v, str) and v.startswith("~")}
    return replace(config, **changed) if changed else config


def check_places(config: RunConfig, where: Callable[[str], str]) -> list[Problem]:
    """The mistakes in the paths of a configuration whose types are sound."""
    long = [k for k in _PATHS if isinstance(v := getattr(config, k), str) and too_long(v)]
    for key in ("datasets", "validation_datasets"):
        paths = [str(entry["path"]) for entry in getattr(config, key)]
        long += [f"{key}.{i}.path" for i, path in enumerate(paths) if too_long(path) and not is_url(path)]
    if long:
        message = "is too long for a path: at most 255 bytes between two slashes, 4095 in all."
        return [Problem(key=key, message=message, where=where(key)) for key in long]
    try:
        found = [*_model(config), *_written(config), *_log_file(config)]
    except OSError as error:  # the name of a model or a data set that is too long, a directory that may not be read
        name = str(error.filename)
        shown = name if len(name) <= 80 else f"{name[:79]}…"
        return [Problem(key="paths", message=f"{shown}: {error.strerror}.")]
    return [Problem(key=key, message=message, where=where(key), fix=fix) for key, message, fix in found]


Mistakes = Iterator[tuple[str, str, str]]
"""(key, message, fix)"""


def check_model_is_there(config: RunConfig) -> None:
    """Raises `ConfigError` for a model directory that does not exist; only showing a configuration does not need it."""
    source = config.model.path
    if source is None or not (source.startswith((".", "/", "~")) or source.count("/") > 1):
        return
    path = Path(expanded(source))
    if not path.exists():
        near = _nearest(path)
        message = f"there is no directory {source}."
        fix = f"model={near}" if near else "the directory of a model, a hub id such as Qwen/Qwen3-0.6B, or model=qwen3"
        raise ConfigError([Problem(key="model", message=message, fix=fix)])


def _model(config: RunConfig) -> Mistakes:
    """A directory that contains something other than a model."""
    source = config.model.path
    path = None if source is None else Path(expanded(source))
    if path is None or not path.exists():
        return
    if not path.is_dir():
        yield "model.path", f"{source} is a file; a model is a directory with config.json and safetensors.", ""
    elif not (path / "config.json").exists():
        if (path / "adapter_config.json").exists():
            base = _base_of(path)
            message = f"{source} is a LoRA adapter, not a model" + (f"; its base is {base}." if base else ".")
            fix = f"model={base or 'BASE'} adapter_path={source}; or fold it in: surogate merge "
            fix += f"{source} --output MERGED, then model=MERGED"
            yield "model.path", message, fix
        elif (inside := [name for name in ("model", "adapter") if (path / name).is_dir()]) and (
            path / "run.json"
        ).exists():
            key = "model" if inside[0] == "model" else "model=BASE adapter_path"
            yield "model.path", f"{source} is the output of a run, not a model.", f"{key}={path / inside[0]}"
        elif (path / "run.json").exists():
            message = f"{source} is the output of a run that has exported no model yet."
            command = f"surogate {_task_of(path)} {path / 'config.yaml'}"
            yield "model.path", message, f"run its command again to finish it: {command}"


def _task_of(run: Path) -> str:
    try:
        found = re.search(r"^task: *([\w-]+)", (run / "config.yaml").read_text(encoding="utf-8"), flags=re.MULTILINE)
    except (OSError, ValueError):
        found = None
    return found[1] if found else "sft"


def _base_of(adapter: Path) -> str:
    try:
        base = read_json(adapter / "adapter_config.json")["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return base if isinstance(base, str) else ""


def _nearest(path: Path) -> str:
    """The directory beside a missing one with the nearest name, or the only model there; empty if there is none."""
    try:
        beside = [p for p in path.parent.iterdir() if p.is_dir()]
        models = [p.name for p in beside if (p / "config.json").is_file()]
    except OSError:
        return ""
    near = get_close_matches(path.name, models, n=1) or get_close_matches(path.name, [p.name for p in beside], n=1)
    name = near[0] if near else models[0] if len(models) == 1 else ""
    # Without the dot a name in the working directory could be taken for an option.
    return name and (f"./{name}" if path.parent == Path() else str(path.parent / name))


def _written(config: RunConfig) -> Mistakes:
    """Directories of others that a run would write into."""
    for key in _WRITTEN:
        value = config.place if key == "output_dir" else getattr(config, key)
        if value is None:
            continue
        target = Path(expanded(value)).resolve()
        for directory, what, also_inside in _others(config):
            if target == directory or (also_inside and directory in target.parents):
                relation = "is" if target == directory else "is in"
                yield key, f"{value} {relation} {what}; a run writes its own files there.", f"{key}=ANOTHER_DIRECTORY"
                break
    output = Path(expanded(config.place)).resolve()
    if config.model.path is not None:
        model = Path(expanded(config.model.path))
        if model.is_dir() and model.resolve() == output / "model":
            message = f"the run moves or replaces {config.place}/model, which is the model that it starts from."
            yield "output_dir", message, "output_dir=ANOTHER_DIRECTORY"
    if config.adapter_path is not None:
        adapter = Path(expanded(config.adapter_path))
        if adapter.is_dir() and (adapter.resolve() == output or output in adapter.resolve().parents):
            message = f"the run writes its adapter into {config.place}, which has the adapter that it starts from."
            yield "output_dir", message, "output_dir=ANOTHER_DIRECTORY"


def _others(config: RunConfig) -> Iterator[tuple[Path, str, bool]]:
    """(directory, what it is, whether the rule also covers the directories inside it)."""
    from huggingface_hub.constants import HF_HUB_CACHE

    if config.model.path is not None and (model := Path(expanded(config.model.path))).is_dir():
        yield model.resolve(), f"the directory of the model {config.model.path}", False
    for entry in [*config.datasets, *config.validation_datasets]:
        # The data set is the files in it and below it: the run's metrics.jsonl would be trained on next time.
        if not is_url(entry["path"]) and (data := Path(expanded(entry["path"]))).is_dir():
            yield data.resolve(), f"the directory of the data set {entry['path']}", True
    yield Path(HF_HUB_CACHE).resolve(), "the cache of the Hugging Face hub", True
    yield Path(__file__).resolve().parents[1], "the directory where surogate itself is installed", True


def _log_file(config: RunConfig) -> Mistakes:
    """A log that would be appended to a file of data or of the model."""
    if config.log_file is None:
        return
    from surogate_core.data.rows.files import FileKind, kind_of

    log = Path(expanded(config.log_file)).resolve()
    data = [Path(expanded(e["path"])).resolve() for e in [*config.datasets, *config.validation_datasets]]
    model = Path(expanded(config.model.path)) if config.model.path else None
    data += [log for directory in data if directory in log.parents and isinstance(kind_of(log.name), FileKind)]
    if log in data:
        yield "log_file", f"{config.log_file} is, or would be, a file of a data set.", "log_file: null"
    elif model is not None and model.is_dir() and log.parent == model.resolve():
        message = f"{config.log_file} is in the directory of the model, where the run writes nothing."
        yield "log_file", message, "log_file: null"
