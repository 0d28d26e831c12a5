"""Mixers: declared once, called once, and all that blocks may tell of other positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import Request, RolloutSettings, Sampling
from surogate_core.dsl import Attention, Convolution, Dim, Model, Param, Setting, Stack
from surogate_core.dsl.mixers import KeyValues
from surogate_core.errors import PluginError, UserError
from surogate_core.generate.native import NativeEngine
from surogate_core.generate.weights import Weights
from surogate_core.kernels import ops
from surogate_testing import tiny

torch.set_num_threads(1)


def model_of(block: type) -> type[Model]:
    return type("M", (tiny.TinyModel,), {"layers": Stack(block, Dim("num_hidden_layers"), "layers.{i}.")})


def outputs(block: type) -> Tensor:
    """One layer of the class in an engine."""
    made = tiny.engine(config=tiny.CONFIG, build=model_of(block))
    return made.logits(tiny.batch(tiny.documents((13, 9))))


class Twice(tiny.TinyBlock):
    """Calls its attention twice."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        return super().forward(super().forward(x, tables), tables)


class Never(tiny.TinyBlock):
    """Declares an attention that nothing calls."""

    other = Attention(4, 4, 8)


class Sinking(tiny.TinyBlock):
    """Declares sinks that it does not give."""

    attend = Attention(4, 4, 8, sinks=True)


class Misshapen(tiny.TinyBlock):
    """Declares other heads than it has."""

    attend = Attention(4, 2, 8)


class Configured(tiny.TinyBlock):
    """Everything from the configuration."""

    attend = Attention(
        Dim("num_attention_heads"),
        Dim("heads"),
        8,
        scale=Setting("scale", default=0.5),
        window=Setting("window", default=0),
        softcap=Setting("cap", default=None),
    )


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Twice, r"test_mixers\.Twice: forward calls attend 2 times.*Fix: declare one for each call, which has a cache"),
        (
            Sinking,
            r"Sinking: attend is called with no sinks, and is declared with sinks=True and 4 heads\. Fix: declare",
        ),
        (Never, r"Never: forward calls other 0 times"),
        (
            Misshapen,
            r"Misshapen: attend is called with heads and features \(\(4, 8\), \(4, 8\), .*is declared with",
        ),
    ],
)
def test_a_mixer_is_called_as_it_is_declared(block: type, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        outputs(block)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": True}, r"config\.json: `window` must be an integer of at least 0, not True"),
        ({"window": "8"}, r"`window` must be an integer of at least 0, not '8'"),
        ({"window": -1}, r"`window` must be an integer of at least 0, not -1"),
        ({"window": 5.5}, r"`window` must be an integer of at least 0, not 5\.5"),
        ({"cap": float("nan")}, r"`cap` must be a finite number of at least 0, not nan"),
        ({"cap": -3.0}, r"`cap` must be a finite number of at least 0, not -3\.0"),
        ({"scale": "1"}, r"`scale` must be a finite number, not '1'"),
        ({"scale": float("inf")}, r"`scale` must be a finite number, not inf"),
        ({"heads": 3}, r"attend has 4 heads \(`num_attention_heads`\), .* multiple of its 3 heads of keys \(`heads`\)"),
    ],
)
def test_what_makes_no_attention_is_refused_by_its_key(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Configured({**tiny.CONFIG, "heads": 4, **given}).mixer_specs()


def test_null_is_no_window_and_no_cap_and_a_number_may_be_computed() -> None:
    (spec,) = Configured({**tiny.CONFIG, "heads": 4, "window": None, "cap": None}).mixer_specs()
    assert (spec.window, spec.softcap, spec.scale) == (0, 0.0, 0.5)

    class Computed(tiny.TinyBlock):
        attend = Attention(4, 4, 8, scale=lambda config: config["scalar"] ** -0.5)

    assert Computed({**tiny.CONFIG, "scalar": 16}).mixer_specs()[0].scale == 0.25


def test_a_mixer_that_something_hides_is_an_error() -> None:
    with pytest.raises(PluginError, match=r"Hidden: attend is a mixer of a base class and function here\. Fix: rename"):

        class Hidden(tiny.TinyBlock):
            def attend(self, x: Tensor) -> Tensor:
                return x

    class Without(tiny.TinyBlock):
        attend = None

    assert Without(tiny.CONFIG).mixer_specs() == ()
    with pytest.raises(PluginError, match=r"the mixer bind hides what every block has"):

        class Binds(tiny.TinyBlock):
            bind = Attention(4, 4, 8)


def test_a_convolution_of_another_width_than_its_weight_does_not_train() -> None:
    class Wide(tiny.TinyBlock):
        weight = Param("conv.weight", tiny.D, 4, init="normal", role="weight")
        conv = Convolution(tiny.D, 3)

        def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
            y: Tensor = super().forward(x + self.conv(x, weight_CW=self.weight), tables)
            return y

    with pytest.raises(PluginError, match=r"Wide\.conv: its scan gives states .*\(\(3, 32\),\).*\(\(2, 32\),\)"):
        outputs(Wide)


def test_a_mixer_outside_of_outputs_is_an_error() -> None:
    block = tiny.TinyBlock(tiny.CONFIG)
    with pytest.raises(PluginError, match=r"attend is called outside of `Block.outputs`"):
        block.attend(*(torch.zeros(3, 4, 8),) * 3)


class Own(tiny.TinyBlock):
    """Attends by the op, and leaves the mixer of its base class out."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        h = ops.rms_norm(x, self.norm, self.eps)
        q, k, v = (product(h).unflatten(1, (self.heads, -1)) for product in (self.q, self.k, self.v))
        x = x + self.o(ops.attention(q, k, v, tables["cu_seqlens"], self.max_seqlen, 0.35).flatten(1))
        h = ops.rms_norm(x, self.norm, self.eps)
        return x + self.down(ops.swiglu(self.gate(h), self.up(h)))


class Bordered(tiny.TinyBlock):
    """A mean over the document that the block computes itself."""

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        order = torch.arange(len(x), device=x.device, dtype=torch.int32)
        document = torch.bucketize(order, tables["cu_seqlens"], right=True)
        seen = (document[:, None] == document) & (order[:, None] >= order)
        return super().forward(x + (seen / seen.sum(1, keepdim=True)).to(x.dtype) @ x, tables)


@pytest.mark.parametrize("block", [Bordered, Own])
def test_a_block_that_reads_borders_trains_and_does_not_generate(block: type) -> None:
    made = tiny.engine(config=tiny.CONFIG, build=model_of(block))
    losses = tiny.train(made, 3, lr=0.1, same=True)
    assert losses[-1] < losses[0]
    native = NativeEngine(Weights.of(made), RolloutSettings(slots=1, context=32))
    asked = Request(prompt=(1, 2, 3), max_new_tokens=2, sampling=Sampling(temperature=0))
    with pytest.raises(
        UserError, match=rf"{block.__name__} reads cu_seqlens itself, and in generation it cannot: .*: attend\)"
    ):
        native.generate([asked])


def test_the_declaration_has_the_sizes_of_the_configuration() -> None:
    class Sized(tiny.TinyBlock):
        attend = Attention(
            Dim("num_attention_heads"), 2, 8, values=16, window=Setting("window", 0), softcap=Setting("cap", None)
        )

    (spec,) = Sized({**tiny.CONFIG, "window": 5}).mixer_specs()
    expected = {"heads": 4, "kv_heads": 2, "keys": 8, "values": 16, "scale": 8**-0.5, "window": 5, "softcap": 0.0}
    assert spec == KeyValues(name="attend", **expected)
    assert spec.extensions == {"window"}
    assert spec.named(None) == {"window": 5}


class Scaled(tiny.TinyBlock):
    """What it adds is multiplied."""

    gain = Setting("gain", default=1.0)

    def forward(self, x: Tensor, tables: Mapping[str, Tensor]) -> Tensor:
        y: Tensor = super().forward(x, tables)
        return x + self.gain * (y - x)


class Gains(tiny.TinyModel):
    """Layers of one class with settings of their own."""

    layers = Stack(Scaled, Dim("num_hidden_layers"), "layers.{i}.")

    def layer_config(self, number: int) -> Mapping[str, Any]:
        return {**self.config, "gain": self.config["gains"][number]}


def test_layers_of_one_class_with_two_settings_are_two_programs() -> None:
    batch = tiny.batch(tiny.documents((13,), seed=3))
    losses, programs = {}, {}
    for gains in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (0.0, 0.0)):
        made = tiny.engine(config={**tiny.CONFIG, "gains": gains}, build=Gains)
        tiny.train(made, 1, lr=0.0)
        losses[gains], programs[gains] = made.evaluate([batch])[0], len(made.programs._layers)
    assert len(set(losses.values())) == 4
    assert programs == {(1.0, 1.0): 1, (1.0, 0.0): 2, (0.0, 1.0): 2, (0.0, 0.0): 1}
    plain = tiny.engine(config=tiny.CONFIG, build=tiny.TinyModel).evaluate([batch])[0]
    assert losses[1.0, 1.0] == pytest.approx(plain, rel=1e-6)


def test_blocks_of_one_identity_are_one_object() -> None:
    blocks = [block for _, block in Gains({**tiny.CONFIG, "gains": (1.0, 2.0)}).blocks(8)]
    assert blocks[0].identity != blocks[1].identity
    same = [block for _, block in Gains({**tiny.CONFIG, "gains": (2.0, 2.0)}).blocks(8)]
    assert same[0] is same[1]
