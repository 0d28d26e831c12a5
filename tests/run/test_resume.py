"""Resuming: bit-identical to the uninterrupted run, wherever it was cut; refused when it is another run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surogate_core.errors import MachineError, UserError

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
History = Callable[[Path], list[tuple[Any, ...]]]
Digests = Callable[[Path], dict[str, str]]

LORA = ("lora=true", "lora_rank=4", "lora_dropout=0.1", "lora_target_modules=[all]")
KILL_TEST = Path(__file__).parents[2] / "scripts" / "kill_test.py"


OTHERS = [
    pytest.param(("optimizer=normuon",), id="normuon"),
    pytest.param(("optimizer=adamw",), id="adamw", marks=pytest.mark.slow),
    pytest.param(("master_dtype=bf16",), id="bf16-masters", marks=pytest.mark.slow),
    pytest.param(("offload=host",), id="host", marks=pytest.mark.slow),
    pytest.param(("offload=disk", "cpu_training=true"), id="disk", marks=pytest.mark.slow),
    pytest.param(("offload=disk", *LORA), id="disk-lora", marks=pytest.mark.slow),
    *[
        pytest.param((f"optimizer={name}", "master_dtype=bf16"), marks=pytest.mark.slow, id=f"{name}-bf16-masters")
        for name in ("adamw", "normuon")
    ],
    *[
        pytest.param((f"recipe={recipe}", "fp8_amax_history=3", *mode), marks=pytest.mark.slow, id=f"{recipe}-{kind}")
        for recipe in ("fp8-hybrid", "nvfp4")
        for kind, mode in (("full", ()), ("lora", LORA))
    ],
]
"""The recipes' graphs are large and take seconds to trace in every run."""


@pytest.mark.slow_cases("normuon", "full")
@pytest.mark.parametrize("mode", [pytest.param((), id="full"), pytest.param(LORA, id="lora"), *OTHERS])
def test_every_checkpoint_continues_bit_identically(
    mode: tuple[str, ...], tmp_path: Path, base: list[str], run_here: RunHere, history: History, digests: Digests
) -> None:
    keys = [*base, *mode, "save_steps=1", "save_total_limit=9", "eval_steps=2", "lr_scheduler_type=cosine"]
    run_here(tmp_path / "whole", *keys)
    whole = tmp_path / "whole" / "checkpoint-6"
    # At an evaluation and between two.
    for step in (2, 5):
        copy = Path(shutil.copytree(tmp_path / "whole", tmp_path / f"from-{step}"))
        for path in copy.glob("checkpoint-*"):
            if int(path.name.removeprefix("checkpoint-")) > step:
                shutil.rmtree(path)
        run_here(copy, *keys)
        assert history(copy) == history(tmp_path / "whole")
        assert digests(copy / "checkpoint-6") == digests(whole)
        states = [json.loads((path / "state.json").read_text()) for path in (copy / "checkpoint-6", whole)]
        assert states[0] == states[1]


@pytest.mark.slow
def test_a_run_goes_on_with_its_tensors_elsewhere(
    tmp_path: Path, base: list[str], run_here: RunHere, history: History, digests: Digests
) -> None:
    keys = [*base, "save_steps=2", "eval_steps=2", f"offload_dir={tmp_path / 'scratch'}"]
    run_here(tmp_path / "whole", *keys)
    run_here(tmp_path / "run", *keys, "offload=disk", "cpu_training=true")
    assert list((tmp_path / "scratch").iterdir()) == []
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    run_here(tmp_path / "run", *keys, "offload=host")
    shutil.rmtree(tmp_path / "run" / "checkpoint-6")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    run_here(tmp_path / "run", *keys)
    assert history(tmp_path / "run") == history(tmp_path / "whole")
    assert digests(tmp_path / "run" / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


def test_a_full_disk_under_offloading_is_one_error_and_harms_no_checkpoint(
    tmp_path: Path, base: list[str], run_here: RunHere, digests: Digests, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_here(tmp_path, *base, "save_steps=2", "max_steps=2")
    before = digests(tmp_path / "checkpoint-2")

    def full(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MachineError, match=r"The disk is full: .* offload_dir"):
        run_here(tmp_path, *base, "save_steps=2", "max_steps=4", "offload=disk")
    assert digests(tmp_path / "checkpoint-2") == before
    monkeypatch.undo()
    assert run_here(tmp_path, *base, "save_steps=2", "max_steps=4") == 0


def test_resuming_evaluates_nothing_twice_and_says_where_it_stands(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    keys = [*base, "lr_scheduler_type=constant", "eval_steps=2", "save_steps=2"]
    run_here(tmp_path, *keys, "max_steps=4")
    run_here(tmp_path, *keys, "max_steps=6")
    assert [line["step"] for line in records(tmp_path, "eval_end")] == [0, 2, 4, 6]
    assert [line["step"] for line in records(tmp_path, "step_end")] == [1, 2, 3, 4, 5, 6]
    start = records(tmp_path, "run_start")[1]
    assert start["start_step"] == 4
    assert any("Resumed from" in note and "at step 4 of 6" in note for note in start["notes"])


@pytest.mark.slow_cases("3")
@pytest.mark.parametrize("limit", [4, 3])
def test_nothing_left_to_train_says_so_and_exports_again(
    limit: int, tmp_path: Path, base: list[str], run_here: RunHere, records: Records, digests: Digests
) -> None:
    run_here(tmp_path, *base, "max_steps=4")
    before, lines = digests(tmp_path / "model"), len(records(tmp_path, "step_end"))
    shutil.rmtree(tmp_path / "model")
    assert run_here(tmp_path, *base, f"max_steps={limit}") == 0
    assert digests(tmp_path / "model") == before
    assert len(records(tmp_path, "step_end")) == lines
    (note,) = [n for n in records(tmp_path, "run_start")[-1]["notes"] if "Nothing is left to train" in n]
    assert f"is at step 4 and the run has {limit}" in note
    assert "raise max_steps or num_epochs" in note


@pytest.mark.slow
def test_another_batch_size_sees_every_row_as_often(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records
) -> None:
    keys = [*base, "num_epochs=2", "save_steps=3"]
    run_here(tmp_path, *keys, "max_steps=3", "gradient_accumulation_steps=2")
    steps = records(tmp_path, "step_end")
    rows = 4 * 3 / steps[-1]["epoch"]
    run_here(tmp_path, *keys, "max_steps=-1", "gradient_accumulation_steps=1")
    steps = records(tmp_path, "step_end")
    assert steps[3]["epoch"] == pytest.approx((4 * 3 + 2) / rows)
    assert 2 <= steps[-1]["epoch"] < 2 + 2 / rows


def test_a_torn_newest_checkpoint_is_passed_over_and_named(
    tmp_path: Path,
    base: list[str],
    run_here: RunHere,
    records: Records,
    digests: Digests,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = [*base, "save_steps=2", "eval_steps=0"]
    run_here(tmp_path, *keys)
    whole = digests(tmp_path / "checkpoint-6")
    file = tmp_path / "checkpoint-6" / "trainable.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    run_here(tmp_path, *keys)
    start = records(tmp_path, "run_start")[-1]
    assert start["start_step"] == 4
    assert any("checkpoint-6" in note and "was altered" in note for note in start["notes"])
    printed = capsys.readouterr()
    warned = [line for line in (printed.out + printed.err).splitlines() if "warning" in line]
    assert any("checkpoint-6: trainable.safetensors was altered" in line for line in warned), warned
    assert digests(tmp_path / "checkpoint-6") == whole


@pytest.mark.slow
def test_resume_from_a_named_checkpoint(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, digests: Digests
) -> None:
    keys = [*base, "save_steps=2"]
    run_here(tmp_path / "a", *keys)
    whole = digests(tmp_path / "a" / "checkpoint-6")
    for named in (f"'{tmp_path}/a/checkpoint-2'", "checkpoint-2"):
        run_here(tmp_path / "a", *keys, f"resume_from_checkpoint={named}")
        assert records(tmp_path / "a", "run_start")[-1]["start_step"] == 2
        assert digests(tmp_path / "a" / "checkpoint-6") == whole
    run_here(tmp_path / "b", *keys, f"resume_from_checkpoint='{tmp_path}/a/checkpoint-4'")
    assert digests(tmp_path / "b" / "checkpoint-6") == whole
    with pytest.raises(UserError, match=r"there is no checkpoint here"):
        run_here(tmp_path / "c", *keys, "resume_from_checkpoint=checkpoint-3")


@pytest.mark.slow
def test_starting_anew_overtakes_what_is_there(
    tmp_path: Path, base: list[str], run_here: RunHere, records: Records, digests: Digests
) -> None:
    run_here(tmp_path, *base, "save_steps=2")
    whole = digests(tmp_path / "checkpoint-6")
    run_here(tmp_path, *base, "max_steps=2", "train_seed=9", "resume_from_checkpoint=false")
    (start,) = records(tmp_path, "run_start")
    assert start["start_step"] == 0
    assert len(records(tmp_path / "former-1", "step_end")) == 6
    run_here(tmp_path, *base, "max_steps=3", "train_seed=9")
    assert records(tmp_path, "run_start")[-1]["start_step"] == 2
    assert digests(tmp_path / "checkpoint-6") == whole


def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, base: list[str], run_here: RunHere, digests: Digests
) -> None:
    changes = [
        (("model.config.hidden_size=48",), ["model.config.hidden_size: 32 in the checkpoint, 48 in this run"]),
        (("train_seed=2",), ['model: "random, train_seed 1234" in the checkpoint']),
        (("lora_rank=8", "lora_alpha=8"), ["lora_rank: 4 in the checkpoint, 8", "lora_alpha: 32.0 in the checkpoint"]),
        (("master_dtype=bf16",), ['master_dtype: absent in the checkpoint, "bf16" in this run']),
        (
            ("optimizer=adamw",),
            ['optimizer: "adamw_8bit" in the checkpoint, "adamw" in this run', "settings: optimizer=adamw_8bit."],
        ),
        (("lora=false",), ["lora: true in the checkpoint, false in this run"]),
        (("lora_target_modules=[q_proj]",), ['lora_target_modules: ["all"] in the checkpoint, ["q_proj"]']),
    ]
    run_here(tmp_path, *base, *LORA, "max_steps=2")
    before = digests(tmp_path / "checkpoint-2")
    config = (tmp_path / "config.yaml").read_text()
    for change, named in changes:
        with pytest.raises(UserError) as caught:
            run_here(tmp_path, *base, *LORA, "max_steps=2", *change)
        message = str(caught.value)
        assert "checkpoint-2: this checkpoint belongs to another run, which differs in:" in message
        assert "resume_from_checkpoint=false" in message
        for text in named:
            assert text in message
    # Nothing of the earlier run was touched, and it goes on.
    assert digests(tmp_path / "checkpoint-2") == before
    assert (tmp_path / "config.yaml").read_text() == config
    assert run_here(tmp_path, *base, *LORA, "max_steps=3") == 0


def test_a_checkpoint_of_another_plugin_set_is_refused(
    tmp_path: Path, base: list[str], run_here: RunHere, install_plugin: Callable[..., Path], records: Records
) -> None:
    from surogate_core.plugins.registry import load_plugins

    source = (
        "from surogate_core import bundles, hookimpl\n"
        "class Made(bundles.Recipe):\n"
        "    name = 'plain'\n"
        "    def linear(self, x, w, slot):\n"
        "        return x @ w.t()\n"
        "@hookimpl\n"
        "def surogate_recipe():\n"
        "    return bundles.RecipeSpec(name='plain', build=lambda options, context: Made())\n"
    )
    run_here(tmp_path, *base, "max_steps=2")
    install_plugin("recipe-plain", source)
    with pytest.raises(UserError) as caught:
        run_here(tmp_path, *base, "max_steps=3", "recipe=plain", registry=load_plugins())
    for text in (
        'recipe: "bf16" in the checkpoint, "plain" in this run',
        "plugin recipe-bf16: used by the checkpoint, not by this run",
        "plugin recipe-plain: used by this run, not by the checkpoint",
    ):
        assert text in str(caught.value)
    # Another version of a plugin is a note, not a refusal; so is another torch.
    state = tmp_path / "checkpoint-2" / "state.json"
    manifest = tmp_path / "checkpoint-2" / "manifest.json"
    text = state.read_text().replace('"recipe-bf16": "0.1.0"', '"recipe-bf16": "0.0.9"')
    _alter(state, manifest, text)
    run_here(tmp_path, *base, "max_steps=3")
    notes = records(tmp_path, "run_start")[-1]["notes"]
    assert any("plugin recipe-bf16 was version 0.0.9" in note for note in notes)


def test_other_data_is_refused(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    with pytest.raises(UserError, match="made with other training rows"):
        run_here(tmp_path, *base, "max_steps=3", "sequence_len=80")


@pytest.mark.slow
def test_a_checkpoint_of_another_version_is_refused(tmp_path: Path, base: list[str], run_here: RunHere) -> None:
    run_here(tmp_path, *base, "max_steps=2")
    state = tmp_path / "checkpoint-2" / "state.json"
    _alter(state, tmp_path / "checkpoint-2" / "manifest.json", state.read_text().replace('"evaluated_step"', '"other"'))
    with pytest.raises(UserError, match="saved by another version of Surogate"):
        run_here(tmp_path, *base, "max_steps=3")
    # An earlier version, which did not know a key of this one, has no keys that this one does not know.
    earlier = json.loads(state.read_text())
    earlier["loop"]["evaluated_step"] = earlier["loop"].pop("other")
    del earlier["loop"]["sampled_step"]
    _alter(state, tmp_path / "checkpoint-2" / "manifest.json", json.dumps(earlier))
    assert run_here(tmp_path, *base, "max_steps=3") == 0


def _alter(state: Path, manifest: Path, text: str) -> None:
    """Another state, with a manifest that agrees."""
    from surogate_core.files.tensorfile import file_digest
    from surogate_core.train.checkpoint import manifest_digest

    state.write_text(text)
    value = json.loads(manifest.read_text())
    value["files"]["state.json"] = {"bytes": state.stat().st_size, "xxh3_128": file_digest(state)}
    value["xxh3_128"] = manifest_digest(value)
    manifest.write_text(json.dumps(value))


# ------------------------------------------------------------------------------------ kills


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("mode", "kills"),
    [("full", 20), ("lora", 5), ("disk", 5), ("experts", 5), ("shared-experts", 3), ("nemotron-h", 4), ("qwen3-5", 4)],
)
def test_kills_change_no_bit(mode: str, kills: int, tmp_path: Path) -> None:
    kill_test(tmp_path, mode=mode, kills=kills, steps=20 if mode == "shared-experts" else 160)


def kill_test(directory: Path, *, mode: str, kills: int, steps: int = 160) -> None:
    command = [sys.executable, str(KILL_TEST), "--mode", mode, "--kills", str(kills), "--steps", str(steps)]
    done = subprocess.run([*command, "--dir", str(directory)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout
