"""Wrong input as people give it: each ends with exit code 2, names the key and the fix, and changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.config.model_keys import unknown_model_keys
from surogate_core.errors import ConfigError, Problem

Problems = Callable[..., list[Problem]]

FILES = [
    # shapes
    ("lora_target_modules: {a: q_proj}", "lora_target_modules", "lora_target_modules: [q_proj]"),
    ("monitor: {jsonl: x}", "monitor.jsonl", "monitor: [jsonl]"),
    # empty text, as from an unset shell variable
    ("output_dir: ''", "output_dir", "output_dir=VALUE or null"),
    ("run_name: ''", "run_name", "run_name=VALUE or null"),
    ("checkpoint_dir: ''", "checkpoint_dir", "checkpoint_dir=VALUE or null"),
    ("log_file: ''", "log_file", "log_file=VALUE or null"),
    ("tokenizer: ''", "tokenizer", "tokenizer=VALUE or null"),
    ("offload_dir: ''", "offload_dir", "offload_dir=VALUE or null"),
    ("data_cache_dir: ''", "data_cache_dir", "data_cache_dir=VALUE or null"),
    ("resume_from_checkpoint: ''", "resume_from_checkpoint", "resume_from_checkpoint=VALUE"),
    ("datasets: [{path: '', type: text}]", "datasets.0.path", "datasets.0.path=VALUE"),
    # numbers
    ("max_steps: 1e3", "max_steps", "1000"),
    ("lora_rank: '8'", "lora_rank", "8, without quotes"),
    ("learning_rate: ${oc.env:RATE_}", "learning_rate", "learning_rate: ${oc.decode:${oc.env:RATE_}}"),
    ("learning_rate: ${oc.env:UNSET_}", "learning_rate", "export UNSET_=VALUE, or ${oc.env:UNSET_,DEFAULT}"),
    # places
    ("model: ./base/config.json", "model.path", ""),
    ("model: ./run", "model.path", "model=run/model"),
    ("model: ./begun", "model.path", "run its command again to finish it: surogate sft begun/config.yaml"),
    ("{model: ./base, output_dir: base}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{model: ./base, checkpoint_dir: ./base}", "checkpoint_dir", "checkpoint_dir=ANOTHER_DIRECTORY"),
    ("{model: ./run/model, lora: false, output_dir: run}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{model: ./run/model, lora: true, output_dir: run}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{model: ./base, adapter_path: run/adapter, output_dir: run}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{datasets: [{path: data, type: text}], output_dir: data}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{datasets: [{path: data, type: text}], output_dir: data/a/b}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    ("{datasets: [{path: ., type: text}]}", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
    (
        "{datasets: [{path: data, type: text}], data_cache_dir: data/c}",
        "data_cache_dir",
        "data_cache_dir=ANOTHER_DIRECTORY",
    ),
    ("{datasets: [{path: data/a.jsonl, type: text}], log_file: data/a.jsonl}", "log_file", "log_file: null"),
    ("{datasets: [{path: data, type: text}], log_file: data/log.jsonl}", "log_file", "log_file: null"),
    ("{model: ./base, log_file: base/log}", "log_file", "log_file: null"),
    ("output_dir: hub/models--a--b", "output_dir", "output_dir=ANOTHER_DIRECTORY"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, an adapter, a run's output and a data set."""
    place = tmp_path / "here"
    for name in ("base", "adapter", "run/model", "run/adapter", "data", "hub"):
        (place / name).mkdir(parents=True)
    for name in ("base", "run/model"):
        (place / name / "config.json").write_text("{}")
    (place / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "./base"}))
    (place / "run" / "run.json").write_text("{}")
    (place / "begun").mkdir()
    (place / "begun" / "run.json").write_text("{}")
    (place / "data" / "a.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.chdir(place)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(place / "hub"))
    monkeypatch.setenv("RATE_", "1e-5")
    return place


@pytest.mark.parametrize(("text", "key", "fix"), FILES, ids=[text[:40] for text, _, _ in FILES])
def test_one_message_with_the_key_and_the_fix(problems: Problems, here: Path, text: str, key: str, fix: str) -> None:
    before = sorted(here.rglob("*"))
    (problem,) = problems(file=f"{text}\n")
    assert (problem.key, problem.fix) == (key, fix)
    assert "\n" not in str(problem)
    assert ".." not in problem.message.replace("../", "")
    assert ConfigError([problem]).exit_code == 2
    assert sorted(here.rglob("*")) == before


def test_an_adapter_as_the_model_names_both_ways_out(problems: Problems, here: Path) -> None:
    (problem,) = problems("model=./adapter")
    assert problem.message == "./adapter is a LoRA adapter, not a model; its base is ./base."
    assert "model=./base adapter_path=./adapter" in problem.fix
    assert "surogate merge ./adapter --output MERGED" in problem.fix


def test_what_is_near_a_forbidden_place_is_allowed(load: Any, here: Path) -> None:
    """Directories beside or above data and model, a run's output inside of a model directory, other people's runs."""
    assert load("model=./base", "output_dir=base/out").output_dir == "base/out"
    assert load("datasets=[{path: data/a.jsonl, type: text}]", "output_dir=data").output_dir == "data"
    assert load("datasets=[{path: data, type: text}]", "output_dir=data2", "log_file=data/a.log").log_file
    assert load("model=./run/model", "output_dir=run2", "lora=false", "merge_adapter=false").output_dir == "run2"
    assert load("model=owner/name").model.path == "owner/name"
    assert load("system=''").system == ""


def test_a_home_directory_in_a_file_is_the_users(load: Any, monkeypatch: pytest.MonkeyPatch, here: Path) -> None:
    monkeypatch.setenv("HOME", str(here))
    config = load(file="output_dir: ~/out\nlog_file: ~/log\n")
    assert (config.output_dir, config.log_file) == (f"{here}/out", f"{here}/log")


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("./bass", " Fix: model=./base"),
        ("./elsewhere", " Fix: model=./base"),
        ("run/modle/", " Fix: model=run/model"),
        ("a/b/c", " Fix: the directory of a model, a hub id such as Qwen/Qwen3-0.6B, or model=qwen3"),
        ("~no-such-user/model", " Fix: the directory of a model, a hub id such as Qwen/Qwen3-0.6B, or model=qwen3"),
    ],
)
@pytest.mark.parametrize("more", [[], ["learning_rate=1e-3,1e-4", "-m"]])
def test_a_model_directory_that_is_not_there(
    here: Path, capsys: pytest.CaptureFixture[str], given: str, fix: str, more: list[str]
) -> None:
    """Before anything is written; the nearest name, or the only model there."""
    before = sorted(here.rglob("*"))
    assert main(["sft", f"model={given}", *more]) == 2
    assert capsys.readouterr().err == f"surogate: model: there is no directory {given}.{fix}\n"
    assert sorted(here.rglob("*")) == before


def test_mistakes_in_places_types_and_interpolations_come_together(problems: Problems, here: Path) -> None:
    found = problems("model=./adapter", "lora_rnk=3", "run_name=${nothing}", "max_steps=x", "output_dir=data",
                     "datasets=[{path: data, type: text}]")  # fmt: skip
    assert {p.key for p in found} == {"model.path", "lora_rnk", "run_name", "max_steps", "output_dir"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["train", "run.yaml", "max_steps=3"], "train: there is no such command"),
        (["train", "run.yaml", "max_steps=3"], "Fix: surogate sft run.yaml max_steps=3\n"),
        (["finetune"], "Fix: surogate sft\n"),
        (["pretrain", "a.yaml"], "Fix: surogate pt a.yaml\n"),
        (["run.yaml", "max_steps=3"], "Fix: surogate sft run.yaml max_steps=3\n"),
    ],
)
def test_commands_of_other_trainers(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    assert words in capsys.readouterr().err


def test_a_wrong_plugin_policy_does_not_hide_the_other_mistakes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("plugins: [x]\nlearning_rte: 1\nlora: maybe\nlora_rank: 0\nrecipe: nvfp4\nnormuon_beta2: 0.9\n")
    assert main(["sft", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "surogate: 4 mistakes in the configuration:"
    assert [line.split()[1] for line in lines[1:]] == ["plugins", "learning_rte", "lora", "lora_rank"]


def test_every_missing_option_of_the_defaults_is_named(problems: Problems) -> None:
    """A core without plugins: each package that the default configuration needs, in one message."""
    names = ["monitor-console", "monitor-jsonl", "monitor-adaptive", "recipe-bf16", "optimizer-adamw-8bit"]
    found = problems(f"plugins.block=[{','.join(names)}]", fresh=True)
    for name in names:
        assert any(f"surogate-{name}" in f"{p.message} {p.fix}" for p in found), name


def test_a_misspelt_key_of_the_models_config(problems: Problems, load: Any) -> None:
    """The nearest name; what the family's class in transformers knows may be set though the preset has it not."""
    (problem,) = problems("model=qwen3", "model.config.num_hiden_layers=1")
    assert (problem.key, problem.where) == ("model.config.num_hiden_layers", "command line")
    assert problem.fix == "model.config.num_hidden_layers"
    (problem,) = problems(file="model: {name: qwen3, preset: tiny, config: {hidden_size: 64, zzz: 1}}\n")
    assert (problem.key, problem.fix) == ("model.config.zzz", "")
    assert problem.where.endswith("run.yaml:1")
    legal = {"num_hidden_layers": 1, "use_sliding_window": False, "max_window_layers": 4, "rope_scaling": None}
    text = "".join(f"    {key}: {json.dumps(value)}\n" for key, value in legal.items())
    config = load(file=f"model:\n  name: qwen3\n  preset: tiny\n  config:\n{text}")
    assert config.model.config == legal


def test_a_misspelt_key_of_a_directorys_config(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"model_type": "qwen3", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    (here / "base" / "config.json").write_text(json.dumps(config))
    args = ["model=./base", "from_scratch=true", "dataset=embedded", "device=cpu", "model.config.num_hiden_layers=1"]
    assert main(["plan", *args]) == 2
    err = capsys.readouterr().err
    assert "model.config.num_hiden_layers (command line): the model's config.json has no key num_hiden_layers." in err
    assert "Fix: model.config.num_hidden_layers" in err


def test_a_family_that_transformers_does_not_know() -> None:
    base = {"num_layers": 2, "model_type": "novel"}
    assert not unknown_model_keys(["gate_width", "num_layers"], base, ["novel"])
    (problem,) = unknown_model_keys(["num_layer"], base, ["novel"])
    assert problem.fix == "model.config.num_layers"


def test_interpolations_that_mean_billions_of_characters_end_at_once(problems: Problems, load: Any) -> None:
    """Eight keys of which each names the next ten times; relative and dotted references, and those in lists too."""
    keys = ["run_name", "system", "tokenizer", "checkpoint_dir", "log_file", "output_dir"]
    lines = [f'{a}: "{f"${{{b}}}" * 10}"' for a, b in pairwise(keys)]
    found = {p.key: p for p in problems(file="\n".join([*lines, "output_dir: xxxxxxxxxx", ""]))}
    assert found["run_name"].message == "its interpolations expand to more than a million characters."
    assert found["run_name"].fix == "write the value out"
    nested = "".join(f'    k{i}: "{f"${{.k{i + 1}}}" * 10}"\n' for i in range(9))
    (problem,) = problems(file=f"model:\n  preset: tiny\n  name: qwen3\n  config:\n{nested}    k9: xxxxxxxxxx\n")
    assert (problem.key, problem.fix) == ("model", "write the value out")
    assert load("run_name=${output_dir}-${train_seed}", "output_dir=a").run_name == "a-1234"


@pytest.mark.parametrize("key", ["output_dir", "log_file", "adapter_path", "checkpoint_dir"])
def test_a_name_that_no_file_can_have(problems: Problems, key: str) -> None:
    args = [f"{key}={'x' * 5000}"] + ([] if key != "adapter_path" else ["lora=true", "model=a/b", "from_scratch=false"])
    (problem,) = problems(*args)
    assert (problem.key, problem.where) == (key, "command line")
    assert "too long for a path" in problem.message
    assert len(str(problem)) < 200


@pytest.mark.parametrize(("text", "command"), [("task: pt\n", "pt"), ("model: x\n", "sft"), (None, "sft")])
def test_an_unfinished_run_as_the_model_is_finished_by_its_own_task(
    tmp_path: Path, text: str | None, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    if text is not None:
        (tmp_path / "config.yaml").write_text(text)
    assert main(["sft", f"model={tmp_path}", "dataset=embedded", "device=cpu"]) == 2
    assert f"to finish it: surogate {command} {tmp_path / 'config.yaml'}" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["datasets", "validation_datasets"])
def test_a_data_set_that_no_file_can_be(problems: Problems, load: Any, key: str) -> None:
    """Long text by mistake is one clear message; many files, and a signed address, are no mistake."""
    (problem,) = problems(f"{key}={'x' * 400}")
    assert (problem.key, problem.where) == (f"{key}.0.path", "command line")
    assert "too long for a path" in problem.message
    names = [f"a_file_with_a_long_name_{i}.jsonl" for i in range(20)]
    assert [entry["path"] for entry in getattr(load(f"{key}={','.join(names)}"), key)] == names
    address = f"https://host/a.jsonl?signature={'x' * 400}"
    assert getattr(load(f"{key}=['{address}']", "output_dir=out"), key)[0]["path"] == address


def test_a_model_that_no_directory_can_be(problems: Problems) -> None:
    (problem,) = problems(f"model={'x' * 400}")
    assert problem.key.startswith("model=")
