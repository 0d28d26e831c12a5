"""Whether the fast path trains as the reference path does: the losses of the first steps, within bf16's noise.

    python benchmarks/track_losses.py [--full] [--steps 50] [--out DIR]

One model, one start, one stream of text: 8 layers of Qwen3-0.6B with random weights, the Python standard
library's sources as tokens, packed documents. Trained are
- the reference path: every op its plain PyTorch reference, compiled by Inductor, bf16;
- the same from starts that differ by rounding: the weights are drawn in fp32 and rounded to bf16, and one
  weight of 256 is rounded not to the nearest but at random to one of its two neighbours, without bias. Both
  are roundings of one model, and every later rounding falls otherwise;
- the same once more (it must repeat bit for bit) and with a learning rate 5 % too high (a fault to be seen);
- the fast path: the kernel packs, bf16; and the reference path in fp32, from the same bf16 weights.

Two bounds are held. At each step the fast path's loss is as near to the reference run's as `FACTOR` times
the farthest perturbed run at that step or before; and as near to the fp32 run's as `FACTOR` times the
farthest bf16 run of the reference path. Why the perturbed runs are a measure: on a CPU their distance was
the same for one weight in 16, 256, 4096 and 65536, so it is not the perturbation's own effect but that of
the roundings after it; with every weight rounded at random it was up to eight times as large. Why the
factor: were the fast path one more perturbed run, its largest distance would be the largest of all in one
of 9 tries.

Shape suffixes: N tokens of a micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import re
import sys
import sysconfig
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import bench
import gpu_lora
import numpy as np
import torch
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import KernelPack
from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource, Source
from surogate_core.kernels.registry import KernelTable
from surogate_core.plugins import load_plugins
from surogate_core.train.drive import ReadySteps, drive
from surogate_core.train.lr import Schedule

FACTOR = 2.0
SHARE = 1 / 256
"""Share of the weights that a perturbed start rounds at random."""
CONTROL = 1.05
"""Factor of the faulty run's learning rate."""
WARM_UP = 5
"""Steps in which the learning rate rises."""
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of all runs."""

    device: torch.device
    config: Mapping[str, Any]
    rows: int
    length: int
    micro_steps: int
    steps: int
    learning_rate: float
    full: bool
    rank: int = 16
    scale: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The figures of one training."""

    losses: list[float]
    norms: list[float]
    kernels: dict[str, str]


def setting_of(options: argparse.Namespace) -> Setting:
    """Eight layers of 0.6B, or what a CPU trains in a second."""
    tiny = options.tiny
    changes = {"num_hidden_layers": 2, "vocab_size": 512} if tiny else {"num_hidden_layers": 8}
    return Setting(
        device=torch.device(options.device),
        config={**PRESETS["tiny" if tiny else "0.6b"], **changes},
        rows=2 if tiny else 1,
        length=64 if tiny else 1024,
        micro_steps=2,
        steps=options.steps,
        learning_rate=options.lr or (3e-4 if options.full else 1e-3),
        full=options.full,
    )


# ---------------------------------------------------------------------------------------- data


def tokens_of_text(vocabulary: int, count: int) -> list[int]:
    """The first tokens of the standard library: words, signs and white space, each hashed to an id."""
    found: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        found += [zlib.crc32(t.encode()) % vocabulary for t in re.findall(r"\w+|[^\w\s]|\s+", text)]
        if len(found) >= count:
            return found[:count]
    raise SystemExit(f"the standard library has {len(found)} tokens, {count} are needed; fix: fewer --steps")


def make_batches(setting: Setting) -> list[list[MicroBatch]]:
    """The micro-batches of every step: the text in its order, cut into documents that fill the rows."""
    random = np.random.default_rng(SEED)
    size = setting.rows * setting.length
    text = torch.tensor(tokens_of_text(setting.config["vocab_size"], setting.steps * setting.micro_steps * size))
    lengths = [
        [n for _ in range(setting.rows) for n in _lengths(setting.length, random)]
        for _ in range(setting.steps * setting.micro_steps)
    ]
    borders = max(map(len, lengths)) + 1
    batches = []
    for ids, cut in zip(text.split(size), lengths, strict=True):
        stops = [0, *accumulate(cut)]
        labels = torch.roll(ids, -1)
        labels[torch.tensor(stops[1:]) - 1] = IGNORE_LABEL
        batches.append(
            MicroBatch(
                input_ids=ids.clone(),
                labels=labels,
                positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in cut]),
                cu_seqlens=torch.tensor([*stops, *[size] * (borders - len(stops))], dtype=torch.int32),
                max_seqlen=setting.length,
                tokens=size,
                label_tokens=size - len(cut),
            )
        )
    return [batches[i : i + setting.micro_steps] for i in range(0, len(batches), setting.micro_steps)]


def _lengths(row: int, random: np.random.Generator) -> Iterator[int]:
    """Log-normal lengths, a third of the row in the mean, that fill it."""
    left = row
    while left:
        length = min(left, max(8, int(random.lognormal(np.log(row / 4), gpu_lora.SIGMA))))
        yield length
        left -= length


# -------------------------------------------------------------------------------------- engines


class Rounded:
    """Base weights on bf16's grid: the nearest values, but with a seed a share at random, without bias."""

    def __init__(self, device: torch.device, seed: int | None = None, share: float = SHARE):
        self.draw = RandomSource(seed=SEED, std=0.02, device=device)
        self.seed, self.share = seed, share

    def __call__(self, spec: TensorSpec) -> Tensor:
        value = self.draw(spec)
        if spec.role == "adapter":
            return value
        if self.seed is None:
            return value.bfloat16().float()
        name = zlib.crc32(f"{self.seed}:{spec.hf_name}".encode())
        generator = torch.Generator(value.device).manual_seed(name)
        low = torch.randint(0, 1 << 16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
        # The upper half of a float's bits is a bf16; a carry out of the lower half moves to its neighbour.
        either = ((value.view(torch.int32) + low) & -(1 << 16)).view(torch.float32)
        touched = torch.rand(value.shape, device=value.device, generator=generator) < self.share
        return torch.where(touched, either, value.bfloat16().float())


def make_engine(
    setting: Setting, packs: Sequence[KernelPack], dtype: torch.dtype, source: Source, borders: int
) -> Engine:
    """An engine with these packs' kernels, and references for the rest."""
    device, cuda = setting.device, setting.device.type == "cuda"
    settings = EngineSettings(
        device=device,
        dtype=dtype,
        compiler="inductor" if cuda else "fx",
        cuda_graphs=cuda,
        tokens=setting.rows * setting.length,
        borders=borders,
        max_seqlen=setting.length,
        head_chunks=4,
        seed=SEED,
    )
    lora = None if setting.full else bench.adapters(setting.rank, scale=setting.scale)
    kernels = KernelTable.build(device, packs)
    return Engine(bench.assemble(build(setting.config), settings, kernels=kernels, lora=lora), source)


@torch.no_grad()
def restart(engine: Engine, source: Callable[[TensorSpec], Tensor]) -> None:
    """Set every weight from the source and the optimizer to its start, in place: nothing is compiled again."""
    parameters = engine.parameters
    for piece in parameters.pieces:
        frozen = iter(parameters.weights.fetch(piece.key))
        for spec in piece.specs:
            (parameters.masters()[spec.hf_name] if spec.trainable else next(frozen)).copy_(source(spec))
    for tensor in engine.optimizer.state().values():
        tensor.zero_()
    parameters.refresh()


def train(engine: Engine, setting: Setting, batches: Sequence[Sequence[MicroBatch]], factor: float = 1.0) -> Run:
    """All steps; the learning rate rises, then stays."""
    config = RunConfig(
        max_steps=len(batches),
        learning_rate=factor * setting.learning_rate,
        lr_scheduler_type="constant",
        warmup_steps=WARM_UP,
    )
    taken = list(drive(config, engine, ReadySteps(map(list, batches)), None, Schedule.of(config, load_plugins())))
    figures = [one.result.read() for one in taken if one.result is not None]
    kernels = {op: name for (op, _), name in engine.programs.kernels.chosen.items()}
    return Run(losses=[loss for loss, _ in figures], norms=[norm for _, norm in figures], kernels=kernels)


def runs(setting: Setting, packs: Sequence[str], perturbed: int) -> Iterator[tuple[str, Run | str]]:
    """(name, figures or what went wrong) of each run, as they come."""
    batches = make_batches(setting)
    borders = batches[0][0].cu_seqlens.numel()
    same = Rounded(setting.device)

    def first(packs: Sequence[KernelPack], dtype: torch.dtype) -> tuple[Engine, Run]:
        engine = make_engine(setting, packs, dtype, same, borders)
        return engine, train(engine, setting, batches)

    def again(engine: Engine, source: Callable[[TensorSpec], Tensor], factor: float = 1.0) -> Run:
        restart(engine, source)
        return train(engine, setting, batches, factor)

    try:
        engine, run = first([], torch.bfloat16)
        yield "reference", run
        yield "reference again", again(engine, same)
        for number in range(1, perturbed + 1):
            yield f"rounded {number}", again(engine, Rounded(setting.device, number))
        yield "control", again(engine, same, CONTROL)
        del engine
    except Exception:
        yield "reference path", traceback.format_exc()
    for name, dtype in (("fast", torch.bfloat16), ("fp32", torch.float32)):
        _free(setting.device)
        try:
            yield name, first(bench.packs(packs) if name == "fast" else [], dtype)[1]
        except Exception:
            yield name, traceback.format_exc()


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# -------------------------------------------------------------------------------------- verdict


def distances(found: Mapping[str, Run], name: str, other: str = "reference") -> list[float]:
    """|loss − loss of the other run| at each step."""
    return [abs(a - b) for a, b in zip(found[name].losses, found[other].losses, strict=True)]


def bound(found: Mapping[str, Run], other: str = "reference") -> list[float]:
    """The bound of the distance to the other run at each step; see the top of this file."""
    names = [name for name in found if name.startswith("rounded ") or (name == "reference" and name != other)]
    each = zip(*(distances(found, name, other) for name in names), strict=True)
    return [FACTOR * value for value in accumulate((max(at) for at in each), max)]


def outside(values: Sequence[float], limits: Sequence[float]) -> list[int]:
    """The steps, from 1, at which a distance is not within its limit; NaN is not."""
    return [i for i, (value, limit) in enumerate(zip(values, limits, strict=True), start=1) if not value <= limit]


def judge(found: Mapping[str, Run], errors: Mapping[str, str]) -> dict[str, Any]:
    """The results of the runs so far."""
    answer: dict[str, Any] = {"errors": dict(errors), "factor": FACTOR, "share": SHARE, "bounds": {}, "judged": {}}
    if "reference again" in found:
        answer["repeats"] = found["reference again"].losses == found["reference"].losses
    perturbed = [name for name in found if name.startswith("rounded ")]
    for other in ("reference", "fp32"):
        if not perturbed or other not in found:
            continue
        limits = bound(found, other)
        answer["bounds"][other] = limits
        for name in ("fast", "control"):
            if name in found:
                away = distances(found, name, other)
                answer["judged"][f"{name} to {other}"] = {
                    "outside": outside(away, limits),
                    "share_of_bound": max(d / b if b else float(d > 0) for d, b in zip(away, limits, strict=True)),
                    "perturbed_runs_farther": sum(max(distances(found, n, other)) >= max(away) for n in perturbed),
                }
    judged = answer["judged"]
    within = all(f"fast to {o}" in judged and not judged[f"fast to {o}"]["outside"] for o in ("reference", "fp32"))
    # A bound that a fault does not leave would say nothing.
    sharp = bool(judged.get("control to reference", {"outside": []})["outside"])
    answer["tracks"] = not errors and answer.get("repeats", False) and within and sharp
    return answer


def markdown(found: Mapping[str, Run], verdict: Mapping[str, Any], title: str) -> str:
    """The verdict, the runs, and the steps."""
    text = [title, ""]
    titles = {"fast": "The fast path", "control": f"A learning rate {CONTROL - 1:.0%} too high"}
    for name, found_of in verdict["judged"].items():
        who, _, other = name.partition(" to ")
        steps = found_of["outside"]
        where = f"is outside the bound at {len(steps)} steps, first {steps[0]}" if steps else "is within the bound"
        text.append(
            f"- {titles[who]}, distance to {other}: {where}; at its worst step {found_of['share_of_bound']:.2f} of the "
            f"bound; {found_of['perturbed_runs_farther']} perturbed runs went farther."
        )
    if "repeats" in verdict:
        text.append(f"- The reference path {'repeats' if verdict['repeats'] else 'does NOT repeat'} bit for bit.")
    if "fast" in found:
        kernels = ", ".join(f"{op} {name}" for op, name in sorted(found["fast"].kernels.items()))
        text.append(f"- The fast path's kernels: {kernels}.")
    text += ["", "| run | first loss | last loss | max, mean distance to reference | max, mean distance to fp32 |"]
    text += ["| --- | --- | --- | --- | --- |"]
    for name, run in found.items():
        cells = [name, f"{run.losses[0]:.5f}", f"{run.losses[-1]:.5f}"]
        for other in ("reference", "fp32"):
            if name == other or other not in found:
                cells.append("")
            else:
                values = distances(found, name, other)
                cells.append(f"{max(values):.1e}, {sum(values) / len(values):.1e}")
        text.append("| " + " | ".join(cells) + " |")
    if "fast" in found and "fp32" in verdict["bounds"]:
        text += ["", "| step | reference | fast − reference | bound | fast − fp32 | bound |", "| --- " * 6 + "|"]
        for i, loss in enumerate(found["reference"].losses):
            cells = [f"{i + 1}", f"{loss:.5f}"]
            for other in ("reference", "fp32"):
                away = found["fast"].losses[i] - found[other].losses[i]
                cells += [f"{away:+.1e}", f"{verdict['bounds'][other][i]:.1e}"]
            text.append("| " + " | ".join(cells) + " |")
    text += [f"\n{name} failed:\n\n```text\n{error}```" for name, error in verdict["errors"].items()]
    return "\n".join(text) + "\n"


# ----------------------------------------------------------------------------------------- plot

COLOURS = {"reference": "#222222", "fast": "#d1495b", "fp32": "#2e86ab", "control": "#b58900", "bound": "#222222"}
WIDTH, HEIGHT, MARGIN = 460, 260, 46


def plot(found: Mapping[str, Run], verdict: Mapping[str, Any]) -> str:
    """SVG: the losses, and the distances to the reference path on a logarithmic scale under the bound."""
    losses = {name: found[name].losses for name in ("reference", "fast", "fp32") if name in found}
    away = {name: distances(found, name) for name in found if name not in ("reference", "reference again")}
    if "reference" in verdict["bounds"]:
        away["bound"] = verdict["bounds"]["reference"]
    logs = {name: [float(np.log10(max(v, 1e-7))) for v in values] for name, values in away.items()}
    panels = [("loss", losses), ("log10 of the distance to the reference path's loss", logs)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for number, (title, curves) in enumerate(panels):
        parts.append(f'<g transform="translate({number * WIDTH},0)">{"".join(_panel(title, curves))}</g>')
    return "".join([*parts, "</svg>\n"])


def _panel(title: str, curves: Mapping[str, Sequence[float]]) -> Iterator[str]:
    values = [v for curve in curves.values() for v in curve if np.isfinite(v)]
    if not values:
        return
    low, high = min(values), max(values)
    span, steps = (high - low) or 1.0, max(map(len, curves.values()))
    right, bottom = WIDTH - 12, HEIGHT - 30
    yield f'<text x="{MARGIN}" y="18">{title}, by step</text>'
    yield f'<path d="M{MARGIN} 28V{bottom}H{right}" fill="none" stroke="#888"/>'
    for share in (0.0, 0.5, 1.0):
        y = bottom - share * (bottom - 28)
        yield f'<text x="{MARGIN - 4}" y="{y + 4:.0f}" text-anchor="end">{low + share * span:.2f}</text>'
    for step in (1, steps):
        x = MARGIN + (step - 1) / max(steps - 1, 1) * (right - MARGIN)
        yield f'<text x="{x:.0f}" y="{bottom + 14}" text-anchor="middle">{step}</text>'
    named = 0
    for name, curve in curves.items():
        places = [
            f"{MARGIN + i / max(steps - 1, 1) * (right - MARGIN):.1f},{bottom - (v - low) / span * (bottom - 28):.1f}"
            for i, v in enumerate(curve)
            if np.isfinite(v)
        ]
        colour = COLOURS.get(name, "#bbbbbb")
        dashes = ' stroke-dasharray="5 3"' if name in ("bound", "fp32") else ""
        yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{colour}" stroke-width="1.4"{dashes}/>'
        if name in COLOURS or name == "rounded 1":
            label = "rounded at random" if name == "rounded 1" else name
            yield f'<text x="{MARGIN + 8 + 78 * named}" y="{HEIGHT - 4}" fill="{colour}">{label}</text>'
            named += 1


# ----------------------------------------------------------------------------------------- main


def track(options: argparse.Namespace) -> dict[str, Any]:
    """All runs; the files are written again after each."""
    torch.set_float32_matmul_precision("highest")
    setting = setting_of(options)
    options.out.mkdir(parents=True, exist_ok=True)
    cuda = setting.device.type == "cuda"
    mode = "full fine-tuning" if setting.full else f"LoRA r={setting.rank}"
    title = (
        f"{torch.cuda.get_device_name() if cuda else 'cpu'}, torch {torch.__version__}; "
        f"{setting.config['num_hidden_layers']} layers of width {setting.config['hidden_size']}, {mode}, "
        f"learning rate {setting.learning_rate:g}, {setting.micro_steps} × {setting.rows} × {setting.length} tokens a "
        "step."
    )
    found: dict[str, Run] = {}
    errors: dict[str, str] = {}
    verdict: dict[str, Any] = {}
    before = time.monotonic()
    for name, run in runs(setting, options.packs, options.perturbed):
        if isinstance(run, str):
            errors[name] = run
        else:
            found[name] = run
        verdict = judge(found, errors)
        told = run.splitlines()[-1] if isinstance(run, str) else f"{run.losses[0]:.4f} … {run.losses[-1]:.4f}"
        print(f"{name}: {told} ({time.monotonic() - before:.0f} s)", file=sys.stderr, flush=True)
        before = time.monotonic()
        if "reference" in found:
            report = {
                "title": title,
                "verdict": verdict,
                "runs": {n: {"losses": r.losses, "norms": r.norms, "kernels": r.kernels} for n, r in found.items()},
            }
            for ending, text in (
                ("json", json.dumps(report, indent=1)),
                ("md", markdown(found, verdict, title)),
                ("svg", plot(found, verdict)),
            ):
                Path(options.out, f"{options.name}.{ending}").write_text(text, encoding="utf-8")
    print(markdown(found, verdict, title))
    return verdict


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--full", action="store_true", help="train all weights")
    parser.add_argument("--packs", nargs="*", choices=list(bench.PACKS), default=list(bench.PACKS), help="fast path's")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--perturbed", type=int, default=8, help="runs that measure the noise")
    parser.add_argument("--lr", type=float, help="1e-3, or 3e-4 for all weights")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--name", default="track_losses", help="of the files in --out")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two small layers, to try the script itself")
    return parser


def main() -> None:
    """Exit status 1 if the fast path does not track the reference path, or a run failed."""
    sys.exit(0 if track(make_parser().parse_args())["tracks"] else 1)


if __name__ == "__main__":
    main()
