"""The engine: carries out the schedule for micro-steps, the optimizer step and evaluation.

Shape suffixes: N tokens of a micro-batch, D features, S document borders, L layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surogate_core.batch import MicroBatch
from surogate_core.bundles import (
    GradientStore,
    Objective,
    OffloaderSpec,
    Optimizer,
    OptimizerSpec,
    RangedState,
    Recipe,
    Store,
    Stores,
    TensorKind,
    WeightFormat,
)
from surogate_core.dsl.declare import LoRA, Model
from surogate_core.dsl.products import Product, add_products
from surogate_core.dsl.trace import Compiler, Recompute, Signature
from surogate_core.engine.device_memory import grow_segments
from surogate_core.engine.gradient_norm import FlatNorm, StreamedNorm
from surogate_core.engine.host_memory import keep_freed_pages
from surogate_core.engine.parameters import Parameters, Source, pieces
from surogate_core.engine.placement import Placement
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.schedule import EMBED, Action, evaluation_schedule, training_schedule
from surogate_core.engine.weight_plan import WeightPlan, plain_layers
from surogate_core.kernels.cpu_updates import host_kernels
from surogate_core.kernels.registry import KernelTable, using


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What shapes an engine besides the model and its plugins."""

    device: torch.device
    dtype: torch.dtype
    """Dtype of weights and activations."""
    adapter_dtype: torch.dtype
    compiler: Compiler
    cuda_graphs: bool
    tokens: int
    """N of every micro-batch."""
    borders: int
    """S of every micro-batch."""
    max_seqlen: int
    head_chunks: int
    recompute: Recompute
    weight_decay: float
    max_grad_norm: float
    """0 does not clip."""
    seed: int
    """Seed of dropout; a mask depends on it, the step, the micro-step, the layer and the slot."""
    weighted: bool = False
    """Whether every micro-batch carries loss weights."""
    plain_first: int = 0
    """Layers from the first that the recipe leaves alone."""
    plain_last: int = 0
    """Layers up to the last that the recipe leaves alone."""
    master_dtype: torch.dtype = torch.float32
    """float32, or bfloat16 written with stochastic rounding."""
    update_on_cpu: bool = False
    """Whether the CPU carries out the optimizer step, on masters and gradients that live in its memory."""


@dataclass(slots=True)
class Inputs:
    """The device tensors that a micro-step reads; their addresses never change on CUDA."""

    input_ids: Tensor
    labels: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    seeds_L: Tensor
    """Four apart: Inductor's programs copy an input that does not begin at a multiple of 16 bytes."""
    loss_scale: Tensor
    """0-d fp32: 1 / loss weight of the whole optimizer step, the number of its label tokens where each counts 1."""
    weights: Tensor | None
    """[N] fp32 loss weights, where the run has any."""

    @classmethod
    def allocate(cls, settings: EngineSettings, layers: int) -> Inputs:
        """Zeroed tensors of a run's shapes."""
        n, device = settings.tokens, settings.device
        return cls(
            input_ids=torch.zeros(n, dtype=torch.int64, device=device),
            labels=torch.zeros(n, dtype=torch.int64, device=device),
            positions=torch.zeros(n, dtype=torch.int32, device=device),
            cu_seqlens=torch.zeros(settings.borders, dtype=torch.int32, device=device),
            seeds_L=torch.zeros(layers, 4, dtype=torch.int32, device=device)[:, 0],
            loss_scale=torch.zeros((), dtype=torch.float32, device=device),
            weights=torch.zeros(n, dtype=torch.float32, device=device) if settings.weighted else None,
        )

    def load(self, batch: MicroBatch, seeds: Tensor, loss_scale: float) -> None:
        """Copy a micro-batch in, without waiting for the device."""
        pairs = [
            (self.input_ids, batch.input_ids),
            (self.labels, batch.labels),
            (self.positions, batch.positions),
            (self.cu_seqlens, batch.cu_seqlens),
            (self.seeds_L, seeds),
        ]
        if self.weights is not None:
            assert batch.weights is not None
            pairs.append((self.weights, batch.weights))
        for target, value in pairs:
            if target.device.type == "cuda" and not value.is_pinned():
                value = value.pin_memory()
            target.copy_(value, non_blocking=True)
        self.loss_scale.fill_(loss_scale)


@dataclass(slots=True)
class StepResult:
    """An optimizer step's figures; reading them waits for the device if it is behind."""

    label_tokens: int
    loss_weight: float
    tokens: int
    _figures: Tensor
    _ready: torch.cuda.Event | None

    def read(self) -> tuple[float, float]:
        """(mean loss per label token, each by its weight; gradient norm before clipping)."""
        if self._ready is not None:
            self._ready.synchronize()
        loss_sum, norm = self._figures[:2].tolist()
        return loss_sum / (self.loss_weight or 1), norm

    def used_range(self, columns: int) -> Tensor:
        """[P, K] fp32 on the host, of a recipe whose state is a `RangedState` with K `columns`."""
        if self._ready is not None:
            self._ready.synchronize()
        return self._figures[2:].view(-1, columns)


@dataclass(slots=True)
class _Flow:
    """Activations on their way through the schedule."""

    tables: list[Tensor] = field(default_factory=list)
    x: Tensor | None = None
    dx: Tensor | None = None
    residuals: Sequence[Tensor] = ()
    gradients: Sequence[tuple[Tensor, Tensor | Product]] = ()
    """(sum, what is to be added to it) of the piece's trainable tensors."""
    pending: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(sum, gradient) of tensors whose gradients are still to be added."""

    def add_pending(self) -> None:
        """Add what is pending, in one go: a layer's adapters alone do not fill a GPU."""
        if self.pending:
            sums, gradients = zip(*self.pending, strict=True)
            torch._foreach_add_(list(sums), list(gradients))
            self.pending.clear()


PENDING_BYTES = 32 * 2**20
"""Gradients of several layers are added together up to so many."""
LOSSES_IN_FP32 = 32
"""Number of losses of micro-steps and chunks that are added in fp32 before the sum moves to float64."""


class Engine:
    """A model made ready to train on one device."""

    def __init__(
        self,
        model: Model,
        *,
        settings: EngineSettings,
        recipe: Recipe,
        objective: Objective,
        optimizer: OptimizerSpec,
        optimizer_options: Any,
        offloader: OffloaderSpec,
        stores: Stores,
        kernels: KernelTable,
        lora: LoRA | None,
        source: Source,
        weight_format: WeightFormat | None = None,
        skips: Callable[[str], bool] = lambda name: False,
        progress: Callable[[str, int, int], None] = lambda task, done, total: None,
    ):
        if settings.device.type == "cpu":
            keep_freed_pages()
        else:
            grow_segments()
        self.model, self.settings = model, settings
        found = pieces(model, lora=lora, max_seqlen=settings.max_seqlen)
        self.embed, *layers, self.head = found
        self.layers = {piece.key: piece for piece in layers}
        self._layer_number = {key: i for i, key in enumerate(self.layers)}
        placement = Placement(offloader=offloader, stores=stores, device=settings.device)
        self.weights: Store = placement.store("weights")
        self.residuals: Store = placement.store("residuals")
        self.gradients: GradientStore = placement.gradients()
        self.streams_gradients = placement.moves("gradients")
        """Whether a piece's sums are on the device only while its backward runs."""
        self._sums_hold = False
        """Whether the sums of gradients hold micro-steps; if not, they count as zeros."""
        self.inputs = Inputs.allocate(settings, len(layers))
        tables = {name: Signature.of(t) for name, t in self._tables().items()}
        plain = plain_layers(found, first=settings.plain_first, last=settings.plain_last)
        self._allocate_recipe_state(recipe)
        updating = torch.device("cpu") if settings.update_on_cpu else settings.device
        self._rounding_seed = torch.zeros((), dtype=torch.int32, device=updating)
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
            tables=tables,
            weight_format=weight_format,
            skips=skips,
        )
        self.parameters = Parameters(
            found,
            panels=plan.panels,
            joins=plan.joins,
            packed=plan.packed,
            weights=self.weights,
            device=settings.device,
            dtype=settings.dtype,
            adapter_dtype=settings.adapter_dtype,
            weight_decay=settings.weight_decay,
            master_dtype=settings.master_dtype,
            seed=self._rounding_seed,
            placement=placement,
        )
        quantising = " and quantising" if any(p.rounded for p in plan.packed.values()) else ""
        self.parameters.fill(source, progress=lambda done, total: progress(f"loading{quantising} weights", done, total))
        self._groups = self.parameters.host_groups if settings.update_on_cpu else self.parameters.groups
        for piece in found:
            self.gradients.put(piece.key, self.parameters.resting_gradients(piece))
        self.norm = FlatNorm(self._groups)
        if settings.update_on_cpu and settings.device.type == "cuda" and self.streams_gradients:
            trained = [spec.hf_name for spec in self.parameters.specs.values() if spec.trainable]
            self.norm = StreamedNorm(found, trained, settings.device)
        with placement.allocating("optimizer"):
            self.optimizer: Optimizer = optimizer.build(self._groups, optimizer_options)
        self.train_embedding = self.embed.specs[0].trainable
        self.training = training_schedule(len(layers), train_embedding=self.train_embedding)
        self.evaluation = evaluation_schedule(len(layers))
        self.programs = ProgramBuilder(
            model=model,
            parameters=self.parameters,
            recipe=recipe,
            plain=plain,
            columns=0 if self.recipe_state is None else self.recipe_state.rows.shape[1],
            objective=objective,
            kernels=kernels,
            device=settings.device,
            tokens=settings.tokens,
            tables=tables,
            head_chunks=settings.head_chunks,
            weighted=settings.weighted,
            recompute=settings.recompute,
            compiler=settings.compiler,
            progress=progress,
        )
        self.loss_sum = torch.zeros((), dtype=torch.float32, device=settings.device)
        self._earlier_losses = torch.zeros((), dtype=torch.float64, device=settings.device)
        self._host_kernels = host_kernels(compiled=settings.compiler == "inductor")
        self._lr = torch.zeros((), dtype=torch.float32, device=updating)
        ranges = self.recipe_state.rows.numel() if isinstance(self.recipe_state, RangedState) else 0
        self._figures = torch.zeros(2 + ranges, dtype=torch.float32, device=settings.device)
        self._compile()
        self._micro_step: Callable[[bool], None] = self._run_training
        self._update: Callable[[], None] = self._run_update
        if settings.device.type == "cuda" and settings.cuda_graphs and offloader.addressable:
            from surogate_core.engine.graphs import capture

            progress("capturing CUDA graphs", 0, 1)
            self._micro_step, self._update = capture(self)
            progress("capturing CUDA graphs", 1, 1)

    def _allocate_recipe_state(self, recipe: Recipe) -> None:
        self._rows: dict[str, slice] = {}
        count = 0
        for piece in self.layers.values():
            self._rows[piece.key] = slice(count, count + len(piece.slots))
            count += len(piece.slots)
        self.recipe_state = recipe.state(count, self.settings.device)
        if self.recipe_state is not None:
            self._observed = torch.zeros_like(self.recipe_state.rows)

    def _compile(self) -> None:
        for piece in self.layers.values():
            self.programs.layer(piece)
        for chunk in self.programs.chunks():
            self.programs.head(self.head, chunk.stop - chunk.start, training=True)

    # ------------------------------------------------------------------------- schedule

    def _tables(self) -> dict[str, Tensor]:
        tables = self.model.tables(self.inputs.positions, self.settings.dtype)
        return {**tables, "cu_seqlens": self.inputs.cu_seqlens}

    def _layer_inputs(self, key: str, flow: _Flow, x: Tensor) -> list[Tensor]:
        seed = self.inputs.seeds_L[self._layer_number[key]]
        piece = self.layers[key]
        tensors = self.parameters.inputs(piece)
        shared = [*self.parameters.panel_tensors(piece), *self.parameters.join_tensors(piece, tensors)]
        panels = (tensor for _, tensor in shared)
        rows = []
        if self.recipe_state is not None and self.programs.reads_rows(piece):
            rows.append(self.recipe_state.rows[self._rows[key]])
        return [*tensors, *panels, *rows, x, *flow.tables, seed]

    def _store(self, kind: TensorKind | None) -> Store:
        """The store that an action of the schedule is about."""
        match kind:
            case "residuals":
                return self.residuals
            case "gradients":
                return self.gradients
        return self.weights

    def _run(self, schedule: Sequence[Action], *, training: bool) -> None:
        flow = _Flow()
        for action in schedule:
            match action.verb:
                case "tables":
                    flow.tables = list(self._tables().values())
                case "prefetch":
                    self._store(action.kind).prefetch(action.key)
                case "fetch":
                    if action.kind == "residuals":
                        flow.residuals = self.residuals.fetch(action.key)
                case "release":
                    if action.kind == "gradients" and self.streams_gradients:
                        flow.add_pending()
                        self.norm.measure(action.key, self.gradients.fetch(action.key))
                    self._store(action.kind).release(action.key)
                case "forward":
                    self._forward(action.key, flow, training=training)
                case "put":
                    self.residuals.put(action.key, flow.residuals)
                    flow.residuals = ()
                case "loss":
                    self._loss(flow, training=training)
                case "backward":
                    self._backward(action.key, flow)
                case "reduce":
                    self._reduce(action.key, flow)
        flow.add_pending()

    def _forward(self, key: str, flow: _Flow, *, training: bool) -> None:
        if key == EMBED:
            (weight,) = self.parameters.inputs(self.embed)
            flow.x = torch.nn.functional.embedding(self.inputs.input_ids, weight)
            return
        x = flow.x
        assert x is not None
        piece = self.layers[key]
        if training:
            program = self.programs.layer(piece)
            flow.x, *kept = program.forward(self._layer_inputs(key, flow, x))
            flow.residuals = (x, *kept)
        else:
            (flow.x,) = self.programs.evaluation_layer(piece)(self._layer_inputs(key, flow, x))

    def _loss(self, flow: _Flow, *, training: bool) -> None:
        x, flow.x = flow.x, None
        assert x is not None
        tensors = self.parameters.inputs(self.head)
        labels = self.inputs.labels
        dx = torch.empty_like(x) if training else None
        sums = self.gradients.fetch(self.head.key) if training else ()
        totals: list[tuple[Tensor, Tensor]] = []
        for number, chunk in enumerate(self.programs.chunks()):
            if number and number % LOSSES_IN_FP32 == 0:
                self._fold_loss()
            program = self.programs.head(self.head, chunk.stop - chunk.start, training=training)
            arguments = [*tensors, x[chunk], labels[chunk]]
            if self.inputs.weights is not None:
                arguments.append(self.inputs.weights[chunk])
            if dx is None:
                self.loss_sum.add_(program(arguments)[0])
                continue
            loss, *gradients, dx[chunk] = program([*arguments, self.inputs.loss_scale])
            self.loss_sum.add_(loss)
            # At once: the factors of a product are a chunk's logits.
            plain = add_products(zip(sums, gradients, strict=True))
            totals = [(a, t.add_(g)) for (a, t), (_, g) in zip(totals, plain, strict=True)] if totals else plain
            # Else they would live while the next chunk's are made.
            del gradients, plain
        flow.dx, flow.gradients = dx, totals

    def _fold_loss(self) -> None:
        """Move the sum of losses to float64: a long sum in fp32 loses digits of each addend."""
        self._earlier_losses.add_(self.loss_sum)
        self.loss_sum.zero_()

    def _take_loss(self) -> Tensor:
        """0-d float64: the sum of losses, which is reset."""
        self._fold_loss()
        total = self._earlier_losses.clone()
        self._earlier_losses.zero_()
        return total

    def _backward(self, key: str, flow: _Flow) -> None:
        dx = flow.dx
        assert dx is not None
        if key == EMBED:
            flow.gradients = ()
            return
        x, *kept = flow.residuals
        flow.residuals = ()
        piece = self.layers[key]
        *gradients, flow.dx = self.programs.layer(piece).backward([*self._layer_inputs(key, flow, x), *kept, dx])
        if self.programs.reads_rows(piece):
            # NaN stays NaN: the recipe is to see that there was one.
            observed = self._observed[self._rows[key]]
            torch.maximum(observed, gradients.pop(), out=observed)
        flow.gradients = list(zip(self.gradients.fetch(key), gradients, strict=True))

    def _reduce(self, key: str, flow: _Flow) -> None:
        if key == EMBED:
            assert flow.dx is not None
            flow.add_pending()  # a tied head's share comes first
            (gradient,) = self.gradients.fetch(EMBED)
            _add_embedding_gradient(gradient, self.inputs.input_ids, flow.dx)
        else:
            flow.pending += add_products(flow.gradients)
            if sum(gradient.nbytes for _, gradient in flow.pending) >= PENDING_BYTES:
                flow.add_pending()
        flow.gradients = ()

    def _run_training(self, first: bool = True) -> None:
        self.gradients.begin(first=first)
        self._run(self.training, training=True)
        self.gradients.finish()

    def _run_update(self) -> None:
        """Clip, step, refresh the compute copies, clear the gradients: the host waits only for a step of its own."""
        groups, on_host = self._groups, self.settings.update_on_cpu
        if on_host and self.settings.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        norm = self.norm.read()
        clip = torch.ones_like(norm)
        if self.settings.max_grad_norm > 0:
            clip = (self.settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        skip = (~torch.isfinite(norm)).float()
        with using(self._host_kernels if on_host else self.programs.kernels):
            self.optimizer.step(lr=self._lr, clip=clip, skip=skip)
        self._figures[:2].copy_(torch.stack((self._take_loss().float(), norm.to(self.settings.device))))
        if self.recipe_state is not None:
            if isinstance(self.recipe_state, RangedState):
                self._figures[2:].copy_(self.recipe_state.used_range(self._observed).view(-1))
            self.recipe_state.update(self._observed, skip.to(self.settings.device))
            self._observed.zero_()
        self.parameters.refresh(on_host=on_host)
        if not self.streams_gradients:
            for group in groups:
                group.grad.zero_()

    def _accumulate(self, batches: Sequence[MicroBatch], *, step: int, loss_weight: float) -> None:
        together = max(1, LOSSES_IN_FP32 // len(self.programs.chunks()))
        for micro_step, batch in enumerate(batches):
            if micro_step and micro_step % together == 0:
                self._fold_loss()
            self.inputs.load(batch, self.seeds(step, micro_step), 1 / (loss_weight or 1))
            self._micro_step(not self._sums_hold)
            self._sums_hold = True

    # --------------------------------------------------------------------------- public

    def slot_names(self) -> list[str]:
        """Of each row of the recipe's state, such as ``layer 3 self_attn.q_proj``."""
        return [f"{key} {slot.module}" for key, piece in self.layers.items() for slot in piece.slots]

    def seeds(self, step: int, micro_step: int) -> Tensor:
        """[L] int32 dropout seeds of a micro-step."""
        sequence = np.random.SeedSequence([self.settings.seed, step, micro_step])
        return torch.from_numpy(sequence.generate_state(len(self.layers), np.uint32).view(np.int32))

    def rounding_seed(self, step: int) -> int:
        """Seed of the stochastic rounding of a step's masters, an int32: all that a resumed run needs is the step."""
        sequence = np.random.SeedSequence([self.settings.seed, step], spawn_key=(1,))
        return int(sequence.generate_state(1, np.uint32).view(np.int32)[0])

    @torch.no_grad()
    def train_step(self, batches: Sequence[MicroBatch], *, step: int, lr: float) -> StepResult:
        """One optimizer step over the micro-batches; `step` counts from 0.

        The loss is averaged over the label tokens of all of them, by their weights.
        """
        label_tokens = sum(b.label_tokens for b in batches)
        loss_weight = sum(b.loss_weight for b in batches)
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        self._lr.fill_(lr)
        self._rounding_seed.fill_(self.rounding_seed(step))
        self._update()
        self._sums_hold = False
        tokens = sum(b.tokens for b in batches)
        if self.settings.device.type != "cuda":
            return StepResult(label_tokens, loss_weight, tokens, self._figures.clone(), None)
        figures = torch.empty(self._figures.shape, dtype=torch.float32, pin_memory=True)
        figures.copy_(self._figures, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return StepResult(label_tokens, loss_weight, tokens, figures, ready)

    @torch.no_grad()
    def accumulate(self, batches: Sequence[MicroBatch], *, step: int = 0) -> float:
        """The micro-steps of a step without its update: gradients stay in the groups; the mean loss."""
        loss_weight = sum(b.loss_weight for b in batches)
        self._take_loss()
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        return self._take_loss().item() / (loss_weight or 1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss per label token, each by its weight; label tokens) without dropout; touches no gradient."""
        label_tokens, loss_weight = 0, 0.0
        total = torch.zeros_like(self._take_loss())
        for batch in batches:
            self.inputs.load(batch, self.seeds(0, 0), 0.0)
            self._run(self.evaluation, training=False)
            total += self._take_loss()
            label_tokens += batch.label_tokens
            loss_weight += batch.loss_weight
        return total.item() / (loss_weight or 1), label_tokens

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] logits of a micro-batch, without dropout; for checks, not for training."""
        from surogate_core.kernels import ops

        self.inputs.load(batch, self.seeds(0, 0), 0.0)
        flow = _Flow()
        flow.tables = list(self._tables().values())
        for key in (EMBED, *self.layers):
            self._forward(key, flow, training=False)
        norm, weight = self.parameters.inputs(self.head)
        eps = float(self.model.head.eps.value(self.model.config))
        assert flow.x is not None
        return ops.rms_norm(flow.x, norm, eps) @ weight.t()

    def state(self) -> dict[str, dict[str, Tensor]]:
        """The live tensors that a checkpoint keeps, by file: masters by HF name, the optimizer's and recipe's state."""
        files = {"trainable": dict(self.parameters.masters()), "optimizer": self.optimizer.state()}
        if self.recipe_state is not None:
            files["recipe"] = self.recipe_state.state()
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


def _add_embedding_gradient(gradient_VD: Tensor, ids_N: Tensor, dx_ND: Tensor) -> None:
    if gradient_VD.device.type == "cpu":
        gradient_VD.index_add_(0, ids_N, dx_ND.to(gradient_VD.dtype))
        return
    # It sorts the ids, so that the sum's order (and the run's bits) do not depend on thread timing.
    gradient_VD.index_put_((ids_N,), dx_ND.float(), accumulate=True)
