"""Figures of benchmarks: standard errors, pairs of models, and what is before an answer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from surogate_command_eval.benchmark_scores import LocalBenchmarks, compared, mcnemar
from surogate_command_eval.benchmarks import BenchmarkOptions, read_benchmarks

from surogate_core.plugin import UserError, bundles, inference
from surogate_core.service.training import Subject
from surogate_testing.chat_templates import byte_tokenizer


def result(*scores: float) -> bundles.BenchmarkResult:
    return bundles.BenchmarkResult(
        model="m",
        task="t",
        metric="accuracy",
        value=sum(scores) / len(scores),
        stderr=0,
        rows=len(scores),
        scores=scores,
    )


def test_the_p_value_is_that_of_mcnemars_exact_test() -> None:
    first, other = [1.0] * 8 + [0.0] * 22, [1.0, 1.0, 1.0] + [0.0] * 5 + [1.0] * 15 + [0.0] * 7
    assert mcnemar(first, other) == pytest.approx(0.0413894653, rel=1e-6), "5 lost, 15 gained: scipy.stats.binomtest"
    assert mcnemar(other, first) == mcnemar(first, other)
    assert mcnemar(first, first) == 1.0
    assert mcnemar([0.5], [1.0]) is None


def test_models_are_compared_row_by_row() -> None:
    first, other = result(1, 0, 0, 1, 0, 0), result(1, 1, 0, 1, 1, 0)
    found = compared(first, other)
    assert found.difference == pytest.approx(1 / 3)
    assert found.difference_stderr == pytest.approx(np.std([0, 1, 0, 0, 1, 0], ddof=1) / math.sqrt(6))
    assert found.p_value == 0.5
    assert compared(result(1, 0), other).difference is None, "other rows"


class Parrot(Subject):
    """Answers with texts of its own, and keeps what it is asked."""

    def answer(self, *texts: str, logprobs: tuple[float, ...] = ()) -> Parrot:
        self.texts, self.logprobs = texts, logprobs
        return self

    def complete(self, prompts: Any, wanted: inference.PromptOptions, **more: Any) -> list[inference.Text]:
        self.prompts, self.wanted = [self.tokenizer.decode(one.ids) for one in prompts], wanted
        found = []
        for number in range(len(prompts)):
            for sample in range(wanted.samples):
                text = self.texts[number * wanted.samples + sample]
                reason: Any = "length" if text.endswith("…") else "stop"
                found.append(
                    inference.Text(prompt=number, sample=sample, text=text, ids=(1,), logprobs=(), reason=reason)
                )
                more["finished"](found[-1])
        return found

    def likelihoods(self, pairs: Any, **more: Any) -> list[inference.Likelihood]:
        self.pairs = [tuple(self.tokenizer.decode(ids) for ids in (p.context, p.continuation)) for p in pairs]
        return [inference.Likelihood(logprob=value, greedy=False) for value in self.logprobs]


@pytest.fixture(scope="module")
def parrot() -> Parrot:
    prepared: Any = SimpleNamespace(tokenizer=byte_tokenizer())
    return Parrot("m", prepared, None, None)  # type: ignore[arg-type]


def benchmarks_of(
    place: Path, rows: list[dict[str, Any]], wanted: inference.PromptOptions, *, chat: bool = False, **options: Any
) -> LocalBenchmarks:
    file = place / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_benchmarks([str(file)], BenchmarkOptions(**options))
    return LocalBenchmarks(benchmarks=read, wanted=wanted, chat=chat)


SUMS = [{"prompt": f"{n}+1 =", "answer": n + 1, "match": "number"} for n in range(4)]


def test_completions_are_scored(tmp_path: Path, parrot: Parrot) -> None:
    lines: list[Any] = []
    benchmarks = benchmarks_of(tmp_path, SUMS, inference.PromptOptions())
    (found,) = benchmarks.run(parrot.answer("1", "so 2.", "none", "5…"), lines.append)
    assert (found.value, found.rows, found.scores) == (0.5, 4, (1.0, 1.0, 0.0, 0.0))
    assert (found.unanswered, found.truncated) == (0.25, 0.25)
    assert lines == list(found.samples)
    assert [line["correct"] for line in lines] == [True, True, False, False]
    assert lines[2] == {
        "model": "m",
        "task": "t",
        "row": f"{tmp_path}/t.jsonl:3",
        "sample": 0,
        "prompt": "2+1 =",
        "completion": "none",
        "answer": "3",
        "extracted": None,
        "correct": False,
        "reason": "stop",
        "tokens": 1,
    }
    assert parrot.prompts == [row["prompt"] for row in SUMS]
    assert parrot.wanted.stop == (), "no example, no stop"


def test_samples_have_a_mean_and_pass_at_their_number(tmp_path: Path, parrot: Parrot) -> None:
    benchmarks = benchmarks_of(tmp_path, SUMS[:2], inference.PromptOptions(samples=2))
    mean, best = benchmarks.run(parrot.answer("1", "7", "7", "8"), lambda line: None)
    assert (mean.metric, mean.scores, mean.value) == ("accuracy", (0.5, 0.0), 0.25)
    assert (best.metric, best.scores, best.value) == ("pass@2", (1.0, 0.0), 0.5)


def test_examples_are_before_a_text_and_end_with_a_blank_line(tmp_path: Path, parrot: Parrot) -> None:
    benchmarks = benchmarks_of(tmp_path, SUMS[:3], inference.PromptOptions(), shots=2)
    benchmarks.run(parrot.answer("3"), lambda line: None)
    assert parrot.prompts == ["0+1 = 1\n\n1+1 = 2\n\n2+1 ="]
    assert parrot.wanted.stop == ("\n\n",)
    benchmarks_of(tmp_path, SUMS[:3], inference.PromptOptions(stop=("#",)), shots=2).run(
        parrot.answer("3"), lambda line: None
    )
    assert parrot.wanted.stop == ("#",)


def test_examples_are_turns_of_a_chat(tmp_path: Path, parrot: Parrot) -> None:
    system = {"role": "system", "content": "Add."}
    rows = [
        {"messages": [system, {"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in SUMS[:2]
    ]
    benchmarks_of(tmp_path, rows, inference.PromptOptions(), shots=1).run(parrot.answer("2"), lambda line: None)
    tokenizer = parrot.tokenizer
    turns = [system, {"role": "user", "content": "0+1 ="}, {"role": "assistant", "content": "1"}]
    expected = tokenizer.apply_chat_template(
        [*turns, {"role": "user", "content": "1+1 ="}], tokenize=False, add_generation_prompt=True
    )
    assert parrot.prompts == [expected]
    assert parrot.wanted.stop == ()
    told = LocalBenchmarks(
        benchmarks=benchmarks_of(tmp_path, SUMS[:2], inference.PromptOptions(), shots=1).benchmarks,
        wanted=inference.PromptOptions(),
        chat=True,
        system="Add.",
    )
    told.run(parrot.answer("2"), lambda line: None)
    assert parrot.prompts == [expected]


def test_examples_of_a_text_are_texts(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "0+1 ="}], "answer": 1}, SUMS[0]]
    with pytest.raises(UserError, match=r"t.jsonl:1: this example is a chat, and .*t.jsonl:2 is a text. Fix: --chat"):
        benchmarks_of(tmp_path, rows, inference.PromptOptions(), shots=1)
    benchmarks_of(tmp_path, rows, inference.PromptOptions(), shots=1, chat=True)


CHOICE = [{"prompt": "A car has", "choices": ["two", "four wheels"], "answer": 1}]


def test_choices_are_scored_by_likelihood_and_by_character(tmp_path: Path, parrot: Parrot) -> None:
    benchmarks = benchmarks_of(tmp_path, CHOICE, inference.PromptOptions())
    plain, norm = benchmarks.run(parrot.answer(logprobs=(-3.0, -6.0)), lambda line: None)
    assert (plain.metric, plain.value) == ("accuracy", 0.0)
    assert (norm.metric, norm.value) == ("accuracy_norm", 1.0), "-6/11 is more than -3/3"
    assert plain.truncated is plain.unanswered is None
    assert parrot.pairs == [("A car has", " two"), ("A car has", " four wheels")]
    assert plain.samples[0]["logprobs"] == [-3.0, -6.0]


def test_the_choices_of_a_chat_follow_its_template(tmp_path: Path, parrot: Parrot) -> None:
    benchmarks_of(tmp_path, CHOICE, inference.PromptOptions(), chat=True).run(
        parrot.answer(logprobs=(-1.0, -1.0)), lambda line: None
    )
    context = parrot.tokenizer.apply_chat_template(
        [{"role": "user", "content": "A car has"}], tokenize=False, add_generation_prompt=True
    )
    assert parrot.pairs == [(context, "two"), (context, "four wheels")]
