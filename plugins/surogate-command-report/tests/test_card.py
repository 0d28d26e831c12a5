"""The head of a report: verdict, figures, paths, next command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from surogate_command_report.card import card_of, method

from surogate_core.service.files import RunRecord

START = {"event": "run_start", "steps": 9, "model": "m", "device": "CPU"}
STEP = {
    "event": "step_end", "step": 7, "loss": 2.123456, "grad_norm": 1.0, "lr": 2e-4, "tokens_per_second": 93_512.3,
    "peak_memory_bytes": 541_790_208, "seconds": 0.5, "total_tokens": 1_234_567, "speed_of_light": 0.174_56,
}  # fmt: skip


def run_of(*records: Mapping[str, Any], live: bool = True, config: str = "") -> RunRecord:
    run = RunRecord(directory=Path("r"), name="r", live=live)
    for record in records:
        run.add(record)
    run.config_text = config
    return run


def tiles(run: RunRecord) -> dict[str, str]:
    return {name: f"{value} ({remark})" if remark else value for name, value, remark in card_of([run]).tiles}


def test_tiles_have_what_was_measured_and_no_more() -> None:
    cpu = tiles(run_of(START, STEP))
    assert cpu == {
        "train loss": "2.123", "learning rate": "2.0e-04", "grad norm": "1",
        "tokens/s": "93.51k (median, 2 steps/s)", "tokens": "1.235M", "training time": "0:00:00",
        "peak memory": "0.50 GiB", "MFU": "17.5% (of a measured matmul)",
    }  # fmt: skip
    more: list[dict[str, Any]] = [
        {"event": "eval_end", "step": 0, "loss": 3.0},
        {"event": "eval_end", "step": 3, "loss": 2.25},
        {"event": "eval_end", "step": 5, "loss": 2.5},
        {"event": "phase_change", "step": 6, "phase": "plateau"},
        {"event": "gpu_stats", "step": 7, "utilization": 0.987, "power_watts": 655.4},
    ]
    assert tiles(run_of(START, STEP, *more)) == {
        **cpu, "eval loss": "3 → 2.5 (step 5)", "best eval loss": "2.25 (step 3)", "phase": "plateau",
        "GPU": "99% (655 W)",
    }  # fmt: skip
    assert tiles(run_of(START)) == {}
    routing = {"event": "routing_stats", "step": 7, "moe_load_imbalance": 2.5, "moe_worst_imbalance": 4.0}
    later = {**routing, "step": 8, "moe_load_imbalance": 3.0}
    assert tiles(run_of(START, STEP, routing, later)) == {**cpu, "expert imbalance": "3.00 (worst layer 4.00)"}
    end = {"event": "run_end", "reason": "finished", "step": 8}
    assert tiles(run_of(START, STEP, routing, later, end))["expert imbalance"] == "2.50 → 2.75 (worst layer 4.00)"
    even = {**later, "moe_rank_imbalance": 1.3, "moe_rank_imbalance_evened": 1.02}
    assert tiles(run_of(START, STEP, routing, even, end))["load of GPUs"] == "1.02 (evened out from 1.30)"
    ranks = {"event": "rank_stats", "step": 7, "peak_memory_bytes": [2**29, 2**30]}
    assert tiles(run_of(START, STEP, ranks))["peak memory"] == "0.50 GiB (rank 0 of 2)"


def test_a_latest_value_that_is_not_finite_is_named() -> None:
    first = tiles(run_of({**STEP, "loss": "NaN"}))
    later = tiles(run_of(STEP, {**STEP, "step": 8, "loss": "Infinity", "grad_norm": "NaN"}))
    assert first["train loss"] == later["train loss"] == later["grad norm"] == "not finite"


def test_the_time_to_go_is_of_the_median_step() -> None:
    run = run_of({**START, "steps": 100})
    for step in range(1, 41):
        # One slow step, such as one with a checkpoint, changes nothing.
        run.add({**STEP, "step": step, "seconds": 30.0 if step == 40 else 0.5})
    assert card_of([run]).verdict == "Running: step 40 of 100 · 0:00:30 to go"
    assert card_of([run]).progress == 0.4


@pytest.mark.parametrize(
    ("reason", "step", "message", "verdict", "tone"),
    [
        ("finished", 9, "", "Finished after 9 steps", "good"),
        ("stopped", 7, "enough", "Stopped early: step 7 of 9", "good"),
        ("signal", 7, "to resume: …", "Interrupted: step 7 of 9", "plain"),
        ("failed", 7, "the loss is NaN", "Failed: step 7 of 9", "bad"),
        ("failed", 0, "no data", "Failed before its first step", "bad"),
        (None, 7, "", "Step 7 of 9. No end is recorded: killed, or running on another machine", "plain"),
    ],
)
def test_the_verdict_comes_first_and_the_message_behind_it(
    reason: str | None, step: int, message: str, verdict: str, tone: str
) -> None:
    records = [START, *([{**STEP, "step": step}] if step else [])]
    end = [{"event": "run_end", "reason": reason, "message": message}] if reason else []
    card = card_of([run_of(*records, *end, live=False)])
    assert (card.verdict, card.message, card.tone) == (verdict, message, tone)
    assert bool(card.tiles) == bool(step)


def test_eval_loss_before_and_after_and_the_best_step() -> None:
    evals = [{"event": "eval_end", "step": at, "loss": loss} for at, loss in ((0, 6.0), (4, 1.5), (9, 2.0))]
    end = {"event": "run_end", "reason": "finished", "export_path": "r/model"}
    run = run_of(START, {**STEP, "step": 9}, *evals, end)
    card = card_of([run])
    assert run.best == (4, 1.5)
    assert card.verdict == "Finished after 9 steps. Eval loss fell from 6.0000 to 2.0000, lowest 1.5000 at step 4"
    assert ("best eval loss", "1.5", "step 4") in card.tiles
    assert ("export", "r/model") in card.places
    # An evaluation that is not finite is never the best, and no change is computed from it.
    run.add({"event": "eval_end", "step": 10, "loss": "NaN"})
    assert run.best == (4, 1.5)
    assert "Eval loss" not in card_of([run]).verdict


def test_the_next_commands_are_those_of_the_run_or_resume_it() -> None:
    next_commands = [["merge", "surogate merge runs/a"], ["read the report", "surogate report runs/a"]]
    done = {"event": "run_end", "reason": "finished", "next_commands": next_commands}
    assert card_of([run_of(START, STEP, done, config="task: sft\n")]).commands == [("merge", "surogate merge runs/a")]
    stopped = run_of(START, STEP, {"event": "run_end", "reason": "signal"}, config="task: pt\n")
    assert card_of([stopped]).commands == [("resume", "surogate pt r/config.yaml")]
    assert card_of([run_of(START, STEP, config="task: pt\n")]).commands == [], "it is still running"
    never = run_of({"event": "run_end", "reason": "failed"}, config="task: sft\n")
    assert card_of([never]).commands == [], "nothing to resume"


def test_training_that_made_it_worse_has_its_best_before_the_first_step() -> None:
    evals = [{"event": "eval_end", "step": at, "loss": loss} for at, loss in ((0, 1.0), (4, 3.0), (9, 2.0))]
    run = run_of(START, {**STEP, "step": 9}, *evals, {"event": "run_end", "reason": "finished"})
    assert run.best == (0, 1.0)
    card = card_of([run])
    assert card.verdict == "Finished after 9 steps. Eval loss rose from 1.0000 to 2.0000, never below the start"
    assert ("best eval loss", "1", "before the first step") in card.tiles
    rewards = [
        {"event": "rollout_eval", "step": at, "reward": {"mean": mean}}
        for at, mean in ((0, 0.5), (4, 0.25), (9, 0.375))
    ]
    run = run_of(START, {**STEP, "step": 9}, *rewards, {"event": "run_end", "reason": "finished"})
    assert "Held-out reward fell from 0.5000 to 0.3750, never above the start" in card_of([run]).verdict


def test_the_method_in_the_words_of_the_field() -> None:
    def said(text: str) -> str:
        return method(run_of(config=text))

    assert said("task: sft\nlora: true\nlora_rank: 16\nqlora_format: nf4\nrecipe: {name: bf16}\n") == (
        "SFT, QLoRA rank 16 on nf4, bf16"
    )
    assert said("task: sft\nlora: true\nlora_rank: 16\nlora_expert_rank: 4\n") == "SFT, LoRA rank 16 (experts 4)"
    assert said("task: pt\nlora: false\nfrom_scratch: true\n") == "PT, from scratch"
    assert said("task: sft\nlora: false\n") == "SFT, all weights"
    assert said("") == said("{") == said("- a list") == ""
