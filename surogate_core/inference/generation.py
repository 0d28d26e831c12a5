"""Opens a trained model for generation: weights, adapter, tokenizer, and what its files say about sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_core.bundles import Sampling
from surogate_core.bundles.handed import whole
from surogate_core.config.composing.grammar import encode
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.data.text.tokenizer import has_tokenizer, turn_end_id
from surogate_core.dsl.declare import LoRA, Model
from surogate_core.dsl.experts import expanded
from surogate_core.dsl.heads import LMHead
from surogate_core.dsl.slots import Adapter
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import SurogateError, UserError
from surogate_core.files.paths import is_hub_id
from surogate_core.files.runs import among_runs, config_of_run, run_directory
from surogate_core.generate.weights import Weights
from surogate_core.hf.lora_files import InitialAdapter, LoraAdapter, another_base, check_merging
from surogate_core.hf.weights import generation_config_in
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import (
    DTYPES,
    ResolvedModel,
    assemble,
    check_weights,
    resolve_model,
)
from surogate_core.setup.heads import check_head
from surogate_core.setup.initial_weights import weights_source
from surogate_core.setup.ranks import on_one_gpu
from surogate_core.setup.tokenizer_of_run import record_in, recorded, tokenizer_of_run
from surogate_core.setup.trained import named_base, open_trained, own_base

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles.handed import Plugins


PLACE = ("device", "model_dtype", "data_cache_dir")
"""Keys of the first run for a model that is no run. It is not quantised and multiplies without a recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What a user's word for a model means."""

    overrides: tuple[str, ...]
    """The keys of a configuration that say where it is."""
    base: tuple[str, str | None]
    """(directory or hub id of the model below the adapters, its revision)."""
    stack: tuple[LoraAdapter, ...] = ()
    """The adapters on the base, the lowest first."""
    files: Path | None = None
    """The directory of the adapter, whose tokenizer and ``generation_config.json`` come before the base's."""
    notes: tuple[str, ...] = ()


def with_adapter(word: str, adapter: str) -> Named:
    """The model of a word with the adapter of a PEFT directory, a run or a checkpoint on it."""
    base = named(word)
    if base.stack:
        raise UserError(f"--adapter {adapter}: {word} is an adapter too. Fix: name the base, or leave --adapter out.")
    stack, used = open_trained(run_directory(adapter), key="--adapter")
    other = another_base(replace(stack[-1], base_files={}), word, {})
    notes = (f"{other} It is used on {word}.",) if other else ()
    return replace(base, stack=tuple(stack), files=used, notes=notes)


def on_its_base(command: str) -> str:
    """What to do with an adapter that names no base, for a command that takes ``--adapter``."""
    return command + " BASE --adapter {word}, with its base as BASE"


def named(word: str, *, fix: str = on_its_base("surogate generate")) -> Named:
    """A Hugging Face directory, a run, a checkpoint with an adapter, an adapter, or a hub id.

    `fix`: what to do with an adapter that names no base; ``{word}`` stands for the adapter.
    """
    path = run_directory(word)
    if not path.is_dir():
        if among_runs(path):
            raise UserError(f"{word}: there is no such run. Fix: name the output_dir of a run.")
        if path.exists() or not is_hub_id(word.partition("@")[0]):
            what = "is a file" if path.exists() else "there is no such directory"
            raise UserError(f"{word}: {what}. Fix: name a model's directory, a run, an adapter, or a hub id.")
        return Named(overrides=(f"model={encode(word)}",), base=(word, None))
    for place in (path, path / "model"):
        if (place / "config.json").is_file():
            return Named(overrides=(f"model={encode(str(place))}",), base=(str(place), None), files=place)
    stack, used = open_trained(path, key="model")
    top = stack[-1]
    repo, revision = named_base(own_base(top, used, fix=fix.format(word=word)))
    overrides = [f"model={encode(repo)}"]
    commit = None if Path(repo).expanduser().is_dir() else revision or top.base_commit
    if commit:
        overrides.append(f"model.revision={encode(str(commit))}")
    return Named(overrides=tuple(overrides), base=(repo, commit or None), stack=tuple(stack), files=used)


def rollout_of(registry: Registry, name: str) -> Any:
    """The rollout engine of a name; raises `UserError` if there is none."""
    known = registry.names("rollout")
    if name not in known:
        missing = registry.explain_missing("rollout", name, known)
        raise UserError(
            f"--engine {name}: {missing.message} Fix: {missing.fix or next(iter(sorted(known)), 'install one')}"
        )
    return registry.get("rollout", name)


def quantised_note(word: str, found: Named, prepared: PreparedModel, registry: Registry) -> list[str]:
    """A note if the adapter that a word names was trained on a quantised base and this one is not quantised."""
    file = config_of_run(word)
    if file is None or not found.stack or prepared.config.weight_format is not None:
        return []
    try:
        trained = load_run_config(found.overrides, config_file=file, registry=registry).weight_format
    except SurogateError:
        return []
    if trained is None:
        return []
    return [
        f"The adapter was trained on a base in {trained}, and this base is not quantised. To quantise it, set "
        f"qlora_format={trained}."
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """A model whose weights are not loaded yet."""

    config: RunConfig
    resolved: ResolvedModel
    lora: LoRA
    tokenizer: PreTrainedTokenizerBase
    generation_config: Mapping[str, Any]
    """What its ``generation_config.json`` says; empty if there is none."""
    notes: tuple[str, ...]

    @property
    def model(self) -> Model:
        """The model."""
        return self.resolved.model

    @property
    def context(self) -> float:
        """Tokens of the longest sequence; infinite if the model has no end."""
        return self.model.positions

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a completion."""
        return stop_ids(self.generation_config, self.model.config, self.tokenizer)

    @property
    def sampling(self) -> Sampling:
        """How the model's files say that tokens are chosen; greedily if they do not say to sample."""
        values = self.generation_config
        if not values.get("do_sample"):
            return Sampling(temperature=0.0)
        known = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        given: dict[str, Any] = {
            key: values.get(key) if values.get(key) is not None else default for key, default in known.items()
        }
        try:
            return Sampling(**given)
        except (TypeError, ValueError) as error:
            raise UserError(f"generation_config.json: {error}. Fix: correct it.") from error

    def load(
        self, registry: Plugins, *, progress: Callable[[str, int, int], None] = lambda task, done, total: None
    ) -> Weights:
        """The weights."""
        config, resolved = self.config, self.resolved
        assembly = assemble(config, whole(Registry, registry), resolved, borders=2)
        settings = assembly.settings
        directory = config.offload_dir or config.place
        assembly = replace(
            assembly,
            lora=self.lora,
            settings=replace(settings, max_seqlen=1),
            stores=assembly.offloader.build(config.offload.options, directory, settings.device),
        )
        quantising = " and quantising" if assembly.weight_format is not None else ""
        return Weights.load(
            assembly,
            weights_source(config, whole(Registry, registry), resolved, assembly),
            progress=lambda done, total: progress(f"loading{quantising} weights", done, total),
        )


def stop_ids(
    generation_config: Mapping[str, Any], model_config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The tokens that end a completion: the end tokens of ``generation_config.json`` or, without one, of
    ``config.json``, the tokenizer's end of text, and the token with which the chat template ends a turn.
    """
    found: set[int] = set()
    own = generation_config.get("eos_token_id", model_config.get("eos_token_id"))
    for value in (own, tokenizer.eos_token_id, turn_end_id(tokenizer)):
        found |= set(value if isinstance(value, list | tuple) else [value]) - {None}
    return frozenset(found)


def prepare(found: Named, config: RunConfig, registry: Registry, *, generates: bool = True) -> PreparedModel:
    """The model that `config` describes, with the adapters of `found` on it; no weight is read.

    `generates`: whether it must give logits; otherwise what its task trains. Raises `UserError` for a model, an adapter
    or a tokenizer that cannot be used.
    """
    config = replace(on_one_gpu(config), recompute=False, lmhead_chunks=1)
    resolved = _with_adapters(resolve_model(config, registry), found)
    head = resolved.model.head
    if not generates:
        check_head(config, registry, resolved.model, resolved.title)
    elif head.kind != LMHead.kind:
        raise UserError(
            f"{resolved.title} is {head.model_name}, which gives {head.kind} and writes no text. "
            f"Fix: `surogate eval MODEL datasets=pairs.jsonl` measures it on pairs of answers"
        )
    lora, resolved, notes = _lora(resolved, DTYPES[config.lora_dtype])
    check_weights(config, replace(resolved, adapter=None), lora)
    tokenizer, said = _tokenizer(config, found, resolved)
    if resolved.weights is None:
        said = [*said, f"The weights of {resolved.title} are random. A directory or a hub id has trained ones."]
    said = [*said, *(note for note in (resolved.of_text, resolved.of_head) if note is not None)]
    own = generation_config_in(found.files) if found.files is not None else None
    if own is None and resolved.weights is not None:
        own = resolved.weights.generation_config()
    return PreparedModel(
        config=config,
        resolved=resolved,
        lora=lora,
        tokenizer=tokenizer,
        generation_config=own or {},
        notes=(*found.notes, *said, *notes),
    )


def _with_adapters(resolved: ResolvedModel, found: Named) -> ResolvedModel:
    if not found.stack:
        return resolved
    model = resolved.model
    if changed := found.stack[-1].base_overrides:
        model = resolved.family.build({**model.config, **changed})
    stack = tuple(one.with_experts(model.fused_tensors(), key="model") for one in found.stack)
    specs = distinct(pieces(model, lora=None, max_seqlen=1))
    shapes = {name: shape for s in specs for name, shape in expanded(s.hf_name, s.shape).items()}
    check_merging(stack, shapes, resolved.weights, tied=model.tied, key="model")
    return replace(resolved, model=model, adapter=InitialAdapter(mode="trainable", stack=stack, fingerprint=""))


def _lora(resolved: ResolvedModel, dtype: torch.dtype) -> tuple[LoRA, ResolvedModel, list[str]]:
    """The adapter of the layers. Nothing is trained, so without one it has no targets.

    An adapter that is not on all projections of a name, or whose ranks and scales differ otherwise than between experts
    and the rest, cannot be multiplied beside them; it is folded in.
    """
    top = resolved.adapter.start if resolved.adapter is not None else None
    none = LoRA.untrained(dtype)
    if top is None or resolved.adapter is None:
        return none, resolved, []
    ranks = top.ranks()
    largest = [max((r for m, r in ranks.items() if (".experts." in m) == experts), default=None) for experts in (0, 1)]
    lora = LoRA(
        adapter=Adapter(rank=largest[0] or largest[1] or 1, scale=top.scale, dropout=0.0, dtype=dtype),
        targets=frozenset(module.rsplit(".", 1)[-1] for module in ranks),
        expert_rank=largest[1],
    )
    specs = [s for p in pieces(resolved.model, lora=lora, max_seqlen=1) for s in p.specs if s.role == "adapter"]
    shapes = {name: shape for s in specs for name, shape in expanded(s.hf_name, s.shape).items()}
    suffix = ".lora_A.weight"
    own = {name.removesuffix(suffix): shape[0] for name, shape in shapes.items() if name.endswith(suffix)}
    if own == ranks and not top.scales:
        return lora, resolved, []
    note = (
        f"{top.source} is not on all projections of a name with one rank and scale, so it is folded into the weights."
    )
    return none, replace(resolved, adapter=replace(resolved.adapter, mode="merge")), [note]


def _tokenizer(config: RunConfig, found: Named, resolved: ResolvedModel) -> tuple[PreTrainedTokenizerBase, list[str]]:
    record: Mapping[str, Any] = {}
    if config.tokenizer is None and found.files is not None:
        if has_tokenizer(found.files):
            config = replace(config, tokenizer=str(found.files))
        elif record := record_in(found.files):
            config = replace(config, tokenizer=record["directory"])
    pretrained = resolved.weights is not None
    tokenizer, notes = tokenizer_of_run(config, vocab_size=resolved.model.vocab_size, pretrained=pretrained)
    return recorded(tokenizer, record) if config.template == "auto" else tokenizer, notes


def placed(config: RunConfig) -> list[str]:
    """The overrides that give a model that is no run the place and precision of the first run."""
    values = {key: getattr(config, key) for key in PLACE}
    return [f"{key}={encode(value)}" for key, value in values.items() if value is not None]
