"""Figures of records that have names of their own, such as rewards, as flat names that every back end shows alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from surogate_core.files.metrics import as_number

TRAIN_TIME = "time/train"
"""Wall time of a step of reinforcement learning without its rollouts."""


def named_figures(record: Mapping[str, Any]) -> dict[str, float]:
    """Name → value of the figures of a record as `metrics.jsonl` has it; empty for other kinds of records.

    ``train/NAME`` and ``eval/NAME`` for the objective; ``reward/…``, ``completions/…``, ``rollouts/…`` and
    ``time/PHASE`` for rollouts; ``eval/reward/…`` and ``eval/completions/…`` for held-out problems. A figure that
    was not measured is left out.
    """
    match record.get("event"):
        case "step_end":
            return _numbers("train", record.get("figures"))
        case "eval_end":
            return _numbers("eval", record.get("figures"))
        case "rollouts":
            return _rollouts(record)
        case "rollout_eval":
            found = {"tasks": as_number(record.get("tasks")), **_faults(record)}
            return {f"eval/{name}": value for name, value in (_rewards(record) | _lengths(record)).items()} | {
                f"eval/rollouts/{name}": value for name, value in found.items()
            }
    return {}


def _rollouts(record: Mapping[str, Any]) -> dict[str, float]:
    seconds = _numbers("time", record.get("seconds"))
    names = ("without_signal", "kept", "refills", "turns", "prefix_breaks", "tokens")
    counts = {name: as_number(record[name]) for name in names if record.get(name) is not None} | _faults(record)
    if generating := seconds.get("time/generate"):
        counts["tokens_per_second"] = counts.get("tokens", 0.0) / generating
    return _rewards(record) | _lengths(record) | {f"rollouts/{name}": v for name, v in counts.items()} | seconds


def _rewards(record: Mapping[str, Any]) -> dict[str, float]:
    """The sum's figures win over a reward that is named like one of them."""
    found: dict[str, float] = {}
    for given, spread in (record.get("rewards") or {}).items():
        name = _plain(given)
        found |= {f"reward/{name}": as_number(spread.get("mean")), f"reward/{name}_std": as_number(spread.get("std"))}
    return found | _numbers("reward", record.get("reward"))


def _lengths(record: Mapping[str, Any]) -> dict[str, float]:
    found = {f"completions/length_{name}": value for name, value in _numbers("", record.get("length")).items()}
    if ended := _numbers("", record.get("terminated_length")):
        found["completions/terminated_length_mean"] = ended["mean"]
    if record.get("truncated") is not None:
        found["completions/truncated"] = as_number(record["truncated"])
    return found


def _faults(record: Mapping[str, Any]) -> dict[str, float]:
    by_reason = _numbers("", record.get("faults"))
    return {"faults": sum(by_reason.values())} | {f"faults_{reason}": count for reason, count in by_reason.items()}


def _numbers(group: str, values: Mapping[str, Any] | None) -> dict[str, float]:
    return {f"{group}/{_plain(n)}" if group else _plain(n): as_number(v) for n, v in (values or {}).items()}


def _plain(name: str) -> str:
    """The name of characters that every back end accepts."""
    return re.sub(r"[^\w./-]+", "_", name)
