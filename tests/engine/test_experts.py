"""A model with experts in the engine: adapters, names in files, recomputing, resuming, work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from mixture import CONFIG, Mixture
from torch import Tensor

from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT
from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint
from surogate_core.engine.engine import Engine
from surogate_core.kernels.experts import combine, grouped_linears, route
from surogate_core.train.flops import ModelFlops
from surogate_testing import tiny


def engine(config: Mapping[str, Any] = CONFIG, **changes: Any) -> Engine:
    return tiny.engine(config, build=Mixture, **changes)


def test_a_model_is_written_under_the_names_of_its_experts() -> None:
    made = engine()
    tiny.train(made, 1)
    written = dict(made.parameters.base_tensors())
    assert written["layers.1.experts.5.down_proj.weight"].shape == (32, 24)
    assert not any(EXPERT in name for name in written)
    again = engine(source=tiny.tensor_source(written))
    packed = tiny.batch(tiny.documents())
    assert torch.equal(again.logits(packed), made.logits(packed))


def test_each_expert_has_an_adapter_of_two_matrices_which_folds_into_its_weight() -> None:
    """So that PEFT, vLLM and SGLang read it, and a merge needs to know nothing of experts."""
    made = engine(lora=tiny.lora(rank=4, scale=2.0), optimizer=tiny.ADAMW)
    before = {name: value.clone() for name, value in made.parameters.base_tensors()}
    losses = tiny.train(made, 4, same=True)
    assert losses[-1] < losses[0]
    adapters = dict(made.parameters.adapter_tensors())
    name = "layers.1.experts.5.down_proj"
    assert adapters[f"{name}.lora_A.weight"].shape == (4, CONFIG["intermediate_size"])
    assert adapters[f"{name}.lora_B.weight"].shape == (CONFIG["hidden_size"], 4)
    assert not any("router" in n or EXPERT in n for n in adapters)  # the router is frozen
    after = dict(made.parameters.base_tensors())
    assert all(torch.equal(after[n], before[n]) for n in before)
    merged = dict(before)
    for module in {n.rsplit(".lora_", 1)[0] for n in adapters}:
        a, b = (adapters[f"{module}.lora_{side}.weight"] for side in "AB")
        merged[f"{module}.weight"] = before[f"{module}.weight"] + 2.0 * b @ a
    plain = engine(source=tiny.tensor_source(merged))
    packed = tiny.batch(tiny.documents())
    torch.testing.assert_close(plain.logits(packed), made.logits(packed), rtol=1e-4, atol=1e-5)


ROUTER = "layers.1.router.weight"


def test_a_trained_router_has_the_gradient_of_a_full_training() -> None:
    """B is zero at first, so the adapters change nothing yet."""
    adapted = engine(lora=tiny.lora(train_router=True), source=tiny.RandomSource(seed=0, std=0.2, device=tiny.CPU))
    full = engine(source=tiny.RandomSource(seed=0, std=0.2, device=tiny.CPU))
    found, expected = (tiny.gradients(made, tiny.batches(0)) for made in (adapted, full))
    assert tiny.relative_error(found[ROUTER], expected[ROUTER]) < 1e-6
    assert all("lora_" in name for name in found if name != ROUTER)
    kept = dict(adapted.parameters.base_tensors())[ROUTER].clone()
    tiny.train(adapted, 1)
    written = dict(adapted.parameters.adapter_tensors())[ROUTER]
    assert torch.equal(written, dict(adapted.parameters.base_tensors())[ROUTER])
    assert not torch.equal(written, kept)


def test_experts_may_have_a_rank_of_their_own() -> None:
    made = engine(lora=tiny.lora(rank=4, expert_rank=3))
    shapes = {name: tensor.shape for name, tensor in made.parameters.adapter_tensors()}
    assert shapes["layers.0.up_proj.lora_A.weight"][0] == 4
    assert {shape[0] for name, shape in shapes.items() if ".experts." in name and "lora_A" in name} == {3}
    losses = tiny.train(made, 3, same=True)
    assert losses[-1] < losses[0]


def test_a_trained_router_resumes_and_recomputes_to_the_same_bits() -> None:
    lora = tiny.lora(expert_rank=2, dropout=0.1, train_router=True)
    tiny.ensure_resumes(lambda: engine(lora=lora, optimizer=tiny.ADAMW))

    def trained(*, recompute: bool) -> dict[str, Tensor]:
        made = engine(recompute=recompute, lora=lora, optimizer=tiny.ADAMW)
        tiny.train(made, 2)
        return tiny.snapshot(made)

    tiny.ensure_same_bits(trained(recompute=True), trained(recompute=False), "recomputed")


def test_recomputing_changes_no_bit() -> None:
    def trained(*, recompute: bool) -> dict[str, Tensor]:
        made = engine(recompute=recompute, optimizer=tiny.ADAMW)
        tiny.train(made, 3)
        return tiny.snapshot(made)

    tiny.ensure_same_bits(trained(recompute=True), trained(recompute=False), "recomputed")


def test_a_training_with_experts_resumes() -> None:
    tiny.ensure_resumes(lambda: engine(optimizer=tiny.ADAMW))


def test_only_the_chosen_experts_count_as_work() -> None:
    def products(choices: int) -> float:
        return ModelFlops.of(Mixture({**CONFIG, "num_experts_per_tok": choices}), frozen=False).products_per_token

    one = 3 * CONFIG["hidden_size"] * CONFIG["intermediate_size"]
    assert products(3) - products(2) == 6 * one


def test_adapters_start_at_the_scale_of_their_own_inputs() -> None:
    made = engine(lora=tiny.lora())
    spec: TensorSpec = made.parameters.specs["layers.1.experts.{e}.down_proj.lora_A.weight"]
    assert spec.shape == (6, 4, 24)
    values = engine(lora=tiny.lora(), source=tiny.RandomSource(seed=0, std=0.02, device=tiny.CPU))
    bound = 24**-0.5
    largest = max(
        t.abs().max() for n, t in values.parameters.adapter_tensors() if "down_proj.lora_A" in n and "1.e" in n
    )
    assert 0.9 * bound < largest <= bound


SORTS = {torch.ops.aten.sort.stable, torch.ops.aten.sort.default, torch.ops.aten.topk.default}


SHAPES = ((16, 8), (4, 8), (4, 12, 8), (4, 8, 12))


def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    weights, _, order, slot, ends = route(x @ router.t(), 2, True)
    (h,) = grouped_linears(x, order, slot, ends, None, [None], None, up)
    (y,) = grouped_linears(torch.relu(h), None, None, ends, None, [None], None, down)
    return combine(y, order, slot, weights)


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize("budget", [1.0, 0.6])
def test_a_layer_keeps_no_view_of_its_weights(budget: float, compiler: Compiler) -> None:
    """The backward reads the transposes of weights. They may be in a workspace that other layers use in between, and
    they would count as memory.
    """
    signatures = [
        Signature(shape, torch.float32, torch.device("cpu"), number == 0) for number, shape in enumerate(SHAPES)
    ]
    forward, backward, kept = _split(trace_joint(layer, signatures), Recompute(block=False, budget=budget), compiler)
    assert not any(tuple(n.meta["val"].shape) in ((4, 8, 12), (4, 12, 8)) for n in kept)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in SHAPES]
    x = values[0].clone().requires_grad_()
    y = layer(x, *values[1:])
    dy = torch.randn(y.shape, generator=generator)
    y.backward(dy)
    forward.recompile()
    given = {n.name: v for n, v in zip(forward.graph.find_nodes(op="placeholder"), values, strict=True)}
    found, *rest = forward(*values)
    given |= dict(zip((n.name for n in kept), rest, strict=True))
    taken = [n.name for n in backward.graph.find_nodes(op="placeholder")]
    (dx,) = [t for t in backward(*(given.get(name, dy) for name in taken)) if t is not None]
    torch.testing.assert_close(found, y.detach())
    torch.testing.assert_close(dx, x.grad)


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize(
    "recompute",
    [Recompute(block=True), Recompute(block=False, regions=frozenset({"ffn"})), Recompute(block=False, budget=0.3)],
    ids=["block", "ffn", "budget"],
)
def test_a_backward_never_chooses_experts_again(recompute: Recompute, compiler: Compiler) -> None:
    """Fused otherwise, a router may round otherwise, and a token near a tie would get another expert's gradient."""
    inputs = [Signature(shape, torch.float32, torch.device("cpu"), True) for shape in SHAPES]
    joint = trace_joint(layer, inputs)
    assert any(node.target in SORTS for node in joint.graph.nodes)
    _, backward, kept = _split(joint, recompute, compiler)
    assert not [node for node in backward.graph.nodes if node.target in SORTS]
    assert sum(n.meta["val"].dtype == torch.int32 for n in kept) >= 3


def test_a_trained_router_beside_adapters_of_another_dtype() -> None:
    """Adapters are computed in fp32 and the router in the model's dtype, from one flat group of fp32 masters."""
    made = engine(lora=tiny.lora(train_router=True), dtype=torch.bfloat16, optimizer=tiny.ADAMW)
    before = made.parameters.masters()[ROUTER].clone()
    tiny.train(made, 3, same=True)
    master, used = made.parameters.masters()[ROUTER], made.parameters.flat.compute[ROUTER]
    assert (master.dtype, used.dtype) == (torch.float32, torch.bfloat16)
    assert not torch.equal(master, before)
    assert torch.equal(used, master.bfloat16())
