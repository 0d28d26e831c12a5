"""`surogate plan`: what a run would do and hold; nothing is trained, no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from surogate_core.errors import MachineError, UserError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.engine.engine import EngineSettings

USAGE = """\
usage: surogate plan [FILE.yaml] [KEY=VALUE …] [--fit SIZE] [--json]

Shows the composed config, the block schedule, where each kind of tensor lives, the predicted memory
and the tokens of a step. Takes what `surogate sft` takes; `--json` prints the same as JSON.

--fit 24GiB  also proposes the cheapest changes with which the run fits into so much GPU memory;
             exit code 3 if nothing does
"""

BORDERS_PER_ROW = 64
"""Document borders assumed in a row; the real number comes from the packed data and changes little."""


def _own_flags(argv: Sequence[str]) -> tuple[list[str], str | None, bool]:
    """(the other words, the value of --fit, whether --json is there)."""
    words: list[str] = []
    fit: str | None = None
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--fit":
            if not rest:
                raise UserError("--fit: a size must follow. Fix: --fit 24GiB")
            fit = rest.pop(0)
        elif word.startswith("--fit="):
            fit = word.partition("=")[2]
        elif word != "--json":
            words.append(word)
    return words, fit, "--json" in argv


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_core.cli.arguments import load, parse

    words, fit, as_json = _own_flags(argv)
    arguments = parse(words, command="surogate plan")
    if arguments.help:
        print(USAGE, end="")
        return 0
    from surogate_core import logs

    logs.configure()
    config, registry = load(arguments, None)

    from surogate_core.cli import plan_fit, plan_view
    from surogate_core.engine.prediction import Counts, Prediction
    from surogate_core.train.setup import (
        engine_settings,
        kernel_table,
        prepare_recipe,
        resolve_device,
        resolve_lora,
        resolve_model,
        resolve_offloader,
        resolve_weight_format,
        weights_as_they_are,
    )

    budget = None if fit is None else plan_fit.parse_size(fit)
    resolved = resolve_model(config, registry, weights_needed=False)
    device = resolve_device(config)

    def settings_of(config: RunConfig) -> EngineSettings:
        borders = config.per_device_train_batch_size * BORDERS_PER_ROW
        return engine_settings(config, device=device, borders=borders)

    def count(config: RunConfig) -> Counts:
        recipe, recipe_options = prepare_recipe(config, registry, device)
        weight_format, weight_settings = resolve_weight_format(config, registry, resolved.model)
        return Counts.of(
            resolved.model,
            settings=settings_of(config),
            recipe=recipe,
            recipe_options=recipe_options,
            objective=registry.get("objective", config.objective),
            offloader=resolve_offloader(config, registry),
            kernels=kernel_table(config, registry, device),
            lora=resolve_lora(config, resolved.model),
            weight_format=weight_format,
            weight_settings=weight_settings,
            skips=weights_as_they_are(config, resolved.model),
        )

    def place(config: RunConfig, counts: Counts) -> Prediction:
        return counts.placed(
            offloader=resolve_offloader(config, registry),
            optimizer=registry.get("optimizer", config.optimizer.name),
            head_chunks=config.lmhead_chunks,
            update_on_cpu=config.cpu_training,
        )

    prediction = place(config, count(config))
    fitting = None if budget is None else plan_fit.proposals(config, registry, count, place)
    settings = settings_of(config)
    host = plan_fit.host_memory()
    if as_json:
        extra = {} if fitting is None or budget is None else {"fit": plan_fit.as_json(budget, fitting, host=host)}
        print(plan_view.as_json(config, resolved.title, settings, prediction, **extra), end="")
    else:
        print(plan_view.as_text(config, resolved.title, settings, prediction), end="")
        if fitting is not None and budget is not None:
            print("\n" + plan_fit.as_text(budget, fitting, host=host), end="")
    nothing_fits = fitting is not None and budget is not None and not any(plan_fit.fits(p, budget) for p in fitting)
    return MachineError.exit_code if nothing_fits else 0
