"""`surogate plugins sbom`. No other plugin is imported."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from surogate_command_sbom.bill import bill_of_materials
from surogate_core.plugin import UserError, import_policy
from surogate_core.service.plugins import SCOPES, installed_plugins


def main(argv: Sequence[str]) -> int:
    """Print or write the bill; the exit code."""
    parser = argparse.ArgumentParser(
        prog="surogate plugins sbom",
        description="Print a bill of materials of the installed set in CycloneDX JSON, with the SHA-256 of every file.",
    )
    parser.add_argument(
        "--scope", choices=SCOPES, default="dependencies", help="as for `plugins lock`; default: %(default)s"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="write to FILE instead of standard output")
    arguments = parser.parse_args(list(argv))
    policy = import_policy()
    allowed = [plugin for plugin in installed_plugins() if policy.refusal(plugin.name) is None]
    text = json.dumps(bill_of_materials(allowed, arguments.scope), indent=1, ensure_ascii=False) + "\n"
    if arguments.output is None:
        sys.stdout.write(text)
        return 0
    try:
        arguments.output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output {arguments.output}: cannot be written: {error.strerror}.") from None
    return 0
