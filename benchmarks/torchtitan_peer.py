"""torchtitan's own trainer, started in each rank by benchmarks/several_gpus_peers.py; torchtitan 0.2 installed apart.

Its Qwen3, its per-layer compilation and compiled loss, its attention (cuDNN first), its fused AdamW; random tokens in
place of a data set. Its trainer reduces gradients after every micro-step, and on one GPU it trains without FSDP. Times
and losses are those that it logs after every step.
"""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import gpu_lora
import torch
import torch._dynamo.utils

if TYPE_CHECKING:
    from several_gpus_peers import Peer

NAME = "qwen3_random"
"""Under which torchtitan finds its Qwen3 with random tokens."""
FLAVORS = {"4b": "4B", "8b": "8B", "tiny": "debugmodel"}
"""torchtitan's names of the presets."""


def arguments(peer: Peer, *, world: int, steps: int) -> list[str]:
    """The command line of torchtitan's trainer."""
    weights = "float32" if peer.side == "titan-fp32" else "bfloat16"
    figures = {
        "model.name": NAME,
        "model.flavor": FLAVORS[peer.preset],
        "training.dtype": weights,
        "training.local_batch_size": gpu_lora.ROWS,
        "training.global_batch_size": gpu_lora.ROWS * world * peer.accumulation,
        "training.seq_len": peer.length,
        "training.steps": steps,
        "optimizer.lr": 1e-4,
        "activation_checkpoint.mode": "selective" if peer.recompute else "none",
        "activation_checkpoint.selective_ac_option": "op",
        "parallelism.fsdp_reshard_after_forward": "default" if peer.level == 3 else "never",
        "metrics.log_freq": 1,
    }
    line = [word for key, value in figures.items() for word in (f"--{key}", str(value))]
    if peer.side != "titan-float8":
        return line
    line += ["--model.converters", "quantize.linear.float8", "--quantize.linear.float8.filter_fqns", "output"]
    if peer.scales == "rowwise":
        return [*line, "--quantize.linear.float8.recipe_name", "rowwise"]
    switches = ("enable_fsdp_float8_all_gather", "precompute_float8_dynamic_scale_for_fsdp")
    return [*line, *(f"--quantize.linear.float8.{switch}" for switch in switches)]


class RandomTokens:
    """What torchtitan takes for a data loader: the micro-batches of a step, over and over."""

    def __init__(self, vocabulary: int, peer: Peer, rank: int) -> None:
        drawn = torch.Generator().manual_seed(rank)
        shape = (gpu_lora.ROWS, peer.length + 1)
        self.rows = [torch.randint(vocabulary, shape, generator=drawn) for _ in range(peer.accumulation)]

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Inputs and the tokens that follow each, ``[rows, length]``."""
        return (({"input": rows[:, :-1]}, rows[:, 1:]) for rows in itertools.cycle(self.rows))

    def state_dict(self) -> dict[str, Any]:
        """Nothing: no checkpoint is written."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing."""


class Kept:
    """What torchtitan takes for a logger: keeps the figures of every step."""

    def __init__(self, memory: Callable[[], int]) -> None:
        self.milliseconds: list[float] = []
        self.losses: list[float] = []
        self.peaks: list[int] = []
        self.memory = memory

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """The figures of step `step`; torchtitan resets the peak of memory afterwards."""
        self.milliseconds.append(metrics["time_metrics/end_to_end(s)"] * 1e3)
        self.losses.append(float(metrics["loss_metrics/global_avg_loss"]))
        self.peaks.append(self.memory())

    def close(self) -> None:
        """Nothing."""


def measure(peer: Peer, *, world: int, rank: int, warm_up: int, steps: int, compiled: bool) -> dict[str, Any]:
    """The figures of this rank, as those of the other peers. The process group is torchtitan's, and stays."""
    from torchtitan.config import ConfigManager
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    if peer.side == "titan-float8":
        importlib.import_module("torchtitan.components.quantization")  # makes its converter known
    started = time.perf_counter()
    init_logger()
    spec = get_train_spec("qwen3")
    vocabulary = spec.model_args[FLAVORS[peer.preset]].vocab_size
    tokens = partial(RandomTokens, vocabulary, peer, rank)
    register_train_spec(
        NAME, replace(spec, build_tokenizer_fn=None, build_dataloader_fn=lambda **_: tokens(), state_dict_adapter=None)
    )
    line = arguments(peer, world=world, steps=warm_up + steps)
    trainer = Trainer(ConfigManager().parse_args([*line, "--compile.enable"] if compiled else line))
    kept = Kept(torch.cuda.max_memory_allocated)
    trainer.metrics_processor.logger = kept
    trainer.train()
    cuda = trainer.device.type == "cuda"
    counted = torch._dynamo.utils.counters
    return {
        "milliseconds_all": kept.milliseconds[warm_up:],
        "setup_seconds": time.perf_counter() - started - sum(kept.milliseconds[warm_up:]) / 1e3,
        "losses": [kept.losses[0], kept.losses[-1]],
        "gpu": torch.cuda.get_device_name(trainer.device) if cuda else "cpu",
        "peak_gib": max(kept.peaks[warm_up:]) / 2**30 if cuda else None,
        "device_gib": gpu_lora.device_gib() if cuda else None,
        "compiled": {"graphs": counted["stats"]["unique_graphs"], "breaks": sum(counted["graph_break"].values())},
    }
