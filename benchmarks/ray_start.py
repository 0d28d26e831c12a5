"""Seconds from the command to the first step's end: on one machine, and by Ray on one and on two fake machines.

    python benchmarks/ray_start.py [--repeats 2]

Needs `surogate-launcher-ray[cluster]`. The machines are raylets of this one, with two CPUs each; the runs have two
processes, a tiny model and four steps.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from surogate_core.files.metrics import METRICS, read_metrics

KEYS = (
    *("model=qwen3", "model.preset=tiny", "from_scratch=true", "dataset=embedded", "device=cpu", "compiler=fx"),
    *("gpus=2", "gradient_accumulation_steps=2", "max_steps=4", "eval_steps=0", "save_steps=0", "report_to=null"),
)
CASES: Mapping[str, tuple[str, ...]] = {
    "local": (),
    "ray, one machine": ("launcher=ray", "launcher.num_nodes=1"),
    "ray, two machines": ("launcher=ray", "launcher.num_nodes=2"),
}


def first_step(keys: tuple[str, ...], place: Path) -> tuple[float, float]:
    """Seconds until the first step has ended, and until the command has."""
    words = [sys.executable, "-m", "surogate", "sft", *KEYS, *keys, f"output_dir={place}"]
    began = time.time()
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    ended: float = read_metrics(place / METRICS, event="step_end")[0]["time"]
    return ended - began, time.time() - began


def main() -> None:
    """Print the table."""
    from ray.cluster_utils import Cluster  # type: ignore[import-not-found, unused-ignore]

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    os.environ["RAY_ADDRESS"] = cluster.address
    print("| start | first step, s | whole command, s |\n| --- | --- | --- |")
    try:
        for number in range(options.repeats):
            for name, keys in CASES.items():
                with tempfile.TemporaryDirectory() as place:
                    first, whole = first_step(keys, Path(place) / f"run-{number}")
                print(f"| {name} | {first:.1f} | {whole:.1f} |", flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
