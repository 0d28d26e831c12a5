"""What a run says beside its figures: what is unusual about it, and what to do with its result."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.plugins.commands import command_names

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Peak learning rates of AdamW with which a kind of training usually works."""

    what: str
    low: float
    high: float
    start: float
    """A rate to begin with."""


LORA = Usual(what="LoRA adapters", low=2e-5, high=1e-3, start=2e-4)
FULL = Usual(what="all weights of a trained model", low=1e-6, high=1e-4, start=1e-5)
SCRATCH = Usual(what="a model from random weights", low=1e-4, high=5e-3, start=1e-3)
FAR = 10
"""Factor outside of the usual rates from which a run warns."""


def rate_note(rate: float, *, lora: bool, from_scratch: bool, optimizer: str, scale: float) -> str | None:
    """A warning, or None for a rate that may work. `scale`: the optimizer's rates as a multiple of AdamW's."""
    usual = SCRATCH if from_scratch else LORA if lora else FULL
    low, high, start = (scale * value for value in (usual.low, usual.high, usual.start))
    if low / FAR <= rate <= high * FAR:
        return None
    side, result = "below", "hardly anything will be learnt"
    if rate > high:
        side, result = "above", "the loss will probably diverge"
    return (
        f"learning_rate={rate:g} is far {side} what usually trains {usual.what} with {optimizer} "
        f"({low:g} to {high:g}): {result}. Try learning_rate={start:g}."
    )


TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (arXiv 2203.15556, table 3)."""


def token_budget(parameters: int) -> int:
    """Compute-optimal tokens for training `parameters` from random weights."""
    return TOKENS_PER_PARAMETER * parameters


def adjusted_epochs(parameters: int, tokens_per_epoch: int) -> float:
    """Epochs of `tokens_per_epoch` tokens that give the token budget; less than one if the data is larger."""
    return token_budget(parameters) / max(1, tokens_per_epoch)


TESTED = (2, 13)
"""The newest torch (major, minor) that the tests have run with."""


def untested_torch(version: str = "") -> list[str]:
    """A note about a torch, by default this one, that is newer than the tested ones; it is not refused."""
    if not version:
        import torch  # not above: monitors that ask for the token budget are read without it

        version = torch.__version__
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
    if found <= TESTED:
        return []
    newest = ".".join(map(str, TESTED))
    return [f"torch {version} is newer than {newest}, the newest that this version of Surogate was tested with."]


def next_commands(config: RunConfig, *, head: str = "logits", worse: bool = False) -> tuple[tuple[str, str], ...]:
    """(purpose, command line) of what can be done with the exported result by the commands that are installed.

    `head`: the kind of its head. `worse`: it is worse than the model that the run began with, so there is nothing to
    publish or serve.
    """
    installed = command_names()
    found = _possible(config, head, worse)
    return tuple((what, line) for what, line in found if line.split()[0] != "surogate" or line.split()[1] in installed)


def _possible(config: RunConfig, head: str, worse: bool) -> tuple[tuple[str, str], ...]:
    place = Path(config.place)
    whole = not config.lora or config.merge_adapter
    model = place / ("model" if whole else "merged")
    run = shlex.quote(str(place))
    # An adapter on random weights cannot be loaded again.
    loads = whole or (config.model.path is not None and not config.from_scratch)
    read = ("read the report", f"surogate report {run}")
    if not loads:
        return (read,)
    merge = () if whole else (("fold the adapter in", f"surogate merge {run} --output {shlex.quote(str(model))}"),)
    # Nobody else has an adapter's base that is a directory here.
    ours = not whole and config.model.path is not None and Path(config.model.path).expanduser().is_dir()
    sent = shlex.quote(str(model)) if ours else run
    tried = f"surogate generate {run} --prompt TEXT" if config.task == "pt" else f"surogate chat {run}"
    publish = ("publish (private)", f"surogate export {sent} --to hub://USER/NAME")
    if head != "logits":
        # `surogate merge` does not fold an adapter with a head of its own; a run with merge_adapter=true does.
        return (("measure it", f"surogate eval {run} datasets=pairs.jsonl"), read, *(() if ours else (publish,)))
    measured = (("measure its rewards", played),) if (played := _env_eval(config, run)) else ()
    if worse:
        return (read, ("try it", tried), *measured)
    return (
        *merge,
        ("try it", tried),
        *measured,
        read,
        publish,
        ("serve (vLLM)", f"vllm serve {shlex.quote(str(model))}"),
    )


def _env_eval(config: RunConfig, run: str) -> str:
    """The command that plays held-out tasks of the run's environment; empty if no command line can name its options."""
    if config.environment is None:
        return ""
    options = config.environment.options
    usual, chosen = asdict(type(options)()), asdict(options)
    changed = {name: value for name, value in chosen.items() if value != usual[name]}
    if not all(isinstance(value, str | int | float) for value in changed.values()):
        return ""
    words = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in changed.items()]
    return f"surogate env eval {run} {shlex.join([config.environment.name, *words])}"
