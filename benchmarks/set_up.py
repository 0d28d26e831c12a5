"""From the command to the end of the first optimizer step: where each second goes, in new processes.

    python benchmarks/set_up.py [--models 0.6b 8b] [--runs 3] [--profile] [--out DIRECTORY] [KEY=VALUE …]
    python benchmarks/set_up.py --tiny --device cpu

For each model a checkpoint with random weights of the published shape is written once, with a tokenizer as large as its
vocabulary and a small data set. Then `surogate sft` fine-tunes adapters for one step (2 rows of 2048 tokens, 4
micro-steps), as a user would start it: once with empty caches (`cold`) and `--runs` times with what that left there
(`warm`, of which the median counts). `--profile` adds a run under cProfile and one with `-X importtime`, which are
slower than a plain run; their figures are in DIRECTORY/profile-MODEL.txt, after the log of the last warm start.

The phases are those of the line `set up` in the run's log, with what the processes before and after it take: `process`
is the time to the first of them, `first step` follows the last. `caches` counts the files that a run added.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pstats
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from grpo import TOKENIZER
from presets import PRESETS
from shapes import model_of
from torch import Tensor

from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.files.metrics import read_metrics
from surogate_core.hf.card import CardFacts
from surogate_core.hf.export import export_full

TINY = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
"""What `--tiny` makes of a model's shape."""
ROWS, WORDS = 64, 400
"""Conversations of the data set, and words of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start; times in seconds."""

    model: str
    kind: str
    seconds: float
    """From the command to the end of the first step."""
    phases: dict[str, float] = field(default_factory=dict)
    caches: dict[str, int] = field(default_factory=dict)
    """Cache → files that this start added."""
    loss: float | None = None


# --------------------------------------------------------------------- the checkpoint and the data


def write_model(directory: Path, name: str, *, tiny: bool, device: str) -> None:
    """A checkpoint with random weights, drawn on the device, and its tokenizer."""
    config: dict[str, Any] = {**PRESETS[name], **(TINY if tiny else {})}
    model = model_of(name).__class__(config)
    torch.manual_seed(0)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for spec in distinct(pieces(model, lora=None, max_seqlen=8)):
            value = torch.empty(spec.shape, dtype=torch.bfloat16, device=device)
            yield spec.hf_name, value.fill_(1).cpu() if spec.hf_name.endswith("norm.weight") else value.normal_(0, 0.02)

    on_cpu = ((key, value.cpu()) for key, value in tensors())
    export_full(directory, on_cpu, config=config, tokenizer=None, card=CardFacts(title="random"))
    write_tokenizer(directory, config["vocab_size"])


def write_tokenizer(directory: Path, vocabulary: int) -> None:
    """The embedded tokenizer with as many further merges as the vocabulary has room for: its size costs time."""
    found = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))
    ids, merges = found["model"]["vocab"], found["model"]["merges"]
    firsts = sorted(ids, key=ids.__getitem__)
    begin = 1 + max([*ids.values(), *(token["id"] for token in found["added_tokens"])])
    fresh = ((a, b) for a in firsts for b in firsts if a + b not in ids)
    for number, (a, b) in zip(range(begin, vocabulary), fresh, strict=False):
        if a + b not in ids:
            ids[a + b] = number
            merges.append([a, b] if isinstance(merges[0], list) else f"{a} {b}")
    (directory / "tokenizer.json").write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
    shutil.copy(TOKENIZER / "tokenizer_config.json", directory)


def write_data(path: Path, words: int) -> None:
    """Conversations with answers of this number of words."""
    answer = " ".join(f"word{n % 97}" for n in range(words))
    rows = ({"messages": _turns(f"question {n}", f"{n}: {answer}")} for n in range(ROWS))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _turns(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


# --------------------------------------------------------------------- a start


def command(model: Path, output: Path, options: argparse.Namespace) -> list[str]:
    """The words after the interpreter's."""
    words = [
        "sft",
        f"model={model}",
        f"datasets=[{{path: {model.parent / 'data.jsonl'}}}]",
        "lora=true",
        "lora_rank=16",
    ]
    words += ["max_steps=1", "warmup_steps=0", "save_steps=0", "monitor=[jsonl]", f"output_dir={output}"]
    words += ["validation_split_ratio=0", "per_device_train_batch_size=2", "gradient_accumulation_steps=4"]
    words += [f"sequence_len={64 if options.tiny else 2048}", f"device={options.device}"]
    return [*words, *options.keys]


def start(model: Path, name: str, kind: str, options: argparse.Namespace, flags: list[str]) -> Start:
    """Start the command with the interpreter's `flags`, and read where its seconds went."""
    caches = model.parent / "caches"
    before = counted(caches)
    with tempfile.TemporaryDirectory(dir=model.parent) as parent:
        output = Path(parent) / "run"
        line = [sys.executable, *flags, "-m", "surogate_core", *command(model, output, options)]
        environment = {**os.environ, "XDG_CACHE_HOME": str(caches)}
        # The first start leaves bytecode, as on any user's machine.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        begin = time.time()
        done = subprocess.run(line, check=False, capture_output=True, text=True, env=environment)
        (model.parent / f"{kind}.stderr").write_text(done.stderr, encoding="utf-8")
        if done.returncode:
            raise SystemExit(f"{' '.join(line)}\n{done.stderr[-4000:]}")
        shutil.copy(output / "surogate.log", model.parent / f"{kind}.log")
        (step,) = read_metrics(output / "metrics.jsonl", event="step_end")
        records = map(json.loads, (output / "surogate.log").read_text(encoding="utf-8").splitlines())
        (ready,) = (record for record in records if record["event"] == "set up")
    ended = datetime.fromisoformat(ready["timestamp"]).timestamp()
    phases = {"process": round(ended - begin - sum(ready["seconds"].values()), 1), **ready["seconds"]}
    phases["first step"] = round(step["time"] - ended, 1)
    added = {key: count - before.get(key, 0) for key, count in counted(caches).items() if count > before.get(key, 0)}
    return Start(
        model=name, kind=kind, seconds=step["time"] - begin, phases=phases, caches=added, loss=step.get("loss")
    )


def counted(caches: Path) -> dict[str, int]:
    """Files below each directory that is named after a compiler or stands directly in the cache."""
    found: dict[str, int] = {}
    for file in caches.rglob("*"):
        if file.is_file():
            parts = file.relative_to(caches).parts
            key = next((part for part in parts if part in ("inductor", "triton", "cupy")), parts[0])
            found[key] = found.get(key, 0) + 1
    return found


def profiles(model: Path, name: str, options: argparse.Namespace) -> list[Start]:
    """The starts under cProfile and with the times of imports, which also write their figures."""
    place = model.parent
    raw = place / "profile.prof"
    found = [
        start(model, name, "profile", options, ["-m", "cProfile", "-o", str(raw)]),
        start(model, name, "imports", options, ["-X", "importtime"]),
    ]
    text = io.StringIO()
    if (place / "warm.log").exists():
        text.write((place / "warm.log").read_text(encoding="utf-8"))
    figures = pstats.Stats(str(raw), stream=text)
    figures.sort_stats("cumulative").print_stats(400)
    figures.sort_stats("tottime").print_stats(100)
    text.write("\n".join(slowest_imports((place / "imports.stderr").read_text(encoding="utf-8"))) + "\n")
    (options.out / f"profile-{name}.txt").write_text(text.getvalue(), encoding="utf-8")
    return found


def slowest_imports(text: str, count: int = 150) -> list[str]:
    """The lines of ``-X importtime`` with the largest cumulative times, the largest first."""
    lines = [line for line in text.splitlines() if line.startswith("import time:") and "|" in line]
    return sorted(lines[1:], key=lambda line: -int(line.split("|")[1]))[:count]


def measure(name: str, options: argparse.Namespace) -> list[Start]:
    """All starts of a model."""
    parent = options.dir / (f"tiny-{name}" if options.tiny else name)
    model = parent / "model"
    if not (model / "tokenizer_config.json").exists():
        parent.mkdir(parents=True, exist_ok=True)
        begin = time.time()
        write_model(model, name, tiny=options.tiny, device=options.device)
        write_data(parent / "data.jsonl", 4 if options.tiny else WORDS)
        print(f"{name}: {model} written in {time.time() - begin:.1f} s", flush=True)
    shutil.rmtree(parent / "caches", ignore_errors=True)
    found = []
    for kind in ("cold", *["warm"] * options.runs):
        found.append(start(model, name, kind, options, []))
        print(in_words(found[-1]), flush=True)
    warm = statistics.median(one.seconds for one in found[1:]) if options.runs else found[0].seconds
    print(f"{name}: {warm:.1f} s from the command to the end of the first step, warm")
    if options.profile:
        found += profiles(model, name, options)
        for one in found[-2:]:
            print(in_words(one), flush=True)
    return found


def in_words(found: Start) -> str:
    """A start on two lines."""
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found.phases.items())
    caches = f"; new files in caches: {found.caches}" if found.caches else ""
    return f"{found.model} {found.kind}: {found.seconds:.1f} s, loss {found.loss}{caches}\n  {phases}"


def main() -> None:
    """Measure and print; the figures are in DIRECTORY/set_up.json too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("keys", nargs="*", help="further KEY=VALUE of the run")
    parser.add_argument("--models", nargs="+", choices=list(PRESETS), default=["0.6b", "8b"])
    parser.add_argument("--runs", type=int, default=3, help="warm starts")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()) / "surogate-set-up")
    parser.add_argument("--out", type=Path, default=Path("set-up"))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a small shape, to try the script itself")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    found: list[Start] = []
    for name in options.models:
        found += measure(name, options)
        figures = {"versions": {"torch": torch.__version__}, "starts": [asdict(one) for one in found]}
        (options.out / "set_up.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
