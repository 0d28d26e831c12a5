"""The console: aligned lines when piped, a live view on a terminal."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from dataclasses import replace
from importlib import resources

import pytest
import surogate_monitor_console
from rich.console import Console
from surogate_monitor_console import text
from surogate_monitor_console.live import LiveView
from surogate_monitor_console.options import ConsoleOptions, build
from surogate_monitor_console.plain import PlainView

from surogate_core.plugin import events

INFO = events.RunInfo(
    run_name="brisk-otter",
    output_dir="output",
    task="sft",
    config={
        "lora": True,
        "lora_rank": 16,
        "recipe": {"name": "bf16"},
        "optimizer": {"name": "adamw", "options": {}},
        "learning_rate": 2e-4,
        "lr_scheduler_type": "linear",
    },
    interactive=False,
)
START = events.RunStart(
    model="qwen3 [tiny]",
    parameters=1_234_567,
    trainable_parameters=98_765,
    train_tokens=45_678,
    steps=120,
    start_step=0,
    tokens_per_step=8192,
    epochs=3.0,
    device="cpu",
    notes=("no GPU: training on the CPU",),
)
EVAL = events.EvalEnd(step=100, loss=2.5, label_tokens=12_345, seconds=1.25, gap=0.125)
SAVED = events.CheckpointSaved(step=50, path="output/checkpoint-50", seconds=0.2, reason="schedule")
END = events.RunEnd(
    reason="finished",
    step=120,
    seconds=83.0,
    first_eval_loss=5.0,
    last_eval_loss=2.0,
    export_path="output/adapter",
    message="Your own data: datasets=…",
)


ROUTING = events.RoutingStats(
    step=1,
    moe_load_imbalance=2.346,
    moe_expert_utilization=0.998,
    moe_worst_imbalance=5.5,
    moe_worst_layer=7,
    moe_entropy=0.9712,
    moe_cv=0.4,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(number: int, loss: float = 3.0, **changes: float) -> events.StepEnd:
    event = events.StepEnd(
        step=number,
        epoch=number / 40,
        loss=loss,
        grad_norm=1.234,
        lr=2e-4,
        tokens=8000,
        label_tokens=3000,
        total_tokens=8000 * number,
        seconds=0.1,
        tokens_per_second=12_345.0,
        eta_seconds=61.0,
        peak_memory_bytes=3 * 2**29,
    )
    return replace(event, **changes)  # type: ignore[arg-type]


def plain(**options: float) -> tuple[PlainView, io.StringIO, Clock]:
    stream, clock = io.StringIO(), Clock()
    return PlainView(ConsoleOptions(**options), INFO, stream=stream, clock=clock), stream, clock  # type: ignore[arg-type]


def test_columns_of_experts() -> None:
    facts = text.run_facts(replace(START, active_parameters=345_678), INFO)
    assert facts[0].startswith("qwen3 [tiny] · 1.23M parameters, 346k active · LoRA")
    view, stream, _ = plain()
    view.on_event(ROUTING)
    view.on_event(step(1))
    view.on_event(replace(ROUTING, moe_aux_loss_raw=8.0625, moe_dead_experts=3))
    view.on_event(step(2))
    first, second = stream.getvalue().splitlines()
    assert "tok/s  imbal   2.35  mem" in first
    assert "tok/s  imbal   2.35  aux  8.062  mem" in second
    told = "experts 99.8% used · worst layer 7, imbalance 5.50 · entropy 0.971"
    assert text.experts_line(ROUTING) == told
    evened = {"moe_rank_imbalance": 1.31, "moe_rank_imbalance_evened": 1.0, "moe_moved_rows": 0.15}
    moved = " · GPUs 1.31 → 1.00 by moving 15.0% of the rows"
    assert text.experts_line(replace(ROUTING, **evened)) == told + moved  # type: ignore[arg-type]
    console = Console(file=io.StringIO(), force_terminal=True, width=160)
    live = LiveView(ConsoleOptions(), INFO, console=console, clock=Clock())
    for event in (START, replace(ROUTING, moe_aux_loss_raw=8.0, moe_dead_experts=3), step(1)):
        live.on_event(event)
    with console.capture() as shown:
        console.print(live.render())
    live.close()
    assert all(part in shown.get() for part in ("worst layer 7", "3 dead", "8.000"))


def test_the_rank_of_experts_is_named() -> None:
    info = replace(INFO, config={**INFO.config, "lora_expert_rank": 4})
    assert "LoRA r=16 (experts 4), 98.8k trained" in text.run_facts(START, info)[0]


def test_plain_run_reads_well() -> None:
    view, stream, _ = plain()
    view.on_event(START)
    for number in range(1, 121):
        view.on_event(step(number, loss=10.0 / number))
        if number == 50:
            view.on_event(SAVED)
        if number == 100:
            view.on_event(EVAL)
    view.on_event(events.Notice(level="warning", message="the rate is high"))
    view.on_event(events.Notice(level="info", message="resumed"))
    view.on_event(END)
    view.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "qwen3 [tiny] · 1.23M parameters · LoRA r=16, 98.8k trained (8 %) · cpu"
    assert lines[1] == "sft · recipe bf16 · optimizer adamw · lr 0.0002 linear"
    assert lines[2] == "120 steps of 8.19k tokens · 3 epochs of 45.7k tokens · output output"
    assert lines[3] == "no GPU: training on the CPU"
    steps = [line for line in lines if line.startswith("step") and "/120" in line]
    assert [int(line.split("/")[0].split()[1]) for line in steps] == [1, 2, 3, 4, 5, *range(10, 121, 10)]
    assert steps[0] == (
        "step   1/120  loss  10.0000  grad     1.23  lr 2.00e-04  epoch  0.03     80k tok/s  mem  1.50 GiB  eta    1:01"
    )
    assert len({len(line) for line in steps}) == 1
    assert "step 50: saved output/checkpoint-50 in 0.2 s" in lines
    assert "step 100: eval loss 2.5000  (0.1250 above the train loss; 12.3k tokens in 1.2 s)" in lines
    assert "warning: the rate is high" in lines
    assert "resumed" in lines
    assert lines[-5:] == [
        "Finished after 120 steps, 1:23.",
        "Mean 80k tok/s, 10 steps/s.",
        "Eval loss 5.0000 → 2.0000, perplexity 148.4 → 7.389.",
        "Exported to output/adapter",
        "Your own data: datasets=…",
    ]
    assert "\x1b" not in stream.getvalue()


GPU = events.GpuStats(
    step=2,
    utilization=0.97,
    memory_used_bytes=71 * 2**30,
    memory_total_bytes=80 * 2**30,
    power_watts=655.4,
    temperature_celsius=58.0,
    sm_clock_mhz=1755.0,
)
GPU_TEXT = "GPU 97% busy · 71.00 GiB of 80.00 GiB · 655 W · 58 °C · 1755 MHz"


RANKS = events.RankStats(step=2, peak_memory_bytes=(70 * 2**30, 71 * 2**30), work_seconds=(0.1, 0.12))
RANKS_TEXT = "2 ranks · peak memory 70.00 GiB to 71.00 GiB · slowest rank 1, micro-steps 9.1% longer than the mean"


def test_ranks_without_a_micro_step_of_their_own_have_no_slowest() -> None:
    assert text.ranks_line(events.RankStats(step=2, peak_memory_bytes=(2**30,) * 4)) == "4 ranks · peak memory 1.00 GiB"


def test_plain_lines_have_speed_of_light_phase_telemetry_and_the_report() -> None:
    view, stream, _ = plain()
    view.on_event(START)
    view.on_event(step(1, speed_of_light=0.0712))
    view.on_event(events.PhaseChange(step=1, phase="converging", previous="warmup", improvement=0.1))
    view.on_event(step(2, speed_of_light=0.415))
    view.on_event(GPU)
    view.on_event(RANKS)
    view.on_event(END)
    view.on_event(events.ReportWritten(path="output/report.html"))
    lines = stream.getvalue().splitlines()
    assert "tok/s  MFU  7.1 %  mem  1.50 GiB  eta    1:01" in lines[4]
    assert lines[6].endswith("tok/s  MFU 41.5 %  mem  1.50 GiB  eta    1:01  converging")
    assert lines[7] == f"step 2: {GPU_TEXT}"
    assert lines[8] == f"step 2: {RANKS_TEXT}"
    assert "Report: output/report.html" in lines


PRECISION = events.PrecisionStats(
    step=50,
    steps=50,
    saturated={"activation": 0.004, "gradient": 0.0},
    underflowed={"activation": 0.0, "gradient": 0.25},
    worst="layer 1 mlp.up_proj activation",
    worst_excess=1.5,
)
PRECISION_TEXT = (
    "step 50: scaled tensors of 50 steps: saturated activation 0.40% · underflowed gradient 25.00% · "
    "worst layer 1 mlp.up_proj activation, 1.5 × its format"
)


def test_what_saturated_has_a_line_and_nothing_else_has() -> None:
    view, stream, _ = plain()
    view.on_event(PRECISION)
    view.on_event(replace(PRECISION, saturated={"activation": 0.0}, underflowed={}, worst="", worst_excess=0.0))
    assert stream.getvalue() == f"{PRECISION_TEXT}\n"


def test_plain_lines_by_time() -> None:
    view, stream, clock = plain(first=1, every=1000, seconds=10.0)
    view.on_event(START)
    for number in range(1, 41):
        clock.now += 1
        view.on_event(step(number))
    shown = [line.split("/")[0] for line in stream.getvalue().splitlines() if "/120" in line]
    assert shown == ["step   1", "step  11", "step  21", "step  31"]


def test_plain_first_lines_count_from_a_resumed_step() -> None:
    view, stream, _ = plain(first=2, every=50)
    view.on_event(replace(START, start_step=60))
    for number in range(61, 80):
        view.on_event(step(number))
    assert [line.split("/")[0] for line in stream.getvalue().splitlines() if "/120" in line] == ["step  61", "step  62"]


def test_plain_progress_only_of_long_tasks() -> None:
    view, stream, clock = plain()
    for done in range(1, 101):
        view.on_event(events.Progress(task="evaluating", done=done, total=100, unit="batches"))
    assert stream.getvalue() == ""
    for done in range(13):
        view.on_event(events.Progress(task="tokenising", done=done, total=12, unit="rows"))
        clock.now += 1
    assert stream.getvalue().splitlines() == [
        "tokenising: 5/12 rows  5.0 s",
        "tokenising: 10/12 rows  0:10",
        "tokenising: 12/12 rows  0:12",
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_figures_that_are_not_finite(bad: float) -> None:
    view, stream, _ = plain()
    view.on_event(START)
    view.on_event(step(1, loss=bad, grad_norm=bad, eta_seconds=bad))
    assert "eta       ?" in stream.getvalue()
    live, console, _ = terminal()
    live.on_event(START)
    live.on_event(step(1, loss=bad, grad_norm=bad, eta_seconds=bad))
    console.print(live.render())
    live.close()


def terminal(width: int = 100) -> tuple[LiveView, Console, Clock]:
    clock = Clock()
    console = Console(record=True, force_terminal=True, width=width, height=30, file=io.StringIO(), color_system=None)
    return LiveView(ConsoleOptions(), replace(INFO, interactive=True), console=console, clock=clock), console, clock


def drawn(view: LiveView, width: int = 100) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(view.render())
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_live_view() -> None:
    view, console, clock = terminal()
    try:
        assert drawn(view) == [""] or drawn(view) == []
        view.on_event(events.Progress(task="loading", done=3, total=10, unit="tensors"))
        clock.now += 3
        assert drawn(view)[-1].startswith("loading ━")
        assert drawn(view)[-1].endswith("3/10 tensors  3.0 s")
        view.on_event(events.Progress(task="loading", done=10, total=10, unit="tensors"))
        view.on_event(events.Progress(task="compiling", done=1))
        assert "compiling" in drawn(view)[-1]
        view.on_event(events.Progress(task="compiling", done=1, total=1))
        view.on_event(START)
        assert drawn(view)[0].startswith("step 0/120 ")
        assert "first step" in drawn(view)[1]
        for number in range(1, 31):
            clock.now += 1
            view.on_event(step(number, loss=6.0 / number))
        view.on_event(EVAL)
        view.on_event(SAVED)
        view.on_event(events.Notice(level="warning", message="gradients [bold]vanish[/bold]"))
        view.on_event(events.Progress(task="evaluating", done=1, total=4, unit="batches"))
        rows = drawn(view)
        assert rows[0].startswith("step 30/120 ━")
        assert rows[0].endswith("25 % 0:30 gone 1:01 to go")
        assert rows[1].startswith("loss 0.2000 ↓ █")
        assert rows[1].endswith("▁  eval loss 2.5000  epoch 0.75")
        assert rows[2] == "lr 2.00e-04  grad norm 1.23  80k tok/s  memory 1.50 GiB"
        assert rows[3].endswith("1/4 batches  0.0 s")
        view.on_event(END)
    finally:
        view.close()
    output = console.export_text()
    for part in (
        "brisk-otter",
        "qwen3 [tiny] · 1.23M parameters",
        "no GPU: training on the CPU",
        "loading: 10 tensors in 3.0 s",
        "step 100: eval loss 2.5000",
        "step 50: saved output/checkpoint-50",
        "warning: gradients [bold]vanish[/bold]",
        "Finished after 120 steps, 1:23.",
        "Eval loss 5.0000 → 2.0000",
        "Exported to output/adapter",
    ):
        assert part in output, part
    assert output.rstrip().endswith("Your own data: datasets=…")


PHASE = events.PhaseChange(step=75, phase="plateau", previous="warmup", improvement=0.0)
ADVICE = events.Advice(step=80, rule="r", message="It [stands].", key="learning_rate", suggestion="lower it")


def test_phase_and_advice_on_plain_lines() -> None:
    view, stream, _ = plain()
    view.on_event(PHASE)
    view.on_event(ADVICE)
    lines = stream.getvalue().splitlines()
    assert lines == ["step 75: warmup → plateau", "step 80: It [stands]. Advice on learning_rate: lower it."]


def test_speed_of_light_and_telemetry_in_the_live_view() -> None:
    view, _, _ = terminal()
    view.on_event(START)
    view.on_event(step(2, speed_of_light=0.415))
    view.on_event(GPU)
    assert drawn(view)[2] == "lr 2.00e-04  grad norm 1.23  80k tok/s  MFU 41.5 %  memory 1.50 GiB"
    assert drawn(view)[3] == GPU_TEXT
    view.on_event(RANKS)
    assert drawn(view)[4] == RANKS_TEXT
    view.close()


def test_phase_and_advice_in_the_live_view() -> None:
    view, console, _ = terminal()
    view.on_event(START)
    view.on_event(step(75))
    assert "phase" not in drawn(view)[2]
    view.on_event(PHASE)
    view.on_event(ADVICE)
    assert drawn(view)[2].endswith("phase plateau")
    view.close()
    assert "step 80: It [stands]. Advice on learning_rate: lower it." in console.export_text()


@pytest.mark.parametrize("width", [40, 60, 200])
def test_live_view_at_any_width(width: int) -> None:
    view, _, _ = terminal(width)
    view.on_event(START)
    view.on_event(step(1))
    assert all(len(line) <= width for line in drawn(view, width))
    view.close()
    view.close()


def test_which_view(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(build(ConsoleOptions(), INFO), PlainView)
    assert isinstance(build(ConsoleOptions(live=False), replace(INFO, interactive=True)), PlainView)
    live = build(ConsoleOptions(), replace(INFO, interactive=True))
    assert isinstance(live, LiveView)
    live.close()
    view = build(ConsoleOptions(), INFO)
    capsys.readouterr()
    view.on_event(SAVED)
    assert capsys.readouterr().out == "step 50: saved output/checkpoint-50 in 0.2 s\n"
    assert view.state() == {}
    view.load_state({})


def test_summaries() -> None:
    failed = replace(END, reason="failed", first_eval_loss=None, export_path=None, message="out of memory")
    assert text.summary(failed) == ["Failed after 120 steps, 1:23."]
    signalled = replace(failed, reason="signal", message="")
    assert text.summary(signalled)[1] == "Run the same command again to resume."
    worse = replace(END, first_eval_loss=2.0, last_eval_loss=1e4, message="")
    assert text.summary(worse)[1] == "Eval loss 2.0000 → 10000.0000, perplexity 7.389 → inf."
    worse = replace(worse, best_eval_loss=2.0, best_step=0)
    never = "No step was better than the start: the eval loss was 2.0000 before the first step."
    assert text.summary(worse)[2:] == ["Exported to output/adapter", never]
    lost = replace(worse, best_eval_loss=1.5, best_step=7)
    assert text.summary(lost)[2] == "Best eval loss 1.5000 at step 7."
    assert text.summary(lost)[-1].startswith("The last step is worse than the start: ")


def test_perplexities() -> None:
    ends = [
        text.summary(replace(END, first_eval_loss=1.0, last_eval_loss=loss))[1] for loss in (9.0, 20.0, 40.0, 800.0)
    ]
    assert [end.split("→ ")[-1] for end in ends] == ["8103.", "485,165,195.", "2.35e+17.", "inf."]


def test_figures() -> None:
    assert [text.count(n) for n in (0, 999, 1000, 93_512, 1.2e6, 8.19e9, 1e12)] == [
        "0",
        "999",
        "1k",
        "93.5k",
        "1.2M",
        "8.19G",
        "1T",
    ]
    assert [text.duration(s) for s in (0.04, 9.94, 9.96, 61, 3723, math.inf)] == [
        "0.0 s",
        "9.9 s",
        "0:10",
        "1:01",
        "1:02:03",
        "?",
    ]
    assert [text.size(n) for n in (2**20, 3 * 2**29)] == ["1 MiB", "1.50 GiB"]
    assert text.sparkline([1, 2, math.nan, 8]) == "▁▂!█"
    assert text.sparkline([2, 2]) == "▁▁"
    assert text.sparkline([math.nan]) == "!"
    assert text.sparkline([]) == ""
    assert text.trend([3, 2]) == " "
    assert text.trend([4, 4, 2, 2]) == "↓"
    assert text.trend([2, 2, 4, 4]) == "↑"
    assert text.trend([2, 2, 2, 2.001]) == "→"


def test_hooks_and_options() -> None:
    from omegaconf import OmegaConf

    spec = surogate_monitor_console.surogate_monitor()
    assert spec.name == "console"
    assert surogate_monitor_console.surogate_config_path() == "pkg://surogate_monitor_console.conf"
    yaml = resources.files("surogate_monitor_console.conf.monitor").joinpath("console.yaml").read_text()
    assert yaml.startswith("# @package monitor.console\n")
    values = dict(OmegaConf.create(yaml))
    assert values.pop("name") == "console"
    assert spec.options(**values) == spec.options()


def test_importing_is_cheap() -> None:
    program = (
        "import sys, surogate_monitor_console as m; m.surogate_monitor(); "
        "print(*[m for m in ('torch', 'rich', 'hydra') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_the_speed_is_a_mean_of_the_last_steps() -> None:
    """Single steps scatter, and the first one compiles."""
    pace = text.Pace()
    assert pace.line() == []
    pace.add(step(1, seconds=100.0))
    for number in range(2, 22):
        pace.add(step(number, seconds=0.05 if number % 2 else 0.15))
    assert pace.tokens_per_second == pytest.approx(80_000)
    assert pace.line() == ["Mean 1.65k tok/s, 0.206 steps/s."]


def test_an_eval_loss_below_the_train_loss() -> None:
    assert text.eval_line(replace(EVAL, gap=-0.5)).startswith(
        "step 100: eval loss 2.5000  (0.5000 below the train loss;"
    )


def test_samples_are_a_line_each_in_both_views() -> None:
    prompts = ("Why?", "A prompt that is much longer than the column of prompts", *(f"number {n}" for n in range(9)))
    texts = ("line 1\n\x1b[31mline 2", "x" * 300, "", *("yes" for _ in range(8)))
    event = events.Samples(step=20, prompts=prompts, texts=texts, ended=(True,) * 11, tokens=120, seconds=1.5)
    lines = text.sample_lines(event)
    assert lines[:2] == ["step 20: samples  (120 tokens in 1.5 s)", r"  Why? → line 1\n\x1b[31mline 2"]
    assert lines[2].startswith("  A prompt that is much longer than the c… → xxx")
    assert lines[2].endswith("x…")
    assert lines[3] == "  number 0 → (empty)"
    assert lines[-1] == "  and 3 more, in the report"
    assert max(map(len, lines)) <= 115
    stream = io.StringIO()
    PlainView(ConsoleOptions(), INFO, stream=stream).on_event(event)
    assert stream.getvalue().splitlines() == lines
    console = Console(file=io.StringIO(), width=130)
    view = LiveView(ConsoleOptions(), INFO, console=console)
    view.on_event(event)
    view.close()
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(line in shown for line in lines)
