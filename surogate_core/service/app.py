"""Commands: their flags, arguments, progress and output, and the calls of the front door from Python."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.api.process import contained, plain
    from surogate_core.api.results import Run
    from surogate_core.app.announce import announce
    from surogate_core.app.arguments import Arguments, leading_task, load, parse, registry_for, with_places
    from surogate_core.app.progress import shown_progress
    from surogate_core.app.reports import write_reports
    from surogate_core.parents import die_with

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
