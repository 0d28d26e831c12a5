"""SwiGLU inside the projections around it: the kernel against float64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import surogate_kernels_cuda
import torch
from torch import Tensor

from surogate_core.plugin import compute

pytestmark = pytest.mark.gpu

R, SCALE = 16, 2.0


@pytest.fixture(autouse=True)
def _needs_the_pack() -> None:
    reason = surogate_kernels_cuda.unavailable(torch.device("cuda"))
    if reason is not None:
        pytest.skip(reason)
    pytest.importorskip("triton")


def random(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).bfloat16().cuda()


def shapes(
    width: int, features: int, dropout: float = 0.0, rank: int = R
) -> tuple[compute.PanelShape, compute.PanelShape]:
    up = compute.PanelShape(
        inputs=width, outputs=(features,) * 2, rank=rank, scale=SCALE, dropout=dropout, salts=(0, 1)
    )
    return up, compute.PanelShape(
        inputs=features, outputs=(width,), rank=rank, scale=SCALE, dropout=dropout, salts=(2,)
    )


def panel(shape: compute.PanelShape, seed: int) -> tuple[Tensor, list[Tensor]]:
    """A panel and its adapters, which bf16 holds."""
    made = shape.allocate(torch.device("cuda"), torch.bfloat16)
    adapters = []
    for number, outputs in enumerate(shape.outputs):
        shape.weight(made, number).copy_(random(outputs, shape.inputs, seed=seed + number, scale=shape.inputs**-0.5))
        adapters.append(random(shape.rank, shape.inputs, seed=seed + 10 + number, scale=shape.inputs**-0.5).float())
        adapters.append(random(outputs, shape.rank, seed=seed + 20 + number, scale=0.05).float())
    shape.load(made, list(zip(adapters[::2], adapters[1::2], strict=True)))
    return made, adapters


def close(found: Tensor, expected: Tensor, bound: float = 1.5e-2) -> bool:
    """Values were rounded to 8 bits before they were multiplied, and results once more."""
    assert found.shape == expected.shape
    return bool((found.double() - expected).abs().max() <= bound * expected.abs().max() + 1e-30)


@pytest.mark.parametrize(
    ("tokens", "features"), [*product([1, 15, 16, 17, 300, 1000], [256, 768]), (2900, 1280), (4096, 2560)]
)
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e-6, 0.0], ids=["one", "huge", "tiny", "zero"])
def test_the_kernel_is_its_formulas(tokens: int, features: int, scale: float) -> None:
    from surogate_kernels_cuda.gated import gated_backward

    width = 128
    shape, _ = shapes(width, features)
    both, _ = panel(shape, 0)
    joined = random(tokens, 2 * features, seed=1, scale=scale)
    gate, up = joined[:, :features], joined[:, features:]
    dh, du_down = random(tokens, features, seed=2), random(tokens, R, seed=3)
    x, u = random(tokens, width + 128, seed=4), random(tokens, 2 * R, seed=5)
    dx, da, db, da_down = gated_backward(dh, gate, up, du_down, x, u, both, width, R, SCALE)

    g, v, d = (t.double() for t in (gate, up, dh))
    sigmoid = torch.sigmoid(g)
    dgate, dup = d * v * sigmoid * (1 + g * (1 - sigmoid)), d * g * sigmoid
    dy = torch.cat((dgate, dup), 1)
    wide = both.double()
    du = dy @ wide[: 2 * features, width : width + 2 * R]
    assert close(dx, dy @ wide[: 2 * features, :width] + du @ wide[2 * features :, :width])
    assert close(da, du.t() @ x[:, :width].double())
    expected = [dgate.t() @ u[:, :R].double(), dup.t() @ u[:, R:].double()]
    assert close(db, SCALE * torch.cat(expected))
    assert close(da_down, du_down.double().t() @ (g * sigmoid * v))


def test_rows_past_4_gibi_elements_are_computed_too() -> None:
    """174,763 rows and more of a feed-forward part of 12,288: what an 8B model's rows of 256k tokens need."""
    from surogate_kernels_cuda.gated import gated_backward

    tokens, features, width, rows = 174_900, 12_288, 128, 300
    if torch.cuda.mem_get_info()[0] < 50 * 2**30:
        pytest.skip("needs 50 GiB")
    shape, _ = shapes(width, features)
    both, _ = panel(shape, 0)
    joined = torch.zeros(tokens, 2 * features, dtype=torch.bfloat16, device="cuda")
    dh = torch.zeros(tokens, features, dtype=torch.bfloat16, device="cuda")
    # Only the last rows are not zero, so all sums are theirs.
    joined[-rows:], dh[-rows:] = random(rows, 2 * features, seed=1), random(rows, features, seed=2)
    du_down, x, u = random(tokens, R, seed=3), random(tokens, width + 128, seed=4), random(tokens, 2 * R, seed=5)
    found = gated_backward(dh, joined[:, :features], joined[:, features:], du_down, x, u, both, width, R, SCALE)
    few = [t[-rows:].contiguous() for t in (dh, joined[:, :features], joined[:, features:], du_down, x, u)]
    dx, *sums = gated_backward(*few, both, width, R, SCALE)
    assert not found[0][:-rows].any()
    # The products of few rows add in another order.
    assert close(found[0][-rows:], dx.double())
    for long, short in zip(found[1:], sums, strict=True):
        assert close(long, short.double(), 1e-4)


def test_a_nan_is_seen_and_equal_inputs_give_equal_bits() -> None:
    from surogate_kernels_cuda.gated import gated_backward

    shape, _ = shapes(128, 512)
    both, _ = panel(shape, 0)
    joined = random(2100, 1024, seed=1)
    arguments: list[Any] = [random(2100, 512, seed=2), joined[:, :512], joined[:, 512:], random(2100, R, seed=3)]
    arguments += [random(2100, 256, seed=4), random(2100, 2 * R, seed=5), both, 128, R, SCALE]
    first = gated_backward(*arguments)
    load, side = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    for _ in range(5):
        with torch.cuda.stream(side):
            load @ load
        assert all(torch.equal(a, b) for a, b in zip(gated_backward(*arguments), first, strict=True))
    joined[7, 3] = float("nan")
    dx, _, db, da_down = gated_backward(*arguments)
    assert dx[7].isnan().all()
    assert dx[8].isfinite().all()
    assert db[3].isnan().all()
    assert da_down[:, 3].isnan().all()
