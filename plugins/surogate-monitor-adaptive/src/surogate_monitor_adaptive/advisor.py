"""The rules: the key that each is about, its advice, and how often it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from surogate_core.plugin import events
from surogate_monitor_adaptive.windows import Detector

COOLDOWN = 200
"""Steps between two pieces of advice of one rule."""

HIGH_LR = 0.5
"""Share of the peak learning rate above which a rate is high."""

AFTER_WARMUP = 100
"""Steps after the warm-up in which trouble is blamed on it."""

SETTLING = 50
"""Steps after a reduction of the learning rate before it is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleAdvice:
    """The advice of a rule."""

    key: str
    message: str
    suggestion: str


RULES: Mapping[str, RuleAdvice] = {
    # ----------------------------------------------------------- one detector each
    "loss_spike": RuleAdvice(
        key="auto_lr_reduction",
        message="The loss or the gradient norm jumped far above its recent mean.",
        suggestion="auto_lr_reduction=true halves the rate itself; otherwise lower learning_rate or max_grad_norm",
    ),
    "divergence": RuleAdvice(
        key="learning_rate",
        message="The loss is rising, by more than noise.",
        suggestion="lower learning_rate by a factor of 2 to 10 and resume from an earlier checkpoint",
    ),
    "plateau": RuleAdvice(
        key="num_epochs",
        message="The loss no longer falls and the learning rate is low already.",
        suggestion="end here (early_stop=true does so), or train on more or other data",
    ),
    "gradient_acceleration": RuleAdvice(
        key="max_grad_norm",
        message="The gradient norm rises steeply.",
        suggestion="lower max_grad_norm or learning_rate before the loss follows",
    ),
    "expert_imbalance": RuleAdvice(
        key="router_aux_loss_coef",
        message="The busiest experts get far more than their share of the tokens.",
        suggestion="raise router_aux_loss_coef",
    ),
    "expert_collapse": RuleAdvice(
        key="router_aux_loss_coef",
        message="Routing has collapsed: a few experts get most of the tokens.",
        suggestion="raise router_aux_loss_coef by a factor of 10, lower learning_rate, resume from before",
    ),
    "layer_collapse": RuleAdvice(
        key="router_aux_loss_coef",
        message="A layer sends most of its tokens to the same experts, far more than at the beginning of the run.",
        suggestion="raise router_aux_loss_coef; router_aux_loss_form=layer balances each layer by itself",
    ),
    "expert_imbalance_rises": RuleAdvice(
        key="router_aux_loss_coef",
        message="The busiest experts' share of the tokens has risen for 100 steps.",
        suggestion="raise router_aux_loss_coef before routing collapses",
    ),
    "experts_underused": RuleAdvice(
        key="router_aux_loss_coef",
        message="Many experts get no token.",
        suggestion="raise router_aux_loss_coef, or use larger batches",
    ),
    "experts_idle": RuleAdvice(
        key="router_aux_loss_coef",
        message="Most of the experts that should work get no token.",
        suggestion="raise router_aux_loss_coef by a factor of 10, resume from before",
    ),
    "routing_narrows": RuleAdvice(
        key="router_aux_loss_coef",
        message="Tokens go to fewer experts than at the beginning of the run: the entropy of their loads fell.",
        suggestion="raise router_aux_loss_coef, or lower learning_rate",
    ),
    "aux_loss_spike": RuleAdvice(
        key="router_z_loss_coef",
        message="The router's auxiliary loss jumped.",
        suggestion="raise router_z_loss_coef, or lower learning_rate",
    ),
    "scales_overrun": RuleAdvice(
        key="recipe.margin",
        message="Values grow faster than their delayed scales: more than a fifth of the scaled tensors were cut off.",
        suggestion="recipe.margin=1 leaves room for twice the values; or lower learning_rate, or lengthen the warm-up",
    ),
    # ----------------------------------------------------------- reinforcement learning
    "entropy_collapse": RuleAdvice(
        key="learning_rate",
        message="Entropy has collapsed: the model samples nearly the same completion again, and the reward stays low.",
        suggestion="resume from before with a lower learning_rate, a larger epsilon_high, or beta above 0",
    ),
    "length_explosion": RuleAdvice(
        key="truncated_completions",
        message="Completions are twice as long as at the beginning, and the reward has not risen.",
        suggestion="truncated_completions=penalty, a smaller max_completion_length, or a reward that counts tokens",
    ),
    "no_signal": RuleAdvice(
        key="environment",
        message="Most groups have equal rewards, so they teach nothing.",
        suggestion="easier problems, a short fine-tuning on the format before, more num_generations, a finer reward",
    ),
    "problems_too_easy": RuleAdvice(
        key="environment",
        message="Most groups have equal rewards because the model solves the problems.",
        suggestion="end here, or take harder problems",
    ),
    "completions_truncated": RuleAdvice(
        key="max_completion_length",
        message="Many completions reach max_completion_length before they end.",
        suggestion="raise max_completion_length, ask for short answers, or truncated_completions=penalty",
    ),
    "environment_faults": RuleAdvice(
        key="environment_timeout",
        message="Many completions get no reward because the environment fails.",
        suggestion="see the reasons in `faults`; `surogate env check` finds the task; raise environment_timeout if it "
        "is slow",
    ),
    "logprob_gap": RuleAdvice(
        key="rollout",
        message="Rollout engine and trainer disagree about the probabilities of sampled tokens.",
        suggestion="make sure that the server has the trainer's weights and precision; rollout=native has both",
    ),
    "clipped_tokens": RuleAdvice(
        key="learning_rate",
        message="Many tokens are clipped, so the policy moves too far in one step.",
        suggestion="lower learning_rate or num_iterations",
    ),
    "reward_hacking": RuleAdvice(
        key="environment",
        message="The reward rises while the held-out reward falls.",
        suggestion="read the completions in the report; go back to the checkpoint of the best held-out reward, take "
        "more problems, or set beta above 0",
    ),
    # ----------------------------------------------------------- several together
    "plateau_high_lr": RuleAdvice(
        key="learning_rate",
        message="The loss no longer falls and the learning rate is still high.",
        suggestion="lower learning_rate, or let it decay sooner (lr_scheduler_type, fewer steps)",
    ),
    "divergence_with_routing_collapse": RuleAdvice(
        key="router_aux_loss_coef",
        message="The loss is rising and routing has collapsed.",
        suggestion="raise router_aux_loss_coef and lower learning_rate; resume from before the collapse",
    ),
    "vanishing_gradients": RuleAdvice(
        key="learning_rate",
        message="Gradients are below 1 % of what they were and the loss is still high.",
        suggestion="start anew with a lower learning_rate; torch_dtype=float32 shows whether they underflow",
    ),
    "loss_spike_with_low_utilization": RuleAdvice(
        key="router_aux_loss_coef",
        message="The loss jumped while many experts got no token.",
        suggestion="raise router_aux_loss_coef before touching learning_rate",
    ),
    "lr_reductions_not_helping": RuleAdvice(
        key="datasets",
        message="The learning rate was reduced repeatedly and the loss is no lower than before.",
        suggestion="look at the rows of these steps; if they are right, resume from before with a lower learning_rate",
    ),
    "warmup_too_short": RuleAdvice(
        key="warmup_steps",
        message="The run became unstable right after its warm-up.",
        suggestion="raise warmup_steps",
    ),
}
"""Rule → its advice; the last six rules are the advisor's."""

FROZEN_ROUTER = (
    "the router is frozen, so other data or the adapters before it caused this and router_aux_loss_coef cannot help: "
    "look at the rows of these steps, lower learning_rate, or let the router learn (train_router=true)"
)
"""Suggestion of the rules about routing if the router is not trained; their key is then `datasets`."""

ROUTER_KEYS = frozenset({"router_aux_loss_coef", "router_z_loss_coef"})
"""Keys that act on a trained router only."""


def for_frozen_router(advice: events.Advice) -> events.Advice:
    """The advice for a run that does not train its router."""
    return replace(advice, key="datasets", suggestion=FROZEN_ROUTER) if advice.key in ROUTER_KEYS else advice


NATIVE_GAP = (
    "the rollout engine has the trainer's weights, so the two compute differently: torch_dtype=float32 recipe=bf16 "
    "shows whether rounding does it; if not, the model family decodes otherwise than it trains, which `surogate "
    "plugins check` finds"
)
"""Suggestion of `logprob_gap` if the engine is the trainer's own; its key is then `torch_dtype`."""


STALE_GAP = (
    "with max_staleness=1 the weights have moved since they sampled: lower learning_rate or num_iterations; "
    "max_staleness=0 shows whether a gap is left"
)
"""The same if completions are sampled with weights of a generation before; its key is then `max_staleness`."""


def for_engine(advice: events.Advice, *, own: bool, stale: bool) -> events.Advice:
    """The advice for a run. `own`: it samples with its own engine. `stale`: with weights of a generation before."""
    if advice.rule != "logprob_gap" or not (own or stale):
        return advice
    key, suggestion = ("max_staleness", STALE_GAP) if stale else ("torch_dtype", NATIVE_GAP)
    return replace(advice, key=key, suggestion=suggestion)


@dataclass(slots=True)
class Advisor(Detector):
    """Gives each rule's advice, at most once in `COOLDOWN` steps."""

    told: dict[str, int] = field(default_factory=dict)
    """Rule → the step of its last advice."""

    def tell(self, step: int, rule: str, evidence: Mapping[str, Any], *, suggestion: str = "") -> list[events.Advice]:
        """The rule's advice; None during its cooldown."""
        if rule in self.told and step - self.told[rule] < COOLDOWN:
            return []
        self.told = {**self.told, rule: step}
        text = RULES[rule]
        return [
            events.Advice(
                step=step,
                rule=rule,
                message=text.message,
                key=text.key,
                suggestion=suggestion or text.suggestion,
                evidence=dict(evidence),
            )
        ]
