"""Custom ops do what their schemas say, on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_packs import triton_packs
from surogate_recipe_fp8 import FP8Options, surogate_recipe
from tiny_qwen3 import BF16, make_engine, tiny_config
from torch import Tensor

from surogate_core.kernels.registry import references
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import kernels, tiny
from surogate_testing.honest import HonestOps
from surogate_testing.recipes import built


def lie(name: str, function: Callable[[Tensor], Tensor], mutates: tuple[str, ...] = ()) -> Any:
    """A custom op of one argument."""
    return torch.library.custom_op(f"surogate_honest::{name}", function, mutates_args=mutates)


def writes(x: Tensor) -> Tensor:
    """Double x, and zero it."""
    result = 2 * x
    x.zero_()
    return result


def writes_beside(x: Tensor) -> Tensor:
    """Double x, and write to the memory behind its rows."""
    x.as_strided((x.shape[0] - 1, 1), x.stride(), x.storage_offset() + x.shape[1]).fill_(7)
    return 2 * x


def returns_memory(x: Tensor) -> Tensor:
    """The same memory again."""
    return torch.empty(0).set_(x.untyped_storage(), 0, x.shape, x.stride())


WRITES = lie("writes", writes)
BESIDE = lie("writes_beside", writes_beside)
DECLARED_BESIDE = lie("declared_beside", writes_beside, mutates=("x",))
torch.library.define("surogate_honest::returns_memory", "(Tensor x) -> Tensor")
torch.library.impl("surogate_honest::returns_memory", "cpu", returns_memory)
RETURNS = torch.ops.surogate_honest.returns_memory
DECLARED = lie("declared", writes, mutates=("x",))


def view() -> Tensor:
    """The first columns of a matrix."""
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(0))[:, :8]


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (WRITES, "surogate_honest::writes writes to memory of its argument x"),
        (BESIDE, "surogate_honest::writes_beside writes to memory of its argument x"),
        (DECLARED_BESIDE, "surogate_honest::declared_beside writes to memory of its argument x"),
        (RETURNS, "surogate_honest::returns_memory returns memory of an argument"),
    ],
)
def test_an_op_that_lies_is_refused(op: Any, said: str) -> None:
    with pytest.raises(AssertionError, match=said), HonestOps():
        op(view())


def test_what_the_schema_says_may_be_written() -> None:
    x = view()
    with HonestOps() as honest:
        DECLARED(x)
        2 * x
    assert not x.any()
    assert honest.seen == {"surogate_honest::declared"}


def test_the_kit_refuses_a_kernel_whose_op_writes_beside_its_argument() -> None:
    """Its argument itself stays as it was, and so do values and gradients."""

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        BESIDE(gate.detach())
        found: Tensor = references["swiglu"].function(gate, up)
        return found

    kernel = next(k for k in TORCH_PACK.kernels() if k.op == "swiglu")
    bad = replace(kernel, function=swiglu, supports=lambda device, dtype: dtype == torch.float32)
    with pytest.raises(AssertionError, match="writes_beside writes to memory of its argument x"):
        kernels.equals_references(replace(TORCH_PACK, kernels=lambda: [bad]))


def custom_ops(prefix: str) -> set[str]:
    """Names of the registered ops that begin so."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    return {name for name in names if name.startswith(prefix)}


def test_ops_of_the_core_on_a_cpu() -> None:
    with HonestOps() as honest:
        for case in kernels._cases(TORCH_PACK):
            if case.device.type == "cpu":
                kernels._run(case.kernel.function, case.inputs, case.leaves)
    assert honest.seen == custom_ops("surogate::cpu_")


LORA = ["adapted_linears_", "adapted_linears_backward_", "norm_rope", "norm_rope_backward"]
ATTENTION = ["attention", "attention_backward"]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("mode", "dropout", "called"),
    [
        ("bf16", 0.0, [*LORA, *ATTENTION]),
        ("bf16", 0.1, [*LORA, *ATTENTION, "swiglu_backward"]),
        ("fp8", 0.0, ATTENTION),
        ("fp8", 0.1, ATTENTION),
        ("full", 0.0, ATTENTION),
    ],
)
def test_ops_of_a_step_on_a_gpu(mode: str, dropout: float, called: list[str]) -> None:
    """All ops that a layer's compiled programs call: without dropout, those of the rewrites; with it, the others."""
    config = tiny_config(hidden_size=256, intermediate_size=512, num_hidden_layers=2, vocab_size=512, head_dim=128)
    recipe = built(surogate_recipe(), torch.device("cuda"), FP8Options(emulate="never")) if mode == "fp8" else BF16
    engine = make_engine(
        config,
        device="cuda",
        tokens=256,
        borders=8,
        lora=None if mode == "full" else tiny.lora(16, dropout=dropout),
        source=tiny.random_source(std=0.05),
        packs=triton_packs(),
        recipe=recipe,
        compiler="inductor",
        dtype=torch.bfloat16,
    )
    batch = tiny.batch(tiny.documents((100, 1, 90, 40), vocabulary=509), tokens=256, borders=8)
    with HonestOps() as honest:
        engine.accumulate([batch], step=0)
    assert honest.seen >= {f"surogate_triton::{name}" for name in called}


@pytest.mark.gpu
def test_ops_of_an_adapted_projection_on_a_gpu() -> None:
    """Forward and backward; the packs' own tests run all their kernels in the same way, which takes minutes."""
    with HonestOps() as honest:
        for pack in triton_packs():
            for case in kernels._cases(pack):
                if case.device.type == "cuda" and case.kernel.op == "adapted_linears":
                    kernels._run(case.kernel.function, case.inputs, case.leaves)
    # Where nothing is traced, the forward writes into the copy of x that it made.
    assert honest.seen >= {f"surogate_triton::adapted_linears{form}" for form in ("_", "_backward")}
