"""Checkpoints whose projections are quantised: the tensors that make up a weight, and its value.

Supports fine-grained FP8 (arXiv 2412.19437), NVFP4 as ModelOpt writes it, MXFP4 (OCP microscaling formats, version
1.0), and all three as compressed-tensors writes them, as the ``quantization_config`` of a ``config.json`` states it.
Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from typing import TYPE_CHECKING, Any

from surogate_core.errors import UserError
from surogate_core.files.foreign import matchers, wrong_pattern

if TYPE_CHECKING:
    from torch import Tensor

STRIP = 1 << 22
"""Approximate number of values that are dequantised at a time."""
SKIP_KEYS = ("modules_to_not_convert", "ignore", "exclude_modules")
"""The methods' keys that list the modules that are not quantised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedPart:
    """One tensor of a quantised weight."""

    suffixes: tuple[str, ...]
    """Suffixes that replace ``.weight`` in its name; the first one that exists is read."""
    dtypes: tuple[str, ...]
    """Names in a safetensors file."""
    shape: Callable[[int, int], tuple[int, ...]]
    """(outputs, inputs) → its shape."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The modules that a method leaves as they are."""

    names: frozenset[str]
    """Names, and beginnings or ends of names."""
    matches: Callable[[str], bool]
    """Whether a pattern matches a name: one with ``*``, or a regular expression after ``re:``."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Skip:
        """Those that a ``quantization_config`` lists."""
        names = tuple(str(m) for key in SKIP_KEYS for m in values.get(key) or ())
        plain = [name for name in names if not name.startswith("re:")]
        globs = [translate(name) for name in plain if set("*?[") & set(name)]
        expressions = [name.removeprefix("re:") for name in names if name not in plain]
        found = [*globs, *expressions]
        for text in found:
            if (why := wrong_pattern(text)) is not None:
                raise UserError(f"config.json: quantization_config: {text[:100]!r} {why}. Fix: correct it.")
        matches = matchers({text: text for text in found}, "config.json: quantization_config")
        return cls(frozenset(plain), lambda module: any(matches(text, module) for text in found))

    def has(self, module: str) -> bool:
        """Whether a module is among them."""
        # Looked up, not compared one by one: a model with experts has tens of thousands of modules.
        dots = [at for at, letter in enumerate(module) if letter == "."]
        parts = {module, *(module[at + 1 :] for at in dots), *(module[:at] for at in dots)}
        return not self.names.isdisjoint(parts) or self.matches(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """The format in which a checkpoint stores the weights of its projections."""

    name: str
    """Name of the format, for messages and for `WeightFormatSpec.adopts`."""
    parts: Mapping[str, QuantisedPart]
    dequantise: Callable[[Mapping[str, Tensor], int, int], Tensor]
    """(parts, first row, one past the last) → [rows, I] fp32."""
    whole: Callable[[tuple[int, ...]], tuple[int, ...]]
    """Shape of the codes → shape of the weight, or of all experts'."""
    skip: Skip
    """Modules that are not quantised."""
    rows: int = 1
    """Ranges of rows must begin at multiples of this number."""
    block: tuple[int, int] | None = None
    """Rows and columns that share a scale, if checkpoints differ in them."""
    read: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] = dict
    """The tensors of the file → the parts that `dequantise` and `WeightFormat.adopt` take."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Scheme | None:
        """The scheme of a ``config.json``; None if nothing is quantised, or by an unsupported method."""
        values = config.get("quantization_config")
        if not isinstance(values, Mapping):
            return None
        method = str(values.get("quant_method", "")).lower()
        skip = Skip.of(values)
        if method == "fp8":
            return _fp8(values.get("weight_block_size"), skip)
        if method.startswith("modelopt") and "NVFP4" in str(values.get("quant_algo", "")).upper():
            return _nvfp4(skip)
        if method == "compressed-tensors":
            return _compressed(values, skip)
        return _mxfp4(skip, _BLOCKS) if method == "mxfp4" else None

    def skips(self, module: str) -> bool:
        """Whether a module is not quantised."""
        return self.skip.has(module)

    def tensors(self, name: str, known: Iterable[str]) -> dict[str, str] | None:
        """Part → tensor of the weight of this name; None if it is not quantised.

        A part that is missing has the name that it should have.
        """
        module, dot, last = name.rpartition(".")
        if last != "weight" or not dot or self.skips(module):
            return None
        names = {
            part: next((f"{module}{s}" for s in p.suffixes if f"{module}{s}" in known), f"{module}{p.suffixes[0]}")
            for part, p in self.parts.items()
        }
        own = [n for n in names.values() if n != name and n in known]
        return names if own else None

    def weight_of(self, name: str, known: Iterable[str]) -> str:
        """The weight that a tensor of the file belongs to; its own name if it is not a part."""
        for part in self.parts.values():
            for suffix in part.suffixes:
                weight = name.removesuffix(suffix) + ".weight"
                if name.endswith(suffix) and name in (self.tensors(weight, known) or {}).values():
                    return weight
        return name

    def into(self, parts: Mapping[str, Tensor], target_OI: Tensor) -> None:
        """Dequantise a weight into `target_OI`, of any float dtype and device, a strip at a time."""
        outputs, inputs = target_OI.shape
        step = max(self.rows, STRIP // max(1, inputs) // self.rows * self.rows)
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            target_OI[first:last].copy_(self.dequantise(parts, first, last))


def _up(value: int, block: int) -> int:
    return -(-value // block)


def _compressed(values: Mapping[str, Any], skip: Skip) -> Scheme | None:
    """Those formats of compressed-tensors that store all projections in one way."""
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        return None
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"]:
        return None
    match group.get("format") or values.get("format"):
        case "nvfp4-pack-quantized":
            return _nvfp4(skip, packed=True)
        case "mxfp4-pack-quantized":
            return _mxfp4(skip, _PAIRS)
        case "float-quantized" if weights.get("num_bits") == 8 and weights.get("strategy") == "block":
            return _fp8(weights.get("block_structure"), skip, scales=".weight_scale")
    return None


def _fp8(block_size: Any, skip: Skip, *, scales: str = ".weight_scale_inv") -> Scheme | None:
    if not isinstance(block_size, list | tuple) or [type(b) for b in block_size] != [int, int]:
        return None
    height, width = block_size

    def dequantise(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        codes = parts["codes"][first:last].float()
        of_blocks = parts["scales"][first // height : _up(last, height)].float()
        wide = of_blocks.repeat_interleave(height, 0)[: len(codes)].repeat_interleave(width, 1)
        return codes * wide[:, : codes.shape[1]]

    return Scheme(
        name="fine-grained FP8",
        parts={
            "codes": QuantisedPart(suffixes=(".weight",), dtypes=("F8_E4M3",), shape=lambda o, i: (o, i)),
            "scales": QuantisedPart(
                suffixes=(scales,),
                dtypes=("F32", "BF16"),
                shape=lambda o, i: (_up(o, height), _up(i, width)),
            ),
        },
        dequantise=dequantise,
        whole=lambda codes: codes,
        skip=skip,
        rows=height,
        block=(height, width),
    )


def _nvfp4(skip: Skip, *, packed: bool = False) -> Scheme:
    """`packed`: as compressed-tensors writes it, with the inverse of ModelOpt's scale of the matrix."""

    def dequantise(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        from surogate_core.formats import fp4

        values = fp4.values(fp4.unpaired(parts["codes"][first:last]))
        return values * parts["scales"][first:last].float().repeat_interleave(16, 1) * parts["decode"].float()

    def inverted(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**parts, "decode": 1 / parts["decode"].float()}

    return Scheme(
        name="compressed-tensors NVFP4" if packed else "ModelOpt NVFP4",
        parts={
            "codes": QuantisedPart(
                suffixes=(".weight_packed" if packed else ".weight",), dtypes=("U8",), shape=lambda o, i: (o, i // 2)
            ),
            "scales": QuantisedPart(suffixes=(".weight_scale",), dtypes=("F8_E4M3",), shape=lambda o, i: (o, i // 16)),
            "decode": QuantisedPart(
                suffixes=(".weight_global_scale" if packed else ".weight_scale_2",),
                dtypes=("F32",),
                shape=lambda o, i: (),
            ),
        },
        dequantise=dequantise,
        whole=lambda codes: (*codes[:-1], 2 * codes[-1]),
        skip=skip,
        read=inverted if packed else dict,
    )


_BLOCKS = {
    "codes": QuantisedPart(suffixes=(".weight_blocks", "_blocks"), dtypes=("U8",), shape=lambda o, i: (o, i // 32, 16)),
    "scales": QuantisedPart(suffixes=(".weight_scales", "_scales"), dtypes=("U8",), shape=lambda o, i: (o, i // 32)),
}
"""MXFP4 as transformers writes it."""
_PAIRS = {
    "codes": QuantisedPart(suffixes=(".weight_packed",), dtypes=("U8",), shape=lambda o, i: (o, i // 2)),
    "scales": QuantisedPart(suffixes=(".weight_scale",), dtypes=("U8",), shape=lambda o, i: (o, i // 32)),
}
"""MXFP4 as compressed-tensors writes it."""


def _mxfp4(skip: Skip, parts: Mapping[str, QuantisedPart]) -> Scheme:
    blocks = parts is _BLOCKS

    def dequantise(parts: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        import torch

        from surogate_core.formats import fp4

        values = fp4.values(fp4.unpaired(parts["codes"][first:last].flatten(1)))
        exponents = parts["scales"][first:last]
        # E8M0: 255 is NaN, which `ldexp` does not know.
        powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
        powers = torch.where(exponents == 255, torch.nan, powers)
        return values * powers.repeat_interleave(32, 1)

    return Scheme(
        name="MXFP4",
        parts=parts,
        dequantise=dequantise,
        whole=lambda codes: (*codes[:-2], 32 * codes[-2]) if blocks else (*codes[:-1], 2 * codes[-1]),
        skip=skip,
    )
