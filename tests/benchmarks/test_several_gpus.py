"""The tables of the benchmarks of several GPUs, from made-up results, and a case on a CPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench
import bench_command
import bench_world
import equal_bits
import kill_rank
import pytest
import several_gpus
import several_gpus_peers
import torch
import torch._inductor.config
import torchtitan_peer

from surogate_core.batch import MicroBatch
from surogate_core.mesh import driver
from surogate_core.mesh.mesh import Mesh
from surogate_testing.virtual import in_threads

TRAINING = bench_world.Training(length=1000, rows=2, accumulation=4)


def rank(*milliseconds: float, **changes: Any) -> dict[str, Any]:
    figures = {
        "milliseconds_all": list(milliseconds),
        "setup_seconds": 3.0,
        "losses": [5.0, 4.0],
        "gradient_norms": [1.0, 0.5],
        "profile": None,
        "gpu": "a GPU",
        "peak_gib": 10.0,
        "predicted_gib": 10.1,
        "reserved_gib": 11.0,
        "device_gib": 12.0,
        "compiled": {},
    }
    return {**figures, **changes}


def test_a_step_takes_as_long_as_its_slowest_rank() -> None:
    one = several_gpus.row_of("a", TRAINING, 1, {"ranks": [rank(100, 100, 100)]})
    two = several_gpus.row_of("a", TRAINING, 2, {"ranks": [rank(100, 120, 90), rank(110, 90, 125, peak_gib=11.0)]})
    assert one["tokens_per_second"] == pytest.approx(80_000)
    assert two["milliseconds"] == 120
    assert two["tokens_per_second"] == pytest.approx(16_000 / 0.120)
    assert two["spread"] == pytest.approx(0.1)
    failed = several_gpus.row_of("b", TRAINING, 2, {"error": "a | b", "log": ""})
    rows = several_gpus.with_efficiency([one, two, failed])
    assert [row["efficiency"] for row in rows] == [1.0, pytest.approx(100 / 120), None]
    text = several_gpus.markdown([one, two, failed])
    assert "| a | 1 | 80,000 |  | 100.0 |  | 10.00 | 10.10 (+1.0%) | 12.0 | 3 s | 5.0000 … 4.0000 |" in text
    assert "| a | 2 | 133,333 | 83.3% | 120.0 | 10.00% | 11.00 | 10.10 (-8.2%) |" in text
    assert "| b | 2 | failed: a \\| b |" in text


def test_efficiency_is_relative_to_the_mean_of_repeats() -> None:
    rows = [{"case": "a", "world": n, "tokens_per_second": rate} for n, rate in ((1, 90), (2, 200), (1, 110))]
    assert several_gpus.with_efficiency(rows)[1]["efficiency"] == 1.0


def test_worlds_of_a_case_follow_each_other() -> None:
    options = several_gpus.make_parser().parse_args(["--worlds", "1", "2", "--only", *several_gpus.LEAST_WORLD])
    assert {name: world for name, _, world in several_gpus.lines(options)} == {
        name: least for name, least in several_gpus.LEAST_WORLD.items() if least <= 2
    }
    options = several_gpus.make_parser().parse_args(["--repeats", "2", "--only", "8B LoRA fp8"])
    assert [world for _, _, world in several_gpus.lines(options)] == [1, 2, 1, 2]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_step_has_the_same_micro_batches_in_every_world(world: int) -> None:
    for level in (1, 2):
        training = bench_world.Training(preset="tiny", length=8, micro_batches=8, zero_level=level)
        whole = bench_world.step_batches(training, Mesh(), step=3)
        assert len(whole) == 8
        found: dict[int, MicroBatch] = {}
        for r in range(world):
            for j, batch in enumerate(bench_world.step_batches(training, Mesh(rank=r, world=world), step=3)):
                assert batch == whole[j].counts() if not isinstance(batch, MicroBatch) else j not in found
                if isinstance(batch, MicroBatch):
                    found[j] = batch
        assert sorted(found) == list(range(8))
        assert all(found[j].input_ids.equal(batch.input_ids) for j, batch in enumerate(whole))
        assert training.tokens(world) == 8 * 16


def test_a_case_is_measured() -> None:
    training = several_gpus.CASES["8B full, level 1, accumulation 4"].tiny()
    work = {"training": asdict(training), "device": "cpu", "steps": 2, "warm_up": 2, "profile": False}
    found = several_gpus.measure(work, Mesh())
    json.dumps(found)
    assert len(found["milliseconds_all"]) == 2
    assert found["losses"][1] < found["losses"][0]
    assert len(found["gradient_norms"]) == 2


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_that_share_rows_have_parts_of_one_step(world: int) -> None:
    training = several_gpus.CASES["8B LoRA bf16, shared rows of 32k"]
    assert not training.is_exact
    assert training.total(world) == 1
    assert training.tokens(world) == 32_768
    shared = bench_world.assembly_of(training.tiny(), world, torch.device("cpu")).settings
    assert (shared.tokens, shared.axes.context) == (32 // world, world)


def test_ranks_share_out_experts() -> None:
    training = several_gpus.CASES["30B-A3B LoRA bf16, experts shared out, rows sent"]
    assert not training.is_exact
    plan = bench_world.assembly_of(training.tiny(), 2, torch.device("cpu")).settings.axes
    assert (plan.expert, plan.expert_rows, plan.micro_batches) == (2, True, 2)


@pytest.mark.slow
def test_ranks_even_out_hot_experts() -> None:
    training = several_gpus.CASES["30B-A3B LoRA bf16, experts shared out, 30 % on four experts, evened out"].tiny()
    work = {"training": asdict(training), "device": "cpu", "steps": 1, "warm_up": 1, "profile": False}
    assert several_gpus.measure(work, Mesh())["loads"] == {"step": 1.0}
    ranks = in_threads(2, lambda fabric: several_gpus.measure(work, fabric.mesh()))
    loads = several_gpus.row_of("a", training, 2, {"ranks": ranks})["loads"]
    assert loads["routed"] > 1.1 > 1.05 >= loads["evened"] >= 1
    assert 0 < loads["moved"] <= 0.5


def test_where_two_runs_differ_first() -> None:
    def run(loss: float, **digests: str) -> dict[str, Any]:
        return {"figures": {"3": [loss.hex(), (1.0).hex()]}, "digests": digests}

    same = run(2.0, trainable="a", optimizer="b")
    assert equal_bits.differences(same, same) == ""
    assert equal_bits.differences(same, run(2.5, trainable="a", optimizer="b")) == "step 3: 2 1 against 2.5 1"
    assert equal_bits.differences(same, run(2.0, trainable="a", optimizer="c")) == "tensors of optimizer"
    assert equal_bits.differences(same, {"error": "no"}) == "failed: no"
    assert equal_bits.differences({"error": "no"}, same) == "nothing to compare with"
    resumed = {**run(2.5, trainable="a", optimizer="c"), "at_half": {"trainable": "h"}}
    saved = {**same, "at_half": {"trainable": "h"}}
    assert equal_bits.apart(saved, resumed) == 0.25
    assert equal_bits.differences(saved, resumed, state_alone=True) == "losses 2.5e-01 apart"
    assert equal_bits.differences(saved, {**run(2.001), "at_half": {"trainable": "h"}}, state_alone=True) == ""
    assert equal_bits.differences(saved, {**run(float("nan")), "at_half": {"trainable": "h"}}, state_alone=True)
    assert equal_bits.differences(saved, run(2.0), state_alone=True) == "tensors at the resume of trainable"
    saved = {**same, "at_half": {"trainable": "h", "optimizer": "i"}}
    assert equal_bits.differences(saved, resumed, state_alone=True) == "tensors at the resume of optimizer"


def test_every_world_trains_and_resumes_if_a_case_is_exact() -> None:
    def runs(world: int, **training: bool) -> list[str]:
        given = dataclasses.replace(equal_bits.FULL, **training)
        return [str(run) for run in equal_bits.runs("a", world, given, largest=world == 2)]

    assert runs(2, exact=True) == ["2 GPUs", "2 GPUs", "2 GPUs from half"]
    assert runs(1, exact=True) == ["1 GPU", "1 GPU from half"]
    assert runs(2, exact=False) == ["2 GPUs", "2 GPUs"]
    assert runs(1, exact=False) == []
    assert runs(2, exact=False, shared_experts=True) == ["2 GPUs", "2 GPUs", "2 GPUs from half"]
    assert runs(1, exact=False, shared_experts=True) == ["1 GPU from half"]


@pytest.mark.parametrize(
    ("fabric", "copied", "right"), [("copy_engines", 0, False), ("copy_engines", 2, True), ("nccl", 2, False)]
)
def test_bits_are_those_of_the_fabric(
    fabric: str, copied: int, right: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training whose data goes another way must not count for the copy engines."""

    def train(*_: object) -> dict[str, object]:
        for _ in range(copied):
            driver.copy(1, 2, 3, 4)
        return {}

    monkeypatch.setattr(driver, "copy", lambda *_: None)
    monkeypatch.setattr(equal_bits, "train", train)
    jobs = [[dataclasses.asdict(equal_bits.LORA), {"case": "LoRA", "world": 2}]]
    work = {"jobs": jobs, "fabric": fabric, "lines": str(tmp_path / "lines"), "device": "cpu"}
    with nullcontext() if right else pytest.raises(AssertionError, match=f"{copied} copies by copy engines"):
        equal_bits.train_all(work, Mesh(world=2))


@pytest.mark.slow
def test_bits_on_two_ranks_and_on_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(equal_bits.CASES, "fails", dataclasses.replace(equal_bits.LORA, recipe="no such recipe"))
    arguments = ["--only", "LoRA", "fails", "full exact, level 1", "--device", "cpu", "--tiny", "--out", str(tmp_path)]
    monkeypatch.setattr(equal_bits.bench_ranks, "GRACE", 0.0)
    rows = equal_bits.compare(equal_bits.make_parser().parse_args(arguments))
    equal = [row["case"] for row in rows if not row["why"]]
    assert equal == [*["LoRA"] * 3, *["full exact, level 1"] * 3, *["LoRA"] * 2, *["full exact, level 1"] * 2]
    assert ["no such recipe" in row["why"] for row in rows if row["why"]] == [True]
    assert json.loads((tmp_path / "equal_bits.json").read_text()) == rows


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A process with a child for each of two ranks, and a child of rank 1 that inherits its number."""
    sleeper = "import time; print(flush=True); time.sleep(60)"
    of_rank = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {sleeper!r}])"
    code = f"""
import os, subprocess, sys
for rank, code in ((0, {sleeper!r}), (1, {of_rank!r})):
    subprocess.Popen([sys.executable, "-c", code], env={{**os.environ, "RANK": str(rank)}})
os.wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline(), process.stdout.readline()
        yield process
        for pid in [*kill_rank.descendants(process.pid), process.pid]:
            os.kill(pid, 9)


def test_the_processes_of_the_ranks_are_found(family: subprocess.Popen[str]) -> None:
    below = kill_rank.descendants(family.pid)
    ranks = kill_rank.ranks_below(family.pid)
    assert len(below) == 3
    assert sorted(ranks) == [0, 1]
    assert set(ranks.values()) < set(below)
    assert kill_rank.descendants(ranks[1]) == [pid for pid in below if pid not in ranks.values()]


def test_the_rate_of_a_command_leaves_its_first_steps_out() -> None:
    steps = [{"total_tokens": 100 * n, "time": 10.0 + (5 if n == 1 else n)} for n in range(1, 7)]
    assert bench_command.rate(steps, 2) == 100


def test_the_overrides_compose(tmp_path: Path) -> None:
    from surogate_core.config.resolve import load_run_config

    given = bench_command.overrides(tmp_path, gpus=1, device="cpu", steps=3, tiny=False)
    for keys in bench_command.CASES.values():
        config = load_run_config([*given, *keys], registry=bench.registry())
        assert (config.max_steps, config.gpus) == (3, 1)


def test_a_peer_s_row() -> None:
    peer = several_gpus_peers.CASES["8B LoRA, DDP"]
    row = several_gpus_peers.row_of("p", peer, 2, {"ranks": [rank(100), rank(200)]})
    assert row["tokens_per_second"] == pytest.approx(2 * 4 * 2 * 2048 / 0.2)
    assert "failed: no" in several_gpus.markdown([several_gpus_peers.row_of("p", peer, 2, {"error": "no"})])


@pytest.mark.parametrize("scales", ["tensorwise", "rowwise"])
def test_float8_of_a_peer_is_in_the_layers_alone(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Config:
        enable_fsdp_float8_all_gather: bool = False
        emulate: bool = False

        @staticmethod
        def from_recipe_name(name: str) -> Config:
            assert name == scales
            return Config()

    converted: list[str] = []

    def convert(model: torch.nn.Module, *, config: Config, module_filter_fn: Callable[..., bool]) -> None:
        assert config == Config(enable_fsdp_float8_all_gather=scales == "tensorwise", emulate=True)
        converted.extend(name for name, module in model.named_modules() if module_filter_fn(module, name))

    torchao = types.ModuleType("torchao.float8")
    monkeypatch.setattr(torchao, "Float8LinearConfig", Config, raising=False)
    monkeypatch.setattr(torchao, "convert_to_float8_training", convert, raising=False)
    monkeypatch.setattr(torchao, "precompute_float8_dynamic_scale_for_fsdp", lambda model: model.clear(), raising=False)
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.float8", torchao)
    linear = torch.nn.Linear
    model = torch.nn.ModuleDict({"q": linear(32, 48), "odd": linear(32, 40), "norm": torch.nn.LayerNorm(32)})
    model["lm_head"] = linear(32, 64)
    with torch._inductor.config.patch(emulate_precision_casts=False):
        several_gpus_peers.to_float8(model, scales, emulate=True)
        assert torch._inductor.config.emulate_precision_casts is (scales == "rowwise")
    assert converted == ["q"]
    peer = several_gpus_peers.Peer(preset="tiny", side="fsdp-float8", scales=scales)
    several_gpus_peers.weight_scales(peer, model)()
    assert len(model) == (0 if scales == "tensorwise" else 4)


def test_torchtitan_receives_what_the_other_peers_train() -> None:
    cases = {
        name: torchtitan_peer.arguments(peer, world=2, steps=11)
        for name, peer in several_gpus_peers.CASES.items()
        if peer.side.startswith("titan")
    }
    plain = cases["8B full, torchtitan bf16, accumulation 4"]
    given = dict(zip(plain[::2], plain[1::2], strict=True))
    assert (given["--model.flavor"], given["--training.dtype"]) == ("8B", "bfloat16")
    assert (given["--training.local_batch_size"], given["--training.global_batch_size"]) == ("2", "16")
    scaled = cases["8B full, torchtitan float8, accumulation 4"][len(plain) :]
    assert "--quantize.linear.float8.enable_fsdp_float8_all_gather" in scaled
    assert "rowwise" in cases["8B full, torchtitan float8 rowwise, accumulation 4"]
    assert "float32" in cases["8B full, torchtitan fp32, accumulation 4"]


def test_figures_of_torchtitan() -> None:
    kept = torchtitan_peer.Kept(lambda: 5)
    kept.log({"time_metrics/end_to_end(s)": 0.5, "loss_metrics/global_avg_loss": torch.tensor(4.0)}, 1)
    assert (kept.milliseconds, kept.losses, kept.peaks) == ([500.0], [4.0], [5])
    peer = several_gpus_peers.Peer(preset="tiny", side="titan-bf16", length=6, accumulation=2)
    batches = iter(torchtitan_peer.RandomTokens(50, peer, 0))
    (first, after), (second, _), (again, _) = (next(batches) for _ in range(3))
    assert first["input"].shape == after.shape == (2, 6)
    assert torch.equal(first["input"][:, 1:], after[:, :-1])
    assert torch.equal(first["input"], again["input"])
    assert not torch.equal(first["input"], second["input"])
