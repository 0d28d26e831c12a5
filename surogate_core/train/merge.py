"""Folding an adapter into its base on disk: what `surogate merge` does."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import MachineError, UserError
from surogate_core.train import adapters, atomic
from surogate_core.train.adapters import LoraAdapter
from surogate_core.train.checkpoint import Checkpoint, CheckpointDir
from surogate_core.train.export import Card, check_place, export_full
from surogate_core.train.weights import ModelDir, locate

if TYPE_CHECKING:
    from torch import Tensor

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a tokenizer and its chat template are made of; the first three tell that there is one."""


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """A tokenizer as files, copied as they are."""

    directory: Path

    def save_pretrained(self, save_directory: str) -> None:
        """Copy the files into a directory."""
        for name in _TOKENIZER_FILES:
            if (self.directory / name).exists():
                shutil.copyfile(self.directory / name, Path(save_directory) / name)

    @classmethod
    def first(cls, *directories: Path) -> TokenizerFiles | None:
        """Those of the first directory that has a tokenizer."""
        for directory in directories:
            if any((directory / name).exists() for name in _TOKENIZER_FILES[:3]):
                return cls(directory)
        return None


def open_trained(path: Path, *, key: str = "--checkpoint-dir") -> tuple[list[LoraAdapter], Path]:
    """The stack in an adapter directory, a checkpoint, or a run's output directory, and the directory used."""
    if not path.is_dir():
        raise UserError(f"{key} {path}: there is no such directory. Fix: correct {key}.")
    for directory in (path, path / "adapter"):
        if (directory / adapters.CONFIG).exists():
            return adapters.open_stack(directory, key=key), directory
    if (path / "manifest.json").exists():
        checkpoint: Checkpoint | None = CheckpointDir.load(path)
    else:
        # Only looking: what a live run is writing there is left alone.
        found = sorted(
            (p for p in path.glob("checkpoint-*") if (p / "manifest.json").exists()),
            key=lambda p: (p / "manifest.json").stat().st_mtime_ns,
        )
        checkpoint = CheckpointDir.load(found[-1]) if found else None
    if checkpoint is None:
        raise UserError(
            f"{key} {path}: neither an adapter ({adapters.CONFIG}) nor a checkpoint of Surogate is here. "
            f"Fix: name a run's output directory, one of its checkpoints, or a PEFT adapter."
        )
    return _of_checkpoint(checkpoint, key), checkpoint.path


def _of_checkpoint(checkpoint: Checkpoint, key: str) -> list[LoraAdapter]:
    essential = checkpoint.state.get("essential", {})
    rank, alpha = essential.get("lora_rank"), essential.get("lora_alpha")
    if not essential.get("lora") or not rank or not alpha:
        raise UserError(
            f"{key} {checkpoint.path}: a checkpoint without LoRA has nothing to merge; its masters are whole weights."
            f" Fix: let the run finish, which exports them."
        )
    below: list[LoraAdapter] = []
    if (stacked := checkpoint.state.get("adapter")) is not None:
        below = adapters.open_stack(Path(stacked["path"]), key=f"{key} {checkpoint.path}, whose adapter_path")
        if adapters.stack_fingerprint(below) != stacked["fingerprint"]:
            raise UserError(
                f"{key} {checkpoint.path}: it was trained with {stacked['path']}, which has changed since. "
                f"Fix: bring the former adapter back."
            )
        if stacked["mode"] == "trainable":
            below.pop()
    own = LoraAdapter(
        source=str(checkpoint.path),
        rank=rank,
        alpha=alpha,
        scale=alpha / rank,
        tensors=checkpoint.tensors("trainable"),
        base_fingerprint=str(essential.get("model", "")).removeprefix("weights ") or None,
    )
    return [*below, own]


def merge(
    base: str, trained: Path, output: Path, *, progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[Path, int, list[str]]:
    """Write `base` with the adapter of `trained` folded in as a Hugging Face directory.

    Returns (the directory that the adapter was read from, weights it is on, warnings). Tensors are
    read, folded and written one by one, in the base's dtypes; a former export at `output` stays whole
    until the new one is. Raises `UserError` or `MachineError`, before anything is written if it can.
    """
    check_place(output)
    if not Path(base).expanduser().is_dir() and (base.startswith((".", "/", "~")) or base.count("/") > 1):
        raise UserError(f"--base-model {base}: there is no such directory. Fix: correct --base-model.")
    model = ModelDir.open(locate(base))
    stack, used = open_trained(trained)
    for path in (model.path, used):
        if path.resolve().is_relative_to(output.resolve()):
            raise UserError(f"--output {output}: would replace {path}, which is read. Fix: choose another place.")
    _check_config(model)
    shapes = {name: model.info(name).shape for name in model.names()}
    tied = bool(model.config.get("tie_word_embeddings"))
    adapters.check_merging(stack, shapes, tied=tied, key="--checkpoint-dir")
    needed = sum(info.end - info.begin for info in map(model.info, model.names()))
    if needed > (free := atomic.free_bytes(output.absolute().parent)):
        need, has = atomic.human_bytes(needed), atomic.human_bytes(free)
        raise MachineError(f"--output {output}: {need} needed, {has} free. Fix: choose a place on another disk.")
    warnings = []
    if (was := stack[-1].base_fingerprint) is not None and not model.fingerprint().startswith(was):
        warnings.append(f"{used} was trained on a base of other files or another configuration than {base}.")
    figures = {"adapters folded in": len(stack), "rank": ", ".join(str(adapter.rank) for adapter in stack)}
    export_full(
        output,
        _read(model, stack, progress),
        config=model.config,
        tokenizer=TokenizerFiles.first(used, model.path),
        card=Card(title=output.resolve().name, base_model=base, settings=figures),
        generation_config=model.generation_config(),
    )
    return used, len({module for adapter in stack for module in adapter.modules}), warnings


def _read(
    model: ModelDir, stack: Sequence[LoraAdapter], progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Tensor]]:
    total = len(model.names())
    for done, name in enumerate(model.names(), start=1):
        yield name, adapters.fold(name, model.get(name), stack)
        progress(done, total)


def _check_config(model: ModelDir) -> None:
    values: dict[str, Any] = dict(model.config)
    if missing := [key for key in ("model_type", "architectures") if not values.get(key)]:
        raise UserError(f"{model.path / 'config.json'}: {' and '.join(missing)} missing. Fix: use the model's own.")
    if values.get("quantization_config"):
        raise UserError(
            f"--base-model {model.path}: its weights are quantised; an adapter is folded into unquantised weights. "
            f"Fix: name the unquantised model."
        )
