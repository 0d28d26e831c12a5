"""The plan's device memory against torch's measured peak, and the time of a step, for combinations of placements.

A Qwen3 of 6 layers of the 0.6B's width and 32,768 tokens of vocabulary, random weights, 2 rows of 2048
tokens a micro-step, 2 micro-steps a step, no CUDA graphs. One process for all. Measured is the peak of
torch's allocator over two steps of a new engine; what CUDA itself takes is said at the end.

    python benchmarks/plan_memory.py [--only NAME …] [--compiler fx] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS
from surogate_offload_host import surogate_offloader
from surogate_optimizer_adamw import surogate_optimizer
from surogate_recipe_bf16 import surogate_recipe

from surogate_core.bundles import Objective, Offloader, OptimizerSettings, TensorKind
from surogate_core.data.batch import MicroBatch
from surogate_core.dsl.declare import LoRA
from surogate_core.dsl.slots import Adapter
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine, EngineSettings
from surogate_core.engine.parameters import RandomSource
from surogate_core.engine.prediction import predict
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_core.kernels.attention import TORCH_PACK
from surogate_core.kernels.ops import cross_entropy
from surogate_core.kernels.registry import KernelTable

ROWS, LENGTH, MICRO_STEPS = 2, 2048, 2
TOKENS = ROWS * LENGTH
CONFIG = {**PRESETS["0.6b"], "num_hidden_layers": 6, "vocab_size": 32768}
CPU_TRAINING: tuple[TensorKind, ...] = ("weights", "master", "gradients", "optimizer")
COMBINATIONS: dict[str, tuple[bool, bool, tuple[TensorKind, ...], bool]] = {
    "full, recompute": (False, True, (), False),
    "full, recompute, residuals": (False, True, ("residuals",), False),
    "full, recompute, optimizer": (False, True, ("optimizer",), False),
    "full, recompute, optimizer + master": (False, True, ("optimizer", "master"), False),
    "full, recompute, gradients": (False, True, ("gradients",), False),
    "full, recompute, optimizer + master + gradients": (False, True, ("optimizer", "master", "gradients"), False),
    "full, recompute, all by the GPU": (False, True, (*CPU_TRAINING, "residuals"), False),
    "full, recompute, cpu_training": (False, True, CPU_TRAINING, True),
    "full, recompute, cpu_training + residuals": (False, True, (*CPU_TRAINING, "residuals"), True),
    "lora": (True, False, (), False),
    "lora, residuals": (True, False, ("residuals",), False),
    "lora, cpu_training": (True, False, CPU_TRAINING, True),
    "lora, cpu_training + residuals": (True, False, (*CPU_TRAINING, "residuals"), True),
}
"""Name → (LoRA, recompute, kinds on the host, whether the CPU takes the optimizer step)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One combination's figures."""

    name: str
    predicted: int
    """Bytes of torch's tensors on the device."""
    measured: int
    host: int
    """Bytes predicted on the host."""
    milliseconds: float
    """Of the second step."""
    losses: list[float]


def batch(seed: int) -> MicroBatch:
    """Random tokens, one document a row."""
    ids = torch.randint(0, CONFIG["vocab_size"], (TOKENS,), generator=torch.Generator().manual_seed(seed))
    return MicroBatch(
        input_ids=ids,
        labels=torch.roll(ids, -1),
        positions=torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS),
        cu_seqlens=torch.tensor([0, *range(LENGTH, TOKENS + 1, LENGTH)], dtype=torch.int32),
        max_seqlen=LENGTH,
        tokens=TOKENS,
        label_tokens=TOKENS,
    )


def measure(name: str, compiler: Any) -> Result:
    """Build an engine, take two steps, and throw it away."""
    adapters, recompute, kinds, update_on_cpu = COMBINATIONS[name]
    device = torch.device("cuda", torch.cuda.current_device())
    offloader: Offloader = replace(surogate_offloader(), kinds=frozenset(kinds)) if kinds else NO_OFFLOAD
    adapter = Adapter(rank=16, scale=2.0, dropout=0.0, dtype=torch.float32)
    shared: dict[str, Any] = {
        "settings": EngineSettings(
            device=device,
            dtype=torch.bfloat16,
            adapter_dtype=torch.float32,
            compiler=compiler,
            cuda_graphs=False,
            tokens=TOKENS,
            borders=ROWS + 1,
            max_seqlen=LENGTH,
            head_chunks=1,
            recompute=Recompute(block=recompute),
            weight_decay=0.1,
            max_grad_norm=1.0,
            seed=0,
            update_on_cpu=update_on_cpu,
        ),
        "recipe": surogate_recipe(),
        "recipe_options": None,
        "objective": Objective(name="cross_entropy", token_loss=cross_entropy),
        "optimizer": surogate_optimizer(),
        "offloader": offloader,
        "lora": LoRA(adapter=adapter, targets=frozenset(["all"])) if adapters else None,
    }
    prediction = predict(build(CONFIG), kernels=KernelTable.build(device, [TORCH_PACK]), **shared)
    context = sum(h.nbytes for h in prediction.held if h.kind == "CUDA context")
    engine = Engine(
        build(CONFIG),
        kernels=KernelTable.build(device, [TORCH_PACK]),
        optimizer_settings=OptimizerSettings(),
        optimizer_options=None,
        offloader_options=None,
        source=RandomSource(seed=0, std=0.02, device=device),
        **shared,
    )
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(2):
        started = time.perf_counter()
        losses.append(engine.train_step([batch(2 * step), batch(2 * step + 1)], step=step, lr=1e-4).read()[0])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return Result(
        name=name,
        predicted=prediction.total("device") - context,
        measured=torch.cuda.max_memory_allocated(),
        host=prediction.total("host"),
        milliseconds=1e3 * seconds,
        losses=losses,
    )


def main() -> None:
    """Print a line a combination."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(COMBINATIONS), choices=COMBINATIONS)
    parser.add_argument("--compiler", default="inductor", choices=["inductor", "fx"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for name in options.only:
        result = measure(name, options.compiler)
        gc.collect()
        torch.cuda.empty_cache()
        found.append(result)
        off = result.predicted / result.measured - 1
        print(
            f"{name:50} predicted {result.predicted / 2**20:7.0f} MiB, measured {result.measured / 2**20:7.0f} "
            f"({off:+.1%}), host {result.host / 2**20:6.0f} MiB, {result.milliseconds:6.0f} ms a step, "
            f"losses {' '.join(f'{loss:.9g}' for loss in result.losses)}",
            flush=True,
        )
    free, total = torch.cuda.mem_get_info()
    print(f"beside torch's tensors: {(total - free - torch.cuda.memory_reserved()) / 2**20:.0f} MiB")
    if options.json:
        options.json.write_text(json.dumps([asdict(r) for r in found], indent=1))


if __name__ == "__main__":
    main()
