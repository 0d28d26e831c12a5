"""The contents of a report, independent of its format: curves, phases, and sections of facts."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from surogate_commands.curves import Band, Mark, figure
from surogate_core.plugin import significant
from surogate_core.service.files import RunRecord, as_number

if TYPE_CHECKING:
    from numpy.typing import NDArray

Rows = list[tuple[str, ...]]

SMOOTH = 0.8
"""Weight that a mean keeps with each further step, unless the reader chooses another."""

LONGEST_PROMPT = 300
"""Characters of a sample's prompt that are shown."""

LONGEST_SAMPLE = 2000
"""Characters of a sample that are shown."""

COMPLETIONS_HEADER = ("step", "reward", "prompt", "text", "ended by", "tokens", "rewards")
EXPERTS_HEADER = ("layer", "imbalance", "highest", "busiest expert", "experts without a token")
EVALUATION_HEADER = ("model", "task", "metric", "value", "± stderr", "rows", "measured")
PLUGIN_HEADER = ("plugin", "distribution", "version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One part of the report below the curves; `rows`, `items` or `text` is its content."""

    title: str
    header: tuple[str, ...] = ()
    """Names of the columns; without them the rows are facts, (what, value)."""
    rows: Sequence[tuple[str, ...]] = ()
    items: Sequence[str] = ()
    """A list of sentences."""
    text: str = ""
    """Text of a file, shown as it is."""
    folded: bool = False
    """Whether it is closed until the reader opens it."""


def facts(run: RunRecord) -> Rows:
    """What was trained, on what, with which versions, (what, value)."""
    start, known = run.start, run.facts
    rows: Rows = []
    if start:
        parameters, trained = start.get("parameters", 0), start.get("trainable_parameters", 0)
        share = f", {trained / parameters:.2%}" if parameters and trained != parameters else ""
        rows += [
            ("model", str(start.get("model"))),
            ("parameters", f"{parameters:,}"),
            ("parameters that a token uses", f"{active:,}" if (active := start.get("active_parameters")) else ""),
            ("experts", _experts(run.routing)),
            ("trained parameters", f"{trained:,}{share}"),
            ("device", str(start.get("device"))),
            ("tokens per step", f"{start['tokens_per_step']:,}" if start.get("tokens_per_step") else ""),
            ("planned epochs", significant(start["epochs"], 4) if start.get("epochs") else ""),
        ]
    if bad := len(run.steps) - len(finite(run, "loss")):
        rows.append(("steps that were not finite", f"{bad:,}"))
    versions = [f"{name} {known[name]}" for name in ("surogate", "torch") if known.get(name)]
    return [row for row in [*rows, ("versions", ", ".join(versions))] if row[1]]


def sections(run: RunRecord, *, with_plugins: bool = True) -> list[Section]:
    """What the report has of a run below its curves; a part without content is left out."""
    counted = data(run)
    zero = [(what, value) for what, value in counted if value == "0"]
    found = [
        Section(title="Samples", header=("prompt", "step", "text"), rows=samples(run)),
        Section(title="Completions", header=COMPLETIONS_HEADER, rows=completions(run)),
        Section(title="Evaluations", header=EVALUATION_HEADER, rows=evaluations(run)),
        Section(title="Advice", header=("step", "seen", "key", "change", "evidence"), rows=advice(run)),
        Section(title="Notes", items=notices(run)),
        Section(title="Run", rows=facts(run)),
        Section(title="Ranks", header=("rank", "peak memory", "micro-step"), rows=ranks(run)),
        Section(title="Experts", header=EXPERTS_HEADER, rows=run.loads.rows(), folded=True),
        Section(title="Data", rows=[row for row in counted if row not in zero]),
        Section(title="Data: counts that are 0", rows=zero, folded=True),
        Section(title="Phases", header=("step", "phase", "before", "improvement"), rows=phases(run), folded=True),
    ]
    if with_plugins:
        found.append(Section(title="Plugins", header=PLUGIN_HEADER, rows=plugins(run), folded=True))
    found.append(Section(title="Configuration", text=run.config_text, folded=True))
    return [part for part in found if part.rows or part.items or part.text]


def shared_plugins(runs: Sequence[RunRecord]) -> Section | None:
    """The plugins of several runs if all have the same, so that they are listed once; otherwise None."""
    first, *others = [plugins(run) for run in runs]
    if not (others and all(rows == first for rows in others)):
        return None
    return Section(title="Plugins of all runs", header=PLUGIN_HEADER, rows=first, folded=True)


def samples(run: RunRecord, count: int = 12) -> Rows:
    """(prompt, step, generated text): at most `count` steps of each prompt, from the last one to the first one."""
    by_prompt: dict[tuple[str, int], dict[int, str]] = {}
    for one in run.samples:
        # Earlier records do not say which texts the model ended.
        ended, equal = chain(one.get("ended") or (), repeat(True)), Counter[str]()
        for prompt, text, whole in zip(one.get("prompts") or (), one.get("texts") or (), ended, strict=False):
            found = by_prompt.setdefault((str(prompt), equal[str(prompt)]), {})
            found[int(one.get("step", 0))] = _sample(str(text), ended=bool(whole))
            equal[str(prompt)] += 1
    rows: Rows = []
    for (prompt, _), texts in by_prompt.items():
        asked = prompt if len(prompt) <= LONGEST_PROMPT else f"{prompt[:LONGEST_PROMPT]} …"
        steps = sorted(texts, reverse=True)
        places = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
        rows += [(asked, f"{steps[place]:,}", texts[steps[place]]) for place in places.tolist()]
    return rows


def completions(run: RunRecord, steps: int = 5, each: int = 4) -> Rows:
    """Completions of the last step and of some before it, the best and the worst of each step, `COMPLETIONS_HEADER`."""
    found = run.completions[::-1]
    places = np.unique(np.linspace(0, len(found) - 1, min(steps, len(found))).round().astype(int)).tolist()
    rows: Rows = []
    for record in (found[place] for place in places):
        samples = [one for one in record.get("samples") or () if isinstance(one, Mapping)]
        if len(samples) > each:
            samples = [*samples[: -(-each // 2)], *samples[-(each // 2) :]]
        rows += [_completion(int(record.get("step", 0)), sample) for sample in samples]
    return rows


def _completion(step: int, sample: Mapping[str, Any]) -> tuple[str, ...]:
    reason, prompt = str(sample.get("reason") or ""), str(sample.get("prompt"))
    text = _sample(str(sample.get("completion")), ended=reason == "stop")
    by_name = sample.get("rewards")
    named = by_name if isinstance(by_name, Mapping) and len(by_name) > 1 else {}
    rewards = ", ".join(f"{name} {_reward(value)}" for name, value in named.items())
    asked = prompt if len(prompt) <= LONGEST_PROMPT else f"{prompt[:LONGEST_PROMPT]} …"
    return f"{step:,}", _reward(sample.get("reward")), asked, text, reason, str(sample.get("length", "")), rewards


def _reward(value: Any) -> str:
    return "none" if value is None else _shown(as_number(value))


def _sample(text: str, *, ended: bool) -> str:
    """A sample for a table: not longer than needed to judge it, and with a mark if it was cut."""
    shown = re.sub(r"\n\s*\n\s*", "\n\n", text).strip("\n")[:LONGEST_SAMPLE]
    if not shown.strip():
        return "(no visible text)"
    return shown if ended and len(text) <= LONGEST_SAMPLE else f"{shown} …"


def evaluations(run: RunRecord) -> Rows:
    """(part of the run, task, metric, value, standard error, rows, date) of what `surogate eval --report` measured."""
    rows: Rows = []
    for one in run.evaluations:
        stderr = f"{one['stderr']:.4f}" if math.isfinite(one["stderr"]) else ""
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(one["time"])) if math.isfinite(one["time"]) else ""
        count = f"{one['rows']:,.0f}" if math.isfinite(one["rows"]) else ""
        rows.append((one["model"], one["task"], one["metric"], f"{one['value']:.4f}", stderr, count, date))
    return rows


COURSE = {
    "train loss": "loss",
    "learning rate": "lr",
    "grad norm": "grad_norm",
    "tokens/s": "tokens_per_second",
    "reward": "reward/mean",
    "length": "completions/length_mean",
    "entropy": "train/entropy",
    "margin": "train/rewards/margins",
    "accuracy": "train/rewards/accuracies",
}
"""Column of `milestones` → its series. Those after the first four are left out of a run that has none of them."""


def milestones(run: RunRecord, count: int = 12) -> tuple[tuple[str, ...], Rows]:
    """(header, rows): figures at `count` steps, the first and the last among them."""
    last = len(run.steps) - 1
    places = sorted({round(i * last / (count - 1)) for i in range(count)}) if last >= 0 else []
    found = {name: dict(zip(*(v.tolist() for v in run.curve(series)), strict=True)) for name, series in COURSE.items()}
    names = [name for place, name in enumerate(COURSE) if place < 4 or found[name]]
    at = [int(run.steps[place]) for place in places]
    return ("step", *names), [(f"{s:,}", *(_shown(found[n][s]) if s in found[n] else "" for n in names)) for s in at]


def ranks(run: RunRecord) -> Rows:
    """(rank, its peak memory, mean time of a micro-step that needs no other rank), as far as they were measured."""
    lists = (run.ranks.get(name) for name in ("peak_memory_bytes", "work_seconds"))
    memory, seconds = ([as_number(v) for v in found] if isinstance(found, list) else [] for found in lists)
    return [
        (str(rank), gibibytes(peak), f"{significant(1e3 * seconds[rank], 4)} ms" if rank < len(seconds) else "")
        for rank, peak in enumerate(memory)
    ]


def gibibytes(size: float) -> str:
    """``1.23 GiB``."""
    return f"{size / 2**30:.{2 if size < 10 * 2**30 else 1}f} GiB"


def phases(run: RunRecord) -> Rows:
    """(step, phase, the phase before, improvement)."""
    return [
        (str(p.get("step")), str(p.get("phase")), str(p.get("previous")), _percent(p.get("improvement")))
        for p in run.phases
    ]


def advice(run: RunRecord) -> Rows:
    """(step, what was seen, key, how to change it, evidence)."""
    return [
        (
            str(a.get("step")),
            str(a.get("message")),
            str(a.get("key")),
            str(a.get("suggestion")),
            _evidence(a.get("evidence")),
        )
        for a in run.advice
    ]


def notices(run: RunRecord) -> list[str]:
    """Notes of the start, warnings, and changes of the learning rate."""
    return [*map(str, run.start.get("notes") or ()), *(str(n.get("message")) for n in run.notices)]


def data(run: RunRecord) -> Rows:
    """The counts of rows by outcome, (outcome, count); empty for a run without a summary."""
    report = run.facts.get("data_report")
    if not isinstance(report, dict):
        return []
    rows: Rows = [("rows read", f"{report['rows_read']:,}"), ("bad rows skipped", f"{report['bad_rows']:,}")]
    names = {
        "documents": "documents",
        "deleted": "documents too long and dropped",
        "truncated": "documents too long and cut",
        "split": "documents too long and split",
        "unlabelled": "parts without a label dropped",
        "rows": "packed rows",
        "tokens": "tokens",
        "label_tokens": "tokens that are trained",
    }
    for part, title in (("train", "training"), ("eval", "eval")):
        if isinstance(counts := report.get(part), dict):
            rows += [(f"{title}: {text}", f"{counts[name]:,}") for name, text in names.items()]
            share = counts["label_tokens"] / max(1, counts["tokens"])
            rows.append((f"{title}: share of the tokens that are trained", f"{share:.1%}"))
    rows += [(f"{d['key']}: {d['path']}", f"{d['rows']:,} rows, {d['bad_rows']:,} bad") for d in report["datasets"]]
    return rows


def plugins(run: RunRecord) -> Rows:
    """(plugin, distribution, version) of the run."""
    found = run.facts.get("plugins")
    rows = [p for p in found if isinstance(p, dict)] if isinstance(found, list) else []
    return [tuple(str(p.get(key, "")) for key in ("name", "distribution", "version")) for p in rows]


def bands(run: RunRecord) -> list[Band]:
    """The phases as stretches of steps."""
    ends = [float(p.get("step", 0)) for p in run.phases[1:]] + [float(run.steps[-1]) if len(run.steps) else 0.0]
    return [
        Band(begin=float(p.get("step", 0)), end=end, label=str(p.get("phase")))
        for p, end in zip(run.phases, ends, strict=False)
    ]


def marks(run: RunRecord) -> list[Mark]:
    """Where advice was given."""
    return [
        Mark(at=float(a.get("step", 0)), label=f"step {a.get('step')}: {a.get('message')} {a.get('key')}")
        for a in run.advice
    ]


def finite(run: RunRecord, series: str) -> NDArray[np.float64]:
    """The finite values of a curve."""
    values = run.curve(series)[1]
    return values[np.isfinite(values)]


def _shown(value: float) -> str:
    return figure(value) if math.isfinite(value) else str(value)


def _experts(routing: Mapping[str, Any]) -> str:
    """``128 a layer, 8 a token``; empty for a model without experts."""
    experts, choices = routing.get("moe_experts"), routing.get("moe_experts_per_token")
    return f"{experts} a layer{f', {choices} a token' if choices else ''}" if experts else ""


def _percent(value: Any) -> str:
    return f"{value:+.2%}" if isinstance(value, (int, float)) else ""


def _evidence(value: Any) -> str:
    if not isinstance(value, Mapping):
        return ""
    shown = (f"{k} {_shown(v) if isinstance(v, float) else v}" for k, v in value.items())
    return ", ".join(shown)
