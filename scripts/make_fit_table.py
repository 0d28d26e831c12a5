"""Write the tables that say what fits into how much GPU memory, by `surogate plan`'s prediction: that of README.md for
one GPU, and those of docs/howto/several-gpus.md.

With --check the tables are made again and compared: exit 1 if one is not current. It takes minutes.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from surogate_command_plan.gpus import Gpu, find  # noqa: E402

from surogate_core.config.resolve import load_run_config  # noqa: E402
from surogate_core.engine.planning.prediction import TensorBytes  # noqa: E402
from surogate_core.kernels.building.native import assuming  # noqa: E402
from surogate_core.plugins.registry import load_plugins  # noqa: E402
from surogate_core.setup.assemble import resolve_model  # noqa: E402
from surogate_core.setup.fitting import assembly_of, placed  # noqa: E402

ONE, SEVERAL = ROOT / "README.md", ROOT / "docs" / "howto" / "several-gpus.md"
BUDGETS = (8, 16, 24, 48, 80, 140)
SPARE = 0.95
"""Share of a budget that a prediction may take."""

MODELS = {
    "0.6B": ("qwen3", "0.6b"),
    "1.7B": ("qwen3", "1.7b"),
    "4B": ("qwen3", "4b"),
    "8B": ("qwen3", "8b"),
    "14B": ("qwen3", "14b"),
    "32B": ("qwen3", "32b"),
    "70B": ("llama", "3.1-70b"),
}
COMMON = ("recompute=true", "per_device_train_batch_size=1", "sequence_len=2048", "lmhead_chunks=8", "device=cuda")
METHODS = {
    "LoRA on 4 bits (`qlora_bnb`)": ("lora=true", "qlora_bnb=true"),
    "LoRA": ("lora=true",),
    "all weights": ("lora=false",),
    "all weights, `cpu_training`": ("lora=false", "cpu_training=true", "master_dtype=bf16", "optimizer=adamw"),
}
SHARED_METHODS = {
    "LoRA": ("lora=true",),
    "LoRA, `shard_weights`": ("lora=true", "shard_weights=true"),
    "LoRA on 4 bits (`qlora_bnb`)": ("lora=true", "qlora_bnb=true"),
    "LoRA on 4 bits, `shard_weights`": ("lora=true", "qlora_bnb=true", "shard_weights=true"),
    "all weights": ("lora=false",),
    "all weights, `zero_level: 2`": ("lora=false", "zero_level=2"),
    "all weights, `zero_level: 3`": ("lora=false", "zero_level=3"),
    "all weights, `zero_level: 3`, `master_dtype: bf16`": ("lora=false", "zero_level=3", "master_dtype=bf16"),
    "all weights, `cpu_training`": METHODS["all weights, `cpu_training`"],
}
NUMBERS = (1, 2, 4, 8)
"""Numbers of GPUs."""
GIB = 2**30


@cache
def predicted(model: str, keys: tuple[str, ...], gpus: int) -> tuple[int, int]:
    """Bytes of each GPU on the device and in host memory."""
    family, preset = MODELS[model]
    registry = _registry()
    config = load_run_config(
        [f"model={family}", f"model.preset={preset}", *COMMON, *keys, f"gpus={gpus}"], registry=registry
    )
    prediction = placed(config, registry, _counts(model, _traced(keys, gpus)))
    return prediction.total("device"), prediction.total("host")


_registry = cache(load_plugins)


def _traced(keys: tuple[str, ...], gpus: int) -> tuple[str, ...]:
    """The keys of a configuration whose layers are those of `keys`: few need to be traced."""
    streams = "shard_weights=true" in keys and gpus > 1
    whole = tuple(key for key in keys if not key.startswith(("zero_level", "shard_weights")))
    return (*whole, "shard_weights=true", "gpus=2") if streams else whole


@cache
def _counts(model: str, keys: tuple[str, ...]) -> TensorBytes:
    family, preset = MODELS[model]
    registry = _registry()
    config = load_run_config([f"model={family}", f"model.preset={preset}", *COMMON, *keys], registry=registry)
    return TensorBytes.of(assembly_of(config, registry, resolve_model(config, registry, weights_needed=False)))


def cell(keys: tuple[str, ...], gpus: int, memory: float) -> str:
    """The largest model that fits into this number of bytes on each GPU, and what it takes; empty if none fits."""
    sizes = {model: predicted(model, keys, gpus) for model in MODELS}
    fits = [model for model, (device, _) in sizes.items() if device <= memory * SPARE]
    if not fits:
        return ""
    device, host = sizes[fits[-1]]
    beside = f", {host / GIB:.0f} GiB host" if host > GIB else ""
    return f"{fits[-1]} ({device / GIB:.1f} GiB{beside})"


def table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def of_one() -> Iterator[tuple[str, ...]]:
    """Memory of a GPU, and what fits into it by each method."""
    for budget in BUDGETS:
        yield (f"{budget} GiB", *(cell(keys, 1, budget * GIB) for keys in METHODS.values()))


def of_several(gpu: Gpu) -> Iterator[tuple[str, ...]]:
    """Method, and what fits by it on each number of GPUs."""
    assert gpu.memory is not None
    for method, keys in SHARED_METHODS.items():
        found = [cell(keys, gpus, gpu.memory) for gpus in NUMBERS]
        alone = any(key.startswith(("zero_level", "shard_weights")) for key in keys)
        yield (method, "" if alone and keys[-1] != "master_dtype=bf16" else found[0], *found[1:])


def made(text: str) -> str:
    """The page with its tables made anew: each is below a comment that says what it is of."""

    def one(found: re.Match[str]) -> str:
        gpu = find(found[2]) if found[2] else None
        if not isinstance(gpu, Gpu):
            return found[1] + table(("GPU memory", *METHODS), of_one())
        heads = ("", *(f"{gpus} × {gpu.title}" if gpus > 1 else gpu.title for gpus in NUMBERS))
        return found[1] + table(heads, of_several(gpu))

    return _TABLE.sub(one, text)


_TABLE = re.compile(r"(<!-- made by scripts/make_fit_table.py(?: for (\w+))? -->\n)(?:\|[^\n]*\n)*")


def main() -> int:
    """Write the tables, or check them."""
    with assuming((9, 0)):
        stale = {}
        for page in (ONE, SEVERAL):
            text = page.read_text(encoding="utf-8")
            if (new := made(text)) != text:
                stale[page] = new
    if "--check" in sys.argv[1:]:
        return int(bool(stale))
    for page, text in stale.items():
        page.write_text(text, encoding="utf-8")
        print(f"wrote the tables of {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
