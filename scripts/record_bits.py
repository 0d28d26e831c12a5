"""Record what short runs compute, to the bit, and compare two recordings.

    python scripts/record_bits.py record FILE [--python PYTHON] [--only NAME …] [--set KEY=VALUE …]
    python scripts/record_bits.py compare BEFORE AFTER [--norms RELATIVE]

A recording has, for each run of RUNS (families, LoRA, full fine-tuning and pre-training, recipes, optimizers,
offloaders, quantized bases), every loss, learning rate and gradient norm as text, and a digest of every tensor in the
last checkpoint and in the export. Runs take about ten seconds each on one core. `--python` names the interpreter of
another tree's environment, so that one script records both trees on one machine; recordings of different machines
or torch versions differ. `--set max_grad_norm=0` turns clipping off where the gradient norm itself is what changes.

`compare` prints each difference and exits with 1 if there is one. `--norms 1e-5` allows gradient norms that much
relative difference; everything else must be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kill_test import SETTINGS
from safetensors import safe_open

STEPS = 12
COMMON = (
    *(setting for setting in SETTINGS if not setting.startswith(("save_steps", "run_name", "model.config"))),
    f"max_steps={STEPS}",
    "save_steps=0",
    "eval_steps=6",
    "report_to=null",
    "run_name=bits",
)
"""The settings of kill_test.py with another length; a model's own settings follow."""
SMALL = ("num_hidden_layers=2", "hidden_size=64", "intermediate_size=96", "vocab_size=1024")
SMALL += ("num_attention_heads=4", "num_key_value_heads=2")
LORA = ("lora=true", "lora_rank=4")
SMALL_EXPERTS = ("model.config.moe_intermediate_size=32",)

RUNS: Mapping[str, tuple[str, ...]] = {
    "qwen3 full adamw_8bit": ("model=qwen3", "lora=false", "optimizer=adamw_8bit"),
    "qwen3 full adamw bf16 masters": ("model=qwen3", "lora=false", "optimizer=adamw", "master_dtype=bf16"),
    "qwen3 full normuon": ("model=qwen3", "lora=false", "optimizer=normuon", "learning_rate=0.02"),
    "qwen3 LoRA dropout": ("model=qwen3", *LORA, "lora_dropout=0.1", "merge_adapter=true"),
    "qwen2 full recompute off": ("model=qwen2", "lora=false", "recompute=false", "lmhead_chunks=2"),
    "qwen2 LoRA recompute on": ("model=qwen2", *LORA, "recompute=true"),
    "llama full unpacked": ("model=llama", "lora=false", "sample_packing=false", "optimizer=adamw"),
    "llama LoRA q v": ("model=llama", *LORA, "lora_target_modules=[q_proj,v_proj]", "optimizer=adamw"),
    "qwen3-moe LoRA routers": ("model=qwen3-moe", *LORA, "lora_expert_rank=2", "train_router=true", *SMALL_EXPERTS),
    "qwen3-moe full": ("model=qwen3-moe", "lora=false", "recompute=true", *SMALL_EXPERTS),
    "qwen3 pre-training": ("task=pt", "model=qwen3", "lora=false", "lr_scheduler_type=wsd", "cooldown_steps=3"),
    "qwen3 full fp8-hybrid": ("model=qwen3", "lora=false", "recipe=fp8-hybrid"),
    "qwen3 LoRA fp8-hybrid": ("model=qwen3", *LORA, "recipe=fp8-hybrid"),
    "qwen3 full nvfp4": ("model=qwen3", "lora=false", "recipe=nvfp4"),
    "qwen3 LoRA NF4": ("model=qwen3", *LORA, "qlora_bnb=true"),
    "qwen3 LoRA FP8 base": ("model=qwen3", *LORA, "qlora_fp8=true", "qlora_block_size=32"),
    "qwen3 LoRA NVFP4 base": ("model=qwen3", *LORA, "qlora_fp4=true"),
    "qwen3 full host store": ("model=qwen3", "lora=false", "offload=host", "offload_residual=true"),
    "qwen3 full cpu_training disk": ("model=qwen3", "lora=false", "offload=disk", "cpu_training=true"),
}


def tensors_of(path: Path) -> dict[str, str]:
    """Tensor name → dtype, shape and SHA-256 of its bytes, for one safetensors file."""
    found = {}
    with safe_open(path, framework="pt") as file:
        for name in sorted(file.keys()):
            tensor = file.get_tensor(name)
            data = tensor.contiguous().view(-1).view(dtype=_bytes_dtype()).numpy().tobytes()
            found[name] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()[:24]}"
    return found


def _bytes_dtype() -> Any:
    import torch

    return torch.uint8


def read_run(output: Path) -> dict[str, Any]:
    """What a finished run left: figures by step, and digests of the tensors of its last checkpoint and exports."""
    figures: dict[str, dict[str, str]] = {"losses": {}, "norms": {}, "rates": {}}
    for text in (output / "metrics.jsonl").read_text().splitlines():
        line = json.loads(text)
        if line["event"] in ("step_end", "eval_end"):
            key = f"{line['event']} {line['step']}"
            figures["losses"][key] = repr(line["loss"])
        if line["event"] == "step_end":
            figures["norms"][str(line["step"])] = repr(line["grad_norm"])
            figures["rates"][str(line["step"])] = repr(line["lr"])
    files = {}
    for directory in (output / f"checkpoint-{STEPS}", output / "adapter", output / "model"):
        for path in sorted(directory.glob("*.safetensors")):
            files[f"{directory.name}/{path.name}"] = tensors_of(path)
    return {**figures, "tensors": files}


def record_run(name: str, settings: Sequence[str], python: str, directory: Path) -> dict[str, Any]:
    """Run once through the command line; the recording, or its error."""
    output = directory / name.replace(" ", "-")
    words = [f"model.config.{setting}" for setting in SMALL]
    places = [f"output_dir={output}", f"data_cache_dir={directory / 'cache'}"]
    code = "import sys; from surogate_core.cli.main import main; sys.exit(main(sys.argv[1:]))"
    command = [python, "-c", code, *COMMON, *words, *settings, *places]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        return {"error": done.stdout[-2000:]}
    return read_run(output)


def record(options: argparse.Namespace) -> int:
    """Record the chosen runs into the file; 1 if one of them failed."""
    chosen = [name for name in RUNS if not options.only or any(part in name for part in options.only)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="surogate-bits-") as directory:
        for number, name in enumerate(chosen, 1):
            found[name] = record_run(name, (*RUNS[name], *options.set), options.python, Path(directory))
            error = found[name].get("error")
            print(f"{number}/{len(chosen)} {name}: {error or 'recorded'}", flush=True)
    options.file.write_text(json.dumps(found, indent=1) + "\n")
    return int(any("error" in run for run in found.values()))


def differences(before: Mapping[str, Any], after: Mapping[str, Any], norms: float) -> list[str]:
    """Every figure and tensor that is not the same in both recordings, a line each."""
    found = []
    for run in sorted(before.keys() | after.keys()):
        one, other = _flat(before.get(run, {})), _flat(after.get(run, {}))
        if not one or not other:
            found.append(f"{run}: recorded {'after' if other else 'before'} only")
            continue
        for key in sorted(one.keys() | other.keys()):
            a, b = one.get(key), other.get(key)
            near = key[0] == "norms" and a and b and abs(float(a) - float(b)) <= norms * abs(float(a))
            if a != b and not near:
                found.append(f"{run}: {' '.join(key)}: {a} → {b}")
    return found


def _flat(value: Any, path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    if not isinstance(value, dict):
        return {path: str(value)}
    flat: dict[tuple[str, ...], str] = {}
    for key, item in value.items():
        flat |= _flat(item, (*path, key))
    return flat


def compare(options: argparse.Namespace) -> int:
    """Print what differs; 1 if anything does."""
    before, after = json.loads(options.before.read_text()), json.loads(options.after.read_text())
    found = differences(before, after, options.norms)
    for line in found:
        print(line)
    figures = sum(len(_flat(run)) for run in after.values())
    verdict = f"{len(found)} differ" if found else "equal to the bit"
    print(f"{len(after)} runs, {figures} figures and tensors: {verdict}")
    return int(bool(found))


def main() -> int:
    """Run the command; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    recording = commands.add_parser("record")
    recording.add_argument("file", type=Path)
    recording.add_argument("--python", default=sys.executable)
    recording.add_argument("--only", nargs="*", default=[])
    recording.add_argument("--set", nargs="*", default=[])
    recording.set_defaults(act=record)
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--norms", type=float, default=0.0)
    comparing.set_defaults(act=compare)
    options = parser.parse_args()
    code: int = options.act(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
