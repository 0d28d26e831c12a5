"""Mappings that set the options of a config group under another name, such as `distributed` for a launcher's.

``synonyms.yaml`` lists them. They are rewritten where a file or the command line is read, so that the rest of the
configuration knows one form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from surogate_core.config.composing.grammar import NotWritableError, encode, parse_override
from surogate_core.config.names import COMMAND_LINE
from surogate_core.config.yamlfile import YamlFile
from surogate_core.errors import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Synonym:
    """A mapping that chooses an option of a group and sets some of its keys."""

    group: str
    name: str
    keys: tuple[str, ...]


def _read() -> dict[str, Synonym]:
    found = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {root: Synonym(**{**values, "keys": tuple(values["keys"])}) for root, values in found.items()}


SYNONYMS: Mapping[str, Synonym] = _read()
"""Mapping → what it sets."""

_ARGUMENT = re.compile(rf"(?P<mark>~|\+{{0,2}})(?P<root>{'|'.join(SYNONYMS)})(?P<rest>[.=@].*)?", re.DOTALL)


def in_file(file: YamlFile) -> YamlFile:
    """The file with each synonym written as its group, with the lines of the synonym's keys, and the mistakes."""
    for root in SYNONYMS.keys() & file.values.keys():
        file = _renamed(file, root, SYNONYMS[root])
    return file


def _renamed(file: YamlFile, root: str, synonym: Synonym) -> YamlFile:
    values, group = dict(file.values), synonym.group
    given, chosen = values.pop(root), values.get(group)
    node = dict(chosen) if isinstance(chosen, Mapping) else {"name": chosen} if chosen is not None else {}
    problems, lines = [*file.problems], dict(file.lines)
    if given is None:
        return replace(file, values=values)
    if not isinstance(given, Mapping):
        problems.append(_no_mapping(root, synonym, given, file.where(root)))
        return replace(file, values=values, problems=tuple(problems))
    if (problem := _other_choice(root, synonym, node.get("name"), file.where(root))) is not None:
        return replace(file, values=values, problems=(*problems, problem))
    for name, value in given.items():
        key, full, where = f"{root}.{name}", f"{group}.{name}", file.where(f"{root}.{name}")
        if name not in synonym.keys:
            problems.append(_no_key(key, synonym, where))
        elif name in node and node[name] != value:
            problems.append(_twice(key, value, full, node[name], where))
        else:
            node[name] = value
            lines[full] = file.lines.get(key, file.lines.get(root, 0))
    lines.setdefault(group, file.lines.get(root, 0))
    values[group] = {"name": synonym.name, **node}
    return replace(file, values=values, lines=lines, problems=tuple(problems))


def in_arguments(arguments: Sequence[str], chosen: Mapping[str, Sequence[str]]) -> tuple[list[str], list[Problem]]:
    """The arguments of the command line with each synonym written as its group, and the mistakes.

    `chosen`: group → the options that the file chooses.
    """
    found: list[str] = []
    problems: list[Problem] = []
    used: dict[str, list[str]] = {}
    direct = dict(text.lstrip("+").partition("=")[::2] for text in arguments)
    for text in arguments:
        match = _ARGUMENT.fullmatch(text)
        if match is None:
            found.append(text)
            continue
        root, rest = match["root"], match["rest"] or ""
        synonym = SYNONYMS[root]
        items = [rest] if rest.startswith(".") else _items(root, synonym, match["mark"], rest, problems)
        for item in items:
            name, equals, value = item[1:].partition("=")
            full = f"{synonym.group}.{name}"
            if name not in synonym.keys:
                problems.append(_no_key(f"{root}.{name}", synonym, COMMAND_LINE))
                continue
            own = used.setdefault(root, [])
            if equals and direct.get(full, value) != value:
                problems.append(_twice(f"{root}.{name}", value, full, direct[full], COMMAND_LINE))
            else:
                own.append(f"{match['mark']}{full}{equals}{value}")
    for root, own in used.items():
        synonym = SYNONYMS[root]
        given = direct.get(synonym.group)
        is_name = given is not None and not given.startswith("{")
        if is_name and (problem := _other_choice(root, synonym, given, COMMAND_LINE)) is not None:
            problems.append(problem)
            continue
        if given is None and list(chosen.get(synonym.group, ())) != [synonym.name]:
            found.insert(0, f"{synonym.group}={synonym.name}")
        found += own
    return found, problems


def _items(root: str, synonym: Synonym, mark: str, rest: str, problems: list[Problem]) -> list[str]:
    """The keys of a whole mapping on the command line, each as ``.KEY=VALUE``."""
    try:
        value = parse_override(f"{root}{rest}").value() if rest.startswith("=") and mark != "~" else rest
        if value is None:
            return []
        if isinstance(value, Mapping):
            return [f".{name}={encode(item)}" for name, item in value.items()]
    except (ValueError, NotWritableError) as error:
        problems.append(Problem(key=root, message=f"cannot be read: {error}.", where=COMMAND_LINE))
        return []
    if mark == "~":
        fix = f"{synonym.group}=local" if synonym.group == "launcher" else ""
        problems.append(Problem(key=f"~{root}", message="cannot be removed.", where=COMMAND_LINE, fix=fix))
    else:
        problems.append(_no_mapping(root, synonym, value, COMMAND_LINE))
    return []


def _no_mapping(root: str, synonym: Synonym, value: Any, where: str) -> Problem:
    shown = f"{root}.{synonym.keys[1]}=VALUE" if where == COMMAND_LINE else f"{root}: {{{synonym.keys[1]}: VALUE}}"
    return Problem(key=root, message=f"must be a mapping; got {value!r}.", where=where, fix=shown)


def _no_key(key: str, synonym: Synonym, where: str) -> Problem:
    root, _, name = key.rpartition(".")
    near = get_close_matches(name, synonym.keys, n=1, cutoff=0.6)
    message = f"there is no such key; known here: {', '.join(synonym.keys)}."
    return Problem(key=key, message=message, where=where, fix=f"{root}.{near[0]}" if near else "")


def _twice(key: str, value: Any, full: str, other: Any, where: str) -> Problem:
    message = f"is {value}, and {full}, which is the same option, is {other}."
    return Problem(key=key, message=message, where=where, fix="keep one")


def _other_choice(root: str, synonym: Synonym, name: Any, where: str) -> Problem | None:
    """The mistake of setting options of one choice while another one is chosen."""
    if name in (None, synonym.name):
        return None
    message = f"sets options of {synonym.group}={synonym.name}, and {synonym.group} is {name}."
    fix = f"{synonym.group}={synonym.name}, or leave out {root}"
    return Problem(key=root, message=message, where=where, fix=fix)
