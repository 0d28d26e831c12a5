"""Checkpoints: whole or never chosen, whatever stops the process."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from surogate_core.errors import MachineError, UserError
from surogate_core.files import atomic
from surogate_core.train.checkpoint import CheckpointDir, check_compatible


def groups(step: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "weights": {"w": torch.full((3, 5), float(step)), "b": torch.arange(4, dtype=torch.bfloat16)},
        "optimizer": {"step": torch.tensor(step), "codes": torch.arange(7, dtype=torch.uint8), "none": torch.empty(0)},
    }


def save(checkpoints: CheckpointDir, step: int, **state: object) -> Path:
    return checkpoints.save(step, tensors=groups(step), state={"step": step, **state})


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_round_trip(tmp_path: Path) -> None:
    state = {"rng": [2**63, -1], "lr": 0.1 + 0.2, "best": float("inf"), "text": "ä"}
    path = save(CheckpointDir(tmp_path, limit=2), 3, **state)
    assert path == tmp_path / "checkpoint-3"
    assert names(path) == ["manifest.json", "optimizer.safetensors", "state.json", "weights.safetensors"]
    loaded = CheckpointDir(tmp_path, limit=2).latest_good()
    assert loaded is not None
    assert (loaded.step, loaded.state, set(loaded.groups)) == (3, {"step": 3, **state}, {"weights", "optimizer"})
    for group, named in groups(3).items():
        tensors = loaded.tensors(group)
        assert set(tensors) == set(named)
        for name, tensor in named.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name], tensor)
            target = torch.empty_like(tensor)
            tensors.copy_into(name, target)
            assert torch.equal(target, tensor)
    with pytest.raises(UserError, match="is needed"):
        loaded.tensors("weights").copy_into("w", torch.empty(5, 3))


def test_safetensors_library_reads_the_files(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = save(CheckpointDir(tmp_path, limit=1), 1)
    for group, named in groups(1).items():
        loaded = load_file(path / f"{group}.safetensors")
        assert loaded.keys() == named.keys()
        assert all(torch.equal(loaded[name], tensor) for name, tensor in named.items())


def test_nothing_there(tmp_path: Path) -> None:
    assert CheckpointDir(tmp_path / "absent", limit=1).latest_good() is None
    with pytest.raises(UserError, match="no checkpoint here"):
        CheckpointDir.load(tmp_path / "absent")
    save(CheckpointDir(tmp_path, limit=1), 1)
    with pytest.raises(UserError, match="it holds checkpoint-1"):
        CheckpointDir.load(tmp_path)


def test_rotation_keeps_the_newest(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    for step in (8, 9, 10, 11):
        save(checkpoints, step)
    assert names(tmp_path) == ["checkpoint-10", "checkpoint-11"]


def test_newest_is_what_was_saved_last(tmp_path: Path) -> None:
    """A run that starts anew, or goes back, overtakes the higher steps of the run before it."""
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 500)
    save(checkpoints, 600)
    save(checkpoints, 50)
    latest = checkpoints.latest_good()
    assert latest is not None
    assert latest.step == 50
    assert names(tmp_path) == ["checkpoint-50", "checkpoint-600"]


def test_rotation_does_not_count_torn_ones_nor_touch_strangers(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    stranger = tmp_path / "checkpoint-1"
    stranger.mkdir()
    (stranger / "trainer_state.json").write_text("{}")
    save(checkpoints, 2)
    save(checkpoints, 3)
    (tmp_path / "checkpoint-3" / "state.json").write_text("")
    save(checkpoints, 4)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-3", "checkpoint-4"]
    save(checkpoints, 5)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-3", "checkpoint-4", "checkpoint-5"]
    assert [path.name for path in checkpoints.left_over()] == ["checkpoint-1"]


def test_an_unusable_checkpoint_may_be_deleted_by_hand_before_its_name_is_used(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    (tmp_path / "checkpoint-2" / "state.json").write_text("")
    latest = checkpoints.latest_good()
    assert latest is not None
    assert latest.step == 1
    shutil.rmtree(tmp_path / "checkpoint-2")
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]


def test_a_save_deletes_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    former = CheckpointDir(tmp_path, limit=2, run="former")
    save(former, 3, take="former")
    save(former, 4, take="former")
    own = CheckpointDir(tmp_path, limit=1, run="own")
    for step in (1, 2, 3):
        save(own, step, take="own")
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-3.kept-1", "checkpoint-4"]
    assert CheckpointDir.load(tmp_path / "checkpoint-3").state["take"] == "own"
    assert CheckpointDir.load(tmp_path / "checkpoint-3.kept-1").state["take"] == "former"
    assert [path.name for path in own.left_over()] == ["checkpoint-3.kept-1", "checkpoint-4"]
    latest = own.latest_good()
    assert latest is not None
    assert (latest.step, latest.run) == (3, "own")


def test_a_manifest_without_a_run_id_is_read_and_kept(tmp_path: Path) -> None:
    path = save(CheckpointDir(tmp_path, limit=1), 4)
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["run"], manifest["xxh3_128"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert CheckpointDir.load(path).run == ""
    save(CheckpointDir(tmp_path, limit=1, run="own"), 5)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]
    # A run that resumes it goes on as the run that saved it.
    save(CheckpointDir(tmp_path, limit=1), 6)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-6"]


def test_same_step_again_replaces(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 5, take=1)
    save(checkpoints, 5, take=2)
    latest = checkpoints.latest_good()
    assert latest is not None
    assert latest.state["take"] == 2
    assert names(tmp_path) == ["checkpoint-5"]


def test_a_strangers_directory_of_the_same_name_is_kept(tmp_path: Path) -> None:
    stranger = tmp_path / "checkpoint-5"
    stranger.mkdir()
    (stranger / "precious").write_text("x")
    save(CheckpointDir(tmp_path, limit=1), 5)
    assert names(tmp_path) == ["checkpoint-5", "checkpoint-5.kept-1"]
    assert (tmp_path / "checkpoint-5.kept-1" / "precious").exists()


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(bytes(data))


def missing(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00{]")


def replaced_by_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def wrong_format(path: Path) -> None:
    value = json.loads(path.read_text())
    path.write_text(json.dumps({**value, "format": 99}))


def listing_another_place(path: Path) -> None:
    value = json.loads(path.read_text())
    value["files"]["../state.json"] = value["files"]["state.json"]
    path.write_text(json.dumps(value))


def not_an_object(path: Path) -> None:
    path.write_text("[1, 2]")


FILES = ("weights.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
DAMAGES = [
    *((tear, file) for tear in (truncate, missing, empty, garbage, replaced_by_a_directory) for file in FILES),
    *((flip, file) for file in FILES),
    *((replaced_by_a_loop, file) for file in FILES[2:]),
    *((tear, FILES[3]) for tear in (wrong_format, listing_another_place, not_an_object)),
]


@pytest.mark.parametrize(("tear", "file"), DAMAGES, ids=lambda value: getattr(value, "__name__", value))
def test_a_damaged_checkpoint_is_named_and_kept(tmp_path: Path, tear: Callable[[Path], None], file: str) -> None:
    """The older one is used where there is one; otherwise the run stops. Later saves delete neither."""
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 1)
    path = save(checkpoints, 2)
    tear(path / file)
    latest = checkpoints.latest_good()
    assert latest is not None
    assert latest.step == 1
    (reason,) = checkpoints.skipped
    assert reason.startswith(f"{path}: ")
    assert file in reason
    assert reason.endswith("; an earlier checkpoint is used, checkpoint-1.")
    with pytest.raises(UserError, match=re.escape(file)):
        CheckpointDir.load(path)

    shutil.rmtree(tmp_path / "checkpoint-1")
    stopped = CheckpointDir(tmp_path, limit=1)
    with pytest.raises(UserError) as caught:
        stopped.latest_good()
    for part in (f"{path}: ", file, "Fix:", "resume_from_checkpoint=false"):
        assert part in str(caught.value)
    assert "an earlier checkpoint is used" not in str(caught.value)

    anew = CheckpointDir(tmp_path, limit=1, run="anew")
    for step in (1, 2, 3):
        save(anew, step)
    assert names(tmp_path) == ["checkpoint-2.kept-1", "checkpoint-3"]


def test_a_flipped_byte_is_not_deleted_by_the_run_that_found_it(tmp_path: Path) -> None:
    """Retention reads sizes only, but remembers what resuming found."""
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 1)
    flip(save(checkpoints, 2) / "weights.safetensors")
    again = CheckpointDir(tmp_path, limit=1)
    assert again.latest_good() is not None
    save(again, 3)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
@pytest.mark.parametrize("file", FILES)
def test_an_unreadable_checkpoint_is_not_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, number: int
) -> None:
    """Without another one the run stops: exit 2 for a permission, 3 for a disk. Nothing is deleted meanwhile."""
    checkpoints = CheckpointDir(tmp_path, limit=1)
    path = save(checkpoints, 2)
    opened = Path.open

    def refuse(self: Path, *args: Any, **options: Any) -> Any:
        if self == path / file:
            raise OSError(number, os.strerror(number), str(self))
        return opened(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(UserError if number == errno.EACCES else MachineError) as caught:
            CheckpointDir(tmp_path, limit=1).latest_good()
        assert f"{path}: {file} cannot be read: {os.strerror(number)}" in str(caught.value)
        assert "resume_from_checkpoint=false" in str(caught.value)
        # Even a save of the same run leaves alone what it cannot read.
        for step in (3, 4):
            save(checkpoints, step)
        assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
        latest = CheckpointDir(tmp_path, limit=1).latest_good()
        assert latest is not None
        assert latest.step == 4
    assert CheckpointDir.load(path).step == 2


def test_a_partial_copy_and_what_is_no_checkpoint_are_named(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=5)
    path = save(checkpoints, 7)
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9" / "weights.safetensors").write_bytes((path / "weights.safetensors").read_bytes())
    (tmp_path / "checkpoint-8").write_text("a file")
    (tmp_path / "checkpoint-3").mkdir()
    latest = checkpoints.latest_good()
    assert latest is not None
    assert latest.step == 7
    ends = ["an earlier checkpoint is used, checkpoint-7."] * 2 + ["it is left as it is."]
    assert [reason.split(": ", 1)[0] for reason in checkpoints.skipped] == [
        str(tmp_path / f"checkpoint-{step}") for step in (9, 8, 3)
    ]
    assert [reason.endswith(end) for reason, end in zip(checkpoints.skipped, ends, strict=True)] == [True] * 3
    shutil.rmtree(path)
    with pytest.raises(UserError, match=r"there are 3 checkpoints, but none can be used") as caught:
        checkpoints.latest_good()
    assert str(caught.value).count("manifest.json") == 3


@pytest.mark.parametrize("replace", [False, True])
def test_disk_full_at_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replace: bool) -> None:
    """ENOSPC at each system call of a save in turn: an error of the machine, and nothing has changed."""
    checkpoints = CheckpointDir(tmp_path, limit=2)
    save(checkpoints, 1, take=1)
    save(checkpoints, 2, take=1)
    step = 2 if replace else 3
    real = {name: getattr(os, name) for name in ("write", "fsync", "mkdir", "rename")}
    remaining = 0

    def failing(name: str):
        def call(*args, **kwargs):
            nonlocal remaining
            remaining -= 1
            if remaining == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*args, **kwargs)

        return call

    # The first call makes the root, which is there.
    for attempt in range(2, 200):
        with monkeypatch.context() as patch:
            remaining = attempt
            for name in real:
                patch.setattr(os, name, failing(name))
            message = ""
            try:
                save(checkpoints, step, take=2)
            except MachineError as error:
                message = str(error)
        if not message:
            break
        for part in (f"checkpoint-{step}", "disk is full", "needed", "free", "Fix:"):
            assert part in message
        latest = CheckpointDir(tmp_path, limit=2).latest_good()
        assert latest is not None
        # A failed sync of the parent comes after the rename: then the new one is there, and whole.
        assert (latest.step, latest.state["take"]) in {(2, 1), (step, 2)}
        if not replace:
            assert {"checkpoint-1", "checkpoint-2"} <= set(names(tmp_path))
        assert not [name for name in names(tmp_path) if name.startswith(".")]
    assert attempt > 15
    latest = checkpoints.latest_good()
    assert latest is not None
    assert (latest.step, latest.state["take"]) == (step, 2)


def test_too_little_space_is_known_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic, "free_bytes", lambda path: 10)
    with pytest.raises(MachineError, match=r"needed, 10 B free"):
        save(CheckpointDir(tmp_path, limit=1), 1)
    assert names(tmp_path) == []


def test_room_for_all_that_is_kept_is_known_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, tensors = CheckpointDir(tmp_path, limit=2), {"weights": {"a": torch.zeros(2**20)}}
    size = 4 * 2**20 + 256 + 4096
    for free, steps, more in [
        (size - 1, [1], 0),
        (size, [1], None),
        (2 * size - 1, [1, 2], 2),
        (3 * size - 1, [1, 2, 3], 3),
        (3 * size, [*range(1, 100)], None),  # one is deleted then
        (0, [], None),
    ]:
        monkeypatch.setattr(atomic, "free_bytes", lambda path, free=free: free)
        if more is None:
            checkpoints.check_room(steps, tensors)
            continue
        with pytest.raises(
            MachineError, match=r"checkpoint-1: the disk is full: .* needed, .* free\. Fix: free"
        ) as error:
            checkpoints.check_room(steps, tensors)
        assert (f"({more} more of 4 MiB each" in str(error.value)) == bool(more)
    monkeypatch.undo()
    # Those that a resumed run will delete are there already.
    for step in (1, 2):
        checkpoints.save(step, tensors=tensors, state={})
    monkeypatch.setattr(atomic, "free_bytes", lambda path: size)
    checkpoints.check_room([3, 4, 5, 6], tensors)


def test_root_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "output").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        save(CheckpointDir(tmp_path / "output", limit=1), 1)
    with pytest.raises(UserError, match=r"output_dir .*Fix: set output_dir"):
        atomic.ensure_writable(tmp_path / "output", key="output_dir")


def test_permission_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object, *args: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(UserError, match="Permission denied"):
        save(CheckpointDir(tmp_path, limit=1), 1)


def test_interrupted_replacement_is_recovered(tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    path = save(checkpoints, 7)
    (tmp_path / ".checkpoint-7.surogate-tmp").mkdir()
    (tmp_path / ".checkpoint-3.surogate-trash").mkdir()
    save(CheckpointDir(tmp_path, limit=2), 8)
    assert names(tmp_path) == ["checkpoint-7", "checkpoint-8"]
    (tmp_path / ".checkpoint-7.surogate-tmp").mkdir()
    path.rename(tmp_path / ".checkpoint-7.surogate-old")
    latest = CheckpointDir(tmp_path, limit=2).latest_good()
    assert latest is not None
    assert latest.step == 8
    assert CheckpointDir.load(path).step == 7
    assert names(tmp_path) == ["checkpoint-7", "checkpoint-8"]


NURSERY = """
import os, sys
from pathlib import Path
import torch
from surogate_core.train.checkpoint import CheckpointDir
torch.set_num_threads(1)
root = Path(sys.argv[1])
for line in sys.stdin:
    first = int(line)
    pid = os.fork()
    if pid == 0:
        checkpoints = CheckpointDir(root, limit=2)
        checkpoints.latest_good()
        for step in range(first, first + 10**6):
            for take in (1, 2):
                tensors = {g: {n: torch.full((4096,), float(step)) for n in "abc"} for g in ("weights", "optimizer")}
                checkpoints.save(step, tensors=tensors, state={"step": step, "take": take})
            os.write(1, b"%d\\n" % step)
    print(f"pid {pid}", flush=True)
    os.waitpid(pid, 0)
    print("reaped", flush=True)
"""


@pytest.mark.slow
def test_sigkill_while_saving(tmp_path: Path) -> None:
    """Kill a process that saves in a loop at random moments: the latest good checkpoint always loads."""
    rng = random.Random(1234)
    leftovers = 0
    newest = 0
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for _ in range(25):
            nursery.stdin.write(f"{newest + 1}\n")
            nursery.stdin.flush()
            saved, pid = 0, None
            while pid is None or saved == 0:
                word = nursery.stdout.readline().split()
                if word[0] == "pid":
                    pid = int(word[1])
                else:
                    saved = int(word[0])
            time.sleep(rng.uniform(0, 0.06))
            os.kill(pid, signal.SIGKILL)
            while (line := nursery.stdout.readline()) != "reaped\n":
                saved = int(line)
            leftovers += any(path.name.startswith(".") for path in tmp_path.iterdir())
            checkpoints = CheckpointDir(tmp_path, limit=2)
            latest = checkpoints.latest_good()
            assert latest is not None
            assert checkpoints.skipped == []
            assert latest.step >= saved
            assert latest.state["step"] == latest.step
            for group in latest.groups:
                for tensor in latest.tensors(group).values():
                    assert torch.equal(tensor, torch.full((4096,), float(latest.step)))
            assert not any(path.name.startswith(".") for path in tmp_path.iterdir())
            newest = latest.step
        nursery.stdin.close()
    assert leftovers >= 5, "the kills did not hit saves"


def current() -> dict:
    return {
        "essential": {"model": "abc", "lora_rank": 16, "lora_target_modules": ("q_proj",), "optimizer": "adamw"},
        "plugins": {"model-qwen3": "0.1.0", "recipe-bf16": "0.1.0"},
    }


def test_compatible(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(current()))
    assert check_compatible(saved, current(), path=tmp_path) == []
    saved["plugins"]["recipe-bf16"] = "0.0.9"
    (warning,) = check_compatible(saved, current(), path=tmp_path)
    assert "recipe-bf16 was version 0.0.9" in warning


def test_incompatible_lists_every_difference(tmp_path: Path) -> None:
    saved = json.loads(json.dumps(current()))
    saved["essential"].update(model="xyz", lora_rank=8)
    del saved["essential"]["optimizer"]
    saved["plugins"] = {"model-llama": "1", "recipe-bf16": "0.1.0"}
    with pytest.raises(UserError) as caught:
        check_compatible(saved, current(), path=tmp_path / "checkpoint-9")
    message = str(caught.value)
    for part in (
        "checkpoint-9",
        'model: "xyz" in the checkpoint, "abc" in this run',
        "lora_rank: 8 in the checkpoint, 16 in this run",
        'optimizer: absent in the checkpoint, "adamw" in this run',
        "plugin model-llama: used by the checkpoint",
        "plugin model-qwen3: used by this run",
        "resume_from_checkpoint=false",
    ):
        assert part in message
    assert "lora_target_modules" not in message


@pytest.mark.parametrize(("key", "value"), [("step", 3), ("sequence", 9), ("run", "other")])
def test_a_manifest_with_another_number_is_torn(key: str, value: object, tmp_path: Path) -> None:
    checkpoints = CheckpointDir(tmp_path, limit=2)
    first, second = save(checkpoints, 1), save(checkpoints, 2)
    text = json.loads((first / "manifest.json").read_bytes())
    (first / "manifest.json").write_text(json.dumps({**text, key: value}))
    with pytest.raises(UserError, match=r"manifest.json was altered"):
        CheckpointDir.load(first)
    found = CheckpointDir(tmp_path, limit=2).latest_good()
    assert found is not None
    assert found.path == second
    # A version before wrote none.
    (first / "manifest.json").write_text(json.dumps({k: v for k, v in text.items() if k != "xxh3_128"}))
    assert CheckpointDir.load(first).step == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["manifest.json", "state.json", "weights.safetensors"])
def test_a_pipe_in_a_checkpoint_is_not_waited_for(name: str, tmp_path: Path) -> None:
    path = save(CheckpointDir(tmp_path, limit=2), 1)
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(UserError, match=rf"{name} cannot be read: it is no regular file"):
        CheckpointDir.load(path)


def test_text_of_a_manifest_is_shown_with_escapes(tmp_path: Path) -> None:
    path = save(CheckpointDir(tmp_path, limit=2), 1)
    (path / "manifest.json").write_text(json.dumps({"format": "\x1b[31m" + "x" * 9000}))
    with pytest.raises(UserError, match="is of layout") as error:
        CheckpointDir.load(path)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 3000


def test_another_base_model_is_named_as_the_cause_and_not_each_of_its_keys(tmp_path: Path) -> None:
    config = {f"model.config.{key}": 1 for key in ("hidden_size", "transformers_version", "vocab_size")}
    saved = {"essential": {"model": "a", "lora_rank": 4, **config}, "plugins": {}, "base_model": "./one"}
    other = dict.fromkeys(config, 2)
    now = {"essential": {"model": "b", "lora_rank": 8, **other}, "plugins": {}, "base_model": "./two"}
    with pytest.raises(UserError) as caught:
        check_compatible(saved, now, path=tmp_path)
    lines = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    assert lines == [
        "  - the base model: ./one in the checkpoint, ./two in this run",
        "  - lora_rank: 4 in the checkpoint, 8 in this run",
    ]
    with pytest.raises(UserError, match=r"the weights in \./one are other ones than when the checkpoint was made"):
        check_compatible(saved, {**now, "base_model": "./one"}, path=tmp_path)
