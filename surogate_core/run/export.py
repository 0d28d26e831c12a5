"""The result of a run in its output directory: the adapter, the model, or both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from surogate_core import __version__
from surogate_core.config.resolve import to_dict
from surogate_core.config.schema import RunConfig
from surogate_core.engine.engine import Engine
from surogate_core.hf.card import CardFacts, changed_keys
from surogate_core.hf.export import export_adapter, export_full, generation_of
from surogate_core.hf.lora_files import LoraAdapter, folded
from surogate_core.setup.assemble import ResolvedModel
from surogate_core.train.loop import LoopState

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surogate_core.data.report import DataReport
    from surogate_core.hf.weights import ModelDir

SHOWN_KEYS = ("learning_rate", "lr_scheduler_type", "sequence_len", "train_seed")
"""Keys whose values the model card always has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A finished training."""

    config: RunConfig
    resolved: ResolvedModel
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    state: LoopState
    exported_step: int
    """The step of the weights: the last, or the best."""
    data: str
    """The data in a few words."""
    longest: int
    """Tokens of the longest document."""
    base_files: dict[str, str]
    """Weight file of the base → digest of its data."""
    weight_format: str | None
    """The weight format of the frozen base."""


def places(config: RunConfig) -> list[Path]:
    """The directories of the result; the one to show is first."""
    output = Path(config.place)
    adapter, model = output / "adapter", output / "model"
    if not config.lora:
        return [model]
    return [model, adapter] if config.merge_adapter else [adapter]


def export(trained: Trained, progress: Callable[[str, int, int], None]) -> Path:
    """Write the result; returns the directory to show. `progress` receives (the work in words, tensors written, their
    total).
    """
    config = trained.config
    card, own = _card(trained), _own_adapter(trained)
    if own is not None:
        _export_adapter(trained, own, card, progress)
    if own is None or config.merge_adapter:
        _export_model(trained, [*_below(trained), own] if own is not None else [], card, progress)
    return places(config)[0]


def _card(trained: Trained) -> CardFacts:
    config, resolved, state = trained.config, trained.resolved, trained.state
    settings = to_dict(config)
    parameters, every = reversed(trained.engine.parameters.counts())
    versions = f"Surogate {__version__}, torch {torch.__version__}, transformers {version('transformers')}"
    chosen = {"recipe": config.recipe.name, "optimizer": config.optimizer.name}
    if trained.weight_format is not None:
        chosen["weight_format"] = trained.weight_format
    return CardFacts(
        title=config.run_name or Path(config.place).resolve().name,
        base_model=config.model.path if resolved.weights else None,
        base_commit=resolved.commit,
        base_place=resolved.weights.place if resolved.weights else None,
        base_files=trained.base_files,
        base_overrides=resolved.base_overrides,
        configuration=changed_keys(config),
        settings={**chosen, **{k: settings[k] for k in SHOWN_KEYS}, "versions": versions},
        figures={
            "method": _method(config),
            "data": trained.data,
            "steps": state.step,
            "tokens": state.total_tokens,
            "tokens of the longest document": trained.longest,
            "trained parameters": f"{parameters:,} of {every:,}",
            "eval loss": _eval_loss(state),
            "weights of step": trained.exported_step if trained.exported_step != state.step else None,
        },
    )


def _method(config: RunConfig) -> str:
    """How the weights were trained, in a few words."""
    how = "from random weights" if config.from_scratch else "pre-training" if config.task == "pt" else config.task
    if not config.lora:
        return f"all weights, {how}"
    modules = "all projections" if "all" in config.lora_target_modules else ", ".join(config.lora_target_modules)
    ranks = f"rank {config.lora_rank}"
    if config.lora_expert_rank is not None:
        ranks += f" (experts {config.lora_expert_rank})"
    router = ", and routers" if config.train_router else ""
    return f"LoRA, {how}, {ranks}, alpha {config.lora_alpha:g}, {modules}{router}"


def _eval_loss(state: LoopState) -> str | None:
    """The held-out loss before, after and at best, as far as it was measured."""
    first, last = state.first_eval_loss, state.last_eval_loss
    if first is None or last is None:
        return None
    if not state.evaluated_step:
        return f"{first:.4f} before the first step"
    best = state.best_step == state.evaluated_step
    other = "the best" if best else f"the best {state.best_eval_loss:.4f} at step {state.best_step}"
    if state.best_eval_loss is None or state.best_eval_loss >= first:
        other = "never better than before the first step"
    return f"{first:.4f} → {last:.4f} at step {state.evaluated_step}, {other}"


def data_in_words(config: RunConfig, report: DataReport) -> str:
    """The data sets with their types and counts; of a path the name alone."""
    entries = {"datasets": config.datasets, "validation_datasets": config.validation_datasets}
    found = []
    for one in report.datasets:
        key, _, number = one.key.rstrip("]").partition("[")
        kind = entries[key][int(number)].get("type", "auto")
        role = ", held out" if key == "validation_datasets" else ""
        found.append(f"{Path(one.path).name} ({kind}, {one.rows - one.bad_rows:,} rows{role})")
    if not config.validation_datasets and report.eval is not None:
        found.append(f"{config.validation_split_ratio:.3g} of it held out")
    return "; ".join(found)


def _own_adapter(trained: Trained) -> LoraAdapter | None:
    """The trained adapter; None if all weights were trained."""
    config = trained.config
    if not config.lora:
        return None
    return LoraAdapter(
        source="the run",
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        scale=config.lora_alpha / config.lora_rank,
        tensors=dict(trained.engine.parameters.adapter_tensors()),
    )


def _below(trained: Trained) -> tuple[LoraAdapter, ...]:
    """The adapters below the trained one, which were folded into the base during training."""
    return tuple(trained.resolved.adapter.folded) if trained.resolved.adapter else ()


def _export_adapter(
    trained: Trained, own: LoraAdapter, card: CardFacts, progress: Callable[[str, int, int], None]
) -> None:
    config, resolved, below = trained.config, trained.resolved, _below(trained)
    tensors = own.tensors
    export_adapter(
        places(config)[-1],
        _shown("the adapter", tensors.items(), len(tensors), progress),
        rank=config.lora_rank,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        base_model=config.model.path,
        card=card,
        tokenizer=trained.tokenizer,
        stacked_on=Path(below[-1].source) if below else None,
        model=resolved.model,
        generation_config=generation_of(resolved.weights, resolved.model.config, trained.tokenizer),
        task_type=resolved.model.head.peft_task,
    )


def _export_model(
    trained: Trained, stack: list[LoraAdapter], card: CardFacts, progress: Callable[[str, int, int], None]
) -> None:
    config, resolved, tokenizer = trained.config, trained.resolved, trained.tokenizer
    parameters = trained.engine.parameters
    values = {**resolved.model.config, "architectures": [resolved.model.hf_class]}
    values.pop("quantization_config", None)  # the exported weights are not quantised
    if resolved.weights is None:
        # A preset has the token ids of the published model's tokenizer, not of this one.
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        values.update({name: getattr(tokenizer, name) for name in names})
    if resolved.model.head.reads_last_token and values.get("pad_token_id") is None:
        values["pad_token_id"] = tokenizer.pad_token_id
    # Folding starts from the files, whose dtypes are kept, and rounds once. With a quantised base it starts from the
    # weights that the adapter was trained on.
    files = resolved.weights if config.lora and trained.weight_format is None else None
    tensors = _of_files(files, trained) if files else chain(parameters.base_tensors(), _carried(resolved))
    export_full(
        places(config)[0],
        _shown("the model", folded(tensors, stack), len(parameters.specs), progress),
        config=values,
        tokenizer=tokenizer,
        card=card,
        generation_config=generation_of(resolved.weights, values, tokenizer),
        fused=resolved.model.fused_tensors(),
    )


def _carried(resolved: ResolvedModel) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files that no run computes with (`Model.carried`)."""
    if resolved.weights is not None and resolved.model.carried:
        for name in resolved.weights.names():
            if name.startswith(resolved.model.carried):
                yield name, resolved.weights.get(name)


def _of_files(files: ModelDir, trained: Trained) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the files, with the trained tensors of the head, in place of another head's."""
    model = trained.resolved.model
    own = model.head.own(model)
    for name in files.names():
        if name not in own and name != model.other_head:
            yield name, files.get(name)
    if own:
        yield from ((n, t) for n, t in trained.engine.parameters.base_tensors() if n in own)


def _shown(
    what: str, tensors: Iterable[tuple[str, Tensor]], total: int, progress: Callable[[str, int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors, with progress; `total` is their approximate number."""
    for number, item in enumerate(tensors):
        progress(f"exporting {what}", min(number, total - 1), total)
        yield item
    progress(f"exporting {what}", total, total)
