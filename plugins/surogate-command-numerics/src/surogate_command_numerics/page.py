"""The comparison of `surogate numerics` as Markdown and as curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from surogate_commands.curves import Curve
from surogate_commands.picture import stacked

if TYPE_CHECKING:
    from surogate_command_numerics.numerics import Numerics, Training


PICTURED = {"projections": "", "experts": " of experts"}
"""Part of a layer that has curves of its rounding → what their titles say."""


def markdown(found: Numerics) -> str:
    """The facts, the losses, and how operands are rounded by layer and role."""
    reference = found.trainings[0]
    seen = "eval loss" if reference.held else "training loss of the last steps"
    lines = [
        "# Numerics",
        "",
        f"{found.model}, {found.parameters:,} parameters, {found.steps} steps of {found.tokens_per_step:,} tokens, "
        f"seed {found.seed}; {found.device}, torch {found.torch}. Gaps are to {reference.name}, and those of one seed: "
        "another gives others.",
        "",
        f"| run | {seen} | gap | tensors saturated | tensors underflowed |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {t.name} | {t.loss:.4f} | {t.loss / reference.loss - 1:+.2%} | {_shares(t.saturated)} | "
            f"{_shares(t.underflowed)} |"
            for t in found.trainings
        ),
        "",
        "Tensors are counted under delayed scales: one of each projection, role and step whose largest value was "
        "beyond the format, or below its normal numbers. A dash: no delayed scales.",
    ]
    lines += [f"\n{t.name}: {t.note}" for t in found.trainings if t.note]
    if found.rounding:
        lines += [
            "",
            f"How the operands of the projections of {reference.name}'s model are rounded, after training, gradients "
            "to nearest. Each tensor is scaled by its own largest value, those of experts as the recipe scales them:",
            "",
            "| layer | part | role | rounded by | relative error | rounded to zero | saturated |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *(
                f"| {r.layer} | {r.part} | {r.role} | {r.recipe} | {r.error:.2%} | {r.to_zero:.2%} | "
                f"{r.saturated:.2%} |"
                for r in found.rounding
            ),
        ]
    return "\n".join(lines) + "\n"


def _shares(shares: Mapping[str, float] | None) -> str:
    if shares is None:
        return "–"
    return ", ".join(f"{role} {share:.2%}" for role, share in shares.items())


def _curve(training: Training) -> list[tuple[float, float]]:
    points = training.held or list(enumerate(training.losses, start=1))
    return [(float(step), loss) for step, loss in points]


def picture(found: Numerics) -> str:
    """SVG: losses and gaps by step, relative errors by layer for each role; a colour for each run."""
    reference = found.trainings[0]
    seen = "Eval loss" if reference.held else "Train loss"
    wide = dict(_curve(reference))
    losses = [Curve(label=t.name, points=_curve(t)) for t in found.trainings]
    gaps = [
        Curve(label=t.name, points=[(step, 100 * (loss / wide[step] - 1)) for step, loss in _curve(t) if step in wide])
        for t in found.trainings
    ]
    figures = [(f"{seen} by step", losses), (f"{seen}: gap to {reference.name} by step, %", gaps)]
    # A recipe or weight format that several runs have is drawn in the colour of its first.
    firsts = {name: t.name for t in reversed(found.trainings) for name in (t.recipe, t.weight_format) if name}
    for part, role in dict.fromkeys((part, r.role) for part in PICTURED for r in found.rounding if r.part == part):
        errors = [
            Curve(
                label=t.name,
                points=[
                    (float(r.layer), 100 * r.error)
                    for r in found.rounding
                    if (r.part, r.role) == (part, role) and firsts[r.recipe] == t.name
                ],
                dots=True,
            )
            for t in found.trainings
        ]
        figures.append((f"Relative rounding error by layer, {role}s{PICTURED[part]}, %", errors))
    return stacked(figures)
