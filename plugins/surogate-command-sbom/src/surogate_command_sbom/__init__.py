"""Surogate plugin: `surogate plugins sbom`, a bill of materials of what is installed, as CycloneDX 1.6 in JSON."""

from __future__ import annotations

from surogate_core.plugin import bundles, hookimpl

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """The command `plugins sbom`."""
    return bundles.CommandSpec(
        name="plugins sbom",
        usage="plugins sbom [--output FILE]",
        help="a bill of materials of what is installed, in CycloneDX JSON",
        main="surogate_command_sbom.command:main",
        rank=810,
    )
