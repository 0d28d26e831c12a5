"""A model with experts in the engine: against transformers' Qwen3-MoE, with adapters, and by its names in files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from surogate_core.dsl import (
    Block,
    Dim,
    Embedding,
    Experts,
    Linear,
    LMHead,
    Model,
    Param,
    Routes,
    Setting,
    Stack,
    project,
)
from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.experts import EXPERT, expanded
from surogate_core.dsl.rope import Rope
from surogate_core.dsl.trace import Compiler, Recompute, Signature, _split, trace_joint
from surogate_core.kernels import ops
from surogate_core.kernels.experts import combine, grouped_linears, route
from surogate_core.testing import tiny
from surogate_core.train.flops import Work

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 3,
    "mlp_only_layers": [1],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
}
D, H, K, F = Dim("hidden_size"), Dim("num_attention_heads"), Dim("num_key_value_heads"), Dim("intermediate_size")
A, I = Dim("head_dim"), Dim("moe_intermediate_size")  # noqa: E741
E, CHOICES = Dim("num_experts"), Dim("num_experts_per_tok")
EPS = Setting("rms_norm_eps", default=1e-6)
NAMES = ("gate_proj", "up_proj", "down_proj")


class Attending(Block):
    """Attention, and a dense feed-forward."""

    heads, kv_heads, head_dim, eps = H, K, A, EPS
    input_norm = Param("input_layernorm.weight", D)
    q_norm = Param("self_attn.q_norm.weight", A)
    k_norm = Param("self_attn.k_norm.weight", A)
    post_norm = Param("post_attention_layernorm.weight", D)
    q = Linear("self_attn.q_proj", D, H * A, region="qkv")
    k = Linear("self_attn.k_proj", D, K * A, region="qkv")
    v = Linear("self_attn.v_proj", D, K * A, region="qkv")
    o = Linear("self_attn.o_proj", H * A, D, region="att")

    def attend(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        h = ops.rms_norm(x, self.input_norm, self.eps)
        q = self.q(h).view(-1, self.heads, self.head_dim)
        k = self.k(h).view(-1, self.kv_heads, self.head_dim)
        v = self.v(h).view(-1, self.kv_heads, self.head_dim)
        q, k, v = ops.norm_rope(q, k, v, self.q_norm, self.k_norm, self.eps, tables["cos"], tables["sin"])
        found = ops.attention(q, k, v, tables["cu_seqlens"], self.max_seqlen, self.head_dim**-0.5)
        return x + self.o(found.flatten(1))


class Dense(Attending):
    gate = Linear("mlp.gate_proj", D, F, region="ffn")
    up = Linear("mlp.up_proj", D, F, region="ffn")
    down = Linear("mlp.down_proj", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        x = self.attend(x, tables)
        h = ops.rms_norm(x, self.post_norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Sparse(Attending):
    choices, renormalise = CHOICES, Setting("norm_topk_prob", default=False)
    router = Param("mlp.gate.weight", E, D, init="normal", role="weight")
    gate = Experts("mlp.experts.{e}.gate_proj", E, CHOICES, D, I, region="ffn")
    up = Experts("mlp.experts.{e}.up_proj", E, CHOICES, D, I, region="ffn")
    down = Experts("mlp.experts.{e}.down_proj", E, CHOICES, I, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        x = self.attend(x, tables)
        h = ops.rms_norm(x, self.post_norm, self.eps)
        routes = Routes.of(h @ self.router.t(), self.choices, renormalise=self.renormalise)
        gate, up = project(h, routes, self.gate, self.up)
        (y,) = project(ops.swiglu(gate, up), routes, self.down, gathered=True)
        return x + routes.combine(y)


class Mixture(Model):
    architecture = "Qwen3MoeForCausalLM"
    embed = Embedding("model.embed_tokens.weight", Dim("vocab_size"), D)
    layers = Stack(Sparse, Dim("num_hidden_layers"), "model.layers.{i}.")
    head = LMHead("lm_head.weight", "model.norm.weight", EPS, tied=Setting("tie_word_embeddings", default=False))

    def tables(self, positions_N: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
        return Rope(self.config, A.size(self.config)).tables(positions_N)

    def blocks(self, max_seqlen: int) -> Iterator[tuple[str, Block]]:
        dense = self.config.get("mlp_only_layers", [])
        kinds = {kind: kind(self.config, max_seqlen) for kind in (Dense, Sparse)}
        for i in range(int(self.config["num_hidden_layers"])):
            yield f"model.layers.{i}.", kinds[Dense if i in dense else Sparse]


def in_files(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """transformers' tensors by their names in files, where each expert has its own."""
    found = {}
    for name, value in state.items():
        if name.endswith("mlp.experts.gate_up_proj"):
            for e, both in enumerate(value):
                for which, part in zip(NAMES, both.chunk(2), strict=False):
                    found[name.replace("gate_up_proj", f"{e}.{which}.weight")] = part
        elif name.endswith("mlp.experts.down_proj"):
            found |= {name.replace("down_proj", f"{e}.down_proj.weight"): part for e, part in enumerate(value)}
        else:
            found[name] = value
    return found


def stacked(name: str, files: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the model from those in files."""
    if EXPERT not in name:
        return files[name]
    count = CONFIG["num_experts"]
    return torch.stack([files[name.replace(EXPERT, str(e))] for e in range(count)])


def reference(config: Mapping[str, Any]) -> Any:
    torch.manual_seed(0)
    given = {key: value for key, value in config.items() if value is not None}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**given, attn_implementation="eager")).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.1 if parameter.ndim > 1 else 0.3))
    return model


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("renormalise", [True, False])
def test_logits_and_every_gradient_are_those_of_transformers(renormalise: bool, recompute: bool) -> None:
    config = {**CONFIG, "norm_topk_prob": renormalise}
    model = reference(config)
    files = in_files({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
    documents = tiny.documents()
    losses, logits = [], []
    for document in documents:
        ids = torch.tensor([document])
        found = model(input_ids=ids).logits[0]
        logits.append(found.detach())
        losses.append(torch.nn.functional.cross_entropy(found[:-1], ids[0, 1:], reduction="none"))
    torch.cat(losses).mean().backward()
    expected = in_files({n: p.grad for n, p in model.named_parameters()})
    full = {**model.config.to_dict(), **config}
    made = tiny.engine(full, build=Mixture, source=lambda spec: stacked(spec.hf_name, files), recompute=recompute)
    packed = tiny.batch(documents)
    assert tiny.relative_error(made.logits(packed)[: sum(map(len, documents))], torch.cat(logits)) < 1e-5
    made.accumulate([packed])
    for name, gradient in made.parameters.gradients_by_name().items():
        assert tiny.relative_error(gradient, stacked(name, expected)) < 1e-5, name


def rope(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "rope_theta": 10000.0, "max_position_embeddings": 64}


def test_a_model_is_written_under_the_names_of_its_experts() -> None:
    made = tiny.engine(rope(CONFIG), build=Mixture)
    tiny.train(made, 1)
    written = dict(made.parameters.base_tensors())
    assert set(written) == set(in_files(reference(CONFIG).state_dict()))
    again = tiny.engine(rope(CONFIG), build=Mixture, source=lambda spec: stacked(spec.hf_name, written))
    packed = tiny.batch(tiny.documents())
    assert torch.equal(again.logits(packed), made.logits(packed))


def test_each_expert_has_an_adapter_of_two_matrices_which_folds_into_its_weight() -> None:
    """So that PEFT, vLLM and SGLang read it, and a merge needs to know nothing of experts."""
    made = tiny.engine(rope(CONFIG), build=Mixture, lora=tiny.lora(rank=4, scale=2.0), optimizer=tiny.ADAMW)
    before = {name: value.clone() for name, value in made.parameters.base_tensors()}
    losses = tiny.train(made, 4, same=True)
    assert losses[-1] < losses[0]
    adapters = dict(made.parameters.adapter_tensors())
    name = "model.layers.2.mlp.experts.5.down_proj"
    assert adapters[f"{name}.lora_A.weight"].shape == (4, CONFIG["moe_intermediate_size"])
    assert adapters[f"{name}.lora_B.weight"].shape == (CONFIG["hidden_size"], 4)
    assert not any("mlp.gate.lora" in n or EXPERT in n for n in adapters)  # the router is frozen
    after = dict(made.parameters.base_tensors())
    assert all(torch.equal(after[n], before[n]) for n in before)
    merged = dict(before)
    for module in {n.rsplit(".lora_", 1)[0] for n in adapters}:
        a, b = (adapters[f"{module}.lora_{side}.weight"] for side in "AB")
        merged[f"{module}.weight"] = before[f"{module}.weight"] + 2.0 * b @ a
    plain = tiny.engine(rope(CONFIG), build=Mixture, source=lambda spec: stacked(spec.hf_name, merged))
    packed = tiny.batch(tiny.documents())
    torch.testing.assert_close(plain.logits(packed), made.logits(packed), rtol=1e-4, atol=1e-5)


def test_recomputing_changes_no_bit() -> None:
    def trained(*, recompute: bool) -> dict[str, Tensor]:
        made = tiny.engine(rope(CONFIG), build=Mixture, recompute=recompute, optimizer=tiny.ADAMW)
        tiny.train(made, 3)
        return tiny.snapshot(made)

    tiny.ensure_same_bits(trained(recompute=True), trained(recompute=False), "recomputed")


def test_a_training_with_experts_resumes() -> None:
    tiny.ensure_resumes(lambda: tiny.engine(rope(CONFIG), build=Mixture, optimizer=tiny.ADAMW))


def test_only_the_chosen_experts_count_as_work() -> None:
    def products(choices: int) -> float:
        config = {**rope(CONFIG), "num_experts_per_tok": choices, "mlp_only_layers": []}
        return Work.of(Mixture(config), frozen=False).products_per_token

    one = 3 * CONFIG["hidden_size"] * CONFIG["moe_intermediate_size"] * CONFIG["num_hidden_layers"]
    assert products(3) - products(2) == 6 * one


def test_names_in_files() -> None:
    assert expanded("a.{e}.b.weight", (2, 3, 4)) == {"a.0.b.weight": (3, 4), "a.1.b.weight": (3, 4)}
    assert expanded("a.weight", (3, 4)) == {"a.weight": (3, 4)}


def test_adapters_start_at_the_scale_of_their_own_inputs() -> None:
    made = tiny.engine(rope(CONFIG), build=Mixture, lora=tiny.lora())
    spec: TensorSpec = made.parameters.specs["model.layers.0.mlp.experts.{e}.down_proj.lora_A.weight"]
    assert spec.shape == (6, 4, 24)


SORTS = {torch.ops.aten.sort.stable, torch.ops.aten.sort.default, torch.ops.aten.topk.default}


@pytest.mark.parametrize("compiler", ["fx", "inductor"])
@pytest.mark.parametrize(
    "recompute",
    [Recompute(block=True), Recompute(block=False, regions=frozenset({"ffn"})), Recompute(block=False, budget=0.3)],
    ids=["block", "ffn", "budget"],
)
def test_a_backward_never_chooses_experts_again(recompute: Recompute, compiler: Compiler) -> None:
    """Fused otherwise, a router may round otherwise, and a token near a tie would get another expert's gradient."""

    def layer(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
        weights, _, order, slot, ends = route(x @ router.t(), 2, True)
        (h,) = grouped_linears(x, order, slot, ends, None, [None], up)
        (y,) = grouped_linears(torch.relu(h), None, None, ends, None, [None], down)
        return combine(y, order, slot, weights)

    shapes = ((16, 8), (4, 8), (4, 12, 8), (4, 8, 12))
    inputs = [Signature(shape, torch.float32, torch.device("cpu"), True) for shape in shapes]
    joint = trace_joint(layer, inputs)
    assert any(node.target in SORTS for node in joint.graph.nodes)
    _, backward, kept = _split(joint, recompute, compiler)
    assert not [node for node in backward.graph.nodes if node.target in SORTS]
    assert sum(n.meta["val"].dtype == torch.int32 for n in kept) >= 3
