"""Loading: order, policy before import, and failures that are named and survived."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from surogate_core.bundles import RecipeSpec
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import PluginError
from surogate_core.plugins import Registry, import_policy, load_plugins

HEAD = "from surogate_core import bundles, hookimpl\n"


def recipe_plugin(*names: str, config: bool = False) -> str:
    offers = ", ".join(f"bundles.RecipeSpec(name={n!r}, build=lambda *a: None)" for n in names)
    text = f"{HEAD}@hookimpl\ndef surogate_recipe():\n    return [{offers}]\n"
    if config:
        text += "@hookimpl\ndef surogate_config_path():\n    return f'pkg://{__name__}.conf'\n"
    return text


def load(policy: PluginPolicy | None = None, **environ: str) -> Registry:
    return load_plugins(import_policy(policy, environ))


def test_loading_is_sorted_and_the_core_is_a_plugin(install_plugin: Any) -> None:
    install_plugin("zeta", recipe_plugin("z"))
    install_plugin("alpha", recipe_plugin("a"))
    registry = load()
    names = [p["name"] for p in registry.plugin_set()]
    assert names == sorted(names)
    assert {"core", "alpha", "zeta"} <= set(names)
    assert {"name": "alpha", "distribution": "dist-alpha", "version": "1.2.3"} in registry.plugin_set()
    assert registry.owner("recipe", "z") == "zeta"
    assert registry.plugins_used([("recipe", "a")]) == [
        {"name": "alpha", "distribution": "dist-alpha", "version": "1.2.3"}
    ]


def test_the_core_offers_its_built_ins() -> None:
    registry = load()
    assert "cross_entropy" in registry.names("objective")
    assert "local" in registry.names("launcher")
    assert "none" in registry.names("offload")


@pytest.mark.parametrize(
    ("returned", "names"),
    [
        ("bundles.RecipeSpec(name='one', build=lambda *a: None)", {"one"}),
        ("[bundles.RecipeSpec(name=n, build=lambda *a: None) for n in ('one', 'two')]", {"one", "two"}),
        ("None", set()),
        ("[]", set()),
    ],
)
def test_a_hook_may_return_one_bundle_a_list_or_none(install_plugin: Any, returned: str, names: set[str]) -> None:
    install_plugin("many", f"{HEAD}@hookimpl\ndef surogate_recipe():\n    return {returned}\n")
    registry = load()
    assert {n for n in registry.names("recipe") if registry.owner("recipe", n) == "many"} == names
    assert all(isinstance(b, RecipeSpec) for b in registry.all("recipe").values())


@pytest.mark.parametrize("failure", ["import no_such_module", "raise SystemExit(3)", "1 / 0", "def f(:"])
def test_a_plugin_that_fails_to_import_is_remembered(install_plugin: Any, failure: str) -> None:
    install_plugin("bad", failure)
    install_plugin("good", recipe_plugin("good"))
    registry = load()
    assert "good" in registry.names("recipe")
    assert "bad" not in registry.plugins
    message = str(registry.broken["bad"])
    assert "plugin bad (distribution dist-bad 1.2.3) failed when it was imported" in message
    assert "\n" not in message


def test_asking_for_what_a_broken_plugin_offers_names_it(install_plugin: Any) -> None:
    install_plugin("bad", "import no_such_module\n" + recipe_plugin("wanted"))
    with pytest.raises(PluginError, match=r"plugin bad \(distribution dist-bad 1\.2\.3\).*no_such_module") as raised:
        load().get("recipe", "wanted")
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


def test_a_wrong_type_is_attributed_and_the_others_stay(install_plugin: Any) -> None:
    install_plugin("wrong", f"{HEAD}@hookimpl\ndef surogate_recipe():\n    return 'bf16'  # Recipe(name='w')\n")
    install_plugin("good", recipe_plugin("good"))
    registry = load()
    assert "good" in registry.names("recipe")
    assert "surogate_recipe: TypeError: it returned 'bf16', not Recipe" in str(registry.broken["wrong"])


def test_a_hook_that_raises_is_attributed(install_plugin: Any) -> None:
    body = "    raise RuntimeError('boom')\n    return bundles.RecipeSpec(name='wanted', build=None)\n"
    install_plugin("raises", f"{HEAD}@hookimpl\ndef surogate_recipe():\n{body}")
    with pytest.raises(PluginError, match=r"plugin raises .* failed in its hook surogate_recipe: RuntimeError: boom"):
        load().get("recipe", "wanted")


@pytest.mark.parametrize(
    "source",
    [
        "@hookimpl\ndef surogate_no_such_hook():\n    pass\n",
        "@hookimpl\ndef surogate_recipe(surprise):\n    pass\n",
    ],
)
def test_a_hook_that_does_not_exist_or_takes_surprises(install_plugin: Any, source: str) -> None:
    install_plugin("odd", HEAD + source)
    install_plugin("good", recipe_plugin("good"))
    registry = load()
    assert "odd" in registry.broken
    assert "odd" not in registry.plugins
    assert "good" in registry.names("recipe")


def test_a_missing_config_directory_is_attributed(install_plugin: Any) -> None:
    source = f"{HEAD}@hookimpl\ndef surogate_config_path():\n    return 'pkg://plugin_lost.nowhere'\n"
    install_plugin("lost", source)
    assert "pkg://plugin_lost.nowhere" in str(load().broken["lost"])


@pytest.mark.parametrize(
    ("policy", "environ"),
    [
        (PluginPolicy(block=["marked"]), {}),
        (PluginPolicy(policy="allowlist", allow=["other"]), {}),
        (PluginPolicy(), {"SUROGATE_PLUGINS_BLOCK": "x, marked"}),
        (PluginPolicy(), {"SUROGATE_PLUGINS_ALLOW": "other"}),
        (PluginPolicy(policy="allowlist", allow=["marked"]), {"SUROGATE_PLUGINS_ALLOW": ""}),
    ],
)
def test_what_the_policy_forbids_is_never_imported(
    install_plugin: Any, policy: PluginPolicy, environ: dict[str, str]
) -> None:
    install_plugin("marked", recipe_plugin("marked"))
    registry = load(policy, **environ)
    assert "plugin_marked" not in sys.modules
    assert "marked" in registry.blocked
    assert "core" in registry.plugins
    with pytest.raises(PluginError, match=r"plugin marked \(distribution dist-marked 1.2.3\) offers it but is"):
        registry.get("recipe", "marked")


def test_an_allow_list_lets_its_members_in(install_plugin: Any) -> None:
    install_plugin("marked", recipe_plugin("marked"))
    registry = load(PluginPolicy(policy="allowlist", allow=["marked"]))
    assert set(registry.plugins) == {"core", "marked"}


def test_two_plugins_offering_the_same_bundle_are_refused(install_plugin: Any) -> None:
    install_plugin("first", recipe_plugin("same"))
    install_plugin("second", recipe_plugin("same"))
    with pytest.raises(PluginError) as raised:
        load().bundles("recipe")
    assert "dist-first" in str(raised.value)
    assert "dist-second" in str(raised.value)
    registry = load(PluginPolicy(block=["second"]))
    assert registry.owner("recipe", "same") == "first"


def test_two_plugins_offering_the_same_option_are_refused(install_plugin: Any) -> None:
    for name in ("first", "second"):
        install_plugin(name, recipe_plugin(name, config=True), conf={"recipe/same.yaml": "name: same\n"})
    with pytest.raises(PluginError, match="recipe=same") as raised:
        load()
    assert "dist-first" in str(raised.value)
    assert "dist-second" in str(raised.value)


def test_two_distributions_with_the_same_entry_point_are_refused(install_plugin: Any) -> None:
    install_plugin("same", recipe_plugin("a"), distribution="dist-one", module="plugin_one")
    install_plugin("same", recipe_plugin("b"), distribution="dist-two", module="plugin_two")
    with pytest.raises(PluginError, match=r"dist-one.*dist-two"):
        load()


def test_the_name_of_the_core_is_taken(install_plugin: Any) -> None:
    install_plugin("core", recipe_plugin("a"))
    with pytest.raises(PluginError, match="dist-core"):
        load()


def test_a_plugin_that_is_not_installed_is_named_by_the_catalogue() -> None:
    registry = load(PluginPolicy())
    registry.plugins = {"core": registry.plugins["core"]}
    registry._offers = {"recipe": {}}
    with pytest.raises(PluginError, match=r"pip install .*surogate-recipe-bf16"):
        registry.get("recipe", "bf16")


def test_a_misspelt_bundle_names_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"recipe 'bf61': .*known: .*bf16.* bf16$"):
        load().get("recipe", "bf61")
