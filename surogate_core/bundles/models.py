"""Model families."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from surogate_core.errors import UserError

if TYPE_CHECKING:
    from surogate_core.dsl import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFamily:
    """A model architecture: the DSL model built from a Hugging Face ``config.json``."""

    name: str
    """The value of `model.name`."""
    hf_model_types: tuple[str, ...]
    """Values of ``model_type`` in ``config.json`` that this family reads."""
    build: Callable[[Mapping[str, Any]], Model]
    """Makes the model from the mapping of a ``config.json``; raises `UserError` naming a bad key."""
    presets: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Preset name → a ``config.json`` mapping, for training from random weights."""
    exports: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] = field(default_factory=dict)
    """Name of an export format → what that format needs to know about the family, from the mapping of a
    ``config.json``. The format's page says which keys. A function raises `UserError` for a model that programs which
    read the format compute in another way.
    """
    ops: tuple[str, ...] = ()
    """Modules that define ops of its own (`surogate_core.kernels.registry.op`), e.g. ``acme_scan.ops``. A run of the
    family imports them before it chooses kernels, so that kernel packs of other plugins may have kernels for them.
    """


def check_export(format: str, reader: str, fits: Mapping[str, bool]) -> None:
    """Raise `UserError` for the first key of a ``config.json`` that does not fit. `reader`: what reads files of that
    format, such as ``llama.cpp's gemma3``.
    """
    for key, one in fits.items():
        if not one:
            raise UserError(
                f"--format {format}: config.json: `{key}` has a value that {reader} does not compute. "
                f"Fix: serve the model with transformers or vLLM."
            )


def decoder_presets(
    common: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, int, int, int, int, Mapping[str, Any]]],
    *,
    tiny: Mapping[str, Any],
) -> Mapping[str, Mapping[str, Any]]:
    """Presets of decoders: ``tiny``, a shape for a CPU, and the published shapes.

    `shapes`: preset → (features, layers, heads of queries, heads of keys and values, features of the feed-forward,
    further keys). `common`: keys of all presets; `tiny`: further keys of that preset.
    """
    small = {
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
        **tiny,
    }
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    activation = {} if "hidden_activation" in common else {"hidden_act": "silu"}
    given = {"attention_dropout": 0.0, **activation, "initializer_range": 0.02, **common}
    return {
        name: {**given, **dict(zip(keys, sizes, strict=True)), **more}
        for name, (*sizes, more) in {"tiny": (128, 4, 4, 2, 384, small), **shapes}.items()
    }
