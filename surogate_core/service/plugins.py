"""Plugins: the registry, what is installed, locks and digests."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core.bundles.handed import whole as whole
    from surogate_core.bundles.options import field_types as field_types
    from surogate_core.bundles.options import flat_values as flat_values
    from surogate_core.bundles.options import option_defaults as option_defaults
    from surogate_core.bundles.parts import fault as fault
    from surogate_core.bundles.tasks import next_share as next_share
    from surogate_core.plugins import digests as digests
    from surogate_core.plugins import lock as lock
    from surogate_core.plugins.commands import RESERVED as RESERVED
    from surogate_core.plugins.commands import offered_commands as offered_commands
    from surogate_core.plugins.digests import LINK as LINK
    from surogate_core.plugins.digests import InstalledFiles as InstalledFiles
    from surogate_core.plugins.discovery import CORE_DISTRIBUTION as CORE_DISTRIBUTION
    from surogate_core.plugins.discovery import GROUP as GROUP
    from surogate_core.plugins.discovery import ImportPolicy as ImportPolicy
    from surogate_core.plugins.discovery import InstalledPlugin as InstalledPlugin
    from surogate_core.plugins.discovery import canonical as canonical
    from surogate_core.plugins.discovery import installed_plugins as installed_plugins
    from surogate_core.plugins.discovery import unmet_requirements as unmet_requirements
    from surogate_core.plugins.isolation import HEAVY as HEAVY
    from surogate_core.plugins.lock import LockedDistribution as LockedDistribution
    from surogate_core.plugins.lock import installed_distributions as installed_distributions
    from surogate_core.plugins.new import new_plugin as new_plugin
    from surogate_core.plugins.policy import LockRule as LockRule
    from surogate_core.plugins.registry import Offered as Offered
    from surogate_core.plugins.registry import Registry as Registry
    from surogate_core.plugins.registry import model_families as model_families
    from surogate_core.plugins.static import locate as locate
    from surogate_core.plugins.static import static_view as static_view
    from surogate_core.plugins.surroundings import SCOPES as SCOPES
    from surogate_core.plugins.surroundings import Scope as Scope
    from surogate_core.plugins.surroundings import in_scope as in_scope
    from surogate_core.plugins.surroundings import required_by as required_by

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
