"""`surogate plugins check`, and the conformance checks as tests of pytest."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from surogate_core.cli import plugin_check
from surogate_core.cli.main import main
from surogate_core.errors import PluginError
from surogate_testing import checks

# ------------------------------------------------------------------------------- the command

RECIPE = """
SUROGATE_API = ">=2,<3"
from surogate_core import bundles, hookimpl

class Plain(bundles.Recipe):
    name = NAME
    plain = True
    def linear(self, x, w, slot):
        return x @ w.t()

@hookimpl
def surogate_recipe():
    return bundles.RecipeSpec(name=NAME, build=lambda options, context: Plain())
"""


def test_check_prints_a_short_verdict(install_plugin: Any, capsys: Any) -> None:
    install_plugin("good", RECIPE.replace("NAME", "'fine'"))
    assert main(["plugins", "check", "good"]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("\ngood fails: 11 checks hold, 1 do not, 3 not applicable\n")
    assert len(printed.splitlines()) == 16, "each check has a line"
    assert "FAILED  plugin good: imports quietly" in printed  # its directory is on the path of this process only


def test_check_names_the_distribution_of_the_kit(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_check, "find_spec", lambda name: None)
    for arguments in (["--matrix"], []):
        assert main(["plugins", "check", *arguments]) == 2
        assert "the conformance kit is not installed. Fix: pip install surogate-testing" in capsys.readouterr().err


def test_check_prints_as_it_goes_and_runs_one_check(
    install_plugin: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("good", RECIPE.replace("NAME", "'fine'"))
    seen: list[str] = []
    real = plugin_check._run

    def watched(check: Any) -> None:
        seen.append(capsys.readouterr().out)
        real(check)

    monkeypatch.setattr(plugin_check, "_run", watched)
    assert main(["plugins", "check", "good", "--check", "recipe fine: "]) == 0
    assert seen[0] == ""
    assert all(re.fullmatch(r"  (holds|skipped) +recipe fine: .* \(\d+\.\d s\)\n", text) for text in seen[1:])
    assert main(["plugins", "check", "good", "--check", "multiplies"]) == 0
    assert "good conforms: 1 checks hold, 0 do not" in capsys.readouterr().out
    assert main(["plugins", "check", "good", "--check", "is_seen_without"]) == 0
    assert main(["plugins", "check", "good", "--check", "nonesuch"]) == 2
    said = capsys.readouterr().err
    assert "--check nonesuch: no check has this in its name. Fix: one of: has what it requires, imports qu" in said
    assert main(["plugins", "check", "good", "--check", "multiplys"]) == 2
    assert "no check has this in its name. Fix: --check 'multiplies'" in capsys.readouterr().err


def test_on_a_terminal_the_check_that_runs_is_shown(
    install_plugin: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_plugin("good", RECIPE.replace("NAME", "'fine'"))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["plugins", "check", "good", "--check", "multiplies packed"]) == 0
    title = "recipe fine: multiplies packed weights"
    printed = capsys.readouterr().out
    assert re.match(rf"  \.\.\.     {title}\r  skipped {title}: the recipe packs no weights", printed)


def test_check_names_what_does_not_hold(install_plugin: Any, capsys: Any) -> None:
    source = RECIPE.replace("NAME", "''.join('bad')").replace("x @ w.t()", "x @ w")
    install_plugin("bad", source)
    install_plugin("broken", "1 / 0")
    install_plugin("loud", RECIPE.replace("NAME", "'loud'").replace("    return b", "    print('hello')\n    return b"))
    assert main(["plugins", "check", "bad", "dist-broken", "absent", "loud"]) == 1
    printed = capsys.readouterr().out
    assert "plugin bad: is seen without import: recipe bad: the name is not a literal in the source" in printed
    assert "recipe bad: multiplies: RuntimeError" in printed
    assert "plugin broken (distribution dist-broken 1.2.3) failed when it was imported: ZeroDivisionError" in printed
    assert "plugin absent is not installed" in printed
    said = "the plugin printed to stdout in its hook surogate_recipe: 'hello'"
    assert f"plugin loud: answers quietly: {said}" in printed


def test_check_shows_the_traceback_and_the_place_on_request(install_plugin: Any, capsys: Any) -> None:
    install_plugin("bad", RECIPE.replace("NAME", "'bad'").replace("x @ w.t()", "x @ w"))
    file = r"\S+plugin_bad/__init__\.py"
    for flags, trace in (([], False), (["--verbose"], True)):
        assert main(["plugins", "check", "bad", *flags]) == 1
        printed = capsys.readouterr().out
        assert re.search(rf"FAILED  recipe bad: multiplies: RuntimeError: .* \(at {file}:9\)", printed)
        assert ("    Traceback (most recent call last):\n" in printed) == trace
        assert bool(re.search(rf'^ +File "{file}", line 9, in linear$', printed, re.MULTILINE)) == trace


def test_checks_of_what_is_blocked_are_refused(install_plugin: Any) -> None:
    install_plugin("old", 'SUROGATE_API = ">=9"\n')
    with pytest.raises(PluginError, match="written for hook API >=9"):
        checks("old")


# ------------------------------------------------------------------------- the pytest plugin


def test_the_pytest_plugin_makes_a_test_of_each_check(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        'SUROGATE_PLUGIN = "monitor-jsonl"\n\ndef test_conformance(surogate_check):\n    surogate_check.run()\n'
    )
    arguments = ["-p", "surogate_testing.pytest_plugin", "-q"]
    pytester.runpytest(*arguments).assert_outcomes(passed=8)
    result = pytester.runpytest(*arguments, "--surogate-plugin", "kernels-cuda")
    outcomes = result.parseoutcomes()
    assert outcomes["passed"] >= 5
    assert outcomes["passed"] + outcomes.get("skipped", 0) == 11


def test_the_pytest_plugin_wants_a_name(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_conformance(surogate_check):\n    surogate_check.run()\n")
    result = pytester.runpytest("-p", "surogate_testing.pytest_plugin")
    result.stdout.fnmatch_lines(["*name a plugin as SUROGATE_PLUGIN*"])
    assert result.ret != 0
