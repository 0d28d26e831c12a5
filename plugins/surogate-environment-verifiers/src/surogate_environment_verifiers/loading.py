"""Which of the two lines of verifiers an environment is written for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

from surogate_core.plugin import MachineError, UserError, import_policy, mistake
from surogate_environment_verifiers.options import VerifiersOptions

if TYPE_CHECKING:
    from surogate_core.plugin import bundles

T = TypeVar("T")


def load(options: VerifiersOptions) -> bundles.Environment:
    """The environment. Raises `MachineError` without verifiers, `UserError` for a module that is none of its own."""
    from surogate_core.plugin import bundles

    if not options.module:
        raise UserError("environment.module is not set. Fix: environment.module=MODULE, the module of the environment")
    module = _imported(options.module, bundles.Code(function=False))
    if hasattr(module, "load_environment"):
        from surogate_environment_verifiers.classic import open_environment

        return attempted(options.module, lambda: open_environment(module.load_environment, options))
    try:
        import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        raise UserError(
            f"environment.module: {options.module} has no function load_environment, as verifiers 0.1 wants it, and "
            f"verifiers 0.4 cannot be imported: {error}"
        ) from error
    from surogate_environment_verifiers.tasksets import open_taskset

    return attempted(options.module, lambda: open_taskset(module, options))


def attempted(name: str, make: Callable[[], T]) -> T:
    """What `make` returns; an exception of the environment's own becomes a `UserError` in one line."""
    try:
        return make()
    except (UserError, MachineError):
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise UserError(f"environment.module: {name} cannot be loaded: {type(error).__name__}: {text}") from error


def _imported(name: str, mark: bundles.Code) -> ModuleType:
    try:
        import verifiers  # noqa: F401
    except ModuleNotFoundError as error:
        raise MachineError(
            f"environment verifiers: the package {error.name} is not installed. Fix: pip install verifiers==0.1.11 for "
            "environments with load_environment, or verifiers==0.4.0 for tasksets"
        ) from error
    wrong = mistake(name, import_policy(), mark=mark)
    if wrong is not None:
        raise UserError(f"environment.module: {wrong}")
    return attempted(name, lambda: import_module(name))
