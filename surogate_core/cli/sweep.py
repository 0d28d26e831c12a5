"""A sweep (`--multirun`): its runs one after the other, named by what differs, and one table of their results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.masking import masked
from surogate_core.plugins.commands import command_names

if TYPE_CHECKING:
    from surogate_core.config.composing.overrides import UserSettings
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry
    from surogate_core.run.place import Place

STOPPED = (129, 130, 143)
"""Exit codes of a run that a signal ended."""
LONGEST_NAME = 100
"""Characters of a run's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One run of a sweep."""

    name: str
    directory: str
    overrides: Mapping[str, str]
    """What differs from the other runs: key → value."""
    exit_code: int
    outcome: str
    steps: int | None = None
    eval_loss: float | None = None
    """The loss of the last evaluation."""
    best_eval_loss: float | None = None
    reward: float | None = None
    """The mean held-out reward of the last evaluation of reinforcement learning."""
    best_reward: float | None = None
    best_step: int | None = None
    seconds: float | None = None

    @property
    def rank(self) -> float:
        """What runs are compared by, less is better: the eval loss, or minus the held-out reward; infinite without."""
        losses = [None if reward is None else -reward for reward in (self.best_reward, self.reward)]
        losses += [self.best_eval_loss, self.eval_loss]
        found = [loss for loss in losses if loss is not None and math.isfinite(loss)]
        return found[0] if found and not self.exit_code else math.inf

    @property
    def last_rank(self) -> float:
        """The same measure of the last evaluation."""
        last = self.eval_loss if self.reward is None else -self.reward
        return last if last is not None and math.isfinite(last) else math.inf

    @property
    def shown(self) -> tuple[float | None, float | None]:
        """The last and the best of what runs are compared by."""
        rewarded = self.reward is not None
        return (self.reward, self.best_reward) if rewarded else (self.eval_loss, self.best_eval_loss)


class Sweep:
    """The runs of a sweep, one after the other."""

    def __init__(self, settings: UserSettings, registry: Registry, start: Callable[[RunConfig], int]) -> None:
        """`start` trains a configuration and returns its exit code."""
        self.settings = settings
        self.registry = registry
        self.start = start
        self.codes: list[int] = []
        self.results: list[Result] = []
        self.root: Path | None = None
        """The directory of the sweep, after its first run began."""
        self.directory = ""
        """The same, where the user names none."""
        self.finished: dict[str, Result] = {}
        """Name → result of the runs that an earlier process of this sweep finished, until their turn comes."""
        self.swept = {v.key for v in settings.values if v.sweep}
        self.groups = {group for group, choice in settings.choices.items() if choice.sweep}
        self.named_by_hydra = any(line.startswith("hydra.sweep.subdir") for line in settings.hydra)

    @contextlib.contextmanager
    def placed(self, configs: Sequence[RunConfig]) -> Iterator[Place | None]:
        """While the sweep runs, the directory of its runs is its own; None if the user names one.

        `configs`: one for each swept value.
        """
        from surogate_core.run.place import asked_of, claimed

        first, lines = configs[0], self.settings.overrides()
        if first.output_dir is not None or "output_dir" in self.swept or any("hydra.sweep.dir" in s for s in lines):
            yield None
            return
        # These lines name the runs.
        naming = [s for s in lines if s.startswith("hydra.") or _key(s) in self.swept | self.groups]
        name = f"sweep-{'-'.join(sorted(self.swept | self.groups))}"[:60]
        anew = first.resume_from_checkpoint is not True
        with claimed({"runs": asked_of(configs), "naming": naming}, name=name, anew=anew) as place:
            self.directory = str(place.directory)
            self.finished = _finished(place.directory)
            if place.note:
                print(place.note, file=sys.stderr)
            yield place

    def overrides(self) -> list[str]:
        """Hydra's overrides: the user's settings override the default places of the runs."""
        from surogate_core.config.composing.grammar import encode

        lines = self.settings.overrides()
        named = [_key(line) for line in lines]
        # The name of a run's directory shows what is swept over, not what all the runs share.
        shared = sorted({key for key in named if key not in self.swept | self.groups})
        return [
            f"hydra.sweep.dir={encode(self.directory) if self.directory else '${output_dir}'}",
            "hydra.sweep.subdir=.",
            f"hydra.job.config.override_dirname.exclude_keys={encode(shared)}",
            *lines,
        ]

    def job(self, config: Any) -> int:
        """One run."""
        from hydra.core.hydra_config import HydraConfig

        from surogate_core.config.composing.compose import plain_values
        from surogate_core.config.resolve import check_values

        checked = check_values(plain_values(config), self.registry, self.settings.where, self.settings.is_set)
        hydra = HydraConfig.get()
        root = Path(hydra.sweep.dir)
        if not self.codes:
            # It repeats every override, as a run's config.yaml does.
            (root / "multirun.yaml").chmod(0o600)
        differs = self._differs(hydra.overrides.task)
        name = str(hydra.sweep.subdir) if self.named_by_hydra else self._name(differs)
        paths: dict[str, Any] = {}
        if "output_dir" not in self.swept:
            self.root = root
            paths["output_dir"] = str(root / name)
        if checked.checkpoint_dir is not None and "checkpoint_dir" not in self.swept:
            paths["checkpoint_dir"] = str(Path(checked.checkpoint_dir) / name)
        one = dataclasses.replace(checked, **paths)
        what = ", ".join(f"{key}={value}" for key, value in differs.items())
        former = self._former(name, one.place)
        note = f"run {len(self.codes)}" + (f": {what}" if what else "") + (" has finished already" if former else "")
        print(masked(f"{note} → {one.place}"), file=sys.stderr, flush=True)
        self.codes.append(0 if former else self.start(one))
        self.results.append(former or result_of(name, one.place, differs, self.codes[-1]))
        self.write()
        if self.codes[-1] in STOPPED:
            raise KeyboardInterrupt
        return self.codes[-1]

    def _former(self, name: str, directory: str) -> Result | None:
        """The result of a run that needs no other start, or None."""
        from surogate_core.run.place import began

        found = self.finished.pop(name, None)
        if found is None or not began(Path(directory)):
            return None
        return dataclasses.replace(found, directory=directory)

    def summary(self) -> None:
        """The table of the runs, and how to compare them."""
        failed = [str(number) for number, code in enumerate(self.codes) if code]
        print("\n" + masked(table(self.results)), flush=True)
        done = f"{len(self.codes) - len(failed)} of {len(self.codes)} runs are done"
        print(done + (f"; failed: {', '.join(failed)}" if failed else ""), file=sys.stderr)
        directories = list(dict.fromkeys(result.directory for result in self.results))
        if len(directories) > 1 and "report" in command_names():
            places = [str(self.root)] if self.root is not None else directories
            print(f"Compare them: surogate report {' '.join(map(shlex.quote, places))}", file=sys.stderr)

    def write(self) -> None:
        """``sweep.json`` and ``sweep.md`` beside the runs, after each of them."""
        from surogate_core.files import atomic
        from surogate_core.files.private import private

        if self.root is None:
            return
        # If this process is killed, the runs whose turn has not come are still known to be finished.
        results = [*self.results, *self.finished.values()]
        best = best_of(results)
        runs = [{**asdict(r), "directory": Path(r.directory).name} for r in results]
        value = {"best": None if best is None else best.name, "runs": runs}
        for file, text in (("sweep.json", json.dumps(value, indent=1)), ("sweep.md", table(results, page=True))):
            atomic.replace_file(self.root / file, masked(f"{text}\n").encode(), key="output_dir", opener=private)

    def _differs(self, lines: Sequence[str]) -> dict[str, str]:
        found = {}
        for line in lines:
            key, _, value = line.lstrip("+~").partition("=")
            if key in self.swept | self.groups:
                found["model" if key == "model.path" else key] = value
        return found

    def _name(self, differs: Mapping[str, str]) -> str:
        """A name for a directory: ``learning_rate=0.001,lora_rank=8``."""
        number = str(len(self.codes))
        text = re.sub(r"[^\w.=,+-]+", "-", ",".join(f"{key}={value}" for key, value in differs.items())).strip("-.")
        taken = {result.name for result in self.results}
        name = masked(text)[:LONGEST_NAME] or number
        return f"{name}-{number}" if name in taken else name


def _key(line: str) -> str:
    """The key of an override."""
    return line.lstrip("+~").partition("=")[0]


def _finished(root: Path) -> dict[str, Result]:
    """Name → result of the runs in a sweep's directory that ended well."""
    try:
        runs = [Result(**run) for run in json.loads((root / "sweep.json").read_bytes())["runs"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    done = [dataclasses.replace(run, directory=str(root / run.directory)) for run in runs if not run.exit_code]
    return {run.name: run for run in done}


def result_of(name: str, directory: str, differs: Mapping[str, str], code: int) -> Result:
    """What a run's record says of its end; without a record only its exit code."""
    from surogate_core.files.metrics import read_lines

    path = Path(directory) / "metrics.jsonl"
    ends = [line for line in read_lines(path) if line.get("event") == "run_end"] if path.is_file() else []
    end: Mapping[str, Any] = ends[-1] if ends else {}
    outcome = str(end.get("reason") or ("failed" if code else "finished"))
    return Result(
        name=name,
        directory=directory,
        overrides=dict(differs),
        exit_code=code,
        outcome="failed" if code and outcome == "finished" else outcome,
        steps=end.get("step"),
        eval_loss=end.get("last_eval_loss"),
        best_eval_loss=end.get("best_eval_loss"),
        reward=end.get("last_reward"),
        best_reward=end.get("best_reward"),
        best_step=end.get("best_step"),
        seconds=end.get("seconds"),
    )


def best_of(results: Sequence[Result]) -> Result | None:
    """The run with the lowest eval loss, or the highest held-out reward; None if no run has one."""
    # Runs that were never better than their common start are ordered by their ends.
    best = min(results, key=lambda result: (result.rank, result.last_rank), default=None)
    return None if best is None or math.isinf(best.rank) else best


def table(results: Sequence[Result], *, page: bool = False) -> str:
    """One line a run, the best one marked; `page`: as Markdown."""
    keys = list(dict.fromkeys(key for result in results for key in result.overrides))
    measure = "reward" if any(result.reward is not None for result in results) else "eval loss"
    head = [*(keys or ["run"]), measure, "best", "at step", "time", "outcome", "directory", ""]
    best = best_of(results)
    rows = [head]
    for result in results:
        named = [result.overrides.get(key, "") for key in keys] or [result.name]
        loss, lowest = (_number(value) for value in result.shown)
        step = "–" if result.best_step is None else f"{result.best_step:,}"
        mark = "← best" if result is best else ""
        place = Path(result.directory).name if page else result.directory
        rows.append([*named, loss, lowest, step, _time(result.seconds), result.outcome, place, mark])
    if page:
        lines = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]
        return "\n".join([lines[0], "|" + " --- |" * len(head), *lines[1:]])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    padded = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
