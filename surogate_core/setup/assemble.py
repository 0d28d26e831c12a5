"""From a validated config to a model, a tokenizer and an engine; shared by training and the plan."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_core.bundles import (
    ModelFamily,
    Objective,
    OffloaderSpec,
    Recipe,
    RecipeContext,
    RecipeSpec,
    WeightFormat,
    WeightFormatSpec,
)
from surogate_core.bundles.options import flat_marks, options_from_flat
from surogate_core.config import offload, sharing
from surogate_core.config.choices import offloader_of_keys
from surogate_core.config.model_keys import unknown_model_keys
from surogate_core.config.schema import RunConfig
from surogate_core.dsl import Model
from surogate_core.dsl.declare import GROUPS, LoRA, target_names
from surogate_core.dsl.experts import expanded
from surogate_core.dsl.slots import Adapter
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import ConfigError, MachineError, Problem, UserError
from surogate_core.files.hub import commit_of, split_revision
from surogate_core.hf.card import config_overrides
from surogate_core.hf.lora_files import InitialAdapter, another_base, check_merging
from surogate_core.hf.prequantised import Scheme
from surogate_core.hf.text_part import text_config, text_part
from surogate_core.hf.weights import ModelDir, config_in, locate
from surogate_core.kernels.building.native import assumed
from surogate_core.kernels.registry import KernelTable
from surogate_core.setup.heads import built_for, new_names, own_head_note, read_head
from surogate_core.setup.router import router_losses
from surogate_core.setup.shared_experts import check_shares_experts
from surogate_core.setup.task_spec import objective_of, task_spec

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """The model that a config means."""

    title: str
    """Title for the user: the path or id, or family and preset."""
    family: ModelFamily
    model: Model
    weights: ModelDir | None
    """The source of its weights; None for random weights."""
    fingerprint: str
    """The fingerprint of the base in a checkpoint, in addition to the model's configuration."""
    adapter: InitialAdapter | None = None
    """The adapter that the run starts from."""
    commit: str | None = None
    """The commit of config, weights and tokenizer on the hub; None without a repository."""
    base_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the trained base's ``config.json`` that the run changes."""
    of_head: str | None = None
    """A note about a head of its own that config.json denies."""
    of_text: str | None = None
    """A note about a model of several parts, of which it is one."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user."""
        of_head = tuple(note for note in (self.of_text, self.of_head) if note is not None)
        if self.adapter is None:
            return of_head
        theirs = self.adapter.stack[-1]
        if theirs.base_overrides == self.base_overrides:
            return of_head
        return (
            *of_head,
            f"adapter_path {theirs.source} was trained with its base's configuration changed by "
            f"{json.dumps(theirs.base_overrides)}, this run changes it by {json.dumps(self.base_overrides)}: "
            f"set rope_scaling and max_model_len to the adapter's unless that is meant.",
        )


def resolve_device(config: RunConfig) -> torch.device:
    """The compute device, which may be assumed (`kernels.native.assuming`); `MachineError` if a GPU is requested and
    there is none.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if assumed() is not None:
        return torch.device("cuda", 0)
    if not torch.cuda.is_available() and config.device == "auto":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError("device=cuda: torch sees no CUDA GPU here. Fix: set device=auto, or see `surogate doctor`.")
    return torch.device("cuda", torch.cuda.current_device())


def resolve_dtype(config: RunConfig, device: torch.device) -> torch.dtype:
    """Dtype of weights and activations."""
    if config.model_dtype is not None:
        return DTYPES[config.model_dtype]
    if config.torch_dtype != "auto":
        return DTYPES[config.torch_dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def kernel_table(config: RunConfig, registry: Registry, device: torch.device, family: ModelFamily) -> KernelTable:
    """The kernels that a run of the family may use."""
    packs = list(registry.all("kernels").values())
    return KernelTable.build(device, packs, families=(family,), deterministic=config.deterministic)


def resolve_model(config: RunConfig, registry: Registry, *, weights_needed: bool = True) -> ResolvedModel:
    """The family, its model and the source of the weights; nothing large is read.

    Without `weights_needed` only the configuration is required, and the weights of a hub id are not downloaded.
    """
    chosen = config.model
    families: Mapping[str, ModelFamily] = registry.all("model")
    commit = place = of_text = None
    if chosen.path is not None:
        weights_needed = weights_needed and not config.from_scratch
        place = locate(chosen.path, revision=chosen.revision, weights=weights_needed)
        commit = commit_of(place)
        title = chosen.path if commit is None else f"{split_revision(chosen.path)[0]}@{commit[:12]}"
        weights = None
        if weights_needed:
            weights, of_text = text_part(ModelDir.open(place), lambda: families, title)
        given = weights.config if weights else config_in(place)
        values = dict(text_config(given, families) or given)
    elif chosen.revision is not None:
        raise UserError(
            "model.revision: only a hub id has a revision. Fix: set model=OWNER/NAME, or remove model.revision."
        )
    else:
        weights, values = None, _preset(config, families)
        title = f"{chosen.name} {chosen.preset}"
    if chosen.path is not None and not config.from_scratch and chosen.config:
        raise UserError("model.config: a trained model's shape cannot be changed. Fix: set from_scratch=true.")
    if unknown := unknown_model_keys(chosen.config, values, [str(values.get("model_type"))]):
        raise ConfigError(unknown)
    values.update(chosen.config)
    family, task = _family(chosen.name, values, families, title), registry.all("task").get(config.task)
    values, model = built_for(family, values, task)
    if (other := _with_positions(config, model)) != model.config:
        values, model = built_for(family, other, task)
    tied = model.head.tied if model.tied else None
    model, weights = read_head(family, model, weights, None if config.from_scratch else place)
    untied = tied.key if tied is not None and not model.tied else None
    if untied is not None:
        values = {**values, untied: False}
    weights = weights and weights.with_experts(model.fused_tensors())
    fingerprint = f"weights {weights.fingerprint()[:16]}" if weights else f"random, train_seed {config.train_seed}"
    return ResolvedModel(
        title=title,
        family=family,
        model=model,
        weights=weights,
        fingerprint=fingerprint,
        adapter=_adapter(config, title, model),
        commit=commit,
        base_overrides=config_overrides(weights.config, values) if weights else {},
        of_head=own_head_note(title, untied) if untied is not None else None,
        of_text=of_text,
    )


def _preset(config: RunConfig, families: Mapping[str, ModelFamily]) -> dict[str, Any]:
    """The ``config.json`` of the family's preset that the config names."""
    chosen = config.model
    if chosen.name not in families or chosen.preset is None:
        raise UserError(
            "model: neither a `path` nor a family's preset is given. "
            "Fix: set model=DIR_OR_HUB_ID, or an option such as model=qwen3."
        )
    presets = families[chosen.name].presets
    if chosen.preset not in presets:
        raise UserError(f"model.preset: {chosen.name} has no {chosen.preset!r}, only {', '.join(presets)}.")
    return dict(presets[chosen.preset])


def _adapter(config: RunConfig, title: str, model: Model) -> InitialAdapter | None:
    """The adapter that the run begins with."""
    if config.adapter_path is None:
        return None
    if config.model.path is None or config.from_scratch:
        raise UserError(
            f"adapter_path: {title} begins from random weights, and an adapter belongs to trained ones. "
            f"Fix: set model=DIR_OR_HUB_ID, or adapter_path=null."
        )
    return InitialAdapter.open(config.adapter_path, config.adapter_init_mode, model.fused_tensors())


def _with_positions(config: RunConfig, model: Model) -> dict[str, Any]:
    """The ``config.json`` with the positions that the run asks for."""
    chosen = config.model
    if config.rope_scaling is not None or config.max_model_len is not None:
        return model.stretched(config.rope_scaling, config.max_model_len)
    if (chosen.path is None or config.from_scratch) and "max_position_embeddings" not in chosen.config:
        return model.covering(config.sequence_len)
    return model.config


def adapter_notes(config: RunConfig, resolved: ResolvedModel, files: Mapping[str, str]) -> list[str]:
    """Warnings if the adapter that the run starts from was trained on another base.

    `files`: weight file of the base → digest of its data.
    """
    if resolved.adapter is None or config.model.path is None:
        return []
    other = another_base(resolved.adapter.stack[-1], config.model.path, files)
    return [f"adapter_path: {other} Set model to that base, unless another one is meant."] if other else []


def pinned(config: RunConfig, resolved: ResolvedModel) -> RunConfig:
    """The config with a hub id's revision replaced by its current commit."""
    path = config.model.path
    if resolved.commit is None or path is None or Path(path).expanduser().is_dir():
        return config
    return replace(config, model=replace(config.model, path=split_revision(path)[0], revision=resolved.commit))


def check_commit(saved: Mapping[str, Any], commit: str | None, *, path: Path) -> None:
    """Refuse to resume a checkpoint (its state, its `path`) of another commit of the base.

    A branch may move while a run is interrupted, and weights of equal shapes have equal fingerprints.
    """
    was = saved.get("base_commit")
    if was is not None and commit is not None and was != commit:
        raise UserError(
            f"{path}: the base was at commit {was} when the checkpoint was saved, and is at {commit} now. "
            f"Fix: set model.revision={was} to go on, or resume_from_checkpoint=false to start anew."
        )


def _family(name: str, values: Mapping[str, Any], families: Mapping[str, ModelFamily], title: str) -> ModelFamily:
    if name != "auto":
        if name not in families:
            raise UserError(f"model.name: no family {name!r} is installed, only {', '.join(sorted(families))}.")
        return families[name]
    kind = values.get("model_type")
    for family in families.values():
        if kind in family.hf_model_types:
            return family
    known = sorted(t for f in families.values() for t in f.hf_model_types)
    raise UserError(
        f"{title}: its config.json has model_type {kind!r}, and the installed families read {', '.join(known)}. "
        f"Fix: install the plugin of that family; `surogate plugins list` shows what is there."
    )


def resolve_lora(config: RunConfig, model: Model) -> LoRA | None:
    """The adapters to train, or None for all weights.

    Raises `ConfigError` for names that are no projection, and for keys of experts or routers if the model has none.
    """
    if not config.lora:
        return None
    blocks = [block for _, block in model.blocks(0)]
    known = {n for b in blocks for s in b.linear_slots(None) for n in target_names(s.module, s.region, experts=False)}
    known |= {n for b in blocks for s in b.expert_slots(None) for n in target_names(s.module, s.region, experts=True)}
    targets = frozenset(config.lora_target_modules)
    if unknown := sorted(targets - known):
        problem = Problem(
            key="lora_target_modules",
            message=f"{', '.join(unknown)}: no such projection in this model.",
            fix=f"choose from {', '.join(sorted(known, key=lambda name: (name not in GROUPS, name)))}.",
        )
        raise ConfigError([problem])
    if not targets:
        raise ConfigError([Problem(key="lora_target_modules", message="is empty.", fix="set [all], or lora=false.")])
    _check_expert_keys(config, known)
    return LoRA(
        adapter=Adapter(
            rank=config.lora_rank,
            scale=config.lora_alpha / config.lora_rank,
            dropout=config.lora_dropout,
            dtype=DTYPES[config.lora_dtype],
        ),
        targets=targets,
        expert_rank=config.lora_expert_rank,
        train_router=config.train_router,
    )


def _check_expert_keys(config: RunConfig, known: Collection[str]) -> None:
    """Refuse keys of experts on a model without any. `known`: the names that select its projections."""
    if "experts" in known:
        return
    keys = {
        "lora_expert_rank": config.lora_expert_rank is not None,
        "train_router": config.train_router,
        "qlora_offload_experts": config.qlora_offload_experts,
        "qlora_selective_expert_dequant": config.qlora_selective_expert_dequant,
    }
    problems = [
        Problem(key=key, message="is set, and the model has no experts.", fix=f"remove {key}.")
        for key, given in keys.items()
        if given
    ]
    if problems:
        raise ConfigError(problems)


def resolve_recompute(config: RunConfig) -> Recompute:
    """The recompute policy of the config's switches and budget, none of which is open."""
    assert config.recompute != "auto"
    switches = ("att", "ffn", "qkv", "swiglu", "rmsnorm")
    return Recompute(
        block=config.recompute,
        regions=frozenset(s for s in switches if getattr(config, f"recompute_{s}")),
        budget=config.recompute_budget,
    )


def engine_settings(
    config: RunConfig,
    *,
    device: torch.device,
    borders: int,
    columns: tuple[str, ...] = (),
    moves_gradients: bool = False,
    varying: bool = False,
) -> EngineSettings:
    """The engine's settings for micro-batches with this many document borders and these columns.

    `moves_gradients`: whether the offloader keeps gradients off the device. `varying`: whether the task, not the
    configuration, decides how many micro-batches a step has.
    """
    assert config.lmhead_chunks != "auto"
    return EngineSettings(
        device=device,
        dtype=resolve_dtype(config, device),
        adapter_dtype=DTYPES[config.lora_dtype],
        compiler=config.compiler if config.compiler != "auto" else ("inductor" if device.type == "cuda" else "fx"),
        cuda_graphs=config.use_cuda_graphs,
        tokens=sharing.tokens_of_rank(config),
        borders=borders,
        max_seqlen=config.sequence_len,
        head_chunks=config.lmhead_chunks,
        recompute=resolve_recompute(config),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        seed=config.train_seed,
        columns=columns,
        plain_first=config.skip_quant_first_layers,
        plain_last=config.skip_quant_last_layers,
        master_dtype=DTYPES[config.master_dtype or "fp32"],
        update_on_cpu=config.cpu_training,
        axes=sharing.axes(config, moves_gradients=moves_gradients, varying=varying),
    )


def resolve_offloader(config: RunConfig, registry: Registry) -> OffloaderSpec:
    """The offloader, restricted to the kinds that the keys move; without such keys it moves all its kinds.

    Raises `ConfigError` if a GPU would have to run the optimizer step in memory that it cannot address, or if several
    GPUs need whole tensors on the device that it moves.
    """
    offloader: OffloaderSpec = registry.get("offload", config.offload.name)
    kinds = offload.kinds_of(config, offloader)
    stepped = kinds & {"master", "gradients", "optimizer"}
    alone = config.cpu_training and config.gpus == 1
    if stepped and not offloader.addressable and not alone and resolve_device(config).type == "cuda":
        message = f"{offloader.name} keeps {', '.join(sorted(stepped))} in memory that no GPU can address."
        fix = f"offload: {offloader_of_keys()}"
        if config.gpus == 1:
            fix = f"cpu_training: true, or {fix}"
        else:
            message += " Several GPUs write gradients there."
        raise ConfigError([Problem(key="offload", message=message, fix=fix)])
    online = task_spec(config, registry).online is not None
    if wrong := sharing.off_the_device(config, offloader, online=online):
        raise ConfigError(wrong)
    return replace(offloader, kinds=kinds)


def resolve_recipe(config: RunConfig, registry: Registry, device: torch.device) -> Recipe:
    """The recipe, built for the device; `MachineError` if the device cannot run it."""
    spec: RecipeSpec = registry.get("recipe", config.recipe.name)
    dtype = resolve_dtype(config, device)
    context = RecipeContext(device=device, dtype="bf16" if dtype == torch.bfloat16 else "fp32")
    recipe: Recipe = spec.build(config.recipe.options, context)
    return recipe


def weight_format_spec(config: RunConfig, registry: Registry, model: Model) -> WeightFormatSpec | None:
    """The storage format of frozen projections; None if they do not change.

    Without such a key, projections of a quantised checkpoint stay in its format, if a plugin offers it.
    """
    if config.weight_format is not None:
        spec: WeightFormatSpec = registry.get("quant", config.weight_format)
        return spec
    scheme = _scheme(config, model)
    specs: Mapping[str, WeightFormatSpec] = registry.all("quant") if scheme is not None else {}
    return next((spec for spec in specs.values() if scheme is not None and scheme.name in spec.adopts), None)


def weight_format_keys(config: RunConfig, registry: Registry, model: Model) -> frozenset[str]:
    """The flat keys that set the chosen format's options."""
    spec = weight_format_spec(config, registry, model)
    return frozenset() if spec is None else frozenset(mark.key for mark in flat_marks(spec.options).values())


def weight_format_options(config: RunConfig, spec: WeightFormatSpec) -> Any:
    """The format's options, which only flat keys set."""
    return options_from_flat(spec.options, config.flat)


def resolve_weight_format(config: RunConfig, registry: Registry, model: Model) -> WeightFormat | None:
    """The storage format of frozen projections, with its options; None if they do not change."""
    spec = weight_format_spec(config, registry, model)
    return None if spec is None else spec.build(weight_format_options(config, spec))


def weights_as_they_are(config: RunConfig, model: Model) -> Callable[[str], bool]:
    """HF name of a weight of a quantised checkpoint → whether it is not quantised."""
    scheme = _scheme(config, model)
    return lambda name: scheme is not None and scheme.skips(name.removesuffix(".weight"))


def _scheme(config: RunConfig, model: Model) -> Scheme | None:
    """How the projections of the model's files are quantised."""
    return None if config.from_scratch or config.model.path is None else Scheme.of(model.config)


def weight_format_notes(
    config: RunConfig, registry: Registry, resolved: ResolvedModel, device: torch.device
) -> list[str]:
    """Notes about the storage of frozen projections."""
    weight_format = resolve_weight_format(config, registry, resolved.model)
    dtype = f"{resolve_dtype(config, device)}".removeprefix("torch.")
    scheme = resolved.weights.scheme if resolved.weights is not None else None
    notes: list[str | None] = []
    if scheme is not None:
        kept = f"dequantised to {dtype}"
        if weight_format is not None:
            adopts = adopts_checkpoint(config, registry, resolved, weight_format)
            kept = "kept as they are" if adopts else f"quantised again to {weight_format.name}"
        notes.append(f"The projections of {resolved.title} are quantised ({scheme.name}); they are {kept}.")
    if weight_format is None:
        return [note for note in notes if note]
    notes += [
        f"QLoRA: frozen projections are kept in {weight_format.name} and unpacked to {dtype} before each use, one "
        f"layer's at a time.",
        weight_format.note(device),
    ]
    if config.merge_adapter:
        notes.append(
            f"merge_adapter: the base of the merged model is what {weight_format.name} made of it, unpacked to {dtype}."
        )
    return [note for note in notes if note]


def assemble(
    config: RunConfig,
    registry: Registry,
    resolved: ResolvedModel,
    *,
    borders: int,
    columns: tuple[str, ...] | None = None,
) -> Assembly:
    """The parts of the run, without its stores.

    `borders`, `columns`: document borders and names of the columns of every micro-batch; None: those that the
    objective reads. Raises `UserError` if the objective reads a column that there is not.
    """
    device, objective = resolve_device(config), objective_of(config, registry)
    columns = tuple(sorted(objective.columns)) if columns is None else columns
    check_columns(objective, columns, task=config.task)
    check_shares_rows(config, resolved.model, objective)
    offloader = resolve_offloader(config, registry)
    gradients = offloader.moves("gradients")
    settings = engine_settings(
        config,
        device=device,
        borders=borders,
        columns=columns,
        moves_gradients=gradients,
        varying=task_spec(config, registry).online is not None,
    )
    recipe = resolve_recipe(config, registry, device)
    check_shares_experts(config, resolved.model, recipe)
    return Assembly(
        model=resolved.model,
        settings=replace(settings, router_losses=router_losses(config, resolved.model)),
        kernels=kernel_table(config, registry, device, resolved.family),
        recipe=recipe,
        objective=objective,
        optimizer=registry.get("optimizer", config.optimizer.name),
        optimizer_options=config.optimizer.options,
        offloader=offloader,
        lora=resolve_lora(config, resolved.model),
        weight_format=resolve_weight_format(config, registry, resolved.model),
        keeps_as_it_is=weights_as_they_are(config, resolved.model),
        offload_experts=config.qlora_offload_experts,
    )


def check_shares_rows(config: RunConfig, model: Model, objective: Objective) -> None:
    """Raise `ConfigError` if several GPUs are to share rows and the model or the objective needs whole ones."""
    size = config.context_parallel_size
    if size == 1:
        return
    message = ""
    if any(block.expert_slots(None) for _, block in model.blocks(0)):
        message = f"is {size}, and GPUs that share a row cannot train a model with experts."
    elif objective.sequence_loss is not None or objective.sequence_figures is not None:
        message = f"is {size}, and objective {objective.name} needs whole documents on one GPU."
    if message:
        fix = "context_parallel_size: 1"
        raise ConfigError([Problem(key="context_parallel_size", message=message, fix=fix)])


def check_columns(objective: Objective, columns: Collection[str], *, task: str) -> None:
    """Raise `UserError` if the objective reads a column that the task's micro-batches do not have."""
    if missing := [name for name in objective.columns if name not in columns]:
        has = f"only {', '.join(columns)}" if columns else "none"
        raise UserError(
            f"objective={objective.name} reads the columns {', '.join(missing)}, and micro-batches of task {task} have "
            f"{has}. Fix: choose a task that gives them, or objective=cross_entropy."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU or the host ran out of memory; the CPU allocator raises a plain `RuntimeError`."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def check_weights(config: RunConfig, resolved: ResolvedModel, lora: LoRA | None) -> tuple[str, ...]:
    """Compare the headers of the weights with the model; returns the names that it does not use.

    Raises `UserError` that lists every tensor that is missing or of another shape.
    """
    if resolved.weights is None:
        return ()
    if resolved.weights.scheme is not None and lora is None:
        problem = Problem(
            key="lora",
            message=f"is false, and the weights of {resolved.title} are quantised ({resolved.weights.scheme.name}).",
            fix="lora: true, or name the model that these weights were quantised from",
        )
        raise ConfigError([problem])
    specs = tuple(distinct(pieces(resolved.model, lora=lora, max_seqlen=config.sequence_len)))
    shapes = {n: shape for s in specs if s.role != "adapter" for n, shape in expanded(s.hf_name, s.shape).items()}
    for name in new_names(resolved.model, resolved.weights):
        shapes.pop(name, None)
    unused = resolved.weights.check(shapes)
    if resolved.adapter is not None:
        check_merging(resolved.adapter.stack, shapes, resolved.weights, tied=resolved.model.tied, key="adapter_path")
        if lora is not None:
            start = resolved.adapter.start
            own = resolved.model.head.own(resolved.model)
            lacks = {name for name in own if start is None or not start.replaces(name)}
            trained = [s for s in specs if s.trainable and s.hf_name not in lacks]
            resolved.adapter.check_continues(
                {n: shape for s in trained for n, shape in expanded(s.hf_name, s.shape).items()},
                rank=lora.adapter.rank,
                alpha=config.lora_alpha,
            )
    return unused


def adopts_checkpoint(
    config: RunConfig, registry: Registry, resolved: ResolvedModel, weight_format: WeightFormat
) -> bool:
    """Whether the format adopts the tensors of the run's quantised checkpoint unchanged."""
    spec = weight_format_spec(config, registry, resolved.model)
    scheme = resolved.weights.scheme if resolved.weights is not None else None
    if spec is None or scheme is None or scheme.name not in spec.adopts:
        return False
    return weight_format.adopts(scheme.block)
