"""The console script: which sub-command, and how each kind of error ends it.

This module imports nothing heavy, so that ``--help`` answers at once.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from surogate_core.app.commands import COMMANDS, CORE_TASKS, DEMO, PEERS_COMMANDS, installed_tasks
from surogate_core.app.starting import NO_EXTENSIONS
from surogate_core.cli.failure import report_bug
from surogate_core.errors import PluginError, SurogateError, UserError

HELP = """\
surogate: train language models at the practical limit of NVIDIA GPUs

start here:
  surogate demo                                         train the embedded example, minutes on a CPU
  surogate sft model=Qwen/Qwen3-0.6B datasets=my.jsonl  fine-tune on your own data
  surogate plan model=Qwen/Qwen3-0.6B datasets=my.jsonl will it fit, how fast, how long

usage:
  surogate KEY=VALUE …                         train; the embedded example where model and data are not set
  surogate demo [KEY=VALUE …]                  the same; without keys, the embedded example as it is
  surogate sft|pt [FILE.yaml] [KEY=VALUE …]    fine-tune, or pre-train all weights; the same with a plugin's task
  surogate generate MODEL --prompt TEXT        continue a text; MODEL is a directory, a run, an adapter or a hub id
  surogate chat MODEL [MODEL …]                a chat in the terminal
  surogate eval MODEL [MODEL …]                held-out loss, or accuracy on tasks; several models are compared
  surogate env list|new|tasks|check|eval       environments of reinforcement learning: tasks, rewards of a model
  surogate serve MODEL [--adapter DIR …]       a server of the OpenAI API
  surogate tokenize [TASK] [FILE.yaml] [KEY=VALUE …] [--debug [N]]
                                               tokenise and pack the data, show what is trained
  surogate merge [RUN] [--output DIR]          fold a LoRA adapter into its base model; RUN is the latest by default
  surogate export [RUN] --to hub://USER/NAME   upload the result to the Hugging Face hub, or copy it to a directory
  surogate export [MODEL] --to FILE.gguf       write one file for llama.cpp and Ollama
  surogate report [RUN …] [--output FILE|--serve]
                                               curves and figures of runs, as files or as a live page
  surogate numerics [KEY=VALUE …] [--recipes A,B]
                                               the same training under each precision recipe, compared
  surogate plan [TASK] [FILE.yaml] [KEY=VALUE …]
                                               will it fit, how fast, how long; nothing is trained
  surogate plugins list|show NAME|lock|verify|sbom
                                               what is installed, and whether it matches the lock
  surogate plugins new NAME --kind KIND        write a plugin package of your own
  surogate plugins check [NAME …|--matrix]     whether a plugin does what its kind must; what can be combined
  surogate doctor                              what this machine can run, and why not the rest
  surogate --version

examples:
  surogate +recipe=bf16 +model=qwen3
  surogate sft run.yaml learning_rate=1e-4 output_dir=runs/a
  surogate sft run.yaml learning_rate=1e-3,1e-4 --multirun

`surogate sft --help` lists every key; docs/config.md explains them.
exit codes: 0 done; 2 the input is wrong; 3 this machine cannot do it; 1 a bug; 130 interrupted
"""

PREFIXES = ("+", "~", "-")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. Installed as ``surogate``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.update(NO_EXTENSIONS)
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
        print(HELP, end="")
        return 0
    if first == "--version":
        from surogate_core import __version__

        print(f"surogate {__version__}")
        return 0
    _check_directory()
    if first.startswith(PREFIXES) or "=" in first:
        return _train(arguments, None)
    if first == DEMO:
        from surogate_core.app.announce import announce

        announce("The demo trains a tiny model on data that ships with Surogate. Loading torch and the plugins.")
        return _train(arguments[1:], None)
    commands: dict[str, Callable[[list[str]], int]] = {
        "generate": _generate,
        "chat": _chat,
        "eval": _evaluate,
        "env": _environments,
        "serve": _serve,
        "tokenize": _tokenize,
        "merge": _merge,
        "export": _export,
        "report": _report_runs,
        "numerics": _numerics,
        "plan": _plan,
        "plugins": _plugins,
        "doctor": _doctor,
    }
    if first in commands:
        return commands[first](arguments[1:])
    if first in CORE_TASKS or first in installed_tasks():
        return _train(arguments[1:], first)
    raise _unknown_command(arguments)


def _check_directory() -> None:
    """Raise `UserError` if the directory of this process has been removed, which libraries ask for anywhere."""
    try:
        os.getcwd()  # noqa: PTH109 - pathlib would be imported for every command, `--help` too
    except FileNotFoundError:
        raise UserError(
            "the directory in which the command was started is gone. Fix: cd to one that exists, and start it again."
        ) from None


def _train(arguments: list[str], task: str | None) -> int:
    from surogate_core.cli import train

    return train.main(arguments, task)


def _generate(arguments: list[str]) -> int:
    from surogate_core.cli import generate

    return generate.main(arguments)


def _chat(arguments: list[str]) -> int:
    from surogate_core.cli import chat

    return chat.main(arguments)


def _evaluate(arguments: list[str]) -> int:
    from surogate_core.cli import evaluate

    return evaluate.main(arguments)


def _environments(arguments: list[str]) -> int:
    from surogate_core.cli import env

    return env.main(arguments)


def _serve(arguments: list[str]) -> int:
    from surogate_core.cli import serve

    return serve.main(arguments)


def _tokenize(arguments: list[str]) -> int:
    from surogate_core.cli import tokenize

    return tokenize.main(arguments)


def _merge(arguments: list[str]) -> int:
    from surogate_core.cli import merge

    return merge.main(arguments)


def _export(arguments: list[str]) -> int:
    from surogate_core.cli import export

    return export.main(arguments)


def _report_runs(arguments: list[str]) -> int:
    from surogate_core.cli import report

    return report.main(arguments)


def _numerics(arguments: list[str]) -> int:
    from surogate_core.cli import numerics

    return numerics.main(arguments)


def _plan(arguments: list[str]) -> int:
    from surogate_core.cli import plan

    return int(plan.main(arguments))


def _plugins(arguments: list[str]) -> int:
    from surogate_core.cli import plugins

    return plugins.main(arguments)


def _doctor(arguments: list[str]) -> int:
    from surogate_core.cli import doctor

    return doctor.main(arguments)


def _unknown_command(arguments: Sequence[str]) -> UserError:
    from surogate_core.config import planned

    word = arguments[0]
    if word in planned.COMMANDS:
        return UserError(f"surogate {word}: {planned.MESSAGE}")
    if word.endswith((".yaml", ".yml")):
        return UserError(f"{word}: name the task before the file. Fix: surogate sft {' '.join(arguments)}")
    near = get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    meant = PEERS_COMMANDS.get(word) or (near[0] if near else "")
    fix = f" Fix: {' '.join(['surogate', meant, *arguments[1:]])}" if meant else " `surogate --help` lists them."
    return UserError(f"{word}: there is no such command (an override has the form KEY=VALUE).{fix}")


def _report(error: SurogateError) -> None:
    print(f"surogate: {error}", file=sys.stderr)
    if isinstance(error, PluginError) and error.__cause__ is not None:
        from surogate_core.logs import record_traceback

        print(f"The traceback is in {record_traceback(str(error), error.__cause__)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
