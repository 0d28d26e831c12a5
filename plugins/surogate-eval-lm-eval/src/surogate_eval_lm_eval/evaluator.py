"""lm-eval's tasks as benchmarks of Surogate: names are checked and data loaded before any model."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from surogate_core.plugin import UserError, bundles
from surogate_eval_lm_eval.model import SurogateLM


class HarnessBenchmarks:
    """Tasks and groups of lm-eval."""

    def __init__(self, names: Sequence[str], settings: bundles.EvalSettings):
        self._settings = settings
        # lm-eval reads ten thousand files for its own tasks, which a task of the user's does not need.
        self._manager = TaskManager(include_defaults=not all(Path(name).is_file() for name in names))
        self._loaded: list[Any] = []
        for name in names:
            self._loaded += self._load(name)

    def _load(self, name: str) -> list[Any]:
        """The task or group of a name, or of a YAML file."""
        if name not in self._manager.task_index and not Path(name).is_file():
            near = get_close_matches(name, self._manager.all_tasks, n=3)
            fix = " or ".join(near) if near else "`lm_eval ls tasks` lists them; a YAML file is a task too"
            raise UserError(f"--tasks lm-eval:{name}: lm-eval has no such task. Fix: {fix}")
        try:
            found = self._manager.load([name])
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"--tasks lm-eval:{name}: lm-eval cannot load it: {reason.rstrip('.')}. Fix: correct the task, or make "
                f"its data available; most tasks read the hub"
            ) from error
        nested = {group.name for top in found["groups"].values() for group in top.get_all_groups()}
        nested -= {name}
        grouped = {task.task_name for top in found["groups"].values() for task in top.get_all_tasks()}
        tops = [group for key, group in found["groups"].items() if key not in nested]
        return [*tops, *(task for key, task in found["tasks"].items() if key not in grouped)]

    def run(
        self, subject: bundles.MeasuredModel, taken: Callable[[Mapping[str, Any]], None]
    ) -> list[bundles.BenchmarkResult]:
        """Measure a model."""
        settings = self._settings
        results: Any = simple_evaluate(
            model=SurogateLM(subject, seed=settings.seed),
            tasks=list(self._loaded),
            task_manager=self._manager,
            num_fewshot=settings.shots,
            limit=settings.limit,
            apply_chat_template=settings.chat,
            system_instruction=settings.system,
            gen_kwargs=None if settings.max_new_tokens is None else {"max_gen_toks": settings.max_new_tokens},
            log_samples=True,
        )
        found: list[bundles.BenchmarkResult] = []
        for task, values in results["results"].items():
            samples = results["samples"].get(task, [])
            lines = [_line(subject.name, task, sample) for sample in samples]
            for line in lines:
                taken(line)
            rows = sum(results["n-samples"][leaf]["effective"] for leaf in _leaves(results, task))
            found += _figures(subject.name, task, values, rows, samples, lines)
        return found


def _leaves(results: Any, name: str) -> Iterator[str]:
    """The tasks of a group, or the task itself."""
    parts = results.get("group_subtasks", {}).get(name)
    if not parts:
        yield name
        return
    for part in parts:
        yield from _leaves(results, part)


def _figures(
    model: str, task: str, values: Mapping[str, Any], rows: int, samples: Sequence[Any], lines: Sequence[Any]
) -> Iterator[bundles.BenchmarkResult]:
    for key, value in values.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
            continue
        stderr = values.get(f"{metric}_stderr,{chosen}")
        own = sorted((s for s in samples if s.get("filter", "none") == chosen), key=lambda s: s["doc_id"])
        scores = [s.get(metric) for s in own]
        known = scores and all(isinstance(score, int | float) for score in scores)
        yield bundles.BenchmarkResult(
            model=model,
            task=f"lm-eval:{task}",
            metric=metric if chosen == "none" else key,
            value=float(value),
            stderr=float(stderr) if isinstance(stderr, int | float) else math.nan,
            rows=rows,
            scores=tuple(float(score) for score in scores) if known else (),
            samples=tuple(lines),
        )


def _line(model: str, task: str, sample: Mapping[str, Any]) -> dict[str, Any]:
    line = {
        "model": model,
        "task": f"lm-eval:{task}",
        "row": sample["doc_id"],
        "filter": sample.get("filter", "none"),
        "prompt": sample["arguments"][0][0],
        "responses": sample["filtered_resps"],
        "answer": sample["target"],
        **{metric: sample.get(metric) for metric in sample.get("metrics", ())},
    }
    plain: dict[str, Any] = json.loads(json.dumps(line, default=str))
    return plain
