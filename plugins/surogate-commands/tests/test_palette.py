"""The palette: contrast, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from surogate_commands import palette

# Viénot, Brettel and Mollon 1999: how dichromats see linear RGB.
PROTAN = np.array([[0.11238, 0.88762, 0.0], [0.11238, 0.88762, 0.0], [0.00401, -0.00401, 1.0]])
DEUTAN = np.array([[0.29275, 0.70725, 0.0], [0.29275, 0.70725, 0.0], [-0.02234, 0.02234, 1.0]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("dark", [False, True])
def test_contrasts(dark: bool) -> None:
    page = palette.DARK_PAGE if dark else palette.LIGHT_PAGE
    tones = palette.DARK_TONES if dark else palette.LIGHT_TONES
    for back in (page["back"], page["box"]):
        for text in (page["ink"], page["pale"], *tones.values()):
            assert contrast(text, back) >= 4.5, (text, back)
    for colour in palette.DARK if dark else palette.LIGHT:
        assert contrast(colour, page["back"]) >= 3, colour


def test_a_heat_map_fits_both_pages_and_the_colour_blind() -> None:
    for colour in palette.HEAT.values():
        assert min(contrast(colour, page["back"]) for page in (palette.LIGHT_PAGE, palette.DARK_PAGE)) >= 3, colour
    for seen in (np.eye(3), PROTAN, DEUTAN):
        shown = [np.clip(seen @ linear(colour), 0, 1) ** (1 / 2.2) for colour in palette.HEAT.values()]
        assert all(np.linalg.norm(one - other) > 0.15 for one, other in combinations(shown, 2))


@pytest.mark.parametrize("colours", [palette.LIGHT, palette.DARK])
def test_lines_differ_for_the_colour_blind(colours: tuple[str, ...]) -> None:
    assert len(set(palette.DASHES)) == len(palette.DASHES) == len(colours)
    for seen in (np.eye(3), PROTAN, DEUTAN):
        first = [np.clip(seen @ linear(colour), 0, 1) ** (1 / 2.2) for colour in colours[:3]]
        for one, other in combinations(first, 2):
            assert np.linalg.norm(one - other) > 0.15
