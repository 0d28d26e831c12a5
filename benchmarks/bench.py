"""What the benchmarks share: plugins by name, the one place where they make an engine, a process for each case."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from surogate_core.batch import MicroBatch
from surogate_core.bundles import KernelPack, RecipeContext, TensorKind
from surogate_core.dsl.declare import LoRA, Model
from surogate_core.dsl.slots import Adapter
from surogate_core.engine.planning.assembly import Assembly, EngineSettings
from surogate_core.engine.stores import NO_OFFLOAD
from surogate_core.kernels.registry import KernelTable
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_core.plugins.registry import Registry, load_plugins

PACKS = ("cuda", "hopper", "triton")
"""The kernel packs of a GPU."""


@cache
def registry() -> Registry:
    """The installed plugins."""
    return load_plugins()


def packs(names: Sequence[str] = PACKS) -> list[KernelPack]:
    """torch's kernels and the packs of these names."""
    return [TORCH_PACK, *(registry().get("kernels", name) for name in names)]


def adapters(rank: int, *, dropout: float = 0.0, scale: float = 2.0, targets: Sequence[str] = ("all",)) -> LoRA:
    """Adapters with fp32 weights; by default on every projection."""
    adapter = Adapter(rank=rank, scale=scale, dropout=dropout, dtype=torch.float32)
    return LoRA(adapter=adapter, targets=frozenset(targets))


def apart(script: str, arguments: Sequence[str], case: str) -> dict[str, Any]:
    """The figures of one case of a script, from a process of its own; only `error` if it fails.

    The script takes `--cases`, `--within` and `--out`, into which it writes a list of figures as JSON.
    """
    with tempfile.TemporaryDirectory() as parent:
        file = Path(parent) / "found.json"
        line = [sys.executable, script, *arguments, "--cases", case, "--within", "--out", str(file)]
        done = subprocess.run(line, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode == 0 and file.is_file():
            (found,) = json.loads(file.read_text(encoding="utf-8"))
            return dict(found)
    print(done.stderr[-4000:], file=sys.stderr)
    lines = done.stderr.strip().splitlines()
    return {"error": lines[-1] if lines else f"exit status {done.returncode}"}


def assemble(
    model: Model,
    settings: EngineSettings,
    *,
    recipe: str = "bf16",
    recipe_options: Any = None,
    optimizer: str = "adamw",
    optimizer_options: Any = None,
    offload: frozenset[TensorKind] = frozenset(),
    offload_experts: bool = False,
    kernels: KernelTable | None = None,
    lora: LoRA | None = None,
    weight_format: str | None = None,
) -> Assembly:
    """What a training run with these plugins would be made of; options are the plugins' defaults unless given.

    `offload`: the kinds of tensor that offloader `host` moves, with `offload_experts` frozen experts too. `kernels`: by
    default those of all packs on a GPU, and torch's on a CPU.
    """
    found, device = registry(), settings.device
    chosen, optimizer_spec = found.get("recipe", recipe), found.get("optimizer", optimizer)
    context = RecipeContext(device=device, dtype="bf16" if settings.dtype == torch.bfloat16 else "fp32")
    offloader = replace(found.get("offload", "host"), kinds=offload) if offload or offload_experts else NO_OFFLOAD
    packed = None if weight_format is None else found.get("quant", weight_format)
    objective = found.get("objective", "cross_entropy")
    return Assembly(
        model=model,
        settings=settings,
        kernels=kernels or KernelTable.build(device, packs(PACKS if device.type == "cuda" else ())),
        recipe=chosen.build(recipe_options or chosen.options(), context),
        objective=objective.build(objective.options()),
        optimizer=optimizer_spec,
        optimizer_options=optimizer_options or optimizer_spec.options(),
        offloader=offloader,
        stores=offloader.build(offloader.options(), tempfile.gettempdir(), device),
        lora=lora,
        weight_format=None if packed is None else packed.build(packed.options()),
        offload_experts=offload_experts,
    )


def random_batch(vocab: int, *, rows: int, length: int, borders: int, seed: int) -> MicroBatch:
    """A micro-batch of one document a row; every token is random, and a label."""
    tokens = rows * length
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed))
    stops = [*range(0, tokens + 1, length), *[tokens] * (borders - rows - 1)]
    return MicroBatch(
        input_ids=ids,
        labels=torch.roll(ids, -1),
        positions=torch.arange(length, dtype=torch.int32).repeat(rows),
        cu_seqlens=torch.tensor(stops, dtype=torch.int32),
        max_seqlen=length,
        tokens=tokens,
        label_tokens=tokens,
    )
