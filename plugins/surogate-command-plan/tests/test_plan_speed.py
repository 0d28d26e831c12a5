"""`surogate plan gpus=N`: what each GPU keeps, what the GPUs send each other, and how long that takes."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import pytest
import torch
from surogate_command_plan.gpus import gpus
from surogate_command_plan.speed import CALL, HIDDEN, UNLINKED, WAIT, WireRates, wire_of

from surogate_core.plugin import surogate as main
from surogate_core.service.engine import Sent, assembly

SMALL = ["model.config.num_hidden_layers=2", "model.config.head_dim=128", "sequence_len=256", "recompute=false"]
KEYS = [*SMALL, "lmhead_chunks=1", "gradient_accumulation_steps=2", "--gpu", "h200"]


@cache
def text(*arguments: str) -> str:
    """What the command prints; equal commands are run once."""
    out = io.StringIO()
    with redirect_stdout(out):
        assert main(["plan", *KEYS, *arguments]) == 0
    return out.getvalue()


def plan(*arguments: str) -> dict[str, Any]:
    value = json.loads(text(*arguments, "--json"))
    assert isinstance(value, dict)
    return value


def test_the_rates_are_those_of_nvlink_or_of_the_bus() -> None:
    linked = WireRates.of(gpus()["h200"], bus=63e9)
    assert linked.exchange == pytest.approx(232e9, rel=0.02), "measured: 232 GB/s each way"
    assert linked.gather == pytest.approx(303e9, rel=0.05), "measured: 264 at 64 MiB, 325 at 1 GiB"
    for gpu in (gpus()["rtx4090"], None):
        assert WireRates.of(gpu, bus=30e9) == WireRates(exchange=UNLINKED * 30e9, gather=UNLINKED * 30e9)


def test_computation_hides_what_it_is_long_enough_for() -> None:
    rates = WireRates(exchange=1e9, gather=2e9)
    last = Sent(what="", nbytes=10**9, calls=0, how="exchange", beside="backward")
    alone = Sent(what="", nbytes=10**9, calls=10, how="gather")
    assert rates.seconds(last) == 1
    assert rates.seconds(alone) == pytest.approx(0.5 + 10 * CALL)
    long = wire_of([last, alone], rates, computing=30, micro_steps=4)
    assert long.nbytes == 2 * 10**9
    assert long.hidden == pytest.approx(HIDDEN)
    assert long.exposed == pytest.approx(long.seconds - HIDDEN + WAIT)
    short = wire_of([last, alone], rates, computing=0.3, micro_steps=4)
    assert short.hidden == pytest.approx(HIDDEN * 0.3 * 2 / 3), "only the last backward is beside it"
    every = Sent(what="", nbytes=10**9, calls=0, how="exchange", beside="backward", micro_steps=4)
    assert wire_of([every, every], rates, computing=0.3, micro_steps=4).hidden == pytest.approx(HIDDEN * 1.2)
    assert wire_of([], rates, computing=1, micro_steps=1).exposed == 0


def test_levels_need_less_and_send_more() -> None:
    first, third = (plan("lora=false", "gpus=4", f"zero_level={level}") for level in (1, 3))
    before, after = ({h["kind"]: h["nbytes"] for h in p["held"]} for p in (first, third))
    assert after["masters"] == before["masters"] == pytest.approx(4 * first["trainable_parameters"] / 4, rel=0.01)
    assert after["gradients"] == pytest.approx(before["gradients"] / 4, rel=0.02), "norms are kept by all"
    assert after["compute copies"] < before["compute copies"]
    assert third["sent_bytes"] > first["sent_bytes"]
    assert 0 < third["efficiency"] < first["efficiency"]
    assert all(0 < p["hidden_seconds"] < p["sent_seconds"] for p in (first, third))


def test_the_figures_are_of_all_gpus() -> None:
    one, four = plan("lora=true", "gpus=1"), plan("lora=true", "gpus=4")
    assert (one["gpus"], four["gpus"]) == (1, 4)
    assert four["tokens_per_step"] == 4 * one["tokens_per_step"]
    assert four["steps"] < one["steps"], "a step takes more rows"
    assert four["tokens_per_second"] == pytest.approx(4 * one["tokens_per_second"] * four["efficiency"], rel=1e-6)
    assert (one["sent"], one["sent_bytes"], one["sent_seconds"]) == ([], 0, 0)
    assert four["mfu"] < one["mfu"]


def test_a_frozen_base_is_shared_out() -> None:
    whole, shared = plan("lora=true", "gpus=4"), plan("lora=true", "gpus=4", "shard_weights=true")
    weights = [next(h["nbytes"] for h in p["held"] if h["kind"] == "weights") for p in (whole, shared)]
    assert weights[1] < weights[0]
    assert "gathered weights" in {h["kind"] for h in shared["held"]}
    assert shared["sent_bytes"] > whole["sent_bytes"]


@pytest.mark.slow
def test_for_people() -> None:
    out = text("lora=true", "gpus=8")
    assert "on 8 × H200" in out
    assert "Memory of each GPU, predicted" in out
    assert "from each GPU over NVLink" in out
    assert "of the speed of 8 single GPUs" in out
    assert "equal bits on 1, 2, 4 and 8 equal GPUs" in out
    out = text("lora=true", "gpus=2", "zero_level=2", "--gpu", "rtx4090")
    assert "over PCIe and host memory, because RTX 4090 has no NVLink" in out
    assert "zero_level=2: no effect with lora" in out


MEASURED = [
    ("qwen3-8b", ["lora=false", "gradient_accumulation_steps=1"], 0.977),
    ("qwen3-8b", ["lora=false", "gradient_accumulation_steps=1", "zero_level=3"], 0.955),
    ("qwen3-8b", ["lora=false"], 0.991),
    ("qwen3-8b", ["lora=true"], 0.996),
    ("qwen3-8b", ["lora=true", "recipe=fp8-hybrid"], 0.990),
    ("qwen3-0.6b", ["lora=true"], 0.983),
    ("qwen3-0.6b", ["lora=true", "recipe=fp8-hybrid"], 0.984),
]
"""Tokens per second of two H200s as a share of those of two single ones: 2 rows of 2048 tokens, 4 micro-steps, 8-bit
AdamW and bf16 masters where all weights are trained (benchmarks/evidence/several-gpus.md). Ranks did not exchange rows
of the embedding's gradient then."""


@pytest.mark.slow
@pytest.mark.parametrize(("model", "keys", "share"), MEASURED, ids=str)
def test_the_estimate_is_near_what_two_gpus_reach(
    model: str, keys: list[str], share: float, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembly, "ROWS_OF_VOCABULARY", 10**9)
    shape = [
        "sequence_len=2048",
        "per_device_train_batch_size=2",
        "recompute=false",
        "lmhead_chunks=4",
        "lora_dropout=0",
    ]
    more = ["gradient_accumulation_steps=4"] * all("accumulation" not in key for key in keys)
    more += ["optimizer=adamw_8bit", "master_dtype=bf16"] if "lora=false" in keys else ["optimizer=adamw"]
    assert main(["plan", f"model={model}", *shape, *keys, *more, "gpus=2", "--gpu", "h200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["efficiency"] == pytest.approx(share, abs=0.01)


@pytest.mark.slow
def test_what_does_not_fit_says_on_how_many_gpus_it_would(capsys: Any) -> None:
    keys = ["model.config.hidden_size=4096", "model.config.num_hidden_layers=4", "optimizer=adamw", "--gpu", "t4"]
    arguments = [*SMALL[1:], "model.config.intermediate_size=16384", "lora=false", "lmhead_chunks=1", *keys]
    assert main(["plan", *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    assert found["fits_with"] == ["gpus=2"]
    assert main(["plan", *arguments, "gpus=2"]) == 0
    assert "Fits     yes" in capsys.readouterr().out
    assert main(["plan", *arguments]) == 0
    assert "; gpus=2 needs" in capsys.readouterr().out
    for same_number in (["gpus=2"], ["num_nodes=2", "gpus_per_node=1"]):
        assert main(["plan", *arguments, *same_number, "zero_level=0", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["fits"], found["fits_with"]) == (False, ["zero_level=1"]), "with as many GPUs as there are"


@pytest.mark.slow
def test_gpus_that_cannot_write_into_each_others_memory(capsys: Any) -> None:
    shared = ["lora=false", "zero_level=3", "gpus=2"]
    card = ["--gpu", "rtx4090"]
    by_copies, by_nccl = plan(*shared, *card), plan(*shared, *card, "fabric=nccl")
    assert by_copies["hidden_seconds"] == by_nccl["hidden_seconds"], "such GPUs have no copy engines for it"
    wires = [*shared[:2], "num_nodes=1", "gpus_per_node=2", "interconnect=pcie4", "tokens_per_second=1e4"]
    assert plan(*wires, *card)["efficiency"] == plan(*wires, *card, "fabric=nccl")["efficiency"]
    assert plan(*wires)["efficiency"] > plan(*wires, "fabric=nccl")["efficiency"]
    assert main(["plan", *KEYS, *shared, *card, "fabric=copy_engines"]) == 2
    assert "needs GPUs that can write into each other's memory, and two RTX 4090 cannot" in capsys.readouterr().err
    linked = plan(*shared), plan(*shared, "fabric=nccl")
    assert linked[0]["hidden_seconds"] > linked[1]["hidden_seconds"]
    assert "over PCIe and host memory, because RTX 4090 has no NVLink and no peer access" in text(*shared, *card)


@pytest.mark.slow
def test_a_fabric_that_connects_no_gpus_is_refused(capsys: Any) -> None:
    for words in (["gpus=2"], ["num_nodes=2", "gpus_per_node=2"]):
        assert main(["plan", *KEYS, "lora=true", "fabric=gloo", *words]) == 2
        assert "fabric (command line): gloo cannot connect GPUs here." in capsys.readouterr().err
    assert main(["plan", *KEYS, "lora=true", "fabric=gloo"]) == 0, "one GPU has no one to exchange with"
    capsys.readouterr()
    on_cpu = [*SMALL, "lmhead_chunks=1", "lora=true", "fabric=nccl"]
    assert main(["plan", *on_cpu, "device=cpu", "gpus=2"]) == 2
    assert "nccl cannot connect processes on the CPU here" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a machine without a GPU")
def test_a_machine_without_gpus_plans_a_fabric_of_gpus(capsys: Any) -> None:
    keys = [*SMALL, "lmhead_chunks=1", "lora=true", "fabric=nccl"]
    assert main(["plan", *keys, "gpus=2"]) == 0
    assert main(["plan", *keys, "num_nodes=2", "gpus_per_node=2"]) == 2
    assert "a cluster has GPUs, and none is here. Fix: add --gpu h200" in capsys.readouterr().err


def test_a_cpu_has_processes(capsys: Any) -> None:
    keys = [*SMALL, "lmhead_chunks=1", "lora=true", "device=cpu"]
    assert main(["plan", *keys, "gpus=0"]) == 0
    assert "Memory, predicted" in capsys.readouterr().out, "all GPUs of a CPU are one process"
    assert main(["plan", *keys, "gpus=2"]) == 0
    out = capsys.readouterr().out
    assert "on the CPU of this machine, 2 processes" in out
    assert "Memory of each process, predicted" in out


@pytest.mark.slow
def test_a_plan_knows_how_many_gpus_are_here(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surogate_command_plan.command._number_here", lambda device: 4)
    for number, said in ((1, "4 GPUs; gpus=0 trains on all"), (0, "on 4 × H200"), (8, "4 GPUs, and gpus=8 needs 8")):
        assert main(["plan", *KEYS, "lora=true", f"gpus={number}"]) == 0
        assert said in capsys.readouterr().out


def test_all_gpus_of_a_machine_that_is_not_known(capsys: Any) -> None:
    assert main(["plan", *KEYS, "lora=true", "gpus=0"]) == 2
    assert "Fix: a number, such as gpus=8" in capsys.readouterr().err


@pytest.mark.slow
def test_fit_proposes_to_share_out() -> None:
    keys = ("lora=false", "gpus=4", "optimizer=adamw_8bit", "model.config.num_hidden_layers=16", "recompute=true")
    level_1, level_3 = (plan(*keys, f"zero_level={level}")["device_bytes"] for level in (1, 3))
    budget = int((level_1 + level_3) / 2 * 1.05)
    found = plan(*keys, f"--fit={budget / 2**20}MiB")["fit"]
    assert any({"zero_level=2", "zero_level=3"} & set(p["overrides"]) for p in found)
