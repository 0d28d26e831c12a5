"""What keys name beside the task: an objective and a schedule with options, in a run and when it is resumed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.bundles.options import essential_values
from surogate_core.cli.main import main
from surogate_core.config.resolve import load_run_config
from surogate_core.plugins import load_plugins
from surogate_core.setup.task_spec import named_offers, objective_of, option_keys

OFFERS = '''
"""A multiple of the cross-entropy, and a schedule that is torn at a step."""
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from surogate_core import bundles, hookimpl


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiple:
    factor: Annotated[float, Gt(0), bundles.Flat("multiple_factor", needed=True, essential=True)] = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    at: Annotated[int, bundles.Flat("torn_at")] = -1


def objective(options):
    def token_loss(logits_NV, labels_N, columns):
        from surogate_core.kernels import ops

        return options.factor * ops.cross_entropy(logits_NV, labels_N)

    return bundles.Objective(name="multiple", token_loss=token_loss)


def schedule(options, context):
    return lambda step: float("nan") if step == options.at else 0.5


@hookimpl
def surogate_objective():
    return bundles.ObjectiveSpec(name="multiple", build=objective, options=Multiple)


@hookimpl
def surogate_schedule():
    return bundles.ScheduleSpec(name="torn", build=schedule, options=Torn)
'''


@pytest.fixture
def offers(install_plugin: Any) -> None:
    install_plugin("offers", OFFERS)


CHOSEN = ("objective=multiple", "lr_scheduler_type=torn", "multiple_factor=2")


def test_options_reach_what_the_keys_name(offers: None, base: list[str]) -> None:
    registry = load_plugins()
    config = load_run_config([*base, *CHOSEN], registry=registry)
    assert config.flat == {"multiple_factor": 2.0, "torn_at": -1}
    logits, labels = torch.randn(3, 8), torch.tensor([1, 2, -100])
    own, plain = (objective_of(one, registry) for one in (config, replace(config, objective="cross_entropy")))
    torch.testing.assert_close(own.token_loss(logits, labels, {}), 2 * plain.token_loss(logits, labels, {}))
    assert {"multiple_factor", "torn_at"} <= option_keys(config, registry)
    essential = [essential_values(offer.options_of(config)) for offer in named_offers(config, registry)]
    assert essential == [{}, {"multiple_factor": 2.0}, {}]


@pytest.mark.slow
def test_options_hold_when_the_run_resumes(
    offers: None, base: list[str], tmp_path: Path, records: Any, capsys: Any
) -> None:
    words = [*(word for word in base if not word.startswith("max_steps")), "learning_rate=1e-3", *CHOSEN]
    words.append(f"output_dir={tmp_path}/twice")
    assert main(["sft", *words, "max_steps=1"]) == 0
    (step,) = records(tmp_path / "twice", "step_end")
    assert step["lr"] == 5e-4
    capsys.readouterr()
    assert main(["sft", *words, "max_steps=2", "multiple_factor=3"]) == 2
    assert "multiple_factor" in capsys.readouterr().err
    assert main(["sft", *words, "max_steps=2", "torn_at=7"]) == 0
    (start,) = records(tmp_path / "twice", "run_start")[-1:]
    assert any("torn_at: -1 → 7" in note for note in start["notes"])
    assert not any("no effect" in note for note in start["notes"])


def test_a_rate_that_is_no_number_ends_the_run_before_it_loads_a_model(
    offers: None, base: list[str], tmp_path: Path, capsys: Any
) -> None:
    for command in ("sft", "plan"):
        words = ["lr_scheduler_type=torn", "torn_at=2", "warmup_steps=1", "max_steps=9", f"output_dir={tmp_path}/run"]
        assert main([command, *base, *words]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "plugin offers" in said
        assert "schedule torn returned the factor nan for step 3, 2 after the warm-up" in said
        assert "Traceback" not in said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_an_objective_that_is_not_chosen_takes_no_options(offers: None, base: list[str], capsys: Any) -> None:
    assert main(["sft", *base, "multiple_factor=2", "--cfg", "job"]) == 2
    assert "multiple_factor (command line): is set, but objective multiple, which does it" in capsys.readouterr().err
    assert main(["sft", *base, "objective=multipel", "--cfg", "job"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "objective (command line): there is no such objective; known: cross_entropy, multiple. Fix: multiple" in said
