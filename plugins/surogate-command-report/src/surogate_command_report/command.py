"""`surogate report`: curves, phases, advice and figures of runs, from the files that they left."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from threading import Event

from surogate_core.plugin import UserError, latest_run, run_directory

USAGE = """\
usage: surogate report [RUN …] [--output FILE]
       surogate report [RUN …] --serve [--port N]

  RUN …                directories of runs, finished, crashed or still going, or of several runs, such as a sweep;
                       several runs are compared; without one the latest run, runs/latest
  --output FILE        write FILE.html or FILE.md; without it report.html and report.md, in RUN, or in the
                       current directory if several are named
  --serve              show a page on 127.0.0.1 that follows the runs, until Ctrl-C; nothing is written
  --port N             its port; without it a free one

A run writes its own report when it ends. After a kill this command does.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    directories: list[Path] = []
    output: Path | None = None
    serve, port = False, 0
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            print(USAGE, end="")
            return 0
        if flag in ("--output", "--port"):
            if not equals and not words:
                example = (
                    "a file must follow. Fix: --output report.html" if flag == "--output" else "a number must follow"
                )
                raise UserError(f"surogate report {flag}: {example}")
            value = value if equals else words.pop(0)
            if flag == "--output":
                output = Path(value).expanduser()
            else:
                port = _port(value)
        elif word == "--serve":
            serve = True
        elif word.startswith("-"):
            raise UserError(f"surogate report: {word} is not known. Fix: `surogate report --help` shows the form")
        else:
            directories.append(run_directory(word))
    if not directories:
        directories.append(latest_run(command="surogate report"))
    # What a shell's `runs/sweep/*` names beside the runs.
    directories = [directory for directory in directories if not directory.is_file()] or directories
    if serve and output is not None:
        raise UserError("surogate report: --serve writes no --output. Fix: keep one of them")
    if serve:
        return _serve(directories, port)
    from surogate_command_report.write import write_report

    for file in write_report(directories, output=output):
        print(file)
    return 0


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise UserError(f"surogate report --port {text}: must be a number from 0 to 65535. Fix: --port 8765")
    return int(text)


def _serve(directories: Sequence[Path], port: int) -> int:
    from contextlib import ExitStack, closing

    from surogate_command_report.serve import MetricsFollower, PageServer
    from surogate_core.service.files import find_runs

    with ExitStack() as stack:
        followers = [
            stack.enter_context(closing(MetricsFollower(run, group=group))) for run, group in find_runs(directories)
        ]
        try:
            server = PageServer(lambda: [follower.record for follower in followers], port=port)
        except OSError as error:
            raise UserError(f"--port {port}: cannot be listened on: {error.strerror}. Fix: another port") from error
        stack.enter_context(closing(server))
        # Before the address is shown, and also where a shell has had SIGINT ignored, as it does behind `&`.
        over = Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: over.set()))
        print(server.url, flush=True)
        over.wait()
    return 0
