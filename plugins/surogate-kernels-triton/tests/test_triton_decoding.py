"""Kernels of generation against their references in float64: on a GPU or, with TRITON_INTERPRET=1, in the interpreter.

`test_in_the_interpreter` runs this file in a process of its own where triton is installed and there is no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.service.kernels import decoding as ops
from surogate_testing.interpreter import INTERPRETED, devices, run_interpreted, starts_interpreter
from surogate_testing.op_cases import random

BOUND = {torch.bfloat16: 1.5e-2, torch.float16: 2e-3, torch.float32: 1e-5}
DTYPES = [dtype for dtype in BOUND if not INTERPRETED or dtype != torch.bfloat16]
"""The interpreter multiplies no matrices in bf16."""


@starts_interpreter
def test_in_the_interpreter() -> None:
    run_interpreted(__file__)


def kernel(op: str) -> Callable[..., Any]:
    import surogate_kernels_triton

    return next(k.function for k in surogate_kernels_triton.kernels() if k.op == op)


# --------------------------------------------------------------------------- attention


def case(
    lengths: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    features: int = 64,
    values: int | None = None,
    context: int = 700,
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
) -> list[Tensor]:
    """(q, k, v, keys, values, slots, positions): a row for each number of positions before its own; -1 for a row of the
    last slot. Positions that no row sees are NaN.
    """
    rows, values = len(lengths), values or features
    made = [random(rows, heads, features, seed=1, scale=2.0), random(rows, kv_heads, features, seed=2)]
    made += [random(rows, kv_heads, values, seed=3), random(rows + 2, context, kv_heads, features, seed=4)]
    made += [random(rows + 2, context, kv_heads, values, seed=5)]
    slots = torch.arange(rows - 1, -1, -1)
    for n, length in enumerate(lengths):
        for cache in made[3:]:
            cache[slots[n], max(length, 0) :] = float("nan")
        if length < 0:
            slots[n] = rows + 1
    positions = torch.tensor(lengths).clamp(min=0)
    return [*(t.to(dtype).to(device) for t in made), slots.to(device), positions.to(device)]


def run(
    attend: Callable[..., Tensor], tensors: list[Tensor], *, longest: int = 0, **named: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(the result, the caches afterwards)."""
    q, k, v, keys, values, slots, positions = tensors
    keys, values = keys.clone(), values.clone()
    found = attend(q, k, v, keys, values, slots, positions, longest or int(positions.max()) + 1, 0.2, **named)
    return found, keys, values


def check(tensors: list[Tensor], *, longest: int = 0, **named: Any) -> Tensor:
    """The kernel's result, which is the reference's as exactly as its dtype allows; so are the caches."""
    found, keys, values = run(kernel("slot_attention"), tensors, longest=longest, **named)
    exact = [t.double() if t.is_floating_point() else t for t in tensors]
    expected, *caches = run(ops.slot_attention, exact, longest=longest, **named)
    assert found.dtype == tensors[0].dtype
    assert found.shape == expected.shape
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error <= BOUND[found.dtype], f"{error:.1e}"
    for cache, wanted in zip((keys, values), caches, strict=True):
        assert torch.equal(cache[:-1].double().nan_to_num(), wanted[:-1].nan_to_num())
    return found


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "features", "values"),
    [
        *((4, 2, 64, None), (3, 3, 80, None), (8, 1, 96, None), (32, 1, 128, None), (4, 2, 256, None), (4, 2, 96, 64)),
        *((4, 1, 512, None), (4, 2, 192, 128)),
    ],
)
def test_attention(
    device: str, dtype: torch.dtype, heads: int, kv_heads: int, features: int, values: int | None
) -> None:
    tensors = case(
        [0, 1, 300, -1, 64],
        heads=heads,
        kv_heads=kv_heads,
        features=features,
        values=values,
        dtype=dtype,
        device=device,
    )
    if dtype == torch.float32 and features == 512:
        pytest.skip("the reference runs")
    check(tensors)


@devices
@pytest.mark.parametrize("length", [0, 1, 31, 32, 63, 64, 65, 255, 256, 257, 511, 512, 513])
def test_lengths_at_borders(device: str, length: int) -> None:
    check(case([length, 5], device=device))
    check(case([length], kv_heads=1, heads=1, device=device), longest=700)


@devices
@pytest.mark.parametrize("named", [{}, {"window": 40}], ids=["all", "window"])
def test_rows_of_one_slot_have_the_bits_of_a_row_at_a_time(device: str, named: dict[str, Any]) -> None:
    """If the slot has their keys and values before, in chunks and in a ring."""
    attend, context = kernel("slot_attention"), 64 if named else 700
    q, k, v, keys, values, _, _ = case([0] * 16, context=context, device=device)
    keys[5], values[5] = keys[5].nan_to_num(), values[5].nan_to_num()
    slots, positions = torch.full((16,), 5, device=device), torch.arange(250, 266, device=device)
    one_by_one, together = (keys.clone(), values.clone()), (keys.clone(), values.clone())
    expected = []
    for n in range(16):
        row = slice(n, n + 1)
        expected.append(attend(q[row], k[row], v[row], *one_by_one, slots[row], positions[row], 300, 0.2, **named))
    for cache, rows in zip(together, (k, v), strict=True):
        cache[slots, positions % context] = rows
    for _ in range(1 if device == "cpu" else 20):
        found = attend(q, k, v, *together, slots, positions, 300, 0.2, **named)
        assert torch.equal(found, torch.cat(expected))
    assert torch.equal(together[0][5], one_by_one[0][5])


@devices
def test_a_rows_bits_do_not_depend_on_the_batch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the other rows, nor on whether chunks are split over programs, nor on `longest`."""
    from surogate_kernels_triton import decoding

    lengths = [600, 0, 17, -1, 256, 513]
    tensors = case(lengths, device=device)
    found = check(tensors)
    assert not found[3].any()
    for split in (False, True):
        monkeypatch.setattr(decoding, "splits", lambda device, pairs, chunks, split=split: split)
        assert torch.equal(run(kernel("slot_attention"), tensors)[0], found)
        assert torch.equal(run(kernel("slot_attention"), tensors, longest=700)[0], found)
        for n in (0, 2, 5):
            rows = slice(n, n + 1)
            alone = [*(t[rows] for t in tensors[:3]), *tensors[3:5], *(t[rows] for t in tensors[5:])]
            assert torch.equal(run(kernel("slot_attention"), alone)[0][0], found[n])


def rings(positions: list[int], window: int, places: int, **sizes: Any) -> list[Tensor]:
    """Rows at these positions, whose slots are rings; places that no row sees are NaN."""
    tensors = case([places] * len(positions), context=places, **sizes)
    for n, position in enumerate(positions):
        seen = {p % places for p in range(max(position - window + 1, 0), position)}
        for cache in tensors[3:5]:
            cache[tensors[5][n], [p for p in range(places) if p not in seen]] = float("nan")
    return [*tensors[:6], torch.tensor(positions).to(tensors[6])]


def sinks_of(heads: int, dtype: torch.dtype, device: str) -> Tensor:
    """One is very large, one very small."""
    sinks = random(heads, seed=6)
    sinks[:2] = torch.tensor([30.0, -1e4])
    return sinks.to(dtype).to(device)


@devices
@pytest.mark.parametrize("window", [1, 2, 5, 64, 100, 257, 300])
def test_windows(device: str, window: int) -> None:
    """Rings of the window, longer ones, and slots that are longer than every position."""
    positions = [0, 1, window - 1, window, window + 1, 3 * window + 7, 700]
    for places in (window, window + 61, 701):
        check(rings(positions, window, places, device=device), window=window)


@devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [{}, {"heads": 8, "kv_heads": 1, "features": 128}, {"features": 96, "values": 64}])
def test_extensions_together(device: str, dtype: torch.dtype, sizes: dict[str, int]) -> None:
    sinks = sinks_of(sizes.get("heads", 4), dtype, device)
    for named in ({"sinks": sinks}, {"softcap": 3.0}, {"softcap": 3.0, "sinks": sinks}):
        check(case([0, 1, 300, -1, 64], dtype=dtype, device=device, **sizes), **named)
        check(rings([0, 40, 99, 700], 40, 64, dtype=dtype, device=device, **sizes), window=40, **named)


@devices
def test_a_rows_bits_with_a_window_do_not_depend_on_the_batch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from surogate_kernels_triton import decoding

    named: dict[str, Any] = {"window": 600, "sinks": sinks_of(4, torch.float16, device)}
    tensors = rings([0, 17, 599, 640, 3000], 600, 640, device=device)
    found = check(tensors, **named)
    for split in (False, True):
        monkeypatch.setattr(decoding, "splits", lambda device, pairs, chunks, split=split: split)
        assert torch.equal(run(kernel("slot_attention"), tensors, **named)[0], found)
        assert torch.equal(run(kernel("slot_attention"), tensors, longest=9000, **named)[0], found)


@devices
def test_views_and_layouts(device: str) -> None:
    """Queries, keys and values as views of one product, and caches that are parts of others."""
    tensors = case([300, 40, 0], device=device)
    expected = check(tensors)
    joined = torch.cat([t.flatten(1) for t in tensors[:3]], dim=1)
    sizes = [t[0].numel() for t in tensors[:3]]
    views = [part.view(t.shape) for part, t in zip(joined.split(sizes, dim=1), tensors[:3], strict=True)]
    caches = [torch.stack((t, t), dim=3).transpose(2, 3)[:, :, 0] for t in tensors[3:5]]
    assert torch.equal(check([*views, *caches, *tensors[5:]]), expected)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors[:3]]
    assert torch.equal(check([*turned, *tensors[3:]]), expected)


@devices
def test_large_scores_and_nan(device: str) -> None:
    tensors = case([300, 40, 10], device=device)
    tensors[0] *= 300
    check(tensors)
    tensors[0][1, 0, 3] = float("nan")
    found = run(kernel("slot_attention"), tensors)[0]
    assert found[1, 0].isnan().all()
    assert bool(found[[0, 2]].isfinite().all())
    assert bool(found[1, 1:].isfinite().all())


@pytest.mark.parametrize(
    ("tensors", "taken"),
    [
        (lambda: case([3]), True),
        (lambda: case([3], features=128, dtype=torch.float32), True),
        (lambda: case([3], features=512), True),
        (lambda: case([3], features=520), False),
        (lambda: case([3], features=256, dtype=torch.float32), True),
        (lambda: case([3], features=320, dtype=torch.float32), False),
        (lambda: case([3], heads=66, kv_heads=2), False),
        (lambda: [*case([3])[:3], *case([3], dtype=torch.float32)[3:]], False),
    ],
)
def test_what_it_takes(tensors: Callable[[], list[Tensor]], taken: bool) -> None:
    pytest.importorskip("triton")
    from surogate_kernels_triton import decoding

    assert decoding.takes(*tensors(), 4, 0.2) == taken


@pytest.mark.gpu
def test_a_captured_graph_follows_slots_and_positions() -> None:
    """Steps of a decoding loop: one graph serves all lengths up to its bucket, split and whole."""
    attend = kernel("slot_attention")
    for rows in (3, 130):
        q, k, v, keys, values, slots, positions = case([0] * rows, heads=8, kv_heads=8, context=1024, device="cuda")
        keys.nan_to_num_()
        values.nan_to_num_()
        own = keys.clone(), values.clone()
        attend(q, k, v, keys, values, slots, positions, 1024, 0.2)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = attend(q, k, v, keys, values, slots, positions, 1024, 0.2)
        for step in (1, 255, 256, 700, 1023):
            positions.copy_((torch.arange(rows) * 7 + step).clamp(max=1023))
            slots.copy_(torch.randperm(rows))
            q.normal_()
            for cache, before in zip((keys, values), own, strict=True):
                cache.copy_(before)
            graph.replay()
            expected = attend(q, k, v, own[0].clone(), own[1].clone(), slots, positions, 1024, 0.2)
            assert torch.equal(found, expected)


@pytest.mark.gpu
def test_a_slot_far_into_a_large_cache() -> None:
    """Elements behind the first 2³¹ are reached."""
    context, kv_heads, features, slots = 32768, 8, 128, 70
    keys, values = (
        torch.zeros(slots, context, kv_heads, features, dtype=torch.bfloat16, device="cuda") for _ in range(2)
    )
    q, k, v = (random(1, h, features, seed=h, dtype=torch.bfloat16).cuda() for h in (16, kv_heads, kv_heads))
    values[slots - 2] = 1.0
    places = [torch.tensor([n], device="cuda") for n in (slots - 2, context - 1)]
    found = kernel("slot_attention")(q, k, torch.ones_like(v), keys, values, *places, context, 0.1)
    assert torch.equal(found, torch.ones_like(found))
    assert torch.equal(keys[slots - 2, context - 1], k[0])
    assert not keys[slots - 2, : context - 1].any()


# --------------------------------------------------------------------------- sampling


def sampled(count: int, vocabulary: int, dtype: torch.dtype, device: str) -> list[Tensor]:
    """(logits, temperatures, keys, numbers); every third row is greedy."""
    generator = torch.Generator().manual_seed(count)
    keys = torch.randint(-(2**31), 2**31, (count, 2), generator=generator).int()
    temperature = torch.rand(count, generator=generator) + 0.3
    temperature[::3] = 0
    logits = random(count, vocabulary, seed=1, scale=3.0).to(dtype)
    return [t.to(device) for t in (logits, temperature, keys, 7 * torch.arange(count).int())]


def check_logprobs(logprobs: Tensor, logits: Tensor, tokens: Tensor) -> None:
    """They are float64's; the reference's own sums in fp32 differ by up to 7e-6 between processors."""
    exact = torch.log_softmax(logits.double(), dim=-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), exact, rtol=1e-6, atol=2e-6, equal_nan=True)


@devices
@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (1, torch.float32),
        (50, torch.bfloat16),
        (1024, torch.float16),
        (8193, torch.float32),
        (8192, torch.bfloat16),
        (50257, torch.bfloat16),
    ],
)
def test_tokens(device: str, vocabulary: int, dtype: torch.dtype) -> None:
    """The reference's tokens. Their log-probabilities are those of float64."""
    tensors = sampled(9, vocabulary, dtype, device)
    tokens, logprobs = kernel("choose_tokens")(*tensors)
    assert torch.equal(tokens, ops.choose_tokens(*tensors)[0])
    assert tokens.dtype == torch.int64
    check_logprobs(logprobs, tensors[0], tokens)


@devices
def test_a_rows_token_does_not_depend_on_the_batch(device: str) -> None:
    tensors = sampled(5, 20000, torch.float32, device)
    found = kernel("choose_tokens")(*tensors)
    for n in range(5):
        alone = kernel("choose_tokens")(*(t[n : n + 1] for t in tensors))
        assert all(torch.equal(a[0], b[n]) for a, b in zip(alone, found, strict=True))
    spread = torch.nn.functional.pad(tensors[0], (0, 5))[:, :-5]
    assert all(map(torch.equal, kernel("choose_tokens")(spread, *tensors[1:]), found))


@devices
def test_ties_infinities_and_nan(device: str) -> None:
    logits = torch.full((6, 20000), -1.0, device=device)
    logits[0, [5, 9000, 19999]] = 2.0
    logits[1] = float("-inf")
    logits[2] = float("-inf")
    logits[2, 12345] = -3.0
    logits[3, [9, 15000]] = float("nan")
    logits[4, 100:] = float("-inf")
    _, temperature, keys, numbers = sampled(6, 1, torch.float32, device)
    for heat in (torch.zeros_like(temperature), torch.full_like(temperature, 0.8)):
        tokens, logprobs = kernel("choose_tokens")(logits, heat, keys, numbers)
        assert torch.equal(tokens, ops.choose_tokens(logits, heat, keys, numbers)[0])
        check_logprobs(logprobs, logits, tokens)


@devices
def test_many_samples_are_those_of_the_reference(device: str) -> None:
    """Differences would be sums that are equal up to a rounding of the logarithms."""
    count = 3000 if device == "cuda" else 60
    _, temperature, keys, numbers = sampled(count, 1, torch.float32, device)
    logits = random(1, 500, seed=2, scale=2.0).float().to(device).expand(count, -1)
    temperature = torch.ones_like(temperature)
    tokens, _ = kernel("choose_tokens")(logits, temperature, keys, numbers)
    assert torch.equal(tokens, ops.choose_tokens(logits, temperature, keys, numbers)[0])


def filtered(count: int, device: str) -> list[Tensor]:
    """(temperatures, top-k, top-p, min-p) of rows that combine them."""
    temperature = torch.tensor([1.0, 0.7, 0.0, 1.5])
    top_k = torch.tensor([0, 20, 5, 0, 1, 300, 0])
    top_p = torch.tensor([0.9, 1.0, 0.5, 1.0, 0.95])
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.1, 0.0, 0.02, 0.0, 0.3, 0.0])
    return [t[torch.arange(count) % len(t)].to(device) for t in (temperature, top_k, top_p, min_p)]


@devices
@pytest.mark.parametrize(
    ("vocabulary", "spread", "dtype"),
    [
        (1, 1.0, torch.float32),
        (50, 3.0, torch.float16),
        (5000, 0.01, torch.float32),
        (5000, 5.0, torch.float32),
        (9000, 40.0, torch.bfloat16),
    ],
)
def test_bounds(device: str, vocabulary: int, spread: float, dtype: torch.dtype) -> None:
    """They keep the tokens that the reference keeps; `spread` decides whether few scores are near the largest."""
    count = 140 if device == "cuda" else 12
    logits = random(count, vocabulary, seed=8, scale=spread).to(dtype).to(device)
    rows = filtered(count, device)
    found = kernel("token_bounds")(logits, *rows)
    assert [t.dtype for t in found] == [torch.float32, torch.int32]
    scores = ops.scaled(logits.float(), rows[0])
    keeps, expected = (ops.kept(scores, *bounds) for bounds in (found, ops.token_bounds(logits, *rows)))
    # The sums of top-p are rounded elsewhere, so the last token that is kept may differ.
    assert int((keeps != expected).sum()) <= count // 20
    assert int((keeps != expected).sum(1).max()) <= 1
    assert bool(keeps.sum(1).min() >= 1)


@devices
def test_bounds_among_equal_tokens(device: str) -> None:
    """Top-p keeps the first of equal tokens, top-k keeps all of them; infinities are never kept beside others."""
    logits = torch.zeros(5, 6000, device=device)
    logits[1, 4096:] = float("-inf")
    logits[2, [7, 5000]] = 9.0
    rows = [torch.ones(5), torch.tensor([0, 0, 1, 3, 5999]), torch.tensor([0.5, 0.5, 1.0, 1.0, 1.0]), torch.zeros(5)]
    rows = [t.to(device) for t in rows]
    bounds = kernel("token_bounds")(logits, *rows)
    keeps = ops.kept(logits, *bounds)
    assert keeps.sum(1).tolist() == [3000, 2048, 2, 6000, 6000]
    assert torch.equal(keeps, ops.kept(logits, *ops.token_bounds(logits, *rows)))
    assert bool(keeps[1, :2048].all())
    *_, keys, numbers = sampled(5, 1, torch.float32, device)
    tokens, logprobs = kernel("choose_tokens")(logits, rows[0], keys, numbers, *bounds)
    assert torch.equal(tokens, ops.choose_tokens(logits, rows[0], keys, numbers, *bounds)[0])
    assert bool(keeps.gather(1, tokens[:, None]).all())
    check_logprobs(logprobs, logits, tokens)


# --------------------------------------------------------------------------- adapters


@devices
@pytest.mark.parametrize(("rows", "rank", "slots", "inputs"), [(1, 16, 3, 1100), (33, 64, 1, 300), (512, 16, 2, 96)])
def test_few_rows_times_the_first_matrices_of_adapters(
    device: str, rows: int, rank: int, slots: int, inputs: int
) -> None:
    from surogate_native.adapters import down

    x, a = random(rows, inputs, seed=1, dtype=torch.float16), random(rank * slots, inputs, seed=2, dtype=torch.float16)
    room, u = torch.zeros(rows, inputs + 128, dtype=torch.float16), torch.zeros(rows, rank * slots, dtype=torch.float16)
    room[:, :inputs] = x
    x, a, u, room = (t.to(device) for t in (room[:, :inputs], a, u, room))
    down(room, a, u, room[:, inputs:], torch.zeros((), dtype=torch.int32, device=device), slots, 0.0, range(slots))
    expected = x.double() @ a.double().T
    assert float((u.double() - expected).abs().max() / expected.abs().max()) <= 1e-3
    assert torch.equal(room[:, inputs : inputs + rank * slots], u)
    assert torch.equal(room[:, :inputs], x)
