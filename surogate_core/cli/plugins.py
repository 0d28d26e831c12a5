"""`surogate plugins`: what is installed, read from metadata and files; `list` and `show` import no plugin."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.cli import plugin_lock
from surogate_core.errors import UserError
from surogate_core.plugins.catalogue import catalogue
from surogate_core.plugins.contract import incompatible, rule_differences, supported_api
from surogate_core.plugins.discovery import (
    ImportPolicy,
    InstalledPlugin,
    canonical,
    core_plugin,
    import_policy,
    installed_plugins,
    unmet_requirements,
)
from surogate_core.plugins.new import KINDS, entry_point, new_plugin
from surogate_core.plugins.static import StaticView, config_options, static_view


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    plugin: InstalledPlugin
    view: StaticView
    options: list[str]
    state: str

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.plugin.name,
            "distribution": self.plugin.distribution,
            "version": self.plugin.version,
            "module": self.plugin.module,
            "state": self.state,
            "api": supported_api(self.plugin) or "",
            "hooks": list(self.view.hooks),
            "options": self.options,
            "offers": [f"{kind} {name}" for kind, name in self.view.bundles],
            "requires": list(self.plugin.requires),
            "unmet": list(unmet_requirements(self.plugin)),
        }


def main(argv: Sequence[str]) -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(prog="surogate plugins", description="The plugins that are installed.")
    commands = parser.add_subparsers(dest="command", metavar="list|show|check|new|lock|verify", required=True)
    listing = commands.add_parser("list", help="every installed plugin")
    showing = commands.add_parser("show", help="one plugin in full")
    showing.add_argument("name", metavar="NAME", help="entry-point name or distribution")
    for sub in (listing, showing):
        sub.add_argument("--json", action="store_true", help="machine-readable")
    checking = commands.add_parser("check", help="run the conformance kit on a plugin; exit code 0 or 1")
    checking.add_argument("names", metavar="NAME", nargs="*", help="entry-point name or distribution; none: all")
    checking.add_argument(
        "--matrix",
        action="store_true",
        help="instead: whether every pair of family, recipe, optimizer, offloader and mode trains a step together",
    )
    checking.add_argument("--check", metavar="TEXT", help="run only the checks with this in their name")
    checking.add_argument("-v", "--verbose", action="store_true", help="show the traceback of each failed check")
    making = commands.add_parser("new", help="write a package for a plugin")
    making.add_argument("name", metavar="NAME", help="lower-case, with dashes; also what a config selects it by")
    making.add_argument("--kind", required=True, choices=list(KINDS), help="what it offers")
    making.add_argument("--output", metavar="DIR", type=Path, default=Path(), help="where; default: here")
    plugin_lock.add_commands(commands)
    arguments = parser.parse_args(list(argv))
    if arguments.command in ("lock", "verify"):
        return plugin_lock.main(arguments)
    if arguments.command == "check":
        from surogate_core.cli import plugin_check

        if arguments.matrix:
            return plugin_check.matrix()
        return plugin_check.main(arguments.names, only=arguments.check, verbose=arguments.verbose)
    if arguments.command == "new":
        directory = new_plugin(arguments.name, arguments.kind, arguments.output)
        point = entry_point(arguments.name, arguments.kind)
        print(f"{directory}\nnext: pip install -e '{directory}[dev]' && surogate plugins show {point}")
        return 0
    rows = _rows()
    if arguments.command == "list":
        chosen = rows
    else:
        chosen = [r for r in rows if arguments.name in (r.plugin.name, r.plugin.distribution)]
        if not chosen:
            raise _unknown(arguments.name, rows)
    if arguments.json:
        facts = [row.facts() for row in chosen]
        print(json.dumps(facts if arguments.command == "list" else facts[0], indent=2))
    elif arguments.command == "list":
        _print_list(chosen)
    else:
        for row in chosen:
            _print_one(row)
    return 0


def _rows() -> list[_Row]:
    policy = import_policy()
    rows = []
    installed = installed_plugins()
    unlocked = _unlocked(policy, installed)
    for plugin in (core_plugin(), *installed):
        view = static_view(plugin.module)
        options = view.options
        if plugin.entry_point is None:
            from surogate_core.conf_paths import conf_dir

            options = config_options(conf_dir())
        unmet = unmet_requirements(plugin)
        refusal = policy.refusal(plugin.name) if plugin.entry_point is not None else None
        refusal = refusal or incompatible(plugin) or unlocked.get(canonical(plugin.distribution))
        state = refusal or view.problem or ("requirements not met" if unmet else "ok")
        rows.append(_Row(plugin=plugin, view=view, options=[f"{g}={o}" for g, o in sorted(options)], state=state))
    return [dataclasses.replace(row, state=_twice(row, rows)) if row.state == "ok" else row for row in rows]


def _twice(row: _Row, rows: Sequence[_Row]) -> str:
    """``ok``, or a name that another usable plugin offers too, so that a run that asks for it is refused."""
    own = {*row.options, *(f"{kind} {name}" for kind, name in row.view.bundles)}
    for other in rows:
        both = own & {*other.options, *(f"{kind} {name}" for kind, name in other.view.bundles)}
        if other is not row and other.state == "ok" and both:
            return f"{min(both)} is also offered by {other.plugin.name}: runs that use it are refused"
    return "ok"


def _unlocked(policy: ImportPolicy, installed: Sequence[InstalledPlugin]) -> dict[str, str]:
    """Normalised distribution → how it differs from the policy's locks. Other differences go to stderr."""
    found: dict[str, str] = {}
    for rule in policy.locks:
        try:
            all_differences = rule_differences(
                policy, installed, file=Path(rule.file), allow_editable=rule.allow_editable
            )
        except UserError as error:
            print(f"surogate: every run is refused: {error}", file=sys.stderr)
            continue
        named = {canonical(p.distribution) for p in (core_plugin(), *installed)}
        for difference in all_differences:
            if difference.distribution in named:
                found.setdefault(difference.distribution, f"not as locked: {difference}")
            else:
                print(f"surogate: every run is refused: {difference} ({rule.file})", file=sys.stderr)
    return found


def _unknown(name: str, rows: list[_Row]) -> UserError:
    ours = {*catalogue().options.values(), *catalogue().bundles.values()}
    for distribution in (name, f"surogate-{name}"):
        if distribution in ours:
            return UserError(f"plugin {name} is not installed. Fix: pip install {distribution}")
    near = get_close_matches(name, [r.plugin.name for r in rows] + [r.plugin.distribution for r in rows], n=1)
    fix = f" Fix: surogate plugins show {near[0]}" if near else " `surogate plugins list` lists what is installed."
    return UserError(f"plugin {name} is not installed.{fix}")


def _console() -> Any:
    from rich.console import Console

    # A pipe has no width of its own; nothing is cut there.
    return Console() if sys.stdout.isatty() else Console(width=200)


def _print_list(rows: list[_Row]) -> None:
    from rich import box
    from rich.table import Table

    table = Table("name", "distribution", "version", "offers", "state", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        shown = row.options + [f"{k} {n}" for k, n in row.view.bundles if f"{k}={n}" not in row.options]
        table.add_row(row.plugin.name, row.plugin.distribution, row.plugin.version, ", ".join(shown), row.state)
    _console().print(table)


def _print_one(row: _Row) -> None:
    from rich import box
    from rich.table import Table

    unmet = {text.partition(" (")[0]: text for text in unmet_requirements(row.plugin)}
    requires = [f"{r}: {'not met: ' + unmet[r] if r in unmet else 'met'}" for r in row.plugin.requires]
    table = Table(box=box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    facts = {
        "name": row.plugin.name,
        "distribution": f"{row.plugin.distribution} {row.plugin.version}",
        "module": row.plugin.module,
        "state": row.state,
        "hook API": supported_api(row.plugin) or "",
        "hooks": "\n".join(row.view.hooks) or "none",
        "config options": "\n".join(row.options) or "none",
        "offers": "\n".join(f"{kind} {name}" for kind, name in row.view.bundles) or "none",
        "requirements": "\n".join(requires) or "none",
    }
    for name, text in facts.items():
        table.add_row(name, text)
    _console().print(table)
