"""`surogate`, `surogate sft`, `surogate pt`: compose, check, run; sweeps and Hydra's own answers."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.app.announce import announce
from surogate_core.app.arguments import Arguments, load, parse, registry_for, with_places
from surogate_core.app.starting import require_own_data, start
from surogate_core.cli.sweep import STOPPED, Sweep
from surogate_core.errors import SurogateError
from surogate_core.masking import masked_yaml
from surogate_core.set_up_times import begin

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry

USAGE = """\
usage: surogate {form} [--config FILE.yaml] [KEY=VALUE …]

  FILE.yaml            flat keys; the command line wins over it
  KEY=VALUE            an override; GROUP=OPTION chooses (recipe=bf16), GROUP.KEY=VALUE sets an option's own key
  --config-dir DIR     a directory of option files of your own: DIR/recipe/mine.yaml is recipe=mine
  -m, --multirun       one run for each value of a sweep (learning_rate=1e-3,1e-4)
  --cfg job            show the composed config and stop
  --info [WHAT]        show how it was composed and stop
  -sc install=bash     print the tab-completion script (bash, zsh, fish)
"""


def main(argv: Sequence[str], task: str | None, first: str) -> int:
    """Run the command; the exit code. `first`: the line for a terminal before anything is loaded."""
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
    announce(first)
    begin("reading the configuration")
    config, registry = load(arguments, task)
    with with_places(arguments, task, registry):
        require_own_data(arguments, task, [config], registry)
        return start(config, registry)


def _show(arguments: Arguments, task: str | None) -> int:
    """``--cfg`` and ``--info``: check as for a run, then let Hydra print."""
    from surogate_core.config.composing.compose import run_hydra
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
    from surogate_core.app.commands import first_words
    from surogate_core.config.composing.compose import run_hydra
    from surogate_core.plugins import load_plugins

    registry = load_plugins()
    app, _, rest = os.environ.get("COMP_LINE", "").partition(" ")
    words = rest.split()
    open_word = words.pop() if words and not rest.endswith(" ") else ""
    querying = any(o.startswith("query=") for o in arguments.overrides)
    if querying:
        names = tuple(dict.fromkeys([*first_words(), *registry.names("task")]))
        print(" ".join(_own_completions(words, open_word, names, registry)))
        if words[:1] == ["plugins"]:
            return 0
    if words and words[0] in first_words():
        words = words[1:]
    kept = [_bare(w, registry) for w in words if "=" in w and not w.startswith("-")]
    os.environ["COMP_LINE"] = " ".join([app, *kept, open_word])
    # A half-typed line is no mistake: what Hydra says of it would be written over the prompt.
    with contextlib.redirect_stderr(io.StringIO()) if querying else contextlib.nullcontext():
        return _hydra_exit(lambda: run_hydra(["-sc", *arguments.overrides], [], registry, lambda config: None))


def _own_completions(words: list[str], open_word: str, firsts: Sequence[str], registry: Registry) -> list[str]:
    """Completions that Hydra does not offer: commands, those of `plugins` with their names, and lists of options."""
    from surogate_core.config.names import LIST_GROUPS
    from surogate_core.plugins.commands import command_names

    names: list[str] = []
    if not words:
        names = list(firsts)
    elif words == ["plugins"]:
        names = ["list", "show", "lock", "verify", "new", "check"]
        names += [second for first, _, second in (name.partition(" ") for name in command_names()) if first == words[0]]
    elif words[0] == "plugins" and words[1] in ("show", "check"):
        names = sorted(registry.plugins)
    group, equals, value = open_word.partition("=")
    if equals and group.lstrip("+") in LIST_GROUPS and value.startswith("["):
        begun, bracket_or_comma, _ = open_word.rpartition("," if "," in value else "[")
        names += [f"{begun}{bracket_or_comma}{o}" for o in sorted(registry.options.get(group.lstrip("+"), {}))]
    return [name for name in names if name.startswith(open_word)]


def _bare(word: str, registry: Registry) -> str:
    key = word.partition("=")[0].lstrip("+")
    return word.lstrip("+") if key in registry.options else word


def _multirun(arguments: Arguments, task: str | None) -> int:
    from surogate_core.config.composing.compose import run_hydra
    from surogate_core.config.places import check_model_is_there
    from surogate_core.config.resolve import gather, load_many

    registry = registry_for(arguments)
    file = arguments.config_file
    every = load_many(arguments.overrides, task=task, config_file=file, registry=registry, multirun=True)
    for _, config in every:
        check_model_is_there(config)
    require_own_data(arguments, task, [config for _, config in every], registry)
    settings = gather(arguments.overrides, task=task, config_file=file, registry=registry, multirun=True)
    sweep = Sweep(settings, registry, lambda config: _guarded(config, registry))
    with sweep.placed([config for _, config in every]) as place:
        try:
            code = _hydra_exit(lambda: run_hydra(["--multirun"], sweep.overrides(), registry, sweep.job))
        except KeyboardInterrupt:
            if sweep.codes and sweep.codes[-1] in STOPPED:
                return sweep.codes[-1]
            raise
        sweep.summary()
        code = next((c for c in sweep.codes if c), code)
        if code == 0 and place is not None:
            place.done()
    return code


def _guarded(config: RunConfig, registry: Registry) -> int:
    """One run of a sweep: its errors are reported and the sweep continues."""
    from surogate_core.cli.failure import report_bug

    try:
        return start(config, registry)
    except SurogateError as error:
        print(f"surogate: {config.place}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        report_bug(error, place=config.place)
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
    from surogate_core.config.names import flat_keys
    from surogate_core.plugins import load_plugins

    try:
        flat = flat_keys(load_plugins())
    except SurogateError as error:
        flat = {}
        print(f"surogate: without the keys of plugins: {error}", file=sys.stderr)
    lines = [USAGE.format(form=f"{task} [FILE.yaml]" if task else "[sft|pt [FILE.yaml]]")]
    section = ""
    for doc in key_docs(flat):
        if doc.section != section:
            section = doc.section
            lines.append(f"\n{section}:\n")
        default = f" [{doc.default}]" if doc.default else ""
        text = textwrap.fill(f"{doc.text}{default}", width=118, initial_indent=" " * 32, subsequent_indent=" " * 32)
        lines.append(f"  {doc.key:<29} {text.lstrip()}\n")
    return "".join(lines)
