"""Surogate: train language models at the practical limit of NVIDIA GPUs.

    import surogate

    run = surogate.sft(model="Qwen/Qwen3-0.6B", datasets=rows, lora_rank=16)
    run.best, run.paths.adapter

docs/python.md describes it. Importing this package imports no torch.
"""

from collections.abc import Callable
from typing import Any

from surogate_core import __version__
from surogate_core.api import (
    HeldOutLoss,
    Paths,
    Run,
    RunReport,
    Sample,
    load,
    pt,
    sft,
    train,
)
from surogate_core.errors import ConfigError, MachineError, PluginError, SurogateError, UserError
from surogate_core.events import Control, Event

__all__ = [
    "ConfigError",
    "Control",
    "Event",
    "HeldOutLoss",
    "MachineError",
    "Paths",
    "PluginError",
    "Run",
    "RunReport",
    "Sample",
    "SurogateError",
    "UserError",
    "__version__",
    "evaluate",
    "export",
    "generate",
    "load",
    "pt",
    "serve",
    "sft",
    "train",
]

_COMMANDS = {"evaluate": "eval", "export": "export", "generate": "generate", "serve": "serve"}
"""Function → the command whose plugin has it. The plugin is imported when the function is used."""


def __getattr__(name: str) -> Callable[..., Any]:
    if name not in _COMMANDS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from surogate_core.app.commands import python_function

    function: Callable[..., Any] = python_function(_COMMANDS[name])
    return function
