"""`surogate numerics`: what the precision recipes do to the same training, as tables and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.plugin import MachineError, UserError

if TYPE_CHECKING:
    from surogate_core.service.config import RunConfig, Source
    from surogate_core.service.plugins import Registry

USAGE = """\
usage: surogate numerics [FILE.yaml] [KEY=VALUE …] [--recipes A,B,…] [--run 'RECIPE KEY=VALUE …'] [--output DIR]

Trains the same model from the same start on the same data under each recipe and writes numerics.md, numerics.json
and numerics.svg: losses, gaps to the first recipe, and by layer how operands are rounded, become zero or saturate.
Takes what `surogate sft` takes, and trains on one GPU; without a FILE it trains the embedded example, small enough
for a CPU.

  --recipes A,B,…      the recipes, the one to compare with first; without it bf16 and the others that are installed
  --run 'RECIPE K=V …' one more run, under RECIPE with keys of its own, such as 'nvfp4 skip_quant_last_layers=1'
  --output DIR         where the files go (numerics)
"""

SMALL: Mapping[str, str] = {
    "max_steps": "60",
    "sequence_len": "128",
    "per_device_train_batch_size": "4",
    "gradient_accumulation_steps": "1",
    "eval_steps": "20",
    "warmup_steps": "5",
    "warmup_ratio": "0",
    "lora": "false",
}
"""Keys of a comparison without a file, unless they are given."""


@dataclass(slots=True)
class _Words:
    """The command line: this command's own flags, and the rest."""

    rest: list[str] = field(default_factory=list)
    recipes: list[str] | None = None
    runs: list[list[str]] = field(default_factory=list)
    output: Path = Path("numerics")


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_core.plugin import atomic
    from surogate_core.service.app import parse, registry_for, shown_progress
    from surogate_core.service.config import logs
    from surogate_core.service.setup import is_out_of_memory, out_of_memory

    words = _own_flags(argv)
    arguments = parse(words.rest, command="surogate numerics")
    if arguments.help:
        print(USAGE, end="")
        return 0
    if arguments.multirun or arguments.hydra:
        raise UserError(
            "surogate numerics has no flags of Hydra and no --multirun. Fix: --run 'RECIPE KEY=VALUE' for each case."
        )

    logs.configure()
    registry = registry_for(arguments)
    runs = _configs(words, arguments.overrides, arguments.config_file, registry)

    from surogate_command_numerics.numerics import measure
    from surogate_command_numerics.page import markdown, picture

    atomic.ensure_writable(words.output, key="--output")
    try:
        with shown_progress() as progress:
            found = measure(runs, registry, progress=progress)
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, MachineError):
            raise out_of_memory(runs[0][1], registry, error) from error
        raise
    text = markdown(found)
    for ending, content in (("md", text), ("json", json.dumps(asdict(found), indent=1)), ("svg", picture(found))):
        atomic.replace_file(words.output / f"numerics.{ending}", content.encode(), key="--output")
    print(text)
    print(f"Written: {words.output}/numerics.md, .json, .svg")
    return 0


def _configs(
    words: _Words, overrides: Sequence[str], file: Source | None, registry: Registry
) -> list[tuple[str, RunConfig]]:
    """(name, checked configuration) of each run, the reference first."""
    from surogate_core.plugin import load_run_config
    from surogate_core.service.config import default_groups

    if any(_key(word) == "recipe" for word in overrides):
        raise UserError("surogate numerics: recipe=… names one recipe. Fix: --recipes bf16,fp8-hybrid")
    for word in overrides:
        if _key(word) == "output_dir":
            value = word.partition("=")[2] or "DIR"
            message = f"surogate numerics: {word}: `numerics` writes to the directory of --output."
            raise UserError(f"{message} Fix: --output {value}")
    installed = list(registry.all("recipe"))
    asked = words.recipes
    if asked is None:
        default = default_groups()["recipe"]
        asked = [r for r in installed if r == default] + sorted(r for r in installed if r != default)
    chosen = [[name] for name in asked] + words.runs
    for recipe, *_ in chosen:
        if recipe not in installed:
            raise UserError(
                f"surogate numerics: no recipe {recipe!r} is installed, only {', '.join(sorted(installed))}. "
                f"Fix: `surogate plugins list` shows what is there."
            )
    names = [" ".join(words_of) for words_of in chosen]
    if len(set(names)) < len(names):
        raise UserError(f"surogate numerics: {', '.join(names)}: a run is named twice. Fix: name each once.")
    if len(chosen) < 2:
        raise UserError("surogate numerics: one run has nothing to be compared with. Fix: --recipes bf16,fp8-hybrid")
    given = {_key(word) for word in overrides}
    small = [] if file is not None else [f"{key}={value}" for key, value in SMALL.items() if key not in given]
    found = []
    for name, (recipe, *own) in zip(names, chosen, strict=True):
        config = load_run_config([*small, *overrides, f"recipe={recipe}", *own], config_file=file, registry=registry)
        found.append((name, config))
    return found


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _own_flags(argv: Sequence[str]) -> _Words:
    found = _Words()
    words = list(argv)
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in ("--recipes", "--run", "--output"):
            found.rest.append(word)
            continue
        if not equals:
            if not words:
                raise UserError(f"surogate numerics {flag}: a value must follow. Fix: see `surogate numerics --help`")
            value = words.pop(0)
        if flag == "--recipes":
            found.recipes = [name.strip() for name in value.split(",") if name.strip()]
        elif flag == "--output":
            found.output = Path(value).expanduser()
        elif not value.split():
            raise UserError("surogate numerics --run: is empty. Fix: --run 'nvfp4 skip_quant_last_layers=1'")
        else:
            found.runs.append(value.split())
    return found
