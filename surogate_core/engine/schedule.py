"""The micro-step as a list of actions that can be read, printed and tested without a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from surogate_core.bundles import TensorKind

EMBED, HEAD = "embed", "head"

Verb = Literal[
    "tables",  # compute the tensors that all blocks read
    "prefetch",  # start bringing a key's tensors to the device
    "fetch",  # a key's tensors are needed now
    "forward",
    "loss",  # head, loss and their gradients, fused
    "backward",
    "put",  # hand a key's tensors to their store
    "reduce",  # add gradients into the step's
    "release",  # a key's tensors are not needed until they are fetched again
]


@dataclass(frozen=True, slots=True)
class Action:
    """One entry of the schedule: an operation, its piece, and the kind of tensor."""

    verb: Verb
    key: str
    kind: TensorKind | None = None

    def __str__(self) -> str:
        return f"{self.verb} {self.kind + ' ' if self.kind else ''}{self.key}".rstrip()


def layer_key(index: int) -> str:
    """The stores' key of a layer."""
    return f"layer {index}"


def training_schedule(layers: int, *, train_embedding: bool) -> tuple[Action, ...]:
    """Forward through all pieces, the fused head, and backward in reverse.

    The tensors of the next piece are prefetched before the current piece runs.
    """
    keys = [layer_key(i) for i in range(layers)]
    actions = [*_forward(keys, keep=True)]
    actions += [
        *_prefetch(keys[-1]),
        Action("fetch", HEAD, "weights"),
        Action("fetch", HEAD, "gradients"),
        Action("loss", HEAD),
        Action("reduce", HEAD, "gradients"),
        Action("release", HEAD, "gradients"),
        Action("release", HEAD, "weights"),
    ]
    backward = keys[::-1]
    for key, following in zip(backward, [*backward[1:], None], strict=True):
        if following:
            actions += _prefetch(following)
        elif train_embedding:
            actions.append(Action("prefetch", EMBED, "gradients"))
        actions += [
            Action("fetch", key, "weights"),
            Action("fetch", key, "residuals"),
            Action("fetch", key, "gradients"),
            Action("backward", key),
            Action("reduce", key, "gradients"),
            Action("release", key, "gradients"),
            Action("release", key, "residuals"),
            Action("release", key, "weights"),
        ]
    if train_embedding:
        actions += [
            Action("fetch", EMBED, "gradients"),
            Action("backward", EMBED),
            Action("reduce", EMBED, "gradients"),
            Action("release", EMBED, "gradients"),
        ]
    return tuple(actions)


def _prefetch(key: str) -> tuple[Action, ...]:
    """The residuals that a layer's backward reads, and the sums to which it adds."""
    return (
        Action("prefetch", key, "weights"),
        Action("prefetch", key, "residuals"),
        Action("prefetch", key, "gradients"),
    )


def evaluation_schedule(layers: int) -> tuple[Action, ...]:
    """Forward only; nothing is kept."""
    return (
        *_forward([layer_key(i) for i in range(layers)], keep=False),
        Action("fetch", HEAD, "weights"),
        Action("loss", HEAD),
        Action("release", HEAD, "weights"),
    )


def counting_schedule(layers: int) -> tuple[Action, ...]:
    """Forward through the layers alone; nothing is kept."""
    return tuple(a for a in _forward([layer_key(i) for i in range(layers)], keep=False) if a.key != HEAD)


def _forward(keys: Sequence[str], *, keep: bool) -> tuple[Action, ...]:
    actions = [
        Action("tables", ""),
        Action("prefetch", keys[0], "weights"),
        Action("fetch", EMBED, "weights"),
        Action("forward", EMBED),
        Action("release", EMBED, "weights"),
    ]
    for key, following in zip(keys, [*keys[1:], HEAD], strict=True):
        actions += [
            Action("prefetch", following, "weights"),
            *([Action("prefetch", HEAD, "gradients")] if keep and following == HEAD else []),
            Action("fetch", key, "weights"),
            Action("forward", key),
        ]
        if keep:
            actions.append(Action("put", key, "residuals"))
        actions.append(Action("release", key, "weights"))
    return tuple(actions)


def render(schedule: Sequence[Action]) -> str:
    """The schedule as text, one piece per line, with equal consecutive layers folded."""
    lines: list[tuple[str, str]] = []
    for key, run in groupby(_with_piece(schedule), key=lambda pair: pair[0]):
        actions = [action for _, action in run]
        lines.append((key, " · ".join(_phrase(a) for a in actions)))
    folded: list[str] = []
    for (text, is_layer), same in groupby(lines, key=lambda line: (line[1], line[0].startswith("layer"))):
        keys = [key for key, _ in same]
        if is_layer and len(keys) > 1:
            first, last = (k.removeprefix("layer ") for k in (keys[0], keys[-1]))
            folded.append(f"layers {first}…{last}: {text}")
        else:
            folded.extend(f"{key}: {text}" for key in keys)
    return "\n".join(folded)


def _with_piece(schedule: Sequence[Action]) -> list[tuple[str, Action]]:
    """Each action with the piece on whose line it is shown: a prefetch is shown with the piece that it overlaps."""
    paired: list[tuple[str, Action]] = []
    piece = ""
    for action in reversed(schedule):
        if action.verb != "prefetch":
            piece = action.key or "tables"
        paired.append((piece, action))
    return paired[::-1]


def _phrase(action: Action) -> str:
    of = " of the next" if action.verb == "prefetch" else ""
    return f"{action.verb} {action.kind or ''}".strip() + of
