"""Surogate's core: hooks, configuration, the block engine and the training loop.

The core holds no model, no recipe, no optimizer and no CUDA source; those are plugins.
Importing this package imports neither torch nor Hydra.
"""

from pluggy import HookimplMarker

__version__ = "0.1.0"

API_VERSION = 2
"""Version of the hook contract (docs/hooks.md); incremented when a hook changes incompatibly."""

hookimpl = HookimplMarker("surogate")
"""Marks a function of a plugin module as the implementation of a hook."""

__all__ = ["API_VERSION", "__version__", "hookimpl"]
