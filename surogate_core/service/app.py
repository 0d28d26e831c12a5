"""Commands: their flags, arguments, progress and output, and the calls of the front door from Python."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.api.process import contained as contained
    from surogate_core.api.process import plain as plain
    from surogate_core.api.results import Run as Run
    from surogate_core.app.announce import announce as announce
    from surogate_core.app.arguments import Arguments as Arguments
    from surogate_core.app.arguments import leading_task as leading_task
    from surogate_core.app.arguments import load as load
    from surogate_core.app.arguments import parse as parse
    from surogate_core.app.arguments import registry_for as registry_for
    from surogate_core.app.arguments import with_places as with_places
    from surogate_core.app.progress import shown_progress as shown_progress
    from surogate_core.app.reports import write_reports as write_reports
    from surogate_core.imports import quick_import as quick_import
    from surogate_core.parents import die_with as die_with

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
