"""Tasks: the micro-batches that a run trains on, step by step."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from surogate_core.bundles.options import NoOptions, options_from_flat
from surogate_core.bundles.parts import Part, part_of

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from surogate_core.batch import BatchCounts, MicroBatch
    from surogate_core.bundles.handed import ModelWeights, Plugins, RunKeys, TrainedModel
    from surogate_core.bundles.objectives import Objective
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.errors import Problem
    from surogate_core.events import Event, Progress


class Steps(Protocol):
    """An endless stream of optimizer steps, whose position a checkpoint records."""

    @property
    def epoch(self) -> float:
        """Passes over the training data so far, with a fraction."""

    @property
    def steps_per_epoch(self) -> float:
        """Optimizer steps in one pass; not a whole number unless the data divide evenly."""

    def next_step(self) -> list[MicroBatch]:
        """The micro-batches of the next optimizer step, as host tensors of the shapes of `Task.sample`.

        Called in a thread, one step ahead of the training.
        """

    def state(self) -> dict[str, Any]:
        """The position in the stream, as JSON values."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the step at which `state` was taken. Raises `UserError` if the data differ."""


class SharedSteps(Steps, Protocol):
    """Steps that need not make the micro-batches that other ranks run; other steps make all of them on every rank."""

    def next_share(self, own: Container[int]) -> list[MicroBatch | BatchCounts]:
        """As `next_step`: micro-batches where their number in the step is in `own`, and `BatchCounts` of the others.

        The counts have the bits of `MicroBatch.counts`: the loss is divided by them on every rank.
        """


def next_share(steps: Steps, own: Container[int]) -> list[MicroBatch | BatchCounts]:
    """The next step for the rank that runs the micro-batches `own`."""
    if _can_share(steps):
        return cast("SharedSteps", steps).next_share(own)
    return [batch if number in own else batch.counts() for number, batch in enumerate(steps.next_step())]


def _can_share(steps: Steps) -> bool:
    """Whether `next_share` belongs to this `next_step`, which a task may have replaced alone."""
    for names in (getattr(steps, "__dict__", {}), *(vars(kind) for kind in type(steps).__mro__)):
        if "next_share" in names or "next_step" in names:
            return "next_share" in names
    return False


class Evaluation(Protocol):
    """The held-out micro-batches: the same ones, in the same order, in every pass."""

    def __len__(self) -> int:
        """Micro-batches in one pass."""

    def __iter__(self) -> Iterator[MicroBatch]:
        """One pass; host tensors of the shapes of `Task.sample`."""


class Task(Protocol):
    """The task that a `TaskSpec` builds."""

    def sample(self) -> MicroBatch:
        """A micro-batch with the shapes of all others; the engine allocates for it before the first step."""

    def steps(self) -> Steps:
        """The steps from the beginning; equal data and keys give equal micro-batches."""

    def evaluation(self) -> Evaluation | None:
        """The held-out micro-batches, or None if nothing is held out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareContext:
    """What `PreparingTask.prepare` may use."""

    config: RunKeys
    """The run's configuration."""
    tokenizer: PreTrainedTokenizerBase
    registry: Plugins
    show: Callable[[Progress], None]
    """Shows progress; may raise to end the preparation."""


@runtime_checkable
class PreparingTask(Task, Protocol):
    """A task with long work before the run's model is loaded, such as reading the rows with another model."""

    def prepare(self, context: PrepareContext) -> None:
        """Called once, before `steps` and `evaluation`. The device's memory is free, and must be free afterwards.

        On several GPUs every rank calls it, rank 0 first; the others should find its results in the data cache.
        """


_STOPPED, _DONE = b"\0", b"\1"
"""The first byte of what a rank gives to the others."""


class Stopped(Exception):  # noqa: N818
    """Raised by `OnlineSteps.next_step` after a signal: the step is not made, and the run ends after the one before."""


class OnlineSteps(Steps, Protocol):
    """Steps that are made with the model as it is: their `next_step` samples from the weights that are trained.

    `next_step` is called in the loop's thread, after the step before has been applied and its figures have been read.
    It may raise `Stopped` when `OnlineContext.stopped()` is true. A step that a kill or a signal interrupts is made
    again by the run that resumes, from the same state and the same weights, and must come out identical.

    On several GPUs every rank calls `next_step` at the same time, and must get identical micro-batches, in any number;
    `OnlineContext.together` exchanges what each rank has made of them. So it is with `OnlineTask.evaluate`.

    Steps that hold processes or files may have a method ``close()``, which is called after the last step or evaluation.
    """

    def attach(self, engine: TrainedModel) -> None:
        """Called once, before the first step: the engine with its weights, after a resume with the restored ones."""


def is_online(steps: Steps) -> bool:
    """Whether the steps are made with the model, each after the step before."""
    return hasattr(steps, "attach")


def evaluator_of(task: Task) -> Callable[[int], Event | None] | None:
    """The method `evaluate` of an online task that has one."""
    return getattr(task, "evaluate", None)


class OnlineTask(Task, Protocol):
    """The task of a `TaskSpec.online`. `sample` is called before the engine exists; `evaluation` may return None.

    It may have a method `evaluate(step: int) -> Event | None`, which is called where an evaluation is due, after
    `attach`: an event with its figures, such as `RolloutEval`, or None after a signal.
    """

    def steps(self) -> OnlineSteps:
        """The steps from the beginning; equal keys and weights give equal micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """The ranks that make the steps of an online task. All ranks call its methods in the same order."""

    rank: int = 0
    """Number of this rank."""
    world: int = 1
    """Number of ranks."""
    local_world: int = 1
    """Ranks on this machine."""
    exchange: Callable[[bytes], list[bytes]] = field(default=lambda data: [data], repr=False)
    """Gives the bytes of all ranks, by rank; when the engine exists."""

    def own(self, number: int) -> bool:
        """Whether this rank does the part of a work that has this number."""
        return number % self.world == self.rank

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """What `make` returns on each rank, by rank. If it raises `Stopped` on one of them, all ranks raise that.

        Other errors of `make` are raised on their rank alone, and end the run.
        """
        if self.world == 1:
            return [make()]
        try:
            mine = _DONE + make()
        except Stopped:
            mine = _STOPPED
        found = self.exchange(mine)
        if any(data[:1] == _STOPPED for data in found):
            raise Stopped
        return [data[1:] for data in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineContext:
    """What an online task is built from."""

    config: RunKeys
    """The run's configuration."""
    options: Any
    """An instance of `TaskSpec.options`."""
    tokenizer: PreTrainedTokenizerBase
    registry: Plugins
    """The installed plugins, for the environment and the rollout engine that the configuration names."""
    generation_config: Mapping[str, Any]
    """``generation_config.json`` of the base model; empty if it has none."""
    emit: Callable[[Event], None]
    """Shows an event to the monitors; only after `attach`, in the loop's thread."""
    stopped: Callable[[], bool]
    """Whether a signal has come. A task asks before each piece of long work, and raises `Stopped`."""
    directory: Path
    """The run's output directory, for files of the task's own."""
    parts: Mapping[str, Part] = field(default_factory=dict)
    """Kind → the part that the options choose of it, as `TaskSpec.parts` names them."""
    data: PreparedData | None = None
    """The packed rows of `datasets`, for a task with `reads_data`."""
    together: Together = Together()
    """The ranks of the run. Each of them builds the task, and all make every step together: what each did of it is
    gathered, and all return the same micro-batches, of which the engine runs a share on each. Monitors see what rank 0
    emits; it alone writes files.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A task: the training data and their division into steps."""

    name: str
    """The value of `task`, and the command ``surogate NAME``."""
    build: Callable[..., Task] | None = None
    """(the run's configuration, the packed rows of its data sets) → the task. A task with `options` gets them as third
    argument. None for an online task.
    """
    options: type = NoOptions
    """Dataclass of its own options. Every field has a default and a flat key, `Annotated[T, Flat("key")]`."""
    objective: Callable[..., Objective] | None = None
    """Options → the objective that the task trains; the key `objective` is then refused. None: the key chooses it. A
    task with `parts` gets them, kind → `Part`, as second argument."""
    parts: Callable[[Any, Plugins], Mapping[str, str]] | None = None
    """(options, the installed plugins) → kind → the name of the bundle of that kind which the options choose, such as
    ``policy_loss``. A name that no plugin offers is a mistake in the configuration. Flat keys set a part's options.
    """
    online: Callable[[OnlineContext], OnlineTask] | None = None
    """Instead of `build`: makes a task whose steps are sampled from the model while it is trained."""
    reads_data: bool = False
    """Whether an online task reads `datasets`; otherwise they are refused, and the run needs none."""
    planned: Callable[[RunKeys, Any, ModelWeights], tuple[int, str]] | None = None
    """For `surogate plan`: (the configuration, the options, the weights as a rollout engine gets them, but without
    values) → (bytes that an online task needs beside these weights, a sentence about them).
    """
    check: Callable[[RunKeys, Any, Plugins], Iterable[Problem]] | None = None
    """(a configuration whose keys are right one by one, the options, the installed plugins) → what is missing or
    contradicts itself. Every command that reads the configuration reports it, before anything is loaded.
    """
    adapters: bool = True
    """Whether it may train adapters; one that does not is refused with `lora`."""
    trains_prompts: bool = False
    """Whether it trains every token of a document on purpose, so the run does not warn about it."""
    group: int = 1
    """Documents that its data have in a group, 2 for pairs. If more than 1, it trains only on types of data set that
    name it in `DatasetFormat.tasks`.
    """
    needs: Mapping[str, str] = field(default_factory=dict)
    """Flat keys of its options that must not be null → an example of the value. The run is refused without them before
    any data are read."""
    head: str = "logits"
    """The kind of head that it trains, as `Head.kind` of `surogate_core.dsl`: "logits" over the vocabulary, [N, V];
    "scores", one for each token, [N, 1], for a reward model; or one that model families of plugins have."""

    def __post_init__(self) -> None:
        if (self.build is None) == (self.online is None):
            raise TypeError(f"task {self.name}: either `build` or `online` must be set")

    @property
    def needs_data(self) -> bool:
        """Whether a run of it has `datasets`."""
        return self.online is None or self.reads_data

    def options_of(self, config: RunKeys) -> Any:
        """The options, which flat keys of the configuration set."""
        return options_from_flat(self.options, config.flat)

    def chosen(self, config: RunKeys, registry: Plugins) -> Mapping[str, str]:
        """Kind → the name of the part that the options choose of it."""
        return {} if self.parts is None else self.parts(self.options_of(config), registry)

    def parts_of(self, config: RunKeys, registry: Plugins) -> dict[str, Part]:
        """Kind → the part that the options choose of it."""
        found = {}
        for kind, name in self.chosen(config, registry).items():
            spec = registry.get(kind, name)
            found[kind] = part_of(kind, spec, spec.options_of(config), plugin=registry.offerer(kind, name))
        return found

    def task_of(self, config: RunKeys, data: PreparedData) -> Task:
        """The task that `build` makes."""
        assert self.build is not None
        more = () if self.options is NoOptions else (self.options_of(config),)
        return self.build(config, data, *more)
