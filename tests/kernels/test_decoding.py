"""The ops of generation: attention over slots against packed attention in float64, and the choice of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from surogate_core.dsl.trace import Compiler, Signature, without_gradients
from surogate_core.kernels.decoding import choose_tokens, gumbel, kept, slot_attention, token_bounds
from surogate_core.kernels.registry import in_place, references
from surogate_testing import op_cases
from surogate_testing.op_cases import random

SCALE = 0.3
LENGTHS = [1, 7, 20]
"""Positions of each row, its own included."""
SLOTS = [2, 0, 3]
"""Five slots; the last one takes rows that do not count."""

OPS = ["slot_attention", "token_bounds", "choose_tokens"]


def cache(
    dtype: torch.dtype = torch.float64, *, kv_heads: int = 2, features: int = 16, other: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values in all positions; those that no row may see are NaN."""
    shapes = (5, 24, kv_heads, features), (5, 24, kv_heads, other or features)
    found = [random(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    for tensor in found:
        for slot, length in zip(SLOTS, LENGTHS, strict=True):
            tensor[slot, length - 1 :] = float("nan")
    return found[0].to(dtype), found[1].to(dtype)


def expected(q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, **extensions: Any) -> Tensor:
    """By the definition of packed attention: the last token of each row's document."""
    rows = []
    for n, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        all_k = torch.cat((keys[slot, : length - 1].double(), k[n : n + 1].double()))
        all_v = torch.cat((values[slot, : length - 1].double(), v[n : n + 1].double()))
        queries = q[n : n + 1].double().expand(length, -1, -1)
        borders = torch.tensor([0, length])
        rows.append(op_cases.attention(queries, all_k, all_v, borders, length, SCALE, **extensions)[-1])
    return torch.stack(rows)


def places() -> tuple[Tensor, Tensor]:
    return torch.tensor(SLOTS), torch.tensor(LENGTHS) - 1


def test_every_op_is_tested() -> None:
    module = slot_attention.__module__
    assert [n for n, k in references.items() if k.function.__module__ == module] == OPS


@pytest.mark.parametrize("dtype", op_cases.BOUNDS, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize("longest", [20, 24])
def test_a_row_sees_its_slot_up_to_itself(heads: int, kv_heads: int, longest: int, dtype: torch.dtype) -> None:
    keys, values = cache(dtype, kv_heads=kv_heads)
    q, k, v = (random(3, h, 16, seed=h + 7, dtype=dtype) for h in (heads, kv_heads, kv_heads))
    wanted = expected(q, k, v, keys, values)
    found = slot_attention(q, k, v, keys, values, *places(), longest, SCALE)
    assert found.dtype == dtype
    assert float((found.double() - wanted).abs().max() / wanted.abs().max()) <= op_cases.BOUNDS[dtype]
    for n, (slot, length) in enumerate(zip(SLOTS, LENGTHS, strict=True)):
        assert torch.equal(keys[slot, length - 1], k[n])
        assert torch.equal(values[slot, length - 1], v[n])
    assert torch.equal(keys[1], cache(dtype, kv_heads=kv_heads)[0][1])


EXTENSIONS = [{"window": 1}, {"window": 5}, {"window": 7, "softcap": 0.8}, {"softcap": 0.8}, {}]


@pytest.mark.parametrize("dtype", op_cases.BOUNDS, ids=str)
def test_extensions_are_those_of_packed_attention(dtype: torch.dtype) -> None:
    """With sinks and without; before the window of a row its slot may hold anything."""
    for settings in EXTENSIONS:
        for sinks in (None, random(4, seed=5, dtype=dtype)):
            keys, values = cache(dtype, other=8)
            q, k, v = (random(3, h, e, seed=h + e, dtype=dtype) for h, e in ((4, 16), (2, 16), (2, 8)))
            known = {**settings, "sinks": sinks}
            wanted = expected(q, k, v, keys, values, **{**known, "sinks": sinks if sinks is None else sinks.double()})
            for slot, length in zip(SLOTS, LENGTHS, strict=True):
                hidden = slice(0, max(0, length - settings.get("window", length)))
                keys[slot, hidden] = values[slot, hidden] = float("nan")
            found = slot_attention(q, k, v, keys, values, *places(), 20, SCALE, **known)
            assert found.dtype == dtype
            assert float((found.double() - wanted).abs().max() / wanted.abs().max()) <= op_cases.BOUNDS[dtype], known


def test_a_slot_with_a_window_is_a_ring() -> None:
    """Slots of as many places as the window give the results of slots that hold every position."""
    window, steps = 5, 17
    tokens = [[random(2, h, 16, seed=10 * h + step) for h in (4, 2, 2)] for step in range(steps)]
    slots = torch.tensor([1, 0])
    results = []
    for size in (window, window + 3, steps):
        keys, values = (torch.full((3, size, 2, 16), float("nan"), dtype=torch.float64) for _ in range(2))
        arguments = [(*t, keys, values, slots, torch.tensor([step, step])) for step, t in enumerate(tokens)]
        results.append([slot_attention(*a, step + 1, SCALE, window=window) for step, a in enumerate(arguments)])
    for ring, wider, whole in zip(*results, strict=True):
        torch.testing.assert_close(ring, whole, rtol=1e-13, atol=1e-14)
        torch.testing.assert_close(wider, whole, rtol=1e-13, atol=1e-14)


def test_rows_of_the_last_slot_give_zeros() -> None:
    keys, values = cache()
    q, k, v = (random(3, h, 16, seed=h) for h in (4, 2, 2))
    found = slot_attention(q, k, v, keys, values, torch.tensor([4, 0, 4]), torch.tensor([0, 6, 23]), 24, SCALE)
    assert not found[[0, 2]].any()
    alone = slot_attention(q[1:2], k[1:2], v[1:2], *cache(), *(t[1:2] for t in places()), 24, SCALE)
    torch.testing.assert_close(found[1], alone[0])


def test_values_may_have_other_features_than_keys() -> None:
    keys, values = cache(other=8)
    q, k, v = random(3, 4, 16, seed=1), random(3, 2, 16, seed=2), random(3, 2, 8, seed=3)
    wide_keys, wide_values = cache(other=8)
    padded = torch.nn.functional.pad(wide_values, (0, 8))
    found = slot_attention(q, k, v, keys, values, *places(), 20, SCALE)
    wanted = expected(q, k, torch.nn.functional.pad(v, (0, 8)), wide_keys, padded)[..., :8]
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow_cases("inductor")
@pytest.mark.parametrize("compiler", ["fx", "inductor"])
def test_a_traced_program_writes_to_the_cache(compiler: Compiler) -> None:
    """Inductor gets the form whose schema declares the writes."""
    tensors = [*(random(3, h, 16, seed=h) for h in (4, 2, 2)), *cache(), *places()]
    given = [t.clone() for t in tensors]
    wanted = slot_attention(*tensors, 24, SCALE) * 2
    program = without_gradients(
        lambda *inputs: slot_attention(*inputs, 24, SCALE) * 2, [Signature.of(t) for t in given], compiler=compiler
    )
    (found,) = program(given)
    torch.testing.assert_close(found, wanted)
    for cached, written in zip(given[3:5], tensors[3:5], strict=True):
        assert torch.equal(cached.nan_to_num(), written.nan_to_num())
    (form,) = (f.op for op, f in in_place.items() if op is torch.ops.surogate.slot_attention.default)
    assert [a.name for a in form._schema.arguments if a.alias_info is not None] == ["keys_STKE", "values_STKE"]


# ------------------------------------------------------------------------- choose_tokens


def rows(count: int, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    keys = torch.randint(-(2**31), 2**31, (count, 2), generator=generator).int()
    return torch.full((count,), temperature), keys, torch.arange(count).int()


def test_noise_depends_on_key_and_number_alone() -> None:
    _, keys, numbers = rows(3)
    together = gumbel(keys, numbers, 50)
    assert torch.equal(together[1:2], gumbel(keys[1:2], numbers[1:2], 50))
    assert torch.equal(together[:, :20], gumbel(keys, numbers, 20))
    assert len({tuple(row.tolist()) for row in together}) == 3
    assert not torch.equal(gumbel(keys, numbers + 1, 50), together)
    assert torch.isfinite(gumbel(keys, numbers, 200_000)).all()


def test_tokens_are_those_of_the_largest_sums() -> None:
    logits = random(6, 50, seed=3).float()
    temperature, keys, numbers = rows(6, 0.7)
    temperature[::2] = 0
    tokens, logprobs = choose_tokens(logits, temperature, keys, numbers)
    sums = logits / 0.7 + gumbel(keys, numbers, 50)
    assert torch.equal(tokens, torch.where(temperature == 0, logits.argmax(-1), sums.argmax(-1)))
    assert torch.equal(logprobs, torch.log_softmax(logits, -1)[range(6), tokens])
    assert tokens.dtype == torch.int64


def test_bounds_keep_what_is_kept_of_a_sort() -> None:
    """Top-p keeps the first of equal tokens, top-k keeps all of them; temperature 0 drops none."""
    logits = torch.tensor([[0.0, 2.0, 0.0, 1.0, 0.0, 0.0]]).repeat(5, 1)
    heat, k = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0]), torch.tensor([0, 3, 2, 1, 0])
    p, least = torch.tensor([0.75, 1.0, 1.0, 0.1, 1.0]), torch.tensor([0.0, 0.0, 0.0, 0.5, 0.3])
    bounds = token_bounds(logits, heat, k, p, least)
    assert [t.dtype for t in bounds] == [torch.float32, torch.int32]
    kept_tokens = [row.nonzero()[:, 0].tolist() for row in kept(logits, *bounds)]
    assert kept_tokens == [[0, 1, 3], [0, 1, 2, 3, 4, 5], [1, 3], [0, 1, 2, 3, 4, 5], [1, 3]]
    _, keys, numbers = rows(200)
    many = [t[2:3].expand(200, *t.shape[1:]) for t in (logits, heat, *bounds)]
    tokens, logprobs = choose_tokens(many[0], many[1], keys, numbers, *many[2:])
    assert set(tokens.tolist()) == {1, 3}
    assert torch.equal(logprobs, torch.log_softmax(many[0], -1)[range(200), tokens])


def test_no_op_reads_a_value_on_the_host() -> None:
    """So that a decoding step can be captured."""
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(t) for t in (*(random(3, h, 16, seed=h) for h in (4, 2, 2)), *cache(), *places())]
        assert slot_attention(*given, 24, SCALE).shape == (3, 4, 16)
        logits, *chosen = (mode.from_tensor(t) for t in (random(3, 50), *rows(3)))
        bounds = token_bounds(logits, chosen[0], chosen[2], chosen[0], chosen[0])
        found = choose_tokens(logits, *chosen, *bounds)
        assert [tuple(t.shape) for t in (*bounds, *found)] == [(3,)] * 4
