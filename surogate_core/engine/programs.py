"""The compiled programs of a model: one per distinct piece, made once, shared by its layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.batch import WEIGHTS
from surogate_core.dsl.declare import Multiply
from surogate_core.dsl.experts import EXPERT
from surogate_core.dsl.footprint import Footprint, footprint, joint_bytes
from surogate_core.dsl.sides import LOADS, reported
from surogate_core.dsl.slots import Join, Panel, plain_gemm
from surogate_core.dsl.trace import (
    Function,
    Program,
    Signature,
    UnusedInputsError,
    _Call,
    differentiate,
    with_gradients,
    without_gradients,
)
from surogate_core.engine.figures import of_chunk, of_sequences
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import Piece
from surogate_core.engine.planning.plan import EnginePlan
from surogate_core.errors import SurogateError
from surogate_core.kernels import ops, registry
from surogate_core.kernels.expert_ranks import ExpertRanks
from surogate_core.kernels.linked import Linked, active, among


@contextmanager
def _naming_unused(piece: Piece) -> Iterator[None]:
    """Turn an error about unused inputs into one that names the block and the parameters."""
    try:
        yield
    except UnusedInputsError as error:
        names = [piece.specs[i].name for i in error.positions if i < len(piece.specs)] or ["its input"]
        block = type(piece.block)
        raise SurogateError(
            f"{block.__module__}.{block.__name__}: the output of forward does not depend on {', '.join(names)}, so "
            f"that there is no gradient. Fix: use it, or take it out of the block."
        ) from error


@dataclass(slots=True, kw_only=True)
class ProgramBuilder:
    """Builds and caches the programs of a run."""

    plan: EnginePlan
    parameters: Parameters
    columns: int
    """K, figures of a slot's row in the recipe's state; 0 if it has none."""
    device: torch.device
    linked: tuple[Linked, ...] = ()
    """The ranks with which programs exchange values: those that share each row, or experts."""
    progress: Callable[[str, int, int], None] = lambda task, done, total: None
    """Called with (task, 0, 1) when compilation of a program begins and with (task, 1, 1) when it ends."""
    _layers: dict[Any, Program] = field(default_factory=dict)
    """Signature of a layer → its program."""
    _evaluations: dict[Any, _Call] = field(default_factory=dict)
    """Signature of a layer → its forward for evaluation."""
    _layers_by_key: dict[str, Program] = field(default_factory=dict)
    """Key of a piece → its program, so that a micro-step need not hash whole signatures."""
    _evaluations_by_key: dict[str, _Call] = field(default_factory=dict)
    _heads: dict[Any, _Call] = field(default_factory=dict)
    _sequence_loss: _Call | None = None
    _sequence_figures: _Call | None = None

    @property
    def settings(self) -> EngineSettings:
        """The engine's settings."""
        return self.plan.assembly.settings

    @property
    def kernels(self) -> registry.KernelTable:
        """The kernels of the run, and which were chosen."""
        return self.plan.assembly.kernels

    @contextmanager
    def _making(self, task: str) -> Iterator[None]:
        self.progress(task, 0, 1)
        with registry.using(self.kernels), among(*self.linked):
            yield
        self.progress(task, 1, 1)

    def _inputs(self, piece: Piece) -> list[Signature]:
        shape, dtype = self.parameters.compute_shape, self.parameters.compute_dtype
        return [Signature(shape(s), dtype(s), self.device, s.trainable, EXPERT in s.hf_name) for s in piece.specs]

    def reads_rows(self, piece: Piece) -> bool:
        """Whether the piece's programs read the recipe's state, and their backward returns observations."""
        return self.columns > 0 and bool(piece.slots) and piece.key not in self.plan.plain

    def _activation(self, tokens: int, *features: int, requires_grad: bool) -> Signature:
        """Rows of other `features` than the hidden state's D, if any are named."""
        shape = features or (self.plan.assembly.model.width,)
        return Signature((tokens, *shape), self.parameters.dtype, self.device, requires_grad)

    def layer_inputs(self, piece: Piece) -> list[Signature]:
        """What the function of a layer takes."""
        seeds = [Signature(shape, torch.int32, self.device) for shape in ((2,), ())]
        activation = self._activation(self.settings.tokens, requires_grad=True)
        panels = [Signature(tuple(t.shape), t.dtype, self.device) for _, t in self.parameters.panel_tensors(piece)]
        panels += [Signature(s, self.parameters.dtype, self.device) for s in self.parameters.join_shapes(piece)]
        rows = []
        if self.reads_rows(piece):
            rows.append(Signature((len(piece.slots), self.columns), torch.float32, self.device, True))
        taken = [self._activation(self.settings.tokens, *s.shape, requires_grad=True) for s in piece.takes]
        return [*self._inputs(piece), *panels, *rows, activation, *taken, *self.plan.tables.values(), *seeds]

    def layer_function(self, piece: Piece, *, training: bool) -> Function:
        """The layer as a function of as many tokens as its arguments have; in training it gives side outputs too. What
        it gives to later layers follows.
        """
        block, names = piece.block, list(self.plan.tables)
        parameters, losses = self.parameters, self.settings.router_losses
        panels: list[Panel | Join] = [*parameters.panels.get(piece.key, ()), *parameters.joins.get(piece.key, ())]
        reads_rows = self.reads_rows(piece)
        count = len(piece.specs) + len(panels) + reads_rows
        kept = self.parameters.packed
        names_of_packed = {s.name for s in piece.specs if s.hf_name in kept and kept[s.hf_name].unpack is None}
        slot_names = [*(s.name for s in piece.slots), *(e.name for e in piece.experts)]
        packed = frozenset(name for name in slot_names if f"{name}.weight" in names_of_packed)
        recipe = Multiply(plain_gemm, packed=packed)
        if piece.key not in self.plan.plain:
            mine = self.plan.assembly.recipe
            recipe = Multiply(mine.linear, mine.grouped, mine.expert_codes, mine.expert_parts, packed)
        assert block is not None

        def run(*flat: Tensor) -> Tensor | Sequence[Tensor]:
            tensors = {spec.name: value for spec, value in zip(piece.specs, flat, strict=False)}
            x, (masks, seed), first = flat[count], flat[-2:], count + 1 + len(piece.takes)
            tables = dict(zip(names, flat[first:-2], strict=True))
            bound = block.bind(
                tensors,
                piece.slots,
                replace(recipe, rows=flat[count - 1].unbind(0)) if reads_rows else recipe,
                experts=piece.experts,
                panels=list(zip(panels, flat[len(piece.specs) :], strict=False)),
                seed=seed if training else None,
                masks=masks if training else None,
            )
            bound.taken = {spec.name: value for spec, value in zip(piece.takes, flat[count + 1 :], strict=False)}
            y, sides = bound.outputs(x, tables)
            group = active(ExpertRanks)
            if group is not None and group.moved is not None:
                sides = {**sides, LOADS: group.moved.figures}
            # Copied, because AOTAutograd exports no output that is a view, or an input.
            given = [bound.given[s.name].clone(memory_format=torch.contiguous_format) for s in piece.gives]
            y = y.clone() if y is x else y
            reports = reported(sides, piece.sides, losses) if training else []
            return (y, *reports, *given) if reports or given else y

        return run

    def signature(self, piece: Piece) -> Any:
        """Equal for layers that share their programs."""
        panels = tuple(self.parameters.panels.get(piece.key, ()))
        joins = tuple(self.parameters.joins.get(piece.key, ()))
        return (
            None if piece.block is None else piece.block.identity,
            piece.slots,
            piece.experts,
            panels,
            joins,
            tuple(self._inputs(piece)),
            piece.key in self.plan.plain,
        )

    def layer(self, piece: Piece) -> Program:
        """Forward and backward of a layer.

        It takes [*tensors, *panels, *joins(, rows), x_ND, *taken, *tables, *`Inputs.seeds_of`], and gives y_ND, the
        side outputs and what it gives to later layers. After y's gradient come those of side outputs that are terms of
        the loss, and of what it gives; the gradients of what it takes come after x's. The gradient of the rows contains
        the observations of their slots. A gradient may be a `dsl.products.Product`.
        """
        found = self._layers_by_key.get(piece.key)
        if found is None:
            found = self._layers_by_key[piece.key] = self._layer(piece)
        return found

    def _layer(self, piece: Piece) -> Program:
        key = self.signature(piece)
        if key not in self._layers:
            with self._making(f"differentiating {type(piece.block).__name__}"), _naming_unused(piece):
                self._layers[key] = differentiate(
                    self.layer_function(piece, training=True),
                    self.layer_inputs(piece),
                    recompute=self.settings.recompute,
                    compiler=self.settings.compiler,
                    summed=len(piece.specs),
                )
        return self._layers[key]

    def layer_footprint(self, piece: Piece) -> Footprint:
        """The residuals of a layer, without its input, and its working set."""
        with registry.using(self.kernels), among(*self.linked), _naming_unused(piece):
            return footprint(
                self.layer_function(piece, training=True),
                self.layer_inputs(piece),
                recompute=self.settings.recompute,
                compiler=self.settings.compiler,
                summed=len(piece.specs),
            )

    def evaluation_layer(self, piece: Piece) -> _Call:
        """Only the forward of a layer, without dropout."""
        found = self._evaluations_by_key.get(piece.key)
        if found is None:
            found = self._evaluations_by_key[piece.key] = self._evaluation_layer(piece)
        return found

    def _evaluation_layer(self, piece: Piece) -> _Call:
        key = self.signature(piece)
        if key not in self._evaluations:
            with self._making(f"tracing {type(piece.block).__name__} for evaluation"):
                self._evaluations[key] = without_gradients(
                    self.layer_function(piece, training=False),
                    self.layer_inputs(piece),
                    compiler=self.settings.compiler,
                )
        return self._evaluations[key]

    def chunks(self) -> Sequence[slice]:
        """The token ranges whose logits exist at one time."""
        tokens = self.settings.tokens
        size = -(-tokens // self.settings.head_chunks)
        return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]

    def _head_function(
        self, piece: Piece, tokens: int, *, training: bool
    ) -> tuple[Callable[..., Sequence[Tensor]], list[Signature]]:
        model, objective, names = self.plan.assembly.model, self.plan.assembly.objective, self.settings.columns
        by_sequence, scaled = objective.sequence_loss is not None, self.scales_head
        factored = by_sequence and training and not scaled

        def run(*flat: Tensor) -> Sequence[Tensor]:
            head = {spec.name: tensor for spec, tensor in zip(piece.specs, flat, strict=False)}
            x_ND, labels_N, *rest = flat[len(piece.specs) :]
            columns = dict(zip(names, rest, strict=False))
            logits_NV = model.logits(x_ND, head)
            loss_N = objective.token_loss(logits_NV, labels_N, columns)
            if factored:
                return [(loss_N * rest[-1]).sum()]
            found = of_chunk(objective, logits_NV, labels_N, columns)
            if by_sequence:
                return [loss_N.sum(), *found, loss_N.detach().clone()] if training else [loss_N, *found]
            if objective.sequence_figures is not None:
                found.append(loss_N.detach().clone())
            weights_N = columns.get(WEIGHTS)
            return [(loss_N if weights_N is None else loss_N * weights_N).sum(), *found]

        column = Signature((tokens,), torch.float32, self.device)
        inputs = [*self._inputs(piece), self._activation(tokens, requires_grad=True)]
        inputs += [Signature((tokens,), torch.int64, self.device), *[column] * len(names)]
        return run, [*inputs, column] if factored else inputs

    @property
    def scales_head(self) -> bool:
        """Whether the head runs once under a `sequence_loss`: nothing of it is trained, so the gradient of each token's
        hidden state is that of its own loss, multiplied by its coefficient.
        """
        trained = any(spec.trainable for spec in self.plan.head.specs)
        return self.plan.assembly.objective.sequence_loss is not None and not trained

    def head_bytes(self, piece: Piece, tokens: int) -> int:
        """Most that exists at one time besides inputs while head and loss of a chunk run; compiles nothing."""
        run, inputs = self._head_function(piece, tokens, training=True)
        with registry.using(self.kernels):
            return joint_bytes(run, inputs, compiler=self.settings.compiler, summed=len(piece.specs))

    def head(self, piece: Piece, tokens: int, *, training: bool) -> _Call:
        """Head and loss of a chunk: ([*tensors of the head, x_ND, labels_N, *columns_N(, d_loss)]).

        Gives [summed loss, gradients of trainable tensors…, d_x], or [summed loss] in evaluation. Gradients may be
        `Product`s, as those of a layer. After the loss come the token figures, if the objective has any, and loss_N
        if it has sequence figures. Under an objective with a `sequence_loss`, training takes a coefficient for each
        token's loss after the columns and gives no figures, and evaluation gives [loss_N], then the token figures. If
        it `scales_head`, training takes no coefficients: it gives the sum, the token figures, loss_N and d_x.
        """
        key = (tokens, training)
        if key not in self._heads:
            task = "differentiating the head and loss" if training else "tracing the head for evaluation"
            run, inputs = self._head_function(piece, tokens, training=training)
            with self._making(task):
                if training:
                    self._heads[key] = with_gradients(
                        run, inputs, compiler=self.settings.compiler, summed=len(piece.specs)
                    )
                else:
                    self._heads[key] = without_gradients(run, inputs, compiler=self.settings.compiler)
        return self._heads[key]

    def logprobs(self, piece: Piece, tokens: int, temperature: float = 1.0) -> _Call:
        """Log-probabilities of a chunk's labels: ([*tensors of the head, x_ND, labels_N]) → [logprob_N]."""
        key = (tokens, f"logprobs at {temperature}")
        if key not in self._heads:
            model = self.plan.assembly.model

            def run(*flat: Tensor) -> Tensor:
                head = {spec.name: tensor for spec, tensor in zip(piece.specs, flat, strict=False)}
                x_ND, labels_N = flat[len(piece.specs) :]
                logits_NV = model.logits(x_ND, head)
                # As an objective at a temperature has it, to the bit.
                tempered_NV = logits_NV if temperature == 1 else ops.wide(logits_NV) / temperature
                return -ops.cross_entropy(tempered_NV, labels_N)

            inputs = [*self._inputs(piece), self._activation(tokens, requires_grad=True)]
            with self._making("tracing the head for log-probabilities"):
                self._heads[key] = without_gradients(
                    run, [*inputs, Signature((tokens,), torch.int64, self.device)], compiler=self.settings.compiler
                )
        return self._heads[key]

    def sequence_loss(self) -> _Call:
        """The objective's `sequence_loss`: ([loss_N, positions_N, *columns_N, d_loss]) → [summed loss, d_loss_N]."""
        if self._sequence_loss is None:
            function, names, n = self.plan.assembly.objective.sequence_loss, self.settings.columns, self.settings.tokens
            assert function is not None

            def run(loss_N: Tensor, positions_N: Tensor, *columns_N: Tensor) -> Tensor:
                return function(loss_N, positions_N, dict(zip(names, columns_N, strict=True)))

            inputs = [Signature((n,), torch.float32, self.device, True), Signature((n,), torch.int32, self.device)]
            inputs += [Signature((n,), torch.float32, self.device)] * len(names)
            with self._making("differentiating the loss of sequences"):
                self._sequence_loss = with_gradients(run, inputs, compiler=self.settings.compiler)
        return self._sequence_loss

    def sequence_figures(self) -> _Call:
        """The objective's `sequence_figures`: ([loss_N, positions_N, *columns_N]) → [figures_F]."""
        if self._sequence_figures is None:
            objective, names, n = self.plan.assembly.objective, self.settings.columns, self.settings.tokens

            def run(loss_N: Tensor, positions_N: Tensor, *columns_N: Tensor) -> Tensor:
                return of_sequences(objective, loss_N, positions_N, dict(zip(names, columns_N, strict=True)))

            inputs = [Signature((n,), torch.float32, self.device), Signature((n,), torch.int32, self.device)]
            inputs += [Signature((n,), torch.float32, self.device)] * len(names)
            with self._making("tracing the figures of sequences"):
                self._sequence_figures = without_gradients(run, inputs, compiler=self.settings.compiler)
        return self._sequence_figures
