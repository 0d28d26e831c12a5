"""Tests of a kernel pack's attention on a GPU, against the reference in float64 and for repeatable bits.

A pack's tests subclass `PackedAttention` and state what the pack supports. Shapes are [N, H, E].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from surogate_core.bundles import Kernel
from surogate_core.kernels import ops
from surogate_testing import op_cases
from surogate_testing.op_cases import Compared, compare, random

Attention = Callable[..., torch.Tensor]

BOUNDS = {torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Largest error over the largest value of a tensor. Weights and gradients of scores are rounded to 8 or 11 bits before
they are multiplied, results once more."""
BORDERS = {
    "one document": [0, 300],
    "even": [0, 128, 256, 300],
    "odd": [0, 1, 8, 141, 142, 299, 300],
    "single tokens": list(range(301)),
    "one and many empty": [0, 300, *[300] * 200],
    "empty anywhere": [0, 0, 4, 4, 4, 130, 130, 300, 300],
}
HEADS = [(4, 4), (4, 2), (4, 1), (8, 1)]

EXTENSIONS: dict[str, tuple[object, ...]] = {"window": (3, 70, 200), "softcap": (2.0,), "sinks": (None,)}
"""Extension → values that are tried; sinks are drawn."""


def _with_sinks(attention: Attention) -> Attention:
    def call(*args: torch.Tensor) -> torch.Tensor:
        q, k, v, sinks, *rest = args
        return attention(q, k, v, *rest, sinks=sinks)

    return call


def make(
    n: int, heads: tuple[int, int], features: int, dtype: torch.dtype, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q [N, heads[0], E], k and v [N, heads[1], E] on the GPU."""
    q = random(n, heads[0], features, seed=0, scale=scale, dtype=dtype).cuda()
    k, v = (random(n, heads[1], features, seed=s, scale=scale, dtype=dtype).cuda() for s in (1, 2))
    return q, k, v


def borders_of(values: list[int]) -> torch.Tensor:
    """`cu_seqlens` on the GPU."""
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def against_reference(
    attention: Attention, tensors: tuple[torch.Tensor, ...], borders: list[int], scale: float
) -> Compared:
    """q, k and v through a pack's attention and through the reference in float64, forward and backward."""
    longest = max(b - a for a, b in pairwise(borders))
    return compare(attention, ops.attention, [*tensors, borders_of(borders)], longest, scale)


def run(attention: Attention, tensors: list[torch.Tensor], borders: torch.Tensor) -> list[bytes]:
    """The bits of the output and of the gradients; tensors are q, k, v and the output's gradient."""
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    y = attention(*leaves, borders, 2048, 128**-0.5)
    values = [y.detach(), *torch.autograd.grad(y, leaves, tensors[3])]
    return [t.view(torch.int16).cpu().numpy().tobytes() for t in values]


class PackedAttention:
    """Tests that every pack's attention must pass; a pack's tests subclass it."""

    pack: ClassVar[ModuleType]
    """The plugin's module."""
    features: ClassVar[tuple[int, ...]] = (128,)
    """Head sizes that the kernels support."""
    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    pytestmark = pytest.mark.gpu

    def kernel(self) -> Kernel:
        """The pack's kernel of `attention`."""
        found: Kernel = next(k for k in self.pack.kernels() if k.op == "attention")
        return found

    @pytest.fixture
    def attention(self) -> Attention:
        """The pack's kernel; skips the test if the GPU cannot run it."""
        device = torch.device("cuda")
        reason = self.pack.unavailable(device)
        if reason is not None:
            pytest.skip(reason)
        kernel = self.kernel()
        assert all(kernel.supports(device, dtype) for dtype in self.dtypes)
        assert not kernel.supports(device, torch.float32)
        function: Attention = kernel.function
        return function

    @pytest.mark.parametrize("borders", BORDERS.values(), ids=BORDERS)
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_against_the_reference(self, attention: Attention, heads: tuple[int, int], borders: list[int]) -> None:
        for features in self.features:
            for dtype in self.dtypes:
                compared = against_reference(attention, make(300, heads, features, dtype), borders, features**-0.5)
                assert compared.error() <= BOUNDS[dtype], (features, dtype)

    @pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 127, 128, 129, 1000])
    def test_any_number_of_tokens(self, attention: Attention, tokens: int) -> None:
        for borders in ([0, tokens], [0, (tokens + 1) // 2, tokens], [0, tokens // 3, tokens, tokens]):
            compared = against_reference(attention, make(tokens, (4, 2), 128, torch.bfloat16), borders, 0.1)
            assert compared.error() <= BOUNDS[torch.bfloat16]

    def test_long_documents(self, attention: Attention) -> None:
        borders = [0, 1, 700, 2999, 3000, 3000]
        for features in self.features:
            tensors = make(3000, (4, 2), features, torch.bfloat16)
            compared = against_reference(attention, tensors, borders, features**-0.5)
            assert compared.error() <= BOUNDS[torch.bfloat16], features

    @pytest.mark.parametrize("scale", [30.0, 1e-8, 0.0], ids=["huge", "tiny", "zero"])
    def test_sizes_of_values(self, attention: Attention, scale: float) -> None:
        """At 30 the scores reach thousands: softmax picks one key, and exp must not overflow."""
        compared = against_reference(attention, make(300, (4, 2), 128, torch.bfloat16, scale), [0, 141, 300], 128**-0.5)
        # If softmax has picked one key, dq and dk are differences of terms of this size.
        size = 128**-0.5 * max(scale, 1e-8) ** 2 if scale == 30.0 else 0.0
        assert compared.error(at_least=[0.0, size, size]) <= BOUNDS[torch.bfloat16]

    def test_other_layouts(self, attention: Attention) -> None:
        """Slices of one buffer, which are read in place, and layouts that must be copied first."""
        fused = random(300, 8, 128, dtype=torch.bfloat16).cuda()
        sliced = (fused[:, :4], fused[:, 4:6], fused[:, 6:])
        assert against_reference(attention, sliced, [0, 141, 300], 0.1).error() <= BOUNDS[torch.bfloat16]
        heads_first = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in sliced)
        assert torch.equal(
            attention(*sliced, borders_of([0, 300]), 300, 0.1), attention(*heads_first, borders_of([0, 300]), 300, 0.1)
        )
        strided = tuple(op_cases.strided(t.cpu()).cuda() for t in sliced)
        assert against_reference(attention, strided, [0, 141, 300], 0.1).error() <= BOUNDS[torch.bfloat16]

    @pytest.mark.parametrize("seed", range(12))
    def test_many_documents_at_random(self, attention: Attention, seed: int) -> None:
        """Each warpgroup skips the tiles that its documents do not reach; a mistake there hangs or loses a block."""
        generator = torch.Generator().manual_seed(seed)
        tokens = int(torch.randint(1, 1200, (), generator=generator))
        count = int(torch.randint(0, [3, 12, 80][seed % 3], (), generator=generator))
        inside = torch.randint(0, tokens + 1, (count,), generator=generator).sort().values.tolist()
        heads = [(4, 4), (8, 2), (5, 1)][seed % 3]
        compared = against_reference(
            attention, make(tokens, heads, 128, torch.bfloat16), [0, *inside, tokens, tokens], 128**-0.5
        )
        # A document of one token has no gradient of q and k, only rounding errors.
        assert compared.error(at_least=[0.0, 0.05, 0.05, 0.0]) <= BOUNDS[torch.bfloat16]

    @pytest.mark.parametrize("name", EXTENSIONS)
    def test_extensions_that_it_knows(self, attention: Attention, name: str) -> None:
        """Values and gradients, of sinks too, with a window shorter and longer than a tile."""
        if name not in self.kernel().knows:
            pytest.skip(f"the kernel does not know {name}")
        borders = [0, 141, 142, 300, 300]
        for value in EXTENSIONS[name]:
            if name == "sinks":
                sinks = random(4, seed=3, dtype=torch.bfloat16).cuda()
                mine, wanted = (_with_sinks(op) for op in (attention, ops.attention))
                tensors = [*make(300, (4, 2), 128, torch.bfloat16), sinks, borders_of(borders)]
            else:
                mine, wanted = (partial(op, **{name: value}) for op in (attention, ops.attention))
                tensors = [*make(300, (4, 2), 128, torch.bfloat16), borders_of(borders)]
            assert compare(mine, wanted, tensors, 158, 0.1).error() <= BOUNDS[torch.bfloat16], value

    def test_a_document_does_not_see_another(self, attention: Attention) -> None:
        """Other documents and later tokens of the same document change no bit."""
        q, k, v = make(300, (4, 2), 128, torch.bfloat16)
        borders = borders_of([0, 141, 300])
        y = attention(q, k, v, borders, 300, 0.1)
        for t in (q, k, v):
            t[:141] = random(*t[:141].shape, seed=9, dtype=torch.bfloat16).cuda() * 50
            t[200:] = -7
        changed = attention(q, k, v, borders, 300, 0.1)
        assert torch.equal(changed[141:200], y[141:200])
        assert not torch.equal(changed[:141], y[:141])

    def test_nan_is_seen(self, attention: Attention) -> None:
        q, k, v = make(300, (4, 2), 128, torch.bfloat16)
        q[200, 1, 2] = float("nan")
        v[280, 0, 3] = float("nan")
        y = attention(q, k, v, borders_of([0, 60, 300]), 300, 0.1)
        assert y[200, 1].isnan().all()
        assert y[280:, 0, 3].isnan().all()
        assert y[:60].isfinite().all()

    def test_equal_inputs_give_equal_bits(self, attention: Attention) -> None:
        """Ten times alone, ten times while another stream keeps the GPU busy."""
        tensors = [
            *make(4096, (16, 8), 128, torch.bfloat16),
            random(4096, 16, 128, seed=4, dtype=torch.bfloat16).cuda(),
        ]
        borders = borders_of([0, 1, 700, 2048, 2100, 4000, 4096, 4096])
        first = run(attention, tensors, borders)
        assert all(run(attention, tensors, borders) == first for _ in range(10))
        load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        for _ in range(10):
            with torch.cuda.stream(side):
                for _ in range(5):
                    load @ load
            assert run(attention, tensors, borders) == first
        torch.cuda.synchronize()

    def test_a_captured_graph_takes_new_borders(self, attention: Attention) -> None:
        """The launch does not depend on the borders of documents: one graph works for all packings."""
        q, k, v = (t.requires_grad_() for t in make(600, (4, 2), 128, torch.bfloat16))
        dy, borders = torch.randn_like(q), borders_of([0, 600, 600, 600])
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.autograd.grad(attention(q, k, v, borders, 600, 0.1), (q, k, v), dy)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = attention(q, k, v, borders, 600, 0.1)
            grads = torch.autograd.grad(y, (q, k, v), dy)
        borders.copy_(borders_of([0, 77, 78, 600]))
        graph.replay()
        expected = attention(q, k, v, borders, 600, 0.1)
        assert torch.equal(y, expected)
        for grad, value in zip(grads, torch.autograd.grad(expected, (q, k, v), dy), strict=True):
            assert torch.equal(grad, value)
