"""Options of the live page, which every command reads; they import no page."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class WebOptions:
    """Options of the live page."""

    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """Port on 127.0.0.1; 0 takes a free one."""
    compare: list[str] = field(default_factory=list)
    """Output directories of other runs, drawn over this one."""
