"""What a plugin does besides what it was asked for: named, and kept away from the command's output."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from surogate_core.masking import masked
from surogate_core.plugins.contract import NEWER_CORE, needs_newer_core
from surogate_core.plugins.discovery import InstalledPlugin, installed_plugins
from surogate_core.plugins.static import locate

SLOW_SECONDS = 1.0
"""An import that takes longer is named."""

HEAVY = ("torch", "hydra", "transformers", "datasets")
"""Packages that a plugin's module should leave to its hooks."""

_LIBRARY = ("dsl", "kernels", "lazy.py", "plugin")
"""Parts of the core that plugins call: an error below them is the caller's."""

_SHOWN = 80
"""Characters of what was printed that a remark shows."""

clock = time.perf_counter


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something that a plugin did and should not; nothing is lost by it."""

    plugin: InstalledPlugin
    text: str
    """The observation, e.g. ``took 1.3 s to import``."""

    def __str__(self) -> str:
        return f"{self.plugin.label} {self.text}"


class _Stdout(io.TextIOWrapper):
    """A plugin's `sys.stdout` while it is observed. If the plugin keeps it, later text goes to the real one."""

    def __init__(self) -> None:
        self._kept = io.BytesIO()
        super().__init__(self._kept, encoding="utf-8", errors="replace", write_through=True)
        self.over = False

    def write(self, text: str) -> int:
        return sys.stdout.write(text) if self.over else super().write(text)

    def end(self) -> str:
        """Return the text so far; later text is not recorded."""
        self.over = True
        return self._kept.getvalue().decode("utf-8", errors="replace")


@contextmanager
def observed(plugin: InstalledPlugin, doing: str, remarks: list[Remark], *, timed: bool = False) -> Iterator[None]:
    """Run a plugin's code; adds to `remarks` what it printed, which threads it left and, if `timed`, that it is slow.

    `doing`: e.g. ``when it was imported``. Text for `sys.stdout` goes into the remark, not to the command's output,
    which another program may read. Threads cannot be stopped. What C code or a child process prints is not seen.
    """
    before, heavy = set(threading.enumerate()), sys.modules.keys() & set(HEAVY)
    printed, begin = _Stdout(), clock()
    try:
        with redirect_stdout(printed):
            yield
    finally:
        seconds = clock() - begin
        found = []
        if timed and seconds > SLOW_SECONDS:
            loaded = ", ".join(sorted((sys.modules.keys() & set(HEAVY)) - heavy))
            reason = f"; its module imports {loaded}, which belongs into its hooks" if loaded else ""
            found.append(f"took {seconds:.1f} s {doing}{reason}")
        if text := " ".join(printed.end().split()):
            shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
            found.append(f"printed to stdout {doing}: {shown!r}")
        for thread in threading.enumerate():
            if thread not in before:
                waits = "" if thread.daemon else ", which the process will wait for at its end"
                found.append(f"started the thread {thread.name!r} {doing}{waits}")
        remarks += [Remark(plugin=plugin, text=text) for text in found]


def culprit(error: BaseException) -> InstalledPlugin | None:
    """The plugin whose code raised the error, or called what raised it; None where it was not a plugin's.

    Read from the traceback. An error that passes through a plugin's code on its way, such as a launcher's, is not
    its own.
    """
    core = Path(__file__).resolve().parents[1]
    packages = {}
    for plugin in installed_plugins():
        package = locate(plugin.module.partition(":")[0].partition(".")[0])
        if package is not None:
            packages[package.resolve()] = plugin
    last: InstalledPlugin | None = None
    traceback = error.__traceback__
    while traceback is not None:
        file = Path(traceback.tb_frame.f_code.co_filename)
        owners = [plugin for package, plugin in packages.items() if file == package or package in file.parents]
        if owners:
            last = owners[0]
        elif core in file.parents and file.relative_to(core).parts[0] not in _LIBRARY:
            last = None
        traceback = traceback.tb_next
    return last


def bug_text(error: BaseException, log: Path) -> str:
    """One line for an unexpected error, with its plugin and the file that has its traceback."""
    plugin = culprit(error)
    where = f" in {plugin.label}" if plugin is not None else ""
    text = masked(" ".join(str(error).split())).rstrip(".")
    if plugin is not None and (newer := needs_newer_core(error)):
        return f"{plugin.label} failed: {newer}. Fix: {NEWER_CORE}. The traceback is in {log}"
    return f"a bug{where}: {type(error).__name__}: {text}. The traceback is in {log}"
