"""Opens the result of a run: its adapters, and the model that they were trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from surogate_core.dsl.experts import EXPERT, expanded
from surogate_core.errors import SurogateError, UserError
from surogate_core.files.hub import split_revision
from surogate_core.files.paths import is_hub_id
from surogate_core.files.tensorfile import in_order
from surogate_core.hf import lora_files
from surogate_core.hf.lora_files import LoraAdapter
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir, read_manifest


def open_trained(path: Path, *, key: str = "RUN") -> tuple[list[LoraAdapter], Path]:
    """The stack in an adapter directory, a checkpoint, or a run's output directory, and the directory used."""
    if not path.is_dir():
        raise UserError(f"{key} {path}: there is no such directory. Fix: correct {key}.")
    for directory in (path, path / "adapter"):
        if (directory / lora_files.CONFIG).exists():
            return lora_files.open_stack(directory, key=key), directory
    if (path / "manifest.json").exists():
        checkpoint: Checkpoint | None = CheckpointDir.load(path)
    else:
        newest = _newest_checkpoint(path)
        checkpoint = CheckpointDir.load(newest) if newest is not None else None
    if checkpoint is None:
        raise UserError(
            f"{key} {path}: neither an adapter ({lora_files.CONFIG}) nor a checkpoint of Surogate is here. "
            f"Fix: name a run's output directory, one of its checkpoints, or a PEFT adapter."
        )
    return _of_checkpoint(checkpoint, key, path), checkpoint.path


def _newest_checkpoint(path: Path) -> Path | None:
    """The checkpoint of a run directory that was saved last; raises `UserError` if one of them cannot be read.

    It changes nothing: it ignores files that a live run is writing or deletes meanwhile.
    """
    manifests = {}
    for checkpoint in path.glob("checkpoint-*"):
        if "." in checkpoint.name or not (checkpoint / "manifest.json").exists():
            continue
        try:
            manifests[checkpoint] = read_manifest(checkpoint)
        except SurogateError as error:
            if checkpoint.exists():
                fix = "name the checkpoint that is meant, it alone is read then"
                raise UserError(f"{error}. Fix: {fix}: {path / 'checkpoint-STEP'}") from error
    return max(manifests, key=lambda p: (manifests[p].sequence, manifests[p].step), default=None)


def later_checkpoint(trained: Path, steps: Any) -> Path | None:
    """A checkpoint that was saved after the adapter in the same run directory; None if there is none."""
    try:
        newest = _newest_checkpoint(trained)
        later = newest is not None and isinstance(steps, int) and read_manifest(newest).step > steps
    except SurogateError:
        return None
    return newest if later else None


_NOTHING_TO_MERGE = "{path}: all weights were trained, so there is nothing to merge. Fix: {fix}."
_NO_ADAPTER = {
    "--adapter": "--adapter {path}: has no adapter, all weights were trained. Fix: name it as MODEL.",
    "model": (
        "{path}: a checkpoint of full training has no exported model. "
        "Fix: name the run's directory, after it has ended."
    ),
}
"""What is said of a checkpoint without LoRA that is named by a key."""


def _of_checkpoint(checkpoint: Checkpoint, key: str, named: Path) -> list[LoraAdapter]:
    """The stack of a checkpoint. `named`: the directory that the user named."""
    essential = checkpoint.state.get("essential", {})
    rank, alpha = essential.get("lora_rank"), essential.get("lora_alpha")
    if not essential.get("lora") or not rank or not alpha:
        exported = checkpoint.path.absolute().parent / "model"
        whole = (exported / "config.json").is_file()
        fix = f"use {exported}, the whole model" if whole else "let the run end, which writes the whole model"
        raise UserError(_NO_ADAPTER.get(key, _NOTHING_TO_MERGE).format(path=named, fix=fix))
    below: list[LoraAdapter] = []
    if (stacked := checkpoint.state.get("adapter")) is not None:
        below = lora_files.open_stack(Path(stacked["path"]), key=f"{key} {checkpoint.path}, whose adapter_path")
        if lora_files.stack_fingerprint(below) != stacked["fingerprint"]:
            raise UserError(
                f"{key} {checkpoint.path}: it was trained with {stacked['path']}, which has changed since. "
                f"Fix: bring the former adapter back."
            )
        if stacked["mode"] == "trainable":
            below.pop()
    file = checkpoint.tensors("trainable")
    own = LoraAdapter(
        source=str(checkpoint.path),
        rank=rank,
        alpha=alpha,
        scale=alpha / rank,
        tensors=file.split({n: in_order(expanded(n, i.shape).items()) for n, i in file.infos.items() if EXPERT in n}),
        base_fingerprint=str(essential.get("model", "")).removeprefix("weights ") or None,
        base_model=checkpoint.state.get("base_model"),
        base_commit=checkpoint.state.get("base_commit"),
        base_files=checkpoint.state.get("base_files") or {},
    )
    return [*below, own]


def named_base(base: str) -> tuple[str, str | None]:
    """The directory or hub id, and the revision that is named with a hub id."""
    repo, revision = split_revision(base)
    local = Path(base).expanduser().is_dir()
    if not local and (repo.startswith((".", "/", "~")) or repo.count("/") > 1):
        raise UserError(f"--base-model {base}: there is no such directory. Fix: correct --base-model.")
    return repo, revision


def own_base(top: LoraAdapter, used: Path, *, fix: str = "add --base-model DIR_OR_HUB_ID") -> str:
    """The model that the adapter was trained on; raises `UserError` if that is unknown or not here."""
    base = top.base_model
    if base is None:
        raise UserError(f"{used}: does not say which model it was trained on. Fix: {fix}")
    gone = not Path(base).expanduser().is_dir() and not is_hub_id(split_revision(base)[0])
    if gone:
        raise UserError(f"{used}: was trained on {base}, which is not here now. Fix: {fix}")
    return base
