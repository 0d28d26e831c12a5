"""What users of Hydra expect: own directories, `defaults`, sweeps that go where they are sent; docs/hydra.md."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from surogate_core.cli.main import main

BOMB = "x0: &x0 [1, 2, 3]\n" + "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]\n" for i in range(1, 7))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the training run; the list gets each config."""
    configs: list[Any] = []

    def fake(config: Any, registry: Any, watch: Any = None) -> int:
        import structlog

        structlog.get_logger("surogate_test").info("a record", chosen={"op": "kernel"})
        configs.append(config)
        return 3 if config.learning_rate == 666.0 else 0

    monkeypatch.setattr("surogate_core.run.job.launch", fake)
    return configs


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a directory of own options."""
    write(tmp_path / "conf/recipe/mine.yaml", "name: fp8-hybrid\nemulate: auto\n")
    write(
        tmp_path / "conf/experiment/careful.yaml",
        "# @package _global_\ndefaults:\n  - override /recipe: nvfp4\nlearning_rate: 1e-5\nwarmup_steps: 10\n",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def one(run: list[Any], *args: str) -> Any:
    """The one run of a command."""
    run.clear()
    assert main(list(args)) == 0
    (config,) = run
    return config


# -------------------------------------------------------------------------- own directories


@pytest.mark.parametrize(
    "flags",
    [
        ["--config-dir", "conf"],
        ["--config-dir=conf"],
        ["-cd", "conf"],
        ["hydra.searchpath=[conf]"],
        ["hydra.searchpath=[file://conf]"],
    ],
)
def test_options_of_an_own_directory(run: list[Any], here: Path, flags: list[str]) -> None:
    config = one(run, "sft", "+experiment=careful", *flags)
    assert (config.recipe.name, config.learning_rate, config.warmup_steps) == ("nvfp4", 1e-5, 10)


def test_an_own_option_beside_others(run: list[Any], here: Path) -> None:
    config = one(run, "sft", "recipe=mine", "--config-dir", "conf")
    assert (config.recipe.name, config.recipe.options.emulate) == ("fp8-hybrid", "auto")
    config = one(run, "sft", "experiment=careful", "learning_rate=1e-3", "--config-dir", "conf")
    assert (config.learning_rate, config.warmup_steps) == (1e-3, 10)


def test_an_own_option_may_name_the_data(run: list[Any], here: Path) -> None:
    """A model of the user's own is not trained on the example, and here it is not."""
    write(here / "base/config.json", "{}")
    write(
        here / "conf/experiment/data.yaml",
        "# @package _global_\ndefaults: [override /dataset: none]\ndatasets: [{path: my.jsonl, type: text}]\n",
    )
    assert one(run, "sft", "--config-dir", "conf", "experiment=data", "model=./base").datasets[0]["path"] == "my.jsonl"
    assert main(["sft", "--config-dir", "conf", "experiment=careful", "model=./base"]) == 2


def test_a_file_names_its_directories(run: list[Any], here: Path) -> None:
    write(here / "run.yaml", "hydra: {searchpath: [conf]}\nrecipe: mine\n")
    assert one(run, "sft", "run.yaml").recipe.name == "fp8-hybrid"
    write(
        here / "run.yaml", "hydra:\n  searchpath: [conf]\n  sweep: {dir: elsewhere}\ndefaults: [experiment: careful]\n"
    )
    assert main(["sft", "run.yaml", "max_steps=1,2", "-m"]) == 0
    assert [c.output_dir for c in run[-2:]] == ["elsewhere/max_steps=1", "elsewhere/max_steps=2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('hydra: {"a b": 1}', "hydra.a b (run.yaml:1): cannot be read: it is not a config key."),
        ('hydra: {"": 3}', "hydra. (run.yaml:1): cannot be read: it is not a config key."),
        ('hydra: {sweep: {"dir=x": 3}}', "hydra.sweep.dir=x (run.yaml:1): cannot be read: it is not a config key."),
        ('hydra: {job: {"x y": z}}', "hydra.job (run.yaml:1): cannot be read: the key 'x y' has characters"),
    ],
)
def test_a_file_with_keys_that_hydra_cannot_have(
    here: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    write(here / "run.yaml", f"{text}\n")
    assert main(["sft", "run.yaml"]) == 2
    assert message in capsys.readouterr().err


def test_a_file_by_path_and_name(run: list[Any], here: Path) -> None:
    write(here / "conf/base.yaml", "recipe: mine\nmax_steps: 7\n")
    for flags in (["--config-path", "conf", "--config-name", "base"], ["-cp", "conf", "-cn=base.yaml"]):
        config = one(run, "sft", *flags)
        assert (config.max_steps, config.recipe.name) == (7, "fp8-hybrid")


def test_mistakes_in_an_own_option_have_their_place(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(here / "conf/experiment/bad.yaml", "# @package _global_\nmax_steps: 3\nlearning_rte: 1\n")
    write(here / "conf/experiment/local.yaml", "learning_rate: 1\n")
    assert main(["sft", "--config-dir", "conf", "experiment=bad"]) == 2
    place = f"{here}/conf/experiment/bad.yaml:3"
    assert capsys.readouterr().err == f"surogate: learning_rte ({place}): there is no such key. Fix: learning_rate\n"
    assert main(["sft", "--config-dir", "conf", "experiment=local"]) == 2
    assert "# @package _global_" in capsys.readouterr().err
    assert main(["sft", "--config-dir", "conf", "experiment=carefull"]) == 2
    assert "Fix: careful\n" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("recipe/a.yaml", "name: bf16\n_target_: os.system\n", "Python objects"),
        ("recipe/a.yaml", "name: bf16\nx: [{y: {_target_: os.system}}]\n", "Python objects"),
        ("experiment/a.yaml", "# @package _global_\nhydra: {callbacks: {x: {k: 1}}}\n", "Hydra's own keys"),
        ("experiment/a.yaml", "# @package hydra.callbacks\nx: 1\n", "Hydra's own keys"),
        ("experiment/a.yaml", "defaults:\n  - override /hydra/launcher: basic\n", "Hydra's own keys"),
        ("experiment/a.yaml", "defaults:\n  - /recipe@hydra.callbacks.x: bf16\n", "Hydra's own keys"),
        ("experiment/a.yaml", "defaults:\n  - /recipe: ../../elsewhere\n", "not a path"),
        ("experiment/a.yaml", "# @package _global_\nplugins: {policy: locked}\n", "policy must be known"),
        ("hydra/launcher/a.yaml", "x: 1\n", "cannot be replaced"),
        ("recipe/bf16.yaml", "name: bf16\n", "offers this option already"),
        ("recipe/a.yaml", "a: [\n", "expected"),
        ("recipe/a.yaml", BOMB, "more than 10,000 values"),
    ],
)
def test_an_own_directory_gets_no_further_than_a_config(
    here: Path, run: list[Any], capsys: pytest.CaptureFixture[str], file: str, text: str, words: str
) -> None:
    """Neither Python objects nor Hydra's launcher and callbacks, nor the plugin policy, for one run and for sweeps."""
    write(here / "bad" / file, text)
    write(here / "elsewhere.yaml", "name: bf16\n")
    for more in ([], ["learning_rate=1,2", "-m"], ["--cfg", "job"]):
        option = [f"experiment={Path(file).stem}"] if file.startswith("experiment") else []
        assert main(["sft", "--config-dir", "bad", *option, *more]) == 2
        assert words in capsys.readouterr().err
    assert not run


def test_only_directories_are_searched(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in ("pkg://os", "structured://x", "s3://bucket/conf"):
        assert main(["sft", f"hydra.searchpath=['{path}']"]) == 2
        assert "only a directory can be searched" in capsys.readouterr().err
    (here / "empty").mkdir()
    assert main(["sft", "--config-dir", "empty"]) == 2
    assert "has no option files. Fix: put them" in capsys.readouterr().err
    os.mkfifo(here / "conf" / "recipe" / "pipe.yaml")
    assert main(["sft", "--config-dir", "conf"]) == 2
    assert "a pipe or a device" in capsys.readouterr().err


# -------------------------------------------------------------------------------- defaults


def test_a_defaults_list_chooses(run: list[Any], here: Path) -> None:
    write(
        here / "run.yaml",
        "defaults:\n  - override /recipe: fp8-hybrid\n  - optimizer: adamw\n  - _self_\nmax_steps: 3\n",
    )
    config = one(run, "sft", "run.yaml")
    assert (config.recipe.name, config.optimizer.name, config.max_steps) == ("fp8-hybrid", "adamw", 3)
    assert one(run, "sft", "run.yaml", "recipe=bf16").recipe.name == "bf16"


@pytest.mark.parametrize(
    ("entries", "place", "words"),
    [
        ("[override /recipe: nvpf4]", "recipe=nvpf4", "Fix: nvfp4"),
        ("[override /recip: nvfp4]", "defaults.0", "Fix: - recipe: OPTION"),
        ("[_self_, recipe: bf16]", "defaults.0", "Fix: put _self_ last"),
        ("[recipe@x: bf16]", "defaults.0", "Fix: - GROUP: OPTION"),
        ("[base]", "defaults.0", "Fix: - GROUP: OPTION"),
        ("[recipe: 3]", "defaults.0", "Fix: - recipe: OPTION"),
        ("nvfp4", "defaults", "must be a list"),
    ],
)
def test_mistakes_in_a_defaults_list(
    here: Path, capsys: pytest.CaptureFixture[str], entries: str, place: str, words: str
) -> None:
    write(here / "run.yaml", f"max_steps: 3\ndefaults: {entries}\n")
    assert main(["sft", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"surogate: {place} (run.yaml:2): ")
    assert words in err


# ---------------------------------------------------------------------------------- sweeps


@pytest.mark.slow_cases("args0", "args1")
@pytest.mark.parametrize(
    ("args", "directories"),
    [
        (["output_dir=out"], ["out/learning_rate=0.001", "out/learning_rate=0.0001"]),
        (["hydra.sweep.dir=zz", "output_dir=out"], ["zz/learning_rate=0.001", "zz/learning_rate=0.0001"]),
        (["output_dir=out", "hydra.sweep.subdir=run-${hydra.job.num}"], ["out/run-0", "out/run-1"]),
        (
            ["output_dir=out", "model=qwen3", "hydra.sweep.subdir=${hydra.job.override_dirname}"],
            ["out/learning_rate=0.001", "out/learning_rate=0.0001"],
        ),
    ],
)
def test_sweeps_go_where_they_are_sent(run: list[Any], here: Path, args: list[str], directories: list[str]) -> None:
    assert main(["sft", "learning_rate=1e-3,1e-4", "checkpoint_dir=ck", "-m", *args]) == 0
    assert [c.output_dir for c in run] == directories
    assert [c.checkpoint_dir for c in run] == [f"ck/{Path(d).name}" for d in directories]
    record = here / Path(directories[0]).parent / "multirun.yaml"
    assert stat.S_IMODE(record.stat().st_mode) == 0o600
    assert {p.name for p in here.iterdir()} == {"conf", Path(directories[0]).parts[0]}


@pytest.mark.slow
def test_a_sweep_over_the_options_that_a_pattern_matches(run: list[Any], here: Path) -> None:
    assert main(["-m", "recipe=glob(*)"]) == 0
    assert [c.recipe.name for c in run] == ["bf16", "fp8-hybrid", "nvfp4"]
    run.clear()
    assert main(["-m", "recipe=glob(*,exclude=*4)", "max_steps=1,2"]) == 0
    assert [(c.recipe.name, c.max_steps) for c in run] == [(r, n) for r in ("bf16", "fp8-hybrid") for n in (1, 2)]


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (["recipe=glob(x*)"], ["recipe=glob(x*) (command line): matches no option of recipe; known: "]),
        (["learning_rate=glob(*)"], ["learning_rate (command line): glob() is for groups of options"]),
        (["optimizer=adamw,nope"], ["optimizer=nope (command line): there is no such optimizer; known: "]),
        (["monitor=[jsonl],[nope]"], ["monitor=nope (command line): there is no such monitor; known: "]),
        (["hydra.sweep.di=x", "max_steps=1,2"], ["hydra.sweep.di (command line): is Hydra's own; of those only "]),
    ],
)
def test_a_mistake_in_a_sweep_is_said_once(
    run: list[Any], here: Path, capsys: pytest.CaptureFixture[str], args: list[str], lines: list[str]
) -> None:
    assert main(["-m", *args]) == 2
    err = capsys.readouterr().err.splitlines()
    assert len(err) == len(lines)
    assert all(line.removeprefix("surogate: ").startswith(begin) for line, begin in zip(err, lines, strict=True))
    assert max(map(len, err)) < 300
    assert not run
    assert not (here / "output").exists()


def test_the_console_has_the_runs_and_nothing_of_hydra(
    run: list[Any], here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "learning_rate=1e-3,666", "model=qwen3", "output_dir=out", "-m"]) == 3
    captured = capfd.readouterr()
    assert [line.split() for line in captured.out.splitlines()] == [
        [],
        ["learning_rate", "eval", "loss", "best", "at", "step", "time", "outcome", "directory"],
        ["0.001", "–", "–", "–", "–", "finished", "out/learning_rate=0.001"],
        ["666", "–", "–", "–", "–", "failed", "out/learning_rate=666"],
    ]
    assert captured.err.splitlines() == [
        "run 0: learning_rate=0.001 → out/learning_rate=0.001",
        "run 1: learning_rate=666 → out/learning_rate=666",
        "1 of 2 runs are done; failed: 1",
        "Compare them: surogate report out",
    ]


# ---------------------------------------------------------------------------------- the page


def _blocks(language: str) -> list[str]:
    text = (ROOT / "docs" / "hydra.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_every_file_and_command_of_the_page_works(
    run: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page's YAML blocks are written to the files that their first lines name, then its commands run in turn."""
    import shlex

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RATE", "3e-4")
    (tmp_path / "my.jsonl").write_text('{"text": "x"}\n')
    for block in _blocks("yaml"):
        name = block.splitlines()[0].removeprefix("# ")
        write(tmp_path / name, block.partition("\n")[2])
        yaml.safe_load(block)
    commands = [line for block in _blocks("sh") for line in block.splitlines() if line and not line.startswith("#")]
    assert len(commands) >= 8
    for command in commands:
        program, *args = shlex.split(command, comments=True)
        assert program == "surogate"
        assert main(args) == 0, (command, capsys.readouterr().err)
    assert run
