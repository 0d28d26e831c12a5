"""The CPU kernels as custom ops: fakes, layouts and tracing; their numbers are in test_ops and test_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_cases import random, strided
from torch import Tensor

from surogate_core.dsl.trace import Recompute, Signature, differentiate
from surogate_core.kernels import cpu
from surogate_core.kernels.attention import TORCH_PACK

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
