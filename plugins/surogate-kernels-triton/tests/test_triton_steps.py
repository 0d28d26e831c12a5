"""Decoding steps of recurrences: on a GPU or in Triton's interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.service.kernels import convolutions, scans
from surogate_testing import op_cases
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.op_cases import random
from surogate_testing.triton_programs import SHARED, check_compiled, empty, recorded

BOUND = {torch.bfloat16: 1e-2, torch.float16: 1e-3, torch.float32: 5e-6}
"""Largest error over the largest value; y is rounded once."""
STATE_BOUND = 5e-6
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter cuts numbers off where it makes bf16 of them."""
SLOTS = (4, 0, 6, 2, 6, 6)
"""The slots of six rows. Three rows do not count: they have the last of seven slots."""
COUNT = 7
NAMES = ("ssd", "gated_delta")
SHAPES = {"ssd": (8, 128, 128, 80), "gated_delta": (16, 32, 128, 128)}
"""Heads of keys, of values, features of a key, of a value: nemotron-nano-9b-v2 and qwen3.5-9b."""
both = pytest.mark.parametrize("name", NAMES)
dtypes = pytest.mark.parametrize("dtype", BOUND, ids=str)


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def kernel(name: str) -> Callable[..., Tensor]:
    from surogate_kernels_triton import steps

    found: Callable[..., Tensor] = getattr(steps, f"{name}_step")
    return found


def slots_of(device: str, rows: int = len(SLOTS)) -> Tensor:
    """int64 [rows]."""
    return torch.tensor(SLOTS[:rows], device=device)


def make(name: str, dtype: torch.dtype, device: str, sizes: Sequence[int], rows: int = len(SLOTS)) -> list[Tensor]:
    """Rows of a scan that are parts of wider ones; decays from none to all of a state."""
    groups, heads, keys, values = sizes
    q, k = (random(rows, groups, keys + 3, seed=seed) for seed in (0, 1))
    v, k = random(rows, heads, values + 5, seed=2), torch.nn.functional.normalize(k, dim=-1)
    slow = torch.tensor([0.01, 1.0, 20.0, 0.1], dtype=torch.float64).repeat(heads)[:heads]
    decay, beta = -random(rows, heads, seed=3).abs() * slow, random(rows, 2 * heads, seed=4).sigmoid()
    q, k, v = (t.to(device, dtype)[..., 1 : 1 + size] for t, size in ((q, keys), (k, keys), (v, values)))
    numbers = [decay.to(device, torch.float32), beta.to(device, torch.float32)[:, ::2]]
    return [*((q, k, v) if name == "gated_delta" else (v, k, q)), *numbers]


def states_of(*shape: int, device: str, seed: int = 5) -> Tensor:
    """[COUNT, …] fp32, zeros in the last slot."""
    states = random(COUNT, *shape, seed=seed)
    states[-1] = 0
    return states.to(device, torch.float32)


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max().clamp(min=1e-2))


@dtypes
@both
@devices
@pytest.mark.parametrize("sizes", [(2, 4, 24, 40), (1, 3, 5, 7), (2, 2, 16, 33)], ids=str)
def test_a_step_is_that_of_the_definition(name: str, sizes: Any, dtype: torch.dtype, device: str) -> None:
    """In its slots alone; the last one remains zeros, and its rows begin there."""
    rows, states, slots = make(name, dtype, device, sizes), states_of(*sizes[1:], device=device), slots_of(device)
    before = states.clone()
    y = kernel(name)(*rows, states, slots)
    wide = [t.double().cpu() for t in rows]
    exact, after = getattr(op_cases, name)(*wide, torch.arange(len(SLOTS) + 1), before[slots].double().cpu())
    assert y.dtype == dtype
    assert y.is_contiguous()
    assert error(y, exact) < BOUND[dtype]
    for row, slot in enumerate(SLOTS):
        if slot < COUNT - 1:
            assert error(states[slot], after[row]) < STATE_BOUND
    assert torch.equal(states[[1, 3, 5]], before[[1, 3, 5]])
    assert not states[-1].any()


@both
@devices
def test_a_step_is_that_of_the_reference(name: str, device: str) -> None:
    """Several in a row, with the states that the steps before have left."""
    sizes = (2, 6, 40, 24) if INTERPRETED else SHAPES[name]
    rows, states, slots = (
        make(name, torch.float32, device, sizes),
        states_of(*sizes[1:], device=device),
        slots_of(device),
    )
    others = states.clone()
    for _ in range(3):
        y = kernel(name)(*rows, states, slots)
        wanted = getattr(scans, f"{name}_step")(*rows, others, slots)
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, others, rtol=1e-4, atol=1e-4)


@both
@devices
def test_a_row_has_its_bits_in_any_company(name: str, device: str) -> None:
    sizes = (1, 2, 24, 40)
    rows, states, slots = make(name, HALF, device, sizes), states_of(*sizes[1:], device=device), slots_of(device)
    whole, kept = kernel(name)(*rows, states.clone(), slots), states.clone()
    again = kernel(name)(*rows, kept, slots)
    assert torch.equal(again, whole)
    for row, slot in enumerate(SLOTS):
        other = states.clone()
        other[:slot], other[slot + 1 : -1] = float("nan"), float("nan")
        alone = kernel(name)(*(t[row : row + 1] for t in rows), other, slots[row : row + 1])
        assert torch.equal(alone[0], whole[row])
        assert torch.equal(other[slot], kept[slot])


@both
@devices
def test_a_decay_of_minus_infinity_forgets_everything(name: str, device: str) -> None:
    sizes = (2, 4, 16, 16)
    rows, states, slots = (
        make(name, torch.float32, device, sizes),
        states_of(*sizes[1:], device=device),
        slots_of(device),
    )
    rows[3] = torch.full_like(rows[3], float("-inf"))
    y, empty_slots = kernel(name)(*rows, states, slots), torch.zeros_like(states)
    assert torch.equal(y, kernel(name)(*rows, empty_slots, slots))
    assert torch.equal(states[4], empty_slots[4])


@pytest.mark.parametrize("dtype", [HALF, torch.float32], ids=str)
@devices
@pytest.mark.parametrize(("channels", "width", "bias"), [(40, 4, True), (600, 4, False), (7, 2, True), (16, 8, False)])
def test_the_convolution_has_the_bits_of_the_reference(
    channels: int, width: int, bias: bool, dtype: torch.dtype, device: str
) -> None:
    """And that of training has them too."""
    x = random(len(SLOTS), channels + 5, seed=0).to(device, dtype)[:, 3 : 3 + channels]
    weight = random(channels, width, seed=1).to(device, dtype)
    added = random(channels, seed=2).to(device, dtype) if bias else None
    slots, states = slots_of(device), states_of(width - 1, channels, device=device)
    before, others = states.clone(), states.clone()
    for _ in range(width):
        y = kernel("causal_convolution")(x, states, slots, weight_CW=weight, bias_C=added)
        assert torch.equal(y, convolutions.causal_convolution_step(x, others, slots, weight, added))
        assert torch.equal(states, others)
    assert torch.equal(states[[1, 3, 5]], before[[1, 3, 5]])
    assert not states[-1].any()
    assert not kernel("causal_convolution")(x[:0], states, slots[:0], weight).numel()


@devices
def test_the_custom_ops_say_what_they_write(device: str) -> None:
    from surogate_kernels_triton import steps

    rows, slots = make("gated_delta", torch.float32, device, (2, 4, 16, 8)), slots_of(device)
    x, weight = rows[2].flatten(1), random(32, 4, seed=1).to(device, torch.float32)
    for op, arguments in (
        (steps._scan_step, (*rows, states_of(4, 16, 8, device=device), slots, True)),
        (steps._convolution_step, (x, states_of(3, 32, device=device), slots, weight, None)),
    ):
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@both
@devices
def test_no_rows(name: str, device: str) -> None:
    rows, states = make(name, torch.float32, device, (1, 2, 8, 8), rows=0), states_of(2, 8, 8, device=device)
    kept = states.clone()
    assert kernel(name)(*rows, states, slots_of(device, 0)).shape == (0, 2, 8)
    assert torch.equal(states, kept)


@pytest.mark.gpu
@dtypes
@both
def test_shapes_of_models(name: str, dtype: torch.dtype) -> None:
    test_a_step_is_that_of_the_definition(name, SHAPES[name], dtype, "cuda")


@pytest.mark.gpu
def test_states_of_more_than_two_thousand_million_numbers() -> None:
    """Places need 64 bits."""
    for name, (groups, heads, keys, values) in SHAPES.items():
        count = 2**31 // (heads * keys * values) + 5
        states = torch.zeros(count, heads, keys, values, device="cuda")
        rows = make(name, torch.bfloat16, "cuda", (groups, heads, keys, values), rows=2)
        few = torch.zeros(3, heads, keys, values, device="cuda")
        slots = torch.tensor([count - 2, 1], device="cuda")
        y = kernel(name)(*rows, states, slots)
        assert torch.equal(y, kernel(name)(*rows, few, torch.tensor([0, 1], device="cuda")))
        assert torch.equal(states[slots], few[:2])
        states[slots] = 0
        assert not states.any()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*NAMES, "causal_convolution"])
def test_a_captured_step_moves_on_whatever_the_slots_are(name: str) -> None:
    """And gives the bits of calls."""
    shape: tuple[int, ...]
    if name == "causal_convolution":
        rows, shape = [random(6, 8192, seed=0).to("cuda", torch.bfloat16)], (3, 8192)
        named = {"weight_CW": random(8192, 4, seed=1).to("cuda", torch.bfloat16)}
    else:
        rows, shape, named = make(name, torch.bfloat16, "cuda", SHAPES[name]), SHAPES[name][1:], {}
    states, slots = states_of(*shape, device="cuda"), slots_of("cuda")
    kernel(name)(*rows, states.clone(), slots, **named)
    called, graph = states.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kernel(name)(*rows, states, slots, **named)
    for order in (SLOTS, (1, 6, 0, 6, 5, 3), SLOTS):
        slots.copy_(torch.tensor(order))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kernel(name)(*rows, called, slots, **named), y)
        assert torch.equal(called, states)
    assert not states[-1].any()


def test_what_they_take() -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import steps

    q, v, steps_of, slots = torch.empty(4, 2, 24), torch.empty(4, 8, 5), torch.empty(4, 8), torch.empty(4)
    states = torch.empty(3, 8, 24, 5)
    assert steps.takes_delta(q, q, v, steps_of, steps_of, states, slots, chunk=3)
    assert steps.takes_ssd(v.half(), q, q, steps_of, steps_of, states, slots)
    assert not steps.takes_delta(q, q, v.double(), steps_of, steps_of, states, slots)
    for other in (states.double(), states.transpose(0, 1), torch.empty(3, 8, 24, 10)[..., ::2], states[:, :4]):
        assert not steps.takes_delta(q, q, v, steps_of, steps_of, other, slots)
    x, weight = torch.empty(4, 8), torch.empty(8, 4)
    assert steps.takes_convolution(x, torch.empty(3, 3, 8), slots, weight_CW=weight)
    assert not steps.takes_convolution(x, torch.empty(3, 4, 8), slots, weight)
    assert not steps.takes_convolution(x, torch.empty(3, 8, 8), slots, torch.empty(8, 9))
    device = torch.device("cuda")
    for one in steps.kernels():
        assert one.supports(device, torch.float16)
        assert not one.supports(device, torch.float64)
        assert not one.supports(torch.device("cpu"), torch.float32)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or os.environ.get("TRITON_INTERPRET") == "1", reason="Triton interprets")
@pytest.mark.parametrize("capability", SHARED)
def test_every_program_compiles(capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    from surogate_kernels_triton import steps

    slots, weight = empty(16, dtype=torch.int64), empty(8192, 4)
    with recorded(monkeypatch) as launches:
        for name, (groups, heads, keys, values) in SHAPES.items():
            q, v, numbers = empty(16, groups, keys), empty(16, heads, values), empty(16, heads, dtype=torch.float32)
            states = empty(17, heads, keys, values, dtype=torch.float32)
            steps._scan_step._init_fn(q, q, v, numbers, numbers, states, slots, name == "gated_delta")
        states = empty(17, 3, 8192, dtype=torch.float32)
        steps._convolution_step._init_fn(empty(16, 8192), states, slots, weight, None)
    assert {found.program.__name__ for found in launches} == {"scan_step", "convolution_step"}
    check_compiled(launches, capability, tmp_path / "binary")
