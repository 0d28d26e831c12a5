"""`surogate eval`: the command, its words, and its table."""

from __future__ import annotations

import math

import pytest
from surogate_command_eval import surogate_command
from surogate_command_eval.command import USAGE, main, table
from surogate_command_eval.evaluation import HeldOutFigures
from surogate_command_eval.python import evaluate

from surogate_core.plugin import UserError

SUROGATE_PLUGIN = "command-eval"


def test_conformance(surogate_check):
    surogate_check.run()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["MODEL", "--help"]) == 0
    assert capsys.readouterr().out == USAGE
    assert surogate_command().name == "eval"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no model is named. Fix: surogate eval MODEL datasets=FILE.jsonl"),
        (("a", "a"), "a is named twice"),
        (("a", "--jsn"), "--jsn is not known. Fix: --json"),
        (("a", "--output"), "a value must follow"),
        (("a", "--json=false"), "--json: is a switch and takes no value"),
        (("a", "--shots", "3"), "--shots: it is for benchmarks, and none is named. Fix: add --tasks FILE.jsonl"),
        (("a", "--chat"), "--chat: it is for benchmarks"),
    ],
)
def test_wrong_words_are_one_clear_message(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        main(words)
    assert message in str(error.value)


def test_python_names_each_model_once() -> None:
    for models in ([], ["a", "a"]):
        with pytest.raises(UserError, match="Fix: name each model once"):
            evaluate(models)
    with pytest.raises(UserError, match="task_options: no benchmark is named"):
        evaluate("a", task_options={})


def test_the_table_has_a_difference_where_there_are_several_models() -> None:
    one = HeldOutFigures(
        model="a",
        loss=2.0,
        stderr=0.25,
        perplexity=math.exp(2),
        accuracy=0.5,
        documents=1000,
        label_tokens=20,
        data="x",
    )
    head, line = table([one]).splitlines()
    assert head.split() == ["model", "loss", "±", "stderr", "perplexity", "accuracy", "documents", "label", "tokens"]
    assert line.split() == ["a", "2.0000", "0.2500", "7.389", "50.00%", "1,000", "20"]
    other = HeldOutFigures(
        model="b", loss=math.pi, stderr=math.nan, perplexity=math.nan, accuracy=math.nan, documents=1, label_tokens=2,
        data="y", figures={"margin": 0.12345},
    )  # fmt: skip
    *_, figures, note = table([one, other]).splitlines()
    assert figures == "b: margin 0.1235"
    assert note.startswith("Models with another tokenizer or template")
