"""The commands of the core and of the installed plugins, read from their sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from surogate_core.plugins.discovery import (
    InstalledPlugin,
    core_plugin,
    import_policy,
    installed_plugins,
)
from surogate_core.plugins.static import last_name, literals, module_file

RESERVED = ("sft", "pt", "demo", "help")
"""First words that the command line itself reads."""

_CLASS = "CommandSpec"


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedCommand:
    """A `CommandSpec` as its plugin's source has it; what is no literal there has its default."""

    plugin: InstalledPlugin
    name: str
    usage: str
    help: str
    main: str
    python: str = ""
    rank: int = 500
    example: str = ""
    configured: bool = False


_TEXTS = ("name", "usage", "help", "main")


def offered_commands() -> list[OfferedCommand]:
    """The commands of the core and of every installed plugin, in the order of `surogate --help`; nothing is imported.

    Two plugins may offer one name, and the policy may forbid a plugin: `surogate_core.app.commands` sees to both.
    """
    found = [command for plugin in (core_plugin(), *installed_plugins()) for command in commands_of(plugin)]
    return sorted(found, key=lambda command: (command.rank, command.name))


def allowed_commands() -> list[OfferedCommand]:
    """The same, without those of plugins that the policy of environment and machine forbids."""
    policy = import_policy()
    return [c for c in offered_commands() if c.plugin.entry_point is None or policy.refusal(c.plugin.name) is None]


def commands_of(plugin: InstalledPlugin) -> Iterator[OfferedCommand]:
    """The commands in the module that the plugin's entry point names; none where it cannot be read."""
    file = module_file(plugin.module.partition(":")[0].strip())
    try:
        text = file.read_text(encoding="utf-8") if file is not None else ""
        tree = ast.parse(text) if _CLASS in text else ast.Module(body=[], type_ignores=[])
    except (OSError, SyntaxError, ValueError):
        return
    constants = literals(tree)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call) and last_name(node.func) == _CLASS):
        fields: dict[str, Any] = {}
        for keyword in call.keywords:
            value = keyword.value
            if isinstance(value, ast.Constant):
                fields[str(keyword.arg)] = value.value
            elif isinstance(value, ast.Name) and value.id in constants:
                fields[str(keyword.arg)] = constants[value.id]
        if all(isinstance(fields.get(name), str) for name in _TEXTS):
            yield OfferedCommand(plugin=plugin, **{k: v for k, v in fields.items() if k in OfferedCommand.__slots__})


def command_names() -> list[str]:
    """Names of the commands that may run, in the order of `surogate --help`."""
    return list(dict.fromkeys(command.name for command in allowed_commands()))


def known_names() -> list[str]:
    """Names of the commands that may run, and of those of this project's plugins that are not installed."""
    from surogate_core.plugins.catalogue import catalogue

    return list(dict.fromkeys([*command_names(), *catalogue().names("command")]))
