"""The losses of a model's routers: from the configuration and the model's own to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surogate_core.config import sharing
from surogate_core.config.schema import RunConfig
from surogate_core.dsl import Model
from surogate_core.dsl.sides import Role, RouterLosses
from surogate_core.errors import ConfigError, Problem, UserError

KEYS: Mapping[str, tuple[Role, float]] = {
    "router_aux_loss_coef": ("router_probability", 0.001),
    "router_z_loss_coef": ("router_z", 0.0),
}
"""Coefficient → the side output that its loss is made of, and transformers' default in ``config.json``."""
SWITCH = "output_router_logits"
"""Key of ``config.json``: whether transformers adds the router's losses to the loss."""


def router_losses(config: RunConfig, model: Model) -> RouterLosses:
    """The coefficients of the losses that are part of the loss.

    Raises `ConfigError` if a coefficient is set and no router is trained, and `UserError` if the model's own is no
    number.
    """
    problems, found = [], {}
    for key, (role, _) in KEYS.items():
        given: float | None = getattr(config, key)
        found[key] = given if given is not None else _own(config, model, key)
        if given and (problem := _refused(config, model, key, role)):
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return RouterLosses(
        aux=found["router_aux_loss_coef"], z=found["router_z_loss_coef"], form=config.router_aux_loss_form
    )


def _refused(config: RunConfig, model: Model, key: str, role: Role) -> Problem | None:
    if not _reports(model, role):
        return Problem(key=key, message="is set, and the model has no router that it applies to.", fix=f"remove {key}.")
    if _frozen(config):
        message = "is set, and the routers are frozen: LoRA does not train them."
        return Problem(key=key, message=message, fix=f"train_router: true, or remove {key}.")
    return None


def _own(config: RunConfig, model: Model, key: str) -> float:
    """The model's own coefficient if transformers adds the loss, otherwise 0."""
    role, default = KEYS[key]
    if not model.config.get(SWITCH) or _frozen(config) or not _reports(model, role):
        return 0.0
    return _in_model(model, key, default)


def _in_model(model: Model, key: str, default: float) -> float:
    value: Any = model.config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 10**6:
        raise UserError(
            f"config.json: `{key}` is {value!r}, no number from 0. Fix: set the run's {key}, such as {default}."
        )
    return float(value)


def _frozen(config: RunConfig) -> bool:
    return config.lora and not config.train_router


def _reports(model: Model, role: Role) -> bool:
    """Whether a block has a side output of this role."""
    return any(spec.role == role for _, block in model.blocks(0) for spec in block.side_specs())


def _learns_nothing(model: Model) -> bool:
    """Whether the loss has no gradient with respect to the routers."""
    choices = {slot.choices for slots in model.expert_slots().values() for slot in slots}
    return choices == {1} and model.config.get("norm_topk_prob") is True


def router_notes(config: RunConfig, model: Model) -> list[str]:
    """What a run and its plan say about the losses of routers: which are part of the loss, and what they cost."""
    losses, notes = router_losses(config, model), []
    if not any(_reports(model, role) for role, _ in KEYS.values()):
        return []
    terms = [f"{key} {value:g}" for key, value in zip(KEYS, (losses.aux, losses.z), strict=True) if value]
    if terms:
        notes.append(f"Added to the loss for the routers: {', '.join(terms)}. The loss that is shown is without them.")
    if not _frozen(config) and _learns_nothing(model):
        rest = ", and its own losses alone train it" if terms else ""
        notes.append(
            f"num_experts_per_tok is 1 and norm_topk_prob true, so the expert of a token always has weight 1: "
            f"the router learns nothing from the loss{rest}."
        )
    counted = config.gradient_accumulation_steps > 1 or (config.gpus != 1 and sharing.axes(config).shard_weights)
    if losses.aux and losses.form == "step" and counted:
        notes.append(
            "router_aux_loss_form=step: every step first runs the forward of its micro-batches to count the tokens of "
            "each expert, one more forward pass. router_aux_loss_form=micro_batch does not."
        )
    for key, (role, default) in KEYS.items():
        written = model.config.get(key) is not None
        if getattr(config, key) is not None or not written or not _reports(model, role):
            continue
        if not _in_model(model, key, default):
            continue
        place = "the preset" if config.model.path is None else "config.json"
        own = f"{place} has {key} {_in_model(model, key, default):g}"
        if model.config.get(SWITCH) and _frozen(config):
            notes.append(f"{own}, which is not part of the loss: the routers are frozen.")
        elif not model.config.get(SWITCH) and not _frozen(config):
            notes.append(
                f"{own}, which is not part of the loss because {SWITCH} is false there, as in transformers. To add it, "
                f"set {key}."
            )
    return notes
