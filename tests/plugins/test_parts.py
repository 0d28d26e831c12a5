"""A policy loss and an advantage of a stranger, with options, chosen by keys of the task `grpo`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lengths import Lengths

from surogate_core.cli.main import main
from surogate_core.errors import UserError
from surogate_core.plugins.registry import load_plugins

RunHere = Callable[..., int]

SOFT = '''
"""The log-probability weighted by a sigmoid of the ratio instead of a clipped one, and advantages that are cut."""
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from surogate_core import bundles, hookimpl


@dataclass(frozen=True)
class SoftOptions:
    sharpness: Annotated[float, Gt(0), bundles.Flat("soft_sharpness", essential=True)] = 4.0
    """How fast the weight of a token falls where its ratio leaves 1."""


@dataclass(frozen=True)
class CutOptions:
    largest: Annotated[float, Gt(0), bundles.Flat("cut_largest", needed=True)] = 1.0
    """Largest size of an advantage."""


def soft(options):
    def loss(terms):
        sharp = options.sharpness
        return -terms.advantages_N * (4 / sharp) * (sharp * (terms.ratio_N - 1)).sigmoid()

    def moved(terms):
        return terms.total(terms.log_ratio_N.detach()).abs()

    return bundles.PolicyLoss(loss=loss, sums_completions=True, kl=None, figures={"soft/moved": moved})


def cut(options):
    def compute(rewards_PG, lengths_PG):
        import numpy as np

        return np.clip(rewards_PG - np.nanmean(rewards_PG, 1, keepdims=True), -options.largest, options.largest)

    return compute


@hookimpl
def surogate_policy_loss():
    return bundles.PolicyLossSpec(name="soft", build=soft, options=SoftOptions, advantage="cut")


@hookimpl
def surogate_advantage():
    return bundles.AdvantageSpec(name="cut", build=cut, options=CutOptions)
'''
ODD = """
from surogate_core import bundles, hookimpl

LOSSES = {
    "infinite": lambda: bundles.PolicyLoss(loss=lambda terms: terms.ratio_N * float("nan")),
    "mean": lambda: bundles.PolicyLoss(loss=lambda terms: terms.ratio_N.mean()),
    "still": lambda: bundles.PolicyLoss(loss=lambda terms: terms.advantages_N),
    "total": lambda: bundles.PolicyLoss(loss=lambda terms: terms.total(terms.ratio_N)),
    "typo": lambda: bundles.PolicyLoss(loss=lambda terms: terms.ratios_N),
    "twice": lambda: bundles.PolicyLoss(loss=None, against="behaviour"),
    "other": lambda: 3,
}

@hookimpl
def surogate_policy_loss():
    return [bundles.PolicyLossSpec(name=name, build=lambda _, make=make: make()) for name, make in LOSSES.items()]
"""
FAULTS = {
    "infinite": " returned [nan, nan, nan, nan] for tokens whose log-probability has moved by -0.1, with an advantage",
    "mean": " returned torch.float32 of [], and must return a loss for each token, torch.float32 of [4]",
    "still": " does not depend on log π",
    "total": " calls `total`, and only a loss with `sums_completions=True` sees whole completions",
    "typo": " failed: AttributeError: 'PolicyTerms' object has no attribute 'ratios_N'",
    "twice": " cannot be built: TypeError: a ratio against the behaviour has the importance weight in it",
    "other": ": `build` returned 3, not a PolicyLoss",
}


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    with mock.patch(
        "surogate_task_grpo.task.open_arena", lambda context, _: Lengths(context.config.environment.name, 1)
    ):
        yield


@pytest.fixture
def soft(install_plugin: Any) -> None:
    install_plugin("policy-soft", SOFT)


def test_a_strangers_loss_and_advantage_train(
    soft: None, grpo_keys: list[str], tmp_path: Path, run_here: RunHere, records: Any
) -> None:
    registry, run = load_plugins(), tmp_path / "run"
    keys = [*grpo_keys, "loss_type=soft", "num_iterations=2", "eval_environment_tasks=0"]
    assert run_here(run, *keys, "cut_largest=0.25", registry=registry) == 0
    steps = records(run, "step_end")
    assert len(steps) == 4
    moved = [step["figures"]["soft/moved"] for step in steps]
    assert moved[0] == moved[2] == 0.0 < moved[1]
    assert all(step["grad_norm"] > 0 for step in steps)
    samples = [one for event in records(run, "rollout_samples") for one in event["samples"]]
    advantages = {one["advantage"] for one in samples} - {None}
    assert advantages
    assert max(map(abs, advantages)) <= 0.25
    config = (run / "config.yaml").read_text()
    assert "soft_sharpness: 4" in config
    assert "cut_largest: 0.25" in config
    with pytest.raises(UserError, match=r"soft_sharpness: 4.0 in the checkpoint, 2.0 in this run"):
        run_here(run, *keys, "max_steps=6", "soft_sharpness=2", registry=registry)


def test_names_and_options_that_do_not_fit(soft: None, grpo_keys: list[str], capsys: Any) -> None:
    def error(*words: str) -> str:
        assert main([*grpo_keys, *words, "--cfg", "job"]) == 2
        return " ".join(capsys.readouterr().err.split())

    found = error("loss_type=dapoo")
    assert "loss_type (command line): there is no such policy loss; known: bnpo, cispo, dapo, dppo" in found
    assert "Fix: dapo" in found
    found = error("advantage=grup")
    assert "advantage (command line): there is no such advantage; known: batch, cut, group" in found
    assert "Fix: group" in found
    assert "cut_largest (command line): is set, but advantage cut, which does it, is not chosen" in error(
        "cut_largest=2"
    )
    assert "soft_sharpness (command line): must be a number above 0" in error("loss_type=soft", "soft_sharpness=0")
    found = error("loss_type=soft", "beta=0.1")
    assert "beta (command line): is 0.1, and loss_type=soft has no divergence from a reference" in found


def test_an_option_of_a_loss_that_is_not_chosen_has_no_effect(
    soft: None, grpo_keys: list[str], tmp_path: Path, run_here: RunHere, records: Any
) -> None:
    keys = [*grpo_keys, "soft_sharpness=2", "max_steps=1", "save_steps=0", "eval_environment_tasks=0"]
    assert run_here(tmp_path / "run", *keys, registry=load_plugins()) == 0
    (start,) = records(tmp_path / "run", "run_start")
    assert any("soft_sharpness=2.0 has no effect: it is an option of loss_type=soft" in note for note in start["notes"])


def test_a_wrong_loss_is_named_with_its_plugin(
    install_plugin: Any, grpo_keys: list[str], tmp_path: Path, capsys: Any
) -> None:
    install_plugin("policy-odd", ODD)
    for name, message in FAULTS.items():
        assert main([*grpo_keys, f"loss_type={name}", f"output_dir={tmp_path}/{name}"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert f"policy loss {name} of plugin policy-odd (distribution dist-policy-odd 1.2.3){message}" in said


LATE = """
from surogate_core import bundles, hookimpl

@hookimpl
def surogate_policy_loss():
    loss = bundles.PolicyLoss(loss=lambda terms: -terms.advantages_N * (3 + terms.logp_N).log())
    return bundles.PolicyLossSpec(name="late", build=lambda options: loss)
"""


def test_a_loss_that_is_not_finite_in_training_is_suspected(
    install_plugin: Any, grpo_keys: list[str], tmp_path: Path, capsys: Any
) -> None:
    """It is finite on the tokens of the first check, and not on the improbable ones of a random model."""
    install_plugin("policy-late", LATE)
    keys = [*grpo_keys, "loss_type=late", "save_steps=0", "eval_environment_tasks=0"]
    assert main([*keys, f"output_dir={tmp_path}/run"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "policy loss late of plugin policy-late (distribution dist-policy-late 1.2.3) may also be the cause" in said
