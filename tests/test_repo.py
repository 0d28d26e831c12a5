"""The repository has the shape that docs/architecture.md and CONTRIBUTING.md describe."""

from __future__ import annotations

import ast
import gc
import re
import runpy
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from surogate_core.plugins.static import view_files

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "surogate_core"
KIT = ROOT / "plugins" / "surogate-testing"
"""A library for tests, and no plugin."""
LIBRARIES = (ROOT / "plugins" / "surogate-commands", ROOT / "plugins" / "surogate-reinforcement")
"""What several plugins share and the core does not need: no entry point, no offer, below every plugin."""
PLUGINS = sorted({p.parent for p in ROOT.glob("plugins/*/pyproject.toml")} - {KIT, *LIBRARIES})
SOURCES = sorted(
    f
    for top in (CORE, ROOT / "surogate", ROOT / "core", ROOT / "plugins", ROOT / "scripts", ROOT / "benchmarks")
    for f in top.rglob("*.py")
    if "tests" not in f.relative_to(ROOT).parts
)
TESTS = sorted(f for top in ("tests", "plugins/*/tests") for f in ROOT.glob(f"{top}/**/*.py"))
CORE_BOUND = r"surogate-core(\[\w+\])?[>=]="
TERMS = {"Tile"}
"""Names of several classes: Triton kernels that cut their work differently each have a `Tile`, the field's word."""
KINDS_WITH_EQUAL_FILES = ("model", "optimizer")
"""Plugins of these kinds have modules of the same names; recipes, monitors and data sets differ in what they need."""


@pytest.fixture(autouse=True, scope="module")
def no_trees_left() -> Iterator[None]:
    """The parsed files are hundreds of MiB, which every pass of the garbage collector would walk through."""
    gc.disable()
    yield
    parsed.cache_clear()
    gc.enable()


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def package_of(plugin: Path) -> Path:
    return plugin / "src" / plugin.name.replace("-", "_")


@cache
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


def refuse(offenders: Iterable[str]) -> None:
    """Fail with all of them, one a line, which an `assert` would abridge."""
    if found := list(offenders):
        pytest.fail("\n".join(found), pytrace=False)


# -------------------------------------------------------------------------------- layout


def test_layout():
    directories = [
        "surogate_core",
        "plugins",
        "conf",
        "native/src/surogate_native/include",
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


def test_plugins_are_distributions_of_their_own():
    wrong = []
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        package = package_of(plugin)
        points = {plugin.name.removeprefix("surogate-"): package.name}
        checks = {
            "the name is the directory's": project["name"] == plugin.name,
            f"the entry points are {points}": project["entry-points"]["surogate"] == points,
            "it depends on surogate-core>=": any(re.match(CORE_BOUND, r) for r in project["dependencies"]),
            f"the package is {relative(package)}": (package / "__init__.py").is_file(),
            "the README says something": len((plugin / "README.md").read_text(encoding="utf-8").split()) > 20,
            "it has tests": bool(list((plugin / "tests").glob("test_*.py"))),
        }
        wrong += [f"{plugin.name}: not so: {what}" for what, holds in checks.items() if not holds]
    refuse(wrong)


def test_the_page_about_plugins_has_one_row_for_each():
    rows = re.findall(r"^\| \[`([\w-]+)`\]", (ROOT / "docs/plugins.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(rows) == sorted(plugin.name for plugin in PLUGINS)


def test_plugins_of_one_kind_have_the_same_files():
    shapes = defaultdict(lambda: defaultdict(list))
    for plugin in PLUGINS:
        for kind in KINDS_WITH_EQUAL_FILES:
            if plugin.name.startswith(f"surogate-{kind}-"):
                package, own = package_of(plugin), plugin.name.removeprefix(f"surogate-{kind}-").replace("-", "_")
                names = {f.name.replace(own, "NAME") for f in package.glob("*.py")}
                shapes[kind][frozenset(names)].append(plugin.name)
    assert set(shapes) == set(KINDS_WITH_EQUAL_FILES)
    assert not {kind: found for kind, found in shapes.items() if len(found) > 1}


def test_config_directories_are_packages():
    found = {ROOT / "conf", *ROOT.glob("plugins/*/src/*/conf")}
    found |= {d for conf in found for d in conf.rglob("*") if d.is_dir() and d.name != "__pycache__"}
    refuse(relative(d) for d in sorted(found) if not (d / "__init__.py").is_file())


def test_files_stay_readable():
    long = {relative(f): n for f in SOURCES if (n := len(f.read_text(encoding="utf-8").splitlines())) > 600}
    assert not long


def is_triton_program(function: ast.FunctionDef) -> bool:
    return any(dotted(d.func if isinstance(d, ast.Call) else d) == "triton.jit" for d in function.decorator_list)


def mirrors_a_schema(function: ast.FunctionDef) -> bool:
    """Whether it is a custom op's implementation or its fake: torch reads the op's schema off the flat parameters."""
    names = {dotted(d.func if isinstance(d, ast.Call) else d) for d in function.decorator_list}
    return any(name.endswith(("library.custom_op", ".register_fake")) for name in names)


def parameters(function: ast.FunctionDef) -> int:
    """`self` and `cls` aside."""
    found = function.args
    named = [a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    return len(named) - (named[:1] in (["self"], ["cls"]))


def length(function: ast.FunctionDef) -> int:
    """Lines without the decorators; a launch ``program[grid](…)`` is one, whatever the number of its arguments."""
    launches = [n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    inside = {line for call in launches for line in range(call.lineno + 1, call.end_lineno + 1)}
    return function.end_lineno - function.lineno + 1 - len(inside)


def too_large(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_triton_program(node):
            if node.end_lineno - node.lineno >= 60 and (lines := length(node)) > 60:
                yield f"{node.lineno}: {node.name} has {lines} lines"
            if (count := parameters(node)) > 12 and not mirrors_a_schema(node):
                yield f"{node.lineno}: {node.name} has {count} parameters"


def test_functions_stay_readable():
    """At most 60 lines and 12 parameters; only Triton programs, and the schemas of custom ops, have more."""
    refuse(f"{relative(file)}:{wrong}" for file in (*SOURCES, *TESTS) for wrong in too_large(parsed(file)))


def test_what_counts_as_a_large_function():
    many = ", ".join(f"p{i}" for i in range(13))
    long = "    pass\n" * 60
    for text, found in {
        f"def f({many}): pass": ["1: f has 13 parameters"],
        f"class C:\n  def f(self, {many[4:]}): pass": [],
        f"def f(self, *, {many}): pass": ["1: f has 13 parameters"],
        f"@triton.jit(do_not_specialize=[])\ndef f({many}):\n{long}": [],
        f"@torch.library.custom_op('a::b', mutates_args=())\ndef f({many}):\n{long}": ["2: f has 61 lines"],
        f"@op.register_fake\ndef _({many}): pass": [],
        f"def f():\n{long}": ["1: f has 61 lines"],
        f"def f():\n{long[9:]}": [],
        "def f():\n  g[1,](\n" + "    x,\n" * 70 + "  )": [],
    }.items():
        assert list(too_large(ast.parse(text))) == found


# ------------------------------------------------------------------------------- arrows


def test_core_imports_no_plugin():
    plugins = tuple(package_of(p).name for p in PLUGINS)
    plugins += tuple(package_of(library).name for library in LIBRARIES)
    kit = package_of(KIT).name
    check = CORE / "cli" / "plugin_check.py"
    refuse(
        f"{relative(file)} imports {name}"
        for file in core_files().values()
        for name in imports(parsed(file))
        if name.startswith(plugins) or (name.startswith(kit) and file != check)
    )


OTHER_MEANINGS = {
    "auto": "a value of several keys",
    "bf16": "a dtype",
    "conversation": "a field of rows",
    "cuda": "a type of device",
    "disk": "a place of tensors",
    "fp8": "a quant_method of Hugging Face",
    "host": "a place of tensors",
    "instruction": "a field of rows",
    "mistral": "a chat template, and a form of tool calls",
    "mxfp4": "a quant_method of Hugging Face",
    "qwen3": "a chat template",
    "reward": "the value of a completion",
    "reverse": "a way to write on a terminal",
    "text": "a type of values",
    "triton": "a package",
    "wandb": "a package",
}
"""Words of the core that are names of plugins' bundles too."""


def test_core_knows_no_plugin_by_name():
    """No text of the core is the name of a bundle or an option, and none has the name of a distribution in it.

    Defaults of choice are in conf/config.yaml; what the core asks of a bundle is a field of the bundle.
    """
    distributions = {name for plugin in PLUGINS for name in (plugin.name, package_of(plugin).name)}
    views = [view_files(package_of(plugin) / "__init__.py", package_of(plugin)) for plugin in PLUGINS]
    # Names of commands are words of which messages are made; those of advantages are words of statistics (mean, group).
    offered = [pair for view in views for pair in (*view.bundles, *view.options)]
    names = {name for kind, name in offered if kind not in ("command", "advantage")}
    assert names > set(OTHER_MEANINGS), "a name that no plugin has any more"
    offenders = []
    for file in (f for f in SOURCES if CORE in f.parents):
        tree = parsed(file)
        texts = [n for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
        documentation = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
        for node in texts:
            by_name = node.value in names - OTHER_MEANINGS.keys() or any(d in node.value for d in distributions)
            if by_name and id(node) not in documentation:
                offenders.append(f"{relative(file)}:{node.lineno}: {node.value[:60]!r}")
    assert not offenders


FLOORS = (
    {"host", "imports", "lazy", "masking", "numbers", "outcome", "parents", "set_up_times"},
    {"errors", "events", "drawing", "plugin", "service"},
    {"conf_paths", "batch", "bundles", "hookspecs"},
    {"tools"},
    {"files"},
    {"logs", "caches"},
    {"kernels"},
    {"formats"},
    {"dsl"},
    {"mesh"},
    {"engine"},
    {"generate"},
    {"plugins"},
    {"data"},
    {"config"},
    {"hf"},
    {"train"},
    {"launch"},
    {"builtin"},
    {"setup"},
    {"inference"},
    {"run"},
    {"measure"},
    {"app"},
    {"api", "cli"},
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
    refuse(wrong)


def test_no_files_import_each_other_in_a_circle():
    graph = TopologicalSorter({m: names - {m} for m, names in imported_modules().items()})
    try:
        graph.prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def private_uses(plugin: Path) -> Iterator[str]:
    """What a plugin's package takes from other plugins and from libraries that it does not require; private names."""
    own = package_of(plugin).name
    required = {package_of(library).name for library in LIBRARIES if requires(plugin, library)}
    others = {package_of(p).name for p in (*PLUGINS, *LIBRARIES, KIT)} - required
    for file in sorted(package_of(plugin).rglob("*.py")):
        tree = parsed(file)
        core = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("surogate_core")
            for alias in node.names
        }
        for name in imports(tree):
            top, *rest = name.split(".")
            private = any(is_private(part) for part in rest)
            if (top != own and top in others) or (top == "surogate_core" and private):
                yield f"{relative(file)} imports {name}"
        for node in ast.walk(tree):
            private = isinstance(node, ast.Attribute) and is_private(node.attr)
            if private and dotted(node.value).partition(".")[0] in core:
                yield f"{relative(file)}:{node.lineno}: {node.attr}"


def requires(plugin: Path, library: Path) -> bool:
    project = tomllib.loads((plugin / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return any(re.match(r"[\w-]+", r)[0] == library.name for r in project["dependencies"])


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def test_plugins_use_nothing_private_and_no_other_plugin():
    refuse(wrong for plugin in (*PLUGINS, *LIBRARIES, KIT) for wrong in private_uses(plugin))


def test_a_library_is_no_plugin_and_has_several_users():
    wrong = []
    for library in LIBRARIES:
        project = tomllib.loads((library / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        users = [plugin for plugin in (*PLUGINS, KIT) if requires(plugin, library)]
        checks = {
            "the name is the directory's": project["name"] == library.name,
            "it has no entry point": "entry-points" not in project,
            "it depends on surogate-core>=": any(re.match(CORE_BOUND, r) for r in project["dependencies"]),
            "several plugins require it": len(users) > 1,
            "it has tests": bool(list((library / "tests").glob("test_*.py"))),
        }
        wrong += [f"{library.name}: not so: {what}" for what, holds in checks.items() if not holds]
    refuse(wrong)


def room_of(file: Path) -> str:
    """The core, a plugin, or all model families together, of which a run has one."""
    top, name, *_ = file.relative_to(ROOT).parts
    return top if top != "plugins" else "families" if name.startswith("surogate-model-") else name


def test_a_class_name_means_one_class():
    places = defaultdict(list)
    for file in SOURCES:
        if file.is_relative_to(CORE) or "src" in file.parts:
            for node in parsed(file).body:
                if isinstance(node, ast.ClassDef) and not is_private(node.name):
                    places[node.name].append(file)
    several = {name: files for name, files in places.items() if len(files) > 1 and name not in TERMS}
    refuse(
        f"class {name} is in {', '.join(map(relative, files))}. Fix: a name that says which one"
        for name, files in several.items()
        if {room_of(file) for file in files} != {"families"}
    )


def test_nothing_leads_out_of_a_plugins_directory():
    links = [
        relative(path) for plugin in (*PLUGINS, *LIBRARIES, KIT) for path in plugin.rglob("*") if path.is_symlink()
    ]
    upwards = [
        plugin.name
        for plugin in (*PLUGINS, *LIBRARIES, KIT)
        if ".." in (plugin / "pyproject.toml").read_text(encoding="utf-8")
    ]
    assert not links + upwards


def test_a_plugins_tests_use_the_core_the_kit_and_the_plugin_alone():
    """So that they run wherever the plugin's directory is; what joins two plugins is tested in tests/."""
    support = {f.stem for f in (ROOT / "tests" / "support").glob("*.py")}
    wrong = []
    for plugin in (*PLUGINS, *LIBRARIES, KIT):
        others = sorted({package_of(p).name for p in PLUGINS} - {package_of(plugin).name}, key=len, reverse=True)
        for file in sorted((plugin / "tests").rglob("*.py")):
            text = file.read_text(encoding="utf-8").replace(package_of(plugin).name, "own")
            found = [name for name in others if re.search(rf"\b{name}\b", text)]
            found += [name for name in imports(parsed(file)) if name.partition(".")[0] in {"tests", *support}]
            wrong += [f"{relative(file)} uses {name}" for name in found]
    assert not wrong


# ------------------------------------------------------------------- what is never written


def forbidden(file: Path) -> Iterator[str]:
    """Places where import errors are passed over, or where code comes from data."""
    for node in ast.walk(parsed(file)):
        place = f"{relative(file)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            caught = {dotted(t) for t in (node.type.elts if isinstance(node.type, ast.Tuple) else [node.type])}
            idle = all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)
            if idle and caught & {"ImportError", "ModuleNotFoundError"}:
                yield f"{place}: an ignored import error"
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = {name.partition(".")[0] for name in imports(ast.Module(body=[node], type_ignores=[]))}
            if modules & {"pickle", "cloudpickle", "dill", "marshal"}:
                yield f"{place}: a pickle"
        if isinstance(node, ast.Call):
            if dotted(node.func) == "torch.load":
                yield f"{place}: torch.load reads pickles"
            for keyword in node.keywords:
                value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
                if keyword.arg == "weights_only" and value is False:
                    yield f"{place}: weights_only=False"
                if keyword.arg == "trust_remote_code" and value is not False:
                    yield f"{place}: trust_remote_code"


def test_no_silent_import_errors_and_no_code_from_data():
    refuse(wrong for file in SOURCES for wrong in forbidden(file))


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


MAKERS = ["make_catalogue", "make_config_docs", "make_hook_tables", "make_plugins_page", "make_reference", "make_stub"]
MAKERS += ["make_dockerfiles", "make_surface"]


@pytest.mark.parametrize("script", [f"{name}.py" for name in MAKERS])
def test_generated_files_are_current(script, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "scripts" / script), run_name="__main__")
    assert end.value.code in (None, 0)


def test_the_front_door_requires_every_plugin_by_default_or_by_an_extra():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    sources, project = project["tool"]["uv"]["sources"], project["project"]
    required = {extra: {re.match(r"[\w-]+", r)[0] for r in found} for extra, found in requirements(project).items()}
    trackers = {p.name for p in PLUGINS if p.name.endswith(("-mlflow", "-tensorboard", "-trackio", "-wandb"))}
    evals = {"surogate-eval-lm-eval"}
    environments = {p.name for p in PLUGINS if p.name.startswith("surogate-environment-")} - {
        "surogate-environment-trl"
    }
    ray = {"surogate-launcher-ray"}
    extras = trackers | evals | environments | ray
    assert required["trackers"] == trackers
    assert required["evals"] == evals
    assert required["environments"] == environments
    assert required["ray"] == ray
    assert required[""] == {"surogate-core", "surogate-native", *(p.name for p in (*PLUGINS, *LIBRARIES, KIT))} - extras
    assert sources.keys() == required[""] | extras
    assert (ROOT / "core" / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def requirements(project):
    """Name of the extra, or empty → its requirements."""
    return {"": project["dependencies"], **project["optional-dependencies"]}
