"""lm-eval's tasks through Surogate and through lm-eval's own class for transformers: equal figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs surogate-eval-lm-eval[harness]")

from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from surogate_eval_lm_eval.evaluator import HarnessBenchmarks
from surogate_eval_lm_eval.model import SurogateLM

from surogate_core.bundles import EvalSettings
from surogate_core.config.resolve import load_run_config
from surogate_core.inference.generation import named, prepare
from surogate_core.measure.subject import Subject
from surogate_core.plugins.registry import Registry

SPLIT = "dataset_path: json\ndataset_kwargs: {data_files: {test: FILE}}\ntest_split: test\nnum_fewshot: 2\n"
SPLIT += "fewshot_split: test\n"
TASKS = {
    "local_gen": """\
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["\\n\\n", "e"], max_gen_toks: 12, do_sample: false}
filter_list:
  - {name: last-number, filter: [{function: regex, regex_pattern: "(\\\\d)", group_select: -1}, {function: take_first}]}
  - {name: whole, filter: [{function: take_first}]}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "local_choice": """\
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: [red, green, a very dark blue]
doc_to_target: "{{right}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_rolling": """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
num_fewshot: 0
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
""",
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three tasks on twelve rows, whose texts go beyond the model's positions."""
    place = tmp_path_factory.mktemp("tasks")
    rows = [
        {"question": f"What is {n}+{n}?", "answer": str(2 * n), "right": n % 3, "text": f"The chain slips {n}. " * 40}
        for n in range(12)
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        head = SPLIT if "num_fewshot" not in text else SPLIT.replace("num_fewshot: 2\n", "")
        (place / f"{name}.yaml").write_text(f"task: {name}\n{head}{text}".replace("FILE", str(place / "rows.jsonl")))
    return [str(place / f"{name}.yaml") for name in TASKS]


@pytest.fixture(scope="module")
def subject(hf_dir: Path, installed: Registry) -> Subject:
    found = named(str(hf_dir))
    config = load_run_config([*found.overrides, "device=cpu"], registry=installed)
    return Subject.load("m", prepare(found, config, installed), installed, installed.get("rollout", "native"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package datasets writes what it reads."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


def test_figures_are_those_of_lm_evals_class_for_transformers(hf_dir: Path, subject: Subject, tasks: list[str]) -> None:
    def measured(model: Any) -> Any:
        return simple_evaluate(model=model, tasks=tasks, task_manager=TaskManager(include_defaults=False))

    theirs = measured(HFLM(pretrained=str(hf_dir), device="cpu", dtype="float32", batch_size=4))
    ours = measured(SurogateLM(subject))
    assert ours["results"].keys() == theirs["results"].keys() == TASKS.keys()
    for task, values in theirs["results"].items():
        figures = {key: value for key, value in values.items() if isinstance(value, float)}
        assert figures
        assert {key: ours["results"][task][key] for key in figures} == pytest.approx(figures, rel=1e-5)
        for own, other in zip(ours["samples"][task], theirs["samples"][task], strict=True):
            assert own["doc_id"] == other["doc_id"]
            if task == "local_gen":
                assert own["resps"] == other["resps"]
                continue
            flat, expected = ([x for resp in s["resps"] for x in resp] for s in (own, other))
            assert [x[0] if isinstance(x, tuple) else x for x in flat] == pytest.approx(
                [x[0] if isinstance(x, tuple) else x for x in expected], rel=1e-5
            )


def test_results_have_scores_of_rows_and_lines(subject: Subject, tasks: list[str]) -> None:
    lines: list[Any] = []
    found = HarnessBenchmarks(tasks, EvalSettings(limit=4)).run(subject, lines.append)
    figures = {(one.task.removeprefix("lm-eval:local_"), one.metric): one for one in found}
    assert figures.keys() == {
        ("gen", "exact_match,last-number"),
        ("gen", "exact_match,whole"),
        ("choice", "acc"),
        ("choice", "acc_norm"),
        ("rolling", "word_perplexity"),
        ("rolling", "bits_per_byte"),
    }
    acc = figures["choice", "acc"]
    assert acc.rows == len(acc.scores) == 4
    assert sum(acc.scores) / 4 == acc.value
    assert figures["rolling", "word_perplexity"].scores == (), "sums, not scores"
    assert [line["row"] for line in lines if line["task"] == "lm-eval:local_choice"] == [0, 1, 2, 3]
    json.dumps(lines)
