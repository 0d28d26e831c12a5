"""Surogate plugin: the report of runs, their live page, and the command that writes or serves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from surogate_core.plugin import bundles, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from surogate_command_report.options import WebOptions
    from surogate_core.plugin import events

SUROGATE_API = ">=2,<3"


@hookimpl
def surogate_command() -> bundles.CommandSpec:
    """The command."""
    return bundles.CommandSpec(
        name="report",
        usage="report [RUN …] [--output FILE|--serve]",
        help="curves and figures of runs, as files or as a live page",
        main="surogate_command_report.command:main",
        rank=320,
    )


@hookimpl
def surogate_report() -> bundles.ReportSpec:
    """`report.html` and `report.md` at the end of a run."""
    return bundles.ReportSpec(name="html", write=_write)


def _write(directories: Sequence[Path]) -> list[Path]:
    # Imported when a run ends.
    from surogate_command_report.write import write_report

    return write_report(directories)


@hookimpl
def surogate_config_path() -> str:
    """Where the option `monitor=web` is."""
    return "pkg://surogate_command_report.conf"


@hookimpl
def surogate_monitor() -> bundles.MonitorSpec:
    """The live page of a run."""
    from surogate_command_report.options import WebOptions

    return bundles.MonitorSpec(name="web", build=_page, options=WebOptions)


def _page(options: WebOptions, info: events.RunInfo) -> bundles.Monitor:
    from surogate_command_report.live import WebMonitor

    return WebMonitor(options, info)
