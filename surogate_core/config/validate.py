"""From the composed mapping to a `RunConfig`, or every mistake in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from surogate_core.bundles.fabrics import FabricSpec
from surogate_core.bundles.offloaders import OffloaderSpec
from surogate_core.bundles.options import field_types, flat_marks, flat_values, options_from_flat
from surogate_core.bundles.tasks import TaskSpec
from surogate_core.config import offload, peers, sharing
from surogate_core.config.checks import RULES, model_dtype
from surogate_core.config.choices import offloader_of_keys
from surogate_core.config.flat import FlatValues
from surogate_core.config.model_keys import unknown_model_keys
from surogate_core.config.names import (
    COMMAND_LINE,
    LIST_GROUPS,
    NAMED,
    OPTIONAL_GROUPS,
    SELECTIONS,
    named_for,
    unknown_key,
    unknown_name,
)
from surogate_core.config.places import PLACES_READ, check_places, expand_home
from surogate_core.config.schema import INSTANTIATE_KEYS, KEYS, ModelSelection, RunConfig, Selection
from surogate_core.config.typed import Builder, split_names
from surogate_core.errors import PluginError, Problem
from surogate_core.files.paths import too_long
from surogate_core.files.prompts import fault_of
from surogate_core.plugins.flat_keys import CHOSEN_BY, PART_KINDS
from surogate_core.plugins.functions import code_of, mistake
from surogate_core.plugins.registry import Registry

_ENVIRONMENTS = (
    "environment=problems with environment.path, for questions with answers, or environment=trl with environment.path "
    "and environment.reward_funcs"
)
"""What to set in place of data for a task whose prompts come from an environment."""


def validate(
    values: Mapping[str, Any], registry: Registry, where: Callable[[str], str], is_set: Callable[[str], bool]
) -> tuple[RunConfig | None, list[Problem]]:
    """Check a composed mapping against the schema and against what the plugins offer."""
    check = _Validator(registry, where)
    check.refuse_objects(values, "")
    if check.problems:
        return None, check.problems
    check.flat = FlatValues(values, registry, check.builder, is_set)
    built: dict[str, Any] = {}
    hints = {key: hint for key, hint in field_types(RunConfig).items() if key in KEYS}
    for key, value in values.items():
        if key in check.flat.keys:
            continue
        if key not in hints and key in registry.options:
            message = f"{key} is not a key of a run: an option of {key} sets the run's keys directly."
            fix = "begin the option's file with `# @package _global_`"
            check.problems.append(Problem(key=key, message=message, where=where(key), fix=fix))
        elif key not in hints:
            check.problems.append(unknown_key(key, where(key), registry))
        elif key == "model":
            built[key] = check.model(value)
        elif key in OPTIONAL_GROUPS and value is None:
            built[key] = None
        elif key in SELECTIONS:
            built[key] = check.selection(key, value, key)
        elif key in LIST_GROUPS:
            built[key] = check.selections(key, value)
        elif key in ("datasets", "validation_datasets"):
            built[key] = check.datasets(key, value)
        elif key == "sample_prompts":
            built[key] = check.sample_prompts(key, value)
        else:
            built[key] = check.value(hints[key], value, key)
    check.defaults(built)
    check.problems.extend(check.builder.problems)
    check.task(built)
    check.flat_keys(built)
    check.weight_format(built)
    check.task_options(built)
    check.named(built)
    check.offload(built)
    check.fabric(built)
    check.contradictions(built)
    check.recipe(built)
    check.optimizer(built)
    config = RunConfig(**built)
    wrong_keys = {p.key.partition(".")[0] for p in check.problems}
    if not wrong_keys & PLACES_READ:
        check.problems += check_places(config, where)
    if built["offload"] is not None and not wrong_keys & sharing.OFF_THE_DEVICE:
        check.off_the_device(config)
    if not check.problems:
        check.task_check(config)
    return (None, check.problems) if check.problems else (expand_home(config), [])


DEFAULT_TYPE = "auto"
"""The type of a data set that names none: found from its rows."""


def entries_of(value: Any) -> list[Any] | None:
    """The entries of a list of data sets, also written as one path, paths with commas, or one mapping."""
    if isinstance(value, str):
        # A file's name may have a comma.
        value = [value] if not too_long(value) and Path(value).exists() else split_names(value)
    elif isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        return None
    return [{"path": entry} if isinstance(entry, str) else entry for entry in value]


class _Validator:
    def __init__(self, registry: Registry, where: Callable[[str], str]) -> None:
        self.registry = registry
        self.where = where
        self.problems: list[Problem] = []
        self.builder = Builder(where, self._unknown)
        self.flat: FlatValues
        """Set by `validate`."""

    def _unknown(self, key: str, known: Iterable[str]) -> Problem:
        return unknown_key(key, self.where(key), self.registry, known)

    def _problem(self, key: str, message: str, fix: str = "") -> None:
        self.problems.append(Problem(key=key, message=message, where=self.where(key), fix=fix))

    def refuse_objects(self, value: Any, key: str) -> None:
        """Refuse Hydra's instantiation keys anywhere."""
        items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
        for name, item in items:
            path = f"{key}.{name}" if key else str(name)
            if name in INSTANTIATE_KEYS:
                self._problem(path, "a config cannot name Python objects to call.", "remove it")
            self.refuse_objects(item, path)

    def defaults(self, built: dict[str, Any]) -> None:
        """Fill what no config file set."""
        for field in fields(RunConfig):
            if field.name in KEYS and field.name not in built:
                default = field.default_factory() if field.default_factory is not MISSING else field.default
                if isinstance(default, Selection):
                    default = self.selection(field.name, {"name": default.name}, field.name)
                built[field.name] = default

    def value(self, hint: Any, value: Any, key: str) -> Any:
        """A value of the key's type; one that other trainers have for it is a mistake with a fix."""
        # A plugin may offer the name that another trainer uses.
        peer = peers.of_value(key, value) if key not in NAMED.values() else None
        if peer is not None:
            self._problem(key, f"{value!r} is not known here.", peer.fix(command_line=self.where(key) == COMMAND_LINE))
            return None
        return self.builder.value(hint, value, key)

    # ------------------------------------------------------------------------ selections

    def selection(self, kind: str, value: Any, key: str) -> Selection | None:
        """A bundle and its options."""
        if not isinstance(value, Mapping) or not isinstance(value.get("name"), str):
            self._problem(key, "nothing is chosen here: `name` is missing.", f"{kind}: NAME")
            return None
        name = value["name"]
        bundle = self._bundle(kind, name, f"{key}.name")
        if bundle is None:
            return None
        options = {k: v for k, v in value.items() if k != "name"}
        cls = self._options_type(kind, name, bundle.options, key)
        if cls is None:
            return None
        options, problems = self.flat.merged(cls, options, key)
        self.problems += problems
        built = self.builder.dataclass(cls, options, f"{key}.")
        for field, text, mark in code_of(built) if built is not None else ():
            if (wrong := mistake(text, self.registry.policy, mark=mark)) is not None:
                self._problem(f"{key}.{field}", wrong)
        return Selection(name=name, options=built)

    def selections(self, kind: str, value: Any) -> list[Selection | None]:
        """The bundles of a list group, composed as one node each."""
        if not isinstance(value, Mapping):
            self._problem(kind, f"must be chosen by names; got {value!r}.", f"{kind}=[NAME,…]")
            return []
        if isinstance(value.get("name"), str):
            file = self.registry.options.get(kind, {}).get(value["name"])
            place = f"option {kind}={value['name']}" + (f" of {file.plugin.label}" if file else "")
            self._problem(kind, f"{place} must begin with `# @package {kind}.{value['name']}`.")
            return []
        return [self.selection(kind, node, f"{kind}.{name}") for name, node in value.items()]

    def _bundle(self, kind: str, name: str, key: str) -> Any:
        try:
            offered = self.registry.bundles(kind).get(name)
        except PluginError as error:
            self._problem(kind, str(error))
            return None
        if offered is None:
            names = self.registry.names(kind)
            shown = key if kind == "dataset" else ""
            self.problems.append(unknown_name(kind, name, self.where(key), self.registry, names, shown))
            return None
        return offered.bundle

    def _options_type(self, kind: str, name: str, cls: type, key: str) -> type | None:
        try:
            field_types(cls)
        except Exception as error:
            label = self.registry.bundles(kind)[name].plugin.label
            self._problem(
                key, f"{label}: the options of {kind} {name} are not a readable dataclass: {str(error).rstrip('.')}."
            )
            return None
        return cls

    # ----------------------------------------------------------------------------- model

    def model(self, value: Any) -> ModelSelection | None:
        """The model node."""
        if not isinstance(value, Mapping):
            self._problem("model", f"must be a mapping; got {value!r}.", "model: NAME_OR_PATH")
            return None
        missing_path = value.get("path") == "???"
        if missing_path:
            self._problem("model.path", "must be set: a directory or hub id.", "model=DIR_OR_HUB_ID")
        values = {k: v for k, v in value.items() if not (k == "path" and missing_path)}
        model = self.builder.dataclass(ModelSelection, values, "model.")
        if model is None or missing_path:
            return None
        assert isinstance(model, ModelSelection)
        if model.path is None and model.preset is None:
            self._problem("model", "neither `path` nor `preset` is set.", "model=DIR_OR_HUB_ID")
        if model.name == "auto":
            if model.path is None:
                self._problem("model.name", "auto reads the family from the model's config.json: set `model.path`.")
            return model
        family = self._bundle("model", model.name, "model.name")
        if (
            family is not None
            and model.path is None
            and model.preset is not None
            and model.preset not in family.presets
        ):
            near = get_close_matches(model.preset, list(family.presets), n=1, cutoff=0.3)
            known = ", ".join(sorted(family.presets)) or "none"
            message = f"{model.name} has no preset {model.preset!r}; known: {known}."
            self._problem("model.preset", message, f"model.preset={near[0]}" if near else "")
        elif family is not None and model.path is None and model.preset is not None:
            for problem in unknown_model_keys(model.config, family.presets[model.preset], family.hf_model_types):
                self._problem(problem.key, problem.message, problem.fix)
        return model

    # -------------------------------------------------------------------------- data sets

    def datasets(self, key: str, value: Any) -> list[dict[str, Any]]:
        """The entries of a list of data sets, checked against the options of their type."""
        from surogate_core.data.rows.sources import SourceSpec

        value = entries_of(value)
        if value is None:
            self._problem(key, "must be a path or a list of paths and mappings.", f"{key}: [{{path: my.jsonl}}]")
            return []
        common = field_types(SourceSpec)
        entries = []
        for index, entry in enumerate(value):
            path = f"{key}.{index}"
            if not isinstance(entry, Mapping):
                self._problem(path, f"must be a path, or a mapping with `path`; got {entry!r}.", "{path: my.jsonl}")
                continue
            entry = {**entry, "type": DEFAULT_TYPE} if entry.get("type") is None else entry
            type_name = entry["type"]
            format_ = None
            if not isinstance(type_name, str):
                self._problem(f"{path}.type", f"must be text; got {type_name!r}.", DEFAULT_TYPE)
            else:
                format_ = self._bundle("dataset", type_name, f"{path}.type")
            self.builder.dataclass(SourceSpec, {k: v for k, v in entry.items() if k in common}, f"{path}.")
            if format_ is not None:
                self._format_options(type_name, format_, entry, set(common), path)
            entries.append(dict(entry))
        return entries

    def _format_options(self, name: Any, format_: Any, entry: Mapping[str, Any], common: set[str], path: str) -> None:
        cls = self._options_type("dataset", name, format_.options, path)
        if cls is None:
            return
        allowed = field_types(cls)
        known = common | {"type"} | set(allowed)
        for unknown in [k for k in entry if k not in known]:
            self.problems.append(self._unknown(f"{path}.{unknown}", known))
        self.builder.dataclass(cls, {k: v for k, v in entry.items() if k in allowed}, f"{path}.")

    def sample_prompts(self, key: str, value: Any) -> list[Any]:
        """The entries of a list of prompts, also written as one text or one mapping."""
        found = [value] if isinstance(value, str | Mapping) else [] if value is None else value
        if not isinstance(found, list):
            self._problem(key, f"must be a text or a list of prompts; got {value!r}.", f'{key}: ["…"]')
            return []
        for index, entry in enumerate(found):
            place = f"{key}.{index}"
            if isinstance(entry, str):
                if not entry.strip():
                    self._problem(place, "is empty.", "give the text to continue")
            elif (fault := fault_of(entry)) is not None:
                self._problem(place, *fault)
        return found

    # --------------------------------------------------------------------- contradictions

    def task(self, built: dict[str, Any]) -> None:
        """Compare what the run trains with what the task can train."""
        name = built["task"]
        if not isinstance(name, str):
            return
        specs = {name: provided.bundle for name, provided in sorted(self.registry.bundles("task").items())}
        if name not in specs:
            self.problems.append(unknown_name("task", name, self.where("task"), self.registry, specs))
            return
        spec: TaskSpec = specs[name]
        if built["lora"] is True and not spec.adapters:
            same = [
                s for s in specs.values() if s.needs_data and s.group == spec.group and s.objective == spec.objective
            ]
            able = " or ".join(other.name for other in same if other.adapters)
            message = f"must be false in task {name}, which trains every weight."
            self._problem("lora", message, f"lora: false, or task {able}" if able else "lora: false")
        if spec.objective is not None and (chosen := built["objective"]) != RunConfig().objective:
            self._problem("objective", f"is {chosen}, and task {name} has an objective of its own.", "remove it")
        if spec.online is not None and isinstance(built["gpus"], int):
            for problem in sharing.online_problems(name, built):
                self._problem(problem.key, problem.message, problem.fix)
        shared = built["context_parallel_size"]
        if isinstance(shared, int) and shared > 1 and (spec.online is not None or spec.objective is not None):
            message = f"is {shared}, and task {name} needs whole rows on one GPU; only sft and pt share them."
            self._problem("context_parallel_size", message, "context_parallel_size: 1")
        if not spec.needs_data and built["epoch_adjustment"] is True:
            message = f"is true, and task {name} has no data whose size it knows."
            self._problem("epoch_adjustment", message, "epoch_adjustment: false, and max_steps")
        if spec.needs_data:
            if not built["datasets"] and not any(p.key.startswith("datasets") for p in self.problems):
                self._problem("datasets", "there is no training data.", "datasets=my.jsonl, or dataset=embedded")
        else:
            for key in ("datasets", "validation_datasets"):
                if built[key] and self.flat.is_set(key):
                    fix = f"remove `{key}`" if spec.online is None else f"in place of `{key}`: {_ENVIRONMENTS}"
                    self._problem(key, f"task {name} reads no data set.", fix)
                built[key] = []

    def task_options(self, built: dict[str, Any]) -> None:
        """Take the options of the chosen task, which only flat keys set."""
        spec = self._task(built)
        cls = None if spec is None else self._options_type("task", spec.name, spec.options, "task")
        if cls is None:
            return
        self._own_options(cls, "task", built)
        assert spec is not None
        self.problems += self.flat.without_use(self._parts(spec, built))
        for key, example in spec.needs.items():
            if built["flat"].get(key) is None and not any(p.key == key for p in self.problems):
                self._problem(key, f"is not set, and task {built['task']} needs it.", f"{key}={example}")

    def _task(self, built: Mapping[str, Any]) -> TaskSpec | None:
        """The chosen task; None if no plugin offers it, which is a mistake elsewhere."""
        offered = self.registry.bundles("task").get(built["task"]) if isinstance(built["task"], str) else None
        return None if offered is None else offered.bundle

    def _parts(self, spec: TaskSpec, built: dict[str, Any]) -> dict[str, list[str]]:
        """Take the options of what the task's options choose; kind → what is chosen of it."""
        wrong_keys = {p.key.partition(".")[0] for p in self.problems}
        if wrong_keys & {mark.key for mark in flat_marks(spec.options).values()}:
            return {}
        chosen = {} if spec.parts is None else spec.parts(options_from_flat(spec.options, built["flat"]), self.registry)
        for kind, name in chosen.items():
            key = CHOSEN_BY.get(kind, kind)
            if (cls := self._offered_options(kind, name, key)) is not None:
                self._own_options(cls, key, built)
        return {kind: [chosen[kind]] if kind in chosen else [] for kind in PART_KINDS}

    def task_check(self, config: RunConfig) -> None:
        """Ask the chosen task what is wrong with a configuration."""
        spec: TaskSpec = self.registry.bundles("task")[config.task].bundle
        if spec.check is not None:
            found = spec.check(config, spec.options_of(config), self.registry)
            self.problems += [replace(problem, where=self.where(problem.key)) for problem in found]

    def _own_options(self, cls: type, key: str, built: dict[str, Any]) -> None:
        """Add the options of a chosen bundle to the flat values of the run."""
        options, _ = self.flat.merged(cls, {}, key)
        before = len(self.builder.problems)
        built["flat"] = {**built["flat"], **flat_values(self.builder.dataclass(cls, options, f"{key}."))}
        self.problems += self.builder.problems[before:]

    def offload(self, built: dict[str, Any]) -> None:
        """Hold the keys that move tensors against what the offloader and the recipe can do."""
        # A weight format always keeps weights quantised, under every recipe.
        if built["persistent_quants"] is True and built["recipe"] is not None and built["weight_format"] is None:
            recipes = {name: provided.bundle for name, provided in sorted(self.registry.bundles("recipe").items())}
            if not recipes[built["recipe"].name].packs:
                able = " or ".join(name for name, other in recipes.items() if other.packs)
                message = f"recipe {built['recipe'].name} quantises no frozen weight at load, nor does a qlora key."
                fix = f"a qlora key, or recipe: {able}" if able else "a qlora key, or persistent_quants: false"
                self._problem("persistent_quants", message, fix)
        if not offload.asked(built) or built["offload"] is None:
            return
        if built["offload"].name == "none":
            built["offload"] = self.selection("offload", {"name": offloader_of_keys()}, "offload")
            if built["offload"] is None:
                return
        name = built["offload"].name
        offered = self.registry.bundles("offload")[name].bundle.kinds
        for key, wanted in {**offload.KINDS, offload.EXPERTS: frozenset({"weights"})}.items():
            if built[key] is True and wanted - offered:
                message = f"offloader {name} does not place {', '.join(sorted(wanted - offered))}."
                self._problem(key, message, f"{key}: false, or offload: {offloader_of_keys()}")

    def off_the_device(self, config: RunConfig) -> None:
        """Hold what the offloader moves against what several GPUs need on the device."""
        offloader: OffloaderSpec = self.registry.bundles("offload")[config.offload.name].bundle
        task: TaskSpec = self.registry.bundles("task")[config.task].bundle
        if not offloader.addressable:  # whether it may step there depends on the device: the run checks both
            return
        found = sharing.off_the_device(config, offloader, online=task.online is not None)
        self.problems += [replace(problem, where=self.where(problem.key)) for problem in found]

    def fabric(self, built: Mapping[str, Any]) -> None:
        """GPUs that share rows, and replicas, need a fabric that connects groups."""
        chosen = built["fabric"]
        if chosen is None:
            return
        spec: FabricSpec = self.registry.bundles("fabric")[chosen.name].bundle
        # One GPU has no groups. With gpus=0 there may be several.
        if built["gpus"] != 1 and built["dp_shard_size"] not in (None, 0, built["gpus"]) and not spec.across:
            message = f"{chosen.name} connects all GPUs alone, and `dp_shard_size` needs groups of them."
            self._problem("fabric", message, "fabric: auto, or dp_shard_size: 0")
        for key in ("context_parallel_size", "ep_size"):
            if isinstance(built[key], int) and built[key] > 1 and not spec.groups:
                message = f"{chosen.name} connects all GPUs alone, and `{key}` needs groups of them."
                self._problem("fabric", message, f"fabric: auto, or {key}: 1")
        apart = isinstance(built["ep_size"], int) and 1 < built["ep_size"] != built["gpus"]
        if apart and spec.groups and not spec.across:
            message = f"{chosen.name} connects neighbours alone, and several groups of `ep_size` need more."
            self._problem("fabric", message, "fabric: auto, or ep_size: as many as gpus")

    def optimizer(self, built: Mapping[str, Any]) -> None:
        """Compare what the run trains with what the optimizer can train."""
        chosen, dtype, lora = built["optimizer"], built["master_dtype"], built["lora"]
        if chosen is None:
            return
        specs = {name: provided.bundle for name, provided in sorted(self.registry.bundles("optimizer").items())}
        spec = specs[chosen.name]
        if dtype in ("fp32", "bf16") and dtype not in spec.master_dtypes:
            able = " or ".join(name for name, other in specs.items() if dtype in other.master_dtypes)
            message = f"is {dtype}, and optimizer {chosen.name} cannot train such masters."
            self._problem(
                "master_dtype", message, f"master_dtype: null, or optimizer: {able}" if able else "master_dtype: null"
            )
        if lora is True and not spec.adapters:
            able = " or ".join(name for name, other in specs.items() if other.adapters)
            message = f"{chosen.name} trains whole matrices, and with `lora` only adapters are trained."
            self._problem("optimizer", message, f"optimizer: {able}, or lora: false" if able else "lora: false")
        if not {p.key for p in self.problems} & {"gpus", "zero_level", "lora"}:
            problem = sharing.whole_matrices(spec, built)
            if problem is not None:
                self._problem(problem.key, problem.message, problem.fix)
        if spec.whole_matrices and isinstance(built["ep_size"], int) and built["ep_size"] > 1:
            message = f"keeps state that GPUs which share out experts (`ep_size`) cannot put together: {chosen.name}."
            self._problem("optimizer", message, "optimizer: adamw_8bit, or ep_size: 1")

    def recipe(self, built: Mapping[str, Any]) -> None:
        """Ask the recipe whether its options fit the model's dtype."""
        chosen = built["recipe"]
        wrong_keys = {p.key.partition(".")[0] for p in self.problems}
        if chosen is None or chosen.options is None or wrong_keys & {"model_dtype", "torch_dtype", "device"}:
            return
        spec = self.registry.bundles("recipe")[chosen.name].bundle
        for option, message, fix in spec.mistakes(chosen.options, lambda: model_dtype(built)):
            mark = flat_marks(spec.options).get(option)
            self._problem(mark.key if mark is not None else f"recipe.{option}", message, fix)

    def weight_format(self, built: dict[str, Any]) -> None:
        """Take the weight format that a key asks for, with all its options; two are a mistake, as one not installed."""
        asked = self.flat.chosen("quant")
        if built["qlora_format"] is not None:
            asked["qlora_format"] = built["qlora_format"]
        switches = [key for key, flat in self.flat.keys.items() if flat.chooses is not None]
        for key in list(asked)[1:]:
            message = "asks for a second weight format; the base is kept in one."
            self._problem(key, message, f"keep one of {', '.join([*switches, 'qlora_format'])}")
        built["weight_format"] = next(iter(asked.values()), None)
        for key, name in asked.items():
            cls = self._offered_options("quant", name, key)
            if cls is not None and name == built["weight_format"]:
                self._own_options(cls, key, built)

    def named(self, built: dict[str, Any]) -> None:
        """Take the options of each bundle that a key names."""
        for kind, key in named_for(self._task(built)).items():
            if isinstance(built[key], str) and (cls := self._offered_options(kind, built[key], key)) is not None:
                self._own_options(cls, key, built)

    def _offered_options(self, kind: str, name: str, key: str) -> type | None:
        """The options of the bundle that a key names, None for one that is not there, which is a mistake."""
        offered = self.registry.bundles(kind).get(name)
        if offered is None:
            names = self.registry.names(kind)
            self.problems.append(unknown_name(kind, name, self.where(key), self.registry, names, key))
            return None
        return self._options_type(kind, name, offered.bundle.options, key)

    def flat_keys(self, built: dict[str, Any]) -> None:
        """Keep the plugins' flat keys that no chosen bundle took; some must not be set without theirs."""
        chosen = {kind: built[kind] if kind in LIST_GROUPS else [built[kind]] for kind in (*SELECTIONS, *LIST_GROUPS)}
        sound = {kind: [s.name for s in found] for kind, found in chosen.items() if None not in found}
        sound |= {kind: [] for kind in NAMED} | {"task": [built["task"]]}
        sound |= {kind: [built[key]] for kind, key in named_for(self._task(built)).items()}
        self.problems += self.flat.without_use(sound)
        built["flat"] = self.flat.left()

    def contradictions(self, built: Mapping[str, Any]) -> None:
        """Apply the table of rules, each if the keys that it reads are valid."""
        wrong_keys = {p.key.partition(".")[0] for p in self.problems}
        sound = {k: v for k, v in built.items() if k not in wrong_keys}
        for rule in RULES:
            try:
                contradictory = rule.wrong(sound)
            except KeyError:
                continue
            if contradictory:
                self.problems.append(replace(rule.problem(sound), where=self.where(rule.key)))
