"""The checks of evaluators find what is wrong with one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from surogate_core.plugin import UserError, bundles
from surogate_testing.suites import bundle_checks


def refuse(text: str) -> Callable[..., Any]:
    def opened(tasks: Any, settings: Any) -> Any:
        raise UserError(text.format(tasks[0]))

    return opened


class Runs:
    def run(self, subject: Any, taken: Any) -> list[Any]:
        return []


def failures(spec: bundles.EvaluatorSpec) -> list[str]:
    found = []
    for check in bundle_checks("eval", spec):
        try:
            check.run()
        except Exception as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize(
    ("name", "opened", "message"),
    [
        ("good", refuse("there is no {}"), None),
        ("any", lambda tasks, settings: Runs(), None),
        ("a:b", refuse("there is no {}"), "the name is 'a:b'"),
        ("silent", refuse("there is none"), "the error does not name the task"),
        ("raw", lambda tasks, settings: {}[tasks[0]], "KeyError"),
        ("hollow", lambda tasks, settings: 3, "int has no method `run`"),
    ],
)
def test_faults_are_found(name: str, opened: Callable[..., Any], message: str | None) -> None:
    found = failures(bundles.EvaluatorSpec(name=name, open=opened))
    if message is None:
        assert found == []
    else:
        assert len(found) == 1
        assert message in found[0]
