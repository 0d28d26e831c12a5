"""Plugins: the registry, what is installed, locks and digests."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.bundles.handed import whole
    from surogate_core.bundles.options import field_types, flat_values, option_defaults
    from surogate_core.bundles.parts import fault
    from surogate_core.bundles.tasks import next_share
    from surogate_core.plugins import digests, lock
    from surogate_core.plugins.commands import RESERVED, offered_commands
    from surogate_core.plugins.digests import LINK, InstalledFiles
    from surogate_core.plugins.discovery import (
        CORE_DISTRIBUTION,
        GROUP,
        ImportPolicy,
        InstalledPlugin,
        canonical,
        installed_plugins,
        unmet_requirements,
    )
    from surogate_core.plugins.isolation import HEAVY
    from surogate_core.plugins.lock import LockedDistribution, installed_distributions
    from surogate_core.plugins.new import new_plugin
    from surogate_core.plugins.policy import LockRule
    from surogate_core.plugins.registry import Offered, Registry, model_families
    from surogate_core.plugins.static import locate, static_view
    from surogate_core.plugins.surroundings import SCOPES, Scope, in_scope, required_by

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
