"""One run in one process, phase by phase: from a validated configuration to its export."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog
import torch

from surogate_core.bundles.tasks import evaluator_of, is_online
from surogate_core.config.schema import RunConfig
from surogate_core.data.referenced import ReferencedTask
from surogate_core.dsl.inductor import start_workers
from surogate_core.engine.device_memory import give_back
from surogate_core.engine.engine import Engine
from surogate_core.errors import SurogateError
from surogate_core.events import Event, Progress, RunEnd, RunStart
from surogate_core.hf.contents import Contents
from surogate_core.hf.export import check_place
from surogate_core.imports import quick_import
from surogate_core.mesh.lifeline import PeerFailed
from surogate_core.mesh.mesh import CalledOff, Mesh
from surogate_core.run import unwatched
from surogate_core.run.export import Trained, data_in_words, export, places
from surogate_core.run.identity import identity_of
from surogate_core.run.notes import next_commands, rate_note, untested_torch
from surogate_core.run.outputs import Outputs
from surogate_core.run.prepare import (
    Base,
    Material,
    checkpoint_to_resume,
    fetch_base,
    measured_rate,
    prepare_material,
    resumed_note,
    with_adjusted_epochs,
)
from surogate_core.run.record import new_run_id
from surogate_core.run.reference import add_references, policy_of
from surogate_core.run.samples import Sampler, rows_of
from surogate_core.set_up_times import of_run
from surogate_core.setup.assemble import adapter_notes, is_out_of_memory, weight_format_spec
from surogate_core.setup.build import MemorySettings, build_engine
from surogate_core.setup.experts import idle_parameters, product_notes
from surogate_core.setup.fitting import out_of_memory
from surogate_core.setup.links import check_fabric, choose_fabric, slow_links
from surogate_core.setup.ranks import (
    check_equal,
    check_none_elsewhere,
    facts_of,
    reduction_notes,
    reduction_of,
    tokens_per_step,
    unequal_devices,
    with_kept_steps,
)
from surogate_core.setup.task_spec import Surroundings, task_spec
from surogate_core.setup.tokenizer_of_run import record_of
from surogate_core.train.at_hand import AtHand, at_hand
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir
from surogate_core.train.follow import Follower
from surogate_core.train.loop import Loop
from surogate_core.train.lr import Schedule, check_rates
from surogate_core.train.signals import StopSignals

if TYPE_CHECKING:
    from surogate_core.bundles import OnlineSteps
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.watch import Watch

log = structlog.get_logger(__name__)


def train(config: RunConfig, registry: Registry, *, watch: Watch | None = None, mesh: Mesh | None = None) -> int:
    """The part of this process in a run; the exit code. Errors are raised after the monitors saw them.

    `mesh`: the ranks of the run, one of which this process is; one rank if it is left out.
    """
    mesh = mesh or Mesh()
    config = replace(config, gpus=mesh.world)
    check_fabric(config, registry, mesh)
    try:
        return _Run(config, registry, watch=watch, mesh=mesh).main()
    finally:
        # A sweep, and a program that trains twice, start the next run in this process.
        give_back()


class _Interrupted(Exception):  # noqa: N818
    """A signal came before the first step: there is nothing to finish or to save."""


class _Run:
    def __init__(self, config: RunConfig, registry: Registry, *, watch: Watch | None, mesh: Mesh):
        self.config, self.registry, self.mesh = config, registry, mesh
        self.outputs = Outputs(config, registry, watch) if mesh.leads else None
        self.bus = EventBus({})
        self.started, self.times = time.perf_counter(), of_run()
        self.signals = StopSignals()
        self.setting_up = True
        self.contents: Contents | None = None
        self.notes: list[str] = []
        """Notes for the user, one sentence each."""
        self.rate: float | None = None
        self.loop: Loop | None = None
        self.at_hand: AtHand | None = None
        """The checkpoint to resume."""

    def main(self) -> int:
        """The run, inside its locks and its signal handlers."""
        with ExitStack() as stack:
            if self.outputs is not None:
                stack.enter_context(self.outputs)
            stack.enter_context(self.signals)
            try:
                if self.outputs is not None:
                    self.bus = self.outputs.watch()
                    self.mesh.lifeline.on_failure(self._stuck)
                choose_fabric(self.config, self.registry, self.mesh)
                return self._phases()
            except CalledOff as off:
                failed = unwatched.failure_of_another(self.mesh)
                if failed is None:
                    return 0
                raise self._failed(failed) from off
            except _Interrupted:
                self.mesh.call_off()
                self.bus.emit(self._end("signal", None, ""))
                return self.signals.exit_code
            except (Exception, KeyboardInterrupt, SystemExit, PeerFailed) as error:  # a plugin may call sys.exit()
                cause = unwatched.cause_of(self.mesh, self.mesh.lifeline.cause_of(error))
                shown = self._failed(cause)
                if cause is error:
                    unwatched.announce(self.mesh, shown)
                if self.loop is not None and isinstance(error, SurogateError):
                    # Another rank may be gone too. This rank's error is the one to show.
                    with suppress(Exception):
                        self.loop.leader.end()
                if shown is error:
                    raise
                raise shown from error
            finally:
                if self.at_hand is not None:
                    self.at_hand.remove()
                if self.contents is not None:
                    self.contents.close()
                if self.outputs is not None:
                    self.outputs.close()

    def _phases(self) -> int:
        if self.outputs is not None:
            self._check()
        base = self._base()
        self.contents = base.contents
        self.notes += base.notes
        identity = identity_of(base.config, self.registry, base.resolved)
        root = Path(self.config.checkpoint_dir or self.config.place)
        checkpoints = CheckpointDir(root, limit=self.config.save_total_limit)
        base, checkpoint = self._resumed(base, checkpoints, identity)
        self.config = base.config
        checkpoints.run = new_run_id() if checkpoint is None else checkpoint.run
        with self.mesh.first("data"):
            material = prepare_material(base, self.registry, checkpoint, self._show, self._surroundings())
            sampler, notes = Sampler.of(self.config, self.registry, base.resolved, material.tokenizer, self._show)
        self.notes += [*material.notes, *notes]
        self._compare(base, material, checkpoint)
        engine = self._build(base, material, checkpoint)
        if isinstance(material.task, ReferencedTask):
            # The engine has the weights from before the first step, also in a run that resumes.
            files = base.files(self._show) if self.mesh.leads else {}
            policy = policy_of(identity["essential"], self.config, self.registry, files)
            add_references(self.config, engine, material.task, policy=policy, show=self._show)
        if not self.mesh.leads:
            return self._follow(engine, material, checkpoints.root, checkpoint)
        identity |= {
            "settled": MemorySettings.taken(engine.settings).record(),
            "base_files": base.files(self._show),
            "gpus": self.mesh.world,
            "micro_batches": None if engine.axes.varying else engine.axes.micro_batches,
            "reduction": reduction_of(engine.axes, engine.sharing.stages.sizes),
            **record_of(self.config, material.tokenizer),
        }
        self.notes += adapter_notes(self.config, base.resolved, identity["base_files"])
        loop = self.loop = Loop(
            self.config,
            engine,
            material.steps,
            material.evaluation,
            self.bus,
            checkpoints,
            identity=identity,
            signals=self.signals,
            schedule=Schedule.of(self.config, self.registry),
            checkpoint=checkpoint,
            gemm_flops_per_second=self.rate,
            mesh=self.mesh,
        )
        loop.sampler, loop.evaluator = sampler, evaluator_of(material.task)
        self._accept(loop, checkpoint, checkpoints, material)
        loop.emit(self._start(base, material, loop))
        if is_online(material.steps):
            cast("OnlineSteps", material.steps).attach(engine)
        reason = loop.run()
        self._finish(reason, base, material, loop)
        loop.leader.end()
        engine.close()
        return self.signals.exit_code

    # --------------------------------------------------------------------------- phases

    def _check(self) -> None:
        """Refuse everything that can be refused, before any long work."""
        for place in places(self.config):
            check_place(place)
        rows_of(self.config)
        check_rates(self.config, self.registry)

    def _base(self) -> Base:
        """The base model, which rank 0 fetches first; the other ranks take the same commit of it."""
        if self.mesh.leads:
            base = fetch_base(self.config, self.registry, self._show)
            if base.device.type == "cuda" and self.config.compiler != "fx":
                # Now, to be ready when the blocks are traced. The other ranks find on disk what this one compiles.
                start_workers()
                quick_import("torch._inductor.compile_fx")
            self.mesh.gather([base.config.model.path, base.config.model.revision])
            return base
        path, revision = self.mesh.gather(None)[0]
        config = replace(self.config, model=replace(self.config.model, path=path, revision=revision))
        return fetch_base(config, self.registry, self._show, digests=False)

    def _resumed(
        self, base: Base, checkpoints: CheckpointDir, identity: dict[str, Any]
    ) -> tuple[Base, Checkpoint | None]:
        """The checkpoint that rank 0 chooses, and the base with the steps that the run keeps from it."""
        checkpoint, config, found = None, base.config, None
        if self.mesh.leads:
            checkpoint, notes = checkpoint_to_resume(checkpoints, base, identity, self._show)
            self.notes += notes
            if checkpoint is not None:
                if task_spec(config, self.registry).online is None:
                    config, notes = with_kept_steps(config, checkpoint)
                    self.notes += notes
                # Each machine may have a checkpoint directory of its own.
                path, root = checkpoint.path.absolute(), checkpoints.root.absolute()
                found = str(path.relative_to(root) if path.is_relative_to(root) else path)
        here = checkpoints.names()[-1:] if self.config.resume_from_checkpoint else []
        answers = self.mesh.gather([found, config.gradient_accumulation_steps, here])
        name, accumulation, _ = answers[0]
        if name is None:
            check_none_elsewhere([there for _, _, there in answers], checkpoints.root)
        else:
            self.at_hand = at_hand(self.mesh, checkpoints.root / name, checkpoints.root, show=self._show)
            if not self.mesh.leads:
                checkpoint = CheckpointDir.load(self.at_hand.path, digests=False)
        return replace(base, config=replace(config, gradient_accumulation_steps=accumulation)), checkpoint

    def _compare(self, base: Base, material: Material, checkpoint: Checkpoint | None) -> None:
        """Raise `UserError` if the ranks would not train the same model on the same rows."""
        if self.mesh.world == 1:
            return
        check_equal(self.mesh.gather(facts_of(base, material, self.registry, checkpoint)))
        devices = self.mesh.gather(_in_words(base.device))
        self.notes += unequal_devices(devices, share_experts=self.config.ep_size > 1)

    def _follow(self, engine: Engine, material: Material, root: Path, checkpoint: Checkpoint | None) -> int:
        """Train as rank 0 orders, until it has written everything."""
        follower = Follower(
            self.config,
            engine,
            material.steps,
            material.evaluation,
            root,
            mesh=self.mesh,
            signals=self.signals,
            checkpoint=checkpoint,
            evaluator=evaluator_of(material.task),
        )
        if self.at_hand is not None:
            self.at_hand.release(self.mesh)
        if is_online(material.steps):
            cast("OnlineSteps", material.steps).attach(engine)
        self.setting_up = False
        follower.run()
        engine.close()
        return 0

    def _build(self, base: Base, material: Material, checkpoint: Checkpoint | None) -> Engine:
        """The engine, with the weights loaded and everything compiled."""
        self.rate = measured_rate(base, self._show) if self.mesh.leads else None
        engine = build_engine(
            self.config,
            self.registry,
            base.resolved,
            sample=material.sample,
            progress=self._progress,
            prefer=None if checkpoint is None else MemorySettings.of(checkpoint.state.get("settled")),
            notes=self.notes,
            mesh=self.mesh,
        )
        self.notes += reduction_notes(
            engine.settings,
            checkpoint,
            deterministic=self.config.deterministic,
            stages=engine.sharing.stages.sizes,
        )
        self.notes += slow_links(self.mesh, base.device) or ([self.mesh.note] if self.mesh.note else [])
        kernels = engine.programs.kernels
        log.info("kernels", chosen={f"{op} {d}": k for (op, d), k in kernels.labels.items()})
        for (op, dtype), unknown in kernels.passed.items():
            log.info("kernels passed over", op=f"{op} {dtype}", unknown=unknown)
        self.notes += product_notes(kernels.chosen, engine.model, base.device)
        # Kernel packs are looked up only now.
        self.notes += [*self.registry.untold(), *untested_torch()]
        if self.config.epoch_adjustment and material.data is not None:
            parameters, tokens = engine.parameters.counts()[0], material.data.report.train.tokens
            self.config, note = with_adjusted_epochs(self.config, parameters=parameters, tokens=tokens)
            self.notes.append(note)
        return engine

    def _accept(
        self, loop: Loop, checkpoint: Checkpoint | None, checkpoints: CheckpointDir, material: Material
    ) -> None:
        """Everything is checked: from here on the output directory's record is this run's."""
        if self.at_hand is not None:
            self.at_hand.release(self.mesh)
        if checkpoint is not None:
            self.notes.append(resumed_note(checkpoint, loop.total_steps))
        self._stop_if_asked()
        loop.check_room()
        assert self.outputs is not None
        self.notes += self.outputs.take_over(checkpoints)
        self.outputs.write_files(self.config, checkpoints.run, loop.identity, material)
        self.setting_up = False
        log.info("set up", seconds=self.times.ended())

    def _finish(self, reason: str, base: Base, material: Material, loop: Loop) -> None:
        """Export the trained weights, unless a signal ended the run, and emit the end of the run."""
        assert self.outputs is not None
        if reason == "signal":
            end = self._end(reason, None, "")
            self.outputs.write_result(end)
            self.bus.emit(end)
            return
        weight_format = weight_format_spec(self.config, self.registry, base.resolved.model)
        trained = Trained(
            config=self.config,
            resolved=base.resolved,
            engine=loop.engine,
            tokenizer=material.tokenizer,
            state=loop.state,
            exported_step=loop.state.step,
            data=data_in_words(self.config, material.data.report) if material.data is not None else "",
            longest=material.longest,
            base_files=base.files(self._show),
            weight_format=weight_format.name if weight_format is not None else None,
        )
        trained = replace(trained, exported_step=loop.load_best())
        with loop.leader.served(loop.engine):
            place = export(trained, self._progress)
        message = _own_data(self.config) if reason == "finished" else f"Stopped: {loop.stop_reason}."
        end = self._end(reason, place, message)
        # With load_best, the best step was exported, which is not worse.
        worse = bool(end.verdict) and trained.exported_step == end.step
        commands = next_commands(self.config, head=base.resolved.model.head.kind, worse=worse)
        end = replace(end, export_step=trained.exported_step, next_commands=commands)
        self.outputs.write_result(end)
        self.bus.emit(end)

    def _failed(self, error: BaseException) -> BaseException:
        """Emit the end of a failed run; returns the error to show, which proposes changes if memory ran out."""
        shown = error
        if not isinstance(error, SurogateError) and is_out_of_memory(error):
            shown = out_of_memory(self.config, self.registry, error)
        message = str(shown) if isinstance(shown, SurogateError) else f"{type(shown).__name__}: {shown}"
        log.info("the run failed", message=message)
        self.bus.emit(self._end("failed", None, message))
        return shown

    def _stuck(self, message: str) -> None:
        """End the record from another thread, because another rank failed and this one waits for it for ever."""
        assert self.outputs is not None
        self.bus.emit(self._end("failed", None, message))
        self.outputs.close()

    # --------------------------------------------------------------------------- events

    def _progress(self, task: str, done: int, total: int) -> None:
        self._show(Progress(task=task, done=done, total=total))

    def _show(self, event: Progress) -> None:
        self.times.saw(event)
        self.bus.emit(event)
        self._stop_if_asked()

    def _surroundings(self) -> Surroundings:
        """What the task may use while the run trains."""

        def emit(event: Event) -> None:
            if self.mesh.leads:
                assert self.loop is not None
                self.loop.emit(event)

        return Surroundings(emit=emit, stopped=lambda: self.signals.received is not None, together=self.mesh.together())

    def _stop_if_asked(self) -> None:
        # Once the ranks are connected, they end together: the loop agrees on it before the first step. Until then the
        # others wait for rank 0.
        if self.setting_up and self.signals.received is not None and self.mesh.leads and self.mesh.fabric is None:
            raise _Interrupted

    def _start(self, base: Base, material: Material, loop: Loop) -> RunStart:
        config, resolved, engine = self.config, base.resolved, loop.engine
        parameters, trainable = engine.parameters.counts()
        notes = list(self.notes)
        optimizer = self.registry.get("optimizer", config.optimizer.name)
        unusual = rate_note(
            config.learning_rate,
            lora=config.lora,
            from_scratch=resolved.weights is None,
            optimizer=optimizer.name,
            scale=optimizer.rate_scale,
        )
        unscheduled = Schedule.of(config, self.registry).note(loop.total_steps)
        notes += [note for note in (unusual, unscheduled) if note is not None]
        if config.lora and resolved.weights is None:
            notes.append("The base is random and stays so: adapters on random weights only make sense for benchmarks.")
        if resolved.adapter and resolved.adapter.folded and not config.merge_adapter:
            notes.append(
                "The adapter of this run needs the one below it, which is exported with it: `surogate merge` folds in "
                "both; merge_adapter=true exports the whole model."
            )
        return RunStart(
            model=resolved.title,
            parameters=parameters,
            trainable_parameters=trainable,
            train_tokens=material.data.report.train.tokens if material.data is not None else 0,
            steps=loop.total_steps,
            start_step=loop.state.step,
            tokens_per_step=0 if is_online(material.steps) else tokens_per_step(self.config),
            epochs=loop.total_steps / material.steps.steps_per_epoch,
            device=_in_words(engine.settings.device, ranks=self.mesh.world),
            gpus=self.mesh.world,
            gemm_flops_per_second=self.rate,
            active_parameters=parameters - idle if (idle := idle_parameters(engine)) else None,
            objective=engine.assembly.objective.name,
            notes=tuple(notes),
        )

    def _end(self, reason: Any, place: Path | None, message: str) -> RunEnd:
        state = self.loop.state if self.loop else None
        return RunEnd(
            reason=reason,
            step=state.step if state else 0,
            seconds=time.perf_counter() - self.started,
            first_eval_loss=state.first_eval_loss if state else None,
            # Evaluated once, before the first step: there is no loss after it to compare with.
            last_eval_loss=state.last_eval_loss if state and state.evaluated_step else None,
            last_eval_step=state.evaluated_step or None if state else None,
            best_eval_loss=state.best_eval_loss if state else None,
            best_step=state.best_step if state else None,
            first_reward=state.first_reward if state else None,
            last_reward=state.last_reward if state else None,
            best_reward=state.best_reward if state else None,
            export_path=str(place) if place else None,
            # Repeat the failure of a monitor, such as the one that keeps the record: it may be hours old.
            message="\n".join(text for text in (message, *self.bus.failures) if text),
        )


def _in_words(device: torch.device, *, ranks: int = 1) -> str:
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        return name if ranks == 1 else f"{ranks} × {name}"
    threads = torch.get_num_threads()
    processes = "" if ranks == 1 else f"{ranks} processes of "
    return f"CPU, {processes}{threads} thread{'s' if threads > 1 else ''}"


def _own_data(config: RunConfig) -> str:
    """How to continue from the embedded default to your own model and data."""
    # Data in a package is an example that a plugin contains.
    if not any(str(d.get("path", "")).startswith("pkg://") for d in config.datasets):
        return ""
    return (
        "This was the embedded example. With a model and data of your own:\n"
        "  surogate sft model=DIR_OR_HUB_ID datasets=my.jsonl\n"
        '  where each line of my.jsonl is {"messages": [{"role": "user", "content": …}, …]}\n'
        '  or {"prompt": …, "completion": …}'
    )
