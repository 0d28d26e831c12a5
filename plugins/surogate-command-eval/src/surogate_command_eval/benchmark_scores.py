"""Models measured on benchmarks: accuracy with standard errors, and pairs of models compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from surogate_command_eval.benchmarks import BETWEEN, LocalBenchmark, Question, Verdict, judged
from surogate_core.plugin import UserError, bundles, encoding, events, inference
from surogate_core.service.inference import prompt_of_messages, prompt_of_text
from surogate_core.service.plugins import Registry
from surogate_core.service.training import Subject, mean_stderr

Taken = Callable[[Mapping[str, Any]], None]
"""Receives a row's completion and verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalBenchmarks:
    """The evaluator of benchmark files."""

    benchmarks: Sequence[LocalBenchmark]
    wanted: inference.PromptOptions
    chat: bool = False
    """Whether a text prompt is a user's message."""
    system: str | None = None

    def __post_init__(self) -> None:
        for benchmark in () if self.chat else self.benchmarks:
            chat = next((shot for shot in benchmark.shots if shot.prompt is None), None)
            text = next((row for row in benchmark.rows if row.prompt is not None), None)
            if chat is not None and text is not None:
                raise UserError(
                    f"{chat.name}: this example is a chat, and {text.name} is a text. Fix: --chat, or rows of one kind"
                )

    def run(self, subject: bundles.MeasuredModel, taken: Taken) -> list[bundles.BenchmarkResult]:
        """The figures of a model."""
        found: list[bundles.BenchmarkResult] = []
        for benchmark in self.benchmarks:
            found += _OneBenchmark(self, benchmark, subject, taken).results()
        return found

    def context(self, benchmark: LocalBenchmark, row: Question, subject: bundles.MeasuredModel) -> inference.Prompt:
        """The tokens before the answer, the examples included."""
        if row.prompt is None or self.chat:
            turns = [turn for shot in benchmark.shots for turn in (*self._turns(shot), _answered(shot))]
            messages = [*turns, *self._turns(row)]
            system = [message for message in self._all(row) if message.get("role") == "system"]
            return prompt_of_messages(subject.tokenizer, [*system, *messages], name=row.name)
        return prompt_of_text(subject.tokenizer, self.text(benchmark, row), name=row.name)

    def text(self, benchmark: LocalBenchmark, row: Question) -> str:
        """A text prompt with its examples."""
        assert row.prompt is not None
        return "".join(f"{continued(shot.prompt or '', shot.shown)}{BETWEEN}" for shot in benchmark.shots) + row.prompt

    def _all(self, row: Question) -> Sequence[Mapping[str, Any]]:
        if row.prompt is None:
            return row.messages
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": row.prompt}]

    def _turns(self, row: Question) -> list[Mapping[str, Any]]:
        return [message for message in self._all(row) if message.get("role") != "system"]

    def pairs(
        self, benchmark: LocalBenchmark, row: Question, subject: bundles.MeasuredModel
    ) -> list[inference.JudgedText]:
        """The context with each of the row's choices."""
        context = self.context(benchmark, row, subject).ids
        found = []
        for choice in row.choices:
            if row.prompt is None or self.chat:
                ids = tuple(encoding.encode_text(subject.tokenizer, choice, add_special_tokens=False))
                found.append(inference.JudgedText(name=row.name, context=context, continuation=ids))
                continue
            whole = prompt_of_text(subject.tokenizer, continued(self.text(benchmark, row), choice), name=row.name).ids
            same = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), len(context))
            border = max(1, min(same, len(whole) - 1))
            found.append(inference.JudgedText(name=row.name, context=whole[:border], continuation=whole[border:]))
        return found


def continued(prompt: str, answer: str) -> str:
    """A text prompt and its answer, with a space between them if neither has white space there."""
    spaced = prompt[-1:].isspace() or answer[:1].isspace()
    return f"{prompt}{'' if spaced else ' '}{answer}"


def _answered(row: Question) -> Mapping[str, Any]:
    return {"role": "assistant", "content": row.shown}


@dataclass(slots=True)
class _OneBenchmark:
    """One benchmark of one model."""

    plan: LocalBenchmarks
    benchmark: LocalBenchmark
    subject: bundles.MeasuredModel
    taken: Taken
    samples: list[Mapping[str, Any]] = field(default_factory=list)

    def results(self) -> list[bundles.BenchmarkResult]:
        """Its figures."""
        rows = self.benchmark.rows
        scores: dict[str, list[float]] = {"accuracy": [math.nan] * len(rows)}
        chosen = [number for number, row in enumerate(rows) if row.match == "choice"]
        written = [number for number, row in enumerate(rows) if row.match != "choice"]
        if len(chosen) == len(rows):
            scores["accuracy_norm"] = [math.nan] * len(rows)
        self._choose(chosen, scores)
        unanswered, truncated = self._write(written, scores)
        order = {row.name: number for number, row in enumerate(rows)}
        self.samples.sort(key=lambda sample: (order[sample["row"]], sample.get("sample", 0)))
        made = [self._result(metric, values) for metric, values in scores.items()]
        return [replace(made[0], unanswered=unanswered, truncated=truncated), *made[1:]]

    def _result(self, metric: str, scores: Sequence[float]) -> bundles.BenchmarkResult:
        return bundles.BenchmarkResult(
            model=self.subject.name,
            task=self.benchmark.name,
            metric=metric,
            value=math.fsum(scores) / len(scores),
            stderr=mean_stderr(scores),
            rows=len(scores),
            scores=tuple(scores),
            samples=tuple(self.samples),
        )

    def _take(self, row: Question, **values: Any) -> None:
        sample = {"model": self.subject.name, "task": self.benchmark.name, "row": row.name, **values}
        self.samples.append(sample)
        self.taken(sample)

    def _choose(self, numbers: Sequence[int], scores: Mapping[str, list[float]]) -> None:
        rows = [self.benchmark.rows[number] for number in numbers]
        pairs = [self.plan.pairs(self.benchmark, row, self.subject) for row in rows]
        likelihoods = iter(self.subject.likelihoods([p for some in pairs for p in some], stage=self.benchmark.name))
        for number, row in zip(numbers, rows, strict=True):
            logprobs = [next(likelihoods).logprob for _ in row.choices]
            lengths = [len(choice) for choice in row.choices]
            found = {
                "accuracy": _best(logprobs),
                "accuracy_norm": _best([value / size for value, size in zip(logprobs, lengths, strict=True)]),
            }
            for metric, values in scores.items():
                values[number] = float(found[metric] == row.right)
            self._take(
                row,
                prompt=row.prompt if row.prompt is not None else row.messages,
                choices=row.choices,
                answer=row.right,
                chosen=found["accuracy"],
                chosen_norm=found["accuracy_norm"],
                logprobs=logprobs,
                correct=found["accuracy"] == row.right,
            )

    def _write(self, numbers: Sequence[int], scores: dict[str, list[float]]) -> tuple[float | None, float | None]:
        """Scores the rows that are answered by a completion; (share without an answer, share that is cut short)."""
        if not numbers:
            return None, None
        rows = [self.benchmark.rows[number] for number in numbers]
        verdicts: dict[tuple[int, int], Verdict] = {}

        def finished(text: inference.Text) -> None:
            row = rows[text.prompt]
            verdict = verdicts[text.prompt, text.sample] = judged(row, text.text)
            self._take(
                row,
                sample=text.sample,
                prompt=row.prompt if row.prompt is not None else row.messages,
                completion=text.text,
                answer=row.answers[0] if len(row.answers) == 1 else row.answers,
                extracted=verdict.extracted,
                correct=verdict.right,
                reason=text.reason,
                tokens=len(text.ids),
            )

        prompts = [self.plan.context(self.benchmark, row, self.subject) for row in rows]
        texts = self.subject.complete(prompts, self._wanted(), stage=self.benchmark.name, finished=finished)
        count = self.plan.wanted.samples
        right = [[verdicts[i, sample].right for sample in range(count)] for i in range(len(rows))]
        for number, some in zip(numbers, right, strict=True):
            scores["accuracy"][number] = sum(some) / count
        if count > 1 and len(rows) == len(self.benchmark.rows):
            scores[f"pass@{count}"] = [float(any(some)) for some in right]
        patterns = [v.extracted is None for (i, _), v in verdicts.items() if rows[i].match != "exact"]
        unanswered = sum(patterns) / len(patterns) if patterns else None
        return unanswered, sum(text.reason == "length" for text in texts) / len(texts)

    def _wanted(self) -> inference.PromptOptions:
        """A completion of a text prompt with examples ends where the next example would begin."""
        wanted, texts = self.plan.wanted, all(row.prompt is not None for row in self.benchmark.rows)
        if self.benchmark.shots and texts and not self.plan.chat and not wanted.stop:
            return replace(wanted, stop=(BETWEEN,))
        return wanted


def _best(values: Sequence[float]) -> int:
    """The number of the largest, the first of equal ones."""
    return max(range(len(values)), key=lambda i: (values[i], -i))


# ------------------------------------------------------------------------------------ figures


def mcnemar(first: Sequence[float], other: Sequence[float]) -> float | None:
    """The exact two-sided p-value of McNemar's test (Biometrika, 1947) on scores of 0 and 1; None for other scores."""
    if any(score not in (0.0, 1.0) for score in (*first, *other)):
        return None
    changed = [b - a for a, b in zip(first, other, strict=True) if a != b]
    count, gained = len(changed), sum(value > 0 for value in changed)
    tail = sum(math.comb(count, k) for k in range(min(gained, count - gained) + 1))
    return min(1.0, 2 * tail / 2**count)


def compared(first: bundles.BenchmarkResult, other: bundles.BenchmarkResult) -> bundles.BenchmarkResult:
    """A figure with its difference from that of the first model, row by row."""
    if len(first.scores) != len(other.scores) or not first.scores:
        return other
    pairs = [b - a for a, b in zip(first.scores, other.scores, strict=True)]
    return replace(
        other,
        difference=math.fsum(pairs) / len(pairs),
        difference_stderr=mean_stderr(pairs),
        p_value=mcnemar(first.scores, other.scores),
    )


def measure_all(
    prepared: Mapping[str, inference.PreparedModel],
    registry: Registry,
    evaluators: Sequence[bundles.Evaluator],
    engine: bundles.RolloutEngineSpec,
    *,
    slots: int | None = None,
    taken: Taken = lambda sample: None,
    progress: Callable[[events.Progress], None] = lambda event: None,
) -> list[bundles.BenchmarkResult]:
    """The figures of several models, each compared with the first."""
    firsts: dict[tuple[int, str, str], bundles.BenchmarkResult] = {}
    found = []
    for name, one in prepared.items():
        subject = Subject.load(name, one, registry, engine, slots=slots, progress=progress)
        for number, evaluator in enumerate(evaluators):
            for result in evaluator.run(subject, taken):
                key = (number, result.task, result.metric)
                first = firsts.setdefault(key, result)
                found.append(result if first is result else compared(first, result))
        del subject
    return found
