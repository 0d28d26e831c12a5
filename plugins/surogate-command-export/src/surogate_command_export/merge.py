"""`surogate merge`: folds an adapter into its base on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import CardFacts, CheckpointDir, MachineError, ModelDir, UserError, atomic, dsl, locate
from surogate_core.service.data import load_tokenizer
from surogate_core.service.files import (
    TIED,
    LoraAdapter,
    TokenizerFiles,
    Whole,
    check_place,
    config_overrides,
    contents_of,
    digest_cache,
    export_full,
    exported_facts,
    generation_config_in,
    generation_of,
    lora_files,
    rejoined,
    split_revision,
    text_part,
)
from surogate_core.service.setup import (
    later_checkpoint,
    named_base,
    open_trained,
    own_base,
    read_head_of,
    record_in,
    recorded,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugin import bundles
    from surogate_core.service.model import Fused


PARTS = ("text", "all")
"""What is written of a base of several parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of `merge`."""

    used: Path
    """The directory that the adapter was read from."""
    base: str
    """The base that the adapter was folded into."""
    weights: int
    """Number of changed weights."""
    warnings: tuple[str, ...]


def merge(
    base: str | None,
    trained: Path,
    output: Path,
    *,
    parts: str = "text",
    families: Callable[[], Mapping[str, bundles.ModelFamily]] = dict,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Merged:
    """Write `base` with the adapter of `trained` folded in as a Hugging Face directory.

    `base`: None is the model that the adapter was trained on. `parts`: of a base of several parts, "text" writes the
    language model alone and "all" the other parts too, as they are.

    Tensors are read, folded and written one by one, in the base's dtypes; a former export at `output` stays until the
    new one is complete. A hub id without a revision is read at the commit that the adapter was trained on, if known.
    `families`: the installed ones; called only if experts are in one tensor, in the base or in the adapter, or if the
    base is tied and its embedding has an unusual name. `progress` receives the bytes done and in total. Raises
    `UserError` or `MachineError`, if possible before anything is written.
    """
    if parts not in PARTS:
        raise UserError(f"--parts: {parts} is not known. Fix: {' or '.join(PARTS)}")
    check_place(output)
    stack, used = open_trained(trained)
    top = stack[-1]
    _refuse_scores(top, used)
    base = base or own_base(top, used)
    repo, revision = named_base(base)
    if revision is None and top.base_model == repo and not Path(base).expanduser().is_dir():
        revision = top.base_commit
    files = ModelDir.open(locate(repo, revision=revision, key="--base-model"))
    found, of_text = text_part(files, families, base)
    model, of_head = read_head_of(found, families, base)
    if fused := _fused_experts(model, stack, families):
        model = model.with_experts(fused)
        stack = [adapter.with_experts(fused, key="RUN") for adapter in stack]
    whole = Whole.of(files, model) if parts == "all" and of_text is not None else None
    total = _check(model, stack, used, output, whole)
    config, changed = _trained_config(model, top, used)
    tokenizer = _tokenizer(used, model.path)
    tensors = _read(model, stack, total, progress)
    export_full(
        output,
        tensors if whole is None else whole.tensors(rejoined(tensors, fused)),
        config=config if whole is None else whole.config(config),
        tokenizer=tokenizer or TokenizerFiles.first(used, model.path),
        card=_card(output, repo, model, stack, exported_facts(used), changed),
        fused=fused if whole is None else None,
        beside=() if whole is None else whole.processors,
        # The adapter of a run has one with the token that ends a turn of its chats.
        generation_config=generation_config_in(used)
        or (model.generation_config() if tokenizer is None else generation_of(model, config, tokenizer)),
    )
    modules = {module for adapter in stack for module in adapter.modules}
    notes = (note for note in (of_text if whole is None else None, of_head) if note is not None)
    warnings = (*notes, *merge_warnings(base, model, top, used, trained))
    return Merged(used=used, base=base, weights=len(modules), warnings=warnings)


def _card(
    output: Path,
    repo: str,
    model: ModelDir,
    stack: Sequence[LoraAdapter],
    facts: Mapping[str, Any],
    changed: Mapping[str, Any],
) -> CardFacts:
    """What the card of the merged model says. `facts`: those of the adapter; `changed`: keys unlike the base's."""
    folded_in = {"adapters folded in": len(stack), "rank": ", ".join(str(adapter.rank) for adapter in stack)}
    return CardFacts(
        title=output.resolve().name,
        base_model=repo,
        base_commit=model.commit,
        base_overrides=changed,
        settings={**folded_in, **facts.get("settings", {})},
        figures=facts.get("figures", {}),
        configuration=facts.get("configuration", {}),
    )


def _tokenizer(used: Path, base: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer that an adapter in a checkpoint was trained with, if it is not as the base has it."""
    if record := record_in(used):
        return recorded(load_tokenizer(record["directory"] or str(base)), record)
    return None


def _refuse_scores(top: LoraAdapter, used: Path) -> None:
    """Raise `UserError` for the adapter of a reward model, which has a head that its base lacks."""
    if {f"{top.prefix}{dsl.ScoreHead.weight_name}", dsl.ScoreHead.weight_name} & top.tensors.keys():
        raise UserError(
            f"RUN {used}: is the adapter of a reward model, whose head only its run can write. "
            f"Fix: repeat its command with merge_adapter=true, which trains nothing again and writes the model."
        )


def merge_warnings(base: str, model: ModelDir, top: LoraAdapter, used: Path, trained: Path) -> tuple[str, ...]:
    """Warnings about the adapter of `used`, part of `trained`, on a base that it may not have been trained on."""
    facts = exported_facts(used)
    return (
        *_base_warnings(base, model, top, used),
        *_later_warnings(trained, used, facts),
        *_dtype_warnings(base, model, used, facts),
    )


def _check(model: ModelDir, stack: Sequence[LoraAdapter], used: Path, output: Path, whole: Whole | None) -> int:
    """Raise unless the stack matches the base and the result fits on the disk; returns the bytes to read from the
    language model.
    """
    for path in (model.path, used):
        if path.resolve().is_relative_to(output.resolve()):
            raise UserError(f"--output {output}: would replace {path}, which is read. Fix: choose another place.")
    _check_config(model)
    shapes = {name: model.shape(name) for name in model.names()}
    lora_files.check_merging(stack, shapes, model, tied=bool(model.config.get(TIED)), key="RUN")
    total = sum(map(model.read_bytes, model.names()))
    needed = total if whole is None else total + sum(map(whole.files.read_bytes, whole.others))
    if needed > (free := atomic.free_bytes(output.absolute().parent)):
        need, has = atomic.human_bytes(needed), atomic.human_bytes(free)
        raise MachineError(f"--output {output}: {need} needed, {has} free. Fix: choose a place on another disk.")
    return total


def _base_warnings(base: str, model: ModelDir, top: LoraAdapter, used: Path) -> tuple[str, ...]:
    """Warnings about differences between the merged model and the trained one."""
    if top.base_commit is not None and model.commit is not None and top.base_commit != model.commit:
        name = split_revision(base)[0]
        return (f"{used} was trained on commit {top.base_commit} of {name}, and is folded into {model.commit}.",)
    files = contents_of(model.files, digest_cache(None)) if top.base_files else {}
    if (other := lora_files.another_base(top, base, files)) is not None:
        return (f"{other} It is folded into {base}, so the result may differ from the trained model.",)
    was = top.base_fingerprint
    if was is not None and not model.fingerprint().startswith(was):
        return (f"{used} was trained on a base of other files or another configuration than {base}.",)
    return ()


def _later_warnings(trained: Path, used: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """A warning if a checkpoint of the run was saved after the adapter."""
    steps = facts.get("figures", {}).get("steps")
    later = later_checkpoint(trained, steps) if used == trained / "adapter" else None
    if later is not None:
        yield (f"{used} is of step {steps}, and {later} was saved later. To merge that one: surogate merge {later}")


def _dtype_warnings(base: str, model: ModelDir, used: Path, facts: Mapping[str, Any]) -> Iterator[str]:
    """A warning if the base's weights are not bit-equal to those that the adapter was trained on."""
    if model.scheme is not None:
        yield (
            f"the weights of {base} are quantised ({model.scheme.name}); "
            f"those of the merged model are dequantised to bf16."
        )
    elif (quantised := facts.get("settings", {}).get("weight_format")) is not None:
        yield (
            f"{used} was trained on weights in {quantised}, and is folded into those of {base} as they are. "
            f"merge_adapter=true in the run folds it into the weights that it was trained on."
        )
    elif (start := facts.get("configuration", {}).get("lora_init")) is not None:
        yield (
            f"{used} began with lora_init={start}, from the rounding errors of the recipe, and is folded into the "
            f"unrounded weights of {base}. The merged model is less accurate than the trained one."
        )


def _trained_config(model: ModelDir, top: LoraAdapter, used: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``config.json`` that the adapter was trained with, and its differences to the base's."""
    changed = dict(top.base_overrides)
    if (used / "manifest.json").exists():
        # A checkpoint has the whole configuration, in which another base could differ in any key.
        essential = CheckpointDir.load(used).state.get("essential", {})
        keys = ("rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings")
        trained = {key: essential[f"model.config.{key}"] for key in keys if f"model.config.{key}" in essential}
        changed = config_overrides(model.config, trained)
    config = {**model.config, **changed}
    if model.scheme is not None:
        # The written weights are dequantised.
        del config["quantization_config"]
    return config, changed


def _read(
    model: ModelDir, stack: Sequence[LoraAdapter], total: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    done = 0
    for name in model.names():
        progress(done, total)
        yield name, lora_files.fold(name, model.get(name), stack)
        done += model.read_bytes(name)
    progress(total, total)


def _fused_experts(
    model: ModelDir, stack: Sequence[LoraAdapter], families: Callable[[], Mapping[str, bundles.ModelFamily]]
) -> Mapping[str, Fused]:
    """The tensors of all experts of the base, if an adapter or a quantised base needs them taken apart: only its family
    knows how they are laid out.

    Raises `UserError` if no installed family reads the base.
    """
    fused = next((name for name in model.names() if ".experts." in name and len(model.shape(name)) == 3), None)
    on_experts = any(".experts." in module for adapter in stack for module in adapter.modules)
    together = next((adapter for adapter in stack if adapter.of_all_experts is not None), None)
    if together is None and (fused is None or not (on_experts or model.is_quantised(fused))):
        return {}
    kind = model.config.get("model_type")
    family = next((family for family in families().values() if kind in family.hf_model_types), None)
    if family is not None:
        return family.build(model.config).fused_tensors()
    what = f"{together.source}: its adapters of experts are" if together else f"--base-model {model.path}: {fused} is"
    raise UserError(
        f"{what} one tensor of all experts, and no installed plugin reads model_type {kind!r}. "
        f"Fix: install the plugin of that model family; `surogate plugins list` shows what is there."
    )


def _check_config(model: ModelDir) -> None:
    values: dict[str, Any] = dict(model.config)
    if missing := [key for key in ("model_type", "architectures") if not values.get(key)]:
        raise UserError(f"{model.path / 'config.json'}: {' and '.join(missing)} missing. Fix: use the model's own.")
    if values.get("quantization_config") and model.scheme is None:
        raise UserError(
            f"--base-model {model.path}: its weights are quantised by a method that is not read here. "
            f"Fix: name the unquantised model."
        )
