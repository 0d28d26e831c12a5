"""Export formats: a trained model as a file for another program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.bundles.options import NoOptions

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from surogate_core.bundles.reinforcement.rollouts import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportJob:
    """A model to write, and the file to write."""

    name: str
    """The model's name, such as the name of its run."""
    config: Mapping[str, Any]
    """The mapping of its ``config.json``."""
    shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name → shape of every tensor, those of each expert by themselves; without the head if it is tied."""
    dtypes: Mapping[str, torch.dtype]
    """Name → dtype in which `get` returns it."""
    get: Callable[[str], Tensor]
    """Reads one tensor to the CPU, with the adapters folded in."""
    tokenizer: PreTrainedTokenizerBase
    stop_ids: frozenset[int]
    """The tokens that end a completion."""
    sampling: Sampling
    """How tokens are chosen, from ``generation_config.json``."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """The mapping of ``generation_config.json``; empty without one."""
    family: Mapping[str, Any] = field(default_factory=dict)
    """What the model's family says for this format (`ModelFamily.exports`); empty if it says nothing."""
    file: Path
    """The file to write; it gets its final name when it is complete."""
    place: Path
    """The final name."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Receives the bytes written and in total."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The result of an export."""

    notes: tuple[str, ...] = ()
    """Sentences for the user."""
    texts: Mapping[Path, str] = field(default_factory=dict)
    """Text files that belong to it, written when the file is in place: path → text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFormat:
    """A file format for models."""

    name: str
    """The value of ``surogate export --format``."""
    summary: str
    """What it is for, in a few words."""
    suffix: str
    """The end of its files' names, with the dot."""
    write: Callable[[ExportJob, Any], Exported]
    """(job, options) → the result. Raises `UserError` before it reads a tensor if the model or the tokenizer does not
    fit the format.
    """
    options: type = NoOptions
    """Dataclass of its own options; every field has a default, and is a flag of the command: ``--field``."""
