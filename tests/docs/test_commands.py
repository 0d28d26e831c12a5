"""Commands of README.md and docs/: their options exist, their configurations compose, and those of the guides run."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import example_commands
import pytest
from page_commands import GUIDES, PAGES, ROOT, Command, commands, commands_of
from pages import blocks
from surogate_command_plan.cluster import own_words

from surogate_core.app.arguments import leading_task, parse
from surogate_core.app.commands import CORE_TASKS, first_words, installed_tasks
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_many
from surogate_core.plugins import Registry, load_plugins

OWN_TESTS = {"hydra.md", "writing-a-plugin.md"}
"""Pages whose commands are run by another test: tests/cli/test_hydra.py and tests/docs/test_tutorials.py."""
VALUES = {"plan": ("--gpu", "--fit"), "numerics": ("--recipes", "--run", "--output"), "tokenize": ()}
"""Options with a value, beside those of every command that takes a configuration."""
NOT_RUNS = ("generate", "chat", "eval", "env", "serve", "merge", "export", "report", "plugins", "doctor")
"""Commands that take no configuration of a run."""
OTHERS = {"pip", "uv", "hf", "sha256sum", "try/bin/pip", "/opt/surogate/bin/pip", "docker", "HF_HUB_OFFLINE=1"}
"""Programs of others that a page may show without the mark `not run`."""

TASKS = (*CORE_TASKS, *installed_tasks())
COMMANDS = first_words()
ALL = [c for page in PAGES if page.name not in OWN_TESTS for c in commands(page)]
OURS = [c for c in ALL if c.words[0] == "surogate"]
RUNNING = [page for page in GUIDES if any(not c.mark and c.words[0] == "surogate" for c in commands(page))]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = tmp_path_factory.mktemp("reader")
    example_commands.furnish(here)
    return here


def put_files(page: Path, here: Path) -> None:
    """The page's blocks with the mark ``file: NAME`` and its YAML blocks that begin with ``# NAME.yaml`` as files; a
    run.yaml for a page that has none.
    """
    (here / "run.yaml").write_text("model: Qwen/Qwen3-0.6B\ndatasets: my.jsonl\n", encoding="utf-8")
    for block in blocks(page):
        if re.fullmatch(r"file: [\w.-]+", block.mark):
            (here / block.mark.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        name = re.match(r"# ([\w-]+\.yaml)\n", block.text)
        if block.language == "yaml" and name:
            (here / name[1]).write_text(block.text, encoding="utf-8")


@cache
def help_of(*words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main([*words, "--help"])
    return out.getvalue()


def overrides(command: str, words: list[str]) -> list[str]:
    """The words without the command's own options."""
    left = []
    while words:
        word = words.pop(0)
        if word in VALUES.get(command, ()) or (word == "--debug" and words and words[0].isdigit()):
            words.pop(0)
        elif word not in ("--debug", "--json"):
            left.append(word)
    return left


def compose(command: Command, registry: Registry) -> None:
    """Raises what the command line would report."""
    name = command.words[1] if len(command.words) > 1 and command.words[1] in (*COMMANDS, *TASKS) else ""
    words = list(command.words[2:] if name else command.words[1:])
    task = name if name in TASKS else None
    if name in ("plan", "tokenize"):
        task, words = leading_task(words)
    if name == "plan":
        words, _ = own_words(words)
    parsed = parse(overrides(name, words), command=f"surogate {name}")
    load_many(
        parsed.overrides,
        task=task,
        config_file=parsed.config_file,
        registry=registry,
        multirun=parsed.multirun,
    )


def test_every_configuration_of_a_command_composes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    registry, wrong, seen = load_plugins(), [], set()
    for command in OURS:
        if command.words[1] in NOT_RUNS:
            continue
        put_files(command.page, place)
        file = next((place / word for word in command.words if word.endswith(".yaml")), None)
        case = (*command.words[2:], file.read_text(encoding="utf-8") if file else "")
        if case in seen:
            continue
        seen.add(case)
        try:
            compose(command, registry)
        except Exception as error:
            wrong.append(f"{command}: {error}")
    assert len(seen) > 20
    assert not wrong, "\n".join(wrong)


def test_every_option_of_a_command_is_in_its_help() -> None:
    wrong = []
    for command in OURS:
        name = command.words[1]
        assert name in (*COMMANDS, *TASKS) or "=" in name or name == "-m", str(command)
        words = command.words[1:3] if name == "plugins" else (name,) if name in COMMANDS else ("sft",)
        text = help_of(*words)
        wrong += [f"{command}: {w}" for w in command.words if w.startswith("--") and w.partition("=")[0] not in text]
    assert not wrong


def test_other_commands_are_of_this_repository_or_marked() -> None:
    """`python benchmarks/FILE.py --option` and `make TARGET` exist; another program is known, or marked as not run."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in ALL:
        first, *rest = command.words
        if first == "make":
            assert re.search(rf"^{rest[0]}:", makefile, re.MULTILINE), str(command)
        elif first == "python" and rest[0].endswith(".py"):
            file = ROOT / rest[0]
            text = "".join(p.read_text(encoding="utf-8") for p in (file, *file.parent.glob("*.py")))
            # A word with spaces holds the options of another script.
            options = [word for word in rest if word.startswith("--") and " " not in word]
            assert all(f'"{o}"' in text or f"{o[2:].replace('-', '_')}:" in text for o in options), str(command)
        elif not first.startswith("surogate") and not first.endswith("python"):
            assert first in OTHERS or command.mark.startswith(("not run: ", "fragment: ")), str(command)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", RUNNING, ids=lambda p: p.stem)
def test_the_commands_of_a_guide_run(
    page: Path, place: Path, monkeypatch: pytest.MonkeyPatch, data_cache: Path
) -> None:
    """In their order, with small models and data under the names of the page, and few steps; its Python too."""
    monkeypatch.chdir(place)
    put_files(page, place)
    # Otherwise runs/latest may be another page's run of all weights, which cannot be merged.
    assert main(["sft", "run.yaml", *example_commands.SHORT, f"data_cache_dir={data_cache}"]) == 0
    for block in blocks(page):
        if block.language == "python" and block.mark.startswith("fragment: needs") and "hub" not in block.mark:
            exec(compile(block.text, str(block), "exec"), {"__name__": "docs"})
        elif block.language == "sh" and not block.mark:
            for command in commands_of(block):
                if command.words[0] == "surogate":
                    run(command, data_cache)


def run(command: Command, data_cache: Path) -> None:
    """The command with few steps added if it trains."""
    words = list(command.words[1:])
    trains = words[0] in (*CORE_TASKS, "demo")
    short = (w for w in example_commands.SHORT if w.partition("=")[0] not in " ".join(words))
    cached = words[0] not in ("merge", "export", "report", "plugins", "doctor", "env")
    extra = [*(short if trains else ()), *([f"data_cache_dir={data_cache}"] if cached else ())]
    assert main([*words, *extra]) == 0, str(command)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_table_of_what_fits_is_current() -> None:
    made = subprocess.run([sys.executable, "scripts/make_fit_table.py", "--check"], cwd=ROOT, check=False)
    assert made.returncode == 0, "run: python scripts/make_fit_table.py"
