"""`surogate tokenize`: read, tokenise and pack the data of a run, and report the result; nothing is trained."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from surogate_core.errors import SurogateError, UserError
from surogate_core.train.signals import StopSignals

if TYPE_CHECKING:
    from types import FrameType, TracebackType

    from surogate_core.app.arguments import Arguments
    from surogate_core.config.schema import RunConfig
    from surogate_core.events import Progress
    from surogate_core.plugins.registry import Registry

USAGE = """\
usage: surogate tokenize [TASK] [FILE.yaml] [KEY=VALUE …] [--debug [N]] [--json]

Reads, tokenises and packs the data of a run and reports what it finds. Nothing is trained and no weight is read;
the run finds the result in the cache. Takes what `surogate sft` takes, or what TASK takes (`surogate tokenize pt …`).

  --debug [N]          show the first N packed documents (3) token by token: what is trained and what is not
  --json               print the report as JSON, and nothing else on standard output
"""

FLAGS = ("--debug", "--json")
SHOWN_DOCUMENTS = 3


@dataclass(slots=True)
class _Words:
    """The command line: this command's own flags, and the rest."""

    rest: list[str]
    json: bool = False
    debug: int = 0


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_core.app.arguments import leading_task, load, parse

    words = _own_flags(argv)
    task, rest = leading_task(words.rest)
    arguments = parse(rest, command="surogate tokenize")
    if arguments.help:
        print(USAGE, end="")
        return 0
    _refuse_other_answers(arguments)
    from surogate_core import logs

    logs.configure()
    config, registry = load(arguments, task)
    stopping = _Stopping()
    with stopping:
        return _tokenize(config, registry, words, stopping.check)


def _tokenize(config: RunConfig, registry: Registry, words: _Words, check: Callable[[], None]) -> int:
    """`check`: see `_Stopping`."""
    from surogate_core.app.progress import shown_progress
    from surogate_core.cli import tokenize_view
    from surogate_core.data.pipeline import prepare
    from surogate_core.data.preview import suspicious_examples
    from surogate_core.setup.tokenizer_of_run import tokenizer_of_run

    pretrained = config.model.path is not None and not config.from_scratch
    spec = registry.get("task", config.task)
    tokenizer, notes = tokenizer_of_run(config, vocab_size=_vocabulary(config, registry), pretrained=pretrained)
    began = time.perf_counter()
    with shown_progress() as show:

        def progress(event: Progress) -> None:
            check()
            show(event)

        data = prepare(
            config,
            tokenizer,
            registry.all("dataset"),
            trains_prompts=spec.trains_prompts,
            group=spec.group,
            progress=progress,
        )
    seconds = time.perf_counter() - began
    examples = suspicious_examples(data, tokenizer)
    report = tokenize_view.report_of(config, data, group=spec.group, notes=notes, examples=examples, seconds=seconds)
    if words.json:
        if words.debug:
            report["debug"] = tokenize_view.debug_as_json(data, tokenizer, words.debug)
        print(json.dumps(report, indent=1))
        return 0
    console = tokenize_view.console()
    if words.debug:
        tokenize_view.show_documents(console, data, tokenizer, words.debug)
    tokenize_view.show(console, report)
    return 0


def _vocabulary(config: RunConfig, registry: Registry) -> int | None:
    """The rows of the model's embedding, if a configuration says; only that is read of a model."""
    chosen = config.model
    values: dict[str, Any] = {}
    if chosen.path is not None:
        values |= _model_config(config, chosen.path)
    elif (family := registry.all("model").get(chosen.name)) is not None:
        values |= dict(family.presets.get(chosen.preset or "", {}))
    values |= chosen.config
    size = values.get("vocab_size")
    return size if isinstance(size, int) else None


def _model_config(config: RunConfig, path: str) -> dict[str, Any]:
    """The ``config.json`` of a directory or hub id; empty where there is none, since a tokenizer alone will do here."""
    from surogate_core.hf.weights import locate

    try:
        file = locate(path, revision=config.model.revision, weights=False) / "config.json"
    except SurogateError:
        # The tokenizer is from elsewhere, so the data can be prepared without the model.
        if config.tokenizer is not None:
            return {}
        raise
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}. Fix: copy the model's config.json again.") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: must hold a JSON object. Fix: copy the model's config.json again.")
    return values


# -------------------------------------------------------------------------------- arguments


def _own_flags(argv: Sequence[str]) -> _Words:
    found = _Words(rest=[])
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word == "--json":
            found.json = True
        elif flag == "--debug":
            if not equals:
                value = words.pop(0) if words and words[0].isdecimal() else str(SHOWN_DOCUMENTS)
            if not value.isdecimal() or int(value) == 0:
                raise UserError(f"--debug {value}: must be a number of documents, 1 or more. Fix: --debug 10")
            found.debug = int(value)
        elif word.startswith("--") and (near := get_close_matches(flag, FLAGS, n=1, cutoff=0.75)):
            raise UserError(f"{word}: there is no such flag. Fix: {near[0]}")
        else:
            found.rest.append(word)
    return found


def _refuse_other_answers(arguments: Arguments) -> None:
    if arguments.multirun:
        raise UserError("surogate tokenize has no --multirun. Fix: call it once for each value.")
    if arguments.hydra:
        shown = " ".join(arguments.hydra)
        raise UserError(f"surogate tokenize has no {arguments.hydra[0]}. Fix: surogate sft {shown}")


class _Stopping(StopSignals):
    """A signal unwinds the command at once, so that the half-built entry of the cache is removed.

    Python drops what is raised inside a finaliser, and the package regex has many. Then `check` raises later.
    """

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, SurogateError):
            self.check()  # a signal that was dropped here may have ended a process that helps

    def check(self) -> None:
        """End the command if a signal came."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is not None:
            raise SystemExit(self.exit_code)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        super()._handle(number, frame)
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if frame is None:
            self.check()
