"""`surogate plan --gpu`: what a run takes of a GPU that is not here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from surogate_command_plan.gpus import Gpu, find, gpus, of_device
from surogate_command_plan.speed import step_time
from surogate_command_plan.view import duration

from surogate_core.plugin import UserError, load_run_config
from surogate_core.plugin import surogate as main
from surogate_core.service.engine import CUBLAS_WORKSPACE, CUDA_CONTEXT
from surogate_core.service.kernels import native
from surogate_core.service.plugins import Registry

SMALL = [
    "model.config.num_hidden_layers=2",
    "model.config.head_dim=128",
    "sequence_len=256",
    "lora=true",
    "recompute=false",
]


def plan(capsys: Any, *arguments: str) -> dict[str, Any]:
    assert main(["plan", *SMALL, *arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize(
    ("text", "capability"),
    [
        ("h200", (9, 0)),
        ("H200", (9, 0)),
        ("RTX 4090", (8, 9)),
        ("t4", (7, 5)),
        ("A100 40GB", (8, 0)),
        ("sm_120", (12, 0)),
    ],
)
def test_names(text: str, capability: tuple[int, int]) -> None:
    found = find(text)
    assert (found.capability if isinstance(found, Gpu) else found) == capability


@pytest.mark.parametrize(
    ("name", "gib", "title"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.1, "H100 PCIe"),
        ("NVIDIA H100 NVL", 93.1, "H100 NVL"),
        ("NVIDIA H200", 139.8, "H200"),
        ("NVIDIA GH200 480GB", 94.5, "GH200"),
        ("NVIDIA A100-SXM4-40GB", 39.4, "A100 40 GB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "A100 80 GB"),
        ("NVIDIA A10", 22.0, "A10"),
        ("NVIDIA A10G", 22.0, "A10G"),
        ("Tesla T4", 14.6, "T4"),
        ("NVIDIA L4", 22.0, "L4"),
        ("NVIDIA L40S", 44.4, "L40S"),
        ("NVIDIA RTX A6000", 47.4, "RTX A6000"),
        ("NVIDIA RTX 6000 Ada Generation", 47.4, "RTX 6000 Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 94.9, "RTX PRO 6000 Blackwell"),
        ("NVIDIA GeForce RTX 4090", 23.5, "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 15.9, None),
        ("NVIDIA GeForce GTX 1080", 8.0, None),
    ],
)
def test_the_name_of_a_driver_finds_its_row(name: str, gib: float, title: str | None) -> None:
    found = of_device(name, int(gib * 2**30))
    assert (None if found is None else found.title) == title


def test_the_table_is_plausible() -> None:
    assert {
        "t4",
        "v100",
        "a10",
        "l4",
        "a100",
        "rtx3090",
        "rtx5090",
        "h100",
        "h200",
        "b200",
        "b300",
        "gh200",
    } <= gpus().keys()
    for name, gpu in gpus().items():
        assert find(name) == find(gpu.title) == gpu
        assert 5e12 < gpu.bf16 < 3e15, name
        assert gpu.fp8 is None or gpu.fp8 == pytest.approx(2 * gpu.bf16, rel=0.02), name
        assert (gpu.fp8 is not None) == (gpu.capability >= (8, 9)), name
        assert (gpu.fp4 is not None) == (gpu.capability >= (10, 0)), name
        assert gpu.rate("fp4") == (gpu.fp4 or gpu.fp8 or gpu.bf16)
        assert 2e11 < gpu.bandwidth < 1e13
        assert gpu.memory is not None
        assert 14 * 2**30 < gpu.memory < 300 * 2**30
        assert gpu.source


MEASURED = [
    ("qwen3-0.6b", [], 130.1e3),
    ("qwen3-1.7b", [], 66.2e3),
    ("qwen3-4b", [], 28.7e3),
    ("qwen3-8b", [], 17.6e3),
    ("qwen3-8b", ["recipe=fp8-hybrid"], 26.2e3),
    ("qwen3-1.7b", ["recipe=fp8-hybrid"], 86.5e3),
    ("qwen3-1.7b", ["lora=false"], 47.7e3),
]
"""tok/s of docs/performance.md on one H200: 2 rows of 2048 tokens, 4 micro-steps."""


@pytest.mark.parametrize(("model", "keys", "rate"), MEASURED, ids=lambda v: str(v))
def test_the_estimate_is_calibrated_on_what_was_measured(model: str, keys: list[str], rate: float) -> None:
    from surogate_command_plan.speed import speed

    from surogate_core.plugin import load_plugins
    from surogate_core.service.engine import Prediction
    from surogate_core.service.setup import resolve_model

    registry = load_plugins()
    shape = ["sequence_len=2048", "per_device_train_batch_size=2", "gradient_accumulation_steps=4"]
    config = load_run_config([f"model={model}", "lora=true", "optimizer=adamw", *shape, *keys], registry=registry)
    resolved = resolve_model(config, registry, weights_needed=False)
    trained = 0 if config.lora else 1_720_000_000
    held = Prediction(held=(), schedule=(), parameters=0, trainable_parameters=trained, kernels={}, again=0)
    found = speed(config, registry, resolved.model, held, gpus()["h200"], more=0)
    assert found.tokens_per_second == pytest.approx(rate, rel=0.06)
    assert found.seconds == pytest.approx(found.tokens / found.tokens_per_second)


@pytest.mark.slow
def test_a_slower_gpu_takes_longer_and_may_not_hold_it(capsys: Any) -> None:
    keys = ["model=qwen3-8b", "lora=true", "sequence_len=1024", "recompute=false", "lmhead_chunks=1"]
    found = {}
    for name in ("h200", "l4", "t4"):
        assert main(["plan", *keys, "--gpu", name, "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    assert [found[name]["fits"] for name in found] == [True, False, False]
    assert found["h200"]["seconds_per_step"] < found["l4"]["seconds_per_step"] < found["t4"]["seconds_per_step"]
    for plan in found.values():
        assert plan["seconds"] == pytest.approx(plan["steps"] * plan["seconds_per_step"])


def test_it_answers_first_and_shows_the_rest_on_request(capsys: Any) -> None:
    assert main(["plan", *SMALL, "--gpu", "t4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "on T4"
    assert [line.split()[0] for line in lines[3:6]] == ["Fits", "Speed", "Time"]
    assert lines[3].startswith("Fits     yes: ")
    assert "estimated" in lines[4]
    assert "no bf16 units" in "\n".join(lines)
    assert len(lines) < 40
    text = "\n".join(lines)
    assert "learning_rate" not in text
    assert "Micro-step" not in text
    assert main(["plan", *SMALL, "--gpu", "t4", "--config", "--schedule"]) == 0
    text = capsys.readouterr().out
    assert "\nMicro-step on cuda:0" in text
    assert "\nlearning_rate: " in text


@pytest.mark.slow
def test_the_length_is_that_of_the_data(capsys: Any, tmp_path: Path, installed: Registry) -> None:
    rows = "".join(json.dumps({"text": f"the number {n} and more of it"}) + "\n" for n in range(200))
    (tmp_path / "my.jsonl").write_text(rows)
    keys = [f"datasets={tmp_path}/my.jsonl", f"data_cache_dir={tmp_path}/cache"]
    keys += [f"tokenizer={load_run_config([], registry=installed).tokenizer}"]
    once, twice = (plan(capsys, *keys, f"num_epochs={n}")["steps"] for n in (2, 4))
    assert 0 < once < twice <= 2 * once
    assert plan(capsys, *keys, "max_steps=7")["steps"] == 7
    assert plan(capsys, "datasets=owner/on-the-hub")["steps"] is None
    assert plan(capsys, f"datasets={tmp_path}/none.jsonl")["steps"] is None


@pytest.mark.parametrize(("seconds", "text"), [(40, "40 s"), (600, "10 min"), (9000, "2 h 30 min"), (3e5, "3.5 days")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0344, "0.034 s"), (4.8, "4.8 s"), (9.96, "10 s"), (57.4, "57 s"), (212.0, "212 s")]
)
def test_times_of_a_step_have_no_exponents(seconds: float, text: str) -> None:
    assert step_time(seconds) == text


def test_a_name_that_is_not_known() -> None:
    with pytest.raises(UserError, match="h200"):
        find("h2000")
    assert main(["plan", "--gpu", "h2000"]) == 2
    assert main(["plan", "device=cpu", "--gpu", "h200"]) == 2
    assert main(["plan", "--gpu"]) == 2


@pytest.mark.slow
def test_kernels_are_those_of_the_gpu(capsys: Any) -> None:
    found = {name: plan(capsys, "--gpu", name) for name in ("h200", "a100")}
    assert all(p["device"] == "cuda:0" for p in found.values())
    assert found["h200"]["kernels"]["attention bfloat16"] == "hopper"
    assert found["a100"]["kernels"]["attention bfloat16"] != "hopper"
    assert "sm_80" in found["a100"]["kernels_left_out"]["hopper"]
    assert found["h200"]["kernels"]["cross_entropy bfloat16"] == "cuda"
    held = {h["kind"]: h["nbytes"] for h in found["h200"]["held"]}
    assert held["workspace"] == 2 * CUBLAS_WORKSPACE
    assert held["CUDA context"] == CUDA_CONTEXT
    assert native.assumed() is None, "only the plan is made so"


def test_the_gpu_stands_for_any_device_but_a_cpu(capsys: Any, tmp_path: Path) -> None:
    assert plan(capsys, "device=auto", "--gpu", "a100")["device"] == "cuda:0"
    (tmp_path / "on_cpu.yaml").write_text("device: cpu\n")
    assert main(["plan", str(tmp_path / "on_cpu.yaml"), "--gpu", "a100"]) == 2
    assert "device=cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_attention_counts_alike_whichever_kernel_takes_it(capsys: Any) -> None:
    """torch's own formula for its flash kernel is of other work."""
    again = [plan(capsys, "--gpu", gpu, "recompute=true")["recomputed_flops"] for gpu in ("h200", "a100")]
    assert again[0] / 1.5 < again[1] < again[0] * 1.5


@pytest.mark.slow
def test_what_is_computed_again(capsys: Any) -> None:
    """A smaller budget keeps less and multiplies more; whole blocks keep least."""
    found = [plan(capsys, "--gpu", "h200", f"recompute_budget={b}") for b in (1, 0.5)]
    found.append(plan(capsys, "--gpu", "h200", "recompute=true"))
    residuals = [next(h["nbytes"] for h in p["held"] if h["kind"] == "residuals") for p in found]
    assert residuals == sorted(residuals, reverse=True)
    assert len(set(residuals)) == 3
    again = [p["recomputed_flops"] for p in found]
    assert again == sorted(again)
    assert again[0] == 0 < again[2]
    assert main(["plan", *SMALL[:-1], "recompute=true", "recompute_budget=0.5"]) == 2


def test_every_gpu_has_a_capability_that_packs_can_ask_for() -> None:
    for capability in {gpu.capability for gpu in gpus().values()}:
        with native.assuming(capability):
            assert native.capability(torch.device("cuda", 0)) == capability
            assert native.missing_gpu(torch.device("cuda", 0)) is None


@pytest.mark.slow
def test_a_model_with_experts_names_its_active_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "+model=qwen3-moe", "lora=true", "lora_rank=4", "--gpu", "h200"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text
    base, active = (
        int(n.replace(",", "")) for n in re.findall(r"([\d,]+) in the base, ([\d,]+) of them active", text)[0]
    )
    unused = 2 * 3 * 128 * 128 * (8 - 2)
    assert base - active == unused
    assert " of 8 experts in each of 2 layers; routers are frozen." in text
    assert main([*words, "train_router=true"]) == 0
    assert f"{base:,} in the base, {active:,} of them active" in (trained := capsys.readouterr().out)
    assert "routers are trained as whole matrices." in trained
    assert main([*words, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["active_parameters"] == active
    assert plan["tokens_per_second"] > 0
    assert "multiplies all rows" not in text
    assert main([*words, "torch_dtype=float32"]) == 0
    wide = " ".join(capsys.readouterr().out.split())
    assert "no kernel takes all their products in float32 here, so that each of 8 experts multiplies all rows" in wide


def test_samples_need_keys_and_values_of_what_is_left(capsys: Any) -> None:
    keys = ("sample_prompts=[Why?, {prompt: The chain}]", "sample_max_new_tokens=100", "max_steps=2", "device=cpu")
    assert main(["plan", *SMALL, *keys]) == 0
    printed = capsys.readouterr().out
    found = re.search(r"samples: 2 sequences of (\d+) tokens need ([\d.]+) MiB", printed)
    assert found is not None
    tokens, size = int(found[1]), float(found[2]) * 2**20
    assert tokens > 100
    # Two layers, keys and values, in fp32: of the sequences, and of one that does not count.
    heads = size / (tokens * 2 * 2 * 128 * 4 * 3)
    assert heads == pytest.approx(round(heads), rel=0.01)
    assert main(["plan", *SMALL, "sample_prompts=gone.jsonl"]) == 2
    assert "sample_prompts gone.jsonl: cannot be read: No such file" in capsys.readouterr().err
