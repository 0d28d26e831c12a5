"""Attention, reference and kernels, against its definition in float64; document borders."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from surogate_core.bundles import Kernel, KernelPack
from surogate_core.dsl.trace import Signature, trace_joint
from surogate_core.kernels import ops
from surogate_core.kernels.registry import KernelTable, references, using
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_testing import op_cases
from surogate_testing.op_cases import Op, compare, random, strided

BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-6, torch.bfloat16: 3e-2}
IMPLEMENTATIONS = [
    *[("reference", dtype) for dtype in BOUNDS],
    *[("torch-cpu", dtype) for dtype in BOUNDS],
]
implementations = pytest.mark.parametrize(
    ("kernel", "dtype"), IMPLEMENTATIONS, ids=[f"{k}-{str(d).removeprefix('torch.')}" for k, d in IMPLEMENTATIONS]
)
HEADS = {"as many": (2, 2), "two of four": (4, 2), "one of three": (3, 1)}
BORDERS = {
    "one": [0, 13],
    "three": [0, 5, 6, 13],
    "empty at the end": [0, 5, 13, 13, 13],
    "empty anywhere": [0, 0, 4, 4, 4, 13, 13],
    "single tokens": list(range(14)),
}


def find(kernel: str) -> Op:
    if kernel == "reference":
        return references["attention"].function
    (found,) = [k for k in TORCH_PACK.kernels() if k.op == "attention" and k.name == kernel]
    return found.function


def make(
    n: int, heads: tuple[int, int], features: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = random(n, heads[0], features, seed=0, scale=scale, dtype=dtype)
    k, v = (random(n, heads[1], features, seed=s, scale=scale, dtype=dtype) for s in (1, 2))
    return q, k, v


def borders_of(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@implementations
@pytest.mark.parametrize("layout", [torch.clone, strided], ids=["contiguous", "strided"])
@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
def test_against_the_definition(
    kernel: str, dtype: torch.dtype, heads: tuple[int, int], borders: list[int], layout: Op
) -> None:
    tensors = [layout(t) for t in make(13, heads, 8, dtype)]
    compared = compare(find(kernel), op_cases.attention, [*tensors, borders_of(borders)], 13, 8**-0.5)
    assert compared.values[0].dtype == dtype
    assert compared.error() <= BOUNDS[dtype]


@implementations
@pytest.mark.parametrize("features", [1, 5, 80])
def test_odd_head_sizes(kernel: str, dtype: torch.dtype, features: int) -> None:
    tensors = make(9, (2, 1), features, dtype)
    compared = compare(find(kernel), op_cases.attention, [*tensors, borders_of([0, 4, 9])], 9, features**-0.5)
    assert compared.error() <= BOUNDS[dtype]


@implementations
@pytest.mark.parametrize("scale", [30.0, 1e-8, 0.0], ids=["huge", "tiny", "zero"])
def test_sizes_of_values(kernel: str, dtype: torch.dtype, scale: float) -> None:
    """At 30 the scores reach thousands: softmax picks one key, and exp must not overflow."""
    tensors = make(13, (4, 2), 8, dtype, scale)
    compared = compare(find(kernel), op_cases.attention, [*tensors, borders_of([0, 5, 13])], 13, 8**-0.5)
    # Where softmax has picked a key, dq and dk are what is left of terms of this size.
    size = 8**-0.5 * max(scale, 1e-8) ** 2 if scale == 30.0 else 0.0
    assert compared.error(at_least=[0.0, size, size]) <= BOUNDS[dtype]


@implementations
def test_rows_longer_than_a_kernel_block(kernel: str, dtype: torch.dtype) -> None:
    """Several blocks of queries and keys, against torch's own softmax over each document."""
    tensors = make(700, (2, 1), 16, dtype)
    borders = borders_of([0, 3, 600, 700])

    def definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: object) -> torch.Tensor:
        parts = []
        for rows in (slice(0, 3), slice(3, 600), slice(600, 700)):
            scores = torch.einsum("nhe,me->hnm", q[rows], k[rows, 0]) / 4
            hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
            parts.append(torch.einsum("hnm,me->nhe", scores.masked_fill(hidden, -torch.inf).softmax(-1), v[rows, 0]))
        return torch.cat(parts)

    assert compare(find(kernel), definition, [*tensors, borders], 700, 0.25).error() <= BOUNDS[dtype]


@implementations
def test_a_document_does_not_see_another(kernel: str, dtype: torch.dtype) -> None:
    """Other documents and later tokens of the same document change no bit."""
    q, k, v = make(13, (4, 2), 8, dtype)
    borders = borders_of([0, 5, 13])
    y = find(kernel)(q, k, v, borders, 13, 0.3)
    for t in (q, k, v):
        t[:5] = random(*t[:5].shape, seed=9, dtype=dtype) * 50
        t[10:] = -7
    changed = find(kernel)(q, k, v, borders, 13, 0.3)
    assert torch.equal(changed[5:10], y[5:10])
    assert not torch.equal(changed[:5], y[:5])
    assert not torch.equal(changed[10:], y[10:])


@implementations
def test_nan_is_seen(kernel: str, dtype: torch.dtype) -> None:
    """From where it stands on; kernels also keep it within its document (the reference's sums run over all)."""
    q, k, v = make(13, (4, 2), 8, dtype)
    q[7, 1, 2] = float("nan")
    v[10, 0, 3] = float("nan")
    y = find(kernel)(q, k, v, borders_of([0, 5, 13]), 13, 0.3)
    assert y[7, 1].isnan().all()
    assert y[10:, 0, 3].isnan().all()
    if kernel != "reference":
        assert y[:5].isfinite().all()


# ---------------------------------------------------------------------------- extensions

WINDOWS = (1, 3, 8, 13, 50)
"""Windows below and above the longest document, which has 13 positions."""


KNOWN = {"reference": {"window", "softcap", "sinks"}, "torch-cpu": {"window", "sinks"}}
"""The extensions of each implementation."""


def test_the_cpus_kernel_knows_a_window_and_sinks() -> None:
    (found,) = [k for k in TORCH_PACK.kernels() if k.op == "attention" and k.name == "torch-cpu"]
    assert found.knows == KNOWN["torch-cpu"]
    given = (*make(13, (4, 2), 8, torch.float32), borders_of([0, 13]), 13, 0.3)
    other = (*given[:2], random(13, 2, 5, dtype=torch.float32), *given[3:])
    with using(KernelTable.build(torch.device("cpu"), [TORCH_PACK])) as table:
        ops.attention(*given, window=3)
        ops.attention(*given, window=3, softcap=1.0)
        assert ops.attention(*other).shape == (13, 4, 5)
    assert table.labels == {
        ("attention(window)", "float32"): "torch/torch-cpu",
        ("attention(softcap, window)", "float32"): "reference",
        ("attention", "float32"): "reference",
    }


def extended(op: Op, **settings: object) -> Op:
    """An op whose last tensor is the sinks."""

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, borders: Tensor, *rest: object) -> Tensor:
        return op(q, k, v, borders, *rest, **settings, sinks=sinks)

    return call


@implementations
def test_extensions_against_the_definition(kernel: str, dtype: torch.dtype) -> None:
    """Values and gradients, of sinks too, with grouped heads and values of other features than keys."""
    borders = borders_of([0, 0, 5, 5, 6, 13, 13])
    for heads, window in zip([(2, 2), (4, 2), (3, 1), (4, 1), (4, 2)], WINDOWS, strict=True):
        q, k, v = make(13, heads, 8, dtype)
        sinks = random(heads[0], seed=3, dtype=dtype)
        if kernel == "reference":
            v = v[..., :5]
        for settings in ({"window": window}, {"softcap": 0.6}, {}, {"window": window, "softcap": 0.6}):
            if not settings.keys() <= KNOWN[kernel]:
                continue
            pair = [extended(op, **settings) for op in (find(kernel), op_cases.attention)]
            compared = compare(*pair, [q, k, v, sinks, borders], 13, 0.3)
            assert compared.values[0].dtype == dtype
            assert compared.error() <= BOUNDS[dtype], settings
            plain = [partial(op, **settings) for op in (find(kernel), op_cases.attention)]
            assert compare(*plain, [q, k, v, borders], 13, 0.3).error() <= BOUNDS[dtype], settings


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("window", [1, 63, 65, 600, 1100])
def test_windows_over_several_blocks_of_the_cpus_kernel(window: int, dtype: torch.dtype) -> None:
    """Blocks of keys that a row does not see at all, and spans that end within a document."""
    q, k, v = make(1400, (2, 1), 4, dtype)
    sinks = random(2, seed=3, dtype=dtype)
    pair = [extended(find(kernel), window=window) for kernel in ("torch-cpu", "reference")]
    compared = compare(*pair, [q, k, v, sinks, borders_of([0, 3, 1370, 1400])], 1367, 0.3)
    assert compared.error() <= BOUNDS[dtype]


def test_a_window_as_long_as_the_documents_hides_nothing() -> None:
    tensors = (*make(13, (4, 2), 8, torch.float32), borders_of([0, 5, 13]), 13, 0.3)
    assert torch.equal(ops.attention(*tensors, window=8), ops.attention(*tensors))
    assert not torch.equal(ops.attention(*tensors, window=7), ops.attention(*tensors))


def test_no_kernel_is_asked_for_a_window_that_no_document_exceeds() -> None:
    """So one that knows none serves, and the bits are those without a window."""
    tensors = (*make(13, (4, 2), 8, torch.float32), borders_of([0, 5, 13]))
    for longest, window, label in ((13, 13, "attention"), (13, 1 << 20, "attention"), (13, 12, "attention(window)")):
        with using(KernelTable.build(torch.device("cpu"), [TORCH_PACK])) as table:
            y = ops.attention(*tensors, longest, 0.3, window=window, sinks=None)
            plain = ops.attention(*tensors, longest, 0.3)
        assert (label, "float32") in table.labels
        assert torch.equal(y, plain)


def test_positions_before_the_window_change_no_bit() -> None:
    q, k, v = make(13, (4, 2), 8, torch.float32)
    settings = {"window": 4, "softcap": 2.0, "sinks": random(4, dtype=torch.float32)}
    y = ops.attention(q, k, v, borders_of([0, 13]), 13, 0.3, **settings)
    k[:6], v[:6] = 50.0, -50.0
    changed = ops.attention(q, k, v, borders_of([0, 13]), 13, 0.3, **settings)
    assert torch.equal(changed[9:], y[9:])
    assert not torch.equal(changed[8], y[8])


def test_a_kernel_without_extensions_gets_six_positional_arguments() -> None:
    calls: list[tuple[int, set[str]]] = []

    def old(*args: object, **named: object) -> Tensor:
        calls.append((len(args), set(named)))
        return args[0]

    offered = Kernel(op="attention", name="old", function=old, supports=lambda device, dtype: True)
    given = (*make(13, (4, 2), 8, torch.float32), borders_of([0, 13]), 13, 0.3)
    with using(KernelTable.build(torch.device("cpu"), [KernelPack(name="test", kernels=lambda: [offered])])) as table:
        ops.attention(*given)
        ops.attention(*given, window=0, softcap=0.0, sinks=None)
        assert calls == [(6, set())] * 2
        ops.attention(*given, window=3, sinks=torch.zeros(4))
        assert len(calls) == 2
    assert table.labels == {
        ("attention", "float32"): "test/old",
        ("attention(sinks, window)", "float32"): "reference",
    }


def test_extensions_at_their_defaults_leave_the_traced_graph_as_it_is() -> None:
    shapes = [(13, 4, 8), (13, 2, 8), (13, 2, 8)]
    cpu = torch.device("cpu")
    inputs = [Signature(shape, torch.float32, cpu, requires_grad=True) for shape in shapes]
    inputs.append(Signature((3,), torch.int32, cpu, requires_grad=False))

    def traced(**settings: object) -> str:
        return str(trace_joint(lambda *t: ops.attention(*t, 13, 0.3, **settings) * 2, inputs).graph)

    for packs in ([], [TORCH_PACK]):
        with using(KernelTable.build(cpu, packs)):
            assert traced(window=0, softcap=0.0, sinks=None) == traced()


# ---------------------------------------------------------------------------------- CUDA


@pytest.mark.gpu
@pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("features", [16, 64, 128])
def test_flash_against_the_reference(heads: tuple[int, int], borders: list[int], features: int) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    tensors = [t.cuda() for t in make(13, heads, features, torch.bfloat16)]
    cu_seqlens = borders_of(borders).cuda()
    compared = compare(
        find("torch-flash"), references["attention"].function, [*tensors, cu_seqlens], 13, features**-0.5
    )
    assert compared.error() <= BOUNDS[torch.bfloat16]


@pytest.mark.gpu
def test_flash_on_long_rows() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    tensors = [t.cuda() for t in make(3000, (4, 2), 64, torch.bfloat16)]
    cu_seqlens = borders_of([0, 1, 700, 2999, 3000, 3000, 3000]).cuda()
    compared = compare(find("torch-flash"), references["attention"].function, [*tensors, cu_seqlens], 3000, 0.125)
    assert compared.error() <= BOUNDS[torch.bfloat16]
