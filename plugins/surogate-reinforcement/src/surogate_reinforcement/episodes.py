"""Episodes that several environments share."""

from __future__ import annotations

from collections.abc import Callable

from surogate_core.plugin import bundles


class OneReply:
    """An episode of one turn: a function judges the reply.

    `judge`: (problem, reply) → rewards. An episode without a reply is judged by the empty text.
    """

    def __init__(
        self, problem: bundles.EnvironmentProblem, judge: Callable[[bundles.EnvironmentProblem, str], bundles.Rewards]
    ) -> None:
        self._problem, self._judge, self._text = problem, judge, ""

    def reply(self, text: str) -> bundles.Turn:
        self._text = text
        return bundles.Turn(done=True)

    def rewards(self) -> bundles.Rewards:
        return self._judge(self._problem, self._text)


def user_says(text: str) -> tuple[dict[str, str], ...]:
    """A conversation that begins with one message of the user."""
    return ({"role": "user", "content": text},)
