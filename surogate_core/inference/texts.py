"""Texts in and out of a rollout engine: prompts to tokens, completions to texts, stop texts, and sizes of caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from surogate_core.bundles import (
    Completion,
    Reason,
    Request,
    RolloutEngine,
    RolloutSettings,
    Sampling,
)
from surogate_core.data.encoded import RowError
from surogate_core.data.text.calls import template_message
from surogate_core.data.text.chat import chat_of, encode_text
from surogate_core.data.text.whole_text import encode_whole
from surogate_core.errors import UserError
from surogate_core.files.atomic import human_bytes
from surogate_core.files.prompts import tools_of
from surogate_core.generate.decoding import why_eager
from surogate_core.generate.room import fitting_slots, needed_bytes
from surogate_core.generate.weights import Weights
from surogate_core.inference.completions import GrowingText
from surogate_core.inference.generation import PreparedModel
from surogate_core.inference.tool_calls import Calling
from surogate_core.tools.choosing import Tools
from surogate_core.tools.reading import Call

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase


MOST_SLOTS = {"cpu": 32, "cuda": 256}
"""Sequences at a time on a device, unless the user says otherwise."""
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A prompt as tokens."""

    name: str
    """Its name in messages."""
    ids: tuple[int, ...]
    calling: Calling | None = None
    """How the model calls its tools; None without tools."""
    listed: bool = False
    """Whether it lists tools."""
    answered: bool = False
    """Whether its messages had an answer at their end, which is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked of every prompt."""

    max_new_tokens: int = 256
    samples: int = 1
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    """Texts that end a completion; they and what follows are not part of its text."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a completion, besides the model's own."""
    ignore_eos: bool = False
    """Whether the model's own tokens do not end it."""

    def __post_init__(self) -> None:
        counted("max_new_tokens", self.max_new_tokens)
        counted("samples", self.samples)
        if not all(isinstance(one, str) for one in self.stop):
            raise UserError('stop: is not text. Fix: stop=".", or a list of texts')
        if "" in self.stop:
            raise UserError("stop: is empty. Fix: give the text before which a completion ends.")


def counted(name: str, value: Any) -> None:
    """Raises `UserError` unless the value is a whole number of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} {value!r}: must be a whole number of at least 1. Fix: {name}=1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A completion as text."""

    prompt: int
    """The number of its prompt."""
    sample: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """The log-probability of each token under the model, before temperature and filters."""
    reason: Reason
    calls: tuple[Call, ...] = ()
    """The tool calls, which are not in the text."""


def prompt_of_text(tokenizer: PreTrainedTokenizerBase, text: str, *, name: str) -> Prompt:
    """The tokens of a text, with those that the tokenizer puts before every text."""
    if not text:
        raise UserError(f"{name}: is empty. Fix: give the text to continue.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{name}: is not Unicode text at character {error.start}. Fix: give text in UTF-8.") from error
    return _checked(tuple(encode_whole(tokenizer, text, ended=False)), name)


def prompt_of_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Messages, *, name: str, tools: Sequence[Mapping[str, Any]] = ()
) -> Prompt:
    """The tokens of a conversation up to the assistant's next turn. `tools`: those that the template lists."""
    if not messages:
        raise UserError(f"{name}: has no message. Fix: give at least one.")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            state = "has no role" if isinstance(message, Mapping) else "is text" if isinstance(message, str) else None
            what = f"messages[{place}] {state or 'is no object'}"
            raise UserError(f'{name}: {what}. Fix: each message is {{"role": …, "content": …}}')
    chat = chat_of(tokenizer, tools or None)
    try:
        given = [template_message(message) for message in messages]
        listed = list(chat.encoder.guarded(list(tools))) or None
        text = chat.render(chat.encoder.guarded(given), listed, add_generation_prompt=True)
        # SmolLM3's template, for one, reads them under other names.
        lists = not tools or chat.render(chat.encoder.guarded(given), None, add_generation_prompt=True) != text
    except RowError as error:
        raise UserError(f"{name}: {str(error).rstrip('.')}. Fix: correct the messages, or `template`.") from error
    except RecursionError as error:
        raise UserError(f"{name}: is nested too deeply. Fix: fewer objects and lists inside each other.") from error
    if not lists:
        raise UserError(f"{name}: the chat template lists no tools. Fix: leave tools out, or set `template`.")
    if chat.encoder.backend is not None:
        ids = chat.encoder.encode_guarded(text)[0]
    else:
        ids = encode_text(tokenizer, text, add_special_tokens=False)
    return _checked(tuple(ids), name)


def prompt_of_row(
    tokenizer: PreTrainedTokenizerBase,
    row: str | Mapping[str, Any],
    *,
    name: str,
    calling: Callable[[Tools], Calling | None] = lambda tools: None,
) -> Prompt:
    """The tokens of a row of a file: a text, or an object with a text ``prompt`` or with ``messages`` and ``tools``.

    An assistant's turn at the end of the messages is the answer that a data set has; the prompt is what is before it.
    """
    if not isinstance(row, str) and "messages" in row:
        messages, tools = row["messages"], tools_of(row)
        asked = unanswered(messages)
        if messages and not asked:
            raise UserError(f"{name}: has no message before the assistant's. Fix: add the user's message.")
        found = prompt_of_messages(tokenizer, asked, name=name, tools=tools)
        return replace(found, listed=bool(tools), calling=calling(tools), answered=len(asked) < len(messages))
    return prompt_of_text(tokenizer, row if isinstance(row, str) else row["prompt"], name=name)


def unanswered(messages: Messages) -> Messages:
    """The messages without assistants' turns at their end."""
    end = len(messages)
    while end and isinstance(last := messages[end - 1], Mapping) and last.get("role") == "assistant":
        end -= 1
    return messages[:end]


def _checked(ids: tuple[int, ...], name: str) -> Prompt:
    if not ids:
        raise UserError(f"{name}: has no token. Fix: give the text to continue.")
    return Prompt(name=name, ids=ids)


def stop_token(tokenizer: PreTrainedTokenizerBase, word: str) -> int:
    """The id of a stop token that is named by its text or its number."""
    vocabulary = tokenizer.get_vocab()
    if word.isascii() and word.isdigit() and int(word) in vocabulary.values():
        return int(word)
    if word in vocabulary:
        return int(vocabulary[word])
    raise UserError(
        f"--stop-token {word}: the tokenizer has no such token. Fix: name one of its tokens or ids, or use --stop for "
        f"a text."
    )


def requests_of(
    prepared: PreparedModel, prompts: Sequence[Prompt], wanted: PromptOptions
) -> tuple[list[Request], list[str]]:
    """A request for each sample of each prompt, and notes about those that the model's positions cut short."""
    requests, cut = [], []
    stop_ids = wanted.stop_ids if wanted.ignore_eos else prepared.stop_ids | wanted.stop_ids
    for number, prompt in enumerate(prompts):
        room = prepared.context - len(prompt.ids)
        if room < 1:
            end = int(prepared.context)
            raise UserError(
                f"{prompt.name}: has {len(prompt.ids):,} tokens, and the model's positions end at {end:,}. "
                f"Fix: shorten it, or stretch the model with rope_scaling and max_model_len."
            )
        if room < wanted.max_new_tokens:
            cut.append(prompt.name)
        requests += [
            Request(
                prompt=prompt.ids,
                max_new_tokens=int(min(room, wanted.max_new_tokens)),
                number=number,
                sample=sample,
                sampling=wanted.sampling,
                stop_ids=stop_ids,
            )
            for sample in range(wanted.samples)
        ]
    notes = []
    if answered := sum(prompt.answered for prompt in prompts):
        rows = "1 row ends" if answered == 1 else f"{answered:,} rows end"
        notes.append(f"{rows} with an assistant's turn, which is left out: the model answers what is before it.")
    if unread := sum(prompt.listed and prompt.calling is None for prompt in prompts):
        rows = "1 row" if unread == 1 else f"{unread:,} rows"
        notes.append(f"the tool calls of {rows} stay text: no tool parser reads what the chat template writes.")
    listed = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
    if cut:
        notes.append(f"{listed}: the completion ends at the model's last position, {prepared.context:,}.")
    return requests, notes


def usual_slots(device: torch.device, requests: Sequence[Request]) -> int:
    """Sequences at a time, if memory allows them."""
    return min(MOST_SLOTS.get(device.type, 32), len(requests))


def settings_of(weights: Weights, requests: Sequence[Request], *, slots: int | None = None) -> RolloutSettings:
    """The caches that these requests need, as many slots as fit into the free memory.

    Raises `MachineError` if not even one fits, or if `slots` do not.
    """
    if slots is not None:
        counted("slots", slots)
    context = longest_of(requests)
    wanted = slots if slots is not None else usual_slots(weights.device, requests)
    least = 1 if slots is None else slots
    fix = "fewer --slots, a lower --max-new-tokens, or a shorter prompt"
    return RolloutSettings(slots=fitting_slots(weights, context, wanted, least=least, fix=fix), context=context)


def warm_up(engine: RolloutEngine, *, slots: int, context: int) -> None:
    """Compile and capture what the first request would wait for, and find weights that are not numbers."""
    one = Request(prompt=(0,), max_new_tokens=min(2, context - 1), sampling=Sampling(temperature=0))
    for count in sorted({1, slots}):  # a GPU has one kind of step for few sequences and one for many
        engine.generate([one] * count)


def longest_of(requests: Sequence[Request]) -> int:
    """Tokens of the longest sequence."""
    return max(len(r.prompt) + r.max_new_tokens for r in requests)


def memory_notes(weights: Weights, settings: RolloutSettings) -> list[str]:
    """What a user should know before generation starts: large caches, and why a GPU decodes slowly."""
    notes, needed = [], needed_bytes(weights, settings.context)(settings.slots)
    if needed >= 2**30:
        sizes = f"{settings.slots} sequences of {settings.context:,} tokens"
        notes.append(f"keys, values and working memory of {sizes}: {human_bytes(needed)}.")
    if weights.device.type == "cuda" and (reason := why_eager(weights.plan.assembly)) is not None:
        notes.append(f"decoding runs without CUDA graphs: {reason}.")
    return notes


def generate_texts(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    requests: Sequence[Request],
    stop: Sequence[str] = (),
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
    shown: Callable[[str], None] | None = None,
    finished: Callable[[Text], None] | None = None,
    callings: Sequence[Calling | None] = (),
) -> list[Text]:
    """The completions of requests as texts. `callings`: how the model calls the tools of each, if it has some.

    `progress` receives the tokens so far and at most; `shown` the new part of the text, as soon as no later token can
    change it, of the only request; `finished` each text when it ends, without log-probabilities.
    """
    total, done = sum(r.max_new_tokens for r in requests), 0
    forms = list(callings) or [None] * len(requests)
    watches = [
        GrowingText(tokenizer, request.prompt, stop, shown=form.shown if form is not None else frozenset())
        for request, form in zip(requests, forms, strict=True)
    ]

    def on_token(index: int, token: int) -> bool:
        nonlocal done
        done += 1
        watch = watches[index]
        ended = watch.take(token)
        stopped = ended or token in requests[index].stop_ids
        if stopped or len(watch.ids) >= requests[index].max_new_tokens:
            done += requests[index].max_new_tokens - len(watch.ids)
            if finished is not None:
                reason: Reason = "stop" if stopped else "length"
                one = Completion(ids=tuple(watch.ids), logprobs=(), reason=reason)
                finished(_text(requests[index], watch, one, forms[index]))
        progress(done, total)
        if shown is not None:
            shown(watch.settled(ended))
        return ended

    found = engine.generate(requests, on_token=on_token)
    if shown is not None:
        shown(watches[0].settled(True))
    return [_text(*made) for made in zip(requests, watches, found, forms, strict=True)]


def _text(request: Request, watch: GrowingText, completion: Completion, calling: Calling | None) -> Text:
    text, calls = watch.text(), tuple[Call, ...]()
    if calling is not None:
        text, calls = calling.read(text)
    return Text(
        prompt=request.number,
        sample=request.sample,
        text=text,
        calls=calls,
        ids=completion.ids,
        logprobs=completion.logprobs,
        reason=completion.reason,
    )
