"""Predicts the bytes of a run in each place, from shapes and traced graphs; nothing is allocated."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from surogate_core.bundles import TensorKind
from surogate_core.dsl.declare import TensorSpec
from surogate_core.engine.flat_groups import WIDE, padded
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.engine.planning.pieces import Piece
from surogate_core.engine.planning.plan import EnginePlan, linked_of
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.shares import GRADIENT, Sent, Shares
from surogate_core.engine.schedule import EMBED, HEAD, Action, layer_key, training_schedule
from surogate_core.engine.stores import DeviceStore

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace on Hopper, for each stream that multiplies; 8 MiB on other GPUs."""
CUDA_CONTEXT = 760 * 2**20
"""Bytes that CUDA, its libraries, loaded kernels and graphs take on a GPU in addition to torch's tensors: 678 MiB to
772 MiB on an H200, by the driver (benchmarks/plan_memory.py).
"""

COMMUNICATOR = 800 * 2**20
"""Bytes that NCCL and mapped memory of other GPUs take on a GPU beside tensors: 0.8 GiB on each of two H200s, with and
without shards (benchmarks/several_gpus.py).
"""

CPU_LIBRARIES = 14 * 2**20
"""Bytes of library code that a run on a CPU is the first to use, as measured (benchmarks/plan_memory_cpu.py)."""


@dataclass(frozen=True, slots=True)
class Held:
    """One kind of tensor in the plan."""

    kind: str
    place: str
    """device, host or disk."""
    nbytes: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The tensors of a run and its schedule."""

    held: tuple[Held, ...]
    schedule: tuple[Action, ...]
    parameters: int
    trainable_parameters: int
    kernels: dict[tuple[str, str], str]
    """(op, dtype) → kernel."""
    again: int
    """FLOPs of products and attention that a micro-step computes again."""
    ranks: int = 1
    """N, ranks of the run; `held` is what each of them keeps."""
    sent: tuple[Sent, ...] = ()
    """What a rank sends to the others in an optimizer step."""

    def total(self, place: str) -> int:
        """Bytes of a rank in a place."""
        return sum(h.nbytes for h in self.held if h.place == place)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """The bytes of a run's tensors, found by tracing; they do not depend on the placement."""

    assembly: Assembly
    """The assembly that was counted."""
    recipe: str
    parameters: int
    trainable_parameters: int
    decayed: tuple[int, ...]
    """Elements of each piece in the flat group of what decays, which ranks may share out."""
    undecayed: int
    """Elements of the flat group of what does not decay."""
    wide: tuple[int, ...]
    """Elements of each flat group of what is always in fp32."""
    own_experts: int
    """Elements of the flat group of experts, if ranks share them out."""
    frozen: int
    """Bytes of frozen weights as stored."""
    kept_in: str | None
    """The recipe or weight format in which projections are stored; None if they are stored unchanged."""
    unpacked: int
    """Bytes of the workspace into which a layer's weights in a weight format are unpacked."""
    copies: int
    """Bytes of the compute copies of trained weights."""
    panel_copies: int
    pieces: tuple[tuple[int, int, int], ...]
    """For each piece: bytes of its frozen weights, of its compute copies, and of masters that it computes with."""
    experts: tuple[int, ...]
    """Bytes of the frozen experts of each piece."""
    sums: tuple[int, ...]
    """Bytes of the gradient sums of each piece."""
    residuals: tuple[int, ...]
    """Bytes of the residuals of each layer."""
    forward: tuple[int, ...]
    """Peak bytes of each layer's forward besides its inputs, including its residuals and its output."""
    backward: tuple[int, ...]
    """The same for the backward. It has no gradients of weights, because the products add to their sums."""
    again: int
    """FLOPs of products and attention that a micro-step computes again."""
    exchanged: tuple[int, ...]
    """Bytes of each tensor that ranks which share rows, or experts, exchange in a micro-step."""
    embedding_gradient: int
    """Bytes of the tokens' gradients in float32, if the embedding is trained."""
    activation: int
    """Bytes of the activation between two layers."""
    head: int
    """Bytes of the head's working set: the logits of one of `settings.head_chunks` chunks and the values computed from
    them.
    """
    largest: int
    """Bytes of the largest residual of a layer."""
    logits: int
    """Bytes of a token's logits."""
    tables: int
    relayed: int
    """Bytes of what layers give to later ones, and of its gradients."""
    recipe_state: int
    slots: int
    train_embedding: bool
    kernels: Mapping[tuple[str, str], str]

    @property
    def settings(self) -> EngineSettings:
        """The settings of the count."""
        return self.assembly.settings

    @classmethod
    def of(cls, assembly: Assembly) -> TensorBytes:
        """Trace the layers. The only relevant property of the offloader is whether it moves weights."""
        settings, model, recipe = assembly.settings, assembly.model, assembly.recipe
        builder = programs_on_meta(assembly)
        plan, parameters = builder.plan, builder.parameters
        state = recipe.state(plan.slots, torch.device("meta"))
        layers = _LayerBytes.of(builder, plan)
        activation = settings.tokens * model.width * settings.dtype.itemsize
        total, trainable = parameters.counts()
        kept_in = recipe.name if assembly.weight_format is None else assembly.weight_format.name
        wide = tuple(g.master.numel() for g in parameters.groups if g.name.endswith(WIDE))
        experts = sum(group.master.numel() for group in parameters.flat.of_experts)
        quantised = any(packed.rounded for packed in parameters.packed.values())
        return cls(
            assembly=assembly,
            recipe=recipe.name,
            parameters=total,
            trainable_parameters=trainable,
            decayed=_by_piece(plan, parameters),
            undecayed=sum(g.master.numel() for g in parameters.groups if g.name != "decayed") - sum(wide) - experts,
            wide=wide,
            own_experts=experts,
            frozen=sum(nbytes(parameters, s) for s in parameters.specs.values() if not s.trainable),
            kept_in=kept_in if quantised else None,
            unpacked=sum(room.nbytes for room in parameters.shared),
            copies=sum(copy.nbytes for copy, _ in parameters.copies),
            panel_copies=_panel_copies(plan, parameters),
            pieces=tuple(_split(parameters, piece) for piece in plan.pieces),
            experts=tuple(sum(nbytes(parameters, s) for s in piece.frozen_experts) for piece in plan.pieces),
            sums=tuple(sum(4 * math.prod(s.shape) for s in piece.specs if s.trainable) for piece in plan.pieces),
            residuals=layers.kept,
            forward=layers.forward,
            backward=layers.backward,
            again=layers.again,
            exchanged=layers.exchanged,
            embedding_gradient=settings.tokens * model.width * 4 if plan.train_embedding else 0,
            head=builder.head_bytes(plan.head, builder.chunks()[0].stop),
            activation=activation,
            largest=max(activation, layers.largest),
            logits=model.vocab_size * settings.dtype.itemsize,
            tables=sum(s.nbytes for s in plan.tables.values()) + settings.tokens * 20,
            relayed=plan.relayed_bytes,
            recipe_state=sum(t.nbytes for t in state.state().values()) if state else 0,
            slots=plan.slots,
            train_embedding=plan.train_embedding,
            kernels=dict(assembly.kernels.chosen),
        )

    def placed(self, assembly: Assembly) -> Prediction:
        """The tensors in the places of an assembly, which may differ from the counted one only in the placement."""
        layers, shares = len(self.residuals), self._shares(assembly)
        rows = [*self._state(assembly, shares), *self._passing(assembly, shares), *self._beside(assembly, shares)]
        return Prediction(
            held=tuple(row for row in rows if row.nbytes),
            schedule=training_schedule(layers, train_embedding=self.train_embedding),
            parameters=self.parameters,
            trainable_parameters=self.trainable_parameters,
            kernels=dict(self.kernels),
            again=self.again,
            ranks=shares.ranks,
            sent=shares.sent,
        )

    def _shares(self, assembly: Assembly) -> Shares:
        frozen = tuple(frozen for frozen, _, _ in self.pieces)
        return Shares(
            settings=assembly.settings,
            decayed=self.decayed,
            undecayed=self.undecayed,
            wide=self.wide,
            experts=self.own_experts,
            frozen=frozen,
            exchanged=self.exchanged,
            replicas_once=assembly.adds_replicas_once,
            halves=assembly.exchanges_halves,
            rows=EmbeddingRows.bytes_of_rank(*self._rows()) if assembly.sends_rows else 0,
        )

    def _rows(self) -> tuple[int, int, torch.dtype]:
        """Tokens, width and dtype of a rank's rows of the embedding's gradient."""
        return self.settings.tokens, self.assembly.model.width, self.settings.dtype

    def _state(self, assembly: Assembly, shares: Shares) -> list[Held]:
        """The tensors that exist from step to step: weights, masters, gradients, the optimizer's and the recipe's
        state.
        """
        settings, offloader, optimizer = self.settings, assembly.offloader, assembly.optimizer
        on = _placement(assembly)

        def place(kind: TensorKind) -> str:
            return offloader.place if on.moves(kind) else "device"

        width = f"{settings.dtype}".removeprefix("torch.")
        master = f"{settings.master_dtype}".removeprefix("torch.")
        state = int(shares.masters * optimizer.state_bytes_per_parameter)
        stepped = "host" if assembly.settings.update_on_cpu and offloader.addressable else place("optimizer")
        in_layers = f", {self.kept_in} in the layers" if self.kept_in else ""
        streams = on.streams_trained(masters=False) and not shares.shards_base
        copies = place("weights") if streams else "device"
        per = f"{optimizer.state_bytes_per_parameter:g} bytes a parameter"

        def of(shared: bool) -> str:
            return f", 1/{shares.parts} of them" if shared else ""

        shared = shares.level >= 1
        base = shares.base(self.frozen)
        layers = f", 1/{shares.parts} of each layer's" if shares.shards_base else ""
        of_layers = f", 1/{shares.parts} of each layer's" if shares.shards_layers else ""
        masters = shares.master_bytes(shares.masters)
        apart = shares.whole_copies if copies != "device" else 0
        # Beside a shared base, blocks do not compute with masters that are off the device.
        own = shares.shards_base and on.moves("master") and any(in_place for _, _, in_place in self.pieces)
        more = shares.master_bytes(shares.flat) if own else 0
        moved = shares.copies(self.copies) - apart + more
        experts = sum(self.experts) if assembly.experts_apart else 0
        form = self.kept_in or width
        return [
            Held("weights", place("weights"), base - experts, f"frozen, {width}{in_layers}{layers}"),
            Held("experts", offloader.place, experts, f"frozen, {form}"),
            Held("unpacked weights", "device", self.unpacked, f"one layer's at a time, {width}"),
            Held("compute copies", copies, moved, f"of trained weights, {width}{of_layers}"),
            Held("whole copies", "device", apart, f"of trained weights outside of layers, {width}"),
            Held("panels", "device", self.panel_copies, "adapters beside the weights that they adapt"),
            Held("masters", place("master"), masters, f"trained, {master}{of(shared)}"),
            Held(
                "gradients", place("gradients"), GRADIENT * shares.sums, f"accumulated, float32{of(shares.level > 1)}"
            ),
            Held("partial sums", "device", GRADIENT * shares.partial_sums, "of gradients, for exact_reduction"),
            Held("optimizer state", stepped, state, f"{optimizer.name}, {per}{of(shared)}"),
            Held("recipe state", "device", self.recipe_state, f"{self.recipe}, {self.slots} projections"),
        ]

    def _passing(self, assembly: Assembly, shares: Shares) -> list[Held]:
        """The tensors that exist only within a micro-step."""
        on, head_chunks = _placement(assembly), assembly.settings.head_chunks
        moves = on.moves("residuals")
        gathered = range(1, len(self.pieces) - 1) if shares.shards_base else ()
        whole = not shares.level and not shares.shards_base
        streamed = [
            (frozen if on.moves("weights") and number not in gathered else 0)
            + (experts if assembly.experts_apart else 0)
            + (copies if on.streams_trained(masters=False) and whole else 0)
            + (masters if on.streams_trained(masters=True) and whole else 0)
            for number, ((frozen, copies, masters), experts) in enumerate(zip(self.pieces, self.experts, strict=True))
        ]
        coming = self.sums if on.moves("gradients") and shares.level < 2 else (0,) * len(self.sums)
        weights, sums = _neighbours(streamed), _neighbours(coming, 3)
        residuals, in_use = sum(self.residuals), _neighbours(self.residuals) if moves else 0
        peak, what = self._peak(streamed, coming, moves=moves, head_chunks=head_chunks)
        working = max(peak - weights - sums - (in_use if moves else residuals), 0)
        inputs = "inputs and routes of experts" if assembly.model.expert_slots() else "inputs only"
        detail = inputs if self.settings.recompute.block else "kept for the backward"
        rest = assembly.offloader.place if moves else "device"
        rows = EmbeddingRows.bytes_of(shares.parts, *self._rows()) if shares.rows else 0
        two = "a layer and the next, on their way through"
        return [
            Held("gradients in use", "device", sums, "a piece's, the next one's coming and the last one's going"),
            Held("weights in use", "device", weights, "a piece and the next, on their way through"),
            Held("gathered weights", "device", shares.gathered(from_host=on.moves("weights")), "two layers', whole"),
            Held("whole gradients", "device", shares.whole_sums, "two layers', and the embedding's or the head's"),
            Held("received gradients", "device", shares.staging, "of the other GPUs, before they are added"),
            Held("received rows", "device", rows, "of the embedding's gradient, from the GPUs that share it out"),
            Held("residuals", rest, residuals, f"{len(self.residuals)} layers, {detail}"),
            Held("residuals in use", "device", in_use, two),
            Held("relayed values", "device", self.relayed, "what layers give to later layers, with gradients"),
            Held("working set", "device", working, what),
            Held("tables and inputs", "device", self.tables, "positions, ids, labels"),
        ]

    def _beside(self, assembly: Assembly, shares: Shares) -> list[Held]:
        """The memory of libraries and the allocator in addition to the tensors."""
        settings = self.settings
        if settings.device.type == "cuda":
            # Graphs are captured on one stream, after a step on another.
            streams = 2 if assembly.captured else 1
            return [
                Held("workspace", "device", streams * CUBLAS_WORKSPACE, "of cuBLAS"),
                Held("CUDA context", "device", CUDA_CONTEXT, "CUDA, loaded kernels and graphs, as measured"),
                Held(
                    "NCCL",
                    "device",
                    COMMUNICATOR if shares.ranks > 1 else 0,
                    "and memory of other GPUs that is mapped, as measured",
                ),
            ]
        # glibc takes an aligned block from a hole only if the hole is slightly larger, so it does not reuse the
        # hole of a block of the same size: count the largest tensor once more.
        logits = self.logits * -(-settings.tokens // assembly.settings.head_chunks)
        margin = max(self.largest, logits)
        return [
            Held("freed memory", "device", margin, "a margin: the largest tensor once more"),
            Held("libraries", "host", CPU_LIBRARIES, "their code, as measured"),
        ]

    def _peak(
        self, streamed: Sequence[int], coming: Sequence[int], *, moves: bool, head_chunks: int
    ) -> tuple[int, str]:
        """(peak bytes of a micro-step in addition to the permanent tensors, their description), found by following the
        schedule.

        `streamed`, `coming`: bytes of each piece's weights, and of its gradient sums, that are copied to the device for
        it. `moves`: whether residuals are offloaded.
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
        """Residuals that are being copied out: one layer's, which are not copied back if they are needed at once."""
        going = 0
        """Sums that are being copied out: one piece's."""
        held = 0
        """Bytes of everything in `here`."""
        found = (0, "")
        for action in training_schedule(layers, train_embedding=self.train_embedding):
            key, now = action.key, 0
            sizes = of_kind[action.kind or "weights"]
            match action.verb:
                case "put" if moves:
                    leaving = {key: residuals[key]}
                case "put" | "prefetch" | "fetch" if action.kind in here:
                    held += sizes[key] - here[action.kind].get(key, 0)
                    here[action.kind][key] = sizes[key]
                    if action.kind == "residuals":
                        leaving.pop(key, None)
                case "release":
                    gone = here[action.kind or "weights"].pop(key, 0)
                    held -= gone
                    going = gone if action.kind == "gradients" else going
                case "forward":
                    now, what = self.activation + forward.get(key, 0), "the forward of a layer"
                case "loss":
                    # In addition to the chunk there are the last layer's output and its whole gradient.
                    now = 2 * self.activation + self.head * chunk // counted
                    what = f"the head: logits of {chunk} of {tokens} tokens at a time"
                case "backward" if key == EMBED:
                    now, what = self.activation + self.embedding_gradient, "the gradient of the embedding"
                case "backward":
                    now, what = self.activation + backward[key], "the backward of a layer"
            if now:
                found = max(found, (now + going + held + sum(leaving.values()), what))
        return found


def in_allocator(nbytes: int) -> int:
    """Bytes that torch's allocator takes from a GPU for a tensor: above 10 MiB a multiple of 2 MiB, unless more than 1
    MiB of the last pair would be unused.
    """
    pairs = -(-nbytes // 2**21) * 2**21
    return pairs if nbytes > 10 * 2**20 and pairs - nbytes <= 2**20 else nbytes


def nbytes(parameters: Parameters, spec: TensorSpec) -> int:
    """Bytes of a tensor: a trained one as a piece receives it, a frozen one as stored."""
    if not spec.trainable:
        return parameters.kept_bytes(spec)
    return math.prod(parameters.compute_shape(spec)) * parameters.compute_dtype(spec).itemsize


def _split(parameters: Parameters, piece: Piece) -> tuple[int, int, int]:
    frozen = copies = masters = 0
    for spec in piece.specs:
        size = nbytes(parameters, spec)
        if not spec.trainable:
            frozen += size
        elif parameters.compute_dtype(spec) == spec.dtype_in(parameters.master_dtype):
            masters += size
        else:
            copies += size
    return frozen, copies, masters


def _neighbours(sizes: Sequence[int], count: int = 2) -> int:
    """The largest sum of `count` consecutive values: while one is in use, the others are being copied."""
    return max(sum(sizes[i : i + count]) for i in range(max(len(sizes) - count + 1, 1)))


def _by_piece(plan: EnginePlan, parameters: Parameters) -> tuple[int, ...]:
    """Elements of each piece in the flat group of what decays; a tied tensor is the embedding's."""
    members = {name for group in parameters.groups if group.name == "decayed" for name in group.shapes}
    found = []
    for piece in plan.pieces:
        mine = {s.hf_name: math.prod(s.shape) for s in piece.specs if s.hf_name in members}
        members -= mine.keys()
        found.append(sum(map(padded, mine.values())))
    return tuple(found)


def predict(assembly: Assembly) -> Prediction:
    """Count the tensors of a run. The layers are traced, not compiled."""
    return TensorBytes.of(assembly).placed(assembly)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerBytes:
    """The residuals and the working set of each layer, by tracing each kind of layer once."""

    kept: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    again: int
    exchanged: tuple[int, ...]
    largest: int

    @classmethod
    def of(cls, builder: ProgramBuilder, plan: EnginePlan) -> _LayerBytes:
        settings = plan.assembly.settings
        kinds = {builder.signature(piece): piece for piece in plan.layers}
        found = {key: builder.layer_footprint(piece) for key, piece in kinds.items()}
        whole = in_allocator if settings.device.type == "cuda" else int
        activation = whole(settings.tokens * plan.assembly.model.width * settings.dtype.itemsize)
        kept = {key: activation + sum(whole(s.nbytes) for s in f.kept) for key, f in found.items()}
        layers = [builder.signature(piece) for piece in plan.layers]
        return cls(
            kept=tuple(kept[key] for key in layers),
            forward=tuple(found[key].forward_bytes for key in layers),
            backward=tuple(found[key].backward_bytes for key in layers),
            again=sum(found[key].again for key in layers),
            exchanged=tuple(nbytes for key in layers for nbytes in found[key].exchanged),
            largest=max((s.nbytes for f in found.values() for s in f.kept), default=0),
        )


def programs_on_meta(assembly: Assembly) -> ProgramBuilder:
    """The programs of a run whose weights have no memory; they can be traced."""
    # A torch without CUDA cannot differentiate even fake tensors of a GPU; no byte depends on where they are.
    on_cpu = assembly.settings.device.type == "cuda" and not torch.cuda.is_available()
    tracing = torch.device("cpu") if on_cpu else assembly.settings.device
    plan = EnginePlan.of(assembly, device=tracing)
    state = assembly.recipe.state(plan.slots, torch.device("meta"))
    columns = 0 if state is None else state.rows.shape[1]
    return ProgramBuilder(
        plan=plan,
        parameters=_parameters_on_meta(plan),
        columns=columns,
        device=tracing,
        linked=tuple(linked_of(assembly.settings.axes).values()),
    )


def held_bytes(programs: ProgramBuilder) -> int:
    """Bytes of the weights of a model that only generates: as they are kept, with masters and gradients of the
    adapters, and with the room in which a layer's weights are unpacked.
    """
    plan, parameters = programs.plan, programs.parameters
    specs = {spec.hf_name: spec for piece in plan.pieces for spec in piece.specs}
    kept = sum(parameters.kept_bytes(spec) for spec in specs.values() if not spec.trainable)
    masters = sum(padded(master.numel()) * master.itemsize for master in parameters.masters().values())
    gradients = sum(padded(gradient.numel()) * GRADIENT for gradient in parameters.gradients_by_name().values())
    rooms = sum(room.nbytes for room in parameters.shared)
    return kept + masters + gradients + rooms + _panel_copies(plan, parameters)


def _parameters_on_meta(plan: EnginePlan) -> Parameters:
    """The run's parameters without memory."""
    settings = plan.assembly.settings
    return Parameters(
        plan.pieces,
        plan=plan.weights,
        weights=DeviceStore("weights"),
        device=torch.device("meta"),
        dtype=settings.dtype,
        adapter_dtype=settings.adapter_dtype,
        weight_decay=settings.weight_decay,
        master_dtype=settings.master_dtype,
        seed=torch.zeros((), dtype=torch.int32, device="meta"),
    )


def _panel_copies(plan: EnginePlan, parameters: Parameters) -> int:
    """Bytes of the adapters' copies inside and outside of the panels."""
    copies = parameters.edge_bytes()
    for piece in plan.layers:
        for panel, tensor in parameters.panel_tensors(piece):
            if not any(tensor is room for room in parameters.shared):
                weights = panel.shape.width * panel.shape.inputs if panel.shape.frozen else 0
                copies += tensor.nbytes - weights * plan.assembly.settings.dtype.itemsize
    return copies


def _placement(assembly: Assembly) -> Placement:
    return Placement(offloader=assembly.offloader, stores=None, device=assembly.settings.device)
