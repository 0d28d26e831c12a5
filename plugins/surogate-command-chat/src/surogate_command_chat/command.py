"""`surogate chat`: talk to a model, or to several at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_commands.flags import FILTERS, TEMPERATURE, TOOL_PARSER, Flag, shown
from surogate_commands.sampling import sampling_of
from surogate_commands.words import Flags, Words
from surogate_core.plugin import SurogateError, UserError

if TYPE_CHECKING:
    from surogate_commands.adapters import Adapters
    from surogate_core.plugin import bundles, inference
    from surogate_core.service.inference import Calling, Weights
    from surogate_core.service.plugins import Registry

FLAGS = Flags(
    command="surogate chat",
    flags=(
        Flag(
            "list",
            "--adapter DIR",
            "an adapter, a run or a checkpoint to use on MODEL; several are partners side by side",
        ),
        Flag("text", "--system TEXT", "the system message"),
        Flag("text", "--tools FILE", "a JSON list of tools that the model may call"),
        TOOL_PARSER,
        Flag("count", "--max-new-tokens N", "largest number of tokens of an answer (512)"),
        Flag("count", "--context N", "tokens of the longest conversation (4096, or what the model has)"),
        TEMPERATURE,
        FILTERS,
        Flag("list", "--stop TEXT", "ends an answer before this text; may be repeated"),
        Flag("number", "--seed N", "with equal seeds and messages equal answers (0)"),
    ),
)

USAGE = f"""\
usage: surogate chat MODEL [MODEL …] [--system TEXT] [KEY=VALUE …]

A chat in the terminal. MODEL is a Hugging Face directory, a run's directory (`latest` is the last run's), a checkpoint
with an adapter, a PEFT adapter, or a hub id. Several models answer one after the other, each with its own history.
KEY=VALUE are keys of a run, such as device=cpu or qlora_bnb=true.

{shown(FLAGS.flags)}
In the chat:
  /help                these commands
  /system TEXT         another system message, and a new conversation
  /reset               a new conversation
  /undo                take the last message and its answer back
  /tools FILE          other tools, and a new conversation; without FILE none
  /save FILE           write the conversation as a row of a data set
  /quit                end the chat, as Ctrl-D does. Ctrl-C ends an answer

After a call of a tool the next line is its result, or an empty line leaves it without one.
Lines of standard input are messages if it is not a terminal.
"""

MOST, CONTEXT = 512, 4096
"""Tokens of an answer and of a conversation, unless flags say otherwise."""


@dataclass(slots=True)
class Partner:
    """A model with its conversation."""

    name: str
    prepared: inference.PreparedModel
    engine: bundles.RolloutEngine
    sampling: bundles.Sampling
    context: int
    stop: tuple[str, ...] = ()
    activate: Callable[[], None] | None = None
    """Puts its adapter into the weights that it shares with others."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: Sequence[Mapping[str, Any]] = ()
    form: Callable[[Sequence[Mapping[str, Any]]], Calling | None] = lambda tools: None
    """How it calls tools."""
    pending: list[Mapping[str, Any]] = field(default_factory=list)
    """Calls of the last answer that have no result yet."""

    def answer(self, text: str, *, most: int, shown: Callable[[str], None]) -> str:
        """Answers a message, which is taken back if it cannot; Ctrl-C ends the answer."""
        return self._answer([*self.messages, {"role": "user", "content": text}], most=most, shown=shown)

    def take_result(self, text: str) -> bool:
        """The result of the first call that has none, or an empty text to leave it; whether there is something to
        answer now.
        """
        call = self.pending.pop(0)
        if text:
            name = call["function"]["name"]
            result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            self.messages = [*self.messages, result]
        return not self.pending and self.messages[-1]["role"] == "tool"

    def go_on(self, *, most: int, shown: Callable[[str], None]) -> str:
        """Answers the results of its calls."""
        return self._answer(self.messages, most=most, shown=shown)

    def _answer(self, messages: list[dict[str, Any]], *, most: int, shown: Callable[[str], None]) -> str:
        from surogate_core.plugin import bundles
        from surogate_core.service.inference import generate_texts, prompt_of_messages

        prompt = prompt_of_messages(self.prepared.tokenizer, messages, name="the conversation", tools=self.tools)
        room = self.context - len(prompt.ids)
        if room < 1:
            raise UserError(
                f"the conversation has {len(prompt.ids):,} tokens, and there is room for {self.context:,}. "
                f"Fix: /reset, or --context N"
            )
        request = bundles.Request(
            prompt=prompt.ids,
            max_new_tokens=min(room, most),
            number=len(self.messages),
            sampling=self.sampling,
            stop_ids=self.prepared.stop_ids,
        )
        calling = self.form(self.tools)
        reader = None if calling is None else calling.reader()
        parts: list[str] = []

        def take(part: str) -> None:
            content = part if reader is None else "".join(delta.content for delta in reader.feed(part))
            parts.append(content)
            shown(content)

        if self.activate is not None:
            self.activate()
        try:
            generate_texts(self.engine, self.prepared.tokenizer, [request], self.stop, shown=take, callings=[calling])
        except KeyboardInterrupt:
            shown(" …")
        calls: list[dict[str, Any]] = []
        if reader is not None:
            rest = "".join(delta.content for delta in reader.close())
            parts.append(rest)
            shown(rest)
            calls = [call.body() for call in reader.calls]
        reply = "".join(parts)
        self.pending = list(calls)
        self.messages = [*messages, {"role": "assistant", "content": reply} | ({"tool_calls": calls} if calls else {})]
        return reply

    def reset(self, system: str | None) -> None:
        """A new conversation."""
        self.pending = []
        self.messages = [{"role": "system", "content": system}] if system else []

    def undo(self) -> bool:
        """Without the last message and its answer; whether there was one."""
        asked = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return False
        self.messages, self.pending = self.messages[: asked[-1]], []
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
    from surogate_core.service.app import announce
    from surogate_core.service.config import logs

    announce(f"Loading {', '.join(words.models)}.")
    logs.configure()
    talk(_partners(words), words.texts.get("--system"), most=words.counts.get("--max-new-tokens", MOST))
    return 0


def _partners(words: Words) -> list[Partner]:
    from surogate_commands.adapters import Adapters
    from surogate_core.plugin import bundles, events
    from surogate_core.service.app import Arguments, registry_for, shown_progress
    from surogate_core.service.inference import calling, check_parser, read_tools, warm_up

    registry = registry_for(Arguments(overrides=words.overrides))
    spec = registry.get("rollout", "native")
    parser = words.texts.get("--tool-parser", "")
    if parser:
        check_parser(registry.all("tool_parser"), parser, key="--tool-parser")
    tools = read_tools(words.texts["--tools"], key="--tools") if "--tools" in words.texts else []
    ready, base = _ready(words, registry)
    _check_tools(ready, tools)
    partners = []
    with shown_progress() as progress:

        def opened(word: str, prepared: inference.PreparedModel) -> tuple[Weights, bundles.RolloutEngine]:
            def told(task: str, done: int, total: int) -> None:
                progress(events.Progress(task=f"{word}: {task}", done=done, total=total))

            weights = prepared.load(registry, progress=told)
            context = _context(words, prepared)
            engine = spec.open(weights, bundles.RolloutSettings(slots=1, context=context, frozen=True))
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
                    tools=tools,
                    form=partial(calling, registry, prepared.tokenizer, name=parser),
                )
            )
    return partners


def _check_tools(
    ready: Mapping[str, inference.PreparedModel] | Sequence[Partner], tools: Sequence[Mapping[str, Any]]
) -> None:
    """Raises `UserError` for tools beside several partners, whose calls would need different results."""
    if tools and len(ready) > 1:
        raise UserError("surogate chat --tools: tools are for one model. Fix: name one MODEL")


def _context(words: Words, prepared: inference.PreparedModel) -> int:
    return int(min(words.counts.get("--context", CONTEXT), prepared.context))


def _activate(adapters: Adapters, engine: bundles.RolloutEngine, word: str) -> None:
    if adapters.activate(word):
        engine.forget()


def _ready(
    words: Words, registry: Registry
) -> tuple[dict[str, inference.PreparedModel], inference.PreparedModel | None]:
    """(the partners' models, the base that all of them share); notes about them are printed."""
    from surogate_commands.adapters import NotSharedError, prepare_beside
    from surogate_core.plugin import encoding, load_run_config
    from surogate_core.service.inference import named, on_its_base, prepare, quantised_note, with_adapter

    adapters = words.lists.get("--adapter", [])
    if adapters and len(words.models) > 1:
        raise UserError("surogate chat --adapter: adapters are on one model. Fix: name one MODEL")
    chosen = {word: named(word, fix=on_its_base("surogate chat")) for word in words.models}
    if adapters:
        chosen = {adapter: with_adapter(words.models[0], adapter) for adapter in adapters}
    configs = {
        word: load_run_config([*found.overrides, *words.overrides], registry=registry) for word, found in chosen.items()
    }
    ready: dict[str, inference.PreparedModel] = {}
    base = None
    if len(chosen) > 1 and adapters:
        with suppress(NotSharedError):
            base, ready = prepare_beside(named(words.models[0]), chosen, configs[adapters[0]], registry)
    if base is None:
        ready = {word: prepare(found, configs[word], registry) for word, found in chosen.items()}
    for word, prepared in ready.items():
        encoding.chat_of(prepared.tokenizer)  # without a template there is no chat
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
            elif partners[0].pending:
                _result(partners[0], text, most)
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
            _show_end(partner, reply)
    except SurogateError:
        # All keep the same questions.
        for partner, messages in zip(partners, before, strict=True):
            partner.messages = messages
        if len(partners) > 1:
            print(f"note: {partner.name} cannot answer, so the message is taken back for all.", file=sys.stderr)
        raise


def _result(partner: Partner, text: str, most: int) -> None:
    """Takes the result of a call; with the last one the model goes on."""
    if partner.take_result(text):
        _show_end(partner, partner.go_on(most=most, shown=lambda part: print(part, end="", flush=True)))
    elif partner.pending:
        _show_call(partner)


def _show_end(partner: Partner, reply: str) -> None:
    """The end of an answer, and the first of its calls."""
    if reply or not partner.pending:
        print(flush=True)
    if partner.pending:
        _show_call(partner)
    elif not reply:
        print("note: the answer is empty.", file=sys.stderr)


def _show_call(partner: Partner) -> None:
    from surogate_core.service.data import text_of_call

    print(f"[call] {text_of_call(partner.pending[0])}", flush=True)
    print("Its result, or an empty line:", file=sys.stderr)


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
        case "/tools":
            from surogate_core.service.inference import read_tools

            tools = read_tools(rest.strip(), key="/tools") if rest.strip() else []
            _check_tools(partners, tools)
            for partner in partners:
                partner.tools = tools
                partner.reset(system)
            print(f"A new conversation with {len(tools)} tools.", file=sys.stderr)
        case "/reset" | "/system":
            system = (rest.strip() or None) if word == "/system" else system
            for partner in partners:
                partner.reset(system)
            about = f" with the system message: {system}" if system else "."
            print(f"A new conversation{about}", file=sys.stderr)
        case _:
            near = get_close_matches(word, ("/help", "/system", "/reset", "/undo", "/save", "/tools", "/quit"), n=1)
            raise UserError(f"{word}: there is no such command. Fix: {near[0] if near else '/help'}")
    return system


def _save(file: str, partners: Sequence[Partner]) -> None:
    from surogate_core.plugin import atomic

    if not file:
        raise UserError("/save: names no file. Fix: /save chat.jsonl")
    rows = [
        json.dumps(
            {"messages": partner.messages} | ({"tools": list(partner.tools)} if partner.tools else {}),
            ensure_ascii=False,
        )
        + "\n"
        for partner in partners
    ]
    atomic.replace_file(Path(file).expanduser(), "".join(rows).encode(), key="/save")
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
