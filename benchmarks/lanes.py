"""Runs other scripts of this directory as processes, in lanes side by side, until the time is up.

A lane has its GPUs and its commands, which follow each other. What a command prints and writes is in a directory of its
own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kill_rank import descendants

Command = Sequence[str]
"""Script and its arguments."""
Lane = tuple[Sequence[int] | None, Sequence[Command]]
"""The GPUs that its commands see, or None for those that this process sees; its commands."""
Words = Callable[[Command, Path], list[str]]
"""The command as a process runs it, with its results in a directory."""


def words_of(command: Command, place: Path, *, tiny: bool, cache: Path | None = None) -> list[str]:
    """See `Words`. `tiny`: small shapes on a CPU. `cache`: where scripts that ask for it keep compiled programs."""
    script, *rest = command
    small = ["--device", "cpu", "--tiny"] if tiny else []
    if script in ("grpo.py", "generate.py"):
        # Their lists take all that follows.
        small = ["--small"] if tiny else []
        rest = ["--out", str(place / f"{Path(script).stem}.json"), *small, *rest]
    elif script == "kill_rank.py":
        rest = ["--json", str(place / "kill_rank.json"), *small, *rest]
    elif script == "gpu_peers.py":
        rest = [*rest, "--out", str(place), *(["--sizes", "tiny", *small] if tiny else [])]
    else:
        caches = cache is not None and script not in ("several_gpus_peers.py", "one_table.py")
        rest = ["--out", str(place), *(["--cache", str(cache)] if caches else []), *small, *rest]
    return [sys.executable, str(Path(__file__).with_name(script)), *rest]


def run(name: str, lanes: Sequence[Lane], out: Path, until: float, words: Words) -> tuple[list[str], list[str]]:
    """Run lanes side by side; (labels of the commands that began, words about each that did not end well).

    A label is also the name of the command's directory in `out`: ``name.lane.number``.
    """
    waiting = [(gpus, list(enumerate(commands))) for gpus, commands in lanes]
    running: dict[int, tuple[str, subprocess.Popen[bytes]]] = {}
    begun: list[str] = []
    failed: list[str] = []
    try:
        while running or any(commands for _, commands in waiting):
            for lane, (gpus, commands) in enumerate(waiting):
                if lane in running:
                    label, process = running[lane]
                    if process.poll() is None and time.monotonic() < until:
                        continue
                    if why := end(process):
                        failed.append(f"{label}: {why}")
                    del running[lane]
                if commands and time.monotonic() < until:
                    number, command = commands.pop(0)
                    begun.append(f"{name}.{lane}.{number}")
                    place = out / begun[-1]
                    running[lane] = begun[-1], begin(words(command, place), place, gpus)
                elif commands:
                    failed += [f"{name}.{lane}.{number}: no time" for number, _ in commands]
                    commands.clear()
            time.sleep(0.1)
    finally:
        for _, process in running.values():
            end(process)
    return begun, failed


def begin(words: Sequence[str], place: Path, gpus: Sequence[int] | None) -> subprocess.Popen[bytes]:
    """Start a command of a lane; what it prints goes to ``log`` in its directory."""
    place.mkdir(parents=True, exist_ok=True)
    surroundings = dict(os.environ)
    if gpus is not None:
        surroundings["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    with (place / "log").open("wb") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=surroundings,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> str:
    """Why a command did not end well, or "". One that still runs is killed, and all that it started with it."""
    if process.poll() is None:
        # Ranks are in sessions of their own.
        for each in [process.pid, *descendants(process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()
        return "stopped"
    code = process.returncode
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}" if code else ""


def said(place: Path, lines: int = 16) -> str:
    """The end of what a command printed."""
    text = (place / "log").read_text(errors="replace")
    return "\n".join(line[:240] for line in [line for line in text.splitlines() if line.strip()][-lines:])
