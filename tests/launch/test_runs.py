"""Whole runs with two processes: faults, signals, restarts, and processes that torchrun started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rank_processes import ranks_of

from surogate_core.errors import MachineError
from surogate_core.launch import supervisor
from surogate_core.mesh.lifeline import RankError
from surogate_core.plugins.registry import load_plugins

pytestmark = pytest.mark.slow

Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]


class Command:
    """`surogate sft` on two processes, in a directory of its own."""

    def __init__(self, place: Path, keys: Sequence[str], program: Sequence[str] = ("-m", "surogate_core")):
        self.output = place / "run"
        self._temporary = place / "temporary"
        self._temporary.mkdir(exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(self._temporary), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, *program, "sft", *keys, f"output_dir={self.output}"]
        self.process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def ranks(self) -> dict[int, int]:
        """Rank → process."""
        return ranks_of(self.process.pid)

    def wait_for_steps(self, count: int) -> dict[int, int]:
        """Wait until this number of steps is recorded; returns the processes of the ranks."""
        file, end = self.output / "metrics.jsonl", time.monotonic() + 120
        while not file.is_file() or file.read_text().count('"step_end"') < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)
        return self.ranks()

    def end(self) -> tuple[int, str]:
        """The exit code and all output; nothing is left behind."""
        output, _ = self.process.communicate(timeout=120)
        assert not self.ranks()
        assert not list(self._temporary.glob(f"{supervisor.PREFIX}*"))
        return self.process.returncode, output


@pytest.fixture
def command(tmp_path: Path, base: list[str]) -> Iterator[Callable[..., Command]]:
    """Starts the command with more keys."""
    started: list[Command] = []
    shared = [word for word in base if not word.startswith(("max_steps", "monitor"))]

    def start(*keys: str, **options: Any) -> Command:
        common = ("gpus=2", "lora=true", "lora_rank=4", "gradient_accumulation_steps=1", "save_steps=4")
        started.append(Command(tmp_path, [*shared, *common, *keys], **options))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_a_killed_rank_ends_the_run_and_its_record(command: Callable[..., Command], records: Records) -> None:
    run = command("max_steps=100000")
    os.kill(run.wait_for_steps(3)[1], signal.SIGKILL)
    code, output = run.end()
    assert code == 137
    message = output[output.rindex("surogate: rank 1") :].removeprefix("surogate: ").strip()
    assert "was killed by SIGKILL" in message
    end = records(run.output, "run_end")[-1]
    assert (end["reason"], end["message"]) == ("failed", message)
    assert "was killed by SIGKILL" in (run.output / "report.md").read_text()


def test_a_stopped_rank_ends_the_run(command: Callable[..., Command], records: Records) -> None:
    run = command("max_steps=100000")
    os.kill(run.wait_for_steps(3)[1], signal.SIGSTOP)
    code, output = run.end()
    assert code == 128 + signal.SIGSTOP
    assert "was stopped by a signal" in output
    # Rank 0 waits in a collective for ever. Its record is ended all the same.
    assert records(run.output, "run_end")[-1]["reason"] == "failed"


@pytest.mark.parametrize("target", ["the command", "rank 1"])
def test_a_signal_saves_after_one_step_and_the_run_resumes(
    command: Callable[..., Command], records: Records, target: str
) -> None:
    run = command("max_steps=100000")
    ranks = run.wait_for_steps(2)
    os.kill(run.process.pid if target == "the command" else ranks[1], signal.SIGTERM)
    code, output = run.end()
    assert code == 143, output
    end = records(run.output, "run_end")[-1]
    assert end["reason"] == "signal"
    assert (run.output / f"checkpoint-{end['step']}").is_dir()
    code, output = command(f"max_steps={end['step'] + 2}").end()
    assert (code, records(run.output, "run_start")[-1]["start_step"]) == (0, end["step"]), output
    # The console of one rank, not of two.
    assert output.count("Finished after") == 1


def test_a_restart_gives_the_same_bits(
    command: Callable[..., Command], records: Records, history: History, tmp_path: Path
) -> None:
    run = command("max_steps=24", "max_restarts=1", "sequence_len=128")
    os.kill(run.wait_for_steps(6)[0], signal.SIGKILL)
    code, output = run.end()
    assert code == 0, output
    assert "the run starts again from checkpoint-" in output
    assert [line["start_step"] > 0 for line in records(run.output, "run_start")] == [False, True]
    restarted = history(run.output)
    run.output.rename(tmp_path / "restarted")
    code, output = command("max_steps=24", "sequence_len=128").end()
    assert code == 0, output
    assert restarted == history(run.output)


def test_processes_of_torchrun_join_in_one_directory(command: Callable[..., Command], records: Records) -> None:
    run = command(
        "max_steps=2",
        "gpus=1",
        program=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "surogate_core"),
    )
    code, output = run.end()
    assert code == 0, output
    assert json.loads((run.output / "run.json").read_text())["gpus"] == 2
    assert output.count("Finished after") == 1
    assert (run.output / "surogate.rank-1.log").is_file()


PICKY = """
import os
from surogate_core import bundles, hookimpl

def loss(logits, labels, columns):
    if os.environ.get("RANK") == "1":
        raise RuntimeError("cannot be compiled here")
    from surogate_core.kernels.ops import cross_entropy

    return cross_entropy(logits, labels)

@hookimpl
def surogate_objective():
    made = bundles.Objective(name="picky", token_loss=loss)
    return bundles.ObjectiveSpec(name="picky", build=lambda options: made)
"""


def test_an_error_while_one_rank_compiles(
    install_plugin: Callable[..., Path], base: list[str], run_here: Callable[..., int], tmp_path: Path, records: Records
) -> None:
    install_plugin("picky", PICKY)
    message = (
        r"^rank 1: a bug in plugin picky .*RuntimeError: cannot be compiled here\. The traceback is in .*rank-1\.log"
    )
    with pytest.raises(RankError, match=message) as raised:
        run_here(tmp_path / "run", *base, "gpus=2", "objective=picky", "max_steps=2", registry=load_plugins())
    assert raised.value.exit_code == 1
    assert "Traceback" in (tmp_path / "run/surogate.rank-1.log").read_text()
    # Rank 0 may have been anywhere. Its record is ended all the same.
    assert records(tmp_path / "run", "run_end")[-1]["message"] == str(raised.value)


def test_one_rank_is_out_of_memory(
    install_plugin: Callable[..., Path], base: list[str], run_here: Callable[..., int], tmp_path: Path, records: Records
) -> None:
    install_plugin("picky", PICKY.replace('RuntimeError("cannot be compiled here")', 'MemoryError("no room")'))
    with pytest.raises(MachineError, match=r"^rank 1: Out of host memory: no room\. .*Fix: ") as raised:
        run_here(tmp_path / "run", *base, "gpus=2", "objective=picky", "max_steps=2", registry=load_plugins())
    assert records(tmp_path / "run", "run_end")[-1]["message"] == str(raised.value)


def test_wrong_input_is_reported_once(command: Callable[..., Command]) -> None:
    code, output = command("max_steps=2", "model=/nowhere/model").end()
    assert code == 2
    assert output.count("/nowhere/model") == 1, output
