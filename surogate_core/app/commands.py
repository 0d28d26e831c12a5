"""The names of the commands."""

from __future__ import annotations

from collections.abc import Iterator

CORE_TASKS = ("sft", "pt")
DEMO = "demo"
"""The command that trains the embedded example."""
COMMANDS = (
    *CORE_TASKS,
    DEMO,
    "generate",
    "chat",
    "eval",
    "env",
    "serve",
    "tokenize",
    "merge",
    "export",
    "report",
    "numerics",
    "plan",
    "plugins",
    "doctor",
)
PEERS_COMMANDS = {
    **dict.fromkeys(("train", "finetune", "fine-tune", "finetuning", "fit", "run", "lora", "qlora"), "sft"),
    **dict.fromkeys(("pretrain", "pre-train"), "pt"),
    "preprocess": "tokenize",
    **dict.fromkeys(("infer", "inference", "predict", "complete"), "generate"),
    "evaluate": "eval",
    **dict.fromkeys(("push", "upload", "push_to_hub", "convert"), "export"),
}
"""Name of a command in other trainers → its name here."""


def installed_tasks() -> Iterator[str]:
    """Names of the tasks that installed plugins offer, read from their sources: nothing is imported."""
    from surogate_core.plugins.discovery import installed_plugins
    from surogate_core.plugins.static import static_view

    for plugin in installed_plugins():
        yield from (name for kind, name in static_view(plugin.module).bundles if kind == "task")
