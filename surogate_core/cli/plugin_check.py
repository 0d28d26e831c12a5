"""`surogate plugins check`: the conformance kit on an installed plugin, and a short verdict."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from textwrap import indent

from surogate_core.errors import PluginError
from surogate_core.testing.check import Check, NotApplicable


def matrix() -> int:
    """Try pairs of everything installed; 0 when each was trained together or refused by name."""
    import torch

    from surogate_core.plugins import import_policy, load_plugins
    from surogate_core.testing.matrix import run_matrix

    torch.set_num_threads(1)
    found = run_matrix(load_plugins(import_policy()), lambda outcome: print(outcome, flush=True))
    print(found)
    for pair in sorted(" with ".join(value for _, value in sorted(pair)) for pair in found.missed):
        print(f"  neither trained nor refused: {pair}")
    return 1 if found.missed or found.count("crashed") else 0


def main(names: list[str], *, verbose: bool = False) -> int:
    """Try the plugins; 0 when every check that applies here holds. `verbose`: with the traceback of what does not."""
    import torch

    from surogate_core.plugins import import_policy, load_plugins
    from surogate_core.testing import checks

    # Tensors this small are done before a second thread wakes up.
    torch.set_num_threads(1)
    registry = load_plugins(import_policy())
    bad = 0
    for name in names or sorted(p for p in registry.plugins if p != "core"):
        held, missed, failures = 0, [], []
        try:
            found = checks(name, registry)
        except PluginError as error:
            failures.append(str(error))
            found = []
        for check in found:
            try:
                _run(check)
            except NotApplicable as reason:
                missed.append(f"{check}: {reason}")
            except AssertionError as error:
                trace = getattr(error, "trace", "") if verbose else ""
                failures.append(f"{check}: {error}" + (f"\n{indent(trace.rstrip(), ' ' * 4)}" if trace else ""))
            else:
                held += 1
        verdict = "fails" if failures else "conforms"
        skipped = f", {len(missed)} not applicable" if missed else ""
        print(f"{name} {verdict}: {held} checks hold, {len(failures)} do not{skipped}")
        for line in failures:
            print(f"  FAILED  {line}")
        for line in missed:
            print(f"  skipped {line}")
        sys.stdout.flush()
        bad += bool(failures)
    return 1 if bad else 0


def _run(check: Check) -> None:
    # A monitor under test writes to the terminal, and the bus logs the failures that the kit provokes.
    quiet = io.StringIO()
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            check.run()
    finally:
        logging.disable(logging.NOTSET)
