"""Commands: `surogate NAME`, offered by plugins as by the core."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """A command of the command line.

    It is made in the module that the entry point names, and its fields are literals there: `surogate --help` and the
    search for a command read them from the source and import no plugin.
    """

    name: str
    """The word after `surogate`, or two words such as `plugins lock`."""
    usage: str
    """What is typed after `surogate`, such as `report [RUN …] [--output FILE]`; a line for each form."""
    help: str
    """What it does, in a few words; a line for each line of `usage`."""
    main: str
    """`package.module:function`, imported when the command runs: receives the words after the name as a list of texts,
    returns the exit code. Raises `UserError` for wrong input. With `--help` it prints its usage."""
    python: str = ""
    """`package.module:function`: the same from Python, for `surogate` and `Run`. Its module imports no torch."""
    rank: int = 500
    """Its place in `surogate --help`: small ranks come first, equal ranks by name. The core's are 100 (generate), 200
    (tokenize), 800 (plugins) and 900 (doctor)."""
    example: str = ""
    """A whole command for the first lines of `surogate --help`, after `surogate`. Only for what most users need."""
    configured: bool = False
    """Whether it takes the words of a run (FILE.yaml, KEY=VALUE). The plugin policy in them then applies to the
    command's own plugin too."""
