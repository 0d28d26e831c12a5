"""The options of `environment=openenv`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Interval, MinLen


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvOptions:
    """A server of OpenEnv, and how its observations and actions are written as text."""

    url: Annotated[str, MinLen(1)] = "http://127.0.0.1:8000"
    """Address of the server."""
    reset: dict[str, Any] = field(default_factory=dict)
    """Further arguments of `reset`, beside the seed."""
    prompt: Annotated[str, MinLen(1)] = "{observation}"
    """The first message of the user; `{observation}` is replaced by what `reset` returns."""
    system: str = ""
    """The system message; empty is none."""
    observation: str = ""
    """The field of an observation that is shown; empty shows all of them as JSON."""
    action: dict[str, Any] = field(default_factory=lambda: {"message": "{reply}"})
    """The action, in which the text `{reply}` is replaced by the model's reply."""
    reply: Literal["text", "tag", "json"] = "text"
    """What of a reply becomes the action: the whole text without thinking, what the last `<action>…</action>` holds, or
    that as a JSON value.
    """
    reward: Literal["sum", "last"] = "sum"
    """Whether the rewards of the steps are added up, or the last one counts."""
    timeout: Annotated[float, Interval(gt=0, le=86_400)] = 30.0
    """Seconds that the server may take for one answer."""
