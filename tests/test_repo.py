"""The repository has the shape that docs/architecture.md and CONTRIBUTING.md describe."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "surogate_core"
PLUGINS = sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))
SOURCES = sorted(
    f
    for top in (CORE, ROOT / "plugins", ROOT / "scripts", ROOT / "benchmarks")
    for f in top.rglob("*.py")
    if "tests" not in f.relative_to(ROOT).parts
)
KINDS_WITH_EQUAL_FILES = ("model", "optimizer")
"""Plugins of these kinds have modules of the same names; recipes, monitors and data sets differ in what they need."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(plugin: Path) -> Path:
    return plugin / "src" / plugin.name.replace("-", "_")


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


def imports(tree: ast.Module) -> Iterator[str]:
    """Dotted names that a file imports, the imported name itself included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


# -------------------------------------------------------------------------------- layout


def test_layout():
    directories = [
        "surogate_core",
        "plugins",
        "conf",
        "native/include",
        "native/kernels",
        "tests",
        "docs",
        "examples",
        "benchmarks",
    ]
    parts = ["bundles", "plugins", "config", "dsl", "kernels", "engine", "data", "train", "cli"]
    files = [
        "pyproject.toml",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "LICENSE",
        "Makefile",
        ".ci/run",
        "conf/config.yaml",
    ]
    modules = ["hookspecs.py", "builtin.py", "errors.py"]
    missing = [d for d in directories if not (ROOT / d).is_dir()]
    missing += [f for f in files if not (ROOT / f).is_file()]
    missing += [p for p in parts if not (CORE / p / "__init__.py").is_file()]
    missing += [m for m in modules if not (CORE / m).is_file()]
    assert not missing


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)
def test_plugin_is_a_distribution_of_its_own(plugin):
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = package_of(plugin)
    kind_and_name = plugin.name.removeprefix("surogate-")
    assert project["name"] == plugin.name
    assert project["entry-points"]["surogate"] == {kind_and_name: package.name}
    assert any(r.startswith("surogate>=") for r in project["dependencies"])
    assert (package / "__init__.py").is_file()
    assert len((plugin / "README.md").read_text(encoding="utf-8").split()) > 20, "the README says nothing"
    assert list((plugin / "tests").glob("test_*.py")), "no tests"


def test_readme_has_one_row_for_each_plugin():
    rows = re.findall(r"^\| \[`([\w-]+)`\]", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(plugin.name for plugin in PLUGINS)


def test_readme_says_nothing_twice():
    """Merges that keep both sides' lines leave such pairs: beginnings are compared, as ends are edited."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    beginnings = [line[:40] for line in lines if len(line) > 60 and not line.startswith("|")]
    assert not {b for b in beginnings if beginnings.count(b) > 1}


@pytest.mark.parametrize("kind", KINDS_WITH_EQUAL_FILES)
def test_plugins_of_one_kind_have_the_same_files(kind):
    shapes = defaultdict(list)
    for plugin in PLUGINS:
        if plugin.name.startswith(f"surogate-{kind}-"):
            package, own = package_of(plugin), plugin.name.removeprefix(f"surogate-{kind}-").replace("-", "_")
            names = {f.name.replace(own, "NAME") for f in package.glob("*.py")}
            shapes[frozenset(names)].append(plugin.name)
    assert len(shapes) <= 1, dict(shapes)


@pytest.mark.parametrize("conf", sorted({ROOT / "conf", *ROOT.glob("plugins/*/src/*/conf")}), ids=relative)
def test_config_directories_are_packages(conf):
    for directory in (conf, *(d for d in conf.rglob("*") if d.is_dir() and d.name != "__pycache__")):
        assert (directory / "__init__.py").is_file(), relative(directory)


def test_files_stay_readable():
    long = {relative(f): n for f in SOURCES if (n := len(f.read_text(encoding="utf-8").splitlines())) > 600}
    assert not long


# ------------------------------------------------------------------------------- arrows


@pytest.mark.parametrize("file", [f for f in SOURCES if CORE in f.parents], ids=relative)
def test_core_imports_no_plugin(file):
    plugins = tuple(package_of(p).name for p in PLUGINS)
    assert not [name for name in imports(parsed(file)) if name.startswith(plugins)]


FLOORS = (
    {"masking"},
    {"errors", "events"},
    {"files", "conf_paths", "batch", "bundles", "hookspecs"},
    {"logs", "caches"},
    {"kernels"},
    {"formats"},
    {"dsl"},
    {"engine"},
    {"builtin"},
    {"plugins"},
    {"data"},
    {"config"},
    {"hf", "report"},
    {"train"},
    {"run"},
    {"testing"},
    {"cli"},
    {"__main__"},
)
"""The folders and top files of the core from the ground up. A file imports its own folder and lower floors only."""


def run_time_imports(node: ast.AST) -> Iterator[str]:
    """Dotted names that a file imports while it runs: anywhere but under `if TYPE_CHECKING`."""
    if isinstance(node, ast.If) and dotted(node.test) == "TYPE_CHECKING":
        for inner in node.orelse:
            yield from run_time_imports(inner)
        return
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from imports(ast.Module(body=[node], type_ignores=[]))
    for inner in ast.iter_child_nodes(node):
        yield from run_time_imports(inner)


def core_files() -> dict[str, Path]:
    """Module of the core → its file."""
    files = sorted(CORE.rglob("*.py"))
    return {".".join(f.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): f for f in files}


def imported_modules() -> dict[str, set[str]]:
    """Module of the core → the modules of the core that it imports at run time."""
    modules = core_files()
    found: dict[str, set[str]] = {}
    for module, file in modules.items():
        found[module] = set()
        for name in run_time_imports(parsed(file)):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            if name:
                found[module].add(name)
    return found


def test_arrows_run_down():
    floors = {part: number for number, parts in enumerate(FLOORS) for part in parts}
    wrong = []
    for module, names in imported_modules().items():
        part = module.partition(".")[2].partition(".")[0]
        for name in names:
            other = name.partition(".")[2].partition(".")[0]
            if part and other and part != other and floors[part] <= floors[other]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_no_files_import_each_other_in_a_circle():
    graph = TopologicalSorter({m: names - {m} for m, names in imported_modules().items()})
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda p: p.name)
def test_plugin_uses_nothing_private_and_no_other_plugin(plugin):
    own, others = package_of(plugin).name, {package_of(p).name for p in PLUGINS}
    for file in sorted(package_of(plugin).rglob("*.py")):
        tree = parsed(file)
        core = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surogate_core"):
                core |= {alias.asname or alias.name for alias in node.names}
        for name in imports(tree):
            top, *rest = name.split(".")
            assert top == own or top not in others, f"{relative(file)} imports {name}"
            if top == "surogate_core":
                private = [part for part in rest if part.startswith("_") and not part.startswith("__")]
                assert not private, f"{relative(file)} imports {name}"
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert dotted(node.value).partition(".")[0] not in core, f"{relative(file)}:{node.lineno}: {node.attr}"


# ------------------------------------------------------------------- what is never written


@pytest.mark.parametrize("file", SOURCES, ids=relative)
def test_no_silent_import_errors_and_no_code_from_data(file):
    for node in ast.walk(parsed(file)):
        place = f"{relative(file)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = {dotted(t) for t in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])}
            idle = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            assert not (idle and caught & {"ImportError", "ModuleNotFoundError"}), f"{place}: an ignored import error"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {name.partition(".")[0] for name in imports(ast.Module(body=[node], type_ignores=[]))}
            assert not modules & {"pickle", "cloudpickle", "dill", "marshal"}, f"{place}: a pickle"
        if isinstance(node, ast.Call):
            assert dotted(node.func) != "torch.load", f"{place}: torch.load reads pickles"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                assert not (keyword.arg == "weights_only" and value is False), f"{place}: weights_only=False"
                assert not (keyword.arg == "trust_remote_code" and value is not False), f"{place}: trust_remote_code"


# ---------------------------------------------------------------------------- cheap imports


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


LIGHT = ["surogate_core", "surogate_core.hookspecs", "surogate_core.bundles", "surogate_core.builtin"]
LIGHT += ["surogate_core.plugins", "surogate_core.cli.main", *(package_of(p).name for p in PLUGINS)]


def test_nothing_heavy_is_imported_early():
    code = "import importlib, sys\n"
    for module in LIGHT:
        code += f"importlib.import_module({module!r})\n"
        code += "heavy = {'torch', 'hydra', 'transformers', 'datasets'} & sys.modules.keys()\n"
        code += f"assert not heavy, ({module!r}, heavy)\n"
    run_python(code)


def test_a_configuration_is_checked_without_torch():
    """A mistake in it is answered at once, whatever is installed."""
    code = "import sys\nfrom surogate_core.config.resolve import load_run_config\n"
    code += "from surogate_core.plugins import import_policy, load_plugins\n"
    for choice in ("recipe=nvfp4", "optimizer=normuon", "model=llama"):
        code += f"load_run_config([{choice!r}, 'lora=false'], registry=load_plugins(import_policy()))\n"
    run_python(code + "assert not {'torch', 'transformers', 'datasets'} & sys.modules.keys()\n")


def test_every_package_of_the_core_is_importable():
    packages = sorted(relative(f.parent).replace("/", ".") for f in CORE.rglob("__init__.py"))
    without_init = [
        relative(d) for d in CORE.iterdir() if d.is_dir() and any(d.glob("*.py")) and relative(d).count("/") == 1
    ]
    assert {d.replace("/", ".") for d in without_init} <= set(packages), "a package without __init__.py"
    run_python("import importlib\n" + "".join(f"importlib.import_module({p!r})\n" for p in packages))


@pytest.mark.parametrize(
    "script", ["make_catalogue.py", "make_config_docs.py", "make_hook_tables.py", "make_plugins_page.py"]
)
def test_generated_files_are_current(script):
    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
