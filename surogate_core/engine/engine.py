"""The engine: a model that is ready to train on one device.

It is built in phases (plan → allocate → load → compile → capture) and then takes optimizer steps. step.py runs a
micro-step, update.py an optimizer step, and graphs.py captures their CUDA graphs.

Shape suffixes: N tokens of a micro-batch, L layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from surogate_core.batch import BatchCounts, MicroBatch
from surogate_core.bundles import Optimizer, RecipeState
from surogate_core.dsl.sides import REAL
from surogate_core.engine.device_memory import grow_segments
from surogate_core.engine.figures import FigureSums
from surogate_core.engine.host_memory import keep_freed_pages
from surogate_core.engine.inputs import MicroStepInputs
from surogate_core.engine.parameters import Parameters
from surogate_core.engine.placement import Placement
from surogate_core.engine.planning.assembly import Assembly
from surogate_core.engine.planning.pieces import ExpertsOfRank, Source
from surogate_core.engine.planning.plan import EnginePlan, linked_of
from surogate_core.engine.programs import ProgramBuilder
from surogate_core.engine.ranks.embedding_rows import EmbeddingRows
from surogate_core.engine.ranks.expert_state import ExpertState
from surogate_core.engine.ranks.lanes import Lanes
from surogate_core.engine.ranks.orders import Orders
from surogate_core.engine.ranks.sharded_state import ShardedState
from surogate_core.engine.ranks.sharding import Sharing
from surogate_core.engine.ranks.traffic import Traffic
from surogate_core.engine.sides import SideSums
from surogate_core.engine.step import LOSSES_IN_FP32, LossSum, MicroStep, RecipeRows, StepContext, StoreSet
from surogate_core.engine.stopwatch import Stopwatch
from surogate_core.engine.update import StepResult, Update, norm_of
from surogate_core.errors import UserError
from surogate_core.files import staging
from surogate_core.files.tensorfile import Deferred, TensorFile
from surogate_core.kernels.building.ahead import wait_for_all
from surogate_core.kernels.linked import Linked
from surogate_core.mesh.mesh import Mesh

if TYPE_CHECKING:
    from surogate_core.engine.graphs import Kind

Progress = Callable[[str, int, int], None]
"""(task, done, total): a progress report of long work."""


def _silent(task: str, done: int, total: int) -> None:
    """Report nothing."""


class Engine:
    """A model that is ready to train on one device."""

    def __init__(self, assembly: Assembly, source: Source, *, mesh: Mesh | None = None, progress: Progress = _silent):
        """Allocate, fill from `source`, compile and capture according to `assembly`.

        `mesh`: this rank among those of the run; every rank builds an engine. They are connected here if they are not.
        """
        self.assembly, self.settings, self.model = assembly, assembly.settings, assembly.model
        self.mesh = mesh or Mesh()
        self.axes = self.settings.axes
        self.sharing = Sharing.of(self.mesh, self.axes, replicas_once=assembly.adds_replicas_once)
        self._linked: list[Linked] = []
        """The ranks with which programs exchange values."""
        with ExitStack() as on_error:
            for axis, group in linked_of(self.axes).items():
                group.open(self.sharing.along[axis])
                self._linked.append(group)
                on_error.callback(group.close)
            self._build(source, progress)
            on_error.pop_all()

    # --------------------------------------------------------------------------- phases

    def _build(self, source: Source, progress: Progress) -> None:
        """All phases."""
        if self.settings.device.type == "cpu":
            keep_freed_pages()
        else:
            grow_segments()
        self.plan = EnginePlan.of(self.assembly, device=self.settings.device)
        placement = Placement(
            offloader=self.assembly.offloader,
            stores=self.assembly.stores,
            device=self.settings.device,
            updates_on_cpu=self.settings.update_on_cpu,
            experts_apart=self.assembly.experts_apart,
        )
        self._allocate(placement)
        self._load(source, progress)
        self._prepare_steps(placement, progress)
        with self.mesh.first("compiled"):
            self._compile()
            if self.mesh.world > 1:
                wait_for_all()  # the other ranks then compile no kernel again
        self.mesh.connect(self.settings.device)
        self.sharing.connect({"context", "expert", *self.parameters.flat.kept_over})
        self._prepare_orders()
        self._capture(progress)

    def _allocate(self, placement: Placement) -> None:
        """The stores, the inputs, the recipe's state and the parameters."""
        settings = self.settings
        self.stores = StoreSet.of(placement, self.sharing, self.plan)
        self.inputs = MicroStepInputs.allocate(
            settings, len(self.plan.layers), reads_real=REAL in self.plan.tables, part=self.sharing.place("context")
        )
        state = self.assembly.recipe.state(self.plan.slots, settings.device)
        self.rows = None if state is None else RecipeRows(state, self.plan.rows)
        updating = torch.device("cpu") if settings.update_on_cpu else settings.device
        self._rounding_seed = torch.zeros((), dtype=torch.int32, device=updating)
        self.parameters = Parameters(
            self.plan.pieces,
            plan=self.plan.weights,
            weights=self.stores.weights,
            shared_weights=self.stores.shared_weights,
            device=settings.device,
            dtype=settings.dtype,
            adapter_dtype=settings.adapter_dtype,
            weight_decay=settings.weight_decay,
            master_dtype=settings.master_dtype,
            seed=self._rounding_seed,
            placement=placement,
            sharing=self.sharing,
        )

    def _load(self, source: Source, progress: Progress) -> None:
        """Load every weight from the source, and put the gradient sums into their store."""
        quantising = " and quantising" if any(p.rounded for p in self.plan.weights.packed.values()) else ""
        task = f"loading{quantising} weights"
        if self.axes.expert > 1:
            source = ExpertsOfRank(source, self.sharing.place("expert"))
        self.parameters.fill(source, progress=lambda done, total: progress(task, done, total))
        staging.release()
        shared = self.stores.shared_gradients
        if shared is None:
            self.parameters.flat.rest_gradients(self.stores.gradients)
        else:
            self.parameters.flat.share_gradients(shared)
            shared.rows = EmbeddingRows.of(self.assembly, self.sharing, self.parameters.sharded)

    def _prepare_steps(self, placement: Placement, progress: Progress) -> None:
        """The optimizer, and the micro-step and optimizer step that run without graphs."""
        settings, axes, streams = self.settings, self.axes, self.stores.streams_gradients
        self.traffic = Traffic(self.sharing, self.parameters, device=settings.device)
        norm = norm_of(
            self.parameters, self.assembly, sharing=self.sharing, traffic=self.traffic, streams_gradients=streams
        )
        by_number = axes.ranks > 1 or axes.exact
        numbers = axes.micro_batches * axes.context if by_number else 0
        self.sides = SideSums(self.plan.layers, settings.device, losses=settings.router_losses, numbers=numbers)
        if 1 < axes.ranks == axes.micro_batches and not (axes.varying or axes.shards_weights):
            self.sides.exchange_within(self.traffic)
        context = StepContext(
            plan=self.plan,
            parameters=self.parameters,
            stores=self.stores,
            traffic=self.traffic,
            norm=norm,
            losses=LossSum(settings.device, numbers=numbers),
            figures=FigureSums(self.assembly.objective, settings.device, numbers=numbers),
            rows=self.rows,
            sides=self.sides,
        )
        self.losses, self.figures = context.losses, context.figures
        self._lanes = Lanes(self.parameters.flat.sums())
        self.own_work = Stopwatch(settings.device)
        """Times the micro-steps that need no other rank, if there are several."""
        cleared = self.parameters.flat.sums_to_clear(streams=streams, written=self.stores.written_first)
        self.update = Update(context, placement, rounding_seed=self._rounding_seed, cleared=cleared)
        self.programs = ProgramBuilder(
            plan=self.plan,
            parameters=self.parameters,
            columns=0 if self.rows is None else self.rows.state.rows.shape[1],
            device=settings.device,
            linked=tuple(self._linked),
            progress=progress,
        )
        self.evaluated: Mapping[str, float] = {}
        """The objective's figures in the last evaluation, by name."""
        self.step = MicroStep(context, self.inputs, self.programs)

    def _prepare_orders(self) -> None:
        """What rank 0 asks the others for when it writes a checkpoint or an export. The ranks are connected."""
        self.orders, self._sharded_state = Orders(self.mesh), None
        group = self.parameters.sharded
        if self.axes.shards_weights:
            self.parameters.before_fetch = self._gather_order()
        if group is not None:
            self._sharded_state = ShardedState(
                group, self.optimizer.state(), self.mesh, self.sharing.stages, self.orders
            )
            self.parameters.deferred = group.deferred(self.orders)
        self._experts: ExpertState | None = None
        if self.parameters.flat.of_experts:
            self._experts = ExpertState(
                self.parameters.flat,
                lambda groups: self.assembly.optimizer.build(groups, self.assembly.optimizer_options),
                self.optimizer.state(),
                self.sharing,
                self.orders,
                self._sharded_state,
            )
            self.parameters.deferred = {**self.parameters.deferred, **self._experts.masters}

    def _gather_order(self) -> Callable[[str], None]:
        """Lets the other ranks gather a piece with rank 0, which fetches it for an export."""
        weights = self.stores.weights

        def gather(key: str) -> None:
            weights.begin_pass()
            weights.fetch(key)
            weights.release(key)

        numbers = {piece.key: self.orders.register(partial(gather, piece.key)) for piece in self.plan.pieces}

        def ask(key: str) -> None:
            self.orders.call(numbers[key])
            weights.begin_pass()

        return ask

    def _compile(self) -> None:
        """All programs of training; those of evaluation are compiled at the first evaluation."""
        for piece in self.plan.layers:
            self.programs.layer(piece)
        for chunk in self.programs.chunks():
            self.programs.head(self.plan.head, chunk.stop - chunk.start, training=True)
            if self.assembly.objective.sequence_loss is not None:
                if not self.programs.scales_head:
                    self.programs.head(self.plan.head, chunk.stop - chunk.start, training=False)
                self.programs.sequence_loss()
            if self.assembly.objective.sequence_figures is not None:
                self.programs.sequence_figures()

    def _compile_evaluation(self) -> None:
        """All programs of evaluation. A rank alone compiles them one by one during its first evaluation."""
        for piece in self.plan.layers:
            self.programs.evaluation_layer(piece)
        for chunk in self.programs.chunks():
            self.programs.head(self.plan.head, chunk.stop - chunk.start, training=False)

    def _capture(self, progress: Progress) -> None:
        """Replace the micro-step and the optimizer step by their CUDA graphs, if they can be captured."""
        settings = self.settings
        self._evaluates = False
        """Whether the programs of evaluation are compiled on all ranks."""
        self._sums_hold = False
        """Whether the gradient sums contain micro-steps; otherwise they count as zeros."""
        self._micro_steps: Mapping[Kind, Callable[[], None]] = {}
        """The graphs of micro-steps; empty where they are not captured."""
        self._update: Callable[[], None] = self.update.run
        self._evaluate: Callable[[], None] = self.step.evaluate
        self._count: Callable[[], None] = self.step.count
        self._captured: torch.cuda.CUDAGraph | None = None
        """The graph of a micro-step, whose memory the evaluation's graph will share."""
        if not self.assembly.captured:
            return
        from surogate_core.engine.graphs import capture, capture_evaluation

        progress("capturing CUDA graphs", 0, 1)
        counts = self.sides.counts_first(self.axes.micro_batches)
        self._micro_steps, self._update, self._captured = capture(
            self.step.train,
            self.update.run,
            spoil=self.update.spoil,
            kinds=self._kinds(),
            update_on_cpu=settings.update_on_cpu,
            forwards=[self.step.count] if counts else (),
            others=self._adding_kinds(),
        )
        if counts:
            self._count = capture_evaluation(self.step.count, self._captured)
        progress("capturing CUDA graphs", 1, 1)

    def _kind(self, first: bool, last: bool, fresh: bool) -> Kind:
        """A micro-step's properties, as far as its work depends on them."""
        begins = self.stores.streams_gradients or bool(self.stores.written_first)
        return (
            first or not self.traffic.gathers,
            last and (self.traffic.overlaps or self.stores.keeps_sums),
            fresh or not begins,
        )

    def _kinds(self) -> list[Kind]:
        """The kinds of micro-step that a step has. Alone, a rank takes steps of any number of micro-batches."""
        if self.axes.ranks == 1 or self.axes.varying:
            found = [self._kind(True, False, True), self._kind(False, False, False)]
        else:
            share = self.sharing.share(self.axes.micro_batches)
            steps, counted = len(share.numbers), self.sides.counts_first(self.axes.micro_batches)
            found = [self._kind(i == 0 and not counted, i == steps - 1, share.begins_leaf(i)) for i in range(steps)]
        return list(dict.fromkeys(found))

    def _adding_kinds(self) -> list[Kind]:
        """A kind of micro-step that adds to sums of earlier ones, if that takes another kernel than the first sums.

        The last kind, because the others may leave all that they add to the next micro-step.
        """
        adding = [kind for kind in self._kinds() if not kind[2]]
        return adding[-1:] if self.axes.shards_gradients or self.stores.written_first else []

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
        """[L, 8] int32: a micro-step's dropout seed and this rank's first token, which are keyed by the whole
        micro-batch; in column 4 a seed for everything else, which is this rank's own if others have a part of it.
        """
        shared, part = [self.settings.seed, step, micro_step], self.sharing.place("context")

        def drawn(*parts: int) -> Tensor:
            sequence = np.random.SeedSequence(shared, spawn_key=parts)
            return torch.from_numpy(sequence.generate_state(len(self.plan.layers), np.uint32).view(np.int32))

        seeds_L8 = torch.zeros(len(self.plan.layers), 8, dtype=torch.int32)
        seeds_L8[:, 0], seeds_L8[:, 1] = drawn(), self.inputs.own.start
        seeds_L8[:, 4] = drawn(part) if part else seeds_L8[:, 0]
        return seeds_L8

    def _accumulate(self, batches: Sequence[MicroBatch | BatchCounts], *, step: int, loss_weight: float) -> None:
        planned, varying = self.axes.micro_batches, self.axes.varying
        if self.axes.ranks > 1 and not varying and len(batches) != planned:
            raise UserError(
                f"step {step} has {len(batches)} micro-batches, and several GPUs need {planned} in every step. "
                f"Fix: gpus=1, or a task whose steps are equally long."
            )
        share = self.sharing.share(len(batches))
        together = max(1, LOSSES_IN_FP32 // len(self.programs.chunks()))
        counted = self.sides.counts_first(len(batches))
        self.sides.begin(counted=counted)
        if varying:
            self.traffic.freshen()
        if counted:
            self._count_routes(batches, share.numbers, step=step)
        tokens = sum(batch.tokens for batch in batches)
        # Sums in a store have those of the step before until a micro-step begins them anew.
        numbers = share.numbers or [len(batches)] * bool(batches and self.stores.streams_gradients)
        if not (numbers or self._sums_hold):
            # Without a micro-step nothing writes them.
            for sums in self.parameters.flat.sums() if self.stores.written_first else ():
                sums.zero_()
        self._lanes.begin(share)
        for micro_step, number in enumerate(numbers):
            batch, seeds = self._own_batch(batches, number, step=step)
            if micro_step and micro_step % together == 0:
                self.losses.fold()
            scale = 1 / (loss_weight or 1)
            self.inputs.load(batch, seeds, scale)
            self.sides.load(tokens=batch.tokens, step_tokens=tokens, micro_batches=len(batches))
            # A count has gathered what the first micro-step would.
            first, last = micro_step == 0 and not counted, micro_step == len(numbers) - 1
            self._run_micro_step(first, last, not self._sums_hold)
            if number >= len(batches):
                self._drop_figures()
            elif varying or len(batches) == planned:
                place = self.sharing.place_of_figures(number, len(batches))
                self.losses.keep(place)
                self.figures.keep(place)
                self.sides.keep(place)
            self._sums_hold = not self._lanes.after(share, micro_step)

    def _drop_figures(self) -> None:
        """Forget what a micro-step without tokens reported: blocks and objectives may count padding and documents."""
        self.losses.take()
        self.figures.take_sums()
        self.sides.drop()

    def _own_batch(
        self, batches: Sequence[MicroBatch | BatchCounts], number: int, *, step: int
    ) -> tuple[MicroBatch, Tensor]:
        """A micro-batch of this rank and its dropout seeds; for a number that the step does not have, the first one
        without its tokens, so that no recipe sees other values.
        """
        exists = number < len(batches)
        batch, seeds = batches[number if exists else 0], self.seeds(step, number if exists else 0)
        assert isinstance(batch, MicroBatch), f"micro-batch {number} is of another rank"
        return batch if exists else batch.emptied(), seeds

    def _count_routes(self, batches: Sequence[MicroBatch | BatchCounts], numbers: Iterable[int], *, step: int) -> None:
        """Run the forward of each own micro-batch, so that the tokens of each expert are known before a backward."""
        self.traffic.freshen()
        for number in numbers:
            self.inputs.load(*self._own_batch(batches, number, step=step), 0.0)
            self._count()
        self.sides.exchange(self.traffic)

    def _run_micro_step(self, first: bool, last: bool, fresh: bool) -> None:
        run: Callable[[], None] = partial(self.step.train, first, last, fresh)
        if self._micro_steps:
            run = self._micro_steps[self._kind(first, last, fresh)]
        if self.axes.ranks > 1 and not self.traffic.within(first=first, last=last) and not self.axes.shards_weights:
            self.own_work.time(run)
        else:
            run()

    @torch.no_grad()
    def train_step(self, batches: Sequence[MicroBatch | BatchCounts], *, step: int, lr: float) -> StepResult:
        """One optimizer step over the micro-batches of all ranks; `step` counts from 0.

        Those that other ranks run may be their counts. The loss is averaged over the label tokens of all of them, by
        their weights.
        """
        loss_weight = sum(b.loss_weight for b in batches)
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        self.update.set(lr=lr, step=step)
        self._update()
        self._sums_hold, self.traffic.stale = False, self.traffic.renews
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
        self.update.take_loss()
        self._accumulate(batches, step=step, loss_weight=loss_weight)
        self.sides.clear()
        self.figures.clear()
        return self.update.take_loss().item() / (loss_weight or 1)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        """(mean loss per label token, each by its weight; label tokens) without dropout; touches no gradient.

        Every rank gives all batches, and runs those whose number is its own modulo the ranks, or its group's modulo the
        groups that share rows.
        """
        rank, ranks, here = self.sharing.place("rows"), self.axes.along("rows").size, self.sharing.place("context")
        if self.mesh.world > 1 and not self._evaluates:
            with self.mesh.first("evaluation compiled"):
                self._compile_evaluation()
            self._evaluates = True
        self.traffic.freshen()
        label_tokens, loss_weight = 0, 0.0
        self.figures.clear()
        self.evaluated = {}
        sums: list[Tensor] = []
        losses: list[Tensor] = [torch.zeros_like(self.losses.take())]
        seeds, waiting, parts = self.seeds(0, 0), None, range(self.axes.context)
        for number, batch in enumerate(batches):
            label_tokens += batch.label_tokens
            loss_weight += batch.loss_weight
            waiting = batch if number % ranks == 0 else waiting
            if number % ranks == rank:
                own = self._evaluate_one(batch, seeds)
                losses += [own if part == here else torch.zeros_like(own) for part in parts]
                waiting = None
            else:
                losses += [torch.zeros_like(losses[0])] * len(parts)
            if self.figures.names:
                found = self.figures.take_sums()
                sums += [found if part == here else torch.zeros_like(found) for part in parts]
        if waiting is not None and rank:
            # The last round is not full, and a forward may need all ranks: its loss is not counted.
            self._evaluate_one(waiting, seeds)
        total = torch.stack(losses)
        self.traffic.add(total)
        if sums:
            rows = torch.stack(sums)
            self.traffic.add(rows)
            self.figures.put_sums(rows.sum(0))
            self.evaluated = self.figures.named(self.figures.take(self.traffic).tolist(), label_tokens=label_tokens)
        return sum(total.tolist()) / (loss_weight or 1), label_tokens

    def _evaluate_one(self, batch: MicroBatch, seeds: Tensor) -> Tensor:
        """0-d float64: the sum of a micro-batch's losses."""
        self.inputs.load(batch, seeds, 0.0)
        self._evaluate()
        loss = self.losses.take()
        self._capture_evaluation()
        return loss

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """[N, V] logits of a micro-batch, without dropout; for checks, not for training."""
        self.traffic.freshen()
        self.inputs.load(batch, self.seeds(0, 0), 0.0)
        x_ND, head = self.step.hidden(), self.plan.head
        tensors = zip(head.specs, self.parameters.inputs(head), strict=True)
        return self.model.logits(x_ND, {spec.name: tensor for spec, tensor in tensors})

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch, *, temperature: float = 1.0) -> Tensor:
        """[N] fp32 on the device: the log-probability of each label, 0 where there is none, without dropout.

        `temperature` divides the logits, in fp32. The forward is that of evaluations. All ranks call it with the same
        micro-batch.
        """
        self.traffic.freshen()
        self.inputs.load(batch, self.seeds(0, 0), 0.0)
        return self.step.logprobs(temperature)

    def freshen(self) -> None:
        """Bring the weights that programs read up to the last step. All ranks call it."""
        self.traffic.freshen()

    def state(self) -> dict[str, dict[str, Tensor | Deferred]]:
        """The tensors of a checkpoint, by file: masters by HF name, the optimizer's and the recipe's state.

        They are live, except for those that ranks share out: rank 0 reads these while the others `serve`.
        """
        parted = self._experts or self._sharded_state
        files: dict[str, dict[str, Tensor | Deferred]] = {
            "trainable": {**self.parameters.masters(), **self.parameters.deferred},
            "optimizer": {**self.optimizer.state()} if parted is None else parted.tensors(),
        }
        if self.rows is not None:
            files["recipe"] = {**self.rows.state.state()}
        return files

    def serve(self) -> None:
        """On the ranks other than 0: take part in reading what is shared out, until rank 0 dismisses them."""
        self.orders.serve()

    def dismiss(self) -> None:
        """On rank 0: the others go on."""
        self.orders.dismiss()

    def load_state(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy a checkpoint's tensors into the live ones; names and shapes must agree. Each rank reads its part."""
        for file, live in self.state().items():
            saved = state[file]
            other = live.keys() ^ saved.keys() or {n for n, t in live.items() if tuple(t.shape) != _shape(saved, n)}
            if other:
                listed = ", ".join(sorted(other)[:5])
                raise ValueError(f"checkpoint file {file}: tensors differ from this run's: {listed}")
        sharded, experts = self.parameters.sharded, self._experts
        parted = experts or self._sharded_state
        for file, live in self.state().items():
            if file == "optimizer" and parted is not None:
                parted.read(state[file])
                continue
            for name, tensor in live.items():
                if isinstance(tensor, Tensor):
                    tensor.copy_(state[file][name])
                elif experts is not None and name in experts.masters:
                    experts.read_master(name, state[file])
                else:
                    assert sharded is not None
                    sharded.read(name, state[file])
        self.parameters.refresh()
        self.traffic.stale = self.traffic.renews

    def close(self) -> None:
        """Drop the CUDA graphs, which must be gone before the ranks disconnect."""
        self._micro_steps, self._update, self._captured = {}, self.update.run, None
        self._evaluate, self._count = self.step.evaluate, self.step.count
        for group in self._linked:
            group.close()


def _shape(saved: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """A saved tensor's shape; of a file's, without reading it."""
    return saved.infos[name].shape if isinstance(saved, TensorFile) else tuple(saved[name].shape)
