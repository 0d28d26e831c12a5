"""`surogate eval`: held-out loss and perplexity of models, runs and adapters on any data set."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_commands.flags import CHAT, ENGINE, MAX_NEW_TOKENS, SLOTS, SYSTEM, Flag, shown
from surogate_commands.tables import aligned
from surogate_commands.words import Flags, Words
from surogate_core.plugin import UserError, significant

if TYPE_CHECKING:
    from surogate_command_eval.evaluation import HeldOutFigures
    from surogate_core.plugin import inference
    from surogate_core.service.config import RunConfig
    from surogate_core.service.inference import Named
    from surogate_core.service.plugins import Registry

OF_MODELS = (
    Flag(
        "text",
        "--config FILE.yaml",
        "keys of a run in a file for every model. Without it a run has its own config.yaml, and all models "
        "have the rows, template, length and packing of the first run",
    ),
    Flag("switch", "--json", "print JSON"),
    Flag("text", "--output FILE", "write the JSON to a file too"),
    Flag("switch", "--report", "add the figures to the report of each run that is measured"),
)
OF_BENCHMARKS = (
    Flag(
        "list",
        "--tasks FILE",
        'JSON lines: {"prompt": TEXT, "answer": TEXT}, {"messages": […], "answer": TEXT} or\n'
        '{"prompt": TEXT, "choices": [TEXT, …], "answer": NUMBER}; or NAME:BENCHMARK of an installed evaluator. '
        "May be repeated",
    ),
    Flag(
        "text",
        "--match HOW",
        "for rows without the key `match`: exact, number (the last number), regex, or choice (the most probable one). "
        "Without it choice for rows with choices, exact for the others",
    ),
    Flag(
        "text",
        "--pattern REGEX",
        "for regex: the last match in the completion, or its group, is compared with the answer",
    ),
    Flag("text", "--prompt TEMPLATE", "the prompt from the row's keys, such as 'Question: {question}'"),
    Flag("text", "--shots N", "the first N rows are solved examples before each prompt, and are not scored (0)"),
    Flag("count", "--limit N", "rows of each benchmark at most"),
    CHAT,
    SYSTEM,
    MAX_NEW_TOKENS,
    Flag("count", "--samples N", "completions of each prompt (1); their mean counts, and pass@N"),
    Flag(
        "number",
        "--temperature T, --top-k N, --top-p P, --min-p P, --repetition-penalty R, --seed N",
        "without them and --samples the most probable token is taken",
    ),
    Flag(
        "list",
        "--stop TEXT",
        "ends a completion before this text; may be repeated. Without it a text prompt with examples ends at a blank "
        "line",
    ),
    SLOTS,
    ENGINE,
    Flag(
        "text",
        "--samples-output FILE",
        "write each completion and its verdict as JSON lines; until the end FILE.partial has those that are done",
    ),
)
FLAGS = Flags(command="surogate eval", flags=(*OF_MODELS, *OF_BENCHMARKS))

USAGE = f"""\
usage: surogate eval MODEL [MODEL …] [datasets=FILE.jsonl] [KEY=VALUE …] [--json] [--output FILE.json]
       surogate eval MODEL [MODEL …] --tasks FILE.jsonl [--tasks …] [KEY=VALUE …] [--json] [--output FILE.json]

Held-out loss, perplexity and token accuracy, with the standard error over documents; or accuracy on benchmarks, with
the standard error over rows. MODEL is a Hugging Face directory, a run's directory (`latest` is the last run's), a
checkpoint with an adapter, a PEFT adapter, or a hub id. KEY=VALUE are keys of a run, such as device=cpu.

  datasets=…           the rows to evaluate; without it those that the first run held out
{shown(OF_MODELS)}
Benchmarks:
{shown(OF_BENCHMARKS)}
Several models are compared with the first: the difference, and its standard error over pairs of documents or rows.
"""

_ROWS = frozenset({"datasets", "dataset", "validation_datasets"})
_MERGED = "surogate merge {word} --base-model BASE --output DIR, then evaluate DIR"
"""How an adapter that names no base is evaluated."""
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
    if "--tasks" not in words.lists:
        of_benchmarks = [*words.lists, *words.counts, *words.sampling, *(words.texts.keys() - {"--config", "--output"})]
        if of_benchmarks or "--chat" in words.switches:
            flag = min(of_benchmarks, default="--chat")
            message = f"surogate eval {flag}: it is for benchmarks, and none is named."
            raise UserError(f"{message} Fix: add --tasks FILE.jsonl")
    from surogate_core.plugin import atomic
    from surogate_core.service.config import logs

    logs.configure()

    output, samples = (
        Path(words.texts[flag]).expanduser() if flag in words.texts else None
        for flag in ("--output", "--samples-output")
    )
    for path, flag in ((output, "--output"), (samples, "--samples-output")):
        if path is not None:
            atomic.ensure_writable_file(path, key=flag)
    lines, plain = _benchmarks(words, samples) if "--tasks" in words.lists else _losses(words)
    text = json.dumps(plain, indent=1)
    print(text if "--json" in words.switches else lines)
    if output is not None:
        atomic.replace_file(output, f"{text}\n".encode(), key="--output")
    if "--report" in words.switches:
        from surogate_command_eval.report import add_to_reports

        add_to_reports(words.models, plain)
    return 0


def _losses(words: Words) -> tuple[str, list[dict[str, Any]]]:
    """The table of held-out losses, and the figures as JSON."""
    from surogate_command_eval.evaluation import evaluate_all
    from surogate_core.service.app import shown_progress

    prepared, registry = prepared_models(words.models, words.overrides, _given(words))
    _note(prepared)
    with shown_progress() as progress:
        found = evaluate_all(prepared, registry, progress=progress)
    return table(found), [_plain(asdict(one)) for one in found]


def _benchmarks(words: Words, output: Path | None) -> tuple[str, list[dict[str, Any]]]:
    """The table of benchmarks, and the figures as JSON. `output`: a file for the completions."""
    from surogate_command_eval.benchmark_command import Asked, benchmark_table, evaluators_of, measured
    from surogate_commands.kept import json_line, kept_lines
    from surogate_core.plugin import atomic
    from surogate_core.service.app import shown_progress

    asked = Asked.of_words(words)
    load = loader(words.models, words.overrides, _given(words))
    evaluators, prepared = evaluators_of(asked, load.registry), load.for_benchmarks()
    _note(prepared)
    with shown_progress() as progress, kept_lines(output, key="--samples-output") as take:
        found = measured(prepared, load.registry, evaluators, asked, taken=take, progress=progress)
        if output is not None:
            rows = {(one.model, one.task): one.samples for one in found}
            text = "".join(json_line(row) for some in rows.values() for row in some)
            atomic.replace_file(output, text.encode(), key="--samples-output")
    plain = [{k: v for k, v in _plain(asdict(one)).items() if k not in ("scores", "samples")} for one in found]
    return "\n".join(aligned(benchmark_table(found, _shown), texts=3)), plain


def _given(words: Words) -> Path | None:
    return Path(words.texts["--config"]).expanduser() if "--config" in words.texts else None


def _note(prepared: Mapping[str, inference.PreparedModel]) -> None:
    for model, one in prepared.items():
        for note in one.notes:
            print(f"note: {model}: {note}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """The models of a command, whose configurations are yet to be composed."""

    models: Mapping[str, Named]
    files: Mapping[str, Path | None]
    words: Sequence[str]
    """Overrides for all of them."""
    given: Path | None
    """A file of keys for all of them."""
    registry: Registry

    @property
    def first(self) -> str:
        """The first run, or the first model if none is a run."""
        return next((model for model, file in self.files.items() if file is not None), next(iter(self.files)))

    def config(self, model: str, *more: str) -> RunConfig:
        """A model's configuration. `more`: overrides that win."""
        from surogate_core.plugin import load_run_config

        own = _ELSEWHERE if self.files[model] is not None else ()
        overrides = [*own, *self.models[model].overrides, *self.words, *more]
        return load_run_config(overrides, config_file=self.files[model], registry=self.registry)

    def for_rows(self) -> dict[str, inference.PreparedModel]:
        """The models by name, all with the same rows."""
        from surogate_command_eval.evaluation import held_out, shared
        from surogate_core.service.inference import prepare
        from surogate_core.service.setup import task_spec

        keys = set(map(_name, self.words))
        if self.files[self.first] is None and not keys & _ROWS:
            raise UserError(
                f"surogate eval {self.first}: this is no run, so the rows to evaluate must be named. "
                f"Fix: datasets=FILE.jsonl"
            )
        rows = self.config(self.first)
        spec = task_spec(rows, self.registry)
        if not spec.needs_data:
            played = "" if rows.environment is None else f"surogate env eval {self.first} {rows.environment.name}, or "
            raise UserError(
                f"surogate eval {self.first}: task {spec.name} has no rows to evaluate. "
                f"Fix: {played}task=sft datasets=FILE.jsonl for the loss on texts, or --tasks FILE.jsonl"
            )
        if self.given is not None and not rows.validation_datasets:
            keys |= {"datasets"}  # a file of rows, not a run that held some of them out
        prepared = {}
        for model, one in self.models.items():
            same = model == self.first or self.given is not None
            config = self.config(model, *([] if same else shared(rows, run=self.files[model] is not None)))
            prepared[model] = prepare(one, held_out(config, named=keys), self.registry, generates=False)
        return prepared

    def for_benchmarks(self) -> dict[str, inference.PreparedModel]:
        """The models by name. A model that is no run has the first run's place and precision."""
        from surogate_core.service.inference import placed, prepare

        if named := next((word for word in self.words if _name(word) in _ROWS), None):
            raise UserError(f"{named}: benchmarks have rows of their own. Fix: leave it out, or leave out --tasks.")
        first = self.config(self.first)
        prepared = {}
        for model, one in self.models.items():
            same = self.files[model] is not None or model == self.first
            prepared[model] = prepare(one, self.config(model, *([] if same else placed(first))), self.registry)
        return prepared


def _name(override: str) -> str:
    """The key of an override."""
    return re.split(r"[.\[=]", override.lstrip("+~"), maxsplit=1)[0]


def loader(models: Sequence[str], words: Sequence[str], given: Path | None) -> Loader:
    """The models of a command. `words`: overrides. `given`: a file of keys for all of them."""
    from surogate_core.service.app import Arguments, registry_for
    from surogate_core.service.files import config_of_run
    from surogate_core.service.inference import named

    files = {model: given or config_of_run(model) for model in models}
    first = next((file for file in files.values() if file is not None), None)
    return Loader(
        models={model: named(model, fix=_MERGED) for model in models},
        files=files,
        words=words,
        given=given,
        registry=registry_for(Arguments(overrides=list(words), config_file=first)),
    )


def prepared_models(
    models: Sequence[str], words: Sequence[str], given: Path | None
) -> tuple[dict[str, inference.PreparedModel], Registry]:
    """The models by name, all with the same rows."""
    load = loader(models, words, given)
    return load.for_rows(), load.registry


def table(found: Sequence[HeldOutFigures]) -> str:
    """The figures as text."""
    several = len(found) > 1
    head = ["model", "loss", "± stderr", "perplexity", "accuracy", "documents", "label tokens"]
    lines = [[*head, "difference", "± stderr"] if several else head]
    for one in found:
        line = [
            one.model,
            f"{one.loss:.4f}",
            _shown(one.stderr),
            "" if math.isnan(one.perplexity) else significant(one.perplexity, 4),
            "" if math.isnan(one.accuracy) else f"{one.accuracy:.2%}",
            f"{one.documents:,}",
            f"{one.label_tokens:,}",
        ]
        if several:
            line += ["", ""] if one.difference is None else [f"{one.difference:+.4f}", _shown(one.difference_stderr)]
        lines.append(line)
    rows = aligned(lines, texts=1)
    for one in (one for one in found if one.figures):
        rows.append(
            f"{one.model}: " + ", ".join(f"{name} {significant(value, 4)}" for name, value in one.figures.items())
        )
    if several and any(one.data != found[0].data for one in found):
        rows.append("Models with another tokenizer or template have other tokens, so their losses are not compared.")
    return "\n".join(rows)


def _shown(value: float | None) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.4f}"


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of JSON, which knows neither NaN nor infinity."""
    return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in values.items()}
