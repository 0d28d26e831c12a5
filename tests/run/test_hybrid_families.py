"""Runs of the shipped hybrids, Nemotron-H and Qwen3.5: resume, ranks, formats, places of tensors, what is refused."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hybrids
import pytest
from rank_world import World, of_step
from run_fixtures import LORA, QUICK
from safetensors import safe_open
from safetensors.torch import save_file

from surogate_core.errors import UserError
from surogate_core.files.tensorfile import file_digest
from surogate_core.plugins.registry import Registry
from surogate_core.train.checkpoint import manifest_digest

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

FULL = ("lora=false",)
MODES = pytest.mark.parametrize("mode", [FULL, LORA], ids=["full", "lora"])
FAMILIES = pytest.mark.parametrize("family", hybrids.RUNS)


@pytest.fixture(scope="module")
def small(data_cache: Path) -> list[str]:
    """Overrides of every run."""
    return [*QUICK, f"data_cache_dir={data_cache}", "learning_rate=0.01"]


@pytest.fixture(scope="module")
def ranks(installed: Registry) -> Iterator[World]:
    """Processes that the runs of this module share."""
    with World(installed) as world:
        yield world


def losses(records: Records, run: Path) -> list[float]:
    return [line["loss"] for line in records(run, "step_end")]


@pytest.mark.slow
@MODES
@FAMILIES
def test_every_checkpoint_continues_bit_identically(
    family: str, mode: tuple[str, ...], tmp_path: Path, small: list[str], run_here: RunHere, history: History,
    digests: Digests, records: Records,
) -> None:  # fmt: skip
    keys = [*small, *hybrids.RUNS[family], *mode, "save_steps=1", "save_total_limit=9", "eval_steps=2"]
    whole = tmp_path / "whole"
    run_here(whole, *keys)
    found = losses(records, whole)
    assert all(map(math.isfinite, found))
    assert found[-1] < found[0]
    for step in (2, 5):
        cut = of_step(whole, step, tmp_path / f"from-{step}")
        run_here(cut, *keys)
        assert history(cut) == history(whole)
        assert digests(cut / "checkpoint-6") == digests(whole / "checkpoint-6")


def without(file: Path, end: str) -> str:
    """Take a tensor whose name has this end out of a checkpoint, whose manifest then agrees; its name."""
    with safe_open(file, "pt") as opened:
        tensors, metadata = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    gone = next(name for name in sorted(tensors) if name.endswith(end))
    del tensors[gone]
    save_file(tensors, file, metadata=metadata)
    manifest = file.parent / "manifest.json"
    value = json.loads(manifest.read_text())
    value["files"][file.name] = {"bytes": file.stat().st_size, "xxh3_128": file_digest(file)}
    manifest.write_text(json.dumps({**value, "xxh3_128": manifest_digest(value)}))
    return gone


@pytest.mark.slow
@FAMILIES
def test_a_checkpoint_that_lacks_a_state_is_refused_by_name(
    family: str, tmp_path: Path, small: list[str], run_here: RunHere, records: Records
) -> None:
    """A decay, a moment of the optimizer; without a whole file an earlier checkpoint is used, and said."""
    keys = [*small, *hybrids.RUNS[family], *FULL, "save_steps=1", "max_steps=2"]
    run_here(tmp_path / "run", *keys)
    for file, end in (("trainable", "A_log"), ("optimizer", "second.fp32")):
        cut = Path(shutil.copytree(tmp_path / "run", tmp_path / file))
        gone = without(cut / "checkpoint-2" / f"{file}.safetensors", end)
        with pytest.raises(UserError, match=rf"checkpoint-2: .*{file}: {gone}.*Fix: restore the settings"):
            run_here(cut, *keys, "max_steps=3")
    (tmp_path / "run" / "checkpoint-2" / "optimizer.safetensors").unlink()
    run_here(tmp_path / "run", *keys, "max_steps=3")
    start = records(tmp_path / "run", "run_start")[-1]
    assert start["start_step"] == 1
    assert any("checkpoint-2: optimizer.safetensors is missing" in note for note in start["notes"])


@pytest.mark.slow
@MODES
@FAMILIES
def test_no_bit_depends_on_where_tensors_are_or_what_is_computed_again(
    family: str, mode: tuple[str, ...], tmp_path: Path, small: list[str], run_here: RunHere, digests: Digests
) -> None:
    keys = [*small, *hybrids.RUNS[family], *mode, "max_steps=2", f"offload_dir={tmp_path}"]
    export = "model" if mode == FULL else "adapter"
    run_here(tmp_path / "run", *keys, "recompute=false")
    expected = digests(tmp_path / "run" / export)
    others = [("recompute=true",), ("offload=host", "offload_residual=true"), ("offload=disk",)]
    others += [("offload=disk", "cpu_training=true")] if mode == FULL else []
    for number, other in enumerate(others):
        run_here(tmp_path / str(number), *keys, *other)
        assert digests(tmp_path / str(number) / export) == expected, other


FORMATS = {
    "NF4": ("qlora_bnb=true",),
    "FP8": ("qlora_fp8=true", "qlora_block_size=32"),
    "NVFP4": ("qlora_fp4=true",),
    "fp8-hybrid": ("recipe=fp8-hybrid", "fp8_amax_history=3"),
    "fp8-hybrid on NF4": ("recipe=fp8-hybrid", "fp8_amax_history=3", "qlora_bnb=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
@FAMILIES
def test_bases_and_products_in_narrow_formats_train_near_plain_ones_and_resume(
    family: str, form: str, tmp_path: Path, small: list[str], run_here: RunHere, history: History, digests: Digests,
    records: Records,
) -> None:  # fmt: skip
    keys = [*small, *hybrids.RUNS[family], *LORA, "max_steps=3", "save_steps=1", "save_total_limit=9"]
    run_here(tmp_path / "plain", *keys)
    whole = tmp_path / "whole"
    run_here(whole, *keys, *FORMATS[form])
    assert losses(records, whole) == pytest.approx(losses(records, tmp_path / "plain"), rel=5e-3)
    assert losses(records, whole) != losses(records, tmp_path / "plain"), "the format must matter"
    cut = of_step(whole, 1, tmp_path / "cut")
    run_here(cut, *keys, *FORMATS[form])
    assert history(cut) == history(whole)
    assert digests(cut / "checkpoint-3") == digests(whole / "checkpoint-3")


EXACT = ("lora=false", "exact_reduction=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    [
        LORA,
        (*LORA, "shard_weights=true"),
        (*LORA, "qlora_bnb=true"),
        *((*EXACT, f"zero_level={level}") for level in (1, 2, 3)),
    ],
    ids=["lora", "lora-shared-base", "lora-nf4", "level-1", "level-2", "level-3"],
)
@FAMILIES
def test_two_ranks_have_the_bits_of_one(
    family: str, mode: tuple[str, ...], tmp_path: Path, small: list[str], ranks: World, history: History,
    digests: Digests,
) -> None:  # fmt: skip
    keys = [*small, *hybrids.RUNS[family], *mode, "max_steps=2", "save_steps=2", "eval_steps=2"]
    one, two = tmp_path / "one", tmp_path / "two"
    ranks.run(1, one, *keys, "gradient_accumulation_steps=2")
    assert ranks.run(2, two, *keys, "gradient_accumulation_steps=1") == (0, [0])
    assert history(two) == history(one)
    assert digests(two / "checkpoint-2") == digests(one / "checkpoint-2")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mixer"), [("nemotron-h", "conv"), ("qwen3-5", "smooth")])
def test_ranks_cannot_share_the_rows_of_a_recurrence(
    family: str, mixer: str, tmp_path: Path, small: list[str], run_here: RunHere
) -> None:
    keys = [*small, *hybrids.DENSE[family], *FULL, "gpus=2", "context_parallel_size=2"]
    with pytest.raises(UserError, match=rf"context_parallel_size is 2, and {mixer} is a recurrence .*Fix: context_par"):
        run_here(tmp_path, *keys)


@pytest.mark.slow
@FAMILIES
def test_compiled_programs_have_the_losses_of_the_graphs(
    family: str, tmp_path: Path, small: list[str], run_here: RunHere, records: Records
) -> None:
    """Inductor's code on a CPU: forward, backward, evaluation and step."""
    keys = [*small, *hybrids.RUNS[family], *FULL, "max_steps=3", "eval_steps=3"]
    found = {}
    for compiler in ("fx", "inductor"):
        run_here(tmp_path / compiler, *keys, f"compiler={compiler}")
        lines = records(tmp_path / compiler, "step_end")
        held_out = [line["loss"] for line in records(tmp_path / compiler, "eval_end")]
        found[compiler] = [*(line["loss"] for line in lines), *(line["grad_norm"] for line in lines), *held_out]
    assert found["inductor"] == pytest.approx(found["fx"], rel=1e-5)
