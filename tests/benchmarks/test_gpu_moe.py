"""The lines and the table of benchmarks/gpu_moe.py, and the routing of benchmarks/shapes.py."""

from __future__ import annotations

import shlex
from typing import Any

import gpu_lora
import gpu_moe
import peers
import pytest
import shapes
import torch

from surogate_core.kernels.experts import route


def row(rate: float, **fields: Any) -> dict[str, Any]:
    found = {"tokens_per_second": rate, "milliseconds": 10.0, "gemm_tflops": 800.0, "gflop_per_token": 15.0}
    return {**found, "setup_seconds": 1.0, "reserved_gib": 2.0, "imbalance": None, "losses": [2.0, 1.0], **fields}


def test_every_line_is_one_that_gpu_lora_takes() -> None:
    for name, words in gpu_moe.OURS.items():
        options = gpu_lora.make_parser().parse_args([gpu_moe.PRESET, *shlex.split(words)])
        assert options.recompute == ("recomputed" in name)
        assert (options.targets == "attention") == ("attention" in name)
    assert set(gpu_moe.LIKE.values()) <= set(gpu_moe.OURS)
    assert {peer.like for peer in gpu_moe.PEERS.values()} <= set(gpu_moe.OURS)


def test_the_table_compares_with_what_was_measured() -> None:
    found = {
        "bf16": row(24_000.0, imbalance=[8.0, 10.0, 12.0], predicted_gib=3.0),
        "nf4": row(21_600.0),
        "transformers, attention alone": row(9_000.0),
        "bf16, attention alone": row(27_000.0),
        "fp8-hybrid": {"error": "OutOfMemoryError: no room"},
    }
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in gpu_moe.markdown(found).splitlines()[2:]}
    assert [c.strip() for c in cells["bf16"]] == [
        *("24,000", "", "", "10.0", "45.0%", "2.0 GiB", "3.0 GiB", "", "1.0 s", "8.0, 10.0, 12.0", "2.000 … 1.000")
    ]
    assert cells["nf4"][1].strip() == "0.900"
    assert cells["transformers, attention alone"][2].strip() == "3.000"
    assert "no room" in cells["fp8-hybrid"][0]


@pytest.mark.parametrize("layer", [0, 7])
def test_the_largest_load_is_8_to_12_times_the_mean(layer: int) -> None:
    """As published routing is, for logits as a random router gives them."""
    generator = torch.Generator().manual_seed(layer)
    logits = 0.9 * torch.randn(8192, 128, generator=generator) + shapes.preference(f"model.layers.{layer}.", 128)
    experts = route(logits, 8, True)[1]
    loads = experts.flatten().bincount(minlength=128) / (8192 * 8 / 128)
    assert 8 <= loads.max() <= 12
    assert loads.median() < 0.6
    assert not torch.equal(shapes.preference("model.layers.1.", 128), shapes.preference("model.layers.2.", 128))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bf16", "transformers, checkpointing"])
def test_a_line_on_a_cpu(name: str) -> None:
    line = gpu_moe.Line(name=name, steps=1, warm_up=1, device="cpu", tiny=True, profile=False, more="")
    constants = gpu_lora.ROWS, gpu_lora.MICRO_STEPS, gpu_lora.LENGTH
    try:
        found = gpu_moe.work_line(line)
    finally:
        gpu_lora.ROWS, gpu_lora.MICRO_STEPS, gpu_lora.LENGTH = constants
    assert found["tokens_per_second"] > 0
    assert found["losses"][-1] < found["losses"][0]
    assert (found["imbalance"] is None) == (name in gpu_moe.PEERS)


def test_transformers_routes_with_the_same_preferences() -> None:
    """Its own router would ignore them."""
    pytest.importorskip("peft")
    import peers_moe

    config = shapes.config_of("moe-tiny")
    batches = gpu_lora.make_batches("row", config["vocab_size"], 3)[:1]
    work = peers.Work(
        preset="moe-tiny",
        config=config,
        full=False,
        recompute=False,
        rank=4,
        scale=2.0,
        rows=2,
        attention="sdpa",
        device=torch.device("cpu"),
        batches=batches,
    )
    model = peers_moe.random_model(work)
    gate = model.model.layers[1].mlp.gate
    logits, weights, experts = gate(torch.zeros(3, config["hidden_size"], dtype=torch.bfloat16))
    expected = shapes.preference("model.layers.1.", config["num_experts"]).bfloat16()
    assert torch.equal(logits[0], expected)
    assert experts[0].tolist() == expected.topk(config["num_experts_per_tok"]).indices.tolist()
    assert float(weights[0].detach().float().sum()) == pytest.approx(1, abs=1e-2)
