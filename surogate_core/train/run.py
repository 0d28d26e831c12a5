"""One run from a validated config to its export; what `surogate`, `surogate sft` and `surogate pt` call."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
from filelock import FileLock, Timeout

from surogate_core.config.resolve import to_dict, to_yaml
from surogate_core.config.schema import RunConfig
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.sampler import EvalBatches, StepLoader, collate
from surogate_core.data.tokenizer import check_vocabulary, load_tokenizer
from surogate_core.engine.engine import Engine
from surogate_core.errors import SurogateError, UserError
from surogate_core.train import atomic
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir, check_compatible
from surogate_core.train.events import Progress, RunEnd, RunInfo, RunStart
from surogate_core.train.export import Card, export_adapter, export_full
from surogate_core.train.loop import Loop
from surogate_core.train.setup import ResolvedModel, build_engine, out_of_memory, resolve_device, resolve_model
from surogate_core.train.signals import StopSignals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)

EMBEDDED = "pkg://surogate_dataset_chat/embedded"
"""Where the data set and tokenizer of the embedded default are."""


def run(config: RunConfig, registry: Registry) -> int:
    """Train as the config says; the exit code. Errors are raised, after the monitors were told."""
    launcher = registry.get("launcher", config.launcher.name)
    return launcher.launch(lambda: _Run(config, registry).main(), config.launcher.options)  # type: ignore[no-any-return]


class _Run:
    def __init__(self, config: RunConfig, registry: Registry):
        self.config, self.registry = config, registry
        self.output = Path(config.output_dir)
        self.started = time.perf_counter()
        self.loop: Loop | None = None
        self.engine: Engine | None = None
        self.bus = EventBus({})

    def main(self) -> int:
        """The run, inside its lock and its signal handlers."""
        atomic.ensure_writable(self.output, key="output_dir")
        lock = FileLock(self.output / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise UserError(
                f"output_dir {self.output}: another run is writing there. Fix: wait for it, or set another output_dir."
            ) from error
        with lock, StopSignals() as signals:
            try:
                return self._main(signals)
            except BaseException as error:
                self._failed(error)
                if isinstance(error, torch.OutOfMemoryError):
                    raise out_of_memory(self.config, error) from error
                raise
            finally:
                self.bus.close()

    def _main(self, signals: StopSignals) -> int:
        config, registry = self.config, self.registry
        checkpoints = CheckpointDir(Path(config.checkpoint_dir or config.output_dir), limit=config.save_total_limit)
        resolved = resolve_model(config, registry)
        device = resolve_device(config)
        recipe = registry.get("recipe", config.recipe.name)
        notes = [n for n in (recipe.unavailable(device),) if n]
        identity = self._identity(resolved)
        checkpoint = self._checkpoint_to_resume(checkpoints, identity, notes)
        notes += checkpoints.skipped
        self._write_run_files(identity)
        self.bus = self._monitors()
        data, tokenizer = self._data(resolved, notes)
        sample = collate(data.train, [0] * config.per_device_train_batch_size)
        self.engine = build_engine(config, registry, resolved, sample=sample, progress=self._progress)
        log.info("kernels", chosen={f"{op} {d}": k for (op, d), k in self.engine.programs.kernels.chosen.items()})
        loader = StepLoader(
            data.train,
            rows_per_micro_batch=config.per_device_train_batch_size,
            micro_batches=config.gradient_accumulation_steps,
            seed=config.train_seed,
        )
        total = config.max_steps if config.max_steps > 0 else math.ceil(config.num_epochs * loader.steps_per_epoch)
        evaluation = None
        if data.eval is not None:
            evaluation = EvalBatches(data.eval, rows_per_micro_batch=config.per_device_train_batch_size)
        self.loop = Loop(
            config,
            self.engine,
            loader,
            evaluation,
            self.bus,
            checkpoints,
            identity=identity,
            total_steps=total,
            signals=signals,
        )
        if checkpoint is not None:
            self.loop.restore(checkpoint)
            notes.append(f"Resumed from {checkpoint.path} at step {checkpoint.step} of {total}.")
        self.bus.emit(self._start(resolved, data, loader, total, notes))
        reason = self.loop.run()
        export = None
        if reason != "signal":
            export = self._export(resolved, tokenizer)
        self.bus.emit(self._end(reason, export, self._next_steps() if reason == "finished" else ""))
        return signals.exit_code

    # --------------------------------------------------------------------------- before

    def _identity(self, resolved: ResolvedModel) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed, and the plugins it was made with."""
        config = self.config
        essential = {
            "model": resolved.fingerprint,
            "objective": config.objective,
            "optimizer": config.optimizer.name,
            "recipe": config.recipe.name,
            "lora": config.lora,
        }
        if config.lora:
            essential["lora_rank"] = config.lora_rank
            essential["lora_alpha"] = config.lora_alpha
            essential["lora_target_modules"] = sorted(config.lora_target_modules)
        return {"essential": essential, "plugins": {p["name"]: p["version"] for p in self._plugins_in_use()}}

    def _plugins_in_use(self) -> list[dict[str, Any]]:
        """The plugins whose bundles shape the weights; monitors may come and go."""
        config, registry = self.config, self.registry
        kinds = {
            "recipe": [config.recipe.name],
            "optimizer": [config.optimizer.name],
            "offload": [config.offload.name],
            "objective": [config.objective],
        }
        owners = {registry.owner(kind, name) for kind, names in kinds.items() for name in names}
        return [p for p in registry.plugin_set() if p["name"] in owners]

    def _checkpoint_to_resume(
        self, checkpoints: CheckpointDir, identity: Mapping[str, Any], notes: list[str]
    ) -> Checkpoint | None:
        asked = self.config.resume_from_checkpoint
        if asked is False:
            return None
        checkpoint = checkpoints.latest_good() if asked is True else CheckpointDir.load(Path(asked))
        if checkpoint is not None:
            notes += check_compatible(checkpoint.state, identity, path=checkpoint.path)
        return checkpoint

    def _write_run_files(self, identity: Mapping[str, Any]) -> None:
        config = self.config
        header = "# The resolved configuration of this run; `surogate sft` on this file repeats it.\n"
        text = header + to_yaml(config)
        facts = {
            "plugins": self.registry.plugin_set(),
            "seeds": {"train_seed": config.train_seed, "eval_seed": config.eval_seed},
            "torch": torch.__version__,
            **identity,
        }
        atomic.write_file(self.output / "config.yaml", text.encode())
        atomic.write_file(self.output / "run.json", json.dumps(facts, indent=1).encode())

    def _monitors(self) -> EventBus:
        import sys

        config = self.config
        info = RunInfo(
            run_name=config.run_name or self.output.resolve().name,
            output_dir=str(self.output),
            task=config.task,
            config=to_dict(config),
            interactive=sys.stdout.isatty(),
        )
        chosen = {s.name: self.registry.get("monitor", s.name).build(s.options, info) for s in config.monitor}
        return EventBus(chosen)

    def _data(self, resolved: ResolvedModel, notes: list[str]) -> tuple[PreparedData, PreTrainedTokenizerBase]:
        config = self.config
        where = config.tokenizer or config.model.path
        if where is None:
            raise UserError(
                f"tokenizer: a model from random weights has none of its own. "
                f"Fix: set `tokenizer` to a directory or hub id; the embedded one is {EMBEDDED}/tokenizer."
            )
        tokenizer = load_tokenizer(where)
        check_vocabulary(tokenizer, resolved.model.vocab_size)
        data = prepare(config, tokenizer, self.registry.all("dataset"), progress=self.bus.emit)
        notes.append(data.report.summary())
        notes += data.report.warnings
        return data, tokenizer

    def _progress(self, task: str, done: int, total: int) -> None:
        self.bus.emit(Progress(task=task, done=done, total=total))

    def _start(
        self, resolved: ResolvedModel, data: PreparedData, loader: StepLoader, total: int, notes: list[str]
    ) -> RunStart:
        assert self.engine is not None
        assert self.loop is not None
        config, device = self.config, self.engine.settings.device
        parameters, trainable = self.engine.parameters.counts()
        if config.lora and resolved.weights is None:
            notes.append("The base is random and stays so: adapters on random weights only make sense for benchmarks.")
        return RunStart(
            model=resolved.title,
            parameters=parameters,
            trainable_parameters=trainable,
            train_tokens=data.report.train.tokens,
            steps=total,
            start_step=self.loop.state.step,
            tokens_per_step=self.engine.settings.tokens * config.gradient_accumulation_steps,
            epochs=total / loader.steps_per_epoch,
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads",
            notes=tuple(notes),
        )

    # ---------------------------------------------------------------------------- after

    def _export(self, resolved: ResolvedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
        assert self.engine is not None
        assert self.loop is not None
        config, parameters, state = self.config, self.engine.parameters, self.loop.state
        base = config.model.path
        settings = to_dict(config)
        keys = ("recipe", "optimizer", "learning_rate", "lr_scheduler_type", "sequence_len", "lora", "lora_rank")
        card = Card(
            title=config.run_name or self.output.resolve().name,
            base_model=base if resolved.weights else None,
            settings={k: settings[k] for k in keys},
            figures={
                "steps": state.step,
                "tokens": state.total_tokens,
                "held-out loss before": state.first_eval_loss,
                "held-out loss after": state.last_eval_loss,
            },
        )
        self._progress("exporting", 0, 1)
        if config.lora:
            adapters = dict(parameters.adapter_tensors())
            path = export_adapter(
                self.output / "adapter",
                adapters.items(),
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                dropout=config.lora_dropout,
                target_modules=sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters}),
                base_model=base,
                card=card,
                tokenizer=tokenizer,
            )
        else:
            values = {**resolved.model.config, "architectures": [resolved.model.architecture]}
            path = export_full(
                self.output / "model", parameters.base_tensors(), config=values, tokenizer=tokenizer, card=card
            )
        self._progress("exporting", 1, 1)
        return path

    def _end(self, reason: str, export: Path | None, message: str) -> RunEnd:
        state = self.loop.state if self.loop else None
        return RunEnd(
            reason=reason,  # type: ignore[arg-type]
            step=state.step if state else 0,
            seconds=time.perf_counter() - self.started,
            first_eval_loss=state.first_eval_loss if state else None,
            last_eval_loss=state.last_eval_loss if state else None,
            export_path=str(export) if export else None,
            message=message,
        )

    def _next_steps(self) -> str:
        """How to go on from the embedded default to one's own model and data."""
        own_data = not any(str(d.get("path", "")).startswith(EMBEDDED) for d in self.config.datasets)
        if own_data and self.config.model.path is not None:
            return ""
        return (
            "This was the embedded example. With a model and data of your own:\n"
            "  surogate sft model=DIR_OR_HUB_ID 'datasets=[{path: my.jsonl, type: conversation}]' output_dir=my-run\n"
            "  where each line of my.jsonl is {\"messages\": [{\"role\": \"user\", \"content\": …}, …]}"
        )

    def _failed(self, error: BaseException) -> None:
        message = str(error) if isinstance(error, SurogateError) else f"{type(error).__name__}: {error}"
        self.bus.emit(self._end("failed", None, message))
