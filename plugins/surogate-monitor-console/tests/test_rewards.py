"""The console in reinforcement learning and preference training."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console
from surogate_monitor_console import rewards
from surogate_monitor_console.live import LiveView
from surogate_monitor_console.options import ConsoleOptions
from surogate_monitor_console.plain import PlainView

from surogate_core.plugin import events
from surogate_testing.run_events import END, START, step

INFO = events.RunInfo(run_name="r", output_dir="output", task="any", config={}, interactive=False)
ONLINE = replace(START, train_tokens=0, epochs=0.0)
ROLLOUTS = events.Rollouts(
    step=1,
    prompts=8,
    completions=64,
    reward=events.Spread(0.25, 0.43, 0.0, 1.0),
    rewards={"correct": events.Spread(0.2, 0.4, 0.0, 1.0), "format": events.Spread(0.3, 0.46, 0.0, 1.0)},
    without_signal=0.125,
    faults={"timeout": 2, "exception": 1},
    length=events.Spread(40.4, 9.0, 3.0, 64.0),
    truncated=0.05,
    tokens=2400,
    seconds={"generate": 2.0, "score": 0.5, "pack": 0.001},
)
SAMPLES = events.RolloutSamples(
    step=1,
    samples=(
        events.RolloutSample(prompt="2 + 2 =", completion=" 4", reward=1.0, reason="stop"),
        events.RolloutSample(prompt="3 + 3 =", completion=" 5", reward=0.5, reason="stop"),
        events.RolloutSample(prompt="4 + 4 =", completion=" [" + "x" * 300, reward=None, reason="timeout"),
    ),
)
EVAL = events.RolloutEval(
    step=2, tasks=16, reward=events.Spread(0.5, 0.4, 0.0, 1.0), length=events.Spread(8, 0, 8, 8), seconds=1.5
)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(*recorded: events.Event, **options: float) -> list[str]:
    stream = io.StringIO()
    view = PlainView(ConsoleOptions(**options), INFO, stream=stream, clock=Clock())  # type: ignore[arg-type]
    for event in recorded:
        view.on_event(event)
    return stream.getvalue().splitlines()


def test_a_step_has_columns_and_a_line_with_its_phases() -> None:
    figures = {"entropy": 0.8123, "clip_ratio/region": 0.01, "importance": 1.0, "logprob_gap/mean": 1.5e-5}
    lines = plain(ONLINE, ROLLOUTS, step(1, 0.5, seconds=4.0, figures=figures))
    assert not [text for text in lines if "epoch" in text], "there are no data"
    assert "reward 0.250±0.43  len     40  cut     5%  no signal    12%  faults      3" in lines[-2]
    assert "entropy  0.812  clip   0.01  gap 1.5e-05  mem" in lines[-2]
    assert lines[-1].strip() == (
        "rewards correct 0.2, format 0.3 · faults timeout 2, exception 1 · generates 1.2k tok/s · "
        "time generate 2.0 s, score 0.5 s, train 1.5 s"
    )


def test_rollouts_of_another_step_are_not_shown_beside_one() -> None:
    lines = plain(START, ROLLOUTS, step(1, 3.0), step(2, 2.0))
    assert sum("reward" in text for text in lines) == 2
    assert "reward" not in lines[-1]
    assert "epoch" in lines[-1]


@pytest.mark.parametrize(
    ("figures", "found"),
    [
        ({}, []),
        (
            {"rewards/chosen": 1.0, "rewards/margins": 0.5, "rewards/accuracies": 0.75},
            [("margin", "0.5"), ("acc", "0.75")],
        ),
        ({"a": 1.0, "b": 2.0, "c": 3.0}, [("a", "1"), ("b", "2")]),
        ({"clip_ratio": 0.1, "clip_ratio/region": 0.2}, [("clip", "0.2")]),
    ],
)
def test_figures_of_an_objective(figures: dict[str, float], found: list[tuple[str, str]]) -> None:
    assert rewards.figures(step(1, 1.0, figures=figures)) == found


def test_an_evaluation_has_the_figures_of_the_objective() -> None:
    event = events.EvalEnd(
        step=3, loss=0.5, label_tokens=64, seconds=0.5, gap=None, figures={"rewards/accuracies": 0.75}
    )
    assert plain(event) == ["step 3: eval loss 0.5000  acc 0.75  (64 tokens in 0.5 s)"]


def test_the_best_the_worst_and_a_failed_completion_at_intervals() -> None:
    later = replace(SAMPLES, step=2)
    (_, head, best, worst, failed) = plain(ONLINE, SAMPLES, later)[2:]
    assert head == "step 1: completions with their rewards"
    assert best == "      +1  2 + 2 = →  4"
    assert worst == "    +0.5  3 + 3 = →  5"
    assert failed.startswith("    none  4 + 4 = →  [xxx")
    assert failed.endswith("… [timeout]")
    assert len(failed) < 130
    assert sum("completions with" in text for text in plain(ONLINE, SAMPLES, later, completions_seconds=0.0)) == 2


def test_held_out_rewards_and_the_summary() -> None:
    after = replace(ROLLOUTS, step=2, reward=events.Spread(0.75, 0.4, 0.0, 1.0))
    better = replace(EVAL, step=3, reward=events.Spread(0.625, 0.4, 0.0, 1.0), faults={"timeout": 1}, truncated=0.5)
    nothing = replace(ROLLOUTS, step=3, reward=None)
    end = replace(END, first_eval_loss=None, first_reward=0.5, last_reward=0.625, best_reward=0.75, best_step=2)
    lines = plain(ONLINE, ROLLOUTS, EVAL, after, better, nothing, end)
    assert "step 2: held-out reward 0.5000 ± 0.1000  (16 problems, length 8 in 1.5 s)" in lines
    assert (
        "step 3: held-out reward 0.6250 ± 0.1000  (16 problems, length 8, 50% truncated, faults timeout 1 in 1.5 s)"
        in lines
    )
    assert "Reward 0.2500 → 0.7500." in lines
    assert "Held-out reward 0.5000 → 0.6250, best 0.7500 at step 2." in lines
    worse = replace(end, last_reward=0.25, best_reward=0.375)
    assert "Held-out reward 0.5000 → 0.2500, never above the start." in plain(worse)
    assert rewards.eval_line(replace(EVAL, reward=None)).startswith("step 2: held-out reward none")
    assert not [text for text in plain(START, step(1, 3.0), END) if "eward" in text]


def test_a_loss_that_is_no_cross_entropy_has_no_perplexity() -> None:
    assert "Eval loss 2.0000 → 1.0000, perplexity 7.389 → 2.718." in plain(START, END)
    assert "Eval loss 2.0000 → 1.0000." in plain(replace(START, objective="dpo"), END)


def test_the_live_view_shows_rewards_and_phases() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    live = LiveView(ConsoleOptions(), INFO, console=console, clock=Clock())
    with console.capture() as said:
        for event in (ONLINE, ROLLOUTS, SAMPLES, replace(SAMPLES, step=2), step(1, 0.5, seconds=4.0), EVAL):
            live.on_event(event)
    with console.capture() as shown:
        console.print(live.render())
    with console.capture() as end:
        live.on_event(END)
    live.close()
    assert said.get().count("completions with their rewards") == 1
    assert "held-out reward 0.5000" in said.get()
    for part in ("0.250±0.43", "no signal", "train 1.5 s", "timeout 2"):
        assert part in shown.get()
    assert "epoch" not in shown.get()
    assert "Finished" in end.get()
