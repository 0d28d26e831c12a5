"""Whether the precision recipes train as well as bf16: pre-training, LoRA fine-tuning, and a task.

A Qwen3 of 110M parameters is pre-trained from scratch on Python sources and documentation, from the same
start on the same rows under each recipe; its held-out loss is taken on files that are kept apart. The bf16
model is then trained further on text mixed with arithmetic drills. That one model is fine-tuned with LoRA
under each recipe, on C and C++ headers (held-out loss), and from the start again on generated word problems of
two steps (exact match). `parity_text.py` has the texts.

Exact match is greedy decoding's: the answer is decoded greedily exactly if at each of its tokens, given the
right ones before, the right one is the likeliest. So one forward of the whole problem decides it.

What a recipe has trained is evaluated under it, and at the end in bf16 too: the one is the run's loss, the other
that of the weights it exports. Pre-training may be repeated from other initial weights on the same rows
(`--starts`): how far chance takes a loss is part of what a gap means. nvfp4 leaves the last `--plain-last` blocks
alone. Each (recipe, part) is a process of its own, all at the same time on one device, so no time is measured here.
Files are written when a part is done; `parity_report.py` makes the tables and the picture of them.

    python benchmarks/loss_parity.py --out DIR [--steps 2000 …] [--device cpu --tiny]

Shape suffixes: N tokens of a micro-batch, S document borders, V vocabulary, R rows, L tokens of a row.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import tee
from pathlib import Path
from typing import Any

import bench
import numpy as np
import parity_report
import parity_text
import torch
from safetensors.torch import load_file, save_file
from surogate_model_qwen3.model import build
from surogate_optimizer_adamw import AdamWOptions
from surogate_optimizer_normuon import NorMuonOptions
from tokenizers import Tokenizer
from torch import Tensor

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import Model, TensorSpec
from surogate_core.dsl.sides import RouterLosses
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource, Source
from surogate_core.engine.update import StepResult
from surogate_core.plugins import load_plugins
from surogate_core.train.drive import ReadySteps, drive
from surogate_core.train.loop import evaluation_due
from surogate_core.train.lr import Schedule
from surogate_core.train.precision import PrecisionWatch

REST = 0.1
RECIPES = {"bf16": "surogate_recipe_bf16", "fp8-hybrid": "surogate_recipe_fp8", "nvfp4": "surogate_recipe_nvfp4"}
PARTS = ("pretrain", "lora")
PROMPT_END = "\nAnswer:"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of all processes; each field is an option of the command line."""

    out: Path = Path("loss_parity")
    device: str = "cuda"
    tiny: bool = False
    seed: int = 0
    rows: int = 4
    """Rows of a step."""
    length: int = 1024
    vocabulary: int = 8192
    steps: int = 2000
    """Steps of pre-training."""
    optimizer: str = "adamw"
    """Optimizer of pre-training; with normuon, embeddings and norms have `REST` times the rate."""
    rate: float = 1e-3
    drill_steps: int = 800
    """Steps of the bf16 model's training on text and drills."""
    lora_steps: int = 400
    task_steps: int = 800
    lora_rate: float = 1e-3
    rank: int = 16
    problems: int = 4096
    """Held-out problems."""
    held_rows: int = 192
    megabytes: int = 48
    """Megabytes of text to pre-train on."""
    evaluate: int = 200
    """Steps between two evaluations."""
    plain_last: int = 2
    """Last blocks that nvfp4 leaves alone."""
    recipes: str = ",".join(RECIPES)
    """The ones to train; bf16, whose model is fine-tuned, is among them."""
    parts: str = ",".join(PARTS)
    """lora needs pretrain."""
    starts: str = "0"
    """Numbers of the initial weights to pre-train from; the first one's model is fine-tuned."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json."""
        shape = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12}
        heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 128}
        if self.tiny:
            shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3}
            heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        rest = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": self.length}
        return {**shape, **heads, **rest, "vocab_size": self.vocabulary, "tie_word_embeddings": True}

    @property
    def borders(self) -> int:
        """S: a problem has at least 24 tokens, and there are as many pieces of padding as rows."""
        return self.rows * self.length // 24 + self.rows + 2


# ------------------------------------------------------------------------------------- data


def prepare(setting: Setting, work: Path) -> dict[str, Any]:
    """Write tokenizer and rows; how much there is."""
    train, held = parity_text.texts(parity_text.PYTHON, setting.megabytes * 10**6)
    tokenizer = parity_text.train_tokenizer(train[: max(1, len(train) // 6)], setting.vocabulary)
    tokenizer.save(str(work / "tokenizer.json"))
    random = np.random.default_rng([setting.seed, 1])
    drills = parity_text.drills(random)
    per_row = setting.length // 12
    texts_of_drills = [
        "\n".join(next(drills) for _ in range(per_row)) for _ in range(setting.drill_steps * setting.rows // 2)
    ]
    size = max(2 * 10**6, 4 * setting.lora_steps * setting.rows * setting.length)
    headers, held_headers = parity_text.texts(parity_text.HEADERS, size)
    facts: dict[str, Any] = {"files": [len(train), len(held)], "header files": [len(headers), len(held_headers)]}
    for name, found in (
        ("train", train),
        ("held", held),
        ("drills", texts_of_drills),
        ("headers", headers),
        ("held_headers", held_headers),
    ):
        made = parity_text.rows(parity_text.tokens(tokenizer, found), setting.length)
        if not len(made):
            raise SystemExit(f"{name}: less than one row of {setting.length} tokens")
        facts[f"{name} tokens"] = made.size
        np.save(work / f"{name}.npy", made)
    return facts


def batch_of(ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]], setting: Setting) -> MicroBatch:
    """A micro-batch of documents, padded with documents without labels; labels are shifted already."""
    size = setting.rows * setting.length
    used = sum(map(len, ids))
    assert used <= size
    rest = [min(setting.length, size - at) for at in range(used, size, setting.length)]
    lengths = [*map(len, ids), *rest]
    stops = np.cumsum([0, *lengths])
    padded = [*stops.tolist(), *[size] * (setting.borders - len(stops))]
    assert len(padded) == setting.borders
    flat = torch.tensor([label for row in labels for label in row] + [IGNORE_LABEL] * sum(rest))
    return MicroBatch(
        input_ids=torch.tensor([id for row in ids for id in row] + [0] * sum(rest)),
        labels=flat,
        positions=torch.cat([torch.arange(n, dtype=torch.int32) for n in lengths]),
        cu_seqlens=torch.tensor(padded, dtype=torch.int32),
        max_seqlen=setting.length,
        tokens=used,
        label_tokens=int((flat != IGNORE_LABEL).sum()),
    )


def text_batch(found: parity_text.Ids, setting: Setting) -> MicroBatch:
    """[rows, L] → a micro-batch in which each row is a document."""
    ids = found.astype(np.int64).tolist()
    return batch_of(ids, [[*row[1:], IGNORE_LABEL] for row in ids], setting)


def text_batches(found: parity_text.Ids, setting: Setting, *, seed: int) -> Iterator[MicroBatch]:
    """Micro-batches of the rows in a random order, epoch after epoch."""
    order: list[int] = []
    epoch = 0
    while True:
        while len(order) < setting.rows:
            order += np.random.default_rng([setting.seed, seed, epoch]).permutation(len(found)).tolist()
            epoch += 1
        yield text_batch(found[order[: setting.rows]], setting)
        del order[: setting.rows]


def held_batches(found: parity_text.Ids, setting: Setting) -> list[MicroBatch]:
    """The first held-out rows, in whole micro-batches."""
    count = max(1, min(len(found), setting.held_rows) // setting.rows)
    return [text_batch(found[i * setting.rows : (i + 1) * setting.rows], setting) for i in range(count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """Problems in one micro-batch."""

    batch: MicroBatch
    answers: list[tuple[parity_text.Problem, list[int], list[int]]]
    """(problem, positions that predict the answer's tokens, those tokens)."""


def pack(found: Sequence[parity_text.Problem], tokenizer: Tokenizer, setting: Setting) -> Iterator[Packed]:
    """Micro-batches of problems in their order; only answers have labels."""
    size, end = setting.rows * setting.length, tokenizer.token_to_id(parity_text.END)
    assert end is not None
    ids: list[list[int]] = []
    labels: list[list[int]] = []
    answers: list[tuple[parity_text.Problem, list[int], list[int]]] = []
    at = 0
    for problem in found:
        prompt = tokenizer.encode(problem.question + PROMPT_END).ids
        answer = [*tokenizer.encode(f" {problem.answer}").ids, end]
        row = [*prompt, *answer]
        if at + len(row) > size or len(ids) + setting.rows + 2 > setting.borders:
            yield Packed(batch=batch_of(ids, labels, setting), answers=answers)
            ids, labels, answers, at = [], [], [], 0
        first = len(prompt) - 1
        ids.append(row)
        labels.append([*[IGNORE_LABEL] * first, *answer, IGNORE_LABEL])
        answers.append((problem, list(range(at + first, at + first + len(answer))), answer))
        at += len(row)
    if ids:
        yield Packed(batch=batch_of(ids, labels, setting), answers=answers)


# ----------------------------------------------------------------------------------- engine


def make_engine(
    name: str,
    setting: Setting,
    source: Source,
    *,
    lora: bool,
    model: Model | None = None,
    router_losses: RouterLosses | None = None,
) -> Engine:
    """A model under a recipe; by default the setting's."""
    device = torch.device(setting.device)
    cuda = device.type == "cuda"
    chosen = "adamw" if lora else setting.optimizer
    settings = EngineSettings(
        device=device,
        dtype=torch.bfloat16,
        compiler="inductor" if cuda else "fx",
        cuda_graphs=cuda,
        tokens=setting.rows * setting.length,
        borders=setting.borders,
        max_seqlen=setting.length,
        weight_decay=0.0 if lora else 0.1,
        seed=setting.seed,
        plain_last=setting.plain_last if name == "nvfp4" else 0,
        router_losses=router_losses or RouterLosses(),
    )
    assembly = bench.assemble(
        model or build(setting.config),
        settings,
        recipe=name,
        optimizer=chosen,
        optimizer_options=(
            NorMuonOptions(rest_lr_factor=REST, adamw_beta2=0.95) if chosen == "normuon" else AdamWOptions(beta2=0.95)
        ),
        lora=bench.adapters(setting.rank) if lora else None,
    )
    return Engine(assembly, source)


class Base:
    """A trained model's weights, with fresh adapters."""

    def __init__(self, path: Path, setting: Setting):
        self.kept = load_file(path)
        self.fresh = RandomSource(seed=setting.seed, std=0.02, device=torch.device(setting.device))

    def __call__(self, spec: TensorSpec) -> Tensor:
        return self.fresh(spec) if spec.role == "adapter" else self.kept[spec.hf_name]


@torch.no_grad()
def restart(engine: Engine, source: Callable[[TensorSpec], Tensor]) -> None:
    """Trained weights, optimizer and the recipe's scales as at their start."""
    for name, master in engine.parameters.masters().items():
        master.copy_(source(engine.parameters.specs[name]))
    states = [engine.optimizer.state(), engine.recipe_state.state() if engine.recipe_state else {}]
    for tensor in (tensor for state in states for tensor in state.values()):
        tensor.zero_()
    engine.parameters.refresh()


def evaluate_weights(engine: Engine, other: Engine, held: Sequence[MicroBatch]) -> float:
    """The held-out loss of an engine's weights in another, which takes them over."""
    masters = engine.parameters.masters()
    restart(other, lambda spec: masters[spec.hf_name])
    return other.evaluate(held)[0]


def train(
    engines: Sequence[Engine],
    batches: Iterator[MicroBatch],
    steps: int,
    rate: float,
    *,
    held: Sequence[MicroBatch],
    every: int,
    told: Callable[[list[dict[str, Any]]], None] = lambda figures: None,
) -> list[dict[str, Any]]:
    """Train each on the same batches, with a cosine to a tenth after a short warm-up.

    Of each its training losses, the held-out losses by step, and how its delayed scales fitted.
    """
    found: list[dict[str, Any]] = [{"losses": [], "held": []} for _ in engines]
    results: list[list[StepResult]] = [[] for _ in engines]
    watches = [PrecisionWatch.of(engine) for engine in engines]
    config = RunConfig(
        max_steps=steps,
        eval_steps=every,
        learning_rate=rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, steps // 20),
        final_lr_fraction=0.1,
    )
    schedule = Schedule.of(config, load_plugins())
    trainings = [
        drive(config, engine, ReadySteps([batch] for batch in of_engine), held or None, schedule)
        for engine, of_engine in zip(engines, tee(batches, len(engines)), strict=True)
    ]
    for together in zip(*trainings, strict=True):
        for taken, of_engine, figures in zip(together, results, found, strict=True):
            if taken.result is not None:
                of_engine.append(taken.result)
            if taken.held is not None:
                figures["held"].append((taken.step, taken.held))
        step = together[0].step
        if step == 0 or not evaluation_due(step, total=steps, every=every):
            continue
        # Read now and then, so that no engine waits for its device in between.
        for of_engine, watch, figures in zip(results, watches, found, strict=True):
            for result in of_engine:
                figures["losses"].append(result.read()[0])
                if watch is not None:
                    watch.observe(result.used_range(watch.columns))
            of_engine.clear()
        told(found)
    for watch, figures in zip(watches, found, strict=True):
        if watch is not None and (scales := watch.take(steps)) is not None:
            figures |= {"saturated": scales.saturated, "underflowed": scales.underflowed, "worst": scales.worst}
            figures |= {"worst_excess": scales.worst_excess}
    return found


def score(engine: Engine, held: Sequence[Packed]) -> dict[str, Any]:
    """Exact match with its standard error, in all, by kind of problem and by largest number."""
    right: list[tuple[parity_text.Problem, bool]] = []
    for packed in held:
        likeliest = engine.logits(packed.batch).argmax(-1).tolist()
        right += [(problem, [likeliest[i] for i in at] == answer) for problem, at, answer in packed.answers]

    def share_of(found: list[bool]) -> float:
        return sum(found) / len(found)

    every = [one for _, one in right]
    kinds, sizes = sorted({p.kind for p, _ in right}), sorted({p.largest for p, _ in right})
    share = share_of(every)
    return {
        "exact_match": share,
        "standard_error": math.sqrt(share * (1 - share) / len(every)),
        "problems": len(every),
        "by_kind": {kind: share_of([one for p, one in right if p.kind == kind]) for kind in kinds},
        "by_largest": {str(size): share_of([one for p, one in right if p.largest == size]) for size in sizes},
        "right": "".join(str(int(one)) for one in every),
    }


# ------------------------------------------------------------------------------------ parts


def pretrain(name: str, setting: Setting, work: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """From random weights; the first bf16 model goes on with drills and is kept for the other part."""
    started = time.monotonic()
    starts, device = setting.starts.split(","), torch.device(setting.device)
    sources = [RandomSource(seed=setting.seed + int(start), std=0.02, device=device) for start in starts]
    engines = [make_engine(name, setting, source, lora=False) for source in sources]
    told: dict[str, Any] = {"parameters": engines[0].parameters.counts()[0], "setup": time.monotonic() - started}
    train_rows, held = np.load(work / "train.npy"), held_batches(np.load(work / "held.npy"), setting)
    started = time.monotonic()
    batches = text_batches(train_rows, setting, seed=2)
    say = _announcer(f"pretrain {name}")

    def progress(found: list[dict[str, Any]]) -> None:
        keep({**told, "starts": dict(zip(starts, found, strict=True))})
        say(found)

    found = train(engines, batches, setting.steps, setting.rate, held=held, every=setting.evaluate, told=progress)
    if name != "bf16":
        plain = make_engine("bf16", setting, sources[0], lora=False)
        for engine, figures in zip(engines, found, strict=True):
            figures["held_in_bf16"] = evaluate_weights(engine, plain, held)
    told |= {"starts": dict(zip(starts, found, strict=True)), "kernels": _kernels(engines[0])}
    told["seconds"] = time.monotonic() - started
    keep(told)
    if name == "bf16" and "lora" in setting.parts.split(","):
        # Half of each step is text, so that the model does not forget it.
        drills = np.load(work / "drills.npy")
        mixed = np.concatenate((drills, train_rows[: len(drills)]))
        drilled = text_batches(mixed, setting, seed=3)
        engine, steps, rate = engines[0], setting.drill_steps, setting.rate / 2
        (told["drills"],) = train([engine], drilled, steps, rate, held=held, every=setting.evaluate)
        keep(told)
        base = {name: master.float().cpu().contiguous() for name, master in engine.parameters.masters().items()}
        save_file(base, work / "base.part")
        (work / "base.part").rename(work / "base.safetensors")


def fine_tune(name: str, setting: Setting, work: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """LoRA on the kept model: headers, then from the start again word problems."""
    size = setting.task_steps * setting.rows * setting.length // 24
    to_learn, to_solve = parity_text.problems(size, setting.problems, seed=setting.seed)
    while not (work / "base.safetensors").exists():
        if (work / "pretrain-bf16.failed").exists():
            raise SystemExit("there is no model to fine-tune: bf16 pre-training failed")
        time.sleep(0.2)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    base = Base(work / "base.safetensors", setting)
    started = time.monotonic()
    engine = make_engine(name, setting, base, lora=True)
    told: dict[str, Any] = {"trainable": engine.parameters.counts()[1], "setup": time.monotonic() - started}
    started = time.monotonic()
    held_problems = list(pack(to_solve, tokenizer, setting))
    told["task"] = {"untuned": score(engine, held_problems)}
    print(f"lora {name}: untuned {told['task']['untuned']['by_largest']}", flush=True)
    keep(told)
    held = held_batches(np.load(work / "held_headers.npy"), setting)
    headers = text_batches(np.load(work / "headers.npy"), setting, seed=4)
    every = max(1, setting.evaluate // 4)
    say = _announcer(f"lora {name}")
    (told["headers"],) = train(
        [engine], headers, setting.lora_steps, setting.lora_rate, held=held, every=every, told=say
    )
    keep(told)
    restart(engine, base)
    batches = (packed.batch for packed in pack(to_learn, tokenizer, setting))
    (figures,) = train([engine], batches, setting.task_steps, setting.lora_rate, held=[], every=every)
    told["task"] |= {"losses": figures["losses"], "tuned": score(engine, held_problems)}
    told |= {"seconds": time.monotonic() - started, "kernels": _kernels(engine)}
    print(f"lora {name}: tuned {told['task']['tuned']['by_largest']}", flush=True)
    keep(told)


def _kernels(engine: Engine) -> dict[str, str]:
    return {op: kernel for (op, _), kernel in engine.programs.kernels.chosen.items()}


def _announcer(label: str) -> Callable[[list[dict[str, Any]]], None]:
    started = time.monotonic()

    def tell(found: list[dict[str, Any]]) -> None:
        losses = " and ".join(f"{figures['held'][-1][1]:.4f}" for figures in found)
        step = found[0]["held"][-1][0]
        print(f"{label}: step {step}, held-out loss {losses}, {time.monotonic() - started:.0f} s", flush=True)

    return tell


def work_on(part: str, name: str, setting: Setting, work: Path) -> None:
    """A process's part; what it found is a file even if it fails later."""
    # Operands of the emulated products have few bits: TF32 holds them exactly, and sums are in fp32.
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(setting.seed)
    file = setting.out / f"{part}-{name}.json"
    try:
        run = {"pretrain": pretrain, "lora": fine_tune}[part]
        run(name, setting, work, lambda found: _write(file, json.dumps(found)))
    except BaseException:
        (work / f"{part}-{name}.failed").write_text(traceback.format_exc())
        raise


def _write(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.rename(path)


# ------------------------------------------------------------------------------------- main


def compare(setting: Setting) -> int:
    """All parts as processes; the number that failed."""
    setting.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        work = Path(place)
        started = time.monotonic()
        facts = prepare(setting, work)
        print(f"data: {facts}, {time.monotonic() - started:.0f} s", flush=True)
        command = [sys.executable, __file__, *words(setting), "--work", place, "--part"]
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false"}
        running = {
            f"{part}-{name}": subprocess.Popen([*command, part, name], env=environment)
            for part in setting.parts.split(",")
            for name in setting.recipes.split(",")
        }
        codes = {name: process.wait() for name, process in running.items()}
    found = {name: json.loads(file.read_text()) for name in running if (file := setting.out / f"{name}.json").exists()}
    cuda = setting.device == "cuda"
    parameters = found.get("pretrain-bf16", {}).get("parameters", 0)
    title = (
        f"{torch.cuda.get_device_name() if cuda else 'cpu'}, torch {torch.__version__}; {parameters / 1e6:.1f}M "
        f"parameters, {setting.rows} × {setting.length} tokens a step, seed {setting.seed}; {facts}; "
        f"{time.monotonic() - started:.0f} s."
    )
    tables = parity_report.markdown(found, {"pretrain": setting.steps, "lora": setting.lora_steps}, title)
    _write(setting.out / "loss_parity.md", tables)
    _write(setting.out / "loss_parity.svg", parity_report.picture(found))
    print(tables)
    print({name: (round(at.get("setup", 0)), round(at.get("seconds", 0))) for name, at in found.items()}, codes)
    return sum(code != 0 for code in codes.values())


def words(setting: Setting) -> list[str]:
    """The options that give this setting."""
    pairs = [(f"--{field.name.replace('_', '-')}", getattr(setting, field.name)) for field in fields(Setting)]
    return [word for flag, value in pairs for word in ([flag] * value if value is bool(value) else [flag, str(value)])]


def make_parser() -> argparse.ArgumentParser:
    """An option for each field of the setting."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for field in fields(Setting):
        flag, default = f"--{field.name.replace('_', '-')}", field.default
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(default) if field.name != "out" else Path, default=default)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Exit status 1 if a part failed."""
    options = vars(make_parser().parse_args())
    part, work = options.pop("part"), options.pop("work")
    setting = Setting(**options)
    if part:
        work_on(part[0], part[1], setting, work)
    else:
        sys.exit(1 if compare(setting) else 0)


if __name__ == "__main__":
    main()
