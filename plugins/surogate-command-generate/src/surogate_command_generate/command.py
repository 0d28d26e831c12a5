"""`surogate generate`: continues prompts with a model, a run or an adapter."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_commands.flags import (
    ADAPTER,
    CHAT,
    ENGINE,
    FILTERS,
    MAX_NEW_TOKENS,
    SLOTS,
    SYSTEM,
    TEMPERATURE,
    TOOL_PARSER,
    Flag,
    shown,
)
from surogate_commands.kept import json_line, kept_lines
from surogate_commands.sampling import sampling_of
from surogate_commands.words import Flags, Words
from surogate_core.plugin import UserError

if TYPE_CHECKING:
    from surogate_core.plugin import inference
    from surogate_core.service.plugins import Registry

FLAGS = Flags(
    command="surogate generate",
    flags=(
        ADAPTER,
        Flag("text", "--prompt TEXT", "the text to continue; - reads it from standard input"),
        Flag(
            "text",
            "--file FILE",
            'JSON lines: {"prompt": TEXT} or {"messages": [{"role": …, "content": …}, …]}; - is standard input',
        ),
        CHAT,
        SYSTEM,
        Flag(
            "text",
            "--tools FILE",
            'a JSON list of tools that --chat offers; a row of --file with messages has its own as "tools"',
        ),
        TOOL_PARSER,
        MAX_NEW_TOKENS,
        Flag("count", "--samples N", "completions of each prompt (1)"),
        replace(
            TEMPERATURE,
            help=f"{TEMPERATURE.help}; if it takes the most probable token, --samples above 1, --top-k, --top-p and "
            "--min-p sample at temperature 1",
        ),
        FILTERS,
        Flag("number", "--seed N", "with equal seeds equal completions (0)"),
        Flag("list", "--stop TEXT", "ends a completion before this text; may be repeated"),
        Flag("list", "--stop-token TOKEN", "ends a completion at this token, or token id; may be repeated"),
        Flag("switch", "--ignore-eos", "do not stop at the model's own end tokens"),
        SLOTS,
        ENGINE,
        Flag("switch", "--json", "print JSON lines: prompt, sample, text, reason, tokens"),
        Flag("switch", "--logprobs", "the same with token ids and the log-probability of each"),
        Flag(
            "text",
            "--output FILE",
            "write the JSON lines to a file; until the end FILE.partial has those that are done",
        ),
    ),
)

USAGE = f"""\
usage: surogate generate MODEL --prompt TEXT [KEY=VALUE …]
       surogate generate MODEL --file PROMPTS.jsonl [--output FILE.jsonl] [KEY=VALUE …]

Continues prompts. MODEL is a Hugging Face directory, a run's directory (`latest` is the last run's), a checkpoint with
an adapter, a PEFT adapter, or a hub id. KEY=VALUE are keys of a run, such as device=cpu or qlora_bnb=true.

{shown(FLAGS.flags)}
A completion alone is printed for one prompt with one sample; several are printed as JSON lines.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    if any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    words = FLAGS.read(argv)
    if len(words.models) > 1:
        raise UserError(f"surogate generate: {' and '.join(words.models)}: one model at a time. Fix: keep one")
    if not words.models:
        raise UserError("surogate generate: no model is named. Fix: surogate generate MODEL --prompt TEXT")
    if ("--prompt" in words.texts) == ("--file" in words.texts):
        which = "both --prompt and --file are given" if "--file" in words.texts else "there is nothing to continue"
        raise UserError(f"surogate generate: {which}. Fix: --prompt TEXT, or --file PROMPTS.jsonl")
    for flag in ("--chat", "--system", "--tools"):
        if "--file" in words.texts and flag in {*words.switches, *words.texts}:
            fix = '{"messages": [{"role": …, "content": …}, …]} in a row is a chat'
            raise UserError(f"surogate generate {flag}: it is for --prompt, not for --file. Fix: {fix}")
    for flag, what in (("--system", "a system message"), ("--tools", "tools")):
        if flag in words.texts and "--chat" not in words.switches:
            raise UserError(f"surogate generate {flag}: only a chat has {what}. Fix: add --chat")
    from surogate_core.service.config import logs

    logs.configure()
    return _generate(words, words.models[0])


def _generate(words: Words, model: str) -> int:
    from surogate_core.plugin import atomic, events, load_run_config
    from surogate_core.service.app import Arguments, registry_for, shown_progress
    from surogate_core.service.inference import (
        generate_texts,
        memory_notes,
        named,
        prepare,
        quantised_note,
        requests_of,
        rollout_of,
        settings_of,
        usual_slots,
        with_adapter,
    )

    output = Path(words.texts["--output"]).expanduser() if "--output" in words.texts else None
    if output is not None:
        atomic.ensure_writable_file(output, key="--output")
    found = with_adapter(model, words.texts["--adapter"]) if "--adapter" in words.texts else named(model)
    overrides = [*found.overrides, *words.overrides]
    registry = registry_for(Arguments(overrides=overrides))
    spec = rollout_of(registry, words.texts.get("--engine", "native"))
    prepared = prepare(found, load_run_config(overrides, registry=registry), registry)
    wanted = _wanted(words, prepared)
    prompts = _prompts(words, prepared, registry)
    requests, cut = requests_of(prepared, prompts, wanted)
    quantised = quantised_note(words.texts.get("--adapter", model), found, prepared, registry)
    for note in (*prepared.notes, *quantised, *cut):
        print(f"note: {note}", file=sys.stderr)
    with shown_progress() as progress:

        def told(task: str, done: int, total: int, unit: str = "") -> None:
            progress(events.Progress(task=task, done=done, total=total, unit=unit))

        weights = prepared.load(registry, progress=told)
        settings = settings_of(weights, requests, slots=words.counts.get("--slots"))
        if "--slots" not in words.counts and settings.slots < usual_slots(weights.device, requests):
            print(f"note: {settings.slots} sequences at a time; more do not fit into memory.", file=sys.stderr)
        for note in memory_notes(weights, settings):
            print(f"note: {note}", file=sys.stderr)
        engine = spec.open(weights, settings)
        with kept_lines(output, key="--output") as take:
            with _named(model):
                texts = generate_texts(
                    engine,
                    prepared.tokenizer,
                    requests,
                    wanted.stop,
                    progress=lambda done, total: told("generating", done, total, "tokens"),
                    finished=None if take is None else lambda text: take(_row(text, False)),
                    callings=[prompts[request.number].calling for request in requests],
                )
            if output is not None:
                _show(words, texts, output)
    if output is None:
        _show(words, texts, None)
    return 0


@contextmanager
def _named(model: str) -> Iterator[None]:
    """Puts the model's name before what is wrong with it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{model}: {error}") from error


def _prompts(words: Words, prepared: inference.PreparedModel, registry: Registry) -> list[inference.Prompt]:
    from surogate_core.service.inference import calling, check_parser, prompt_of_row, prompt_of_text, read_tools

    tokenizer, parser = prepared.tokenizer, words.texts.get("--tool-parser", "")
    if parser:
        check_parser(registry.all("tool_parser"), parser, key="--tool-parser")
    form = partial(calling, registry, tokenizer, name=parser)
    if "--file" in words.texts:
        rows = _rows(words.texts["--file"])
        return [prompt_of_row(tokenizer, row, name=name, calling=form) for name, row in rows]
    text = words.texts["--prompt"]
    name = "--prompt"
    if text == "-":
        text, name = sys.stdin.read(), "standard input"
    if "--chat" not in words.switches:
        return [prompt_of_text(tokenizer, text, name=name)]
    if not text:
        raise UserError(f"{name}: is empty. Fix: give the message to answer.")
    system = [{"role": "system", "content": words.texts["--system"]}] if "--system" in words.texts else []
    tools = read_tools(words.texts["--tools"], key="--tools") if "--tools" in words.texts else []
    row = {"messages": [*system, {"role": "user", "content": text}], "tools": tools}
    return [prompt_of_row(tokenizer, row, name=name, calling=form)]


def _rows(file: str) -> list[tuple[str, str | dict[str, Any]]]:
    """(name, row) of each line of JSON."""
    from surogate_core.service.files import prompt_rows, read_prompts, some_prompts

    if file != "-":
        return read_prompts(file, key="--file")
    return some_prompts(prompt_rows(sys.stdin.read(), "standard input"), "--file -")


def _wanted(words: Words, prepared: inference.PreparedModel) -> inference.PromptOptions:
    from surogate_core.plugin import inference
    from surogate_core.service.inference import stop_token

    several = words.counts.get("--samples", 1) > 1
    sampling = sampling_of(words.sampling, prepared.sampling, sampled=several)
    stops = words.lists.get("--stop", [])
    if "" in stops:
        raise UserError("--stop: is empty. Fix: give the text before which a completion ends.")
    return inference.PromptOptions(
        max_new_tokens=words.counts.get("--max-new-tokens", 256),
        samples=words.counts.get("--samples", 1),
        sampling=sampling,
        stop=tuple(stops),
        stop_ids=frozenset(stop_token(prepared.tokenizer, word) for word in words.lists.get("--stop-token", [])),
        ignore_eos="--ignore-eos" in words.switches,
    )


def _show(words: Words, texts: Sequence[inference.Text], output: Path | None) -> None:
    from surogate_core.plugin import atomic

    as_lines = bool({"--json", "--logprobs"} & words.switches) or output is not None or len(texts) > 1
    if not as_lines:
        if texts[0].text or not texts[0].calls:
            print(texts[0].text)
        for call in texts[0].calls:
            print(json_line(call.body()), end="")
        if not texts[0].text and not texts[0].calls:
            count = len(texts[0].ids)
            first = count == 1 and texts[0].reason == "stop"
            why = "ended the completion at its first token" if first else f"wrote {count} tokens that have no text"
            print(f"note: the model {why}.", file=sys.stderr)
        return
    lines = "".join(json_line(_row(text, "--logprobs" in words.switches)) for text in texts)
    if output is None:
        print(lines, end="")
        return
    atomic.replace_file(output, lines.encode(), key="--output")
    print(f"Written: {output}")


def _row(text: inference.Text, logprobs: bool) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": text.prompt,
        "sample": text.sample,
        "text": text.text,
        "reason": text.reason,
        "tokens": len(text.ids),
    }
    if text.calls:
        row["tool_calls"] = [call.body() for call in text.calls]
    return row | ({"ids": list(text.ids), "logprobs": list(text.logprobs)} if logprobs else {})
