"""The CPU kernels as custom ops: fakes, layouts and tracing; their numbers are in test_ops and test_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.dsl.trace import Recompute, Signature, differentiate
from surogate_core.kernels import cpu
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing.op_cases import random, strided

BORDERS = torch.tensor([0, 3, 6], dtype=torch.int32)
F32 = torch.float32


def calls() -> dict[str, tuple[Any, ...]]:
    """Arguments of every custom op of the CPU pack, in layouts that are not contiguous."""

    def make(*shape: int, seed: int = 0) -> Tensor:
        return strided(random(*shape, seed=seed, dtype=F32))

    q, k, v = make(6, 4, 8), make(6, 2, 8, seed=1), make(6, 2, 8, seed=2)
    labels = torch.tensor([1, -100, 3, 0, -100, 2])
    out, lse = torch.ops.surogate.cpu_attention(q, k, v, BORDERS, 0.3)
    return {
        "cpu_rms_norm": (make(6, 5), make(5, seed=1), 1e-6),
        "cpu_rms_norm_backward": (make(6, 5), make(6, 5, seed=1), make(5, seed=2), make(6, 1, seed=3).abs(), True),
        "cpu_swiglu": (make(6, 5), make(6, 5, seed=1)),
        "cpu_swiglu_backward": (make(6, 5), make(6, 5, seed=1), make(6, 5, seed=2)),
        "cpu_rope": (make(6, 2, 8), make(6, 4, seed=1), make(6, 4, seed=2), -1),
        "cpu_cross_entropy": (make(6, 7), labels),
        "cpu_cross_entropy_backward": (make(6, seed=1), make(6, 7), labels, make(6, seed=2)),
        "cpu_attention": (q, k, v, BORDERS, 0.3),
        "cpu_attention_backward": (make(6, 4, 8, seed=3), q, k, v, out, lse, BORDERS, 0.3),
    }


CALLS = calls()


def test_every_custom_op_is_here() -> None:
    registered = {n.split("::")[1].split(".")[0] for n in torch._C._dispatch_get_all_op_names() if "surogate::" in n}
    assert {n for n in registered if n.startswith("cpu_")} == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_the_fake_tells_the_truth(name: str) -> None:
    """Shapes, dtypes and strides of the fake are those of the results, and inputs are not written to."""
    op = getattr(torch.ops.surogate, name).default
    torch.library.opcheck(op, CALLS[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_alias_inputs(name: str) -> None:
    results = getattr(torch.ops.surogate, name)(*CALLS[name])
    inputs = {a.untyped_storage().data_ptr() for a in CALLS[name] if isinstance(a, Tensor)}
    for result in results if isinstance(results, (tuple, list)) else (results,):
        if result.numel():
            assert result.untyped_storage().data_ptr() not in inputs


def test_frozen_norm_weights_cost_nothing() -> None:
    arguments = list(CALLS["cpu_rms_norm_backward"])
    dx, dweight = torch.ops.surogate.cpu_rms_norm_backward(*arguments)
    arguments[-1] = False
    same, nothing = torch.ops.surogate.cpu_rms_norm_backward(*arguments)
    assert torch.equal(dx, same)
    assert dweight.numel() == 5
    assert nothing.numel() == 0


@pytest.mark.slow_cases("inductor")
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_a_gradient_of_stride_zero(compiler: Any) -> None:
    """What `sum` hands to the backward is one number expanded; torch's CPU attention would misread it."""

    def function(q: Tensor, k: Tensor, v: Tensor, borders: Tensor) -> Tensor:
        (kernel,) = [x for x in TORCH_PACK.kernels() if x.op == "attention" and x.name == "torch-cpu"]
        return kernel.function(q, k, v, borders, 6, 0.3).sum()

    tensors = [random(6, 2, 8, seed=s, dtype=F32).requires_grad_() for s in range(3)]
    expected = torch.autograd.grad(function(*tensors, BORDERS), tensors)
    inputs = [*(Signature.of(t, requires_grad=True) for t in tensors), Signature.of(BORDERS)]
    program = differentiate(function, inputs, recompute=Recompute(block=False), compiler=compiler)
    arguments = [*(t.detach() for t in tensors), BORDERS]
    _, *kept = program.forward(arguments)
    found = program.backward([*arguments, *kept, torch.ones(())])
    tensors = [t.detach().double().requires_grad_() for t in tensors]
    wide = torch.autograd.grad(function(*tensors, BORDERS), tensors, grad_outputs=torch.ones((), dtype=torch.float64))
    for a, b, c in zip(found, expected, wide, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a.double(), c, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    assert not any(k.supports(torch.device("cpu"), dtype) for k in cpu.kernels())
    assert all(k.supports(torch.device("cpu"), torch.float32) for k in cpu.kernels())
    assert not any(k.supports(torch.device("cuda"), torch.float32) for k in cpu.kernels())


# ---------------------------------------------------------------------- long reductions


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("kind", ["normal", "equal"])
def test_a_norms_weight_gets_the_gradient_of_100000_tokens(kind: str) -> None:
    x_ND, dy_ND = (random(100_000, 8, seed=seed, dtype=F32) for seed in (0, 1))
    if kind == "equal":
        dy_ND = torch.full_like(dy_ND, 0.1234567).copysign(x_ND)
    weight_D = random(8, seed=2, dtype=F32)
    found = torch.ops.surogate.cpu_rms_norm_backward(dy_ND, x_ND, weight_D, *_inverse(x_ND), True)
    wide = [t.double() for t in (dy_ND, x_ND, weight_D)]
    expected = torch.ops.surogate.cpu_rms_norm_backward(*wide, *_inverse(wide[1]), True)
    assert relative(found[1], expected[1]) < 1e-6
    assert relative(found[0], expected[0]) < 1e-6


def _inverse(x_ND: Tensor) -> list[Tensor]:
    return [torch.ops.surogate.cpu_rms_norm(x_ND, torch.ones_like(x_ND[0]), 1e-6)[1]]


def test_a_loss_over_150000_logits_and_the_sum_of_100000_losses() -> None:
    logits_NV = random(8, 151_936, dtype=F32)
    labels_N = torch.arange(8)
    loss_N, lse_N = torch.ops.surogate.cpu_cross_entropy(logits_NV, labels_N)
    wide_N, wide_lse_N = torch.ops.surogate.cpu_cross_entropy(logits_NV.double(), labels_N)
    assert relative(loss_N, wide_N) < 1e-6
    ones_N = torch.ones(8)
    found = torch.ops.surogate.cpu_cross_entropy_backward(ones_N, logits_NV, labels_N, lse_N)
    expected = torch.ops.surogate.cpu_cross_entropy_backward(ones_N.double(), logits_NV.double(), labels_N, wide_lse_N)
    assert relative(found, expected) < 1e-6
    many_N = loss_N.repeat(12_500)
    assert relative(many_N.sum(), many_N.double().sum()) < 1e-6


def test_the_last_tokens_of_a_long_document_attend_to_all() -> None:
    """Keys alike, so that every weight of a sum is about 1 / N.

    The order of the sums is the processor's: an AMD one without AVX-512 erred by 1.7e-6, others by less than 1e-6.
    """
    tokens = 12_000
    q, k, v = (random(tokens, 1, 8, seed=seed, dtype=F32) for seed in range(3))
    k, v = k * 1e-3, v + 1
    borders = torch.tensor([0, tokens], dtype=torch.int32)
    out, lse = torch.ops.surogate.cpu_attention(q, k, v, borders, 0.3)
    last = slice(tokens - 64, tokens)
    scores = 0.3 * q[last, 0].double() @ k[:, 0].double().t()
    order = torch.arange(tokens)
    scores = scores.masked_fill(order[None] > order[last, None], float("-inf"))
    assert relative(out[last, 0], torch.softmax(scores, -1) @ v[:, 0].double()) < 4e-6
    dout = random(tokens, 1, 8, seed=4, dtype=F32)
    found = torch.ops.surogate.cpu_attention_backward(dout, q, k, v, out, lse, borders, 0.3)
    wide = [t.double() for t in (q, k, v)]
    out64, lse64 = torch.ops.surogate.cpu_attention(*wide, borders, 0.3)
    expected = torch.ops.surogate.cpu_attention_backward(dout.double(), *wide, out64, lse64, borders, 0.3)
    for name, mine, theirs in zip("qkv", found, expected, strict=True):
        assert relative(mine, theirs) < 4e-6, name


def test_the_exponentials_of_logits_are_made_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_NV, labels_N = random(50, 1000, dtype=F32), torch.arange(50)
    whole = torch.ops.surogate.cpu_cross_entropy(logits_NV, labels_N)
    assert torch.equal(whole[1], torch.logsumexp(logits_NV, dim=-1))
    for logits in (1, 3000, 7001):
        monkeypatch.setattr(cpu, "LOGITS", logits)
        for found, expected in zip(torch.ops.surogate.cpu_cross_entropy(logits_NV, labels_N), whole, strict=True):
            assert torch.equal(found, expected)
    with torch.autograd.profiler.profile(profile_memory=True) as profile:
        torch.ops.surogate.cpu_cross_entropy(logits_NV, labels_N)
    assert max(event.cpu_memory_usage for event in profile.function_events) < logits_NV.nbytes / 2
