"""The hook API that a plugin states is read from its source, and one that does not fit is never imported."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from surogate_core import API_VERSION
from surogate_core.errors import PluginError
from surogate_core.plugins import import_policy, load_plugins
from surogate_core.plugins.contract import incompatible, outdated, served, supported_api
from surogate_core.plugins.discovery import installed_plugins

BODY = """
from surogate_core import bundles, hookimpl

@hookimpl
def surogate_recipe():
    return bundles.RecipeSpec(name="wanted", build=lambda *a: None)
"""


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ('SUROGATE_API = ">=3,<4"', "it was written for hook API >=3,<4, and this surogate has version 2"),
        ('SUROGATE_API = ">=1,<2"', "it was written for hook API >=1,<2, and this surogate has version 2"),
        ("", "it was written for hook API >=1,<2, and this surogate has version 2"),
        ('SUROGATE_API: str = "<1"', "it was written for hook API <1, and this surogate has version 2"),
        ('SUROGATE_API = "one"', "its SUROGATE_API is 'one', not a range such as '>=2,<3'"),
        ("SUROGATE_API = str(1)", "its SUROGATE_API is 'not a literal', not a range such as '>=2,<3'"),
        ("SUROGATE_API = 1", "its SUROGATE_API is 'not a literal', not a range such as '>=2,<3'"),
    ],
)
def test_an_incompatible_plugin_is_refused_with_the_reason_and_not_imported(
    install_plugin: Any, tmp_path: Path, statement: str, reason: str
) -> None:
    trace = f"__import__('pathlib').Path({str(tmp_path / 'imported')!r}).touch()\n"
    install_plugin("old", trace + statement + BODY, states_api=False)
    registry = load_plugins(import_policy(None, {}))
    assert reason in registry.blocked["old"][1]
    with pytest.raises(PluginError, match=r"plugin old .* offers it but is refused: .*pip install -U dist-old"):
        registry.get("recipe", "wanted")
    assert not (tmp_path / "imported").exists()
    assert "plugin_old" not in sys.modules


@pytest.mark.parametrize("statement", ['SUROGATE_API = ">=2,<3"', 'SUROGATE_API = "==2"', 'SUROGATE_API = ">=1"'])
def test_a_compatible_plugin_loads(install_plugin: Any, statement: str) -> None:
    install_plugin("new", statement + BODY)
    assert load_plugins(import_policy(None, {})).owner("recipe", "wanted") == "new"


def test_a_plugin_that_states_nothing_was_written_for_version_one(install_plugin: Any) -> None:
    install_plugin("silent", BODY, states_api=False)
    (plugin,) = (p for p in installed_plugins() if p.name == "silent")
    assert supported_api(plugin) == ">=1,<2"
    assert incompatible(plugin, api=1) is None
    assert incompatible(plugin, api=2) is not None


@pytest.mark.parametrize(
    ("stated", "surogate"),
    [
        (
            ">=1,<2",
            "an older core: one of hook API >=1,<2; dist-old does not say which versions have it",
        ),
        (">=3", "a newer core: pip install -U surogate-core"),
    ],
)
def test_the_remedy_is_another_plugin_or_another_surogate(install_plugin: Any, stated: str, surogate: str) -> None:
    install_plugin("old", f'SUROGATE_API = "{stated}"' + BODY)
    missing = load_plugins(import_policy(None, {})).explain_missing("recipe", "wanted", [])
    assert missing.fix == f"Install a version of dist-old for hook API 2: pip install -U dist-old; or {surogate}."


def test_the_older_core_is_the_one_that_the_plugin_requires(install_plugin: Any) -> None:
    install_plugin("old", 'SUROGATE_API = ">=1,<2"' + BODY, requires=["numpy", "surogate-core >=0.0.3, <0.1"])
    missing = load_plugins(import_policy(None, {})).explain_missing("recipe", "wanted", [])
    assert missing.fix.endswith("; or an older core: pip install 'surogate-core>=0.0.3,<0.1'.")


def test_two_versions_of_the_hook_api_are_served(install_plugin: Any) -> None:
    assert [list(served(api)) for api in (2, 3, 4)] == [[2], [2, 3], [3, 4]]
    install_plugin("acme", 'SUROGATE_API = ">=2,<3"' + BODY)
    (plugin,) = (p for p in installed_plugins() if p.name == "acme")
    assert [incompatible(plugin, api) is None for api in (1, 2, 3, 4)] == [False, True, True, False]
    assert (incompatible(plugin, 4) or "").endswith("and this surogate has version 3 and 4")
    assert not outdated(plugin, 2)
    assert outdated(plugin, 3) == "was written for hook API >=2,<3, which hook API 4 drops: pip install -U dist-acme"


def test_a_source_that_is_no_python_fails_when_it_is_imported(install_plugin: Any) -> None:
    install_plugin("torn", "def f(:\n")
    registry = load_plugins(import_policy(None, {}))
    assert not registry.blocked
    assert "SyntaxError" in str(registry.broken["torn"])


def test_our_own_plugins_state_a_range_and_fit() -> None:
    from surogate_core.plugins.static import static_view

    ours = [p for p in installed_plugins() if p.distribution.startswith("surogate-")]
    assert ours
    assert not [p.name for p in ours if static_view(p.module).api is None]
    assert not [p.name for p in ours if incompatible(p, API_VERSION)]
