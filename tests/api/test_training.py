"""`surogate.sft` and its like: a run, its figures, callbacks, mistakes, and a process that is left as it was."""

from __future__ import annotations

import ast
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import surogate
from surogate_core.errors import MachineError
from surogate_core.events import Control
from surogate_core.train.loop import Loop

ROOT = Path(__file__).resolve().parents[2]
ROWS = [{"prompt": f"What is {i}?", "completion": f"It is {i}."} for i in range(40)]
TOKENIZER = "pkg://surogate_dataset_chat/embedded/tokenizer"
KEYS: dict[str, Any] = {
    "model": {"name": "qwen3", "preset": "tiny"},
    "tokenizer": TOKENIZER,
    "compiler": "fx",
    "sequence_len": 64,
    "max_steps": 3,
    "eval_steps": 1,
    "save_steps": 2,
    "log_gpu_util": 0,
    "device": "cpu",
}


def process() -> dict[str, Any]:
    """What a run must leave as it was."""
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(file.path for file in psutil.Process().open_files()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "variables": dict(os.environ),
        "handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger().level,
    }


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """A run with callbacks, one of which fails; what they saw; the process before and after another run."""
    place = tmp_path_factory.mktemp("api")
    seen: dict[str, list[Any]] = {"names": [], "losses": [], "notices": []}

    def fails(event: Any) -> None:
        raise KeyError("no such thing")

    callbacks = [
        lambda event: seen["names"].append(event.name) or "ignored",
        {"step_end": lambda event: seen["losses"].append(event.loss), "eval_end": [fails]},
        {"notice": lambda event: seen["notices"].append(event.message)},
    ]
    keys = {**KEYS, "output_dir": place / "run", "data_cache_dir": place / "cache"}
    before = process()
    surogate.sft(datasets=ROWS, **{**keys, "max_steps": 1, "output_dir": place / "first"}, quiet=True)
    after = process()
    run = surogate.sft(datasets=ROWS, callbacks=callbacks, quiet=True, **keys)
    return SimpleNamespace(run=run, seen=seen, before=before, after=after, keys=keys, place=place)


def test_a_run_has_its_figures_and_files(trained: SimpleNamespace) -> None:
    run = trained.run
    assert run.path == trained.place / "run"
    assert len(run.losses) == 3
    assert [found.step for found in run.evals] == [0, 1, 2, 3]
    assert run.best == min(run.evals, key=lambda found: found.loss)
    assert run.outcome == "finished"
    assert run.config["max_steps"] == 3
    assert run.paths.model is not None or run.paths.adapter is not None
    assert [path.name for path in run.paths.checkpoints] == ["checkpoint-2", "checkpoint-3"]
    assert run.facts["seeds"]["train_seed"] == run.config["train_seed"]
    assert "3" in repr(run)
    assert f"{run.best.loss:.4f}" in run._repr_html_()


def test_the_task_may_be_named_by_its_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    called: list[Any] = []

    def stands_in(task: str, config: Any, callbacks: Any, quiet: bool, keys: Any) -> tuple[Path, int]:
        called.append((task, dict(keys)))
        raise surogate.UserError("enough")

    monkeypatch.setattr("surogate_core.api.training._train", stands_in)
    with pytest.raises(surogate.UserError, match="enough"):
        surogate.train(task="dpo", max_steps=2)
    assert called == [("dpo", {"max_steps": 2})]
    with pytest.raises(surogate.UserError, match="there is no task"):
        surogate.train(max_steps=2)


def test_a_figure_of_a_task_is_a_curve(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"event": "rollouts", "step": step, "reward": {"mean": step / 4}}) + "\n" for step in (1, 2))
    )
    run = surogate.load(tmp_path)
    assert run.curve("reward/mean") == [(1, 0.25), (2, 0.5)]
    with pytest.raises(surogate.UserError, match=r"the run has no figure reward/men\. Figures: .*reward/mean"):
        run.curve("reward/men")


def test_a_run_is_loaded_from_its_directory(trained: SimpleNamespace, tmp_path: Path) -> None:
    again = surogate.load(str(trained.run.path))
    assert (again.losses, again.evals) == (trained.run.losses, trained.run.evals)
    with pytest.raises(surogate.UserError, match="there is no run in this directory"):
        surogate.load(tmp_path)


def test_a_notebook_shows_the_report_in_a_frame(trained: SimpleNamespace) -> None:
    report = trained.run.report()
    assert report.path == trained.run.path / "report.html"
    shown = report._repr_html_()
    assert shown.startswith("<iframe srcdoc=")
    assert shown.count("<") == 2, "the page is escaped"
    assert report.markdown.startswith("#")


def test_callbacks_see_the_events_and_fail_alone(trained: SimpleNamespace) -> None:
    seen = trained.seen
    assert seen["losses"] == trained.run.losses
    assert {"run_start", "step_end", "eval_end", "run_end"} <= set(seen["names"])
    failures = [text for text in seen["notices"] if "monitor fails failed at event eval_end and is disabled" in text]
    assert len(failures) == 1
    assert "fails" not in (trained.run.path / "config.yaml").read_text()


def test_a_run_leaves_the_process_as_it_was(trained: SimpleNamespace) -> None:
    assert trained.after == trained.before


def test_the_same_call_resumes_and_a_control_stops(trained: SimpleNamespace) -> None:
    keys = {**trained.keys, "output_dir": trained.place / "stopped", "max_steps": 4}
    stop = {"step_end": lambda event: Control(stop=True, reason="enough") if event.step == 2 else None}
    stopped = surogate.sft(datasets=ROWS, callbacks=stop, quiet=True, **keys)
    assert (stopped.outcome, len(stopped.losses)) == ("stopped early", 2)
    steps: list[int] = []
    run = surogate.sft(datasets=ROWS, callbacks={"step_end": lambda e: steps.append(e.step)}, quiet=True, **keys)
    assert steps == [3, 4]
    assert len(run.losses) == 4


def test_callbacks_cannot_leave_the_process(trained: SimpleNamespace) -> None:
    keys = {**trained.keys, "output_dir": trained.place / "refused", "gpus": 2}
    with pytest.raises(surogate.ConfigError, match=r"callbacks: they run in the process that trains.* Fix: gpus=1, or"):
        surogate.sft(datasets=ROWS, callbacks=print, **keys)
    assert not (trained.place / "refused" / "logs").exists()


@pytest.mark.slow
def test_several_processes_are_one_run(trained: SimpleNamespace, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    keys = {key: value for key, value in trained.keys.items() if key != "output_dir"}
    before = process()
    run = surogate.sft(datasets=ROWS, quiet=True, gpus=2, **keys)
    assert process() == before
    assert (run.outcome, len(run.losses)) == ("finished", 3)
    assert run.paths.directory.parent == Path("runs")
    assert (run.paths.directory / "logs" / "rank-1.log").is_file()


def test_a_file_and_keywords_together(trained: SimpleNamespace, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("max_steps: 99\nlearning_rate: 1e-3\nlora_rank: wrong\n")
    with pytest.raises(surogate.ConfigError) as raised:
        surogate.sft(file, **{**trained.keys, "max_steps": "two"}, datasets=ROWS)
    found = {problem.key: problem.where for problem in raised.value.problems}
    assert found == {"max_steps": "keyword argument", "lora_rank": f"{file}:3"}


def test_mistakes_are_told_together_with_the_keyword(trained: SimpleNamespace) -> None:
    with pytest.raises(surogate.ConfigError) as raised:
        surogate.sft(**{**trained.keys, "learnin_rate": 1e-3, "lora_alpha": "x", "recipe": "bf61"}, datasets=ROWS)
    problems = {problem.key.partition("=")[0]: problem for problem in raised.value.problems}
    assert set(problems) == {"learnin_rate", "lora_alpha", "recipe"}
    assert {problem.where for problem in problems.values()} == {"keyword argument"}
    assert problems["learnin_rate"].fix == "learning_rate"
    with pytest.raises(surogate.ConfigError, match=r"callbacks .*no event 'step_ends'.* Fix: step_end"):
        surogate.sft(**trained.keys, callbacks={"step_ends": print})
    with pytest.raises(surogate.ConfigError, match=r"datasets.*no data set is named"):
        surogate.sft(model=str(trained.place))


def test_progress_is_printed_unless_quiet(trained: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    keys = {**trained.keys, "max_steps": 1, "eval_steps": 0}
    surogate.sft(datasets=ROWS, quiet=True, **{**keys, "output_dir": trained.place / "quiet"})
    assert capsys.readouterr().out == ""
    surogate.sft(datasets=ROWS, **{**keys, "output_dir": trained.place / "loud"})
    said = capsys.readouterr().out
    assert "step 1/1" in said
    assert "\x1b" not in said, "plain lines, no codes of a terminal"


def test_a_run_works_outside_the_main_thread(trained: SimpleNamespace) -> None:
    found: list[Any] = []
    keys = {**trained.keys, "output_dir": trained.place / "thread", "max_steps": 1}
    thread = threading.Thread(target=lambda: found.append(surogate.sft(datasets=ROWS, quiet=True, **keys)))
    thread.start()
    thread.join(120)
    assert [run.outcome for run in found] == ["finished"]


def test_ctrl_c_saves_and_then_interrupts_the_code(trained: SimpleNamespace) -> None:
    keys = {**trained.keys, "output_dir": trained.place / "interrupted", "max_steps": 50}
    # A parent that runs in the background may have left the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    press = {"step_end": lambda event: signal.raise_signal(signal.SIGINT) if event.step == 2 else None}
    try:
        with pytest.raises(KeyboardInterrupt):
            surogate.sft(datasets=ROWS, callbacks=press, quiet=True, **keys)
    finally:
        signal.signal(signal.SIGINT, before)
    run = surogate.load(keys["output_dir"])
    assert run.outcome == "interrupted"
    assert run.paths.checkpoints


def test_an_error_keeps_nothing_of_the_run_alive(trained: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook keeps its last error: the engine in the error's frames would keep the GPU's memory."""
    engines: list[Any] = []

    def fails(loop: Loop) -> Any:
        engines.append(weakref.ref(loop.engine))
        raise MachineError("out of memory")

    monkeypatch.setattr(Loop, "run", fails)
    with pytest.raises(MachineError) as kept:
        surogate.sft(datasets=ROWS, quiet=True, **{**trained.keys, "output_dir": trained.place / "failed"})
    gc.collect()
    assert kept.value.__traceback__ is not None
    assert engines[0]() is None


def test_the_best_evaluation_is_after_the_first_step(tmp_path: Path) -> None:
    lines = [{"event": "eval_end", "step": step, "loss": loss} for step, loss in ((0, 1.0), (2, 3.0), (4, 2.0))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    best = surogate.load(tmp_path).best
    assert best is not None
    assert (best.step, best.loss) == (4, 2.0)


def test_importing_surogate_imports_no_torch() -> None:
    code = "import surogate, sys; assert not {'torch', 'hydra', 'datasets'} & sys.modules.keys(); surogate.sft"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_python_m_surogate_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "surogate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("surogate ")


def test_the_stub_has_what_the_module_has() -> None:
    tree = ast.parse((ROOT / "surogate" / "__init__.pyi").read_text())
    names = {alias.asname for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    names |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef)} | {"__version__"}
    assert set(surogate.__all__) <= names
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    keys = {argument.arg for argument in functions["sft"].args.kwonlyargs}
    assert {"model", "datasets", "lora_rank", "learning_rate", "output_dir", "adamw_beta1", "quiet"} <= keys


@pytest.mark.gpu
def test_two_runs_on_a_gpu_free_its_memory(tmp_path: Path) -> None:
    import torch

    allocated = []
    for name in ("a", "b"):
        keys = {**KEYS, "device": "cuda", "output_dir": tmp_path / name, "data_cache_dir": tmp_path / "cache"}
        assert surogate.sft(datasets=ROWS, quiet=True, **keys).outcome == "finished"
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[1] <= allocated[0] + (1 << 20)
