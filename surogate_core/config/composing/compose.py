"""Composition by Hydra: the search path, the schema's defaults, and the two ways to compose.

A single run composes by the API, so that nothing is written before the config is known to be
good; ``--multirun``, ``--cfg``, ``--info`` and ``-sc`` go through `hydra.main`.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from surogate_core.conf_paths import CONFIG_NAME, conf_dir
from surogate_core.config.choices import default_groups
from surogate_core.config.composing.interpolation import too_large
from surogate_core.config.names import flat_keys, schema_defaults
from surogate_core.errors import ConfigError, PluginError, Problem
from surogate_core.plugins.registry import Registry

VERSION_BASE = "1.3"
SCHEMA = "schema"
"""Name of the ConfigStore node with the schema's defaults, first in the primary config's defaults list."""

HYDRAS_OWN = tuple(
    f"~hydra/{group}"
    for group in ("output", "launcher", "sweeper", "help", "hydra_help", "hydra_logging", "job_logging", "env")
)
"""Leave out Hydra's own groups, which only `hydra.main` uses. Merging them takes a quarter of a composition's time."""


_REMEMBERED = 64
"""Compositions of choices that a process keeps, each about 100 KB."""

_composed: dict[Any, DictConfig] = {}
"""Choices, and what they depend on → their composition, without values."""


class SurogateSearchPath(SearchPathPlugin):
    """Adds the config directories of the plugins; Hydra makes the instance itself."""

    paths: Sequence[tuple[str, str]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for provider, path in self.paths:
            search_path.append(provider=provider, path=path)


def _hydras_plugins() -> Plugins:
    """Hydra's own registry; at its first use it imports every module of the namespace `hydra_plugins`."""
    try:
        return Plugins.instance()
    except Exception as error:
        text = " ".join(str(error).split())
        raise PluginError(
            f"a module of the namespace hydra_plugins, which Hydra imports, failed: {type(error).__name__}: {text}. "
            "Fix: repair or uninstall its distribution, or set plugins.policy=locked or allowlist, which imports none"
        ) from error


@contextmanager
def _prepared(registry: Registry, *, complete: bool = False) -> Iterator[None]:
    """Hydra with our search path and the schema's defaults; `complete`: with the defaults of plugins' flat keys too.

    A configuration of a run is composed without the latter, so that a flat key in it is one that is set.
    """
    plugins = _hydras_plugins()
    if SurogateSearchPath not in plugins.discover(SearchPathPlugin):
        plugins.register(SurogateSearchPath)
    flat = {key: found.settings[0].default for key, found in flat_keys(registry).items()} if complete else {}
    ConfigStore.instance().store(name=SCHEMA, node={**flat, **schema_defaults()}, provider="surogate")
    for group in default_groups().keys() - registry.options.keys():
        # Hydra can only leave out a group that exists; this one has lost its every plugin.
        ConfigStore.instance().store(name="unavailable", group=group, node={}, provider="surogate")
    SurogateSearchPath.paths = tuple(registry.search_path)
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        SurogateSearchPath.paths = ()
        GlobalHydra.instance().clear()


def compose_config(overrides: Sequence[str], registry: Registry) -> DictConfig:
    """Compose; raises `ConfigError` with Hydra's reason in one line.

    Hydra takes 0.1 s, most of it for the choices. A process that composes often, as a sweep does, keeps the composition
    of the choices and sets the values in a copy of it.
    """
    groups = {*registry.options, *default_groups()}
    choices = [line for line in overrides if re.match(r"[+~]*([^=@]*)", line)[1] in groups]  # type: ignore[index]
    values = [line for line in overrides if line not in choices]
    if not all(re.match(r"(\+\+)?[A-Za-z_]", line) and not line.startswith("hydra") for line in values):
        return _compose(overrides, registry)
    try:
        key = _known_by(choices, registry)
        if key not in _composed:
            while len(_composed) >= _REMEMBERED:
                del _composed[next(iter(_composed))]
            _composed[key] = _compose(choices, registry)
        config = copy.deepcopy(_composed[key])
        for value in OverridesParser.create().parse_overrides(values):
            if value.is_sweep_override() or value.package is not None:
                return _compose(overrides, registry)
            OmegaConf.update(config, value.key_or_group, value.value(), merge=True, force_add=value.is_force_add())
        return config
    except (ConfigError, HydraException, OmegaConfBaseException, OSError):
        return _compose(overrides, registry)


def _known_by(choices: Sequence[str], registry: Registry) -> Any:
    """What the composition of choices depends on: where Hydra looks, and the files that are there."""
    files = [conf_dir() / f"{CONFIG_NAME}.yaml"]
    files += [option.file for options in registry.options.values() for option in options.values()]
    states = [(str(file), (state := file.stat()).st_mtime_ns, state.st_size) for file in files]
    return tuple(choices), tuple(registry.search_path), tuple(states)


def _compose(overrides: Sequence[str], registry: Registry) -> DictConfig:
    with _prepared(registry), initialize_config_dir(str(conf_dir()), version_base=VERSION_BASE, job_name="surogate"):
        try:
            own = any(override.lstrip("+~").startswith("hydra") for override in overrides)
            return compose(CONFIG_NAME, overrides=[*overrides, *(() if own else HYDRAS_OWN)])
        except (HydraException, OmegaConfBaseException) as error:
            raise ConfigError([problem_of(error)]) from error


def plain_values(config: DictConfig) -> dict[str, Any]:
    """The composed config as plain values, interpolations resolved; raises `ConfigError`."""
    values, problems = resolved_values(config)
    if problems:
        raise ConfigError(problems)
    return values


def resolved_values(config: DictConfig) -> tuple[dict[str, Any], list[Problem]]:
    """The same, with a problem for each key that cannot be resolved."""
    raw = OmegaConf.to_container(config, resolve=False)
    assert isinstance(raw, dict)
    message = "its interpolations expand to more than a million characters."
    large = too_large({str(key): value for key, value in raw.items()})
    problems = [Problem(key=key, message=message, fix="write the value out") for key in large]
    values: dict[str, Any] = {}
    for key in (key for key in config if str(key) not in large):
        try:
            value = "???" if OmegaConf.is_missing(config, key) else config[key]
            is_node = OmegaConf.is_config(value)
            values[str(key)] = OmegaConf.to_container(value, resolve=True) if is_node else value
        except OmegaConfBaseException as error:
            problems.append(problem_of(error))
    return values, problems


def problem_of(error: HydraException | OmegaConfBaseException) -> Problem:
    """Hydra's or OmegaConf's error as one problem."""
    text = str(error).partition("Config search path:")[0].partition("Available options in")[0]
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    cause = error.__cause__
    if cause is not None and isinstance(cause, OmegaConfBaseException):
        lines += [line.strip() for line in str(cause).splitlines()[:1]]
        error = cause
    key = str(getattr(error, "full_key", None) or "config")
    unset = re.search(r"Environment variable '(.*?)' not found", str(error))
    if unset is not None:
        name = unset[1]
        message = f"the environment variable {name} is not set."
        return Problem(key=key, message=message, fix=f"export {name}=VALUE, or ${{oc.env:{name},DEFAULT}}")
    message = "; ".join(line for line in lines if not line.startswith(("full_key", "object_type", "reference_type")))
    return Problem(key=key, message=f"{message.rstrip('.')}.")


def run_hydra(
    flags: Sequence[str], overrides: Sequence[str], registry: Registry, task: Callable[[DictConfig], Any]
) -> None:
    """`hydra.main` with these arguments. May raise `SystemExit`, as Hydra does."""
    argv = sys.argv
    # Logging is the run's; Hydra's own would print every record of ours in its form.
    quiet = ["hydra.output_subdir=null", "hydra/job_logging=none", "hydra/hydra_logging=none"]
    sys.argv = ["surogate", *flags, *quiet, *overrides]

    def surogate(config: DictConfig) -> Any:
        return task(config)

    try:
        with _prepared(registry, complete="--multirun" not in flags):
            hydra_main(config_path=str(conf_dir()), config_name=CONFIG_NAME, version_base=VERSION_BASE)(surogate)()
    finally:
        sys.argv = argv
