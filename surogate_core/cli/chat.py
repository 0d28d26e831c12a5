"""`surogate chat`: talk to a model, or to several at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.cli.sampling import sampling_of
from surogate_core.cli.words import Flags, Words
from surogate_core.errors import SurogateError, UserError

if TYPE_CHECKING:
    from surogate_core.bundles import RolloutEngine, Sampling
    from surogate_core.generate.weights import Weights
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.adapters import Adapters
    from surogate_core.run.generation import Prepared

USAGE = """\
usage: surogate chat MODEL [MODEL …] [--system TEXT] [KEY=VALUE …]

A chat in the terminal. MODEL is a Hugging Face directory, a run's directory (`latest` is the last run's), a checkpoint
with an adapter, a PEFT adapter, or a hub id. Several models answer one after the other, each with its own history.
KEY=VALUE are keys of a run, such as device=cpu or qlora_bnb=true.

  --adapter DIR        an adapter, a run or a checkpoint to use on MODEL; several are partners side by side
  --system TEXT        the system message
  --max-new-tokens N   largest number of tokens of an answer (512)
  --context N          tokens of the longest conversation (4096, or what the model has)
  --temperature T      0 takes the most probable token. Without these flags generation_config.json decides
  --top-k N, --top-p P, --min-p P, --repetition-penalty R
  --stop TEXT          ends an answer before this text; may be repeated
  --seed N             with equal seeds and messages equal answers (0)

In the chat:
  /help                these commands
  /system TEXT         another system message, and a new conversation
  /reset               a new conversation
  /undo                take the last message and its answer back
  /save FILE           write the conversation as a row of a data set
  /quit                end the chat, as Ctrl-D does. Ctrl-C ends an answer

Lines of standard input are messages if it is not a terminal.
"""

MOST, CONTEXT = 512, 4096
"""Tokens of an answer and of a conversation, unless flags say otherwise."""
FLAGS = Flags(
    command="surogate chat",
    texts=("--system",),
    lists=("--adapter", "--stop"),
    counts=("--max-new-tokens", "--context"),
    samples=True,
)


@dataclass(slots=True)
class Partner:
    """A model with its conversation."""

    name: str
    prepared: Prepared
    engine: RolloutEngine
    sampling: Sampling
    context: int
    stop: tuple[str, ...] = ()
    activate: Callable[[], None] | None = None
    """Puts its adapter into the weights that it shares with others."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def answer(self, text: str, *, most: int, shown: Callable[[str], None]) -> str:
        """Answers a message, which is taken back if it cannot; Ctrl-C ends the answer."""
        from surogate_core.bundles import Request
        from surogate_core.run.texts import generate_texts, prompt_of_messages

        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = prompt_of_messages(self.prepared.tokenizer, messages, name="the conversation")
        room = self.context - len(prompt.ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt.ids):,} tokens, and there is room for {self.context:,}. "
                f"Fix: /reset, or --context N"
            )
        request = Request(
            prompt=prompt.ids,
            max_new_tokens=min(room, most),
            number=len(self.messages),
            sampling=self.sampling,
            stop_ids=self.prepared.stop_ids,
        )
        parts: list[str] = []

        def take(part: str) -> None:
            parts.append(part)
            shown(part)

        if self.activate is not None:
            self.activate()
        try:
            generate_texts(self.engine, self.prepared.tokenizer, [request], self.stop, shown=take)
        except KeyboardInterrupt:
            shown(" …")
        reply = "".join(parts)
        self.messages = [*messages, {"role": "assistant", "content": reply}]
        return reply

    def reset(self, system: str | None) -> None:
        """A new conversation."""
        self.messages = [{"role": "system", "content": system}] if system else []

    def undo(self) -> bool:
        """Without the last message and its answer; whether there was one."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            return False
        self.messages = self.messages[:-2]
        return True


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    words = FLAGS.read(argv)
    if not words.models:
        raise UserError("surogate chat: no model is named. Fix: surogate chat MODEL")
    if "" in words.lists.get("--stop", ()):
        raise UserError("--stop: is empty. Fix: give the text before which an answer ends.")
    from surogate_core import logs

    logs.configure()
    talk(_partners(words), words.texts.get("--system"), most=words.counts.get("--max-new-tokens", MOST))
    return 0


def _partners(words: Words) -> list[Partner]:
    from surogate_core.bundles import RolloutSettings
    from surogate_core.cli.arguments import Arguments, registry_for
    from surogate_core.cli.progress import shown_progress
    from surogate_core.events import Progress
    from surogate_core.run.adapters import Adapters
    from surogate_core.run.texts import warm_up

    registry = registry_for(Arguments(overrides=words.overrides))
    spec = registry.get("rollout", "native")
    ready, base = _ready(words, registry)
    partners = []
    with shown_progress() as progress:

        def opened(word: str, prepared: Prepared) -> tuple[Weights, RolloutEngine]:
            def told(task: str, done: int, total: int) -> None:
                progress(Progress(task=f"{word}: {task}", done=done, total=total))

            weights = prepared.load(registry, progress=told)
            context = _context(words, prepared)
            engine = spec.open(weights, RolloutSettings(slots=1, context=context, frozen=True))
            told("warming up", 0, 1)
            warm_up(engine, slots=1, context=context)
            told("warming up", 1, 1)
            return weights, engine

        if base is not None:
            weights, shared = opened(words.models[0], base)
            adapters = Adapters(weights, ready)
        for word, prepared in ready.items():
            if base is None:
                engine, activate = opened(word, prepared)[1], None
            else:
                engine, activate = shared, partial(_activate, adapters, shared, word)
            partners.append(
                Partner(
                    name=word,
                    prepared=prepared,
                    engine=engine,
                    sampling=sampling_of(words.sampling, prepared.sampling),
                    context=_context(words, prepared),
                    stop=tuple(words.lists.get("--stop", ())),
                    activate=activate,
                )
            )
    return partners


def _context(words: Words, prepared: Prepared) -> int:
    return int(min(words.counts.get("--context", CONTEXT), prepared.context))


def _activate(adapters: Adapters, engine: RolloutEngine, word: str) -> None:
    if adapters.activate(word):
        engine.forget()


def _ready(words: Words, registry: Registry) -> tuple[dict[str, Prepared], Prepared | None]:
    """(the partners' models, the base that all of them share); notes about them are printed."""
    from surogate_core.config.resolve import load_run_config
    from surogate_core.data.chat import chat_of
    from surogate_core.run.adapters import NotSharedError, prepare_beside
    from surogate_core.run.generation import named, on_its_base, prepare, quantised_note, with_adapter

    adapters = words.lists.get("--adapter", [])
    if adapters and len(words.models) > 1:
        raise UserError("surogate chat --adapter: adapters are on one model. Fix: name one MODEL")
    chosen = {word: named(word, fix=on_its_base("surogate chat")) for word in words.models}
    if adapters:
        chosen = {adapter: with_adapter(words.models[0], adapter) for adapter in adapters}
    configs = {
        word: load_run_config([*found.overrides, *words.overrides], registry=registry) for word, found in chosen.items()
    }
    ready: dict[str, Prepared] = {}
    base = None
    if len(chosen) > 1 and adapters:
        with suppress(NotSharedError):
            base, ready = prepare_beside(named(words.models[0]), chosen, configs[adapters[0]], registry)
    if base is None:
        ready = {word: prepare(found, configs[word], registry) for word, found in chosen.items()}
    for word, prepared in ready.items():
        chat_of(prepared.tokenizer)  # without a template there is no chat
        for note in (*prepared.notes, *quantised_note(word, chosen[word], prepared, registry)):
            print(f"note: {word}: {note}", file=sys.stderr)
    return ready, base


def talk(partners: Sequence[Partner], system: str | None, *, most: int) -> None:
    """Answers lines until they end."""
    for partner in partners:
        partner.reset(system)
    for line in _lines():
        text = line.strip()
        try:
            if text.startswith("/"):
                if text.split()[0] in ("/quit", "/exit"):
                    return
                system = _command(text, partners, system)
            elif text:
                _answers(partners, text, most)
        except SurogateError as error:
            print(f"surogate: {error}", file=sys.stderr)


def _answers(partners: Sequence[Partner], text: str, most: int) -> None:
    before = [partner.messages for partner in partners]
    try:
        for partner in partners:
            if len(partners) > 1:
                _show_name(partner.name)
            reply = partner.answer(text, most=most, shown=lambda part: print(part, end="", flush=True))
            print(flush=True)
            if not reply:
                print("note: the answer is empty.", file=sys.stderr)
    except SurogateError:
        # All keep the same questions.
        for partner, messages in zip(partners, before, strict=True):
            partner.messages = messages
        if len(partners) > 1:
            print(f"note: {partner.name} cannot answer, so the message is taken back for all.", file=sys.stderr)
        raise


def _show_name(name: str) -> None:
    """Before an answer of one of several partners; bold in a terminal."""
    from rich.console import Console

    Console(highlight=False, soft_wrap=True).print(f"[{name}]", style="bold cyan", markup=False)


def _command(text: str, partners: Sequence[Partner], system: str | None) -> str | None:
    """Does what a line that begins with / says; the system message from then on."""
    word, _, rest = text.partition(" ")
    match word:
        case "/help":
            print(USAGE.partition("In the chat:\n")[2].partition("\n\n")[0], file=sys.stderr)
        case "/save":
            _save(rest.strip(), partners)
        case "/undo":
            undone = [partner.undo() for partner in partners]
            print("The last message is taken back." if any(undone) else "There is no message.", file=sys.stderr)
        case "/reset" | "/system":
            system = (rest.strip() or None) if word == "/system" else system
            for partner in partners:
                partner.reset(system)
            about = f" with the system message: {system}" if system else "."
            print(f"A new conversation{about}", file=sys.stderr)
        case _:
            near = get_close_matches(word, ("/help", "/system", "/reset", "/undo", "/save", "/quit"), n=1)
            raise UserError(f"{word}: there is no such command. Fix: {near[0] if near else '/help'}")
    return system


def _save(file: str, partners: Sequence[Partner]) -> None:
    from surogate_core.files.atomic import replace_file

    if not file:
        raise UserError("/save: names no file. Fix: /save chat.jsonl")
    rows = [json.dumps({"messages": partner.messages}, ensure_ascii=False) + "\n" for partner in partners]
    replace_file(Path(file).expanduser(), "".join(rows).encode(), key="/save")
    print(f"Written: {file}", file=sys.stderr)


def _lines() -> Iterator[str]:
    """Messages: typed at a prompt, or lines of standard input."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    try:
        import readline  # noqa: F401  # input() takes its editing and history from it
    except ImportError:
        print("note: lines cannot be edited: Python has no readline here.", file=sys.stderr)
    print("/help lists the commands, /quit ends.", file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:  # one that came too late for an answer must not end the conversation
            print("\n/quit or Ctrl-D ends the chat.", file=sys.stderr)
