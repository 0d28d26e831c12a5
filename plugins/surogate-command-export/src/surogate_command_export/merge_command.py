"""`surogate merge`: fold a LoRA adapter into its base model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from surogate_core.plugin import UserError, atomic, latest_run, run_directory

USAGE = """\
usage: surogate merge [RUN] [--output DIR] [--base-model DIR_OR_HUB_ID] [--parts text|all]

  RUN                  a run's directory, one of its checkpoints, or a PEFT adapter, also as --checkpoint-dir RUN;
                       without it the latest run, runs/latest
  --output             where to write a Hugging Face directory that transformers and vLLM load; RUN/merged for a run
  --base-model         the model to fold the adapter into; without it the one that the adapter was trained on
  --parts              of a base with a vision tower: text, the language model alone (default), or all, with the
                       other parts as they are

A hub id may name a revision: OWNER/NAME@BRANCH_TAG_OR_COMMIT. Without a revision it is read at the commit
that the adapter was trained on, if that is known, otherwise at the head of the default branch.
Weights keep the base's dtypes; quantised ones become bf16. An adapter from stacked LoRA includes the adapters below it.
"""

FLAGS = ("--base-model", "--checkpoint-dir", "--output", "--parts")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    values = _parse(argv)
    from surogate_core.service.config import logs
    from surogate_core.service.plugins import model_families

    logs.configure()
    from surogate_command_export.merge import merge

    named = values.get("--checkpoint-dir")
    trained = run_directory(named) if named else latest_run(command="surogate merge")
    if "--output" not in values and not (trained / "run.json").is_file():
        raise UserError(f"surogate merge: --output missing, and {trained} is no run. Fix: add --output DIR")
    output = Path(values["--output"]).expanduser() if "--output" in values else trained / "merged"
    parts = values.get("--parts", "text")
    base = values.get("--base-model")
    with _shown() as progress:
        done = merge(base, trained, output, parts=parts, families=model_families, progress=progress)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{done.used} is folded into {done.weights} weights of {done.base}: {output}")
    return 0


def _parse(argv: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word and not word.startswith("-"):
            flag, equals, value = "--checkpoint-dir", "=", word
        if flag not in FLAGS:
            near = get_close_matches(flag, FLAGS, n=1)
            fix = near[0] if near else "`surogate merge --help` shows the form"
            raise UserError(f"surogate merge: {flag} is not known. Fix: {fix}")
        if not equals:
            if not words:
                raise UserError(f"{flag}: a value must follow. Fix: {flag} DIR")
            value = words.pop(0)
        if flag in values:
            shown = "RUN" if flag == "--checkpoint-dir" else flag
            raise UserError(f"{shown}: is given twice ({values[flag]}, {value}). Fix: keep one.")
        values[flag] = value
    if empty := [flag for flag in values if not values[flag]]:
        raise UserError(f"surogate merge: {', '.join(empty)}: the value is empty. Fix: {empty[0]} DIR")
    return values


@contextmanager
def _shown() -> Iterator[Callable[[int, int], None]]:
    """Shows the bytes written and in total: as a bar on a terminal, otherwise as a line every few seconds."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(TextColumn("merging"), *columns, console=console, transient=True) as bar:
        task = bar.add_task("merging", total=None, visible=False)
        # Not before the first tensor: what is fetched from the hub until then has bars of its own.
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)


class _Lines:
    """A line at the end, and one every `SECONDS` until then."""

    SECONDS = 10.0

    def __init__(self) -> None:
        self.said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - self.said >= self.SECONDS:
            self.said = now
            sys.stderr.write(
                f"merging: {atomic.human_bytes(done)} of {atomic.human_bytes(total)}, {done / max(1, total):.0%}\n"
            )
            sys.stderr.flush()
