"""Our LoRA step on a CPU against transformers + PEFT: time and peak memory, in one run.

A 256-wide, 8-layer Qwen3, rows of 512 tokens, fp32, r=16 on all seven projections, the same random
tokens. Each side runs in processes of its own, in turn, with the same number of threads; the figure
is the ratio of the median step times and of the median peak resident sets.

    python benchmarks/cpu_lora.py [--rounds 3] [--steps 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
ROWS, LENGTH, RANK = 4, 512, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def ours(dropout: float, recompute: bool) -> Callable[[int], float]:
    """A function that takes one optimizer step and returns the loss."""
    import bench
    import torch
    from surogate_model_qwen3.model import build

    from surogate_core.dsl.trace import Recompute
    from surogate_core.engine.engine import Engine
    from surogate_core.engine.planning.assembly import EngineSettings
    from surogate_core.engine.planning.pieces import RandomSource

    device = torch.device("cpu")
    settings = EngineSettings(
        device=device,
        tokens=ROWS * LENGTH,
        borders=ROWS + 1,
        max_seqlen=LENGTH,
        head_chunks=4,
        recompute=Recompute(block=recompute),
    )
    assembly = bench.assemble(build(SHAPE), settings, lora=bench.adapters(RANK, dropout=dropout))
    engine = Engine(assembly, RandomSource(seed=0, std=0.02, device=device))

    return lambda number: engine.train_step([_batch(number)], step=number, lr=1e-4).read()[0]


def _batch(number: int) -> Any:
    """The micro-batch of a step, one document a row."""
    import torch

    from surogate_core.batch import MicroBatch

    ids = _tokens(number)
    labels = torch.cat((ids[:, 1:], torch.full((ROWS, 1), -100)), dim=1)
    return MicroBatch(
        input_ids=ids.flatten(),
        labels=labels.flatten(),
        positions=torch.arange(LENGTH, dtype=torch.int32).repeat(ROWS),
        cu_seqlens=torch.arange(ROWS + 1, dtype=torch.int32) * LENGTH,
        max_seqlen=LENGTH,
        tokens=ROWS * LENGTH,
        label_tokens=ROWS * (LENGTH - 1),
    )


def peer(dropout: float, recompute: bool) -> Callable[[int], float]:
    """The same with transformers and PEFT."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    base = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    if recompute:
        base.gradient_checkpointing_enable()
        base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=32, lora_dropout=dropout, target_modules=TARGETS))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.1)

    def step(number: int) -> float:
        ids = _tokens(number)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _tokens(number: int) -> Any:
    import torch

    return torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(number))


def measure(side: str, steps: int, threads: int, dropout: float, recompute: bool) -> dict[str, Any]:
    """Time `steps` optimizer steps after two of warm-up, in this process."""
    import torch

    torch.set_num_threads(threads)
    step = {"ours": ours, "peer": peer}[side](dropout, recompute)
    losses = [step(0), step(1)]
    times = []
    for number in range(2, steps + 2):
        started = time.perf_counter()
        losses.append(step(number))
        times.append(time.perf_counter() - started)
    return {"seconds": times, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "losses": losses}


def main() -> None:
    """Run both sides in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(measure(options.side, options.steps, options.threads, options.dropout, options.recompute)))
        return
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "peer": []}
    for _ in range(options.rounds):
        for side, runs in found.items():
            command = [sys.executable, __file__, "--side", side, "--steps", str(options.steps)]
            command += ["--threads", str(options.threads), "--dropout", str(options.dropout)]
            command += ["--recompute"] if options.recompute else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    seconds = {side: statistics.median(t for run in runs for t in run["seconds"]) for side, runs in found.items()}
    rss = {side: statistics.median(run["rss"] for run in runs) for side, runs in found.items()}
    print(f"{'':24}{'step':>10}{'peak RSS':>12}")
    for side, title in (("ours", "surogate"), ("peer", "transformers + PEFT")):
        print(f"{title:24}{seconds[side] * 1e3:8.0f} ms{rss[side] / 2**20:8.0f} MiB")
    ratios = {"time": seconds["ours"] / seconds["peer"], "rss": rss["ours"] / rss["peer"]}
    print(f"{'ratio':24}{ratios['time']:10.3f}{ratios['rss']:12.3f}")
    if options.json:
        options.json.write_text(json.dumps({"ratios": ratios, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
