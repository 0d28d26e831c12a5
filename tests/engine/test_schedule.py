"""The micro-step as a list: order, prefetching, releases, and how it prints."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from surogate_core.engine.schedule import EMBED, HEAD, Action, evaluation_schedule, layer_key, render, training_schedule

SCHEDULES = {
    "training": lambda n: training_schedule(n, train_embedding=False),
    "training the embedding too": lambda n: training_schedule(n, train_embedding=True),
    "evaluation": evaluation_schedule,
}
schedules = pytest.mark.parametrize("name", SCHEDULES)
layers = pytest.mark.parametrize("n", [1, 2, 5])


@layers
@schedules
def test_every_fetch_is_released_once_and_used_in_between(name: str, n: int) -> None:
    held: dict[tuple[str, str | None], bool] = {}
    for action in SCHEDULES[name](n):
        at = (action.key, action.kind)
        if action.verb == "fetch":
            assert at not in held, f"{action} twice"
            held[at] = False
        elif action.verb == "release":
            assert held.pop(at), f"{action}: not fetched, or not used"
        elif action.verb in ("forward", "loss", "backward"):
            of_piece = [key for key in held if key[0] == action.key]
            assert of_piece or (action.verb, action.key) == ("backward", EMBED), action
            held.update(dict.fromkeys(of_piece, True))
    assert not held


@layers
@schedules
def test_only_one_piece_is_held_at_a_time(name: str, n: int) -> None:
    held: set[str] = set()
    for action in SCHEDULES[name](n):
        if action.verb == "fetch":
            held.add(action.key)
        elif action.verb == "release":
            held.discard(action.key)
        assert len(held) <= 1


@layers
@schedules
def test_prefetch_is_one_piece_ahead(name: str, n: int) -> None:
    """While a piece runs, only the tensors that the next one fetches are being prefetched."""
    actions = SCHEDULES[name](n)
    computed = [i for i, a in enumerate(actions) if a.verb in ("forward", "loss", "backward")]
    waiting: set[tuple[str, str | None]] = set()
    for i, action in enumerate(actions):
        at = (action.key, action.kind)
        if action.verb == "prefetch":
            assert at not in waiting
            waiting.add(at)
        elif action.verb == "fetch":
            waiting.discard(at)
        elif i in computed:
            later = [j for j in computed if j > i]
            upcoming = actions[i : later[0]] if later else ()
            assert waiting == {(a.key, a.kind) for a in upcoming if a.verb == "fetch"}, action
    assert not waiting, "prefetched and never fetched"


@layers
def test_training_goes_forward_and_back(n: int) -> None:
    actions = training_schedule(n, train_embedding=True)
    done = [(a.verb, a.key) for a in actions if a.verb in ("forward", "loss", "backward")]
    keys = [layer_key(i) for i in range(n)]
    assert done == [
        *[("forward", k) for k in (EMBED, *keys)],
        ("loss", HEAD),
        *[("backward", k) for k in (*keys[::-1], EMBED)],
    ]
    reduced = [a.key for a in actions if a.verb == "reduce"]
    assert reduced == [HEAD, *keys[::-1], EMBED]
    assert training_schedule(n, train_embedding=False) == tuple(
        a for a in actions if not (a.key == EMBED and (a.verb == "backward" or a.kind == "gradients"))
    )


@layers
def test_residuals_are_put_once_and_come_back_in_reverse(n: int) -> None:
    actions = [a for a in training_schedule(n, train_embedding=False) if a.kind == "residuals"]
    keys = [layer_key(i) for i in range(n)]

    def of(verb: str) -> Sequence[str]:
        return [a.key for a in actions if a.verb == verb]

    assert of("put") == keys
    assert of("prefetch") == of("fetch") == of("release") == keys[::-1]


@layers
def test_evaluation_keeps_nothing(n: int) -> None:
    actions = evaluation_schedule(n)
    assert not [a for a in actions if a.kind == "residuals" or a.verb in ("put", "backward", "reduce")]
    training = training_schedule(n, train_embedding=False)
    assert [a for a in actions if a.verb == "forward"] == [a for a in training if a.verb == "forward"]


def test_actions_print() -> None:
    assert str(Action("fetch", "layer 3", "weights")) == "fetch weights layer 3"
    assert str(Action("tables", "")) == "tables"


def words(schedule: Sequence[Action], key: str, verb: str) -> list[str]:
    """The actions of a piece, but for prefetches, in the half of the schedule that has the verb."""
    turn = next(i for i, a in enumerate(schedule) if a.verb == "loss" or (a.key, a.verb) == (HEAD, "backward"))
    half = schedule[:turn] if verb == "forward" else schedule[turn:]
    found = [f"{a.verb} {a.kind or ''}".strip() for a in half if a.key == key and a.verb != "prefetch"]
    assert verb in found
    return found


def test_equal_layers_fold() -> None:
    training = training_schedule(28, train_embedding=True)
    text = render(training)
    lines = text.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "tables",
        "embed",
        "layers 0…26",
        "layer 27",
        "head",
        "layers 27…1",
        "layer 0",
        "embed",
    ]
    # A line has the words of its actions, in order, and a prefetch is on the line of what it overlaps.
    forward, backward = words(training, layer_key(1), "forward"), words(training, layer_key(0), "backward")
    assert [part.removesuffix(" of the next") for part in lines[2].split(": ")[1].split(" · ")] == [
        f"prefetch {forward[0].split()[1]}",
        *forward,
    ]
    assert [part for part in lines[6].split(": ")[1].split(" · ") if "prefetch" not in part] == backward
    assert "…" not in render(training_schedule(1, train_embedding=False))
