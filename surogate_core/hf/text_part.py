"""Checkpoints of several parts, such as a language model and a vision tower: the language model in them.

Their ``config.json`` has that of the language model under ``text_config``, and their files have its tensors under a
prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

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
PROCESSORS = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files with which transformers prepares what the other parts read."""


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
        f"model, and an exported model is the language model alone (surogate merge --parts all writes all parts)."
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """All parts of a model around its language model, as an export of all of them needs it."""

    files: ModelDir
    names: Mapping[str, str]
    """Tensors of the language model: name in files of it alone → name in `files`."""

    @classmethod
    def of(cls, files: ModelDir, text: ModelDir) -> Whole:
        """`text`: the language model in `files`. Raises `UserError` for quantised files, whose parts have several
        tensors.
        """
        if files.scheme is not None or text.scheme is not None:
            what = f"--parts all: the weights of {files.path} are quantised."
            raise UserError(f"{what} Fix: name the unquantised model, or --parts text.")
        kept = set(text.stored_names())
        owned = ((_own_name(name, ()) or name, name) for name in files.stored_names())
        return cls(files=files, names={own: name for own, name in owned if own in kept})

    @property
    def others(self) -> list[str]:
        """The names of the tensors of other parts."""
        used = set(self.names.values())
        return [name for name in self.files.stored_names() if name not in used]

    @property
    def processors(self) -> Sequence[Path]:
        """The files of the directory that an export has as they are."""
        return [file for name in PROCESSORS if (file := self.files.path / name).is_file()]

    def config(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The ``config.json`` of the whole model whose language model has this one."""
        own = self.files.config["text_config"]
        inside = {key: value for key, value in text.items() if key != "architectures" or key in own}
        shared = {key: text[key] for key in _SHARED if key in self.files.config and key in text}
        return {**self.files.config, **shared, "text_config": inside}

    def tensors(self, text: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the language model by their names in `files`, then those of the other parts as they are."""
        for name, tensor in text:
            yield self.names.get(name) or PLACE + name.removeprefix(OWN), tensor
        for name in self.others:
            yield name, self.files.get(name)
