"""Importing torch and all that a run needs, without the garbage collector."""

from __future__ import annotations

import gc
import importlib
import sys


def quick_import(name: str) -> None:
    """Import a module that imports much, and keep what exists then out of the collector's later passes.

    Modules, classes and functions are no garbage, and passes over those of torch took a sixth of their import and a
    tenth of the compilation after it. Of a module that is imported already, nothing changes.
    """
    if name in sys.modules:
        return
    # Garbage would be kept too; there is little before the import.
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module(name)
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
