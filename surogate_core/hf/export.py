"""The result of a run as directories that transformers, PEFT and vLLM load."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core import __version__
from surogate_core.data.text.tokenizer import turn_end_id
from surogate_core.errors import UserError
from surogate_core.files import atomic
from surogate_core.files.foreign import read_json
from surogate_core.files.tensorfile import TensorWriter, nbytes, write_tensors
from surogate_core.hf.card import OVERRIDES, USE, CardFacts, card_facts, overrides_note, write_card
from surogate_core.hf.fused import adapters_joined, rejoined
from surogate_core.hf.lora_files import CONFIG, MARKER, STACKED_ON, WEIGHTS
from surogate_core.hf.text_part import OWN
from surogate_core.hf.tokenizer_files import TokenizerFiles
from surogate_core.masking import masked

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surogate_core.dsl import Model
    from surogate_core.dsl.experts import Fused
    from surogate_core.hf.weights import ModelDir

MOST_RESERVED = 4 * 2**20
"""Most bytes of a shard's header."""
_PREFIX = "base_model.model."
_SIDES = (".lora_A.weight", ".lora_B.weight")
_EXPERT_MODULE = re.compile(r"\.experts\.\d+\.")


def generation_of(
    base: ModelDir | None, config: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The base's ``generation_config.json``, or the token ids of `config`, with the end of a turn among its ends.

    That of a base model lacks the token that ends a turn in the trained chats, so generation would not stop.
    """
    found = base.generation_config() if base else None
    if found is None:
        ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        found = {key: value for key, value in ids.items() if value is not None}
    end = turn_end_id(tokenizer)
    ends = found.get("eos_token_id")
    ends = [] if ends is None else [ends] if isinstance(ends, int) else list(ends)
    if end is not None and end not in ends:
        ends = [*ends, end]
        found["eos_token_id"] = ends if len(ends) > 1 else end
    return found


def export_full(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase | TokenizerFiles | None,
    card: CardFacts,
    generation_config: Mapping[str, Any] | None = None,
    max_shard_bytes: float = 5e9,
    fused: Mapping[str, Fused] | None = None,
    beside: Sequence[Path] = (),
) -> Path:
    """Write a Hugging Face model directory; a former export there is replaced when the new one is whole.

    `tensors`: (Hugging Face name, tensor on any device), each written and freed before the next is read. `config`: the
    mapping of ``config.json``; `model_type` and `architectures` must be in it, `torch_dtype` is set to the tensors'
    most common dtype. `generation_config` defaults to the token ids of `config`. `fused`: `Model.fused_tensors`, of a
    model with experts. `beside`: files that are copied along. Raises `MachineError` (disk full) or `UserError` (not
    writable, or the directory holds something that is not an export).
    """
    assert config.get("model_type")
    assert config.get("architectures")
    with _export_directory(directory, kind="full", card=card) as new:
        dtypes = _write_shards(new, rejoined(tensors, fused or {}), max_shard_bytes)
        values = {key: value for key, value in config.items() if key != "dtype"}
        values["torch_dtype"] = max(dtypes, key=lambda name: dtypes[name])
        _write_json(new / "config.json", values)
        if generation_config is None:
            ids = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
            generation_config = {key: value for key, value in ids.items() if value is not None}
        _write_json(new / "generation_config.json", generation_config)
        _save_tokenizer(tokenizer, new)
        for file in beside:
            shutil.copyfile(file, new / file.name)
        write_card(new, card, library="transformers", notes=[USE] if tokenizer is not None else [])
    return directory


def export_adapter(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    *,
    rank: int,
    alpha: float,
    dropout: float,
    base_model: str | None,
    card: CardFacts,
    tokenizer: PreTrainedTokenizerBase | TokenizerFiles | None = None,
    task_type: str = "CAUSAL_LM",
    stacked_on: Path | None = None,
    generation_config: Mapping[str, Any] | None = None,
    model: Model | None = None,
) -> Path:
    """Write a PEFT adapter directory; a former export there is replaced when the new one is whole.

    `tensors`: (``<module>.lora_A.weight``, [r, in]) and (``<module>.lora_B.weight``, [out, r]), modules by their
    Hugging Face names, and whole matrices (``<module>.weight``). alpha / rank is the scale of every adapter, whatever
    its own r is, and is not folded in. `base_model`: hub id or directory that PEFT is to load the adapter on.
    `stacked_on`: an adapter directory that the base had folded in, which is copied along. `generation_config` is for
    `surogate merge`. `model`: what it belongs to, which says how experts are named. Errors as in
    `export_full`.
    """
    own = dict(tensors)
    ranks = {_in_peft(module, card): rank for module, rank in _ranks(own).items()}
    own, parameters = adapters_joined(own, model.fused_tensors() if model else {})
    named = {_in_peft(name, card): tensor for name, tensor in own.items()}
    whole = {_in_layer(name.rpartition(".")[0]) for name in named if ".lora_" not in name}
    about = {"task_type": task_type, "base_model_name_or_path": base_model, "revision": card.base_commit}
    config = _peft_config(about, dropout, modules_to_save=sorted(whole) or None)
    config |= (
        _peft_parameters(ranks, alpha / rank, parameters)
        if parameters
        else _peft_targets(ranks, alpha / rank, model.expert_names() if model else ())
    )
    with _export_directory(directory, kind="adapter", card=card) as new:
        write_tensors(new / "adapter_model.safetensors", named)
        _write_json(new / "adapter_config.json", config)
        _save_tokenizer(tokenizer, new)
        if generation_config is not None:
            _write_json(new / "generation_config.json", generation_config)
        if stacked_on is not None:
            _copy_stack(stacked_on, new / STACKED_ON)
        notes = ["This is a LoRA adapter in PEFT's format. `pip install peft`, then load it on its base model:"]
        if tokenizer is not None and stacked_on is None and not card.base_overrides:
            notes.append(USE)
        if stacked_on is not None:
            notes.append(f"The base must have the adapter in `{STACKED_ON}/` merged first: `surogate merge` does both.")
        if card.base_overrides:
            _write_json(new / OVERRIDES, card.base_overrides)
            notes.append(overrides_note(card.base_overrides))
        write_card(new, card, library="peft", notes=notes)
    return directory


def _save_tokenizer(tokenizer: PreTrainedTokenizerBase | TokenizerFiles | None, directory: Path) -> None:
    """Write a tokenizer: the files that it was read from, if they are there."""
    if tokenizer is not None:
        files = tokenizer if isinstance(tokenizer, TokenizerFiles) else TokenizerFiles.of(tokenizer)
        (files or tokenizer).save_pretrained(str(directory))


def _in_peft(name: str, card: CardFacts) -> str:
    """A name as PEFT has it."""
    is_placed = card.base_place is not None and name.startswith(OWN)
    return f"{_PREFIX}{card.base_place}{name.removeprefix(OWN)}" if is_placed else _PREFIX + name


def _in_layer(module: str) -> str:
    """A module's name after the number of its layer: ``mlp.gate``."""
    return re.split(r"\.\d+\.", module)[-1].removeprefix(_PREFIX)


def _ranks(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Module → its adapter's rank."""
    ranks = {}
    for name, tensor in tensors.items():
        if name.endswith(_SIDES[0]):
            module, rank = name.removesuffix(_SIDES[0]), tensor.shape[0]
            other = tensors[module + _SIDES[1]].shape[1]
            assert rank == other, f"{module}: A is of rank {rank}, B of rank {other}"
            ranks[module] = rank
    return ranks


def _peft_config(about: Mapping[str, Any], dropout: float, *, modules_to_save: list[str] | None) -> dict[str, Any]:
    """The fields of PEFT's `LoraConfig` but for targets and ranks; `about`: those that say what it belongs to."""
    return {
        "peft_type": "LORA",
        **about,
        "lora_dropout": dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": modules_to_save,
        "use_dora": False,
        "use_rslora": False,
    }


def _peft_targets(ranks: Mapping[str, int], scale: float, expert_names: Collection[str]) -> dict[str, Any]:
    """The fields of a `LoraConfig` that say which modules have an adapter, and of which rank.

    PEFT 0.21 turns adapters of each expert into one of transformers' tensor of all experts. That kind has no dropout,
    not even one that is off. It takes targets with the last name of an expert's projection as experts only, so
    projections of dense layers are named as parameters. It doubles `r` itself for gate and up, so `r` is the rank of
    experts, and other ranks are patterns.
    """
    experts = {module for module in ranks if _EXPERT_MODULE.search(module)}
    last = {module.rpartition(".")[2] for module in experts} | set(expert_names)
    dense = {m for m in ranks if m not in experts and m.rpartition(".")[2] in last}
    rank = next((ranks[m] for m in ranks if m in experts), None) or max(ranks.values())
    patterns = {_pattern(m, parameter=m in dense): other for m, other in ranks.items() if other != rank}
    fields: dict[str, Any] = {
        "r": rank,
        "lora_alpha": _number(scale * rank),
        "target_modules": sorted({m.rpartition(".")[2] for m in ranks if m not in dense}),
    }
    if patterns:
        fields["rank_pattern"] = patterns
        fields["alpha_pattern"] = {pattern: _number(scale * other) for pattern, other in patterns.items()}
    if dense:
        fields["target_parameters"] = sorted(f"{m.removeprefix(_PREFIX)}.weight" for m in dense)
    if dense or experts:
        fields["lora_dropout"] = 0.0
    return fields


def _peft_parameters(ranks: Mapping[str, int], scale: float, parameters: Mapping[str, int]) -> dict[str, Any]:
    """The same for a model with adapters of all experts in one tensor: PEFT targets the weight as a parameter.

    `parameters`: name → rank.
    """
    rank = min(parameters.values())
    others = {_in_layer(m): other for m, other in ranks.items() if not _EXPERT_MODULE.search(m)}
    own = {_in_layer(name): other for name, other in parameters.items()}
    patterns = {re.escape(name): other for name, other in {**others, **own}.items() if other != rank}
    fields: dict[str, Any] = {
        "r": rank,
        "lora_alpha": _number(scale * rank),
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in others}),
        "target_parameters": list(dict.fromkeys(map(_in_layer, parameters))),
    }
    if patterns:
        fields["rank_pattern"] = patterns
        fields["alpha_pattern"] = {name: _number(scale * other) for name, other in patterns.items()}
    return fields


def _pattern(module: str, *, parameter: bool) -> str:
    """The regular expression by which PEFT finds a module's rank; `parameter`: whether it is named as a parameter."""
    if parameter:
        return re.escape(module.removeprefix(_PREFIX)) + r"(\.weight)?"
    return re.escape(module.rpartition(".")[2])


def _number(value: float) -> int | float:
    """An integer where it is one: vLLM and older PEFT expect it."""
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=1e-12) else value


def _copy_stack(source: Path, target: Path) -> None:
    """Copy an adapter and those below it, without what is not needed to fold them."""
    target.mkdir()
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, target / name)
    for name in (OVERRIDES, MARKER):
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)
    if (source / STACKED_ON).is_dir():
        _copy_stack(source / STACKED_ON, target / STACKED_ON)


def exported_facts(directory: Path) -> dict[str, Any]:
    """``settings``, ``figures`` and ``configuration`` of the card of an export; empty for another directory."""
    try:
        values = read_json(directory / MARKER)
    except (OSError, ValueError):
        return {}
    names = ("settings", "figures", "configuration")
    return {name: values[name] for name in names if isinstance(values, dict) and isinstance(values.get(name), dict)}


def check_place(directory: Path) -> None:
    """Raise `UserError` when `directory` holds something that is not an export, which is never overwritten."""
    if (
        directory.exists()
        and not (directory / MARKER).exists()
        and (not directory.is_dir() or any(directory.iterdir()))
    ):
        raise UserError(
            f"{directory}: already there and not an export of Surogate, so it is not overwritten. "
            "Fix: choose another place, or move it away."
        )


@contextmanager
def _export_directory(directory: Path, *, kind: str, card: CardFacts) -> Iterator[Path]:
    """A directory that becomes `directory`; never in place of something that is not an export."""
    check_place(directory)
    fix = "free space, or choose a place on another disk"
    with atomic.replaced_directory(directory, what=f"{kind} export", fix=fix) as new:
        facts = card_facts(card)
        facts["figures"] = {k: v for k, v in card.figures.items() if not isinstance(v, float) or math.isfinite(v)}
        _write_json(new / MARKER, {"surogate": __version__, "kind": kind, "title": masked(card.title), **facts})
        yield new


def _write_shards(directory: Path, tensors: Iterable[tuple[str, Tensor]], max_shard_bytes: float) -> dict[str, int]:
    """Write the tensors as one file or as shards with an index; returns dtype name → elements.

    A shard whose header is full is followed by one with eight times the room, so that the experts of a large model fill
    shards of `max_shard_bytes`.
    """
    shards: list[TensorWriter] = []
    reserved = TensorWriter.RESERVED
    dtypes: dict[str, int] = {}
    try:
        for name, tensor in tensors:
            full = shards and (
                not shards[-1].fits(name, tensor)
                or (shards[-1].entries and shards[-1].data_bytes + nbytes(tensor) > max_shard_bytes)
            )
            if full:
                shards[-1].finish()
                if not shards[-1].has_room(name, tensor):
                    reserved = min(8 * reserved, MOST_RESERVED)
            if full or not shards:
                shards.append(TensorWriter(directory / f"shard-{len(shards) + 1:05d}", reserved=reserved))
            shards[-1].add(name, tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            dtypes[dtype] = dtypes.get(dtype, 0) + tensor.numel()
        assert shards, "a model has tensors"
        shards[-1].finish()
    finally:
        for shard in shards:
            shard.close()
    if len(shards) == 1:
        shards[0].path.rename(directory / "model.safetensors")
        return dtypes
    where: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        shard.path.rename(directory / final)
        assert not where.keys() & shard.entries.keys(), "a tensor appears twice"
        where.update(dict.fromkeys(shard.entries, final))
    total = sum(shard.data_bytes for shard in shards)
    _write_json(
        directory / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
    )
    return dtypes


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    atomic.write_file(path, (json.dumps(value, indent=2) + "\n").encode())
