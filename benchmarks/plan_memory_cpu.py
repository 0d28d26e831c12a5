"""What `surogate plan` predicts of a run on a CPU against what the process takes, for several configurations.

Every configuration is trained by `surogate sft` in a process of its own: two optimizer steps of two micro-steps, an
evaluation, a checkpoint, the export. Measured is the largest resident set from the engine's beginning to the end of the
run, beyond the resident set just before the engine is built; of it, `files` are mapped pages of files, which the kernel
takes back when it needs them. `--stages` prints what is resident after each part of the run.

    python benchmarks/plan_memory_cpu.py [--only NAME …] [--stages] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MIB = 2**20
SHAPE = (
    "{hidden_size: 512, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 64, "
    "intermediate_size: 1536, vocab_size: 65536}"
)
"""59 million parameters, as a change of Qwen3's preset tiny."""
SMALL = ["model=qwen3", "model.preset=tiny"]
LARGE = [*SMALL, f"model.config={SHAPE}", "sequence_len=256", "per_device_train_batch_size=4"]
EXPERTS = (
    "{hidden_size: 512, num_hidden_layers: 8, num_attention_heads: 8, num_key_value_heads: 4, head_dim: 64, "
    "moe_intermediate_size: 256, num_experts: 16, num_experts_per_tok: 4, vocab_size: 65536}"
)
"""91 million parameters, 53 million of them in experts, as a change of Qwen3-MoE's preset tiny."""
SPARSE = [
    "model=qwen3-moe",
    "model.preset=tiny",
    f"model.config={EXPERTS}",
    *("sequence_len=256", "per_device_train_batch_size=4"),
]
FULL = ["lora=false", "optimizer=adamw"]
LORA = ["lora=true", "lora_rank=16"]
CASES: dict[str, list[str]] = {
    "1M full": [*SMALL, *FULL, "sequence_len=1024"],
    "59M full, adamw": [*LARGE, *FULL],
    "59M full, adamw_8bit": [*LARGE, "lora=false"],
    "59M lora": [*LARGE, *LORA],
    "59M lora, no recompute, chunks 4": [*LARGE, *LORA, "recompute=false", "lmhead_chunks=4"],
    "59M full, cpu_training, offload=disk": [*LARGE, *FULL, "offload=disk", "cpu_training=true", "lmhead_chunks=4"],
    "91M of experts full, adamw": [*SPARSE, *FULL],
    "91M of experts lora": [*SPARSE, *LORA],
    "91M of experts lora, no recompute": [*SPARSE, *LORA, "recompute=false", "lmhead_chunks=4"],
    "91M of experts lora, fp8-hybrid": [*SPARSE, *LORA, "recipe=fp8-hybrid", "lmhead_chunks=4"],
    "91M of experts qlora nf4": [*SPARSE, *LORA, "qlora_bnb=true", "lmhead_chunks=4"],
    "59M qlora nf4": [*LARGE, *LORA, "qlora_bnb=true", "lmhead_chunks=4"],
}
RUN = ["device=cpu", "max_steps=2", "gradient_accumulation_steps=2", "save_steps=1", "validation_split_ratio=0.02"]


def resident() -> dict[str, int]:
    """Bytes of this process: anonymous, of files, both, and the most there were since `forget_peak`."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    names = {"anonymous": "RssAnon", "files": "RssFile", "now": "VmRSS", "peak": "VmHWM"}
    return {name: int(fields[field].split()[0]) * 1024 for name, field in names.items()}


def forget_peak() -> None:
    """Let the kernel count the largest resident set from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def child(words: list[str]) -> None:
    """Train, and print what was resident when as the last line."""
    from surogate_core.cli.main import main as surogate
    from surogate_core.engine.engine import Engine
    from surogate_core.engine.update import Update
    from surogate_core.run import run
    from surogate_core.train.loop import Loop

    stages: list[tuple[str, dict[str, int]]] = []

    def watch(owner: Any, name: str, before: Callable[[], None] | None = None) -> None:
        inner = getattr(owner, name)

        def outer(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                before()
            found = inner(*args, **kwargs)
            stages.append((name, resident()))
            return found

        setattr(owner, name, outer)

    def begin() -> None:
        forget_peak()
        stages.append(("floor", resident()))

    watch(run, "build_engine", begin)
    watch(Engine, "_compile")
    watch(Engine, "_accumulate")
    watch(Update, "run")
    watch(Engine, "evaluate")
    watch(Loop, "run")
    watch(run, "export")
    code = surogate(["sft", *words])
    print(json.dumps({"code": code, "stages": stages}))


def measure(name: str, *, threads: int, stages: bool) -> tuple[int, int, int]:
    """(predicted, measured, of files) in bytes."""
    words = [*CASES[name], *RUN]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as place:
        words = [*words, f"output_dir={place}/run"]
        asked = [str(Path(sys.executable).with_name("surogate")), "plan", *words, "--json"]
        plan = json.loads(subprocess.run(asked, capture_output=True, check=True, text=True, env=environment).stdout)
        asked = [sys.executable, __file__, "--child", *words]
        done = subprocess.run(asked, capture_output=True, check=False, text=True, env=environment)
    if done.returncode:
        sys.exit(f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])["stages"]
    floor = found[0][1]
    last = found[-1][1]
    if stages:
        for held in plan["held"]:
            print(f"    plan {held['kind']:<20} {held['place']:<8} {held['nbytes'] / MIB:9.1f}  {held['detail']}")
        for stage, values in found:
            print(f"    {stage:<16}" + "".join(f" {k} {(v - floor[k]) / MIB:9.1f}" for k, v in values.items()))
    predicted = plan["device_bytes"] + plan["host_bytes"]
    return predicted, last["peak"] - floor["now"], last["files"] - floor["files"]


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child)
        return
    print("| configuration | predicted, MiB | measured, MiB | of files | |\n| --- | --- | --- | --- | --- |")
    for name in options.only:
        predicted, measured, files = measure(name, threads=options.threads, stages=options.stages)
        off = f"{predicted / measured - 1:+.1%}".replace("-", "−")
        print(f"| {name} | {predicted / MIB:,.0f} | {measured / MIB:,.0f} | {files / MIB:,.0f} | {off} |", flush=True)


if __name__ == "__main__":
    main()
