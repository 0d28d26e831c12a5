"""How a model is named and described in a GGUF file, from what its family says about itself."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from surogate_core.plugin import UserError, bundles, dsl

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_QK = re.compile(r"\.attn_([qk])\.(weight|bias)$")
_LAYER = re.compile(r"\.(\d+)\.")
Figure = bool | int | float | str
"""A value of the file's keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family as llama.cpp computes it. Its fields are the keys of `ModelFamily.exports["gguf"]`, with the name of the
    architecture as `arch`.
    """

    arch: gguf.MODEL_ARCH
    biases: frozenset[str] = frozenset()
    """Projections that may have a bias."""
    interleaved: bool = False
    """Whether RoPE turns neighbouring features, so that rows of q and k are in another order than Hugging Face's."""
    has_frequency_factors: bool = False
    """Whether RoPE's frequencies may have a factor each, as Llama 3's have."""
    tensors: Mapping[str, str | Mapping[str, slice]] = field(default_factory=dict)
    """Hugging Face name → name in the file, of what the package `gguf` has no name for in this architecture. Both are
    without ``.weight`` for a module and whole for another tensor, with ``{}`` for the number of the layer and without
    that of an expert. A mapping instead of a name divides the outputs: names in the file with their slices.
    """
    vectors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Whole names of fp32 vectors that only the file has, with their values: ``rope_freqs.weight``."""
    figures: Mapping[str, Figure | Sequence[Figure]] = field(default_factory=dict)
    """Further keys of the file, without the architecture's name in front, such as ``attention.sliding_window``. A key
    that the file has anyway gets this value.
    """
    notes: Sequence[str] = ()
    """What a user of the file should know."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Keys of ``config.json`` with the values by which RoPE and the features of a head are described, of a model whose
    layers differ.
    """
    convert: Callable[[str, torch.Tensor], torch.Tensor] | None = None
    """(Hugging Face name, weight) → the weight as the file has it, of the same shape."""

    @classmethod
    def of(cls, job: bundles.ExportJob) -> Family:
        """The family of a job, as its plugin describes it."""
        kind = str(job.config.get("model_type"))
        if not job.family:
            raise UserError(
                f"--format gguf: models of type {kind!r} are not available: the plugin of their family does not "
                f"describe them (`ModelFamily.exports`). Fix: `surogate merge`, then a converter that knows this type."
            )
        known = [one.name for one in fields(cls)]
        if unknown := sorted(set(job.family) - set(known)):
            raise _wrong(kind, f"key {unknown[0]!r}", f"one of {', '.join(known)}")
        names = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        name = job.family.get("arch")
        if name not in names:
            near = get_close_matches(str(name), names, n=3) or ["a name of gguf.MODEL_ARCH_NAMES"]
            raise _wrong(kind, f"`arch` {name!r}", " or ".join(near))
        return cls(**{**job.family, "arch": names[name], "biases": frozenset(job.family.get("biases", ()))})


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the file."""

    name: str
    parts: tuple[str, ...]
    """The model's tensors that it is made of: one, or one for each expert."""
    shape: tuple[int, ...]
    outputs: slice | None = None
    """The outputs that it has of each; None: all."""

    @property
    def is_matrix(self) -> bool:
        """Whether it has the type of the file; vectors, biases of experts and routers are f32."""
        return len(self.shape) > 1 and self.name.endswith(".weight") and ".ffn_gate_inp." not in self.name

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """Its outputs of a tensor of the model."""
        if self.outputs is None:
            return weight
        return weight[..., self.outputs] if self.name.endswith(".bias") else weight[self.outputs]


class Architecture:
    """The model of a job, as GGUF describes it. Raises `UserError` for what llama.cpp does not compute."""

    def __init__(self, job: bundles.ExportJob):
        self.config = job.config
        self.family = Family.of(job)
        self.name: str = gguf.MODEL_ARCH_NAMES[self.family.arch]
        self.heads, self.kv_heads = (
            int(job.config["num_attention_heads"]),
            int(job.config.get("num_key_value_heads") or job.config["num_attention_heads"]),
        )
        config = {**job.config, **self.family.rope}
        self.head_dim = int(config.get("head_dim") or config["hidden_size"] // self.heads)
        self.vocab_size = job.shapes["model.embed_tokens.weight"][0]
        self.layers = int(job.config["num_hidden_layers"])
        self._check()
        self.tensors = self._tensors(job.shapes)

    @cached_property
    def rope(self) -> dsl.Rope:
        """The rotary embedding."""
        return dsl.Rope({**self.config, **self.family.rope}, self.head_dim)

    def _check(self) -> None:
        kind = self.rope.kind
        if kind not in ("default", "linear", "yarn", "llama3"):
            raise _not_there("rope_scaling", f"{kind}, which llama.cpp lacks")
        if kind == "llama3" and not self.family.has_frequency_factors:
            raise _not_there("rope_scaling", f"llama3, which {self.name} lacks")
        if kind == "yarn" and not self.rope.parameters.get("truncate", True):
            raise _not_there("rope_scaling", "yarn with truncate=false, which llama.cpp lacks")
        if self.family.interleaved and self.rope.rotary != self.head_dim:
            raise _not_there("partial_rotary_factor", f"below 1, which {self.name} lacks")

    def _tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> list[Tensor]:
        """The tensors of the file in the order of the model's."""
        names = gguf.get_tensor_name_map(self.family.arch, self.layers)
        parts: dict[str, list[str]] = {}
        divided: dict[str, slice] = {}
        for name in shapes:
            whole = _EXPERT.sub(".experts.", name)
            found = self._own_names(whole) or {names.get_name(whole, try_suffixes=(".weight", ".bias")): None}
            for place, outputs in found.items():
                if place is None or (place.endswith(".bias") and place.split(".")[-2] not in self.family.biases):
                    raise UserError(
                        f"--format gguf: {name} has no place in a {self.name} file. "
                        f"Fix: `surogate merge` writes a Hugging Face directory with it."
                    )
                parts.setdefault(place, []).append(name)
                if outputs is not None:
                    divided[place] = outputs
        made = []
        for place, own in parts.items():
            own.sort(key=_number_of_expert)
            tensor = Tensor(place, tuple(own), (), divided.get(place))
            one = tuple(tensor.of(torch.empty(shapes[own[0]], device="meta")).shape)
            made.append(replace(tensor, shape=(len(own), *one) if _EXPERT.search(own[0]) else one))
        return made

    def _own_names(self, name: str) -> Mapping[str | None, slice | None]:
        """The names that the family gives a tensor, with the slices of its outputs; none where it gives none."""
        layer = _LAYER.search(name)
        number = layer[1] if layer else ""
        pattern = name.replace(f".{number}.", ".{}.", 1) if layer else name
        module, _, last = pattern.rpartition(".")
        suffix = ""
        found = self.family.tensors.get(pattern)
        if found is None and last in ("weight", "bias"):
            found, suffix = self.family.tensors.get(module, {}), f".{last}"
        parts: Mapping[str, slice | None] = {found: None} if isinstance(found, str) else found or {}
        return {f"{place.format(number)}{suffix}": outputs for place, outputs in parts.items()}

    def converted(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """A tensor of the model as the file has it."""
        return weight if self.family.convert is None else self.family.convert(name, weight)

    def heads_of(self, name: str) -> int:
        """The heads whose rows of a tensor must be reordered; 0 for none."""
        found = _QK.search(name) if self.family.interleaved else None
        return 0 if found is None else self.heads if found[1] == "q" else self.kv_heads

    def add_to(self, writer: gguf.GGUFWriter) -> None:
        """Write the figures."""
        config = self.config
        writer.add_vocab_size(self.vocab_size)
        writer.add_block_count(self.layers)
        writer.add_context_length(self._context())
        writer.add_embedding_length(int(config["hidden_size"]))
        writer.add_feed_forward_length(int(config["intermediate_size"]))
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_key_length(self.head_dim)
        writer.add_value_length(self.head_dim)
        writer.add_layer_norm_rms_eps(float(config.get("rms_norm_eps") or 1e-6))
        self._add_rope(writer)
        for key, value in self.family.figures.items():
            writer.kv_data[0].pop(f"{self.name}.{key}", None)
            if isinstance(value, Sequence) and not isinstance(value, str):
                writer.add_array(f"{self.name}.{key}", list(value))
            else:
                writer.add_key_value(f"{self.name}.{key}", value, _type_of(value))

    def _context(self) -> int:
        """Tokens of the longest sequence. Some models with yarn state the positions before it."""
        positions, parameters = int(self.config["max_position_embeddings"]), self.rope.parameters
        original, factor = (parameters.get(key) for key in ("original_max_position_embeddings", "factor"))
        return max(positions, int(original * factor)) if self.rope.kind == "yarn" and original and factor else positions

    def _add_rope(self, writer: gguf.GGUFWriter) -> None:
        rope, parameters = self.rope, self.rope.parameters
        writer.add_rope_dimension_count(rope.rotary)
        writer.add_rope_freq_base(float(rope.theta))
        if rope.kind == "linear":
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(float(parameters["factor"]))
        if rope.kind == "yarn":
            original = self.config.get("original_max_position_embeddings")
            original = original or parameters.get("original_max_position_embeddings")
            original = original or self.config["max_position_embeddings"]
            factor = float(parameters.get("factor") or self.config["max_position_embeddings"] / original)
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(factor)
            writer.add_rope_scaling_orig_ctx_len(int(original))
            writer.add_rope_scaling_yarn_beta_fast(float(parameters.get("beta_fast") or 32))
            writer.add_rope_scaling_yarn_beta_slow(float(parameters.get("beta_slow") or 1))
            # llama.cpp multiplies this by 0.1 ln(factor) + 1, the usual amplitude.
            writer.add_rope_scaling_attn_factors(rope.amplitude / _usual_amplitude(factor))

    def vectors(self) -> dict[str, NDArray[np.float32]]:
        """The vectors that only the file has: the family's, and what each RoPE frequency of Llama 3 is divided by."""
        found = {name: np.array(values, dtype=np.float32) for name, values in self.family.vectors.items()}
        if self.rope.kind == "llama3":
            plain = {k: v for k, v in self.config.items() if k not in ("rope_scaling", "rope_parameters")}
            unscaled = dsl.Rope({**plain, "rope_theta": self.rope.theta}, self.head_dim).frequencies()
            found["rope_freqs.weight"] = (unscaled / self.rope.frequencies()).numpy()
        return found


def _type_of(value: Any) -> gguf.GGUFValueType:
    """The type in which llama.cpp reads a figure: sizes and counts are unsigned."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return gguf.GGUFValueType.UINT32 if is_count else gguf.GGUFValueType.get_type(value)


def _wrong(kind: str, what: str, fix: str) -> UserError:
    return UserError(
        f"--format gguf: the plugin of the model family {kind!r} describes it with an unknown {what}. "
        f"Fix: in its `ModelFamily.exports`, {fix}."
    )


def _number_of_expert(name: str) -> int:
    found = _EXPERT.search(name)
    return int(found[1]) if found else 0


def _usual_amplitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0


def _not_there(key: str, what: str) -> UserError:
    return UserError(f"--format gguf: config.json: `{key}` is {what}. Fix: serve the model with transformers or vLLM.")
