"""A tiny engine with the pack on a GPU: against the CPU, against the core's own kernels, and against itself."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from gpu_packs import triton_packs
from tiny_qwen3 import make_engine, tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from surogate_core.dsl.declare import TensorSpec
from surogate_core.dsl.trace import Recompute
from surogate_core.engine.engine import Engine
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import tiny

pytestmark = pytest.mark.gpu
CONFIG = tiny_config(hidden_size=128, intermediate_size=256, num_hidden_layers=3, vocab_size=512, head_dim=64)
TOKENS, BORDERS = 256, 8
OPS = {"adapted_linears", "attention", "cross_entropy", "norm_rope", "swiglu"}


def batches(step: int) -> list[Any]:
    return [
        tiny.batch(tiny.documents(lengths, vocabulary=509, seed=10 * step + i), tokens=TOKENS, borders=BORDERS)
        for i, lengths in enumerate(((100, 1, 90, 40), (130, 17)))
    ]


def source(spec: TensorSpec) -> Tensor:
    """Values that bf16 holds exactly."""
    return tiny.random_source(std=0.05)(spec).bfloat16().float()


def engine(device: str = "cuda", *, dropout: float = 0.1, packs: Any = None, full: bool = False, **more: Any) -> Engine:
    cuda = {"compiler": "inductor", "dtype": torch.bfloat16, "cuda_graphs": True} if device == "cuda" else {}
    return make_engine(
        CONFIG,
        device=device,
        tokens=TOKENS,
        borders=BORDERS,
        lora=None if full else tiny.lora(16, dropout=dropout),
        source=source,
        head_chunks=2,
        packs=packs or triton_packs(),
        **{**cuda, **more},
    )


@pytest.mark.parametrize("full", [False, True], ids=["lora", "full"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_gradients_are_those_of_the_cpu(recompute: bool, full: bool) -> None:
    """As near to fp32 on the CPU as the core's own kernels are, give or take a half."""
    policy = Recompute(block=recompute)
    exact = tiny.gradients(engine("cpu", packs=[TORCH_PACK], full=full), batches(0))
    found = engine(recompute=policy, full=full)
    chosen = {op for (op, _), kernel in found.programs.kernels.chosen.items() if kernel == "triton"}
    assert chosen - {"adamw_update"} == (OPS - {"adapted_linears"} | {"rms_norm"} if full else OPS)
    plain = engine(recompute=policy, packs=[TORCH_PACK], full=full)
    error, name = tiny.worst({n: g.cpu() for n, g in tiny.gradients(found, batches(0)).items()}, exact)
    other, _ = tiny.worst({n: g.cpu() for n, g in tiny.gradients(plain, batches(0)).items()}, exact)
    assert error <= 1.5 * other, f"{name}: {error:.1e}, the core's own kernels {other:.1e}"


class Calls(TorchDispatchMode):
    """Addresses of what the pack's ops are given first and make first."""

    def __init__(self) -> None:
        super().__init__()
        self.given: dict[str, list[int]] = defaultdict(list)
        self.made: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function.namespace == "surogate_triton":
            name = function.overloadpacket.__name__
            self.given[name].append(args[0].data_ptr())
            self.made[name].append((found if isinstance(found, Tensor) else found[0]).data_ptr())
        return found


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_compiled_layers_write_in_place_and_copy_nothing(recompute: bool) -> None:
    """u behind what attention made, du behind the gradients that SwiGLU's and the norms' backwards made."""
    found = engine(recompute=Recompute(block=recompute), cuda_graphs=False)
    with Calls() as calls:
        found.accumulate(batches(0)[:1], step=0)
    forwards = 2 if recompute else 1
    assert len(calls.given["adapted_linears_"]) >= 4 * CONFIG["num_hidden_layers"]
    assert not calls.given["adapted_linears"]
    assert len(calls.made["attention"]) == forwards * CONFIG["num_hidden_layers"]
    assert set(calls.made["attention"]) <= set(calls.given["adapted_linears_"])
    for op in ("swiglu_backward", "norm_rope_backward"):
        assert len(calls.made[op]) == CONFIG["num_hidden_layers"]
        assert set(calls.made[op]) <= set(calls.given["adapted_linears_backward_"])
    assert len(calls.given["adapted_linears_backward"]) == 2 * CONFIG["num_hidden_layers"], "o and down, alone"


def test_losses_follow_the_cpu() -> None:
    runs = [engine("cpu", packs=[TORCH_PACK]), engine()]
    for step in range(10):
        exact, found = (e.train_step(batches(step % 2), step=step, lr=3e-3).read() for e in runs)
        assert found[0] == pytest.approx(exact[0], rel=5e-3)
    exact_loss, found_loss = (e.evaluate(batches(0))[0] for e in runs)
    assert found_loss == pytest.approx(exact_loss, rel=5e-3)


def test_an_engine_repeats_bit_for_bit() -> None:
    e = engine()
    first = tiny.gradients(e, batches(0))
    for _ in range(3):
        again = tiny.gradients(e, batches(0))
        assert all(torch.equal(g, first[name]) for name, g in again.items())


def test_a_fresh_engine_repeats_bit_for_bit() -> None:
    first, second = engine(), engine()
    for step in range(3):
        results = [e.train_step(batches(step), step=step, lr=2e-3).read() for e in (first, second)]
        assert results[0] == results[1]
