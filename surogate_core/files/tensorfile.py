"""Safetensors files, read and written piece by piece, so that no file is ever whole in memory.

The format: 8 bytes little-endian header length, a JSON header padded with spaces, then the data without holes.
"""

from __future__ import annotations

import copy
import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from surogate_core.errors import UserError
from surogate_core.files import staging
from surogate_core.files.atomic import write_all
from surogate_core.files.foreign import open_regular, parsed
from surogate_core.files.private import regular

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PIECE_BYTES = 64 * 2**20
"""Most bytes of a tensor that are copied at one time."""

_STAGING_BYTES = 8 * 2**20
"""Bytes of the buffer through which a tensor is copied to another dtype; small, because it is needed in addition to the
tensors.
"""

_MAX_HEADER_BYTES = 100 * 10**6
"""The limit of the safetensors library."""

_DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}
"""Name in the file → (name in torch, bytes an element)."""

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that weights may have; the others are of quantised ones, whose scales are elsewhere."""

_NAMES = {torch_name: name for name, (torch_name, _) in _DTYPES.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A tensor in a file, known without reading its data."""

    shape: tuple[int, ...]
    dtype: str
    """Name in the file, e.g. ``BF16``."""
    begin: int
    """First byte in the file."""
    end: int
    """One past the last byte in the file."""
    transposed: bool = False
    """Whether the file has the matrix's columns one after the other; `shape` is that of the matrix."""

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype in torch."""
        import torch

        dtype = getattr(torch, _DTYPES[self.dtype][0])
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """A part of a tensor that is read as a tensor of its own."""

    name: str
    shape: tuple[int, ...]
    first: int
    """Number of its first element."""
    transposed: bool = False
    """As of a `TensorInfo`."""


def in_order(parts: Iterable[tuple[str, tuple[int, ...]]], *, transposed: bool = False) -> list[View]:
    """The views of parts (name, shape) that follow each other in a tensor. `transposed`: each as of a `TensorInfo`."""
    views, first = [], 0
    for name, shape in parts:
        views.append(View(name=name, shape=shape, first=first, transposed=transposed))
        first += prod(shape)
    return views


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file by name, in the order of their data.

    Raises `UserError` when the file is missing, is not safetensors, or is not as long as its header says.
    """
    try:
        with os.fdopen(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if len(start) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise _damaged(path, f"its {size} bytes do not hold the header that a safetensors file begins with")
            header = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}.") from error
    try:
        entries = parsed(header)
        entries.pop("__metadata__", None)
        infos = {name: _info(entry, 8 + length) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        raise _damaged(path, f"its header is not valid ({error})") from error
    infos = dict(sorted(infos.items(), key=lambda item: item[1].begin))
    position = 8 + length
    for name, info in infos.items():
        if info.begin != position:
            raise _damaged(path, f"tensor {name} begins at byte {info.begin}, not at {position}")
        position = info.end
    if position != size:
        relation = "truncated" if size < position else "too long"
        raise _damaged(path, f"it is {relation}: the header says {position} bytes, the file has {size}")
    return infos


def _damaged(path: Path, reason: str) -> UserError:
    return UserError(f"{path}: not a whole safetensors file: {reason}. Fix: download or copy the file again.")


def _info(entry: Mapping[str, Any], offset: int) -> TensorInfo:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise ValueError(f"dtype {entry['dtype']} is not known")
    shape = tuple(int(n) for n in entry["shape"])
    info = TensorInfo(shape=shape, dtype=entry["dtype"], begin=offset + int(begin), end=offset + int(end))
    if info.end - info.begin != prod(shape) * _DTYPES[info.dtype][1]:
        raise ValueError(f"shape {list(shape)} of {info.dtype} does not fill {info.end - info.begin} bytes")
    return info


class TensorFile(Mapping[str, "Tensor"]):
    """A safetensors file as a mapping of name → CPU tensor; a lookup reads that tensor and no other.

    Tensors are read, not memory-mapped: what is read belongs to the caller, and the file may change later.
    """

    def __init__(self, path: Path):
        self.path = path
        self.infos: Mapping[str, TensorInfo] = read_header(path)

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def __getitem__(self, name: str) -> Tensor:
        import torch

        info = self.infos[name]
        stored = info.shape[::-1] if info.transposed else info.shape
        tensor = torch.empty(stored, dtype=info.torch_dtype)
        self._read(info.begin, tensor.reshape(-1))
        return tensor.t().contiguous() if info.transposed else tensor

    def split(self, parts: Mapping[str, Sequence[View]]) -> TensorFile:
        """The file with each of these tensors seen as others."""
        views: dict[str, TensorInfo] = {}
        for name, info in self.infos.items():
            size = _DTYPES[info.dtype][1]
            for part in parts.get(name, (View(name=name, shape=info.shape, first=0),)):
                begin = info.begin + size * part.first
                end = begin + size * prod(part.shape)
                assert end <= info.end, f"{part.name} is not inside of {name}"
                views[part.name] = TensorInfo(
                    shape=tuple(part.shape), dtype=info.dtype, begin=begin, end=end, transposed=part.transposed
                )
        found = copy.copy(self)
        found.infos = views
        return found

    def renamed(self, names: Mapping[str, str]) -> TensorFile:
        """The file with those tensors alone that have another name here, under it."""
        found = copy.copy(self)
        found.infos = {names[name]: info for name, info in self.infos.items() if name in names}
        return found

    def copy_into(self, name: str, target: Tensor) -> None:
        """Copy a tensor into `target` (contiguous, same shape, any device), a piece at a time.

        A float is cast to the float dtype of `target`. Raises `UserError` for another shape or another kind of dtype.
        """
        import torch

        info = self.infos[name]
        cast = info.torch_dtype != target.dtype
        floats = info.torch_dtype.is_floating_point and target.dtype.is_floating_point
        if tuple(target.shape) != info.shape or (cast and not floats):
            raise UserError(
                f"{self.path}: tensor {name} is {info.torch_dtype} {list(info.shape)}, "
                f"but {target.dtype} {list(target.shape)} is needed."
            )
        assert target.is_contiguous()
        if info.transposed:
            target.detach().copy_(self[name])
            return
        flat = target.detach().view(-1)
        if flat.device.type == "cpu" and not cast:
            self._read(info.begin, flat)
            return
        size = info.torch_dtype.itemsize
        if flat.device.type == "cuda":
            staging.to_gpu(lambda first, part: self._read(info.begin + first * size, part), info.torch_dtype, flat)
            return
        step = _STAGING_BYTES // size
        # Mapped by itself: in the heap, what is allocated meanwhile would keep its room from being used again.
        room = mmap.mmap(-1, max(1, min(step, flat.numel()) * size))
        piece = torch.frombuffer(room, dtype=torch.uint8)[: len(room) // size * size].view(info.torch_dtype)
        for first in range(0, flat.numel(), step):
            part = piece[: min(step, flat.numel() - first)]
            self._read(info.begin + first * size, part)
            flat[first : first + part.numel()].copy_(part)

    def read_part(self, name: str, first: int, target: Tensor) -> None:
        """Copy the elements from number `first` on into `target` (contiguous, any device); floats are cast."""
        import torch

        info = self.infos[name]
        assert target.is_contiguous()
        assert target.dtype == info.torch_dtype or (target.dtype.is_floating_point and info.dtype in FLOATS)
        flat, size = target.view(-1), info.torch_dtype.itemsize
        assert info.begin + (first + flat.numel()) * size <= info.end, f"{name} has fewer elements"
        if info.transposed:
            flat.copy_(self[name].view(-1)[first : first + flat.numel()])
            return
        if flat.device.type == "cpu" and flat.dtype == info.torch_dtype:
            self._read(info.begin + first * size, flat)
            return
        if flat.device.type == "cuda":
            begin = info.begin + first * size
            staging.to_gpu(lambda start, part: self._read(begin + start * size, part), info.torch_dtype, flat)
            return
        step = _STAGING_BYTES // size
        for start in range(0, flat.numel(), step):
            part = torch.empty(min(step, flat.numel() - start), dtype=info.torch_dtype)
            self._read(info.begin + (first + start) * size, part)
            flat[start : start + part.numel()].copy_(part)

    def _read(self, offset: int, flat: Tensor) -> None:
        """Fill `flat` (1-D, CPU, contiguous) from the file's bytes at `offset`."""
        import torch

        buffer = flat.detach().view(torch.uint8).numpy().data
        with self.path.open("rb", buffering=0) as file:
            file.seek(offset)
            while len(buffer):
                count = file.readinto(buffer[:PIECE_BYTES])
                if not count:
                    raise UserError(f"{self.path}: the file became shorter while it was read.")
                buffer = buffer[count:]


def read_elements(file: Mapping[str, Tensor], name: str, first: int, into: Tensor) -> None:
    """Copy a tensor's elements from number `first` on into `into` (contiguous, any device); of a file only these."""
    if isinstance(file, TensorFile):
        file.read_part(name, first, into)
    else:
        into.view(-1).copy_(file[name].reshape(-1)[first : first + into.numel()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Deferred:
    """A tensor that is made when it is read, such as one whose parts are on several GPUs."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Callable[[], Iterator[Tensor]]
    """Makes the elements in order, in pieces of any size."""

    def load(self) -> Tensor:
        """The whole tensor, in host memory."""
        import torch

        whole, at = torch.empty(self.numel(), dtype=self.dtype), 0
        for part in self.parts():
            whole[at : at + part.numel()].copy_(part.reshape(-1))
            at += part.numel()
        return whole.view(self.shape)

    def clone(self) -> Tensor:
        """As of a tensor: its values now."""
        return self.load()

    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


def pieces(tensor: Tensor | Deferred) -> Iterator[memoryview]:
    """The bytes of a tensor on any device, row-major, in views of at most `PIECE_BYTES` of host memory."""
    import torch

    if isinstance(tensor, Deferred):
        for part in tensor.parts():
            yield from pieces(part)
        return
    flat = tensor.detach().contiguous().view(-1)
    step = PIECE_BYTES // flat.element_size()
    for first in range(0, flat.numel(), step):
        yield flat[first : first + step].cpu().view(torch.uint8).numpy().data


def nbytes(tensor: Tensor | Deferred) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def dtype_name(tensor: Tensor | Deferred) -> str:
    """The name of the tensor's dtype in a safetensors file."""
    return _NAMES[str(tensor.dtype).removeprefix("torch.")]


def _header_bytes(entries: Mapping[str, object], length: int | None = None) -> bytes:
    """The file's bytes before the data, padded to `length` or to a multiple of 8."""
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    padded = length - 8 if length is not None else -(-len(text) // 8) * 8
    return struct.pack("<Q", padded) + text.ljust(padded)


def _entry(tensor: Tensor | Deferred, begin: int) -> dict[str, object]:
    return {
        "dtype": dtype_name(tensor),
        "shape": list(tensor.shape),
        "data_offsets": [begin, begin + nbytes(tensor)],
    }


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Deferred], *, wrote: Callable[[int], None] = lambda count: None
) -> tuple[int, str]:
    """Write a new safetensors file, not synced; returns its bytes and the xxh3-128 digest of what was written.

    `wrote` receives the bytes of each chunk.
    """
    # Wide dtypes first keep every tensor aligned to its element, which readers that map the file need.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    entries, position = {}, 0
    for name in names:
        entries[name] = _entry(tensors[name], position)
        position += nbytes(tensors[name])
    header = _header_bytes(entries)
    digest = xxhash.xxh3_128(header)
    descriptor = regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(descriptor, memoryview(header))
        for name in names:
            for piece in pieces(tensors[name]):
                digest.update(piece)
                write_all(descriptor, piece)
                wrote(piece.nbytes)
    finally:
        os.close(descriptor)
    return len(header) + position, digest.hexdigest()


def file_digest(path: Path) -> str:
    """The xxh3-128 digest of a file's bytes."""
    digest = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while data := file.read(8 * 2**20):
            digest.update(data)
    return digest.hexdigest()


class TensorWriter:
    """A safetensors file whose tensors come one by one, none kept: the header's room is reserved in front."""

    RESERVED = 64 * 2**10
    """Bytes before the data: some 350 tensors' entries."""

    def __init__(self, path: Path, *, reserved: int = RESERVED):
        """`reserved`: bytes before the data, a multiple of 8."""
        self.path, self.reserved = path, reserved
        self.data_bytes = 0
        self.entries: dict[str, object] = {}
        self._header_bytes = 64
        self._descriptor = regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.lseek(self._descriptor, self.reserved, os.SEEK_SET)

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor's entry has room, and its data would be aligned to its element."""
        return self.data_bytes % tensor.element_size() == 0 and self.has_room(name, tensor)

    def has_room(self, name: str, tensor: Tensor) -> bool:
        """Whether the tensor's entry has room in the header."""
        return self._header_bytes + self._cost(name, tensor) <= self.reserved

    @staticmethod
    def _cost(name: str, tensor: Tensor) -> int:
        # Offsets have at most 20 digits each; the remainder is punctuation.
        return len(json.dumps(name)) + len(str(list(tensor.shape))) + 100

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor that `fits`."""
        assert self.fits(name, tensor)
        assert name not in self.entries, f"tensor {name} appears twice"
        self._header_bytes += self._cost(name, tensor)
        self.entries[name] = _entry(tensor, self.data_bytes)
        self.data_bytes += nbytes(tensor)
        for piece in pieces(tensor):
            write_all(self._descriptor, piece)

    def finish(self) -> None:
        """Write the header and close."""
        try:
            os.lseek(self._descriptor, 0, os.SEEK_SET)
            write_all(self._descriptor, memoryview(_header_bytes(self.entries, self.reserved)))
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, finished or not."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
