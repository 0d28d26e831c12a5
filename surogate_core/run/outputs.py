"""The outputs that only the process of rank 0 has: locks, record, monitors, report."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import structlog
import torch

from surogate_core import __version__
from surogate_core.config.resolve import to_dict, to_yaml
from surogate_core.config.schema import RunConfig
from surogate_core.data.preview import examples
from surogate_core.errors import PluginError, SurogateError
from surogate_core.events import ReportWritten, RunEnd, RunInfo, strict_json
from surogate_core.files import atomic
from surogate_core.files.metrics import METRICS
from surogate_core.files.private import private
from surogate_core.files.runs import START, point_latest
from surogate_core.masking import masked_values
from surogate_core.run.prepare import Material
from surogate_core.run.record import CONFIG, FACTS, EarlierRecord, locked
from surogate_core.run.watch import Watch
from surogate_core.train.bus import EventBus
from surogate_core.train.checkpoint import CheckpointDir

if TYPE_CHECKING:
    from surogate_core.bundles import Monitor
    from surogate_core.data.pipeline import PreparedData
    from surogate_core.plugins.registry import Registry

log = structlog.get_logger(__name__)


class Outputs:
    """The files that a run writes and the monitors that watch it. While entered, it holds the directories' locks."""

    def __init__(self, config: RunConfig, registry: Registry, watch: Watch | None = None):
        self._config, self._registry, self._watch = config, registry, watch or Watch()
        self._directory = Path(config.place)
        self._locks = ExitStack()
        self._accepted = False
        """Whether the record in the output directory is this run's to write."""
        self._keeps_record = False
        """Whether a monitor keeps the record that the report is made from."""
        self._facts: dict[str, Any] = {}
        """What is in ``run.json``."""
        self.bus = EventBus({})

    def __enter__(self) -> Outputs:
        with ExitStack() as stack:
            for key, directory in self._directories().items():
                atomic.ensure_writable(directory, key=key)
                stack.enter_context(locked(directory, key=key))
            self._record = EarlierRecord(self._directory)
            self._locks = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._locks.close()

    def _directories(self) -> dict[str, Path]:
        """Config key → each directory that the run writes to."""
        directories = {"output_dir": self._directory}
        if self._config.checkpoint_dir is not None:
            checkpoints = Path(self._config.checkpoint_dir)
            if checkpoints.resolve() != self._directory.resolve():
                directories["checkpoint_dir"] = checkpoints
        return directories

    # ------------------------------------------------------------------------- monitors

    def watch(self) -> EventBus:
        """Build the monitors; the bus to them. Raises `PluginError` naming the plugin of one that cannot be built."""
        config = self._config
        info = RunInfo(
            run_name=config.run_name or self._directory.resolve().name,
            output_dir=str(self._directory),
            task=config.task,
            config=to_dict(config),
            interactive=sys.stdout is not None and not sys.stdout.closed and sys.stdout.isatty(),
        )
        built: dict[str, Monitor] = {}
        for chosen in config.monitor:
            spec = self._registry.get("monitor", chosen.name)
            if spec.prints and self._watch.quiet:
                continue
            self._keeps_record |= spec.keeps_record
            try:
                built[chosen.name] = spec.build(chosen.options, info)
            except Exception as error:
                EventBus(built).close()
                if isinstance(error, SurogateError):
                    raise
                owner = self._registry.owner("monitor", chosen.name)
                raise PluginError(
                    f"monitor {chosen.name} of plugin {owner} cannot be built: {type(error).__name__}: {error}. "
                    f"Fix: repair the plugin or its options, or leave it out of `monitor`."
                ) from error
        built |= {name: build(info) for name, build in self._watch.callbacks.items()}
        self.bus = EventBus(built)
        return self.bus

    def close(self) -> None:
        """Write the reports, in whatever way the run ended, and close the monitors."""
        self._write_reports()
        self.bus.close()

    def _write_reports(self) -> None:
        """Write the reports of the installed plugins; a failure changes nothing else.

        A failed start does not change the report of the previous run, and one that failed before the first event has
        nothing to report.
        """
        kept = self._keeps_record and (self._directory / METRICS).is_file()
        # The directory that a refused run made for itself is deleted.
        used = self._record.exists or (self._directory / START).is_file()
        if not kept or (used and not self._accepted):
            return
        for name, spec in self._registry.all("report").items():
            try:
                first, *_ = spec.write([self._directory])
            except Exception as error:
                log.warning("a report was not written", report=name, error=repr(error), exc_info=True)
            else:
                self.bus.emit(ReportWritten(path=str(first)))

    # --------------------------------------------------------------------------- record

    def take_over(self, checkpoints: CheckpointDir) -> list[str]:
        """Start this run's record in the output directory; returns notes about former runs there."""
        notes = []
        if self._record.is_of_another_run(checkpoints.run):
            former = self._record.set_aside()
            notes.append(
                f"The record and the exports of the previous run were moved to {former}. "
                f"To delete them: rm -r {shlex.quote(str(former))}"
            )
        if left := checkpoints.left_over():
            one = len(left) == 1
            few = "1 checkpoint here belongs" if one else f"{len(left)} checkpoints here belong"
            # No command is proposed: when the user types it, this run may have a checkpoint of the same name.
            names = ", ".join(str(path) for path in left)
            notes.append(
                f"{few} to another run or cannot be used, and no save deletes {'it' if one else 'them'}: {names}. "
                f"If this run needs {'its name' if one else 'one of the names'}, it renames the old one to "
                f"NAME.kept-1. Delete by hand what you do not need: this run's own checkpoints have "
                f"run {checkpoints.run} in manifest.json."
            )
        self._accepted = True
        point_latest(self._directory)
        return notes

    def write_files(self, config: RunConfig, run: str, identity: Mapping[str, Any], material: Material) -> None:
        """Write ``config.yaml`` and ``run.json``. `config`: with what the run's data and model have changed in it."""
        header = f"# The resolved configuration of this run; `surogate {config.task}` on this file repeats it.\n"
        facts = {
            "run": run,
            "surogate": __version__,
            "torch": torch.__version__,
            "plugins": self._registry.plugin_set(digests=True),
            "plugins_in_use": sorted(identity["plugins"]),
            "seeds": {"train_seed": config.train_seed, "eval_seed": config.eval_seed},
            "data": material.data.digest if material.data is not None else None,
            "data_report": _data_facts(material.data, material) if material.data is not None else None,
            "base_model": identity["base_model"],
            "base_commit": identity["base_commit"],
            "base_files": identity["base_files"],
            "essential": identity["essential"],
            "gpus": identity["gpus"],
            "micro_batches": identity["micro_batches"],
            "reduction": identity["reduction"],
        }
        self._facts = masked_values(facts)
        text = json.dumps(self._facts, indent=1) + "\n"
        yaml = header + to_yaml(config)
        atomic.replace_file(self._directory / CONFIG, yaml.encode(), key="output_dir", opener=private)
        atomic.replace_file(self._directory / FACTS, text.encode(), key="output_dir")

    def write_result(self, end: RunEnd) -> None:
        """Add the result to ``run.json``."""
        names: tuple[str, ...] = ("reason", "step", "seconds", "first_eval_loss", "last_eval_loss", "last_eval_step")
        names += ("first_reward", "last_reward", "best_reward")
        names += ("best_eval_loss", "best_step", "export_path", "export_step")
        result = {name: strict_json(getattr(end, name)) for name in names}
        text = json.dumps({**self._facts, "result": result}, indent=1) + "\n"
        atomic.replace_file(self._directory / FACTS, text.encode(), key="output_dir")


def _data_facts(data: PreparedData, material: Material) -> dict[str, Any]:
    """What ``run.json`` says of the data."""
    report = data.report
    return {
        "rows_read": report.rows_read,
        "bad_rows": report.bad_row_count,
        "trained_share": report.trained_share,
        "longest_document": material.longest,
        "datasets": [dataclasses.asdict(d) for d in report.datasets],
        "train": dataclasses.asdict(report.train),
        "eval": dataclasses.asdict(report.eval) if report.eval else None,
        "examples": examples(data.train, material.tokenizer),
    }
