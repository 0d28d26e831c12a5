"""Why a group of completions teaches nothing, and what to change."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

from surogate_task_grpo.options import GRPOOptions, truncation
from surogate_task_grpo.play import TEMPLATE, TOO_LONG, Played
from surogate_task_grpo.reward_model import FAULT

TIMEOUT = "timeout"
"""Reason of a fault: the environment has not answered within `environment_timeout`."""
CHECK = "see what the environment does with `surogate env check`"
"""The fix if completions have no reward and the reason is not known."""
FIXES = {
    TOO_LONG: "a larger sequence_len, or shorter prompts",
    TEMPLATE: "a `template` that takes the messages of the environment",
    TIMEOUT: "a larger environment_timeout if the environment is only slow; `surogate env check` shows what it does",
    FAULT: "a reward model whose scores are numbers; `surogate eval` measures it",
}
"""The same by the reason of the fault."""
EXAMPLES = (
    "train on examples of good answers first (surogate sft), take easier problems, or raise num_generations or "
    "temperature"
)
"""The fix if rewards are equal."""
LIMITS = {"length": "max_completion_length", "turns": "max_turns"}
"""Reason of a truncated completion → the key that sets its limit."""
Cause = Literal["none", "alone", "masked", "equal"]
"""No completion of the group has a reward; one has; rewards differ and all are left out of the loss; they are equal."""


def is_trained(options: GRPOOptions, one: Played) -> bool:
    """Whether a completion of a group with signal is trained on."""
    return one.reward is not None and not (truncation(options) == "mask" and one.truncated)


def cause(options: GRPOOptions, group: Sequence[Played]) -> Cause | None:
    """Why the completions of one prompt have no signal; None if they have one."""
    rewards = [one.reward for one in group if one.reward is not None]
    if len(rewards) < 2:
        return "alone" if rewards else "none"
    if len(set(rewards)) == 1:
        return "equal"
    return None if any(is_trained(options, one) for one in group) else "masked"


def message(options: GRPOOptions, groups: Sequence[Sequence[Played]]) -> str:
    """The error if none of these groups has signal: every cause with its groups, and the fix of the most frequent."""
    played = [one for group in groups for one in group]
    count = f"{len(groups):,} groups of {options.num_generations} completions"
    if all(one.reward is None for one in played):
        return f"None of {count} has a reward: {_missing(played)}. Fix: {_missing_fix(played)}."
    causes = Counter(found for group in groups if (found := cause(options, group)) is not None)
    listed = [(one, number) for one, number in causes.most_common()]
    said = "; ".join(
        _said(one, options, played) if number == len(groups) else f"in {number:,} of them {_said(one, options, played)}"
        for one, number in listed
    )
    return f"Reinforcement learning has no signal: in {count}, {said}. Fix: {_fix(listed[0][0], options, played)}."


def _said(found: Cause, options: GRPOOptions, played: Sequence[Played]) -> str:
    if found == "masked":
        return (
            f"rewards differ, but every completion that has one is truncated ({_cut(played)}) and left out of the loss"
        )
    if found == "alone":
        return f"one completion has a reward and nothing to compare it with ({_missing(played)})"
    if found == "none":
        return f"no completion has a reward ({_missing(played)})"
    rewards = {one.reward for one in played if one.reward is not None}
    same = f"every reward is {min(rewards):g}" if len(rewards) == 1 else "the rewards within each group are equal"
    return f"{same}, and most completions are truncated ({_cut(played)})" if _mostly_cut(played) else same


def _fix(found: Cause, options: GRPOOptions, played: Sequence[Played]) -> str:
    larger = " and ".join(f"a larger {LIMITS[reason]}" for reason in _cuts(played))
    if found == "masked":
        return f"{larger}, or truncated_completions=keep, which trains on truncated completions too"
    if found in ("alone", "none"):
        return _missing_fix(played)
    return f"{larger}; otherwise {EXAMPLES}" if _mostly_cut(played) else EXAMPLES


def _cuts(played: Sequence[Played]) -> Counter[str]:
    return Counter(one.reason for one in played if one.truncated)


def _mostly_cut(played: Sequence[Played]) -> bool:
    return 2 * _cuts(played).total() > len(played)


def _cut(played: Sequence[Played]) -> str:
    """``length 90`` ..."""
    return ", ".join(f"{reason} {number:,}" for reason, number in sorted(_cuts(played).items()))


def _missing(played: Sequence[Played]) -> str:
    """The reasons of completions without a reward, and the text of the first fault."""
    without = [one for one in played if one.reward is None]
    faults = Counter(one.reason for one in without if one.fault)
    if not faults:
        return (
            "those of the environment are all None"
            if len(without) == len(played)
            else (f"the environment gives {len(without):,} of {len(played):,} completions None")
        )
    detail = next((f", the first: {one.detail}" for one in without if one.fault and one.detail), "")
    silent = len(without) - faults.total()
    reasons = [f"{reason} {number:,}" for reason, number in sorted(faults.items())] + [f"None {silent:,}"] * bool(
        silent
    )
    return f"{', '.join(reasons)}{detail.rstrip('.')}"


def _missing_fix(played: Sequence[Played]) -> str:
    reasons = {one.reason for one in played if one.fault} or {""}
    return "; ".join(sorted({FIXES.get(reason, CHECK) for reason in reasons}))
