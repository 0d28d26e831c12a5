"""`surogate serve`: a server of the OpenAI API for a model, a run or adapters."""

from __future__ import annotations

import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_command_serve.access import LEAST_TOKEN, LOOPBACK, is_token
from surogate_commands.flags import ENGINE, TOOL_PARSER, Flag, shown
from surogate_commands.sampling import number, sampling_of
from surogate_commands.words import Flags, Words
from surogate_core.plugin import UserError

if TYPE_CHECKING:
    from surogate_command_serve.server import Server

PORT = 8000
FLAGS = Flags(
    command="surogate serve",
    flags=(
        Flag(
            "list",
            "--adapter [NAME=]DIR",
            "an adapter, a run or a checkpoint on MODEL, served beside it under its own name; may be repeated",
        ),
        Flag("text", "--name NAME", "the name of MODEL in requests (the last part of its path)"),
        Flag("text", "--host ADDRESS", "the address to listen on (127.0.0.1: programs of this machine only)"),
        Flag("text", "--port N", f"({PORT}); 0 takes a free one"),
        Flag(
            "text",
            "--token-file FILE",
            "the token that clients must send. A new file gets a random one. Without it a random token is printed",
        ),
        Flag("switch", "--no-token", "anybody on this machine may ask; on 127.0.0.1 only"),
        Flag(
            "count",
            "--context N",
            "tokens of the longest sequence, its prompt included (4096, or what the model has)",
        ),
        Flag("count", "--slots N", "sequences at a time (8 on a CPU, 64 on a GPU, or as many as memory allows)"),
        ENGINE,
        TOOL_PARSER,
        Flag(
            "number",
            "--temperature T",
            "for requests that have none. Without these flags generation_config.json decides",
        ),
        Flag("number", "--top-k N, --top-p P, --min-p P, --repetition-penalty R, --seed N"),
        Flag("switch", "--quiet", "no line for each answer"),
    ),
)

USAGE = f"""\
usage: surogate serve MODEL [--adapter [NAME=]DIR …] [KEY=VALUE …]

A server of the OpenAI API: /v1/models, /v1/completions and /v1/chat/completions, streamed or whole. MODEL is a Hugging
Face directory, a run's directory (`latest` is the last run's), a checkpoint with an adapter, a PEFT adapter, or a hub
id. KEY=VALUE are keys of a run, such as device=cpu or qlora_bnb=true.

{shown(FLAGS.flags)}
Ctrl-C ends the server.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    words = FLAGS.read(argv)
    if not words.models:
        raise UserError("surogate serve: no model is named. Fix: surogate serve MODEL")
    if len(words.models) > 1:
        raise UserError(f"surogate serve: {' and '.join(words.models)}: one model at a time. Fix: --adapter DIR")
    port = int(number("--port", words.texts.get("--port", str(PORT)), int, least=0))
    if port > 65535:
        raise UserError(f"--port {port}: must be at most 65535. Fix: --port {PORT}")
    host = words.texts.get("--host", "127.0.0.1")
    token = _token(words, host)
    from surogate_core.service.config import logs
    from surogate_core.service.data import clock

    logs.configure()
    clock.follow()
    with _interruptible(), _server(words, host=host, port=port, token=token) as server:
        if "--token-file" not in words.texts and token is not None:
            without = "; without one: --no-token" if host in LOOPBACK else ""
            print(f"token: {token} (the api_key of a client, or the header Authorization: Bearer TOKEN{without})")
        print(f"{', '.join(server.models)} at {server.url}; Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("stopping", file=sys.stderr)
    return 0


def _token(words: Words, host: str) -> str | None:
    """The token that clients must send; None if they need none."""
    if "--no-token" in words.switches:
        if "--token-file" in words.texts:
            raise UserError("surogate serve: both --no-token and --token-file are given. Fix: keep one.")
        if host not in LOOPBACK:
            raise UserError(
                f"surogate serve --no-token: everybody who reaches {host} could ask. Fix: leave --no-token out."
            )
        return None
    if "--token-file" in words.texts:
        return _token_of(Path(words.texts["--token-file"]).expanduser())
    return secrets.token_urlsafe(24)


def _token_of(file: Path) -> str:
    """The token in a file, which is written if there is none."""
    from surogate_core.service.files import private

    try:
        found = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        found = secrets.token_urlsafe(24)
        try:
            with open(file, "x", encoding="utf-8", opener=private) as out:
                out.write(found + "\n")
        except OSError as error:
            raise UserError(f"--token-file {file}: cannot be written: {error.strerror}. Fix: another file.") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise UserError(f"--token-file {file}: cannot be read: {reason}. Fix: a file with one line.") from error
    if not is_token(found):
        raise UserError(
            f"--token-file {file}: has no token of at least {LEAST_TOKEN} letters, digits and signs in one line. "
            f"Fix: name a file that does not exist, which gets a random one."
        )
    if file.stat().st_mode & 0o077:
        print(f"note: others on this machine can read {file}. Fix: chmod 600 {file}", file=sys.stderr)
    return found


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends the server as Ctrl-C does, which also works where a shell has had SIGINT ignored, as behind `&`."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, interrupt))
        yield


def _server(words: Words, *, host: str, port: int, token: str | None) -> Server:
    from surogate_command_serve.loading import Serving, check_address, listen, load
    from surogate_core.plugin import events, load_run_config
    from surogate_core.service.app import Arguments, registry_for, shown_progress

    check_address(host, port)
    registry = registry_for(Arguments(overrides=words.overrides))
    serving = Serving(
        model=words.models[0],
        configure=lambda overrides: load_run_config([*overrides, *words.overrides], registry=registry),
        name=words.texts.get("--name", ""),
        adapters=_named_adapters(words),
        context=words.counts.get("--context"),
        slots=words.counts.get("--slots"),
        engine=words.texts.get("--engine", "native"),
        tool_parser=words.texts.get("--tool-parser", ""),
        sampling=lambda own: sampling_of(words.sampling, own),
    )
    with shown_progress() as progress:

        def told(task: str, done: int, total: int) -> None:
            progress(events.Progress(task=task, done=done, total=total))

        models, worker = load(
            serving, registry, progress=told, note=lambda line: print(f"note: {line}", file=sys.stderr)
        )

    def note(line: str) -> None:
        if "--quiet" not in words.switches:
            print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)

    return listen(models, worker, host=host, port=port, token=token, note=note)


def _named_adapters(words: Words) -> dict[str, str]:
    """Name → directory of each --adapter."""
    found: dict[str, str] = {}
    for word in words.lists.get("--adapter", ()):
        name, equals, directory = word.partition("=")
        if not equals:
            name, directory = Path(word.rstrip("/")).name, word
        if not name or not directory:
            raise UserError(f"--adapter {word}: has no name or no directory. Fix: --adapter shop=runs/a")
        if name in found:
            raise UserError(f"--adapter {word}: two adapters are called {name}. Fix: --adapter OTHER={directory}")
        found[name] = directory
    return found
