"""The router's losses against transformers and against their definitions: gradients, accumulation, recomputing.

Shape suffixes: T tokens of documents, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from surogate_model_qwen3_moe.model import build
from surogate_model_qwen3_moe.presets import PRESETS
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from surogate_core.plugin import MicroBatch
from surogate_core.service.model import Form, RouterLosses
from surogate_testing import tiny
from surogate_testing.parity import TINY, TOLERANCE, ModelPair

EXPERTS, CHOICES = 6, 2
SETTINGS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "num_experts": EXPERTS,
    "num_experts_per_tok": CHOICES,
    "head_dim": 16,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
    "output_router_logits": True,
    "architectures": ["Qwen3MoeForCausalLM"],
}
TOKENS = 32
AUX, Z = 0.5, 0.1


def pair() -> ModelPair:
    return ModelPair.of(Qwen3MoeForCausalLM, Qwen3MoeConfig(**{**TINY, **SETTINGS}), build)


def micro_batches(count: int) -> list[list[list[int]]]:
    """Documents of each micro-batch, which is not full, and not equally full."""
    return [tiny.documents((13, 9 - number, 7), seed=number) for number in range(count)]


def packed(found: Sequence[Sequence[Sequence[int]]]) -> list[MicroBatch]:
    return [tiny.batch(documents, tokens=TOKENS) for documents in found]


def forward(reference: Any, documents: Sequence[Sequence[int]]) -> tuple[list[Tensor], list[Tensor]]:
    """(losses of tokens by document, logits [T, E] of each router) of documents one by one."""
    losses, routers = [], []
    for document in documents:
        ids = torch.tensor([document])
        out = reference(input_ids=ids, output_router_logits=True)
        losses.append(torch.nn.functional.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="none"))
        routers.append(out.router_logits)
    return losses, [torch.cat(layers) for layers in zip(*routers, strict=True)]


def per_layer(logits_TE: Tensor) -> Tensor:
    """The loss of one layer: 1 if loads are even."""
    chosen = torch.topk(logits_TE, CHOICES, dim=-1).indices.flatten()
    share_E = torch.bincount(chosen, minlength=EXPERTS) / len(chosen)
    return EXPERTS * (share_E * torch.softmax(logits_TE, -1).mean(0)).sum()


def router_losses(routers: Sequence[Tensor], form: Form) -> Tensor:
    """Both losses with their coefficients, over the tokens of one forward."""
    squares = torch.stack([torch.logsumexp(layer, -1).square().mean() for layer in routers])
    if form == "layer":
        return AUX * torch.stack([per_layer(layer) for layer in routers]).sum() + Z * squares.sum()
    aux = load_balancing_loss_func(tuple(routers), EXPERTS, CHOICES)
    return AUX * aux + Z * squares.mean()


def expected(
    found: ModelPair, batches: Sequence[Sequence[Sequence[int]]], form: Form
) -> tuple[dict[str, Tensor], Tensor]:
    """(gradients by name, the router's losses) of a step in transformers."""
    parts = [forward(found.reference, documents) for documents in batches]
    loss = torch.cat([torch.cat(losses) for losses, _ in parts]).mean()
    if form == "step":
        extra = router_losses([torch.cat(layers) for layers in zip(*(r for _, r in parts), strict=True)], form)
    else:
        extra = torch.stack([router_losses(routers, form) for _, routers in parts]).mean()
    (loss + extra).backward()
    grads = {name: p.grad for name, p in found.reference.named_parameters()}
    return tiny.in_files(grads, build(found.reference.config.to_dict())), extra.detach()


@pytest.mark.slow_cases("step-4-recomputed", "layer-1-kept", "micro_batch-1-recomputed", "micro_batch-4-kept")
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("form", ["step", "micro_batch", "layer"])
def test_gradients_with_the_losses_of_the_router(form: Form, count: int, recompute: bool) -> None:
    found, documents = pair(), micro_batches(count)
    gradients, losses = expected(found, documents, form)
    made = found.engine(tokens=TOKENS, recompute=recompute, router_losses=RouterLosses(aux=AUX, z=Z, form=form))
    error, name = tiny.worst(tiny.gradients(made, packed(documents)), gradients)
    assert error <= TOLERANCE, name
    sides = made.train_step(packed(documents), step=0, lr=0.0).sides()
    terms = [float(total) for role, total in sides.values() if role in ("router_aux_loss", "router_z_loss")]
    assert sum(terms) == pytest.approx(float(losses), rel=TOLERANCE)
    without = tiny.gradients(found.engine(tokens=TOKENS), packed(documents))
    assert tiny.worst(without, gradients)[0] > 100 * TOLERANCE, "the losses must matter"


@pytest.mark.slow
def test_a_small_coefficient_is_not_rounded_away_in_bf16() -> None:
    """Its gradient has the size of that in fp32, though it is small beside the router's other gradient."""
    config = {**PRESETS["tiny"], "num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 32}
    batch = tiny.batch(tiny.documents((1000,), vocabulary=1000), tokens=1024)

    def added(dtype: torch.dtype) -> Tensor:
        settings: dict[str, Any] = {
            "build": build,
            "dtype": dtype,
            "tokens": 1024,
            "source": tiny.random_source(std=0.05),
        }
        made = (tiny.engine(config, router_losses=RouterLosses(aux=aux), **settings) for aux in (0.001, 0.0))
        with_loss, without = (tiny.gradients(one, [batch])["model.layers.0.mlp.gate.weight"] for one in made)
        assert 0 < (with_loss - without).norm() < 0.1 * without.norm()
        return with_loss - without

    expected, found = added(torch.float32), added(torch.bfloat16)
    assert float((found * expected).sum() / expected.square().sum()) == pytest.approx(1, abs=0.04)
