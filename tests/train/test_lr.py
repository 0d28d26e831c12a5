"""Learning-rate schedules against transformers', and their properties."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from surogate_core.bundles import ScheduleContext, ScheduleSpec
from surogate_core.config.schema import RunConfig
from surogate_core.errors import PluginError, UserError
from surogate_core.plugins import load_plugins
from surogate_core.train.lr import CHECKED_AT_ONCE, SCHEDULES, Schedule, check_rates, faded, warmup_length
from surogate_testing.suites import bundle_checks

PEAK = 3e-4
SPECS = {spec.name: spec for spec in SCHEDULES}


def rates_of(kind: str | ScheduleSpec, total: int, peak: float = PEAK, **keys: float) -> list[float]:
    spec = SPECS[kind] if isinstance(kind, str) else kind
    rate = Schedule(spec=spec, options=spec.options(), owner="plugin odd", peak=peak, **keys).rates(total)  # type: ignore[arg-type]
    return [rate(step) for step in range(total)]


def reference(schedule, warmup: int, total: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = schedule(optimizer, warmup, total)
    rates = []
    for _ in range(total):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize(
    ("kind", "schedule"), [("linear", get_linear_schedule_with_warmup), ("cosine", get_cosine_schedule_with_warmup)]
)
def test_equals_transformers(kind, schedule, warmup: int) -> None:
    """Equal from the warm-up's end on; in the warm-up ours is one step ahead, as theirs begins at rate 0."""
    total = 50
    theirs = reference(schedule, warmup, total)
    ours = rates_of(kind, total, warmup_steps=warmup)
    assert ours[warmup:] == pytest.approx(theirs[warmup:], rel=1e-12, abs=1e-18)
    assert ours[:warmup] == pytest.approx(theirs[1 : warmup + 1], rel=1e-12)


def test_wsd_holds_then_falls() -> None:
    rates = rates_of("wsd", 100, 1.0, warmup_steps=4)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert set(rates[4:91]) == {1.0}
    assert rates[90:] == pytest.approx([1 - i / 10 for i in range(10)])
    longer = rates_of("wsd", 100, 1.0, cooldown_steps=50)
    assert longer[50] == 1.0
    assert longer[75] == pytest.approx(0.5)


def test_constant() -> None:
    assert rates_of("constant", 10, 2.0, warmup_steps=2) == [1.0] + [2.0] * 9
    assert rates_of("constant", 10, 2.0, cooldown_steps=4, final_fraction=0.5)[9] == pytest.approx(1.25)


def test_warmup_length() -> None:
    assert warmup_length(total_steps=101, warmup_steps=0, warmup_ratio=0.1) == math.ceil(10.1)
    assert warmup_length(total_steps=101, warmup_steps=5, warmup_ratio=0.0) == 5
    assert warmup_length(total_steps=101, warmup_steps=0, warmup_ratio=0.0) == 0


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        ({"warmup_steps": 8}, "warmup_steps=8"),
        ({"warmup_steps": 20}, "warmup_steps=20"),
        ({"warmup_ratio": 1.0}, "warmup_ratio=1"),
    ],
)
def test_a_run_that_is_all_warm_up_says_so(keys: dict[str, Any], cause: str) -> None:
    schedule = Schedule(spec=SPECS["cosine"], options=None, owner="core", peak=PEAK, **keys)
    key = cause.partition("=")[0]
    assert schedule.note(8) == (
        f"Every step of this run (8) is warm-up ({cause}), so lr_scheduler_type=cosine has no effect. "
        f"Fix: {key}=0, or more steps."
    )


def test_a_run_with_a_step_after_its_warm_up_says_nothing() -> None:
    for keys in ({"warmup_steps": 7}, {"warmup_ratio": 0.5}, {}):
        assert Schedule(spec=SPECS["cosine"], options=None, owner="core", peak=PEAK, **keys).note(8) is None


@given(
    kind=st.sampled_from(["linear", "cosine", "wsd", "constant"]),
    total=st.integers(1, 300),
    warmup=st.integers(0, 350),
    cooldown=st.integers(0, 350),
    final=st.floats(0, 1),
)
def test_bounds_and_continuity(kind, total: int, warmup: int, cooldown: int, final: float) -> None:
    rates = rates_of(kind, total, warmup_steps=warmup, cooldown_steps=cooldown, final_fraction=final)
    warm = min(warmup, total)
    assert all(0 < rate <= PEAK * (1 + 1e-12) for rate in rates)
    assert all(rate >= PEAK * final * (1 - 1e-12) for rate in rates[warm:])
    assert rates[:warm] == sorted(rates[:warm])
    # Never a rise after the warm-up, and never a jump: at most the steepest phase's slope a step.
    assert all(b <= a * (1 + 1e-12) for a, b in pairwise(rates[warm:]))
    if kind == "wsd" and cooldown == 0:
        cooldown = math.ceil(total / 10)
    cool = min(cooldown, total - warm)
    slopes = [1 / warm if warm else 0, 1 / cool if cool else 0, math.pi / 2 / (total - warm) if total > warm else 0]
    steepest = PEAK * max(slopes) * (1 + 1e-9)
    assert all(abs(b - a) <= steepest for a, b in pairwise(rates))


def test_a_factor_that_blends_back() -> None:
    assert [faded(0.5, since=s, steps=4) for s in range(6)] == [0.5, 0.625, 0.75, 0.875, 1.0, 1.0]


@pytest.mark.parametrize(
    ("kind", "rates"),
    [
        ("linear", ["0x1.f75104d551d68p-14", "0x1.b866e43aa79bbp-12", "0x1.3a92a30553260p-13"]),
        ("cosine", ["0x1.f75104d551d68p-14", "0x1.e7967caea747cp-12", "0x1.93611fb241ea2p-14"]),
        ("wsd", ["0x1.f75104d551d68p-14", "0x1.3a92a30553261p-11", "0x1.3a92a30553260p-11"]),
        ("constant", ["0x1.f75104d551d68p-14", "0x1.3a92a30553261p-11", "0x1.3a92a30553261p-11"]),
    ],
)
def test_the_rates_keep_their_bits(kind: str, rates: list[str]) -> None:
    """Of warm-up, middle and end, with a final rate: a run that resumes must find those that it began with."""
    found = rates_of(kind, 23, 6e-4, warmup_steps=5, final_fraction=0.1)
    assert [found[step].hex() for step in (0, 11, 20)] == rates


@pytest.mark.parametrize("name", SPECS)
def test_the_cores_own_pass_the_kit(name: str) -> None:
    for check in bundle_checks("schedule", SPECS[name]):
        check.call()


def odd(factor: object, **facts: bool) -> ScheduleSpec:
    return ScheduleSpec(name="odd", build=lambda options, context: factor, **facts)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("factor", "message"),
    [
        (lambda step: math.nan, "returned the factor nan for step 3, 0 after the warm-up"),
        (lambda step: 1.0 if step < 4 else -0.5, r"returned the factor -0.5 for step 7, 4 after the warm-up"),
        (lambda step: math.inf, "returned the factor inf for step 3"),
        (lambda step: 1 / (1 - step), "failed for step 4: ZeroDivisionError"),
        (lambda step: None, "failed for step 3: TypeError"),
        (lambda: 1.0, "failed for step 3: TypeError"),
        (3, "failed for step 3: TypeError"),
    ],
)
def test_a_rate_that_cannot_be_one_is_found_before_the_first_step(factor: object, message: str) -> None:
    for falls in (True, False):
        with pytest.raises(PluginError, match=f"^plugin odd: schedule odd {message}"):
            rates_of(odd(factor, falls=falls), 12, warmup_steps=3)


def test_a_schedule_that_cannot_be_built() -> None:
    def fails(options: object, context: ScheduleContext) -> None:
        raise ValueError(f"{context.steps} steps")

    def refuses(options: object, context: ScheduleContext) -> None:
        raise UserError("own_key: must be less")

    with pytest.raises(PluginError, match=r"schedule odd failed for .*steps=9.*: ValueError: 9 steps"):
        rates_of(ScheduleSpec(name="odd", build=fails), 12, warmup_steps=3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"^own_key: must be less"):
        rates_of(ScheduleSpec(name="odd", build=refuses), 12)  # type: ignore[arg-type]
    assert rates_of(ScheduleSpec(name="odd", build=fails), 3, warmup_steps=3)[-1] == PEAK  # type: ignore[arg-type]


def test_a_long_run_is_checked_in_part_and_at_each_step() -> None:
    asked = []

    def factor(step: int) -> float:
        asked.append(step)
        return math.nan if step == 7 else 1.0

    schedule = Schedule(spec=odd(factor), options=None, owner="plugin odd", peak=PEAK)
    rate = schedule.rates(10**9)
    assert len(asked) == CHECKED_AT_ONCE
    with pytest.raises(PluginError, match="for step 7,"):
        rate(7)


def test_only_a_run_that_says_its_steps_is_checked_before_long_work(install_plugin: Any) -> None:
    source = "lambda options, context: lambda step: -1.0"
    hook = f"def surogate_schedule():\n    return bundles.ScheduleSpec(name='rising', build={source})\n"
    install_plugin("schedule-rising", f"from surogate_core import bundles, hookimpl\n\n@hookimpl\n{hook}")
    registry = load_plugins()
    check_rates(RunConfig(lr_scheduler_type="rising"), registry)
    with pytest.raises(PluginError, match=r"schedule-rising .*: schedule rising returned the factor -1\.0 for step 0"):
        check_rates(RunConfig(lr_scheduler_type="rising", max_steps=9), registry)
