"""What a run will hold, where, in bytes: counted from shapes and traced graphs, nothing allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from surogate_core.bundles import Objective, Offloader, OptimizerSpec, Recipe, TensorKind
from surogate_core.dsl.declare import LoRA, Model, TensorSpec
from surogate_core.dsl.trace import Signature
from surogate_core.engine.engine import EngineSettings
from surogate_core.engine.parameters import Parameters, Piece, pieces
from surogate_core.engine.placement import Placement
from surogate_core.engine.programs import ProgramBuilder, plain_layers, plan_packing, plan_panels
from surogate_core.engine.schedule import Action, training_schedule
from surogate_core.engine.stores import DeviceStore
from surogate_core.kernels.registry import KernelTable

LOGIT_COPIES = {"inductor": 2, "fx": 3}
"""Tensors of a logits chunk's size that exist at once in the head: logits and their gradient, and in
the traced graph as it is a temporary. With them the measured peaks on an H200 are met: 8.45 GiB
predicted and 8.53 measured for Qwen3-0.6B, 37.3 and 37.5 for 8B (LoRA, 4096 tokens, no recompute)."""

CUDA_CONTEXT = 600 * 2**20
"""Bytes that CUDA, its libraries and loaded kernels take of a GPU beside torch's tensors; estimated."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What a run's tensors take, wherever they are put: found by tracing, which placements share."""

    settings: EngineSettings
    recipe: str
    parameters: int
    trainable_parameters: int
    flat: int
    """Elements of the flat groups."""
    frozen: int
    """Bytes of frozen weights as the programs receive them."""
    packed: bool
    copies: int
    """Bytes of the copies of trained weights that blocks compute with."""
    panel_copies: int
    pieces: tuple[tuple[int, int, int], ...]
    """Of each piece: bytes of its frozen weights, of its copies of masters, and of masters that it computes with."""
    residuals: tuple[int, ...]
    """Bytes of each layer."""
    layer: int
    """Bytes of a layer's working set."""
    head_gradients: int
    embedding_gradient: int
    vocabulary: int
    tables: int
    recipe_state: int
    slots: int
    train_embedding: bool
    kernels: Mapping[tuple[str, str], str]

    @classmethod
    def of(
        cls,
        model: Model,
        *,
        settings: EngineSettings,
        recipe: Recipe,
        recipe_options: Any,
        objective: Objective,
        offloader: Offloader,
        kernels: KernelTable,
        lora: LoRA | None,
    ) -> Counts:
        """Trace the layers; of the offloader matters only whether it moves weights."""
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
        parameters = Parameters(
            found,
            panels=plan_panels(
                found,
                recipe=recipe,
                offloader=offloader,
                kernels=kernels,
                dtype=settings.dtype,
                tokens=settings.tokens,
                width=model.width,
                tables=signatures,
            ),
            packed=plan_packing(found, recipe=recipe, recipe_options=recipe_options, plain=plain, dtype=settings.dtype),
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
        embed, *layers, head = found
        prints = {builder.signature(piece): piece for piece in layers}
        footprints = {key: builder.layer_footprint(piece) for key, piece in prints.items()}
        activation = settings.tokens * model.width * settings.dtype.itemsize
        kept = {key: activation + sum(s.nbytes for s in f.kept) for key, f in footprints.items()}

        frozen = sum(nbytes(parameters, s) for s in parameters.specs.values() if not s.trainable)
        total, trainable = parameters.counts()
        panel_copies = 0
        for piece in layers:
            for panel, tensor in parameters.panel_tensors(piece):
                panel_copies += tensor.nbytes - panel.shape.width * panel.shape.inputs * settings.dtype.itemsize
        train_embedding = embed.specs[0].trainable
        # Sorted sums need the whole gradient of the table at once on CUDA, and the tokens' in fp32 elsewhere.
        rows = model.vocab_size if settings.device.type == "cuda" else settings.tokens
        return cls(
            settings=settings,
            recipe=recipe.name,
            parameters=total,
            trainable_parameters=trainable,
            flat=sum(g.master.numel() for g in parameters.groups),
            frozen=frozen,
            packed=bool(parameters.packed),
            copies=sum(copy.nbytes for copy, _ in parameters.copies),
            panel_copies=panel_copies,
            pieces=tuple(_split(parameters, piece) for piece in found),
            residuals=tuple(kept[builder.signature(piece)] for piece in layers),
            layer=activation + max(f.working_bytes for f in footprints.values()),
            head_gradients=sum(nbytes(parameters, s) for s in head.specs if s.trainable),
            embedding_gradient=rows * model.width * 4 if train_embedding else 0,
            vocabulary=model.vocab_size,
            tables=sum(s.nbytes for s in signatures.values()) + settings.tokens * 20,
            recipe_state=sum(t.nbytes for t in state.state().values()) if state else 0,
            slots=slots,
            train_embedding=train_embedding,
            kernels=dict(kernels.chosen),
        )

    def placed(
        self, *, offloader: Offloader, optimizer: OptimizerSpec, head_chunks: int, update_on_cpu: bool = False
    ) -> Prediction:
        """The tensors where an offloader puts the kinds that it is narrowed to."""
        settings, on = self.settings, Placement(offloader=offloader, options=None, device=self.settings.device)

        def place(kind: TensorKind) -> str:
            return offloader.place if on.moves(kind) else "device"

        width = f"{settings.dtype}".removeprefix("torch.")
        whole = not settings.recompute.block
        residuals, detail = sum(self.residuals), "kept for the backward" if whole else "inputs only"
        resting = residuals if not on.moves("residuals") else _neighbours(self.residuals)
        streamed = [
            (frozen if on.moves("weights") else 0)
            + (copies if on.streams_trained(masters=False) else 0)
            + (masters if on.streams_trained(masters=True) else 0)
            for frozen, copies, masters in self.pieces
        ]
        working, what = self._working(resting, head_chunks)
        state = int(self.flat * optimizer.state_bytes_per_parameter)
        masters = self.flat * settings.master_dtype.itemsize
        rows: list[tuple[str, str, int, str]] = [
            (
                "weights",
                place("weights"),
                self.frozen,
                f"frozen, {width}" + (f", {self.recipe} in the layers" if self.packed else ""),
            ),
            (
                "compute copies",
                place("weights") if on.streams_trained(masters=False) else "device",
                self.copies,
                f"of trained weights, {width}",
            ),
            ("panels", "device", self.panel_copies, "adapters beside the weights that they adapt"),
            ("masters", place("master"), masters, f"trained, {settings.master_dtype}".replace("torch.", "")),
            ("gradients", place("gradients"), self.flat * 4, "accumulated, float32"),
            (
                "optimizer state",
                "host" if update_on_cpu else place("optimizer"),
                state,
                f"{optimizer.name}, {optimizer.state_bytes_per_parameter:g} bytes a parameter",
            ),
            ("recipe state", "device", self.recipe_state, f"{self.recipe}, {self.slots} projections"),
            ("weights in use", "device", _neighbours(streamed), "a piece and the next, on their way through"),
            ("residuals", place("residuals"), residuals, f"{len(self.residuals)} layers, {detail}"),
            (
                "residuals in use",
                "device",
                resting if on.moves("residuals") else 0,
                "a layer and the next, on their way through",
            ),
            ("working set", "device", working, what),
            ("tables and inputs", "device", self.tables, "positions, ids, labels"),
        ]
        if settings.device.type == "cuda":
            rows.append(("CUDA context", "device", CUDA_CONTEXT, "kernels and workspaces, estimated"))
        return Prediction(
            held=tuple(Held(kind=k, place=p, nbytes=n, detail=d) for k, p, n, d in rows if n),
            schedule=training_schedule(len(self.residuals), train_embedding=self.train_embedding),
            parameters=self.parameters,
            trainable_parameters=self.trainable_parameters,
            kernels=dict(self.kernels),
        )

    def _working(self, residuals: int, head_chunks: int) -> tuple[int, str]:
        """(bytes on top of the residuals where all is largest, what they are)."""
        settings = self.settings
        tokens = -(-settings.tokens // head_chunks)
        logits = tokens * self.vocabulary * settings.dtype.itemsize * LOGIT_COPIES[settings.compiler]
        # Of several chunks the sum and the newest exist.
        gradients = self.head_gradients * (2 if head_chunks > 1 else 1)
        return max(
            (logits + gradients, f"the head: logits of {tokens} of {settings.tokens} tokens at a time"),
            (self.layer, "the backward of a layer"),
            # No layer's residuals are left by then.
            (self.embedding_gradient - residuals, "the gradient of the embedding"),
        )


def nbytes(parameters: Parameters, spec: TensorSpec) -> int:
    """Bytes of a tensor as a piece receives it."""
    return math.prod(parameters.compute_shape(spec)) * parameters.compute_dtype(spec).itemsize


def _split(parameters: Parameters, piece: Piece) -> tuple[int, int, int]:
    frozen = copies = masters = 0
    for spec in piece.specs:
        size = nbytes(parameters, spec)
        if not spec.trainable:
            frozen += size
        elif parameters.compute_dtype(spec) == parameters.master_dtype:
            masters += size
        else:
            copies += size
    return frozen, copies, masters


def _neighbours(sizes: Sequence[int]) -> int:
    """The largest sum of two that follow each other: while one is in use, the other is on its way."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


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
    counts = Counts.of(
        model,
        settings=settings,
        recipe=recipe,
        recipe_options=recipe_options,
        objective=objective,
        offloader=offloader,
        kernels=kernels,
        lora=lora,
    )
    return counts.placed(
        offloader=offloader,
        optimizer=optimizer,
        head_chunks=settings.head_chunks,
        update_on_cpu=settings.update_on_cpu,
    )
