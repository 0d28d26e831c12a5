"""The lock: what is refused, before anything is imported, and what the file looks like."""

from __future__ import annotations

import hashlib
import json
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from environments import Environment
from wheels import make_wheel

from surogate_core.cli.main import main
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import PluginError, UserError
from surogate_core.plugins import digests, discovery, import_policy, load_plugins, policy
from surogate_core.plugins.discovery import installed_plugins
from surogate_core.plugins.lock import installed_lock, read_lock, write_lock

HEAD = "from surogate_core import bundles, hookimpl\n"


def source(name: str, sentinel: Path) -> str:
    """A plugin whose import leaves a trace."""
    return (
        f"from pathlib import Path\nPath({str(sentinel)!r}).touch()\n{HEAD}@hookimpl\ndef surogate_recipe():\n"
        f"    return bundles.RecipeSpec(name={name!r}, build=lambda *a: None)\n"
    )


@pytest.fixture
def only(monkeypatch: pytest.MonkeyPatch) -> None:
    """None but the fake plugins are installed."""
    find = discovery.entry_points
    fake = lambda **which: [e for e in find(**which) if e.value.startswith("plugin_")]  # noqa: E731
    monkeypatch.setattr(discovery, "entry_points", fake)


@pytest.fixture
def locked(tmp_path: Path, install_plugin: Any, only: None) -> Callable[..., Any]:
    """`marked` and `other` installed and locked; loads them under the lock, and checks that a refusal imported none."""
    sentinel, file = tmp_path / "imported", tmp_path / "surogate.lock"
    install_plugin("marked", source("a", sentinel), conf={"recipe/a.yaml": "name: a\n"})
    install_plugin("other", source("b", sentinel))
    write_lock(installed_lock(installed_plugins()), file)

    def load(refused: str = "", **fields: Any) -> str:
        rules = PluginPolicy(policy="locked", lock=str(file), **fields)
        if not refused:
            load_plugins(import_policy(rules, {}))
            return ""
        with pytest.raises(PluginError, match=refused) as caught:
            load_plugins(import_policy(rules, {}))
        assert not sentinel.exists(), "a plugin was imported"
        assert not {"plugin_marked", "plugin_other"} & sys.modules.keys()
        return str(caught.value)

    return load


def test_the_locked_set_loads(locked: Any) -> None:
    locked()
    assert "plugin_marked" in sys.modules


def test_threads_read_the_same_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    plugins = [p for p in installed_plugins() if p.name in ("dataset-chat", "recipe-bf16")]
    found = []
    for limit in (0, 2**60):
        monkeypatch.setattr(digests, "THREADED", limit)
        found.append(installed_lock(plugins).distributions)
    assert found[0] == found[1]
    assert all(len(distribution.files) > 1 for distribution in found[0].values())


def test_every_difference_is_in_one_message(locked: Any, install_plugin: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "plugin_marked" / "__init__.py").write_text(source("a", tmp_path / "imported") + "\n# altered\n")
    (site / "plugin_marked" / "conf" / "recipe" / "a.yaml").unlink()
    (site / "plugin_marked" / "more.py").touch()
    (site / "dist_other-1.2.3.dist-info" / "entry_points.txt").unlink()
    install_plugin("added", source("c", tmp_path / "imported"))
    message = locked("are not the locked ones, so none was imported")
    assert "dist-added 1.2.3 (plugin added) is installed but not locked" in message
    assert "dist-other 1.2.3 is locked but not installed" in message
    assert "plugin_marked/more.py was added" in message
    assert "plugin_marked/conf/recipe/a.yaml is gone" in message
    assert "plugin_marked/__init__.py was altered" in message
    assert "asked for by plugins.policy" in message
    assert message.endswith("surogate plugins lock")


def test_another_version_is_refused(locked: Any, tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = (site / "dist_other-1.2.3.dist-info").rename(site / "dist_other-1.2.4.dist-info")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dist-other\nVersion: 1.2.4\n")
    locked("dist-other is 1.2.4, the lock has 1.2.3")


def test_another_entry_point_is_refused(locked: Any, tmp_path: Path) -> None:
    file = tmp_path / "site" / "dist_other-1.2.3.dist-info" / "entry_points.txt"
    file.write_text("[surogate]\nrenamed = plugin_other\n")
    locked("dist-other has the entry points renamed = plugin_other, the lock has other = plugin_other")


def test_a_package_earlier_on_the_path_is_refused(locked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shadow = tmp_path / "shadow" / "plugin_other"
    shadow.mkdir(parents=True)
    (shadow / "__init__.py").write_bytes((tmp_path / "site/plugin_other/__init__.py").read_bytes())
    monkeypatch.syspath_prepend(shadow.parent)
    locked("dist-other is not imported from its installed files")


def test_caches_of_bytecode_do_not_count(locked: Any, tmp_path: Path) -> None:
    cache = tmp_path / "site" / "plugin_other" / "__pycache__"
    cache.mkdir()
    (cache / "__init__.cpython-311.pyc").write_bytes(b"x")
    locked()


def test_what_the_policy_blocks_may_be_absent_or_added(locked: Any, install_plugin: Any, tmp_path: Path) -> None:
    install_plugin("added", source("c", tmp_path / "imported"))
    (tmp_path / "site" / "dist_other-1.2.3.dist-info" / "entry_points.txt").unlink()
    locked("is locked but not installed")
    locked(block=["added", "other"])
    assert "plugin_added" not in sys.modules


def test_names_that_differ_in_case_and_dashes_are_one_distribution(
    install_plugin: Any, tmp_path: Path, only: None
) -> None:
    install_plugin("marked", HEAD, distribution="Dist.Of_Mine")
    assert list(installed_lock(installed_plugins()).distributions) == ["dist-of-mine"]


def test_files_of_the_record_count(install_plugin: Any, tmp_path: Path, only: None) -> None:
    """A .pth file, and a module beside the plugin's; without a RECORD the metadata counts all the same."""
    site = install_plugin("marked", HEAD)
    info = site / "dist_marked-1.2.3.dist-info"
    without = installed_lock(installed_plugins()).distributions["dist-marked"]
    assert {f"{info.name}/METADATA", f"{info.name}/entry_points.txt"} <= without.files.keys()
    (site / "start.pth").write_text("import helper\n")
    (site / "helper.py").touch()
    record = ["start.pth,,", "helper.py,,", f"{info.name}/RECORD,,", "../../bin/script,,", "plugin_marked/gone.py,,"]
    (info / "RECORD").write_text("\n".join(record) + "\n")
    files = installed_lock(installed_plugins()).distributions["dist-marked"].files
    assert {"start.pth", "helper.py", "plugin_marked/__init__.py"} <= files.keys()
    assert files["plugin_marked/gone.py"].startswith("unreadable")
    assert files["start.pth"] == hashlib.sha256(b"import helper\n").hexdigest()
    assert files["../../bin/script"].startswith("unreadable")
    assert not any("RECORD" in f for f in files)


# -------------------------------------------------------------------------------- editable installs


@pytest.fixture
def editable(install_plugin: Any, tmp_path: Path, only: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`marked`, whose sources are elsewhere."""
    site = install_plugin("marked", source("a", tmp_path / "imported"))
    (tmp_path / "src").mkdir()
    (site / "plugin_marked").rename(tmp_path / "src" / "plugin_marked")
    monkeypatch.syspath_prepend(tmp_path / "src")
    (site / "dist_marked-1.2.3.dist-info" / "direct_url.json").write_text(
        json.dumps({"url": "file:///src", "dir_info": {"editable": True}})
    )
    return tmp_path / "src" / "plugin_marked"


def test_editable_installs_are_marked_hashed_and_refused_unless_allowed(editable: Path, tmp_path: Path) -> None:
    file = tmp_path / "surogate.lock"
    lock = installed_lock(installed_plugins())
    assert lock.distributions["dist-marked"].editable
    write_lock(lock, file)
    with pytest.raises(PluginError, match=r"dist-marked is an editable install.*allow_editable=false"):
        load_plugins(import_policy(PluginPolicy(policy="locked", lock=str(file)), {}))
    allowed = PluginPolicy(policy="locked", lock=str(file), allow_editable=True)
    (editable / "__init__.py").open("a").write("\n")
    with pytest.raises(PluginError, match=r"plugin_marked/__init__.py was altered"):
        load_plugins(import_policy(allowed, {}))
    assert not (tmp_path / "imported").exists()
    write_lock(installed_lock(installed_plugins()), file)
    load_plugins(import_policy(allowed, {}))
    assert (tmp_path / "imported").exists()


# -------------------------------------------------------------------------------- three sources


def set_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> Path:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    monkeypatch.setattr(policy, "system_policy_file", lambda: file)
    return file


def test_the_environment_locks_and_no_configuration_loosens_it(
    locked: Any, tmp_path: Path, install_plugin: Any
) -> None:
    install_plugin("added", source("c", tmp_path / "imported"))
    other = tmp_path / "other.lock"
    write_lock(installed_lock(installed_plugins()), other)
    environ = {"SUROGATE_PLUGINS_POLICY": "locked", "SUROGATE_PLUGINS_LOCK": str(tmp_path / "surogate.lock")}
    for rules in (PluginPolicy(), PluginPolicy(policy="locked", lock=str(other), allow_editable=True)):
        with pytest.raises(PluginError, match=r"not locked \(.*asked for by SUROGATE_PLUGINS_POLICY\)"):
            load_plugins(import_policy(rules, environ))
    assert not (tmp_path / "imported").exists()


def test_the_machine_locks_and_nobody_loosens_it(
    locked: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install_plugin: Any
) -> None:
    file = set_system(monkeypatch, tmp_path, f'policy = "locked"\nlock = "{tmp_path}/surogate.lock"\n')
    install_plugin("added", source("c", tmp_path / "imported"))
    other = tmp_path / "other.lock"
    write_lock(installed_lock(installed_plugins()), other)
    rules = PluginPolicy(policy="locked", lock=str(other), allow_editable=True, allow=["added"])
    environ = {"SUROGATE_PLUGINS_POLICY": "open", "SUROGATE_PLUGINS_LOCK": str(other)}
    with pytest.raises(PluginError, match=str(file)):
        load_plugins(import_policy(rules, environ))
    assert not (tmp_path / "imported").exists()


def test_the_machine_allows_and_blocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = set_system(monkeypatch, tmp_path, 'policy = "allowlist"\nallow = ["a", "b"]\nblock = ["b"]\n')
    rules = import_policy(PluginPolicy(policy="allowlist", allow=["a", "b", "c"]), {})
    assert rules.refusal("a") is None
    assert rules.refusal("b") == f"blocked by {file}"
    assert rules.refusal("c") == f"not in `allow` of {file}"
    environ = {"SUROGATE_PLUGINS_POLICY": "allowlist"}
    assert import_policy(PluginPolicy(allow=["a"]), environ).refusal("a") == "not in SUROGATE_PLUGINS_ALLOW"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy = ", "cannot be read"),
        ('policy = "lokced"', "`policy` must be one of open, allowlist, locked, not 'lokced'"),
        ('polcy = "locked"', "there is no key `polcy`"),
        ('policy = "locked"', "`lock` must be the absolute path"),
        ('policy = "locked"\nlock = "a.lock"', "`lock` must be the absolute path"),
        ('allow = "a"', "`allow` must be a list of names"),
        ("allow_editable = 1", "`allow_editable` must be true or false"),
    ],
)
def test_a_machine_policy_that_is_not_understood_forbids_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    file = set_system(monkeypatch, tmp_path, text)
    with pytest.raises(UserError, match=message) as caught:
        import_policy(None, {})
    assert str(file) in str(caught.value)


def test_the_machine_policy_is_not_where_a_user_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CONFIG_DIRS", "/elsewhere")
    assert policy.system_policy_file() == Path("/etc/surogate/policy.toml")


def test_a_policy_of_the_environment_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UserError, match="SUROGATE_PLUGINS_POLICY must be one of"):
        import_policy(None, {"SUROGATE_PLUGINS_POLICY": "closed"})


# ----------------------------------------------------------------------------------- the file


def test_the_file_is_toml_and_says_what_is_installed(locked: Any, tmp_path: Path) -> None:
    file = tmp_path / "surogate.lock"
    data = tomllib.loads(file.read_text())
    (marked, _) = data["distribution"]
    assert (data["api"], marked["name"], marked["version"], marked["editable"]) == (2, "dist-marked", "1.2.3", False)
    assert marked["entry_points"] == {"marked": "plugin_marked"}
    listing = "".join(f"{digest}  {path}\n" for path, digest in sorted(marked["files"].items()))
    assert marked["sha256"] == hashlib.sha256(listing.encode()).hexdigest()
    assert read_lock(file) == installed_lock(installed_plugins())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("version = 2\n", "version = \n", "Invalid value"),
        ("version = 2\n", "version = 1\n", "version 1, this surogate reads version 2"),
        ("api = 2\n", "", "`api` is missing"),
        ("api = 2\n", "api = true\n", "`api` must be an integer"),
        ("editable = false", 'editable = "no"', "`editable` must be true or false"),
        ('version = "1.2.3"', "version = 1.2", "`version` must be a string"),
        ('name = "dist-other"', 'name = "dist-marked"', "dist-marked is there twice"),
        ("", "", ""),
    ],
)
def test_a_malformed_lock_is_one_clear_error(locked: Any, tmp_path: Path, old: str, new: str, message: str) -> None:
    file = tmp_path / "surogate.lock"
    text = file.read_text()
    if not message:
        first = next(line for line in text.splitlines() if line.startswith('"plugin_marked'))
        old, new, message = first[-10:], "0" * 9 + '"', "`sha256` of dist-marked is not that of its `files`"
    assert old in text
    file.write_text(text.replace(old, new, 1) if "other" not in old else text.replace(old, new))
    with pytest.raises(UserError) as caught:
        read_lock(file)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{file}: malformed plugin lock: ")
    assert str(caught.value).endswith(f"Fix: surogate plugins lock --output {file}")


# -------------------------------------------------------------------------------- the commands


def test_lock_and_verify(
    install_plugin: Any, only: None, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plugins", "verify"]) == 2
    assert "there is no plugin lock. Fix: surogate plugins lock --output surogate.lock" in capsys.readouterr().err
    site = install_plugin("marked", source("a", tmp_path / "imported"))
    assert main(["plugins", "lock"]) == 0
    printed = "surogate.lock: 1 distributions, 3 files\n"
    printed += "these have no RECORD, so files beside their packages are not known: dist-marked\n"
    assert capsys.readouterr().out.startswith(printed)
    assert main(["plugins", "verify", "--lock", "surogate.lock"]) == 0
    (site / "plugin_marked" / "__init__.py").open("a").write("\n")
    assert main(["plugins", "verify"]) == 1
    altered = "dist-marked 1.2.3: plugin_marked/__init__.py was altered"
    assert altered in capsys.readouterr().out
    assert main(["plugins", "verify", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "lock": "surogate.lock",
        "equal": False,
        "differences": [{"distribution": "dist-marked", "difference": altered}],
    }
    # A new lock says what it changes; an equal one, and one in place of a damaged one, say nothing.
    for changes in (True, False):
        assert main(["plugins", "lock"]) == 0
        assert (f"changed: {altered}\n" in capsys.readouterr().out) == changes
    (tmp_path / "surogate.lock").write_text("?")
    assert main(["plugins", "verify"]) == 2
    assert main(["plugins", "lock"]) == 0
    assert "changed" not in capsys.readouterr().out
    assert not (tmp_path / "imported").exists()


def test_a_run_under_a_lock_that_does_not_hold_ends_at_once(locked: Any, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "site" / "plugin_other" / "__init__.py").open("a").write("\n")
    code = main(["plugins.policy=locked", f"plugins.lock={tmp_path}/surogate.lock", f"output_dir={tmp_path}/out"])
    assert code == 2
    assert "plugin_other/__init__.py was altered" in capsys.readouterr().err
    assert not (tmp_path / "imported").exists()


def test_requirements_have_the_hashes_that_are_known(
    install_plugin: Any, only: None, tmp_path: Path, capsys: Any
) -> None:
    site = install_plugin("recorded", HEAD)
    install_plugin("built", HEAD)
    install_plugin("unknown", HEAD)
    archive = {"url": "file:///x.whl", "archive_info": {"hashes": {"sha256": "ab" * 32}}}
    (site / "dist_recorded-1.2.3.dist-info" / "direct_url.json").write_text(json.dumps(archive))
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "dist_built-1.2.3-py3-none-any.whl").write_bytes(b"wheel")
    (wheels / "dist_unknown-1.2.30-py3-none-any.whl").write_bytes(b"wheel")
    assert main(["plugins", "lock", "--require-hashes", "--wheels", str(wheels)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == [
        f"dist-built==1.2.3 --hash=sha256:{hashlib.sha256(b'wheel').hexdigest()}",
        f"dist-recorded==1.2.3 --hash=sha256:{'ab' * 32}",
        "dist-unknown==1.2.3  # the hash of its wheel is not known here",
    ]
    assert "pip will refuse them: dist-unknown." in printed.err


@pytest.mark.slow
def test_the_exported_requirements_install_the_locked_set_and_nothing_else(tmp_path: Path) -> None:
    """With pip, in a fresh environment; another wheel is refused, and a requirement without a hash."""
    wheels, lock = tmp_path / "wheels", str(tmp_path / "surogate.lock")
    ours = {"SUROGATE_PLUGINS_ALLOW": "recipe-a recipe-b"}
    made = [
        make_wheel(
            wheels, f"plugin-{n}", {f"plugin_{n}/__init__.py": f"{HEAD}# {n}\n"}, points={f"recipe-{n}": f"plugin_{n}"}
        )
        for n in "ab"
    ]
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    first, second = (Environment(place) for place in places)
    first.run("pip", "install", "--quiet", "--no-index", "--no-deps", *map(str, made), cwd=tmp_path)
    cli = "surogate_core.cli.main"
    first.run(cli, "plugins", "lock", "--output", lock, cwd=tmp_path, **ours)
    listed = first.run(cli, "plugins", "lock", "--require-hashes", cwd=tmp_path, **ours)
    hashes = [hashlib.sha256(w.read_bytes()).hexdigest() for w in made]
    assert listed.splitlines()[1:] == [
        f"plugin-{n}==1.0 --hash=sha256:{digest}" for n, digest in zip("ab", hashes, strict=True)
    ]
    requirements = tmp_path / "requirements.txt"
    install = ["pip", "install", "--quiet", "--no-index", "--find-links", str(wheels), "--no-deps", "--require-hashes"]
    requirements.write_text(f"{listed}plugin-c\n")
    assert "plugin-c" in second.run(*install, "-r", str(requirements), cwd=tmp_path, code=1)
    requirements.write_text(listed)
    second.run(*install, "-r", str(requirements), cwd=tmp_path)
    second.run(cli, "plugins", "verify", "--lock", lock, cwd=tmp_path, **ours)
    second.run("pip", "uninstall", "--quiet", "--yes", "plugin-a", "plugin-b", cwd=tmp_path)
    make_wheel(wheels, "plugin-b", {"plugin_b/__init__.py": "# another\n"}, points={"recipe-b": "plugin_b"})
    said = second.run(*install, "-r", str(requirements), cwd=tmp_path, code=1)
    assert "DO NOT MATCH THE HASHES" in said
    assert "is locked but not installed" in second.run(
        cli, "plugins", "verify", "--lock", lock, cwd=tmp_path, code=1, **ours
    )
