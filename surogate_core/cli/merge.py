"""`surogate merge`: fold a LoRA adapter into its base model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from surogate_core.errors import UserError

USAGE = """\
usage: surogate merge --base-model DIR_OR_HUB_ID --checkpoint-dir DIR --output DIR

  --base-model         the model that the adapter was trained on
  --checkpoint-dir     a PEFT adapter, a run's output directory, or one checkpoint of a LoRA run
  --output             where to write; a Hugging Face directory that transformers and vLLM load

Weights keep the base's dtypes. An adapter from stacked LoRA brings the adapters below it along.
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
    from surogate_core.train.merge import merge

    output = Path(values["--output"]).expanduser()
    trained = Path(values["--checkpoint-dir"]).expanduser()
    try:
        used, weights, warnings = merge(values["--base-model"], trained, output, progress=_progress)
    except BaseException:
        _end_line()
        raise
    _end_line()
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    print(f"{used} is folded into {weights} weights of {values['--base-model']}: {output}")
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


def _progress(done: int, total: int) -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\rmerging: {done} of {total} tensors")
        sys.stderr.flush()
    elif done == total:
        sys.stderr.write(f"merging: {total} tensors\n")


def _end_line() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
