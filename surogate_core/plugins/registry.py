"""Loading plugins and looking up what they offer.

A plugin that cannot be loaded is remembered, not raised: it only matters to a run that asks for
something it offers, and then the run stops with a message that names plugin and distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import pluggy

from surogate_core import hookspecs
from surogate_core.bundles import KINDS, Bundle, ModelFamily
from surogate_core.caches import use_private_caches
from surogate_core.errors import PluginError
from surogate_core.plugins.catalogue import catalogue, install_command
from surogate_core.plugins.contract import NEWER_CORE, incompatible, needs_newer_core, outdated, remedy, verify
from surogate_core.plugins.deprecated import deprecations
from surogate_core.plugins.discovery import (
    CORE,
    ImportPolicy,
    InstalledPlugin,
    canonical,
    core_plugin,
    installed_plugins,
)
from surogate_core.plugins.flat_keys import FlatKey, collect
from surogate_core.plugins.isolation import Remark, observed
from surogate_core.plugins.static import StaticView, config_options, search_path_dir, static_view


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """A plugin that failed."""

    plugin: InstalledPlugin
    doing: str
    """When it failed, e.g. ``when it was imported``."""
    error: BaseException

    def __str__(self) -> str:
        text = " ".join(str(self.error).split())
        reason = f"{type(self.error).__name__}: {text}" if text else type(self.error).__name__
        newer = needs_newer_core(self.error)
        return f"{self.plugin.label} failed {self.doing}: {f'{newer} ({reason})' if newer else reason}"

    @property
    def fix(self) -> str:
        """What to do about it."""
        if needs_newer_core(self.error):
            return f"{NEWER_CORE}, or an older {self.plugin.distribution}; the traceback is in the log."
        return f"Repair or update {self.plugin.distribution}; the traceback is in the log."


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """A bundle and the plugin that offers it."""

    bundle: Any
    plugin: InstalledPlugin


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigOption:
    """An option of a config group and the plugin that offers it."""

    file: Path
    plugin: InstalledPlugin


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Why a name cannot be had: what is wrong, and what to do."""

    message: str
    fix: str
    broken: Broken | None = None
    needs: str = ""
    """The distribution to install."""

    @classmethod
    def of(cls, distribution: str) -> Missing:
        """A plugin of this project that is not installed."""
        message = f"its plugin {distribution} is not installed."
        return cls(message=message, fix=install_command(distribution), needs=distribution)

    def __str__(self) -> str:
        return f"{self.message} {self.fix}".rstrip()


@dataclass(slots=True, kw_only=True)
class Registry:
    """The offers of the loaded plugins. Made by `load_plugins`."""

    manager: pluggy.PluginManager
    policy: ImportPolicy
    plugins: dict[str, InstalledPlugin] = field(default_factory=dict)
    """Loaded plugins by entry-point name."""
    blocked: dict[str, tuple[InstalledPlugin, str]] = field(default_factory=dict)
    """Plugins that were not imported, with the reason."""
    broken: dict[str, Broken] = field(default_factory=dict)
    remarks: list[Remark] = field(default_factory=list)
    """Side effects of plugins: printed text, started threads, slow imports."""
    search_path: list[tuple[str, str]] = field(default_factory=list)
    """(plugin name, Hydra search path), in the order of loading; the core's own is not in it."""
    options: dict[str, dict[str, ConfigOption]] = field(default_factory=dict)
    """Config group → option → its file and owner."""
    clashes: dict[tuple[str, str], Missing] = field(default_factory=dict)
    """(kind or config group, name) that two plugins offer. Nobody has it: a run that asks for it is refused."""
    _offers: dict[str, dict[str, Offered]] = field(default_factory=dict)
    _flat_keys: dict[str, FlatKey] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """Default monitors that are not installed, which a run does without → their distributions."""
    _told: set[str] = field(default_factory=set)

    # ------------------------------------------------------------------------- bundles

    def bundles(self, kind: str) -> Mapping[str, Offered]:
        """Everything offered of a kind, by name. The kind's hooks are called on first use.

        A name that two plugins offer is left out, and is in `clashes`. Of kernel packs a run uses all, so that for them
        it is a `PluginError`.
        """
        if kind not in self._offers:
            hook, bundle_type = KINDS[kind]
            offers: dict[str, Offered] = {}
            for plugin, bundle in self._call(hook, bundle_type):
                other = offers.get(bundle.name)
                if other is not None:
                    clash = offered_twice(f"{kind} {bundle.name!r}", other.plugin, plugin)
                    if kind == "kernels":
                        raise PluginError(str(clash))
                    self.clashes.setdefault((kind, bundle.name), clash)
                    if kind == "model":
                        bundle = _family_of_two(clash, other.bundle, bundle)
                offers[bundle.name] = Offered(bundle=bundle, plugin=plugin)
            for name in [name for name in offers if kind != "model" and (kind, name) in self.clashes]:
                del offers[name]
            self._offers[kind] = dict(sorted(offers.items()))
        return self._offers[kind]

    def names(self, kind: str) -> list[str]:
        """Names of the kind's bundles, sorted."""
        return list(self.bundles(kind))

    def get(self, kind: str, name: str) -> Any:
        """The bundle; raises `PluginError` naming who could offer it."""
        offered = self.bundles(kind).get(name)
        if offered is None:
            missing = self.explain_missing(kind, name, self.names(kind))
            raise PluginError(f"{kind} {name!r}: {missing.message} {missing.fix}".rstrip()) from (
                missing.broken.error if missing.broken else None
            )
        return offered.bundle

    def all(self, kind: str) -> dict[str, Any]:
        """The kind's bundles by name."""
        return {name: offered.bundle for name, offered in self.bundles(kind).items()}

    def owner(self, kind: str, name: str) -> str:
        """Entry-point name of the plugin that offers the bundle."""
        self.get(kind, name)
        return self.bundles(kind)[name].plugin.name

    def offerer(self, kind: str, name: str) -> str:
        """The plugin that offers the bundle, as messages name it."""
        self.get(kind, name)
        return self.bundles(kind)[name].plugin.label

    def flat_keys(self) -> Mapping[str, FlatKey]:
        """The flat keys that the plugins' options declare, by key.

        Raises `PluginError` when two plugins declare one key with different types.
        """
        if self._flat_keys is None:
            self._flat_keys = collect(self)
        return self._flat_keys

    def check(self) -> None:
        """Call the hooks of every kind, so that every failure is found; raises `PluginError` for a clash."""
        for kind in KINDS:
            self.bundles(kind)
        self.flat_keys()
        if self.clashes:
            raise PluginError("\n".join(map(str, self.clashes.values())))

    def _call(self, hook: str, expected: type) -> Iterable[tuple[InstalledPlugin, Any]]:
        caller = getattr(self.manager.hook, hook)
        for impl in sorted(caller.get_hookimpls(), key=lambda i: (i.plugin_name != CORE, i.plugin_name)):
            plugin = self.plugins[impl.plugin_name]
            try:
                with observed(plugin, f"in its hook {hook}", self.remarks):
                    offers = impl.function()
                listed = [] if offers is None else offers if isinstance(offers, list) else [offers]
                for offer in listed:
                    if not isinstance(offer, expected):
                        raise TypeError(f"it returned {offer!r:.80}, not {expected.__name__}, a list of them or None")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self.broken.setdefault(plugin.name, Broken(plugin=plugin, doing=f"in its hook {hook}", error=error))
                continue
            for offer in listed:
                yield plugin, offer

    # ------------------------------------------------------------------------- messages

    def explain_missing(self, group: str, name: str, known: Iterable[str]) -> Missing:
        """Why `name` is not to be had in a group (or kind), and what to do.

        In order: two plugins offer it; a broken plugin does; a blocked one does; one that is not installed does;
        otherwise the nearest known name.
        """
        if (clash := self.clashes.get((group, name))) is not None:
            return clash
        for broken in self.broken.values():
            if _offers(broken.plugin, group, name):
                return Missing(
                    message=f"{broken}.",
                    fix=broken.fix,
                    broken=broken,
                )
        for plugin, reason in self.blocked.values():
            if static_view(plugin.module).offers(group, name):
                fix = remedy(plugin) if incompatible(plugin) else ""
                fix = "Change the plugin policy." if self.policy.refusal(plugin.name) else fix
                return Missing(message=f"{plugin.label} offers it but is {reason}.", fix=fix)
        distribution = catalogue().distribution_of(group, name)
        installed = {p.distribution for p in self.plugins.values()}
        if distribution is not None and distribution not in installed:
            return Missing.of(distribution)
        known = sorted(known)
        near = get_close_matches(name, known, n=1, cutoff=0.5)
        listed = ", ".join(known) or "none is installed"
        what = {"dataset": "type", "quant": "weight format", "policy_loss": "policy loss"}.get(group, group)
        message = f"there is no such {what}; known: {listed}."
        if not near and self.broken:
            message += " Not loaded: " + "; ".join(str(b) for b in self.broken.values()) + "."
        return Missing(message=message, fix=near[0] if near else "")

    def explain_missing_key(self, key: str) -> Missing | None:
        """Why a flat key of a plugin is not to be had, and what to do; None where no known plugin declares it.

        In order: a broken plugin declares it; a blocked one does; one that is not installed does.
        """
        for broken in self.broken.values():
            if key in static_view(broken.plugin.module).flat_keys:
                return Missing(message=f"{broken}.", fix=broken.fix, broken=broken)
        for plugin, reason in self.blocked.values():
            if key in static_view(plugin.module).flat_keys:
                fix = "Change the plugin policy." if self.policy.refusal(plugin.name) else remedy(plugin)
                return Missing(message=f"{plugin.label} has it but is {reason}.", fix=fix)
        distribution = catalogue().keys.get(key)
        if distribution is None or distribution in {p.distribution for p in self.plugins.values()}:
            return None
        return Missing.of(distribution)

    def untold(self) -> list[str]:
        """Notices about plugins that failed or did something besides, each returned once.

        Hooks are called when their kind is looked up for the first time, so there may be more later.
        """
        said = [f"{broken}; it is left out" for broken in self.broken.values()] + [str(r) for r in self.remarks]
        found = [text for text in dict.fromkeys(said) if text not in self._told]
        self._told.update(found)
        return found

    # ----------------------------------------------------------------------------- facts

    def plugin_set(self, *, digests: bool = False) -> list[dict[str, str]]:
        """Name, distribution and version of every loaded plugin, sorted by name; the core is one.

        `digests` adds ``sha256``, over the distribution's files, as a lock has it.
        """
        found = [_facts(p) for _, p in sorted(self.plugins.items())]
        if digests:
            from surogate_core.plugins.lock import installed_distributions

            known = installed_distributions((p for p in self.plugins.values() if p.entry_point is not None), "core")
            for facts in found:
                # The core is no distribution where it runs from its sources.
                if (dist := known.get(canonical(facts["distribution"]))) is not None:
                    facts["sha256"] = dist.sha256
        return found

    def plugins_used(self, selected: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
        """The same, of the plugins that offer the given (kind, name) bundles only."""
        used = {self.owner(kind, name) for kind, name in selected}
        return [facts for facts in self.plugin_set() if facts["name"] in used]


def load_plugins(policy: ImportPolicy | None = None) -> Registry:
    """Import what the policy allows, one at a time in the order of names, and register it.

    Raises `PluginError` with every difference when what may be imported is not what a lock of the policy holds; then
    nothing was imported.

    Raises `PluginError` when two distributions use the same entry-point name or ship the same
    config option. Import errors are remembered in `Registry.broken`.
    """
    from surogate_core.plugins.discovery import import_policy

    policy = import_policy() if policy is None else policy
    use_private_caches()
    manager = pluggy.PluginManager("surogate")
    manager.add_hookspecs(hookspecs)
    registry = Registry(manager=manager, policy=policy)
    found = installed_plugins()
    verify(policy, found)
    _refuse_equal_names(found, policy)
    for plugin in found:
        reason = policy.refusal(plugin.name) or incompatible(plugin)
        if reason is not None:
            manager.set_blocked(plugin.name)
            registry.blocked[plugin.name] = (plugin, reason)
    for plugin in (core_plugin(), *found):
        if plugin.name not in registry.blocked:
            _load(registry, plugin)
    _check_pending(registry)
    _collect_options(registry)
    return registry


def model_families() -> Mapping[str, ModelFamily]:
    """The model families of the installed plugins, by name."""
    return load_plugins().all("model")


def _load(registry: Registry, plugin: InstalledPlugin) -> None:
    doing = "when it was imported"
    try:
        if plugin.entry_point is None:
            # By its name, as any plugin: what the core itself offers stands above this package.
            module: Any = import_module(plugin.module)
        else:
            with observed(plugin, doing, registry.remarks, timed=True):
                module = plugin.entry_point.load()
        doing = "when its hooks were registered"
        registry.manager.register(module, name=plugin.name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin that calls sys.exit() at import is broken too
        if registry.manager.has_plugin(plugin.name):
            registry.manager.unregister(name=plugin.name)
        registry.broken[plugin.name] = Broken(plugin=plugin, doing=doing, error=error)
    else:
        registry.plugins[plugin.name] = plugin
        old = [text for text in (outdated(plugin), *deprecations(plugin)) if text]
        registry.remarks += [Remark(plugin=plugin, text=text) for text in old]


def _check_pending(registry: Registry) -> None:
    while True:
        try:
            registry.manager.check_pending()
        except pluggy.PluginValidationError as error:
            name = registry.manager.get_name(error.plugin)
            assert name is not None
            registry.manager.unregister(name=name)
            plugin = registry.plugins.pop(name)
            registry.broken[name] = Broken(plugin=plugin, doing="when its hooks were checked", error=error)
        else:
            return


def _collect_options(registry: Registry) -> None:
    from surogate_core.conf_paths import conf_dir

    _add_options(registry, core_plugin(), conf_dir())
    for plugin, path in list(registry._call("surogate_config_path", str)):
        directory = search_path_dir(path)
        if directory is None or not directory.is_dir():
            missing = FileNotFoundError(f"there is no config directory {path}")
            registry.broken[plugin.name] = Broken(
                plugin=plugin, doing="in its hook surogate_config_path", error=missing
            )
            continue
        registry.search_path.append((plugin.name, path))
        _add_options(registry, plugin, directory)
    for group, option in registry.clashes:
        del registry.options[group][option]


def _add_options(registry: Registry, plugin: InstalledPlugin, directory: Path) -> None:
    for (group, option), file in config_options(directory).items():
        options = registry.options.setdefault(group, {})
        other = options.get(option)
        if other is not None:
            registry.clashes[group, option] = offered_twice(f"config option {group}={option}", other.plugin, plugin)
        options[option] = ConfigOption(file=file, plugin=plugin)


def _refuse_equal_names(found: Sequence[InstalledPlugin], policy: ImportPolicy) -> None:
    names: dict[str, InstalledPlugin] = {CORE: core_plugin()}
    modules: dict[str, InstalledPlugin] = {}
    for plugin in found:
        if policy.refusal(plugin.name) is not None:
            continue
        other = names.setdefault(canonical(plugin.name), plugin)
        if other is not plugin:
            raise PluginError(str(offered_twice(f"entry point {plugin.name!r}", other, plugin, same_name=True)))
        other = modules.setdefault(plugin.module, plugin)
        if other is not plugin:
            raise PluginError(str(offered_twice(f"module {plugin.module!r}", other, plugin)))


def offered_twice(what: str, first: InstalledPlugin, second: InstalledPlugin, *, same_name: bool = False) -> Missing:
    """Why nobody has a name that two plugins offer."""
    known = catalogue()
    ours = {canonical(name) for name in (*known.options.values(), *known.bundles.values())}
    # The one to leave out is not that which this project offers under the name.
    other = first if canonical(second.distribution) in ours else second
    fix = f"Uninstall one of them: pip uninstall {other.distribution}"
    if not same_name:
        fix += f", or leave one out with plugins.block=[{other.name}]"
    return Missing(message=f"{what} is offered twice: by {first.label} and by {second.label}.", fix=f"{fix}.")


def _family_of_two(clash: Missing, first: ModelFamily, second: ModelFamily) -> ModelFamily:
    """In place of two families with one name: it reads what both read, and refuses to be built."""

    def build(config: Mapping[str, Any]) -> Any:
        raise PluginError(str(clash))

    kinds = tuple(dict.fromkeys((*first.hf_model_types, *second.hf_model_types)))
    return ModelFamily(name=first.name, hf_model_types=kinds, build=build, presets={**first.presets, **second.presets})


def _offers(plugin: InstalledPlugin, group: str, name: str) -> bool:
    view: StaticView = static_view(plugin.module)
    return view.offers(group, name)


def _facts(plugin: InstalledPlugin) -> dict[str, str]:
    return {"name": plugin.name, "distribution": plugin.distribution, "version": plugin.version}


__all__ = ["Broken", "Bundle", "ConfigOption", "Missing", "Offered", "Registry", "load_plugins"]
