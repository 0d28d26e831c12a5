"""The console script: which sub-command, and how each kind of error ends it.

This module imports nothing heavy, so that ``--help`` answers at once.
"""

from __future__ import annotations

import atexit
import errno
import gc
import os
import stat
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from surogate_core.app.commands import CORE_TASKS, DEMO, PEERS_COMMANDS, find_command, installed_tasks, run_command
from surogate_core.app.starting import NO_EXTENSIONS
from surogate_core.cli.failure import report_bug
from surogate_core.errors import PluginError, SurogateError, UserError

HELP = """\
surogate: train language models at the practical limit of NVIDIA GPUs

start here:
{start}

usage:
{usage}

examples:
  surogate +recipe=bf16 +model=qwen3
  surogate sft run.yaml learning_rate=1e-4 output_dir=runs/a
  surogate sft run.yaml learning_rate=1e-3,1e-4 --multirun

`surogate sft --help` lists every key; docs/config.md explains them.
exit codes: 0 done; 2 the input is wrong; 3 this machine cannot do it; 1 a bug; 130 interrupted
"""

START = (
    ("demo", "train the embedded example, minutes on a CPU"),
    ("sft model=Qwen/Qwen3-0.6B datasets=my.jsonl", "fine-tune on your own data"),
)
TRAINING = (
    ("KEY=VALUE …", "train; the embedded example where model and data are not set"),
    ("demo [KEY=VALUE …]", "the same; without keys, the embedded example as it is"),
    ("sft|pt [FILE.yaml] [KEY=VALUE …]", "fine-tune, or pre-train all weights; the same with a plugin's task"),
)
"""(what is typed after ``surogate``, what it does)."""

PREFIXES = ("+", "~", "-")
TRAINING_FIRST = "Reading the configuration. Loading torch and the plugins."
DEMO_FIRST = "The demo trains a tiny model on data that ships with Surogate. Loading torch and the plugins."
"""What is said before the seconds that this takes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Installed as ``surogate``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.update(NO_EXTENSIONS)
    # At its end Python would look for garbage in all that was imported, and then end.
    atexit.register(gc.freeze)
    code = 0
    try:
        code = _dispatch(arguments)
        _flush()
    except SurogateError as error:
        _report(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("surogate: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _discard_output()  # the reader has gone (`| head`)
        return code
    except Exception as error:
        report_bug(error)
        return 1
    except SystemExit as end:
        from surogate_core.plugins.isolation import culprit

        if culprit(end) is None:
            raise
        # A plugin does not decide that the command has ended, least of all that it has ended well.
        report_bug(end)
        return 1
    except BaseException as error:
        from surogate_core.files.tokenizers import is_panic, panic_error

        if not is_panic(error):
            raise
        _report(panic_error(error))
        return UserError.exit_code
    return code


def _flush() -> None:
    """Write what standard output still holds. A terminal that has been closed changes no exit code."""
    try:
        sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EIO or not stat.S_ISCHR(os.fstat(sys.stdout.fileno()).st_mode):
            raise
        _discard_output()


def _discard_output() -> None:
    """Keep Python from failing again when it flushes standard output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    first = arguments[0] if arguments else ""
    if first in ("", "--help", "-h", "help"):
        print(help_text(), end="")
        return 0
    if first == "--version":
        from surogate_core import __version__

        print(f"surogate {__version__}")
        return 0
    _check_directory()
    if first.startswith(PREFIXES) or "=" in first:
        return _train(arguments, None)
    if first == DEMO:
        return _train(arguments[1:], None, DEMO_FIRST)
    if first in CORE_TASKS:
        return _train(arguments[1:], first)
    command = find_command(arguments)
    if command is not None:
        return run_command(command, arguments)
    if first in installed_tasks():
        return _train(arguments[1:], first)
    raise _unknown_command(arguments)


def help_text() -> str:
    """What ``surogate --help`` prints: the core's lines, and those of the commands that may run."""
    from surogate_core.plugins.commands import allowed_commands

    offered = allowed_commands()
    start = [*START, *((c.example, c.help.partition("\n")[0]) for c in offered if c.example)]
    forms = [pair for c in offered for pair in zip(c.usage.split("\n"), c.help.split("\n"), strict=False)]
    usage = [*TRAINING, *forms, ("--version", "")]
    return HELP.format(start=_lines(start, width=53), usage=_lines(usage, width=44))


def _lines(pairs: Iterable[tuple[str, str]], *, width: int) -> str:
    """A line for each pair, with its second text in a column; below the first where that is too long."""
    lines = []
    for typed, what in pairs:
        command = f"surogate {typed}"
        between = f"\n{'':{width + 3}}" if len(command) > width else " "
        lines.append(f"  {command:<{width}}{between}{what}".rstrip())
    return "\n".join(lines)


def _check_directory() -> None:
    """Raise `UserError` if the directory of this process has been removed, which libraries ask for anywhere."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib would be imported for every command, `--help` too
    except FileNotFoundError:
        raise UserError(
            "the directory in which the command was started is gone. Fix: cd to one that exists, and start it again."
        ) from None


def _train(arguments: list[str], task: str | None, first: str = TRAINING_FIRST) -> int:
    from surogate_core.cli import train

    return train.main(arguments, task, first)


def _unknown_command(arguments: Sequence[str]) -> UserError:
    from surogate_core.plugins.commands import known_names

    word = arguments[0]
    if word.endswith((".yaml", ".yml")):
        return UserError(f"{word}: name the task before the file. Fix: surogate sft {' '.join(arguments)}")
    near = get_close_matches(word, [*CORE_TASKS, DEMO, *known_names()], n=1, cutoff=0.5)
    meant = PEERS_COMMANDS.get(word) or (near[0] if near else "")
    fix = f" Fix: {' '.join(['surogate', meant, *arguments[1:]])}" if meant else " `surogate --help` lists them."
    return UserError(f"{word}: there is no such command (an override has the form KEY=VALUE).{fix}")


def _report(error: SurogateError) -> None:
    print(f"surogate: {error}", file=sys.stderr)
    if isinstance(error, PluginError) and error.__cause__ is not None:
        from surogate_core.logs import record_traceback

        print(f"The traceback is in {record_traceback(str(error), error.__cause__)}", file=sys.stderr)


surogate = main
"""The command line, by its name in the public surface."""

if __name__ == "__main__":
    sys.exit(main())
