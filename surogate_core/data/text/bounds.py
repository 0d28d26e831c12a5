"""Limits on what a chat template computes: the model's files contain it, and one line can mean gigabytes or hours.

Jinja's sandbox keeps templates from files and processes, and a single `range` short. These bounds limit repetitions,
powers, all ranges of a rendering together, and its text. A template gets the day of the run (`clock`) and no chance, so
that two renderings of a conversation are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from surogate_core.data.text import clock

MAX_ITEMS = 1 << 20
"""Characters or items of one repetition (``'-' * n``), and steps of all the ranges of a rendering."""
MAX_BITS = 1 << 16
"""Size of a power."""
MAX_GROWTH = 16
"""A rendering has at most `MAX_ITEMS` characters, or this many per character of the conversation and its tools."""


def bounded(template: str) -> str:
    """What to pass to transformers' renderer instead of the template: the same with limits, and a new count of steps.

    Jinja computes constants while it compiles, so the bounds must be in place before. The renderer compiles a comment,
    and the template's program then replaces the comment's. Raises Jinja's errors for a template with mistakes.
    """
    compile_ = _compiler()
    if compile_ is None:
        return template
    name = _name(template)
    compiled = compile_(name)
    environment = compiled.environment
    if not hasattr(environment, "surogate_steps"):
        _bound(environment)
        real = environment.from_string(template)
        compiled.root_render_func, compiled.blocks = real.root_render_func, real.blocks
    environment.surogate_steps = (
        0  # set after the program: a template with mistakes is compiled again, and refused again
    )
    return name


@cache
def _name(template: str) -> str:
    """A comment of the template's own; the renderer looks for the word in it where turns are marked."""
    return f"{{# {hashlib.sha256(template.encode(errors='surrogatepass')).hexdigest()} {{% generation %}} #}}"


def check(text: str, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> None:
    """Raise `OverflowError` for a rendering that is far longer than what it was made of."""
    if len(text) > MAX_ITEMS and len(text) > MAX_GROWTH * (_size(messages) + _size(tools)):
        raise OverflowError(f"it writes {len(text):,} characters, more than {MAX_GROWTH} times its input")


@cache
def _compiler() -> Callable[[str], Any] | None:
    """transformers' cached function that compiles a template; None if transformers no longer has it."""
    try:
        from transformers.utils.chat_template_utils import _compile_jinja_template
    except ImportError:
        return None
    return _compile_jinja_template


def _bound(environment: Any) -> None:
    short_range = environment.globals["range"]

    def bounded_range(*arguments: int) -> range:
        steps: range = short_range(*arguments)
        environment.surogate_steps += len(steps)
        if environment.surogate_steps > MAX_ITEMS:
            raise OverflowError(f"its ranges have more than {MAX_ITEMS:,} steps")
        return steps

    environment.globals["range"] = bounded_range
    environment.globals["strftime_now"] = clock.strftime_now
    environment.globals["lipsum"] = environment.filters["random"] = _chance
    environment.intercepted_binops = frozenset({"*", "**"})
    environment.binop_table = {**environment.binop_table, "*": _times, "**": _power}


def _chance(*arguments: Any, **options: Any) -> Any:
    raise ValueError("it draws at random, so a row would differ each time")


def _times(left: Any, right: Any) -> Any:
    for many, number in ((left, right), (right, left)):
        if isinstance(many, str | list | tuple) and isinstance(number, int) and len(many) * number > MAX_ITEMS:
            raise OverflowError(f"it repeats a value to more than {MAX_ITEMS:,} items")
    return _number(left * right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > MAX_BITS:
        raise OverflowError("it raises a number to a power that is too large")
    return left**right


def _number(value: Any) -> Any:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise OverflowError("it multiplies numbers that are too large")
    return value


def _size(value: Any) -> int:
    """Characters of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(_size(key) + _size(item) for key, item in value.items())
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
