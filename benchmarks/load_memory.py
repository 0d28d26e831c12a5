"""Host memory while weights are loaded, against the bytes of the weights and of the largest tensor.

Writes a random Qwen3 of about 1.3 GB in bf16, in shards, once; then, for each dtype of a run and each weight format,
a fresh process loads it through the loader of a run (CPU engine, LoRA on a frozen base) and tells its peak resident set
over what it held before. The bound: the weights as they rest, plus one tensor.

    python benchmarks/load_memory.py [--dir DIRECTORY] [--layers 12] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
SHARD_BYTES = 300e6
BASES = ("bfloat16", "float32", "qlora_bnb", "qlora_fp8", "qlora_fp4")
"""Dtypes of a run, and weight formats of one in bfloat16."""


def write_model(directory: Path, layers: int) -> None:
    """A random model directory in bf16, tensor by tensor."""
    import torch
    from surogate_model_qwen3.model import build

    from surogate_core.engine.planning.pieces import distinct, pieces
    from surogate_core.hf.card import CardFacts
    from surogate_core.hf.export import export_full

    config = {**SHAPE, "num_hidden_layers": layers}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for spec in distinct(pieces(build(config), lora=None, max_seqlen=8)):
            yield spec.hf_name, torch.empty(spec.shape, dtype=torch.bfloat16).normal_(0, 0.02)

    card = CardFacts(title="random")
    export_full(directory, tensors(), config=config, tokenizer=None, card=card, max_shard_bytes=SHARD_BYTES)


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status, such as VmRSS or VmHWM."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}")


def load(directory: Path, base: str) -> dict[str, Any]:
    """Load the model as a run does; the figures."""
    import gc

    import torch

    from surogate_core.batch import MicroBatch
    from surogate_core.config.resolve import load_run_config
    from surogate_core.plugins.registry import load_plugins
    from surogate_core.setup.assemble import check_weights, resolve_lora, resolve_model
    from surogate_core.setup.build import build_engine

    registry = load_plugins()
    tokens = 8
    keys = [f"{base}=true", "torch_dtype=bfloat16"] if base.startswith("qlora") else [f"torch_dtype={base}"]
    config = load_run_config(
        [
            f"model={directory}", *keys, "device=cpu", f"sequence_len={tokens}",
            "per_device_train_batch_size=1", "lora_rank=1", "lora_target_modules=[q_proj]",
            "datasets=[{path: absent.jsonl, type: text}]",
        ],
        registry=registry,
    )  # fmt: skip
    resolved = resolve_model(config, registry)
    assert resolved.weights is not None
    check_weights(config, resolved, resolve_lora(config, resolved.model))
    sample = MicroBatch(
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        labels=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        max_seqlen=tokens,
        tokens=tokens,
        label_tokens=tokens,
    )
    gc.collect()
    before = status("VmRSS")
    # Begins the high-water mark anew.
    Path("/proc/self/clear_refs").write_text("5")
    seen: dict[str, int] = {}

    def progress(task: str, done: int, total: int) -> None:
        seen[task] = status("VmHWM")

    engine = build_engine(config, registry, resolved, sample=sample, progress=progress)
    loading = next(peak for task, peak in seen.items() if "load" in task)
    weights = engine.stores.weights.nbytes()["device"]
    infos = [resolved.weights.info(name) for name in resolved.weights.names()]
    return {
        "base": base,
        "files": sum(info.end - info.begin for info in infos),
        "weights": weights,
        "largest": max(info.end - info.begin for info in infos),
        "peak": loading - before,
        "after": status("VmRSS") - before,
    }


def main() -> int:
    """Run the benchmark; 0 if the bound holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=None)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--load", choices=BASES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load is not None:
        print(json.dumps(load(options.dir, options.load)))
        return 0
    with tempfile.TemporaryDirectory(prefix="surogate-load-memory-") as temporary:
        directory = options.dir or Path(temporary) / "model"
        if not (directory / "config.json").exists():
            write_model(directory, options.layers)
        results = []
        for base in BASES:
            command = [sys.executable, __file__, "--dir", str(directory), "--load", base]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    held = True
    for figures in results:
        bound = figures["weights"] + figures["largest"]
        held &= figures["peak"] <= bound
        print(
            f"{figures['base']}: files {figures['files'] / 1e6:,.0f} MB, weights {figures['weights'] / 1e6:,.0f} MB, "
            f"largest tensor in the files {figures['largest'] / 1e6:,.0f} MB; "
            f"peak over what the process held before {figures['peak'] / 1e6:,.0f} MB "
            f"(weights + {(figures['peak'] - figures['weights']) / 1e6:,.0f} MB), "
            f"bound {bound / 1e6:,.0f} MB: {'held' if figures['peak'] <= bound else 'BROKEN'}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
