"""`finetune`: the cells of the table, each in a process of its own with a JSON file as its result.

A call runs the cells that have no result yet, several at a time, and starts none that would not end within
`--minutes`. Every cell trains the same rows for the same number of steps. The seed decides the adapters' initial values
and the order of the rows.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from accuracy.cells import GROUPS, SEEDS, Cell, cells
from accuracy.problems import final_number

LORA: Mapping[str, Any] = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "learning_rate": 1e-3}
FULL = {"learning_rate": 2e-4}
SETTINGS = ("length", "rows", "steps")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", type=Path, help="the base model; OUT/pretrain/model without it")
    parser.add_argument("--minutes", type=float, default=8.0, help="length of this call")
    parser.add_argument("--together", type=int, default=4, help="cells at the same time")
    parser.add_argument("--groups", nargs="*", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--seeds", type=int, nargs="*", default=list(SEEDS))
    parser.add_argument("--only", nargs="*", help="lines of the table, such as 'nf4 bf16'")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rows", type=int, default=16, help="rows of a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--problems", type=int, default=1000, help="held-out problems to answer")
    parser.add_argument("--new-tokens", type=int, default=160, help="longest answer")
    parser.add_argument("--cell", help=argparse.SUPPRESS)


TINY = {"steps": 2, "rows": 2, "length": 256, "problems": 4, "new_tokens": 8, "together": 1, "seeds": [1]}
"""Options of a trial on a CPU."""


def run(given: argparse.Namespace) -> None:
    """Run a cell, or those that have no result yet."""
    if given.cell is not None:
        _run_cell(next(c for c in cells(seeds=given.seeds) if c.name == given.cell), given)
        return
    results = given.out / "cells"
    results.mkdir(parents=True, exist_ok=True)
    wanted = [c for c in cells(given.groups, given.seeds) if given.only is None or c.row in given.only]
    waiting = [c for c in wanted if not (results / f"{c.name}.json").is_file()]
    print(f"{len(wanted) - len(waiting)} of {len(wanted)} cells have a result", flush=True)
    command = [sys.executable, *sys.argv]
    work(waiting, command, results, seconds=60 * given.minutes, together=given.together)
    missing = [c.name for c in wanted if not (results / f"{c.name}.json").is_file()]
    print(f"without a result: {', '.join(missing) or 'none'}", flush=True)


def work(waiting: Sequence[Cell], command: Sequence[str], results: Path, *, seconds: float, together: int) -> None:
    """Run the cells in processes, `together` at a time; none begins that would end after `seconds` as those before."""
    began, longest = time.monotonic(), 0.0
    left = list(waiting)
    going: dict[subprocess.Popen[bytes], tuple[Cell, float]] = {}
    while left or going:
        now = time.monotonic() - began
        if now + 1.2 * longest >= seconds:
            left = []  # for the next call
        while left and len(going) < together:
            cell = left.pop(0)
            with (results / f"{cell.name}.log").open("ab") as log:
                words = [*command, "--cell", cell.name]
                going[subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)] = cell, now
        for process in [one for one in going if one.poll() is not None]:
            cell, start = going.pop(process)
            longest = max(longest, now - start)
            said = "done" if process.returncode == 0 else f"failed, see {results / cell.name}.log"
            print(f"{cell.name}: {said} in {now - start:.0f} s", flush=True)
        if now > seconds:
            for process in going:
                process.terminate()
        time.sleep(0.1)


def keys_of(cell: Cell, given: argparse.Namespace) -> dict[str, Any]:
    """The keys of a cell's run."""
    data = given.out / "data"
    full = cell.keys.get("lora") is False
    gsm8k = [data / "gsm8k.jsonl"] if (data / "gsm8k.jsonl").is_file() else []
    return {
        "model": str(given.model or given.out / "pretrain/model"),
        "datasets": [{"path": str(path), "type": "conversation"} for path in (data / "tune.jsonl", *gsm8k)],
        "validation_datasets": [{"path": str(data / "tune-held.jsonl"), "type": "conversation"}],
        "sequence_len": given.length,
        "per_device_train_batch_size": given.rows,
        "gradient_accumulation_steps": 1,
        "max_steps": given.steps,
        "lr_scheduler_type": "cosine",
        "warmup_steps": max(1, given.steps // 20),
        "weight_decay": 0.0,
        "eval_steps": 0,
        "save_steps": 0,
        "train_seed": cell.seed,
        **(FULL if full else LORA),
        **cell.keys,
    }


def _run_cell(cell: Cell, given: argparse.Namespace) -> None:
    import surogate

    began = time.monotonic()
    place = given.out / "runs" / cell.name
    found = surogate.sft(**keys_of(cell, given), output_dir=str(place), quiet=True)
    result: dict[str, Any] = {
        "row": cell.row,
        "group": cell.group,
        "seed": cell.seed,
        "keys": dict(cell.keys),
        "settings": {key: getattr(given, key) for key in SETTINGS},
        "start": found.evals[0].loss,
        "train_loss": sum(found.losses[-20:]) / len(found.losses[-20:]),
        "train_seconds": time.monotonic() - began,
        **measured(str(place), given, cell.keys),
    }
    result["seconds"] = time.monotonic() - began
    write_result(given.out / "cells" / f"{cell.name}.json", result)


def write_result(place: Path, result: Mapping[str, Any]) -> None:
    """Write a result file whole or not at all."""
    partial = place.with_suffix(".partial")
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(place)


def measured(model: str, given: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a trained model: losses of held-out rows, and the share of held-out problems that it solves.

    `keys`: those that say how its weights are stored and multiplied.
    """
    import surogate

    data = given.out / "data"
    result: dict[str, Any] = {}
    for name, file in (("problems", "tune-held.jsonl"), ("gsm8k", "gsm8k-held.jsonl")):
        if not (data / file).is_file():
            continue
        rows = [{"path": str(data / file), "type": "conversation"}]
        more = {"sequence_len": given.length, "per_device_train_batch_size": given.rows}
        (figures,) = surogate.evaluate(model, datasets=rows, **more, **keys)
        stderr = None if math.isnan(figures.stderr) else figures.stderr
        result[name] = {"loss": figures.loss, "stderr": stderr, "documents": figures.documents}
    with (data / "tune-held.jsonl").open(encoding="utf-8") as file_:
        rows = [json.loads(line) for line in islice(file_, given.problems)]
    texts = surogate.generate(
        model,
        [row["messages"][:1] for row in rows],
        max_new_tokens=given.new_tokens,
        sampling={"temperature": 0},
        sequence_len=given.length,
        **{key: value for key, value in keys.items() if key != "lora"},
    )
    return result | {"exact_match": score(rows, [one.text for one in texts])}


def score(rows: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> dict[str, Any]:
    """Share of the answers whose final number is right, with its standard error, and by number of steps."""
    right = [final_number(text) == row["answer"] for row, text in zip(rows, texts, strict=True)]
    share = sum(right) / len(right)
    by_steps: dict[int, list[bool]] = {}
    for row, hit in zip(rows, right, strict=True):
        by_steps.setdefault(row["steps"], []).append(hit)
    return {
        "share": share,
        "stderr": math.sqrt(share * (1 - share) / len(right)),
        "problems": len(right),
        "unanswered": sum(final_number(text) is None for text in texts) / len(texts),
        "by_steps": {steps: sum(hits) / len(hits) for steps, hits in sorted(by_steps.items())},
        "right": "".join(map(str, map(int, right))),
    }
