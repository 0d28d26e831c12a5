"""`surogate plan`: what a run would do and hold; nothing is trained, no weight is read."""

from __future__ import annotations

from collections.abc import Sequence

USAGE = """\
usage: surogate plan [FILE.yaml] [KEY=VALUE …]

Shows the composed config, the block schedule, where each kind of tensor lives, the predicted memory
and the tokens of a step. Takes what `surogate sft` takes; `--json` prints the same as JSON.
"""

BORDERS_PER_ROW = 64
"""Document borders assumed in a row; the real number comes from the packed data and changes little."""


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_core.cli.arguments import load, parse

    arguments = parse([a for a in argv if a != "--json"], command="surogate plan")
    if arguments.help:
        print(USAGE, end="")
        return 0
    from surogate_core import logs

    logs.configure()
    config, registry = load(arguments, None)

    from surogate_core.engine.prediction import predict
    from surogate_core.train.setup import (
        engine_settings,
        kernel_table,
        prepare_recipe,
        resolve_device,
        resolve_lora,
        resolve_model,
        resolve_offloader,
    )

    resolved = resolve_model(config, registry, weights_needed=False)
    device = resolve_device(config)
    settings = engine_settings(config, device=device, borders=config.per_device_train_batch_size * BORDERS_PER_ROW)
    recipe, recipe_options = prepare_recipe(config, registry, device)
    prediction = predict(
        resolved.model,
        settings=settings,
        recipe=recipe,
        recipe_options=recipe_options,
        objective=registry.get("objective", config.objective),
        optimizer=registry.get("optimizer", config.optimizer.name),
        offloader=resolve_offloader(config, registry),
        kernels=kernel_table(config, registry, device),
        lora=resolve_lora(config, resolved.model),
    )
    from surogate_core.cli import plan_view

    show = plan_view.as_json if "--json" in argv else plan_view.as_text
    print(show(config, resolved.title, settings, prediction), end="")
    return 0
