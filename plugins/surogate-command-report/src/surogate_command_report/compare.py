"""Several runs side by side: their names, a table of their figures, and where their configurations differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from surogate_command_report import contents
from surogate_commands.curves import figure
from surogate_core.service.files import RunRecord

Rows = list[tuple[str, ...]]

ABOUT_PLACES = frozenset({"output_dir", "checkpoint_dir", "run_name", "log_file", "data_cache_dir", "offload_dir"})
"""Keys that say where files are, not what is trained."""

NAMED_BY = 3
"""Most keys in a run's name."""


def titles(runs: Sequence[RunRecord]) -> list[str]:
    """Names that distinguish the runs: those of a sweep by the values that differ, the others by their directories."""
    names = [run.name for run in runs]
    # The numbers that Hydra gives to the runs of a sweep say nothing.
    telling = len(set(names)) == len(names) and not all(name.isdigit() for name in names)
    if len(runs) > 1 and (any(run.group for run in runs) or not telling):
        keys, values = _differing(runs)
        by_values = [
            ", ".join(f"{key}={value}" for key, value in zip(keys, column, strict=True))
            for column in zip(*values, strict=True)
        ]
        if 0 < len(keys) <= NAMED_BY and len(set(by_values)) == len(runs):
            return by_values
    return names if len(set(names)) == len(names) else [str(run.directory) for run in runs]


def best(runs: Sequence[RunRecord]) -> tuple[int, str] | None:
    """(place, ``highest``) of the run with the highest held-out reward, or (place, ``lowest``) of that with the lowest
    eval loss; None if fewer than two runs were evaluated.
    """
    rewards = [run.best_reward[1] if run.best_reward else -math.inf for run in runs]
    if sum(map(math.isfinite, rewards)) > 1:
        return rewards.index(max(rewards)), "highest"
    losses = [run.best[1] if run.best else math.inf for run in runs]
    if sum(map(math.isfinite, losses)) < 2:
        return None
    return losses.index(min(losses)), "lowest"


def table(runs: Sequence[RunRecord]) -> tuple[tuple[str, ...], Rows]:
    """(header, a row for each run) of the runs' figures; columns that no run fills are left out."""
    first, (marked, word) = titles(runs), best(runs) or (None, "")
    found = [_figures(run) for run in runs]
    names = [name for name in found[0] if any(figures[name] for figures in found)]
    rows = [
        (f"{title} ({word})" if place == marked else title, *(figures[name] for name in names))
        for place, (title, figures) in enumerate(zip(first, found, strict=True))
    ]
    return ("run", *names), rows


def _figures(run: RunRecord) -> dict[str, str]:
    steps, losses = run.curve("eval")
    trained, peaks = (contents.finite(run, name) for name in ("loss", "peak_memory_bytes"))
    speed = run.median("tokens_per_second")
    seconds = run.along("time")
    planned = run.start.get("steps")
    rewards, held_out = (contents.finite(run, name) for name in ("reward/mean", "eval/reward/mean"))
    last = int(run.steps[-1]) if len(run.steps) else 0
    return {
        "outcome": run.outcome,
        "steps": f"{last:,} of {planned:,}" if planned and planned != last else f"{last:,}",
        "held-out reward": f"{held_out[0]:.4f} → {held_out[-1]:.4f}" if len(held_out) > 1 else "",
        "reward": f"{rewards[-20:].mean():.4f}" if len(rewards) else "",
        "eval loss": f"{losses[0]:.4f} → {losses[-1]:.4f}" if len(losses) > 1 else "",
        "best eval loss": f"{run.best[1]:.4f} (step {run.best[0]:,})" if run.best and len(steps) > 1 else "",
        "train loss": f"{trained[-20:].mean():.4f}" if len(trained) else "",
        "tokens/s": figure(speed) if speed is not None else "",
        "training time": f"{seconds[-1]:,.0f} s" if len(seconds) and seconds[-1] else "",
        "peak memory": f"{peaks.max() / 2**30:.2f} GiB" if len(peaks) else "",
    }


def differences(runs: Sequence[RunRecord]) -> tuple[tuple[str, ...], Rows]:
    """(header, a row for each key) of the configuration where not all runs have the same value."""
    keys, values = _differing(runs)
    return ("key", *titles(runs)), [(key, *row) for key, row in zip(keys, values, strict=True)]


def _differing(runs: Sequence[RunRecord]) -> tuple[list[str], list[list[str]]]:
    """The keys of the configuration that differ, and the value of each run for each of them."""
    flat = [_flat(run.settings) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in flat for key in settings)
        if key not in ABOUT_PLACES and len({repr(settings.get(key)) for settings in flat}) > 1
    ]
    return keys, [[_value(settings.get(key)) for settings in flat] for key in keys]


def _flat(settings: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{above}{key}.")
        else:
            found[f"{above}{key}"] = value
    return found


def _value(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "–"}[value]
    if isinstance(value, float):
        short = f"{value:g}"
        if abs(value) >= 0.01 or not value:
            return short
        mantissa, _, exponent = f"{value:.6e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"
    return str(value)
