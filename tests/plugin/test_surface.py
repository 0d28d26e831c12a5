"""The public surface: what it has, and that it is light."""

from __future__ import annotations

import importlib
import subprocess
import sys
from types import ModuleType

from surogate_core import plugin

MOST = 100
"""Public names at most, of which some are modules."""


def test_it_is_small():
    assert len(plugin.__all__) <= MOST


def test_every_name_is_there():
    modules = [value for name in plugin.__all__ if isinstance(value := getattr(plugin, name), ModuleType)]
    for module in modules:
        assert all(hasattr(module, name) for name in getattr(module, "__all__", ()))
    subjects = [module for module in modules if module.__name__.startswith("surogate_core.plugin.")]
    assert {m.__name__.rpartition(".")[2] for m in subjects} == {
        "compute",
        "encoding",
        "inference",
        "launching",
    }


def test_a_subject_has_a_name_once():
    """No name of a subject is a public name itself."""
    for subject in ("compute", "encoding", "inference", "launching"):
        names = set(importlib.import_module(f"surogate_core.plugin.{subject}").__all__)
        assert not names & set(plugin.__all__)


def test_naming_it_imports_no_torch():
    code = "from surogate_core.plugin import bundles, compute, events, hookimpl, UserError\n"
    code += "import sys; assert not {'torch', 'hydra', 'transformers'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
