"""Write surogate/__init__.pyi: `sft`, `pt` and `train` with every key of the configuration, for editors.

With --check nothing is written: exit 1 if it is not current.
"""

from __future__ import annotations

import json
import sys
import textwrap
import types
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_core.bundles.options import field_types  # noqa: E402
from surogate_core.config.docs import field_docs  # noqa: E402
from surogate_core.config.names import flat_keys  # noqa: E402
from surogate_core.config.schema import KEYS, RunConfig  # noqa: E402
from surogate_core.plugins import load_plugins  # noqa: E402

FILE = ROOT / "surogate" / "__init__.pyi"

HEAD = '''\
# Made by scripts/make_stub.py from surogate_core/config/schema.py and the plugins' options; change those.
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, TypeAlias

from surogate_command_eval.python import evaluate as evaluate
from surogate_command_export.python import export as export
from surogate_command_generate.python import generate as generate
from surogate_command_serve.serving import serve as serve

from surogate_core.api.results import HeldOutLoss as HeldOutLoss
from surogate_core.api.results import Paths as Paths
from surogate_core.api.results import Run as Run
from surogate_core.api.results import RunReport as RunReport
from surogate_core.api.results import Sample as Sample
from surogate_core.api.results import load as load
from surogate_core.errors import ConfigError as ConfigError
from surogate_core.errors import MachineError as MachineError
from surogate_core.errors import PluginError as PluginError
from surogate_core.errors import SurogateError as SurogateError
from surogate_core.errors import UserError as UserError
from surogate_core.events import Control as Control
from surogate_core.events import Event as Event

__version__: str

_Path: TypeAlias = str | PathLike[str]
_Choice: TypeAlias = str | Mapping[str, Any]
"""The name of an option, or a mapping with `name` and the option's own keys."""
_Choices: TypeAlias = _Choice | list[str] | list[_Choice]
_Data: TypeAlias = Any
"""A path or several, entries with `path` and `type`, a list of dicts, a datasets.Dataset or a data frame."""
_Callback: TypeAlias = Callable[[Any], Any]
_Callbacks: TypeAlias = _Callback | Mapping[str, _Callback | Iterable[_Callback]] | Iterable[_Callbacks]
'''

TYPES = {
    "datasets": "_Data",
    "validation_datasets": "_Data",
    "model": "_Path | Mapping[str, Any]",
    "monitor": "_Choices",
}
TYPES |= {"plugins": "Mapping[str, Any]", "report_to": "str | list[str] | None"}
TYPES |= dict.fromkeys(("optimizer", "recipe", "offload", "launcher", "fabric", "rollout", "dataset"), "_Choice")
TYPES["environment"] = "_Choice | None"
"""The keys whose type in the schema is not the one that is passed."""
PATHS = ("output_dir", "checkpoint_dir", "adapter_path", "tokenizer", "data_cache_dir", "log_file", "offload_dir")

SUMMARIES = {
    "sft": "Fine-tune a model; returns when the run is over. The same call resumes an interrupted run.",
    "pt": "Pre-train all weights of a model on text; returns when the run is over.",
}
OWN = {
    "config": "A YAML file; keyword arguments win over it.",
    "callbacks": "Functions that receive the run's events, or a mapping from an event's name to a function.",
    "quiet": "Print no progress.",
}


def written(hint: Any) -> str:
    """A type of the schema as the stub writes it."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return written(arguments[0])
    if hint is None or hint is type(None):
        return "None"
    if origin is Literal:
        return f"Literal[{', '.join(json.dumps(a) if isinstance(a, str) else repr(a) for a in arguments)}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(written(argument) for argument in arguments))
    if origin in (list, tuple, set, frozenset):
        return f"list[{written(arguments[0])}]"
    if origin is not None:
        return "Mapping[str, Any]"
    if hint in (int, float, str, bool):
        return str(hint.__name__)
    return "Any" if isinstance(hint, TypeVar) or not isinstance(hint, type) else "Mapping[str, Any]"


def keys() -> dict[str, tuple[str, str]]:
    """Key → (type, documentation) in the order of the schema; the plugins' keys follow."""
    hints, docs = field_types(RunConfig), field_docs(RunConfig)
    found = {key: (TYPES.get(key, written(hints[key])), docs.get(key, "")) for key in KEYS if key != "task"}
    found["dataset"] = (TYPES["dataset"], "A data set that a plugin brings, such as embedded.")
    for key in PATHS:
        found[key] = (found[key][0].replace("str", "_Path"), found[key][1])
    for key, flat in flat_keys(load_plugins()).items():
        first = flat.settings[0]
        if all(setting.kind == "task" for setting in flat.settings):
            continue  # `sft` and `pt` have no options of their own
        text = field_docs(first.options).get(first.option or "", "") if first.options is not None else ""
        found[key] = (written(flat.hint), text or f"Short for {first.group}={first.name}.")
    return found


def function(name: str, found: dict[str, tuple[str, str]]) -> str:
    """The stub of `sft` or `pt`."""
    lines = [f"def {name}(", "    config: _Path | None = None,", "    /,", "    *,"]
    lines += ["    callbacks: _Callbacks = (),", "    quiet: bool = False,"]
    lines += [f"    {key}: {kind} = ...," for key, (kind, _) in found.items()]
    lines += [") -> Run:", f'    """{SUMMARIES[name]}', "", "    Args:"]
    for key, text in {**OWN, **{key: text for key, (_, text) in found.items()}}.items():
        lines.append(
            textwrap.fill(f"{key}: {text}", width=116, initial_indent=" " * 8, subsequent_indent=" " * 12)
            if text
            else f"        {key}:"
        )
    return "\n".join([*lines, '    """']).replace("\\", "\\\\") + "\n"


def make() -> str:
    """The stub's text."""
    found = keys()
    train = "\ndef train(\n    task: str = ...,\n    config: _Path | None = None,\n    /,\n    *,\n"
    train += "    callbacks: _Callbacks = (),\n    quiet: bool = False,\n    **keys: Any,\n) -> Run:\n"
    train += '    """Run a task by its name, also one that a plugin offers."""\n'
    return HEAD + "".join(f"\n{function(name, found)}" for name in SUMMARIES) + train


def main() -> int:
    """Write the file, or check it."""
    text = make()
    if "--check" in sys.argv[1:]:
        current = FILE.is_file() and FILE.read_text(encoding="utf-8") == text
        if not current:
            print(f"{FILE.relative_to(ROOT)} is not current; run: python scripts/make_stub.py", file=sys.stderr)
        return 0 if current else 1
    FILE.write_text(text, encoding="utf-8")
    print(f"wrote {FILE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
