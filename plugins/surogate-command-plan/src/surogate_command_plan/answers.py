"""The answer of an earlier plan of the same words on the same machine, for which not even torch is imported."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_command_plan.length import local_data
from surogate_core.service.config import expanded
from surogate_core.service.files import resolve_package_path

if TYPE_CHECKING:
    from surogate_core.service.config import RunConfig
    from surogate_core.service.plugins import Registry


TASKS = ("sft", "pt")
"""Tasks that read no other model, and no code of the user."""


def answered(config: RunConfig, registry: Registry, asked: Any, plan: Callable[[], int]) -> int:
    """Print what `plan` prints, and return its exit code. `asked`: the flags and what they name."""
    from surogate_core.service.setup import kept

    def find() -> tuple[str, int]:
        with redirect_stdout(io.StringIO()) as text:
            code = plan()
        return text.getvalue(), code

    text, code = kept(
        "plans",
        config,
        registry,
        lambda: _depends(config, asked),
        find=find,
        write=lambda answer: {"text": answer[0], "code": answer[1]},
        read=lambda facts: (str(facts["text"]), int(facts["code"])),
    )
    print(text, end="")
    return code


def _depends(config: RunConfig, asked: Any) -> list[Any]:
    """Raises `NotKeptError` for a plan of what is free now, and where a part of it is not on this machine."""
    from surogate_core.plugin import compute
    from surogate_core.service.engine import memory_of_machine
    from surogate_core.service.setup import NotKeptError, file_facts

    if compute.assumed() is None or config.offload.name != "none" or config.task not in TASKS:
        raise NotKeptError("what is free, or files of a task")
    named = [name for name in (config.model.path, config.adapter_path) if name is not None]
    places = [Path(expanded(resolve_package_path(name))) for name in named]
    if config.sample_prompts or not all(place.exists() for place in places):
        raise NotKeptError("a model of the hub, or prompts")
    return [asked, memory_of_machine(), *map(file_facts, places), local_data(config)]
