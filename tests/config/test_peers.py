"""Keys, values and types of other trainers: each is an error with a fix, and each fix is a sound configuration."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pages import blocks

from surogate_core.bundles.options import field_types
from surogate_core.config import peers
from surogate_core.config.choices import default_groups
from surogate_core.config.names import unknown_key
from surogate_core.config.schema import RunConfig
from surogate_core.config.typed import Builder
from surogate_core.data.rows.sources import SourceSpec
from surogate_core.errors import Problem
from surogate_core.plugins import Registry

Problems = Callable[..., list[Problem]]
TABLE = peers.table()
OTHER = "something-else"
"""A value that no row names."""


def cases() -> Iterator[tuple[str, Any, peers.Peer]]:
    """(key, value, what replaces it) of every row, with each value that it names."""
    for key, row in TABLE["keys"].items():
        values = [row.get("example")]
        values += [yaml.safe_load(word) if word in ("true", "false") else word for word in row.get("set", {}) if word]
        values += list(row.get("values", {}))
        if "" in row.get("set", {}) and "$" not in str(row["set"][""]):
            values.append(OTHER)
        for value in values:
            peer = peers.of_key(key, value)
            assert peer is not None
            yield key, value, peer
    for key, words in TABLE["values"].items():
        for word in words:
            peer = peers.of_value(key, word)
            assert peer is not None
            yield key, word, peer


CASES = list(cases())
SETTINGS = {yaml.safe_dump(p.settings): p.settings for _, _, p in CASES if p.settings}
"""Every fix that sets keys, once."""


def test_the_table_has_no_key_that_exists(registry: Registry) -> None:
    ours = set(field_types(RunConfig)) | registry.flat_keys().keys() | default_groups().keys()
    assert not TABLE["keys"].keys() & ours
    assert TABLE["values"].keys() <= ours
    assert len(TABLE["keys"]) >= 120
    for row in TABLE["keys"].values():
        assert len({"to", "set", "drop"} & row.keys()) == 1
        assert set(row.get("peers", [])) <= peers.PEERS.keys()
    assert TABLE["same"].keys() == peers.PEERS.keys()
    for same in TABLE["same"].values():
        assert set(same) <= ours


@pytest.mark.parametrize("line", [False, True], ids=["file", "command line"])
def test_every_key_has_its_fix_in_a_form_to_paste(registry: Registry, line: bool) -> None:
    where = "command line" if line else "run.yaml:1"
    for key, value, peer in CASES:
        if key not in TABLE["keys"]:
            continue
        problem = unknown_key(key, where, registry, value=value)
        assert problem.message == "there is no such key."
        if peer.reason:
            assert problem.fix == f"remove it: {peer.reason}"
        elif not line and value is not None:
            read: dict[str, Any] = {}
            for part in problem.fix.split(" and "):
                read |= yaml.safe_load(part)
            assert read == peer.settings or key == "default_system", key
        assert problem.fix


def test_every_fix_names_keys_and_values_that_exist(registry: Registry) -> None:
    """Each value alone; the slow test below composes whole configurations."""
    hints = {**field_types(RunConfig), **{key: flat.hint for key, flat in registry.flat_keys().items()}}
    groups = {group: set(registry.options.get(group, {})) for group in default_groups()}
    for settings in SETTINGS.values():
        for key, value in settings.items():
            builder = Builder(lambda key: "", lambda key, known: Problem(key=key, message="unknown"))
            if key in groups and key != "model":
                assert value in groups[key], (key, value)
            elif key not in ("datasets", "validation_datasets") and not key.startswith("model"):
                builder.value(hints[key], value, key)
            if value != OTHER:
                assert not builder.problems, (key, builder.problems)


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=str)
def test_every_fix_composes(load: Any, settings: Mapping[str, Any]) -> None:
    if OTHER in settings.values():
        pytest.skip("no value of a row")
    base = {"model": "qwen3-0.6b", "datasets": "my.jsonl"}
    if settings.keys() & {"model.revision", "model.config", "model.config.rope_theta"}:
        nested = {key.removeprefix("model."): value for key, value in settings.items()}
        config = load(*(f"model.{key}={peers.shown(value, ',')}" for key, value in nested.items()), "model=owner/name")
    else:
        more = {"lora": False} if settings.get("optimizer") == "normuon" else {}
        # The shapes of a preset have random weights, all of which are trained.
        trained = "adapter_path" in settings or any(key.startswith("qlora") for key in settings)
        more |= {"model": "owner/name"} if trained else {}
        more |= {"gpus": 2} if "context_parallel_size" in settings else {}
        config = load(file=yaml.safe_dump({**base, **more, **settings}))
    assert config.datasets


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        ("val_set_size: 0.05", "val_set_size", "validation_split_ratio: 0.05"),
        ("adapter: qlora", "adapter", "lora: true and qlora_bnb: true"),
        ("bf16: true", "bf16", "recipe: bf16"),
        ("fp16: true", "fp16", "recipe: bf16"),
        ("load_in_4bit: true", "load_in_4bit", "qlora_bnb: true"),
        ("finetuning_type: full", "finetuning_type", "lora: false"),
        ("stage: sft", "stage", "task: sft"),
        ("stage: dpo", "stage", "task: dpo"),
        ("stage: ppo", "stage", "remove it: this version has grpo instead, which needs no second model"),
        ("chat_template: chatml", "chat_template", "template: chatml"),
        ("chat_template: tokenizer_default", "chat_template", "template: auto"),
        ("seed: 3", "seed", "train_seed: 3"),
        ("optim: paged_adamw_8bit", "optim", "optimizer: adamw_8bit"),
        ("lora_r:", "lora_r", "lora_rank"),
        ("deepspeed: examples/deepspeed/ds_z3_config.json", "deepspeed", "zero_level: 3"),
        ("fsdp: full_shard auto_wrap", "fsdp", "zero_level: 3"),
        ("fsdp: [shard_grad_op, auto_wrap]", "fsdp", "zero_level: 2"),
        ("nproc_per_node: 8", "nproc_per_node", "gpus: 8"),
        ("fsdp: hybrid", "fsdp", "remove it: zero_level: 3 is full_shard, zero_level: 2 is shard_grad_op"),
        ("pretraining_dataset: a.jsonl", "pretraining_dataset", "task: pt and lora: false and datasets: a.jsonl"),
        # their values of keys that exist
        ("optimizer: paged_adamw_8bit", "optimizer=paged_adamw_8bit", "optimizer: adamw_8bit"),
        ("lr_scheduler_type: constant_with_warmup", "lr_scheduler_type", "lr_scheduler_type: constant"),
        ("report_to: none", "report_to", "report_to: null"),
        ("report_to: [all]", "report_to", "report_to: [wandb, tensorboard]"),
        ("lora_target_modules: all-linear", "lora_target_modules", "lora_target_modules: [all]"),
        ("torch_dtype: float16", "torch_dtype", "torch_dtype: bfloat16"),
        ("recipe: fp8", "recipe=fp8", "recipe: fp8-hybrid"),
        ("dataset: a.jsonl", "dataset=a.jsonl", "datasets: a.jsonl"),
        # data sets
        ("datasets: [{path: a.jsonl, type: chat_template}]", "datasets.0.type", "type: auto"),
        ("datasets: [{path: a.jsonl, type: chat}]", "datasets.0.type", "type: auto"),
        ("datasets: [{path: a.jsonl, type: alpaca}]", "datasets.0.type", "type: instruction"),
        (
            "datasets: [{path: a.jsonl, type: conversation, field_messages: m}]",
            "datasets.0.field_messages",
            "datasets.0.messages_field",
        ),
        ("datasets: [{path: a.jsonl, ds_type: json}]", "datasets.0.ds_type", "remove it: the file's name says it"),
    ],
)
def test_one_message_with_the_fix(problems: Problems, text: str, key: str, fix: str) -> None:
    (problem,) = problems(file=f"{text}\n")
    assert (problem.key, problem.fix) == (key, fix)


def test_on_the_command_line_the_fix_is_an_override(problems: Problems) -> None:
    (problem,) = problems("adapter=qlora")
    assert problem.fix == "lora=true qlora_bnb=true"
    (problem,) = problems("lora_target=[q_proj,v_proj]")
    assert problem.fix == "'lora_target_modules=[q_proj,v_proj]'"
    (problem,) = problems("seed=1,2")
    assert problem.fix == "train_seed"


@pytest.mark.parametrize("name", ["type", "field"])
def test_types_and_fields_of_data_sets_exist(registry: Registry, name: str) -> None:
    formats = registry.all("dataset")
    fields = set(field_types(SourceSpec)) | {"type"}
    fields = fields.union(*(field_types(f.options) for f in formats.values()))
    if name == "type":
        assert {found["type"] for found in TABLE["types"].values()} <= formats.keys()
        assert not TABLE["types"].keys() & formats.keys()
    else:
        assert {row["to"] for row in TABLE["fields"].values() if "to" in row} <= fields
        assert not TABLE["fields"].keys() & fields


PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").glob("coming-from-*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_converts_every_key_of_its_example(page: Path) -> None:
    """Each key of the other trainer's example is the same here, or in the table; its fixes are in our example."""
    theirs, ours = [block for block in blocks(page) if block.language in ("yaml", "python")][:2]
    here = yaml.safe_load(ours.text)
    if theirs.language == "yaml":
        given = yaml.safe_load(theirs.text)
    else:
        calls = [node for node in ast.walk(ast.parse(theirs.text)) if isinstance(node, ast.Call)]
        words = [word for call in calls for word in call.keywords if isinstance(word.value, ast.Constant | ast.List)]
        given = {word.arg: ast.literal_eval(word.value) for word in words}
        for of_loading in ("data_files", "split", "tokenizer"):
            given.pop(of_loading, None)
    for key, value in given.items():
        peer = peers.of_key(key, value) or peers.of_value(key, value)
        # It exists here too, with another meaning; the page says so.
        assert peer is not None or key in here or key == "max_length", key
        if peer is not None and key not in ("target_modules", "packing"):
            missing = {
                k: v for k, v in peer.settings.items() if here.get(k) not in (v, v[0] if isinstance(v, list) else v)
            }
            assert not missing or key == "report_to", (key, missing)


def test_the_tables_of_the_pages_are_current() -> None:
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("make_coming_from", root / "scripts" / "make_coming_from.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert len(PAGES) == 5
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert module.make(text) == text, "run: python scripts/make_coming_from.py"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("be brief", "be brief"),
        ("Note: be brief", '"Note: be brief"'),
        ("a #b", '"a #b"'),
        ("5e-5", "5e-5"),
        ("{x", '"{x"'),
    ],
)
def test_a_text_is_quoted_where_yaml_would_read_something_else(value: str, text: str) -> None:
    assert peers.shown(value) == text
    assert str(yaml.safe_load(peers.shown(value))) == value
