"""The monitor: passes events to the detectors and their findings to the advisor; returns controls only if
configured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from surogate_core.plugin import TOKENS_PER_PARAMETER, bundles, events, token_budget, warmup_length
from surogate_monitor_adaptive.advisor import AFTER_WARMUP, HIGH_LR, SETTLING, Advisor, for_engine, for_frozen_router
from surogate_monitor_adaptive.early_stop import EarlyStop, training_flops
from surogate_monitor_adaptive.gradients import GradientTracker, acceleration_of
from surogate_monitor_adaptive.guard import TEMPORARY, LossGuard, Reduction
from surogate_monitor_adaptive.phases import LevelWatch, PhaseDetector, PlateauDetector, improvement_of, surely_rising
from surogate_monitor_adaptive.rewards import RewardMonitor
from surogate_monitor_adaptive.routing import RoutingMonitor, figures_of
from surogate_monitor_adaptive.windows import Detector, mean

GUARDED = "the guard halves the rate; if this happens again, lower learning_rate or max_grad_norm"
"""The suggestion of `loss_spike` if `auto_lr_reduction` is already on."""


SETTLED, OVERRUN, FAR = 100, 0.2, 1.25
"""Delayed scales are overrun if, past `SETTLED` steps, this share of tensors saturated, one of them by `FAR`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveOptions:
    """Options of the adaptive monitor."""

    auto_lr_reduction: Annotated[bool, bundles.Flat("auto_lr_reduction", needed=True)] = False
    """Halve the learning rate when the loss or the gradient jumps; its docs/adaptive.md has the rules."""
    early_stop: Annotated[bool, bundles.Flat("early_stop", needed=True)] = False
    """End a run that has converged, diverges or stands still; its docs/adaptive.md has the criteria."""
    phases: bool = True
    """Report changes of phase."""
    advice: bool = True
    """Give advice."""


@dataclass(slots=True)
class Counters(Detector):
    """The monitor's own state."""

    total_tokens: int = 0
    loss_before_reductions: float | None = None
    """Usual loss before the first reduction of the learning rate."""
    judge_at: int | None = None
    """The step at which the last reduction is judged."""


class AdaptiveMonitor:
    """Phases and advice from the run's events. It scales the rate and stops the run only if the configuration says so.

    It depends only on the events and on its state, so a resumed run gets the same advice and controls as one that was
    never interrupted.
    """

    def __init__(self, options: AdaptiveOptions, info: events.RunInfo):
        config = info.config
        self._options = options
        self._from_nothing = info.task == "pt"
        self._reduces = options.auto_lr_reduction
        self._stops = options.early_stop
        self._peak_lr = float(config.get("learning_rate", 0.0))
        self._warmup_keys = int(config.get("warmup_steps", 0)), float(config.get("warmup_ratio", 0.0))
        self._warmup = 0
        self._parameters = 0
        self._phases, self._levels, self._plateau = PhaseDetector(), LevelWatch(), PlateauDetector()
        self._gradients, self._guard, self._routing = GradientTracker(), LossGuard(), RoutingMonitor()
        self._stop, self._advisor, self._counters = EarlyStop(), Advisor(), Counters()
        self._rewards = RewardMonitor()
        # A record of an earlier version does not name the engine.
        self._samples_itself = (config.get("rollout") or {}).get("name", "native") in ("native", "dedicated")
        self._stale = bool(config.get("max_staleness"))
        self._router_frozen = bool(config.get("lora")) and not config.get("train_router")

    def on_event(self, event: events.Event) -> events.Control | None:
        """The control that answers the event; None for most events."""
        match event:
            case events.RunStart():
                return self._run_start(event)
            case events.StepEnd():
                return self._step_end(event)
            case events.RoutingStats():
                return self._routing_stats(event)
            case events.PrecisionStats():
                return self._precision_stats(event)
            case events.EvalEnd():
                return self._eval_end(event)
            case events.Rollouts():
                return self._advise(event.step, self._rewards.observe(event))
            case events.RolloutEval():
                evidence = self._rewards.observe_eval(event)
                return self._advise(event.step, [("reward_hacking", evidence)] if evidence is not None else [])
        return None

    def state(self) -> dict[str, Any]:
        """The state of every detector."""
        return {name: detector.state() for name, detector in self._detectors().items()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned."""
        for name, detector in self._detectors().items():
            # A checkpoint of an earlier version lacks the detectors that are newer.
            if name in state:
                detector.load_state(state[name])

    def close(self) -> None:
        """Nothing to release."""

    # --------------------------------------------------------------------------- events

    def _run_start(self, event: events.RunStart) -> events.Control | None:
        steps, ratio = self._warmup_keys
        self._warmup = warmup_length(total_steps=event.steps, warmup_steps=steps, warmup_ratio=ratio)
        self._parameters = event.parameters
        if not self._options.advice or not self._from_nothing:
            return None
        budget, planned = token_budget(event.parameters), event.train_tokens * event.epochs
        message = (
            f"Token budget: {TOKENS_PER_PARAMETER} × {event.parameters:,} parameters = {budget:,} tokens; "
            f"this run trains on {planned:,.0f}, {planned / max(1, budget):.3%} of it."
        )
        data = {"budget": budget, "planned": planned}
        return events.Control(events=(events.Notice(level="info", message=message, data=data),))

    def _step_end(self, event: events.StepEnd) -> events.Control | None:
        step, loss, norm = event.step, event.loss, event.grad_norm
        self._counters.total_tokens = event.total_tokens
        # The usual loss until now, before the guard takes the step.
        before = self._guard.losses
        told: list[events.Event] = []
        # In reinforcement learning loss and gradient follow the advantages: a jump is no sign of trouble.
        finite, online = math.isfinite(loss) and math.isfinite(norm), self._rewards.active
        jump = None if online and finite else self._guard.observe(loss, norm)
        reduction, proceed = None, False
        if jump is not None:
            usual = mean(before) if before else loss
            evidence = {"what": jump, "loss": loss, "usual_loss": usual, "grad_norm": norm}
            told += self._advisor.tell(step, "loss_spike", evidence, suggestion=GUARDED if self._reduces else "")
            if self._routing.underused(step):
                told += self._advisor.tell(step, "loss_spike_with_low_utilization", evidence)
            told += self._blame_warmup(step, evidence)
            if self._reduces:
                proceed = jump == "not finite" and not self._guard.exhausted
                reduction = self._guard.reduce(step)
                if reduction is not None:
                    self._remember(step, usual)
        if finite:
            told += self._online_step(event) if online else self._finite_step(event)
        reason = self._stop_reason(step) if self._stops else None
        return self._control(told, reduction, proceed=proceed, stop=reason, why=jump or "")

    def _finite_step(self, event: events.StepEnd) -> list[events.Event]:
        step, loss = event.step, event.loss
        told: list[events.Event] = []
        phases, gradients, routing = self._phases, self._gradients, self._routing
        self._levels.observe(loss)
        if (change := phases.observe(step, loss, unstable=self._levels.raised)) is not None and self._options.phases:
            told.append(change)
        if phases.phase == "diverging" and surely_rising(phases.losses):
            evidence = {"improvement": improvement_of(phases.losses), "steps": phases.steps_in("diverging", step)}
            if routing.collapsed(step):
                told += self._advisor.tell(step, "divergence_with_routing_collapse", evidence)
            else:
                told += self._advisor.tell(step, "divergence", evidence)
            told += self._blame_warmup(step, evidence)
        if self._plateau.observe(step, loss):
            high = event.lr >= HIGH_LR * self._peak_lr
            rates = {"lr": event.lr, "peak_lr": self._peak_lr}
            flat = {"flat_steps": self._plateau.flat_steps(step), "best_mean_loss": self._plateau.best}
            told += self._advisor.tell(step, "plateau_high_lr" if high else "plateau", {**flat, **rates})
        gradients.observe(event.grad_norm, loss)
        if gradients.accelerating:
            figures = {**gradients.figures(), "acceleration": acceleration_of(gradients.norms)}
            told += self._advisor.tell(step, "gradient_acceleration", figures)
        if gradients.vanishing:
            figures = {**gradients.figures(), "highest_mean": gradients.highest_mean}
            told += self._advisor.tell(step, "vanishing_gradients", figures)
        return told + self._judge(step)

    def _online_step(self, event: events.StepEnd) -> list[events.Event]:
        found = self._rewards.observe_step(event)
        told = [advice for rule, evidence in found for advice in self._advisor.tell(event.step, rule, evidence)]
        return [for_engine(advice, own=self._samples_itself, stale=self._stale) for advice in told]

    def _advise(self, step: int, found: Iterable[tuple[str, Mapping[str, Any]]]) -> events.Control | None:
        told = [advice for rule, evidence in found for advice in self._advisor.tell(step, rule, evidence)]
        return self._control(told, None)

    def _routing_stats(self, event: events.RoutingStats) -> events.Control | None:
        beginning = self._routing.beginning(event.step)
        evidence = {
            **figures_of(event),
            "worst_layer": event.moe_worst_layer,
            "aux_loss": event.moe_aux_loss_raw,
            **{f"{name}_at_the_beginning": value for name, value in (beginning or {}).items()},
        }
        told = [a for rule in self._routing.observe(event) for a in self._advisor.tell(event.step, rule, evidence)]
        return self._control(told, None)

    def _precision_stats(self, event: events.PrecisionStats) -> events.Control | None:
        share = max(event.saturated.values(), default=0.0)
        # Values of the first steps grow, and any of them may be the largest so far.
        if event.step <= SETTLED or share <= OVERRUN or event.worst_excess < FAR:
            return None
        evidence = {"saturated": dict(event.saturated), "worst": event.worst, "worst_excess": event.worst_excess}
        return self._control(self._advisor.tell(event.step, "scales_overrun", evidence), None)

    def _eval_end(self, event: events.EvalEnd) -> events.Control | None:
        if math.isfinite(event.loss):
            self._levels.observe_held_out(event.loss)
        flops = training_flops(self._parameters, self._counters.total_tokens)
        reason = self._stop.at_evaluation(event.loss, flops)
        return self._control([], None, stop=reason if self._stops else None)

    # --------------------------------------------------------------------------- pieces

    def _blame_warmup(self, step: int, evidence: Mapping[str, Any]) -> list[events.Event]:
        if step > self._warmup + AFTER_WARMUP:
            return []
        better = max(2 * self._warmup, AFTER_WARMUP)
        evidence = {**evidence, "warmup_steps": self._warmup}
        return [*self._advisor.tell(step, "warmup_too_short", evidence, suggestion=f"warmup_steps={better}")]

    def _remember(self, step: int, usual: float) -> None:
        counters = self._counters
        if counters.loss_before_reductions is None:
            counters.loss_before_reductions = usual
        counters.judge_at = step + SETTLING

    def _judge(self, step: int) -> list[events.Event]:
        """Whether repeated reductions have brought the loss back, `SETTLING` steps after the last."""
        counters, before = self._counters, self._counters.loss_before_reductions
        if counters.judge_at is None or step < counters.judge_at or before is None:
            return []
        counters.judge_at = None
        now = mean(self._phases.losses[-SETTLING:])
        if self._guard.reductions < TEMPORARY or now < before:
            return []
        evidence = {"reductions": self._guard.reductions, "loss_before": before, "loss_now": now}
        return [*self._advisor.tell(step, "lr_reductions_not_helping", evidence)]

    def _stop_reason(self, step: int) -> str | None:
        diverging = self._phases.steps_in("diverging", step)
        return self._stop.at_step(diverging=diverging, plateau=self._plateau.flat_steps(step))

    def _control(
        self,
        told: Iterable[events.Event],
        reduction: Reduction | None,
        *,
        proceed: bool = False,
        stop: str | None = None,
        why: str = "",
    ) -> events.Control | None:
        shown = tuple(
            for_frozen_router(event) if self._router_frozen and isinstance(event, events.Advice) else event
            for event in told
            if self._options.advice or not isinstance(event, events.Advice)
        )
        if not (shown or reduction or proceed or stop):
            return None
        reason = f"early stop: {stop}" if stop else ""
        if reduction:
            reason = reason or f"loss guard, reduction {reduction.number}: the step's {_thing(why)}"
        return events.Control(
            lr_scale=reduction.scale if reduction else None,
            fade_steps=reduction.fade_steps if reduction else 0,
            proceed=proceed,
            stop=stop is not None,
            events=shown,
            reason=reason,
        )

    def _detectors(self) -> dict[str, Detector]:
        return {
            "phases": self._phases,
            "levels": self._levels,
            "plateau": self._plateau,
            "gradients": self._gradients,
            "guard": self._guard,
            "routing": self._routing,
            "rewards": self._rewards,
            "early_stop": self._stop,
            "advisor": self._advisor,
            "counters": self._counters,
        }


def _thing(jump: str) -> str:
    return "loss or gradient norm is not finite" if jump == "not finite" else f"{jump} jumped"


def replay(
    recorded: Iterable[events.Event], info: events.RunInfo, options: AdaptiveOptions | None = None
) -> list[events.Control]:
    """The controls, in order, with which a new monitor answers the events of a run, recorded or made up.

    `options`: None takes those that the flat keys of the run's configuration give.
    """
    monitor = AdaptiveMonitor(options or bundles.options_from_flat(AdaptiveOptions, info.config), info)
    return [control for event in recorded if (control := monitor.on_event(event)) is not None]
