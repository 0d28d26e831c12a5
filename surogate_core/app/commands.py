"""The commands: their names, and the start of one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from surogate_core.errors import PluginError, UserError
from surogate_core.plugins.commands import OfferedCommand, command_names, offered_commands
from surogate_core.plugins.discovery import ImportPolicy, import_policy, installed_plugins

CORE_TASKS = ("sft", "pt")
DEMO = "demo"
"""The command that trains the embedded example."""
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
    from surogate_core.plugins.static import static_view

    for plugin in installed_plugins():
        yield from (name for kind, name in static_view(plugin.module).bundles if kind == "task")


def first_words() -> tuple[str, ...]:
    """Every first word: the core's tasks, `demo`, and the commands of core and plugins."""
    return (*CORE_TASKS, DEMO, *dict.fromkeys(name.partition(" ")[0] for name in command_names()))


def find_command(words: Sequence[str]) -> OfferedCommand | None:
    """The command that the first two words, or the first, name; None where there is none of that name.

    Raises `PluginError` if its plugin is not installed or forbidden, or if two plugins offer it.
    """
    offered = offered_commands()
    for count in (2, 1):
        name = " ".join(words[:count])
        found = [command for command in offered if command.name == name]
        if found:
            return _one_of(found)
        _refuse_absent(name)
    return None


def run_command(command: OfferedCommand, arguments: Sequence[str]) -> int:
    """Import the command's function and call it; the exit code.

    Raises `PluginError` if what is installed is not what a lock of the policy holds, and if the import fails.
    """
    words = list(arguments)[len(command.name.split()) :]
    function = _imported(command, command.main, words)
    try:
        return int(function(words))
    except SystemExit as end:
        from surogate_core.plugins.isolation import culprit

        # A command's own plugin may end it, as argparse does; another plugin may not.
        by = culprit(end)
        if by is None or by.name != command.plugin.name or not isinstance(end.code, int | None):
            raise
        return end.code or 0


def python_function(name: str) -> Any:
    """The function that a command has for Python.

    Raises `PluginError` as `find_command` and `run_command` do.
    """
    command = find_command([name])
    assert command is not None, f"neither installed nor in the catalogue: {name}"
    return _imported(command, command.python, ())


def _imported(command: OfferedCommand, place: str, words: Sequence[str]) -> Any:
    """The function at ``package.module:function``, from a plugin that may be imported."""
    module, _, function = place.partition(":")
    if command.plugin.entry_point is None:
        return getattr(import_module(module), function)
    _check_plugin(command, words)
    try:
        return getattr(import_module(module), function)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        from surogate_core.plugins.registry import Broken

        broken = Broken(plugin=command.plugin, doing=f"when its command {command.name} was imported", error=error)
        raise PluginError(f"{broken}. {broken.fix}") from error


def _one_of(found: Sequence[OfferedCommand]) -> OfferedCommand:
    """The one command of its name whose plugin may be imported."""
    policy = import_policy()
    reasons = {c.plugin.name: policy.refusal(c.plugin.name) for c in found if c.plugin.entry_point is not None}
    allowed = [command for command in found if not reasons.get(command.plugin.name)]
    if not allowed:
        raise _forbidden(found[0], str(reasons[found[0].plugin.name]))
    if len(allowed) > 1:
        from surogate_core.plugins.registry import offered_twice

        # The core first: it is not the one to uninstall.
        first, second, *_ = sorted(allowed, key=lambda command: command.plugin.entry_point is not None)
        raise PluginError(str(offered_twice(f"command {first.name!r}", first.plugin, second.plugin)))
    return allowed[0]


def _check_plugin(command: OfferedCommand, words: Sequence[str]) -> None:
    """Raise `PluginError` unless hook API, locks and the policy in the command's words allow the plugin."""
    from surogate_core.plugins.contract import incompatible, remedy, verify

    if (reason := incompatible(command.plugin)) is not None:
        raise PluginError(
            f"surogate {command.name}: {command.plugin.label} offers it but is {reason}. {remedy(command.plugin)}"
        )
    policy = _policy_in(words) if command.configured else import_policy()
    if (refusal := policy.refusal(command.plugin.name)) is not None:
        raise _forbidden(command, refusal)
    verify(policy, installed_plugins())


def _policy_in(words: Sequence[str]) -> ImportPolicy:
    """The policies of environment, machine and the configuration in a command's words."""
    file = next((Path(word) for word in words if word.endswith((".yaml", ".yml")) and Path(word).is_file()), None)
    overrides = [word for word in words if "=" in word and word[0] != "-"]
    if file is None and not overrides:
        return import_policy()
    from surogate_core.config.resolve import peek_policy

    try:
        return import_policy(peek_policy(overrides, file))
    except UserError:
        return import_policy()  # the command reports what is wrong with its words


def _forbidden(command: OfferedCommand, reason: str) -> PluginError:
    return PluginError(
        f"surogate {command.name}: {command.plugin.label} offers it but is {reason}. Change the plugin policy."
    )


def _refuse_absent(name: str) -> None:
    from surogate_core.plugins.catalogue import catalogue, install_command

    distribution = catalogue().bundles.get(f"command/{name}")
    if distribution is None:
        return
    if any(plugin.distribution == distribution for plugin in installed_plugins()):
        raise UserError(f"surogate {name}: {distribution} is installed and its command cannot be read. Reinstall it.")
    raise PluginError(
        f"surogate {name}: its plugin {distribution} is not installed. Fix: {install_command(distribution)}"
    )
