"""The identity of a run in its checkpoints: the facts that a resumed run must share, and the versions that made it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from surogate_core.bundles.options import essential_values
from surogate_core.config.schema import RunConfig
from surogate_core.setup.assemble import ResolvedModel, weight_format_options, weight_format_spec
from surogate_core.setup.changes import recorded
from surogate_core.setup.task_spec import named_offers, objective_of, task_spec

if TYPE_CHECKING:
    from surogate_core.plugins.registry import Registry


def identity_of(config: RunConfig, registry: Registry, resolved: ResolvedModel) -> dict[str, Any]:
    """The part of a checkpoint's state that identifies its run, as JSON values.

    ``essential`` must be equal for a run to resume; `check_compatible` reports differences in the rest.
    """
    weight_format, task = weight_format_spec(config, registry, resolved.model), task_spec(config, registry)
    essential = {
        "model": resolved.fingerprint,
        **{f"model.config.{key}": value for key, value in resolved.model.config.items()},
        "objective": objective_of(config, registry).name,
        "optimizer": config.optimizer.name,
        "recipe": config.recipe.name,
        "lora": config.lora,
    }
    if config.master_dtype == "bf16":
        essential["master_dtype"] = config.master_dtype
    essential |= essential_values(config.recipe.options)
    for offer in named_offers(config, registry):
        essential |= essential_values(offer.options_of(config))
    if weight_format is not None:
        essential["weight_format"] = weight_format.name
        essential |= essential_values(weight_format_options(config, weight_format))
    if config.lora:
        essential["lora_rank"] = config.lora_rank
        essential["lora_alpha"] = config.lora_alpha
        essential["lora_target_modules"] = sorted(config.lora_target_modules)
        if config.lora_expert_rank is not None:
            essential["lora_expert_rank"] = config.lora_expert_rank
        if config.train_router:
            essential["train_router"] = True
    made_with: dict[str, Any] = {"base_model": config.model.path, "base_commit": resolved.commit}
    if (given := resolved.adapter) is not None:
        essential["adapter"] = f"{given.mode} {given.fingerprint[:16]}"
        path = str(Path(given.stack[-1].source).resolve())
        made_with["adapter"] = {"path": path, "mode": given.mode, "fingerprint": given.fingerprint}
    # The plugins whose bundles determine the weights; monitors and offloaders may change.
    used = registry.plugins_used(
        [
            ("model", resolved.family.name),
            ("recipe", config.recipe.name),
            ("optimizer", config.optimizer.name),
            ("schedule", config.lr_scheduler_type),
            ("objective", config.objective) if task.objective is None else ("task", task.name),
            *([("quant", weight_format.name)] if weight_format is not None else []),
            *task.chosen(config, registry).items(),
        ]
    )
    versions = {p["name"]: p["version"] for p in used}
    made_with |= {"torch": torch.__version__, "config": recorded(config)}
    return {"essential": essential, "plugins": versions, **made_with}
