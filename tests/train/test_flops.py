"""FLOPs counted by hand, and the rate that they are held against."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import hybrid_family
import numpy as np
import pytest
import torch
from surogate_model_qwen3.model import build
from surogate_model_qwen3.presets import PRESETS

from surogate_core import dsl
from surogate_core.batch import IGNORE_LABEL, MicroBatch, mean_pairs
from surogate_core.data.sampler import collate
from surogate_core.train.flops import ModelFlops, gemm_flops_per_second
from surogate_testing import tiny


def batch(*lengths: int, padding: int = 0) -> MicroBatch:
    n = sum(lengths) + padding
    documents = [*lengths, *([padding] if padding else [])]
    return MicroBatch(
        input_ids=torch.zeros(n, dtype=torch.int64),
        labels=torch.full((n,), IGNORE_LABEL),
        positions=torch.cat([torch.arange(d, dtype=torch.int32) for d in documents]),
        cu_seqlens=torch.tensor([0, n], dtype=torch.int32),
        max_seqlen=n,
        tokens=sum(lengths),
        label_tokens=0,
    )


def test_a_window_bounds_the_pairs_of_a_token() -> None:
    full, windowed = (
        hybrid_family.Hybrid({**hybrid_family.CONFIG, "kinds": kinds}) for kinds in (["full"], ["window"])
    )
    work, other = (ModelFlops.of(model, frozen=True) for model in (full, windowed))
    assert other.windows == ((5, work.attention_per_pair),)
    assert other.attention_per_pair == 0
    assert [other.attention(10, pairs) for pairs in (30, 50, 400)] == [work.attention(10, p) for p in (30, 50, 50)]
    assert other.per_token(3) == work.per_token(3)


def test_the_state_of_a_recurrence_is_counted() -> None:
    model = hybrid_family.Hybrid({**hybrid_family.CONFIG, "kinds": ["delta"]})
    (block,) = (block for _, block in model.blocks(8))
    products = sum(s.inputs * s.outputs for s in block.linear_slots(None)) + model.vocab_size * model.width
    recurrent = 3 * 4 * 8 * 8 + 96 * 4
    assert ModelFlops.of(model, frozen=False).products_per_token == 6 * (products + recurrent)


@pytest.mark.parametrize(("preset", "gflop"), [("0.6b", 3.21), ("8b", 32.4)])
def test_published_shapes(preset: str, gflop: float) -> None:
    """Rows of 2048 tokens, frozen base: the figures that the speed of the house is measured by."""
    work = ModelFlops.of(build(PRESETS[preset]), frozen=True)
    assert work.per_token(mean_pairs(torch.arange(2048))) / 1e9 == pytest.approx(gflop, rel=0.005)


def test_every_product_counts_once() -> None:
    config = {**PRESETS["tiny"]}
    model = build(config)
    width, wide, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads, kv_heads, features = (config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    layer = 2 * width * heads * features + 2 * width * kv_heads * features + 3 * width * wide
    weights = layers * layer + config["vocab_size"] * width
    assert ModelFlops.of(model, frozen=True).products_per_token == 4 * weights
    assert ModelFlops.of(model, frozen=False).products_per_token == 6 * weights
    # Two products of `features` a head, two FLOPs each, and 3.5 times that with the backward.
    assert ModelFlops.of(model, frozen=True).attention_per_pair == 3.5 * 4 * heads * features * layers


def test_documents_are_short_and_padding_is_no_work() -> None:
    assert mean_pairs(torch.tensor([0, 1, 2, 3])) == 2.5
    assert mean_pairs(torch.tensor([0, 1, 0, 1])) == 1.5
    work = ModelFlops(products_per_token=100.0, attention_per_pair=1.0)
    assert work.step([batch(4), batch(2, 2)]) == pytest.approx(4 * 102.5 + 4 * 101.5)
    assert work.step([batch(4, padding=4)]) == pytest.approx(4 * 102.5)


def test_the_length_of_padding_is_no_work() -> None:
    """Rows of 64 positions have documents of 3 and 5 tokens, and then padding, whose positions go up to 55."""
    row = SimpleNamespace(input_ids=np.arange(8), weights=np.ones(8, np.float32), lengths=(3, 5))
    rows: Any = SimpleNamespace(sequence_len=64, padding_id=0, max_documents=3, weighted=False, row=lambda index: row)
    work = ModelFlops(products_per_token=100.0, attention_per_pair=1.0)
    for rows_of_batch in ([0], [0, None]):
        assert work.step([collate(rows, rows_of_batch)]) == 8 * 100 + (1 + 2 + 3) + (1 + 2 + 3 + 4 + 5)


def test_a_layer_without_attention_has_none_counted() -> None:
    class Feed(dsl.Block):
        up = dsl.Linear("up_proj", tiny.D, tiny.F, region="ffn")
        down = dsl.Linear("down_proj", tiny.F, tiny.D, region="ffn")

        def forward(self, x: torch.Tensor, tables: Mapping[str, torch.Tensor]) -> torch.Tensor:
            return x + self.down(torch.relu(self.up(x)))

    class Mixed(tiny.TinyModel):
        layers = (dsl.Stack(Feed, dsl.Dim("num_hidden_layers"), "layers.{i}."), tiny.TinyModel.layers)  # type: ignore

    width, wide, both = 32, 64, 2
    attending = 4 * width * width + 3 * width * wide
    work = ModelFlops.of(Mixed(tiny.CONFIG), frozen=True)
    head = tiny.CONFIG["vocab_size"] * width
    assert work.products_per_token == 4.0 * (head + both * (2 * width * wide) + both * attending)
    assert work.attention_per_pair == 3.5 * 4 * width * both


def test_the_rate_is_measured_once() -> None:
    device = torch.device("cpu")
    rate = gemm_flops_per_second(device, torch.float32)
    assert rate > 1e8
    assert gemm_flops_per_second(device, torch.float32) is rate
