"""Reading a Hugging Face model directory: everything is checked before any data is read."""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.data.text.tokenizer import TOKENIZER_FILES
from surogate_core.errors import UserError, printable
from surogate_core.files.foreign import check_sizes, read_json
from surogate_core.files.hub import absent, commit_of, fetch, nearest_directory, one_revision
from surogate_core.files.tensorfile import FLOATS, TensorFile, TensorInfo
from surogate_core.hf.fused import views_of_experts
from surogate_core.hf.prequantised import Scheme

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from surogate_core.dsl.experts import Fused

    ReadPart = Callable[[int, Tensor], object]
    """Reads the elements of a tensor from a number on into a flat tensor."""

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

MODELOPT = "hf_quant_config.json"
"""The file of older exports of ModelOpt that has the ``quantization_config``."""

_SMALL_FILES = ("config.json", "generation_config.json", MODELOPT, INDEX)

_COPY_AGAIN = "Fix: download or copy the complete model again."

TIED = "tie_word_embeddings"
"""The key of ``config.json`` that says whether the head uses the embedding's weight."""

_COMPARED = 2**22
"""Elements of two tensors that are compared at a time."""

_OF_ACTIVATIONS = ("input_scale", "input_global_scale", ".k_scale", ".v_scale")
"""Ends of names of scales that quantised checkpoints have for inference."""

_SHOWN = 12
"""Most problems listed in one message."""


class ModelDir:
    """A model directory: its configuration, and its tensors by name over all shards."""

    def __init__(
        self,
        path: Path,
        config: Mapping[str, Any],
        files: Mapping[str, TensorFile],
        where: Mapping[str, str],
        *,
        place: str | None = None,
    ):
        """Use `open`. `files`: file name → file; `where`: tensor name → file name."""
        self.path = path
        self.place = place
        """The prefix that a model of several parts has for ``model.`` of this part; None of a whole model."""
        self.config = config
        """The mapping of ``config.json``."""
        self._files = files
        self._where = where
        self.scheme = Scheme.of(config)
        """How its projections are quantised; None if they are not, or by an unsupported method."""

    @classmethod
    def open(cls, source: str | Path, *, revision: str | None = None) -> ModelDir:
        """Open a local directory, or a hub id (``owner/name``, ``owner/name@revision``) by way of the normal cache.

        Reads ``config.json``, the index and every shard's header. Raises one `UserError` for a missing
        directory, file or shard, JSON that cannot be parsed, and a truncated or damaged shard; all
        bad shards are in one message. No code of the model is run and no pickle is read.
        """
        path = locate(source, revision=revision)
        config = config_in(path)
        if (path / SINGLE).exists():
            files = _open_files(path, [SINGLE], needed_by=path)
            return cls(path, config, files, dict.fromkeys(files[SINGLE], SINGLE))
        if not (path / INDEX).exists():
            raise _no_weights(path)
        where = _weight_map(path / INDEX)
        files = _open_files(path, sorted(set(where.values())), needed_by=path / INDEX)
        absent = [f"{name}: not in {file}" for name, file in where.items() if name not in files[file]]
        if absent:
            raise UserError(
                f"{path / INDEX}: the shards are not those of this index:\n{_listed(absent)}\n{_COPY_AGAIN}"
            )
        return cls(path, config, files, where)

    def with_experts(self, fused: Mapping[str, Fused]) -> ModelDir:
        """The directory with the tensors of each expert, for those that are parts of one tensor of all experts.

        Raises `UserError` that lists every such tensor of another shape or dtype.
        """
        infos = {name: self.info(name) for name in self._where}
        parts, problems = views_of_experts(fused, self.scheme, infos, self._where)
        if problems:
            raise _another_model(self.path, problems)
        if not parts:
            return self
        names = {name: [view.name for view in parts[name]] if name in parts else [name] for name in self._where}
        where = {part: file for name, file in self._where.items() for part in names[name]}
        files = {name: file.split(parts) for name, file in self._files.items()}
        return ModelDir(self.path, self.config, files, where, place=self.place)

    def stored_names(self) -> tuple[str, ...]:
        """The names of all tensors of the files; a quantised weight has several."""
        return tuple(self._where)

    def part(self, names: Mapping[str, str], config: Mapping[str, Any], *, place: str) -> ModelDir:
        """A part of the model, which has these tensors (name → its own name) and this configuration."""
        files = {name: file.renamed(names) for name, file in self._files.items()}
        where = {new: self._where[old] for old, new in names.items()}
        return ModelDir(self.path, config, files, where, place=place)

    def with_head(self, head: str, embedding: str, *, key: str = TIED) -> ModelDir:
        """The directory of a model whose `key` ties `head` to `embedding`, as its files are: transformers 5 and vLLM
        read it so.

        Where the files have both tensors, an equal copy is left out of them, and for a head with other values `key` is
        false in the configuration.
        """
        names = self.names()
        if head not in names or embedding not in names:
            return self
        if not self.has(head, self.shape(embedding), self._reader(embedding)):
            return ModelDir(self.path, {**self.config, key: False}, self._files, self._where, place=self.place)
        parts = set((self._parts(head) or {"": head}).values())
        where = {name: file for name, file in self._where.items() if name not in parts}
        return ModelDir(self.path, self.config, self._files, where, place=self.place)

    def has(self, name: str, shape: tuple[int, ...], read: ReadPart, dtype: torch.dtype | None = None) -> bool:
        """Whether a tensor has this shape and the values that `read` gives; compared piece by piece.

        `dtype`: the dtype to which the tensor's values are rounded before; None: none.
        """
        import torch

        if self.shape(name) != shape or (not self.is_quantised(name) and self.info(name).dtype not in FLOATS):
            return False
        read_own, count = self._reader(name), math.prod(shape)
        for first in range(0, count, _COMPARED):
            own, other = (torch.empty(min(_COMPARED, count - first), dtype=torch.float64) for _ in range(2))
            read_own(first, own)
            read(first, other)
            if not torch.equal(own if dtype is None else own.to(dtype).double(), other):
                return False
        return True

    def _reader(self, name: str) -> ReadPart:
        """Reads parts of a tensor; a quantised weight is dequantised once."""
        if not self.is_quantised(name):
            return partial(self.read_part, name)
        whole = self.get(name).view(-1)
        return lambda first, target: target.copy_(whole[first : first + target.numel()])

    @property
    def commit(self) -> str | None:
        """The commit on the hub that it is; None for a directory of the user's."""
        return commit_of(self.path)

    @property
    def files(self) -> Mapping[str, TensorFile]:
        """The weight files by name."""
        return self._files

    def names(self) -> tuple[str, ...]:
        """The names of all tensors, in the order of the index or file; a quantised weight has one."""
        scheme = self.scheme
        if scheme is None:
            return tuple(self._where)
        named = (scheme.weight_of(name, self._where) for name in self._where if not name.endswith(_OF_ACTIVATIONS))
        return tuple(dict.fromkeys(named))

    def parts(self, name: str) -> Mapping[str, Tensor] | None:
        """The tensors of a quantised weight, not dequantised; None if it is not quantised."""
        names = self._parts(name)
        if names is None or self.scheme is None:
            return None
        return self.scheme.read({part: self._files[self._where[n]][n] for part, n in names.items()})

    def _parts(self, name: str) -> dict[str, str] | None:
        return self.scheme.tensors(name, self._where) if self.scheme is not None else None

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape; for a quantised weight the shape of the weight itself."""
        parts = self._parts(name)
        if parts is None or self.scheme is None:
            return self.info(name).shape
        return self.scheme.whole(self.info(parts["codes"]).shape)

    def read_bytes(self, name: str) -> int:
        """Bytes of a tensor as `get` gives it."""
        if self._parts(name) is None:
            return self.info(name).end - self.info(name).begin
        return 2 * math.prod(self.shape(name))

    def info(self, name: str) -> TensorInfo:
        """The header's entry of a tensor."""
        return self._files[self._where[name]].infos[name]

    def header(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """A tensor's shape and dtype, without reading its data."""
        info = self.info(name)
        return info.shape, info.torch_dtype

    def get(self, name: str) -> Tensor:
        """Read one tensor, on the CPU, in the dtype of the file; a quantised weight in bf16."""
        if self._parts(name) is not None:
            import torch

            weight = torch.empty(self.shape(name), dtype=torch.bfloat16)
            self.copy_into(name, weight)
            return weight
        return self._files[self._where[name]][name]

    def copy_into(self, name: str, target: Tensor) -> None:
        """Read one tensor into `target` (contiguous, same shape, any float dtype and device), a piece at a time.

        A quantised weight is dequantised in fp32 and rounded to the dtype of `target`.
        """
        if (parts := self.parts(name)) is not None:
            assert self.scheme is not None
            self.scheme.into(parts, target)
            return
        self._files[self._where[name]].copy_into(name, target)

    def read_part(self, name: str, first: int, target: Tensor) -> None:
        """Read the elements from number `first` on into a flat `target`; not of a quantised weight."""
        self._files[self._where[name]].read_part(name, first, target)

    def is_quantised(self, name: str) -> bool:
        """Whether a weight is."""
        return self._parts(name) is not None

    def check(self, expected: Mapping[str, Iterable[int]]) -> tuple[str, ...]:
        """Compare the headers with the tensors that the model needs (name → shape); returns the names that it does not
        need.

        Raises one `UserError` that lists every missing tensor, with the nearest name here, and every
        tensor of another shape or of a dtype that is no plain float, with its file.
        """
        problems = []
        quantised = False
        spare = [name for name in self.names() if name not in expected]
        for name, shape in expected.items():
            if (parts := self._parts(name)) is not None:
                problems += self._wrong_parts(parts, *shape)
                continue
            if name not in self._where:
                # Only what is shown: of two models with experts, the names number tens of thousands.
                near = difflib.get_close_matches(name, spare, n=1, cutoff=0.8) if len(problems) < _SHOWN else []
                problems.append(f"{name} is missing" + (f"; the nearest name is {near[0]}" if near else ""))
                continue
            info, file = self.info(name), self._where[name]
            # First the dtype: packed weights have another shape too.
            if info.dtype not in FLOATS:
                quantised = True
                problems.append(f"{name} is {info.dtype} in {file}, the model needs one of {', '.join(FLOATS)}")
            elif list(info.shape) != (wanted := list(shape)):
                problems.append(f"{name} has shape {list(info.shape)} in {file}, the model needs {wanted}")
        if problems:
            raise _another_model(self.path, problems, quantised=quantised)
        return tuple(spare)

    def _wrong_parts(self, parts: Mapping[str, str], outputs: int, inputs: int) -> list[str]:
        """The faults in the tensors of a quantised weight."""
        assert self.scheme is not None
        problems = []
        for part, name in parts.items():
            known = self.scheme.parts[part]
            if name not in self._where:
                problems.append(f"{name} is missing, which belongs to a weight in {self.scheme.name}")
                continue
            info, file, wanted = self.info(name), self._where[name], known.shape(outputs, inputs)
            if info.dtype not in known.dtypes:
                problems.append(f"{name} is {info.dtype} in {file}, {self.scheme.name} has {' or '.join(known.dtypes)}")
            elif info.shape not in (wanted, wanted or (1,)):
                problems.append(f"{name} has shape {list(info.shape)} in {file}, the model needs {list(wanted)}")
        return problems

    def generation_config(self) -> dict[str, Any] | None:
        """The mapping of ``generation_config.json``, if there is one."""
        return generation_config_in(self.path)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over the configuration, every header and file size; not over the path.

        The data is not in it: `contents.contents_of` has the digests of that.
        """
        files = {
            name: [file.path.stat().st_size, [[n, i.dtype, i.shape, i.begin] for n, i in sorted(file.infos.items())]]
            for name, file in self._files.items()
        }
        text = json.dumps([self.config, files], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def locate(source: str | Path, *, revision: str | None = None, weights: bool = True, key: str = "model") -> Path:
    """The local directory of a model: `source` itself, or the snapshot of a hub id in the normal cache.

    From a repository only the configuration, the tokenizer and, with `weights`, the safetensors files of the model are
    downloaded. ``HF_HUB_OFFLINE`` is honoured. `key` is the configuration key that named the source. Raises `UserError`
    when there is no such directory or repository, and `MachineError` when the hub cannot be reached.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UserError(
                f"{key} {source}: is a directory here, and the revision {revision} is one of a repository on the hub. "
                f"Fix: leave the revision out."
            )
        return path
    if path.exists():
        raise UserError(f"{key} {source}: a model is a directory with config.json and safetensors files, not a file.")
    repo, revision = one_revision(str(source), revision, key=key)
    if repo.startswith((".", "/", "~")) or repo.count("/") > 1:
        raise UserError(f"{key} {source}: there is no such directory.{nearest_directory(path)} Fix: correct it.")
    snapshot = fetch(repo, (*_SMALL_FILES, *TOKENIZER_FILES), revision=revision, key=key)
    if not (snapshot / "config.json").exists():
        raise absent(repo, snapshot, ["config.json"], key=key)
    if weights:
        names = sorted(set(_weight_map(snapshot / INDEX).values())) if (snapshot / INDEX).exists() else [SINGLE]
        if not all((snapshot / name).exists() for name in names):
            snapshot = fetch(repo, names, revision=commit_of(snapshot) or revision, key=key)
        if missing := [name for name in names if not (snapshot / name).exists()]:
            raise absent(repo, snapshot, missing, key=key)
    return snapshot


def unused_note(unused: Sequence[str], *, other_head: str | None, carried: tuple[str, ...] = ()) -> str | None:
    """A note about tensors that the model does not use; None if this is expected. `other_head`: the weight of the head
    that the model has another one instead of; `carried`: `Model.carried`.

    If the block lacks a bias of the files, the model would differ from the trained one.
    """
    strange = [n for n in unused if not n.endswith("rotary_emb.inv_freq") and n != other_head]
    if kept := [n for n in strange if n.startswith(carried)] if carried else []:
        own = unused_note([n for n in strange if n not in set(kept)], other_head=None)
        count = "1 tensor" if len(kept) == 1 else f"{len(kept)} tensors"
        note = (
            f"The model's files hold {count} that no run trains ({kept[0]}{' …' if kept[1:] else ''}). "
            f"An exported model has what the files have."
        )
        return note if own is None else f"{own} {note}"
    if not strange:
        return None
    listed = ", ".join(strange[:3]) + (f" and {len(strange) - 3} more" if len(strange) > 3 else "")
    return f"The model's files hold tensors that config.json has no use for, and that are left out: {listed}."


def is_complete(directory: Path) -> bool:
    """Whether all weight files of a model are in its directory."""
    if (directory / SINGLE).exists() or not (directory / INDEX).exists():
        return (directory / SINGLE).exists()
    return all((directory / name).exists() for name in set(_weight_map(directory / INDEX).values()))


def config_in(directory: Path) -> dict[str, Any]:
    """The mapping of a directory's ``config.json``, with the ``quantization_config`` that ModelOpt keeps elsewhere."""
    values = _read_json(directory / "config.json")
    check_sizes(values, str(directory / "config.json"))
    if "quantization_config" not in values and (directory / MODELOPT).exists():
        own = _read_json(directory / MODELOPT).get("quantization")
        if isinstance(own, dict):
            values["quantization_config"] = {"quant_method": "modelopt", **own}
    return values


def generation_config_in(directory: Path) -> dict[str, Any] | None:
    """The mapping of a directory's ``generation_config.json``, if there is one."""
    path = directory / "generation_config.json"
    return _read_json(path) if path.exists() else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except FileNotFoundError as error:
        message = f"{path}: missing. A model directory has config.json and safetensors files. {_COPY_AGAIN}"
        raise UserError(message) from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON: {error}. Fix: download or copy the file again.") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object.")
    return value


def _weight_map(path: Path) -> dict[str, str]:
    """Tensor name → file name of an index."""
    where = _read_json(path).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise UserError(f"{path}: weight_map is not a mapping of tensor names to file names. {_COPY_AGAIN}")
    return where


def _open_files(path: Path, names: Iterable[str], *, needed_by: Path) -> dict[str, TensorFile]:
    """Open every file; all that are missing or damaged are reported in one `UserError`."""
    files, problems = {}, []
    for name in names:
        if Path(name).name != name:
            problems.append(f"{printable(name)}: a shard must be in the directory itself")
        elif not (path / name).exists():
            problems.append(f"{printable(str(path / name))}: missing")
        else:
            try:
                files[name] = TensorFile(path / name)
            except UserError as error:
                problems.append(str(error))
    if len(problems) == 1:
        raise UserError(
            problems[0] if "Fix:" in problems[0] else f"{problems[0]} (needed by {needed_by}). {_COPY_AGAIN}"
        )
    if problems:
        raise UserError(
            f"{needed_by}: {len(problems)} weight files cannot be used:\n{_listed(problems)}\n{_COPY_AGAIN}"
        )
    return files


def _another_model(path: Path, problems: list[str], *, quantised: bool = False) -> UserError:
    fix = "use the config.json and the weights of one and the same model."
    if quantised:
        fix = "name the model that these weights were quantised from."
    return UserError(
        f"{path}: the weights are not those of the model that config.json describes:\n{_listed(problems)}\nFix: {fix}"
    )


def _no_weights(path: Path) -> UserError:
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern))
    if pickles:
        return UserError(
            f"{path}: no {SINGLE}; {pickles[0]} is a pickle, which is never read. "
            "Fix: load it with transformers and save_pretrained it again, which writes safetensors."
        )
    return UserError(f"{path}: neither {SINGLE} nor {INDEX} is here. {_COPY_AGAIN}")


def _listed(problems: list[str]) -> str:
    lines = [f"  - {line}" for line in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        lines.append(f"  … and {len(problems) - _SHOWN} more")
    return "\n".join(lines)
