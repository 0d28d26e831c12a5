"""Every rule on a curve that fires it, at an expected step, and on a near miss that does not.

`pytest -v` lists each rule with the step at which it fires.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest
from surogate_monitor_adaptive.advisor import COOLDOWN, FROZEN_ROUTER, NATIVE_GAP, RULES, STALE_GAP
from surogate_monitor_adaptive.monitor import GUARDED, AdaptiveMonitor, AdaptiveOptions, replay

from surogate_core.plugin import events
from surogate_testing.run_events import START, curve, falling, info, step

Value = Callable[[int], float]
"""Step, 1 for the first → value."""


def routed(recorded: Sequence[events.Event], routing: Callable[[int], events.RoutingStats]) -> Iterator[events.Event]:
    """The events, each step's routing before it."""
    for event in recorded:
        if isinstance(event, events.StepEnd):
            yield routing(event.step)
        yield event


def advices(controls: Sequence[events.Control]) -> list[events.Advice]:
    return [event for control in controls for event in control.events if isinstance(event, events.Advice)]


def told(rule: str, recorded: Sequence[events.Event], **config: Any) -> list[int]:
    return [advice.step for advice in advices(replay(recorded, info(**config))) if advice.rule == rule]


def stats(at: int, imbalance: float = 1.5, utilization: float = 0.95, **more: Any) -> events.RoutingStats:
    figures = {"moe_worst_imbalance": imbalance, "moe_worst_layer": 0, "moe_entropy": 0.97, "moe_cv": 0.3, **more}
    return events.RoutingStats(step=at, moe_load_imbalance=imbalance, moe_expert_utilization=utilization, **figures)


def even(at: int) -> events.RoutingStats:
    return stats(at, moe_aux_loss_raw=1.0)


def scaled(at: int, saturated: float, excess: float = 1.3) -> events.PrecisionStats:
    shares = {"activation": 0.0, "gradient": saturated}
    return events.PrecisionStats(
        step=at, steps=50, saturated=shares, underflowed={}, worst="layer 0 q_proj gradient", worst_excess=excess
    )


def rising_after(at: int, begin: int, rate: float) -> float:
    return 2.0 + rate * max(0, at - begin)


def calm(at: int) -> float:
    """A loss that goes up and down by 1 %."""
    return 2.0 + 0.02 * (-1) ** at


def spiky(height: float, at_step: int = 300) -> Value:
    return lambda at: calm(at) + (height if at == at_step else 0.0)


def rising_norm(at: int, rate: float) -> float:
    return 1.0 + max(0.0, at - 300) * rate


SPARSE = {"moe_experts": 128, "moe_experts_per_token": 8}
"""The experts of Qwen3-30B-A3B. Its largest possible imbalance is 16."""


def routed_from(begin: int, *, steps: int = 130, **changed: float) -> list[events.Event]:
    """A run whose routing changes at the step `begin`, for good."""
    usual = {"moe_load_imbalance": 4.0, "moe_worst_imbalance": 4.0, **SPARSE}
    return list(
        routed(curve(steps, falling), lambda at: replace(stats(at), **{**usual, **(changed if at >= begin else {})}))
    )


def reinforced(
    steps: int = 100,
    reward: Value = lambda at: 0.3,
    entropy: Value = lambda at: 1.0,
    length: Value = lambda at: 50.0,
    held_out: Mapping[int, float] = MappingProxyType({}),
    figures: Mapping[str, Value] = MappingProxyType({}),
    **more: Value,
) -> list[events.Event]:
    """A run of reinforcement learning whose loss and gradient jump without meaning."""
    recorded: list[events.Event] = [replace(START, steps=steps)]
    for at in range(1, steps + 1):
        given: dict[str, Any] = {name: value(at) for name, value in more.items()}
        recorded.append(
            events.Rollouts(
                step=at, prompts=8, completions=64, reward=events.Spread(reward(at), 0.4, 0.0, 1.0), tokens=64,
                length=events.Spread(length(at), 1.0, 1.0, 64.0), **given,
            )
        )  # fmt: skip
        named = {"entropy": entropy(at), **{name: value(at) for name, value in figures.items()}}
        loss, norm = (-1) ** at * (5.0 if at % 40 else 500.0), 30.0 if at % 30 else 0.1
        recorded.append(step(at, loss, grad_norm=norm, figures=named))
        if at in held_out:
            spread = events.Spread(held_out[at], 0.4, 0.0, 1.0)
            recorded.append(events.RolloutEval(step=at, tasks=64, reward=spread, seconds=0.1))
    return recorded


def from_50(value: float, usual: float = 0.0) -> Value:
    return lambda at: value if at >= 50 else usual


def rising(at: int) -> float:
    return 0.2 + 0.007 * at


LONG_WARMUP = {"warmup_steps": 100}

CASES: dict[str, tuple[int, list[events.Event], list[events.Event], dict[str, Any]]] = {
    # rule: (step at which it fires first, the curve, the near miss, config of both)
    "loss_spike": (300, curve(320, spiky(0.6)), curve(320, spiky(0.4)), {}),
    "divergence": (
        250,
        curve(600, lambda at: rising_after(at, 200, 0.003)),
        curve(600, lambda at: rising_after(at, 200, 0.0002)),
        {},
    ),
    "plateau": (
        800,
        curve(900, lambda at: max(falling(at), falling(600)), lr=lambda at: 4e-4),
        curve(900, falling, lr=lambda at: 4e-4),
        {},
    ),
    "plateau_high_lr": (
        800,
        curve(900, lambda at: max(falling(at), falling(600)), lr=lambda at: 6e-4),
        curve(900, lambda at: max(falling(at), falling(600)), lr=lambda at: 4e-4),
        {},
    ),
    "gradient_acceleration": (
        306,
        curve(340, falling, lambda at: rising_norm(at, 0.4)),
        curve(340, falling, lambda at: rising_norm(at, 0.05)),
        {},
    ),
    "vanishing_gradients": (
        320,
        curve(340, lambda at: 4.0, lambda at: 1.0 if at <= 300 else 0.001),
        curve(340, lambda at: 4.0, lambda at: 1.0 if at <= 300 else 0.02),
        {},
    ),
    # The beginning has an imbalance of 4, a utilization of 0.95 and an entropy of 0.97.
    "expert_imbalance": (109, routed_from(100, moe_load_imbalance=8.1), routed_from(100, moe_load_imbalance=7.9), {}),
    "expert_collapse": (102, routed_from(100, moe_load_imbalance=12.1), routed_from(100, moe_load_imbalance=11.9), {}),
    "layer_collapse": (
        109,
        routed_from(100, moe_worst_imbalance=13.7),
        routed_from(100, moe_worst_imbalance=13.5),
        {},
    ),
    "expert_imbalance_rises": (
        170,
        list(routed(curve(200, falling), lambda at: stats(at, 4 + max(0, at - 100) / 60, **SPARSE))),
        list(routed(curve(200, falling), lambda at: stats(at, 4 + max(0, at - 100) / 90, **SPARSE))),
        {},
    ),
    "experts_underused": (
        109,
        routed_from(100, moe_expert_utilization=0.84),
        routed_from(100, moe_expert_utilization=0.86),
        {},
    ),
    "experts_idle": (
        102,
        routed_from(100, moe_expert_utilization=0.74),
        routed_from(100, moe_expert_utilization=0.76),
        {},
    ),
    "routing_narrows": (109, routed_from(100, moe_entropy=0.82), routed_from(100, moe_entropy=0.83), {}),
    "aux_loss_spike": (
        40,
        list(
            routed(
                curve(60, falling),
                lambda at: stats(at, 1, 1, moe_aux_loss_raw=1.5 if at == 40 else 1 + at % 2 / 10),
            )
        ),
        list(
            routed(
                curve(60, falling),
                lambda at: stats(at, 1, 1, moe_aux_loss_raw=1.15 if at == 40 else 1 + at % 2 / 10),
            )
        ),
        {},
    ),
    "scales_overrun": (
        150,
        [*curve(100, falling), scaled(100, 0.3), scaled(150, 0.21), scaled(200, 0.3)],
        [*curve(100, falling), scaled(100, 0.3), scaled(150, 0.19), scaled(200, 0.3, excess=1.2)],
        {},
    ),
    # Means of the last 10 steps; the figures change at step 50.
    "entropy_collapse": (
        58,
        reinforced(entropy=from_50(0.05, 0.5)),
        reinforced(reward=rising, entropy=from_50(0.05, 0.5)),
        {},
    ),
    "length_explosion": (59, reinforced(length=from_50(101, 50)), reinforced(length=from_50(99, 50)), {}),
    "no_signal": (
        58,
        reinforced(without_signal=from_50(0.9)),
        reinforced(without_signal=from_50(0.8)),
        {},
    ),
    "problems_too_easy": (
        58,
        reinforced(reward=lambda at: 0.95, without_signal=from_50(0.9)),
        reinforced(reward=lambda at: 0.85, without_signal=from_50(0.9)),
        {},
    ),
    "completions_truncated": (57, reinforced(truncated=from_50(0.4)), reinforced(truncated=from_50(0.3)), {}),
    "environment_faults": (
        56,
        reinforced(faults=lambda at: {"timeout": 10 if at >= 50 else 0}),
        reinforced(faults=lambda at: {"timeout": 6 if at >= 50 else 0}),
        {},
    ),
    "logprob_gap": (
        57,
        reinforced(figures={"logprob_gap/mean": from_50(0.07)}),
        reinforced(figures={"logprob_gap/mean": from_50(0.05)}),
        {},
    ),
    "clipped_tokens": (
        57,
        reinforced(figures={"clip_ratio/region": from_50(0.4)}),
        reinforced(figures={"clip_ratio/region": from_50(0.3)}),
        {},
    ),
    "reward_hacking": (
        90,
        reinforced(reward=rising, held_out={30: 0.4, 60: 0.6, 80: 0.4, 90: 0.4}),
        reinforced(reward=rising, held_out={30: 0.4, 60: 0.6, 80: 0.4, 90: 0.5, 100: 0.4}),
        {},
    ),
    "divergence_with_routing_collapse": (
        250,
        list(
            routed(
                curve(600, lambda at: rising_after(at, 200, 0.003)),
                lambda at: stats(at, 11 if at > 210 else 1, 1),
            )
        ),
        list(routed(curve(600, lambda at: rising_after(at, 200, 0.003)), even)),
        {},
    ),
    "loss_spike_with_low_utilization": (
        300,
        list(
            routed(
                curve(320, spiky(0.6)),
                lambda at: stats(at, 1, 0.7 if at > 250 else 1),
            )
        ),
        list(
            routed(
                curve(320, spiky(0.6)),
                lambda at: stats(at, 1, 0.7 if at < 150 else 1),
            )
        ),
        {},
    ),
    # Reductions at 300, 310, … 340 (five jumps); the loss stays above and is judged 50 steps after the last.
    "lr_reductions_not_helping": (
        390,
        curve(420, lambda at: calm(at) + (1.0 if 300 <= at <= 345 else 0.2 if at > 345 else 0)),
        curve(420, lambda at: calm(at) + (1.0 if 300 <= at <= 345 else -0.2 if at > 345 else 0)),
        {"auto_lr_reduction": True},
    ),
    "warmup_too_short": (200, curve(240, spiky(1.0, 200)), curve(240, spiky(1.0, 201)), LONG_WARMUP),
}


def test_every_rule_has_a_case() -> None:
    assert CASES.keys() == RULES.keys()


@pytest.mark.parametrize("rule", CASES, ids=lambda rule: f"{rule}-{CASES[rule][0]}")
def test_a_rule_fires_at_its_step_and_not_on_the_near_miss(rule: str) -> None:
    expected, recorded, near_miss, config = CASES[rule]
    steps = told(rule, recorded, **config)
    assert steps[:1] == [expected]
    assert told(rule, near_miss, **config) == []


def test_table_of_rules() -> None:
    """`pytest -rP -k table` shows it: rule, step at which it fires, step at which it should."""
    print(f"{'rule':34} fired  expected  on the near miss")  # noqa: T201
    for rule, (expected, recorded, near_miss, config) in CASES.items():
        fired, missed = told(rule, recorded, **config), told(rule, near_miss, **config)
        print(f"{rule:34} {fired[0]:5}  {expected:8}  {missed or 'silent'}")  # noqa: T201
        assert fired[0] == expected


def test_a_gap_is_not_blamed_on_the_engine_that_the_run_has() -> None:
    recorded = CASES["logprob_gap"][1]
    for rollout in ({}, {"rollout": {"name": "native"}}, {"rollout": {"name": "dedicated"}}):
        (advice,) = [one for one in advices(replay(recorded, info(**rollout))) if one.rule == "logprob_gap"]
        assert (advice.key, advice.suggestion) == ("torch_dtype", NATIVE_GAP)
        assert "rollout=native has both" not in advice.suggestion
    (advice,) = [a for a in advices(replay(recorded, info(rollout={"name": "vllm"}))) if a.rule == "logprob_gap"]
    assert (advice.key, advice.suggestion) == ("rollout", RULES["logprob_gap"].suggestion)
    for name in ("vllm", "dedicated"):
        found = advices(replay(recorded, info(rollout={"name": name}, max_staleness=1)))
        (advice,) = [one for one in found if one.rule == "logprob_gap"]
        assert (advice.key, advice.suggestion) == ("max_staleness", STALE_GAP)


def test_norms_of_the_first_steps_and_norms_that_come_back_are_no_acceleration() -> None:
    def steep(begin: int) -> list[events.Event]:
        return curve(begin + 40, falling, lambda at: 1.0 + max(0.0, at - begin) * 0.4)

    assert told("gradient_acceleration", steep(10)) == []
    assert told("gradient_acceleration", steep(60)) == [66]
    # Down to a third for 30 steps, and back.
    dip = curve(340, falling, lambda at: 0.35 if 270 <= at < 300 else 1.0)
    assert told("gradient_acceleration", dip) == []


def test_a_single_batch_says_little_about_routing() -> None:
    assert told("expert_collapse", routed_from(100, steps=101, moe_load_imbalance=50.0)) == []
    assert told("experts_idle", routed_from(100, steps=101, moe_expert_utilization=0.1)) == []


def test_fixed_limits_until_the_beginning_is_known() -> None:
    def early(**changed: Any) -> list[events.Event]:
        return list(routed(curve(40, falling), lambda at: replace(stats(at), **changed)))

    assert told("expert_imbalance", early(moe_load_imbalance=3.1)) == [19], "nothing fires before step 10"
    assert told("expert_imbalance", early(moe_load_imbalance=2.9)) == []
    assert told("expert_collapse", early(moe_load_imbalance=10.1)) == [12]
    assert told("experts_underused", early(moe_expert_utilization=0.79)) == [19]
    assert told("experts_idle", early(moe_expert_utilization=0.49)) == [12]
    assert told("expert_imbalance", early(moe_load_imbalance=11.9, **SPARSE)) == []
    assert told("expert_imbalance", early(moe_load_imbalance=12.1, **SPARSE)) == [19]
    assert told("expert_collapse", early(moe_load_imbalance=14.3, **SPARSE)) == []
    assert told("expert_collapse", early(moe_load_imbalance=14.5, **SPARSE)) == [12]
    assert told("layer_collapse", early(moe_worst_imbalance=14.5, **SPARSE)) == [19]
    assert told("layer_collapse", early(moe_worst_imbalance=14.3, **SPARSE)) == []
    few = {"moe_experts": 8, "moe_experts_per_token": 4}  # even the largest possible imbalance, 2, is harmless
    assert told("expert_imbalance", early(moe_load_imbalance=2.0, **few)) == []


def test_limits_can_be_reached_where_the_beginning_is_uneven_already() -> None:
    def run(imbalance: float) -> list[events.Event]:
        def routing(at: int) -> events.RoutingStats:
            return stats(at, imbalance if at >= 100 else 11.0, **SPARSE)

        return list(routed(curve(130, falling), routing))

    assert told("expert_imbalance", run(13.6)) == [109], "half of the way from 11 to 16"
    assert told("expert_imbalance", run(13.4)) == []
    assert told("expert_collapse", run(15.1)) == [102]


def test_a_run_that_is_uneven_from_the_beginning_gets_no_advice() -> None:
    uneven = {**SPARSE, "moe_load_imbalance": 11.0, "moe_entropy": 0.7}
    recorded = list(routed(curve(400, falling), lambda at: replace(stats(at), **uneven)))
    assert not advices(replay(recorded, info()))


def test_a_healthy_run_of_reinforcement_learning_gets_no_advice() -> None:
    """Its loss jumps, it becomes sure of itself and its completions grow while the reward rises."""
    run = reinforced(
        300,
        reward=lambda at: min(1.0, 0.01 + at / 100),
        entropy=lambda at: 1.0 / (1 + at / 5),
        length=lambda at: 20.0 + at,
        held_out={100: 0.8, 200: 0.85, 300: 0.82},
    )
    assert advices(replay(run, info(auto_lr_reduction=True))) == []
    assert [control for control in replay(run, info(auto_lr_reduction=True)) if control.lr_scale] == []


def test_in_reinforcement_learning_what_is_not_finite_is_still_survived() -> None:
    run = reinforced(60)
    broken = [replace(e, loss=math.nan) if isinstance(e, events.StepEnd) and e.step == 40 else e for e in run]
    (control,) = [c for c in replay(broken, info(auto_lr_reduction=True)) if c.proceed]
    assert control.lr_scale == 0.5


def test_a_held_out_reward_before_the_first_step_is_no_best_one() -> None:
    """The most probable tokens may be right at once where sampled ones are not."""
    before = events.RolloutEval(step=0, tasks=64, reward=events.Spread(0.9, 0.1, 0.0, 1.0), seconds=0.1)
    run = reinforced(60, reward=rising, held_out={20: 0.7, 40: 0.72, 60: 0.71})
    assert told("reward_hacking", [run[0], before, *run[1:]]) == []


def test_rollouts_without_a_reward_are_taken() -> None:
    run = [
        replace(e, reward=None) if isinstance(e, events.Rollouts) else e for e in reinforced(30, truncated=from_50(0.4))
    ]
    run.append(events.RolloutEval(step=30, tasks=4, reward=None, seconds=0.1))
    assert advices(replay(run, info())) == []


def test_a_resumed_run_of_reinforcement_learning_gets_the_same_advice() -> None:
    run = reinforced(truncated=from_50(0.4))
    middle = next(place for place, event in enumerate(run) if event == step_of(run, 54))
    first, second = AdaptiveMonitor(AdaptiveOptions(), info()), AdaptiveMonitor(AdaptiveOptions(), info())
    for event in run[: middle + 1]:
        first.on_event(event)
    second.load_state(json.loads(json.dumps(first.state(), allow_nan=False)))
    controls = [control for event in run[middle + 1 :] if (control := second.on_event(event)) is not None]
    assert [(advice.rule, advice.step) for advice in advices(controls)] == [("completions_truncated", 57)]
    older = {name: value for name, value in first.state().items() if name != "rewards"}
    AdaptiveMonitor(AdaptiveOptions(), info()).load_state(older)


def step_of(recorded: Sequence[events.Event], number: int) -> events.Event:
    return next(event for event in recorded if isinstance(event, events.StepEnd) and event.step == number)


def test_advice_about_a_frozen_router() -> None:
    recorded = routed_from(100, moe_load_imbalance=8.1)
    (trained,) = advices(replay(recorded, info(lora=True, train_router=True)))
    assert (trained.key, trained.evidence["imbalance_at_the_beginning"]) == ("router_aux_loss_coef", pytest.approx(4.0))
    (frozen,) = advices(replay(recorded, info(lora=True)))
    assert (frozen.key, frozen.suggestion) == ("datasets", FROZEN_ROUTER)


def test_advice_has_evidence_and_a_key() -> None:
    (advice,) = [a for a in advices(replay(curve(320, spiky(0.6)), info())) if a.rule == "loss_spike"]
    assert advice.evidence["what"] == "loss"
    assert advice.evidence["loss"] - advice.evidence["usual_loss"] > 0.5
    assert (advice.key, advice.suggestion) == ("auto_lr_reduction", RULES["loss_spike"].suggestion)
    guarded = advices(replay(curve(320, spiky(0.6)), info(auto_lr_reduction=True)))
    assert [a.suggestion for a in guarded if a.rule == "loss_spike"] == [GUARDED]


def test_the_warmup_that_is_advised() -> None:
    (advice,) = [a for a in advices(replay(curve(240, spiky(1.0, 200)), info(**LONG_WARMUP))) if "warmup" in a.rule]
    assert (advice.key, advice.suggestion, advice.evidence["warmup_steps"]) == ("warmup_steps", "warmup_steps=200", 100)


def test_a_state_that_two_have_loaded_belongs_to_none_of_them() -> None:
    first, second, third = (AdaptiveMonitor(AdaptiveOptions(), info()) for _ in range(3))
    for event in curve(150, falling):
        first.on_event(event)
    state = first.state()
    second.load_state(state)
    third.load_state(state)
    second.on_event(step(151, 7.0))
    assert third.state() == state == first.state() != second.state()


def test_cooldown_of_each_rule() -> None:
    def spikes(at: int) -> float:
        return falling(at) + (1.0 if at in (300, 499, 500, 501) else 0.0)

    assert told("loss_spike", curve(600, spikes)) == [300, 300 + COOLDOWN]


def test_a_jump_within_the_noise_is_none() -> None:
    def noisy(at: int) -> float:
        return 2.0 + 0.3 * (-1) ** at + (0.85 if at == 300 else 0.0)

    assert told("loss_spike", curve(320, noisy)) == [300]
    assert told("loss_spike", curve(320, lambda at: noisy(at) - (0.3 if at == 300 else 0.0))) == []


def test_a_loss_that_doubles_in_the_first_steps_is_a_jump() -> None:
    def exploding(at: int, ratio: float) -> float:
        return 6.9 * (ratio if at >= 4 else 1.0)

    assert told("loss_spike", curve(19, lambda at: exploding(at, 2.05))) == [4]
    assert told("warmup_too_short", curve(19, lambda at: exploding(at, 2.05))) == [4]
    assert told("loss_spike", curve(19, lambda at: exploding(at, 1.95))) == []
    assert told("loss_spike", curve(19, lambda at: 0.2 if at < 4 else 0.65)) == []
    assert told("loss_spike", curve(19, lambda at: 1.0 if at == 1 else 3.0)) == []


@pytest.mark.parametrize(
    ("kind", "loss", "norm"),
    [("gradient", 2.0, 10.1), ("gradient", 2.0, 101.0), ("not finite", math.nan, 1.0), ("not finite", 2.0, math.inf)],
)
def test_other_jumps(kind: str, loss: float, norm: float) -> None:
    recorded = [*curve(29, lambda at: 2.0), step(30, loss, grad_norm=norm)]
    (advice,) = [a for a in advices(replay(recorded, info())) if a.rule == "loss_spike"]
    assert (advice.step, advice.evidence["what"]) == (30, kind)


def test_gradients_that_are_large_from_the_beginning_are_no_jump() -> None:
    assert told("loss_spike", curve(300, falling, lambda at: 150.0)) == []
    assert told("loss_spike", curve(300, falling, lambda at: 30.0 if at < 200 else 99.0)) == []


# ------------------------------------------------------------------------- false alarms


def healthy(seed: int, steps: int = 1000) -> list[events.Event]:
    """A power law with 2 % of noise, spells of correlated noise, and a cosine rate after 5 % of warm-up."""
    random_ = random.Random(seed)
    drift = 0.0
    recorded: list[events.Event] = [replace(START, steps=steps)]
    top, exponent, floor = random_.uniform(6, 9), random_.uniform(0.25, 0.4), random_.uniform(1.2, 2.2)
    for at in range(1, steps + 1):
        drift = 0.9 * drift + random_.gauss(0, 0.003)
        loss = (floor + (top - floor) * (1 + at / 5) ** -exponent) * (1 + drift + random_.gauss(0, 0.02))
        norm = (0.5 + 3 * (1 + at / 5) ** -0.5) * math.exp(random_.gauss(0, 0.2))
        warm = min(1.0, at / 50)
        lr = 1e-3 * warm * (0.5 + 0.5 * math.cos(math.pi * at / steps))
        recorded.append(step(at, loss, grad_norm=norm, lr=lr))
    return recorded


def test_no_false_alarms_on_20_healthy_seeds() -> None:
    config = {"warmup_steps": 50, "auto_lr_reduction": True, "early_stop": True}
    alarms = {}
    for seed in range(20):
        found = replay(healthy(seed), info(**config))
        bad = [a.rule for a in advices(found)] + [c.reason for c in found if c.lr_scale or c.stop]
        if bad:
            alarms[seed] = bad
    assert not alarms
