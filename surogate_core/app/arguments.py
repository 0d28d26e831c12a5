"""The arguments of the commands that compose a configuration, and its loading."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.config.yamlfile import Source
    from surogate_core.plugins.registry import Registry

_SWITCHES = {"--multirun": "--multirun", "-m": "--multirun", "--help": "--help", "-h": "--help"}
_HYDRA_SWITCHES = {
    "--resolve": "--resolve",
    "--shell-completion": "-sc",
    "-sc": "-sc",
    "--hydra-help": "--hydra-help",
}
_CONFIG_VALUES = {
    "--config": "--config",
    "--config-dir": "--config-dir",
    "-cd": "--config-dir",
    "--config-path": "--config-path",
    "-cp": "--config-path",
    "--config-name": "--config-name",
    "-cn": "--config-name",
}
_HYDRA_VALUES = {"--cfg": ("job", "hydra", "all"), "-c": ("job", "hydra", "all"), "--package": (), "-p": ()}
_INFO = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass(slots=True)
class Arguments:
    """The words after the command."""

    overrides: list[str] = field(default_factory=list)
    config_file: Source | None = None
    multirun: bool = False
    help: bool = False
    hydra: list[str] = field(default_factory=list)
    """Flags that Hydra answers itself (``--cfg job``, ``--info``, ``-sc``)."""

    @property
    def completion(self) -> bool:
        """Whether the shell asks for completions, or for the script that does."""
        return "-sc" in self.hydra


def parse(argv: Sequence[str], *, command: str = "surogate") -> Arguments:
    """Sort arguments into flags, the YAML file and overrides; raises `UserError`."""
    parsed = Arguments()
    words = list(argv)
    named: dict[str, str] = {}
    while words:
        word = words.pop(0)
        flag, equals, attached = word.partition("=")
        if not word.startswith("-"):
            _positional(parsed, word, command, argv)
        elif _SWITCHES.get(word) == "--multirun":
            parsed.multirun = True
        elif _SWITCHES.get(word) == "--help":
            parsed.help = True
        elif flag in _CONFIG_VALUES:
            value = attached if equals else _next(words, flag)
            if _CONFIG_VALUES[flag] == "--config":
                _set_file(parsed, value)
            elif _CONFIG_VALUES[flag] == "--config-dir":
                _add_directory(parsed, value)
            else:
                named[_CONFIG_VALUES[flag]] = value
        elif word in _HYDRA_SWITCHES:
            parsed.hydra.append(_HYDRA_SWITCHES[word])
        elif flag in _HYDRA_VALUES:
            value = attached if equals else _next(words, flag)
            allowed = _HYDRA_VALUES[flag]
            if allowed and value not in allowed:
                raise UserError(f"{flag} {value}: must be one of {', '.join(allowed)}.")
            parsed.hydra += [flag, value]
        elif flag in ("--info", "-i"):
            has_value = bool(words) and words[0] in _INFO
            parsed.hydra += ["--info", attached if equals else words.pop(0) if has_value else "all"]
        else:
            known = [*_CONFIG_VALUES, "--info", *_SWITCHES, *_HYDRA_SWITCHES, *_HYDRA_VALUES]
            near = get_close_matches(flag, known, n=1, cutoff=0.6)
            key = flag.lstrip("-").replace("-", "_")
            fix = near[0] if near else f"an override has no dashes: {key}={attached or 'VALUE'}"
            raise UserError(f"{word}: there is no such flag. Fix: {fix}")
    _named_file(parsed, named)
    if parsed.multirun and parsed.hydra:
        raise UserError(f"--multirun and {parsed.hydra[0]} cannot be used together.")
    return parsed


def leading_task(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """(the task that the first word names, the other words): `surogate plan dpo …` is `surogate plan task=dpo …`."""
    from surogate_core.app.commands import CORE_TASKS, installed_tasks

    first = words[0] if words else ""
    plain = first.isidentifier() and not Path(first).is_file()
    if plain and (first in CORE_TASKS or first in installed_tasks()):
        return first, list(words[1:])
    return None, list(words)


def load(arguments: Arguments, task: str | None) -> tuple[RunConfig, Registry]:
    """The checked configuration of one run, and the plugins that were loaded for it."""
    from surogate_core.config.places import check_model_is_there
    from surogate_core.config.resolve import load_run_config

    registry = registry_for(arguments)
    config = load_run_config(arguments.overrides, task=task, config_file=arguments.config_file, registry=registry)
    check_model_is_there(config)
    return config, registry


@contextmanager
def with_places(arguments: Arguments, task: str | None, registry: Registry) -> Iterator[None]:
    """Mistakes that only the work inside finds, such as keys that do not suit the model, get their file and line."""
    from surogate_core.errors import ConfigError

    try:
        yield
    except ConfigError as error:
        from surogate_core.config.resolve import gather

        file = arguments.config_file
        settings = gather(arguments.overrides, task=task, config_file=file, registry=registry, multirun=False)
        problems = [p if p.where else replace(p, where=settings.where(p.key)) for p in error.problems]
        raise ConfigError(problems) from error


def registry_for(arguments: Arguments) -> Registry:
    """Load the plugins that the configuration's policy allows."""
    from surogate_core.config.resolve import mistakes_without_plugins, peek_policy
    from surogate_core.errors import ConfigError
    from surogate_core.plugins import import_policy, load_plugins

    try:
        policy = peek_policy(arguments.overrides, arguments.config_file)
    except ConfigError as error:
        known = {p.key for p in error.problems}
        found = mistakes_without_plugins(arguments.overrides, arguments.config_file)
        raise ConfigError([*error.problems, *(p for p in found if p.key not in known)]) from error
    return load_plugins(import_policy(policy))


def _add_directory(parsed: Arguments, directory: str) -> None:
    """A directory of the user's option files, as the override that Hydra has for it."""
    from surogate_core.config.composing.grammar import encode

    parsed.overrides.append(f"hydra.searchpath={encode([directory])}")


def _named_file(parsed: Arguments, named: dict[str, str]) -> None:
    """`--config-path DIR --config-name NAME`: the file DIR/NAME.yaml, and DIR's own options where it has some."""
    directory, name = named.get("--config-path"), named.get("--config-name")
    if name is not None:
        file = name if name.endswith((".yaml", ".yml")) else f"{name}.yaml"
        _set_file(parsed, str(Path(directory or ".") / file))
    elif directory is not None:
        raise UserError("--config-path: names the directory of --config-name. Fix: add --config-name NAME")
    if directory is not None and any(Path(directory).glob("*/*.yaml")):
        _add_directory(parsed, directory)


def _positional(parsed: Arguments, word: str, command: str, argv: Sequence[str]) -> None:
    from surogate_core.app.commands import first_words

    if "=" in word or word.startswith(("~", "+")):
        parsed.overrides.append(word)
    elif command == "surogate" and word in first_words():
        rest = [w for w in argv if w != word]
        raise UserError(f"{word}: the command comes first. Fix: {' '.join(['surogate', word, *rest])}")
    elif command == "surogate":
        raise UserError(f"{word}: an override has the form KEY=VALUE. Fix: surogate sft {word} to read a file")
    else:
        _set_file(parsed, word)


def _set_file(parsed: Arguments, path: str) -> None:
    if parsed.config_file is not None:
        raise UserError(f"{path}: one config file only; {parsed.config_file} is given already.")
    parsed.config_file = Path(path)


def _next(words: list[str], flag: str) -> str:
    if not words:
        raise UserError(f"{flag}: a value must follow.")
    return words.pop(0)
