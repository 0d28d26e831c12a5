"""Bad input that reaches a run: one clear message of the right exit code, and nothing lost."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surogate_core.batch import MicroBatch
from surogate_core.engine.engine import Engine
from surogate_core.logs import close_log
from surogate_core.train.loop import Loop

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]
Digests = Callable[[Path], dict[str, str]]
Fails = Callable[..., str]
BaseOn = Callable[[Path], list[str]]
DIVERGING = ("learning_rate=1000", "weight_decay=1000", "max_steps=20")
"""Each step multiplies a matrix by a million: fp32 overflows within a few."""


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Fails:
    """Runs the command line, which must end with `code` and one message on stderr; the message."""

    def start(output: Path, *overrides: str, code: int = 2) -> str:
        from surogate_core.cli.main import main

        latest = {text.partition("=")[0]: text for text in (*overrides, f"output_dir={output}")}
        capsys.readouterr()
        assert main(list(latest.values())) == code, capsys.readouterr().err
        captured = capsys.readouterr()
        assert "Traceback" not in captured.out + captured.err
        assert captured.err.startswith("surogate: ")
        assert captured.err.count("surogate: ") == 1
        assert "Fix: " in captured.err
        assert captured.out == ""
        print(captured.err)  # noqa: T201
        return captured.err.removeprefix("surogate: ")

    return start


def jsonl(path: Path, rows: list[Any]) -> str:
    """The override that trains on these rows, none held out."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"datasets=[{{path: '{path}', type: conversation}}]"


def chat(*turns: str) -> dict[str, Any]:
    """A conversation whose turns alternate, the user's first."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


# --------------------------------------------------------------------------- model directory


def sharded(directory: Path) -> None:
    """The directory's weights as three shards with an index."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="140KB")
    assert len(list(directory.glob("model-*.safetensors"))) >= 3


def test_missing_shard(model_copy: Path, tmp_path: Path, base_on: BaseOn, fails: Fails, run_here: RunHere) -> None:
    sharded(model_copy)
    shard = sorted(model_copy.glob("model-*.safetensors"))[1]
    aside = shard.rename(tmp_path / "aside")
    message = fails(tmp_path / "out", *base_on(model_copy))
    assert f"{shard}: missing" in message
    aside.rename(shard)
    assert run_here(tmp_path / "out", *base_on(model_copy), "max_steps=1") == 0


def test_wrong_shape(model_copy: Path, tmp_path: Path, base_on: BaseOn, fails: Fails) -> None:
    file = model_copy / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].t().contiguous()
    del tensors["model.norm.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    message = fails(tmp_path / "out", *base_on(model_copy))
    assert f"{name} has shape [64, 32] in model.safetensors, the model needs [32, 64]" in message
    assert "model.norm.weight is missing" in message


@pytest.mark.slow
def test_truncated_safetensors(
    model_copy: Path, tmp_path: Path, base_on: BaseOn, fails: Fails, digests: Digests, run_here: RunHere
) -> None:
    run_here(tmp_path / "out", *base_on(model_copy), "max_steps=2")
    before = digests(tmp_path / "out" / "checkpoint-2")
    file = model_copy / "model.safetensors"
    whole = file.read_bytes()
    for length in (len(whole) - 100, 6, 0):
        file.write_bytes(whole[:length])
        message = fails(tmp_path / "out", *base_on(model_copy))
        assert str(file) in message
        assert "truncated" in message
    assert digests(tmp_path / "out" / "checkpoint-2") == before
    file.write_bytes(whole)
    assert run_here(tmp_path / "out", *base_on(model_copy), "max_steps=3") == 0


def test_vocabularies_that_differ(
    model_copy: Path,
    tmp_path: Path,
    base: list[str],
    base_on: BaseOn,
    fails: Fails,
    run_here: RunHere,
    records: Records,
) -> None:
    message = fails(tmp_path / "a", *base, "model.config.vocab_size=500")
    assert "The tokenizer has token ids up to 1023 but the model's vocabulary has 500 entries" in message
    assert "model.config.vocab_size=1024" in message
    # A smaller vocabulary may be padding, or another model's: the run goes on and says so.
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, "vocab_size": 2048}))
    tensors = load_file(model_copy / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    run_here(tmp_path / "b", *base_on(model_copy), "max_steps=1")
    notes = records(tmp_path / "b", "run_start")[0]["notes"]
    assert any("knows 1,024 of the model's 2,048 token ids" in note for note in notes)


def test_model_directories_that_cannot_be_used(model_copy: Path, tmp_path: Path, base_on: BaseOn, fails: Fails) -> None:
    config = json.loads((model_copy / "config.json").read_text())
    (model_copy / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    message = fails(tmp_path / "out", *base_on(model_copy))
    assert "model_type 'mamba'" in message
    assert "qwen3" in message
    (model_copy / "config.json").write_text(json.dumps(config)[:-5])
    assert "config.json: not valid JSON" in fails(tmp_path / "out", *base_on(model_copy))
    message = fails(tmp_path / "out", *base_on(Path(f"{model_copy}x")))
    assert f"there is no directory {model_copy}x. Fix: model={model_copy}" in message
    (model_copy / "config.json").write_text(json.dumps(config))
    for file in model_copy.glob("tokenizer*"):
        file.unlink()
    assert "tokenizer" in fails(tmp_path / "out", *base_on(model_copy))


# --------------------------------------------------------------------------------------- data


def test_empty_data(tmp_path: Path, base: list[str], fails: Fails, run_here: RunHere) -> None:
    empty = jsonl(tmp_path / "empty.jsonl", [])
    message = fails(tmp_path / "out", *base, empty)
    assert "datasets[0]: data set" in message
    assert f"{tmp_path}/empty.jsonl has no rows" in message
    missing = f"datasets=[{{path: '{tmp_path}/emty.jsonl', type: conversation}}]"
    assert "emty.jsonl" in fails(tmp_path / "out", *base, missing)
    assert run_here(tmp_path / "out", *base, "max_steps=1") == 0


def test_rows_without_an_assistant(
    tmp_path: Path, base: list[str], fails: Fails, run_here: RunHere, records: Records
) -> None:
    good = [chat(f"What is {i} and {i}?", f"It is {2 * i}.") for i in range(20)]
    some = jsonl(tmp_path / "some.jsonl", [*good[:3], chat("Nobody answers?"), *good[3:]])
    keys = [*base, "validation_datasets=[]", "max_steps=1"]
    run_here(tmp_path / "some", *keys, some)
    notes = " ".join(records(tmp_path / "some", "run_start")[0]["notes"])
    assert "1 bad rows skipped" in notes
    assert "some.jsonl:4: " in notes
    assert "assistant" in notes
    message = fails(tmp_path / "all", *keys, jsonl(tmp_path / "all.jsonl", [chat("Anybody?")] * 3))
    assert "has no usable row among 3" in message
    assert "all.jsonl:1: " in message
    assert "assistant" in message


LONG = " ".join(f"number {i}," for i in range(80))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "note"),
    [
        ("delete", "1 too long and dropped"),
        ("left", "1 too long and cut"),
        ("right", "1 too long and cut"),
        ("split", "1 too long and split"),
    ],
)
def test_samples_longer_than_a_row(
    strategy: str, note: str, tmp_path: Path, base: list[str], run_here: RunHere, records: Records, fails: Fails
) -> None:
    good = [chat(f"What is {i} and {i}?", f"It is {2 * i}.") for i in range(20)]
    keys = [*base, "validation_datasets=[]", "validation_split_ratio=0", f"truncation_strategy={strategy}"]
    run_here(tmp_path / "one", *keys, jsonl(tmp_path / "one.jsonl", [*good, chat("Count.", LONG)]), "max_steps=1")
    assert note in " ".join(records(tmp_path / "one", "run_start")[0]["notes"])
    only = jsonl(tmp_path / "only.jsonl", [chat("Count.", LONG)] * 3)
    if strategy == "delete":
        message = fails(tmp_path / "only", *keys, only)
        assert "none of the 3 documents fits into sequence_len=64" in message
        assert "truncation_strategy to right or split" in message
    else:
        assert run_here(tmp_path / "only", *keys, only, "max_steps=1") == 0


# ---------------------------------------------------------------------------- output and disk


def test_places_that_cannot_be_written(tmp_path: Path, base: list[str], fails: Fails, run_here: RunHere) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for place in (file, file / "sub"):
        assert "output_dir" in fails(place, *base)
    assert "checkpoint_dir" in fails(tmp_path / "out", *base, f"checkpoint_dir={file}")
    assert file.read_text() == "mine"
    # Something that is not ours where the run would write its export.
    (tmp_path / "out" / "model").mkdir(parents=True)
    (tmp_path / "out" / "model" / "notes.txt").write_text("mine")
    message = fails(tmp_path / "out", *base)
    assert f"{tmp_path}/out/model: already there and not an export of Surogate" in message
    assert not list((tmp_path / "out").glob("checkpoint-*"))
    for name in ("config.yaml", ".lock"):
        directory = tmp_path / name.strip(".")
        (directory / name).mkdir(parents=True)
        assert name in fails(directory, *base)
    (tmp_path / "out" / "model" / "notes.txt").unlink()
    assert run_here(tmp_path / "out", *base, "max_steps=1") == 0


@contextmanager
def mounted(place: Path, options: str) -> Iterator[None]:
    """A tmpfs, where the tests may mount one."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount")
    try:
        yield
    finally:
        close_log()
        subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
def test_read_only_file_system(tmp_path: Path, base: list[str], fails: Fails) -> None:
    with mounted(tmp_path / "ro", "ro"):
        message = fails(tmp_path / "ro" / "out", *base)
    assert "Read-only file system" in message


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
def test_full_file_system(
    tmp_path: Path,
    base: list[str],
    fails: Fails,
    run_here: RunHere,
    digests: Digests,
    records: Records,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = [*base, "save_steps=2", "optimizer=adamw"]  # so that a second checkpoint has no room
    run_here(tmp_path / "whole", *keys)
    with mounted(tmp_path / "small", "size=1600k"):
        output = tmp_path / "small" / "out"
        assert "the disk is full" in fails(output, *keys, code=3), "before the first step"
        assert not list(output.glob("*checkpoint-*"))
        monkeypatch.setattr(Loop, "check_room", lambda self: None)  # as if others filled the disk later
        message = fails(output, *keys, code=3)
        assert "the disk is full" in message
        assert "older checkpoints are kept" in message
        kept = sorted(path.name for path in output.glob("checkpoint-*"))
        assert kept
        assert not list(output.glob(".checkpoint-*"))
        assert records(output, "run_end")[0]["reason"] == "failed"
        # Moved to a disk with room, the run goes on from the last checkpoint to the same weights.
        shutil.copytree(output, tmp_path / "moved")
    run_here(tmp_path / "moved", *keys)
    assert digests(tmp_path / "moved" / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.slow_cases("foreseen", "in a write", "file size limit")
@pytest.mark.parametrize("how", ["foreseen", "in a write", "file size limit"])
def test_disk_full_in_a_checkpoint(
    how: str,
    tmp_path: Path,
    base: list[str],
    fails: Fails,
    run_here: RunHere,
    digests: Digests,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from surogate_core.files import atomic, tensorfile

    keys = [*base, "save_steps=2", "lr_scheduler_type=constant"]
    output = tmp_path / "out"
    run_here(output, *keys, "max_steps=2")
    before = digests(output / "checkpoint-2")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if how == "foreseen":
        monkeypatch.setattr(atomic, "free_bytes", lambda path: 1000)
    elif how == "in a write":

        def full(descriptor: int, data: memoryview) -> None:
            os.write(descriptor, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(tensorfile, "write_all", full)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (120_000, limits[1]))
    try:
        message = fails(output, *keys, code=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        monkeypatch.undo()
    reason = "File too large" if how == "file size limit" else "the disk is full"
    assert f"checkpoint {output}/checkpoint-4: " in message
    assert reason in message
    if how == "foreseen":
        assert "(2 more of " in message, "before the first step, for all that the run keeps"
    assert [path.name for path in output.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert digests(output / "checkpoint-2") == before
    # With room again the same command goes on, to the weights of a run that had room all the time.
    run_here(output, *keys)
    run_here(tmp_path / "whole", *keys)
    assert digests(output / "checkpoint-6") == digests(tmp_path / "whole" / "checkpoint-6")


@pytest.mark.slow
def test_out_of_memory(tmp_path: Path, base: list[str], fails: Fails) -> None:
    keys = [*base, "model.config.intermediate_size=100000000000", "model.config.num_hidden_layers=1"]
    message = fails(tmp_path / "out", *keys, code=3)
    assert "Out of host memory" in message
    assert re.search(r"predicted to need \d{3} TiB", message)
    assert "Fix: a smaller model or a machine with more memory" in message
    assert "sequence_len=" not in message, "shorter rows do not help"


# ---------------------------------------------------------------------------------- divergence


def test_nan_loss_keeps_the_checkpoints(
    tmp_path: Path, base: list[str], fails: Fails, run_here: RunHere, digests: Digests, records: Records
) -> None:
    output = tmp_path / "out"
    keys = [*base, "lr_scheduler_type=constant", "eval_steps=0"]
    run_here(output, *keys, "max_steps=2")
    before = digests(output / "checkpoint-2")
    message = fails(output, *keys, *DIVERGING)
    assert "step 9: the loss is " in message
    assert "gradient norm nan, so the step was not applied" in message
    assert "checkpoint-2 is kept" in message
    assert "lower learning_rate (now 1000)" in message
    assert [path.name for path in output.glob("*checkpoint-*")] == ["checkpoint-2"]
    assert digests(output / "checkpoint-2") == before
    last = records(output, "step_end")[-1]
    assert (last["step"], last["grad_norm"]) == (9, "NaN")
    # With a sound rate the same directory goes on.
    assert run_here(output, *keys, "learning_rate=1e-3") == 0
    steps = records(output, "step_end")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(isinstance(line["grad_norm"], float) for line in steps)


def test_a_diverged_end_is_neither_saved_nor_exported(
    tmp_path: Path, base: list[str], fails: Fails, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step has a finite loss; what the last one made of the weights shows in the evaluation alone."""
    whole, losses = Engine.evaluate, iter((None, math.nan))

    def evaluate(engine: Engine, batches: Iterable[MicroBatch]) -> tuple[float, int]:
        loss, tokens = whole(engine, batches)
        return next(losses) or loss, tokens

    monkeypatch.setattr(Engine, "evaluate", evaluate)
    message = fails(tmp_path, *base, "max_steps=1")
    assert "step 1: the eval loss is nan; no checkpoint was saved before" in message
    assert not (tmp_path / "model").exists()
    assert not list(tmp_path.glob("*checkpoint-*"))


@pytest.mark.slow
def test_poisoned_weights_are_found_before_the_first_step(
    model_copy: Path, tmp_path: Path, base_on: BaseOn, fails: Fails
) -> None:
    tensors = load_file(model_copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(tensors, model_copy / "model.safetensors", metadata={"format": "pt"})
    message = fails(tmp_path / "a", *base_on(model_copy))
    assert "step 0: the eval loss is nan; nothing has been trained yet" in message
    assert "the model's model.layers.0.mlp.up_proj.weight has values that are not finite. Fix: " in message
    message = fails(tmp_path / "b", *base_on(model_copy), "validation_datasets=[]", "validation_split_ratio=0")
    assert "step 1: the loss is nan" in message
    assert "nothing has been trained yet" in message


@pytest.mark.slow
def test_resuming_a_diverged_checkpoint_says_so(
    tmp_path: Path, base: list[str], fails: Fails, run_here: RunHere, digests: Digests
) -> None:
    keys = [*base, "eval_steps=0", "save_steps=1", "validation_datasets=[]", "validation_split_ratio=0"]
    message = fails(tmp_path, *keys, *DIVERGING)
    assert "checkpoint-6 is kept" in message
    message = fails(tmp_path, *keys, "max_steps=7")
    assert "right after resuming: checkpoint-6 itself has diverged" in message
    assert "resume_from_checkpoint=false" in message
    assert run_here(tmp_path, *keys, "resume_from_checkpoint=false") == 0


def test_another_model_in_the_directory(tmp_path: Path, base: list[str], run_here: RunHere, fails: Fails) -> None:
    run_here(tmp_path, *base, "max_steps=1")
    message = fails(tmp_path, *base, "model.config.hidden_size=48")
    assert "model.config.hidden_size: 32 in the checkpoint, 48 in this run" in message
