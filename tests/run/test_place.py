"""Each run has a directory of its own, and the same request resumes what it began."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import KILLER

from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.config.schema import RunConfig
from surogate_core.errors import MachineError, PluginError, UserError
from surogate_core.files.runs import RUNS
from surogate_core.plugins.registry import Registry, load_plugins
from surogate_core.run.place import CONTENT_BYTES, asked_of, claimed, placed

Load = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.jsonl").write_text('{"text": "a"}\n')


@pytest.fixture(scope="module")
def load(installed: Registry) -> Load:
    """A configuration with the keys."""
    config = load_run_config(["datasets=[{path: my.jsonl, type: text}]"], registry=installed)
    return lambda **keys: replace(config, **keys)


def fail(config: RunConfig, file: str, error: Exception) -> None:
    """A run that writes a file and fails."""
    with placed(config) as (_, place):
        (place.directory / file).write_text("{}")
        raise error


def begin(config: RunConfig, *, done: bool = False) -> tuple[str, str]:
    """(directory, note) of a run that begins, and ends well if `done`."""
    with placed(config) as (one, place):
        assert one.output_dir == str(place.directory)
        (place.directory / "run.json").write_text("{}")
        if done:
            place.done()
    return str(place.directory), place.note


def test_the_name_says_model_task_and_data(load: Load) -> None:
    first, note = begin(load())
    assert re.fullmatch(r"runs/qwen3-tiny-my-\d{8}-\d{6}", first)
    assert note == ""
    assert re.match(r"runs/qwen3-tiny-pt-my-2", begin(load(task="pt"))[0])
    assert re.match(r"runs/first-try-2", begin(load(run_name="first try"))[0])
    config = load(output_dir="mine")
    with placed(config) as (one, place):
        assert one is config
        assert place.directory == Path("mine")


def test_the_same_request_resumes_until_it_is_done(load: Load) -> None:
    first, _ = begin(load())
    again, note = begin(load(report_to=["web"], log_gpu_util=0))
    assert again == first, "monitors do not make it another run"
    assert begin(load(gpus=2))[0] == first, "a run resumes on another number of GPUs"
    assert note.startswith(f"Resuming {first}")
    assert begin(load(), done=True)[0] == first
    new, note = begin(load())
    assert new != first
    assert f"{first} has finished with the same configuration" in note
    assert f"output_dir={first} with more max_steps or num_epochs" in note


def test_another_experiment_never_collides(load: Load) -> None:
    found = [begin(load())[0], begin(load(learning_rate=1e-5))[0], begin(load(resume_from_checkpoint=False))[0]]
    Path("my.jsonl").write_text('{"text": "b"}\n')
    found.append(begin(load())[0])
    assert len(set(found)) == 4
    # The file is written anew with the same content.
    Path("my.jsonl").write_text('{"text": "b"}\n')
    assert begin(load())[0] == found[-1]


def test_two_at_once_have_two_directories(load: Load) -> None:
    with placed(load()) as (one, _), placed(load()) as (other, place):
        assert one.output_dir != other.output_dir
        assert place.note == ""


def _begin_in_a_process(barrier: Any, names: Any) -> None:
    config = load_run_config(["datasets=[{path: my.jsonl, type: text}]"], registry=load_plugins())
    barrier.wait(60)
    with placed(config) as (one, _):
        names.put(one.output_dir)
        barrier.wait(60)


@pytest.mark.slow
def test_processes_that_start_in_the_same_second() -> None:
    context = multiprocessing.get_context("spawn")
    barrier, names = context.Barrier(3), context.Queue()
    processes = [context.Process(target=_begin_in_a_process, args=(barrier, names)) for _ in range(3)]
    for process in processes:
        process.start()
    found = {names.get(timeout=120) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(found) == 3


@pytest.mark.parametrize(
    "error", [UserError("no"), MachineError("no"), PluginError("no")], ids=lambda e: type(e).__name__
)
def test_a_run_that_is_refused_leaves_no_directory(load: Load, error: Exception) -> None:
    with pytest.raises(type(error)):
        fail(load(), "surogate.log", error)
    # The traceback of a plugin's error is in the log there.
    assert len(list(RUNS.glob("qwen3*"))) == isinstance(error, PluginError)


def test_a_run_that_began_is_kept_when_it_fails(load: Load) -> None:
    with pytest.raises(MachineError):
        fail(load(), "run.json", MachineError("full"))
    (kept,) = RUNS.glob("qwen3*")
    assert begin(load())[0] == str(kept)


@pytest.mark.parametrize("file", ["run.json", "checkpoint-5", "metrics.jsonl", "deeper/run.json"])
def test_a_sweep_that_fails_keeps_its_runs(file: str) -> None:
    """Their directories are below the claimed one."""

    def fails(name: str) -> None:
        with claimed([name], name="sweep") as place:
            written = place.directory / "lora_rank=8" / name
            written.parent.mkdir(parents=True)
            written.write_text('{"event": "run_start"}\n')
            raise MachineError("full")

    for name in (file, "surogate.log"):
        with pytest.raises(MachineError):
            fails(name)
    assert [str(path) for path in RUNS.glob("sweep-*")] == [str(p.parent) for p in RUNS.glob("*/lora_rank=8")]
    (kept,) = RUNS.glob("sweep-*")
    assert (kept / "lora_rank=8" / file).exists()


def test_the_contents_of_a_large_data_set_are_not_all_read(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """One budget for all shards: what is beyond it counts by its size and its time."""
    Path("many").mkdir()
    for number in range(3):
        with Path(f"many/{number}.jsonl").open("wb") as file:
            file.truncate(CONTENT_BYTES * 3 // 8)
    read: list[str] = []
    real = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or real(path))
    (found,) = asked_of([load(datasets=[{"path": "many", "type": "text"}])])["data"].values()
    assert read == ["0.jsonl", "1.jsonl"]
    assert [type(what) for _, _, what in found] == [str, str, int]


def test_an_address_or_long_text_as_data_is_no_raw_error(load: Load) -> None:
    assert asked_of([load(datasets=[{"path": f"https://host/{'x' * 400}", "type": "text"}])])["data"]
    with pytest.raises(UserError, match="cannot be read"):
        asked_of([load(datasets=[{"path": "x" * 400, "type": "text"}])])


def test_a_run_without_output_dir_is_resumed_by_the_same_command(
    base: list[str], capsys: pytest.CaptureFixture[str], install_plugin: Callable[..., Path]
) -> None:
    install_plugin("monitor-killer", KILLER)
    command = [*base, "monitor=[jsonl,killer]", "save_steps=0"]
    killer = __import__("plugin_monitor_killer").Killer
    killer.at, killer.number = (lambda event: event.name == "step_end" and event.step == 3), signal.SIGINT
    assert main(command) == 130
    (first,) = RUNS.glob("qwen3-tiny-embedded-*")
    assert (RUNS / "latest").resolve() == first.resolve()
    assert main(command) == 0
    assert f"Resuming {first}" in capsys.readouterr().err
    lines = [json.loads(line) for line in (first / "metrics.jsonl").read_text().splitlines()]
    assert [line["start_step"] for line in lines if line["event"] == "run_start"] == [0, 4]
    assert len(list(RUNS.glob("qwen3*"))) == 1
    refused = [word for word in base if not word.startswith(("monitor=", "datasets="))]
    data = "datasets=[{path: my.jsonl, type: conversation}]"
    assert main([*refused, data, "monitor=[console,jsonl]"]) == 2
    assert "Report:" not in capsys.readouterr().out
    assert len(list(RUNS.glob("qwen3*"))) == 1, "a refused run leaves no directory"


@pytest.mark.slow
def test_a_sweep_has_one_directory(base: list[str]) -> None:
    assert main([*base, "learning_rate=1e-3,1e-4", "max_steps=1", "--multirun"]) == 0
    (sweep,) = RUNS.glob("sweep-learning_rate-*")
    assert {path.name for path in sweep.iterdir() if path.is_dir()} == {"learning_rate=0.001", "learning_rate=0.0001"}
    assert (RUNS / "latest").resolve() == (sweep / "learning_rate=0.0001").resolve()
