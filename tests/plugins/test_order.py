"""The order in which metadata is found changes nothing: not the order of loading, not the configuration."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from surogate_core.config.composing.compose import compose_config, plain_values
from surogate_core.plugins import discovery, import_policy, load_plugins

SOURCE = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

@hookimpl
def surogate_config_path():
    return "pkg://" + __name__ + ".conf"

@hookimpl
def surogate_recipe():
    return bundles.RecipeSpec(name="NAME", build=lambda *a: None)

@hookimpl
def surogate_monitor():
    return [bundles.MonitorSpec(name="NAME-b", build=None), bundles.MonitorSpec(name="NAME-a", build=None)]
"""
CHOICES = ["recipe=f3", "monitor=[f7-a,jsonl,f1-a]", "optimizer=adamw", "learning_rate=1e-3"]

REPORT = """
import json
from surogate_core.config.composing.compose import compose_config, plain_values
from surogate_core.plugins import import_policy, load_plugins
registry = load_plugins(import_policy(None, {}))
config = plain_values(compose_config(["optimizer=adamw"], registry))
options = {group: list(options) for group, options in registry.options.items()}
print(json.dumps([list(registry.plugins), registry.search_path, options, config]))
"""


@pytest.mark.parametrize(("count", "every"), [(20, 5), pytest.param(100, 1, marks=pytest.mark.slow)])
def test_many_orders_of_the_metadata_give_one_order_of_loading_and_one_config(
    install_plugin: Any, monkeypatch: pytest.MonkeyPatch, count: int, every: int
) -> None:
    """Hydra takes a tenth of a second to compose, so every fifth does, and every one in the slow form."""
    for n in range(8):
        options = {f"recipe/f{n}.yaml": f"name: f{n}\n"}
        options |= {f"monitor/f{n}-{x}.yaml": f"# @package monitor.f{n}-{x}\nname: f{n}-{x}\n" for x in "ab"}
        install_plugin(f"f{n}", SOURCE.replace("NAME", f"f{n}"), conf=options)
    find = discovery.entry_points
    generator = random.Random(0)
    orders, loads, configs = set(), set(), set()

    def shuffled(**which: Any) -> list[Any]:
        found = list(find(**which))
        generator.shuffle(found)
        orders.add(tuple(e.name for e in found))
        return found

    monkeypatch.setattr(discovery, "entry_points", shuffled)
    for number in range(count):
        registry = load_plugins(import_policy(None, {}))
        kinds = {kind: registry.names(kind) for kind in ("recipe", "monitor")}
        options = {group: list(options) for group, options in registry.options.items()}
        loads.add(json.dumps([list(registry.plugins), registry.search_path, options, kinds]))
        if number % every == 0:
            configs.add(json.dumps(plain_values(compose_config(CHOICES, registry))))
    assert len(orders) == count
    assert len(loads) == 1
    assert len(configs) == 1
    assert json.loads(configs.pop())["recipe"] == {"name": "f3"}


def test_the_hash_seed_of_a_process_changes_nothing() -> None:
    found = set()
    for seed in "123":
        environ = os.environ | {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", REPORT], env=environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
