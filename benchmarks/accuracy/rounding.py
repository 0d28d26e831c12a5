"""`rounding`: the loss that the rounding of each operand costs, without any training.

The held-out loss of the unquantised model is compared with that of the same model when only weights, only activations,
or both are rounded, then when a single layer, or a single kind of projection, is. Differences are over pairs of
documents. NVFP4's values are also compared with `reference`, which is written from the formulas in float64 and shares
no code with the recipe.

Suffixes: N tokens, D features, I inputs, O outputs, R rows, K columns.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from surogate_command_numerics.rounding import Roundings
from torch import Tensor

from surogate_core.bundles import Role
from surogate_core.config.composing.grammar import encode
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.data import pipeline
from surogate_core.data.sampler import EvalBatches
from surogate_core.dsl.declare import Multiply
from surogate_core.dsl.slots import Gemm, TracedSlot, plain_gemm
from surogate_core.engine.planning.pieces import Piece, Relayed
from surogate_core.generate.losses import DocumentSums, documents_of
from surogate_core.generate.weights import Layer, Weights
from surogate_core.inference.generation import named, prepare
from surogate_core.measure.stderr import ratio_stderr
from surogate_core.plugins import load_plugins
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_recipe, resolve_weight_format

CHOICES: Mapping[str, Sequence[str]] = {
    "nvfp4": ["recipe=nvfp4"],
    "nvfp4, blocks of 1x16": ["recipe=nvfp4", "recipe.frozen_blocks=1x16"],
    "nvfp4, blocks of 1x16, searched": ["recipe=nvfp4", "recipe.frozen_blocks=1x16", "recipe.search_scales=true"],
    "fp8-hybrid": ["recipe=fp8-hybrid"],
    "base in nf4": ["qlora_format=nf4"],
    "base in fp8": ["qlora_format=fp8"],
    "base in nvfp4": ["qlora_format=nvfp4"],
    "base in nvfp4, searched": ["qlora_format=nvfp4", "qlora_search_scales=true"],
}
"""Name of a rounding → the keys that choose it."""
DETAILED = "nvfp4"
"""The rounding that is measured layer by layer."""
Takes = Callable[[int, str], bool]
"""(number of the layer, name of the projection) → whether its operands are rounded."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--model", type=Path, help="the model; OUT/pretrain/model without it")
    parser.add_argument(
        "--rows", type=Path, nargs="*", help="files to measure the loss on; those held out of pre-training without it"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batches", type=int, default=16, help="micro-batches of 8 rows")
    parser.add_argument("--choices", nargs="*", choices=CHOICES, default=list(CHOICES))


TINY = {"length": 256, "batches": 1, "choices": ["nvfp4", "base in nf4"]}
"""Options of a trial on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A loss against that of the unquantised model."""

    loss: float
    difference: float
    stderr: float

    def __str__(self) -> str:
        return f"{self.loss:.4f} | {self.difference:+.4f} ± {self.stderr:.4f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedWeights(Weights):
    """Weights whose layers run eagerly, with products of one's own."""

    gemm: Callable[[int], Gemm]
    """Number of a layer → how it multiplies."""

    def layers(self, function: object = None) -> Iterator[Layer]:
        """The layers in order."""
        for number, piece in enumerate(self.plan.layers):
            yield self._eager(piece, self.gemm(number))

    def _eager(self, piece: Piece, gemm: Gemm) -> Layer:
        assert piece.block is not None
        tensors = {s.name: t for s, t in zip(piece.specs, self.parameters.inputs(piece), strict=True)}
        bound = piece.block.bind(tensors, piece.slots, Multiply(gemm), experts=piece.experts)

        def run(x_ND: Tensor, tables: Sequence[Tensor], relayed: Relayed) -> Tensor:
            bound.taken = piece.taken(relayed)
            y_ND, _ = bound.outputs(x_ND, dict(zip(self.plan.tables, tables, strict=True)))
            piece.keep(relayed, [bound.given[spec.name] for spec in piece.gives])
            return y_ND

        return run


def run(given: argparse.Namespace) -> None:
    """Measure, and write rounding.md and rounding.json."""
    registry = load_plugins()
    weights, batches = _opened(given, registry)
    exact = _documents(weights, batches, lambda number: plain_gemm)
    loss = sum(d.loss for d in exact) / sum(d.weight for d in exact)
    found: dict[str, Any] = {"loss": loss, "documents": len(exact), "roundings": {}, "layers": {}, "projections": {}}
    text = [f"Unquantised: {loss:.4f}, {len(exact)} documents.", ""]
    text += ["| rounding | operands | loss | difference |", "| --- | --- | --- | --- |"]
    for name in given.choices:
        roundings = _rounding(given, registry, name)
        operands: Sequence[Sequence[Role]] = (["weight"], ["activation"], ["weight", "activation"])
        for roles in operands if len(roundings.roles) > 1 else operands[:1]:
            one = _compared(weights, batches, exact, roundings, roles)
            found["roundings"][f"{name}: {' and '.join(roles)}"] = asdict(one)
            text.append(f"| {name} | {' and '.join(roles)} | {one} |")
            print(text[-1], flush=True)
    roundings = _rounding(given, registry, DETAILED)
    both: Sequence[Role] = ("weight", "activation")
    text += ["", f"`{DETAILED}` in one place only:", "", "| place | loss | difference |", "| --- | --- | --- |"]
    for number in range(len(weights.plan.layers)):
        one = _compared(weights, batches, exact, roundings, both, _only_layer(number))
        found["layers"][number] = asdict(one)
        text.append(f"| layer {number} | {one} |")
    for kind in sorted({slot.module for slot in weights.plan.layers[0].slots}):
        one = _compared(weights, batches, exact, roundings, both, _only_module(kind))
        found["projections"][kind] = asdict(one)
        text.append(f"| all {kind} | {one} |")
    different, values = against_reference(weights)
    found["reference"] = {"different": different, "values": values}
    text += ["", f"NVFP4's values differ from the reference in float64 for {different:,} of {values:,} weights."]
    (given.out / "rounding.md").write_text("\n".join(text) + "\n")
    (given.out / "rounding.json").write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(text))


def _only_layer(number: int) -> Takes:
    return lambda layer, module: layer == number


def _only_module(name: str) -> Takes:
    return lambda layer, module: module == name


def _opened(given: argparse.Namespace, registry: Registry) -> tuple[Weights, list[Any]]:
    """The weights in the model's dtype, and the micro-batches."""
    config = _config(given, registry, ["recipe=bf16"])
    prepared = prepare(named(str(_model(given))), config, registry)
    data = pipeline.prepare(
        prepared.config, prepared.tokenizer, registry.all("dataset"), trains_prompts=False, progress=lambda event: None
    )
    assert data.eval is not None
    batches = EvalBatches(data.eval, rows_per_micro_batch=config.per_device_train_batch_size)
    return prepared.load(registry), list(islice(batches, given.batches))


def _model(given: argparse.Namespace) -> Path:
    model: Path = given.model or given.out / "pretrain/model"
    return model


def _config(given: argparse.Namespace, registry: Registry, words: Sequence[str]) -> RunConfig:
    files = given.rows or [given.out / "data" / name for name in ("text-held.jsonl", "problems-held.jsonl")]
    rows = encode([{"path": str(file)} for file in files])
    keys = [f"model={encode(str(_model(given)))}", f"datasets={rows}", f"validation_datasets={rows}", "lora=true"]
    keys += [f"sequence_len={given.length}", "truncation_strategy=split", "per_device_train_batch_size=8"]
    return load_run_config([*keys, *words], config_file=None, registry=registry)


def _rounding(given: argparse.Namespace, registry: Registry, name: str) -> Roundings:
    config = _config(given, registry, CHOICES[name])
    prepared = prepare(named(str(_model(given))), config, registry)
    weight_format = resolve_weight_format(config, registry, prepared.model)
    if weight_format is not None:
        return Roundings.of_format(weight_format)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Roundings.of(resolve_recipe(config, registry, device))


def _rounded(roundings: Roundings, roles: Sequence[Role]) -> Gemm:
    rounded = roundings.dense
    assert rounded is not None

    def multiply(x_NI: Tensor, weight_OI: Tensor, slot: TracedSlot) -> Tensor:
        if "activation" in roles:
            x_NI = rounded(x_NI, "activation")[0].to(x_NI.dtype)
        if "weight" in roles:
            weight_OI = rounded(weight_OI, "weight")[0].to(weight_OI.dtype)
        return x_NI @ weight_OI.t()

    return multiply


def _documents(weights: Weights, batches: Sequence[Any], gemm: Callable[[int], Gemm]) -> list[DocumentSums]:
    parts = {name: getattr(weights, name) for name in ("plan", "parameters", "programs", "store", "rows")}
    eager = RoundedWeights(**parts, gemm=gemm)
    return [one for found in documents_of(eager, batches) for one in found]


def _compared(
    weights: Weights,
    batches: Sequence[Any],
    exact: Sequence[DocumentSums],
    roundings: Roundings,
    roles: Sequence[Role],
    takes: Takes = lambda layer, module: True,
) -> Difference:
    """The loss with the operands of some places rounded."""
    rounded = _rounded(roundings, roles)

    def of_layer(number: int) -> Gemm:
        return lambda x, w, slot: (rounded if takes(number, slot.module) else plain_gemm)(x, w, slot)

    return difference(_documents(weights, batches, of_layer), exact)


def difference(found: Sequence[DocumentSums], exact: Sequence[DocumentSums]) -> Difference:
    """The loss of documents against that of the same documents, with the standard error of pairs."""
    weight = math.fsum(d.weight for d in exact)
    pairs = [(a.loss - b.loss, a.weight) for a, b in zip(found, exact, strict=True)]
    mean = math.fsum(value for value, _ in pairs) / weight
    loss = math.fsum(d.loss for d in found) / weight
    return Difference(loss=loss, difference=mean, stderr=ratio_stderr(pairs, mean))


# ---------------------------------------------------------------------------------------- the published formulas

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_SUBNORMAL = [m / 8 * 2.0**-6 for m in range(8)]
E4M3 = np.array([*_SUBNORMAL, *((1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8))])
E4M3 = E4M3[E4M3 <= 448]


def nearest(grid: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest value of a grid of magnitudes, ties to the even place, with the sign of x."""
    size = np.minimum(np.abs(x), grid[-1])
    upper = np.clip(np.searchsorted(grid, size), 1, len(grid) - 1)
    middle = (grid[upper - 1] + grid[upper]) / 2
    up = (size > middle) | ((size == middle) & (upper % 2 == 0))
    return np.sign(x) * grid[np.where(up, upper, upper - 1)]


def reference(x_RK: NDArray[np.float64], *, height: int) -> NDArray[np.float64]:
    """A matrix rounded to NVFP4 with four-over-six in blocks of `height` × 16 (arXiv 2509.25149, 2512.02010), in
    float64. Its sides are multiples of the block's.
    """
    rows, inner = x_RK.shape
    tiles = x_RK.reshape(rows // height, height, inner // 16, 16).transpose(0, 2, 1, 3)
    amax = np.abs(tiles).max((2, 3))
    s_enc = 1536 / amax.max()
    best = error = None
    for top in (6, 4):
        scale = (nearest(E4M3, amax * s_enc / top) / s_enc)[..., None, None]
        found = nearest(E2M1, np.divide(tiles, scale, out=np.zeros_like(tiles), where=scale > 0)) * scale
        squared = ((found - tiles) ** 2).sum((2, 3))
        if best is None or error is None:
            best, error = found, squared
        else:
            best = np.where((squared < error)[..., None, None], found, best)
    assert best is not None
    return best.transpose(0, 2, 1, 3).reshape(rows, inner)


def against_reference(weights: Weights) -> tuple[int, int]:
    """(weights whose rounded value differs by more than fp32's rounding, weights) of all projections."""
    from surogate_core.formats.nvfp4 import quantise

    different = total = 0
    for piece in weights.plan.layers:
        names = {f"{slot.name}.weight" for slot in piece.slots}
        for spec, tensor in zip(piece.specs, weights.parameters.inputs(piece), strict=True):
            if spec.name not in names:
                continue
            rows, inner = (n // 16 * 16 for n in tensor.shape)
            w = tensor[:rows, :inner].float()
            found = quantise(w, square=True, four_over_six=True)
            ours = (found.blocks(rows, inner).double() * found.decode.double()).cpu().numpy()
            theirs = reference(w.double().cpu().numpy(), height=16)
            different += int((np.abs(ours - theirs) > 1e-5 * np.abs(theirs) + 1e-12).sum())
            total += w.numel()
    return different, total
