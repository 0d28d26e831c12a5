"""What emulated NVFP4 costs on one GPU: the rounding of operands, and training steps with and without the kernels.

Rounding: each operand of a slot's three products, 4096 tokens, by the CUDA kernels and by the PyTorch
references run eagerly, in microseconds; bytes are the matrix read twice and what is written. Training: a
Qwen3 of 12 layers of width 768 (134M parameters) in full, 4 × 2048 tokens a micro-step, compiled, in CUDA
graphs: tokens a second in bf16 and in NVFP4 with kernels and with references that Inductor compiles.

    python benchmarks/gpu_nvfp4.py [--skip-training] [--skip-references] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench
import numpy as np
import surogate_recipe_nvfp4
import torch
from surogate_kernels_cuda import nvfp4
from surogate_model_qwen3.model import build

from surogate_core.batch import IGNORE_LABEL, MicroBatch
from surogate_core.bundles import KernelPack
from surogate_core.engine.engine import Engine
from surogate_core.engine.planning.assembly import EngineSettings
from surogate_core.engine.planning.pieces import RandomSource
from surogate_core.formats.nvfp4 import Operand, nvfp4_rounded
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK

TOKENS, ROWS, LENGTH, STEPS = 4096, 4, 2048, 8
SIDES = ((4096, 4096), (12288, 4096))
"""Outputs and inputs of projections of a Qwen3 of 8B."""
OPERANDS = {
    "activation": (Operand(four_over_six=True), False),
    "weight": (Operand(square=True, four_over_six=True), False),
    "weight, transposed": (Operand(square=True, four_over_six=True, transposed=True), False),
    "gradient": (Operand(four_over_six=True, salt=1), True),
    "gradient, rotated": (Operand(transposed=True, rotated=True, salt=2), True),
    "activation, rotated": (Operand(transposed=True, rotated=True), False),
}
MODEL = {
    "vocab_size": 32768,
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": LENGTH,
}


def microseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """The median time of a call, by events."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3)
    return statistics.median(times)


def rounding(*, references: bool) -> list[dict[str, Any]]:
    """The time of each operand."""
    seed, found = torch.tensor(1, dtype=torch.int32, device="cuda"), []
    for outputs, inputs in SIDES:
        for name, (how, stochastic) in OPERANDS.items():
            shape = {"weight": (outputs, inputs), "gradient": (TOKENS, outputs), "activation": (TOKENS, inputs)}
            x = torch.randn(shape[name.partition(",")[0]], device="cuda", dtype=torch.bfloat16)
            arguments = x, seed if stochastic else None, how
            one: dict[str, Any] = {"operand": name, "shape": list(x.shape)}
            one["kernel_us"] = microseconds(lambda: nvfp4.nvfp4_rounded(*arguments))  # noqa: B023
            one["terabytes_per_second"] = 3 * x.nbytes / one["kernel_us"] / 1e6
            if references:
                one["reference_us"] = microseconds(lambda: nvfp4_rounded(*arguments), 3)  # noqa: B023
            found.append(one)
            print({k: round(v, 2) if isinstance(v, float) else v for k, v in one.items()}, flush=True)
    return found


def make_batch() -> MicroBatch:
    """Rows of random tokens, one document each."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, MODEL["vocab_size"], ROWS * LENGTH))
    labels = torch.roll(ids, -1)
    labels[LENGTH - 1 :: LENGTH] = IGNORE_LABEL
    return MicroBatch(
        input_ids=ids,
        labels=labels,
        positions=torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS),
        cu_seqlens=torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH,
        max_seqlen=LENGTH,
        tokens=ROWS * LENGTH,
        label_tokens=ROWS * (LENGTH - 1),
    )


def training(recipe: str, options: Any, packs: list[KernelPack]) -> dict[str, Any]:
    """Tokens a second of optimizer steps of one micro-step."""
    device, start = torch.device("cuda"), time.perf_counter()
    settings = EngineSettings(
        device=device,
        dtype=torch.bfloat16,
        compiler="inductor",
        cuda_graphs=True,
        tokens=ROWS * LENGTH,
        borders=ROWS + 1,
        max_seqlen=LENGTH,
        head_chunks=4,
    )
    kernels = KernelTable.build(device, packs)
    assembly = bench.assemble(build(MODEL), settings, recipe=recipe, recipe_options=options, kernels=kernels)
    engine = Engine(assembly, RandomSource(seed=0, std=0.02, device=device))
    batch, times, losses = make_batch(), [], []
    for step in range(STEPS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        losses.append(engine.train_step([batch], step=step, lr=1e-3).read()[0])
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    milliseconds = statistics.median(times[3:]) * 1e3
    return {
        "tokens_per_second": ROWS * LENGTH / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "set_up_seconds": time.perf_counter() - start - sum(times[1:]),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "losses": losses,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip-training", action="store_true")
    parser.add_argument("--skip-references", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    found["rounding"] = rounding(references=not options.skip_references)
    if not options.skip_training:
        pack = KernelPack(name="nvfp4", kernels=nvfp4.kernels)
        emulated = surogate_recipe_nvfp4.NVFP4Options(emulate="always")
        runs: dict[str, tuple[str, Any, list[KernelPack]]] = {
            "bf16": ("bf16", None, []),
            "nvfp4, kernels": ("nvfp4", emulated, [pack]),
            "nvfp4, references": ("nvfp4", emulated, []),
        }
        for name, (recipe, recipe_options, packs) in runs.items():
            if options.skip_references and "references" in name:
                continue
            found[name] = training(recipe, recipe_options, [TORCH_PACK, *packs])
            print(name, found[name], flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
