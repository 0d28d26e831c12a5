"""The product with its gradients, and models trained with it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest
import torch
from surogate_recipe_fp8 import FP8Options, gemm, surogate_recipe
from surogate_recipe_fp8.gemm import FP8Hybrid, multiply
from torch import Tensor

from surogate_core.plugin import MachineError, dsl, fp8
from surogate_core.service.engine import Engine, predict
from surogate_testing import tiny
from surogate_testing.recipes import built

CPU = torch.device("cpu")
SPEC = surogate_recipe()
RECIPE = built(SPEC, CPU, FP8Options(amax_history=3))
SLOT = dsl.LinearSlot(name="q", module="q_proj", inputs=48, outputs=32, bias=False, region="qkv", adapter=None, index=0)
State = Mapping[str, Mapping[str, Tensor]]
MODES = {"full": None, "lora": tiny.lora(dropout=0.1)}


def operands() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*shape, generator=generator) for shape in ((24, 48), (32, 48), (24, 32)))
    return x, w * 0.05, dy * 1e-6


def dequantised(x: Tensor, format: torch.dtype, scale: float) -> Tensor:
    return fp8.quantise(x, torch.tensor(scale), format).double() / scale


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("delayed", [False, True])
def test_products_are_of_the_quantised_operands(delayed: bool, frozen: bool) -> None:
    """Without scales each tensor's own largest value gives its scale, later the row; the row's gradient is amax."""
    x, w, dy = operands()
    own = [448 / x.abs().max().item(), 448 / w.abs().max().item(), 57344 / dy.abs().max().item()]
    used = [100.0, own[1] if frozen else 3000.0, 2e9] if delayed else own
    row = (torch.tensor(used) if delayed else torch.zeros(3)).requires_grad_()
    slot = dsl.TracedSlot.of(SLOT, seed=None, row=row, packed=frozen)
    weight = RECIPE.pack(w, SLOT) if frozen else w.clone().requires_grad_()
    x_leaf = x.clone().requires_grad_()
    y = RECIPE.linear(x_leaf, weight, slot)
    y.backward(dy)
    xq, wq = dequantised(x, fp8.E4M3, used[0]), dequantised(w, fp8.E4M3, used[1])
    dyq = dequantised(dy, fp8.E5M2, used[2])
    assert tiny.relative_error(y, xq @ wq.t()) < 1e-6
    assert tiny.relative_error(x_leaf.grad, dyq @ wq) < 1e-6
    if not frozen:
        assert tiny.relative_error(weight.grad, dyq.t() @ xq) < 1e-6
    seen = [x.abs().max().item(), 0.0 if frozen else w.abs().max().item(), dy.abs().max().item()]
    assert row.grad is not None
    assert row.grad.tolist() == seen


def test_slots_of_one_input_share_its_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made once, outputs and gradients stay those of each slot alone, and nothing outlives the input."""
    x, w, dy = operands()
    rows = [torch.tensor([100.0, scale, 2e9], requires_grad=True) for scale in (3000.0, 2000.0)]
    made: list[int] = []
    plain = gemm._codes

    def counted(values: Tensor, row: Tensor, role: int, *rest: Any, **named: Any) -> Any:
        made.append(role)
        return plain(values, row, role, *rest, **named)

    monkeypatch.setattr(gemm, "_codes", counted)
    recipe = FP8Hybrid(native=False, margin=0, history=3, note="")

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        weights = [weight.clone().requires_grad_() for weight in (w, 2 * w)]
        slots = [dsl.TracedSlot.of(SLOT, seed=None, row=row, packed=False) for row in rows]
        ys = [recipe.linear(x, weight, slot) for x, weight, slot in zip(inputs, weights, slots, strict=True)]
        return (*ys, *torch.autograd.grad(ys, [*weights, *rows], [dy, dy]))

    together = run(x, x)
    assert made.count(fp8.ACTIVATION) == 1
    apart = run(x.clone(), x.clone())
    assert made.count(fp8.ACTIVATION) == 3
    assert all(map(torch.equal, together, apart))
    with torch.no_grad():
        recipe.linear(x, w, dsl.TracedSlot.of(SLOT, seed=None, row=rows[0], packed=False))
    assert made.count(fp8.ACTIVATION) == 4
    del x
    assert len(recipe._inputs) == 0


def test_an_input_that_was_changed_in_place_has_new_codes() -> None:
    x, w, _ = operands()
    row = torch.zeros(3)

    def run(weight: Tensor, x: Tensor, *, in_place: bool) -> Tensor:
        slot = dsl.TracedSlot.of(SLOT, seed=None, row=row, packed=False)
        h = x + 1
        y = RECIPE.linear(h, weight, slot)
        return y + RECIPE.linear(h.mul_(3) if in_place else h * 3, weight, slot)

    assert torch.equal(run(w, x, in_place=True), run(w, x, in_place=False))


def test_an_infinite_activation_saturates_and_is_observed() -> None:
    x, w, dy = operands()
    x[0, 0] = torch.inf
    row = torch.full((3,), 64.0, requires_grad=True)
    y = RECIPE.linear(x.requires_grad_(), w.requires_grad_(), dsl.TracedSlot.of(SLOT, seed=None, row=row, packed=False))
    y.backward(dy)
    assert y.isfinite().all()
    assert row.grad is not None
    assert row.grad[0].isinf()


def snapshot(engine: Engine) -> State:
    return {file: {n: t.clone() for n, t in named.items()} for file, named in engine.state().items()}


@cache
def made_once(mode: str, fp8: bool, block: bool, plain_first: int, plain_last: int) -> tuple[Engine, State]:
    recipe = {"recipe": RECIPE} if fp8 else {}
    layers = {"plain_first": plain_first, "plain_last": plain_last}
    made = tiny.engine(lora=MODES[mode], optimizer=tiny.ADAMW, recompute=block, **recipe, **layers)
    return made, snapshot(made)


def engine(mode: str, *, fp8: bool = True, block: bool = False, plain_first: int = 0, plain_last: int = 0) -> Engine:
    """An engine in its first state; equal ones are one, since tracing is what takes long."""
    made, start = made_once(mode, fp8, block, plain_first, plain_last)
    made.load_state(start)
    return made


def assert_equal(found: State, expected: State) -> None:
    for file, named in expected.items():
        for name, value in named.items():
            torch.testing.assert_close(found[file][name], value, rtol=0, atol=0)


def batches(step: int) -> list[Any]:
    return [tiny.batch(tiny.documents([20, 12], seed=2 * step + i)) for i in range(2)]


def train(engine: Engine, steps: range) -> list[tuple[float, float]]:
    return [engine.train_step(batches(step % 2), step=step, lr=1e-2).read() for step in steps]


@pytest.mark.slow_cases("full")
@pytest.mark.parametrize("mode", MODES)
def test_losses_are_near_those_of_fp32(mode: str) -> None:
    """e4m3 has 4 bits of precision, so single products are a few per cent off, and their mean much less."""
    fp8, wide = (train(engine(mode, fp8=fp8), range(8)) for fp8 in (True, False))
    assert [loss for loss, _ in fp8] == pytest.approx([loss for loss, _ in wide], rel=0.05)
    assert fp8[-1][0] < 0.8 * fp8[0][0]
    assert fp8 != wide


@pytest.mark.slow_cases("lora", "full")
@pytest.mark.parametrize("mode", MODES)
def test_recomputation_changes_no_bit(mode: str) -> None:
    kept, again = engine(mode), engine(mode, block=True)
    assert train(kept, range(4)) == train(again, range(4))
    assert_equal(kept.state(), again.state())


@pytest.mark.parametrize("mode", MODES)
def test_a_resumed_run_goes_on_bit_for_bit(mode: str) -> None:
    made = engine(mode)
    expected = train(made, range(3))
    saved = snapshot(made)
    expected += train(made, range(3, 6))
    end = snapshot(made)
    made.load_state(saved)
    assert train(made, range(3, 6)) == expected[3:]
    assert_equal(made.state(), end)


def test_without_its_state_a_resumed_run_would_differ() -> None:
    """The saved scales matter: the test above would see it if they were lost."""
    expected = train(engine("full"), range(6))
    lost = engine("full")
    train(lost, range(3))
    for tensor in lost.state()["recipe"].values():
        tensor.zero_()
    assert train(lost, range(3, 6)) != expected[3:]


def test_the_scales_of_a_step_follow_from_the_steps_before() -> None:
    made = engine("full")
    assert made.recipe_state is not None
    assert not made.recipe_state.rows.any()
    train(made, range(1))
    state = made.recipe_state.state()
    ring, rows = state["amax_history"], state["scales"]
    assert ring[0].all()
    assert not ring[1:].any()
    limits = torch.tensor([448.0, 448.0, 57344.0])
    torch.testing.assert_close(rows, limits / ring[0], rtol=0, atol=0)
    before = rows.clone()
    train(made, range(1, 2))
    torch.testing.assert_close(rows, limits / ring[:2].amax(0), rtol=0, atol=0)
    assert not torch.equal(rows, before)


def test_evaluation_and_skipped_steps_leave_the_scales_alone() -> None:
    made = engine("full")
    train(made, range(2))
    before = snapshot(made)
    made.evaluate(batches(0))
    for group in made.parameters.groups:
        group.grad.fill_(torch.nan)
    train(made, range(2, 3))
    assert_equal(made.state(), before)


@pytest.mark.slow
def test_layers_that_are_left_alone() -> None:
    wide = train(engine("full", fp8=False), range(3))
    assert train(engine("full", plain_first=1, plain_last=1), range(3)) == wide
    assert train(engine("full"), range(3)) != wide
    half = engine("lora", plain_first=1)
    train(half, range(1))
    assert half.recipe_state is not None
    slots = len(half.plan.layer("layer 0").slots)
    assert not half.recipe_state.rows[:slots].any()
    # A frozen weight's scale is in its codes.
    assert half.recipe_state.rows[slots:, [0, 2]].all()


def test_frozen_weights_are_kept_as_codes_and_exported_as_they_were() -> None:
    made, plain = engine("lora", plain_first=1), engine("lora", fp8=False)
    dtypes = {key: {t.dtype for t in made.stores.weights.fetch(key)} for key in made.plan.by_key}
    assert dtypes == {"layer 0": {torch.float32}, "layer 1": {torch.float32, torch.uint8}}
    expected = dict(plain.parameters.base_tensors())
    exported = dict(made.parameters.base_tensors())
    assert exported.keys() == expected.keys()
    for name, value in exported.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_the_plan_counts_packed_weights_and_scales() -> None:
    made = engine("lora")
    assert made.recipe_state is not None
    prediction = predict(made.assembly)
    held = {h.kind: h.nbytes for h in prediction.held}
    # A tied head shares the embedding's tensor.
    tensors = {t.data_ptr(): t for piece in made.parameters.pieces for t in made.stores.weights.fetch(piece.key)}
    assert held["weights"] == sum(t.nbytes for t in tensors.values())
    assert held["recipe state"] == sum(t.nbytes for t in made.recipe_state.state().values())


@pytest.mark.parametrize(("capability", "native"), [((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_which_gpus_multiply_natively(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    device = torch.device("cuda")
    assert (SPEC.unavailable(device) is None) == native
    assert built(SPEC, device).native == native
    if not native:
        expected = (
            r"recipe\.emulate=never: SM86 has no FP8 products, SM89 and newer have\. Fix: set recipe\.emulate=auto"
        )
        with pytest.raises(MachineError, match=expected) as info:
            built(SPEC, device, FP8Options(emulate="never"))
        assert "\n" not in str(info.value)


def test_where_it_runs() -> None:
    assert "EMULATED FP8 (cpu has no FP8 products)" in (RECIPE.note or "")
    assert "no FP8 products" in (SPEC.unavailable(CPU) or "")
    with pytest.raises(MachineError, match=r"recipe\.emulate=never: cpu has no FP8 products.*Fix: set"):
        built(SPEC, CPU, FP8Options(emulate="never"))
    here = FP8Hybrid.of(FP8Options(), None)
    assert here.native
    assert "EMULATED" not in here.note
    forced = FP8Hybrid.of(FP8Options(emulate="always"), None)
    assert not forced.native
    assert "EMULATED FP8 (recipe.emulate=always)" in forced.note


@pytest.mark.gpu
@pytest.mark.parametrize("format", [fp8.E4M3, fp8.E5M2], ids=str)
def test_native_products_agree_with_emulated_ones(format: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = fp8.quantise(torch.randn(64, 256, generator=generator), torch.tensor(100.0), format).cuda()
    b = fp8.quantise(torch.randn(128, 256, generator=generator), torch.tensor(100.0), fp8.E4M3).cuda()
    inverse = torch.tensor(0.01, device="cuda")
    for out in (torch.bfloat16, torch.float32):
        native, emulated = (multiply(a, b, inverse, inverse, out, native) for native in (True, False))
        assert tiny.relative_error(native, emulated) < (2**-8 if out == torch.bfloat16 else 1e-3)
