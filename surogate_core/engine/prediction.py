"""What a run will hold, where, in bytes: counted from shapes and traced graphs, nothing allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from surogate_core.bundles import Objective, Offloader, OptimizerSpec, Recipe
from surogate_core.dsl.declare import LoRA, Model
from surogate_core.dsl.trace import Signature
from surogate_core.engine.engine import EngineSettings
from surogate_core.engine.parameters import Parameters, pieces
from surogate_core.engine.programs import ProgramBuilder, plain_layers, plan_joins, plan_packing, plan_panels
from surogate_core.engine.schedule import Action, training_schedule
from surogate_core.engine.stores import DeviceStore
from surogate_core.kernels.registry import KernelTable

LOGIT_COPIES = {"inductor": 2, "fx": 3}
"""Tensors of a logits chunk's size that exist at once in the head: logits and their gradient, and in
the traced graph as it is a temporary. With them the measured peaks on an H200 are met: 8.45 GiB
predicted and 8.53 measured for Qwen3-0.6B, 37.3 and 37.5 for 8B (LoRA, 4096 tokens, no recompute)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One kind of tensor in the plan."""

    kind: str
    place: str
    """device, host, disk or sharded."""
    nbytes: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run's tensors and its schedule."""

    held: tuple[Held, ...]
    schedule: tuple[Action, ...]
    parameters: int
    trainable_parameters: int
    kernels: dict[tuple[str, str], str]
    """(op, dtype) → kernel."""

    def total(self, place: str) -> int:
        """Bytes in a place."""
        return sum(h.nbytes for h in self.held if h.place == place)


def predict(
    model: Model,
    *,
    settings: EngineSettings,
    recipe: Recipe,
    recipe_options: Any,
    objective: Objective,
    optimizer: OptimizerSpec,
    offloader: Offloader,
    kernels: KernelTable,
    lora: LoRA | None,
) -> Prediction:
    """Count the tensors of a run with these settings. The layers are traced, not compiled."""
    found = pieces(model, lora=lora, max_seqlen=settings.max_seqlen)
    positions = torch.zeros(settings.tokens, dtype=torch.int32, device="meta")
    tables = {
        **model.tables(positions, settings.dtype),
        "cu_seqlens": torch.zeros(settings.borders, dtype=torch.int32, device="meta"),
    }
    signatures = {n: Signature(tuple(t.shape), t.dtype, settings.device) for n, t in tables.items()}
    plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
    slots = sum(len(piece.slots) for piece in found)
    state = recipe.state(slots, torch.device("meta"), recipe_options) if recipe.state is not None else None
    panels = plan_panels(
        found,
        recipe=recipe,
        recipe_options=recipe_options,
        plain=plain,
        offloader=offloader,
        kernels=kernels,
        dtype=settings.dtype,
        tokens=settings.tokens,
        width=model.width,
        tables=signatures,
    )
    parameters = Parameters(
        found,
        panels=panels,
        packed=plan_packing(
            found,
            recipe=recipe,
            recipe_options=recipe_options,
            plain=plain,
            panels=panels,
            dtype=settings.dtype,
        ),
        joins=plan_joins(
            found,
            recipe=recipe,
            recipe_options=recipe_options,
            offloader=offloader,
            compiler=settings.compiler,
            dtype=settings.dtype,
            tokens=settings.tokens,
            width=model.width,
            tables=signatures,
        ),
        weights=DeviceStore("weights"),
        device=torch.device("meta"),
        dtype=settings.dtype,
        adapter_dtype=settings.adapter_dtype,
        weight_decay=settings.weight_decay,
        master_dtype=settings.master_dtype,
        seed=torch.zeros((), dtype=torch.int32, device="meta"),
    )
    builder = ProgramBuilder(
        model=model,
        parameters=parameters,
        recipe=recipe,
        recipe_options=recipe_options,
        plain=plain,
        columns=0 if state is None else state.rows.shape[1],
        objective=objective,
        kernels=kernels,
        device=settings.device,
        tokens=settings.tokens,
        tables=signatures,
        head_chunks=settings.head_chunks,
        weighted=settings.weighted,
        recompute=settings.recompute,
        compiler=settings.compiler,
    )
    layers = found[1:-1]
    distinct = {builder.signature(piece): piece for piece in layers}
    per_layer = {key: sum(s.nbytes for s in builder.layer_residuals(piece)) for key, piece in distinct.items()}
    residuals = sum(per_layer[builder.signature(piece)] for piece in layers)

    specs = parameters.specs.values()
    frozen = sum(
        math.prod(parameters.compute_shape(s)) * parameters.compute_dtype(s).itemsize for s in specs if not s.trainable
    )
    total, trainable = parameters.counts()
    flat = sum(g.master.numel() for g in parameters.groups)
    copies = sum(copy.nbytes for copy, _ in parameters.copies)
    for piece in layers:
        for panel, tensor in parameters.panel_tensors(piece):
            held_weights = panel.shape.width * panel.shape.inputs if panel.shape.frozen else 0
            copies += tensor.nbytes - held_weights * settings.dtype.itemsize
    chunk = max(c.stop - c.start for c in builder.chunks())
    logits = chunk * model.vocab_size * settings.dtype.itemsize * LOGIT_COPIES[settings.compiler]
    moved = offloader.place

    def place(kind: str) -> str:
        return moved if kind in offloader.kinds else "device"

    width = f"{settings.dtype}".removeprefix("torch.")
    held = [
        Held(
            kind="weights",
            place=place("weights"),
            nbytes=frozen,
            detail=f"frozen, {width}" + (f", {recipe.name} in the layers" if parameters.packed else ""),
        ),
        Held(kind="compute copies", place="device", nbytes=copies, detail=f"of trained weights, {width}"),
        Held(
            kind="masters",
            place=place("master"),
            nbytes=flat * settings.master_dtype.itemsize,
            detail=f"trained, {settings.master_dtype}".replace("torch.", ""),
        ),
        Held(kind="gradients", place=place("gradients"), nbytes=flat * 4, detail="accumulated, float32"),
        Held(
            kind="optimizer state",
            place=place("optimizer"),
            nbytes=int(flat * optimizer.state_bytes_per_parameter),
            detail=f"{optimizer.name}, {optimizer.state_bytes_per_parameter:g} bytes a parameter",
        ),
        Held(
            kind="recipe state",
            place="device",
            nbytes=sum(t.nbytes for t in state.state().values()) if state else 0,
            detail=f"{recipe.name}, {slots} projections",
        ),
        Held(
            kind="residuals",
            place=place("residuals"),
            nbytes=residuals,
            detail=f"{len(layers)} layers, {'inputs only' if settings.recompute.block else 'kept for the backward'}",
        ),
        Held(kind="logits", place="device", nbytes=logits, detail=f"{chunk} of {settings.tokens} tokens at a time"),
        Held(
            kind="tables and inputs",
            place="device",
            nbytes=sum(s.nbytes for s in signatures.values()) + settings.tokens * 20,
            detail="positions, ids, labels",
        ),
    ]
    return Prediction(
        held=tuple(h for h in held if h.nbytes),
        schedule=training_schedule(len(layers), train_embedding=found[0].specs[0].trainable),
        parameters=total,
        trainable_parameters=trainable,
        kernels=dict(kernels.chosen),
    )
