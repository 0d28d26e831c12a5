"""`surogate eval`: held-out loss and perplexity of models, runs and adapters on any data set."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.cli.words import Flags
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.evaluation import Evaluation
    from surogate_core.run.generation import Prepared

USAGE = """\
usage: surogate eval MODEL [MODEL …] [datasets=FILE.jsonl] [KEY=VALUE …] [--json] [--output FILE.json]

Held-out loss, perplexity and token accuracy, with the standard error over documents. MODEL is a Hugging Face directory,
a run's directory (`latest` is the last run's), a checkpoint with an adapter, a PEFT adapter, or a hub id. KEY=VALUE are
keys of a run, such as sequence_len=2048 or device=cpu.

  datasets=…           the rows to evaluate; without it those that the first run held out
  --config FILE.yaml   keys of a run in a file for every model. Without it a run has those of its own config.yaml, and
                       all models have the rows, template, length and packing of the first run
  --json               print JSON
  --output FILE        write the JSON to a file too

Several models are compared with the first: difference of the losses, and its standard error over pairs of documents.
"""

FLAGS = Flags(command="surogate eval", texts=("--config", "--output"), switches=("--json",))
_ROWS = frozenset({"datasets", "dataset", "validation_datasets"})
_ELSEWHERE = ("from_scratch=false", "adapter_path=null", "output_dir=null")
"""What a run's own configuration says of where it began and ended, and its result does not."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    words = FLAGS.read(argv)
    if not words.models:
        raise UserError("surogate eval: no model is named. Fix: surogate eval MODEL datasets=FILE.jsonl")
    from surogate_core import logs

    logs.configure()
    from surogate_core.cli.progress import shown_progress
    from surogate_core.files.atomic import ensure_writable, replace_file
    from surogate_core.run.evaluation import evaluate_all

    output = Path(words.texts["--output"]).expanduser() if "--output" in words.texts else None
    if output is not None:
        ensure_writable(output.parent, key="--output")
    given = Path(words.texts["--config"]).expanduser() if "--config" in words.texts else None
    prepared, registry = prepared_models(words.models, words.overrides, given)
    for model, one in prepared.items():
        for note in one.notes:
            print(f"note: {model}: {note}", file=sys.stderr)
    with shown_progress() as progress:
        found = evaluate_all(prepared, registry, progress=progress)
    text = json.dumps([_plain(one) for one in found], indent=1)
    print(text if "--json" in words.switches else table(found))
    if output is not None:
        replace_file(output, f"{text}\n".encode(), key="--output")
    return 0


def prepared_models(
    models: Sequence[str], words: Sequence[str], given: Path | None
) -> tuple[dict[str, Prepared], Registry]:
    """The models by name, all with the same rows. `words`: overrides. `given`: a file of keys for all of them."""
    from surogate_core.cli.arguments import Arguments, registry_for
    from surogate_core.config.resolve import load_run_config
    from surogate_core.files.runs import config_of_run
    from surogate_core.run.evaluation import held_out, shared
    from surogate_core.run.generation import named, prepare

    keys = {re.split(r"[.\[=]", word.lstrip("+~"), maxsplit=1)[0] for word in words}
    files = {model: given or config_of_run(model) for model in models}
    first = next((model for model, file in files.items() if file is not None), models[0])
    if files[first] is None and not keys & _ROWS:
        raise UserError(
            f"surogate eval {models[0]}: this is no run, so the rows to evaluate must be named. "
            f"Fix: datasets=FILE.jsonl"
        )
    found = {model: named(model) for model in models}
    registry = registry_for(Arguments(overrides=list(words), config_file=files[first]))

    def load(model: str, *more: str) -> RunConfig:
        own = _ELSEWHERE if files[model] is not None else ()
        overrides = [*own, *found[model].overrides, *words, *more]
        return load_run_config(overrides, config_file=files[model], registry=registry)

    rows = load(first)
    if given is not None and not rows.validation_datasets:
        keys |= {"datasets"}  # a file of rows, not a run that held some of them out
    prepared = {}
    for model, one in found.items():
        same = model == first or given is not None
        config = load(model, *([] if same else shared(rows, run=files[model] is not None)))
        prepared[model] = prepare(one, held_out(config, named=keys), registry)
    return prepared, registry


def table(found: Sequence[Evaluation]) -> str:
    """The figures as text."""
    several = len(found) > 1
    head = ["model", "loss", "± stderr", "perplexity", "accuracy", "documents", "label tokens"]
    lines = [[*head, "difference", "± stderr"] if several else head]
    for one in found:
        line = [
            one.model,
            f"{one.loss:.4f}",
            _shown(one.stderr),
            f"{one.perplexity:.4g}",
            f"{one.accuracy:.2%}",
            f"{one.documents:,}",
            f"{one.label_tokens:,}",
        ]
        if several:
            line += ["", ""] if one.difference is None else [f"{one.difference:+.4f}", _shown(one.difference_stderr)]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    rows = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip() for line in lines]
    if several and any(one.data != found[0].data for one in found):
        rows.append("Models with another tokenizer or template have other tokens, so their losses are not compared.")
    return "\n".join(rows)


def _shown(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _plain(one: Evaluation) -> Mapping[str, Any]:
    return {key: None if isinstance(v, float) and math.isnan(v) else v for key, v in asdict(one).items()}
