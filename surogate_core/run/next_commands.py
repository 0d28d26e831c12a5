"""What to do with the result of a run, as commands to paste."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from surogate_core.plugins.commands import command_names

if TYPE_CHECKING:
    from surogate_core.config.schema import RunConfig


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
