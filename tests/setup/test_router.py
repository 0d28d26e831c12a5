"""The losses of routers from the keys and the model's configuration: which are in the loss, what is said, refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from run_fixtures import QUICK, RunHere

from surogate_core.config.resolve import load_run_config
from surogate_core.dsl.sides import RouterLosses
from surogate_core.errors import ConfigError, UserError
from surogate_core.plugins.registry import Registry
from surogate_core.setup.assemble import resolve_model
from surogate_core.setup.router import router_losses, router_notes

ON = "model.config.output_router_logits=true"
FULL = ("lora=false", "model=qwen3-moe")
SMALL = (
    "model.config.hidden_size=32",
    "model.config.head_dim=16",
    "model.config.num_attention_heads=2",
    "model.config.moe_intermediate_size=16",
    "model.config.intermediate_size=32",
    "sequence_len=64",
)


@pytest.fixture
def losses(installed: Registry) -> Callable[..., tuple[RouterLosses, str]]:
    """(losses, notes) of a configuration."""

    def of(*overrides: str) -> tuple[RouterLosses, str]:
        latest = {text.partition("=")[0]: text for text in [*QUICK, *FULL, *overrides]}
        config = load_run_config([*latest.values()], registry=installed)
        model = resolve_model(config, installed).model
        return router_losses(config, model), " ".join(router_notes(config, model))

    return of


Losses = Callable[..., tuple[RouterLosses, str]]


def test_a_models_coefficient_counts_only_where_transformers_adds_it(losses: Losses) -> None:
    found, said = losses()
    assert found == RouterLosses()
    assert "the preset has router_aux_loss_coef 0.001, which is not part of the loss because output_router_log" in said
    assert losses(ON)[0] == RouterLosses(aux=0.001)
    assert losses(ON, "model.config.router_aux_loss_coef=0.5")[0] == RouterLosses(aux=0.5)
    assert losses(ON, "router_aux_loss_coef=0")[0] == RouterLosses()
    found, said = losses(ON, "lora=true")
    assert found == RouterLosses()
    assert "not part of the loss: the routers are frozen" in said
    assert losses("lora=true")[1] == "", "nothing to say of a router that nobody trains"
    absent = ("model.config.router_aux_loss_coef=null",)
    assert losses(*absent)[1] == "", "nothing to say of what is not written"
    assert losses(ON, *absent)[0] == RouterLosses(aux=0.001), "the default of transformers"


def test_a_coefficient_that_is_set_is_added_to_the_loss(losses: Losses) -> None:
    found, said = losses("router_aux_loss_coef=0.01", "router_z_loss_coef=0.001")
    assert found == RouterLosses(aux=0.01, z=0.001)
    assert "Added to the loss for the routers: router_aux_loss_coef 0.01, router_z_loss_coef 0.001." in said
    assert "one more forward pass" in said
    assert "one more forward pass" not in losses("router_aux_loss_coef=0.01", "gradient_accumulation_steps=1")[1]
    for form in ("micro_batch", "layer"):
        found, said = losses("router_aux_loss_coef=0.01", f"router_aux_loss_form={form}")
        assert found == RouterLosses(aux=0.01, form=form)  # type: ignore[arg-type]
        assert "one more forward pass" not in said
    assert losses("lora=true", "train_router=true", "router_z_loss_coef=1")[0] == RouterLosses(z=1.0)


def test_a_router_that_the_loss_cannot_teach_is_named(losses: Losses) -> None:
    one = ("model.config.num_experts_per_tok=1", "model.config.norm_topk_prob=true")
    assert "the router learns nothing from the loss." in losses(*one)[1]
    assert "learns nothing from the loss, and its own losses alone train it" in losses(*one, ON)[1]
    for teaches in (("model.config.norm_topk_prob=false",), ("model.config.num_experts_per_tok=2",), ("lora=true",)):
        assert "learns nothing" not in losses(*one, *teaches)[1]


@pytest.mark.parametrize("key", ["router_aux_loss_coef", "router_z_loss_coef"])
def test_a_coefficient_without_a_router_that_is_trained_is_refused(losses: Losses, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}.*the routers are frozen(.|\n)*train_router: true, or remove {key}"):
        losses("lora=true", f"{key}=0.01")
    with pytest.raises(ConfigError, match=rf"{key}.*has no router(.|\n)*remove {key}"):
        losses("model=qwen3", f"{key}=0.01")
    assert losses("model=qwen3", f"{key}=0") == (RouterLosses(), "")
    assert losses("lora=true", f"{key}=0")[0] == RouterLosses()


def test_a_coefficient_of_the_model_that_is_no_number_is_refused(losses: Losses) -> None:
    with pytest.raises(UserError, match=r"config.json: `router_aux_loss_coef` is 'much', no number from 0. Fix"):
        losses(ON, "model.config.router_aux_loss_coef=much")


@pytest.fixture(scope="module")
def words(data_cache: Path) -> Sequence[str]:
    keys = ("router_aux_loss_coef=0.1", "router_z_loss_coef=0.01", "learning_rate=0.01", "lr_scheduler_type=constant")
    return [*QUICK, *FULL, *SMALL, *keys, f"data_cache_dir={data_cache}"]


@pytest.mark.slow
def test_a_run_reports_both_losses_and_goes_on_with_the_same_bits(
    words: Sequence[str], run_here: RunHere, tmp_path: Path, records: Callable[..., list[dict[str, Any]]],
    digests: Callable[[Path], dict[str, str]],
) -> None:  # fmt: skip
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    assert run_here(whole, *words, "max_steps=4") == 0
    for steps in (2, 4):
        assert run_here(halves, *words, f"max_steps={steps}") == 0
    assert digests(whole / "checkpoint-4") == digests(halves / "checkpoint-4")
    for record in records(whole, "routing_stats"):
        assert record["moe_aux_loss"] == pytest.approx(0.1 * record["moe_aux_loss_raw"])
        assert record["moe_z_loss"] == pytest.approx(0.01 * record["moe_z_loss_raw"])
        assert 2 <= record["moe_aux_loss_raw"] < 8
