"""`surogate`, `surogate sft`, `surogate pt`: compose, check, run; sweeps and Hydra's own answers."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.cli.arguments import Arguments, load, parse, registry_for
from surogate_core.errors import ConfigError, Problem, SurogateError
from surogate_core.masking import masked_yaml

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry

USAGE = """\
usage: surogate {form} [--config FILE.yaml] [KEY=VALUE …]

  FILE.yaml            flat keys; the command line wins over it
  KEY=VALUE            an override; GROUP=OPTION chooses (recipe=bf16), GROUP.KEY=VALUE sets an option's own key
  -m, --multirun       one run for each value of a sweep (learning_rate=1e-3,1e-4)
  --cfg job            show the composed config and stop
  --info [WHAT]        show how it was composed and stop
  -sc install=bash     print the tab-completion script (bash, zsh, fish)
"""

_STOPPED = (129, 130, 143)


def main(argv: Sequence[str], task: str | None) -> int:
    """Run the command; the exit code."""
    arguments = parse(argv, command=f"surogate {task}" if task else "surogate")
    if arguments.help:
        print(_help(task), end="")
        return 0
    from surogate_core import logs

    logs.configure()
    if arguments.completion:
        return _complete(arguments)
    if arguments.hydra:
        return _show(arguments, task)
    if arguments.multirun:
        return _multirun(arguments, task)
    config, registry = load(arguments, task)
    _require_own_data(arguments, task, [config], registry)
    return start(config, registry)


def _require_own_data(arguments: Arguments, task: str | None, configs: Sequence[RunConfig], registry: Registry) -> None:
    """Raise `ConfigError` when a model of the user's own would be trained on the example, which nobody named."""
    from surogate_core.config.resolve import gather

    model = next((config.model.path for config in configs if config.model.path is not None), None)
    if model is None:
        return
    settings = gather(arguments.overrides, task=task, config_file=arguments.config_file, registry=registry)
    if "dataset" in settings.choices or any(value.key.startswith("datasets") for value in settings.values):
        return
    message = f"no data set is named, and the default is a toy example that {model} should not learn."
    fix = "'datasets=[{path: my.jsonl, type: auto}]', or dataset=embedded where the example is meant"
    raise ConfigError([Problem(key="datasets", message=message, fix=fix)])


def start(config: RunConfig, registry: Registry) -> int:
    """Open the run's log and train."""
    from surogate_core import logs

    logs.configure()
    log_file = Path(config.log_file) if config.log_file else Path(config.output_dir) / "surogate.log"
    try:
        logs.open_log(log_file, follow=config.log_file is not None)
    except OSError as error:
        key = "log_file" if config.log_file else "output_dir"
        message = f"{log_file} cannot be written: {error.strerror}."
        raise ConfigError([Problem(key=key, message=message, fix=f"{key}=DIRECTORY_YOU_MAY_WRITE")]) from None
    from surogate_core.train.run import run

    return run(config, registry)


def _show(arguments: Arguments, task: str | None) -> int:
    """``--cfg`` and ``--info``: check as for a run, then let Hydra print."""
    from surogate_core.config.compose import run_hydra
    from surogate_core.config.resolve import load_many

    registry = registry_for(arguments)
    loaded = load_many(arguments.overrides, task=task, config_file=arguments.config_file, registry=registry)
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            return _hydra_exit(lambda: run_hydra(arguments.hydra, loaded[0][0], registry, lambda config: None))
    finally:
        print(masked_yaml(shown.getvalue()), end="")


def _complete(arguments: Arguments) -> int:
    """Tab completion; Hydra knows groups and keys, not our sub-commands, so they are taken out of the line."""
    from surogate_core.cli.main import COMMANDS
    from surogate_core.config.compose import run_hydra
    from surogate_core.plugins import load_plugins

    registry = load_plugins()
    app, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    words = rest.split()
    open_word = words.pop() if words and not rest.endswith(" ") else ""
    querying = any(o.startswith("query=") for o in arguments.overrides)
    if querying and not words:
        print(" ".join(c for c in COMMANDS if c.startswith(open_word)))
    if words and words[0] in COMMANDS:
        words = words[1:]
    kept = [_bare(w, registry) for w in words if "=" in w and not w.startswith("-")]
    os.environ["COMP_LINE"] = " ".join([app, *kept, open_word])
    # A half-typed line is no mistake: what Hydra says of it would be written over the prompt.
    with contextlib.redirect_stderr(io.StringIO()) if querying else contextlib.nullcontext():
        return _hydra_exit(lambda: run_hydra(["-sc", *arguments.overrides], [], registry, lambda config: None))


def _bare(word: str, registry: Registry) -> str:
    key = word.partition("=")[0].lstrip("+")
    return word.lstrip("+") if key in registry.options else word


def _multirun(arguments: Arguments, task: str | None) -> int:
    from surogate_core.config.compose import plain_values, run_hydra
    from surogate_core.config.places import check_model_is_there
    from surogate_core.config.resolve import check_values, gather, load_many

    registry = registry_for(arguments)
    file = arguments.config_file
    every = load_many(arguments.overrides, task=task, config_file=file, registry=registry, multirun=True)
    for _, config in every:
        check_model_is_there(config)
    _require_own_data(arguments, task, [config for _, config in every], registry)
    settings = gather(arguments.overrides, task=task, config_file=file, registry=registry)
    swept = {v.key for v in settings.values if v.sweep}
    codes: list[int] = []

    def job(config: Any) -> int:
        number = len(codes)
        checked = check_values(plain_values(config), registry, settings.where)
        paths: dict[str, Any] = {}
        for key in ("output_dir", "checkpoint_dir"):
            value = getattr(checked, key)
            if value is not None and key not in swept:
                paths[key] = str(Path(value) / str(number))
        codes.append(_guarded(dataclasses.replace(checked, **paths), registry))
        if codes[-1] in _STOPPED:
            raise KeyboardInterrupt
        return codes[-1]

    subdirectory = "." if "output_dir" in swept else "${hydra.job.num}"
    places = ["hydra.sweep.dir=${output_dir}", f"hydra.sweep.subdir={subdirectory}"]
    try:
        code = _hydra_exit(lambda: run_hydra(["--multirun"], [*places, *settings.overrides()], registry, job))
    except KeyboardInterrupt:
        if codes and codes[-1] in _STOPPED:
            return codes[-1]
        raise
    return next((c for c in codes if c), code)


def _guarded(config: RunConfig, registry: Registry) -> int:
    """One run of a sweep: its errors are reported and the sweep goes on."""
    from surogate_core.cli.main import report_bug

    try:
        return start(config, registry)
    except SurogateError as error:
        print(f"surogate: {config.output_dir}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        report_bug(error, place=config.output_dir)
        return 1


def _hydra_exit(call: Any) -> int:
    try:
        call()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _help(task: str | None) -> str:
    import textwrap

    from surogate_core.config.docs import key_docs

    lines = [USAGE.format(form=f"{task} [FILE.yaml]" if task else "[sft|pt [FILE.yaml]]")]
    section = ""
    for doc in key_docs():
        if doc.section != section:
            section = doc.section
            lines.append(f"\n{section}:\n")
        default = f" [{doc.default}]" if doc.default else ""
        text = textwrap.fill(f"{doc.text}{default}", width=118, initial_indent=" " * 32, subsequent_indent=" " * 32)
        lines.append(f"  {doc.key:<29} {text.lstrip()}\n")
    return "".join(lines)
