"""What a precision recipe does to a training: the same small model from the same start under each.

A 64-wide, 4-layer Qwen3 is trained in full, in fp32 outside of the recipe, on a random chain in which two
tokens decide the distribution of the next. Printed are the held-out losses and their gaps to the wide
run; and of the operands of every projection of the wide run's model after training, how each format
rounds them: relative error, the share of values that become zero and the share that saturates, by
layer and role. FP8 scales are those of each tensor's own largest value; gradients are rounded to nearest.

    python benchmarks/numerics.py [--steps 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from surogate_model_qwen3.model import build
from surogate_optimizer_adamw.adamw import AdamW
from surogate_recipe_bf16 import surogate_recipe as wide_recipe
from surogate_recipe_fp8 import FP8Options
from surogate_recipe_fp8 import surogate_recipe as fp8_recipe
from surogate_recipe_fp8.gemm import E4M3, E5M2, LIMIT
from surogate_recipe_fp8.gemm import quantise as to_fp8
from surogate_recipe_nvfp4 import NVFP4Options
from surogate_recipe_nvfp4 import surogate_recipe as nvfp4_recipe
from torch import Tensor

from surogate_core.bundles import NoOptions, Objective, OptimizerSettings, OptimizerSpec, RecipeSettings
from surogate_core.data.batch import MicroBatch
from surogate_core.dsl.slots import LinearSlot
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine, EngineSettings
from surogate_core.engine.parameters import RandomSource
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.nvfp4 import quantise as to_nvfp4
from surogate_core.kernels.ops import cross_entropy
from surogate_core.kernels.registry import KernelTable

SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}
ROWS, LENGTH, EVALUATED, RATE = 8, 64, 8, 3e-3
CPU = torch.device("cpu")
ROLES = ("activation", "weight", "gradient")
# name in the table → (recipe, its options, layers from the last that it leaves alone)
RUNS = {
    "bf16 (fp32 here)": (wide_recipe(), NoOptions(), 0),
    "fp8-hybrid": (fp8_recipe(), FP8Options(), 0),
    "nvfp4": (nvfp4_recipe(), NVFP4Options(), 0),
    "nvfp4, last layer wide": (nvfp4_recipe(), NVFP4Options(), 1),
}


def make_batch(number: int) -> MicroBatch:
    """Rows of the chain; each number gives others."""
    vocab = SHAPE["vocab_size"]
    successors = torch.randint(0, vocab, (vocab, 2, 4), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + number)
    rows = torch.randint(0, vocab, (ROWS, LENGTH), generator=generator)
    picks = torch.randint(0, 4, (ROWS, LENGTH), generator=generator)
    for t in range(2, LENGTH):
        rows[:, t] = successors[rows[:, t - 1], rows[:, t - 2] % 2, picks[:, t]]
    labels = torch.cat((rows[:, 1:], torch.full((ROWS, 1), -100)), dim=1)
    return MicroBatch(
        input_ids=rows.flatten(),
        labels=labels.flatten(),
        positions=torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS),
        cu_seqlens=torch.arange(0, ROWS * LENGTH + 1, LENGTH, dtype=torch.int32),
        max_seqlen=LENGTH,
        tokens=ROWS * LENGTH,
        label_tokens=ROWS * (LENGTH - 1),
    )


def make_engine(name: str) -> Engine:
    """The model at its start under a run's recipe."""
    recipe, options, plain_last = RUNS[name]
    return Engine(
        build(SHAPE),
        settings=EngineSettings(
            device=CPU,
            dtype=torch.float32,
            adapter_dtype=torch.float32,
            compiler="fx",
            cuda_graphs=False,
            tokens=ROWS * LENGTH,
            borders=ROWS + 1,
            max_seqlen=LENGTH,
            head_chunks=1,
            recompute=Recompute(block=False),
            weight_decay=0.1,
            max_grad_norm=1.0,
            seed=0,
            plain_last=plain_last,
        ),
        recipe=recipe,
        recipe_options=recipe.prepare(options, RecipeSettings(), CPU),
        objective=Objective(name="cross_entropy", token_loss=cross_entropy),
        optimizer=OptimizerSpec(name="adamw", build=AdamW.build),
        optimizer_settings=OptimizerSettings(),
        optimizer_options=None,
        offloader=NO_OFFLOAD,
        offloader_options=None,
        kernels=KernelTable.build(CPU, [TORCH_PACK]),
        lora=None,
        source=RandomSource(seed=0, std=0.05, device=CPU),
    )


def operands(engine: Engine, batch: MicroBatch) -> list[dict[str, list[Tensor]]]:
    """By layer and role, what its projections multiply, found by running the blocks eagerly."""
    found: list[dict[str, list[Tensor]]] = []
    tables: dict[str, Any] = {**engine.model.tables(batch.positions, torch.float32), "cu_seqlens": batch.cu_seqlens}

    def record(x_NI: Tensor, weight_OI: Tensor, slot: LinearSlot, options: Any) -> Tensor:
        y_NO = x_NI @ weight_OI.t()
        at = found[-1]
        at["activation"].append(x_NI.detach())
        at["weight"].append(weight_OI.detach())
        y_NO.register_hook(at["gradient"].append)
        return y_NO

    (embedding,) = engine.parameters.inputs(engine.embed)
    x_ND = torch.nn.functional.embedding(batch.input_ids, embedding).requires_grad_()
    for piece in engine.layers.values():
        found.append({role: [] for role in ROLES})
        tensors = {s.name: t for s, t in zip(piece.specs, engine.parameters.inputs(piece), strict=True)}
        assert piece.block is not None
        x_ND = piece.block.bind(tensors, piece.slots, gemm=record, gemm_options=None, seed=None).forward(x_ND, tables)
    norm_D, weight_VD = engine.parameters.inputs(engine.head)
    h_ND = torch.nn.functional.rms_norm(x_ND, norm_D.shape, norm_D, 1e-6)
    (cross_entropy(h_ND @ weight_VD.t(), batch.labels).sum() / batch.label_tokens).backward()
    return found


def fp8(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """(the values that x rounds to, where it saturates)."""
    kind = E5M2 if role == "gradient" else E4M3
    scale = LIMIT[kind] / x.abs().max()
    return to_fp8(x, scale, kind).float() / scale, (x * scale).abs() > LIMIT[kind]


def nvfp4(x: Tensor, role: str) -> tuple[Tensor, Tensor]:
    """(the values that x rounds to, where it is beyond the largest of its block)."""
    found = to_nvfp4(x, square=role == "weight", four_over_six=True)
    height = x.shape[0] // found.scales.shape[0]
    limits = found.scales.float().repeat_interleave(height, 0).repeat_interleave(16, 1) * 6 * found.decode
    return found.blocks(*x.shape) * found.decode, x.abs() > limits[:, : x.shape[1]]


FORMATS: dict[str, Callable[[Tensor, str], tuple[Tensor, Tensor]]] = {"fp8-hybrid": fp8, "nvfp4": nvfp4}


def rounding(tensors: list[Tensor], role: str, convert: Callable[[Tensor, str], tuple[Tensor, Tensor]]) -> list[float]:
    """[relative error, share that becomes zero, share that saturates] over the tensors."""
    error = size = zeros = saturated = count = 0.0
    for x in tensors:
        rounded, beyond = convert(x, role)
        error += float((rounded - x).double().square().sum())
        size += float(x.double().square().sum())
        zeros += float(((rounded == 0) & (x != 0)).sum())
        saturated += float(beyond.sum())
        count += x.numel()
    return [(error / size) ** 0.5, zeros / count, saturated / count]


def main() -> None:
    """Train under each recipe and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    held_out = [make_batch(10**6 + i) for i in range(EVALUATED)]
    losses: dict[str, float] = {}
    layers: list[dict[str, list[Tensor]]] = []
    for name in RUNS:
        engine = make_engine(name)
        for step in range(arguments.steps):
            engine.train_step([make_batch(step)], step=step, lr=RATE)
        losses[name], _ = engine.evaluate(held_out)
        if not layers:
            layers = operands(engine, held_out[0])
    first = next(iter(losses.values()))
    print(f"held-out loss after {arguments.steps} steps of {ROWS * LENGTH} tokens\n")
    print(f"| recipe | loss | gap |\n| --- | --- | --- |\n{_rows(losses, first)}\n")
    print("| layer | role | format | relative error | to zero | saturated |\n| --- | --- | --- | --- | --- | --- |")
    table = []
    for number, at in enumerate(layers):
        for role in ROLES:
            for name, convert in FORMATS.items():
                error, zeros, saturated = rounding(at[role], role, convert)
                print(f"| {number} | {role} | {name} | {error:.2%} | {zeros:.2%} | {saturated:.2%} |")
                table.append([number, role, name, error, zeros, saturated])
    if arguments.json:
        arguments.json.write_text(json.dumps({"steps": arguments.steps, "losses": losses, "rounding": table}, indent=1))


def _rows(losses: dict[str, float], first: float) -> str:
    return "\n".join(f"| {name} | {loss:.4f} | {loss / first - 1:+.2%} |" for name, loss in losses.items())


if __name__ == "__main__":
    main()
