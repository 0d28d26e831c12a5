"""The micro-step: runs the schedule for one micro-batch.

Shape suffixes: N tokens of a micro-batch, D features, V vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import not_

import torch
from torch import Tensor

from surogate_core.bundles import GradientStore, RecipeState, Store, TensorKind
from surogate_core.dsl.products import Product, add_products, write_gradients
from surogate_core.dsl.sides import IDS
from surogate_core.engine.figures import FigureSums
from surogate_core.engine.gradient_norm import FlatNorm
from surogate_core.engine.inputs import MicroStepInputs
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.plan import EnginePlan
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows, add_rows
from surogate_core.engine.ranks.sharded_gradients import ShardedGradients
from surogate_core.engine.ranks.sharded_weights import ShardedWeights
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.ranks.traffic import Traffic
from surogate_core.engine.schedule import EMBED, Action, counting_schedule, evaluation_schedule, training_schedule
from surogate_core.engine.sides import SideSums
from surogate_core.engine.stores import DeviceGradients, ExpertsApart
from surogate_core.kernels.registry import using

PENDING_BYTES = 32 * 2**20
"""Gradients of several layers are collected up to this number of bytes, and are then added in one launch."""
LOSSES_IN_FP32 = 32
"""Number of losses of micro-steps and chunks that are added in fp32 before the sum moves to float64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSet:
    """The stores of weights, residuals and gradient sums between their uses."""

    weights: Store
    residuals: Store
    gradients: GradientStore
    streams_gradients: bool
    """Whether the gradient sums of a piece are on the device only while its backward runs."""
    shared_weights: ShardedWeights | None = None
    """`weights`, if ranks share them out."""
    shared_gradients: ShardedGradients | None = None
    """`gradients`, if ranks share them out."""

    @classmethod
    def of(cls, placement: Placement, sharing: Sharing, plan: EnginePlan) -> StoreSet:
        """The stores of a placement; those of the kinds that ranks share out keep this rank's part."""
        weights, device, allocate = placement.store("weights"), placement.device, sharing.mesh.zeros
        shared_weights = shared_gradients = None
        if placement.experts_apart:
            places = {piece.key: piece.places_of_experts for piece in plan.pieces}
            weights = ExpertsApart(weights, placement.moved("weights"), places)
        if sharing.axes.shards_weights:
            inner = weights if placement.moves("weights") else None
            shared_weights = ShardedWeights(sharing.stages, device, inner=inner, allocate=allocate)
        if sharing.axes.shards_gradients:
            shared_gradients = ShardedGradients(
                sharing.stages,
                device,
                allocate=allocate,
                everywhere=not sharing.replicas_once,
                written=not sharing.axes.exact,
                later=sharing.axes.reduces_later,
                kernels=plan.assembly.kernels,
            )
        return cls(
            weights=shared_weights or weights,
            residuals=placement.store("residuals"),
            gradients=shared_gradients or placement.gradients(_written(sharing, plan)),
            streams_gradients=sharing.axes.shards_gradients or placement.moves("gradients"),
            shared_weights=shared_weights,
            shared_gradients=shared_gradients,
        )

    @property
    def written_first(self) -> Collection[str]:
        """The pieces whose sums the first micro-step of an optimizer step writes, so that nothing clears them."""
        return self.gradients.written_first if isinstance(self.gradients, DeviceGradients) else ()

    @property
    def keeps_sums(self) -> bool:
        """Whether a micro-step that is not the last one of its optimizer step leaves sums that are not reduced."""
        return self.shared_gradients is not None and self.shared_gradients.later

    @property
    def embedding_rows(self) -> EmbeddingRows | None:
        """Takes the embedding's gradient, if ranks exchange its rows."""
        return None if self.shared_gradients is None else self.shared_gradients.rows

    def of_kind(self, kind: TensorKind | None) -> Store:
        """The store of an action of the schedule."""
        match kind:
            case "residuals":
                return self.residuals
            case "gradients":
                return self.gradients
        return self.weights


def _written(sharing: Sharing, plan: EnginePlan) -> Collection[str]:
    """The pieces whose sums on the device the first micro-step writes: the layers, if all their weights are trained.

    Adapters are too small to pay for a graph of their own. A tensor of two pieces has two gradients.
    """
    if sharing.axes.ranks > 1 or sharing.axes.exact or plan.assembly.lora is not None:
        return ()
    pieces_of = Counter(spec.hf_name for piece in plan.pieces for spec in piece.specs)
    return {piece.key for piece in plan.layers if all(pieces_of[spec.hf_name] == 1 for spec in piece.specs)}


class LossSum:
    """The sum of the losses of a step: a few addends in fp32 on the device, then float64."""

    def __init__(self, device: torch.device, *, numbers: int = 0):
        """`numbers`: M, if the loss of each micro-batch is kept by its number, so that several ranks have one sum."""
        self._recent = torch.zeros((), dtype=torch.float32, device=device)
        self._earlier = torch.zeros((), dtype=torch.float64, device=device)
        self.by_number = torch.zeros(numbers, dtype=torch.float64, device=device) if numbers else None

    def add(self, loss: Tensor) -> None:
        """Add a 0-d fp32 loss."""
        self._recent.add_(loss)

    def fold(self) -> None:
        """Move the sum to float64, because a long sum in fp32 loses digits of each addend."""
        self._earlier.add_(self._recent)
        self._recent.zero_()

    def keep(self, place: int) -> None:
        """The losses since the last call are those of a micro-batch; `place`: `Sharing.place_of_figures`."""
        if self.by_number is not None:
            self.by_number[place].add_(self.take())

    def take(self) -> Tensor:
        """0-d float64: the sum; resets it."""
        self.fold()
        total = self._earlier.clone()
        self._earlier.zero_()
        return total


@dataclass(slots=True)
class RecipeRows:
    """The state of a recipe, and the observations of its slots since the last update."""

    state: RecipeState
    of_layer: Mapping[str, slice]
    observed: Tensor = field(init=False)
    """[P, K] fp32: the maximum of each figure over the micro-steps."""

    def __post_init__(self) -> None:
        self.observed = torch.zeros_like(self.state.rows)

    def rows(self, key: str) -> Tensor:
        """[slots of the layer, K]: the rows that the layer's programs read."""
        return self.state.rows[self.of_layer[key]]

    def observe(self, key: str, figures: Tensor) -> None:
        """Keep the maximum of each figure. NaN stays NaN, so that the recipe sees it."""
        observed = self.observed[self.of_layer[key]]
        torch.maximum(observed, figures, out=observed)


@dataclass(slots=True)
class _Flow:
    """The activations between the actions of the schedule."""

    tables: list[Tensor] = field(default_factory=list)
    x: Tensor | None = None
    dx: Tensor | None = None
    relayed: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """(number of a layer, name) → what it gave to later layers."""
    drelayed: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    """The same → the sum of its gradients so far."""
    residuals: Sequence[Tensor] = ()
    gradients: Sequence[tuple[Tensor, Tensor | Product]] = ()
    """(sum, gradient to add to it) of the piece's trainable tensors."""
    written: Sequence[tuple[Tensor, Tensor | Product]] = ()
    """Those of them whose sums do not count yet: the gradient is written."""
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(sum, gradient) of gradients that are not yet added."""

    def add_pending(self) -> None:
        """Add the pending gradients in one launch, because one layer's adapters do not fill a GPU."""
        if self.pending:
            sums, gradients = zip(*self.pending, strict=True)
            torch._foreach_add_(list(sums), list(gradients))
            self.pending.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepContext:
    """What the micro-steps of an engine and its optimizer step share."""

    plan: EnginePlan
    parameters: Parameters
    stores: StoreSet
    traffic: Traffic
    norm: FlatNorm
    losses: LossSum
    figures: FigureSums
    rows: RecipeRows | None
    sides: SideSums


class MicroStep:
    """Runs the schedule: forward and backward of a micro-batch, or only forward."""

    def __init__(self, context: StepContext, inputs: MicroStepInputs, programs: ProgramBuilder):
        self.plan, self.parameters, self.stores = context.plan, context.parameters, context.stores
        self.traffic, self.norm, self.rows = context.traffic, context.norm, context.rows
        self.losses, self.figures, self.sides = context.losses, context.figures, context.sides
        self.inputs, self.programs = inputs, programs
        layers = len(self.plan.layers)
        self.training = training_schedule(layers, train_embedding=self.plan.train_embedding)
        self.evaluation = evaluation_schedule(layers)
        self.counting = counting_schedule(layers)

    def train(self, first: bool = True, last: bool = True, fresh: bool = True) -> None:
        """Forward and backward of the micro-batch in `inputs`. `first`, `last`: whether it is the first, and the last,
        of its optimizer step on this rank. `fresh`: whether the gradient sums count as zeros.
        """
        self.traffic.begin(first=first, last=last)
        self.stores.gradients.begin(first=fresh, last=last)
        self._run(self.training, training=True)
        self.stores.gradients.finish()
        self.traffic.finish()

    def evaluate(self) -> None:
        """Forward of the micro-batch in `inputs`, without dropout."""
        self._run(self.evaluation, training=False)

    def count(self) -> None:
        """Forward of the micro-batch in `inputs` through the layers, as in training, for the routes alone."""
        self._run(self.counting, training=True)
        self.sides.count()

    def hidden(self) -> Tensor:
        """[N, D]: the last layer's output for the micro-batch in `inputs`, without dropout."""
        self.stores.weights.begin_pass()
        flow = _Flow(tables=self._tables())
        for piece in self.plan.pieces[:-1]:
            self._forward(piece.key, flow, training=False)
            self.stores.weights.release(piece.key)
        assert flow.x is not None
        return flow.x

    def logprobs(self, temperature: float = 1.0) -> Tensor:
        """[N] fp32: the log-probability of each label of the micro-batch in `inputs`, 0 without a label; no dropout."""
        found: list[Tensor] = []

        def head(flow: _Flow) -> None:
            x_ND, flow.x = flow.x, None
            assert x_ND is not None
            tensors = self.parameters.inputs(self.plan.head)
            for chunk in self.programs.chunks():
                program = self.programs.logprobs(self.plan.head, chunk.stop - chunk.start, temperature)
                found.append(program([*tensors, x_ND[chunk], self.inputs.labels[chunk]])[0])

        self._run(self.evaluation, training=False, loss=head)
        return torch.cat(found)

    # ------------------------------------------------------------------------- schedule

    def _run(self, schedule: Sequence[Action], *, training: bool, loss: Callable[[_Flow], None] | None = None) -> None:
        self.stores.weights.begin_pass()
        flow = _Flow()
        for action in schedule:
            match action.verb:
                case "tables":
                    flow.tables = self._tables()
                case "prefetch":
                    self.stores.of_kind(action.kind).prefetch(action.key)
                case "fetch":
                    if action.kind == "residuals":
                        flow.residuals = self.stores.residuals.fetch(action.key)
                    elif action.kind == "weights":
                        self.traffic.wait_for(action.key)
                case "release":
                    if action.kind == "gradients" and self.stores.streams_gradients:
                        flow.add_pending()
                        self.norm.measure(action.key, self.stores.gradients.fetch(action.key))
                    if action.kind == "gradients" and self.traffic.reducing:
                        flow.add_pending()
                        self.traffic.reduce(action.key)
                    self.stores.of_kind(action.kind).release(action.key)
                case "forward":
                    self._forward(action.key, flow, training=training)
                case "put":
                    self.stores.residuals.put(action.key, flow.residuals)
                    flow.residuals = ()
                case "loss" if loss is not None:
                    loss(flow)
                case "loss":
                    if training:
                        self.sides.settle()
                    self._loss(flow, training=training)
                case "backward":
                    self._backward(action.key, flow)
                case "reduce":
                    self._reduce(action.key, flow)
        flow.add_pending()

    def _tables(self) -> list[Tensor]:
        assembly = self.plan.assembly
        tables = self.inputs.tables(assembly.model, assembly.settings.dtype)
        real = [] if self.inputs.real is None else [self.inputs.real]
        ids = [self.inputs.input_ids] if IDS in self.plan.tables else []
        return [*tables.values(), self.inputs.cu_seqlens, *real, *ids]

    def _layer_inputs(self, key: str, flow: _Flow, x: Tensor) -> list[Tensor]:
        piece = self.plan.layer(key)
        tensors = self.parameters.inputs(piece)
        shared = [*self.parameters.panel_tensors(piece), *self.parameters.join_tensors(piece, tensors)]
        panels = (tensor for _, tensor in shared)
        rows = [] if self.rows is None or not self.programs.reads_rows(piece) else [self.rows.rows(key)]
        taken = piece.taken(flow.relayed).values()
        return [*tensors, *panels, *rows, x, *taken, *flow.tables, *self.inputs.seeds_of(piece.number)]

    def _forward(self, key: str, flow: _Flow, *, training: bool) -> None:
        if key == EMBED:
            (weight,) = self.parameters.inputs(self.plan.embed)
            flow.x = self.plan.assembly.model.embedded(self.inputs.input_ids, weight)
            return
        x = flow.x
        assert x is not None
        piece = self.plan.layer(key)
        if training:
            flow.x, *others = self.programs.layer(piece).forward(self._layer_inputs(key, flow, x))
            self.sides.collect(piece, others[: len(piece.sides)])
            given, kept = len(piece.sides), len(piece.sides) + len(piece.gives)
            piece.keep(flow.relayed, others[given:kept])
            flow.residuals = (x, *others[kept:])
        else:
            flow.x, *others = self.programs.evaluation_layer(piece)(self._layer_inputs(key, flow, x))
            piece.keep(flow.relayed, others)
            for source in self.plan.last_taken(piece):
                del flow.relayed[source]

    def _loss(self, flow: _Flow, *, training: bool) -> None:
        x, flow.x = flow.x, None
        assert x is not None
        head = self.plan.head
        tensors = self.parameters.inputs(head)
        by_sequence, scaled = self.plan.assembly.objective.sequence_loss is not None, self.programs.scales_head
        coefficients = self._coefficients(tensors, x) if by_sequence and not (training and scaled) else None
        if not training:
            if coefficients is None:
                self._evaluate_head(tensors, x)
            return
        sums = self.stores.gradients.fetch(head.key)
        dx = torch.empty_like(x)
        totals: list[tuple[Tensor, Tensor]] = []
        losses: list[Tensor] = []
        for number, chunk in enumerate(self.programs.chunks()):
            if number and number % LOSSES_IN_FP32 == 0:
                self.losses.fold()
            program = self.programs.head(head, chunk.stop - chunk.start, training=True)
            arguments = self._of_chunk(tensors, x, chunk)
            if scaled:
                _, *gradients, loss_N, dx[chunk] = program([*arguments, self.inputs.one])
                losses.append(loss_N)
                self._add_figures(gradients, losses)
            elif coefficients is None:
                loss, *gradients, dx[chunk] = program([*arguments, self.inputs.loss_scale])
                self.losses.add(loss)
                self._add_figures(gradients, losses)
            else:
                # The scale of the loss is in the coefficients.
                _, *gradients, dx[chunk] = program([*arguments, coefficients[chunk], self.inputs.one])
            # At once: the factors of a product are the chunk's logits.
            plain = self._add_products(zip(sums, gradients, strict=True))
            totals = [(a, t.add_(g)) for (a, t), (_, g) in zip(totals, plain, strict=True)] if totals else plain
            # Otherwise they would live while the next chunk's are made.
            del gradients, plain
        flow.dx, flow.gradients = dx, totals
        self._add_sequences(losses)
        if scaled:
            torch.mul(dx, self._of_sequences(losses)[:, None], out=dx)

    def _add_products(self, pairs: Iterable[tuple[Tensor, Tensor | Product]]) -> list[tuple[Tensor, Tensor]]:
        """`products.add_products` by the run's kernels."""
        with using(self.programs.kernels):
            return add_products(pairs)

    def _of_chunk(self, tensors: Sequence[Tensor], x: Tensor, chunk: slice) -> list[Tensor]:
        """What the head's programs take of a chunk of the tokens."""
        columns = (column[chunk] for column in self.inputs.columns.values())
        return [*tensors, x[chunk], self.inputs.labels[chunk], *columns]

    def _evaluate_head(self, tensors: Sequence[Tensor], x: Tensor) -> None:
        """Add the losses of a micro-batch."""
        losses: list[Tensor] = []
        for number, chunk in enumerate(self.programs.chunks()):
            if number and number % LOSSES_IN_FP32 == 0:
                self.losses.fold()
            program = self.programs.head(self.plan.head, chunk.stop - chunk.start, training=False)
            loss, *found = program(self._of_chunk(tensors, x, chunk))
            self.losses.add(loss)
            self._add_figures(found, losses)
        self._add_sequences(losses)

    def _add_figures(self, found: list[Tensor], losses: list[Tensor]) -> None:
        """Add the token figures that the head's program gave of a chunk, and take them from the front of `found`; the
        losses of tokens, from which the figures of sequences are made, go to `losses`.
        """
        objective = self.plan.assembly.objective
        if objective.of_tokens:
            self.figures.add_tokens(found.pop(0))
        if objective.sequence_figures is not None and objective.sequence_loss is None:
            losses.append(found.pop(0))

    def _add_sequences(self, losses: Sequence[Tensor]) -> None:
        """Add the figures of sequences, from the losses of all chunks; nothing without losses."""
        if losses and self.plan.assembly.objective.sequence_figures is not None:
            arguments = [torch.cat(list(losses)), self.inputs.positions, *self.inputs.columns.values()]
            self.figures.add_sequences(self.programs.sequence_figures()(arguments)[0])

    def _coefficients(self, tensors: Sequence[Tensor], x: Tensor) -> Tensor:
        """[N] fp32: the gradient of the objective's loss of sequences by each token's loss; the loss is added."""
        parts = []
        for chunk in self.programs.chunks():
            program = self.programs.head(self.plan.head, chunk.stop - chunk.start, training=False)
            loss_N, *found = program(self._of_chunk(tensors, x, chunk))
            parts.append(loss_N)
            self._add_figures(found, parts)
        self._add_sequences(parts)
        return self._of_sequences(parts)

    def _of_sequences(self, losses: Sequence[Tensor]) -> Tensor:
        """The same from the losses of the chunks."""
        inputs = self.inputs
        arguments = [torch.cat(list(losses)), inputs.positions, *inputs.columns.values(), inputs.loss_scale]
        loss, coefficients = self.programs.sequence_loss()(arguments)
        self.losses.add(loss)
        return coefficients

    def _backward(self, key: str, flow: _Flow) -> None:
        dx = flow.dx
        assert dx is not None
        if key == EMBED:
            flow.gradients = ()
            return
        x, *kept = flow.residuals
        flow.residuals = ()
        piece = self.plan.layer(key)
        given = [flow.drelayed.pop((piece.number, spec.name)) for spec in piece.gives]
        arguments = [*self._layer_inputs(key, flow, x), *kept, dx, *self.sides.tangents(piece), *given]
        found = self.programs.layer(piece).backward(arguments)
        taken = len(found) - len(piece.sources)
        *gradients, flow.dx = found[:taken]
        for source, gradient in zip(piece.sources, found[taken:], strict=True):
            # Not in place, because a program may return one tensor as two gradients.
            summed = flow.drelayed.get(source)
            flow.drelayed[source] = gradient.contiguous() if summed is None else summed + gradient
        for source in self.plan.first_taken(piece):
            del flow.relayed[source]
        if self.rows is not None and self.programs.reads_rows(piece):
            self.rows.observe(key, gradients.pop())
        pairs = list(zip(self.stores.gradients.fetch(key), gradients, strict=True))
        written = self.stores.gradients.written(key) or [False] * len(pairs)
        flow.gradients = list(compress(pairs, map(not_, written)))
        flow.written = list(compress(pairs, written))

    def _reduce(self, key: str, flow: _Flow) -> None:
        if key == EMBED:
            assert flow.dx is not None
            flow.add_pending()  # the gradient of a tied head is added first
            scale = self.plan.assembly.model.embed_scale(flow.dx.dtype)
            if scale != 1:
                flow.dx.mul_(scale)
            if self.stores.embedding_rows is not None:
                self.stores.embedding_rows.keep(self.inputs.input_ids, flow.dx)
            else:
                (gradient,) = self.stores.gradients.fetch(EMBED)
                add_rows(gradient, self.inputs.input_ids, flow.dx)
        else:
            with using(self.programs.kernels):
                write_gradients(flow.written)
            flow.pending += self._add_products(flow.gradients)
            if sum(gradient.nbytes for _, gradient in flow.pending) >= PENDING_BYTES:
                flow.add_pending()
        flow.gradients = flow.written = ()
