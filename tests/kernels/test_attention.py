"""Attention, reference and kernels, against its definition in float64; document borders."""

from __future__ import annotations

import pytest
import torch

from surogate_core.kernels.registry import references
from surogate_core.kernels.torch_pack import TORCH_PACK
from surogate_core.testing import op_cases
from surogate_core.testing.op_cases import Op, compare, random, strided

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
