"""The public surface: what it has, and that it is light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

from surogate_core import plugin

MOST = 100
"""Public names at most, of which some are modules."""


def test_it_is_small():
    assert len(plugin.__all__) <= MOST


def subjects() -> list[ModuleType]:
    """The modules that gather the public names of one subject."""
    modules = [value for name in plugin.__all__ if isinstance(value := getattr(plugin, name), ModuleType)]
    return [module for module in modules if module.__name__.startswith("surogate_core.plugin.")]


def test_every_name_is_there():
    for module in (plugin, *subjects()):
        assert all(hasattr(module, name) for name in module.__all__)
    files = {file.stem for file in Path(str(plugin.__file__)).parent.glob("*.py")} - {"__init__"}
    assert {module.__name__.rpartition(".")[2] for module in subjects()} == files


def test_a_subject_has_a_name_once():
    """No name of a subject is a public name itself."""
    names = [name for module in (plugin, *subjects()) for name in module.__all__]
    assert not {name for name in names if names.count(name) > 1}


def test_naming_it_imports_no_torch():
    code = "from surogate_core.plugin import bundles, compute, events, hookimpl, UserError\n"
    code += "import sys; assert not {'torch', 'hydra', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
