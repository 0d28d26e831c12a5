"""`generate`: texts of a model, a run or an adapter from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import UserError, bundles
from surogate_core.service.app import contained, plain

if TYPE_CHECKING:
    from surogate_core.plugin import inference

Prompt = str | Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""A text to continue, the messages of a chat to answer, or a row with ``messages`` and ``tools``."""


def generate(
    model: str | os.PathLike[str],
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int = 256,
    samples: int = 1,
    stop: str | Sequence[str] = (),
    slots: int | None = None,
    engine: str = "native",
    sampling: Mapping[str, float] | None = None,
    chat: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
    tool_parser: str = "",
    **keys: Any,
) -> list[inference.Text]:
    """Continue texts, or answer chats: ``surogate.generate(run.path, ["The chain"], sampling={"temperature": 0})``.

    `model`: a directory, a run, a checkpoint, an adapter or a hub id. `sampling`: `temperature`, `top_k`, `top_p`,
    `min_p`, `repetition_penalty`, `seed`; the others are those of the model's files. `stop`: a text or several that end
    a completion. `chat`: a text is a user's message. `tools`: those that a chat may call, in the form of the OpenAI
    API; `tool_parser`: the form of the calls, by default that of the chat template. `keys`: keys of the configuration,
    such as ``device="cpu"``. Returns the `samples` of each prompt together, each with `text`, `calls`, `ids`,
    `logprobs` and `reason`. Every call loads the weights. Raises `UserError` or `MachineError`.
    """
    asked = _asked(prompts)
    if not asked:
        return []
    with contained():
        from surogate_commands.sampling import flags_of, sampling_of
        from surogate_core.plugin import load_run_config
        from surogate_core.service.app import Arguments, registry_for
        from surogate_core.service.config import with_keywords
        from surogate_core.service.inference import calling, check_parser, counted, named, prepare, rollout_of, texts

        # What needs no model is refused before one is opened.
        if slots is not None:
            counted("slots", slots)
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        flags = flags_of(sampling)
        ranged = sampling_of(flags, bundles.Sampling())
        wanted = texts.PromptOptions(max_new_tokens=max_new_tokens, samples=samples, sampling=ranged, stop=stops)
        rows = {f"prompt {n}": _row(one, f"prompt {n}", chat, tools) for n, one in enumerate(asked)}
        found = named(os.fspath(model))
        source = with_keywords(None, {key: plain(value) for key, value in keys.items()})
        registry = registry_for(Arguments(config_file=source))
        spec = rollout_of(registry, engine)
        if tool_parser:
            check_parser(registry.all("tool_parser"), tool_parser, key="tool_parser")
        prepared = prepare(found, load_run_config(found.overrides, config_file=source, registry=registry), registry)
        wanted = replace(wanted, sampling=sampling_of(flags, prepared.sampling, sampled=samples > 1))
        form = partial(calling, registry, prepared.tokenizer, name=tool_parser, key="tool_parser")
        given = [texts.prompt_of_row(prepared.tokenizer, row, name=name, calling=form) for name, row in rows.items()]
        requests, _ = texts.requests_of(prepared, given, wanted)
        weights = prepared.load(registry)
        made = spec.open(weights, texts.settings_of(weights, requests, slots=slots))
        callings = [given[request.number].calling for request in requests]
        return texts.generate_texts(made, prepared.tokenizer, requests, wanted.stop, callings=callings)


def _row(prompt: Prompt, name: str, chat: bool, tools: Sequence[Mapping[str, Any]]) -> str | dict[str, Any]:
    """A prompt as a row of a file has it; raises `UserError`."""
    from surogate_core.service.files import fault_of
    from surogate_core.service.inference import unanswered

    if isinstance(prompt, str):
        if not (chat or tools):
            return prompt
        if not prompt:
            raise UserError(f"{name}: is empty. Fix: give the message to answer.")
        row: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]}
    else:
        row = dict(prompt) if isinstance(prompt, Mapping) else {"messages": list(prompt)}
    if tools and row.get("tools") is None:
        row["tools"] = list(tools)
    if (fault := fault_of(row)) is not None:
        raise UserError(f"{name}: {fault[0]} Fix: {fault[1]}")
    if "messages" in row and len(unanswered(row["messages"])) < len(row["messages"]):
        raise UserError(
            f"{name}: ends with an assistant's turn. Fix: leave it out; the model answers what is before it."
        )
    return row


def _asked(prompts: Any) -> list[Any]:
    if isinstance(prompts, str | Mapping) or _is_chat(prompts):
        return [prompts]
    found = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, bytes) else None
    if found is None or not all(isinstance(one, str | list | tuple | Mapping) for one in found):
        raise UserError("prompts: is neither text nor messages. Fix: a text, a list of messages, or a list of these")
    return found


def _is_chat(prompts: Any) -> bool:
    """Whether these are the messages of one chat, and not rows."""
    some = isinstance(prompts, list | tuple) and bool(prompts)
    return some and all(isinstance(one, Mapping) and not one.keys() & {"messages", "prompt"} for one in prompts)
