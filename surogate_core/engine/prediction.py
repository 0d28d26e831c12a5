"""What a run will hold, where, in bytes: counted from shapes and traced graphs, nothing allocated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from surogate_core.bundles import (
    Objective,
    OffloaderSpec,
    OptimizerSpec,
    Recipe,
    TensorKind,
    WeightFormat,
)
from surogate_core.dsl.declare import LoRA, Model, TensorSpec
from surogate_core.dsl.trace import Signature
from surogate_core.engine.engine import EngineSettings
from surogate_core.engine.parameters import Parameters, Piece, pieces
from surogate_core.engine.placement import Placement
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.schedule import EMBED, HEAD, Action, layer_key, training_schedule
from surogate_core.engine.stores import DeviceStore
from surogate_core.engine.weight_plan import WeightPlan, plain_layers
from surogate_core.kernels.registry import KernelTable

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes that torch gives cuBLAS on Hopper, for each stream that multiplies; 8 MiB elsewhere."""
CUDA_CONTEXT = 760 * 2**20
"""Bytes that CUDA, its libraries, loaded kernels and graphs take of a GPU beside torch's tensors: 678 MiB to 772 MiB on
an H200, by the driver (benchmarks/plan_memory.py)."""

CPU_LIBRARIES = 14 * 2**20
"""Pages of libraries' code that a run on a CPU touches first, as measured (benchmarks/plan_memory_cpu.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """One kind of tensor in the plan."""

    kind: str
    place: str
    """device, host or disk."""
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
    again: int
    """FLOPs of products and attention that a micro-step computes again."""

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
    """Bytes of frozen weights as they rest."""
    kept_in: str | None
    """The recipe or weight format that projections rest in; None where they rest as they are."""
    unpacked: int
    """Bytes of the room that a layer's weights in a weight format are unpacked into."""
    copies: int
    """Bytes of the copies of trained weights that blocks compute with."""
    panel_copies: int
    pieces: tuple[tuple[int, int, int], ...]
    """Of each piece: bytes of its frozen weights, of its copies of masters, and of masters that it computes with."""
    sums: tuple[int, ...]
    """Bytes of the gradients' sums of each piece."""
    residuals: tuple[int, ...]
    """Bytes of each layer."""
    forward: tuple[int, ...]
    """Most bytes that each layer's forward has besides its inputs; what it keeps and hands on are part of them."""
    backward: tuple[int, ...]
    """The same of the backward. Gradients of weights are multiplied into their sums, so none are in it."""
    again: int
    """FLOPs of products and attention that a micro-step computes again."""
    embedding_gradient: int
    """Bytes of the tokens' gradients in float32, where the embedding is trained."""
    activation: int
    """Bytes of what one layer hands to the next."""
    head: int
    """Bytes of the head's working set: the logits of `settings.head_chunks` pieces and what is made of them."""
    largest: int
    """Bytes of the largest tensor that layers keep for the backward."""
    logits: int
    """Bytes of a token's logits."""
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
        objective: Objective,
        offloader: OffloaderSpec,
        kernels: KernelTable,
        lora: LoRA | None,
        weight_format: WeightFormat | None = None,
        skips: Callable[[str], bool] = lambda name: False,
    ) -> Counts:
        """Trace the layers; of the offloader matters only whether it moves weights."""
        found = pieces(model, lora=lora, max_seqlen=settings.max_seqlen)
        positions = torch.zeros(settings.tokens, dtype=torch.int32, device="meta")
        tables = {
            **model.tables(positions, settings.dtype),
            "cu_seqlens": torch.zeros(settings.borders, dtype=torch.int32, device="meta"),
        }
        # A torch without CUDA cannot differentiate even fake tensors of a GPU; no byte depends on where they are.
        tracing = (
            settings.device if settings.device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
        )
        signatures = {n: Signature(tuple(t.shape), t.dtype, tracing) for n, t in tables.items()}
        plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
        slots = sum(len(piece.slots) for piece in found)
        state = recipe.state(slots, torch.device("meta"))
        plan = WeightPlan.of(
            found,
            recipe=recipe,
            plain=plain,
            offloader=offloader,
            kernels=kernels,
            compiler=settings.compiler,
            dtype=settings.dtype,
            tokens=settings.tokens,
            width=model.width,
            tables=signatures,
            weight_format=weight_format,
            skips=skips,
        )
        parameters = Parameters(
            found,
            panels=plan.panels,
            joins=plan.joins,
            packed=plan.packed,
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
            plain=plain,
            columns=0 if state is None else state.rows.shape[1],
            objective=objective,
            kernels=kernels,
            device=tracing,
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
        whole = in_allocator if settings.device.type == "cuda" else int
        kept = {key: whole(activation) + sum(whole(s.nbytes) for s in f.kept) for key, f in footprints.items()}
        of_layers = [builder.signature(piece) for piece in layers]

        frozen = sum(nbytes(parameters, s) for s in parameters.specs.values() if not s.trainable)
        total, trainable = parameters.counts()
        panel_copies = parameters.edge_bytes()
        for piece in layers:
            for panel, tensor in parameters.panel_tensors(piece):
                if not any(tensor is room for room in parameters.shared):
                    held_weights = panel.shape.width * panel.shape.inputs if panel.shape.frozen else 0
                    panel_copies += tensor.nbytes - held_weights * settings.dtype.itemsize
        quantised = any(packed.rounded for packed in parameters.packed.values())
        train_embedding = embed.specs[0].trainable
        return cls(
            settings=settings,
            recipe=recipe.name,
            parameters=total,
            trainable_parameters=trainable,
            flat=sum(g.master.numel() for g in parameters.groups),
            frozen=frozen,
            kept_in=(recipe.name if weight_format is None else weight_format.name) if quantised else None,
            unpacked=sum(room.nbytes for room in parameters.shared),
            copies=sum(copy.nbytes for copy, _ in parameters.copies),
            panel_copies=panel_copies,
            pieces=tuple(_split(parameters, piece) for piece in found),
            sums=tuple(sum(4 * math.prod(s.shape) for s in piece.specs if s.trainable) for piece in found),
            residuals=tuple(kept[key] for key in of_layers),
            forward=tuple(footprints[key].forward_bytes for key in of_layers),
            backward=tuple(footprints[key].backward_bytes for key in of_layers),
            again=sum(footprints[key].again for key in of_layers),
            embedding_gradient=settings.tokens * model.width * 4 if train_embedding else 0,
            head=builder.head_bytes(head, builder.chunks()[0].stop),
            activation=activation,
            largest=max([activation, *(s.nbytes for f in footprints.values() for s in f.kept)]),
            logits=model.vocab_size * settings.dtype.itemsize,
            tables=sum(s.nbytes for s in signatures.values()) + settings.tokens * 20,
            recipe_state=sum(t.nbytes for t in state.state().values()) if state else 0,
            slots=slots,
            train_embedding=train_embedding,
            kernels=dict(kernels.chosen),
        )

    def placed(
        self, *, offloader: OffloaderSpec, optimizer: OptimizerSpec, head_chunks: int, update_on_cpu: bool = False
    ) -> Prediction:
        """The tensors where an offloader puts the kinds that it is narrowed to."""
        settings, on = self.settings, Placement(offloader=offloader, stores=None, device=self.settings.device)

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
        moves = on.moves("residuals")
        coming = self.sums if on.moves("gradients") else (0,) * len(self.sums)
        in_use = _neighbours(streamed) + (resting if moves else 0) + _neighbours(coming, 3)
        peak, what = self._peak(streamed, coming, moves=moves, head_chunks=head_chunks)
        working = max(peak - in_use - (0 if moves else residuals), 0)
        state = int(self.flat * optimizer.state_bytes_per_parameter)
        masters = self.flat * settings.master_dtype.itemsize
        rows: list[tuple[str, str, int, str]] = [
            (
                "weights",
                place("weights"),
                self.frozen,
                f"frozen, {width}" + (f", {self.kept_in} in the layers" if self.kept_in else ""),
            ),
            ("unpacked weights", "device", self.unpacked, f"one layer's at a time, {width}"),
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
                "gradients in use",
                "device",
                _neighbours(coming, 3),
                "a piece's, the next one's coming and the last one's going",
            ),
            (
                "optimizer state",
                "host" if update_on_cpu and offloader.addressable else place("optimizer"),
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
            # Graphs are captured on one stream, after a step on another.
            streams = 2 if settings.cuda_graphs and offloader.addressable else 1
            rows.append(("workspace", "device", streams * CUBLAS_WORKSPACE, "of cuBLAS"))
            rows.append(("CUDA context", "device", CUDA_CONTEXT, "CUDA, loaded kernels and graphs, as measured"))
        else:
            # glibc takes an aligned block from a hole only if the hole is slightly larger, so it does not reuse the
            # hole of a block of the same size: count the largest tensor once more.
            logits = self.logits * -(-settings.tokens // head_chunks)
            rows.append(("freed memory", "device", max(self.largest, logits), "a margin: the largest tensor once more"))
            rows.append(("libraries", "host", CPU_LIBRARIES, "their code, as measured"))
        return Prediction(
            held=tuple(Held(kind=k, place=p, nbytes=n, detail=d) for k, p, n, d in rows if n),
            schedule=training_schedule(len(self.residuals), train_embedding=self.train_embedding),
            parameters=self.parameters,
            trainable_parameters=self.trainable_parameters,
            kernels=dict(self.kernels),
            again=self.again,
        )

    def _peak(
        self, streamed: Sequence[int], coming: Sequence[int], *, moves: bool, head_chunks: int
    ) -> tuple[int, str]:
        """(most bytes of a micro-step on top of what rests, what they are), found by going through the schedule.

        `streamed`, `coming`: bytes of each piece's weights, and of its sums of gradients, that come to the device for
        it. `moves`: whether residuals leave it.
        """
        tokens, layers = self.settings.tokens, len(self.residuals)
        keys = [EMBED, *(layer_key(i) for i in range(layers)), HEAD]
        weights, residuals = dict(zip(keys, streamed, strict=True)), dict(zip(keys[1:-1], self.residuals, strict=True))
        forward, backward = (
            dict(zip(keys[1:], self.forward, strict=False)),
            dict(zip(keys[1:], self.backward, strict=False)),
        )
        chunk, counted = -(-tokens // head_chunks), -(-tokens // self.settings.head_chunks)
        here: dict[TensorKind, dict[str, int]] = {"weights": {}, "residuals": {}, "gradients": {}}
        of_kind = {"weights": weights, "residuals": residuals, "gradients": dict(zip(keys, coming, strict=True))}
        leaving: dict[str, int] = {}
        """Residuals on their way out: one layer's, which need not be brought back if they are wanted at once."""
        going = 0
        """Sums on their way out: one piece's."""
        found = (0, "")
        for action in training_schedule(layers, train_embedding=self.train_embedding):
            key, now = action.key, 0
            sizes = of_kind[action.kind or "weights"]
            match action.verb:
                case "put" if moves:
                    leaving = {key: residuals[key]}
                case "put" | "prefetch" | "fetch" if action.kind in here:
                    here[action.kind][key] = sizes[key]
                    if action.kind == "residuals":
                        leaving.pop(key, None)
                case "release":
                    gone = here[action.kind or "weights"].pop(key, 0)
                    going = gone if action.kind == "gradients" else going
                case "forward":
                    now, what = self.activation + forward.get(key, 0), "the forward of a layer"
                case "loss":
                    # Beside the chunk's there are what the last layer gave, and the gradient of all of it.
                    now = 2 * self.activation + self.head * chunk // counted
                    what = f"the head: logits of {chunk} of {tokens} tokens at a time"
                case "backward" if key == EMBED:
                    now, what = self.activation + self.embedding_gradient, "the gradient of the embedding"
                case "backward":
                    now, what = self.activation + backward[key], "the backward of a layer"
            if now:
                total = now + going + sum(sum(sizes.values()) for sizes in (*here.values(), leaving))
                found = max(found, (total, what))
        return found


def in_allocator(nbytes: int) -> int:
    """Bytes that torch's allocator takes of a GPU for a tensor: above 10 MiB whole pairs of MiB, unless more than one
    MiB is left of the last."""
    pairs = -(-nbytes // 2**21) * 2**21
    return pairs if nbytes > 10 * 2**20 and pairs - nbytes <= 2**20 else nbytes


def nbytes(parameters: Parameters, spec: TensorSpec) -> int:
    """Bytes of a tensor: of a trained one as a piece receives it, of a frozen one as it rests."""
    if not spec.trainable:
        return parameters.kept_bytes(spec)
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


def _neighbours(sizes: Sequence[int], count: int = 2) -> int:
    """The largest sum of so many that follow each other: while one is in use, others are on their way."""
    return max(sum(sizes[i : i + count]) for i in range(max(len(sizes) - count + 1, 1)))


def predict(
    model: Model,
    *,
    settings: EngineSettings,
    recipe: Recipe,
    objective: Objective,
    optimizer: OptimizerSpec,
    offloader: OffloaderSpec,
    kernels: KernelTable,
    lora: LoRA | None,
    weight_format: WeightFormat | None = None,
    skips: Callable[[str], bool] = lambda name: False,
) -> Prediction:
    """Count the tensors of a run with these settings. The layers are traced, not compiled."""
    counts = Counts.of(
        model,
        settings=settings,
        recipe=recipe,
        objective=objective,
        offloader=offloader,
        kernels=kernels,
        lora=lora,
        weight_format=weight_format,
        skips=skips,
    )
    return counts.placed(
        offloader=offloader,
        optimizer=optimizer,
        head_chunks=settings.head_chunks,
        update_on_cpu=settings.update_on_cpu,
    )
