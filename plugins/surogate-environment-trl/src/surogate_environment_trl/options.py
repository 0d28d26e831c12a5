"""The options of `environment=trl`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import MinLen

from surogate_core.plugin import bundles


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardFunctionOptions:
    """Prompts of a file and the functions that reward completions."""

    path: str = ""
    """A .jsonl file; each line is an object with a prompt and further columns."""
    eval_path: str = ""
    """Another one, whose prompts are held out; empty holds out the last ones of `path`."""
    reward_funcs: Annotated[list[str] | None, bundles.Code()] = None
    """Reward functions, each as `module:function` or `file.py:function`; their names are the names of the rewards. An
    empty list only gives prompts, for a run with a `reward_model`.
    """
    prompt: Annotated[str, MinLen(1)] = "prompt"
    """The column of the prompt: a text, which becomes a message of the user, or a list of messages."""
    system: str = ""
    """The system message of prompts that have none; empty is none."""
    call: Literal["completion", "group"] = "completion"
    """Whether a function is called with each completion alone, or with all completions of a prompt."""
