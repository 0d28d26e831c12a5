"""What a run says about the experts of its model."""

from __future__ import annotations

import torch

from surogate_core.bundles import Recipe
from surogate_core.config.schema import RunConfig
from surogate_core.run.assemble import ResolvedModel, resolve_dtype, resolve_lora


def expert_notes(config: RunConfig, resolved: ResolvedModel, recipe: Recipe, device: torch.device) -> list[str]:
    """Notes about experts: those that the recipe leaves as they are, and adapters that PEFT does not load."""
    slots = next(iter(resolved.model.expert_slots().values()), ())
    notes = []
    if slots and not recipe.plain:
        dtype = f"{resolve_dtype(config, device)}".removeprefix("torch.")
        names = ", ".join(slot.module for slot in slots)
        notes.append(f"recipe {config.recipe.name}: experts ({names}) are multiplied in {dtype}.")
    lora = resolve_lora(config, resolved.model)
    for fused in {slot.fused: None for slot in slots if lora is not None and slot.fused is not None}:
        modules = [slot.module for slot in slots if slot.fused == fused]
        adapted = [module for module in modules if lora is not None and lora.for_module(module)]
        if adapted and len(adapted) < len(modules):
            rest = ", ".join(m for m in modules if m not in adapted)
            notes.append(
                f"lora_target_modules has {', '.join(adapted)} without {rest}: PEFT does not load such an adapter, "
                f"because transformers 5 keeps both in one tensor. `surogate merge` does."
            )
    return notes
