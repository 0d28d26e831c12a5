"""The options of the environments. Where a prompt is text with a name in braces, the name is replaced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval, MinLen

Count = Annotated[int, Interval(ge=1, le=64)]
Text = Annotated[str, MinLen(1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyOptions:
    """Options of copy."""

    length: Count = 4
    """Largest number of letters."""
    min_length: Count | None = None
    """Smallest number of letters; null is `length`."""
    alphabet: Text = "abcdefgh"
    """The letters."""
    separator: str = " "
    """What is between two letters. White space is ignored in replies."""
    prompt: Text = "Copy: {text}"
    """The user's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReverseOptions(CopyOptions):
    """Options of reverse."""

    prompt: Text = "Reverse: {text}"
    """The user's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticOptions:
    """Options of arithmetic."""

    digits: Annotated[int, Interval(ge=1, le=12)] = 1
    """Digits of the largest number."""
    terms: Annotated[int, Interval(ge=2, le=8)] = 2
    """Numbers of a question."""
    operators: Annotated[str, MinLen(1)] = "+-"
    """The operators that a question is drawn from, of + - *."""
    negative: bool = False
    """Whether answers may be negative."""
    prompt: Text = "What is {question}?"
    """The user's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CountdownOptions:
    """Options of countdown."""

    numbers: Annotated[int, Interval(ge=2, le=6)] = 3
    """How many numbers there are."""
    largest: Annotated[int, Interval(ge=3, le=1000)] = 50
    """The largest of the numbers."""
    prompt: Text = (
        "Using the numbers {numbers}, make an expression that equals {target}. You may use + - * / and parentheses, "
        "and each number at most once. Put the expression into <answer> tags, for example <answer>(1 + 2) * 3</answer>."
    )
    """The user's message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemsOptions:
    """Options of problems."""

    path: str = ""
    """The problems: a file, a directory, a URL or a hub id, as `path` of `datasets`."""
    subset: str | None = None
    """Configuration of a hub data set, such as main."""
    split: Text = "train"
    """Split of a hub data set or of a directory."""
    eval_path: str = ""
    """Problems that training never draws; empty is `path`, if `eval_split` is another split of it."""
    eval_split: str = ""
    """The split of those."""
    held_out: Annotated[int, Interval(ge=0)] = 0
    """How many of the last problems of `path` are held out, if neither of those is set."""
    question: Text = "question"
    """The field of the question."""
    answer: Text = "answer"
    """The field of the answer; what follows the last ####, as in GSM8K, or the whole text or number."""
    prompt: Text = "{question}\n\nThink step by step. Put the final answer into \\boxed{}."
    """The user's message."""
    system: str = ""
    """The system message; empty is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalculatorOptions:
    """Options of tool-calculator."""

    digits: Annotated[int, Interval(ge=1, le=12)] = 3
    """Digits of the largest number."""
    terms: Annotated[int, Interval(ge=2, le=8)] = 3
    """Numbers of a question."""
    max_turns: Annotated[int, Interval(ge=1, le=64)] = 4
    """Replies of the model in an episode; the last one has to have the answer."""
    call: Literal["tag", "json"] = "tag"
    """How the model calls the calculator: tag is <calculator>1 + 2</calculator>, and the result is a message of the
    user; json gives the tool to the chat template, and the result is a message of the tool.
    """
    prompt: Text = "What is {question}?"
    """The user's message; with tags, how to call the calculator follows it."""
