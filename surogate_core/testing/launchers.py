"""Checks of launchers: main is called, and its exit code comes back."""

from __future__ import annotations

import tempfile
from pathlib import Path

from surogate_core.bundles import Launcher
from surogate_core.errors import MachineError
from surogate_core.testing.check import NotApplicable, ensure


def returns_the_exit_code(launcher: Launcher) -> None:
    """With the options' defaults main runs, here or in other processes, and 0 and 3 come back as they are."""
    for code in (0, 3):
        with tempfile.TemporaryDirectory() as directory:
            called = Path(directory) / "called"

            def main(called: Path = called, code: int = code) -> int:
                called.touch()
                return code

            try:
                found = launcher.launch(main, launcher.options())
            except MachineError as error:
                raise NotApplicable(str(error)) from None
            ensure(called.exists(), "main was not called")
            ensure(found == code, f"main ended with {code}, and launch returned {found!r}")


def lets_errors_through(launcher: Launcher) -> None:
    """What main raises ends the launch: an error, or an exit code that is not 0; never 0."""

    def main() -> int:
        raise RuntimeError("raised by the conformance kit")

    try:
        found = launcher.launch(main, launcher.options())
    except MachineError as error:
        raise NotApplicable(str(error)) from None
    except RuntimeError as error:
        ensure("conformance kit" in str(error), f"another error came out: {error}")
        return
    ensure(found != 0, "main raised, and launch returned 0")


CHECKS = (returns_the_exit_code, lets_errors_through)
