"""One run from a validated config to its export; what `surogate`, `surogate sft` and `surogate pt` call."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch

from surogate_core import __version__
from surogate_core.config.resolve import to_dict, to_yaml
from surogate_core.config.schema import RunConfig
from surogate_core.data.pipeline import PreparedData, prepare
from surogate_core.data.preview import examples, suspicious_examples
from surogate_core.data.sampler import EvalBatches, StepLoader, collate
from surogate_core.dsl.rope import check_covers
from surogate_core.engine.engine import Engine
from surogate_core.errors import PluginError, SurogateError
from surogate_core.events import Progress, ReportWritten, RunEnd, RunInfo, RunStart
from surogate_core.files import atomic
from surogate_core.files.private import private
from surogate_core.hf.card import Card, changed_keys
from surogate_core.hf.contents import Contents, check_contents, digest_cache
from surogate_core.hf.export import check_place, export_adapter, export_full, generation_of
from surogate_core.hf.lora_files import LoraAdapter, folded
from surogate_core.masking import masked_values
from surogate_core.report.write import write_report
from surogate_core.run.assemble import (
    ResolvedModel,
    adapter_notes,
    build_engine,
    check_commit,
    check_weights,
    is_out_of_memory,
    pinned,
    prepare_recipe,
    recipe_notes,
    resolve_device,
    resolve_dtype,
    resolve_lora,
    resolve_model,
    resolve_weight_format,
    unused_note,
    weight_format_notes,
)
from surogate_core.run.changes import changes_note, recorded
from surogate_core.run.fitting import out_of_memory
from surogate_core.run.record import CONFIG, FACTS, Record, locked, new_run_id
from surogate_core.run.token_budget import adjusted_epochs, token_budget
from surogate_core.run.tokenizer_of_run import EMBEDDED, tokenizer_of_run
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir, check_compatible
from surogate_core.train.flops import gemm_flops_per_second
from surogate_core.train.loop import Loop
from surogate_core.train.signals import StopSignals

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles import Monitor
    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)


def run(config: RunConfig, registry: Registry) -> int:
    """Train as the config says; the exit code. Errors are raised, after the monitors were told."""
    launcher = registry.get("launcher", config.launcher.name)
    return launcher.launch(lambda: _Run(config, registry).main(), config.launcher.options)


class _Interrupted(Exception):  # noqa: N818
    """A signal came before the first step: there is nothing to finish or to save."""


class _Run:
    def __init__(self, config: RunConfig, registry: Registry):
        self.config, self.registry = config, registry
        self.output = Path(config.output_dir)
        self.checkpoint_root = Path(config.checkpoint_dir or config.output_dir)
        self.started = time.perf_counter()
        self.signals = StopSignals()
        self.setting_up = True
        self.accepted = False
        """Whether the record in the output directory is this run's to write."""
        self.longest = 0  # tokens of the longest document
        self.loop: Loop | None = None
        self.engine: Engine | None = None
        self.bus = EventBus({})
        self.contents: Contents | None = None
        self.keeps_record = False

    def main(self) -> int:
        """The run, inside its locks and its signal handlers."""
        with ExitStack() as stack:
            for key, directory in self._directories().items():
                atomic.ensure_writable(directory, key=key)
                stack.enter_context(locked(directory, key=key))
            stack.enter_context(self.signals)
            self.record = Record(self.output)
            try:
                self.bus = EventBus(self._monitors())
                return self._main()
            except _Interrupted:
                self.bus.emit(self._end("signal", None, ""))
                return self.signals.exit_code
            except BaseException as error:
                shown: BaseException = error
                if not isinstance(error, SurogateError) and is_out_of_memory(error):
                    shown = out_of_memory(self.config, self.registry, error)
                message = str(shown) if isinstance(shown, SurogateError) else f"{type(shown).__name__}: {shown}"
                log.info("the run failed", message=message, accepted=self.accepted)
                self.bus.emit(self._end("failed", None, message))
                if shown is error:
                    raise
                raise shown from error
            finally:
                if self.contents is not None:
                    self.contents.close()
                self._write_report()
                self.bus.close()

    def _directories(self) -> dict[str, Path]:
        """Config key → each directory that the run writes to."""
        directories = {"output_dir": self.output}
        if self.checkpoint_root.resolve() != self.output.resolve():
            directories["checkpoint_dir"] = self.checkpoint_root
        return directories

    def _main(self) -> int:
        config, registry = self.config, self.registry
        # What can be refused is refused before anything long is done.
        for place in self._export_places():
            check_place(place)
        self._progress("fetching the model", 0, 1)
        resolved = resolve_model(config, registry)
        self._progress("fetching the model", 1, 1)
        config = self.config = pinned(config, resolved)
        unused = check_weights(config, resolved, resolve_lora(config, resolved.model))
        if resolved.weights is not None:
            # In the background: a run that resumes nothing needs the digests only for its first checkpoint.
            self.contents = Contents(resolved.weights.files, digest_cache(config.data_cache_dir))
        device = resolve_device(config)
        if unused:
            log.info("tensors of the model directory that the model does not use", names=unused)
        recipe, recipe_options = prepare_recipe(config, registry, device)
        left_out = unused_note(unused, tied=resolved.model.tied)
        notes = recipe_notes(config, recipe, recipe_options)
        notes += weight_format_notes(config, registry, resolved, device)
        notes += [n for n in (left_out, *resolved.notes) if n]
        checkpoints = CheckpointDir(self.checkpoint_root, limit=config.save_total_limit)
        identity = self._identity(resolved)
        checkpoint = self._checkpoint_to_resume(checkpoints, identity, notes)
        checkpoints.run = checkpoint.run if checkpoint is not None else new_run_id()
        tokenizer, of_tokenizer = tokenizer_of_run(
            config, vocab_size=resolved.model.vocab_size, pretrained=resolved.weights is not None
        )
        notes += of_tokenizer
        data = prepare(config, tokenizer, registry.all("dataset"), progress=self._show)
        self.longest = max(rows.longest for rows in (data.train, data.eval) if rows is not None)
        check_covers(resolved.model.config, self.longest)
        notes += [data.report.summary(), *data.report.warnings]
        notes += suspicious_examples(data, tokenizer)
        loader = StepLoader(
            data.train,
            rows_per_micro_batch=config.per_device_train_batch_size,
            micro_batches=config.gradient_accumulation_steps,
            seed=config.train_seed,
        )
        if checkpoint is not None:
            loader.load_state(checkpoint.state.get("loader", {}))
        sample = collate(data.train, [0] * config.per_device_train_batch_size)
        rate = self._gemm_rate(device)
        self.engine = build_engine(config, registry, resolved, sample=sample, progress=self._progress)
        log.info("kernels", chosen={f"{op} {d}": k for (op, d), k in self.engine.programs.kernels.chosen.items()})
        # Kernel packs are looked up only now.
        notes += self.registry.untold()
        if config.epoch_adjustment:
            config = self.config = self._with_adjusted_epochs(data, notes)
        identity["base_files"] = self._base_files()
        notes += adapter_notes(config, resolved, identity["base_files"])
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
            signals=self.signals,
            checkpoint=checkpoint,
            gemm_flops_per_second=rate,
        )
        if checkpoint is not None:
            notes.append(_resumed(checkpoint, self.loop.total_steps))
        self._stop_if_asked()
        notes += self._take_over(checkpoints)
        self._write_run_files(identity, data, tokenizer)
        self.setting_up = False
        self.loop.emit(self._start(resolved, data, loader, notes, rate))
        reason = self.loop.run()
        if reason == "signal":
            self.bus.emit(self._end(reason, None, ""))
        else:
            export = self._export(resolved, tokenizer)
            message = self._next_steps() if reason == "finished" else f"Stopped: {self.loop.stop_reason}."
            self.bus.emit(self._end(reason, export, message))
        return self.signals.exit_code

    # --------------------------------------------------------------------------- before

    def _identity(self, resolved: ResolvedModel) -> dict[str, Any]:
        """What a checkpoint must agree with to be resumed, and what it was made with."""
        config = self.config
        essential = {
            "model": resolved.fingerprint,
            **{f"model.config.{key}": value for key, value in resolved.model.config.items()},
            "objective": config.objective,
            "optimizer": config.optimizer.name,
            "recipe": config.recipe.name,
            "lora": config.lora,
        }
        if config.master_dtype == "bf16":
            essential["master_dtype"] = config.master_dtype
        if self.registry.get("recipe", config.recipe.name).state is not None:
            essential["fp8_amax_history"] = config.fp8_amax_history
        weight_format, weight_settings = resolve_weight_format(config, self.registry, resolved.model)
        if weight_format is not None:
            essential["weight_format"] = weight_format.name
            essential |= {key: getattr(weight_settings, key) for key in weight_format.keys}
        if config.lora:
            essential["lora_rank"] = config.lora_rank
            essential["lora_alpha"] = config.lora_alpha
            essential["lora_target_modules"] = sorted(config.lora_target_modules)
        made_with: dict[str, Any] = {"base_model": config.model.path, "base_commit": resolved.commit}
        if (given := resolved.adapter) is not None:
            essential["adapter"] = f"{given.mode} {given.fingerprint[:16]}"
            path = str(Path(given.stack[-1].source).resolve())
            made_with["adapter"] = {"path": path, "mode": given.mode, "fingerprint": given.fingerprint}
        # The plugins whose bundles shape the weights; monitors may come and go, and so may where tensors live.
        used = self.registry.plugins_used(
            [
                ("model", resolved.family.name),
                ("recipe", config.recipe.name),
                ("optimizer", config.optimizer.name),
                ("objective", config.objective),
                *([("quant", weight_format.name)] if weight_format is not None else []),
            ]
        )
        versions = {p["name"]: p["version"] for p in used}
        made_with |= {"torch": torch.__version__, "config": recorded(config)}
        return {"essential": essential, "plugins": versions, **made_with}

    def _checkpoint_to_resume(
        self, checkpoints: CheckpointDir, identity: Mapping[str, Any], notes: list[str]
    ) -> Checkpoint | None:
        asked = self.config.resume_from_checkpoint
        if asked is False:
            return None
        self._progress("verifying the checkpoint", 0, 1)
        if asked is True:
            checkpoint = checkpoints.latest_good()
            notes += checkpoints.skipped
        else:
            beside = self.checkpoint_root / asked
            checkpoint = CheckpointDir.load(beside if beside.is_dir() and not Path(asked).is_dir() else Path(asked))
        self._progress("verifying the checkpoint", 1, 1)
        if checkpoint is None:
            return None
        check_commit(checkpoint.state, identity["base_commit"], path=checkpoint.path)
        notes += check_compatible(checkpoint.state, identity, path=checkpoint.path)
        note = check_contents(checkpoint.state, self._base_files(), frozen=self.config.lora, path=checkpoint.path)
        changed = changes_note(checkpoint.state, self.config, path=checkpoint.path)
        notes += [n for n in (note, changed) if n]
        had = checkpoint.state.get("torch")
        if had != torch.__version__:
            notes.append(
                f"torch was version {had} when the checkpoint was saved and is {torch.__version__} now: "
                f"the run goes on, but not bit for bit as it would have."
            )
        return checkpoint

    def _base_files(self) -> dict[str, str]:
        """Weight file of the base → digest of its data; empty for random weights."""
        if self.contents is None:
            return {}
        self._progress("verifying the base", 0, 1)
        digests = self.contents.digests()
        self._progress("verifying the base", 1, 1)
        return digests

    def _with_adjusted_epochs(self, data: PreparedData, notes: list[str]) -> RunConfig:
        """The config with the epochs that the token budget of the model makes of the data."""
        assert self.engine is not None
        parameters, tokens = self.engine.parameters.counts()[0], data.report.train.tokens
        epochs = adjusted_epochs(parameters, tokens)
        notes.append(
            f"epoch_adjustment: num_epochs is {epochs:.4g} instead of {self.config.num_epochs:.4g}, for "
            f"{token_budget(parameters):,} tokens at {tokens:,} an epoch."
        )
        return dataclasses.replace(self.config, num_epochs=epochs)

    def _take_over(self, checkpoints: CheckpointDir) -> list[str]:
        """Make the output directory's record this run's; what the owner should know of former runs there."""
        notes = []
        if self.record.is_of_another_run(checkpoints.run):
            former = self.record.set_aside()
            notes.append(
                f"The record and the exports of the previous run were moved to {former}. "
                f"To delete them: rm -r {shlex.quote(str(former))}"
            )
        if left := checkpoints.left_over():
            one = len(left) == 1
            few = "1 checkpoint here belongs" if one else f"{len(left)} checkpoints here belong"
            # No command: by the time that it is typed, this run may have a checkpoint under the same name.
            names = ", ".join(str(path) for path in left)
            notes.append(
                f"{few} to another run or cannot be used, and no save deletes {'it' if one else 'them'}: {names}. "
                f"If this run needs {'its name' if one else 'one of the names'}, it renames the old one to "
                f"NAME.kept-1. Delete by hand what you do not need: this run's own checkpoints have "
                f"run {checkpoints.run} in manifest.json."
            )
        self.accepted, self.run_id = True, checkpoints.run
        return notes

    def _write_run_files(
        self, identity: Mapping[str, Any], data: PreparedData, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        config = self.config
        header = f"# The resolved configuration of this run; `surogate {config.task}` on this file repeats it.\n"
        facts = {
            "run": self.run_id,
            "surogate": __version__,
            "torch": torch.__version__,
            "plugins": self.registry.plugin_set(digests=True),
            "plugins_in_use": sorted(identity["plugins"]),
            "seeds": {"train_seed": config.train_seed, "eval_seed": config.eval_seed},
            "data": data.digest,
            "data_report": {
                "rows_read": data.report.rows_read,
                "bad_rows": data.report.bad_row_count,
                "trained_share": data.report.trained_share,
                "longest_document": self.longest,
                "datasets": [dataclasses.asdict(d) for d in data.report.datasets],
                "train": dataclasses.asdict(data.report.train),
                "eval": dataclasses.asdict(data.report.eval) if data.report.eval else None,
                "examples": examples(data.train, tokenizer),
            },
            "base_commit": identity["base_commit"],
            "base_files": identity["base_files"],
            "essential": identity["essential"],
        }
        text = json.dumps(masked_values(facts), indent=1) + "\n"
        atomic.replace_file(self.output / CONFIG, (header + to_yaml(config)).encode(), key="output_dir", opener=private)
        atomic.replace_file(self.output / FACTS, text.encode(), key="output_dir")

    def _monitors(self) -> dict[str, Monitor]:
        config = self.config
        info = RunInfo(
            run_name=config.run_name or self.output.resolve().name,
            output_dir=str(self.output),
            task=config.task,
            config=to_dict(config),
            interactive=sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty(),
        )
        built: dict[str, Monitor] = {}
        for chosen in config.monitor:
            spec = self.registry.get("monitor", chosen.name)
            self.keeps_record |= spec.keeps_record
            try:
                built[chosen.name] = spec.build(chosen.options, info)
            except Exception as error:
                EventBus(built).close()
                if isinstance(error, SurogateError):
                    raise
                owner = self.registry.owner("monitor", chosen.name)
                raise PluginError(
                    f"monitor {chosen.name} of plugin {owner} cannot be built: {type(error).__name__}: {error}. "
                    f"Fix: repair the plugin or its options, or leave it out of `monitor`."
                ) from error
        return built

    def _progress(self, task: str, done: int, total: int) -> None:
        self._show(Progress(task=task, done=done, total=total))

    def _show(self, event: Progress) -> None:
        self.bus.emit(event)
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        if self.setting_up and self.signals.received is not None:
            raise _Interrupted

    def _gemm_rate(self, device: torch.device) -> float | None:
        """Measured before the model is there; what that takes is not of the run's peak memory. None without room."""
        self._progress("measuring the device's rate", 0, 1)
        rate = None
        try:
            rate = gemm_flops_per_second(device, resolve_dtype(self.config, device))
        except torch.OutOfMemoryError as error:
            log.info("no speed of light: the device has no room to measure its rate", error=repr(error))
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        self._progress("measuring the device's rate", 1, 1)
        return rate

    def _start(
        self, resolved: ResolvedModel, data: PreparedData, loader: StepLoader, notes: Sequence[str], rate: float | None
    ) -> RunStart:
        assert self.engine is not None
        assert self.loop is not None
        config, device, total = self.config, self.engine.settings.device, self.loop.total_steps
        parameters, trainable = self.engine.parameters.counts()
        if config.lora and resolved.weights is None:
            notes = [
                *notes,
                "The base is random and stays so: adapters on random weights only make sense for benchmarks.",
            ]
        if resolved.adapter and resolved.adapter.folded and not config.merge_adapter:
            notes = [
                *notes,
                "The adapter of this run needs the one below it, which is exported with it: `surogate merge` folds in "
                "both; merge_adapter=true exports the whole model.",
            ]
        threads = torch.get_num_threads()
        on = (
            torch.cuda.get_device_name(device)
            if device.type == "cuda"
            else f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        )
        return RunStart(
            model=resolved.title,
            parameters=parameters,
            trainable_parameters=trainable,
            train_tokens=data.report.train.tokens,
            steps=total,
            start_step=self.loop.state.step,
            tokens_per_step=self.engine.settings.tokens * config.gradient_accumulation_steps,
            epochs=total / loader.steps_per_epoch,
            device=on,
            gemm_flops_per_second=rate,
            notes=tuple(notes),
        )

    # ---------------------------------------------------------------------------- after

    def _export_places(self) -> list[Path]:
        """Where the result goes, the one that is shown first."""
        adapter, model = self.output / "adapter", self.output / "model"
        if not self.config.lora:
            return [model]
        return [model, adapter] if self.config.merge_adapter else [adapter]

    def _export(self, resolved: ResolvedModel, tokenizer: PreTrainedTokenizerBase) -> Path:
        assert self.engine is not None
        assert self.loop is not None
        config, parameters, state = self.config, self.engine.parameters, self.loop.state
        base = config.model.path
        settings = to_dict(config)
        keys = ["learning_rate", "lr_scheduler_type", "sequence_len", "lora", *(["lora_rank"] if config.lora else [])]
        chosen = {"recipe": config.recipe.name, "optimizer": config.optimizer.name}
        weight_format, _ = resolve_weight_format(config, self.registry, resolved.model)
        if weight_format is not None:
            chosen["weight_format"] = weight_format.name
        card = Card(
            title=config.run_name or self.output.resolve().name,
            base_model=base if resolved.weights else None,
            base_commit=resolved.commit,
            base_files=self._base_files(),
            base_overrides=resolved.base_overrides,
            configuration=changed_keys(config),
            settings={**chosen, **{k: settings[k] for k in keys}},
            figures={
                "steps": state.step,
                "tokens": state.total_tokens,
                "tokens of the longest document": self.longest,
                "trained parameters": parameters.counts()[1],
                "held-out loss before": state.first_eval_loss,
                "held-out loss after": state.last_eval_loss if state.evaluated_step else None,
            },
        )
        stack: list[LoraAdapter] = []
        if config.lora:
            adapters = dict(parameters.adapter_tensors())
            scale = config.lora_alpha / config.lora_rank
            own = LoraAdapter(
                source="the run", rank=config.lora_rank, alpha=config.lora_alpha, scale=scale, tensors=adapters
            )
            below = resolved.adapter.folded if resolved.adapter else ()
            stack = [*below, own]
            export_adapter(
                self._export_places()[-1],
                self._exported("the adapter", adapters.items(), len(adapters)),
                rank=config.lora_rank,
                alpha=config.lora_alpha,
                dropout=config.lora_dropout,
                target_modules=sorted({name.split(".lora_")[0].rsplit(".", 1)[-1] for name in adapters}),
                base_model=base,
                card=card,
                tokenizer=tokenizer,
                stacked_on=Path(below[-1].source) if below else None,
                generation_config=generation_of(resolved.weights, resolved.model.config, tokenizer),
            )
        if not config.lora or config.merge_adapter:
            values = {**resolved.model.config, "architectures": [resolved.model.architecture]}
            values.pop("quantization_config", None)  # what is written is not quantised
            if resolved.weights is None:
                # A preset's token ids are those of the published model's tokenizer, not of this one.
                names = ("bos_token_id", "eos_token_id", "pad_token_id")
                values.update({name: getattr(tokenizer, name) for name in names})
            # Folding begins from the files, whose dtypes are kept, and rounds once; of a quantised base from what
            # the adapter was trained on.
            files = resolved.weights if config.lora and weight_format is None else None
            tensors = ((n, files.get(n)) for n in files.names()) if files else parameters.base_tensors()
            export_full(
                self._export_places()[0],
                self._exported("the model", folded(tensors, stack), len(parameters.specs)),
                config=values,
                tokenizer=tokenizer,
                card=card,
                generation_config=generation_of(resolved.weights, values, tokenizer),
            )
        return self._export_places()[0]

    def _exported(
        self, what: str, tensors: Iterable[tuple[str, torch.Tensor]], total: int
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors, with progress told; `total` is about their number."""
        for number, item in enumerate(tensors):
            self._progress(f"exporting {what}", min(number, total - 1), total)
            yield item
        self._progress(f"exporting {what}", total, total)

    def _write_report(self) -> None:
        """Leave report.html and report.md, however the run ended; a failure at it changes nothing.

        A start that failed leaves the report of the run before as it is.
        """
        if not self.keeps_record or (self.record.exists and not self.accepted):
            return
        try:
            written = write_report([self.output])
        except Exception as error:
            log.warning("no report was written", error=repr(error), exc_info=True)
        else:
            self.bus.emit(ReportWritten(path=str(written[0])))

    def _end(self, reason: str, export: Path | None, message: str) -> RunEnd:
        state = self.loop.state if self.loop else None
        return RunEnd(
            reason=reason,  # type: ignore[arg-type]
            step=state.step if state else 0,
            seconds=time.perf_counter() - self.started,
            first_eval_loss=state.first_eval_loss if state else None,
            # Evaluated once, before the first step: there is no loss after it to compare with.
            last_eval_loss=state.last_eval_loss if state and state.evaluated_step else None,
            export_path=str(export) if export else None,
            message=message,
        )

    def _next_steps(self) -> str:
        """How to go on from the embedded default to one's own model and data."""
        if not any(str(d.get("path", "")).startswith(EMBEDDED) for d in self.config.datasets):
            return ""
        return (
            "This was the embedded example. With a model and data of your own:\n"
            "  surogate sft model=DIR_OR_HUB_ID 'datasets=[{path: my.jsonl, type: conversation}]' output_dir=my-run\n"
            '  where each line of my.jsonl is {"messages": [{"role": "user", "content": …}, …]}'
        )


def _resumed(checkpoint: Checkpoint, total: int) -> str:
    if checkpoint.step < total:
        return f"Resumed from {checkpoint.path} at step {checkpoint.step} of {total}."
    return (
        f"Nothing is left to train: {checkpoint.path} is at step {checkpoint.step} and the run has {total}; "
        f"its result is exported again. To train on, raise max_steps or num_epochs; "
        f"to start anew, set resume_from_checkpoint=false."
    )
