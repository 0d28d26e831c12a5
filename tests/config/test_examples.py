"""The files under examples/: each composes, and the commands in its header are real."""

from __future__ import annotations

import re
from pathlib import Path

import example_commands
import pytest

from surogate_core.app.arguments import parse
from surogate_core.config.resolve import load_run_config
from surogate_core.plugins import Registry

EXAMPLES = example_commands.EXAMPLES
COMMANDS = [(example, words) for example in EXAMPLES for words in example_commands.commands(example)]


def test_an_example_is_short() -> None:
    names = {e.stem for e in EXAMPLES}
    assert {"lora", "qlora_8b", "full_finetune", "pretrain", "instruction_data", "stacked_lora"} <= names
    assert not [e.name for e in EXAMPLES if len(e.read_text(encoding="utf-8").splitlines()) > 25]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_file_itself_composes(example: Path, registry: Registry) -> None:
    config = load_run_config([], config_file=example, registry=registry)
    assert config.datasets
    assert config.output_dir.startswith("runs/")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_header_has_a_purpose_a_command_and_an_end(example: Path) -> None:
    header = re.split(r"^(?!#)", example.read_text(encoding="utf-8"), maxsplit=1, flags=re.MULTILINE)[0]
    lines = header.splitlines()
    assert lines[0].startswith("# ")
    assert len(lines[0].split()) > 5, "the first line says what the file is for"
    assert lines[2].startswith("#   surogate "), "the command comes right after the purpose"
    assert "Ends with" in header, "where the result is"
    assert all(len(line) <= 120 for line in lines)


@pytest.mark.parametrize(("example", "words"), COMMANDS, ids=lambda v: v.stem if isinstance(v, Path) else v[0])
def test_the_header_names_the_file_and_its_command_composes(
    example: Path, words: list[str], registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(example_commands.ROOT)
    command, rest = words[0], [w for w in words[1:] if w not in ("--debug", "--gpu", "rtx4090", "h200")]
    arguments = parse(rest, command=f"surogate {command}")
    assert arguments.config_file == Path("examples") / example.name
    task = command if command in ("sft", "pt") else None
    config = load_run_config(arguments.overrides, task=task, config_file=arguments.config_file, registry=registry)
    if task is not None:
        assert config.task == task


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda p: p.stem)
def test_the_header_says_where_the_output_goes(example: Path, registry: Registry) -> None:
    config = load_run_config([], config_file=example, registry=registry)
    assert f"in {config.output_dir}/" in example.read_text(encoding="utf-8")
