"""Panels: planned from what a block reads, filled from frozen weights and adapters, and the same step with them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from panel_pack import PACK
from tiny_qwen3 import make_engine, strict_offloader, tiny_config

from surogate_core.bundles import KernelPack
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny

CONFIG = tiny_config(vocab_size=64)


def engine(packs: Sequence[KernelPack], **settings: object) -> Engine:
    arguments = {"lora": tiny.lora(16, dropout=0.1), **settings}
    return make_engine(CONFIG, packs=packs, **arguments)  # type: ignore[arg-type]


BATCHES = [tiny.batch(tiny.documents([9, 14], seed=s)) for s in range(2)]


def test_slots_with_one_input_share_a_panel() -> None:
    e = engine([TORCH_PACK, PACK])
    (names, *others) = {tuple(tuple(s.name for s in p.slots) for p in found) for found in e.parameters.panels.values()}
    assert names == (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
    assert not others
    assert e.programs.kernels.chosen["adapted_linears", "float32"] == "from-panel"


def test_a_panel_holds_what_the_parameters_say() -> None:
    e = engine([TORCH_PACK, PACK])
    e.train_step(BATCHES, step=0, lr=1e-2)
    masters, base = e.parameters.masters(), dict(e.parameters.base_tensors())
    for piece in e.plan.layers:
        for panel, tensor in e.parameters.panel_tensors(piece):
            rest = tensor.clone()
            for number, slot in enumerate(panel.slots):
                prefix = next(s.hf_name for s in piece.specs if s.name == f"{slot.name}.weight").removesuffix(".weight")
                a, b = panel.shape.adapter(tensor, number)
                assert torch.equal(panel.shape.weight(tensor, number), base[f"{prefix}.weight"])
                assert torch.equal(a, masters[f"{prefix}.lora_A.weight"])
                assert torch.equal(b, 2 * masters[f"{prefix}.lora_B.weight"])
                for view in (panel.shape.weight(rest, number), *panel.shape.adapter(rest, number)):
                    view.zero_()
            assert not rest.any()


@pytest.mark.slow_cases("0.0")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_same_gradients_as_slot_by_slot(dropout: float) -> None:
    plain, found = (engine(packs, lora=tiny.lora(16, dropout=dropout)) for packs in ([TORCH_PACK], [TORCH_PACK, PACK]))
    assert not plain.parameters.panels
    for step in range(2):
        error, name = tiny.worst(tiny.gradients(found, BATCHES, step=step), tiny.gradients(plain, BATCHES, step=step))
        assert error < 1e-5, name
        losses = [e.train_step(BATCHES, step=step, lr=1e-3).read() for e in (plain, found)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert plain.evaluate(BATCHES)[0] == pytest.approx(found.evaluate(BATCHES)[0], rel=1e-5)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_that_come_from_elsewhere_are_copied_into_panels(recompute: bool) -> None:
    """The layers share one panel of each shape, and every bit is that of weights that stay."""
    offloader, stores = strict_offloader()
    packs, settings = [TORCH_PACK, PACK], {"recompute": Recompute(block=recompute)}
    found, plain = engine(packs, offloader=offloader, **settings), engine(packs, **settings)
    assert found.parameters.panels == plain.parameters.panels
    first, second = ([t for _, t in found.parameters.panel_tensors(p)] for p in found.plan.layers)
    assert all(a is b for a, b in zip(first, second, strict=True))
    for step in range(3):
        assert (
            found.train_step(BATCHES, step=step, lr=1e-2).read() == plain.train_step(BATCHES, step=step, lr=1e-2).read()
        )
    assert found.evaluate(BATCHES) == plain.evaluate(BATCHES)
    exported = [{n: t.clone() for n, t in e.parameters.base_tensors()} for e in (found, plain)]
    assert all(torch.equal(exported[0][name], t) for name, t in exported[1].items())
    assert not stores["weights"].out


def test_where_there_are_none() -> None:
    """Ranks that no tile has, some slots without adapters, no adapters at all."""
    packs = [TORCH_PACK, PACK]
    assert not any(engine(packs, lora=tiny.lora(4)).parameters.panels.values())
    some = engine(packs, lora=tiny.lora(16, targets=["q_proj", "o_proj"])).parameters.panels
    assert {tuple(s.name for p in found for s in p.slots) for found in some.values()} == {("o",)}
    assert not engine(packs, lora=None).parameters.panels
