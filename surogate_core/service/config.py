"""Configurations: the schema, what is chosen for the user, checks, files, logs and what is masked in them."""

# ruff: noqa: F401

from typing import TYPE_CHECKING

from surogate_core.lazy import lazily

if TYPE_CHECKING:
    from surogate_core import logs, numbers
    from surogate_core.conf_paths import expanded
    from surogate_core.config import offload, sharing
    from surogate_core.config.checks import EXACT_RANKS, RULES
    from surogate_core.config.choices import default_groups, offloader_of_keys
    from surogate_core.config.composing.grammar import encode
    from surogate_core.config.resolve import plain, to_dict, to_yaml
    from surogate_core.config.schema import RunConfig, Selection
    from surogate_core.config.typed import Builder
    from surogate_core.config.yamlfile import Source, with_keywords
    from surogate_core.logs import contained, record_traceback
    from surogate_core.masking import masked, masked_values, masked_yaml

else:
    __getattr__, __dir__, __all__ = lazily(__name__)
