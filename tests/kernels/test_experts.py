"""The ops of a mixture of experts against textbook definitions in float64, and the edges of routing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import NemotronHConfig
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHTopkRouter

from surogate_core.dsl.experts import Routes
from surogate_core.kernels.experts import ExpertAdapter, combine, grouped_linears, route, sort_by_expert
from surogate_core.kernels.registry import references

TOKENS, EXPERTS, CHOICES, WIDTH, INNER, RANK = 13, 6, 3, 8, 10, 4


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor, *, renormalise: bool, choices: int = CHOICES) -> Tensor:
    """A layer of relu experts by the ops."""
    weights, _, order, slot, ends = route(x @ router.t(), choices, renormalise)
    (h,) = grouped_linears(x, order, slot, ends, None, [None], None, up)
    (y,) = grouped_linears(torch.relu(h), None, None, ends, None, [None], None, down)
    return combine(y, order, slot, weights)


def textbook(
    x: Tensor, router: Tensor, up: Tensor, down: Tensor, *, renormalise: bool, choices: int = CHOICES
) -> Tensor:
    """The same, token by token."""
    rows = []
    for token in x:
        probabilities = torch.softmax(router @ token, dim=0)
        chosen = sorted(range(EXPERTS), key=lambda e: (-float(probabilities.detach()[e]), e))[:choices]
        total = sum(probabilities[e] for e in chosen) if renormalise else 1.0
        rows.append(sum(probabilities[e] / total * (down[e] @ torch.relu(up[e] @ token)) for e in chosen))
    return torch.stack(rows)


@pytest.mark.parametrize("choices", [1, CHOICES, EXPERTS])
@pytest.mark.parametrize("renormalise", [True, False])
def test_a_layer_and_its_gradients_are_those_of_the_definition(renormalise: bool, choices: int) -> None:
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    mine, theirs = ([draw(*shape, seed=i) for i, shape in enumerate(shapes)] for _ in range(2))
    how = {"renormalise": renormalise, "choices": choices}
    found, expected = layer(*mine, **how), textbook(*theirs, **how)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = draw(TOKENS, WIDTH, seed=9).detach()
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-10, atol=1e-12)


def test_biases_of_experts_and_their_gradients() -> None:
    """A bias is added to sorted rows or to the sum of a token's experts; an expert without tokens has no gradient."""
    logits = draw(TOKENS, EXPERTS, seed=1).detach()
    logits[:, 2] -= 100
    routes = Routes.of(logits.requires_grad_(), CHOICES, renormalise=True)
    x, bias, textbook_bias = draw(TOKENS, WIDTH), draw(EXPERTS, WIDTH, seed=2), draw(EXPERTS, WIDTH, seed=2)
    rows = x[(routes.order_R // CHOICES).long()]
    found = routes.combine(routes.biased(rows, bias))
    chosen = textbook_bias[routes.experts_NK.long()]
    expected = ((x[:, None] + chosen) * routes.weights_NK[..., None]).sum(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(x + routes.combined_bias(bias), expected, rtol=1e-12, atol=1e-12)
    weight = draw(TOKENS, WIDTH, seed=9).detach()
    (found * weight).sum().backward(retain_graph=True)
    (expected * weight).sum().backward(retain_graph=True)
    torch.testing.assert_close(bias.grad, textbook_bias.grad, rtol=1e-12, atol=1e-12)
    assert bias.grad is not None
    assert not bias.grad[2].any()
    bias.grad = None
    (routes.combined_bias(bias) * weight).sum().backward()
    torch.testing.assert_close(bias.grad, textbook_bias.grad, rtol=1e-12, atol=1e-12)


def test_factors_of_experts_and_their_gradients() -> None:
    logits = draw(TOKENS, EXPERTS, seed=1)
    routes = Routes.of(logits, CHOICES, renormalise=False)
    mine, theirs = draw(EXPERTS, seed=3), draw(EXPERTS, seed=3)
    found, expected = routes.scaled(mine).weights_NK, routes.weights_NK * theirs[routes.experts_NK.long()]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weight = draw(TOKENS, CHOICES, seed=9).detach()
    gradients = [
        torch.autograd.grad((y * weight).sum(), (logits, s), retain_graph=True)
        for y, s in ((found, mine), (expected, theirs))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_adapters_are_in_the_sum_and_get_their_gradients() -> None:
    x, logits = draw(TOKENS, WIDTH), draw(TOKENS, EXPERTS, seed=1).detach()
    weights = [draw(EXPERTS, INNER, WIDTH, seed=i).detach() for i in (2, 3)]
    a, b = draw(EXPERTS, RANK, WIDTH, seed=4), draw(EXPERTS, INNER, RANK, seed=5)
    adapter = ExpertAdapter(rank=RANK, scale=2.0, dropout=0.0, salt=0)
    _, experts, order, slot, ends = route(logits, CHOICES, True)
    both = (weights[0], weights[1], a, b)
    plain, adapted = grouped_linears(x, order, slot, ends, None, [None, adapter], None, *both)
    (again,) = grouped_linears(x, order, slot, ends, None, [None], None, weights[0])
    assert torch.equal(plain, again)
    merged = weights[1] + 2.0 * b @ a
    for row, source in enumerate(order.tolist()):
        expert = int(experts.flatten()[source])
        torch.testing.assert_close(adapted[row], merged[expert] @ x[source // CHOICES], rtol=1e-12, atol=1e-12)
    (expected,) = grouped_linears(x.detach(), order, slot, ends, None, [None], None, merged)
    scale = draw(*adapted.shape, seed=6).detach()
    grads = torch.autograd.grad((adapted * scale).sum(), [a, b])
    wanted = torch.autograd.grad((expected * scale).sum(), [a, b])
    for found, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(found, other, rtol=1e-10, atol=1e-12)


def test_dropout_of_adapters_depends_on_seed_and_salt_alone() -> None:
    x, logits = draw(TOKENS, WIDTH).detach(), draw(TOKENS, EXPERTS, seed=1).detach()
    tensors = [draw(EXPERTS, INNER, WIDTH, seed=2), draw(EXPERTS, RANK, WIDTH, seed=3), draw(EXPERTS, INNER, RANK)]
    _, _, order, slot, ends = route(logits, CHOICES, True)

    def run(seed: int | None, salt: int) -> Tensor:
        adapter = ExpertAdapter(rank=RANK, scale=1.0, dropout=0.5, salt=salt)
        given = None if seed is None else torch.tensor(seed, dtype=torch.int32)
        return grouped_linears(x, order, slot, ends, given, [adapter], None, *tensors)[0].detach()

    assert torch.equal(run(3, 1), run(3, 1))
    assert not torch.equal(run(3, 1), run(4, 1))
    assert not torch.equal(run(3, 1), run(3, 2))
    assert not torch.equal(run(None, 1), run(3, 1))


def test_of_equal_probabilities_the_lowest_expert_wins() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    _, experts, *_ = route(logits, 2, True)
    assert experts.tolist() == [[1, 2], [0, 1]]


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (3, 1), (3, 2), (2, 2)])
def test_sigmoids_with_a_correction_in_groups(groups: int, chosen: int, renormalise: bool) -> None:
    """The router of Nemotron-H, which is DeepSeek-V3's, with its gradient."""
    config = NemotronHConfig(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        n_group=groups,
        topk_group=chosen,
        norm_topk_prob=renormalise,
        routed_scaling_factor=2.5,
    )
    theirs = NemotronHTopkRouter(config)
    x, theirs.weight.data = draw(TOKENS, WIDTH, dtype=torch.float32), draw(EXPERTS, WIDTH, seed=1).float().detach()
    theirs.e_score_correction_bias.copy_(draw(EXPERTS, seed=2).detach())
    logits, expected, chosen_NK = theirs(x)
    mine = logits.detach().double().requires_grad_()
    correction = theirs.e_score_correction_bias
    how = {"sigmoid": True, "correction_E": correction, "groups": groups, "group_choices": chosen, "scale": 2.5}
    weights, experts, *_ = references["route"].function(mine, 2, renormalise, **how)
    assert experts.long().sort(1).values.equal(chosen_NK.sort(1).values)
    dense, wanted = (torch.zeros(TOKENS, EXPERTS, dtype=torch.float64) for _ in range(2))
    dense, wanted = dense.scatter(1, experts.long(), weights), wanted.scatter(1, chosen_NK, expected.double())
    torch.testing.assert_close(dense, wanted, rtol=1e-6, atol=1e-7)
    factors = draw(TOKENS, EXPERTS, seed=3).detach()
    (found,) = torch.autograd.grad((dense * factors).sum(), mine)
    (gradient,) = torch.autograd.grad((wanted * factors).sum(), logits)
    torch.testing.assert_close(found, gradient.double(), rtol=1e-5, atol=1e-7)


def test_sigmoids_that_vanish_are_weighted_by_zeros() -> None:
    logits = torch.full((2, EXPERTS), -200.0).requires_grad_()
    weights, experts, *_ = route(logits, 2, True, sigmoid=True)
    assert weights.tolist() == [[0.0, 0.0]] * 2
    assert experts.tolist() == [[0, 1]] * 2
    assert torch.autograd.grad(weights.sum(), logits)[0].isfinite().all()


def test_rows_are_sorted_stably_and_no_row_is_lost() -> None:
    experts = torch.tensor([[4, 1], [1, 0], [4, 0]], dtype=torch.int32)
    order, slot, ends = sort_by_expert(experts, 6)
    assert order.tolist() == [3, 5, 1, 2, 0, 4]  # experts 0, 0, 1, 1, 4, 4
    assert ends.tolist() == [2, 4, 4, 4, 6, 6]  # 2, 3 and 5 have none
    assert [order.tolist()[i] for i in slot.flatten().tolist()] == list(range(6))
    assert {t.dtype for t in (order, slot, ends)} == {torch.int32}


@pytest.mark.parametrize("favourite", [0, EXPERTS - 1])
def test_all_rows_may_be_on_few_experts(favourite: int) -> None:
    """So that most experts have no row: neither values nor gradients are lost or become NaN."""
    router = torch.zeros(EXPERTS, WIDTH, dtype=torch.float64)
    x = draw(TOKENS, WIDTH)
    up, down = draw(EXPERTS, INNER, WIDTH, seed=1), draw(EXPERTS, WIDTH, INNER, seed=2)
    logits = x @ router.t() + 10.0 * torch.nn.functional.one_hot(torch.tensor(favourite), EXPERTS)
    weights, _, order, slot, ends = route(logits, 1, True)
    (h,) = grouped_linears(x, order, slot, ends, None, [None], None, up)
    (y,) = grouped_linears(torch.relu(h), None, None, ends, None, [None], None, down)
    out = combine(y, order, slot, weights)
    torch.testing.assert_close(out, torch.relu(x @ up[favourite].t()) @ down[favourite].t(), rtol=1e-12, atol=1e-12)
    out.sum().backward()
    assert up.grad is not None
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())
    assert all(bool(up.grad[e].any()) == (e == favourite) for e in range(EXPERTS))


def test_every_expert_of_a_token_may_be_chosen() -> None:
    logits = draw(TOKENS, EXPERTS)
    weights, experts, *_ = route(logits, EXPERTS, False)
    assert torch.equal(experts.sort(dim=1).values, torch.arange(EXPERTS).int().expand(TOKENS, -1))
    torch.testing.assert_close(weights.sum(1), torch.ones(TOKENS, dtype=torch.float64))


def test_not_a_number_in_the_router_is_seen_in_the_output() -> None:
    logits = torch.zeros(2, EXPERTS)
    logits[1, 3] = float("nan")
    weights, *_ = route(logits, 2, True)
    assert bool(weights[0].isfinite().all())
    assert bool(weights[1].isnan().all())


def test_the_ops_are_traced_with_static_shapes() -> None:
    """Routing depends on values, and no shape does: a CUDA graph can capture it."""
    shapes = ((TOKENS, WIDTH), (EXPERTS, WIDTH), (EXPERTS, INNER, WIDTH), (EXPERTS, WIDTH, INNER))
    tensors = [draw(*shape, seed=i).detach() for i, shape in enumerate(shapes)]
    traced = make_fx(lambda *t: layer(*t, renormalise=True), tracing_mode="fake")(*tensors)
    other = [draw(*shape, seed=i + 20).detach() for i, shape in enumerate(shapes)]
    assert torch.equal(traced(*other), layer(*other, renormalise=True))
