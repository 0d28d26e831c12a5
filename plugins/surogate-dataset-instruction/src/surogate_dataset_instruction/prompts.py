"""Prompts from format strings: `{system}`, `{instruction}`, `{input}`, and `{output}` at the very end or left out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

PLACEHOLDERS = ("system", "instruction", "input", "output")

ALPACA = "{system}\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
"""The format for a tokenizer without a chat template (github.com/tatsu-lab/stanford_alpaca)."""
ALPACA_NO_INPUT = "{system}\n\n### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_SYSTEM = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request."
)
"""Stands for the system prompt where there is none."""
ALPACA_SYSTEM_NO_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request."
)

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def check_format(name: str, text: str, *, has_input: bool, has_system: bool) -> None:
    """Raise `ValueError` when a row could not be put into the format, or a part of it would be lost."""
    found = _PLACEHOLDER.findall(text)
    for placeholder in found:
        if placeholder not in PLACEHOLDERS:
            close = difflib.get_close_matches(placeholder, PLACEHOLDERS, n=1)
            hint = f"; did you mean {{{close[0]}}}?" if close else ""
            known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
            raise ValueError(f"{name} has {{{placeholder}}}, known are {known}{hint}")
    if "instruction" not in found:
        raise ValueError(f"{name} has no {{instruction}}")
    if "output" in found and (found.count("output") > 1 or not text.endswith("{output}")):
        raise ValueError(f"{name} may have {{output}} only once and at its end: what follows would never be learnt")
    if has_input and "input" not in found:
        raise ValueError(f"{name} has no {{input}}, so input_field would be lost")
    if not has_input and "input" in found:
        raise ValueError(f"{name} has {{input}} but is for rows without an input")
    if has_system and "system" not in found:
        raise ValueError(f"{name} has no {{system}}, so the system prompt would be lost")


def fill(text: str, values: Mapping[str, str]) -> str:
    """The prompt; braces in the values are left alone."""
    return _PLACEHOLDER.sub(lambda match: values[match[1]], text.removesuffix("{output}"))
