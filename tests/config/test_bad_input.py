"""Every mistake gives one clear problem: key, place, nearest name, fix; and all come at once."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surogate_core.config import planned
from surogate_core.config.checks import RULES
from surogate_core.config.composing.grammar import parse_override
from surogate_core.config.composing.overrides import KEYS
from surogate_core.config.resolve import load_run_config, peek_policy
from surogate_core.config.schema import RunConfig
from surogate_core.config.typed import Builder, field_types
from surogate_core.config.yamlfile import plain_scalar
from surogate_core.errors import ConfigError, Problem
from surogate_core.plugins import Registry, load_plugins

Problems = Callable[..., list[Problem]]


@pytest.mark.parametrize(
    ("args", "key", "words", "fix"),
    [
        (["learning_rte=1"], "learning_rte", "no such key", "learning_rate"),
        (["lr=1"], "lr", "no such key", "learning_rate=1"),
        (["seed=1"], "seed", "no such key", "train_seed=1"),
        (["zzzzzz=1"], "zzzzzz", "no such key", ""),
        (["recipe=bf61"], "recipe=bf61", "no such recipe; known: bf16", "bf16"),
        (["model=qwn3"], "model=qwn3", "no such model", "qwen3"),
        (
            ["model=elsewhere"],
            "model=elsewhere",
            "no such model",
            "name a model's directory, or OWNER/NAME on the hub",
        ),
        (["monitor=[jsnl]"], "monitor=jsnl", "no such monitor", "jsonl"),
        (["dataset=embeded"], "dataset=embeded", "no such", "embedded"),
        (["dataset=alpaca_en"], "dataset=alpaca_en", "no such", "datasets=FILE_OR_HUB_ID"),
        (["task=sftt"], "task=sftt", "no such task", "sft"),
        (
            ["task=grpo", "environment=copy", "datasets=a.jsonl"],
            "datasets",
            "task grpo reads no data set",
            "in place of `datasets`: environment=problems with environment.path, for questions with answers, or "
            "environment=trl with environment.path and environment.reward_funcs",
        ),
        (["recipe.emulte=1"], "recipe.emulte", "no such key", ""),
        (
            ["monitor=[jsonl]", "monitor.jsonl.progres=x"],
            "monitor.jsonl.progres",
            "no such key",
            "monitor.jsonl.progress",
        ),
        (["monitor=[jsonl]", "monitor.jsnl.progress=x"], "monitor.jsnl", "`name` is missing", ""),
        (["model.presett=1"], "model.presett", "no such key", "model.preset"),
        (["model.preset=tny"], "model.preset", "no preset 'tny'", "model.preset=tiny"),
        (["plugins.blok=[a]"], "plugins.blok", "no such key", ""),
        (["model=hf"], "model.path", "must be set", "model=DIR_OR_HUB_ID"),
        (["model=qwen3-0.6b", "model.path=a/b"], "model", "both given", "model=PATH"),
        (["fp4_backend=cublas"], "fp4_backend", "one of cutlass, cudnn", ""),
        *(([f"{key}=2"], key, "not available in this version", fix) for key, fix in planned.KEYS.items()),
        (["num_nodes=2"], "num_nodes", "no such key", planned.ELSEWHERE["num_nodes"]),
        (["master_dtype=fp16"], "master_dtype", "one of fp32, bf16", ""),
        (["master_dtype=e4m3"], "master_dtype", "one of fp32, bf16", ""),
        (["model_dtype=fp16"], "model_dtype", "one of fp32, bf16", ""),
        (["matmul_dtype=e5m2"], "matmul_dtype", "one of fp32, bf16, e4m3", ""),
        (["gradient_dtype=e4m3"], "gradient_dtype", "one of fp32, bf16, e5m2", ""),
        (["max_steps=1.5"], "max_steps", "a whole number from -1 to 1000000000; got 1.5", ""),
        (["max_steps=2.0"], "max_steps", "got 2.0", "2"),
        (["max_steps=many"], "max_steps", "got 'many'", ""),
        (["lora_rank='8'"], "lora_rank", "got '8'", "8, without quotes"),
        (["lora=yes"], "lora", "true or false; got 'yes'", "true"),
        (["lora=1"], "lora", "true or false; got 1", ""),
        (["lora_rank=true"], "lora_rank", "got true", ""),
        (["lora_rank=0"], "lora_rank", "from 1 to 8192; got 0", ""),
        (["lora=true", "qlora_format=nf5"], "qlora_format", "no such", "nf4"),
        (["qlora_bnb_block_size=96"], "qlora_bnb_block_size", "one of 64, 128, 256, 512", ""),
        (["qlora_block_size=100"], "qlora_block_size", "one of 32, 64, 128, 256", ""),
        (["warmup_ratio=1.5"], "warmup_ratio", "a number from 0 to 1; got 1.5", ""),
        (["learning_rate=nan"], "learning_rate", "got nan", ""),
        (["learning_rate=inf"], "learning_rate", "got inf", ""),
        (["learning_rate=null"], "learning_rate", "got null", ""),
        (["lr_scheduler_type=cosin"], "lr_scheduler_type", "known: constant, cosine, linear, wsd", "cosine"),
        (["lora_target_modules=3"], "lora_target_modules", "a list of text; got 3", ""),
        (["report_to=wandbb"], "report_to", "no such monitor", "wandb"),
        (["run_name=1.5"], "run_name", "text", "put it in quotes"),
        (["learning_rate=1e-3,1e-4"], "learning_rate", "needs --multirun", "add --multirun"),
        (["recipe=bf16,fp8"], "recipe=fp8", "no such recipe", ""),
        (["x=["], "x=[", "cannot be read", ""),
        (["recipe@other=bf16"], "recipe@other", "not supported", ""),
        (["~recipe"], "~recipe", "needs one", ""),
        (["offload=null"], "offload", "must be the name", ""),
        (["recipe=[a]"], "recipe", "must be the name", ""),
        (["monitor=3"], "monitor", "list of names", ""),
        (["hydra.callbacks.x=1"], "hydra.callbacks.x", "only hydra.sweep", ""),
        (["hydra.searchpath=[file:///x]"], "hydra.searchpath", "there is no directory /x.", ""),
        (["output_dir=${nothing}"], "output_dir", "nothing", ""),
        (["objective=cros_entropy"], "objective", "no such objective", "cross_entropy"),
        (["datasets=[]"], "datasets", "no training data", ""),
        (["datasets=3"], "datasets", "a list of paths", ""),
        (["datasets=[3]"], "datasets.0", "a path, or a mapping with `path`", ""),
        (["datasets=[{path: a, type: 3}]"], "datasets.0.type", "must be text; got 3", "auto"),
        (["datasets=[{type: text}]"], "datasets.0.path", "must be set", ""),
        (["datasets=[{path: a, type: txt}]"], "datasets.0.type", "no such type", "text"),
        (["datasets=[{path: a, type: text, splt: x}]"], "datasets.0.splt", "no such key", "datasets.0.split"),
        (
            ["datasets=[{path: a, type: text, txt_field: x}]"],
            "datasets.0.txt_field",
            "no such",
            "datasets.0.text_field",
        ),
        (["datasets=[{path: a, type: text, samples: x}]"], "datasets.0.samples", "whole number", ""),
    ],
)
def test_one_mistake_one_problem(problems: Problems, args: list[str], key: str, words: str, fix: str) -> None:
    (problem,) = problems(*args)
    assert problem.key == key
    assert words in problem.message
    assert problem.where == "command line" or key in ("model.path", "monitor.jsnl")
    assert not fix or problem.fix == fix
    assert "\n" not in str(problem)


HINTS = {**field_types(RunConfig), **{key: flat.hint for key, flat in load_plugins().flat_keys().items()}}
NUMBERS = sorted(key for key, hint in HINTS.items() if re.search(r"\b(int|float)\b", repr(hint)))


@pytest.mark.parametrize("key", NUMBERS)
def test_every_number_has_limits(key: str) -> None:
    """What no run can mean is refused before anything is allocated, as it is read from an override or a file."""
    hint = HINTS[key]

    def message(value: Any) -> str:
        builder = Builder(lambda _: "", lambda key, _: Problem(key=key, message="unknown"))
        builder.value(hint, value, key)
        (problem,) = builder.problems
        assert len(str(problem)) < 300
        return problem.message

    for text in ["1" + "0" * 20, "1" + "0" * 300, "1e400", "-2", "nan", "inf", "-inf", "true", "[1]", "1e3x", "0x10"]:
        value = parse_override(f"{key}={text}").value()
        assert "must be" in message(value) or "64 bits" in message(value)
    for text in ["1" + "0" * 300, "9" * 5000, "1e400", "0x10", "-.inf", ".nan", "false", "~~"]:
        assert "must be" in message(plain_scalar(text)) or "64 bits" in message(plain_scalar(text))


@pytest.mark.parametrize("key", ["sequence_len", "max_steps", "lora_rank", "per_device_train_batch_size"])
def test_a_number_past_its_limit_names_the_limit(problems: Problems, tmp_path: Path, key: str) -> None:
    (problem,) = problems(f"{key}=999999999999")
    assert (problem.key, problem.where) == (key, "command line")
    assert re.fullmatch(r"must be a whole number from -?\d+ to \d+; got 999999999999\.", problem.message)
    (problem,) = problems(file=f"{key}: 1{'0' * 400}\n")
    assert (problem.key, problem.where) == (key, f"{tmp_path}/run.yaml:1")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["model.config.a=" + "[" * 400 + "]" * 400], "nested too deeply; at most 32"),
        (["model.config.a=" + "{b:" * 60 + "1" + "}" * 60], "nested too deeply; at most 32"),
        (["max_steps=" + "9" * 5000], "fewer than 400 digits"),
        (["model.config.a=" + "9" * 200], "at most 64 bits"),
        (["run_name=a\udcffb"], "not UTF-8 text"),
        (["output_dir=a\udcffb"], "not UTF-8 text"),
    ],
)
def test_values_that_nothing_could_hold(problems: Problems, args: list[str], words: str) -> None:
    (problem,) = problems(*args)
    assert words in problem.message
    assert len(str(problem)) < 250


def test_a_nul_character_is_refused_wherever_it_is(problems: Problems) -> None:
    for text in ('run_name: "a\\0b"', 'output_dir: "a\\0b"', 'datasets: [{path: "a\\0b", type: text}]'):
        (problem,) = problems(file=f"{text}\n")
        assert "NUL" in problem.message


def test_quoted_brackets_and_digits_are_text(load: Any) -> None:
    assert load("run_name='" + "[" * 40 + "'").run_name == "[" * 40
    assert load("run_name='" + "9" * 500 + "'").run_name == "9" * 500


@pytest.mark.parametrize("key", ["_target_", "_partial_"])
def test_no_config_names_python_objects(problems: Problems, key: str) -> None:
    for args, file in (
        ([f"{key}=os.system"], None),
        ([f"++recipe.{key}=os.system"], None),
        ([f"model.config={{a: {{{key}: os.system}}}}"], None),
        ([f"datasets=[{{path: a, type: text, {key}: x}}]"], None),
        ([f"hydra.launcher.{key}=os.system"], None),
        ([f"optimizer={{name: adamw, {key}: x}}"], None),
        ([], f"recipe: {{name: bf16, {key}: os.system}}\n"),
        ([], f"{key}: os.system\n"),
        ([], f"monitor: [{{name: jsonl, {key}: x}}]\n"),
    ):
        (problem,) = problems(*args, file=file)
        assert "Python objects" in problem.message


BAD_FILE = """\
learning_rte: 1e-4
learning_rate: 2e-4
warmup_steps: 10
warmup_ratio: 0.1
recipe: {name: bf16, emulte: x}
lora: yes
monitor: [jsonl, {name: jsnl}]
datasets:
  - path: a.jsonl
    type: text
    samples: many
learning_rate: 3
"""


def test_all_mistakes_come_together_with_their_lines(problems: Problems, tmp_path: Path) -> None:
    found = {p.key: p for p in problems("lora_rnk=3", "max_steps=x", file=BAD_FILE)}
    lines = {key: p.where.removeprefix(f"{tmp_path}/") for key, p in found.items()}
    assert lines == {
        "learning_rte": "run.yaml:1",
        "learning_rate": "run.yaml:12",
        "warmup_ratio": "run.yaml:4",
        "recipe.emulte": "run.yaml:5",
        "lora": "run.yaml:6",
        "monitor=jsnl": "run.yaml:7",
        "datasets.0.samples": "run.yaml:11",
        "lora_rnk": "command line",
        "max_steps": "command line",
    }


def test_the_report_is_one_message() -> None:
    error = ConfigError([Problem(key="a", message="x."), Problem(key="b", message="y.", where="f:1", fix="z")])
    assert str(error) == "2 mistakes in the configuration:\n  - a: x.\n  - b (f:1): y. Fix: z"
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("key", "plugin"), [("qlora_bnb", "quant-nf4"), ("qlora_fp8", "quant-fp8"), ("qlora_fp4", "quant-nvfp4")]
)
def test_a_qlora_key_names_the_distribution_that_it_needs(problems: Problems, key: str, plugin: str) -> None:
    (problem,) = problems("lora=true", f"{key}=true", f"plugins.block=[{plugin}]", fresh=True)
    assert problem.key == key
    assert f"surogate-{plugin}" in f"{problem.message} {problem.fix}"


@pytest.mark.parametrize(
    ("keys", "later"),
    [
        (["qlora_bnb=true", "qlora_fp8=true"], "qlora_fp8"),
        (["qlora_fp8=true", "qlora_fp4=true"], "qlora_fp4"),
        (["qlora_bnb=true", "qlora_format=nf4"], "qlora_format"),
    ],
)
def test_a_second_weight_format_is_refused(problems: Problems, keys: list[str], later: str) -> None:
    (problem,) = problems("lora=true", *keys)
    assert problem.key == later
    assert problem.message == "asks for a second weight format; the base is kept in one."
    assert problem.fix == "keep one of qlora_fp8, qlora_bnb, qlora_fp4, qlora_format"


QUANTS = ["lora=true", "recipe=fp8-hybrid", "persistent_quants=true"]
SHARED_ROWS = ["gpus=2", "context_parallel_size=2", "lora=false"]
SHARED_EXPERTS = ["gpus=2", "ep_size=2", "lora=false"]
CONTRADICTIONS = {
    "qlora_without_lora": ["lora=false", "qlora_bnb=true"],
    "micro_batch_past_any_memory": ["per_device_train_batch_size=65536", "sequence_len=4096"],
    "step_past_any_memory": ["per_device_train_batch_size=64", "sequence_len=4096", "gradient_accumulation_steps=1024"],
    "two_warmups": ["warmup_ratio=0.1", "warmup_steps=3"],
    **{f"recompute_{p}_without_effect": [f"recompute_{p}=true", "recompute=true"] for p in ("att", "ffn", "qkv")},
    **{f"recompute_{p}_without_effect": [f"recompute_{p}=true", "recompute=true"] for p in ("swiglu", "rmsnorm")},
    "recompute_budget_without_effect": ["recompute_budget=0.5", "recompute=true"],
    "row_past_the_positions": ["sequence_len=64", "max_model_len=32"],
    "sample_past_the_row": ["sequence_len=64", "max_length=65"],
    "two_model_dtypes": ["model_dtype=bf16", "torch_dtype=float32"],
    "template_without_use": ["template=chatml", "use_chat_template=false"],
    "no_steps": ["max_steps=0"],
    "no_target_modules": ["lora=true", "lora_target_modules=[]"],
    "adapter_without_lora": ["adapter_path=x", "lora=false", "from_scratch=false"],
    "adapter_on_random_weights": ["adapter_path=x", "lora=true", "from_scratch=true"],
    "trainable_without_adapter": ["adapter_init_mode=trainable"],
    "init_of_trained_adapter": [
        *("lora=true", "lora_init=loftq", "adapter_path=x", "adapter_init_mode=trainable", "from_scratch=false")
    ],
    "merge_without_lora": ["merge_adapter=true", "lora=false"],
    **{
        f"offload_{what}_with_cpu_training": [f"offload_{what}=true", "cpu_training=true"]
        for what in ("optimizer", "master", "grads")
    },
    "offload_quants_with_cpu_training": [*QUANTS, "offload_quants=true", "cpu_training=true"],
    "qlora_offload_experts_with_cpu_training": ["lora=true", "qlora_offload_experts=true", "cpu_training=true"],
    "experts_offloaded_twice": [*QUANTS, "offload_quants=true", "qlora_offload_experts=true"],
    "trained_experts_offloaded": ["lora=false", "qlora_offload_experts=true"],
    "shared_experts_offloaded": ["lora=true", "gpus=2", "shard_weights=true", "qlora_offload_experts=true"],
    "offloaded_quants_made_anew": ["offload_quants=true", "lora=true"],
    "quants_of_trained_weights": ["persistent_quants=true", "recipe=fp8-hybrid", "lora=false"],
    "epochs_without_effect": ["epoch_adjustment=true", "max_steps=10"],
    "shard_gradients_without_level": ["gpus=2", "lora=false", "zero_level=0", "shard_gradients=true"],
    "shard_weights_without_level": ["gpus=2", "lora=false", "zero_level=0", "shard_weights=true"],
    "exact_sums_of_other_numbers": ["gpus=3", "exact_reduction=true"],
    "exact_sums_off_the_device": ["exact_reduction=true", "offload_grads=true"],
    "groups_that_share_out": ["gpus=4", "lora=false", "dp_shard_size=3"],
    "groups_of_one": ["gpus=4", "lora=false", "dp_shard_size=1"],
    "groups_without_level": ["gpus=4", "lora=false", "zero_level=0", "dp_shard_size=2"],
    "groups_of_gpus": ["gpus=3", "context_parallel_size=2"],
    "parts_of_rows": ["gpus=3", "context_parallel_size=3", "sequence_len=1024"],
    "zero_level_with_context_parallel_size": [*SHARED_ROWS, "zero_level=2"],
    "shard_gradients_with_context_parallel_size": [*SHARED_ROWS, "shard_gradients=true"],
    "shard_weights_with_context_parallel_size": [*SHARED_ROWS, "shard_weights=true"],
    "cpu_training_with_context_parallel_size": [*SHARED_ROWS, "cpu_training=true"],
    "exact_reduction_with_context_parallel_size": [*SHARED_ROWS, "exact_reduction=true"],
    "groups_of_experts": ["gpus=4", "ep_size=3"],
    "zero_level_with_ep_size": [*SHARED_EXPERTS, "zero_level=2"],
    "shard_gradients_with_ep_size": [*SHARED_EXPERTS, "shard_gradients=true"],
    "shard_weights_with_ep_size": [*SHARED_EXPERTS, "shard_weights=true"],
    "cpu_training_with_ep_size": [*SHARED_EXPERTS, "cpu_training=true"],
    "exact_reduction_with_ep_size": [*SHARED_EXPERTS, "exact_reduction=true"],
    "context_parallel_size_with_ep_size": [*SHARED_EXPERTS, "context_parallel_size=2"],
    "sample_prompts_with_ep_size": [*SHARED_EXPERTS, "sample_prompts=[hello]"],
}


@pytest.mark.parametrize("rule", RULES, ids=lambda c: c.name)
def test_every_contradiction(problems: Problems, rule: Any) -> None:
    (problem,) = problems("model=qwen3-0.6b", *CONTRADICTIONS[rule.name])
    said = re.sub(r"\\{\w+\\}", r"\\w+", re.escape(rule.message))
    assert problem.key == rule.key
    assert re.fullmatch(said, problem.message)
    assert problem.fix


def test_a_rule_shows_the_values(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-0.6b", "gpus=4", "lora=false", "dp_shard_size=3")
    assert problem.message.startswith("is 3 and does not divide gpus=4 into groups")


def test_an_option_of_another_choice_of_the_group(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-0.6b", "launcher.num_nodes=2")
    assert (problem.key, problem.message) == ("launcher.num_nodes", "there is no such key.")
    assert problem.fix == "remove it, or choose launcher=ray"
    (problem,) = problems(file="model: qwen3-0.6b\nlauncher: {num_nodes: 2}\n")
    assert problem.fix == "remove it, or choose launcher: ray"


def test_an_option_of_a_plugin_that_cannot_be_read(problems: Problems, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody chose it, so its fault is not the run's."""
    everything = Registry.all
    strange = {"strange": SimpleNamespace(options=int), "bare": SimpleNamespace()}
    monkeypatch.setattr(Registry, "all", lambda self, kind: {**strange, **everything(self, kind)})
    (problem,) = problems("model=qwen3-0.6b", "launcher.num_nodes=2")
    assert problem.fix == "remove it, or choose launcher=ray"


def test_a_task_needs_data(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-0.6b", "datasets=[]")
    assert (problem.key, problem.message) == ("datasets", "there is no training data.")


def test_a_step_of_all_gpus_is_bounded(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-0.6b", "per_device_train_batch_size=64", "sequence_len=4096", "gpus=1024")
    assert problem.key == "gradient_accumulation_steps"


def test_a_task_that_trains_all_weights_takes_no_adapters(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-0.6b", "task=pt", "lora=true")
    assert (problem.key, problem.fix) == ("lora", "lora: false, or task sft")
    assert "must be false in task pt, which trains every weight" in problem.message


# ------------------------------------------------------------------------------- plugins


def test_a_broken_plugin_that_is_asked_for(
    problems: Problems, load: Any, install_plugin: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    source = "import no_such_module\nfrom surogate_core import bundles\nbundles.RecipeSpec(name='frail', build=None)\n"
    install_plugin("frail", source, conf={"monitor/glass.yaml": "# @package monitor.glass\nname: glass\n"})
    for args in (["recipe=frail"], ["monitor=[glass]"]):
        (problem,) = problems(*args, fresh=True)
        assert "plugin frail (distribution dist-frail 1.2.3) failed when it was imported" in problem.message
        assert "no_such_module" in problem.message
        log = Path(problem.fix.rpartition("traceback: ")[2])
        assert "Traceback" in log.read_text()
        assert "plugin_frail" in log.read_text()
    load(fresh=True)


def test_a_blocked_plugin_that_is_asked_for(problems: Problems) -> None:
    (problem,) = problems("plugins.block=[recipe-bf16]", "recipe=bf16", fresh=True)
    assert "surogate-recipe-bf16" in problem.message
    assert "blocked by plugins.block" in problem.message


def test_a_monitor_option_without_its_package(problems: Problems, install_plugin: Any) -> None:
    source = (
        "from surogate_core import bundles, hookimpl\n"
        "@hookimpl\ndef surogate_monitor():\n    return bundles.MonitorSpec(name='eye', build=None)\n"
        "@hookimpl\ndef surogate_config_path():\n    return 'pkg://plugin_eye.conf'\n"
    )
    install_plugin("eye", source, conf={"monitor/eye.yaml": "name: eye\n"})
    (problem,) = problems("monitor=[eye]", fresh=True)
    assert "# @package monitor.eye" in problem.message
    assert "dist-eye" in problem.message


def test_the_policy_is_read_before_anything_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("plugins:\n  policy: allowlist\n  allow: [a]\n")
    policy = peek_policy(["+plugins.block=[b]", "plugins.allow=[a,c]"], file)
    assert (policy.policy, policy.allow, policy.block) == ("allowlist", ["a", "c"], ["b"])
    for bad in (["plugins.policy=allowed"], ["plugins.block=3"], ["plugins=x"], ["plugins.block=["]):
        with pytest.raises(ConfigError):
            peek_policy(bad, None)


def test_a_policy_that_an_option_file_changes_is_refused(problems: Problems, registry: Registry) -> None:
    (problem,) = problems("plugins.block=[x]")
    assert problem.key == "plugins"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["fp32", "bf16"])
@pytest.mark.parametrize("matmul", ["null", "fp32", "bf16", "e4m3"])
@pytest.mark.parametrize("gradient", ["null", "fp32", "bf16", "e5m2"])
def test_exactly_the_six_products_are_taken(load: Any, matmul: str, gradient: str, model: str) -> None:
    six = ["fp32×fp32→fp32", "bf16×bf16→fp32", "bf16×bf16→bf16", "e4m3×e4m3→fp32", "e4m3×e4m3→bf16", "e4m3×e5m2→bf16"]
    forward = model if matmul == "null" else matmul
    backward = {"null": "bf16" if matmul == "e4m3" else forward}.get(gradient, gradient)
    beside = "e4m3" if backward == "e5m2" else backward
    wrong = set()
    if f"{forward}×{forward}→{model}" not in six:
        wrong.add("matmul_dtype")
    if gradient != "null" and f"{beside}×{backward}→{model}" not in six:
        wrong.add("gradient_dtype")
    text = f"recipe: bf16\nmodel_dtype: {model}\nmatmul_dtype: {matmul}\ngradient_dtype: {gradient}\n"
    try:
        load(file=text)
        found = {}
    except ConfigError as error:
        found = {p.key: p for p in error.problems}
    assert found.keys() == wrong
    for key, problem in found.items():
        assert problem.where.endswith("run.yaml:3" if key == "matmul_dtype" else "run.yaml:4")
        assert "there is no product" in problem.message
        assert "model_dtype: " in problem.fix


def test_recipes_with_dtypes_of_their_own_take_every_value(load: Any) -> None:
    assert load("recipe=nvfp4", "model_dtype=bf16", "matmul_dtype=fp32", "gradient_dtype=fp32").recipe.name == "nvfp4"


def test_an_optimizer_that_cannot_train_bf16_masters_is_refused_by_name(
    problems: Problems, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = registry.bundles("optimizer")
    narrow = replace(found["adamw"], bundle=replace(found["adamw"].bundle, master_dtypes=("fp32",)))
    monkeypatch.setitem(found, "adamw", narrow)
    (problem,) = problems(file="optimizer: adamw\nmaster_dtype: bf16\n")
    assert problem.key == "master_dtype"
    assert "run.yaml:2" in problem.where
    assert problem.message == "is bf16, and optimizer adamw cannot train such masters."
    assert problem.fix == "master_dtype: null, or optimizer: adamw_8bit or normuon"


def test_an_optimizer_that_is_not_for_adapters_is_refused_with_lora(problems: Problems) -> None:
    (problem,) = problems(file="lora: true\noptimizer: normuon\n")
    assert problem.key == "optimizer"
    assert "run.yaml:2" in problem.where
    assert problem.message == "normuon trains whole matrices, and with `lora` only adapters are trained."
    assert problem.fix == "optimizer: adamw or adamw_8bit, or lora: false"


def test_a_fabric_without_groups_is_refused_where_gpus_share_rows(
    problems: Problems, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = registry.bundles("fabric")
    monkeypatch.setitem(found, "gloo", replace(found["gloo"], bundle=replace(found["gloo"].bundle, groups=False)))
    (problem,) = problems(file="gpus: 2\nfabric: gloo\ncontext_parallel_size: 2\n")
    assert problem.key == "fabric"
    assert "run.yaml:2" in problem.where
    assert problem.message == "gloo connects all GPUs alone, and `context_parallel_size` needs groups of them."
    assert problem.fix == "fabric: auto, or context_parallel_size: 1"


def test_an_optimizer_of_whole_matrices_is_refused_where_gpus_share_out_experts(problems: Problems) -> None:
    (problem,) = problems("model=qwen3-moe", "gpus=2", "ep_size=2", "lora=false", "zero_level=0", "optimizer=normuon")
    assert problem.key == "optimizer"
    assert problem.message == "keeps state that GPUs which share out experts (`ep_size`) cannot put together: normuon."
    assert problem.fix == "optimizer: adamw_8bit, or ep_size: 1"


def test_a_fabric_without_distant_groups_is_refused_where_groups_share_out_experts(
    problems: Problems, load: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = registry.bundles("fabric")
    monkeypatch.setitem(found, "gloo", replace(found["gloo"], bundle=replace(found["gloo"].bundle, across=False)))
    (problem,) = problems("model=qwen3-moe", "gpus=4", "ep_size=2", "fabric=gloo")
    assert (problem.key, problem.fix) == ("fabric", "fabric: auto, or ep_size: as many as gpus")
    assert load("model=qwen3-moe", "gpus=4", "ep_size=4", "fabric=gloo").ep_size == 4


def test_a_fabric_without_distant_groups_is_refused_where_gpus_are_replicas(
    problems: Problems, load: Any, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: Any = registry.bundles("fabric")
    monkeypatch.setitem(found, "gloo", replace(found["gloo"], bundle=replace(found["gloo"].bundle, across=False)))
    (problem,) = problems(file="gpus: 4\nfabric: gloo\ndp_shard_size: 2\n")
    assert problem.key == "fabric"
    assert problem.message == "gloo connects all GPUs alone, and `dp_shard_size` needs groups of them."
    assert problem.fix == "fabric: auto, or dp_shard_size: 0"
    assert load(file="gpus: 4\nfabric: gloo\ndp_shard_size: 4\n").dp_shard_size == 4


# --------------------------------------------------------------------------- the contract


def test_planned_names_are_not_there_yet() -> None:
    assert not planned.KEYS.keys() & KEYS


def test_every_key_is_documented_and_the_page_is_current() -> None:
    from surogate_core.config.docs import key_docs

    assert all(doc.text and doc.type and doc.section for doc in key_docs())
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("make_config_docs", root / "scripts" / "make_config_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    current = (root / "docs" / "config.md").read_text(encoding="utf-8")
    assert module.make() == current, "run: python scripts/make_config_docs.py"


def test_a_plugin_of_an_earlier_run_that_is_gone_is_named(tmp_path: Path) -> None:
    had = [("acme", "acme-surogate", "1.2"), ("core", "surogate-core", "0.1.0")]
    plugins = [{"name": name, "distribution": dist, "version": version} for name, dist, version in had]
    (tmp_path / "run.json").write_text(json.dumps({"plugins": plugins}))
    (tmp_path / "config.yaml").write_text("optimizer: signsgd\n")
    with pytest.raises(ConfigError) as caught:
        load_run_config([], config_file=tmp_path / "config.yaml", registry=load_plugins())
    assert "signsgd" in str(caught.value)
    assert "acme (acme-surogate 1.2), which is not installed. Fix: pip install 'acme-surogate==1.2'" in str(
        caught.value
    )
    with pytest.raises(ConfigError, match="acme-surogate"):
        load_run_config(["optimizer=signsgd", f"output_dir={tmp_path}"], registry=load_plugins())


@pytest.mark.parametrize("key", ["a\x00b", "\u202ea", "\x1b[31mred", "x" * 9000])
def test_a_key_is_shown_with_escapes_and_cut(key: str, tmp_path: Path, registry: Registry) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"{json.dumps(key)}: 1\n")
    with pytest.raises(ConfigError) as error:
        load_run_config([], config_file=file, registry=registry)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000
