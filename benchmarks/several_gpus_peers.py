"""PyTorch's own data parallel on the same work as benchmarks/several_gpus.py: DDP with PEFT's LoRA, and FSDP2.

    python benchmarks/several_gpus_peers.py [--worlds 1 2] [--only NAME …] [--steps 8] [--out DIR]
    python benchmarks/several_gpus_peers.py --device cpu --tiny      # without a GPU

transformers' Qwen3 in its published shapes with random weights, 2 rows of 2048 random tokens a micro-batch, scaled-dot-
product attention, layers compiled by torch.compile, clipping to norm 1, fused AdamW; torchrun starts the ranks.
- DDP: adapters in bf16; gradients are reduced in the backward of the last micro-step alone.
- FSDP2, bf16: weights, gradients and optimizer state in bf16, one `fully_shard` a layer.
- FSDP2, fp32: sharded fp32 weights and state, bf16 computation and fp32 reduction, as torchtitan does by default.
- FSDP2, 8-bit: bf16 weights with torchao's 8-bit AdamW, if it is installed.
- FSDP2, float8: as bf16, and the layers' products by torchao's float8 training, if it is installed. One scale a tensor:
  weights are gathered in float8, and their scales are computed together after the optimizer's step. One scale a row:
  weights are gathered in bf16.
- torchtitan: its own trainer (torchtitan_peer.py), if it is installed, with weights in bf16 or fp32, or float8.
Level 2 keeps gathered weights from the forward to the backward, level 3 gathers them again. With accumulation the
gradients are reduced after the last micro-step, and are kept whole until then; "each" reduces them after every one.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
import bench_ranks
import bench_world
import gpu_lora
import peers
import several_gpus
import torch
import torch._dynamo.utils
import torch.distributed as dist
import torchtitan_peer
from surogate_model_qwen3.presets import PRESETS
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """What a peer trains."""

    preset: str
    side: str
    """ddp, or fsdp-bf16, fsdp-fp32, fsdp-8bit, fsdp-float8, titan-bf16, titan-fp32, titan-float8."""
    scales: str = "tensorwise"
    """torchao's recipe of float8: tensorwise or rowwise."""
    accumulation: int = 4
    level: int = 3
    reduce_each: bool = False
    """Whether gradients are reduced after every micro-step."""
    recompute: bool = False
    least_world: int = 1
    """Fewest GPUs that have the memory."""
    length: int = 2048

    def tokens(self, world: int) -> int:
        """Tokens of an optimizer step."""
        return self.accumulation * world * gpu_lora.ROWS * self.length


TITAN = Peer(preset="8b", side="titan-bf16", reduce_each=True)
EIGHT, FP32 = Peer(preset="8b", side="fsdp-bf16"), Peer(preset="8b", side="fsdp-fp32", least_world=2)
CASES: dict[str, Peer] = {
    "0.6B LoRA, DDP": Peer(preset="0.6b", side="ddp"),
    "8B LoRA, DDP": Peer(preset="8b", side="ddp"),
    "8B full, FSDP2 bf16, accumulation 4": EIGHT,
    "8B full, FSDP2 bf16, accumulation 4, each": replace(EIGHT, reduce_each=True),
    "8B full, FSDP2 bf16, accumulation 1": replace(EIGHT, accumulation=1),
    "8B full, FSDP2 bf16, level 2, accumulation 4": replace(EIGHT, level=2),
    "8B full, FSDP2 fp32, accumulation 4, each": replace(FP32, reduce_each=True, recompute=True),
    "8B full, FSDP2 fp32, accumulation 1": replace(FP32, accumulation=1, recompute=True),
    "8B full, FSDP2 8-bit, accumulation 4": replace(EIGHT, side="fsdp-8bit"),
    "8B full, FSDP2 8-bit, accumulation 1": replace(EIGHT, side="fsdp-8bit", accumulation=1),
    "8B full, FSDP2 float8, accumulation 4": replace(EIGHT, side="fsdp-float8"),
    "8B full, FSDP2 float8 rowwise, accumulation 4": replace(EIGHT, side="fsdp-float8", scales="rowwise"),
    "4B full, FSDP2 float8, accumulation 4": replace(EIGHT, preset="4b", side="fsdp-float8"),
    "4B full, FSDP2 bf16, accumulation 4": replace(EIGHT, preset="4b"),
    "4B full, FSDP2 bf16, accumulation 1": replace(EIGHT, preset="4b", accumulation=1),
    "4B full, FSDP2 fp32, accumulation 1": replace(FP32, preset="4b", accumulation=1, least_world=1),
    "8B full, torchtitan bf16, accumulation 4": TITAN,
    "8B full, torchtitan float8, accumulation 4": replace(TITAN, side="titan-float8"),
    "8B full, torchtitan float8 rowwise, accumulation 4": replace(TITAN, side="titan-float8", scales="rowwise"),
    "8B full, torchtitan fp32, accumulation 4": replace(TITAN, side="titan-fp32", recompute=True, least_world=2),
    "4B full, torchtitan bf16, accumulation 4": replace(TITAN, preset="4b"),
    "4B full, torchtitan float8, accumulation 4": replace(TITAN, preset="4b", side="titan-float8"),
}


NEEDS = {
    "fsdp-8bit": ("torchao",),
    "fsdp-float8": ("torchao",),
    "titan-bf16": ("torchtitan",),
    "titan-fp32": ("torchtitan",),
    "titan-float8": ("torchtitan", "torchao"),
}
"""What has to be installed for a side, which is left out otherwise."""


# ------------------------------------------------------------------------------------- a rank


def work_of(peer: Peer, device: torch.device) -> peers.Work:
    """The work of this rank; its tokens are its own."""
    rank, vocabulary = dist.get_rank(), PRESETS[peer.preset]["vocab_size"]
    batches = [
        bench.random_batch(
            vocabulary, rows=gpu_lora.ROWS, length=peer.length, borders=gpu_lora.ROWS + 1, seed=rank * 1000 + number
        )
        for number in range(peer.accumulation)
    ]
    return peers.Work(
        preset=peer.preset,
        config=PRESETS[peer.preset],
        full=peer.side != "ddp",
        recompute=peer.recompute,
        rank=gpu_lora.RANK,
        scale=2.0,
        rows=gpu_lora.ROWS,
        attention="sdpa",
        device=device,
        batches=batches,
    )


def compile_layers(layers: nn.ModuleList) -> None:
    """Each layer as a compiled module, so that hooks of data parallel stay outside of the compiled code."""
    for name, layer in list(layers.named_children()):
        layers.register_module(name, torch.compile(layer))  # type: ignore[arg-type]


def ddp_model(work: peers.Work, *, compiled: bool) -> Any:
    """PEFT's adapters, each layer compiled, behind DDP."""
    torch.manual_seed(0)
    model = peers.transformers_model(work, liger=False)
    model.train()
    if compiled:
        compile_layers(model.base_model.model.model.layers)
    cuda = work.device.type == "cuda"
    return nn.parallel.DistributedDataParallel(
        model, device_ids=[work.device.index] if cuda else None, gradient_as_bucket_view=True
    )


def is_float8(module: nn.Module, name: str) -> bool:
    """Whether a product is computed in float8: those of the layers, of sizes that the hardware can multiply."""
    sized = isinstance(module, nn.Linear) and module.in_features % 16 == 0 and module.out_features % 16 == 0
    return sized and "lm_head" not in name


def to_float8(model: Any, scales: str, *, emulate: bool) -> None:
    """The layers' products by torchao. `emulate`: rounded to float8, multiplied in the wider type."""
    import torch._inductor.config
    from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
        Float8LinearConfig,
        convert_to_float8_training,
    )

    config = replace(
        Float8LinearConfig.from_recipe_name(scales),
        enable_fsdp_float8_all_gather=scales == "tensorwise",
        emulate=emulate,
    )
    if scales == "rowwise":
        # As torchtitan does: https://github.com/pytorch/pytorch/issues/150859
        torch._inductor.config.emulate_precision_casts = True
    convert_to_float8_training(model, config=config, module_filter_fn=is_float8)


def fsdp_model(work: peers.Work, peer: Peer, *, compiled: bool) -> Any:
    """A model made on `meta`, cut by layers, and given memory for this rank's shards alone."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = peers.random_model(replace(work, device=torch.device("meta")))
    if work.recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if peer.side == "fsdp-fp32":
        model.to(torch.float32)
    if peer.side == "fsdp-float8":
        to_float8(model, peer.scales, emulate=work.device.type == "cpu")
    model.train()
    # None: the layers' weights are freed after the forward, those of the root are kept.
    again = None if peer.level == 3 else False
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if compiled:
        compile_layers(model.model.layers)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, reshard_after_forward=again)
    fully_shard(model, mp_policy=policy, reshard_after_forward=again)
    model.to_empty(device=work.device)
    # A table that is computed, and that `to_empty` has lost.
    with work.device:
        model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)
    model.tie_weights()
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            local: torch.Tensor = parameter.to_local()
            local.fill_(1.0) if "norm" in name else local.normal_(0, 0.02)
    return model


def optimizer_of(peer: Peer, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused AdamW, or torchao's with 8-bit state."""
    if peer.side == "fsdp-8bit":
        from torchao.optim import AdamW8bit  # type: ignore[import-not-found, unused-ignore]

        eight_bit: torch.optim.Optimizer = AdamW8bit(parameters, lr=1e-4, weight_decay=0.1)
        return eight_bit
    return torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.1, fused=True)


def weight_scales(peer: Peer, model: Any) -> Callable[[], None]:
    """What follows the optimizer's step: the scales of all weights that are gathered in float8, by one all-reduce."""
    if peer.side != "fsdp-float8" or peer.scales != "tensorwise":
        return lambda: None
    from torchao.float8 import (  # type: ignore[import-not-found, unused-ignore]
        precompute_float8_dynamic_scale_for_fsdp,
    )

    return partial(precompute_float8_dynamic_scale_for_fsdp, model)


def step_of(peer: Peer, work: peers.Work, *, compiled: bool) -> Callable[[], Callable[[], float]]:
    """One optimizer step of this rank; the answer reads its loss."""
    sharded = work.full
    model = fsdp_model(work, peer, compiled=compiled) if sharded else ddp_model(work, compiled=compiled)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_of(peer, trained)
    after_step = weight_scales(peer, model)
    inputs = [peers.arguments(batch, work) for batch in work.batches]

    @contextlib.contextmanager
    def reducing(last: bool) -> Iterator[None]:
        now = last or peer.reduce_each
        if sharded:
            model.set_requires_gradient_sync(now)
            yield
        else:
            with contextlib.nullcontext() if now else model.no_sync():
                yield

    def step() -> Callable[[], float]:
        total = torch.zeros((), device=work.device)
        for number, given in enumerate(inputs):
            with reducing(number == len(inputs) - 1):
                loss = model(**given, use_cache=False).loss / len(inputs)
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        after_step()
        optimizer.zero_grad(set_to_none=True)
        return total.item

    return step


def measure(peer: Peer, options: argparse.Namespace) -> None:
    """In a rank that torchrun started: time the steps; rank 0 writes the figures."""
    if peer.side.startswith("titan"):
        world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        mine = torchtitan_peer.measure(
            peer, world=world, rank=rank, warm_up=several_gpus.WARM_UP, steps=options.steps, compiled=options.compile
        )
    else:
        mine = timed_steps(peer, options)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    if dist.get_rank() == 0:
        options.result.write_text(json.dumps({"ranks": ranks}), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def timed_steps(peer: Peer, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of this rank of DDP or FSDP2. The process group stays."""
    started = time.perf_counter()
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", device_id=device if cuda else None)
    work = work_of(peer, device)
    step = step_of(peer, work, compiled=options.compile)
    losses = [step()() for _ in range(several_gpus.WARM_UP)]
    setup = time.perf_counter() - started
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    dist.barrier()

    def timed() -> None:
        losses.append(step())  # type: ignore[arg-type]

    times = gpu_lora.timed(timed, options.steps) if cuda else bench_world.cpu_times(timed, options.steps)
    counted = torch._dynamo.utils.counters
    return {
        "milliseconds_all": times,
        "setup_seconds": setup,
        "losses": [losses[0], losses[-1]()],  # type: ignore[operator]
        "gpu": torch.cuda.get_device_name(device) if cuda else "cpu",
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "device_gib": gpu_lora.device_gib() if cuda else None,
        "compiled": {"graphs": counted["stats"]["unique_graphs"], "breaks": sum(counted["graph_break"].values())},
    }


# -------------------------------------------------------------------------------------- a run


def start(peer: Peer, world: int, options: argparse.Namespace) -> dict[str, Any]:
    """The ranks' figures, from torchrun; ``{"error": …}`` if it fails or takes longer than the limit."""
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place, "result.json"), Path(place, "log")
        line = ["--line", json.dumps(asdict(peer)), "--result", str(result), "--device", options.device]
        line += ["--steps", str(options.steps), "--compile" if options.compile else "--no-compile"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
        surroundings = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [*torchrun, __file__, *line],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=surroundings,
                start_new_session=True,
            )
            try:
                code: int | None = child.wait(timeout=options.limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        text = log.read_text(errors="replace")
        with contextlib.suppress(OSError, ValueError):
            return json.loads(result.read_text())
        if code is None:
            return {"error": f"stopped after {options.limit:.0f} s", "log": text[-3000:]}
        # What torchrun says after the ranks hides their cause.
        said = text.partition("ChildFailedError")[0]
        return {"error": bench_ranks.cause(said) or f"exit status {code}", "log": said[-3000:]}


def row_of(name: str, peer: Peer, world: int, result: dict[str, Any]) -> dict[str, Any]:
    """The figures as a row of benchmarks/several_gpus.py."""
    row: dict[str, Any] = {"case": name, "world": world, "training": asdict(peer), **result}
    if "error" in result:
        return row
    steps = [max(times) for times in zip(*(rank["milliseconds_all"] for rank in result["ranks"]), strict=True)]
    medians = [statistics.median(rank["milliseconds_all"]) for rank in result["ranks"]]
    first, milliseconds = result["ranks"][0], statistics.median(steps)
    return {
        **row,
        "tokens_per_second": peer.tokens(world) / milliseconds * 1e3,
        "milliseconds": milliseconds,
        "spread": (max(medians) - min(medians)) / min(medians),
        "peak_gib": first["peak_gib"],
        "device_gib": first["device_gib"],
        "setup_seconds": first["setup_seconds"],
        "losses": first["losses"],
        "compiled": first["compiled"],
    }


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case in every world."""
    rows: list[dict[str, Any]] = []
    until = time.monotonic() + options.budget
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.only or CASES:
        peer = replace(CASES[name], preset="tiny", length=32) if options.tiny else CASES[name]
        if lacks := [need for need in NEEDS.get(peer.side, ()) if importlib.util.find_spec(need) is None]:
            print(f"{name}: {' and '.join(lacks)} is not installed", file=sys.stderr)
            continue
        for world in options.worlds:
            if world < peer.least_world or time.monotonic() > until:
                continue
            row = row_of(name, peer, world, start(peer, world, options))
            rows.append(row)
            several_gpus.save(options.out, rows, row, name="several_gpus_peers")
            said = row.get("error") or f"{row['tokens_per_second']:,.0f} tok/s"
            print(f"{name}, {world} GPUs: {said}", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Print the table; or, started by torchrun, measure one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=[], metavar="NAME")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--limit", type=float, default=200, help="seconds that a line may take")
    parser.add_argument("--budget", type=float, default=400, help="seconds after which no line is started")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script itself")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.line:
        measure(Peer(**json.loads(options.line)), options)
        return
    rows = run(options)
    print(several_gpus.markdown(rows))
    sys.exit(any("error" in row for row in rows))


if __name__ == "__main__":
    main()
