"""Forms, precedence and implications: from arguments and a file to a `RunConfig`, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surogate_core.config.composing.compose import compose_config, plain_values
from surogate_core.config.resolve import expand_sweeps, load_many, to_dict, to_yaml
from surogate_core.config.schema import ModelSelection
from surogate_core.plugins import Registry
from surogate_core.plugins.static import config_options

ROOT = Path(__file__).resolve().parents[2]
DATA = "datasets=[{path: my.jsonl, type: text}]"


def shipped() -> list[tuple[str, str]]:
    directories = [ROOT / "conf", *ROOT.glob("plugins/*/src/*/conf")]
    return sorted(option for directory in directories for option in config_options(directory))


@pytest.mark.parametrize(("group", "option"), shipped())
def test_every_shipped_option_composes_and_is_valid(load: Any, group: str, option: str) -> None:
    more = ["model.path=some/model"] if (group, option) == ("model", "hf") else []
    more += [DATA] if (group, option) == ("dataset", "none") else []
    more += ["distill_teacher=some/model"] if (group, option) == ("task", "distill") else []
    more += ["environment=copy", "max_completion_length=64"] if (group, option) == ("task", "grpo") else []
    config = load(f"{group}={option}", *more)
    assert bool(config.datasets) is ((group, option) != ("task", "grpo"))


@pytest.mark.parametrize("prefix", ["", "+", "++"])
@pytest.mark.parametrize(
    "override", ["recipe=bf16", "model=qwen3-0.6b", "optimizer=adamw", "monitor=[jsonl]", "lora=true"]
)
def test_the_three_forms_are_the_same(load: Any, prefix: str, override: str) -> None:
    assert load(f"{prefix}{override}") == load(override)


def test_the_main_job_to_the_letter(load: Any) -> None:
    config = load("+recipe=bf16", "+model=qwen3")
    assert (config.recipe.name, config.model.name, config.task) == ("bf16", "qwen3", "sft")


def test_lists_of_monitors(load: Any) -> None:
    assert [m.name for m in load("monitor=[console,jsonl]").monitor] == ["console", "jsonl"]
    assert [m.name for m in load("monitor=jsonl").monitor] == ["jsonl"]
    assert load("monitor=[]").monitor == []
    assert load("~monitor").monitor == []
    assert load(file="monitor: null\n").monitor == []


def test_options_of_a_chosen_bundle(load: Any) -> None:
    config = load(file="monitor: [console, {name: tensorboard, directory: a}]\n")
    assert config.monitor[1].options.directory == "a"
    config = load("monitor.tensorboard.directory=b", file="monitor:\n  tensorboard: {directory: a}\n")
    assert [m.name for m in config.monitor] == ["tensorboard"]
    assert config.monitor[0].options.directory == "b"


@pytest.mark.parametrize("path", ["Qwen/Qwen3-0.6B", "./here", "/abs/dir", "{tmp}"])
def test_a_model_by_its_path(load: Any, tmp_path: Path, path: str) -> None:
    path = path.format(tmp=tmp_path)
    expected = ModelSelection(name="auto", path=path)
    for config in (
        load(f"model={path}"),
        load(f"model.path={path}"),
        load("model=hf", f"model.path={path}"),
        load(file=f"model: {path}\n"),
        load(file=f"model: {{path: {path}}}\n"),
        load(f"model={path}", file="model: qwen3-8b\n"),
        load(f"model.path={path}", file="model: qwen3-8b\n"),
    ):
        assert config.model == expected
        assert not config.from_scratch


def test_a_family_with_a_path_does_not_start_from_random_weights(load: Any) -> None:
    config = load(file="model: {name: qwen3, path: a/b}\n")
    assert config.model == ModelSelection(name="qwen3", path="a/b")
    assert not config.from_scratch


def test_a_preset_by_mapping_takes_its_option(load: Any) -> None:
    config = load(file="model: {name: qwen3, preset: 0.6b, config: {num_hidden_layers: 2}}\n")
    assert config.model.preset == "0.6b"
    assert config.model.config == {"num_hidden_layers": 2}
    assert config.sequence_len == load("model=qwen3-0.6b").sequence_len


def test_the_command_line_replaces_a_model_of_the_file(load: Any) -> None:
    config = load("model=qwen3-0.6b", file="model: {path: a/b, config: {x: 1}}\n")
    assert config.model == ModelSelection(name="qwen3", preset="0.6b")


def test_own_data_leaves_the_embedded_set(load: Any) -> None:
    embedded = load()
    assert embedded.validation_datasets
    for config in (load(DATA), load(file="datasets:\n  - {path: my.jsonl, type: text}\n")):
        assert config.datasets == [{"path": "my.jsonl", "type": "text"}]
        assert config.validation_datasets == []
    assert load("dataset=embedded", file="datasets:\n  - {path: a, type: text}\n") == embedded


def test_the_command_line_wins_over_the_file_and_the_file_over_options(load: Any) -> None:
    file = "learning_rate: 5e-5\nsequence_len: 64\nlora: true\n"
    config = load("sequence_len=128", file=file)
    assert (config.learning_rate, config.sequence_len, config.lora) == (5e-5, 128, True)
    assert load("~sequence_len", file=file).sequence_len == load().sequence_len
    assert load("sequence_len=8", "sequence_len=16").sequence_len == 16


def test_the_task_of_the_sub_command(load: Any, problems: Any) -> None:
    config = load("model=qwen3-0.6b", task="pt")
    assert (config.task, config.lora) == ("pt", False)
    assert load("+task=pt").task == "pt"
    assert load(file="task: pt\n", task="pt").task == "pt"
    (problem,) = problems(file="task: pt\n", task="sft")
    assert problem.key == "task"
    assert problem.fix == "surogate pt …"


def test_interpolations_and_escapes(load: Any) -> None:
    config = load(file="run_name: a\noutput_dir: out/${run_name}\ndata_cache_dir: \\${HOME}\n")
    assert (config.output_dir, config.data_cache_dir) == ("out/a", "${HOME}")


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("model=qwen3-0.6b", "recipe=bf16", "lora=true", "lora_target_modules=[q_proj]"),
        ("model=a/b", DATA, "monitor=[tensorboard]", "monitor.tensorboard.directory='x ${run_name} y'", "run_name=r"),
        ("run_name='\\\\\\${no} {}[]=,: # \"'", "monitor=[]", "model.config={num_hidden_layers: 1}"),
        ("task=pt", "max_steps=3", "resume_from_checkpoint=false", "adamw_epsilon=1e-8"),
        ("resume_from_checkpoint=some/dir", "plugins.block=[nothing-real]"),
    ],
)
def test_the_written_yaml_repeats_the_run(load: Any, args: tuple[str, ...]) -> None:
    config = load(*args, fresh=True)
    again = load(file=to_yaml(config), task=config.task, fresh=True)
    assert again == config
    assert to_dict(again) == to_dict(config)


def test_sweeps_are_expanded_for_checking() -> None:
    assert expand_sweeps(["a=1,2", "b=x", "c=range(0,2)"]) == [
        ["a=1", "b=x", "c=0"],
        ["a=2", "b=x", "c=0"],
        ["a=1", "b=x", "c=1"],
    ]


def test_a_sweep_over_groups_and_paths(registry: Registry) -> None:
    loaded = load_many(["model=qwen3,qwen3-0.6b"], registry=registry, multirun=True)
    assert [c.model.preset for _, c in loaded] == ["tiny", "0.6b"]
    loaded = load_many(["model=a/b,c/d", "learning_rate=1e-3,1e-4"], registry=registry, multirun=True)
    assert sorted((str(c.model.path), c.learning_rate) for _, c in loaded) == [
        ("a/b", 1e-4),
        ("a/b", 1e-3),
        ("c/d", 1e-3),
    ]


def test_a_plain_composition_has_every_key(registry: Registry) -> None:
    values = plain_values(compose_config(["monitor=[jsonl]"], registry))
    assert values["learning_rate"]
    assert values["plugins"] == {
        "policy": "open",
        "allow": [],
        "block": [],
        "lock": "surogate.lock",
        "allow_editable": False,
    }
    assert values["monitor"]["jsonl"]["name"] == "jsonl"
    # An option of Hydra's own needs the groups that a composition otherwise leaves out.
    for own in ("hydra/job_logging=none", "+hydra.job.env_set.A=b", "hydra.run.dir=here"):
        assert plain_values(compose_config(["monitor=[jsonl]", own], registry)) == values


def test_a_bundle_without_an_option_file(load: Any, install_plugin: Any) -> None:
    source = """
from dataclasses import dataclass
from surogate_core import bundles, hookimpl

@dataclass(frozen=True)
class Options:
    momentum: float = 0.5

@hookimpl
def surogate_optimizer():
    return bundles.OptimizerSpec(name="mine", build=lambda *a: None, options=Options)

@hookimpl
def surogate_monitor():
    return bundles.MonitorSpec(name="eye", build=lambda *a: None)

@hookimpl
def surogate_rollout_engine():
    return bundles.RolloutEngineSpec(name="far", open=lambda *a: None, options=Options)

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="maze", build=lambda options: None, options=Options)
"""
    install_plugin("outside", source)
    maze = ("environment=maze", "environment.momentum=0.1")
    config = load("optimizer=mine", "optimizer.momentum=0.9", "monitor=[jsonl,eye]", "rollout=far", *maze, fresh=True)
    assert config.optimizer.options.momentum == 0.9
    assert config.environment is not None
    assert (config.environment.name, config.environment.options.momentum) == ("maze", 0.1)
    assert (config.rollout.name, config.rollout.options.momentum) == ("far", 0.5)
    assert [m.name for m in config.monitor] == ["jsonl", "eye"]
    assert load(file=to_yaml(config), task="sft", fresh=True) == config
    for words in (("~environment",), ("environment=null",)):
        assert load(*words, file="environment: {name: maze, momentum: 0.1}", fresh=True).environment is None


def test_no_environment_is_chosen_unless_the_user_does(load: Any, problems: Any) -> None:
    assert load().environment is None
    assert load(file="environment: null").environment is None
    assert "there is no such environment; known: arithmetic, copy, " in str(problems("environment=nowhere")[0])


def test_a_configuration_with_code_obeys_its_policy(
    install_plugin: Any, load: Any, problems: Any, registry: Registry
) -> None:
    source = """
from dataclasses import dataclass
from typing import Annotated
from surogate_core import bundles, hookimpl

@dataclass(frozen=True)
class Options:
    reward: Annotated[str, bundles.Code()] = "mine:f"

@hookimpl
def surogate_environment():
    return bundles.EnvironmentSpec(name="judged", build=lambda o: None, options=Options)
"""
    install_plugin("judge", source)
    config = load("environment=judged", "environment.reward=mine.py:g", fresh=True)
    assert config.environment.options.reward == "mine.py:g"
    (problem,) = problems("environment=judged", "environment.reward=g", fresh=True)
    assert problem.key == "environment.reward"
    assert "names no function" in problem.message
    allow = [*registry.plugins.keys() - {"core"}, "judge"]
    (problem,) = problems(
        "environment=judged", "plugins.policy=allowlist", f"plugins.allow=[{','.join(allow)}]", fresh=True
    )
    assert "mine:f is not in the package of a plugin, and plugins.allow allows only" in problem.message


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a.jsonl", [{"path": "a.jsonl", "type": "auto"}]),
        ("a.jsonl,b.jsonl", [{"path": "a.jsonl", "type": "auto"}, {"path": "b.jsonl", "type": "auto"}]),
        (
            "[a.jsonl,{path: b.csv, type: text}]",
            [{"path": "a.jsonl", "type": "auto"}, {"path": "b.csv", "type": "text"}],
        ),
        ("{path: a.jsonl, samples: 3}", [{"path": "a.jsonl", "type": "auto", "samples": 3}]),
    ],
)
@pytest.mark.parametrize("key", ["datasets", "validation_datasets"])
def test_data_sets_are_named_by_their_paths(load: Any, key: str, text: str, entries: list[Any]) -> None:
    """One path, paths with commas, a list of them or one mapping; the type is found from the rows if none is given."""
    spaced = text.replace(",b", ", b").replace(",{", ", {")
    sorted_entries = [dict(sorted(e.items())) for e in entries]
    for config in (load(f"{key}={text}"), load(file=f"{key}: {spaced}\n")):
        assert [dict(sorted(e.items())) for e in getattr(config, key)] == sorted_entries


def test_a_path_with_a_comma_is_one_path(load: Any, tmp_path: Path) -> None:
    (tmp_path / "a,b.jsonl").write_text("{}")
    config = load(file=f"datasets: {tmp_path}/a,b.jsonl\n")
    assert [e["path"] for e in config.datasets] == [f"{tmp_path}/a,b.jsonl"]


@pytest.mark.parametrize("form", ["{0}={1}", "{0}=[{1}]"])
def test_a_string_is_a_list_where_a_list_is_meant(load: Any, form: str) -> None:
    def both(key: str, text: str) -> list[Any]:
        return [load(form.format(key, text)), load(file=form.format(key, text).replace("=", ": ", 1) + "\n")]

    for config in both("lora_target_modules", "q_proj,v_proj"):
        assert config.lora_target_modules == ["q_proj", "v_proj"]
    for config in both("lora_target_modules", "all"):
        assert config.lora_target_modules == ["all"]
    for config in both("report_to", "web,wandb"):
        assert config.report_to == ["web", "wandb"]
        assert [m.name for m in config.monitor][-2:] == ["web", "wandb"]
    for config in (load(form.format("monitor", "jsonl,console")), load(file="monitor: [jsonl, console]\n")):
        assert [m.name for m in config.monitor] == ["jsonl", "console"]


def test_without_the_plugin_of_the_default_type_the_message_names_it(problems: Any) -> None:
    (problem,) = problems("datasets=a.jsonl", "plugins.block=dataset-auto", fresh=True)
    assert problem.key == "datasets.0.type"
    assert "surogate-dataset-auto" in problem.message
