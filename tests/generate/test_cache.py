"""Attention over the cache: the form for any device and the CPU's kernel are one function."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from surogate_core.dsl.mixers import KeyValues
from surogate_core.generate.cache import AttentionCache, Cache, SlotPlaces, attention, cpu_attention, mixers_of
from surogate_core.generate.weights import Weights
from surogate_core.kernels import ops
from surogate_testing import tiny

CPU = torch.device("cpu")


SPEC = KeyValues(name="attend", heads=4, kv_heads=2, keys=16, values=16, scale=0.25, window=0, softcap=0.0)


def cache(dtype=torch.float32) -> AttentionCache:
    return Cache([[SPEC]], slots=3, context=32, dtype=dtype, device=CPU).layers[0][0]


def drawn(rows: int, dtype=torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, heads, 16, generator=generator).to(dtype) for heads in (4, 2, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_both_forms_equal_the_op_on_a_whole_document(dtype):
    q, k, v = drawn(32, dtype)
    expected = ops.attention(q, k, v, torch.tensor([0, 32]), 32, 0.25)
    for attend in (attention, cpu_attention):
        kept = cache(dtype)
        parts = []
        for start, width in ((0, 16), *((position, 1) for position in range(16, 32))):
            rows = slice(start, start + width)
            places = SlotPlaces(slots_G=torch.tensor([1]), starts_G=torch.tensor([start]), width=width)
            parts.append(attend(SPEC, q[rows], k[rows], v[rows], kept, places))
        bound = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2e-2)
        assert tiny.relative_error(torch.cat(parts), expected) < bound
        assert torch.equal(kept.now[0][1], k)
        assert not kept.now[0][[0, 2]].any()


@pytest.mark.parametrize("features", [8, 24])
def test_values_may_have_other_features_than_keys(features):
    spec = replace(SPEC, values=features)
    q, k, _ = drawn(32)
    v = torch.randn(32, 2, features, generator=torch.Generator().manual_seed(1))
    expected = ops.attention(q, k, v, torch.tensor([0, 32]), 32, 0.25)
    kept = Cache([[spec]], slots=3, context=32, dtype=torch.float32, device=CPU).layers[0][0]
    for start, width in ((0, 16), (16, 16), (31, 1)):
        rows = slice(start, start + width)
        places = SlotPlaces(slots_G=torch.tensor([1]), starts_G=torch.tensor([start]), width=width)
        found = cpu_attention(spec, q[rows], k[rows], v[rows], kept, places)
        assert tiny.relative_error(found, expected[rows]) < 1e-5


def test_groups_do_not_see_each_other():
    q, k, v = drawn(48)
    for attend in (attention, cpu_attention):
        together, alone = cache(), cache()
        places = SlotPlaces(slots_G=torch.tensor([2, 3, 0]), starts_G=torch.tensor([0, 0, 0]), width=16)
        found = attend(SPEC, q, k, v, together, places)
        one = SlotPlaces(slots_G=torch.tensor([1]), starts_G=torch.tensor([0]), width=16)
        assert torch.allclose(found[32:], attend(SPEC, q[32:], k[32:], v[32:], alone, one), rtol=1e-6, atol=1e-6)


def test_a_query_with_a_nan_is_not_hidden():
    q, k, v = drawn(16)
    q[3, 1, 0] = float("nan")
    places = SlotPlaces(slots_G=torch.tensor([0]), starts_G=torch.tensor([0]), width=16)
    found = cpu_attention(SPEC, q, k, v, cache(), places)
    assert found[3, 1].isnan().all()
    assert found[4:].isfinite().all()


def test_a_cache_keeps_what_blocks_declare():
    weights = Weights.load(tiny.assembly(lora=tiny.lora()), tiny.random_source())
    assert [[(s.kv_heads, s.keys, s.values) for s in specs] for specs in mixers_of(weights)] == [[(4, 8, 8)]] * 2
    small = tiny.assembly(tiny.SMALL_CONFIG, build=tiny.SmallModel, lora=tiny.lora())
    assert mixers_of(Weights.load(small, tiny.random_source())) == [(), ()]
