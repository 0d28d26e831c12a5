"""Dims, settings and declarations: what a family's class body becomes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from surogate_core.dsl import Block, Dim, Embedding, Linear, LMHead, Model, Param, Setting, Stack
from surogate_core.dsl.declare import LoRA, Multiply
from surogate_core.dsl.dims import number_of
from surogate_core.dsl.inits import constant, uniform
from surogate_core.dsl.slots import Adapter, TracedSlot
from surogate_core.engine.planning.pieces import distinct, pieces
from surogate_core.errors import PluginError, UserError

D, F, V = Dim("width"), Dim("inner"), Dim("vocab")
ADAPTER = Adapter(rank=3, scale=2.0, dropout=0.1, dtype=torch.float32)
CONFIG = {"width": 4, "inner": 6, "vocab": 10, "layers": 2, "more": 1, "bias": True, "tied": False, "eps": 1e-5}


class Base(Block):
    norm = Param("norm.weight", D)
    up = Linear("mlp.up", D, F, region="ffn", bias=Setting("bias", default=False))
    down = Linear("mlp.down", F, D, region="ffn")

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return x + self.down(self.up(x * self.norm))


class Wider(Base):
    gain = Param("gain", D * 2, init="zeros")
    out = Linear("out", D, D + F, region="att", bias=True)


class Toy(Model):
    architecture = "Toy"
    embed = Embedding("embed.weight", V, D)
    layers = (Stack(Base, Dim("layers"), "a.{i}."), Stack(Wider, Dim("more"), "b.{i}."))
    head = LMHead("head.weight", "norm.weight", Setting("eps"), tied=Setting("tied", default=False))


# ------------------------------------------------------------------------ dims, settings


def test_dims_multiply_and_add() -> None:
    assert (D * F).size(CONFIG) == 24
    assert (D + F).size(CONFIG) == 10
    assert (D * 2 + 1).size(CONFIG) == 9
    assert repr(D * F + 1) == "width·inner+1"


def test_a_missing_dim_is_named_with_a_fix() -> None:
    with pytest.raises(UserError, match=r"key `width` is missing\. Fix: "):
        (D * F).size({"inner": 6})
    with pytest.raises(UserError, match=r"key `width` is null, and must have a value\. Fix: "):
        D.size({"width": None})


def test_null_has_the_default_only_where_other_keys_give_it() -> None:
    assert Dim("head", default=lambda config: config["width"]).size({"width": 4, "head": None}) == 4
    assert Setting("window", default=4096, null=0).value({"window": None}) == 0
    assert Setting("window", default=None).value({"window": None}) is None
    for declared in (Setting("eps", default=1e-6), Dim("eps", default=8)):
        read = declared.value if isinstance(declared, Setting) else declared.size
        with pytest.raises(UserError, match=r"key `eps` is null, and must have a value\. Fix: "):
            read({"eps": None})


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True, [4]])
def test_a_dim_is_a_positive_integer(value: object) -> None:
    with pytest.raises(UserError, match="`width` must be a positive integer"):
        D.size({"width": value})


def test_defaults_are_values_or_read_other_keys() -> None:
    assert Dim("head", default=8).size({}) == 8
    assert Dim("head", default=8).size({"head": 2}) == 2
    assert Dim("head", default=lambda c: c["width"] // 2).size({"width": 6}) == 3
    assert Setting("eps", default=1e-6).value({}) == 1e-6
    with pytest.raises(UserError, match="key `eps` is missing"):
        Setting("eps").value({})


def test_a_number_is_given_read_or_computed() -> None:
    config = {"scale": 12, "width": 16}
    assert number_of(2, config, "it") == 2.0
    assert number_of(Setting("scale", default=1.0), config, "it") == 12.0
    assert number_of(lambda c: c["width"] ** 0.5, config, "it") == 4.0
    with pytest.raises(UserError, match=r"`scale` must be a finite number, not 'big'"):
        number_of(Setting("scale"), {"scale": "big"}, "it")
    with pytest.raises(UserError, match=r"the factor must be a finite number, not nan"):
        number_of(lambda c: float("nan"), config, "the factor")


# ------------------------------------------------------------------------------- models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaled_embedding_is_transformers(dtype: torch.dtype) -> None:
    class Scaled(Toy):
        embed = Embedding("embed.weight", V, D, scale=lambda config: config["width"] ** 0.5, rounded=True)

    config = {**CONFIG, "width": 6}
    weight_VD = torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).to(dtype)
    theirs = Gemma3TextScaledWordEmbedding(10, 6, 0, embed_scale=6**0.5).to(dtype)
    theirs.weight.data = weight_VD
    ids_N = torch.tensor([0, 3, 9, 3])
    kept = weight_VD.clone()
    assert torch.equal(Scaled(config).embedded(ids_N, weight_VD), theirs(ids_N))
    assert torch.equal(weight_VD, kept)
    assert torch.equal(Toy(config).embedded(ids_N, weight_VD), weight_VD[ids_N])


def test_the_head_scales_and_caps_its_logits() -> None:
    class Capped(Toy):
        head = LMHead(
            "head.weight",
            "norm.weight",
            Setting("eps"),
            tied=Setting("tied", default=False),
            offset=1.0,
            scale=lambda config: 1 / config["logits_scaling"],
            softcap=Setting("cap", default=0.0),
        )

    config = {**CONFIG, "logits_scaling": 4.0, "cap": 0.5}
    norm, weight = Capped(config).head_specs(train_base=True)
    assert (norm.init, Toy(CONFIG).head_specs(train_base=True)[0].init) == ("zeros", "ones")
    generator = torch.Generator().manual_seed(0)
    head = {s.name: torch.randn(s.shape, generator=generator) for s in (norm, weight)}
    x_ND = torch.randn(3, 4, generator=generator)
    plain = Toy(CONFIG).logits(x_ND, {**head, "norm": 1 + head["norm"]})
    torch.testing.assert_close(Capped(config).logits(x_ND, head), 0.5 * torch.tanh(plain / 4 / 0.5))
    torch.testing.assert_close(Capped({**config, "cap": None}).logits(x_ND, head), plain / 4)


# ------------------------------------------------------------------------------- blocks


def test_declarations_keep_their_order_over_inheritance() -> None:
    block = Wider(CONFIG)
    slots = block.linear_slots(None)
    assert [(s.name, s.inputs, s.outputs, s.bias, s.region, s.index) for s in slots] == [
        ("up", 4, 6, True, "ffn", 0),
        ("down", 6, 4, False, "ffn", 1),
        ("out", 4, 10, True, "att", 2),
    ]
    specs = block.tensor_specs("b.0.", slots, train_base=True)
    assert [(s.name, s.hf_name, s.shape, s.role, s.init, s.decayed) for s in specs] == [
        ("norm", "b.0.norm.weight", (4,), "norm", "ones", False),
        ("gain", "b.0.gain", (8,), "norm", "zeros", False),
        ("up.weight", "b.0.mlp.up.weight", (6, 4), "weight", "normal", True),
        ("up.bias", "b.0.mlp.up.bias", (6,), "bias", "zeros", False),
        ("down.weight", "b.0.mlp.down.weight", (4, 6), "weight", "normal", True),
        ("out.weight", "b.0.out.weight", (10, 4), "weight", "normal", True),
        ("out.bias", "b.0.out.bias", (10,), "bias", "zeros", False),
    ]
    assert all(s.trainable for s in specs)


def test_a_block_returns_the_dtype_and_the_shape_of_its_input() -> None:
    class Wide(Base):
        rate = Param("rate", D, role="scalar", dtype="fp32")

        def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
            return x * self.rate

    class Short(Base):
        def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
            return x[1:]

    x = torch.ones(5, 4, dtype=torch.bfloat16)
    for kind, said in ((Wide, r"Wide: forward returns \[5, 4\] in torch.float32"), (Short, r"Short: .* \[4, 4\] in")):
        block = kind(CONFIG)
        tensors = {s.name: torch.ones(s.shape) for s in block.tensor_specs("", (), train_base=True)}
        with pytest.raises(PluginError, match=rf"{said}.*Fix: return what the next layer takes"):
            block.bind(tensors, (), Multiply(lambda x, weight, slot: x)).outputs(x, {})


def test_a_subclass_may_declare_a_parameter_otherwise() -> None:
    class Other(Wider):
        norm = Param("other.weight", D, init="zeros")

    specs = Other(CONFIG).tensor_specs("b.0.", (), train_base=True)
    assert [(s.name, s.hf_name, s.init) for s in specs] == [
        ("norm", "b.0.other.weight", "zeros"),
        ("gain", "b.0.gain", "zeros"),
    ]


def test_a_parameter_says_its_role_and_its_initial_values() -> None:
    class Recurrent(Base):
        decay = Param("decay", 3, role="scalar", init=uniform(0, 1))
        step = Param("step", 3, role="scalar", init=Setting("_step", default=lambda config: constant(config["eps"])))

    specs = {s.name: s for s in Recurrent(CONFIG).tensor_specs("b.0.", (), train_base=True)}
    assert (specs["decay"].role, specs["decay"].decayed, specs["decay"].init) == ("scalar", False, uniform(0, 1))
    assert specs["step"].init == constant(1e-5)
    assert specs["step"].declared.endswith("Recurrent.step")
    with pytest.raises(TypeError, match=r"Param\('gain'\): init='one' is none of normal, ones, zeros"):
        Param("gain", init="one")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ({"all"}, ["up", "down", "out"]),
        ({"down"}, ["down"]),
        ({"up", "out"}, ["up", "out"]),
        ({"mlp"}, ["up", "down"]),
        ({"attention"}, ["out"]),
        ({"experts"}, []),
    ],
)
def test_adapters_go_on_their_targets(targets: set[str], adapted: list[str]) -> None:
    block = Wider(CONFIG)
    slots = block.linear_slots(LoRA(adapter=ADAPTER, targets=frozenset(targets)))
    assert [s.name for s in slots if s.adapter] == adapted
    specs = block.tensor_specs("b.0.", slots, train_base=False)
    trained = [s for s in specs if s.trainable]
    assert len(trained) == 2 * len(adapted)
    assert all(s.role == "adapter" and s.decayed for s in trained)
    for slot in slots:
        if slot.adapter:
            a, b = (s for s in trained if s.name.startswith(f"{slot.name}."))
            assert (a.name, a.shape, a.init) == (f"{slot.name}.lora_A", (3, slot.inputs), "lora_a")
            assert (b.name, b.shape, b.init) == (f"{slot.name}.lora_B", (slot.outputs, 3), "zeros")
            assert a.hf_name == f"b.0.{slot.module}.lora_A.weight"


def test_a_bound_block_computes_with_what_it_was_given() -> None:
    block = Base(CONFIG)
    slots = block.linear_slots(LoRA(adapter=ADAPTER, targets=frozenset({"up"})))
    specs = block.tensor_specs("a.0.", slots, train_base=False)
    tensors = {s.name: torch.randn(s.shape, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(specs)}
    seen = []

    def gemm(x: Tensor, weight: Tensor, slot: object) -> Tensor:
        seen.append(slot)
        return x @ weight.t()

    bound = block.bind(tensors, slots, Multiply(gemm))
    x = torch.randn(5, 4)
    t = tensors
    h = x * t["norm"]
    up = h @ t["up.weight"].t() + t["up.bias"] + 2.0 * h @ t["up.lora_A"].t() @ t["up.lora_B"].t()
    torch.testing.assert_close(bound.forward(x, {}), x + up @ t["down.weight"].t())
    assert seen == [TracedSlot.of(s, seed=None, row=None, packed=False) for s in slots]
    assert block.tensors == {}, "binding must not touch the block itself"


def test_dropout_acts_on_the_adapter_alone_and_only_with_a_seed() -> None:
    block = Base(CONFIG)
    slots = block.linear_slots(LoRA(adapter=ADAPTER, targets=frozenset({"up"})))
    specs = block.tensor_specs("a.0.", slots, train_base=False)
    tensors = {s.name: torch.ones(s.shape) for s in specs}

    def forward(masks: Tensor | None) -> Tensor:
        bound = block.bind(tensors, slots, Multiply(lambda x, w, s: x @ w.t()), masks=masks)
        return bound.forward(torch.ones(400, 4), {})

    without = forward(None)
    assert (without == without[0]).all()
    seeded = forward(torch.tensor([1, 0], dtype=torch.int32))
    assert not (seeded == without).all()
    assert torch.equal(seeded, forward(torch.tensor([1, 0], dtype=torch.int32)))
    tensors["up.lora_B"].zero_()
    assert torch.equal(forward(torch.tensor([1, 0], dtype=torch.int32)), forward(None))


def test_a_block_without_forward_says_so() -> None:
    class Empty(Block):
        pass

    with pytest.raises(TypeError, match="Empty declares no forward"):
        Empty(CONFIG).forward(torch.ones(1), {})


# ------------------------------------------------------------------------------- models


def test_stacks_are_numbered_through() -> None:
    model = Toy(CONFIG)
    assert [(prefix, type(block).__name__) for prefix, block in model.blocks(8)] == [
        ("a.0.", "Base"),
        ("a.1.", "Base"),
        ("b.2.", "Wider"),
    ]
    assert {block.max_seqlen for _, block in model.blocks(8)} == {8}


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_shares_the_embedding(tied: bool) -> None:
    found = pieces(Toy({**CONFIG, "tied": tied}), lora=None, max_seqlen=8)
    names = [s.hf_name for s in distinct(found)]
    assert len(names) == len(set(names))
    assert ("head.weight" in names) == (not tied)
    assert [s.hf_name for s in found[-1].specs] == ["norm.weight", "embed.weight" if tied else "head.weight"]
    assert [s.shape for s in found[-1].specs] == [(4,), (10, 4)]
    assert [p.key for p in found] == ["embed", "layer 0", "layer 1", "layer 2", "head"]


def test_lora_freezes_everything_else() -> None:
    found = pieces(Toy(CONFIG), lora=LoRA(adapter=ADAPTER, targets=frozenset({"down"})), max_seqlen=8)
    trained = [s.hf_name for s in distinct(found) if s.trainable]
    assert trained == [f"{p}.mlp.down.lora_{x}.weight" for p in ("a.0", "a.1", "b.2") for x in "AB"]
