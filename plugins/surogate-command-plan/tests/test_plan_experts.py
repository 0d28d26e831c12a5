"""`surogate plan` of a model with experts: its speed, with experts shared out, and without."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from surogate_command_plan.command import _of_machine
from surogate_command_plan.experts import busiest_of, load_of, notes
from surogate_command_plan.gpus import gpus
from surogate_command_plan.speed import ExpertWork

from surogate_core.plugin import UserError
from surogate_core.plugin import surogate as main

TINY = ["model=qwen3-moe", "model.preset=tiny", "lora=true", "max_steps=2", "recompute=true", "lmhead_chunks=1"]
SHARED = [*TINY, "--gpu", "h200", "gpus=2", "ep_size=2"]


@cache
def printed(*arguments: str) -> str:
    """What the command prints; equal commands are run once."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", *arguments]) == 0
    return out.getvalue()


def plan(*arguments: str) -> dict[str, Any]:
    value = json.loads(printed(*arguments, "--json"))
    assert isinstance(value, dict)
    return value


def test_the_busiest_gpu_is_waited_for() -> None:
    gpu, config = gpus()["h200"], SimpleNamespace(ep_size=2, ep_load_balance_threshold=None)
    work = ExpertWork(products=6e9, gradients=2e9, rows=0)
    even = work.seconds(gpu, "bf16")
    assert even == pytest.approx(4e9 / (0.69 * gpu.bf16) + 2e9 / (0.32 * gpu.bf16))
    assert work.seconds(gpu, "bf16", busiest=1.5) == pytest.approx(1.5 * even)
    assert [load_of(config, busiest) for busiest in (None, 1.5, 8.0)] == [1, 1.5, 2]  # type: ignore[arg-type]
    config.ep_load_balance_threshold = 1.05
    assert [load_of(config, busiest) for busiest in (None, 1.5)] == [1, 1.05]  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0.9", "nan", "even", "1e9"])
def test_a_load_that_is_none(text: str) -> None:
    with pytest.raises(UserError, match=r"--busiest .*from 1 to ep_size\. Fix: --busiest 1\.5"):
        busiest_of(text)


@pytest.mark.slow
def test_experts_that_are_shared_out_have_a_time_and_so_has_the_run_without_it() -> None:
    found, whole = plan(*SHARED), plan(*SHARED, "ep_size=1")
    without = found["without_ep_size"]
    assert without["overrides"] == ["ep_size=1"]
    assert without["tokens_per_second"] == pytest.approx(whole["tokens_per_second"])
    assert without["device_bytes"] == whole["device_bytes"]
    assert found["recomputed_flops"] == whole["recomputed_flops"], "as many rows, on average"
    assert found["tokens_per_second"] < whole["tokens_per_second"]
    assert whole["without_ep_size"] is None
    text = printed(*SHARED)
    assert "ep_size=1 would be faster and fits: about " in text
    assert "ep_size=2: the time is of even loads (--busiest)" in text
    busy = plan(*SHARED, "--busiest", "2")
    assert busy["seconds_per_step"] > found["seconds_per_step"]
    assert busy["recomputed_flops"] > found["recomputed_flops"]


@pytest.mark.parametrize(("rate", "how"), [(2.0, "faster"), (1.05, "about as fast"), (0.5, "slower")])
def test_which_is_faster_is_said_where_the_estimates_can_tell(rate: float, how: str) -> None:
    speed = [SimpleNamespace(tokens_per_second=1e4 * times) for times in (1, rate)]
    whole: Any = SimpleNamespace(overrides=("ep_size=1", "zero_level=3"), device=2**30, sent=2**20, speed=speed[1])
    prediction = SimpleNamespace(sent=(), total=lambda place: 2**31)
    mine: Any = SimpleNamespace(
        config=SimpleNamespace(ep_size=2), whole_experts=whole, speed=speed[0], load=1.5, prediction=prediction
    )
    assert "of 1.5 times the mean on the busiest GPU" in notes(mine)[0]
    assert notes(mine)[1].startswith(f"ep_size=1 zero_level=3 would be {how} and fits: about ")


@pytest.mark.slow
def test_unequal_gpus_get_a_remark(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H100"]
    monkeypatch.setattr("surogate_command_plan.command._number_here", lambda device: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _of_machine(torch.device("cuda", 0)) == {"here": 2, "unequal": tuple(names)}
    names[1] = names[0]
    assert _of_machine(torch.device("cuda", 0)) == {"here": 2, "unequal": ()}
    monkeypatch.undo()
    monkeypatch.setattr(
        "surogate_command_plan.command._of_machine", lambda device: {"here": 2, "unequal": ("H200", "H100")}
    )
    assert main(["plan", *SHARED]) == 0
    assert "the GPUs here are not equal (H200, H100); the plan is of equal ones" in capsys.readouterr().out


SHAPE = ["model=qwen3-moe-30b-a3b", "--gpu", "h200", "sequence_len=2048", "lmhead_chunks=4", "max_steps=2"]
LORA = ["lora=true", "lora_rank=16", "lora_dropout=0", "optimizer=adamw"]
FULL = ["lora=false", "optimizer=adamw_8bit", "model.config.num_hidden_layers=6"]
KEPT = ["recompute=false", "per_device_train_batch_size=4", "gradient_accumulation_steps=4"]
AGAIN = ["recompute=true", "per_device_train_batch_size=8", "gradient_accumulation_steps=2"]
MEASURED = [
    ([*LORA, *KEPT], 26.0),
    ([*LORA, *AGAIN], 20.8),
    ([*LORA, *KEPT, "recipe=fp8-hybrid"], 31.2),
    ([*LORA, *AGAIN, "recipe=fp8-hybrid"], 25.6),
    ([*LORA, *KEPT, "lora_target_modules=[attention]"], 29.2),
    ([*FULL, *KEPT], 95.9),
]
"""Thousands of tokens per second of one H200 (benchmarks/evidence/experts.md)."""


SHARED_OUT = ["recompute=true", "per_device_train_batch_size=8", "lmhead_chunks=8"]
MEASURED_ON_SEVERAL = [
    ([*LORA, *SHARED_OUT, "gpus=2"], 41.9),
    ([*LORA, *SHARED_OUT, "gpus=4"], 81.1),
    ([*LORA, *SHARED_OUT, "gpus=4", "ep_size=4", "--busiest", "1.110"], 67.0),
]
"""Likewise of two and four H200s (benchmarks/evidence/several-gpus.md)."""


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "rate"), MEASURED_ON_SEVERAL, ids=str)
def test_the_estimate_is_near_what_several_gpus_reach(keys: list[str], rate: float) -> None:
    assert plan(*SHAPE, *keys)["tokens_per_second"] == pytest.approx(rate * 1e3, rel=0.04)


@pytest.mark.slow
@pytest.mark.parametrize(("keys", "rate"), MEASURED, ids=str)
def test_the_estimate_is_near_what_one_gpu_reaches(keys: list[str], rate: float) -> None:
    assert plan(*SHAPE, *keys)["tokens_per_second"] == pytest.approx(rate * 1e3, rel=0.1)


@pytest.mark.slow
def test_all_weights_of_30b_on_four_gpus() -> None:
    found = plan(*SHAPE, "lora=false", "optimizer=adamw_8bit", "recompute=true", "gpus=4", "ep_size=4", "zero_level=1")
    without = found["without_ep_size"]
    assert found["fits"]
    assert without["overrides"] == ["ep_size=1", "zero_level=3"], "the first that fits"
    assert without["tokens_per_second"] < found["tokens_per_second"]
