"""Environments: random draws, answers in completions, episodes of one reply, processes that play."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.environments.answers import answer_of, boxed, last_number, marked, same_answer, tagged, visible
    from surogate_core.environments.checking import check_repeats
    from surogate_core.environments.draws import Draws
    from surogate_core.environments.episodes import OneReply, user_says
    from surogate_core.environments.order import held_out_numbers, training_numbers
    from surogate_core.environments.pool import EnvironmentPool

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
