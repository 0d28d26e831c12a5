"""What `surogate plan` says of experts that GPUs share out, and of the same run without that."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surogate_core.plugin import ConfigError, UserError, atomic
from surogate_core.service.config import numbers, sharing

if TYPE_CHECKING:
    from surogate_command_plan.fit import Predictor
    from surogate_command_plan.speed import Speed
    from surogate_command_plan.view import RunPlan
    from surogate_core.service.config import RunConfig
    from surogate_core.service.engine import Prediction
    from surogate_core.service.plugins import Registry


ALIKE = 0.1
"""Two speeds that differ by less are called alike: estimates of trainings with experts are within it."""


def busiest_of(text: str | None) -> float | None:
    """The value of ``--busiest``; raises `UserError`."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1024:
        message = "it is the rows of the GPU with most over the mean of all, a number from 1 to ep_size"
        raise UserError(f"--busiest {text}: {message}. Fix: --busiest 1.5")
    return value


def load_of(config: RunConfig, busiest: float | None) -> float:
    """Rows of the rank with most over the mean: those given, or what evening out leaves where that is less."""
    even = config.ep_load_balance_threshold
    most = min(config.ep_size, busiest or 1.0)
    return most if even is None else min(most, max(even, 1.0))


def on_average(config: RunConfig, predicted: Predictor, busiest: float | None) -> Prediction:
    """The prediction, with the products that the busiest rank computes again and not those of all places: a product
    skips places that no row takes, and on average a rank has as many rows as one that has all experts.
    """
    found = predicted(config)
    if config.ep_size == 1 or not found.again:
        return found
    whole = predicted(_without(config)).again
    # Places are up to ep_size times the rows; the time of the rest of the layer does not depend on either.
    of_experts = (found.again - whole) / (config.ep_size - 1)
    return replace(found, again=round(whole + (load_of(config, busiest) - 1) * of_experts))


def _without(config: RunConfig) -> RunConfig:
    return replace(config, ep_size=1, ep_load_balance_threshold=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeExperts:
    """The run with all experts on every GPU."""

    overrides: tuple[str, ...]
    device: int
    """Bytes of each GPU."""
    sent: int
    """Bytes that a GPU sends in a step."""
    speed: Speed | None

    def as_json(self) -> dict[str, Any]:
        """Under `without_ep_size`."""
        rate = None if self.speed is None else self.speed.tokens_per_second
        return {"overrides": list(self.overrides), "device_bytes": self.device, "tokens_per_second": rate}


def whole_experts(
    plan: RunPlan, registry: Registry, predicted: Predictor, estimate: Callable[[RunConfig], Speed] | None
) -> WholeExperts | None:
    """The first way to fit without `ep_size`, from the one that sends least; None if nothing does, or none is asked."""
    from surogate_core.service.setup import MARGIN

    memory, config = plan.room.device, plan.config
    if config.ep_size == 1 or memory is None:
        return None
    optimizer = registry.get("optimizer", config.optimizer.name)
    for words, changed in _ways(config, registry):
        try:
            sharing.check(changed, optimizer)
            prediction = predicted(changed)
        except ConfigError:
            continue
        if (needed := prediction.total("device")) * MARGIN > memory:
            continue
        sent = sum(one.nbytes for one in prediction.sent)
        return WholeExperts(
            overrides=words, device=needed, sent=sent, speed=None if estimate is None else estimate(changed)
        )
    return None


def _ways(config: RunConfig, registry: Registry) -> Iterator[tuple[tuple[str, ...], RunConfig]]:
    whole = _without(config)
    for changes in ({}, *sharing.shares_more(whole, registry)):
        words = (f"{key}={str(value).lower()}" for key, value in changes.items())
        yield ("ep_size=1", *words), replace(whole, **changes)


def notes(plan: RunPlan) -> list[str]:
    """What the time rests on, and what the run would be without `ep_size`."""
    config, whole, found = plan.config, plan.whole_experts, []
    if config.ep_size > 1 and plan.speed is not None:
        load = "even loads" if plan.load == 1 else f"{plan.load:g} times the mean on the busiest GPU"
        found.append(f"ep_size={config.ep_size}: the time is of {load} (--busiest)")
    if whole is None:
        return found
    sends = sum(sent.nbytes for sent in plan.prediction.sent)
    needs, instead, before, after = map(
        atomic.human_bytes, (whole.device, plan.prediction.total("device"), whole.sent, sends)
    )
    how, fits = " ".join(whole.overrides), "fits too: "
    if whole.speed is not None and plan.speed is not None:
        rates = [speed.tokens_per_second for speed in (whole.speed, plan.speed)]
        alike = abs(rates[0] / rates[1] - 1) <= ALIKE
        fits = "about as fast" if alike else "faster" if rates[0] > rates[1] else "slower"
        whole_rate, own_rate = map(numbers.rate, rates)
        fits = f"would be {fits} and fits: about {whole_rate} tokens/s instead of {own_rate} (estimated), "
    found.append(
        f"{how} {fits}{needs} on each GPU instead of {instead}, and a GPU sends {before} a step instead of {after}."
    )
    return found
