"""`surogate env`: the environments of reinforcement learning: what is installed, a check, and a model's rewards."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_commands.flags import ADAPTER, ENGINE, SLOTS, Flag, shown
from surogate_commands.kept import json_line, kept_lines
from surogate_commands.sampling import number, sampling_of
from surogate_commands.words import Flags, Words
from surogate_core.plugin import UserError

if TYPE_CHECKING:
    from surogate_command_env.scores import Scores
    from surogate_core.service.config import RunConfig, Selection
    from surogate_core.service.plugins import Registry
    from surogate_reinforcement.checking import Checked
    from surogate_reinforcement.pool import EnvironmentPool

FLAGS = Flags(
    command="surogate env",
    flags=(
        Flag("count", "--limit N", "number of problems (problems 10, check 20, eval 100)"),
        Flag("number", "--seed N", "seed of the problems, and of eval's sampling (1234, the default of train_seed)"),
        Flag("switch", "--held-out", "problems: those that training never draws"),
        Flag("switch", "--solved", "problems: conversations with the right answer"),
        Flag("list", "--reply TEXT", "check: a reply to play too; further ones are the replies of later turns"),
        Flag("switch", "--train", "eval: problems of the training instead of held-out ones"),
        Flag("count", "--samples N", "eval: attempts at each problem (1)"),
        Flag("count", "--max-turns N", "eval: replies of an attempt at most (8)"),
        Flag("text", "--solved-at R", "eval: an attempt is solved from this reward (1)"),
        Flag("count", "--max-new-tokens N", "eval: tokens of a reply at most (512)"),
        Flag(
            "number",
            "--temperature T, --top-k N, --top-p P, --min-p P, --repetition-penalty R",
            "eval: without them and --samples the most probable token is taken",
        ),
        *(replace(flag, help=f"eval: {flag.help}") for flag in (ADAPTER, SLOTS, ENGINE)),
        Flag("count", "--workers N", "processes of the environment (1)"),
        Flag("text", "--timeout S", "seconds of one problem, reply or reward (10)"),
        Flag(
            "text", "--build-timeout S", "seconds to build the environment (--timeout if that is given, otherwise 300)"
        ),
        Flag("switch", "--json", "print JSON"),
        Flag(
            "text",
            "--output FILE",
            "problems: write them to a file; eval: write each attempt; new: the directory to write to",
        ),
    ),
)

USAGE = f"""\
usage: surogate env list [--json]
       surogate env new NAME [--output DIR]
       surogate env problems NAME [OPTION=VALUE …] [--limit N] [--held-out] [--solved] [--output FILE.jsonl]
       surogate env check NAME [OPTION=VALUE …] [--limit N] [--reply TEXT …] [--json]
       surogate env eval MODEL [MODEL …] NAME [OPTION=VALUE …] [--limit N] [--samples N] [--json] [--output FILE.jsonl]

Environments of reinforcement learning: problems, and rewards of the answers. OPTION=VALUE are options of the
environment, such as digits=2, and keys of a run, such as device=cpu.

  list                 what is installed, with options and weights of rewards
  new                  write a package with an environment of your own, and its tests
  problems             print problems as JSON lines; with --solved as conversations with the right answer, for problems
                       whose data have an `answer`: rows to fine-tune on before reinforcement learning
  check                play problems twice, in other processes and in another order, and compare every byte; exit code
                       1 if they differ or every episode fails
  eval                 mean reward of a model, a run or an adapter on held-out problems, with its standard error;
                       several are compared with the first, problem by problem

{shown(FLAGS.flags)}"""

SEED = 1234
_OF_POOL = ("--timeout", "--build-timeout", "--workers")
_OF: Mapping[str, tuple[str, ...]] = {
    "list": ("--json",),
    "new": ("--output",),
    "problems": ("--limit", "--seed", "--held-out", "--solved", "--output", *_OF_POOL),
    "check": ("--limit", "--seed", "--reply", "--json", *_OF_POOL),
}
"""Command → its flags; eval has all but those of a single other one."""
_NOT_OF_EVAL = ("--held-out", "--solved", "--reply")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    commands = {"list": _list, "new": _new, "problems": _problems, "check": _check, "eval": _eval}
    if not argv or any(word in ("--help", "-h") for word in argv):
        print(USAGE, end="")
        return 0
    command, *rest = argv
    if command not in commands:
        near = get_close_matches(command, commands, n=1)
        fix = f"surogate env {near[0]}" if near else f"surogate env {'|'.join(commands)}"
        raise UserError(f"surogate env: there is no command {command!r}. Fix: {fix}")
    words = replace(FLAGS, command=f"surogate env {command}").read(rest)
    _refuse_flags(command, words)
    return commands[command](words)


def _refuse_flags(command: str, words: Words) -> None:
    given = [*words.sampling, *words.counts, *words.texts, *words.lists, *words.switches]
    wrong = [flag for flag in given if (flag not in _OF[command] if command in _OF else flag in _NOT_OF_EVAL)]
    if wrong:
        raise UserError(f"surogate env {command}: {wrong[0]} is not for this command. Fix: leave it out")
    if words.overrides and command in ("list", "new"):
        raise UserError(f"surogate env {command}: takes no options; got {words.overrides[0]}. Fix: leave it out")
    wanted = {"list": 0, "eval": 2}.get(command, 1)
    if len(words.models) != wanted and not (command == "eval" and len(words.models) > wanted):
        what = {0: "no name", 1: "one name", 2: "a model and the name of an environment"}[wanted]
        form = {0: "", 1: " NAME", 2: " MODEL NAME"}[wanted]
        got = ", ".join(words.models) or "none"
        raise UserError(f"surogate env {command}: takes {what}; got {got}. Fix: surogate env {command}{form}")


# ------------------------------------------------------------------------------------- list, new


def _list(words: Words) -> int:
    from surogate_core.plugin import import_policy, load_plugins
    from surogate_core.service.plugins import option_defaults

    registry = load_plugins(import_policy())
    rows = [
        {
            "name": name,
            "options": option_defaults(offered.bundle.options),
            "weights": dict(offered.bundle.weights),
            "deterministic": offered.bundle.deterministic,
            "plugin": offered.plugin.name,
            "distribution": offered.plugin.distribution,
        }
        for name, offered in registry.bundles("environment").items()
    ]
    if "--json" in words.switches:
        print(json.dumps(rows, indent=1, default=list))
        return 0
    if not rows:
        print("No environment is installed. `surogate env new NAME` writes one.")
        return 0
    from surogate_commands.tables import aligned

    lines = [["environment", "plugin", "options"]]
    for row in rows:
        lines.append([row["name"], row["plugin"], ", ".join(row["options"]) or "none"])
    print("\n".join(aligned(lines, texts=3)))
    return 0


def _new(words: Words) -> int:
    from surogate_core.service.plugins import new_plugin

    (name,) = words.models
    directory = new_plugin(name, "environment", Path(words.texts.get("--output", ".")).expanduser())
    print(f"{directory}\nnext: pip install -e '{directory}[dev]' && surogate env check {name}")
    return 0


# ------------------------------------------------------------------------------------- problems, check


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chosen:
    config: RunConfig
    registry: Registry

    @property
    def selection(self) -> Selection:
        assert self.config.environment is not None
        return self.config.environment

    def pool(self, words: Words) -> EnvironmentPool:
        from surogate_reinforcement.pool import EnvironmentPool
        from surogate_reinforcement.process import BUILD_SECONDS

        def seconds(flag: str, otherwise: float) -> float:
            return float(number(flag, words.texts[flag], float, least=0.01)) if flag in words.texts else otherwise

        return EnvironmentPool(
            self.selection,
            self.registry,
            workers=words.counts.get("--workers", 1),
            timeout=seconds("--timeout", 10.0),
            build_timeout=seconds("--build-timeout", seconds("--timeout", BUILD_SECONDS)),
        )


def _chosen(name: str, overrides: Sequence[str], of_model: Sequence[str] = ()) -> _Chosen:
    """The environment of a name. An override whose key is an option of it sets that option."""
    from surogate_core.plugin import load_run_config
    from surogate_core.service.app import Arguments, registry_for
    from surogate_core.service.plugins import field_types

    registry = registry_for(Arguments(overrides=[*of_model, *overrides]))
    known = registry.bundles("environment")
    own = set(field_types(known[name].bundle.options)) if name in known else set()
    words = [f"environment.{word}" if word.partition("=")[0] in own else word for word in overrides]
    config = load_run_config([*of_model, f"environment={name}", *words], registry=registry)
    return _Chosen(config=config, registry=registry)


def _problems(words: Words) -> int:
    from surogate_core.plugin import atomic, bundles
    from surogate_reinforcement.checking import ANSWER

    output = _output(words)
    chosen, seed, count = _chosen(words.models[0], words.overrides), _seed(words), words.counts.get("--limit", 10)
    with chosen.pool(words) as pool:
        numbers = _numbers(pool, count, seed, held_out="--held-out" in words.switches)
        found = pool.problems(numbers, seed)
    lines, faults = [], 0
    for place, problem in zip(numbers, found, strict=True):
        if isinstance(problem, bundles.Fault):
            faults += 1
            print(f"note: problem {place}: {problem}", file=sys.stderr)
        elif "--solved" not in words.switches:
            row = {"number": place, "messages": list(problem.messages), "data": dict(problem.data)}
            lines.append(json_line(row | ({"tools": list(problem.tools)} if problem.tools else {})))
        elif isinstance(answer := problem.data.get(ANSWER), str):
            lines.append(json_line({"messages": [*problem.messages, {"role": "assistant", "content": answer}]}))
        else:
            raise UserError(f"--solved: problem {place} has no text `{ANSWER}` in its data. Fix: leave --solved out")
    if output is None:
        print("".join(lines), end="")
    else:
        atomic.replace_file(output, "".join(lines).encode(), key="--output")
    return 1 if faults == len(numbers) else 0


def _numbers(pool: EnvironmentPool, count: int, seed: int, *, held_out: bool) -> list[int]:
    from surogate_reinforcement.order import held_out_numbers, training_numbers

    if held_out and (numbers := held_out_numbers(count, size=pool.size, held_out=pool.held_out)):
        return numbers
    if held_out:
        print(f"note: {pool.name} holds no problem out, so these are problems of the training.", file=sys.stderr)
    return training_numbers(0, count if pool.size is None else min(count, pool.size), size=pool.size, seed=seed)


def _seed(words: Words) -> int:
    seed = int(words.sampling.get("--seed", SEED))
    if seed < 0:
        raise UserError(f"--seed {seed}: must be at least 0. Fix: --seed {SEED}")
    return seed


def _output(words: Words) -> Path | None:
    from surogate_core.plugin import atomic

    if "--output" not in words.texts:
        return None
    output = Path(words.texts["--output"]).expanduser()
    atomic.ensure_writable_file(output, key="--output")
    return output


def _check(words: Words) -> int:
    from surogate_reinforcement.checking import check

    chosen, seed = _chosen(words.models[0], words.overrides), _seed(words)
    with chosen.pool(words) as first, chosen.pool(words) as second:
        found = check(
            first, second, problems=words.counts.get("--limit", 20), seed=seed, replies=words.lists.get("--reply", ())
        )
        spec = first.spec
    wrong = wrong_with(found, declared=spec.deterministic)
    if "--json" in words.switches:
        values = {"environment": spec.name, "deterministic": not found.differences, **asdict(found), "wrong": wrong}
        print(json.dumps(values, indent=1))
        return 1 if wrong else 0
    count = len(found.differences)
    same = "all equal the second time" if not count else f"{count} differ the second time"
    print(f"{spec.name}: {found.problems} problems, {found.episodes} episodes: {same}")
    print(f"rewards: {', '.join(' '.join(names) or 'none' for names in found.names) or 'none'}")
    shown = (f"{kind} {'none' if mean is None else f'{mean:.3f}'}" for kind, mean in found.rewards.items())
    print(f"mean reward by reply: {', '.join(shown)}")
    for fault, times in found.faults.items():
        print(f"{times} times {fault}")
    for line in found.differences[:5]:
        print(f"different: {line}")
    for line in wrong:
        print(f"wrong: {line}")
    return 1 if wrong else 0


def wrong_with(found: Checked, *, declared: bool) -> list[str]:
    """What a check finds wrong, one line each. `declared`: whether the environment says that it is deterministic."""
    from surogate_reinforcement.checking import REPEAT

    wrong = []
    if found.differences and declared:
        wrong.append(f"it says that it is deterministic and is not. Fix: {REPEAT}")
    if sum(found.faults.values()) == found.episodes:
        wrong.append("every episode fails.")
    if len(found.names) > 1:
        wrong.append("the names of the rewards differ between episodes. Fix: None for one that does not apply")
    if found.names == ((),):
        wrong.append("there is no reward.")
    if found.unknown_weights:
        wrong.append(f"weights of rewards that there are not: {', '.join(found.unknown_weights)}.")
    return wrong


# -------------------------------------------------------------------------------------------- eval


def _eval(words: Words) -> int:
    from surogate_command_env.scores import compared
    from surogate_core.plugin import atomic
    from surogate_core.service.config import logs

    logs.configure()
    output = _output(words)
    *models, name = words.models
    found: list[Scores] = []
    rows: list[Mapping[str, Any]] = []
    with kept_lines(output, key="--output") as take:

        def taken(row: Mapping[str, Any]) -> None:
            rows.append(row)
            if take is not None:
                take(row)

        for model in models:
            scores = _measured(model, name, words, taken)
            found.append(compared(found[0], scores) if found else scores)
    if output is not None:
        atomic.replace_file(output, "".join(json_line(row) for row in rows).encode(), key="--output")
    if "--json" in words.switches:
        print(json.dumps([_plain(scores) for scores in found], indent=1))
    else:
        print("\n\n".join(_shown(scores, len(models) > 1) for scores in found))
    return 0


def _measured(model: str, name: str, words: Words, taken: Callable[[Mapping[str, Any]], None]) -> Scores:
    from surogate_command_env.scores import ScorePlan, measure
    from surogate_core.plugin import inference
    from surogate_core.service.app import shown_progress
    from surogate_core.service.inference import named, prepare, rollout_of, with_adapter
    from surogate_core.service.training import Subject

    found = with_adapter(model, words.texts["--adapter"]) if "--adapter" in words.texts else named(model)
    chosen = _chosen(name, words.overrides, found.overrides)
    engine = rollout_of(chosen.registry, words.texts.get("--engine", "native"))
    samples, seed = words.counts.get("--samples", 1), _seed(words)
    prepared = prepare(found, chosen.config, chosen.registry)
    for note in prepared.notes:
        print(f"note: {note}", file=sys.stderr)
    greedy = replace(prepared.sampling, temperature=0.0, seed=SEED)
    wanted = inference.PromptOptions(
        max_new_tokens=words.counts.get("--max-new-tokens", 512),
        samples=samples,
        sampling=sampling_of(words.sampling, greedy, sampled=samples > 1),
    )
    with chosen.pool(words) as pool, shown_progress() as progress:
        numbers = _numbers(pool, words.counts.get("--limit", 100), seed, held_out="--train" not in words.switches)
        plan = ScorePlan(
            numbers=numbers,
            seed=seed,
            wanted=wanted,
            turns=words.counts.get("--max-turns", 8),
            weights=pool.spec.weights,
            bar=number("--solved-at", words.texts.get("--solved-at", "1"), float),
        )
        subject = Subject.load(
            model, prepared, chosen.registry, engine, slots=words.counts.get("--slots"), progress=progress
        )
        return measure(subject, pool, plan, taken)


def _plain(scores: Scores) -> dict[str, Any]:
    values = {key: value for key, value in asdict(scores).items() if key != "by_problem"}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _shown(scores: Scores, has_others: bool) -> str:
    lines = [scores.model] if has_others else []
    lines.append(f"{scores.environment}: {scores.problems} problems, {scores.samples} attempts each")
    lines.append(f"reward {_figure(scores.reward, scores.stderr)}")
    lines += [f"  {name} {_figure(value)}" for name, value in scores.rewards.items()]
    if scores.difference is not None:
        lines.append(f"difference {_figure(scores.difference, scores.difference_stderr)}")
    many = f", pass@{scores.samples} {scores.pass_at:.1%}" if scores.samples > 1 else ""
    lines.append(f"solved {scores.solved:.1%}{many}")
    length = f"{scores.turns:.1f} replies and {scores.tokens:.1f} tokens an attempt"
    lines.append(f"{length}, {scores.truncated:.1%} cut short")
    lines += [f"{times} attempts without a result: {reason}" for reason, times in scores.faults.items()]
    return "\n".join(lines)


def _figure(value: float | None, stderr: float | None = None) -> str:
    if value is None:
        return "none"
    return f"{value:.4f}" + ("" if stderr is None or math.isnan(stderr) else f" ± {stderr:.4f}")
