"""Configurations of any text: read, or refused with the key and what to do; nothing is dropped, nothing is written."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import fuzzing
import pytest
import yaml
from hypothesis import strategies as st

from surogate_core.config import schema
from surogate_core.config.resolve import load_run_config, peek_policy, to_dict, to_yaml
from surogate_core.plugins import load_plugins
from surogate_core.plugins.registry import Registry

KEYS = [*schema.KEYS, *load_plugins().flat_keys()]
GROUPS = ["model", "recipe", "optimizer", "dataset", "task", "monitor", "offload", "plugins", "objective"]

WORDS = st.sampled_from(
    [
        "",
        " ",
        "true",
        "no",
        "null",
        "~",
        "auto",
        "none",
        "cpu",
        "cuda",
        "bf16",
        "${learning_rate}",
        "${oc.env:HOME}",
        "${",
        "$${x}",
        "\\${a}",
        "???",
        "1e-3",
        "0x10",
        "1_000",
        "-0",
        ".nan",
        ".inf",
        "1e400",
        "9" * 30,
        "9" * 500,
        "a,b",
        "[1,2",
        "{a: 1}",
        "{a:1,b:[",
        "'",
        '"',
        "\\",
        "a b",
        "é🦊",
        "\u202e",
        "\x00",
        "\x1b[31m",
        "\ud800",
        "../x",
        "/etc/passwd",
        "pkg://x/y",
        "hf://x",
        "_target_",
        "__class__",
        "*a",
        "&a b",
        "!!python/object:os.system",
        "#",
        "glob(*)",
        "range(1,3)",
        "choice(1,2)",
        "interval(0,1)",
        "a=b",
        "=",
        "~model",
        "@",
        "%s",
        "{}",
        "x" * 5000,
    ]
)
NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.integers(-(10**25), 10**25),
    st.sampled_from([2**31, 2**63, 2**64, 10**400, -(10**400), 1e308, 5e-324, float("nan"), float("inf"), -0.0]),
    st.floats(),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, WORDS, st.text(max_size=12))
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.one_of(st.sampled_from([*KEYS, "name", "path", "type"]), st.text(max_size=6)), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
FINE: dict[str, Any] = {
    "learning_rate": [1e-3, 1],
    "max_steps": [1, 10],
    "lora": [True, False],
    "lora_rank": [1, 8],
    "sequence_len": [64, 2048],
    "num_epochs": [1, 0.5],
    "warmup_steps": [0, 5],
    "save_steps": [0, 10],
    "eval_steps": [0, 5],
    "train_seed": [0, 2**31],
    "lr_scheduler_type": ["linear", "cosine"],
    "max_grad_norm": [1.0, 0],
    "weight_decay": [0.1],
    "output_dir": ["out", "é x"],
    "sample_packing": [True],
    "truncation_strategy": ["split"],
    "report_to": [[]],
    "save_total_limit": [3],
    "gradient_accumulation_steps": [2],
    "per_device_train_batch_size": [1],
    "run_name": ["a", "${x}", "ü"],
    "lora_alpha": [16],
    "lora_dropout": [0.1],
    "lora_target_modules": [["q_proj"], ["all"]],
    "recompute": [True],
    "datasets": [[{"path": "a.jsonl", "type": "text"}], [{"path": "a", "type": "auto", "samples": 3}]],
    "recipe": ["bf16", {"name": "bf16"}],
    "optimizer": ["adamw", {"name": "adamw", "beta1": 0.8}],
    "monitor": [["jsonl"]],
}
RAW = (
    "a: &a [x, x, x]\nb: &b [*a, *a, *a]\nc: [*b, *b, *b]\n",
    "&a a: *a\n",
    "a: &a {b: *a}\n",
    "<<: {learning_rate: 1}\n",
    "- a\n- b\n",
    "learning_rate\n",
    "learning_rate: 1\nlearning_rate: 2\n",
    "\tlearning_rate: 1\n",
    "? [a, b]\n: c\n",
    "%YAML 1.1\n---\nlora: true\n",
    "lora: true\n---\nlora: false\n",
    "lora: !!bool 1\n",
    "lora: !custom x\n",
    "\ufefflora: true\n",
    "{" * 200,
    "[" * 200,
    "a: " + "[" * 40 + "]" * 40 + "\n",
    "learning_rate: |\n  1e-3\n",
    "learning_rate: >-\n 1\n",
    "...\n",
    "model: {name: hf, name: tiny}\n",
    "datasets:\n  path: x\n",
    "datasets: [{path: x, type: }]\n",
    "plugins: [x]\n",
    "null: 1\n",
    "1: 2\n",
    "true: false\n",
    "learning_rate: 2024-01-01\n",
    "max_steps: 1:30\n",
    "'': x\n",
    "a.b.c: 1\n",
    "model.name: x\n",
    "hydra: {run: {dir: /tmp/x}}\n",
    "defaults: [x]\n",
    "_target_: os.system\n",
    "model: {_target_: os.system}\n",
)


@dataclass(frozen=True)
class Case:
    """A YAML file (None: no file), overrides, the sub-command."""

    kind: str
    file: bytes | None
    arguments: tuple[str, ...]
    task: str | None


@st.composite
def mappings(draw: st.DrawFn) -> dict[str, Any]:
    """Keys that exist with values that fit, and in half of the cases one or two that are wrong."""
    chosen = draw(st.lists(st.sampled_from(sorted(FINE)), max_size=5, unique=True))
    values = {key: draw(st.sampled_from(FINE[key])) for key in chosen}
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        key = draw(st.one_of(st.sampled_from([*KEYS, *GROUPS]), st.sampled_from(KEYS).map(lambda k: k[:-1]), WORDS))
        values[key] = draw(VALUES)
    return values


@st.composite
def files(draw: st.DrawFn) -> tuple[str, bytes]:
    """(kind, bytes) of a configuration file."""
    how = draw(st.integers(0, 9))
    if how == 9:
        return "bytes", draw(st.binary(max_size=60))
    if how == 8:
        text = "".join(draw(st.lists(st.sampled_from(RAW), min_size=1, max_size=2)))
        return "raw", text.encode("utf-8", "surrogatepass")
    values = draw(mappings())
    if how == 7:
        lines = [f"{key}: {draw(WORDS)}\n" for key in values] or ["lora: true\n"]
        return "words", "".join(lines).encode("utf-8", "surrogatepass")
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=draw(st.booleans()), default_flow_style=how == 6)
    content = text.encode("utf-8", "surrogatepass")
    if how == 5 and content:
        at = draw(st.integers(0, len(content) - 1))
        return "flipped", content[:at] + bytes([content[at] ^ draw(st.integers(1, 255))]) + content[at + 1 :]
    return "mapping", content


def _override(key: str, value: Any) -> str:
    text = (
        value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True, width=9999).split("\n")[0]
    )
    return f"{key}={text}"


@st.composite
def overrides(draw: st.DrawFn) -> str:
    """One argument."""
    key = draw(st.sampled_from([*FINE]))
    how = draw(st.integers(0, 9))
    if how < 6:
        return _override(key, draw(st.sampled_from(FINE[key])))
    prefix = draw(
        st.sampled_from(["", "+", "++", "~", "--", "-", "model.", "recipe.", "hydra.", "plugins.", "datasets.0."])
    )
    if how < 9:
        return prefix + _override(draw(st.sampled_from([*KEYS, *GROUPS, "name", ""])), draw(VALUES))
    return draw(st.one_of(WORDS, st.text(max_size=10)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any case; an argument has no NUL, which no operating system passes on."""
    kind, file = draw(files()) if draw(st.integers(0, 3)) else ("arguments", None)
    count = draw(st.sampled_from([0, 0, 0, 1, 2] if file is not None else [1, 2, 3]))
    found = tuple(draw(overrides()).replace("\x00", "") for _ in range(count))
    return Case(kind=kind, file=file, arguments=found, task=draw(st.sampled_from([None, None, "sft", "pt"])))


@cache
def registry() -> Registry:
    return load_plugins()


def run(case: Case, directory: Path) -> None:
    """The configuration steps of the command before it trains, and back."""
    path = None
    if case.file is not None:
        path = directory / "run.yaml"
        path.write_bytes(case.file)
    peek_policy(case.arguments, path)
    config = load_run_config(case.arguments, task=case.task, config_file=path, registry=registry())
    if sorted(p.name for p in directory.iterdir()) != (["run.yaml"] if path else []):
        raise fuzzing.WrongError("reading the configuration wrote into the directory")
    if len(repr(case)) % 4:  # composing it once more takes as long again
        return
    again = directory / "again.yaml"
    again.write_text(to_yaml(config), encoding="utf-8")
    if repr(to_dict(load_run_config([], config_file=again, registry=registry()))) != repr(to_dict(config)):
        raise fuzzing.WrongError("the written configuration is not the one that was read")


@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", fuzzing.numbers(10, 150, 1500))
def test_configurations(number: int) -> None:
    registry()
    counts = fuzzing.fuzz(cases(), run, number, start=1)
    counts.check(number, least_accepted=0.15, least_refused=0.3)
