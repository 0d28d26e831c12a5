"""`surogate plugins check`: the conformance kit on an installed plugin, and a short verdict."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import time
from difflib import get_close_matches
from importlib.util import find_spec
from textwrap import indent
from typing import TYPE_CHECKING

from surogate_core.errors import PluginError, UserError

if TYPE_CHECKING:
    from surogate_testing import Check


def need_kit() -> None:
    """Raises `UserError` with the distribution if the conformance kit is not installed."""
    if find_spec("surogate_testing") is None:
        raise UserError("the conformance kit is not installed. Fix: pip install surogate-testing")


def matrix() -> int:
    """Try pairs of everything installed; 0 when each was trained together or refused by name."""
    need_kit()
    import torch

    from surogate_core.plugins import import_policy, load_plugins
    from surogate_testing.matrix import run_matrix

    torch.set_num_threads(1)
    found = run_matrix(load_plugins(import_policy()), lambda outcome: print(outcome, flush=True))
    print(found)
    for pair in sorted(" with ".join(value for _, value in sorted(pair)) for pair in found.missed):
        print(f"  neither trained nor refused: {pair}")
    return 1 if found.missed or found.count("crashed") else 0


def main(names: list[str], *, only: str | None = None, verbose: bool = False) -> int:
    """Try the plugins; 0 when every check that applies here holds.

    Each check is printed when it ends; on a terminal its name is there while it runs. `only`: run the checks whose name
    contains this text. `verbose`: with the traceback of what does not hold. Raises `UserError` with the nearest names
    if no check has `only` in its name.
    """
    need_kit()
    import torch

    from surogate_core.plugins import import_policy, load_plugins
    from surogate_testing import checks

    # Tensors this small are done before a second thread wakes up.
    torch.set_num_threads(1)
    registry = load_plugins(import_policy())
    bad, tried = 0, 0
    known: dict[str, None] = {}
    for name in names or sorted(p for p in registry.plugins if p != "core"):
        counts = {"holds": 0, "FAILED": 0, "skipped": 0}
        try:
            found = checks(name, registry)
            known |= dict.fromkeys(check.title for check in found)
            found = [check for check in found if only is None or _plain(only) in _plain(str(check))]
        except PluginError as error:
            print(f"  FAILED  {error}", flush=True)
            counts["FAILED"], found = 1, []
        tried += len(found)
        if not found and not counts["FAILED"]:
            continue
        for check in found:
            started = time.monotonic()
            if sys.stdout.isatty():
                print(f"  ...     {check}", end="\r", flush=True)
            word, detail = _outcome(check, verbose=verbose)
            counts[word] += 1
            print(f"  {word:<7} {check}{detail} ({time.monotonic() - started:.1f} s)", flush=True)
        verdict = "fails" if counts["FAILED"] else "conforms"
        skipped = f", {counts['skipped']} not applicable" if counts["skipped"] else ""
        print(f"{name} {verdict}: {counts['holds']} checks hold, {counts['FAILED']} do not{skipped}", flush=True)
        bad += bool(counts["FAILED"])
    if only is not None and not tried and not bad:
        near = get_close_matches(_plain(only), known, n=3, cutoff=0.5)
        fix = " or ".join(f"--check '{title}'" for title in near) or f"one of: {', '.join(known)}"
        raise UserError(f"--check {only}: no check has this in its name. Fix: {fix}")
    return 1 if bad else 0


def _plain(text: str) -> str:
    """A check's name as it is compared: with blanks or underscores, as a function or as it is printed."""
    return text.replace("_", " ").lower()


def _outcome(check: Check, *, verbose: bool) -> tuple[str, str]:
    """``holds``, ``FAILED`` or ``skipped``, and the reason."""
    from surogate_testing import NotApplicable

    try:
        _run(check)
    except NotApplicable as reason:
        return "skipped", f": {reason}"
    except AssertionError as error:
        trace = getattr(error, "trace", "") if verbose else ""
        return "FAILED", f": {error}" + (f"\n{indent(trace.rstrip(), ' ' * 4)}" if trace else "")
    return "holds", ""


def _run(check: Check) -> None:
    # A monitor under test writes to the terminal, and the bus logs the failures that the kit provokes.
    quiet = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            check.run()
    finally:
        logging.disable(logging.NOTSET)
