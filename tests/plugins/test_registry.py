"""Loading: order, policy before import, and failures that are named and survived."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest

from surogate_core.bundles import RecipeSpec
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import PluginPolicy
from surogate_core.errors import ConfigError, PluginError
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
    registry = load()
    assert "same" not in registry.names("recipe")
    assert "bf16" in registry.names("recipe")
    for use in (lambda: registry.get("recipe", "same"), registry.check):
        with pytest.raises(PluginError) as raised:
            use()
        assert "dist-first" in str(raised.value)
        assert "dist-second" in str(raised.value)
    registry = load(PluginPolicy(block=["second"]))
    assert registry.owner("recipe", "same") == "first"


def test_two_plugins_offering_the_same_option_are_refused(install_plugin: Any) -> None:
    for name in ("first", "second"):
        install_plugin(name, recipe_plugin(name, config=True), conf={"recipe/same.yaml": "name: same\n"})
    registry = load()
    assert "same" not in registry.options["recipe"]
    with pytest.raises(PluginError, match="recipe=same") as raised:
        registry.check()
    assert "dist-first" in str(raised.value)
    assert "dist-second" in str(raised.value)


def test_a_taken_name_stops_only_runs_that_use_it(install_plugin: Any) -> None:
    files = {"recipe/nvfp4.yaml": "name: nvfp4\n"}
    install_plugin("acme", recipe_plugin("nvfp4", config=True), conf=files)
    assert load_run_config([], registry=load()).recipe.name == "bf16"
    with pytest.raises(ConfigError, match=r"recipe=nvfp4.*is offered twice.*Fix: Uninstall .*pip uninstall dist-acme"):
        load_run_config(["recipe=nvfp4"], registry=load())


def test_a_taken_default_stops_runs_that_choose_no_other(install_plugin: Any) -> None:
    install_plugin("acme", recipe_plugin(config=True), conf={"recipe/bf16.yaml": "name: fp8\n"})
    with pytest.raises(ConfigError, match=r"recipe=bf16.*is offered twice.*plugins.block=\[acme\]"):
        load_run_config([], registry=load())
    assert load_run_config(["recipe=fp8-hybrid"], registry=load()).recipe.name == "fp8-hybrid"


def test_a_taken_model_family_is_refused_when_it_is_built(install_plugin: Any) -> None:
    offer = "bundles.ModelFamily(name='qwen3', hf_model_types=('acme',), build=lambda config: None)"
    install_plugin("acme", f"{HEAD}@hookimpl\ndef surogate_model_family():\n    return {offer}\n")
    families = load().all("model")
    assert {"llama", "qwen2", "qwen3"} <= families.keys()
    assert {"qwen3", "acme"} <= set(families["qwen3"].hf_model_types)
    with pytest.raises(PluginError, match=r"model 'qwen3' is offered twice.*pip uninstall dist-acme"):
        families["qwen3"].build({})


def test_taken_names_of_kernel_packs_stop_every_run(install_plugin: Any) -> None:
    offer = "bundles.KernelPack(name='torch', kernels=tuple)"
    install_plugin("acme", f"{HEAD}@hookimpl\ndef surogate_kernel_pack():\n    return {offer}\n")
    with pytest.raises(PluginError, match="kernels 'torch' is offered twice"):
        load().all("kernels")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "@hookimpl\ndef surogate_recipe():\n    return bundles.RecipeSpec(name='x', build=None, schedule_free=1)\n",
            r"knows no field schedule_free of RecipeSpec; the plugin needs a newer surogate-core",
        ),
        ("from surogate_core.bundles import Hologram\n", r"knows no Hologram in surogate_core\.bundles; the plugin"),
        ("import surogate_core.dsl.holograms\n", r"knows no module surogate_core\.dsl\.holograms; the plugin"),
        ("bundles.Hologram\n", r"knows no Hologram in surogate_core\.bundles; the plugin needs"),
        (
            "from surogate_core.plugin import Hologram\n",
            r"knows no Hologram in surogate_core\.plugin; the plugin",
        ),
        (
            "from surogate_core.plugin import compute\ncompute.hologram\n",
            r"knows no hologram in surogate_core\.plugin\.compute; the plugin needs",
        ),
        (
            "from surogate_core.plugin import events\nevents.Notice(level='info', message='', hologram=1)\n",
            r"knows no field hologram of Notice; the plugin needs",
        ),
        (
            "from surogate_core.plugin import significant\nsignificant(1.0, 2, hologram=1)\n",
            r"knows no argument hologram of significant; the plugin needs",
        ),
    ],
)
def test_a_plugin_of_a_newer_core_says_so(install_plugin: Any, body: str, said: str) -> None:
    install_plugin("future", f"{HEAD}{body}")
    registry = load()
    registry.bundles("recipe")
    broken = registry.broken["future"]
    assert re.search(said, str(broken))
    assert broken.fix.startswith("pip install -U surogate-core, or an older dist-future")


def test_an_error_of_a_plugin_itself_does_not_ask_for_a_newer_core(install_plugin: Any) -> None:
    install_plugin("own", "class Box:\n    def __init__(self): pass\nBox(size=1)\n")
    install_plugin("named", "def significant(): pass\nsignificant(hologram=1)\n")
    broken = load().broken
    assert broken["own"].fix.startswith("Repair or update dist-own")
    assert broken["named"].fix.startswith("Repair or update dist-named")


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
