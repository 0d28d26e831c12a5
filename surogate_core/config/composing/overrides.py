"""From a flat YAML file and command-line arguments to Hydra overrides, with the place of each.

Both sources end in one `UserSettings`: a choice per config group and a list of values. The command line overrides
the file. Mistakes are collected, not raised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Glob, Override

from surogate_core.conf_paths import expanded
from surogate_core.config.choices import default_groups
from surogate_core.config.composing.defaults_list import choose_defaults
from surogate_core.config.composing.grammar import KEY, LimitError, NotWritableError, encode, parse_override
from surogate_core.config.composing.own_options import add_directories, own_file
from surogate_core.config.composing.synonyms import in_arguments, in_file
from surogate_core.config.names import (
    COMMAND_LINE,
    DATA_KEYS,
    KEYS,
    LIST_GROUPS,
    OPTIONAL_GROUPS,
    flat_keys,
    schema_defaults,
    unknown_key,
    unknown_name,
)
from surogate_core.config.schema import INSTANTIATE_KEYS
from surogate_core.config.typed import split_names
from surogate_core.config.yamlfile import YamlFile
from surogate_core.errors import Problem
from surogate_core.files.paths import too_long
from surogate_core.plugins.registry import ConfigOption, Registry

HUB_OPTION = "hf"
"""The option of `model` that reads a directory or hub id."""
HYDRA_KEYS = (
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job",
    "hydra.verbose",
    "hydra.launcher",
    "hydra/launcher",
    "hydra.sweeper",
    "hydra/sweeper",
    "hydra.searchpath",
)
"""Hydra's own keys that may be set, with those below them: of sweeps, of logging, of own directories."""
_QUOTE_HINT = "write KEY=VALUE, and put text with brackets, commas or quotes in quotes: 'key=\"a, b\"'"


@dataclass(slots=True)
class GroupChoice:
    """The option(s) chosen in a group."""

    options: list[str]
    """Empty outside list groups: the bundle has no option file, or nothing valid was chosen."""
    where: str
    sweep: str = ""
    """The right-hand side as typed, when it is a sweep."""
    implied: bool = False


@dataclass(slots=True)
class Value:
    """One value, as the right-hand side of an override."""

    key: str
    text: str
    where: str
    sweep: bool = False


@dataclass(slots=True)
class UserSettings:
    """The settings of the user."""

    registry: Registry
    multirun: bool = False
    """Whether values with commas between them are a sweep also where a list is meant."""
    choices: dict[str, GroupChoice] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    deletions: list[Value] = field(default_factory=list)
    hydra: list[str] = field(default_factory=list)
    """Hydra's own overrides, passed on."""
    places: dict[str, str] = field(default_factory=dict)
    """Dotted key → where it was set."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def groups(self) -> frozenset[str]:
        """The config groups, also those whose every plugin is missing."""
        return frozenset(self.registry.options) | frozenset(default_groups()) | OPTIONAL_GROUPS

    @property
    def keys(self) -> frozenset[str]:
        """The flat keys, the plugins' included."""
        return KEYS | flat_keys(self.registry).keys()

    def _options(self, group: str) -> Mapping[str, ConfigOption]:
        return self.registry.options.get(group, {})

    # ------------------------------------------------------------------------- sources

    def add_file(self, file: YamlFile) -> None:
        """Take a flat YAML file's keys; its `defaults` choose first, and its own keys win over them."""
        file = in_file(file)
        self.problems.extend(file.problems)
        for key in file.lines:
            self.places[key] = file.where(key)
        for key, value in file.values.items():
            if key == "hydra" and not _names_objects(value):
                self._add_hydra(key, value, file)
        for key, value in file.values.items():
            where = file.where(key)
            if key == "defaults":
                choose_defaults(self, value, file)
            elif key == "hydra" and not _names_objects(value):
                continue
            elif key in INSTANTIATE_KEYS or _names_objects(value):
                self._refuse_objects(key, where)
            elif key in self.groups:
                self.choose_value(key, value, where)
            elif key in self.keys:
                self.put(key, value, where)
            else:
                self.problems.append(unknown_key(key, where, self.registry, value=value))

    def add_arguments(self, arguments: Sequence[str]) -> None:
        """Take the overrides of the command line."""
        parsed = []
        arguments, problems = in_arguments(arguments, {group: choice.options for group, choice in self.choices.items()})
        self.problems += problems
        for argument in arguments:
            try:
                parsed.append(parse_override(argument))
            except ValueError as error:
                shown = argument if len(argument) <= 80 else f"{argument[:79]}…"
                message = f"cannot be read: {error}."
                fix = "" if isinstance(error, LimitError) else _QUOTE_HINT
                self.problems.append(Problem(key=shown, message=message, where=COMMAND_LINE, fix=fix))
        on_command_line: set[str] = set()
        for override in parsed:
            self._add_override(override, on_command_line)

    def _add_hydra(self, key: str, value: Any, file: YamlFile) -> None:
        """Hydra's own keys in a file, as the overrides that they are."""
        if isinstance(value, Mapping) and value and key not in HYDRA_KEYS:
            for name, item in value.items():
                self._add_hydra(f"{key}.{name}", item, file)
            return
        try:
            if not KEY.fullmatch(key.replace("/", ".")):
                raise ValueError("it is not a config key")
            override = parse_override(f"{key}={encode(value)}")
        except ValueError as error:
            self.problems.append(Problem(key=key, message=f"cannot be read: {error}.", where=file.where(key)))
        else:
            self._add_hydra_override(override, file.where(key))

    def _add_hydra_override(self, override: Override, where: str) -> None:
        key = override.key_or_group
        if _names_objects(override.value()) or any(part in INSTANTIATE_KEYS for part in re.split(r"[./]", key)):
            self._refuse_objects(key, where)
        elif key == "hydra.searchpath":
            self.problems.extend(add_directories(override.value(), self.registry, where))
        elif not any(key == known or key.startswith((f"{known}.", f"{known}/")) for known in HYDRA_KEYS):
            message = f"is Hydra's own; of those only {', '.join(HYDRA_KEYS)} may be set."
            self.problems.append(Problem(key=key, message=message, where=where))
        else:
            assert override.input_line is not None
            self.hydra.append(override.input_line)

    def _add_override(self, override: Override, chosen: set[str]) -> None:
        key = override.key_or_group
        root = key.partition(".")[0]
        if override.is_hydra_override():
            self._add_hydra_override(override, COMMAND_LINE)
            return
        if override.package is not None:
            message = "`group@package` is not supported; every option has its place."
            self.problems.append(Problem(key=f"{key}@{override.package}", message=message, where=COMMAND_LINE))
        elif any(part in INSTANTIATE_KEYS for part in key.split(".")) or (
            not override.is_sweep_override() and _names_objects(override.value())
        ):
            self._refuse_objects(key, COMMAND_LINE)
        elif key in self.groups:
            self._clear_group(key, chosen)
            self._choose_override(override)
            chosen.add(key)
        elif root in self.keys:
            self._value_override(override)
        else:
            value = None if override.is_sweep_override() else override.value()
            self.problems.append(unknown_key(key, COMMAND_LINE, self.registry, value=value))

    def _choose_override(self, override: Override) -> None:
        group = override.key_or_group
        if override.is_delete():
            if group in LIST_GROUPS | OPTIONAL_GROUPS:
                self.choices[group] = GroupChoice([], COMMAND_LINE)
            elif group == "dataset":
                self.choices[group] = GroupChoice(["none"], COMMAND_LINE)
            else:
                message = "a run needs one; choose another option instead of removing it."
                self.problems.append(Problem(key=f"~{group}", message=message, where=COMMAND_LINE))
        elif group in LIST_GROUPS and self._is_list(override):
            self._choose_many(group, [part.strip() for part in _right_hand_side(override).split(",")], COMMAND_LINE)
        elif override.is_sweep_override():
            self._choose_sweep(override)
        else:
            self.choose_value(group, override.value(), COMMAND_LINE)

    def _choose_sweep(self, override: Override) -> None:
        group, text = override.key_or_group, _right_hand_side(override)
        names: list[Any] = []
        pattern: object = override.value()
        if isinstance(pattern, Glob):
            names = list(pattern.filter(sorted(self._options(group))))
            text = ",".join(names)
            if not names:
                known = ", ".join(sorted(self._options(group)))
                message = f"matches no option of {group}; known: {known}."
                shown = f"{group}={_right_hand_side(override)}"
                self.problems.append(Problem(key=shown, message=message, where=COMMAND_LINE))
        elif override.is_choice_sweep():
            names = [Override._convert_value(v) for v in override.sweep_iterator()]
        flat = [str(n) for item in names for n in (item if isinstance(item, list) else [item])]
        if group == "model" and flat and all(self._is_model_path(n) for n in flat):
            self.choices["model"] = GroupChoice([HUB_OPTION], COMMAND_LINE)
            self.values.append(Value("model.path", text, COMMAND_LINE, sweep=True))
            return
        wrong = [name for name in dict.fromkeys(flat) if name not in self._options(group)]
        for name in wrong:
            self._no_option(group, name, COMMAND_LINE)
        # What cannot be swept over is reported above; the rest is checked with one of the options.
        valid = [name for name in flat if name not in wrong]
        sweep = "" if wrong or (names and len(names) == 1) else text
        self.choices[group] = GroupChoice(valid[:1] if not sweep else valid, COMMAND_LINE, sweep=sweep)
        if not valid:
            self.choices.pop(group)

    def _value_override(self, override: Override) -> None:
        key = override.key_or_group
        if override.is_delete():
            self.values = [v for v in self.values if v.key != key and not v.key.startswith(f"{key}.")]
            if "." in key:
                self.deletions.append(Value(key, "", COMMAND_LINE))
            return
        self.values = [v for v in self.values if v.key != key or v.text.startswith("{")]
        text = _right_hand_side(override)
        if override.is_sweep_override() and isinstance(override.value(), Glob):
            message = "glob() is for groups of options; a key has values."
            problem = Problem(key=key, message=message, where=COMMAND_LINE, fix=f"{key}=VALUE,VALUE")
            self.problems.append(problem)
            return
        is_list = isinstance(_schema_default(key), list) or key == "report_to"
        if is_list and self._is_list(override):
            self.put(key, [part.strip().strip("'\"") for part in text.split(",")], COMMAND_LINE)
        elif override.is_sweep_override():
            self.values.append(Value(key, text, COMMAND_LINE, sweep=True))
        elif self._wrong_shape(key, override.value(), COMMAND_LINE):
            return
        else:
            in_list = key in DATA_KEYS and isinstance(override.value(), Mapping)
            self.values.append(Value(key, f"[{text}]" if in_list else text, COMMAND_LINE))
        self.places = {k: w for k, w in self.places.items() if not k.startswith(f"{key}.")}
        self.places[key] = COMMAND_LINE

    # ------------------------------------------------------------------------- choosing

    def choose_value(self, group: str, value: Any, where: str) -> None:
        """Choose in a group by a plain value: a name, a list of names, or a mapping with `name`."""
        if group in LIST_GROUPS:
            self._choose_many(group, value, where)
        elif isinstance(value, str) and value:
            self._choose_name(group, value, where)
        elif isinstance(value, Mapping) and group != "dataset":
            self._choose_mapping(group, dict(value), where)
        elif value is None and group == "dataset":
            self.choices[group] = GroupChoice(["none"], where)
        elif value is None and group in OPTIONAL_GROUPS:
            self.choices[group] = GroupChoice([], where)
        else:
            message = f"must be the name of an option; got {value!r}."
            self.problems.append(Problem(key=group, message=message, where=where, fix=f"{group}: NAME"))

    def _choose_name(self, group: str, name: str, where: str) -> None:
        if name in self._options(group):
            self.choices[group] = GroupChoice([name], where)
            self.places[group] = where
        elif group == "model" and self._is_model_path(name):
            self.choices["model"] = GroupChoice([HUB_OPTION], where)
            self.places["model"] = where
            self.put("model.path", expanded(name), where)
        elif self._has_bundle(group, name):
            self.choices[group] = GroupChoice([], where)
            self.put(f"{group}.name", name, where)
        else:
            self._no_option(group, name, where)

    def _choose_mapping(self, group: str, value: dict[str, Any], where: str) -> None:
        name = value.get("name")
        if group == "model":
            if value.get("path") is not None:
                self.choices["model"] = GroupChoice([HUB_OPTION], where)
            elif isinstance(name, str):
                preset = f"{name}-{value.get('preset')}"
                self._choose_name("model", preset if preset in self._options("model") else name, where)
        elif isinstance(name, str):
            self._choose_name(group, name, where)
            value.pop("name")
        for key, item in value.items():
            self.put(f"{group}.{key}", item, self.places.get(f"{group}.{key}", where))

    def _choose_many(self, group: str, value: Any, where: str) -> None:
        if value is None:
            value = []
        elif isinstance(value, str):
            value = [value]
        elif isinstance(value, Mapping):
            is_one = isinstance(value.get("name"), str)
            value = [value] if is_one else [self._named(group, k, v, where) for k, v in value.items()]
        chosen: list[str] = []
        if not isinstance(value, list):
            message = f"must be a list of names; got {value!r}."
            self.problems.append(Problem(key=group, message=message, where=where, fix=f"{group}: [NAME, …]"))
            return
        for index, item in enumerate(value):
            place = self.places.get(f"{group}.{index}", where)
            entry = {"name": item} if isinstance(item, str) else item
            if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
                message = f"must be a name, or a mapping with `name`; got {item!r}."
                self.problems.append(Problem(key=f"{group}.{index}", message=message, where=place))
                continue
            name = entry["name"]
            if name in self._options(group):
                chosen.append(name)
            elif self._has_bundle(group, name):
                self.put(f"{group}.{name}.name", name, place)
            else:
                self._no_option(group, name, place)
            for key, sub in entry.items():
                if key != "name":
                    self.put(f"{group}.{name}.{key}", sub, self.places.get(f"{group}.{index}.{key}", place))
        self.choices[group] = GroupChoice(chosen, where)
        self.places[group] = where

    def _named(self, group: str, name: str, options: Any, where: str) -> dict[str, Any]:
        """An entry of a list group that is written as a mapping of names."""
        if options is not None and not isinstance(options, Mapping):
            message = f"must be a mapping of the options of {name}; got {options!r}."
            place = self.places.get(f"{group}.{name}", where)
            self.problems.append(Problem(key=f"{group}.{name}", message=message, where=place, fix=f"{group}: [{name}]"))
            options = None
        return {"name": name, **(options or {})}

    def put(self, key: str, value: Any, where: str) -> None:
        """Set a key to a plain value."""
        if not KEY.fullmatch(key):
            self.problems.append(Problem(key=key, message="is not a config key.", where=where))
            return
        value = [value] if key in DATA_KEYS and isinstance(value, Mapping) else value
        if self._wrong_shape(key, value, where):
            return
        try:
            self.values.append(Value(key, encode(value), where))
        except NotWritableError as error:
            self.problems.append(Problem(key=key, message=f"{error}.", where=where))
        self.places.setdefault(key, where)

    def _wrong_shape(self, key: str, value: Any, where: str) -> bool:
        """Refuse a list for a mapping and the reverse, which Hydra would end on before it reads the other keys."""
        default = _schema_default(key)
        if isinstance(default, list) and isinstance(value, Mapping) and key not in DATA_KEYS:
            fix = f"{key}: [{', '.join(encode(v) for v in value.values())}]"
            problem = Problem(key=key, message="must be a list; got one mapping.", where=where, fix=fix)
        elif isinstance(default, Mapping) and not isinstance(value, Mapping) and not _is_interpolation(value):
            fix = f"{key}: {{{next(iter(default), 'KEY')}: VALUE}}"
            problem = Problem(key=key, message=f"must be a mapping; got {value!r}.", where=where, fix=fix)
        else:
            return False
        self.problems.append(problem)
        return True

    # ------------------------------------------------------------------------ the result

    def imply(self) -> None:
        """The choices that follow from others: own data leaves the embedded set, a path chooses `model=hf`."""
        own = [v for v in self.values if v.key == "datasets"]
        chosen = self.choices.get("dataset")
        if own and (chosen is None or (chosen.where != COMMAND_LINE and own[-1].where == COMMAND_LINE)):
            self.choices["dataset"] = GroupChoice(["none"], own[-1].where, implied=True)
        path = [v for v in self.values if v.key == "model.path" and v.text != "null"]
        if path:
            model = self.choices.setdefault("model", GroupChoice([HUB_OPTION], path[-1].where, implied=True))
            if model.where != COMMAND_LINE and path[-1].where == COMMAND_LINE:
                self.choices["model"] = GroupChoice([HUB_OPTION], COMMAND_LINE, implied=True)
            elif model.options != [HUB_OPTION]:
                message = f"the preset model={','.join(model.options)} and model.path are both given."
                self.problems.append(Problem(key="model", message=message, where=model.where, fix="model=PATH"))

        self.registry.left_out.clear()
        self._add_reported_to()
        self._check_defaults()

    def _add_reported_to(self) -> None:
        """`report_to` names further monitors; what is no list of names is left to the schema."""
        given = [v for v in self.values if v.key == "report_to" and not v.sweep]
        names = parse_override(f"report_to={given[-1].text}").value() if given else None
        names = split_names(names) if isinstance(names, str) else names
        chosen = self.choices.get("monitor")
        if not isinstance(names, list) or (chosen is not None and chosen.sweep):
            return
        options = list(chosen.options) if chosen else self._installed_defaults("monitor")
        for name in names:
            if not isinstance(name, str):
                return
            if name not in self._options("monitor"):
                known = self._options("monitor")
                where = given[-1].where
                self.problems.append(unknown_name("monitor", name, where, self.registry, known, "report_to"))
            elif name not in options:
                options.append(name)
        where = chosen.where if chosen else given[-1].where
        self.choices["monitor"] = GroupChoice(options, where, implied=chosen is None)

    def _check_defaults(self) -> None:
        """The default options may be missing too, when their plugin is not installed, blocked or broken."""
        refused = {p.key.partition("=")[0] for p in self.problems}
        for group, default in default_groups().items():
            if group in self.choices:
                continue
            names = self._installed_defaults(group) if group in LIST_GROUPS else [default]
            missing = [n for n in names if n not in self._options(group)]
            if group not in refused:
                for name in missing:
                    self._no_option(group, name, "the default")
            if missing or (group in LIST_GROUPS and names != default):
                self.choices[group] = GroupChoice([n for n in names if n not in missing], "the default", implied=True)

    def _installed_defaults(self, group: str) -> list[str]:
        """The default options of a list group without those of plugins that are not installed, which a run can do
        without: the registry keeps their names for a note."""
        found = []
        for name in default_groups()[group]:
            known = self._options(group)
            needs = "" if name in known else self.registry.explain_missing(group, name, known).needs
            if needs:
                self.registry.left_out[name] = needs
            else:
                found.append(name)
        return found

    def overrides(self) -> list[str]:
        """Everything as Hydra overrides, groups first."""
        lines = list(self.hydra)
        for group, choice in self.choices.items():
            prefix = "" if group in default_groups() else "+"
            if choice.sweep:
                lines.append(f"{prefix}{group}={choice.sweep}")
            elif group in LIST_GROUPS:
                lines.append(f"{prefix}{group}={encode(choice.options)}")
            elif not choice.options:
                lines += [f"~{group}"] if not prefix else []
            else:
                lines.append(f"{prefix}{group}={encode(choice.options[0])}")
        for value in self.values:
            known = value.key in KEYS and value.key not in self.groups
            lines.append(f"{'' if known else '++'}{value.key}={value.text}")
        return lines + [f"~{d.key}" for d in self.deletions]

    def is_set(self, key: str) -> bool:
        """Whether the file or the command line sets exactly this dotted key."""
        return key in self.places

    def where(self, key: str) -> str:
        """Where a key of the composed config was set; the option's file for what a group brought."""
        path = key
        while path:
            if path in self.places:
                return self.places[path]
            path = path.rpartition(".")[0]
        if (own := self._in_own_file(key)) is not None:
            return own
        root, _, rest = key.partition(".")
        options = self.registry.options.get(root, {})
        chosen = self.choices[root].options if root in self.choices else default_groups().get(root)
        names = [chosen] if isinstance(chosen, str) else list(chosen or ())
        if root in LIST_GROUPS:
            names = [n for n in names if n == rest.partition(".")[0]]
        return str(options[names[0]].file) if len(names) == 1 and names[0] in options else ""

    def _in_own_file(self, key: str) -> str | None:
        """The line of a key in the chosen option files of the user's own directories."""
        for group, choice in self.choices.items():
            for option in (self._options(group).get(name) for name in choice.options):
                file = own_file(option) if option is not None else None
                path = key.removeprefix(f"{group}.")
                if file is not None and (path in file.lines or key.partition(".")[0] in file.lines):
                    return file.where(path)
        return None

    # --------------------------------------------------------------------------- details

    def _is_list(self, override: Override) -> bool:
        """Whether ``a,b``, which Hydra reads as a sweep, is a list here."""
        return not self.multirun and override.is_choice_sweep() and "(" not in _right_hand_side(override)

    def _clear_group(self, group: str, chosen: set[str]) -> None:
        """Forget what the file said of a group that the command line chooses anew."""
        if group in chosen:
            return
        self.choices.pop(group, None)
        keys = ("datasets", "validation_datasets") if group == "dataset" else (group,)
        self.values = [v for v in self.values if v.where == COMMAND_LINE or v.key.partition(".")[0] not in keys]
        self.places = {k: w for k, w in self.places.items() if w == COMMAND_LINE or k.partition(".")[0] not in keys}

    def _has_bundle(self, group: str, name: str) -> bool:
        from surogate_core.bundles import KINDS

        return group in KINDS and group not in ("model", "dataset", "task") and name in self.registry.bundles(group)

    def _is_model_path(self, name: str) -> bool:
        if name in self._options("model"):
            return False
        return "/" in name or name.startswith((".", "~")) or (not too_long(name) and Path(name).is_dir())

    def _no_option(self, group: str, name: str, where: str) -> None:
        self.problems.append(unknown_name(group, name, where, self.registry, self._options(group)))

    def _refuse_objects(self, key: str, where: str) -> None:
        message = "a config cannot name Python objects to call (`_target_` and its like)."
        self.problems.append(Problem(key=key, message=message, where=where, fix="choose what a plugin registered"))


def _schema_default(key: str) -> Any:
    """The default of a dotted key, None outside the schema."""
    node: Any = schema_defaults()
    for part in key.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def _names_objects(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(k in INSTANTIATE_KEYS or _names_objects(v) for k, v in value.items())
    return isinstance(value, list) and any(_names_objects(v) for v in value)


def _right_hand_side(override: Override) -> str:
    assert override.input_line is not None
    return override.input_line.partition("=")[2]


__all__ = [
    "COMMAND_LINE",
    "GroupChoice",
    "UserSettings",
    "Value",
    "unknown_key",
    "unknown_name",
]
