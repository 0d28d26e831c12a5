"""Surogate plugin: environments for reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl
from surogate_environments.options import (
    ArithmeticOptions,
    CalculatorOptions,
    CopyOptions,
    CountdownOptions,
    ProblemsOptions,
    ReverseOptions,
)

if TYPE_CHECKING:
    from surogate_environments.arithmetic import Arithmetic
    from surogate_environments.calculator import Calculator
    from surogate_environments.copying import Copying
    from surogate_environments.countdown import Countdown
    from surogate_environments.problems import Problems

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_config_path() -> str:
    """Where the options `environment=copy` and its like are."""
    return "pkg://surogate_environments.conf"


@hookimpl
def surogate_environment() -> list[bundles.EnvironmentSpec]:
    """Letters to copy or reverse, arithmetic with and without a calculator, countdown, problems of a file."""
    return [
        bundles.EnvironmentSpec(name="copy", build=_copy, options=CopyOptions, weights={"exact": 0.0}),
        bundles.EnvironmentSpec(name="reverse", build=_reverse, options=ReverseOptions, weights={"exact": 0.0}),
        bundles.EnvironmentSpec(name="arithmetic", build=_arithmetic, options=ArithmeticOptions),
        bundles.EnvironmentSpec(name="countdown", build=_countdown, options=CountdownOptions, weights={"valid": 0.1}),
        bundles.EnvironmentSpec(name="problems", build=_problems, options=ProblemsOptions),
        bundles.EnvironmentSpec(
            name="tool-calculator", build=_calculator, options=CalculatorOptions, weights={"calls": 0.0}
        ),
    ]


# Each is imported when it is built, not when a configuration is checked.


def _copy(options: CopyOptions) -> Copying:
    from surogate_environments.copying import Copying

    return Copying(options)


def _reverse(options: ReverseOptions) -> Copying:
    from surogate_environments.copying import Copying

    return Copying(options, backwards=True)


def _arithmetic(options: ArithmeticOptions) -> Arithmetic:
    from surogate_environments.arithmetic import Arithmetic

    return Arithmetic(options)


def _countdown(options: CountdownOptions) -> Countdown:
    from surogate_environments.countdown import Countdown

    return Countdown(options)


def _problems(options: ProblemsOptions) -> Problems:
    from surogate_environments.problems import Problems

    return Problems(options)


def _calculator(options: CalculatorOptions) -> Calculator:
    from surogate_environments.calculator import Calculator

    return Calculator(options)
