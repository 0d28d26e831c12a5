"""The flags of commands: one table for those that several commands have, and their lines in a command's help."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

COLUMN, WIDTH = 23, 120
"""Where the help of a flag begins, and where its lines end."""


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag, or several of one kind with one help."""

    kind: Literal["text", "list", "count", "number", "switch"]
    """A text, of which the last one counts; texts, as it may be repeated; a whole number from 1; a number of
    `surogate_commands.sampling.NUMBERS`; no value.
    """
    form: str
    """The name with its value, such as ``--max-new-tokens N``; several are separated by commas."""
    help: str = ""
    """What it does; its lines are wrapped."""

    @property
    def names(self) -> list[str]:
        """With their dashes."""
        return re.findall(r"--[a-z][a-z-]*", self.form)


def shown(flags: Iterable[Flag]) -> str:
    """The lines of a command's help for these flags."""
    lines = []
    for flag in flags:
        head = f"  {flag.form}"
        wrapped = (textwrap.wrap(line, WIDTH - COLUMN, break_on_hyphens=False) for line in flag.help.splitlines())
        texts = [text for some in wrapped for text in some]
        if texts and len(head) < COLUMN:
            head = f"{head:<{COLUMN}}{texts.pop(0)}"
        lines += [head, *(" " * COLUMN + text for text in texts)]
    return "\n".join(lines) + "\n"


ADAPTER = Flag(
    "text",
    "--adapter DIR",
    "an adapter, a run or a checkpoint to use on MODEL, where that is not the base that it names",
)
CHAT = Flag("switch", "--chat", "a prompt is a user's message, and the completion the assistant's answer")
SYSTEM = Flag("text", "--system TEXT", "the system message of --chat")
MAX_NEW_TOKENS = Flag("count", "--max-new-tokens N", "largest number of tokens of a completion (256)")
TEMPERATURE = Flag(
    "number",
    "--temperature T",
    "0 takes the most probable token. Without these flags generation_config.json decides",
)
FILTERS = Flag("number", "--top-k N, --top-p P, --min-p P, --repetition-penalty R")
SLOTS = Flag("count", "--slots N", "sequences at a time; without it as many as the prompts need and memory allows")
ENGINE = Flag("text", "--engine NAME", "the rollout engine (native)")
TOOL_PARSER = Flag(
    "text", "--tool-parser NAME", "the form of the model's tool calls; without it the chat template decides"
)
