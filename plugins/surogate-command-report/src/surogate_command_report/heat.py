"""Heat maps of the experts' loads as pictures, for a page without its script."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from surogate_commands import palette
from surogate_commands.curves import LEFT, RIGHT, TOP, WIDTH, ticks
from surogate_commands.curves import figure as number
from surogate_core.plugin import significant
from surogate_core.service.files import Column, Loads, loads

if TYPE_CHECKING:
    from numpy.typing import NDArray

ACROSS = 256
"""Pixels of a picture's width, in which all steps are equally wide."""

BOTTOM = 24

LAYERS = "Expert imbalance"
EXPERTS = "Expert load"
"""Titles of the two maps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Map:
    """A heat map: rows from top to bottom, columns of steps from left to right."""

    title: str
    what: str
    names: Sequence[int]
    pixels_RT4: NDArray[np.uint8]
    shades: Sequence[tuple[str, str, float]]
    """(meaning, colour, opacity)."""


def figures(found: Loads) -> list[str]:
    """The imbalance of each layer, and the load of each expert of the layer that is least even; none without a record.

    The script replaces them by maps that can be read at every place, of every layer.
    """
    columns = found.shown()
    if not columns:
        return []
    loads_LET = loads(columns)
    peaks_LT = loads_LET.max(1)
    worst = int(peaks_LT.mean(1).argmax())
    pixels, shades = _rising(peaks_LT)
    maps = [
        _Map(title=LAYERS, what="layer", names=found.layers, pixels_RT4=pixels, shades=shades),
        _Map(
            title=f"{EXPERTS}, layer {found.layers[worst]}",
            what="expert",
            names=range(loads_LET.shape[1]),
            pixels_RT4=around_mean(loads_LET[worst]),
            shades=_SHADES,
        ),
    ]
    tall = max(180, min(3 * max(loads_LET.shape[:2]), 384))
    return [_figure(one, columns, tall) for one in maps]


def around_mean(loads_RT: NDArray[np.float64]) -> NDArray[np.uint8]:
    """[R, T, 4]: RGBA of loads. The mean is transparent, so one picture fits a light and a dark page."""
    with np.errstate(divide="ignore"):
        depth = np.clip(np.log2(loads_RT) / palette.HEAT_SPAN, -1.0, 1.0)
    found = _pixels(np.where(depth[..., None] < 0, _rgb("low"), _rgb("high")), np.abs(depth))
    found[loads_RT == 0] = [*_rgb("none"), 255]
    return found


def _rising(peaks_RT: NDArray[np.float64]) -> tuple[NDArray[np.uint8], list[tuple[str, str, float]]]:
    """Pixels from the least imbalance to the largest, and what they mean."""
    heights = np.log2(np.maximum(peaks_RT, 1.0))
    least, most = float(heights.min()), float(heights.max())
    opacity = 0.1 + 0.9 * (heights - least) / max(most - least, 1e-9)
    known = dict.fromkeys((least, (least + most) / 2, most))
    depths = [0.1 + 0.9 * (at - least) / max(most - least, 1e-9) for at in known]
    shades = [
        (f"{significant(2**at, 2)} ×", palette.HEAT["high"], depth) for at, depth in zip(known, depths, strict=True)
    ]
    return _pixels(np.broadcast_to(_rgb("high"), (*peaks_RT.shape, 3)), opacity), shades


def _rgb(name: str) -> NDArray[np.uint8]:
    return np.array([int(palette.HEAT[name][i : i + 2], 16) for i in (1, 3, 5)], np.uint8)


def _pixels(rgb: NDArray[np.uint8], opacity: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.concatenate([rgb, (255 * opacity).round().astype(np.uint8)[..., None]], axis=-1)


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A picture of RGBA pixels [height, width, 4]."""
    height, width, _ = pixels.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    ]
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def _figure(one: _Map, columns: Sequence[Column], tall: int) -> str:
    first, last = columns[0].first, columns[-1].last
    places = np.floor(np.linspace(first, last + 1, ACROSS, endpoint=False))
    nearest = np.searchsorted([column.last for column in columns], places).clip(max=len(columns) - 1)
    picture = base64.b64encode(png(one.pixels_RT4[:, nearest])).decode()
    count, wide, height = len(one.names), WIDTH - LEFT - RIGHT, TOP + tall + BOTTOM
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(one.title)}">',
        f'<image x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}" preserveAspectRatio="none" '
        f'image-rendering="pixelated" href="data:image/png;base64,{picture}"/>',
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{wide}" height="{tall}"/>',
    ]
    for row in range(0, count, -(-count // 8)):
        down = TOP + (row + 0.5) * tall / count + 4
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{down:.1f}">{one.names[row]}</text>')
    for at in ticks(first, max(last, first + 1)):
        across = LEFT + (at - first) / max(last + 1 - first, 1) * wide
        parts.append(f'<text class="x" x="{across:.1f}" y="{height - 6}">{number(at)}</text>')
    head = f"<figcaption>{escape(one.title)} ({one.what} by step)</figcaption>"
    return f"<figure>{head}{_key(one.shades)}{''.join(parts)}</svg></figure>"


_SHADES = (
    (f"1/{2**palette.HEAT_SPAN} of the mean or less", palette.HEAT["low"], 1.0),
    ("half", palette.HEAT["low"], 1 / palette.HEAT_SPAN),
    ("2 ×", palette.HEAT["high"], 1 / palette.HEAT_SPAN),
    (f"{2**palette.HEAT_SPAN} × or more", palette.HEAT["high"], 1.0),
    ("no token", palette.HEAT["none"], 1.0),
)


def _key(shades: Sequence[tuple[str, str, float]]) -> str:
    items = "".join(
        f'<li><svg class="shade" viewBox="0 0 10 10" aria-hidden="true"><rect width="10" height="10" rx="2" '
        f'fill="{fill}" opacity="{opacity:.2f}"/></svg>{escape(label)}</li>'
        for label, fill, opacity in shades
    )
    return f'<ul class="key">{items}</ul>'
