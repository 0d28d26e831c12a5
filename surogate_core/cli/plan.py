"""`surogate plan`: what a run would do and hold; nothing is trained, no weight is read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from surogate_core.errors import MachineError, UserError

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig
    from surogate_core.plugins.registry import Registry

USAGE = """\
usage: surogate plan [FILE.yaml] [KEY=VALUE …] [--gpu NAME] [--fit SIZE] [--json]

Shows the composed config, the block schedule, where each kind of tensor lives, the predicted memory
and the tokens of a step. Takes what `surogate sft` takes; `--json` prints the same as JSON.

--gpu h200   plans for such a GPU, which need not be here: a name such as a100, rtx4090, h200 or b200,
             or a compute capability such as sm_90
--fit 24GiB  also proposes the cheapest changes with which the run fits into so much GPU memory;
             exit code 3 if nothing does
"""

GPUS = {
    "a100": (8, 0),
    "a10": (8, 6),
    "rtx3090": (8, 6),
    "l4": (8, 9),
    "l40s": (8, 9),
    "rtx4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "b300": (10, 3),
    "rtx5090": (12, 0),
}
"""Name → compute capability, which says what kernels there are."""


def parse_gpu(text: str) -> tuple[int, int]:
    """The compute capability of a name or of ``sm_90``; raises `UserError` with the names."""
    capability = re.fullmatch(r"sm_?(\d+)(\d)", text.lower())
    if capability is not None:
        return int(capability[1]), int(capability[2])
    name = re.sub(r"[^a-z0-9]", "", text.lower())
    if name not in GPUS:
        raise UserError(f"--gpu {text}: not known. Fix: one of {', '.join(GPUS)}, or a capability such as sm_90.")
    return GPUS[name]


def _own_flags(argv: Sequence[str]) -> tuple[list[str], dict[str, str], bool]:
    """(the other words, the values of --fit and --gpu, whether --json is there)."""
    words: list[str] = []
    values: dict[str, str] = {}
    examples = {"--fit": ("a size", "24GiB"), "--gpu": ("a name", "h200")}
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        flag, equals, attached = word.partition("=")
        if flag in examples:
            what, example = examples[flag]
            if not equals and not rest:
                raise UserError(f"{flag}: {what} must follow. Fix: {flag} {example}")
            values[flag] = attached if equals else rest.pop(0)
        elif word != "--json":
            words.append(word)
    return words, values, "--json" in argv


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    from surogate_core.cli.arguments import load, parse

    words, values, as_json = _own_flags(argv)
    arguments = parse(words, command="surogate plan")
    if arguments.help:
        print(USAGE, end="")
        return 0
    gpu = None if "--gpu" not in values else parse_gpu(values["--gpu"])
    from surogate_core import logs

    logs.configure()
    config, registry = load(arguments, None)
    if gpu is not None and config.device == "cpu":
        raise UserError("--gpu: the configuration says device=cpu. Fix: leave --gpu, or set device=auto.")
    with ExitStack() as stack:
        if gpu is not None:
            from surogate_core.kernels.native import assuming

            stack.enter_context(assuming(gpu))
        return _plan(config, registry, fit=values.get("--fit"), as_json=as_json)


def _plan(config: RunConfig, registry: Registry, *, fit: str | None, as_json: bool) -> int:
    """Predict, and print; the exit code."""
    from surogate_core.cli import plan_fit, plan_view
    from surogate_core.cli.plan_room import Room
    from surogate_core.dsl.budget import ARITHMETIC
    from surogate_core.engine.prediction import Counts, Prediction
    from surogate_core.kernels.attention import TORCH_PACK
    from surogate_core.kernels.native import assumed
    from surogate_core.run.assemble import resolve_device, resolve_model
    from surogate_core.run.build import free_memory
    from surogate_core.run.fitting import assembly_of, placed, settled_for
    from surogate_core.train.flops import gemm_flops_per_second

    budget = None if fit is None else plan_fit.parse_size(fit)
    resolved = resolve_model(config, registry, weights_needed=False)
    device = resolve_device(config)
    # What --fit proposes is named as changes of the fastest setting.
    free = None if budget is not None or assumed() else free_memory(device)
    config = settled_for(config, registry, resolved, room=free)

    def count(config: RunConfig) -> Counts:
        return Counts.of(assembly_of(config, registry, resolved))

    def place(config: RunConfig, counts: Counts) -> Prediction:
        return placed(config, registry, counts)

    counts = count(config)
    prediction = place(config, counts)
    settings = counts.settings
    here = assumed() is None
    reasons = {} if here else {n: pack.unavailable(device) for n, pack in registry.all("kernels").items()}
    measured = here and (prediction.again > 0 or budget is not None)
    told = plan_view.Device(
        flops=gemm_flops_per_second(device, settings.dtype) if measured else ARITHMETIC,
        source="measured here" if measured else "assumed",
        left_out={name: reason for name, reason in reasons.items() if reason and name != TORCH_PACK.name},
    )
    fitting = None
    if budget is not None:
        fitting = plan_fit.proposals(config, registry, count, place, counts=counts, flops=told.flops)
    room = Room.here(config)
    if as_json:
        extra = {} if fitting is None or budget is None else {"fit": plan_fit.as_json(budget, fitting, room=room)}
        print(plan_view.as_json(config, resolved.title, settings, prediction, told, **extra), end="")
    else:
        print(plan_view.as_text(config, resolved.title, settings, prediction, told, room), end="")
        if fitting is not None and budget is not None:
            print("\n" + plan_fit.as_text(budget, fitting, room=room), end="")
    nothing_fits = fitting is not None and budget is not None and not any(plan_fit.fits(p, budget) for p in fitting)
    return MachineError.exit_code if nothing_fits else 0
