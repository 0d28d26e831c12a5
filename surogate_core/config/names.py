"""Keys and options that do not exist: what other trainers call them, and the nearest name here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from difflib import get_close_matches
from typing import Any

from surogate_core.config import planned, schema
from surogate_core.config.choices import default_groups
from surogate_core.config.schema import ModelSelection, RunConfig, Selection
from surogate_core.errors import PluginError, Problem
from surogate_core.plugins.flat_keys import FlatKey
from surogate_core.plugins.registry import Registry

KEYS = frozenset(schema.KEYS)
"""The flat keys of the core."""
LIST_GROUPS = frozenset({"monitor"})
"""Groups of which several options are chosen at once."""
PEERS_NAMES = {
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "epochs": "num_epochs",
    "num_train_epochs": "num_epochs",
    "steps": "max_steps",
    "batch_size": "per_device_train_batch_size",
    "micro_batch_size": "per_device_train_batch_size",
    "max_seq_length": "sequence_len",
    "cutoff_len": "sequence_len",
    "val_set_size": "validation_split_ratio",
    "val_size": "validation_split_ratio",
    "chat_template": "template",
    "base_model": "model",
    "model_name_or_path": "model",
    "lora_r": "lora_rank",
    "gradient_checkpointing": "recompute",
    "packing": "sample_packing",
    "seed": "train_seed",
}
"""Name of a key in other trainers → its name here."""

PEERS_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "adapter": {"lora": "lora: true", "qlora": "lora: true and qlora_bnb: true", "": "lora: true, or lora: false"},
    "finetuning_type": {"lora": "lora: true", "": "lora: false"},
    "stage": {"sft": "surogate sft, or task: sft", "pt": "surogate pt, or task: pt"},
    "bf16": {"true": "recipe: bf16", "": "torch_dtype: float32"},
    "fp16": {"true": "recipe: bf16; fp16 is not available", "": "remove it"},
    "tf32": {"": "remove it"},
    "load_in_4bit": {"true": "qlora_bnb: true", "": "qlora_bnb: false"},
    "load_in_8bit": {"true": "qlora_fp8: true", "": "qlora_fp8: false"},
}
"""Key of other trainers → its value (``""``: any other) → the settings that do the same here, if it is not one key."""


def flat_keys(registry: Registry) -> Mapping[str, FlatKey]:
    """The flat keys of the installed plugins; raises `PluginError` for one that is a key of the core."""
    found = registry.flat_keys()
    for key in sorted(found.keys() & (KEYS | default_groups().keys())):
        setting = found[key].settings[0]
        raise PluginError(
            f"flat key {key!r} of {setting.kind} {setting.name} ({setting.plugin.label}) is a key of every run. "
            f"Fix: update {setting.plugin.distribution}, or leave it out with plugins.block=[{setting.plugin.name}]."
        )
    return found


def unknown_key(
    key: str, where: str, registry: Registry, known: Iterable[str] | None = None, value: Any = None
) -> Problem:
    """The problem of a key that does not exist: planned, of a missing plugin, or misspelt."""
    root = key.partition(".")[0]
    if known is None and key in PEERS_SETTINGS:
        meant = PEERS_SETTINGS[key]
        fix = meant.get(str(value).lower(), meant.get("", ""))
        return Problem(key=key, message="there is no such key.", where=where, fix=fix)
    if known is None and (missing := registry.explain_missing_key(root)) is not None:
        return Problem(key=key, message=missing.message, where=where, fix=missing.fix)
    if known is None and root in planned.KEYS:
        return Problem(key=key, message=planned.MESSAGE, where=where)
    every = KEYS | flat_keys(registry).keys() | default_groups().keys() | registry.options.keys()
    names = sorted(known if known is not None else every)
    last = key.rpartition(".")[2] if known is not None else root
    near = [PEERS_NAMES[last]] if known is None and last in PEERS_NAMES else []
    near = near or get_close_matches(last, names, n=1, cutoff=0.7)
    message = "there is no such key."
    if not near and known is not None:
        message = f"there is no such key; known here: {', '.join(names) or 'none'}."
    prefix = key[: len(key) - len(last)] if known is not None else ""
    return Problem(key=key, message=message, where=where, fix=f"{prefix}{near[0]}" if near else "")


def unknown_name(group: str, name: str, where: str, registry: Registry, known: Iterable[str], key: str = "") -> Problem:
    """The problem of an option or bundle that does not exist; a broken owner's traceback goes to the log.

    `key` is what the problem is said to be of; without it ``group=name``.
    """
    key = key or f"{group}={name}"
    missing = registry.explain_missing(group, name, known)
    if missing.broken is not None:
        from surogate_core.logs import record_traceback

        path = record_traceback(f"{missing.broken}", missing.broken.error)
        return Problem(
            key=key,
            message=missing.message,
            where=where,
            fix=f"repair or update {missing.broken.plugin.distribution}; traceback: {path}",
        )
    if (group, name) in planned.NAMES and not missing.fix.startswith("pip install"):
        return Problem(key=key, message=planned.MESSAGE, where=where)
    return Problem(key=key, message=missing.message, where=where, fix=missing.fix)


def schema_defaults() -> dict[str, Any]:
    """Every flat key of the core with its default; the nodes of groups come from their options."""
    values: dict[str, Any] = {}
    for field in (f for f in fields(RunConfig) if f.name in KEYS):
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name in LIST_GROUPS or isinstance(default, Selection | ModelSelection):
            continue
        values[field.name] = asdict(default) if is_dataclass(default) and not isinstance(default, type) else default
    return values
