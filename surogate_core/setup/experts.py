"""What a run says about the experts of its model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from surogate_core.bundles import Recipe
from surogate_core.config.schema import RunConfig
from surogate_core.dsl import Model
from surogate_core.dsl.declare import LoRA
from surogate_core.dsl.experts import ExpertSlot
from surogate_core.dsl.slots import LinearSlot
from surogate_core.engine.engine import Engine
from surogate_core.setup.assemble import ResolvedModel, resolve_dtype, resolve_lora


def expert_notes(config: RunConfig, resolved: ResolvedModel, recipe: Recipe, device: torch.device) -> list[str]:
    """Notes about experts: those that the recipe leaves as they are, and which projections have adapters."""
    slots = next(iter(resolved.model.expert_slots().values()), ())
    notes = []
    if slots and recipe.grouped is not None:
        notes += [recipe.note_of_experts] if recipe.note_of_experts else []
    elif slots and not recipe.plain:
        dtype = f"{resolve_dtype(config, device)}".removeprefix("torch.")
        names = ", ".join(slot.module for slot in slots)
        notes.append(f"recipe {config.recipe.name}: experts ({names}) are multiplied in {dtype}.")
    if config.qlora_selective_expert_dequant:
        notes.append(
            "qlora_selective_expert_dequant: no effect. The tokens of a training step reach nearly every expert, and "
            "all experts of a layer are unpacked before it runs."
        )
    lora = resolve_lora(config, resolved.model)
    if slots and lora is not None:
        notes += [adapted_note(resolved.model, lora), *_peft_notes(slots, lora)]
    return notes


def product_notes(kernels: Mapping[tuple[str, str], str], model: Model, device: torch.device) -> list[str]:
    """A note where a GPU multiplies experts without a kernel. `kernels`: (op, dtype) → name of the chosen one."""
    slots = next(iter(model.expert_slots().values()), ())
    plain = [dtype for (op, dtype), name in kernels.items() if op == "grouped_product" and name == "reference"]
    if not slots or not plain or device.type != "cuda":
        return []
    count, dtypes = slots[0].count, ", ".join(plain)
    return [
        f"experts: no kernel takes all their products in {dtypes} here, so that each of {count} experts multiplies all "
        f"rows. Kernels take bfloat16, on sm_80 and newer with Triton (docs/kernels.md)."
    ]


def adapted_note(model: Model, lora: LoRA) -> str:
    """Which projections of a model with experts have adapters, and whether routers are trained."""
    blocks = [block for _, block in model.blocks(0)]
    parts = []
    if adapted := _by_rank(slot for block in blocks for slot in block.linear_slots(lora)):
        parts.append(adapted)
    layers = [slots for block in blocks if (slots := block.expert_slots(lora))]
    of_experts = _by_rank(slot for slots in layers for slot in slots)
    if of_experts:
        parts.append(f"{of_experts} of {layers[0][0].count} experts in each of {len(layers)} layers")
    routers = "trained as whole matrices" if lora.train_router else "frozen"
    frozen = f"routers are {routers}" if of_experts else f"experts have none; routers are {routers}"
    return f"LoRA: adapters on {' and '.join(parts)}; {frozen}."


def _by_rank(slots: Iterable[LinearSlot | ExpertSlot]) -> str:
    """The names of the adapted slots with their rank: ``q_proj, v_proj (rank 8)``."""
    ranks = {s.module.rpartition(".")[2]: s.adapter.rank for s in slots if s.adapter is not None}
    return f"{', '.join(ranks)} (rank {next(iter(ranks.values()))})" if ranks else ""


def _peft_notes(slots: Sequence[ExpertSlot], lora: LoRA) -> list[str]:
    """Notes about adapters that PEFT or a server does not load."""
    notes = []
    for fused in {slot.fused: None for slot in slots if slot.fused is not None}:
        of_one = [slot for slot in slots if slot.fused == fused]
        adapted = [slot.module for slot in of_one if lora.of(slot.module, slot.region, experts=True)]
        if adapted and len(adapted) < len(of_one):
            rest = ", ".join(slot.module for slot in of_one if slot.module not in adapted)
            notes.append(
                f"lora_target_modules has {', '.join(adapted)} without {rest}: PEFT does not load such an adapter, "
                f"because transformers 5 keeps both in one tensor. `surogate merge` does."
            )
    if lora.train_router:
        notes.append(
            "train_router: the adapter has whole routers (`modules_to_save`), which PEFT loads and vLLM refuses. "
            "To serve it, merge it: merge_adapter=true, or `surogate merge`."
        )
    return notes


def idle_parameters(engine: Engine) -> int:
    """Parameters that a token does not use: weights and adapters of the experts to which it does not go."""
    lora = engine.assembly.lora
    slots = [slot for _, block in engine.model.blocks(0) for slot in block.expert_slots(lora)]
    ranks = (slot.adapter.rank if slot.adapter else 0 for slot in slots)
    adapters = (rank * (s.inputs + s.outputs) * (s.count - s.choices) for s, rank in zip(slots, ranks, strict=True))
    return sum(slot.unused for slot in slots) + sum(adapters)
