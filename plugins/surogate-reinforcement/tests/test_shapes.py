"""Answers of a worker that are JSON and no answers."""

from __future__ import annotations

from typing import Any

import pytest

from surogate_reinforcement.shapes import ANSWERS, InvalidError

SAID: dict[str, Any] = {"role": "user", "content": "go"}
WRONG: dict[str, list[Any]] = {
    "build": [
        None,
        {},
        {"size": 0, "held_out": 0, "groups": False},
        {"size": 1.5, "held_out": 0, "groups": False},
        {"size": 3, "held_out": -1, "groups": False},
        {"size": 3, "held_out": 0, "groups": "no"},
    ],
    "problem": [
        [],
        {"messages": [SAID]},
        {"messages": [], "data": {}, "tools": []},
        {"messages": [SAID], "data": [], "tools": []},
        {"messages": [SAID], "data": {}, "tools": ["tool"]},
        {"messages": ["go"], "data": {}, "tools": []},
        {"messages": [{"role": 1, "content": "go"}], "data": {}, "tools": []},
    ],
    "start": [{}, 1],
    "reply": [
        {"messages": [{**SAID, "content": "\ud800"}], "done": False},
        "done",
        {"messages": [], "done": False},
        {"messages": [SAID], "done": 1},
        {"messages": {}, "done": True},
    ],
    "rewards": [None, [1.0], {"": 1.0}, {"a": "1"}, {"a": float("inf")}, {"a": -1e19}, {"a\x1b[2J": 1.0}],
    "group": [{}, [[1.0]]],
    "forget": [[]],
}
RIGHT: dict[str, Any] = {
    "build": {"size": None, "held_out": 0, "groups": True},
    "problem": {"messages": [SAID], "data": {"answer": [1, {}]}, "tools": [{}]},
    "start": None,
    "reply": {"messages": [SAID], "done": False},
    "rewards": {"a": None, "b": -1e18},
    "group": [{"a": 1.0}, {}],
    "forget": None,
}


def test_answers_have_a_shape() -> None:
    for request, check in ANSWERS.items():
        assert check(RIGHT[request]) == RIGHT[request]
        for value in WRONG[request]:
            with pytest.raises(InvalidError):
                check(value)
