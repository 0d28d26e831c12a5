"""The engine: a model that is ready to train on one device.

It is built in phases (plan → allocate → load → compile → capture) and then takes optimizer steps. step.py runs a
micro-step, update.py an optimizer step, and graphs.py captures their CUDA graphs.

Shape suffixes: N tokens of a micro-batch, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.bundles import Optimizer, RecipeState
from surogate_core.engine.assembly import Assembly
from surogate_core.engine.device_memory import grow_segments
from surogate_core.engine.host_memory import keep_freed_pages
from surogate_core.engine.inputs import Inputs
from surogate_core.engine.parameters import Parameters, Source
from surogate_core.engine.placement import Placement
from surogate_core.engine.plan import EnginePlan
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.step import LOSSES_IN_FP32, LossSum, MicroStep, RecipeRows, SideSums, StoreSet
from surogate_core.engine.update import StepResult, Update, norm_of

Progress = Callable[[str, int, int], None]
"""(task, done, total): a progress report of long work."""


def _silent(task: str, done: int, total: int) -> None:
    """Report nothing."""


class Engine:
    """A model that is ready to train on one device."""

    def __init__(self, assembly: Assembly, source: Source, *, progress: Progress = _silent):
        """Allocate, fill from `source`, compile and capture according to `assembly`."""
        self.assembly, self.settings, self.model = assembly, assembly.settings, assembly.model
        if self.settings.device.type == "cpu":
            keep_freed_pages()
        else:
            grow_segments()
        self.plan = EnginePlan.of(assembly, device=self.settings.device)
        placement = Placement(offloader=assembly.offloader, stores=assembly.stores, device=self.settings.device)
        self._allocate(placement)
        self._load(source, progress)
        self._prepare_steps(placement, progress)
        self._compile()
        self._capture(progress)

    # --------------------------------------------------------------------------- phases

    def _allocate(self, placement: Placement) -> None:
        """The stores, the inputs, the recipe's state and the parameters."""
        settings, weights = self.settings, self.plan.weights
        self.stores = StoreSet.of(placement)
        self.inputs = Inputs.allocate(settings, len(self.plan.layers))
        state = self.assembly.recipe.state(self.plan.slots, settings.device)
        self.rows = None if state is None else RecipeRows(state, self.plan.rows)
        updating = torch.device("cpu") if settings.update_on_cpu else settings.device
        self._rounding_seed = torch.zeros((), dtype=torch.int32, device=updating)
        self.parameters = Parameters(
            self.plan.pieces,
            panels=weights.panels,
            joins=weights.joins,
            packed=weights.packed,
            weights=self.stores.weights,
            device=settings.device,
            dtype=settings.dtype,
            adapter_dtype=settings.adapter_dtype,
            weight_decay=settings.weight_decay,
            master_dtype=settings.master_dtype,
            seed=self._rounding_seed,
            placement=placement,
        )

    def _load(self, source: Source, progress: Progress) -> None:
        """Load every weight from the source, and put the gradient sums into their store."""
        quantising = " and quantising" if any(p.rounded for p in self.plan.weights.packed.values()) else ""
        task = f"loading{quantising} weights"
        self.parameters.fill(source, progress=lambda done, total: progress(task, done, total))
        for piece in self.plan.pieces:
            self.stores.gradients.put(piece.key, self.parameters.resting_gradients(piece))

    def _prepare_steps(self, placement: Placement, progress: Progress) -> None:
        """The optimizer, and the micro-step and optimizer step that run without graphs."""
        settings, streams = self.settings, self.stores.streams_gradients
        norm = norm_of(self.parameters, self.assembly, streams_gradients=streams)
        self.losses = LossSum(settings.device)
        self.sides = SideSums(self.plan.layers, settings.device)
        self.update = Update(
            self.assembly,
            self.parameters,
            placement=placement,
            norm=norm,
            losses=self.losses,
            rows=self.rows,
            sides=self.sides,
            rounding_seed=self._rounding_seed,
            clears_gradients=not streams,
        )
        self.programs = ProgramBuilder(
            plan=self.plan,
            parameters=self.parameters,
            columns=0 if self.rows is None else self.rows.state.rows.shape[1],
            device=settings.device,
            progress=progress,
        )
        self.step = MicroStep(
            plan=self.plan,
            inputs=self.inputs,
            parameters=self.parameters,
            programs=self.programs,
            stores=self.stores,
            norm=norm,
            losses=self.losses,
            rows=self.rows,
            sides=self.sides,
        )

    def _compile(self) -> None:
        """All programs of training; those of evaluation are compiled at the first evaluation."""
        for piece in self.plan.layers:
            self.programs.layer(piece)
        for chunk in self.programs.chunks():
            self.programs.head(self.plan.head, chunk.stop - chunk.start, training=True)
            if self.assembly.objective.sequence_loss is not None:
                self.programs.head(self.plan.head, chunk.stop - chunk.start, training=False)
                self.programs.sequence_loss()

    def _capture(self, progress: Progress) -> None:
        """Replace the micro-step and the optimizer step by their CUDA graphs, if they can be captured."""
        settings = self.settings
        self._sums_hold = False
        """Whether the gradient sums contain micro-steps; otherwise they count as zeros."""
        self._micro_step: Callable[[bool], None] = self.step.train
        self._update: Callable[[], None] = self.update.run
        self._evaluate: Callable[[], None] = self.step.evaluate
        self._captured: torch.cuda.CUDAGraph | None = None
        """A graph beside which that of the evaluation is to be captured."""
        if settings.device.type != "cuda" or not settings.cuda_graphs or not self.assembly.offloader.addressable:
            return
        from surogate_core.engine.graphs import capture

        progress("capturing CUDA graphs", 0, 1)
        self._micro_step, self._update, self._captured = capture(
            self.step.train,
            self.update.run,
            spoil=self.update.spoil,
            first_differs=self.stores.streams_gradients,
            update_on_cpu=settings.update_on_cpu,
        )
        progress("capturing CUDA graphs", 1, 1)

    def _capture_evaluation(self) -> None:
        """After the first micro-batch, which compiles the evaluation's programs, replace it by its CUDA graph."""
        beside, self._captured = self._captured, None
        if beside is not None:
            from surogate_core.engine.graphs import capture_evaluation

            self._evaluate = capture_evaluation(self.step.evaluate, beside)

    # --------------------------------------------------------------------------- public

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the run."""
        return self.update.optimizer

    @property
    def recipe_state(self) -> RecipeState | None:
        """The state of the recipe, or None."""
        return None if self.rows is None else self.rows.state

    def slot_names(self) -> list[str]:
        """The name of each row of the recipe's state, such as ``layer 3 self_attn.q_proj``."""
        return [f"{piece.key} {slot.module}" for piece in self.plan.layers for slot in piece.slots]

    def seeds(self, step: int, micro_step: int) -> Tensor:
        """[L] int32 dropout seeds of a micro-step."""
        sequence = np.random.SeedSequence([self.settings.seed, step, micro_step])
        return torch.from_numpy(sequence.generate_state(len(self.plan.layers), np.uint32).view(np.int32))

    def _accumulate(self, batches: Sequence[MicroBatch], *, step: int, loss_weight: float) -> None:
        together = max(1, LOSSES_IN_FP32 // len(self.programs.chunks()))
        for micro_step, batch in enumerate(batches):
            if micro_step and micro_step % together == 0:
                self.losses.fold()
            scale = 1 / (loss_weight or 1)
            self.inputs.load(batch, self.seeds(step, micro_step), scale, side_scale=1 / len(batches))
            self._micro_step(not self._sums_hold)
            self._sums_hold = True

    @torch.no_grad()
    def train_step(self, batches: Sequence[MicroBatch], *, step: int, lr: float) -> StepResult:
        """One optimizer step over the micro-batches; `step` counts from 0.

        The loss is averaged over the label tokens of all of them, by their weights.
        """
        loss_weight = sum(b.loss_weight for b in batches)
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        self.update.set(lr=lr, step=step)
        self._update()
        self._sums_hold = False
        return self.update.result(
            label_tokens=sum(b.label_tokens for b in batches),
            loss_weight=loss_weight,
            tokens=sum(b.tokens for b in batches),
            micro_steps=len(batches),
        )

    @torch.no_grad()
    def accumulate(self, batches: Sequence[MicroBatch], *, step: int = 0) -> float:
        """Run the micro-steps of a step without its update: gradients stay in the groups. Returns the mean loss."""
        loss_weight = sum(b.loss_weight for b in batches)
        self.losses.take()
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        return self.losses.take().item() / (loss_weight or 1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss per label token, each by its weight; label tokens) without dropout; touches no gradient."""
        label_tokens, loss_weight = 0, 0.0
        total = torch.zeros_like(self.losses.take())
        seeds = self.seeds(0, 0)
        for batch in batches:
            self.inputs.load(batch, seeds, 0.0)
            self._evaluate()
            total += self.losses.take()
            self._capture_evaluation()
            label_tokens += batch.label_tokens
            loss_weight += batch.loss_weight
        return total.item() / (loss_weight or 1), label_tokens

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] logits of a micro-batch, without dropout; for checks, not for training."""
        self.inputs.load(batch, self.seeds(0, 0), 0.0)
        x_ND, head = self.step.hidden(), self.plan.head
        tensors = zip(head.specs, self.parameters.inputs(head), strict=True)
        return self.model.logits(x_ND, {spec.name: tensor for spec, tensor in tensors})

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors of a checkpoint, by file: masters by HF name, the optimizer's and the recipe's state."""
        files = {"trainable": dict(self.parameters.masters()), "optimizer": self.optimizer.state()}
        if self.rows is not None:
            files["recipe"] = self.rows.state.state()
        return files

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the live ones; names and shapes must agree."""
        for file, live in self.state().items():
            saved = state[file]
            other = live.keys() ^ saved.keys() or {n for n, t in live.items() if t.shape != saved[n].shape}
            if other:
                listed = ", ".join(sorted(other)[:5])
                raise ValueError(f"checkpoint file {file}: tensors differ from this run's: {listed}")
        for file, live in self.state().items():
            for name, tensor in live.items():
                tensor.copy_(state[file][name])
        self.parameters.refresh()
