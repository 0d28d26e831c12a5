"""`surogate eval --tasks`: the figures of two models, the files that it writes, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from surogate_command_eval.benchmark_scores import LocalBenchmarks
from surogate_command_eval.benchmarks import BenchmarkOptions, read_benchmarks

import surogate
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.inference.generation import named, prepare
from surogate_core.inference.texts import Prompt, PromptOptions
from surogate_core.measure.subject import JudgedText, Subject
from surogate_core.plugins.registry import Registry

ROWS = [
    {"prompt": "The capital of France is", "answer": "Paris"},
    {"prompt": "2+2 =", "answer": 4, "match": "number"},
    {"prompt": "A car has", "choices": ["two wheels", "four wheels"], "answer": 1},
]


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of three kinds."""
    file = tmp_path_factory.mktemp("benchmark") / "mixed.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return file


def test_two_models_are_compared_and_each_completion_is_written(
    hf_dir: Path, model_copy: Path, benchmark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tasks", benchmark, "--max-new-tokens", 4, "--samples-output", tmp_path / "lines.jsonl", "device=cpu"]
    output = tmp_path / "figures.json"
    capsys.readouterr()
    assert main(["eval", str(hf_dir), str(model_copy), *map(str, words), "--output", str(output)]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[0] == "model"
    assert head.split()[-4:] == ["difference", "±", "stderr", "p"]
    first, other = json.loads(output.read_text())
    assert [line.split()[:3] for line in lines] == [[str(model), "mixed", "accuracy"] for model in (hf_dir, model_copy)]
    assert first.keys() == other.keys()
    assert not {"scores", "samples"} & first.keys()
    assert (first["difference"], other["difference"], other["p_value"]) == (None, 0.0, 1.0)
    rows = [json.loads(line) for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert [row["model"] for row in rows] == [str(hf_dir)] * 3 + [str(model_copy)] * 3
    assert [row["row"] for row in rows[:3]] == [f"{benchmark}:{n}" for n in (1, 2, 3)]
    assert sum(row["correct"] for row in rows[:3]) == pytest.approx(3 * first["value"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["base", "figures.json", "lines.jsonl"]
    (found,) = surogate.evaluate(hf_dir, tasks=[benchmark], task_options={"max_new_tokens": 4}, device="cpu")
    assert found.value == first["value"]
    assert found.samples[0]["completion"] == rows[0]["completion"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tasks", "gone.jsonl"), "--tasks gone.jsonl: cannot be read: No such file or directory"),
        (("--tasks", "FILE", "--tasks", "FILE"), "is named twice"),
        (("--tasks", "gsm8k"), "--tasks gsm8k: there is no such file. Fix: --tasks FILE.jsonl"),
        (("--tasks", "FILE", "--samples-output", "/"), "--samples-output /: is a directory. Fix: name a file"),
        (("--tasks", "nothing:a"), "--tasks nothing:a: there is no such file, and"),
        (("--tasks", "FILE", "--match", "close"), "match 'close': is not known. Fix: choose from exact"),
        (("--tasks", "FILE", "--shots", "-1"), "--shots -1: must be at least 0"),
        (("--tasks", "FILE", "--shots", "3"), "has 3 rows, and the first 3 are examples"),
        (("--tasks", "FILE", "--system", "Be brief."), "only a chat has a system message. Fix: add --chat"),
        (("--tasks", "FILE", "--engine", "nativ"), "there is no such rollout"),
        (("--tasks", "FILE", "--temperature", "-1"), "--temperature -1.0: is out of range"),
        (("--tasks", "FILE", "datasets=a.jsonl"), "datasets=a.jsonl: benchmarks have rows of their own"),
    ],
)
def test_bad_input_is_one_clear_message(
    words: tuple[str, ...], message: str, hf_dir: Path, benchmark: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["eval", str(hf_dir), *(str(benchmark) if word == "FILE" else word for word in words)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err


def test_bad_options_from_python(hf_dir: Path, benchmark: Path) -> None:
    for options, message in (
        (
            {"tasks": [benchmark], "task_options": {"shot": 1}},
            "task_options: there is no 'shot'. Fix: choose from match",
        ),
        ({"tasks": [benchmark], "task_options": {"sampling": {"heat": 1}}}, "sampling: there is no 'heat'"),
        ({"tasks": []}, "no benchmark is named"),
    ):
        with pytest.raises(surogate.UserError) as error:
            surogate.evaluate(hf_dir, device="cpu", **options)  # type: ignore[call-overload]
        assert message in str(error.value)


def test_figures_are_added_to_the_report_of_a_run(
    hf_dir: Path, benchmark: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "model").symlink_to(hf_dir)
    (run / "config.yaml").write_text(json.dumps({"lora": False}))
    (run / "metrics.jsonl").write_text('{"event": "run_start"}\n')
    words = ["--tasks", str(benchmark), "--max-new-tokens", "2", "device=cpu", "--report"]
    assert main(["eval", str(run), str(run / "model"), str(hf_dir), *words]) == 0
    said = capsys.readouterr().err
    assert f"note: {hf_dir} is no run" in said
    assert said.count("report.md") == 1, "two models of one run write its report once"
    report = (run / "report.md").read_text()
    assert "## Evaluations" in report
    assert "| model | mixed | accuracy |" in report
    assert "Evaluations" in (run / "report.html").read_text()
    (found,) = surogate.load(run).evaluate(
        tasks=[benchmark], task_options={"max_new_tokens": 2, "limit": 1}, device="cpu"
    )
    assert (found.model, found.rows) == (str(run), 1)


WORDS = """
from surogate_core import bundles, hookimpl
from surogate_core.errors import UserError

class Words:
    def __init__(self, words, settings):
        if "gone" in words:
            raise UserError("--tasks words:gone: there is no such word")
        self.words, self.limit = words, settings.limit

    def run(self, subject, taken):
        for word in self.words:
            taken({"model": subject.name, "task": word})
        figures = {"metric": "count", "value": float(len(self.words)), "stderr": 0.0, "rows": self.limit}
        return [bundles.BenchmarkResult(model=subject.name, task="words", **figures)]

@hookimpl
def surogate_evaluator():
    return bundles.EvaluatorSpec(name="words", open=Words)
"""


def test_a_plugin_brings_benchmarks(
    hf_dir: Path, install_plugin: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    install_plugin("eval-words", WORDS)
    words = ["--tasks", "words:a", "--tasks", "words:b", "--limit", "7", "device=cpu"]
    capsys.readouterr()
    assert main(["eval", str(hf_dir), *words, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["task"], found["metric"], found["value"], found["rows"]) == ("words", "count", 2.0, 7)
    for more, message in (
        (("--tasks", "words:gone"), "there is no such word"),
        (("--tasks", "words:"), "names no benchmark. Fix: --tasks words:BENCHMARK"),
        (("--match", "exact"), "--match: is for files of JSON lines, and none is named"),
        (("--samples", "2"), "--samples: is for files of JSON lines"),
        (("--stop", "a"), "--stop: is for files of JSON lines"),
        (("--temperature", "1"), "--temperature: is for files of JSON lines"),
    ):
        assert main(["eval", str(hf_dir), "--tasks", "words:a", "device=cpu", *more]) == 2
        assert message in capsys.readouterr().err


def test_a_token_over_the_border_belongs_to_the_choice(hf_dir: Path, installed: Registry, tmp_path: Path) -> None:
    """A prompt that ends with a space, which the tokenizer joins to the next word."""
    found = named(str(hf_dir))
    prepared = prepare(found, load_run_config([*found.overrides, "device=cpu"], registry=installed), installed)
    subject = Subject("m", prepared, None, None)  # type: ignore[arg-type]
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"prompt": "A car has ", "choices": ["two", "four"], "answer": 1}))
    benchmarks = LocalBenchmarks(benchmarks=read_benchmarks([str(file)], BenchmarkOptions()), wanted=PromptOptions())
    (benchmark,) = benchmarks.benchmarks
    for pair, choice in zip(benchmarks.pairs(benchmark, benchmark.rows[0], subject), ("two", "four"), strict=True):
        assert isinstance(pair, JudgedText)
        assert pair.continuation
        whole = subject.tokenizer.decode((*pair.context, *pair.continuation))
        assert whole == f"A car has {choice}"
    prompt = benchmarks.context(benchmark, benchmark.rows[0], subject)
    assert isinstance(prompt, Prompt)
