"""`surogate merge`: fold a LoRA adapter into its base model."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from surogate_core.errors import UserError
from surogate_core.files.atomic import human_bytes

USAGE = """\
usage: surogate merge --base-model DIR_OR_HUB_ID --checkpoint-dir DIR --output DIR

  --base-model         the model that the adapter was trained on
  --checkpoint-dir     a PEFT adapter, a run's output directory, or one checkpoint of a LoRA run
  --output             where to write; a Hugging Face directory that transformers and vLLM load

A hub id may name a revision: OWNER/NAME@BRANCH_TAG_OR_COMMIT. Without a revision it is read at the commit
that the adapter was trained on, if that is known, otherwise at the head of the default branch.
Weights keep the base's dtypes; quantised ones become bf16. An adapter from stacked LoRA includes the adapters below it.
"""

FLAGS = ("--base-model", "--checkpoint-dir", "--output")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    values = _parse(argv)
    from surogate_core import logs

    logs.configure()
    from surogate_core.run.merge import merge

    output = Path(values["--output"]).expanduser()
    trained = Path(values["--checkpoint-dir"]).expanduser()
    with _shown() as progress:
        done = merge(values["--base-model"], trained, output, progress=progress)
    for warning in done.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{done.used} is folded into {done.weights} weights of {values['--base-model']}: {output}")
    return 0


def _parse(argv: Sequence[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    words = list(argv)
    while words:
        flag, equals, value = words.pop(0).partition("=")
        if flag not in FLAGS:
            near = get_close_matches(flag, FLAGS, n=1)
            fix = near[0] if near else "`surogate merge --help` shows the form"
            raise UserError(f"surogate merge: {flag} is not known. Fix: {fix}")
        if not equals:
            if not words:
                raise UserError(f"{flag}: a value must follow. Fix: {flag} DIR")
            value = words.pop(0)
        if flag in values:
            raise UserError(f"{flag}: is given twice. Fix: keep one.")
        values[flag] = value
    if missing := [flag for flag in FLAGS if not values.get(flag)]:
        fix = " ".join(f"{flag} DIR" for flag in missing)
        raise UserError(f"surogate merge: {', '.join(missing)} missing. Fix: add {fix}")
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
            sys.stderr.write(f"merging: {human_bytes(done)} of {human_bytes(total)}, {done / max(1, total):.0%}\n")
            sys.stderr.flush()
