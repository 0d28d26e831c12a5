"""Commands of plugins: in `surogate --help`, found, run, refused, and attributed when they fail."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from surogate_core.bundles import CommandSpec
from surogate_core.cli.main import main
from surogate_core.plugins.catalogue import catalogue
from surogate_core.plugins.commands import OfferedCommand, command_names, known_names
from surogate_core.plugins.discovery import core_plugin

GREET = """
from surogate_core import bundles, hookimpl

print("imported", __name__)
HELP = "says hello"

@hookimpl
def surogate_command():
    return bundles.CommandSpec(name="{name}", usage="{name} [NAME]", help=HELP, main="{module}:main", rank={rank})

def main(words):
    print("hello", *words)
    return len(words)
"""


def source(name: str, module: str, rank: int = 500) -> str:
    return GREET.format(name=name, module=module, rank=rank)


def test_a_strangers_command_is_in_the_help_and_runs(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("hello", source("hello", "plugin_hello"))
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert "  surogate hello [NAME]                        says hello" in lines
    assert "imported" not in out
    assert "plugin_hello" not in sys.modules
    assert main(["hello", "you", "all"]) == 2
    assert capsys.readouterr().out == "imported plugin_hello\nhello you all\n"
    assert main(["helo"]) == 2
    assert "Fix: surogate hello" in capsys.readouterr().err


def test_the_rank_gives_the_place_in_the_help(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("late", source("late", "plugin_late", rank=950))
    install_plugin("early", source("early", "plugin_early", rank=1))
    main(["--help"])
    words = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  surogate ")]
    assert words.index("early") < words.index("generate")
    assert words.index("doctor") < words.index("late") < words.index("--version")


def test_a_name_may_have_two_words(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("seal", source("plugins seal", "plugin_seal"))
    assert main(["plugins", "seal", "it"]) == 1
    assert capsys.readouterr().out == "imported plugin_seal\nhello it\n"


def test_two_plugins_with_one_command_are_both_named(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("one", source("hello", "plugin_one"))
    install_plugin("two", source("hello", "plugin_two"))
    install_plugin("three", source("doctor", "plugin_three"))
    for command, names in (("hello", ("one", "two")), ("doctor", ("core", "three"))):
        assert main([command]) == 2
        error = capsys.readouterr().err
        assert f"command '{command}' is offered twice: by plugin {names[0]} (" in error
        assert f"and by plugin {names[1]} (" in error
    assert main(["--help"]) == 0


def test_one_of_two_may_be_blocked(
    install_plugin: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("one", source("hello", "plugin_one"))
    install_plugin("two", source("hello", "plugin_two"))
    monkeypatch.setenv("SUROGATE_PLUGINS_BLOCK", "one")
    assert main(["hello"]) == 0
    assert "plugin_two" in capsys.readouterr().out


def test_a_forbidden_plugin_does_not_run(
    install_plugin: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install_plugin("hello", source("hello", "plugin_hello"))
    monkeypatch.setenv("SUROGATE_PLUGINS_BLOCK", "hello")
    assert main(["hello"]) == 2
    said = "surogate hello: plugin hello (distribution dist-hello 1.2.3) offers it but is"
    assert f"{said} blocked by SUROGATE_PLUGINS_BLOCK. Change the plugin policy." in capsys.readouterr().err
    assert main(["--help"]) == 0
    assert "says hello" not in capsys.readouterr().out
    monkeypatch.delenv("SUROGATE_PLUGINS_BLOCK")
    monkeypatch.setenv("SUROGATE_PLUGINS_POLICY", "locked")
    monkeypatch.setenv("SUROGATE_PLUGINS_LOCK", str(tmp_path / "surogate.lock"))
    assert main(["hello"]) == 2
    assert "surogate.lock" in capsys.readouterr().err
    assert "plugin_hello" not in sys.modules


def test_the_policy_in_a_configurations_words_applies(
    install_plugin: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = source("hello", "plugin_hello").replace("rank=500", "configured=True")
    install_plugin("hello", text)
    file = tmp_path / "run.yaml"
    file.write_text("plugins: {block: [hello]}\n")
    for words in (["plugins.block=[hello]"], [str(file)]):
        assert main(["hello", *words]) == 2
        assert "is blocked by plugins.block" in capsys.readouterr().err
    assert "plugin_hello" not in sys.modules
    assert main(["hello", "learning_rate=1"]) == 1


def test_a_plugin_of_another_api_is_refused(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("hello", source("hello", "plugin_hello") + '\nSUROGATE_API = ">=99,<100"\n')
    assert main(["hello"]) == 2
    assert "it was written for hook API >=99,<100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ('print("imp', 'import no_such_library\nprint("imp'),
            "ModuleNotFoundError: No module named 'no_such_library'",
        ),
        (('print("imp', 'raise SystemExit(0)\nprint("imp'), "SystemExit: 0"),
        (("def main", "def other"), "AttributeError: module 'plugin_hello' has no attribute 'main'"),
    ],
)
def test_a_command_that_cannot_be_imported_is_attributed(
    install_plugin: Any, capsys: pytest.CaptureFixture[str], change: tuple[str, str], words: str
) -> None:
    install_plugin("hello", source("hello", "plugin_hello").replace(*change))
    assert main(["hello"]) == 2
    error = capsys.readouterr().err
    assert "plugin hello (distribution dist-hello 1.2.3) failed when its command hello was imported" in error
    assert words in error


def test_a_bug_in_a_command_names_its_plugin(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install_plugin("hello", source("hello", "plugin_hello").replace('print("hello", *words)', "1 / 0"))
    assert main(["hello"]) == 1
    assert "a bug in plugin hello (distribution dist-hello 1.2.3): ZeroDivisionError" in capsys.readouterr().err


def test_a_command_of_a_newer_core_says_so(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    used = "__import__('surogate_core.bundles').bundles.Sampling(hologram=1)"
    install_plugin("hello", source("hello", "plugin_hello").replace('print("hello", *words)', used))
    assert main(["hello"]) == 1
    error = capsys.readouterr().err
    assert "knows no field hologram of Sampling; the plugin needs a newer surogate-core" in error
    assert "Fix: pip install -U surogate-core." in error
    assert "TypeError" not in error


def test_a_command_may_end_as_argparse_does(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    parsing = (
        "import argparse\n\ndef main(words):\n    argparse.ArgumentParser(prog='x').parse_args(words)\n    return 0\n"
    )
    install_plugin("parses", source("parses", "plugin_parses").partition("def main")[0] + parsing)
    assert main(["parses", "--help"]) == 0
    assert "usage: x" in capsys.readouterr().out
    assert main(["parses", "--unknown"]) == 2
    assert "a bug" not in capsys.readouterr().err


def test_a_command_that_is_not_installed_names_its_distribution(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(catalogue().bundles, "command/juggle", "surogate-command-juggle")
    monkeypatch.setitem(catalogue().bundles, "command/plugins juggle", "surogate-command-juggle")
    for words in (["juggle", "a=1"], ["plugins", "juggle"]):
        assert main(words) == 2
        error = capsys.readouterr().err
        assert "its plugin surogate-command-juggle is not installed. Fix: pip install surogate-command-juggle" in error
    assert main(["jugle"]) == 2
    assert "Fix: surogate juggle" in capsys.readouterr().err
    assert "juggle" in known_names()
    assert "juggle" not in command_names()


def test_an_offered_command_has_the_fields_of_its_bundle() -> None:
    fields = {"name": "a", "usage": "a", "help": "b", "main": "c:d"}
    offered, spec = OfferedCommand(plugin=core_plugin(), **fields), CommandSpec(**fields)
    assert {name: getattr(offered, name) for name in CommandSpec.__slots__} == {
        name: getattr(spec, name) for name in CommandSpec.__slots__
    }
    assert set(OfferedCommand.__slots__) == {"plugin", *CommandSpec.__slots__}


def test_the_help_imports_no_plugin_and_not_the_registry() -> None:
    code = (
        "import sys\nfrom surogate_core.cli.main import main\nmain(['--help'])\n"
        "bad = [m for m in sys.modules if m.startswith(('surogate_', 'torch')) and not m.startswith('surogate_core')]\n"
        "print([*bad, *(m for m in ('surogate_core.plugins.registry', 'surogate_core.bundles') if m in sys.modules)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done
