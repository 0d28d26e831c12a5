"""The task `grpo`: each step samples completions of prompts from the model, and trains on their advantages."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from surogate_core.plugin import (
    WEIGHTS,
    MicroBatch,
    UserError,
    atomic,
    bundles,
    events,
    inference,
    launching,
    total_steps,
)
from surogate_reinforcement.checking import check_repeats
from surogate_reinforcement.order import held_out_numbers, training_numbers
from surogate_reinforcement.policy import Policy
from surogate_reinforcement.policy_terms import ADVANTAGES, BEHAVIOUR, OLD, REFERENCE
from surogate_reinforcement.pool import EnvironmentPool
from surogate_task_grpo.ahead import Ahead, GeneratedSteps
from surogate_task_grpo.conversation import Renderer
from surogate_task_grpo.exchange import gathered
from surogate_task_grpo.forward import Reference, logprobs
from surogate_task_grpo.no_signal import is_trained
from surogate_task_grpo.options import GRPOOptions
from surogate_task_grpo.packing import Batch, Document, Shape, arranged, micro_batch
from surogate_task_grpo.play import EpisodeLimits, Played, Player, TrainedSequence
from surogate_task_grpo.record import CompletionLog
from surogate_task_grpo.reward_model import RewardModel, needed
from surogate_task_grpo.rollout import (
    Collector,
    Generation,
    Prompts,
    reward_figures,
    rollouts_event,
    samples_event,
    unused_weights,
)

if TYPE_CHECKING:
    from surogate_core.plugin import dsl

STATE_VERSION = 1
MOST_WORKERS = 8
"""Processes of the environment, unless `environment_workers` says otherwise."""
REPORTS = 20
"""Progress events of one generation, about."""


class GRPOTask:
    """Reinforcement learning with groups of completions."""

    def __init__(self, context: bundles.OnlineContext):
        self.context, self.options = context, context.options
        self.policy = Policy(context.parts["policy_loss"], context.options)
        self.policy.check()
        self._steps: GRPOSteps | None = None

    @property
    def _shape(self) -> Shape:
        config, options = self.context.config, self.options
        completions = options.prompts_per_step * options.num_generations
        return Shape(
            rows=config.per_device_train_batch_size,
            sequence_len=config.sequence_len,
            documents=max(1, min(completions, config.sequence_len // 16)),
            columns=(WEIGHTS, *self.policy.columns),
            padding_id=self.context.tokenizer.pad_token_id or 0,
        )

    def sample(self) -> MicroBatch:
        """Rows that are one document each, trained but for its first token."""
        shape = self._shape
        trained = np.arange(shape.sequence_len) > 0
        ids = np.full(shape.sequence_len, shape.padding_id, np.int64)
        values = {name: np.ones(shape.sequence_len, np.float32) for name in shape.columns}
        document = Document(ids_T=ids, trained_T=trained, columns=values)
        return micro_batch([[document]] * shape.rows, shape, divisor=float(shape.rows * (shape.sequence_len - 1)))

    def steps(self) -> GRPOSteps:
        """The steps from the beginning."""
        if self._steps is None:
            self._steps = GRPOSteps(self.context, self._shape, self.policy)
        return self._steps

    def evaluation(self) -> None:
        """Held-out problems are played, not packed."""

    @property
    def evaluate(self) -> Callable[[int], events.Event | None] | None:
        """Plays held-out problems; None if there are none."""
        steps = self.steps()
        return steps.evaluate if steps.held_out else None


def caches(
    config: bundles.RunKeys, options: GRPOOptions, model: dsl.Model, weights: bundles.ModelWeights
) -> tuple[int, int]:
    """(tokens of the longest sequence, sequences at a time if memory allows them)."""
    completions = options.prompts_per_step * options.num_generations
    longest = int(min(config.sequence_len, model.positions))
    return longest, min(inference.MOST_SLOTS.get(weights.device.type, 32), completions)


def planned(config: bundles.RunKeys, options: GRPOOptions, weights: bundles.ModelWeights) -> tuple[int, str]:
    """(bytes that generation needs beside the weights, a sentence about them)."""
    longest, slots = caches(config, options, weights.model, weights)
    nbytes = inference.needed_bytes(weights, longest)(slots)
    sentence = (
        f"rollouts: {slots} sequences of {longest:,} tokens need {atomic.human_bytes(nbytes)} of free memory; with "
        "less, fewer are generated at a time"
    )
    if options.reward_model is None:
        return nbytes, sentence
    more, said = needed(options.reward_model, weights.dtype)
    return nbytes + more, f"{sentence}; {said}"


def open_arena(context: bundles.OnlineContext, first_fault: Callable[[bundles.Fault], None]) -> EnvironmentPool:
    """The worker processes of the run's environment. `first_fault`: see `EnvironmentPool`.

    On one GPU it is built meanwhile. Of several ranks the first builds it before the others, which find its files, and
    a failure comes before they exchange anything.
    """
    config, options = context.config, context.options
    assert config.environment is not None
    workers = options.environment_workers or min(launching.cores(context.together.local_world), MOST_WORKERS)
    return EnvironmentPool(
        config.environment,
        context.registry,
        workers=workers,
        timeout=options.environment_timeout,
        build_timeout=options.environment_build_timeout,
        build_option="environment_build_timeout",
        waits=context.together.world > 1,
        stopped=context.stopped,
        first_fault=first_fault,
    )


class GRPOSteps:
    """The steps of a run: prompts in the order of the seed, completions of the model as it is."""

    def __init__(self, context: bundles.OnlineContext, shape: Shape, policy: Policy):
        self.context, self.shape, self.options, self.policy = context, shape, context.options, policy
        self._together = context.together
        self._judge: RewardModel | None = None
        if self.options.reward_model is not None:
            ending = self._renderer(frozenset()).ending()
            self._judge = RewardModel(self.options.reward_model, context, shape, ending)
        self._ahead = Ahead()
        # A generation ahead belongs to the checkpoint, so a signal waits for it.
        self.arena = open_arena(replace(context, stopped=self._is_stopped), self._tell_fault)
        self.spec: bundles.EnvironmentSpec = self.arena.spec
        weakref.finalize(self, self.arena.close)
        self._repeats = not self.spec.deterministic
        """Whether the environment was found to give the same problem twice, or need not."""
        self._untold: list[events.Notice] = []
        """Notices of a generation ahead, whose thread emits nothing."""
        recording = self.options.log_completions and self._together.rank == 0
        self.record = CompletionLog(context.directory) if recording else None
        self.drawn = 0
        """Prompts taken."""
        self.trained = 0
        """Prompts of the generations that were trained on so far."""
        self.taken = 0
        """Optimizer steps made."""
        self._player: Player | None = None
        self._engine: bundles.TrainedModel | None = None
        self._rollout: bundles.RolloutEngine | None = None
        self._apart: bundles.ApartEngine | None = None
        """The rollout engine, if it has weights of its own."""
        self._reference: Reference | None = None
        self._batch: Batch | None = None
        self._next: GeneratedSteps | None = None
        self._failure: Exception | None = None
        """Why there is no generation ahead."""
        self._seconds: dict[str, float] = {}
        self._since = 0.0

    # ----------------------------------------------------------------------------- steps

    @property
    def epoch(self) -> float:
        """Passes over the environment's problems so far; 0 if there is no end of them."""
        return self.trained / self.arena.size if self.arena.size else 0.0

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in a pass, if no prompt is replaced; infinite if there is no end of the problems."""
        prompts = self.options.prompts_per_step / self.options.num_iterations
        return self.arena.size / prompts if self.arena.size else float("inf")

    def state(self) -> dict[str, Any]:
        """The position, as JSON values."""
        self._settle()
        if self.record is not None:
            self.record.sync()
        return {
            **self._identity(),
            "drawn": self.drawn,
            "trained": self.trained,
            "taken": self.taken,
            "record": self.record.bytes if self.record is not None else 0,
            # A generation that is trained on once more cannot be made again: the weights are others by now.
            "batch": self._batch.state() if self._batch is not None and not self._is_used_up else None,
            "next": self._next.state() if self._next is not None else None,
        }

    def _identity(self) -> dict[str, Any]:
        return {
            "version": STATE_VERSION,
            "environment": self.spec.name,
            "size": self.arena.size,
            "seed": self.context.config.train_seed,
            "reward_model": self._judge.digest[:16] if self._judge is not None else None,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `state` was taken. Raises `UserError` if the prompts are others."""
        mine = self._identity()
        changed = [f"{key} {state.get(key)}, now {mine[key]}" for key in mine if state.get(key) != mine[key]]
        if changed:
            raise UserError(
                f"The checkpoint was made with other prompts or rewards ({'; '.join(changed)}), so the run cannot "
                f"continue it. Fix: restore `environment`, `train_seed` and `reward_model`, or start anew with "
                f"resume_from_checkpoint=false."
            )
        self.drawn, self.taken, self.trained = (int(state[name]) for name in ("drawn", "taken", "trained"))
        self._next = GeneratedSteps.of(state["next"]) if state["next"] is not None else None
        self._batch = Batch.of(state["batch"]) if state["batch"] is not None else None
        if self.record is not None:
            self.record.bytes = int(state["record"])

    def attach(self, engine: bundles.TrainedModel) -> None:
        """Open the rollout engine on the weights of the run."""

        config, context = self.context.config, self.context
        weights = inference.weights_of(engine)
        longest, wanted = caches(config, self.options, engine.model, weights)
        if self._judge is not None:
            # Before the caches, which take what is left of the memory.
            self._judge.load()
            for note in self._judge.notes:
                context.emit(events.Notice(level="warning", message=note))
        fix = "a shorter sequence_len, recompute=true, or a smaller per_device_train_batch_size"
        spec: bundles.RolloutEngineSpec = context.registry.get("rollout", config.rollout.name)
        slots = inference.fitting_slots(weights, longest, wanted, fix=fix) if spec.caches else wanted
        # What is sampled may depend on their number in the last bits.
        slots = min(int(found) for found in self._together.gather(str(slots).encode))
        settings = bundles.RolloutSettings(
            slots=slots, context=longest, frozen=True, spares=True, options=config.rollout.options
        )
        self._engine, self._rollout = engine, spec.open(weights, settings)
        if spec.apart:
            self._apart = cast("bundles.ApartEngine", self._rollout)
        if self.options.beta > 0:
            begun = self.taken > 0
            self._reference = Reference(engine, context.directory, begun=begun, together=self._together)
        self._player = Player(
            engine=self._rollout,
            arena=self.arena,
            renderer=self._renderer(
                inference.stop_ids(context.generation_config, engine.model.config, context.tokenizer)
            ),
            limits=EpisodeLimits(
                completion=self.options.max_completion_length, sequence=longest, turns=self.options.max_turns
            ),
            weights={**self.spec.weights, **self.options.reward_weights},
            lap=self._lap,
            judge=self._judge,
        )

    def _renderer(self, stop_ids: frozenset[int]) -> Renderer:
        config, context = self.context.config, self.context
        trains_prompts = context.registry.get("task", config.task).trains_prompts
        return Renderer(
            context.tokenizer,
            templated=config.use_chat_template and not trains_prompts,
            system=config.system,
            stop_ids=stop_ids,
        )

    def next_step(self) -> list[MicroBatch]:
        """The completions of a new generation, or those of the last one if it is trained on once more."""
        if self._is_used_up:
            self._generate()
        assert self._batch is not None
        self._batch.iterations += 1
        self.taken += 1
        if self.options.max_staleness and self._batch.iterations == 1:
            self._begin_next(self._batch)
        return self._packed(self._batch)

    def _generate(self) -> None:
        """Take the generation that was made ahead, or make one now."""
        self._settle()
        if self._failure is not None:
            raise self._failure
        if self._next is None:
            self._seconds, self._since = {}, time.perf_counter()
            self._freshen()
            self._next = self._finished(self._collected(self._watch("generating rollouts")), self.taken + 1)
        ready, self._next = self._next, None
        self._batch, self.trained, figures = ready.batch, ready.drawn, ready.figures
        if OLD in self.shape.columns:
            # With the weights of now, whenever what was made ahead was taken from its thread.
            began = time.perf_counter()
            self._batch.documents = self._with_logprobs(self._batch.documents, OLD)
            figures = replace(figures, seconds={**figures.seconds, "old": time.perf_counter() - began})
        self.context.emit(figures)
        self.context.emit(ready.samples)

    def _collected(self, watch: Callable[[int], None]) -> Generation:
        """Sample completions until a step has its groups."""
        before = self.drawn
        try:
            return self._collector(watch).collect()
        except BaseException:
            self.drawn = before
            raise

    def _finished(self, generation: Generation, step: int) -> GeneratedSteps:
        """What `step` trains on, when its completions are recorded."""
        batch = self._measured(generation)
        generation.seconds = self._seconds
        if step == 1 and (unused := unused_weights(self.options, generation)):
            self.context.emit(events.Notice(level="warning", message=unused))
        if self.record is not None:
            self.record.append(step, generation)
        figures, samples = rollouts_event(generation, step), samples_event(generation, step)
        return GeneratedSteps(batch=batch, figures=figures, samples=samples, drawn=self.drawn)

    def _begin_next(self, batch: Batch) -> None:
        """Make the next generation with the weights as they are now, in a thread, unless the run ends before it."""
        step = self.taken + self.options.num_iterations
        if step > total_steps(self.context.config, self, done=0):
            return
        self._freshen()
        assert self._apart is not None
        self._apart.copy_weights([document.ids_T.tolist() for document in batch.documents])
        self._seconds, self._since = {}, time.perf_counter()
        self._ahead.begin(lambda: self._collected(self._end_if_closed), step)

    def _settle(self) -> None:
        """Wait for the generation ahead, if there is one. A failure is kept for the step that needs it."""
        if not self._ahead.begun:
            return
        try:
            generation, waited = self._ahead.take()
        except Exception as error:
            self._failure = error
            return
        finally:
            self._tell()
        generation.overlapped = self._seconds
        self._seconds, self._since = {"wait": waited}, time.perf_counter()
        self._next = self._finished(generation, self._ahead.step)

    def _is_stopped(self) -> bool:
        return self._ahead.closed or (not self._ahead.begun and self.context.stopped())

    def _tell_fault(self, fault: bundles.Fault) -> None:
        """Say what the first fault of the environment is; of a generation ahead, when it is taken."""
        message = (
            f"environment={self.arena.name}: the first fault: {str(fault).rstrip('.')}. Such completions have no "
            f"reward, and each step counts them. `surogate env check` shows what the environment does."
        )
        self._untold.append(events.Notice(level="warning", message=message))
        if not self._ahead.begun:
            self._tell()

    def _tell(self) -> None:
        for notice in self._untold:
            self.context.emit(notice)
        self._untold.clear()

    def _end_if_closed(self, left: int) -> None:
        """Called for each token of a generation ahead."""
        if self._ahead.closed:
            raise bundles.Stopped

    def close(self) -> None:
        """End the processes of the environment, and leave nothing on a server."""
        self._ahead.close()
        self.arena.close()
        if self._apart is not None:
            self._apart.close()

    @property
    def held_out(self) -> list[int]:
        """The numbers of the held-out problems."""
        return held_out_numbers(self.options.eval_environment_tasks, size=self.arena.size, held_out=self.arena.held_out)

    def evaluate(self, step: int) -> events.RolloutEval | None:
        """The rewards of the held-out problems, each played once with the most probable tokens; None after a signal."""
        self._settle()
        numbers = self.held_out
        started = self._since = time.perf_counter()
        self._freshen()
        try:
            prompts = list(zip(numbers, numbers, strict=True))
            played = self._play(prompts, 1, bundles.Sampling(temperature=0.0), self._watch("evaluating"))
        except bundles.Stopped:
            return None
        seconds = time.perf_counter() - started
        return events.RolloutEval(step=step, tasks=len(played), seconds=seconds, **reward_figures(played))

    # ---------------------------------------------------------------------------- pieces

    @property
    def _is_used_up(self) -> bool:
        """Whether the next step needs a new generation."""
        return self._batch is None or self._batch.iterations >= self.options.num_iterations

    @property
    def _seed(self) -> int:
        return self.context.config.train_seed

    def _lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now

    def _freshen(self) -> None:
        """Let the rollout engine see the weights of the last step."""
        assert self._engine is not None
        assert self._rollout is not None
        self._engine.freshen()
        self._rollout.forget()

    def _collector(self, watch: Callable[[int], None]) -> Collector:
        options = self.options
        sampling = bundles.Sampling(
            temperature=options.temperature,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            seed=self._seed,
            tempered_logprobs=True,
        )
        return Collector(
            options=options,
            advantage=self.context.parts["advantage"],
            draw=self._draw,
            play=lambda prompts: self._play(prompts, options.num_generations, sampling, watch),
            penalties=self._penalties,
        )

    def _draw(self, count: int) -> Prompts:
        """The numbers of the next prompts of the run, and of their problems."""
        places = training_numbers(self.drawn, count, size=self.arena.size, seed=self._seed)
        numbers = range(self.drawn, self.drawn + count)
        self.drawn += count
        return list(zip(numbers, places, strict=True))

    def _problems(self, places: Sequence[int]) -> list[bundles.EnvironmentProblem | bundles.Fault]:
        """The problems of the environment. The first of the run is asked for twice, if possible in two processes."""
        if self._repeats or not places:
            return self.arena.problems(places, self._seed)
        other, *problems = self.arena.problems([places[0], *places], self._seed)
        check_repeats(self.spec.name, problems[0], other)
        self._repeats = True
        return problems

    def _play(
        self, prompts: Prompts, samples: int, sampling: bundles.Sampling, watch: Callable[[int], None]
    ) -> list[Played]:
        """The episodes of prompts; each rank plays its own, and gets those of all."""
        player, together = self._player, self._together
        assert player is not None

        def own() -> list[Played]:
            mine = prompts[together.rank :: together.world]
            problems = self._problems([place for _, place in mine])
            numbers = [number for number, _ in mine]
            return player.play(list(zip(numbers, problems, strict=True)), samples, sampling, watch)

        played = gathered(together, own, prompts=len(prompts), samples=samples)
        if together.world > 1:
            self._lap("wait")
        player.judged(played)
        return played

    def _watch(self, task: str) -> Callable[[int], None]:
        """Shows the progress of a generation, and ends it after a signal."""
        total = shown = 0

        def on_token(left: int) -> None:
            nonlocal total, shown
            if self.context.stopped():
                raise bundles.Stopped
            total = max(total, left + 1)
            done = total - left
            if left == 0 or (done - shown) * REPORTS >= total:
                shown = done
                self.context.emit(events.Progress(task=task, done=done, total=total, unit="tokens"))
            if left == 0:
                total = shown = 0

        return on_token

    def _measured(self, generation: Generation) -> Batch:
        """What the steps train on, but for the column `OLD`: the completions of the groups with signal."""
        rewarded = [pair for group in generation.kept for pair in zip(group.played, group.advantages, strict=True)]
        rewarded = [(one, advantage) for one, advantage in rewarded if one.reward is not None]
        trained = [(one, advantage) for one, advantage in rewarded if is_trained(self.options, one)]
        documents = [_document(sample, advantage) for one, advantage in trained for sample in one.samples]
        if REFERENCE in self.shape.columns:
            with self._referring():
                documents = self._with_logprobs(documents, REFERENCE)
            self._lap("reference")
        return Batch(documents=documents, completions=len(documents) + len(rewarded) - len(trained))

    def _with_logprobs(self, documents: list[Document], column: str) -> list[Document]:
        """The documents with the log-probabilities of the engine's weights."""
        assert self._engine is not None
        found = logprobs(
            self._engine, documents, self.shape, temperature=self.options.temperature, together=self._together
        )
        return [
            replace(document, columns={**document.columns, column: values_T})
            for document, values_T in zip(documents, found, strict=True)
        ]

    def _referring(self) -> AbstractContextManager[None]:
        assert self._reference is not None
        return self._reference.in_place()

    def _penalties(self, played: Sequence[Played]) -> list[float]:
        """What each completion's reward loses because it differs from the reference; 0 unless the policy loss has
        this in the reward.
        """
        if self.policy.loss.kl != "reward" or self._reference is None:
            return [0.0] * len(played)
        documents = [_document(sample, 0.0) for one in played for sample in one.samples]
        with self._referring():
            found = iter(self._with_logprobs(documents, REFERENCE))
        self._lap("reference")
        penalties = []
        for one in played:
            parts = [next(found) for _ in one.samples]
            penalties.append(sum(self._penalty(document) for document in parts))
        return penalties

    def _penalty(self, document: Document) -> float:
        behaviour, reference = document.columns[BEHAVIOUR].tolist(), document.columns[REFERENCE].tolist()
        return self.policy.kl_penalty(behaviour, reference, document.trained_T.tolist())

    def _packed(self, batch: Batch) -> list[MicroBatch]:
        documents = batch.documents
        rows = arranged([len(document) for document in documents], self.shape)
        counts = [[int(documents[place].trained_T.sum()) for row in some for place in row] for some in rows]
        batches = []
        for some, divided in zip(rows, self.policy.aggregation(counts, batch.completions), strict=True):
            weights = iter(divided.weights)
            chosen = [[documents[place].with_column(WEIGHTS, next(weights)) for place in row] for row in some]
            batches.append(micro_batch(chosen, self.shape, divisor=divided.divisor))
        return batches


def _document(sample: TrainedSequence, advantage: float) -> Document:
    return Document(
        ids_T=np.asarray(sample.ids, np.int64),
        trained_T=np.asarray(sample.trained, np.bool_),
        columns={
            ADVANTAGES: np.full(len(sample.ids), advantage, np.float32),
            BEHAVIOUR: np.asarray(sample.logprobs, np.float32),
        },
    )
