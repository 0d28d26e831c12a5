"""Samples during training: what the model generates for the prompts of `sample_prompts`, with its weights in place."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from surogate_core.bundles import Request, RolloutEngine, RolloutEngineSpec, RolloutSettings, Sampling
from surogate_core.conf_paths import expanded
from surogate_core.config.schema import RunConfig
from surogate_core.dsl.declare import LoRA
from surogate_core.engine.device_memory import give_back
from surogate_core.engine.engine import Engine
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.errors import SurogateError
from surogate_core.events import Notice, Progress, Samples
from surogate_core.files.atomic import human_bytes
from surogate_core.files.prompts import read_prompts
from surogate_core.generate.room import fitting_slots, needed_bytes
from surogate_core.generate.weights import Weights, without_values
from surogate_core.inference.generation import PreparedModel
from surogate_core.inference.texts import (
    Prompt,
    PromptOptions,
    generate_texts,
    longest_of,
    prompt_of_row,
    requests_of,
    unanswered,
    usual_slots,
)
from surogate_core.setup.assemble import ResolvedModel, is_out_of_memory
from surogate_core.setup.tokenizer_of_run import tokenizer_of_run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)

KEY = "sample_prompts"
REPORTS = 20
"""Progress events of one round of samples, about."""

Row = str | Mapping[str, Any]


class _Stopped(Exception):  # noqa: N818
    """A signal came while samples were generated."""


def rows_of(config: RunConfig) -> list[tuple[str, Row]]:
    """(name, row) of each prompt that a configuration names. Reads its files; raises `UserError` for what is wrong."""
    found: list[tuple[str, Row]] = []
    for place, entry in enumerate(config.sample_prompts):
        if isinstance(entry, str) and entry.endswith(".jsonl"):
            found += read_prompts(expanded(entry), key=KEY)
        else:
            found.append((f"{KEY}.{place}", entry))
    return found


def shown(row: Row) -> str:
    """A prompt as the events have it: its text, or the last message of a conversation."""
    if isinstance(row, str):
        return row
    if "prompt" in row:
        return str(row["prompt"])
    return str((unanswered(row["messages"]) or row["messages"])[-1].get("content"))


def prompts_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase, *, trains_prompts: bool) -> list[Prompt]:
    """The prompts of a configuration as tokens.

    A text alone is a user's message if the data is rendered with a chat template. Conversations without a system
    message get that of `system`. `trains_prompts`: whether the task trains every token (`TaskSpec.trains_prompts`).
    """
    chats = config.use_chat_template and not trains_prompts and bool(tokenizer.chat_template)
    found = []
    for name, row in rows_of(config):
        given: Row = {"messages": [{"role": "user", "content": row}]} if isinstance(row, str) and chats else row
        if isinstance(given, str) or "messages" not in given:
            found.append(prompt_of_row(tokenizer, given, name=name))
            continue
        messages = list(given["messages"])
        first = messages[0].get("role") if messages and isinstance(messages[0], Mapping) else None
        if config.system is not None and first != "system":
            messages = [{"role": "system", "content": config.system}, *messages]
        found.append(prompt_of_row(tokenizer, {**given, "messages": messages}, name=name))
    return found


@dataclass(slots=True, kw_only=True)
class Sampler:
    """Generates the samples of a run. What fails here is a warning, and the run goes on without samples."""

    shown: tuple[str, ...]
    """The prompts, for the events."""
    requests: Sequence[Request]
    spec: RolloutEngineSpec
    tokenizer: PreTrainedTokenizerBase
    show: Callable[[Progress], object]
    _engine: RolloutEngine | None = None
    """Kept from round to round with its caches, so that memory that was enough once stays enough."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        registry: Registry,
        resolved: ResolvedModel,
        tokenizer: PreTrainedTokenizerBase,
        show: Callable[[Progress], object] = lambda event: None,
    ) -> tuple[Sampler | None, list[str]]:
        """The sampler, if the configuration names prompts, and notes. Raises `UserError` for a prompt that is wrong."""
        if not config.sample_prompts:
            return None, []
        trains_prompts = registry.get("task", config.task).trains_prompts
        prompts = prompts_of(config, tokenizer, trains_prompts=trains_prompts)
        sampling = Sampling(temperature=config.sample_temperature, seed=config.train_seed)
        wanted = PromptOptions(max_new_tokens=config.sample_max_new_tokens, sampling=sampling)
        own = resolved.weights.generation_config() if resolved.weights is not None else None
        prepared = PreparedModel(
            config=config,
            resolved=resolved,
            lora=LoRA.untrained(),
            tokenizer=tokenizer,
            generation_config=own or {},
            notes=(),
        )
        requests, notes = requests_of(prepared, prompts, wanted)
        texts = tuple(shown(row) for _, row in rows_of(config))
        spec: RolloutEngineSpec = registry.get("rollout", "native")
        return cls(shown=texts, requests=requests, spec=spec, tokenizer=tokenizer, show=show), notes

    def __call__(self, engine: Engine, step: int, stopped: Callable[[], bool]) -> Samples | Notice | None:
        """The samples of the weights after a step, or a notice why there are none; None if it was `stopped`."""
        try:
            return self._samples(engine, step, stopped)
        except _Stopped:
            return None
        except Exception as error:
            self._engine = None
            if not isinstance(error, SurogateError):
                log.warning("samples failed", error=repr(error), exc_info=error)
            if is_out_of_memory(error):
                give_back()
            why = str(error) if isinstance(error, SurogateError) else repr(error)
            message = f"There are no samples from step {step} on, and the run goes on without them: {why}"
            return Notice(level="warning", message=message, data={"key": KEY})

    def _samples(self, engine: Engine, step: int, stopped: Callable[[], bool]) -> Samples:
        started = time.perf_counter()
        if self._engine is None:
            weights, context = Weights.of(engine), longest_of(self.requests)
            wanted = usual_slots(weights.device, self.requests)
            slots = fitting_slots(
                weights, context, wanted, fix="shorter sample_prompts, or fewer sample_max_new_tokens"
            )
            self._engine = self.spec.open(weights, RolloutSettings(slots=slots, context=context))
        total = sum(request.max_new_tokens for request in self.requests)
        said = 0

        def progress(done: int, _: int) -> None:
            nonlocal said
            if stopped():
                raise _Stopped
            if done == total or (done - said) * REPORTS >= total:
                said = done
                self.show(Progress(task="generating samples", done=done, total=total, unit="tokens"))

        texts = generate_texts(self._engine, self.tokenizer, self.requests, progress=progress)
        return Samples(
            step=step,
            prompts=self.shown,
            texts=tuple(text.text for text in texts),
            ended=tuple(text.reason == "stop" for text in texts),
            tokens=sum(len(text.ids) for text in texts),
            seconds=time.perf_counter() - started,
        )


def cache_note(
    config: RunConfig, registry: Registry, resolved: ResolvedModel, programs: ProgramBuilder
) -> tuple[int, str]:
    """(bytes that a run's samples need, a sentence about them); 0 without prompts."""
    if not config.sample_prompts:
        return 0, ""
    pretrained = config.model.path is not None and not config.from_scratch
    tokenizer, _ = tokenizer_of_run(config, vocab_size=resolved.model.vocab_size, pretrained=pretrained)
    sampler, _ = Sampler.of(config, registry, resolved, tokenizer)
    assert sampler is not None
    weights = without_values(programs)
    slots = usual_slots(programs.plan.assembly.settings.device, sampler.requests)
    longest = longest_of(sampler.requests)
    nbytes = needed_bytes(weights, longest)(slots)
    what = f"{slots} sequences of {longest:,} tokens need" if slots > 1 else f"a sequence of {longest:,} tokens needs"
    return nbytes, f"samples: {what} {human_bytes(nbytes)} of what training leaves free"
