"""`surogate plugins lock` and `verify`: the installed set, pinned and compared. No plugin is imported.

They are in the core, because a policy's lock may refuse every plugin, and these commands are then the way out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from surogate_core.errors import UserError
from surogate_core.plugins.contract import rule_differences
from surogate_core.plugins.digests import MISSING
from surogate_core.plugins.discovery import (
    DEFAULT_LOCK,
    EDITABLE_VARIABLE,
    import_policy,
    installed_plugins,
)
from surogate_core.plugins.lock import Lock, differences, installed_lock, read_lock, requirements, write_lock
from surogate_core.plugins.surroundings import SCOPES


def add_commands(commands: Any) -> None:
    """Add the sub-commands to a parser's."""
    locking = commands.add_parser(
        "lock", help="write the installed set to a file", description="Lock the plugins that the policy allows."
    )
    locking.add_argument("--output", metavar="FILE", type=Path, default=Path(DEFAULT_LOCK), help="default: %(default)s")
    locking.add_argument(
        "--scope",
        choices=SCOPES,
        default="plugins",
        help="what to lock: the plugins; the core as well; also all that both require; or every installed "
        "distribution, so that any additional one is refused, and any module that none of them has; "
        "default: %(default)s",
    )
    locking.add_argument(
        "--require-hashes",
        action="store_true",
        help="print requirements with hashes for pip and uv instead of writing the lock",
    )
    locking.add_argument(
        "--wheels", metavar="DIR", type=Path, help="directory of wheels to take hashes from, for --require-hashes"
    )
    verifying = commands.add_parser(
        "verify",
        help="compare the installed set with the file",
        description="Compare the installed plugins with a lock. Exit code 0: equal; 1: not equal; 2: no valid lock.",
    )
    verifying.add_argument("--lock", metavar="FILE", type=Path, default=Path(DEFAULT_LOCK), help="default: %(default)s")
    verifying.add_argument("--allow-editable", action="store_true", help="accept editable installs")
    verifying.add_argument("--json", action="store_true", help="machine-readable")


def main(arguments: argparse.Namespace) -> int:
    """Run the sub-command; the exit code."""
    return {"verify": _verify, "lock": _lock}[arguments.command](arguments)


def _lock(arguments: argparse.Namespace) -> int:
    # The locks of the policy do not count here: this command may be about to write one of them anew.
    policy = import_policy()
    allowed = [p for p in installed_plugins() if policy.refusal(p.name) is None]
    lock = installed_lock(allowed, arguments.scope)
    if arguments.require_hashes:
        if arguments.wheels is not None and not arguments.wheels.is_dir():
            raise UserError(f"--wheels {arguments.wheels}: there is no such directory.")
        text, unknown = requirements(lock, arguments.wheels)
        print(text, end="")
        if unknown:
            names = ", ".join(unknown)
            print(
                f"surogate: the hashes of these wheels are not known, so pip will refuse them: {names}. Installers "
                "record only those of wheels given by file or URL. Fix: pip wheel or download them, then --wheels DIR",
                file=sys.stderr,
            )
        return 0
    former: Lock | None = None
    with contextlib.suppress(UserError):  # there is none, or it cannot be read: it is replaced
        former = read_lock(arguments.output)
    write_lock(lock, arguments.output)
    if former is not None and former.scope == lock.scope:
        for change in differences(former, lock, allow_editable=True):
            print(f"changed: {change}")
    files = sum(digest != MISSING for d in lock.distributions.values() for digest in d.files.values())
    print(f"{arguments.output}: {len(lock.distributions)} distributions, {files} files")
    editable = [d.name for d in lock.distributions.values() if d.editable]
    if editable:
        print(f"editable, refused by `locked` unless plugins.allow_editable=true: {', '.join(editable)}")
    unrecorded = [d.name for d in lock.distributions.values() if MISSING in d.files.values()]
    if unrecorded:
        print(f"these have no RECORD, so files beside their packages are not known: {', '.join(unrecorded)}")
    startup = [f"{d.name} ({p})" for d in lock.distributions.values() for p in d.files if p.endswith(".pth")]
    if startup:
        print(f"these bring a .pth file, which may run code whenever Python starts: {', '.join(startup)}")
    for text in lock.started:
        if text.startswith("start-up"):
            print(f"Python runs this before Surogate: {text}")
        if text.startswith("loose"):
            print(f"no distribution has this, and it may be imported: {text}")
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    allow_editable = arguments.allow_editable or os.environ.get(EDITABLE_VARIABLE, "").lower() in ("1", "true")
    found = rule_differences(import_policy(), installed_plugins(), file=arguments.lock, allow_editable=allow_editable)
    if arguments.json:
        listed = [{"distribution": one.distribution, "difference": str(one)} for one in found]
        print(json.dumps({"lock": str(arguments.lock), "equal": not found, "differences": listed}, indent=2))
        return 1 if found else 0
    for line in found:
        print(line)
    if not found:
        print(f"{arguments.lock}: the installed plugins are the locked ones")
    return 1 if found else 0
