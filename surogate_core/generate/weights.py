"""The weights that generation reads: those of an engine that trains, or a model that is loaded for this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surogate_core.bundles import Store
from surogate_core.bundles.handed import ModelWeights, TrainedModel, whole
from surogate_core.dsl import Model
from surogate_core.dsl.declare import LoRA
from surogate_core.dsl.tensors import TensorSpec
from surogate_core.dsl.trace import Function
from surogate_core.engine.engine import Engine
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import Piece, Relayed, Source
from surogate_core.engine.planning.plan import EnginePlan
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.step import RecipeRows, StoreSet
from surogate_core.engine.stores import DeviceStore
from surogate_core.mesh.axes import Axes
from surogate_core.mesh.mesh import Mesh

Layer = Callable[[Tensor, Sequence[Tensor], Relayed], Tensor]
"""(x_ND, tables, what earlier layers gave for these rows) → [N, D], without dropout. It adds what the layer gives to
later ones, and drops what none takes any more.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model's weights where they are, and the functions of its layers."""

    plan: EnginePlan
    parameters: Parameters
    programs: ProgramBuilder
    store: Store
    rows: RecipeRows | None
    compiled: dict[Any, Function] = field(default_factory=dict)
    """(signature of a layer, rows) → its program for generation, which all engines share."""
    seeds: tuple[Tensor, Tensor] = field(init=False)
    """What layers take as seeds, and do not read. Made anew they would be two launches for each layer of a step."""

    def __post_init__(self) -> None:
        seeds = tuple(torch.zeros(shape, dtype=torch.int32, device=self.device) for shape in ((2,), ()))
        object.__setattr__(self, "seeds", seeds)

    @classmethod
    def of(cls, engine: Engine) -> Weights:
        """The weights of an engine that trains; nothing is copied."""
        return cls(
            plan=engine.plan,
            parameters=engine.parameters,
            programs=engine.programs,
            store=engine.stores.weights,
            rows=engine.rows,
        )

    @classmethod
    def load(
        cls, assembly: Assembly, source: Source, *, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> Weights:
        """Weights without gradients, optimizer or programs of training."""
        settings = assembly.settings
        plan = EnginePlan.of(assembly, device=settings.device)
        placement = Placement(
            offloader=assembly.offloader, stores=assembly.stores, device=settings.device, updates_on_cpu=False
        )
        sharing = Sharing.of(Mesh(), Axes())
        store = StoreSet.of(placement, sharing, plan).weights
        parameters = Parameters(
            plan.pieces,
            plan=plan.weights,
            weights=store,
            device=settings.device,
            dtype=settings.dtype,
            adapter_dtype=settings.adapter_dtype,
            weight_decay=0.0,
            placement=placement,
            sharing=sharing,
        )
        parameters.fill(source, progress=progress)
        state = assembly.recipe.state(plan.slots, settings.device)
        rows = None if state is None else RecipeRows(state, plan.rows)
        columns = 0 if rows is None else rows.state.rows.shape[1]
        programs = ProgramBuilder(plan=plan, parameters=parameters, columns=columns, device=settings.device)
        return cls(plan=plan, parameters=parameters, programs=programs, store=store, rows=rows)

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.parameters.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the forward."""
        return self.parameters.dtype

    @property
    def model(self) -> Model:
        """What its family declares."""
        return self.plan.assembly.model

    @property
    def lora(self) -> LoRA | None:
        """Where the adapters are and their form; None without adapters."""
        return self.plan.assembly.lora

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Name → the declaration of each tensor."""
        return self.parameters.specs

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, value) of each adapter's tensors."""
        return self.parameters.adapter_tensors()

    def layers(self, function: Callable[[Piece], Function] | None = None) -> Iterator[Layer]:
        """The layers in order, each with its weights until the next one is asked for.

        `function`: that of a layer, by default `ProgramBuilder.layer_function`.
        """
        self.store.begin_pass()
        for piece in self.plan.layers:
            yield self._layer(piece, function or self._function)
            self.store.release(piece.key)

    def _function(self, piece: Piece) -> Function:
        return self.programs.layer_function(piece, training=False)

    def _inputs(self, piece: Piece) -> list[Tensor]:
        """A piece's tensors; ranks that share them out gather them together."""
        self.parameters.before_fetch(piece.key)
        return self.parameters.inputs(piece)

    def _layer(self, piece: Piece, function_of: Callable[[Piece], Function]) -> Layer:
        tensors = self._inputs(piece)
        shared = [*self.parameters.panel_tensors(piece), *self.parameters.join_tensors(piece, tensors)]
        rows = [self.rows.rows(piece.key)] if self.rows is not None and self.programs.reads_rows(piece) else []
        fixed = [*tensors, *(tensor for _, tensor in shared), *rows]
        function = function_of(piece)

        last = self.plan.last_taken(piece)

        def run(x_ND: Tensor, tables: Sequence[Tensor], relayed: Relayed) -> Tensor:
            found = function(*fixed, x_ND, *piece.taken(relayed).values(), *tables, *self.seeds)
            y_ND, *given = [found] if isinstance(found, Tensor) else found
            piece.keep(relayed, given)
            for source in last:
                del relayed[source]
            return y_ND

        return run

    def not_finite(self) -> str | None:
        """The first weight, from the embedding to the head, that has NaN or infinity; None if all are finite."""
        self.store.begin_pass()
        for piece in (self.plan.embed, *self.plan.layers, self.plan.head):
            pairs = zip(piece.specs, self._inputs(piece), strict=True)
            wide = ((s.hf_name, t) for s, t in pairs if t.is_floating_point() and t.itemsize > 1)
            found = next((name for name, tensor in wide if not bool(torch.isfinite(tensor).all())), None)
            self.store.release(piece.key)
            if found is not None:
                return found
        return None

    def embedded(self, ids_N: Tensor) -> Tensor:
        """[N, D]: the rows of the embedding."""
        (weight,) = self._inputs(self.plan.embed)
        x_ND = self.plan.assembly.model.embedded(ids_N, weight)
        self.store.release(self.plan.embed.key)
        return x_ND

    def logits(self, x_ND: Tensor) -> Tensor:
        """[N, V]: the head."""
        head = self.plan.head
        tensors = {s.name: t for s, t in zip(head.specs, self._inputs(head), strict=True)}
        found = self.plan.assembly.model.logits(x_ND, tensors)
        self.store.release(head.key)
        return found


def weights_of(model: TrainedModel) -> ModelWeights:
    """The weights of a model that is trained, as rollout engines take them; nothing is copied."""
    return Weights.of(whole(Engine, model))


def without_values(programs: ProgramBuilder) -> Weights:
    """The weights of an engine on the device ``meta``, to predict what generation needs."""
    return Weights(
        plan=programs.plan, parameters=programs.parameters, programs=programs, store=DeviceStore("weights"), rows=None
    )
