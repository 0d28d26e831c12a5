from pathlib import Path

import pytest

from surogate_core.config.resolve import load_many
from surogate_core.errors import ConfigError
from surogate_core.plugins import Registry, load_plugins


@pytest.mark.parametrize("written", ["multirun.yaml", "run.json", "metrics.jsonl", "sweep.json"])
def test_what_runs_and_sweeps_wrote_beside_the_options_is_no_option(tmp_path: Path, written: str) -> None:
    registry: Registry = load_plugins()
    for place in ("recipe", "out", "out/learning_rate=0.1", "runs/one"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "recipe" / "mine.yaml").write_text("defaults: [bf16]\n")
    (tmp_path / "out" / written).touch()
    (tmp_path / "out" / "more.yaml").write_text("hydra: {launcher: {_target_: os.getcwd}}\n")
    (tmp_path / "out" / "learning_rate=0.1" / "config.yaml").write_text("_target_: os.getcwd\n")
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    (tmp_path / "runs" / "one" / "config.yaml").write_text("_target_: os.getcwd\n")
    ((_, config),) = load_many([f"hydra.searchpath=[{tmp_path}]", "recipe=mine"], registry=registry)
    assert config.recipe.name == "bf16"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["hydra/launcher=joblib"],
            r"hydra/launcher=joblib \(command line\): is not available: the runs .*Fix: leave it",
        ),
        (["hydra/launcher=submitit_slurm"], r"hydra/launcher=submitit_slurm .*start several commands"),
        (["hydra/sweeper=optuna"], r"hydra/sweeper=optuna .*Fix: name values, KEY=1e-5,1e-4 .*surogate\.train"),
        (["learning_rate=interval(1e-5,1e-3)"], r"learning_rate \(command line\): interval.*has no values .*Fix: name"),
        (["learning_rate=tag(log,interval(1e-5,1e-3))"], r"learning_rate .*has no values that a sweep can train"),
    ],
)
def test_other_launchers_and_sweepers_are_refused_with_what_to_use(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        load_many(words, registry=load_plugins(), multirun=True)
    assert len(error.value.problems) == 1
    assert load_many(["hydra/launcher=basic", "hydra/sweeper=basic"], registry=load_plugins(), multirun=True)
