"""The date that chat templates write. It is the same in all renderings of a run, and a template has no time of day.

Rows with a date differ from day to day, so the date is part of the key of their tokens (`pipeline`) and of a
checkpoint's position in the data (`sampler`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import date, datetime, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CLOCK = re.compile(r"\bstrftime_now\b")


class _Clock:
    """The day; None until a template asks for it."""

    day: date | None = None
    follows = False


def today() -> date:
    """The day of this process: the day of the first call, or the one that `set_day` chose."""
    if _Clock.day is None or _Clock.follows:
        _Clock.day = date.today()
    return _Clock.day


def set_day(day: date) -> None:
    """Choose the day: of the process that started this one, or of a run that goes on."""
    _Clock.day = day


def resume(state: Mapping[str, Any]) -> None:
    """Choose the day with which a checkpoint saved its position in the data, if the rows have one."""
    if day := state.get("day"):
        set_day(date.fromisoformat(day))


def follow() -> None:
    """Let the day change at midnight, for a process that renders prompts for weeks and compares no two of them."""
    _Clock.follows = True


def strftime_now(form: str) -> str:
    """The function of this name in templates, with midnight as the time of day."""
    return datetime.combine(today(), time()).strftime(form)


def shows_date(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a chat template of the tokenizer asks for the date."""
    template = tokenizer.chat_template or ""
    texts = template.values() if isinstance(template, dict) else [template]
    return any(_CLOCK.search(text) for text in texts)
