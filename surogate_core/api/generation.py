"""`generate`: texts of a model, a run or an adapter from Python."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api.process import contained, plain
from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.run.texts import Text

Prompt = str | Sequence[Mapping[str, Any]]
"""A text to continue, or the messages of a chat to answer."""


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
    **keys: Any,
) -> list[Text]:
    """Continue texts, or answer chats: ``surogate.generate(run.path, ["The chain"], sampling={"temperature": 0})``.

    `model`: a directory, a run, a checkpoint, an adapter or a hub id. `sampling`: `temperature`, `top_k`, `top_p`,
    `min_p`, `repetition_penalty`, `seed`; the others are those of the model's files. `stop`: a text or several that end
    a completion. `keys`: keys of the configuration,
    such as ``device="cpu"``. Returns the `samples` of each prompt together, each with `text`, `ids`, `logprobs` and
    `reason`. Every call loads the weights. Raises `UserError` or `MachineError`.
    """
    asked = _asked(prompts)
    with contained():
        from surogate_core.cli.arguments import Arguments, registry_for
        from surogate_core.cli.sampling import flags_of, sampling_of
        from surogate_core.config.resolve import load_run_config
        from surogate_core.config.yamlfile import with_keywords
        from surogate_core.run import texts
        from surogate_core.run.generation import named, prepare, rollout_of

        found = named(os.fspath(model))
        source = with_keywords(None, {key: plain(value) for key, value in keys.items()})
        registry = registry_for(Arguments(config_file=source))
        spec = rollout_of(registry, engine)
        prepared = prepare(found, load_run_config(found.overrides, config_file=source, registry=registry), registry)
        wanted = texts.Wanted(
            max_new_tokens=max_new_tokens,
            samples=samples,
            sampling=sampling_of(flags_of(sampling), prepared.sampling, sampled=samples > 1),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        if not asked:
            return []
        given = [
            texts.prompt_of_text(prepared.tokenizer, one, name=f"prompt {number}")
            if isinstance(one, str)
            else texts.prompt_of_messages(prepared.tokenizer, one, name=f"prompt {number}")
            for number, one in enumerate(asked)
        ]
        requests, _ = texts.requests_of(prepared, given, wanted)
        weights = prepared.load(registry)
        made = spec.open(weights, texts.settings_of(weights, requests, slots=slots))
        return texts.generate_texts(made, prepared.tokenizer, requests, wanted.stop)


def _asked(prompts: Any) -> list[Any]:
    if isinstance(prompts, str) or _is_chat(prompts):
        return [prompts]
    found = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, bytes | Mapping) else None
    if found is None or not all(isinstance(one, str | list | tuple) for one in found):
        raise UserError("prompts: is neither text nor messages. Fix: a text, a list of messages, or a list of these")
    return found


def _is_chat(prompts: Any) -> bool:
    return isinstance(prompts, list | tuple) and bool(prompts) and all(isinstance(one, Mapping) for one in prompts)
