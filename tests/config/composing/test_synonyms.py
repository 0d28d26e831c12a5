"""`distributed` sets the options of `launcher=ray`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from surogate_core.config.resolve import to_dict
from surogate_core.config.schema import RunConfig
from surogate_core.errors import Problem

Problems = Callable[..., list[Problem]]


def options_of(config: RunConfig) -> Any:
    assert config.launcher.name == "ray"
    return config.launcher.options


def test_the_keys_choose_the_launcher_and_set_its_options(load: Any) -> None:
    options = options_of(load("distributed.num_nodes=2", "distributed.ray_address=10.0.0.1:6379"))
    assert (options.num_nodes, options.gpus_per_node, options.ray_address) == (2, 0, "10.0.0.1:6379")
    assert options_of(load("distributed={num_nodes: 2, gpus_per_node: 4}")).gpus_per_node == 4
    file = "launcher: {name: ray, silence: 5}\ndistributed:\n  num_nodes: 3\n  ray_address: auto\n"
    options = options_of(load(file=file))
    assert (options.num_nodes, options.silence, options.ray_address) == (3, 5, "auto")


def test_it_is_the_same_configuration(load: Any) -> None:
    one = load("launcher=ray", "launcher.num_nodes=2")
    assert to_dict(load("distributed.num_nodes=2")) == to_dict(one)
    assert to_dict(load(file="distributed: {num_nodes: 2}")) == to_dict(one)
    assert "distributed" not in to_dict(one)


def test_nothing_in_it_changes_nothing(load: Any) -> None:
    assert load(file="distributed:\n").launcher.name == "local"
    assert load("distributed=null").launcher.name == "local"


def test_the_command_line_goes_before_the_file(load: Any) -> None:
    file = "distributed: {num_nodes: 2, gpus_per_node: 4}\n"
    options = options_of(load("launcher.num_nodes=3", file=file))
    assert (options.num_nodes, options.gpus_per_node) == (3, 4)
    assert options_of(load("distributed.num_nodes=3", file=file)).num_nodes == 3
    assert load("launcher=local", file=file).launcher.name == "local"
    assert options_of(load("distributed.num_nodes=3", file="launcher: local\n")).num_nodes == 3


@pytest.mark.parametrize(
    ("args", "file", "key", "message", "fix", "where"),
    [
        (
            ["distributed.nodes=2"],
            "",
            "distributed.nodes",
            "no such key; known here: ray_address,",
            "distributed.num_nodes",
            "command line",
        ),
        ([], "distributed:\n  gpu_per_node: 2\n", "distributed.gpu_per_node", "no such key", "gpus_per_node", ":2"),
        ([], "distributed: 2\n", "distributed", "must be a mapping; got 2", "{num_nodes: VALUE}", ":1"),
        (["distributed=2"], "", "distributed", "must be a mapping; got 2", "distributed.num_nodes=VALUE", "line"),
        (["distributed={num_nodes: [}"], "", "distributed", "cannot be read", "", "command line"),
        (["~distributed"], "", "~distributed", "cannot be removed", "launcher=local", "command line"),
        (
            ["distributed.num_nodes=2", "launcher.num_nodes=3"],
            "",
            "distributed.num_nodes",
            "is 2, and launcher.num_nodes, which is the same option, is 3",
            "keep one",
            "command line",
        ),
        (
            [],
            "launcher: {name: ray, num_nodes: 3}\ndistributed: {num_nodes: 2}\n",
            "distributed.num_nodes",
            "is 2, and launcher.num_nodes, which is the same option, is 3",
            "keep one",
            ":2",
        ),
        (
            [],
            "launcher: local\ndistributed: {num_nodes: 2}\n",
            "distributed",
            "sets options of launcher=ray, and launcher is local",
            "launcher=ray, or leave out distributed",
            ":2",
        ),
        (
            ["launcher=local", "distributed.num_nodes=2"],
            "",
            "distributed",
            "sets options of launcher=ray, and launcher is local",
            "launcher=ray, or leave out distributed",
            "command line",
        ),
        (["distributed.num_nodes=0"], "", "launcher.num_nodes", "from 1 to 1024; got 0", "", "command line"),
        ([], "distributed:\n  num_nodes: 0\n", "launcher.num_nodes", "from 1 to 1024; got 0", "", ":2"),
    ],
)
def test_a_mistake_is_reported_once(
    problems: Problems, args: Sequence[str], file: str, key: str, message: str, fix: str, where: str
) -> None:
    (problem,) = problems(*args, file=file or None)
    assert problem.key == key
    assert message in problem.message
    assert fix in problem.fix
    assert where in problem.where


def test_values_can_be_swept(registry: Any) -> None:
    from surogate_core.config.resolve import gather

    settings = gather(["distributed.gpus_per_node=1,2"], task=None, config_file=None, registry=registry, multirun=True)
    assert not settings.problems
    assert {"launcher=ray", "++launcher.gpus_per_node=1,2"} <= set(settings.overrides())
