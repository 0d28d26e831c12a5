"""`surogate numerics`: the command, its words, what it measures of a layer, and its page."""

from __future__ import annotations

import re

import pytest
import torch
from surogate_command_numerics.command import USAGE, main
from surogate_command_numerics.numerics import Numerics, Training
from surogate_command_numerics.page import markdown, picture
from surogate_command_numerics.rounding import DENSE, ROLES, OperandRounding, Roundings, rounding_of
from torch import Tensor

from surogate_core.plugin import UserError
from surogate_testing import tiny

SUROGATE_PLUGIN = "command-numerics"


def test_conformance(surogate_check):
    surogate_check.run()


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == USAGE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recipes"], "--recipes: a value must follow"),
        (["--run", ""], "--run: is empty"),
        (["recipe=nvfp4"], "recipe=… names one recipe. Fix: --recipes bf16,fp8-hybrid"),
        (["output_dir=mine"], "Fix: --output mine"),
        (["--multirun"], "no --multirun"),
    ],
)
def test_wrong_words_are_one_clear_message(words: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        main(words)
    assert message in str(error.value)


def test_every_role_of_a_layer_is_measured() -> None:
    def a_half(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
        return x / 2, torch.full_like(x, role == "gradient", dtype=torch.bool)

    found = rounding_of(tiny.engine(), tiny.batches(0)[0], {"half": Roundings(dense=a_half)})
    assert {(one.recipe, one.part) for one in found} == {("half", DENSE)}
    assert {one.role for one in found} == set(ROLES)
    for one in found:
        assert (one.error, one.saturated) == (0.5, float(one.role == "gradient"))


def test_the_page_compares_with_the_first_run() -> None:
    def training(name: str, *held: float) -> Training:
        return Training(
            name=name, recipe=name, weight_format=None, note=f"{name} is emulated", losses=[3.0, 2.0],
            held=list(enumerate(held)), saturated={"weight": 0.25}, underflowed=None,
        )  # fmt: skip

    found = Numerics(
        model="tiny", parameters=1000, device="cpu", torch="2", steps=2, tokens_per_step=256, seed=1,
        trainings=[training("wide", 3.0, 2.0), training("eight", 3.0, 2.5)],
        rounding=[
            OperandRounding(recipe="eight", layer=0, part=DENSE, role="weight", error=0.03, to_zero=0.0, saturated=0.0)
        ],
    )  # fmt: skip
    text = markdown(found)
    assert "| wide | 2.0000 | +0.00% | weight 25.00% | – |" in text
    assert "| eight | 2.5000 | +25.00% |" in text
    assert "eight: eight is emulated" in text
    assert "| 0 | projections | weight | eight | 3.00% | 0.00% | 0.00% |" in text
    titles = re.findall(r'class="title"[^>]*>([^<]*)<', picture(found))
    assert titles == [
        "Eval loss by step", "Eval loss: gap to wide by step, %", "Relative rounding error by layer, weights, %",
    ]  # fmt: skip
