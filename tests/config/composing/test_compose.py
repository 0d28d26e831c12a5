"""What is composed from memory equals what Hydra composes."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from surogate_core.config.composing import compose
from surogate_core.config.composing.compose import compose_config
from surogate_core.errors import ConfigError
from surogate_core.plugins import load_plugins

ANOTHER = """
from surogate_core import hookimpl

@hookimpl
def surogate_config_path():
    return "pkg://plugin_another.conf"
"""


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch):
    monkeypatch.setattr(compose, "_composed", {})


def composed(overrides, registry):
    """The values as they are written, and what may be changed; or the mistakes."""
    try:
        config = compose_config(overrides, registry)
    except ConfigError as error:
        return error.problems
    return list(config.items()), OmegaConf.to_container(config), OmegaConf.is_struct(config)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["max_steps=3", "max_steps=4", "learning_rate=${max_steps}"],
        ["optimizer=normuon", "learning_rate=1e-3", "++optimizer.nosuch=1"],
        ["monitor=[jsonl]", "++monitor.jsonl.file='a b'", "datasets=[{path: x, type: y}]"],
        ["++model.config.hidden_size=3", "++nosuch.key=[1,{a: null}]", "output_dir=${oc.env:HOME}"],
        ["~max_steps"],
        ["hydra.searchpath=[.]", "max_steps=3"],
        ["max_steps=1,2"],
        ["nosuch=3", "max_steps=3"],
        ["optimizer=nosuch"],
        ["x@y=3"],
        ["max_steps=[1"],
    ],
    ids=" ".join,
)
def test_a_remembered_composition_is_hydras(registry, overrides):
    # Overrides of Hydra's own keys are always composed by Hydra.
    fresh = composed(["hydra.job.name=x", *overrides], registry)
    assert composed(overrides, registry) == composed(overrides, registry) == fresh


def test_a_copy_is_the_callers(registry):
    compose_config([], registry).max_steps = 12345
    assert compose_config([], registry).max_steps != 12345


def test_a_changed_file_is_read_again(install_plugin):
    file = install_plugin("another", ANOTHER, conf={"recipe/another.yaml": "name: bf16\nx: 1\n"})
    file = file / "plugin_another/conf/recipe/another.yaml"
    registry = load_plugins()
    assert compose_config(["recipe=another"], registry).recipe.x == 1
    file.write_text("name: bf16\nx: 23\n", encoding="utf-8")
    assert compose_config(["recipe=another"], registry).recipe.x == 23


def test_a_process_remembers_few(registry, monkeypatch):
    monkeypatch.setattr(compose, "_REMEMBERED", 2)
    for name in ("adamw", "normuon", "adamw_8bit"):
        compose_config([f"optimizer={name}"], registry)
    assert [choices for choices, *_ in compose._composed] == [("optimizer=normuon",), ("optimizer=adamw_8bit",)]
