"""The documentation says what is there, and what it shows runs."""

from __future__ import annotations

import ast
import dataclasses
import re
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from pages import Block, Shell, blocks

from surogate_core import API_VERSION, hookspecs
from surogate_core.bundles import KINDS
from surogate_core.config.docs import field_docs, key_docs
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.plugins import import_policy, load_plugins

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "benchmarks/NOTEBOOK.md",
    *sorted(ROOT.glob("benchmarks/evidence/*.md")),
    *DOCS,
    ROOT / "native/README.md",
    *sorted(ROOT.glob("plugins/*/*.md")),
    *sorted(ROOT.glob("plugins/*/docs/*.md")),
]
RUNNABLE = ("docs/hooks.md", "docs/writing-a-plugin.md")
"""Pages whose blocks are run by a test of their own."""

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ------------------------------------------------------------------------- what must be there


def hook_names() -> list[str]:
    return [name for name in vars(hookspecs) if name.startswith("surogate_")]


@pytest.mark.parametrize("hook", hook_names())
def test_hook_has_a_section_with_an_example(hook):
    text = (ROOT / "docs/hooks.md").read_text(encoding="utf-8")
    _, found, section = text.partition(f"\n## {hook}\n")
    assert found, f"docs/hooks.md has no section {hook}"
    section = section.partition("\n## ")[0]
    assert f"def {hook}(" in section
    assert "When:" in section
    assert "Returns:" in section


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_of_a_bundle_is_explained(kind):
    hook, bundle = KINDS[kind]
    page = (ROOT / "docs/hook-fields.md").read_text(encoding="utf-8")
    section = page.partition(f"\n## {hook}\n")[2].partition("\n## ")[0]
    missing = [f.name for f in dataclasses.fields(bundle) if f"\n| `{f.name}` |" not in section]
    assert not missing, f"docs/hook-fields.md, {hook}: no row for {missing}"


def test_every_config_key_is_documented():
    text = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    missing = [doc.key for doc in key_docs() if f"| `{doc.key}` |" not in text]
    assert not missing, f"docs/config.md lacks {missing}; run: make docs"
    assert field_docs(RunConfig).keys() == {f.name for f in dataclasses.fields(RunConfig)}, "a field has no docstring"


def test_every_page_is_in_the_index():
    links = set(_LINK.findall((ROOT / "docs/index.md").read_text(encoding="utf-8")))
    assert {page.relative_to(ROOT / "docs").as_posix() for page in DOCS} - {"index.md"} <= links


GENERATED = {"cli.md", "config.md", "hook-fields.md", "metrics.md", "plugins.md", "public-surface.md"}
"""Pages of docs/ that `make docs` writes: to look up, not to read."""
AUTHORS = {"architecture.md", "hooks.md", "kernels.md", "model-family.md", "writing-a-plugin.md"}
"""Pages for those who write plugins or change the core."""
_MADE = re.compile(r"<!-- (?:keys: |same: |made by )[^\n]*\n(?:[^\n]+\n)*")


def words_for_users() -> dict[str, int]:
    """Page → words of docs/ that a user reads; tables that scripts write do not count."""
    pages = [page for page in DOCS if page.name not in GENERATED | AUTHORS]
    return {relative(page): len(_MADE.sub("", page.read_text(encoding="utf-8")).split()) for page in pages}


def test_users_have_few_words_to_read():
    words = words_for_users()
    assert sum(words.values()) <= 45_000, sorted(words.items(), key=lambda item: -item[1])[:10]


def prose(page: Path) -> str:
    """The page without its blocks of code."""
    return re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)


def leads_somewhere(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if "://" in link or not anchor:
        return "://" in link or target.exists()
    headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8") if target.is_file() else "", re.MULTILINE)
    return anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def test_links_lead_somewhere():
    links = [(page, link) for page in PAGES for link in _LINK.findall(prose(page))]
    assert len(links) > 100
    assert not [f"{relative(page)} links to {link}" for page, link in links if not leads_somewhere(page, link)]


def test_paths_that_are_named_exist():
    """Text in backticks that looks like a path of the repository is one."""
    wrong = []
    tops = ("surogate_core/", "conf/", "plugins/", "tests/", "docs/", "examples/", "scripts/", "benchmarks/", "native/")
    for page in PAGES:
        for name in re.findall(r"`([\w./-]+)`", prose(page)):
            if name.startswith(tops) and page.parent.name != name.partition("/")[0]:
                inside_plugin = page.parent.parent.name == "plugins" and (page.parent / name).exists()
                if not inside_plugin and not (ROOT / name).exists():
                    wrong.append(f"{relative(page)} names {name}")
    assert not wrong


def test_a_reader_of_the_code_finds_what_it_asks():
    """README leads to the page, whose tables have a row for each question: two steps to the file."""
    assert "(docs/architecture.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [line.partition(" | ")[0].lower() for line in page.splitlines() if line.startswith("| ")]
    asked = [
        "loss divided",
        "checkpoint atomic",
        "kv cache allocated",
        "gradient reduced",
        "advantage",
        "recompute: auto",
    ]
    asked += ["an optimizer", "a chat template", "loss of `sft`", "window", "experts", "a kernel for an op"]
    asked += ["to the first kernel", "learning rate of a step", "rank count as failed"]
    assert [words for words in asked if not any(words in row for row in rows)] == []


def test_architecture_names_functions_that_exist():
    """``FILE``: ``NAME``, ``NAME`` in the table "Where is what": each NAME is defined in FILE."""
    table = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("\n## Where is what\n")[2]
    table = table.partition("\n## ")[0]
    named = re.findall(r"`([\w/-]+\.py)`: ((?:`\w+`(?:, )?)+)", table)
    assert len(named) > 20
    for file, names in named:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
        missing = set(re.findall(r"\w+", names)) - defined
        assert not missing, f"docs/architecture.md: {file} does not define {missing}"


# ------------------------------------------------------------------------- what must run


def python_blocks() -> list[Block]:
    return [b for page in PAGES if relative(page) not in RUNNABLE for b in blocks(page) if b.language == "python"]


@pytest.mark.parametrize("block", python_blocks(), ids=str)
def test_python_block_runs(block, tmp_path, monkeypatch):
    kind, _, argument = block.mark.partition(": ")
    if kind == "from":
        source = (ROOT / argument).read_text(encoding="utf-8")
        assert block.text in source, f"{block} is not in {argument} word for word"
    elif kind in ("fragment", "file"):  # files are run by the test of what they belong to
        ast.parse(textwrap.dedent(block.text))
    else:
        (tmp_path / "output").mkdir()
        (tmp_path / "output/metrics.jsonl").write_text('{"event": "step_end", "step": 1, "loss": 1.5}\n')
        monkeypatch.chdir(tmp_path)
        exec(compile(block.text, str(block), "exec"), {"__name__": "docs"})


def test_shown_output_of_python_is_real(capsys):
    pairs = [pair for page in PAGES if relative(page) not in RUNNABLE for pair in pairwise(blocks(page))]
    for block, shown in pairs:
        if block.language == "python" and not block.mark and shown.mark == "output":
            exec(compile(block.text, str(block), "exec"), {"__name__": "docs"})
            assert capsys.readouterr().out == shown.text, f"{shown} is not what {block} prints"


def yaml_blocks() -> list[Block]:
    return [b for page in PAGES for b in blocks(page) if b.language == "yaml"]


def test_yaml_blocks_are_yaml():
    for block in yaml_blocks():
        assert yaml.safe_load(block.text) is not None, block


@pytest.mark.parametrize("block", [b for b in yaml_blocks() if b.page in DOCS and not b.mark], ids=str)
def test_yaml_block_composes(block, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(block.text, encoding="utf-8")
    load_run_config([], config_file=file, registry=load_plugins(import_policy()))


# ------------------------------------------------------------------------- pages that are programs


@pytest.fixture
def shell(tmp_path):
    return Shell(tmp_path)


@pytest.mark.slow
def test_hook_examples_train_together(shell):
    """docs/hooks.md: every example as a module of one package, and a run that selects all of them."""
    package = shell.site / "hook_examples"
    package.mkdir()
    modules = []
    for block in blocks(ROOT / "docs/hooks.md"):
        if block.language == "python":
            hook = re.findall(r"^def (surogate_\w+)\(", block.text, re.MULTILINE)
            assert len(hook) == 1, f"{block} must implement one hook"
            modules.append(hook[0].removeprefix("surogate_"))
            # The page says once that a plugin states its API; its examples leave it out.
            text = f'{block.text}\nSUROGATE_API = ">={API_VERSION},<{API_VERSION + 1}"\n'
            (package / f"{modules[-1]}.py").write_text(text, encoding="utf-8")
    assert {f"surogate_{m}" for m in modules} == set(hook_names())
    (package / "__init__.py").touch()
    (package / "conf/recipe").mkdir(parents=True)
    (package / "conf/recipe/rounded.yaml").write_text("name: rounded\nactivations: true\n")
    (package / "conf/task").mkdir()
    (package / "conf/task/reseeded.yaml").write_text("# @package _global_\ntask: reseeded\n")
    for directory in ("conf", "conf/recipe", "conf/task"):
        (package / directory / "__init__.py").touch()
    metadata = shell.site / "hook_examples-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hook-examples\nVersion: 1\n")
    points = "".join(f"example-{m} = hook_examples.{m}\n" for m in modules)
    (metadata / "entry_points.txt").write_text(f"[surogate]\n{points}")
    rows = "".join(f'{{"prompt": "{n} and two is", "answer": "{n + 2}"}}\n{{"prompt": 1}}\n' for n in range(40))
    (shell.work / "pairs.jsonl").write_text(rows, encoding="utf-8")
    printed = shell.run(
        "surogate reseeded model.name=pairs model.preset=tiny objective=z_loss z_loss_factor=1e-3 "
        "recipe=rounded recipe.activations=false optimizer=sign_sgd offload=simple_host launcher=polite "
        "lr_scheduler_type=inverse_root inverse_root_timescale=2 fabric=through_store "
        "monitor=[console,jsonl,target] monitor.target.loss=100 "
        "'datasets=[{path: pairs.jsonl, type: pair}]' max_steps=3 warmup_steps=0 sequence_len=32 eval_steps=0 "
        "lora=true qlora_format=int8_rows tokenizer=pkg://surogate_dataset_chat/embedded/tokenizer output_dir=out "
        "reseeded_order=2"
    )
    assert "eval loss" in printed
    assert "is below 100" in printed
    assert "kept in int8_rows" in printed
    assert '"figures": {"entropy": ' in (shell.work / "out/metrics.jsonl").read_text(encoding="utf-8")
    log = (shell.work / "out/surogate.log").read_text(encoding="utf-8")
    assert '"swiglu float32": "plain/plain"' in log
    assert (shell.work / "out/best.txt").read_text(encoding="utf-8") == "no evaluation\n"
    assert "surogate tail [RUN]" in shell.run("surogate --help")
    assert shell.run("surogate tail out").splitlines() == log.splitlines()[-10:]
