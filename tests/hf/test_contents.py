"""A base is known by what its weight files hold: resuming, `adapter_path` and `surogate merge` compare it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from surogate_core.cli.main import main
from surogate_core.errors import MachineError, UserError
from surogate_core.files.tensorfile import TensorFile
from surogate_core.hf import contents
from surogate_core.hf.contents import Contents, contents_of, differences

RunHere = Callable[..., int]
Records = Callable[..., list[dict[str, Any]]]

QUICK = ("max_steps=2", "eval_steps=0", "lora_rank=2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a few pieces; files of this moment are trusted."""
    monkeypatch.setattr(contents, "PIECE", 1000)
    monkeypatch.setattr(contents, "_SETTLED_NS", -(10**18))
    torch.manual_seed(0)
    save_file({"a": torch.randn(700), "b": torch.randn(30)}, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def digests(path: Path, cache: Path) -> dict[str, str]:
    return contents_of({path.name: TensorFile(path)}, cache)


def flip(path: Path, place: int = -2) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("place", [-1, -1500, -2900])
def test_every_byte_of_the_data_counts(weights: Path, tmp_path: Path, place: int) -> None:
    before = digests(weights, tmp_path / "one")
    flip(weights, place)
    now = digests(weights, tmp_path / "two")
    assert before.keys() == now.keys() == {"w.safetensors"}
    assert before != now
    assert differences(before, now) == "w.safetensors has other contents"
    assert differences(before, before) == ""
    assert differences(before, {}) == "w.safetensors is only in one of them"


def test_the_digest_is_of_the_data_whatever_reads_it(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = digests(weights, tmp_path / "one")
    save_file(load_file(weights), weights, metadata={"format": "pt", "by": "somebody"})
    monkeypatch.setattr(contents, "_THREADS", 1)
    assert digests(weights, tmp_path / "two") == before


def test_a_file_is_read_once_until_it_changes(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    first = digests(weights, cache)
    read: list[int] = []
    piece = Contents._piece
    monkeypatch.setattr(Contents, "_piece", lambda self, path, place: read.append(place) or piece(self, path, place))
    assert digests(weights, cache) == first
    assert read == []
    # A copy that keeps the times is another file; and so is the file after a write in place.
    other = Path(shutil.copy2(weights, tmp_path / "copy.safetensors"))
    assert list(digests(other, cache).values()) == list(first.values())
    assert len(read) == 3
    flip(weights)
    assert digests(weights, cache) != first
    for entry in cache.iterdir():
        entry.write_text("{")
    assert digests(other, cache)["copy.safetensors"] == first["w.safetensors"]


def test_a_file_that_just_changed_is_not_remembered(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents, "_SETTLED_NS", 10**18)
    digests(weights, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_costs_only_time(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    assert digests(weights, tmp_path / "cache") == digests(weights, tmp_path / "other")


def test_a_failing_disk_is_an_error_of_the_machine(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {weights.name: TensorFile(weights)}

    def fail(self: Path, *_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(MachineError, match=r"w\.safetensors: cannot be read: Input/output error"):
        contents_of(files, tmp_path / "cache")


# --------------------------------------------------------------------------------------- runs


@pytest.fixture
def other_base(hf_dir: Path, tmp_path: Path) -> Path:
    """The base with other weights under equal headers."""
    other = Path(shutil.copytree(hf_dir, tmp_path / "other"))
    flip(other / "model.safetensors")
    return other


def notes(found: list[dict[str, Any]]) -> str:
    return "\n".join(found[-1]["notes"])


@pytest.mark.slow
def test_an_adapter_does_not_go_on_upon_other_weights(
    tmp_path: Path,
    hf_dir: Path,
    other_base: Path,
    base_on: Callable[[Path], list[str]],
    run_here: RunHere,
    records: Records,
) -> None:
    out = tmp_path / "run"
    run_here(out, *base_on(hf_dir), *QUICK)
    with pytest.raises(UserError, match=r"with different weights: model\.safetensors has other contents") as e:
        run_here(out, *base_on(other_base), *QUICK, "max_steps=3")
    assert str(hf_dir) in str(e.value)
    assert "resume_from_checkpoint=false" in str(e.value)
    # The same weights elsewhere are the same base.
    same = shutil.copytree(hf_dir, tmp_path / "same")
    run_here(out, *base_on(same), *QUICK, "max_steps=3")
    assert records(out, "run_start")[-1]["start_step"] == 2
    assert json.loads((out / "run.json").read_text())["base_files"].keys() == {"model.safetensors"}


def test_all_weights_trained_go_on_from_their_checkpoint(
    tmp_path: Path,
    hf_dir: Path,
    other_base: Path,
    base_on: Callable[[Path], list[str]],
    run_here: RunHere,
    records: Records,
) -> None:
    full = ("max_steps=1", "eval_steps=0", "lora=false")
    run_here(tmp_path / "run", *base_on(hf_dir), *full)
    run_here(tmp_path / "run", *base_on(other_base), *full, "max_steps=2")
    assert "The checkpoint has all weights: the run continues." in notes(records(tmp_path / "run", "run_start"))


@pytest.mark.slow
def test_a_checkpoint_from_before_digests_goes_on_with_a_note(
    tmp_path: Path, hf_dir: Path, base_on: Callable[[Path], list[str]], run_here: RunHere, records: Records
) -> None:
    from surogate_core.files.tensorfile import file_digest

    out = tmp_path / "run"
    run_here(out, *base_on(hf_dir), *QUICK)
    state, manifest = (out / "checkpoint-2" / name for name in ("state.json", "manifest.json"))
    values = json.loads(state.read_text())
    del values["base_files"]
    state.write_text(json.dumps(values))
    listed = json.loads(manifest.read_text())
    del listed["xxh3_128"]  # earlier versions have none
    listed["files"]["state.json"] = {"bytes": state.stat().st_size, "xxh3_128": file_digest(state)}
    manifest.write_text(json.dumps(listed))
    run_here(out, *base_on(hf_dir), *QUICK, "max_steps=3")
    assert "has no digests of the base's weight files" in notes(records(out, "run_start"))


@pytest.mark.slow
def test_merging_and_beginning_with_an_adapter_name_another_base(
    tmp_path: Path,
    hf_dir: Path,
    other_base: Path,
    base_on: Callable[[Path], list[str]],
    run_here: RunHere,
    records: Records,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    run_here(out, *base_on(hf_dir), *QUICK)
    for source in ("adapter", "checkpoint-2"):
        for base, warned in ((hf_dir, False), (other_base, True)):
            arguments = ["--base-model", str(base), "--checkpoint-dir", str(out / source)]
            assert main(["merge", *arguments, "--output", str(tmp_path / "merged")]) == 0
            said = capsys.readouterr().err
            text = f"was trained on other weights, that is {hf_dir}: model.safetensors has other contents."
            assert (text in said) == warned, said
            assert ("warning" in said) == warned, said
    for base, warned in ((hf_dir, False), (other_base, True)):
        upon = tmp_path / f"upon-{base.name}"
        run_here(upon, *base_on(base), *QUICK, f"adapter_path={out}")
        said = notes(records(upon, "run_start"))
        assert ("was trained on other weights" in said) == warned, said


def test_an_adapter_of_another_program_is_known_by_its_bases_name_only(
    tmp_path: Path,
    hf_dir: Path,
    other_base: Path,
    base_on: Callable[[Path], list[str]],
    run_here: RunHere,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    run_here(out, *base_on(hf_dir), *QUICK)
    adapter = out / "adapter"
    (adapter / "surogate_export.json").unlink()
    config = json.loads((adapter / "adapter_config.json").read_text())
    for named, warned in ((str(hf_dir), False), ("somebody/Qwen3", False), ("somebody/else", True), (None, False)):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": named}))
        place = str(tmp_path / "merged")
        assert main(["merge", "--base-model", str(hf_dir), "--checkpoint-dir", str(adapter), "--output", place]) == 0
        assert ("names somebody/else as its base" in capsys.readouterr().err) == warned
