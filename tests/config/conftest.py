"""The registry of the installed plugins, and short ways to load a configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surogate_core.config.resolve import load_run_config, peek_policy
from surogate_core.config.schema import RunConfig
from surogate_core.errors import ConfigError, Problem
from surogate_core.plugins import Registry, import_policy, load_plugins

Load = Callable[..., RunConfig]


@pytest.fixture(scope="session")
def registry() -> Registry:
    return load_plugins(import_policy(None, {}))


@pytest.fixture
def load(registry: Registry, tmp_path: Path) -> Load:
    """``load("key=value", …, file="yaml text", task=None, fresh=False)``."""

    def call(*args: str, file: str | None = None, task: str | None = None, fresh: bool = False) -> RunConfig:
        path = None
        if file is not None:
            path = tmp_path / "run.yaml"
            path.write_text(file, encoding="utf-8")
        used = load_plugins(import_policy(peek_policy(args, path), {})) if fresh else registry
        return load_run_config(args, task=task, config_file=path, registry=used)

    return call


@pytest.fixture
def problems(load: Load) -> Callable[..., list[Problem]]:
    """The mistakes that loading finds; fails when there are none."""

    def call(*args: str, file: str | None = None, task: str | None = None, fresh: bool = False) -> list[Problem]:
        with pytest.raises(ConfigError) as raised:
            load(*args, file=file, task=task, fresh=fresh)
        return list(raised.value.problems)

    return call
