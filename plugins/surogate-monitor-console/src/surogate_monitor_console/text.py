"""Figures and sentences that both views show."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from surogate_core.plugin import count, events, printable, significant

PACE_STEPS = 20
"""Steps whose mean speed is shown."""

TREND_WINDOW = 20
"""Losses whose two halves the trend compares."""

TREND_SHARE = 0.005
"""Relative change of the halves' means below which the trend is level."""

MOST_DIGITS = 34
"""Losses from which a perplexity, more than 10^14, has an exponent."""

SAMPLES = 8
"""Samples that are shown."""

SAMPLE_PROMPT = 40
"""Characters of a sample's prompt that are shown."""


def duration(seconds: float) -> str:
    """``1:02:03``, ``2:03``; ``0.4 s`` below ten seconds."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size(nbytes: float) -> str:
    """``1.50 GiB``."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def trend(losses: Sequence[float]) -> str:
    """``↓`` falling, ``↑`` rising, ``→`` level, or a blank while there are too few losses to say."""
    recent = [loss for loss in losses[-TREND_WINDOW:] if math.isfinite(loss)]
    half = len(recent) // 2
    if half < 2:
        return " "
    before, after = sum(recent[:half]) / half, sum(recent[-half:]) / half
    if abs(after - before) <= TREND_SHARE * abs(before):
        return "→"
    return "↓" if after < before else "↑"


def sparkline(losses: Sequence[float], width: int = 24) -> str:
    """The last `width` losses as bars; one that is not finite is ``!``."""
    shown = list(losses)[-width:]
    finite = [loss for loss in shown if math.isfinite(loss)]
    if not finite:
        return "!" * len(shown)
    low, high = min(finite), max(finite)
    bars = "▁▂▃▄▅▆▇█"
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((loss - low) * scale)] if math.isfinite(loss) else "!" for loss in shown)


def run_facts(event: events.RunStart, info: events.RunInfo) -> list[str]:
    """The model, the training and its length, in three lines."""
    config = info.config
    share = 100 * event.trainable_parameters / event.parameters if event.parameters else 0.0
    rank = f"r={config.get('lora_rank')}"
    if (of_experts := config.get("lora_expert_rank")) is not None:
        rank += f" (experts {of_experts})"
    trained = (
        f"LoRA {rank}, {count(event.trainable_parameters)} trained ({significant(share, 2)} %)"
        if config.get("lora") and event.trainable_parameters != event.parameters
        else "all trained"
    )
    active = f", {count(event.active_parameters)} active" if event.active_parameters is not None else ""
    model = [event.model, f"{count(event.parameters)} parameters{active}", trained, event.device]
    how = [info.task, *(f"{key} {name}" for key in ("recipe", "optimizer") if (name := _name(config.get(key))))]
    if (rate := config.get("learning_rate")) is not None:
        how.append(f"lr {significant(rate)} {config.get('lr_scheduler_type', '')}".rstrip())
    done = f" from step {event.start_step}" if event.start_step else ""
    each = f" of {count(event.tokens_per_step)} tokens" if event.tokens_per_step else ""
    length = [f"{event.steps} steps{done}{each}"]
    if event.train_tokens:
        length.append(f"{significant(event.epochs)} epochs of {count(event.train_tokens)} tokens")
    length.append(f"output {info.output_dir}")
    return [" · ".join(line) for line in (model, how, length)]


def _name(value: Any) -> str:
    """The name of a selection, as a mapping, an object or plainly."""
    if isinstance(value, Mapping):
        return str(value.get("name", ""))
    return str(getattr(value, "name", value if value is not None else ""))


def eval_line(event: events.EvalEnd, figures: Sequence[tuple[str, str]] = ()) -> str:
    """An evaluation in one line; `figures`: (name, value) of further figures."""
    gap = ""
    if event.gap is not None:
        gap = f"{abs(event.gap):.4f} {'above' if event.gap >= 0 else 'below'} the train loss; "
    tokens = f"{count(event.label_tokens)} tokens in {duration(event.seconds)}"
    further = "".join(f"  {name} {value}" for name, value in figures)
    return f"step {event.step}: eval loss {event.loss:.4f}{further}  ({gap}{tokens})"


def sample_lines(event: events.Samples, width: int = 110) -> list[str]:
    """The samples, one line for each of the first prompts; their line ends and control characters are escaped."""
    found = []
    for prompt, text in zip(event.prompts, event.texts, strict=True):
        asked = shortened(prompt, SAMPLE_PROMPT)
        found.append(f"  {asked} → {shortened(text, width - len(asked)) or '(empty)'}")
    rest = len(found) - SAMPLES
    more = [f"  and {rest} more, in the report"] if rest > 0 else []
    speed = f"{event.tokens} tokens in {duration(event.seconds)}"
    return [f"step {event.step}: samples  ({speed})", *found[:SAMPLES], *more]


def shortened(text: str, width: int) -> str:
    """The beginning of a text on one line, with control characters escaped."""
    line = printable(text[: width + 1])
    return f"{line[: width - 1]}…" if len(line) > width else line


def phase_line(event: events.PhaseChange) -> str:
    """A change of phase."""
    return f"step {event.step}: {event.previous} → {event.phase}"


def utilization(share: float | None) -> str:
    """``MFU 41.5 %``, against the measured rate of a matrix product; empty where that was not measured."""
    return f"MFU {100 * share:4.1f} %" if share is not None else ""


class Pace:
    """How fast the steps of a run are; single steps scatter."""

    def __init__(self) -> None:
        self._last: deque[tuple[int, float]] = deque(maxlen=PACE_STEPS)
        self._tokens, self._seconds, self._steps = 0, 0.0, 0

    def add(self, event: events.StepEnd) -> None:
        """Take a step."""
        self._last.append((event.tokens, event.seconds))
        self._tokens += event.tokens
        self._seconds += event.seconds
        self._steps += 1

    @property
    def tokens_per_second(self) -> float:
        """The mean of the last steps."""
        return sum(tokens for tokens, _ in self._last) / max(1e-9, sum(seconds for _, seconds in self._last))

    def line(self) -> list[str]:
        """The means of the whole run, without evaluations and checkpoints; nothing without a step."""
        if not self._steps or not self._seconds:
            return []
        return [f"Mean {count(self._tokens / self._seconds)} tok/s, {self._steps / self._seconds:.3g} steps/s."]


def gpu_line(event: events.GpuStats) -> str:
    """The GPU telemetry, in one line."""
    return (
        f"GPU {event.utilization:.0%} busy · {size(event.memory_used_bytes)} of {size(event.memory_total_bytes)} · "
        f"{event.power_watts:.0f} W · {event.temperature_celsius:.0f} °C · {event.sm_clock_mhz:.0f} MHz"
    )


def ranks_line(event: events.RankStats) -> str:
    """Peak memory of all ranks, and the slowest of them, in one line."""
    least, most = min(event.peak_memory_bytes), max(event.peak_memory_bytes)
    memory = size(most) if size(least) == size(most) else f"{size(least)} to {size(most)}"
    told = f"{len(event.peak_memory_bytes)} ranks · peak memory {memory}"
    if event.slowest is None:
        return told
    rank, excess = event.slowest
    return f"{told} · slowest rank {rank}, micro-steps {excess:.1%} longer than the mean"


def routing(event: events.RoutingStats) -> list[tuple[str, str]]:
    """(name, value) of the columns about experts: imbalance, and the load-balancing loss where it is known."""
    found = [("imbal", f"{event.moe_load_imbalance:.2f}")]
    return found + ([("aux", f"{event.moe_aux_loss_raw:.3f}")] if event.moe_aux_loss_raw is not None else [])


def experts_line(event: events.RoutingStats) -> str:
    """The figures of a mixture of experts that have no column, in one line."""
    told = [
        f"experts {event.moe_expert_utilization:.1%} used",
        f"worst layer {event.moe_worst_layer}, imbalance {event.moe_worst_imbalance:.2f}",
        f"entropy {event.moe_entropy:.3f}",
    ]
    told += [f"{event.moe_dead_experts} dead"] if event.moe_dead_experts else []
    if event.moe_rank_imbalance is not None:
        told.append(
            f"GPUs {event.moe_rank_imbalance:.2f} → {event.moe_rank_imbalance_evened:.2f} by moving "
            f"{event.moe_moved_rows:.1%} of the rows"
        )
    return " · ".join(told)


def precision_line(event: events.PrecisionStats) -> str:
    """The shares of saturated and underflowed tensors; empty if there are none."""
    told = [
        f"{what} {', '.join(f'{role} {share:.2%}' for role, share in shares.items() if share)}"
        for what, shares in (("saturated", event.saturated), ("underflowed", event.underflowed))
        if any(shares.values())
    ]
    if event.worst:
        told.append(f"worst {event.worst}, {significant(event.worst_excess)} × its format")
    return f"step {event.step}: scaled tensors of {event.steps} steps: {' · '.join(told)}" if told else ""


def advice_line(event: events.Advice) -> str:
    """The finding, and the key to change."""
    return f"step {event.step}: {event.message} Advice on {event.key}: {event.suggestion}."


def saved_line(event: events.CheckpointSaved) -> str:
    """A checkpoint in one line."""
    why = "" if event.reason == "schedule" else f" ({event.reason})"
    return f"step {event.step}: saved {event.path} in {duration(event.seconds)}{why}"


def summary(
    event: events.RunEnd, pace: Pace | None = None, rewards: Sequence[str] = (), *, start: events.RunStart | None = None
) -> list[str]:
    """The end of the run, in a few lines; the message last. `rewards`: lines about rewards."""
    words = {
        "finished": "Finished",
        "stopped": "Stopped",
        "signal": "Interrupted",
        "failed": "Failed",
    }
    lines = [
        f"{words[event.reason]} after {event.step} steps, {duration(event.seconds)}.",
        *(pace.line() if pace is not None else []),
        *rewards,
    ]
    if event.first_reward is not None and event.last_reward is not None:
        best = f", best {event.best_reward:.4f} at step {event.best_step}" if event.best_reward is not None else ""
        if event.best_reward is not None and event.best_reward <= event.first_reward:
            best = ", never above the start"
        lines.append(f"Held-out reward {event.first_reward:.4f} → {event.last_reward:.4f}{best}.")
    first, last = event.first_eval_loss, event.last_eval_loss
    if first is not None and last is not None:
        at = f" at step {event.last_eval_step}" if event.last_eval_step not in (None, event.step) else ""
        known = start is None or start.objective == "cross_entropy"
        perplexities = f", perplexity {_perplexity(first)} → {_perplexity(last)}" if known else ""
        lines.append(f"Eval loss {first:.4f} → {last:.4f}{at}{perplexities}.")
    if event.best_eval_loss is not None and event.best_step and event.first_reward is None:
        lines.append(f"Best eval loss {event.best_eval_loss:.4f} at step {event.best_step}.")
    if event.export_path is not None:
        older = f", the weights of step {event.export_step}" if event.export_step not in (None, event.step) else ""
        lines.append(f"Exported to {event.export_path}{older}")
    if event.verdict and event.reason != "failed":
        lines.append(event.verdict)
    if event.reason == "signal":
        lines.append("Run the same command again to resume.")
    if event.next_commands:
        width = max(len(purpose) for purpose, _ in event.next_commands)
        lines += ["Next:", *(f"  {purpose:<{width}}  {command}" for purpose, command in event.next_commands)]
    # The command itself prints the reason of a failure once, at the very end.
    if event.message and event.reason != "failed":
        lines += event.message.splitlines()
    return lines


def _perplexity(loss: float) -> str:
    if loss < MOST_DIGITS:
        return significant(math.exp(loss), 4)
    return f"{math.exp(loss):.3g}" if loss < 700 else "inf"
