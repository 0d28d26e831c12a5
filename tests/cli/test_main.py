"""The console script: speed, what it imports, errors and exit codes."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.cli.main import main
from surogate_core.errors import ConfigError, MachineError, Problem, UserError

HEAVY = ("torch", "hydra", "omegaconf", "transformers", "pydantic", "numpy", "datasets")
ROOT = Path(__file__).resolve().parents[2]


def surogate(*args: str, code: int = 0, path: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own."""
    environment = {**os.environ, **environ}
    if path is not None:
        environment["PYTHONPATH"] = os.pathsep.join([str(path), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "surogate_core.cli.main", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == code, done.stderr
    return done


RESULT: list[Callable[[Any], int]] = []
"""What a run does, set by `let_run` for one test."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the training run; the list gets each config, `let_run` says what a run does."""
    configs: list[Any] = []
    RESULT[:] = [lambda config: 0]

    def fake(config: Any, registry: Any, watch: Any = None) -> int:
        configs.append(config)
        return RESULT[0](config)

    monkeypatch.setattr("surogate_core.run.job.launch", fake)
    return configs


def let_run(result: Callable[[Any], int]) -> None:
    RESULT[:] = [result]


# ----------------------------------------------------------------------------------- imports


@pytest.mark.parametrize(
    "args", [["--help"], ["--version"], ["plugins", "list"], ["plugins", "show", "core"], ["oops"]]
)
def test_imports_nothing_heavy(args: list[str]) -> None:
    code = (
        "import sys\nfrom surogate_core.cli.main import main\n"
        f"main({args!r})\nprint('loaded:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "loaded: []", done


@pytest.mark.parametrize(
    "args", [["--help"], ["sft", "--help"], ["pt", "-h"], ["plan", "--help"], ["learning_rate=1", "--help"]]
)
def test_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 0
    assert "surogate" in capsys.readouterr().out


def test_the_end_of_a_command_looks_for_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all that torch has made it would take half a second."""
    last: list[Any] = []
    monkeypatch.setattr("surogate_core.cli.main.atexit.register", last.append)
    assert main(["--version"]) == 0
    assert last == [gc.freeze]


def test_without_words_it_prints_help_with_the_next_commands(
    run: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bare `surogate` trains nothing and writes nothing."""
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    first = capsys.readouterr().out.split("\n\n")[1]
    commands = [line.split()[:2] for line in first.splitlines()[1:]]
    assert commands == [["surogate", "demo"], ["surogate", "sft"], ["surogate", "plan"]]
    assert not run
    assert not list(tmp_path.iterdir())


def test_demo_and_a_bare_override_train_the_embedded_example(run: list[Any], tmp_path: Path) -> None:
    place = f"output_dir={tmp_path}/out"
    assert main(["demo", place]) == main([place]) == main(["+recipe=bf16", "+model=qwen3", place]) == 0
    assert main(["demo", place, "max_steps=3"]) == 0
    assert run[0] == run[1] == run[2]
    assert [d["path"].startswith("pkg://") for d in run[0].datasets] == [True]
    assert run[3].max_steps == 3


def test_help_of_a_task_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    from surogate_core.config.composing.overrides import KEYS

    main(["sft", "--help"])
    out = capsys.readouterr().out
    assert all(f"  {key} " in out for key in KEYS)


@pytest.mark.parametrize("args", [["plugins", "--help"], ["plugins", "list", "--help"], ["doctor", "--help"]])
def test_help_of_argparse(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 0
    assert "usage: surogate" in capsys.readouterr().out


# ------------------------------------------------------------------------------ exit codes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["sftt"], "Fix: surogate sft"),
        (["plugin"], "Fix: surogate plugins"),
        (["zzz"], "no such command"),
        (["run.yaml"], "Fix: surogate sft run.yaml"),
        *((([word, "run.yaml"], "Fix: surogate sft run.yaml")) for word in ("train", "finetune", "fit")),
        (["plugins", "show", "recipe-bf61"], "Fix: surogate plugins show recipe-bf16"),
        (["sft", "absent.yaml"], "absent.yaml: there is no such file"),
        (["sft", "a.yaml", "b.yaml"], "one config file only"),
        (["sft", "--multirn"], "Fix: --multirun"),
        (["--multirun", "sft", "y.yaml", "lr=1"], "Fix: surogate sft --multirun y.yaml lr=1"),
        (["sft", "--config-path", "conf"], "Fix: add --config-name NAME"),
        (["sft", "--config-dir", "absent-directory"], "there is no directory"),
        (["sft", "--learning-rate=3"], "Fix: an override has no dashes: learning_rate=3"),
        (["sft", "--config"], "a value must follow"),
        (["--cfg", "jobs"], "must be one of job"),
        (["--multirun", "--cfg", "job"], "cannot be used together"),
        (["learning_rate=1", "word"], "KEY=VALUE"),
        (["learning_rte=1"], "learning_rte (command line): there is no such key. Fix: learning_rate"),
        (["recipe=bf61"], "Fix: bf16"),
        (["plugins.policy=no"], "plugins.policy (command line): must be one of open, allowlist"),
    ],
)
def test_wrong_input_is_one_message(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("surogate: ")
    assert captured.err.count("\n") == 1
    assert not captured.out


def test_nothing_is_written_for_wrong_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["learning_rte=1"]) == 2
    assert main(["learning_rte=1,2", "--multirun"]) == 2
    assert main(["--cfg", "job", "learning_rte=1"]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [UserError, MachineError])
def test_errors_of_a_run(
    run: list[Any], kind: type[UserError], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> int:
        raise kind("the reason")

    let_run(fail)
    assert main([f"output_dir={tmp_path}"]) == kind.exit_code
    assert capsys.readouterr().err == "surogate: the reason\n"


def test_a_mistake_that_only_a_run_finds_has_its_place(
    run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> int:
        keys = ("lora_rank", "gpus", "lora_alpha")
        raise ConfigError([Problem(key=key, message="does not suit the model.", fix=f"remove {key}.") for key in keys])

    let_run(fail)
    file = tmp_path / "run.yaml"
    file.write_text("dataset: embedded\nlora_rank: 3\n")
    assert main(["sft", str(file), "gpus=2", f"output_dir={tmp_path / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert f"lora_rank ({file}:2): does not suit the model. Fix: remove lora_rank." in error
    assert "gpus (command line): does not" in error
    assert "lora_alpha: does not" in error
    # `plan` builds the model too.
    file.write_text("model: qwen3-moe\ndataset: embedded\nlora: true\nrouter_aux_loss_coef: 0.1\n")
    assert main(["plan", str(file)]) == 2
    assert f"router_aux_loss_coef ({file}:4): is set, and the routers are frozen" in capsys.readouterr().err


def test_a_bug_keeps_its_traceback_in_the_log(
    run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    let_run(lambda config: {}["missing"])  # type: ignore[index]
    assert main([f"output_dir={tmp_path}/out"]) == 1
    err = capsys.readouterr().err
    log = tmp_path / "out" / "surogate.log"
    assert err == f"surogate: a bug: KeyError: 'missing'. The traceback is in {log}\n"
    record = json.loads(log.read_text().splitlines()[-1])
    assert record["level"] == "error"
    assert "Traceback" in record["exception"]
    assert "test_main.py" in record["exception"]


def test_a_bugs_message_ends_with_one_full_stop(
    run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(config: Any) -> int:
        raise ValueError("input_ids has shape (19,):\nwant equal 1-D shapes.")

    let_run(fail)
    assert main([f"output_dir={tmp_path}/out"]) == 1
    assert (
        "ValueError: input_ids has shape (19,): want equal 1-D shapes. The traceback is in" in capsys.readouterr().err
    )


def test_an_interrupt_before_training(run: list[Any], tmp_path: Path) -> None:
    def interrupt(config: Any) -> int:
        raise KeyboardInterrupt

    let_run(interrupt)
    assert main([f"output_dir={tmp_path}"]) == 130


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_directory_that_is_not_writable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o500)
    assert main([f"output_dir={tmp_path}/out"]) == 2
    assert "output_dir" in capsys.readouterr().err


def test_an_output_directory_that_is_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main([f"output_dir={tmp_path}/file"]) == 2
    assert "output_dir" in capsys.readouterr().err
    assert main([f"output_dir={tmp_path}", f"log_file={tmp_path}/file/log"]) == 2
    assert "log_file" in capsys.readouterr().err


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m surogate_core.cli.main sft --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0"
    assert not done.stderr


def test_a_closed_terminal_changes_no_exit_code() -> None:
    terminal, side = os.openpty()
    # What is printed stays in Python's buffer until the command ends.
    program = (
        "import sys\nsys.stdout = open(1, 'w', buffering=4096)\n"
        "from surogate_core.cli.main import main\nsys.stdin.read()\nsys.exit(main(['--version']))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=side, stderr=subprocess.PIPE, text=True
    ) as process:
        os.close(side)
        os.close(terminal)
        _, said = process.communicate(timeout=60)
        assert (process.returncode, said) == (0, "")


# -------------------------------------------------------------------------------- configs


def test_the_ways_to_name_a_file(run: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"learning_rate: 2e-4\noutput_dir: {tmp_path}\n")
    for args in (["sft", str(file)], ["sft", "--config", str(file)], [f"--config={file}"]):
        assert main([*args, "sequence_len=64"]) == 0
    assert main(["pt", str(file), "sequence_len=64"]) == 0
    assert [c.task for c in run] == ["sft", "sft", "sft", "pt"]
    assert all((c.learning_rate, c.sequence_len) == (2e-4, 64) for c in run)


def test_structlog_goes_to_the_run_log_and_warnings_to_stderr(
    run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import logging
    import warnings

    import structlog

    def talk(config: Any) -> int:
        log = structlog.get_logger("surogate_plugin")
        log.info("quiet", number=1)
        log.warning("loud", number=2)
        logging.getLogger("someone.else").warning("theirs")
        warnings.warn("a warning of Python", UserWarning, stacklevel=1)
        return 0

    let_run(talk)
    assert main([f"output_dir={tmp_path}"]) == 0
    records = [json.loads(line) for line in (tmp_path / "surogate.log").read_text().splitlines()]
    events = {r["event"].split("\n")[0][:40]: r for r in records}
    assert events["quiet"]["number"] == 1
    assert events["loud"]["level"] == "warning"
    assert "theirs" in events
    assert any("a warning of Python" in r["event"] for r in records)
    assert capsys.readouterr().err == "warning: loud (number=2)\n"


# -------------------------------------------------------------------------------- plugins


def test_plugins_list_does_not_import(install_plugin: Any) -> None:
    site = install_plugin("marked", "raise SystemExit('imported')", requires=("no-such-thing>=2",))
    rows = json.loads(surogate("plugins", "list", "--json", path=site).stdout)
    row = next(r for r in rows if r["name"] == "marked")
    assert (row["distribution"], row["version"], row["state"]) == ("dist-marked", "1.2.3", "requirements not met")
    assert row["unmet"] == ["no-such-thing>=2 (not installed)"]
    assert rows[0]["name"] == "core"
    rows = json.loads(surogate("plugins", "list", "--json", path=site, SUROGATE_PLUGINS_BLOCK="marked").stdout)
    assert next(r for r in rows if r["name"] == "marked")["state"] == "blocked by SUROGATE_PLUGINS_BLOCK"


def test_plugins_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "list"]) == 0
    out = capsys.readouterr().out
    assert "surogate-recipe-bf16" in out
    assert "dataset conversation" in out
    for name in ("recipe-bf16", "surogate-recipe-bf16"):
        assert main(["plugins", "show", name]) == 0
        out = capsys.readouterr().out
        assert "surogate_recipe" in out
        assert "recipe=bf16" in out
        assert ": met" in out


def test_a_plugin_from_outside_is_used_and_when_gone_refused(
    install_plugin: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    source = """
from surogate_core import bundles, hookimpl

@hookimpl
def surogate_config_path():
    return "pkg://plugin_outside.conf"

@hookimpl
def surogate_optimizer():
    return bundles.OptimizerSpec(name="mine", build=lambda *a: None)
"""
    site = install_plugin("outside", source, conf={"optimizer/mine.yaml": "name: mine\n"})
    assert main(["--cfg", "job", "--package", "optimizer", "optimizer=mine"]) == 0
    assert "name: mine" in capsys.readouterr().out
    shutil.rmtree(site / "dist_outside-1.2.3.dist-info")
    assert main(["--cfg", "job", "optimizer=mine"]) == 2
    assert "optimizer=mine (command line): there is no such optimizer" in capsys.readouterr().err


def test_a_broken_plugin_is_a_warning_or_a_clear_stop(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = "from surogate_core import bundles\nraise ImportError('libmissing.so')\nbundles.RecipeSpec(name='frail')\n"
    install_plugin("frail", source)
    assert main(["--cfg", "job"]) == 0
    err = capsys.readouterr().err
    assert err.startswith("warning: plugin frail (distribution dist-frail 1.2.3) failed when it was imported")
    assert main(["recipe=frail"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "dist-frail" in err
    assert "libmissing.so" in err
    log = Path(err.strip().rpartition("traceback: ")[2])
    assert "Traceback" in log.read_text()


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["versions"]["torch"]
    assert next(r for r in facts["recipes"] if r["name"] == "bf16")["cpu"] == "ok"
    assert any(d["name"] == "cpu" for d in facts["devices"])
    assert main(["doctor"]) == 0
    assert "recipes" in capsys.readouterr().out


def test_doctor_says_why_a_recipe_cannot_run(install_plugin: Any, capsys: pytest.CaptureFixture[str]) -> None:
    source = (
        "from surogate_core import bundles, hookimpl\n@hookimpl\ndef surogate_recipe():\n"
        "    return bundles.RecipeSpec(name='fast', build=None, unavailable=lambda d: f'{d.type} has no fp8')\n"
    )
    install_plugin("fast", source)
    install_plugin("broken", "1/0")
    main(["doctor", "--json"])
    facts = json.loads(capsys.readouterr().out)
    assert next(r for r in facts["recipes"] if r["name"] == "fast")["cpu"] == "cpu has no fp8"
    assert any("dist-broken" in text for text in facts["not loaded"])


# ---------------------------------------------------------------------------------- Hydra


def test_cfg_job_shows_the_composed_config(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert main(["--cfg", "job", "+recipe=bf16", "learning_rate=3e-4"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["learning_rate"] == 3e-4
    assert shown["recipe"] == {"name": "bf16"}
    assert main(["pt", "--cfg", "job", "model=qwen3-0.6b"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["task"], shown["lora"]) == ("pt", False)


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--info", "defaults"]) == 0
    assert "recipe/bf16" in capsys.readouterr().out


def test_multirun(run: list[Any], tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert main(["sft", "learning_rate=1e-3,1e-4", "model=qwen3,qwen3-0.6b", f"output_dir={out}", "--multirun"]) == 0
    expected = {(rate, preset) for rate in (1e-3, 1e-4) for preset in ("tiny", "0.6b")}
    assert {(c.learning_rate, c.model.preset) for c in run} == expected
    names = [f"model={model},learning_rate={rate}" for model in ("qwen3", "qwen3-0.6b") for rate in ("0.001", "0.0001")]
    assert {c.output_dir for c in run} == {str(out / name) for name in names}
    assert all((out / name / "surogate.log").is_file() for name in names)


def test_multirun_goes_on_after_a_failure_and_says_so(
    run: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_first(config: Any) -> int:
        if config.learning_rate == 1e-3:
            raise MachineError("no memory")
        return 0

    let_run(fail_first)
    assert main(["learning_rate=1e-3,1e-4", f"output_dir={tmp_path}", "-m"]) == 3
    assert len(run) == 2
    assert "no memory" in capsys.readouterr().err


def test_multirun_stops_at_a_signal(run: list[Any], tmp_path: Path) -> None:
    let_run(lambda config: 143)
    assert main(["learning_rate=1e-3,1e-4", f"output_dir={tmp_path}", "-m"]) == 143
    assert len(run) == 1


def test_multirun_checks_every_value_before_the_first_run(run: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sequence_len=64,1,many", "-m"]) == 2
    assert not run
    assert "got 1" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-sc", f"install={shell}"]) == 0
    assert "surogate" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("surogate recip", ["recipe="]),
        ("surogate recipe=", ["recipe=bf16"]),
        ("surogate sft recipe=b", ["recipe=bf16"]),
        ("surogate sft +recipe=bf16 model=qwen3-0", ["model=qwen3-0.6b"]),
        ("surogate sft run.yaml learning_", ["learning_rate="]),
        ("surogate pl", ["plan", "plugins"]),
        ("surogate +optimizer=", ["+optimizer=adamw"]),
        ("surogate plugins sh", ["show"]),
        ("surogate plugins show recipe-b", ["recipe-bf16"]),
        ("surogate sft monitor=[con", ["monitor=[console"]),
        ("surogate sft monitor=[console,js", ["monitor=[console,jsonl"]),
    ],
)
def test_tab_completion(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMP_LINE", line)
    assert main(["-sc", "query=bash"]) == 0
    captured = capsys.readouterr()
    assert set(expected) <= set(captured.out.split())
    assert not captured.err


@pytest.mark.parametrize("recipe", ["fp8-hybrid", "nvfp4"])
def test_a_device_without_a_recipes_products_is_told_in_one_line(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"recipe={recipe}", "recipe.emulate=never", "device=cpu", f"output_dir={tmp_path}"]
    assert main(["sft", *keys]) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"surogate: recipe={recipe} with recipe.emulate=never: cpu has no ")
    assert "Fix: set recipe.emulate=auto to emulate, or recipe=" in line


# ------------------------------------------------------------------------------------- data


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["model=own"], ""),
        (["sft", "model=own", "lora_rank=8"], ""),
        (["pt", "model=own"], ""),
        (["sft", "model=own", "from_scratch=true"], ""),
        (["sft", "run.yaml"], "model: own\n"),
        (["sft", "run.yaml", "model=own"], "validation_datasets: [{path: x.jsonl, type: text}]\n"),
        (["--multirun", "model=own", "lora_rank=4,8"], ""),
    ],
)
def test_a_model_of_ones_own_is_not_trained_on_the_example(
    run: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], lines: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/config.json").write_text("{}")
    if lines:
        Path("run.yaml").write_text(lines)
    assert main(words) == 2
    assert not run
    error = capsys.readouterr().err
    assert "datasets: no data set is named, and the default is a toy example that own should not learn." in error
    assert "Fix: datasets=my.jsonl, or dataset=embedded" in error


@pytest.mark.parametrize(
    "words",
    [
        ["demo"],
        ["sft"],
        ["model=qwen3", "lora=true"],
        ["sft", "model=own", "dataset=embedded"],
        ["sft", "model=own", "datasets=[{path: my.jsonl, type: text}]"],
        ["sft", "run.yaml"],
    ],
)
def test_the_example_is_trained_where_it_is_meant(
    run: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/config.json").write_text("{}")
    Path("run.yaml").write_text("model: own\ndataset: embedded\n")
    assert main(words) == 0
    assert len(run) == 1


def test_a_directory_that_is_gone_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert main(["--version"]) == 0
    assert main(["doctor"]) == 2
    assert (
        "the directory in which the command was started is gone. Fix: cd to one that exists" in capsys.readouterr().err
    )
