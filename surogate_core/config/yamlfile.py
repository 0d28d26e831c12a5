"""Reading and writing a flat YAML file: plain values, and the line of every key.

YAML as a config author expects it: ``2e-4`` is a number, ``on`` and ``no`` are text, dates are
text, and a key that is there twice is a mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from surogate_core.errors import ConfigError, Problem

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?((\d[\d_]*)?\.\d[\d_]*|\d[\d_]*\.?)([eE][-+]?\d+)?")
_INF = re.compile(r"[-+]?\.inf", re.IGNORECASE)
_NAN = re.compile(r"\.nan", re.IGNORECASE)
_WORDS: Mapping[str, Any] = {"": None, "~": None, "null": None, "true": True, "false": False}

KEYWORD = "keyword argument"
"""The place of a value that Python code passes."""
MAX_BYTES = 1 << 20
"""Size of the largest config file."""
MAX_VALUES = 10_000
"""Values in a config file, each alias counted with all that it repeats: a few lines of aliases can mean billions."""
MAX_DEPTH = 32
"""Mappings and lists inside one another, in a file or an override; Hydra and OmegaConf read them by recursion."""
MAX_DIGITS = 400
"""A number has fewer digits, in a file or an override."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YamlFile:
    """A file's values and places."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int] = field(default_factory=dict)
    """Dotted key (list items by number) → line, from 1."""
    problems: tuple[Problem, ...] = ()

    def where(self, key: str) -> str:
        """``file:line`` of a key, or of the nearest key above it; a keyword argument has no line."""
        while key and key not in self.lines:
            key = key.rpartition(".")[0]
        if key and not self.lines[key]:
            return KEYWORD
        return f"{self.path}:{self.lines[key]}" if key else str(self.path)


Source = Path | YamlFile
"""A file to read, or one that was read."""


def with_keywords(file: YamlFile | None, keywords: Mapping[str, Any]) -> YamlFile:
    """Keyword arguments of Python as the values of a file; each replaces the whole key of `file`."""
    file = file or YamlFile(path=Path(KEYWORD), values={})
    kept = {key: line for key, line in file.lines.items() if key.partition(".")[0] not in keywords}
    return YamlFile(
        path=file.path,
        values={**file.values, **keywords},
        lines={**kept, **dict.fromkeys(_dotted(keywords), 0)},
        problems=tuple(p for p in file.problems if p.key.partition(".")[0] not in keywords),
    )


def _dotted(values: Any, prefix: str = "") -> Iterator[str]:
    items = values.items() if isinstance(values, Mapping) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield f"{prefix}{key}"
        yield from _dotted(value, f"{prefix}{key}.")


def read_yaml(path: Source) -> YamlFile:
    """Read a file; raises `ConfigError` when it cannot be read as YAML at all."""
    if isinstance(path, YamlFile):
        return path
    text = _text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError([_too_deep(path, "YAML", "")]) from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        reason = error.problem or error.context or "not YAML"
        fix = "indent with spaces; a tab is not allowed" if "\\t" in reason else ""
        raise ConfigError(
            [Problem(key="YAML", message=f"{reason.rstrip('.')}.", where=f"{path}:{line}", fix=fix)]
        ) from None
    except yaml.YAMLError as error:
        raise ConfigError([Problem(key=str(path), message=f"not YAML: {' '.join(str(error).split())}.")]) from None
    if root is None:
        return YamlFile(path=path, values={})
    if not isinstance(root, yaml.MappingNode):
        message = "a config file holds `key: value` lines."
        raise ConfigError([Problem(key="YAML", message=message, where=f"{path}:{root.start_mark.line + 1}")])
    reader = _Reader(path)
    values = reader.mapping(root, "")
    return YamlFile(path=path, values=values, lines=reader.lines, problems=tuple(reader.problems))


def _text(path: Path) -> str:
    """The file's text. A pipe or a device is refused: a command reads its file more than once, and neither may end."""
    try:
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "a pipe or a device"
            fix = f"name a file in it: {path / 'run.yaml'}" if path.is_dir() else "write it to a file first"
            message = f"the file cannot be read: it is {kind}."
            raise ConfigError([Problem(key=str(path), message=message, fix=fix)])
        if path.stat().st_size > MAX_BYTES:
            message = f"the file has {path.stat().st_size:,} bytes; a config file has at most {MAX_BYTES:,}."
            raise ConfigError([Problem(key=str(path), message=message, fix="data belongs into a file of `datasets`")])
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError([_no_such_file(path)]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError([Problem(key=str(path), message=f"the file cannot be read: {reason}.")]) from None


def _no_such_file(path: Path) -> Problem:
    try:
        beside = [p.name for p in path.parent.iterdir() if p.suffix in (".yaml", ".yml")]
    except OSError:
        beside = []
    near = get_close_matches(path.name, beside, n=1, cutoff=0.6)
    return Problem(key=str(path), message="there is no such file.", fix=str(path.parent / near[0]) if near else "")


def _too_deep(path: Path, key: str, line: int | str) -> Problem:
    message = f"mappings and lists are nested too deeply; at most {MAX_DEPTH} levels."
    return Problem(key=key, message=message, where=f"{path}:{line}" if line else str(path))


class _Reader:
    """Turns nodes into values, noting lines and mistakes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[str, int] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()
        self._values = 0

    def mapping(self, node: yaml.MappingNode, prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                for source in value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]:
                    if isinstance(source, yaml.MappingNode):
                        merged = (self.value(source, prefix.rstrip(".")) or {}) | merged
                    else:
                        self._problem(f"{prefix}<<", "only mappings can be merged.", line)
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(prefix.rstrip(".") or "YAML", "a key must be plain text.", line)
                continue
            key = f"{prefix}{key_node.value}"
            if key_node.value in values:
                self._problem(key, f"the key is there twice; first on line {self.lines[key]}.", line)
                continue
            self.lines[key] = line
            values[key_node.value] = self.value(value_node, key)
        return merged | values

    def value(self, node: yaml.Node, key: str) -> Any:
        line = node.start_mark.line + 1
        self._values += 1
        if self._values > MAX_VALUES:
            message = f"there are more than {MAX_VALUES:,} values, each alias counted with all that it repeats."
            fix = "write fewer aliases (`*name`) or fewer entries"
            root = key.partition(".")[0]
            raise ConfigError([Problem(key=root, message=message, where=f"{self.path}:{line}", fix=fix)])
        if len(self._open) >= MAX_DEPTH:
            raise ConfigError([_too_deep(self.path, key.partition(".")[0], line)])
        if id(node) in self._open:
            self._problem(key, "an alias contains itself.", line)
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self.mapping(node, f"{key}." if key else "")
            if isinstance(node, yaml.SequenceNode):
                items = []
                for index, item in enumerate(node.value):
                    self.lines[f"{key}.{index}"] = item.start_mark.line + 1
                    items.append(self.value(item, f"{key}.{index}"))
                return items
            assert isinstance(node, yaml.ScalarNode)
            if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python/"):
                self._problem(key, f"the tag {node.tag!r} is not allowed.", line)
                return None
            return node.value if node.style in ("'", '"', "|", ">") else plain_scalar(node.value)
        finally:
            self._open.discard(id(node))

    def _problem(self, key: str, message: str, line: int) -> None:
        self.problems.append(Problem(key=key or "YAML", message=message, where=f"{self.path}:{line}"))


def write_yaml(values: Mapping[str, Any]) -> str:
    """Flat YAML that `read_yaml` reads back as the same values, keys in their order."""
    text: str = yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=100)
    # PyYAML leaves these line breaks as they are, and reads them back as spaces.
    if any(c in text for c in "\x85\u2028\u2029"):
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=False, width=100)
    return text


def plain_scalar(text: str) -> Any:
    """The value of an unquoted scalar."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if len(text) >= MAX_DIGITS:
        return text
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) and not text.lstrip("+-").isdigit():
        return float(text)
    if _INF.fullmatch(text):
        return float(text.replace(".", ""))
    if _NAN.fullmatch(text):
        return float("nan")
    return text
