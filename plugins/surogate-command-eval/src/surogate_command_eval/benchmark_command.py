"""The part of `surogate eval` that measures models on benchmarks: what is asked, the run, and the table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_commands.sampling import sampling_of
from surogate_commands.words import Words
from surogate_core.plugin import UserError

if TYPE_CHECKING:
    from surogate_core.plugin import bundles, events, inference
    from surogate_core.service.plugins import Registry


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The benchmarks, and the options of all of them."""

    benchmarks: tuple[str, ...]
    match: Any = None
    pattern: str | None = None
    prompt: str | None = None
    shots: int | None = None
    limit: int | None = None
    chat: bool = False
    system: str | None = None
    max_new_tokens: int | None = None
    samples: int = 1
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] | None = None
    slots: int | None = None
    engine: str = "native"

    @classmethod
    def of(cls, benchmarks: Sequence[str], values: Mapping[str, Any]) -> Asked:
        """Benchmarks with options by name; raises `UserError` for an unknown one."""
        known = [field.name for field in fields(cls)][1:]
        if unknown := sorted(values.keys() - set(known)):
            raise UserError(f"task_options: there is no {unknown[0]!r}. Fix: choose from {', '.join(known)}")
        stop = values.get("stop", ())
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        return cls(benchmarks=tuple(benchmarks), **{**values, "stop": stops})

    def for_files(self) -> str | None:
        """A flag that only files of JSON lines have."""
        given = {f"--{name}": getattr(self, name) is not None for name in ("match", "pattern", "prompt")}
        given |= {"--samples": self.samples > 1, "--stop": bool(self.stop)}
        given |= {flag: True for flag in self.sampling or {} if flag != "--seed"}
        return next((flag for flag, there in given.items() if there), None)

    @classmethod
    def of_words(cls, words: Words) -> Asked:
        """What a command line asks for."""
        from surogate_commands.sampling import number

        named = ("--match", "--pattern", "--prompt", "--system", "--engine")
        counted = ("--limit", "--max-new-tokens", "--samples", "--slots")
        values: dict[str, Any] = {_key(flag): words.texts[flag] for flag in named if flag in words.texts}
        values |= {_key(flag): words.counts[flag] for flag in counted if flag in words.counts}
        if "--shots" in words.texts:
            values["shots"] = int(number("--shots", words.texts["--shots"], int, least=0))
        values |= {"chat": "--chat" in words.switches, "stop": words.lists.get("--stop", ())}
        return cls.of(words.lists["--tasks"], values | {"sampling": words.sampling})


def _key(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def evaluators_of(asked: Asked, registry: Registry) -> list[bundles.Evaluator]:
    """The benchmarks, checked; no model is loaded."""
    from surogate_command_eval.benchmark_scores import LocalBenchmarks
    from surogate_command_eval.benchmarks import BenchmarkOptions, read_benchmarks
    from surogate_core.plugin import bundles, inference
    from surogate_core.service.inference import rollout_of

    if not asked.benchmarks:
        raise UserError("tasks: no benchmark is named. Fix: name a file of JSON lines")
    if repeated := next((name for name in asked.benchmarks if asked.benchmarks.count(name) > 1), None):
        raise UserError(f"--tasks {repeated}: is named twice. Fix: name it once.")
    if asked.system is not None and not asked.chat:
        raise UserError("--system: only a chat has a system message. Fix: add --chat")
    rollout_of(registry, asked.engine)
    files, others = _sorted(asked.benchmarks, registry)
    sampling = sampling_of(asked.sampling or {}, bundles.Sampling(temperature=0.0), sampled=asked.samples > 1)
    found: list[bundles.Evaluator] = []
    if files:
        options = BenchmarkOptions(
            match=asked.match, pattern=asked.pattern, prompt=asked.prompt, shots=asked.shots or 0, limit=asked.limit
        )
        wanted = inference.PromptOptions(
            max_new_tokens=256 if asked.max_new_tokens is None else asked.max_new_tokens,
            samples=asked.samples,
            sampling=sampling,
            stop=asked.stop,
        )
        read = read_benchmarks(files, options)
        found.append(LocalBenchmarks(benchmarks=read, wanted=wanted, chat=asked.chat, system=asked.system))
    elif given := asked.for_files():
        raise UserError(f"{given}: is for files of JSON lines, and none is named. Fix: leave it out.")
    settings = bundles.EvalSettings(
        shots=asked.shots,
        limit=asked.limit,
        chat=asked.chat,
        system=asked.system,
        max_new_tokens=asked.max_new_tokens,
        seed=sampling.seed,
    )
    found += [registry.get("eval", name).open(names, settings) for name, names in others.items()]
    return found


def _sorted(benchmarks: Sequence[str], registry: Registry) -> tuple[list[str], dict[str, list[str]]]:
    """(files, benchmarks of each evaluator)."""
    known = registry.names("eval")
    files: list[str] = []
    others: dict[str, list[str]] = {}
    for benchmark in benchmarks:
        source, colon, name = benchmark.partition(":")
        if Path(benchmark).expanduser().exists() or (Path(benchmark).suffix and not colon):
            files.append(benchmark)
        elif not colon:
            others_of = "".join(f", or --tasks {name}:{benchmark}" for name in sorted(known))
            raise UserError(f"--tasks {benchmark}: there is no such file. Fix: --tasks FILE.jsonl{others_of}")
        elif source not in known:
            missing = registry.explain_missing("eval", source, known)
            fix = missing.fix or "name a file of JSON lines"
            raise UserError(f"--tasks {benchmark}: there is no such file, and {missing.message} Fix: {fix}")
        elif not name:
            raise UserError(f"--tasks {benchmark}: names no benchmark. Fix: --tasks {source}:BENCHMARK")
        else:
            others.setdefault(source, []).append(name)
    return files, others


def measured(
    prepared: Mapping[str, inference.PreparedModel],
    registry: Registry,
    evaluators: Sequence[bundles.Evaluator],
    asked: Asked,
    *,
    taken: Callable[[Mapping[str, Any]], None] | None = None,
    progress: Callable[[events.Progress], None] = lambda event: None,
) -> list[bundles.BenchmarkResult]:
    """The figures of the models."""
    from surogate_command_eval.benchmark_scores import measure_all
    from surogate_core.service.inference import rollout_of

    engine = rollout_of(registry, asked.engine)
    return measure_all(
        prepared,
        registry,
        evaluators,
        engine,
        slots=asked.slots,
        taken=taken or (lambda sample: None),
        progress=progress,
    )


def benchmark_table(found: Sequence[bundles.BenchmarkResult], shown: Callable[[float | None], str]) -> list[list[str]]:
    """The figures as lines of cells, the head first; columns without a value are left out."""
    head = ["model", "benchmark", "metric", "value", "± stderr", "rows", "no answer", "cut short"]
    lines = [[*head, "difference", "± stderr", "p"]]
    for one in found:
        shares = ["" if share is None else f"{share:.1%}" for share in (one.unanswered, one.truncated)]
        lines.append(
            [
                *(one.model, one.task, one.metric, f"{one.value:.4f}", shown(one.stderr), f"{one.rows:,}", *shares),
                "" if one.difference is None else f"{one.difference:+.4f}",
                shown(one.difference_stderr),
                "" if one.p_value is None else f"{one.p_value:.3g}",
            ]
        )
    kept = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    return [[line[column] for column in kept] for line in lines]
