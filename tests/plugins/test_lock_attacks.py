"""Attacks on a locked set: each is refused in one message, and not a line of it runs.

Code that an attack brings leaves a file behind when it runs, the canary.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from wheels import make_wheel, unpack

from surogate_core.cli.main import main
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import PluginError, SurogateError, UserError
from surogate_core.plugins import import_policy, load_plugins
from surogate_core.plugins.discovery import installed_plugins
from surogate_core.plugins.lock import installed_lock, read_lock, write_lock
from surogate_core.plugins.static import static_view

HEAD = (
    "from surogate_core import bundles, hookimpl\nSUROGATE_API = '>=2,<3'\nimport two_helper.impl\nimport two_single\n"
)
HOOK = "@hookimpl\ndef surogate_recipe():\n    return bundles.RecipeSpec(name='two', build=lambda *a: None)\n"


def canary(place: Path) -> str:
    return f"from pathlib import Path\nPath({str(place / 'canary')!r}).touch()\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``site`` with a locked distribution of two packages, a module and a shared file; ``early`` is before it."""
    for name in ("site", "early"):
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path / name)
    files = {
        "two_main/__init__.py": HEAD + HOOK,
        "two_helper/__init__.py": "",
        "two_helper/impl.py": "",
        "two_single.py": "",
    }
    unpack(make_wheel(tmp_path / "wheels", "plugin-two", files, points={"recipe-two": "two_main"}), tmp_path / "site")
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "data.json").write_text("{}")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "two-tool").write_text("#!/somewhere/python\nprint('two')\n")
    with record(tmp_path).open("a") as file:
        file.write("../share/data.json,,\n../bin/two-tool,,\n")
    static_view.cache_clear()
    write_lock(installed_lock(installed_plugins()), tmp_path / "surogate.lock")
    yield tmp_path
    static_view.cache_clear()
    for name in [m for m in sys.modules if m.startswith("two_")]:
        del sys.modules[name]


def record(place: Path) -> Path:
    return next(place.glob("site/plugin_two-*.dist-info/RECORD"))


def load(place: Path, **fields: object) -> None:
    static_view.cache_clear()
    sys.path_importer_cache.clear()
    rules = PluginPolicy(policy="locked", lock=str(place / "surogate.lock"), allow_editable=True)
    load_plugins(import_policy(rules, {}))


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def link(name: str) -> Callable[[Path], None]:
    """Put an equal copy elsewhere, and a link to it in its place."""

    def attack(place: Path) -> None:
        (place / "elsewhere").mkdir()
        (place / "site" / name).rename(place / "elsewhere" / name)
        (place / "site" / name).symlink_to(place / "elsewhere" / name)

    return attack


def pipe(name: str) -> Callable[[Path], None]:
    def attack(place: Path) -> None:
        (place / "site" / name).unlink(missing_ok=True)
        os.mkfifo(place / "site" / name)

    return attack


def copy_in_front(place: Path) -> None:
    shutil.copytree(place / "site", place / "early", dirs_exist_ok=True)


ATTACKS: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "a package that hides a module of a further package": (
        lambda p: write(p / "site/two_helper/impl/__init__.py", canary(p)),
        r"two_helper/impl/__init__\.py was added",
    ),
    "a further package earlier on the path": (
        lambda p: write(p / "early/two_helper/__init__.py", canary(p)),
        "plugin-two is not imported from its installed files",
    ),
    "a module of the distribution earlier on the path": (
        lambda p: write(p / "early/two_single.py", canary(p)),
        "plugin-two is not imported from its installed files",
    ),
    "a package that hides a module": (
        lambda p: write(p / "site/two_single/__init__.py", canary(p)),
        r"two_single/__init__\.py was added",
    ),
    "an altered further package": (
        lambda p: write(p / "site/two_helper/impl.py", canary(p)),
        r"two_helper/impl\.py was altered",
    ),
    "an altered shared file": (
        lambda p: write(p / "share/data.json", "[]"),
        r"\.\./share/data\.json was altered",
    ),
    "an altered script": (
        lambda p: write(p / "bin/two-tool", "#!/somewhere/python\n" + canary(p)),
        r"\.\./bin/two-tool was altered",
    ),
    "a package that is a link to an equal copy": (link("two_helper"), "two_helper is a symbolic link"),
    "a module that is a link to an equal copy": (link("two_single.py"), r"two_single\.py is a symbolic link"),
    "an equal copy of all in front": (copy_in_front, "plugin-two is installed twice: .*early, .*site"),
    "a pipe among the files": (pipe("two_helper/more.py"), r"two_helper/more\.py was added"),
    "a pipe in place of a file": (pipe("two_helper/impl.py"), r"impl\.py was altered: not a regular file"),
    "a NUL byte in RECORD": (
        lambda p: record(p).write_text("two_main/__init__.py,,\nx\0y,,\n"),
        r"RECORD was added|RECORD is|two_helper/__init__\.py is gone",
    ),
    "no RECORD": (lambda p: record(p).unlink(), "RECORD is missing"),
    "an import line in a new .pth file": (
        lambda p: write(p / "site/evil.pth", "import os; " + canary(p).replace("\n", "; ")),
        r"start-up file evil\.pth, SHA-256 [0-9a-f]{64} is not locked",
    ),
    "a sitecustomize": (
        lambda p: write(p / "early/sitecustomize.py", canary(p)),
        "start-up module sitecustomize, SHA-256 .* is not locked",
    ),
}


def test_the_locked_set_loads(place: Path) -> None:
    (place / "bin" / "two-tool").write_text("#!/another/python\nprint('two')\n")
    load(place)
    assert "two_main" in sys.modules


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_refused_and_runs_nothing(place: Path, name: str) -> None:
    attack, message = ATTACKS[name]
    attack(place)
    with pytest.raises(PluginError, match=message):
        load(place)
    assert not (place / "canary").exists()
    assert not [m for m in sys.modules if m.startswith("two_")]


def test_a_loaded_sitecustomize_hides_no_other(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's Python loads one of its own."""
    write(place / "own.py", "")
    loaded = ModuleType("sitecustomize")
    loaded.__spec__ = spec_from_file_location("sitecustomize", place / "own.py")
    monkeypatch.setitem(sys.modules, "sitecustomize", loaded)
    write_lock(installed_lock(installed_plugins()), place / "surogate.lock")
    attack, message = ATTACKS["a sitecustomize"]
    attack(place)
    with pytest.raises(PluginError, match=message):
        load(place)


GROUPS = (
    "torch.backends",
    "torch_dynamo_backends",
    "networkx.backend_info",
    "networkx.backends",
    "pydantic",
    "fsspec.specs",
    "triton.backends",
    "pygments.lexers",
    "sqlalchemy.dialects",
    "mlflow.run_context_provider",
    "opentelemetry_propagator",
)
"""Groups whose entry points some library imports on its own."""


@pytest.mark.parametrize("group", GROUPS)
def test_an_entry_point_that_a_library_imports_is_refused(place: Path, group: str) -> None:
    files = {"zz_evil/__init__.py": canary(place)}
    unpack(make_wheel(place / "wheels", "zz-evil", files, points={"zz": "zz_evil"}, group=group), place / "site")
    refused = rf"entry point {group}: zz = zz_evil \(distribution zz-evil\) is not locked"
    with pytest.raises(PluginError, match=refused):
        load(place)
    assert not (place / "canary").exists()


# ------------------------------------------------------------------------- whole processes


def surogate(place: Path, *arguments: str, code: int, isolated: bool = False, **environ: str) -> str:
    """The command under the lock, in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SUROGATE_PLUGINS")}
    env |= {"PYTHONPATH": f"{place / 'early'}{os.pathsep}{place / 'site'}", "OMP_NUM_THREADS": "1"}
    env |= {"SUROGATE_PLUGINS_POLICY": "locked", "SUROGATE_PLUGINS_LOCK": str(place / "surogate.lock")}
    env |= {"SUROGATE_PLUGINS_ALLOW_EDITABLE": "1", **environ}
    flags = ["-I"] if isolated else []
    command = [sys.executable, *flags, "-m", "surogate_core", *arguments]
    done = subprocess.run(command, env=env, cwd=place, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


_locked: list[str] = []


def relock(place: Path) -> None:
    """Lock what is seen from a process, in which the tests' own start-up files are: the same for every `place`."""
    if not _locked:
        surogate(place, "plugins", "lock", "--output", "surogate.lock", code=0)
        _locked.append((place / "surogate.lock").read_text())
    (place / "surogate.lock").write_text(_locked[0])


@pytest.mark.slow
def test_a_module_of_hydras_namespace_does_not_run(place: Path) -> None:
    relock(place)
    plugins = installed_plugins()
    write(place / "site/hydra_plugins/corp_sweeper/__init__.py", canary(place))
    surogate(place, "--cfg", "job", code=0)
    assert not (place / "canary").exists()
    allowed = {"SUROGATE_PLUGINS_POLICY": "allowlist", "SUROGATE_PLUGINS_ALLOW": ",".join(p.name for p in plugins)}
    surogate(place, "--cfg", "job", code=0, **allowed)
    assert not (place / "canary").exists()
    surogate(place, "--cfg", "job", code=0, SUROGATE_PLUGINS_POLICY="open")
    assert (place / "canary").exists(), "without a policy Hydra's own plugins are of use"


def test_a_broken_module_of_hydras_namespace_is_named(place: Path) -> None:
    write(place / "site/hydra_plugins/broken/__init__.py", "raise RuntimeError('x')\n")
    said = surogate(place, "--cfg", "job", code=2, SUROGATE_PLUGINS_POLICY="open")
    assert "a module of the namespace hydra_plugins, which Hydra imports, failed: RuntimeError: x. Fix: repair" in said


@pytest.mark.slow
def test_torch_and_pydantic_import_no_entry_point_before_the_lock_is_compared(place: Path) -> None:
    relock(place)
    environ = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "1", "PYDANTIC_DISABLE_PLUGINS": "0"}
    files = {"zz_evil/__init__.py": canary(place) + "def load(): pass\n"}
    for group in ("torch.backends", "pydantic"):
        name = f"zz-{group.replace('.', '-')}"
        unpack(make_wheel(place / "wheels", name, files, points={"zz": "zz_evil:load"}, group=group), place / "site")
        (installed,) = place.glob(f"site/{name.replace('-', '_')}-*.dist-info")
        said = surogate(place, "numerics", "max_steps=1", code=2, **environ)
        assert f"entry point {group}: zz = zz_evil:load (distribution {name}) is not locked" in said
        assert not (place / "canary").exists()
        installed.rename(place / group)
    for group in ("torch.backends", "pydantic"):
        (place / group).rename(place / "site" / f"zz_{group.replace('.', '_')}-1.0.dist-info")
    surogate(place, "doctor", "--json", code=0, SUROGATE_PLUGINS_POLICY="open", **environ)
    assert not (place / "canary").exists(), "no run has a use for one"


def test_an_isolated_interpreter_reads_no_variable(place: Path) -> None:
    """A sitecustomize on PYTHONPATH runs before anything can be compared; with -I it is not on the path."""
    write(place / "early/sitecustomize.py", canary(place))
    surogate(place, "--version", code=0)
    assert (place / "canary").exists(), "this is what docs/security.md warns of"
    (place / "canary").unlink()
    surogate(place, "--version", code=0, isolated=True)
    assert not (place / "canary").exists()


@pytest.mark.slow
def test_list_and_show_say_what_is_altered(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SUROGATE_PLUGINS_POLICY", "locked")
    monkeypatch.setenv("SUROGATE_PLUGINS_LOCK", str(place / "surogate.lock"))
    monkeypatch.setenv("SUROGATE_PLUGINS_ALLOW_EDITABLE", "1")
    write(place / "site/two_helper/impl.py", canary(place))
    for arguments in (("list",), ("show", "recipe-two"), ("list", "--json"), ("show", "recipe-two", "--json")):
        static_view.cache_clear()
        assert main(["plugins", *arguments]) == 0
        said = " ".join("".join(capsys.readouterr()).split())
        assert "not as locked: plugin-two 1.0: two_helper/impl.py was" in said, arguments
    assert not (place / "canary").exists()


# ----------------------------------------------------------------------------- the lock file


def deep(text: str) -> str:
    return text + "x = " + "[" * 100_000


FILES: Mapping[str, tuple[Callable[[str], str], str]] = {
    "values nested deep": (deep, "nested too deep|malformed plugin lock"),
    "an unknown key": (lambda t: "allow_all = true\n" + t, "there is no key `allow_all`; known: version, core"),
    "an unknown key of a distribution": (
        lambda t: t.replace("editable = false", "editable = false\ntrusted = true", 1),
        "there is no key `trusted`; known: name, version",
    ),
    "a NUL byte": (lambda t: t + "\0", "malformed plugin lock"),
    "an unknown scope": (lambda t: t.replace('scope = "plugins"', 'scope = "nothing"'), "`scope` must be one of"),
    "no list of what is started": (lambda t: t.replace("started = [", "started_ = ["), "there is no key `started_`"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_lock_that_is_not_sound_is_one_message(place: Path, name: str) -> None:
    change, message = FILES[name]
    file = place / "surogate.lock"
    file.write_text(change(file.read_text()))
    with pytest.raises(UserError, match=message) as caught:
        read_lock(file)
    assert "Fix: surogate plugins lock --output" in str(caught.value)


@pytest.mark.timeout(60)
def test_a_lock_that_is_no_file_or_huge_ends_at_once(place: Path) -> None:
    file = place / "surogate.lock"
    with file.open("r+b") as stream:
        stream.truncate(300 << 20)
    with pytest.raises(UserError, match="it has 314,572,800 bytes, more than"):
        read_lock(file)
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(UserError, match="it is not a regular file"):
        read_lock(file)


# ------------------------------------------------------------------------------------ scopes


def test_a_lock_of_the_core_sees_an_altered_core(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = place / "surogate.lock"
    lock = installed_lock(installed_plugins(), "core")
    files = lock.distributions["surogate-core"].files
    assert "surogate_core/plugins/lock.py" in files
    assert any(f.startswith("surogate_core-") and f.endswith("METADATA") for f in files)
    assert "surogate/__main__.py" in lock.distributions["surogate"].files
    write_lock(lock, file)
    load(place)
    text = file.read_text()
    digest = lock.distributions["surogate-core"].files["surogate_core/plugins/lock.py"]
    old, files = lock.distributions["surogate-core"].sha256, dict(lock.distributions["surogate-core"].files)
    files["surogate_core/plugins/lock.py"] = "0" * 64
    new = type(lock.distributions["surogate-core"])(
        name="surogate-core", version="", entry_points={}, editable=False, files=files
    ).sha256
    file.write_text(text.replace(digest, "0" * 64).replace(old, new))
    with pytest.raises(SurogateError, match=r"surogate-core .*: surogate_core/plugins/lock\.py was altered"):
        load(place)


def test_a_lock_of_the_environment_refuses_one_more_distribution(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_core.plugins import lock, surroundings

    monkeypatch.setattr(lock, "loose_modules", lambda owned: {})  # tests/plugins/test_loose.py
    monkeypatch.setattr("surogate_core.plugins.loose.refuse_loose", lambda owned: None)
    ours = [d for d in surroundings.distributions() if "two" in d.name or d.name == "pluggy"]
    more = lambda: [*ours, *[d for d in true() if d.name == "zz-more"]]  # noqa: E731
    true = surroundings.distributions
    monkeypatch.setattr(surroundings, "distributions", more)
    file = place / "surogate.lock"
    write_lock(installed_lock(installed_plugins(), "environment"), file)
    assert read_lock(file).scope == "environment"
    assert {"pluggy", "plugin-two"} <= read_lock(file).distributions.keys()
    load(place)
    unpack(make_wheel(place / "wheels", "zz-more", {"zz_more/__init__.py": canary(place)}, points={}), place / "site")
    with pytest.raises(PluginError, match=r"zz-more 1\.0 is installed but not locked"):
        load(place)


def test_a_lock_of_dependencies_holds_what_the_plugins_require() -> None:
    from surogate_core.plugins.surroundings import in_scope

    found = in_scope("dependencies", ["surogate-optimizer-adamw"])
    assert {"surogate", "surogate-core", "torch", "hydra-core", "omegaconf", "antlr4-python3-runtime"} <= found.keys()
    assert "pytest" not in found
    assert in_scope("plugins", ["surogate-optimizer-adamw"]) == {}


def test_the_command_locks_the_scope_that_it_is_asked_for(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(place / "core.lock")
    assert main(["plugins", "lock", "--scope", "core", "--output", out]) == 0
    capsys.readouterr()
    assert read_lock(Path(out)).scope == "core"
    assert main(["plugins", "verify", "--lock", out, "--allow-editable"]) == 0
