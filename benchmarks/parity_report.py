"""The tables and the picture of `loss_parity.py`, from the files of its parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from parity_text import LARGEST

from surogate_commands.curves import Curve
from surogate_commands.picture import stacked

BARS = {"fp8-hybrid": 0.005, "nvfp4": 0.015}
"""How much higher than bf16's a recipe's final held-out loss may be, relatively."""
RECIPES = ("bf16", *BARS)
Curves = dict[tuple[str, str], list[tuple[int, float]]]
"""(recipe, number of the initial weights) → (step, held-out loss)."""


def curves_of(found: Mapping[str, Any], part: str) -> Curves:
    """What a part's files hold: those of pre-training ("pretrain") or of LoRA on headers ("lora")."""
    answer: Curves = {}
    for name in RECIPES:
        at = found.get(f"{part}-{name}", {})
        starts = at.get("starts", {}) if part == "pretrain" else {"0": at.get("headers", {})}
        answer |= {
            (name, start): [(step, loss) for step, loss in figures["held"]]
            for start, figures in starts.items()
            if figures.get("held")
        }
    return answer


def gaps_of(curves: Curves) -> Curves:
    """Of each but bf16's the relative gap to bf16's from the same initial weights, where both have a loss."""
    answer: Curves = {}
    for (name, start), points in curves.items():
        if name != "bf16" and ("bf16", start) in curves:
            wide = dict(curves["bf16", start])
            answer[name, start] = [(step, loss / wide[step] - 1) for step, loss in points if step in wide]
    return answer


def _exported(found: Mapping[str, Any], curves: Curves) -> dict[tuple[str, str], tuple[float, float]]:
    """Of each but bf16's: (loss of the trained weights in bf16, its gap to bf16's own from the same start)."""
    return {
        (name, start): (figures["held_in_bf16"], figures["held_in_bf16"] / curves["bf16", start][-1][1] - 1)
        for name in BARS
        for start, figures in found.get(f"pretrain-{name}", {}).get("starts", {}).items()
        if "held_in_bf16" in figures and ("bf16", start) in curves
    }


def _label(name: str, start: str) -> str:
    return name if start == "0" else f"{name}, start {start}"


def markdown(found: Mapping[str, Any], steps: Mapping[str, int], title: str) -> str:
    """The tables; `steps` of the parts."""
    text = [title, ""]
    for part, what in (("pretrain", "Pre-training"), ("lora", "LoRA")):
        curves = curves_of(found, part)
        if not curves:
            continue
        gaps, exported = gaps_of(curves), _exported(found, curves) if part == "pretrain" else {}
        text += [f"{what}, {steps[part]} steps:", ""]
        text += ["| recipe | held-out loss | gap to bf16 | bar | its weights in bf16 | gap |", "| --- " * 6 + "|"]
        for name in RECIPES:
            bar = f"+{BARS[name]:.1%}" if name in BARS else ""
            for (_, start), points in ((key, value) for key, value in curves.items() if key[0] == name):
                gap = f"{gaps[name, start][-1][1]:+.2%}" if gaps.get((name, start)) else ""
                wide = exported.get((name, start))
                text.append(
                    f"| {_label(name, start)} | {points[-1][1]:.4f} | {gap} | {bar} | "
                    + (f"{wide[0]:.4f} | {wide[1]:+.2%} |" if wide else "| |")
                )
            of_starts = [points[-1][1] for key, points in gaps.items() if key[0] == name and points]
            if len(of_starts) > 1:
                in_bf16 = [gap for key, (_, gap) in exported.items() if key[0] == name]
                last = f"{_mean(in_bf16)} |" if len(in_bf16) > 1 else "|"
                text.append(f"| {name}, mean ± standard error | | {_mean(of_starts)} | {bar} | | {last}")
        text.append("")
    sizes = " | ".join(f"to {size}" for size in LARGEST)
    head = [
        f"| model | exact match ± standard error | problems | {sizes} |",
        "| --- " * (3 + len(LARGEST)) + "|",
    ]
    for which, names in (("untuned", RECIPES[:1]), ("tuned", RECIPES)):
        for name in names:
            task = found.get(f"lora-{name}", {}).get("task", {}).get(which)
            if task:
                share = f"{task['exact_match']:.4f} ± {task['standard_error']:.4f}"
                shares = " | ".join(f"{share:.3f}" for share in task["by_largest"].values())
                text += [*head, f"| {name}, {which} | {share} | {task['problems']} | {shares} |"]
                head = []
    return "\n".join(text) + "\n"


def _mean(values: list[float]) -> str:
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return f"{mean:+.2%} ± {math.sqrt(variance / len(values)):.2%}"


def picture(found: Mapping[str, Any]) -> str:
    """SVG: held-out losses by step of pre-training and of LoRA, and their gaps to bf16 of the same start."""
    parts = [curves_of(found, part) for part in ("pretrain", "lora")]
    # A curve's place decides its colour, so each chart has all of them.
    places = sorted({key for curves in parts for key in curves}, key=lambda k: (int(k[1]), RECIPES.index(k[0])))
    figures: list[tuple[str, list[Curve]]] = []
    for curves, what in zip(parts, ("Pre-training", "LoRA fine-tuning"), strict=True):
        if not curves:
            continue
        gaps = {key: [(step, 100 * gap) for step, gap in points] for key, points in gaps_of(curves).items()}
        for title, each in ((f"{what}: held-out loss", curves), (f"{what}: gap to bf16, %", gaps)):
            # The loss before the first step would leave no height for the rest.
            drawn = [
                Curve(label=_label(*key), points=[(float(s), v) for s, v in each.get(key, []) if s]) for key in places
            ]
            figures.append((title, drawn))
    return stacked(figures)
