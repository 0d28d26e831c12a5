"""`evaluate`: held-out loss, perplexity and accuracy on benchmarks from Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

from surogate_core.plugin import UserError
from surogate_core.service.app import contained, plain

if TYPE_CHECKING:
    from surogate_command_eval.evaluation import HeldOutFigures
    from surogate_core.plugin import bundles

Name = str | os.PathLike[str]


@overload
def evaluate(models: Name | Sequence[Name], *, tasks: None = None, **keys: Any) -> list[HeldOutFigures]: ...


@overload
def evaluate(
    models: Name | Sequence[Name], *, tasks: Sequence[Name], task_options: Mapping[str, Any] = ..., **keys: Any
) -> list[bundles.BenchmarkResult]: ...


def evaluate(
    models: Name | Sequence[Name],
    *,
    tasks: Sequence[Name] | None = None,
    task_options: Mapping[str, Any] | None = None,
    **keys: Any,
) -> list[HeldOutFigures] | list[bundles.BenchmarkResult]:
    """Measure models on held-out rows: ``surogate.evaluate([run.path, "a/base"])``, or on benchmarks:
    ``surogate.evaluate(run.path, tasks=["words.jsonl"], task_options={"match": "number"})``.

    `models`: directories, runs, checkpoints, adapters or hub ids; each is compared with the first. `keys`: keys of the
    configuration for all of them, such as ``datasets=[{"path": "test.jsonl"}]``; without rows those that the first run
    held out. `tasks`: benchmarks, files or names of an evaluator. `task_options`: the flags of `surogate eval` for
    benchmarks, by name: `match`, `pattern`, `prompt`, `shots`, `limit`, `chat`, `system`, `max_new_tokens`, `samples`,
    `stop`, `slots`, `engine`, and `sampling`, a mapping as for `generate`. Raises `UserError` or `MachineError`.
    """
    names = [os.fspath(one) for one in ([models] if isinstance(models, str | os.PathLike) else models)]
    if not names or len(set(names)) < len(names):
        raise UserError("evaluate: no model is named, or one is named twice. Fix: name each model once.")
    if tasks is None and task_options is not None:
        raise UserError("task_options: no benchmark is named. Fix: tasks=[FILE]")
    with contained():
        from surogate_command_eval.command import loader
        from surogate_command_eval.evaluation import evaluate_all
        from surogate_core.service.config import encode

        load = loader(names, [f"{key}={encode(plain(value))}" for key, value in keys.items()], None)
        if tasks is None:
            return evaluate_all(load.for_rows(), load.registry)
        from surogate_command_eval.benchmark_command import Asked, evaluators_of, measured
        from surogate_commands.sampling import flags_of

        options = dict(task_options or {})
        options["sampling"] = flags_of(options.get("sampling"))
        named = [tasks] if isinstance(tasks, str | os.PathLike) else tasks
        asked = Asked.of([os.fspath(one) for one in named], options)
        evaluators = evaluators_of(asked, load.registry)
        return measured(load.for_benchmarks(), load.registry, evaluators, asked)
