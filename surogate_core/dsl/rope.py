"""Rotary position embedding (arXiv 2104.09864): the tables for `kernels.ops.rope`, and the rotation of heads.

`Rope` reads ``rope_parameters`` (transformers 5), or ``rope_scaling``, ``rope_theta`` and ``partial_rotary_factor``
(before), of a ``config.json``. The frequencies follow transformers, operation for operation, so that angles agree at
positions where one unit in the last place would show.

Shape suffixes: N tokens, H heads, E head features, P pairs of features that are rotated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from surogate_core.dsl.dims import Dim, not_computed, read_key
from surogate_core.errors import UserError
from surogate_core.kernels import ops

_ORIGINAL = "original_max_position_embeddings"
DEFAULT_THETA = 10_000.0
"""Base if ``config.json`` names none."""


class Rope:
    """The RoPE of a ``config.json``; `UserError` when it is none that this module computes.

    Kinds: default; linear (position interpolation, arXiv 2306.15595); dynamic (NTK-aware base, by document
    length); yarn (arXiv 2309.00071); longrope (arXiv 2402.13753, short or long factors by document length); llama3
    (Llama 3.1, arXiv 2407.21783); proportional (Gemma 4: frequencies over the whole head, of which the slow ones are
    zero).
    """

    def __init__(self, config: Mapping[str, Any], head_dim: int):
        if head_dim % 2:
            raise UserError(f"config.json: `head_dim` must be even for RoPE, not {head_dim}.")
        self.config, self.head_dim = config, head_dim
        self.key, self.parameters = _parameters(config)
        self.kind = _kind(self.parameters)
        self.theta = self._number("rope_theta", above=1.0, default=config.get("rope_theta") or DEFAULT_THETA)
        if self.kind not in KINDS:
            raise not_computed([f"`{self.key}`: RoPE scaling `{self.kind}` is not available, only {', '.join(KINDS)}"])
        self.partial = self._partial()
        self.rotary = head_dim if self.kind == "proportional" else int(head_dim * self.partial)
        """Features of a head that are rotated, its first ones."""
        if self.rotary % 2 or self.rotary < 2:
            raise not_computed(
                [f"`partial_rotary_factor` is {self.partial!r}: {self.rotary} of {head_dim} features of a head, and "
                 f"RoPE rotates pairs of them"]
            )  # fmt: skip
        # A wrong parameter is an error here.
        self.frequencies()
        _ = self.amplitude

    def frequencies(
        self,
        lengths_N: Tensor | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> Tensor:
        """Radians per position, [P]; [N, P] of kinds `BY_LENGTH` with `lengths_N`, each token's document length."""
        exponents = torch.arange(0, self.rotary, 2, dtype=dtype, device=device) / self.rotary
        return KINDS[self.kind](self, exponents, lengths_N)

    @property
    def amplitude(self) -> float:
        """Factor of cos and sin: the attention factor of yarn and longrope, otherwise 1."""
        if self.kind not in ("yarn", "longrope"):
            return 1.0
        if self.parameters.get("attention_factor") is not None:
            return self._number("attention_factor", above=0.0)
        if self.kind == "longrope":
            longer = self._number("factor", above=0.0, default=self._max_positions / self.original)
            return 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(self.original))
        factor = self._yarn_factor
        mscale, all_dim = (self._number(key, above=-math.inf, default=0.0) for key in ("mscale", "mscale_all_dim"))
        if mscale and all_dim:
            return _mscale(factor, mscale) / _mscale(factor, all_dim)
        return _mscale(factor, 1.0)

    def tables(self, positions_N: Tensor) -> dict[str, Tensor]:
        """cos and sin, each [N, P] fp32, of positions that start at 0 in each document."""
        lengths_N = document_lengths(positions_N) if self.kind in BY_LENGTH else None
        angles = positions_N.float()[:, None] * self.frequencies(lengths_N, device=positions_N.device)
        cos, sin = angles.cos(), angles.sin()
        if (amplitude := self.amplitude) != 1.0:
            cos, sin = cos * amplitude, sin * amplitude
        return {"cos": cos, "sin": sin}

    def _partial(self) -> float:
        """The share of a head's features that is rotated."""
        key = "partial_rotary_factor"
        value = self.parameters.get(key)
        value = self.config.get(key) if value is None else value
        share = _checked(key, 1.0 if value is None else value, above=0.0)
        if share > 1:
            raise UserError(f"config.json: `{key}` must be at most 1, not {share!r}.")
        return share

    def factors(self, key: str, exponents: Tensor) -> Tensor:
        """[P]: the numbers that longrope divides the frequencies by, ``short_factor`` or ``long_factor``."""
        value = self.parameters.get(key)
        pairs = self.rotary // 2
        numbers = isinstance(value, list | tuple) and all(
            isinstance(one, int | float) and not isinstance(one, bool) and math.isfinite(one) and one > 0
            for one in value
        )
        if not numbers or len(value) != pairs:  # type: ignore[arg-type]
            found = f"{len(value)} values" if isinstance(value, list | tuple) else repr(value)
            raise UserError(
                f"config.json: `{self.key}.{key}` must be {pairs} numbers above 0, one for each rotated pair of "
                f"features, not {found}. Fix: use the model's own config.json."
            )
        return torch.tensor(value, dtype=exponents.dtype, device=exponents.device)

    @property
    def _factor(self) -> float:
        return self._number("factor", least=1.0)

    @property
    def _yarn_factor(self) -> float:
        if "factor" in self.parameters and self.parameters["factor"] is None:
            return self._max_positions / self.original
        return self._factor

    @property
    def _max_positions(self) -> float:
        return _checked("max_position_embeddings", read_key(self.config, "max_position_embeddings"), least=1.0)

    @property
    def original(self) -> float:
        """Positions that the model was trained on before scaling."""
        key = _ORIGINAL
        beside = self.config.get(key)
        if beside is not None:
            return _checked(key, beside, least=1.0)
        return self._number(key, least=1.0) if self.parameters.get(key) is not None else self._max_positions

    def _number(
        self, key: str, *, above: float | None = None, least: float | None = None, default: float | None = None
    ) -> float:
        value = self.parameters.get(key)
        if value is None:
            if default is None:
                raise UserError(
                    f"config.json: `{self.key}`: RoPE scaling `{self.kind}` needs `{key}`. "
                    f"Fix: use the model's own config.json."
                )
            value = default
        return _checked(f"{self.key}.{key}", value, above=above, least=least)


def rotated(x_NHE: Tensor, cos_NP: Tensor, sin_NP: Tensor, *, interleaved: bool = False) -> Tensor:
    """[N, H, E]: heads of queries or keys with their first 2·P features rotated, feature i against i + P.

    `interleaved`: features 2i and 2i + 1 are a pair, and the result has the first of all pairs before the second ones.
    Scores do not depend on the order of features, as long as queries and keys have the same one.
    """
    size = 2 * cos_NP.shape[1]
    turned, rest = (x_NHE, None) if size == x_NHE.shape[2] else (x_NHE[..., :size], x_NHE[..., size:])
    if interleaved:
        turned = torch.cat((turned[..., 0::2], turned[..., 1::2]), dim=-1)
    y_NHE = ops.rope(turned, cos_NP, sin_NP)
    return y_NHE if rest is None else torch.cat((y_NHE, rest), dim=-1)


def document_lengths(positions_N: Tensor) -> Tensor:
    """[N] the length of the document that each token belongs to; documents start where the position is 0.

    Without a transfer to the host, so that it can be captured in a CUDA graph.
    """
    documents_N = (positions_N == 0).cumsum(0)
    last = torch.zeros(len(positions_N) + 1, dtype=positions_N.dtype, device=positions_N.device)
    return last.scatter_reduce(0, documents_N, positions_N, "amax")[documents_N] + 1


def scaled_config(
    config: Mapping[str, Any], scaling: str | Mapping[str, Any] | None, positions: int | None
) -> dict[str, Any]:
    """The ``config.json`` with the RoPE scaling and the number of positions that a run sets.

    A kind's name stretches the model's positions to `positions`. A mapping is used unchanged, except that `positions`
    may supply its ``factor``. transformers computes from the result the same values that are trained.
    """
    if kinds := [name for name, value in (config.get("rope_parameters") or {}).items() if isinstance(value, Mapping)]:
        if scaling is not None:
            raise UserError(
                f"rope_scaling: the model has a RoPE for each type of its layers ({', '.join(kinds)}), and one scaling "
                f"for all of them would be another model. Fix: leave rope_scaling at null."
            )
        return {**config, "max_position_embeddings": positions or config.get("max_position_embeddings")}
    key, old = _parameters(config)
    if key == "rope_parameters" and not old:
        key = "rope_scaling"  # where every version of transformers reads it
    kind = _kind(old)
    trained = Dim("max_position_embeddings").size(config)
    new: dict[str, Any] = (
        {"rope_type": scaling} if isinstance(scaling, str) else dict(old if scaling is None else scaling)
    )
    chosen = new.setdefault("rope_type", new.pop("type", "default"))
    if scaling is not None:
        if isinstance(scaling, str) and kind != "default":
            raise UserError(
                f"rope_scaling: the model already has RoPE scaling `{kind}`. Fix: give all of the new one's parameters."
            )
        if chosen != "default" and "factor" not in new:
            if positions is None or positions <= trained:
                raise UserError(
                    f"rope_scaling: {chosen} needs to know how far to stretch. "
                    f"Fix: set max_model_len above the model's {trained} positions."
                )
            new["factor"] = positions / trained
        if old.get("rope_theta") is not None:
            new.setdefault("rope_theta", old["rope_theta"])
    if chosen in ("yarn", "llama3", "longrope") and config.get(_ORIGINAL) is None:
        new.setdefault(_ORIGINAL, old.get(_ORIGINAL) or trained)
    changed = {**config, key: new if new != {"rope_type": "default"} else None}
    if positions is not None and chosen != "dynamic":
        changed["max_position_embeddings"] = positions  # dynamic counts from the trained ones
    elif positions is not None and (scaling is None or new["factor"] != positions / trained):
        raise UserError(
            f"max_model_len: dynamic RoPE scaling stretches {trained} positions by its `factor`. "
            f"Fix: leave max_model_len at null, or `factor` out of rope_scaling."
        )
    return changed


def covering(config: Mapping[str, Any], length: int) -> dict[str, Any]:
    """The ``config.json`` of a model from scratch, with positions for documents of `length` tokens.

    It changes only if the number of positions affects no angle, and all layers have one RoPE.
    """
    if _of_layer_types(config):
        return dict(config)
    parameters = _parameters(config)[1]
    kind, positions = _kind(parameters), config.get("max_position_embeddings")
    is_fixed = kind in ("default", "linear") or (
        kind in ("yarn", "llama3") and bool(config.get(_ORIGINAL) or parameters.get(_ORIGINAL))
    )
    if is_fixed and isinstance(positions, int) and positions < length:
        return {**config, "max_position_embeddings": length}
    return dict(config)


def longest_covered(config: Mapping[str, Any]) -> float:
    """Tokens of the longest document that the model's positions cover; infinite if none is too long.

    Models differ in whether ``max_position_embeddings`` includes the stretch of linear and yarn; the larger
    interpretation is used.
    """
    if layered := _of_layer_types(config):
        return max(map(longest_covered, layered))
    positions = config.get("max_position_embeddings")
    _, parameters = _parameters(config)
    kind = _kind(parameters)
    if not isinstance(positions, int) or kind == "dynamic":
        return math.inf
    factor = parameters.get("factor")
    if kind in ("linear", "yarn") and isinstance(factor, int | float):
        original = config.get(_ORIGINAL) or parameters.get(_ORIGINAL) if kind == "yarn" else None
        return max(positions, (original or positions) * factor)
    return positions


def longest_fixed(config: Mapping[str, Any]) -> float:
    """Tokens of the longest document whose first angles do not depend on its length; infinite but for `BY_LENGTH`."""
    return min((float(end) for _, end in _ends(config)), default=math.inf)


def switches(config: Mapping[str, Any]) -> frozenset[int]:
    """Lengths beyond which all angles of a document are others, and then stay: the ends of longrope's short factors."""
    return frozenset(end for kind, end in _ends(config) if kind == "longrope")


def angles_of(config: Mapping[str, Any], length: int) -> tuple[int, ...]:
    """A key of the angles of a document of `length` tokens: documents with equal keys have equal angles."""
    return tuple(int(length > end) if kind == "longrope" else max(length, end) for kind, end in _ends(config))


def _ends(config: Mapping[str, Any]) -> list[tuple[str, int]]:
    """(kind, tokens of the longest document with the first angles) of each RoPE of `BY_LENGTH`."""
    found = []
    for one in _of_layer_types(config) or [dict(config)]:
        parameters = _parameters(one)[1]
        kind = _kind(parameters)
        original = one.get(_ORIGINAL) or parameters.get(_ORIGINAL) if kind == "longrope" else None
        if kind in BY_LENGTH:
            found.append((kind, int(original or Dim("max_position_embeddings").size(one))))
    return found


def check_covers(covered: float, longest: int) -> None:
    """Raise `UserError` if a document of `longest` tokens exceeds the model's positions, which cover `covered`."""
    if longest > covered:
        end = int(covered)
        raise UserError(
            f"The longest document has {longest:,} tokens, but the model's positions end at {end:,} "
            f"(max_position_embeddings of its config.json): tokens beyond them would be trained at positions that the "
            f"model does not know. Fix: sequence_len={end} or max_length={end}, so that truncation_strategy drops, "
            f"cuts or splits longer documents; or stretch the model with rope_scaling=yarn max_model_len={longest}."
        )


def of_layer_type(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """A ``config.json`` with the RoPE of one layer type alone: as it is, unless ``rope_parameters`` has one for each.

    Raises `UserError` if it has none for this type.
    """
    nested = config.get("rope_parameters")
    is_nested = isinstance(nested, Mapping) and any(isinstance(one, Mapping) for one in nested.values())
    if not layer_type or not isinstance(nested, Mapping) or not is_nested:
        return config
    if not isinstance(own := nested.get(layer_type), Mapping):
        raise not_computed([f"`rope_parameters` has no RoPE for layers of type `{layer_type}`"])
    return {**config, "rope_parameters": own}


def _of_layer_types(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A ``config.json`` with the RoPE of each layer type; none if all layers have one."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping):
        return []
    return [{**config, "rope_parameters": one} for one in nested.values() if isinstance(one, Mapping)]


def _kind(parameters: Mapping[str, Any]) -> str:
    kind = str(parameters.get("rope_type") or parameters.get("type") or "default")
    # The first files of Phi-3 name longrope so.
    return "longrope" if kind == "su" or (kind == "yarn" and parameters.get("short_factor")) else kind


def _parameters(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(the key that they are under, the RoPE parameters)."""
    given = {key: config[key] for key in ("rope_scaling", "rope_parameters") if config.get(key)}
    for key, parameters in given.items():
        if not isinstance(parameters, Mapping):
            raise UserError(f"config.json: `{key}` must be an object, not {parameters!r}.")
        if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
            raise not_computed([f"`{key}`: RoPE by layer type ({', '.join(nested)}) is not available here"])
    if len(given) == 2 and given["rope_scaling"] != given["rope_parameters"]:
        raise UserError(
            "config.json: `rope_scaling` and `rope_parameters` are both given and differ. "
            "Fix: use the model's own config.json."
        )
    return next(iter(given.items()), ("rope_parameters", {}))


def _checked(key: str, value: Any, *, above: float | None = None, least: float | None = None) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (above is not None and value <= above) or (least is not None and value < least):
        bound = f" above {above:g}" if above is not None else f" of at least {least:g}"
        raise UserError(f"config.json: `{key}` must be a number{bound}, not {value!r}.")
    return value  # an int stays one: transformers divides by it as it is


def _default(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    return 1.0 / rope.theta**exponents


def _linear(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    return _default(rope, exponents, None) / rope._factor


def _dynamic(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    """The base grows with the document, once it is longer than the model's positions."""
    factor, trained, size = rope._factor, rope._max_positions, rope.rotary
    if size <= 2:
        raise UserError(
            f"config.json: `head_dim` must have at least 4 rotated features for dynamic RoPE scaling, not {size}."
        )
    if lengths_N is None:
        return _default(rope, exponents, None)
    stretch_N = factor * lengths_N.double().clamp(min=trained) / trained - (factor - 1)
    base_N = rope.theta * stretch_N ** (size / (size - 2))
    return 1.0 / base_N.to(exponents.dtype)[:, None] ** exponents


def _yarn(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    """Fast dims unchanged, slow ones divided by the factor, a ramp between."""
    size, theta, original = rope.rotary, rope.theta, rope.original
    fast = rope._number("beta_fast", above=0.0, default=32)
    slow = rope._number("beta_slow", above=0.0, default=1)

    def dim_of(rotations: float) -> float:
        return (size * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(theta))

    low, high = dim_of(fast), dim_of(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(size // 2, dtype=exponents.dtype, device=exponents.device)
    extrapolated = 1 - ((steps - low) / (high - low)).clamp(0, 1)
    powers = theta**exponents
    return 1.0 / (rope._yarn_factor * powers) * (1 - extrapolated) + 1.0 / powers * extrapolated


def _longrope(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    """Each frequency divided by a factor of its own: short in documents up to the original length, long in others."""
    short, long = (1.0 / (rope.factors(key, exponents) * rope.theta**exponents) for key in _FACTORS)
    if lengths_N is None:
        return short
    return torch.where((lengths_N > rope.original)[:, None], long, short)


def _proportional(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    """The fast frequencies of the whole head; the others are zero, so that their features do not turn."""
    count = int(rope.partial * rope.head_dim // 2)
    factor = rope._number("factor", above=0.0, default=1.0)
    turning = torch.arange(len(exponents), device=exponents.device) < count
    return torch.where(turning, _default(rope, exponents, None), 0.0) / factor


def _llama3(rope: Rope, exponents: Tensor, lengths_N: Tensor | None) -> Tensor:
    """Short waves unchanged, long ones stretched by the factor, a blend between."""
    factor, original = rope._factor, rope.original
    low = rope._number("low_freq_factor", above=0.0)
    high = rope._number("high_freq_factor", above=low)
    plain = _default(rope, exponents, None)
    wavelengths = 2 * math.pi / plain
    stretched = torch.where(wavelengths > original / low, plain / factor, plain)
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * stretched / factor + blend * stretched
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, blended, stretched)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


KINDS: Mapping[str, Callable[[Rope, Tensor, Tensor | None], Tensor]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}
"""Kind → frequencies."""
_FACTORS = ("short_factor", "long_factor")
BY_LENGTH = ("dynamic", "longrope")
"""Kinds whose angles depend on the length of the document."""
