"""SIGINT and SIGTERM in whole runs: the step is finished and saved, and the resumed run loses no bit."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import KILLER

from surogate_core.plugins.registry import Registry, load_plugins

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]


@pytest.fixture
def killer(install_plugin: Callable[..., Path]) -> tuple[Any, Registry]:
    """The monitor that signals, and the registry that has it."""
    install_plugin("monitor-killer", KILLER)
    registry = load_plugins()
    return sys.modules["plugin_monitor_killer"].Killer, registry


PLACES: dict[str, Callable[[Any], bool]] = {
    "a step": lambda e: e.name == "step_end" and e.step == 3,
    "a step with an evaluation and a save": lambda e: e.name == "step_end" and e.step == 4,
    "the last step": lambda e: e.name == "step_end" and e.step == 6,
    "an evaluation": lambda e: e.name == "progress" and e.task == "evaluating" and e.done == 2,
    "a save": lambda e: e.name == "progress" and e.task == "saving a checkpoint",
    "after a save": lambda e: e.name == "checkpoint_saved",
    "the export": lambda e: e.name == "progress" and e.task.startswith("exporting"),
}


@pytest.mark.slow
def test_signals_lose_no_bit(
    killer: tuple[Any, Registry],
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    records: Records,
    history: History,
    digests: Digests,
) -> None:
    monitor, registry = killer
    keys = [*base, "eval_steps=2", "save_steps=2", "monitor=[jsonl,killer]", "lora=true", "lora_dropout=0.1"]
    whole = tmp_path / "whole"
    run_here(whole, *keys, registry=registry)
    for place, at in PLACES.items():
        monitor.at, monitor.number = at, signal.SIGTERM
        cut = tmp_path / place
        assert run_here(cut, *keys, registry=registry) == 143, place
        end = records(cut, "run_end")[-1]
        assert end["reason"] == ("finished" if place == "the export" else "signal"), place
        outcome = "finished" if place == "the export" else "interrupted"
        assert f"**{outcome.capitalize()}" in (cut / "report.md").read_text(), place
        assert (cut / "adapter").exists() == (place == "the export"), place
        assert (cut / f"checkpoint-{end['step']}").exists() == (place != "an evaluation"), place
        assert run_here(cut, *keys, registry=registry) == 0
        assert history(cut) == history(whole), place
        for directory in ("checkpoint-6", "adapter"):
            assert digests(cut / directory) == digests(whole / directory), place


@pytest.mark.slow
def test_a_signal_in_a_later_evaluation_saves_first(
    killer: tuple[Any, Registry],
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    records: Records,
    history: History,
    digests: Digests,
) -> None:
    monitor, registry = killer
    keys = [*base, "eval_steps=2", "save_steps=0", "monitor=[jsonl,killer]"]
    run_here(tmp_path / "whole", *keys, registry=registry)
    evaluations = 0

    def third(event: Any) -> bool:
        nonlocal evaluations
        evaluations += event.name == "progress" and event.task == "evaluating" and event.done == 1
        return evaluations == 3

    monitor.at, monitor.number = third, signal.SIGINT
    assert run_here(tmp_path / "cut", *keys, registry=registry) == 130
    # Saved without that evaluation, which the resumed run makes up for.
    saved = [(line["step"], line["reason"]) for line in records(tmp_path / "cut", "checkpoint_saved")]
    assert saved == [(4, "signal")]
    assert [line["step"] for line in records(tmp_path / "cut", "eval_end")] == [0, 2]
    assert run_here(tmp_path / "cut", *keys, registry=registry) == 0
    assert history(tmp_path / "cut") == history(tmp_path / "whole")
    assert digests(tmp_path / "cut" / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.parametrize("task", ["tokenise", "loading weights", "differentiating Qwen3Block"])
def test_a_signal_in_the_set_up_ends_it_at_once(
    task: str, killer: tuple[Any, Registry], tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    monitor, registry = killer
    keys = [*base, f"data_cache_dir={tmp_path / 'cache'}", "monitor=[jsonl,killer]", "max_steps=2"]
    monitor.at, monitor.number = lambda e: e.name == "progress" and e.task.startswith(task), signal.SIGINT
    assert run_here(tmp_path / "out", *keys, registry=registry) == 130
    assert records(tmp_path / "out", "run_end")[0]["reason"] == "signal"
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    assert not list((tmp_path / "cache").rglob("*.tmp-*"))
    assert run_here(tmp_path / "out", *keys, registry=registry) == 0


# -------------------------------------------------------------------------- child processes

SLOW = """
import time
from surogate_core.engine.engine import Engine
step = Engine.train_step
def train_step(self, *arguments, **named):
    open({marker!r}, "w").close()
    time.sleep({seconds})
    return step(self, *arguments, **named)
Engine.train_step = train_step
"""


@contextmanager
def child(
    output: Path, base: list[str], *extra: str, seconds: float, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """`surogate` as a process that takes `seconds` a step, in its first step."""
    latest = {text.partition("=")[0]: text for text in (*base, *extra, f"output_dir={output}")}
    marker = output.with_name(f"{output.name}.began")
    program = SLOW.format(marker=str(marker), seconds=seconds)
    program += f"import sys\nfrom surogate_core.cli.main import main\nsys.exit(main({list(latest.values())!r}))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True, **options
    )
    try:
        until = time.monotonic() + 120
        while not marker.exists():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < until
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: list[str], run_here: RunHere) -> Path:
    """A run that nothing has cut."""
    place = tmp_path_factory.mktemp("whole")
    run_here(place, *base)
    return place


@pytest.mark.slow
def test_a_signalled_process_exits_with_its_code_and_says_how_to_go_on(
    tmp_path: Path, base: list[str], whole: Path, run_here: RunHere, history: History, digests: Digests
) -> None:
    with child(tmp_path / "cut", base, "monitor=[jsonl,console]", seconds=0.5, stdout=subprocess.PIPE) as process:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert (tmp_path / "cut" / "checkpoint-1").is_dir()
    assert "Run the same command again to resume." in out
    # It was evaluated before the first step only: there is nothing to compare.
    assert "Eval loss" not in out
    assert err == ""
    assert run_here(tmp_path / "cut", *base) == 0
    assert history(tmp_path / "cut") == history(whole)
    assert digests(tmp_path / "cut" / "checkpoint-6") == digests(whole / "checkpoint-6")


@pytest.mark.slow
def test_a_closed_terminal_saves_a_checkpoint(
    tmp_path: Path, base: list[str], whole: Path, run_here: RunHere, history: History, digests: Digests
) -> None:
    """The kernel sends SIGHUP when the terminal goes; nothing can be shown any more."""
    terminal, side = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where these tests run under nohup
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)

    # Standard error stays a pipe, so that a traceback would be seen.
    with child(
        tmp_path / "cut", base, "monitor=[jsonl,console]", seconds=0.5,
        stdin=side, stdout=side, preexec_fn=take_terminal,
    ) as process:  # fmt: skip
        os.close(side)
        os.close(terminal)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 129, err
    assert "Traceback" not in err
    assert (tmp_path / "cut" / "checkpoint-1").is_dir()
    assert run_here(tmp_path / "cut", *base) == 0
    assert history(tmp_path / "cut") == history(whole)
    assert digests(tmp_path / "cut" / "checkpoint-6") == digests(whole / "checkpoint-6")


@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    with child(tmp_path / "out", base, seconds=60, stdout=subprocess.DEVNULL) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
    # The dead process holds no lock.
    assert run_here(tmp_path / "out", *base, "max_steps=1") == 0


@pytest.mark.slow
def test_a_closed_pipe_does_not_stop_the_run(tmp_path: Path, base: list[str], records: Records) -> None:
    with child(tmp_path / "out", base, "monitor=[console,jsonl]", seconds=0.1, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "Traceback" not in err
    assert len(records(tmp_path / "out", "step_end")) == 6
    assert records(tmp_path / "out", "run_end")[0]["reason"] == "finished"
    assert (tmp_path / "out" / "model" / "config.json").exists()
