"""What an environment may answer, as JSON values: its worker checks that, and the run does, which trusts no worker."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

from surogate_reinforcement.frames import LARGEST, TooLargeError

LARGEST_REWARD = 1e18
"""A larger one, squared, leaves little of float32's range, in which losses and gradients are computed."""
MOST_REWARDS = 256
"""Rewards of an episode."""
LONGEST_NAME = 200
"""Characters of the name of a reward."""


class InvalidError(Exception):
    """The environment returned something that it must not."""


def facts(found: Any) -> dict[str, Any]:
    """Size, held-out problems, and whether it compares groups."""
    match found:
        case {"size": size, "held_out": int(held_out), "groups": bool()} if held_out >= 0:
            if size is None or (isinstance(size, int) and size > 0):
                return dict(found)
    said = found if isinstance(found, Mapping) else {}
    raise InvalidError(f"size is {said.get('size')!r:.40}, held_out is {said.get('held_out')!r:.40}")


def problem(found: Any) -> dict[str, Any]:
    """A problem: messages, of which there is one at least, data and tools."""
    match found:
        case {"messages": list(said), "data": dict(), "tools": list(tools)}:
            if not said:
                raise InvalidError("the problem has no message")
            messages(said)
            if not all(isinstance(tool, Mapping) for tool in tools):
                raise InvalidError("a tool of the problem is no mapping")
            return dict(found)
    raise InvalidError("it is no problem")


def turn(found: Any) -> dict[str, Any]:
    """A turn: messages, unless it is done."""
    match found:
        case {"messages": list(said), "done": bool(done)}:
            if not done and not said:
                raise InvalidError("the episode goes on, but the turn has no message")
            messages(said)
            return dict(found)
    raise InvalidError("it is no turn")


def messages(found: Iterable[Any]) -> None:
    """Raise `InvalidError` if one is no message, and `TooLargeError` if they are longer than an answer may be."""
    length = 0
    for message in found:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidError("a message is no mapping with `role` and `content`")
        length += len(message["content"]) if isinstance(message["content"], str) else 0
        if not _is_text(message):
            raise InvalidError("a message has half of a surrogate pair, which is not text")
    if length > LARGEST:
        raise TooLargeError(f"messages of {length} characters")


def _is_text(message: Mapping[str, Any]) -> bool:
    """Whether a tokenizer can take all texts. A message that is not JSON passes; the worker refuses it later."""
    with contextlib.suppress(TypeError, RecursionError):
        try:
            json.dumps(message, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return False
        except ValueError:
            return True
    return True


def rewards(found: Any) -> dict[str, float | None]:
    """The named rewards of an episode."""
    if not isinstance(found, Mapping):
        raise InvalidError(f"the rewards are {type(found).__name__}, not a mapping")
    if len(found) > MOST_REWARDS:
        raise InvalidError(f"there are {len(found)} rewards, more than {MOST_REWARDS}")
    return {_name(name, value): None if value is None else _reward(name, value) for name, value in found.items()}


def _name(name: Any, value: Any) -> str:
    if not isinstance(name, str) or not (value is None or isinstance(value, Real)):
        raise InvalidError(f"reward {name!r:.40} is {type(value).__name__}, not a number or None")
    if not 0 < len(name) <= LONGEST_NAME:
        raise InvalidError(f"the name of a reward has {len(name)} characters, not 1 to {LONGEST_NAME}: {name[:40]!r}")
    if not name.isprintable():
        raise InvalidError(f"the name of a reward has characters that are not printable: {name[:40]!r}")
    return name


def _reward(name: str, value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidError(f"reward {name[:40]!r} is {number}")
    if abs(number) > LARGEST_REWARD:
        raise InvalidError(f"reward {name[:40]!r} is {number:g}, which overflows in sums; at most {LARGEST_REWARD:g}")
    return number


def group(found: Any) -> list[dict[str, float | None]]:
    """The rewards of episodes that were compared."""
    if not isinstance(found, list | tuple):
        raise InvalidError("the rewards of the group are no list")
    return [rewards(one) for one in found]


def nothing(found: Any) -> None:
    """The answer to a request that only says something."""
    if found is not None:
        raise InvalidError("it is not empty")


ANSWERS: Mapping[str, Callable[[Any], Any]] = {
    "build": facts,
    "problem": problem,
    "start": nothing,
    "reply": turn,
    "rewards": rewards,
    "group": group,
    "forget": nothing,
}
"""Request → what checks its answer."""
