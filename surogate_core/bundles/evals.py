"""Benchmarks: what measures a model, and the figures that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from surogate_core.bundles.handed import MeasuredModel


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkResult:
    """One figure of one model on one benchmark."""

    model: str
    """As it was named."""
    task: str
    """Name of the benchmark."""
    metric: str
    """Such as ``accuracy``."""
    value: float
    stderr: float
    """Standard error over the rows; NaN for one row."""
    rows: int
    unanswered: float | None = None
    """Share of the completions in which the pattern finds nothing; None where no pattern is used."""
    truncated: float | None = None
    """Share of the completions that ended at the largest number of tokens; None where nothing is generated."""
    difference: float | None = None
    """Value minus that of the first model; None for the first, and where scores of rows are not known."""
    difference_stderr: float | None = None
    """Standard error of the difference, from the rows in pairs."""
    p_value: float | None = None
    """Exact McNemar test: the probability of so unequal a split of the rows that only one of the two models gets
    right, if both are equally good. None unless every score is 0 or 1.
    """
    scores: tuple[float, ...] = field(default=(), repr=False)
    """The score of each row, in the order of the file."""
    samples: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """Each row's completion or likelihoods, and the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """What applies to every benchmark of an evaluation."""

    shots: int | None = None
    """Solved examples before each prompt; None is the benchmark's own number."""
    limit: int | None = None
    """Rows of each benchmark at most."""
    chat: bool = False
    """Whether the chat template is applied to prompts."""
    system: str | None = None
    """The system message of chats."""
    max_new_tokens: int | None = None
    """Tokens of a completion at most; None is the benchmark's own number."""
    seed: int = 0


class Evaluator(Protocol):
    """Benchmarks that are checked and ready to run."""

    def run(self, subject: MeasuredModel, taken: Callable[[Mapping[str, Any]], None]) -> list[BenchmarkResult]:
        """Measure a model. `taken` receives each row's completion and verdict as it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatorSpec:
    """A source of benchmarks for `surogate eval --tasks NAME:BENCHMARK`."""

    name: str
    """The part before the colon."""
    open: Callable[[Sequence[str], EvalSettings], Evaluator]
    """(names of benchmarks, settings) → the benchmarks. Called before any model is loaded; raises `UserError` for one
    that does not exist.
    """
