"""Configurations: the schema, what is chosen for the user, checks, files, logs and what is masked in them."""

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core import logs as logs
    from surogate_core import numbers as numbers
    from surogate_core.conf_paths import expanded as expanded
    from surogate_core.config import offload as offload
    from surogate_core.config import sharing as sharing
    from surogate_core.config.checks import EXACT_RANKS as EXACT_RANKS
    from surogate_core.config.checks import RULES as RULES
    from surogate_core.config.choices import default_groups as default_groups
    from surogate_core.config.choices import offloader_of_keys as offloader_of_keys
    from surogate_core.config.composing.grammar import encode as encode
    from surogate_core.config.resolve import plain as plain
    from surogate_core.config.resolve import to_dict as to_dict
    from surogate_core.config.resolve import to_yaml as to_yaml
    from surogate_core.config.schema import RunConfig as RunConfig
    from surogate_core.config.schema import Selection as Selection
    from surogate_core.config.typed import Builder as Builder
    from surogate_core.config.yamlfile import Source as Source
    from surogate_core.config.yamlfile import with_keywords as with_keywords
    from surogate_core.logs import contained as contained
    from surogate_core.logs import record_traceback as record_traceback
    from surogate_core.masking import masked as masked
    from surogate_core.masking import masked_values as masked_values
    from surogate_core.masking import masked_yaml as masked_yaml

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
