"""Tests of a kernel pack's attention on a GPU, against the reference in float64 and for repeatable bits.

A pack's tests subclass `PackedAttention` and state what the pack supports. `LAYERS` are attentions with windows, soft
caps, sinks and other sizes of heads; a kernel that knows and takes one must compute it. Shapes are [N, H, E].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from surogate_core.plugin import bundles, ops
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """An attention as a block may declare it."""

    heads: tuple[int, int] = (4, 2)
    keys: int = 128
    """Features of a head of queries and keys."""
    values: int = 0
    """Features of a head of values; 0: as many."""
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        """The extensions of a call but sinks."""
        named = {"window": self.window, "softcap": self.softcap}
        return {name: value for name, value in named.items() if value}

    @property
    def borders(self) -> list[int]:
        """Documents of 1, 2, window - 1, window and window + 1 tokens, and a longer one; an empty one at the end."""
        size = self.window or 40
        return [0, *accumulate([1, 2, size - 1, size, size + 1, 2 * size + 50, 0])]

    def tensors(self, dtype: torch.dtype, device: str, tokens: int = 0) -> list[torch.Tensor]:
        """q, k, v and, if it has them, sinks, of which one is very large and one very small."""
        tokens, (heads, kv_heads) = tokens or self.borders[-1], self.heads
        shapes = ((heads, self.keys), (kv_heads, self.keys), (kv_heads, self.values or self.keys))
        made = [random(tokens, *shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes)]
        if self.sinks:
            sinks = random(heads, seed=3, dtype=dtype)
            sinks[:2] = torch.tensor([30.0, -1e4])[:heads]
            made.append(sinks)
        return [t.to(device) for t in made]

    def call(self, attention: Attention, *tensors: torch.Tensor, longest: int = 0) -> torch.Tensor:
        """Call the op with q, k, v, the sinks if the layer has them, and the borders."""
        q, k, v, *sinks, borders = tensors
        named = self.settings | dict(zip(["sinks"], sinks, strict=False))
        return attention(q, k, v, borders, longest or len(q), self.keys**-0.5, **named)

    def compared(
        self, attention: Attention, dtype: torch.dtype, *, device: str = "cuda", borders: list[int] | None = None
    ) -> float:
        """The error against the reference in float64, forward and backward."""
        values = borders or self.borders
        tensors = [*self.tensors(dtype, device, values[-1]), torch.tensor(values, dtype=torch.int32, device=device)]
        mine, wanted = (partial(self.call, op) for op in (attention, ops.attention))
        # A query that sees one key has no gradient of q and k, only rounding errors.
        return compare(mine, wanted, tensors).error(at_least=[0.0, 0.05, 0.05, 0.0, 0.05][: len(tensors)])


def _layers() -> dict[str, Layer]:
    every = {f"window {size}": Layer(window=size, heads=(2, 1)) for size in (1, 2, 5, 37, 64, 70, 128, 130, 200)}
    every |= {"soft cap": Layer(softcap=2.0), "sinks": Layer(sinks=True), "no groups": Layer(heads=(3, 3), window=17)}
    every |= {
        "window and sinks": Layer(window=70, sinks=True, heads=(8, 1)),
        "window and soft cap": Layer(window=70, softcap=2.0),
        "soft cap and sinks": Layer(softcap=2.0, sinks=True),
        "everything": Layer(window=37, softcap=2.0, sinks=True),
    }
    for keys, values in ((64, 0), (96, 0), (192, 0), (256, 0), (512, 0), (192, 128), (64, 128), (128, 64), (80, 24)):
        size = f"{keys} and {values}" if values else f"{keys}"
        every[f"features {size}"] = Layer(heads=(2, 1), keys=keys, values=values)
        every[f"features {size}, everything"] = Layer(
            heads=(2, 1), keys=keys, values=values, window=37, softcap=2.0, sinks=True
        )
    return every


LAYERS = _layers()


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


def unread_keys(layer: Layer, attention: Attention, dtype: torch.dtype, device: str) -> None:
    """Keys and values far outside of a window are not multiplied by zero: they may be NaN."""
    q, k, v = (t.requires_grad_() for t in layer.tensors(dtype, device, 400))
    borders = torch.tensor([0, 400], dtype=torch.int32, device=device)
    wanted = layer.call(attention, q, k, v, borders)
    gradients = torch.autograd.grad(wanted[330:].sum(), (q, k, v))
    with torch.no_grad():
        for t in (q, k, v):
            t[:100] = float("nan")
    y = layer.call(attention, q, k, v, borders)
    assert torch.equal(y[330:], wanted[330:])
    for mine, expected in zip(torch.autograd.grad(y[330:].sum(), (q, k, v)), gradients, strict=True):
        assert torch.equal(mine[330:], expected[330:])


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

    def kernel(self) -> bundles.Kernel:
        """The pack's kernel of `attention`."""
        found: bundles.Kernel = next(k for k in self.pack.kernels() if k.op == "attention")
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

    def needs(self, layer: Layer) -> None:
        """Skip the test if the kernel does not know or take an attention."""
        kernel, tensors = self.kernel(), layer.tensors(self.dtypes[0], "cpu", 4)
        named = layer.settings | dict(zip(["sinks"], tensors[3:], strict=False))
        if unknown := named.keys() - kernel.knows:
            pytest.skip(f"the kernel does not know {', '.join(sorted(unknown))}")
        if not kernel.takes(*tensors[:3], torch.tensor([0, 4]), 4, layer.keys**-0.5, **named):
            pytest.skip("the kernel does not take these sizes")

    @pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
    def test_layers(self, attention: Attention, layer: Layer) -> None:
        """Values and gradients, of sinks too, with windows shorter and longer than a tile."""
        self.needs(layer)
        for dtype in self.dtypes:
            assert layer.compared(attention, dtype) <= BOUNDS[dtype], dtype

    @pytest.mark.parametrize("layer", [Layer(window=512), Layer(window=1024, sinks=True)], ids=["512", "1024, sinks"])
    def test_windows_of_long_documents(self, attention: Attention, layer: Layer) -> None:
        self.needs(layer)
        for borders in ([0, 3000], [0, 1, 700, 2999, 3000]):
            assert layer.compared(attention, self.dtypes[0], borders=borders) <= BOUNDS[self.dtypes[0]]

    def test_what_no_window_reaches_is_not_read(self, attention: Attention) -> None:
        self.needs(layer := Layer(window=60))
        unread_keys(layer, attention, self.dtypes[0], "cuda")

    def test_equal_bits_with_everything(self, attention: Attention) -> None:
        """Gradients of sinks are sums over all rows."""
        self.needs(layer := Layer(window=200, sinks=True, heads=(16, 8)))
        leaves = [t.requires_grad_() for t in layer.tensors(self.dtypes[0], "cuda", 4096)]
        borders = borders_of([0, 1, 700, 2048, 2100, 4000, 4096, 4096])

        def bits() -> list[torch.Tensor]:
            y = layer.call(attention, *leaves, borders)
            return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]

        first = bits()
        assert all(torch.equal(a, b) for _ in range(10) for a, b in zip(bits(), first, strict=True))

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
