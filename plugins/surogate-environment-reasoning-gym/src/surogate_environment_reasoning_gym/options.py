"""The options of `environment=reasoning-gym`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningGymOptions:
    """Data sets of reasoning-gym."""

    dataset: Annotated[list[str], MinLen(1)] = field(default_factory=lambda: ["chain_sum"])
    """Names of data sets, such as `chain_sum` or `leg_counting`; problems of several are mixed."""
    weights: list[Annotated[float, Interval(gt=0, le=10**6)]] = field(default_factory=list)
    """Share of each data set; empty gives all the same."""
    config: dict[str, Any] = field(default_factory=dict)
    """Parameters of the data set, such as `{min_terms: 2, max_terms: 3}`; for several data sets by name."""
    prompt: Annotated[str, MinLen(1)] = (
        "{question}\n\nThink step by step, then write the final answer alone between <answer> and </answer>."
    )
    """The user's message; `{question}` is replaced."""
    system: str = ""
    """The system message; empty is none."""
    answer: Literal["tag", "text"] = "tag"
    """Where the answer is: tag takes what the last `<answer>…</answer>` holds, text the whole reply. Thinking,
    `<think>…</think>`, is left out.
    """
