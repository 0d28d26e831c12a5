"""Deprecated public names are found in the sources of the plugins that use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from surogate_core import API_VERSION, plugin
from surogate_core.plugins import deprecated, import_policy, load_plugins
from surogate_core.plugins.deprecated import DEPRECATED, Deprecated

SOURCE = """
from surogate_core.plugin import bundles, compute, hookimpl, printable as shown

@hookimpl
def surogate_recipe():
    compute.place
    return bundles.RecipeSpec(name="wanted", build=lambda *a: None)
"""
OLD: Mapping[str, Deprecated] = {
    "printable": Deprecated(use="shown", since=API_VERSION),
    "compute.place": Deprecated(use="compute.position", since=API_VERSION - 1),
    "RecipeSpec.build": Deprecated(use="RecipeSpec.make", since=API_VERSION),
    "significant": Deprecated(use="rounded", since=API_VERSION),
}


def test_a_plugin_that_uses_one_is_named_with_what_to_use(install_plugin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install_plugin("acme", SOURCE)
    install_plugin("other", SOURCE.replace("wanted", "different").replace(", printable as shown", ""))
    assert not load_plugins(import_policy(None, {})).untold()
    monkeypatch.setattr(deprecated, "DEPRECATED", OLD)
    said = load_plugins(import_policy(None, {})).untold()
    label = "plugin acme (distribution dist-acme 1.2.3)"
    next_one, after = (f"which hook API {API_VERSION + n} drops (this is {API_VERSION})" for n in (1, 2))
    assert [text for text in said if text.startswith(label)] == [
        f"{label} uses RecipeSpec.build of surogate_core.plugin, {after}: use RecipeSpec.make",
        f"{label} uses compute.place of surogate_core.plugin, {next_one}: use compute.position",
        f"{label} uses printable of surogate_core.plugin, {after}: use shown",
    ]
    assert not any("printable" in text for text in said if text.startswith("plugin other"))
    assert all("\n" not in text for text in said)


def test_deprecated_names_are_there_until_they_are_dropped() -> None:
    for name, known in DEPRECATED.items():
        assert known.since <= API_VERSION < known.dropped, f"{name} is to be dropped in hook API {known.dropped}"
        first, _, rest = name.partition(".")
        assert hasattr(plugin, first) or first in vars(plugin.bundles) or hasattr(plugin, rest)
