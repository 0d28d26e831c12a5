"""Runs whose processes share out experts: the losses of one process, its files, and checkpoints of either."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mixture import save_qwen3_moe
from rank_processes import ranks_of
from rank_world import World, of_step
from run_fixtures import QUICK
from safetensors.torch import load_file, save_file

from surogate_core.errors import ConfigError, UserError
from surogate_core.files.tensorfile import file_digest
from surogate_core.plugins.registry import Registry
from surogate_core.train.checkpoint import manifest_digest

Records = Callable[..., list[dict[str, Any]]]

KEYS = ("max_steps=2", "save_steps=0", "eval_steps=0", "gradient_accumulation_steps=2", "tokenizer=null")
LORA = (
    "lora=true",
    "lora_rank=4",
    "lora_dropout=0",
    "lora_expert_rank=2",
    "lora_target_modules=[all]",
    "merge_adapter=true",
)
FULL = ("lora=false",)
SHARED = ("ep_size=2",)
EVEN = ("ep_load_balance_threshold=1",)


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    """Processes that the runs of this module share."""
    with World(installed) as world:
        yield world


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, data_cache: Path) -> list[str]:
    """A random Qwen3-MoE of 4 experts, and the data."""
    model = save_qwen3_moe(tmp_path_factory.mktemp("moe") / "base")
    return [*QUICK, f"model={model}", f"data_cache_dir={data_cache}"]


def losses(records: Records, run: Path) -> list[float]:
    return [record["loss"] for event in ("eval_end", "step_end") for record in records(run, event)]


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(LORA, id="lora", marks=pytest.mark.slow),
        pytest.param(FULL, id="full", marks=pytest.mark.slow),
        pytest.param((*LORA, "qlora_bnb=true"), id="NF4", marks=pytest.mark.slow),
        pytest.param((*LORA, *EVEN), id="even loads", marks=pytest.mark.slow),
        pytest.param((*FULL, *EVEN), id="full, even loads", marks=pytest.mark.slow),
        pytest.param((*LORA, *EVEN, "qlora_bnb=true", "recompute=true"), id="NF4, even", marks=pytest.mark.slow),
        pytest.param(
            (*LORA, "qlora_bnb=true", "qlora_offload_experts=true", "offload=host"),
            id="experts on the host",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            (*LORA, *EVEN, "qlora_bnb=true", "qlora_offload_experts=true", "offload=host"),
            id="experts on the host, even loads",
            marks=pytest.mark.slow,
        ),
        pytest.param((*LORA, "recipe=fp8-hybrid", "recompute=true"), id="fp8, recomputed", marks=pytest.mark.slow),
        pytest.param((*LORA, *EVEN, "recipe=fp8-hybrid"), id="fp8, even loads", marks=pytest.mark.slow),
        pytest.param((*FULL, *EVEN, "recipe=fp8-hybrid"), id="fp8, full, even loads", marks=pytest.mark.slow),
        pytest.param(
            (*FULL, "optimizer=adamw", "offload=host", "offload_master=true", "offload_optimizer=true"),
            id="masters on the host",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_two_processes_share_out_experts(
    tmp_path: Path, base: list[str], ranks: World, records: Records, mode: tuple[str, ...]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    ranks.run(1, one, *base, *mode, *KEYS, "gradient_accumulation_steps=4")
    assert ranks.run(2, two, *base, *mode, *KEYS, *SHARED) == (0, [0])
    assert losses(records, two) == pytest.approx(losses(records, one), rel=2e-6)
    starts = [records(run, "run_start")[0] for run in (one, two)]
    moved = [event["moe_moved_rows"] for event in records(two, "routing_stats")]
    assert any(moved) if EVEN[0] in mode else moved == [None, None], moved
    for figure in ("tokens_per_step", "parameters", "trainable_parameters", "active_parameters"):
        assert starts[0][figure] == starts[1][figure], figure
    for file in sorted(one.glob("*/*.safetensors")):
        if file.parent.name.startswith("checkpoint"):
            continue
        mine, other = load_file(file), load_file(two / file.relative_to(one))
        assert mine.keys() == other.keys()
        for name, tensor in mine.items():
            torch.testing.assert_close(other[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["sums", "rows"])
def test_a_recipe_with_scales_of_whole_tensors(
    tmp_path: Path, base: list[str], ranks: World, records: Records, exchange: str
) -> None:
    """Its scale is that of all rows that are multiplied together, so losses differ a little from one process's."""
    one, two = tmp_path / "one", tmp_path / "two"
    keys = [*base, *LORA, *KEYS, "recipe=nvfp4"]
    ranks.run(1, one, *keys, "gradient_accumulation_steps=4")
    assert ranks.run(2, two, *keys, *SHARED, f"ep_exchange={exchange}") == (0, [0])
    assert losses(records, two) == pytest.approx(losses(records, one), rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [LORA, FULL], ids=["lora", "full"])
def test_a_checkpoint_continues_on_any_number_of_processes_that_share_out_experts(
    tmp_path: Path, base: list[str], ranks: World, records: Records, mode: tuple[str, ...]
) -> None:
    keys = [*base, *mode, *KEYS, "save_steps=1"]
    alone, shared = ("gradient_accumulation_steps=4",), ("ep_size=4", "gradient_accumulation_steps=1")
    one, four = tmp_path / "one", tmp_path / "four"
    ranks.run(1, one, *keys, *alone)
    assert ranks.run(4, four, *keys, *shared, *EVEN) == (0, [0, 0, 0])
    onto_one = of_step(four, 1, tmp_path / "onto one")
    ranks.run(1, onto_one, *keys, *alone)
    onto_two = of_step(one, 1, tmp_path / "onto two")
    assert ranks.run(2, onto_two, *keys, *SHARED, *EVEN) == (0, [0])
    for resumed in (onto_one, onto_two):
        assert records(resumed, "run_start")[-1]["start_step"] == 1
        assert losses(records, resumed) == pytest.approx(losses(records, one), rel=2e-6)


@pytest.mark.slow
def test_a_killed_process_costs_only_steps(tmp_path: Path, base: list[str], ranks: World, records: Records) -> None:
    keys = [*base, *LORA, *KEYS, "save_steps=2", "save_total_limit=20", "max_steps=12"]
    cut, whole, shared = tmp_path / "cut", tmp_path / "whole", [*SHARED, *EVEN]
    words = {word.partition("=")[0]: word for word in [*keys, *shared, "gpus=2", f"output_dir={cut}"]}
    command = [sys.executable, "-m", "surogate_core", "sft", *words.values()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        while not (cut / "checkpoint-4").is_dir():
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        killed = ranks_of(process.pid)[1]
        os.kill(killed, signal.SIGKILL)
        output = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGKILL
    assert output.count("surogate: rank 1") == output.count("was killed by SIGKILL") == 1, output
    assert "Traceback" not in output
    assert records(cut, "run_end")[-1]["reason"] == "failed"
    assert not [path for path in cut.rglob("*") if ".surogate-" in path.name and path.is_dir()]
    alone = Path(shutil.copytree(cut, tmp_path / "alone"))
    assert ranks.run(2, whole, *keys, *shared) == (0, [0])
    assert ranks.run(2, cut, *keys, *shared) == (0, [0])
    ranks.run(1, alone, *keys, "gradient_accumulation_steps=4")
    for resumed in (cut, alone):
        assert records(resumed, "run_start")[-1]["start_step"] >= 4
    assert dict(steps(records, cut)) == dict(steps(records, whole))
    for file in whole.glob("*/*.safetensors"):
        assert file.read_bytes() == (cut / file.relative_to(whole)).read_bytes(), file
    expected = dict(steps(records, whole))
    assert dict(steps(records, alone)) == pytest.approx(expected, rel=2e-6)


def steps(records: Records, run: Path) -> list[tuple[int, float]]:
    """(step, loss); those after a resumed checkpoint come twice, the later ones last."""
    return [(record["step"], record["loss"]) for record in records(run, "step_end")]


@pytest.mark.slow
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, base: list[str], ranks: World) -> None:
    with pytest.raises(ConfigError, match=r"ep_size.*does not divide gpus=1"):
        ranks.run(1, tmp_path / "run", *base, *LORA, *KEYS, *SHARED)
    fix = r"ep_load_balance_threshold: is set, and recipe nvfp4 keeps.*Fix: ep_load_balance_threshold: null, or"
    with pytest.raises(ConfigError, match=fix):
        ranks.run(2, tmp_path / "run", *base, *LORA, *KEYS, *SHARED, *EVEN, "recipe=nvfp4")
    with pytest.raises(ConfigError, match=r"ep_size: is 3 and does not divide the 4 experts.*Fix: ep_size: 1, or"):
        ranks.run(3, tmp_path / "run", *base, *LORA, *KEYS, "ep_size=3")


@pytest.mark.slow
def test_a_file_or_tensor_of_experts_is_missing(tmp_path: Path, base: list[str], ranks: World) -> None:
    model = save_qwen3_moe(tmp_path / "parts", max_shard_size="40KB")
    keys = [*base, f"model={model}", *LORA, *KEYS, *SHARED]
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shard = model / json.loads((model / "model.safetensors.index.json").read_text())["weight_map"][name]
    tensors = load_file(shard)
    del tensors[name]
    save_file(tensors, shard, metadata={"format": "pt"})
    for message in (f"{name}: not in {shard.name}", f"{shard}: missing"):
        with pytest.raises(UserError, match=rf"{re.escape(message)}[\s\S]*Fix: download or copy"):
            ranks.run(2, tmp_path / "run", *keys)
        assert ranks.ends == [0], "the other process ends, and says nothing"
        shard.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_checkpoint_without_a_part_of_the_experts(tmp_path: Path, base: list[str], ranks: World) -> None:
    keys, run = [*base, *LORA, *KEYS, *SHARED, "save_steps=2"], tmp_path / "run"
    assert ranks.run(2, run, *keys) == (0, [0])
    state = run / "checkpoint-2" / "trainable.safetensors"
    tensors = load_file(state)
    name = next(name for name in tensors if ".experts." in name)
    del tensors[name]
    save_file(tensors, state)
    with pytest.raises(UserError, match=r"cannot be used:[\s\S]*trainable\.safetensors has \d+ bytes[\s\S]*Fix: "):
        ranks.run(2, run, *keys, "max_steps=3")
    manifest = state.with_name("manifest.json")
    value = json.loads(manifest.read_text())
    value["files"][state.name] = {"bytes": state.stat().st_size, "xxh3_128": file_digest(state)}
    manifest.write_text(json.dumps(value | {"xxh3_128": manifest_digest(value)}))
    message = rf"checkpoint-2: 1 tensors are not those of this run: trainable: {re.escape(name)}\. Fix: "
    with pytest.raises(UserError, match=message):
        ranks.run(2, run, *keys, "max_steps=3")
    state.unlink()
    with pytest.raises(UserError, match=r"trainable\.safetensors is missing[\s\S]*Fix: "):
        ranks.run(2, run, *keys, "max_steps=3")
