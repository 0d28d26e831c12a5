"""The phases before a run's first step: the base model, the checkpoint to resume, the data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Evaluation, PrepareContext, PreparingTask, Recipe, Steps, Task, WeightFormat
from surogate_core.bundles.tasks import evaluator_of
from surogate_core.config import sharing
from surogate_core.config.flat import flat_defaults, no_effect_notes
from surogate_core.config.schema import RunConfig
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.preview import suspicious_examples
from surogate_core.data.text import clock
from surogate_core.dsl.rope import check_covers
from surogate_core.engine.device_memory import give_back
from surogate_core.errors import ConfigError, Problem
from surogate_core.events import Progress
from surogate_core.hf.contents import Contents, check_contents, digest_cache
from surogate_core.hf.weights import unused_note
from surogate_core.numbers import significant
from surogate_core.run.notes import adjusted_epochs, token_budget
from surogate_core.setup.assemble import (
    ResolvedModel,
    check_commit,
    check_weights,
    pinned,
    resolve_device,
    resolve_dtype,
    resolve_lora,
    resolve_model,
    resolve_recipe,
    resolve_weight_format,
    weight_format_keys,
    weight_format_notes,
)
from surogate_core.setup.changes import changes_note
from surogate_core.setup.experts import expert_notes
from surogate_core.setup.heads import check_head
from surogate_core.setup.ranks import on_one_gpu
from surogate_core.setup.router import router_notes
from surogate_core.setup.task_spec import Surroundings, check_end, online_task, option_keys, task_spec
from surogate_core.setup.tokenizer_of_run import tokenizer_of_run
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir, check_compatible
from surogate_core.train.flops import gemm_flops_per_second

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)

Show = Callable[[Progress], None]
"""Receives progress; may raise to end the preparation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model that a run starts from."""

    config: RunConfig
    """With the commit of the hub that the model's name leads to now."""
    resolved: ResolvedModel
    device: torch.device
    contents: Contents | None
    """Reads the digests of the weight files in the background; None for random weights. The run closes it."""
    flat_defaults: Mapping[str, Any]
    """Flat keys of the installed plugins with their defaults."""
    notes: tuple[str, ...]

    def files(self, show: Show) -> dict[str, str]:
        """Weight file of the base → digest of its data, waiting for them; empty for random weights."""
        if self.contents is None:
            return {}
        show(Progress(task="verifying the base", done=0, total=1))
        digests = self.contents.digests()
        show(Progress(task="verifying the base", done=1, total=1))
        return digests


@dataclass(frozen=True, slots=True, kw_only=True)
class Material:
    """What a run trains on."""

    tokenizer: PreTrainedTokenizerBase
    data: PreparedData | None
    """The packed rows; None for a task that reads no data set."""
    task: Task
    sample: MicroBatch
    """Has the shapes of every micro-batch."""
    steps: Steps
    evaluation: Evaluation | None
    longest: int
    """Tokens of the longest document."""
    notes: tuple[str, ...]


_LORA_KEYS = frozenset(
    {
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_dtype",
        "lora_init",
        "lora_target_modules",
        "lora_expert_rank",
        "train_router",
    }
)


def _lora_notes(config: RunConfig) -> list[str]:
    """A note about keys of LoRA that are not at their defaults while all weights are trained."""
    if config.lora:
        return []
    usual = RunConfig()
    values = ((f.name, getattr(config, f.name)) for f in fields(config) if f.name in _LORA_KEYS)
    # A task's option may switch dropout off, which is how it is without adapters too.
    found = [k for k, value in values if value != getattr(usual, k) and (k, value) != ("lora_dropout", 0.0)]
    return [f"{', '.join(found)}: no effect with lora=false."] if found else []


def _init_notes(config: RunConfig, recipe: Recipe, weight_format: WeightFormat | None) -> list[str]:
    """A note about adapters that make up for a rounded base."""
    if not config.lora or config.lora_init == "default":
        return []
    if weight_format is None and recipe.rounded is None:
        return [f"lora_init={config.lora_init}: no effect, because nothing rounds the frozen weights."]
    base = f"in {weight_format.name}" if weight_format is not None else f"under recipe {recipe.name}"
    return [
        f"lora_init={config.lora_init}: the adapters start from the rounding errors of the base, so they belong to the "
        f"base {base}. On the unquantised base the result is less accurate."
    ]


def fetch_base(config: RunConfig, registry: Registry, show: Show, *, digests: bool = True) -> Base:
    """Find the model and its device, and check what can be checked before anything long is done.

    `digests`: whether this process reads the digests of the weight files.
    """
    show(Progress(task="fetching the model", done=0, total=1))
    resolved = resolve_model(config, registry)
    show(Progress(task="fetching the model", done=1, total=1))
    check_head(config, registry, resolved.model, resolved.title)
    check_sampled_positions(config, registry, resolved)
    config = pinned(config, resolved)
    unused = check_weights(config, resolved, resolve_lora(config, resolved.model))
    if unused:
        log.info("tensors of the model directory that the model does not use", names=unused)
    device = resolve_device(config)
    recipe = resolve_recipe(config, registry, device)
    notes = [recipe.note] if recipe.note else []
    notes += [*expert_notes(config, resolved, recipe, device), *router_notes(config, resolved.model)]
    keys = weight_format_keys(config, registry, resolved.model) | option_keys(config, registry)
    notes += no_effect_notes(config, registry, used=lambda key: key in keys)
    notes += [
        *sharing.notes(config),
        *_lora_notes(config),
        *_init_notes(config, recipe, resolve_weight_format(config, registry, resolved.model)),
    ]
    notes += weight_format_notes(config, registry, resolved, device)
    left = unused_note(unused, other_head=resolved.model.other_head, carried=resolved.model.carried)
    notes += [n for n in (left, *resolved.notes) if n]
    contents = None
    if resolved.weights is not None and digests:
        # In the background: a run that resumes nothing needs the digests only for its first checkpoint.
        contents = Contents(resolved.weights.files, digest_cache(config.data_cache_dir))
    return Base(
        config=config,
        resolved=resolved,
        device=device,
        contents=contents,
        flat_defaults=flat_defaults(registry),
        notes=tuple(notes),
    )


def check_sampled_positions(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> None:
    """Raise `ConfigError` if a task samples from a model whose training computes other angles than sampling does."""
    fixed = resolved.model.fixed_positions
    if task_spec(config, registry).online is None or config.sequence_len <= fixed:
        return
    message = (
        f"is {config.sequence_len:,}, and {resolved.title} has RoPE whose angles change when a text grows "
        f"beyond {int(fixed):,} tokens. A token is sampled with the angles of the text before it and trained with "
        f"those of the whole text, so the sampled and the trained model would differ."
    )
    fix = f"sequence_len: {int(fixed)}" + (", or another rope_scaling" if config.rope_scaling is not None else "")
    raise ConfigError([Problem(key="sequence_len", message=message, fix=fix)])


def checkpoint_to_resume(
    checkpoints: CheckpointDir, base: Base, identity: Mapping[str, Any], show: Show
) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint that `resume_from_checkpoint` asks for, and what its owner should know.

    Finishes or removes what killed runs left half-written in the directory.
    Raises `UserError` where there are checkpoints and none can be used, or where it does not fit the run.
    """
    config = base.config
    asked = config.resume_from_checkpoint
    if asked is False:
        return None, []
    notes: list[str] = []
    show(Progress(task="verifying the checkpoint", done=0, total=1))
    if asked is True:
        checkpoint = checkpoints.latest_good()
        notes += checkpoints.skipped
        for reason in checkpoints.skipped:  # Monitors that show no notes may be the only ones.
            log.warning(reason)
    else:
        beside = checkpoints.root / asked
        checkpoint = CheckpointDir.load(beside if beside.is_dir() and not Path(asked).is_dir() else Path(asked))
    show(Progress(task="verifying the checkpoint", done=1, total=1))
    if checkpoint is None:
        return None, notes
    check_commit(checkpoint.state, identity["base_commit"], path=checkpoint.path)
    notes += check_compatible(checkpoint.state, identity, path=checkpoint.path)
    note = check_contents(checkpoint.state, base.files(show), frozen=config.lora, path=checkpoint.path)
    changed = changes_note(checkpoint.state, config, path=checkpoint.path, flat=base.flat_defaults)
    notes += [n for n in (note, changed) if n]
    had = checkpoint.state.get("torch")
    if had != torch.__version__:
        notes.append(
            f"torch was version {had} when the checkpoint was saved and is {torch.__version__} now: "
            f"the run continues, but not bit for bit as it would have."
        )
    return checkpoint, notes


def prepare_material(
    base: Base, registry: Registry, checkpoint: Checkpoint | None, show: Show, surroundings: Surroundings
) -> Material:
    """Tokenise and pack the data, or map the cached result; the steps continue from the checkpoint."""
    config, model = base.config, base.resolved.model
    show(Progress(task="loading the tokenizer", done=0, total=1))
    tokenizer, of_tokenizer = tokenizer_of_run(
        config, vocab_size=model.vocab_size, pretrained=base.resolved.weights is not None
    )
    show(Progress(task="loading the tokenizer", done=1, total=1))
    spec = task_spec(config, registry)
    data, longest, notes = None, config.sequence_len, [*of_tokenizer]
    if checkpoint is not None:
        clock.resume(checkpoint.state.get("loader", {}))
    if spec.needs_data:
        data = prepare(
            config,
            tokenizer,
            registry.all("dataset"),
            trains_prompts=spec.trains_prompts,
            group=spec.group,
            progress=show,
        )
        longest = max(rows.longest for rows in (data.train, data.eval) if rows is not None)
        notes += [
            *data.report.notes,
            data.report.summary(),
            *data.report.warnings,
            *suspicious_examples(data, tokenizer),
        ]
    check_covers(model.positions, longest)
    if spec.online is not None:
        task = online_task(config, registry, base.resolved, tokenizer, data, surroundings)
    else:
        assert data is not None
        # A step has the same rows however many ranks share it.
        task = spec.task_of(on_one_gpu(config), data)
    if isinstance(task, PreparingTask):
        task.prepare(PrepareContext(config=config, tokenizer=tokenizer, registry=registry, show=show))
        give_back()
    if config.load_best and task.evaluation() is None and evaluator_of(task) is None:
        message = "there is no held-out data to tell which step is best."
        raise ConfigError([Problem(key="load_best", message=message, fix="validation_split_ratio=0.1")])
    steps = task.steps()
    check_end(config, steps)
    if checkpoint is not None:
        steps.load_state(checkpoint.state.get("loader", {}))
    return Material(
        tokenizer=tokenizer,
        data=data,
        task=task,
        sample=task.sample(),
        steps=steps,
        evaluation=task.evaluation(),
        longest=longest,
        notes=tuple(notes),
    )


def measured_rate(base: Base, show: Show) -> float | None:
    """FLOP/s of a large product on the device, for the speed of light; None if the device has too little memory.

    It is measured before the model is loaded, and is not part of the run's peak memory.
    """
    device = base.device
    show(Progress(task="measuring the device's rate", done=0, total=1))
    rate = None
    try:
        rate = gemm_flops_per_second(device, resolve_dtype(base.config, device))
    except torch.OutOfMemoryError as error:
        log.info("no speed of light: the device has no room to measure its rate", error=repr(error))
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    show(Progress(task="measuring the device's rate", done=1, total=1))
    return rate


def with_adjusted_epochs(config: RunConfig, *, parameters: int, tokens: int) -> tuple[RunConfig, str]:
    """The configuration with the epochs that give the model's token budget at `tokens` per epoch, and a note about
    it.
    """
    epochs = adjusted_epochs(parameters, tokens)
    note = (
        f"epoch_adjustment: num_epochs is {significant(epochs, 4)} instead of {significant(config.num_epochs, 4)}, for "
        f"{token_budget(parameters):,} tokens at {tokens:,} an epoch."
    )
    return dataclasses.replace(config, num_epochs=epochs), note


def resumed_note(checkpoint: Checkpoint, total: int) -> str:
    """A sentence on the step from which a run of `total` steps resumes."""
    if checkpoint.step < total:
        return f"Resumed from {checkpoint.path} at step {checkpoint.step} of {total}."
    return (
        f"Nothing is left to train: {checkpoint.path} is at step {checkpoint.step} and the run has {total}; "
        f"its result is exported again. To train on, raise max_steps or num_epochs; "
        f"to start anew, set resume_from_checkpoint=false."
    )
