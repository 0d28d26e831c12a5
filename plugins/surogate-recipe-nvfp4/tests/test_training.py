"""The product with its gradients, and models trained with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from surogate_recipe_nvfp4 import NVFP4Options, surogate_recipe, unavailable
from surogate_recipe_nvfp4.gemm import FIRST_SALT, NVFP4, unpack
from torch import Tensor

from surogate_core.plugin import MachineError, UserError, dsl, nvfp4, ops
from surogate_core.service.engine import Engine
from surogate_testing import tiny
from surogate_testing.recipes import built

CPU = torch.device("cpu")


def recipe_on(device: torch.device, **options: Any) -> NVFP4:
    """The recipe with these options."""
    recipe = built(surogate_recipe(), device, NVFP4Options(**options))
    assert isinstance(recipe, NVFP4)
    return recipe


SPEC = surogate_recipe()
RECIPE = recipe_on(CPU)
SLOT = dsl.LinearSlot(name="q", module="q_proj", inputs=40, outputs=24, bias=False, region="qkv", adapter=None, index=5)
State = Mapping[str, Mapping[str, Tensor]]
MODES = {"full": None, "lora": tiny.lora(dropout=0.1)}


def wide(x: Tensor, **how: Any) -> Tensor:
    """The dequantised matrix in fp64."""
    found = nvfp4.quantise(x, **how)
    return found.blocks(*x.shape).double() * found.decode.double()


def random_bits_of(x: Tensor, seed: Tensor, number: int) -> Tensor:
    """Of an operand; elements are numbered in the padded matrix."""
    rows, inner = x.shape
    return ops.random_bits(torch.Size((rows, -(-inner // nvfp4.BLOCK) * nvfp4.BLOCK)), seed, salt=number)[:, :inner]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_products_are_of_the_quantised_operands(frozen: bool, stochastic: bool) -> None:
    """1×16 blocks along the inner dimension, 16×16 for the weight; Hadamard and no four-over-six for dW alone."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((20, 40), (24, 40), (20, 24)))
    recipe = recipe_on(CPU, nearest_gradients=not stochastic)
    seed = torch.tensor(123, dtype=torch.int32)
    slot = dsl.TracedSlot.of(SLOT, seed=seed, row=None, packed=frozen)
    weight = recipe.pack(w, SLOT) if frozen else w.clone().requires_grad_()
    leaf = x.clone().requires_grad_()
    y = recipe.linear(leaf, weight, slot)
    y.backward(dy)
    wq = wide(w, square=True, four_over_six=True)
    assert tiny.relative_error(y, wide(x, square=False, four_over_six=True) @ wq.t()) < 1e-6
    numbers = FIRST_SALT + 2 * SLOT.index, FIRST_SALT + 2 * SLOT.index + 1
    rotated = nvfp4.hadamard(dy.t())
    bits = [random_bits_of(t, seed, n) if stochastic else None for t, n in zip((dy, rotated), numbers, strict=True)]
    dyq = wide(dy, square=False, four_over_six=True, bits=bits[0])
    assert tiny.relative_error(leaf.grad, dyq @ wq) < 1e-6
    if not frozen:
        a = wide(rotated, square=False, four_over_six=False, bits=bits[1])
        b = wide(nvfp4.hadamard(x.t()), square=False, four_over_six=False)
        assert tiny.relative_error(weight.grad, a @ b.t()) < 1e-6


def test_four_over_six_can_be_turned_off() -> None:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    slot = dsl.TracedSlot.of(SLOT, seed=None, row=None, packed=False)
    w = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    six = recipe_on(CPU, four_over_six=False)
    expected = wide(x, square=False, four_over_six=False) @ wide(w, square=True, four_over_six=False).t()
    assert tiny.relative_error(six.linear(x, w, slot), expected) < 1e-6
    assert tiny.relative_error(RECIPE.linear(x, w, slot), expected) > 1e-3


def test_a_packed_weight_holds_it_and_its_transpose() -> None:
    w = torch.randn(24, 40, generator=torch.Generator().manual_seed(1))
    packed = RECIPE.pack(w, SLOT)
    expected = wide(w, square=True, four_over_six=True)
    for transposed, shape in ((False, (24, 40)), (True, (40, 24))):
        found = unpack(packed, 24, 40, transposed=transposed).rounded(*shape)
        value = found.values.double() * found.decode.double()
        assert torch.equal(value.t() if transposed else value, expected)
    assert packed.numel() == 16 + 2 * (32 * 48 // 2 + 32 * 48 // 256)


def test_frozen_weights_in_rows_are_rounded_along_the_inner_dimension_of_each_product() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((20, 40), (24, 40), (20, 24)))
    recipe = recipe_on(CPU, frozen_blocks="1x16", search_scales=True, nearest_gradients=True)
    slot = dsl.TracedSlot.of(SLOT, seed=None, row=None, packed=True)
    leaf = x.clone().requires_grad_()
    packed = recipe.pack(w, SLOT)
    assert packed.numel() == 16 + (24 * 48 // 2 + 24 * 3) + (40 * 32 // 2 + 40 * 2)
    y = recipe.linear(leaf, packed, slot)
    y.backward(dy)
    how = {"square": False, "four_over_six": True, "search": True}
    wq, wq_t = wide(w, **how), wide(w.t(), **how)
    assert tiny.relative_error(y, wide(x, square=False, four_over_six=True) @ wq.t()) < 1e-6
    assert tiny.relative_error(leaf.grad, wide(dy, square=False, four_over_six=True) @ wq_t.t()) < 1e-6
    assert tiny.relative_error(wq, w.double()) < 0.8 * tiny.relative_error(
        wide(w, square=True, four_over_six=True), w.double()
    )
    assert recipe.rounded is not None
    assert tiny.relative_error(recipe.rounded(w, "weight")[0], wq) < 1e-6
    trained = w.clone().requires_grad_()
    of_trained = recipe.linear(x, trained, dsl.TracedSlot.of(SLOT, seed=None, row=None, packed=False))
    expected = wide(x, square=False, four_over_six=True) @ wide(w, square=True, four_over_six=True).t()
    assert tiny.relative_error(of_trained, expected) < 1e-6, "trained weights keep their blocks"


def snapshot(engine: Engine) -> State:
    return {file: {n: t.clone() for n, t in named.items()} for file, named in engine.state().items()}


@cache
def made_once(mode: str, fp4: bool, block: bool, stochastic: bool) -> tuple[Engine, State]:
    recipe = {"recipe": recipe_on(CPU, nearest_gradients=not stochastic)} if fp4 else {}
    parts = {"build": tiny.SmallModel, "optimizer": tiny.ADAMW, "lora": MODES[mode], **recipe}
    made = tiny.engine(tiny.SMALL_CONFIG, recompute=block, **parts)
    return made, snapshot(made)


def engine(mode: str, *, fp4: bool = True, block: bool = False, stochastic: bool = True) -> Engine:
    """An engine in its first state; equal ones are one, since tracing is what takes long."""
    made, start = made_once(mode, fp4, block, stochastic)
    made.load_state(start)
    return made


def train(engine: Engine, steps: range, lr: float = 1e-2) -> list[tuple[float, float]]:
    batches = [tiny.batch(tiny.documents([20, 12], seed=i)) for i in range(2)]
    return [engine.train_step(batches, step=step, lr=lr).read() for step in steps]


@pytest.mark.slow
@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_near_those_of_fp32(mode: str) -> None:
    """e2m1 has 2 bits of precision and 32 features average little out: the step's descent is slower."""
    fp4, plain = (train(engine(mode, fp4=fp4), range(8)) for fp4 in (True, False))
    assert [loss for loss, _ in fp4] == pytest.approx([loss for loss, _ in plain], rel=0.15)
    assert fp4[-1][0] < 0.9 * fp4[0][0]


@pytest.mark.slow
@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", MODES)
def test_recomputation_changes_no_bit(mode: str) -> None:
    kept, again = engine(mode), engine(mode, block=True)
    assert train(kept, range(4)) == train(again, range(4))
    for name, value in kept.state()["trainable"].items():
        torch.testing.assert_close(value, again.state()["trainable"][name], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_goes_on_bit_for_bit(mode: str) -> None:
    """There is no state but what the optimizer has: random bits are a function of the step."""
    made = engine(mode)
    assert made.state().keys() == {"trainable", "optimizer"}
    train(made, range(2))
    saved, expected = snapshot(made), train(made, range(2, 4))
    made.load_state(saved)
    assert train(made, range(2, 4)) == expected
    made.load_state(saved)
    assert train(made, range(3, 5)) != expected


@pytest.mark.slow_cases("search_scales")
@pytest.mark.parametrize(
    "options", [{"search_scales": True}, {"frozen_blocks": "1x16"}], ids=["search_scales", "frozen_blocks"]
)
def test_frozen_weights_with_smaller_errors_train(options: dict[str, Any]) -> None:
    parts = {"build": tiny.SmallModel, "optimizer": tiny.ADAMW, "lora": MODES["lora"]}
    made = tiny.engine(tiny.SMALL_CONFIG, recipe=recipe_on(CPU, **options), **parts)
    usual = train(engine("lora"), range(2))
    found = train(made, range(2))
    assert found != usual, "the options reach the products"
    assert [loss for loss, _ in found] == pytest.approx([loss for loss, _ in usual], rel=0.1)


@pytest.mark.slow
def test_rounding_to_nearest_is_another_run() -> None:
    assert train(engine("full"), range(2)) != train(engine("full", stochastic=False), range(2))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_a_model_with_attention(mode: str) -> None:
    """At a rate at which eight steps do not learn two rows by heart, where every digit counts."""
    parts = {"lora": MODES[mode], "optimizer": tiny.ADAMW}
    made = [tiny.engine(recipe=RECIPE, **parts), tiny.engine(**parts)]
    fp4, plain = (train(one, range(8), lr=1e-3) for one in made)
    assert [loss for loss, _ in fp4] == pytest.approx([loss for loss, _ in plain], rel=0.15)


def test_where_it_runs() -> None:
    assert "EMULATED NVFP4 (cpu has no NVFP4 products" in (RECIPE.note or "")
    assert "emulated" in (SPEC.unavailable(CPU) or "")
    with pytest.raises(
        MachineError, match=r"recipe\.emulate=never: cpu has.*SM100.*Fix: set recipe\.emulate=auto"
    ) as info:
        recipe_on(CPU, emulate="never")
    assert "\n" not in str(info.value)
    assert "fp8-hybrid" not in str(info.value), "it would be refused too"


@pytest.mark.parametrize(("capability", "native"), [((8, 0), False), ((9, 0), False), ((10, 0), True), ((12, 1), True)])
def test_which_gpus_multiply_natively(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert (unavailable(device) is None) == native
    recipe = recipe_on(device)
    assert recipe.native == native
    assert ("EMULATED" in recipe.note) == (not native)
    assert ("torch's scaled_mm, which is cuBLASLt" in recipe.note) == native
    assert not recipe_on(device, emulate="always").native
    if not native:
        with pytest.raises(MachineError, match=f"SM{capability[0]}{capability[1]} has no NVFP4 products") as info:
            recipe_on(device, emulate="never")
        assert ("recipe=fp8-hybrid" in str(info.value)) == (capability >= (8, 9))


def test_a_backend_that_torch_lacks_is_refused_where_it_would_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "fp4_backend=cudnn has no effect" in (recipe_on(CPU, backend="cudnn").note or "")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    with pytest.raises(UserError, match=r"fp4_backend=cudnn: .*Fix: leave fp4_backend at cutlass"):
        recipe_on(torch.device("cuda"), backend="cudnn")
