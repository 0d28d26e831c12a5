"""Two processes with the variables of torchrun take each other for two machines, each with a disk of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_world import of_step
from surogate_launcher_ray.sockets import free_port

pytestmark = pytest.mark.slow

Machines = Callable[..., list[tuple[int, str]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]


@pytest.fixture
def on_machines(base: list[str]) -> Machines:
    """Runs `surogate sft` in each directory, with the output in `run` below it; (exit code, output) of each process."""

    def run(places: Sequence[Path], *keys: str) -> list[tuple[int, str]]:
        port = free_port("127.0.0.1")
        processes = []
        for rank, place in enumerate(places):
            place.mkdir(exist_ok=True)
            found = {"RANK": rank, "WORLD_SIZE": len(places), "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
            words = {text.partition("=")[0]: text for text in (*base, *KEYS, *keys)}
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "surogate_core", "sft", *words.values(), "output_dir=run"],
                    cwd=place,
                    env={**os.environ, **{name: str(value) for name, value in found.items()}},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        try:
            outputs = [process.communicate(timeout=120)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]

    return run


KEYS = ("lora=false", "exact_reduction=true", "optimizer=adamw", "gradient_accumulation_steps=2", "save_steps=2")
BEST = ("eval_steps=1", "load_best=true", "learning_rate=0.5", "save_total_limit=9", "warmup_steps=4")
"""Neither the start nor the last step is the best."""


def test_a_checkpoint_of_one_machine_gives_the_bits_of_a_shared_one(
    on_machines: Machines, tmp_path: Path, history: History, digests: Digests, records: Any
) -> None:
    shared, one, two = tmp_path / "shared", tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in on_machines([shared, shared], "max_steps=4", *BEST)] == [0, 0]
    one.mkdir()
    of_step(shared / "run", 2, one / "run")
    ended = on_machines([one, two], "max_steps=4", *BEST)
    assert [code for code, _ in ended] == [0, 0], ended
    assert history(one / "run") == history(shared / "run")
    assert digests(one / "run/checkpoint-4") == digests(shared / "run/checkpoint-4")
    # The weights of the best step, which only the first machine has, too.
    (end,) = records(one / "run", "run_end")[-1:]
    assert 0 < end["export_step"] < 4
    assert digests(one / "run/model") == digests(shared / "run/model")
    assert [path.name for path in (two / "run").iterdir()] == ["surogate.rank-1.log"]


def test_a_machine_that_cannot_write_ends_the_run_with_its_error(on_machines: Machines, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert [code for code, _ in on_machines([one, one], "max_steps=2")] == [0, 0]
    (two / "run").mkdir(parents=True)
    # The name of the copy is taken by something that cannot be replaced.
    name = f".received-{os.uname().nodename}"
    (two / "run" / f".{name}.surogate-tmp").write_text("in the way")
    ended = on_machines([one, two], "max_steps=4")
    assert [code for code, _ in ended] == [2, 2], ended
    assert "surogate: rank 1: copy of the checkpoint" in ended[0][1]
    # The other way round, the run would start from step 0.
    ended = on_machines([two, one], "max_steps=4")
    assert [code for code, _ in ended] == [2, 2], ended
    assert "run: the machine of rank 0 has no checkpoint here, but that of rank 1 has checkpoint-2. Fix:" in ended[0][1]
    shutil.rmtree(two)
    assert [code for code, _ in on_machines([one, two], "max_steps=4")] == [0, 0]
