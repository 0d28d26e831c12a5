"""Flat keys that plugins declare: a stranger's are like those of the built-ins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.config.flat import no_effect_notes
from surogate_core.config.resolve import load_many, load_run_config, to_dict, to_yaml
from surogate_core.errors import PluginError, Problem
from surogate_core.plugins import Registry, load_plugins
from surogate_core.train.lr import Schedule

Problems = Callable[..., list[Problem]]

LION = '''
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Interval
from surogate_core import bundles, hookimpl

SUROGATE_API = "{api}"

@dataclass(frozen=True, slots=True, kw_only=True)
class LionOptions:
    """Options."""
    beta1: Annotated[{hint}, bundles.Flat("{key}")] = {default}
    """Weight of the momentum."""

@hookimpl
def surogate_optimizer():
    return bundles.OptimizerSpec(name="{name}", build=None, options=LionOptions)

@hookimpl
def surogate_config_path():
    return "pkg://plugin_{name}.conf"
'''


def lion(install: Any, name: str = "lion", *, key: str = "lion_beta1", hint: str = "float", default: Any = 0.9) -> None:
    from surogate_core import API_VERSION

    api = f">={API_VERSION},<{API_VERSION + 1}"
    source = LION.format(name=name, key=key, hint=hint, default=default, api=api)
    install(name, source, conf={f"optimizer/{name}.yaml": f"name: {name}\nbeta1: {default}\n"})


def test_a_strangers_optimizer_has_flat_keys(install_plugin: Any, tmp_path: Path) -> None:
    """In YAML, with `=`, `+` and in sweeps; the option of the node is the same option."""
    lion(install_plugin)
    registry = load_plugins()
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: lion\nlion_beta1: 0.8\n")
    for arguments, value in (
        ((), 0.8),
        (("lion_beta1=0.7",), 0.7),
        (("+lion_beta1=0.7",), 0.7),
        (("optimizer.beta1=0.6",), 0.6),
        (("~lion_beta1",), 0.9),
        (("lion_beta1=0.7", "optimizer.beta1=0.7"), 0.7),
    ):
        config = load_run_config(arguments, config_file=file, registry=registry)
        assert config.optimizer.options.beta1 == value, arguments
    sweep = load_many(["optimizer=lion", "lion_beta1=0.1,0.2"], registry=registry, multirun=True)
    assert [config.optimizer.options.beta1 for _, config in sweep] == [0.1, 0.2]
    again = tmp_path / "again.yaml"
    again.write_text(to_yaml(config))
    assert to_dict(load_run_config([], config_file=again, registry=registry)) == to_dict(config)
    assert to_dict(config)["lion_beta1"] == 0.7
    assert "beta1" not in to_dict(config)["optimizer"]


def test_mistakes_name_the_flat_key_and_its_place(install_plugin: Any, problems: Problems, tmp_path: Path) -> None:
    lion(install_plugin)
    file = "optimizer: lion\nlion_beta1: x\nlion_bet1: 0.5\n"
    found = {p.key: p for p in problems(file=file, fresh=True)}
    assert found["lion_beta1"].where.endswith("run.yaml:2")
    assert found["lion_beta1"].message == "must be a number; got 'x'."
    assert (found["lion_bet1"].message, found["lion_bet1"].fix) == ("there is no such key.", "lion_beta1")
    (problem,) = problems("optimizer=lion", "lion_beta1=0.5", "optimizer.beta1=0.6", fresh=True)
    assert problem.key == "lion_beta1"
    assert problem.message == "is 0.5, and optimizer.beta1, which is the same option, is 0.6."


def test_the_command_line_wins_over_the_file_in_either_form(load: Any) -> None:
    assert load("optimizer.beta1=0.5", file="adamw_beta1: 0.6\n").optimizer.options.beta1 == 0.5
    file = "optimizer: {name: adamw, beta1: 0.5}\n"
    assert load("adamw_beta1=0.6", file=file).optimizer.options.beta1 == 0.6


def test_the_chosen_bundle_gets_a_key_that_several_declare(load: Any) -> None:
    for name in ("adamw", "adamw_8bit"):
        assert load(f"optimizer={name}", "adamw_beta2=0.95").optimizer.options.beta2 == 0.95
    options = load("optimizer=normuon", "lora=false", "adamw_beta2=0.96", "normuon_beta2=0.5").optimizer.options
    assert (options.adamw_beta2, options.beta2) == (0.96, 0.5)


def test_an_environment_has_no_effect_in_a_task_that_asks_none(load: Any, registry: Registry) -> None:
    (note,) = no_effect_notes(load("environment=copy"), registry, used=lambda key: False)
    assert note.startswith("environment=copy has no effect in task sft. Leave it out")
    assert no_effect_notes(load(), registry, used=lambda key: False) == []


def test_a_key_of_nothing_that_is_chosen_is_kept_and_has_no_effect(load: Any, registry: Registry) -> None:
    config = load("normuon_beta2=0.5", "normuon_momentum=0.95")
    assert config.flat == {"normuon_beta2": 0.5}, "the other is at its default"
    assert to_dict(config)["normuon_beta2"] == 0.5
    assert no_effect_notes(config, registry, used=lambda key: False) == [
        "normuon_beta2=0.5 has no effect: it is an option of optimizer=normuon. Leave it out."
    ]


@pytest.mark.parametrize("key", ["auto_lr_reduction", "early_stop"])
def test_a_key_that_needs_its_monitor(problems: Problems, load: Any, key: str) -> None:
    (problem,) = problems(f"{key}=true", "monitor=[jsonl]")
    assert (problem.key, problem.fix) == (key, "add adaptive to `monitor`")
    assert problem.message == "is set, but monitor adaptive, which does it, is not chosen."
    assert not load(f"{key}=false", "monitor=[jsonl]").flat
    assert getattr(load(f"{key}=true", "monitor=[jsonl,adaptive]").monitor[-1].options, key) is True


def test_a_key_of_the_core_is_refused(install_plugin: Any) -> None:
    lion(install_plugin, key="lora_rank", hint="int", default=3)
    with pytest.raises(PluginError, match=r"flat key 'lora_rank' of optimizer lion \(plugin lion .*a key of every run"):
        load_run_config([], registry=load_plugins())


def test_one_key_of_two_types_is_refused(install_plugin: Any) -> None:
    lion(install_plugin, "lion", key="beta")
    lion(install_plugin, "puma", key="beta", hint="int", default=1)
    with pytest.raises(PluginError, match=r"flat key 'beta' of optimizer puma \(plugin puma .*of optimizer lion"):
        load_plugins().check()


def test_a_blocked_and_a_missing_plugin_are_named(problems: Problems) -> None:
    (problem,) = problems("normuon_beta2=0.5", "plugins.block=[optimizer-normuon]", fresh=True)
    assert problem.key == "normuon_beta2"
    assert "surogate-optimizer-normuon" in problem.message
    assert "blocked by plugins.block" in problem.message


def test_help_and_completion_have_the_keys(
    install_plugin: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lion(install_plugin)
    assert main(["sft", "--help"]) == 0
    assert "lion_beta1" in capsys.readouterr().out
    monkeypatch.setenv("COMP_LINE", "surogate lion_be")
    assert main(["-sc", "query=bash"]) == 0
    assert "lion_beta1=" in capsys.readouterr().out


POWERED = """
from dataclasses import dataclass
from typing import Annotated
from annotated_types import Interval
from surogate_core import bundles, hookimpl

@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    power: Annotated[float, Interval(ge=0), bundles.Flat("rex_power", needed=True)] = 1.0

def build(options, context):
    return lambda step: (1 - step / context.steps) ** options.power

@hookimpl
def surogate_schedule():
    return bundles.ScheduleSpec(name="rex", build=build, options=Options)
"""


def test_a_plugins_schedule_is_chosen_with_its_options(install_plugin: Any, load: Any, problems: Any) -> None:
    install_plugin("schedule-rex", POWERED)
    config = load("lr_scheduler_type=rex", "rex_power=2", "learning_rate=1", "warmup_steps=0", fresh=True)
    rate = Schedule.of(config, load_plugins()).rates(4)
    assert [rate(step) for step in range(4)] == [1, 0.5625, 0.25, 0.0625]
    assert to_dict(config)["rex_power"] == 2
    assert no_effect_notes(load("rex_power=1.0", fresh=True), load_plugins(), used=lambda key: False) == []
    (problem,) = problems("rex_power=2", fresh=True)
    assert (problem.key, problem.fix) == ("rex_power", "lr_scheduler_type: rex")
    (problem,) = problems("lr_scheduler_type=rax", fresh=True)
    assert (problem.message, problem.fix) == (
        "there is no such schedule; known: constant, cosine, linear, rex, wsd.",
        "rex",
    )
    (problem,) = problems("lr_scheduler_type=rex", "rex_power=-1", fresh=True)
    assert (problem.key, problem.message) == ("rex_power", "must be a number of at least 0; got -1.")
