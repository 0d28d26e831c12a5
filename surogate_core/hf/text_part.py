"""Checkpoints of several parts, such as a language model and a vision tower: the language model in them.

Their ``config.json`` has that of the language model under ``text_config``, and their files have its tensors under a
prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surogate_core.bundles import ModelFamily
    from surogate_core.hf.weights import ModelDir

PLACE = "model.language_model."
"""Where the classes of transformers 5 have the language model's ``model.``, and adapters name its modules."""
OWN = "model."
"""Where the class of the language model alone has it."""
_PREFIXES = {PLACE: OWN, "language_model.model.": OWN, "language_model.lm_head.": "lm_head."}
_HEAD = "lm_head."
_SHARED = ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id", "quantization_config")
"""Keys that some files have beside ``text_config`` instead of in it."""


def text_config(config: Mapping[str, Any], families: Mapping[str, ModelFamily]) -> dict[str, Any] | None:
    """The ``config.json`` of the language model of a model of several parts.

    None if it is no such model, if a family reads it as it is, or if no family reads its language model.
    """
    own = config.get("text_config")
    types = {kind: family for family in families.values() for kind in family.hf_model_types}
    if not isinstance(own, Mapping) or config.get("model_type") in types or own.get("model_type") not in types:
        return None
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    values = {**shared, **{key: value for key, value in own.items() if value is not None or key not in shared}}
    return {**values, "architectures": [types[own["model_type"]].build(values).architecture]}


def text_part(
    files: ModelDir, families: Callable[[], Mapping[str, ModelFamily]], title: str
) -> tuple[ModelDir, str | None]:
    """(the files of the language model alone, a note) for a model of several parts; otherwise the files themselves."""
    if not isinstance(files.config.get("text_config"), Mapping):
        return files, None
    offered = families()
    config = text_config(files.config, offered)
    if config is None:
        return files, None
    family = next(one for one in offered.values() if config["model_type"] in one.hf_model_types)
    carried = family.build(config).carried
    kept = {name: own for name in files.stored_names() if (own := _own_name(name, carried)) is not None}
    left = len(files.stored_names()) - len(kept)
    note = (
        f"{title} is a {files.config.get('model_type')} of several parts. Its language model is read and trained, as "
        f"{config['model_type']}; {left} tensors of other parts are left out. Adapters have the names of the whole "
        f"model, and an exported model is the language model alone."
    )
    return files.part(kept, config, place=PLACE), note


def _own_name(name: str, carried: tuple[str, ...]) -> str | None:
    """A tensor's name in files of the language model alone; None if it belongs to another part. `carried`: as of
    `Model`.
    """
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name if name.startswith((_HEAD, *carried)) else None
