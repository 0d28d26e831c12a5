"""Write docs/cli.md from the help of each command, and docs/metrics.md from the docstrings of the events.

With --check nothing is written: exit 1 if a page is not current."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from make_hook_tables import table  # noqa: E402

from surogate_core import events  # noqa: E402
from surogate_core.app.commands import first_words  # noqa: E402
from surogate_core.cli.main import main as surogate  # noqa: E402

PLUGINS = ("list", "show", "check", "new", "lock", "verify")

CLI = """\
# Command line

<!-- Made by scripts/make_reference.py from the help of each command; change that. -->

Every command answers `--help`. Those that take the configuration of a run accept a YAML file, `KEY=VALUE` overrides, or
both; the override wins. [config.md](config.md) lists the keys, and the forms of an override.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 2 | the input is wrong: one message with the key, the place and the fix |
| 3 | this machine cannot do it: no such GPU, out of memory, disk full |
| 1 | a bug; the traceback is in the run's `surogate.log` |
| 129, 130, 143 | SIGHUP, SIGINT, SIGTERM: a run saves a checkpoint first |
| 128 + n | with several GPUs: signal n ended the process of a rank, for example 137 for SIGKILL |
"""

METRICS = """\
# metrics.jsonl

<!-- Made by scripts/make_reference.py from surogate_core/events.py; change that. -->

A run appends one JSON object a line to `metrics.jsonl` in its directory. `event` names the kind, the other fields are
below. Times are in seconds. Losses are natural-log cross-entropies per label token, unless the task has another
objective (`objective` of `run_start`). NaN and infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. A
resumed run continues the file. Fields are added in new versions, so ignore those that you do not know.

<!-- fragment: needs a run -->
```python
import json
from pathlib import Path

lines = Path("runs/latest/metrics.jsonl").read_text(encoding="utf-8").splitlines()
steps = [row for row in map(json.loads, lines) if row["event"] == "step_end"]
print(steps[-1]["step"], steps[-1]["loss"])
```

The file is written by the monitor `jsonl`, which is on by default. Other programs can read it while the run goes on.
"""


def _help(words: list[str]) -> str:
    """What `surogate WORDS --help` prints, without the list of keys."""
    out = io.StringIO()
    os.environ["COLUMNS"] = "110"
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        surogate([*words, "--help"])
    lines = []
    for line in out.getvalue().splitlines():
        if line == "what is trained:":
            break
        lines.append(line.rstrip())
    return "\n".join(lines).strip() + "\n"


def cli() -> str:
    """The text of docs/cli.md."""
    parts = [CLI, f"\n## surogate\n\n```text\n{_help([])}```\n"]
    for command in first_words():
        parts.append(f"\n## surogate {command}\n\n```text\n{_help([command])}```\n")
        if command == "plugins":
            parts += [f"\n### surogate plugins {sub}\n\n```text\n{_help([command, sub])}```\n" for sub in PLUGINS]
    return "".join(parts)


def metrics() -> str:
    """The text of docs/metrics.md."""
    names = [n.name for n in ast.parse(inspect.getsource(events)).body if isinstance(n, ast.ClassDef)]
    kinds = [cls for cls in (getattr(events, name) for name in names) if _is_event(cls)]
    parts = [METRICS]
    for cls in kinds:
        parts.append(f"\n## {events._with_underscores(cls.__name__)}\n\n{_text(cls)}\n\n{table(cls)}")
    return "".join(parts)


def _is_event(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) and issubclass(cls, events.Event) and cls is not events.Event


def _text(cls: type) -> str:
    paragraphs = inspect.getdoc(cls).replace("``", "`").split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(p.split()), 120) for p in paragraphs)


PAGES = {"cli.md": cli, "metrics.md": metrics}


def main() -> int:
    """Write the pages, or check them."""
    code = 0
    for name, make in PAGES.items():
        file, text = ROOT / "docs" / name, make()
        if "--check" not in sys.argv[1:]:
            file.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")
        elif not file.is_file() or file.read_text(encoding="utf-8") != text:
            print(f"docs/{name} is not current; run: python scripts/make_reference.py", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
