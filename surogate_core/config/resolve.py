"""The one way from arguments and a flat YAML file to a `RunConfig`, and back to YAML."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from surogate_core.bundles.options import field_types, flat_marks, flat_values
from surogate_core.config.choices import default_groups
from surogate_core.config.schema import KEYS, PluginPolicy, RunConfig, Selection
from surogate_core.errors import ConfigError, Problem
from surogate_core.files.foreign import read_json
from surogate_core.plugins.registry import Registry

if TYPE_CHECKING:
    from surogate_core.config.yamlfile import Source

log = structlog.get_logger(__name__)


def load_run_config(
    args: Sequence[str], *, task: str | None = None, config_file: Source | None = None, registry: Registry
) -> RunConfig:
    """Compose and check a run's configuration.

    `args`: overrides. `task`: the sub-command that names it. `config_file`: a flat YAML file,
    weaker than `args`. Raises `ConfigError` with every mistake found. Nothing is written.
    """
    return load_many(args, task=task, config_file=config_file, registry=registry)[0][1]


def load_many(
    args: Sequence[str],
    *,
    task: str | None = None,
    config_file: Source | None = None,
    registry: Registry,
    multirun: bool = False,
) -> list[tuple[list[str], RunConfig]]:
    """The same for a sweep: with `multirun`, one configuration for each swept value, with the other sweeps at their
    first value. Each is returned with its overrides.
    """
    from surogate_core.config.composing.overrides import UserSettings

    settings = gather(args, task=task, config_file=config_file, registry=registry, multirun=multirun)
    assert isinstance(settings, UserSettings)
    if not multirun:
        _refuse_sweeps(settings)
    problems = list(settings.problems)
    if problems:
        # What can be composed in spite of them is checked too, so that all mistakes come at once.
        settings.problems.clear()
    loaded = []
    for overrides in expand_sweeps(settings.overrides()) if multirun else [settings.overrides()]:
        try:
            loaded.append((overrides, check(overrides, settings)))
        except ConfigError as error:
            known = {(p.key, p.message) for p in problems}
            problems += [p for p in error.problems if (p.key, p.message) not in known]
    if problems:
        places = [config_file.parent] if isinstance(config_file, Path) else []
        places += [Path(v.text.strip("'\"")) for v in settings.values if v.key == "output_dir"]
        raise ConfigError(_installed_at_once([*_without_echoes(problems), *_plugins_gone(places, registry)]))
    for text in registry.untold():
        log.warning(text)
    return loaded


def gather(
    args: Sequence[str], *, task: str | None, config_file: Source | None, registry: Registry, multirun: bool = False
) -> Any:
    """File and command line as one `UserSettings`; its `problems` are not raised yet."""
    from surogate_core.config.composing.overrides import COMMAND_LINE, UserSettings
    from surogate_core.config.yamlfile import read_yaml

    settings = UserSettings(registry, multirun=multirun)
    # The file may choose what a directory offers that the command line names.
    directories = [argument for argument in args if argument.startswith("hydra.searchpath=")]
    settings.add_arguments(directories)
    if config_file is not None:
        settings.add_file(read_yaml(config_file))
    before = settings.choices.get("task")
    settings.add_arguments([argument for argument in args if argument not in directories])
    if task is not None:
        chosen = settings.choices.get("task")
        if chosen is not None and chosen.options != [task] and not chosen.sweep:
            named = ",".join(chosen.options)
            place = "the file" if chosen is before else "the override"
            message = f"`surogate {task}` was called, but {place} says {named}."
            problem = Problem(key="task", message=message, where=chosen.where, fix=f"surogate {named} …")
            settings.problems.append(problem)
        settings.choose_value("task", task, COMMAND_LINE)
    settings.imply()
    settings.problems += [*_clashes(settings), *_other_sweepers(settings)]
    return settings


def _clashes(settings: Any) -> Iterator[Problem]:
    """A problem for each default option that two plugins offer; what the user chooses is looked up on its own."""
    for group, options in default_groups().items():
        for option in options if isinstance(options, list) else [options]:
            clash = settings.registry.clashes.get((group, option))
            if clash is not None and group not in settings.choices:
                yield Problem(key=f"{group}={option}", message=clash.message, where="the default", fix=clash.fix)


_SWEEPS = {
    "launcher": (
        "is not available: the runs of a sweep start one after the other in this process, which keeps their table.",
        "leave it out; to train runs at the same time start several commands, each with its own values and output_dir",
    ),
    "sweeper": (
        "is not available: a sweep trains the values that it names, all of which are checked before the first run.",
        "name values, KEY=1e-5,1e-4 or KEY=choice(1e-5,1e-4); a search can call `surogate.train` from Python",
    ),
}
"""Hydra's groups whose only option is ``basic`` → (why, what to do instead)."""


def _other_sweepers(settings: Any) -> list[Problem]:
    """A problem for each launcher and sweeper that is not Hydra's own, and for intervals, which need one.

    They are taken out, so that Hydra does not complain about them too.
    """
    from surogate_core.config.composing.overrides import COMMAND_LINE

    problems: list[Problem] = []
    for line in list(settings.hydra):
        key, _, value = line.lstrip("+~").partition("=")
        group = key.partition("@")[0].removeprefix("hydra/")
        if key.startswith("hydra/") and group in _SWEEPS and value.strip("'\"") != "basic":
            message, fix = _SWEEPS[group]
            problems.append(Problem(key=f"hydra/{group}={value}", message=message, where=COMMAND_LINE, fix=fix))
            settings.hydra.remove(line)
    for value in list(settings.values):
        if re.match(r"(\w+\([^'\"]*[(,\s])?interval\(|\w+\(interval\(", value.text):
            message = f"{value.text} has no values that a sweep can train."
            problems.append(Problem(key=value.key, message=message, where=value.where, fix=_SWEEPS["sweeper"][1]))
            settings.values.remove(value)
    return problems


def check(overrides: Sequence[str], settings: Any) -> RunConfig:
    """Compose the overrides and check the result."""
    from surogate_core.config.composing.compose import compose_config, resolved_values

    try:
        composed = compose_config(overrides, settings.registry)
    except ConfigError as error:
        raise ConfigError([_placed(p, settings) for p in error.problems]) from error
    values, unresolved = resolved_values(composed)
    try:
        config = check_values(values, settings.registry, settings.where, settings.is_set)
    except ConfigError as error:
        found = [_decoded(p, composed) for p in error.problems]
        raise ConfigError([*(_placed(p, settings) for p in unresolved), *found]) from error
    if unresolved:
        raise ConfigError([_placed(p, settings) for p in unresolved])
    return config


def _placed(problem: Problem, settings: Any) -> Problem:
    return problem if problem.where else dataclasses.replace(problem, where=settings.where(problem.key))


def _decoded(problem: Problem, composed: Any) -> Problem:
    """The value of an environment variable is text: what makes a number of it is `oc.decode`."""
    from omegaconf import OmegaConf

    node = OmegaConf.to_container(composed, resolve=False)
    for part in problem.key.split("."):
        node = node[part] if isinstance(node, dict) and part in node else None
    if isinstance(node, str) and node.startswith("${oc.env:") and "without quotes" in problem.fix:
        return dataclasses.replace(problem, fix=f"{problem.key}: ${{oc.decode:{node}}}")
    return problem


def check_values(
    values: Mapping[str, Any], registry: Registry, where: Callable[[str], str], is_set: Callable[[str], bool]
) -> RunConfig:
    """Check a composed mapping; raises `ConfigError` with every mistake.

    `where` and `is_set`: the place of a dotted key, and whether the user set exactly it.
    """
    from surogate_core.config.validate import validate
    from surogate_core.plugins.discovery import import_policy

    config, problems = validate(values, registry, where, is_set)
    if config is not None and import_policy(config.plugins) != registry.policy:
        message = "the policy must be known before plugins are loaded."
        fix = "set it in the config file, on the command line or in the environment"
        problems = [Problem(key="plugins", message=message, where=where("plugins"), fix=fix)]
    if problems or config is None:
        raise ConfigError(problems)
    return config


def peek_policy(args: Sequence[str], config_file: Source | None = None) -> PluginPolicy:
    """The plugin policy that a file and arguments ask for, before any plugin is loaded.

    Raises `ConfigError` when it is not sound, as nothing may be imported then.
    """
    from surogate_core.config.composing.grammar import parse_override
    from surogate_core.config.composing.overrides import COMMAND_LINE
    from surogate_core.config.typed import Builder
    from surogate_core.config.yamlfile import read_yaml

    values: dict[str, Any] = {}
    places: dict[str, str] = {}
    if config_file is not None:
        file = read_yaml(config_file)
        found = file.values.get("plugins")
        if found is not None and not isinstance(found, Mapping):
            raise ConfigError(
                [
                    Problem(
                        key="plugins",
                        message="must be a mapping.",
                        where=file.where("plugins"),
                        fix="plugins: {block: [NAME]}",
                    )
                ]
            )
        values.update(found or {})
        places = {f"plugins.{name}": file.where(f"plugins.{name}") for name in values}
    for argument in args:
        if not argument.lstrip("+").startswith(("plugins.", "plugins=")):
            continue
        try:
            override = parse_override(argument)
        except ValueError as error:
            raise ConfigError([Problem(key=argument, message=f"{error}.", where=COMMAND_LINE)]) from None
        value = override.value()
        name = override.key_or_group.partition(".")[2]
        values.update({name: value} if name else value if isinstance(value, Mapping) else {"": value})
        places[override.key_or_group] = COMMAND_LINE

    def unknown(key: str, known: Any) -> Problem:
        message = f"there is no such key; known here: {', '.join(sorted(known))}."
        return Problem(key=key, message=message, where=places.get(key, COMMAND_LINE))

    builder = Builder(lambda key: places.get(key, COMMAND_LINE), unknown)
    policy = builder.dataclass(PluginPolicy, values, "plugins.")
    if builder.problems:
        raise ConfigError(builder.problems)
    assert isinstance(policy, PluginPolicy)
    return policy


def mistakes_without_plugins(args: Sequence[str], config_file: Source | None) -> list[Problem]:
    """The mistakes that can be found while the plugin policy is not known: in keys and values of the core's own."""
    from surogate_core.config.composing.grammar import parse_override
    from surogate_core.config.typed import Builder
    from surogate_core.plugins.catalogue import catalogue
    from surogate_core.plugins.discovery import ImportPolicy, installed_plugins
    from surogate_core.plugins.registry import load_plugins
    from surogate_core.plugins.static import static_view

    core_alone = load_plugins(ImportPolicy(allow=(("", frozenset()),)))
    settings = gather(args, task=None, config_file=config_file, registry=core_alone)
    declared = [static_view(plugin.module).flat_keys for plugin in installed_plugins()]
    plugins_keys = {"plugins", *catalogue().keys}.union(*declared)
    own = [p for p in settings.problems if "=" not in p.key and p.key.partition(".")[0] not in plugins_keys]
    builder = Builder(settings.where, lambda key, known: Problem(key=key, message="there is no such key."))
    hints = field_types(RunConfig)
    for value in settings.values:
        if value.key in {*KEYS} - plugins_keys - settings.groups and not value.sweep and "${" not in value.text:
            builder.value(hints[value.key], parse_override(f"{value.key}={value.text}").value(), value.key)
    return [*own, *builder.problems]


def expand_sweeps(overrides: Sequence[str]) -> list[list[str]]:
    """One list of overrides for each value of each sweep, the other sweeps at their first value."""
    from surogate_core.config.composing.grammar import parse_override

    choices: list[list[str]] = []
    for text in overrides:
        override = parse_override(text)
        if override.is_sweep_override() and override.is_discrete_sweep() and "glob(" not in text:
            key = override.get_key_element()
            choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            choices.append([text])
    first = [values[0] for values in choices]
    expanded = [first]
    for index, values in enumerate(choices):
        expanded += [[*first[:index], value, *first[index + 1 :]] for value in values[1:]]
    return expanded


def _refuse_sweeps(settings: Any) -> None:
    swept = [(v.key, v.text, v.where) for v in settings.values if v.sweep]
    swept += [(group, c.sweep, c.where) for group, c in settings.choices.items() if c.sweep]
    for key, text, where in swept:
        message = f"several values ({text}) are a sweep, which needs --multirun."
        settings.problems.append(Problem(key=key, message=message, where=where, fix="add --multirun"))
    settings.values = [v for v in settings.values if not v.sweep]
    settings.choices = {g: c for g, c in settings.choices.items() if not c.sweep}


def _plugins_gone(directories: Sequence[Path], registry: Registry) -> list[Problem]:
    """The plugins that an earlier run in one of the directories had and that are not installed now."""
    gone: dict[str, Problem] = {}
    for directory in directories:
        try:
            plugins = read_json(directory / "run.json")["plugins"]
            had = {p["name"]: f"{p['distribution']} {p['version']}" for p in plugins}
        except (OSError, ValueError, TypeError, KeyError):
            continue
        for name in had.keys() - registry.plugins.keys() - registry.blocked.keys() - registry.broken.keys():
            gone[name] = Problem(
                key="plugins",
                message=f"the run in {directory} was made with plugin {name} ({had[name]}), which is not installed.",
                fix=f"pip install '{had[name].replace(' ', '==')}'",
            )
    return [gone[name] for name in sorted(gone)]


def _installed_at_once(problems: Sequence[Problem]) -> list[Problem]:
    """The problems; one command installs all missing plugins if there are several."""
    from surogate_core.plugins.catalogue import install_command

    missing = list(dict.fromkeys(p.needs for p in problems if p.needs))
    if len(missing) < 2:
        return list(problems)
    kept = [dataclasses.replace(p, fix="") if p.needs else p for p in problems]
    message = f"{len(missing)} plugins are not installed."
    return [*kept, Problem(key="plugins", message=message, fix=install_command(*missing))]


def _without_echoes(problems: Sequence[Problem]) -> list[Problem]:
    """One problem a key and one an option: a rejected choice must not be reported again as its consequence."""
    seen: set[str] = set()
    kept = []
    for problem in problems:
        root, chosen, _ = problem.key.partition("=")
        # Several options of one group may be missing; each is a mistake of its own.
        if problem.key not in seen and (chosen or root not in seen):
            kept.append(problem)
        seen |= {problem.key, root, "datasets"} if root == "dataset" else {problem.key, root}
    return kept


# ----------------------------------------------------------------------------- back to YAML


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The configuration as flat keys and plain values, group nodes with `name` and the options without a flat key."""
    values = {key: plain(getattr(config, key)) for key in KEYS}
    for _, selection in selections(config):
        values |= {key: plain(value) for key, value in flat_values(selection.options).items()}
    return values | {key: plain(value) for key, value in config.flat.items()}


def selections(config: RunConfig) -> Iterator[tuple[str, Selection]]:
    """(kind, what is chosen) of every `Selection` of the configuration."""
    for key in KEYS:
        value = getattr(config, key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Selection):
                yield key, item


def config_from(values: Mapping[str, Any], registry: Registry) -> RunConfig:
    """The configuration that `to_dict` wrote as `values`; raises `ConfigError` where the plugins do not know it."""
    from surogate_core.config.names import LIST_GROUPS

    composed = {key: {one["name"]: one for one in v} if key in LIST_GROUPS else v for key, v in values.items()}
    return check_values(composed, registry, where=lambda key: "", is_set=lambda key: False)


def policy_from(values: Mapping[str, Any]) -> PluginPolicy:
    """The plugin policy in the values that `to_dict` gave."""
    return PluginPolicy(**values["plugins"])


def to_yaml(config: RunConfig) -> str:
    """The flat YAML that gives the same configuration again."""
    from surogate_core.config.yamlfile import write_yaml

    return write_yaml(_escaped(to_dict(config)))


def plain(value: Any) -> Any:
    """A value of the configuration as YAML has it."""
    if isinstance(value, Selection):
        options = {} if value.options is None else plain(value.options)
        cls: type = type(value.options)
        flat = flat_marks(cls) if value.options is not None else {}
        return {"name": value.name, **{key: item for key, item in options.items() if key not in flat}}
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(item) for name, item in asdict(value).items()}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation, written so that it is none."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, Mapping):
        return {k: _escaped(v) for k, v in value.items()}
    return [_escaped(v) for v in value] if isinstance(value, list) else value
