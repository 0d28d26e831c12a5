"""What a run left behind: its curves, its files, and what can be done with them."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from surogate_core.errors import UserError
from surogate_core.files.runs import run_directory

if TYPE_CHECKING:
    from surogate_core.files.records import RunRecord
    from surogate_core.inference.texts import Text


class HeldOutLoss(NamedTuple):
    """The loss on the held-out rows after a step."""

    step: int
    loss: float


class Sample(NamedTuple):
    """What the model generated for a prompt after a step."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The files of a run. A file that the run did not write is None."""

    directory: Path
    adapter: Path | None
    """The trained adapter, which PEFT and vLLM load."""
    model: Path | None
    """The trained model, which transformers and vLLM load."""
    config: Path | None
    metrics: Path | None
    report: Path | None
    log: Path | None
    checkpoints: tuple[Path, ...]
    """The checkpoints, from the first to the last step."""


@dataclass(frozen=True, slots=True)
class RunReport:
    """The report of a run; a notebook shows it."""

    path: Path
    """The HTML file."""

    @property
    def html(self) -> str:
        """The page."""
        return self.path.read_text(encoding="utf-8")

    @property
    def markdown(self) -> str:
        """The same as Markdown."""
        return self.path.with_suffix(".md").read_text(encoding="utf-8")

    def _repr_html_(self) -> str:
        # A frame keeps the styles of the page and of the notebook apart.
        page = html.escape(self.html, quote=True)
        return f'<iframe srcdoc="{page}" style="width: 100%; height: 640px; border: 0" title="Report"></iframe>'


class Run:
    """A run, by its directory. The figures are read from its files when they are asked for."""

    __slots__ = ("_read", "path")

    path: Path
    """The directory of the run."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self._read: tuple[tuple[int, int], RunRecord] | None = None

    # --------------------------------------------------------------------------- figures

    @property
    def outcome(self) -> str:
        """How it ended: finished, stopped early, interrupted or failed."""
        return self._record.outcome

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [float(value) for value in self._record.curve("loss")[1]]

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a figure of the run, such as ``reward/mean`` or ``eval/rewards/margins``.

        Raises `UserError` for a name that the run does not have.
        """
        steps, values = self._record.curve(name) if name in self._record.names else ((), ())
        if not len(steps):
            have = ", ".join(self._record.names) or "none"
            raise UserError(f"{self.path}: the run has no figure {name}. Figures: {have}.")
        return [(int(step), float(value)) for step, value in zip(steps, values, strict=True)]

    @property
    def evals(self) -> list[HeldOutLoss]:
        """The evaluations, from the first to the last."""
        steps, values = self._record.curve("eval")
        return [HeldOutLoss(int(step), float(value)) for step, value in zip(steps, values, strict=True)]

    @property
    def samples(self) -> list[Sample]:
        """What the model generated for `sample_prompts`, from the first to the last step."""
        return [
            Sample(int(one.get("step", 0)), str(prompt), str(text))
            for one in self._record.samples
            for prompt, text in zip(one.get("prompts") or (), one.get("texts") or (), strict=False)
        ]

    @property
    def best(self) -> HeldOutLoss | None:
        """The evaluation after the first step with the lowest loss; None without one."""
        finite = [found for found in self.evals if found.step > 0 and math.isfinite(found.loss)]
        return min(finite, key=lambda found: found.loss, default=None)

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as flat keys."""
        from surogate_core.config.yamlfile import read_yaml

        return dict(read_yaml(self.path / "config.yaml").values)

    @property
    def facts(self) -> Mapping[str, Any]:
        """``run.json``: versions, plugins, seeds, data."""
        return self._record.facts

    # ----------------------------------------------------------------------------- files

    @property
    def paths(self) -> Paths:
        """The files of the run."""

        def existing(name: str) -> Path | None:
            return self.path / name if (self.path / name).exists() else None

        place = (self.config.get("checkpoint_dir") if existing("config.yaml") else None) or self.path
        numbered = [(p.name.rpartition("-")[2], p) for p in Path(place).glob("checkpoint-*") if p.is_dir()]
        found = sorted((int(number), p) for number, p in numbered if number.isdigit())
        return Paths(
            directory=self.path,
            adapter=existing("adapter"),
            model=existing("model"),
            config=existing("config.yaml"),
            metrics=existing("metrics.jsonl"),
            report=existing("report.html"),
            log=existing("surogate.log"),
            checkpoints=tuple(path for _, path in found),
        )

    def generate(self, prompts: Any, **options: Any) -> list[Text]:
        """Continue texts or answer chats with the run's result; the options are those of `surogate.generate`."""
        from surogate_core.app.commands import python_function

        return list(python_function("generate")(self.path, prompts, **options))

    def evaluate(self, **options: Any) -> list[Any]:
        """Measure the run's result on held-out rows or tasks; the options are those of `surogate.evaluate`."""
        from surogate_core.app.commands import python_function

        return list(python_function("eval")(self.path, **options))

    def merge(
        self, output: str | os.PathLike[str] | None = None, *, base_model: str | None = None, parts: str = "text"
    ) -> Path:
        """Fold the adapter into its base model; returns the new model's directory.

        `output`: by default ``merged`` in the run's directory. `base_model`: where the base is now, if it has moved.
        `parts`: of a base of several parts, "text" writes the language model alone and "all" the others too.
        """
        from surogate_core.app.commands import python_function

        target = Path(output) if output is not None else self.path / "merged"
        if self.paths.model is not None:
            raise UserError(f"{self.path}: the run has no adapter to merge. Fix: use its model: {self.paths.model}")
        return Path(python_function("merge")(self.path, target, base_model=base_model, parts=parts))

    def export(self, to: str | os.PathLike[str], **options: Any) -> Path:
        """Write the result as another program's file; the options are those of `surogate.export`."""
        from surogate_core.app.commands import python_function

        return Path(python_function("export")(self.path, to, **options))

    def report(self) -> RunReport:
        """Write the report anew, from what the run has recorded until now."""
        from surogate_core.app.reports import write_reports

        return RunReport(write_reports([self.path])[0])

    # ----------------------------------------------------------------------------- shown

    @property
    def _record(self) -> RunRecord:
        from surogate_core.files.records import metrics_path, read_run

        status = metrics_path(self.path).stat() if metrics_path(self.path).is_file() else None
        now = (status.st_mtime_ns, status.st_size) if status is not None else (0, 0)
        if self._read is None or self._read[0] != now:
            self._read = (now, read_run(self.path))
        return self._read[1]

    def _facts(self) -> dict[str, str]:
        evals, losses, best = self.evals, self.losses, self.best
        shown = {"outcome": self.outcome, "steps": str(len(losses))}
        if len(evals) > 1 and best is not None:
            shown["eval loss"] = f"{evals[0].loss:.4f} → {evals[-1].loss:.4f}"
            shown["best"] = f"{best.loss:.4f} at step {best.step}"
        elif losses:
            shown["loss"] = f"{losses[-1]:.4f}"
        return shown

    def __repr__(self) -> str:
        facts = ", ".join(f"{name} {value}" if name != "outcome" else value for name, value in self._facts().items())
        return f"<Run {self.path}: {facts}>"

    def _repr_html_(self) -> str:
        facts = {"directory": str(self.path), **self._facts()}
        rows = "".join(f"<tr><th>{name}</th><td>{html.escape(value)}</td></tr>" for name, value in facts.items())
        return f"<table>{rows}</table>"


def load(path: str | os.PathLike[str]) -> Run:
    """The run in a directory: finished, interrupted or still going; ``latest`` is the one that began last.

    Raises `UserError` where there is none.
    """
    run = Run(run_directory(os.fspath(path)))
    if not any((run.path / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise UserError(f"{run.path}: there is no run in this directory. Fix: name the output_dir of a run")
    return run
