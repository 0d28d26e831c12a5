"""The op `sum_coded_product`: a product of FP8 codes that adds to its fp32 sum as it writes, by cuBLASLt.

torch's scaled product only writes, so its result would be rounded, written, read and added in a second kernel. cuBLASLt
is called directly, in the library that torch has loaded; constants and structures are those of its header `cublasLt.h`.

Shape suffixes: N tokens, O and I the sides of a weight. A row-major [O, I] is cuBLASLt's column-major [I, O].
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from surogate_core.plugin import MachineError, bundles, compute

MULTIPLE = 16
"""The sides of a product must be multiples of this."""
WORKSPACE = 32 * 2**20
"""Most bytes that an algorithm may ask for."""
TYPES = {torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
"""``cudaDataType_t``."""
COMPUTE_32F, OP_TRANSPOSED = 68, 1
TRANSPOSE_A, SCALE_A, SCALE_B = 3, 17, 18
"""Of ``cublasLtMatmulDescAttributes_t``: its third operation is B's, which is not transposed by default."""
MOST_WORKSPACE, LEAST_ALIGNMENTS = 1, (5, 6, 7, 8)
"""Of ``cublasLtMatmulPreferenceAttributes_t``; the alignments are of A, B, C and D."""
ALIGNED = 256
"""Bytes; a better alignment changes nothing."""
WITHOUT = (
    "Fix: leave out the kernels of this pack, with plugins.block=[kernels-cuda]: torch then computes the same products."
)


class _Found(ctypes.Structure):
    """``cublasLtMatmulHeuristicResult_t``."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to compute a product of some shape."""

    operation: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    """Of A, B and C, which is D."""
    found: _Found


@cache
def _library() -> ctypes.CDLL:
    """cuBLASLt of torch's CUDA version; `OSError` where there is none."""
    return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")


def _call(name: str, *arguments: object) -> None:
    status = getattr(_library(), name)(*arguments)
    if status:
        raise MachineError(f"{name} of cuBLASLt gave status {status}. {WITHOUT}")


def _set(name: str, target: ctypes.c_void_p, attribute: int, value: object) -> None:
    _call(name, target, attribute, ctypes.byref(value), ctypes.sizeof(value))  # type: ignore[arg-type]


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """The handle of a device. It lives as long as the process."""
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        _call("cublasLtCreate", ctypes.byref(handle))
    return handle


def _made(name: str, *arguments: object) -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    _call(name, ctypes.byref(made), *arguments)
    return made


@cache
def _plan(
    device: int, sides: tuple[int, int, int], dtypes: tuple[torch.dtype, torch.dtype], alignments: tuple[int, ...]
) -> _Plan:
    """The first algorithm that cuBLASLt proposes, so that every run takes the same. `sides`: O, N, I; `dtypes`: of left
    and right; `alignments`: of right, left and total in bytes.
    """
    outputs, tokens, inputs = sides
    left, right = dtypes
    operation = _made("cublasLtMatmulDescCreate", COMPUTE_32F, TYPES[torch.float32])
    _set("cublasLtMatmulDescSetAttribute", operation, TRANSPOSE_A, ctypes.c_int32(OP_TRANSPOSED))
    # An algorithm is proposed for scaled operands; the addresses are set with every call.
    for attribute in (SCALE_A, SCALE_B):
        _set("cublasLtMatmulDescSetAttribute", operation, attribute, ctypes.c_void_p(ALIGNED))
    matrices = ((right, tokens, inputs), (left, tokens, outputs), (torch.float32, inputs, outputs))
    layouts = tuple(
        _made(
            "cublasLtMatrixLayoutCreate",
            TYPES[dtype],
            ctypes.c_uint64(rows),
            ctypes.c_uint64(columns),
            ctypes.c_int64(rows),
        )
        for dtype, rows, columns in matrices
    )
    preference = _made("cublasLtMatmulPreferenceCreate")
    _set("cublasLtMatmulPreferenceSetAttribute", preference, MOST_WORKSPACE, ctypes.c_size_t(WORKSPACE))
    for attribute, aligned in zip(LEAST_ALIGNMENTS, (*alignments, alignments[-1]), strict=True):
        _set("cublasLtMatmulPreferenceSetAttribute", preference, attribute, ctypes.c_uint32(aligned))
    found, count = _Found(), ctypes.c_int()
    a, b, c = layouts
    _call(
        "cublasLtMatmulAlgoGetHeuristic",
        *(_handle(device), operation, a, b, c, c, preference, 1, ctypes.byref(found), ctypes.byref(count)),
    )
    _call("cublasLtMatmulPreferenceDestroy", preference)
    if count.value == 0:
        raise MachineError(f"cuBLASLt has no product of FP8 codes for sides of {sides}. {WITHOUT}")
    return _Plan(operation, layouts, found)


def _aligned(tensor: Tensor) -> int:
    address = tensor.data_ptr()
    return min(ALIGNED, address & -address) if address else ALIGNED


def sum_coded_product(
    total_OI: Tensor, left_ON: Tensor, right_NI: Tensor, inverse_left: Tensor, inverse_right: Tensor, add: bool
) -> None:
    """`surogate_core.kernels.sums.sum_coded_product`."""
    operands: Sequence[Tensor] = (right_NI, left_ON, total_OI)
    device = total_OI.device
    assert device.index is not None
    plan = _plan(
        device.index,
        (left_ON.shape[0], *right_NI.shape),
        (left_ON.dtype, right_NI.dtype),
        tuple(map(_aligned, operands)),
    )
    for attribute, inverse in ((SCALE_A, inverse_right), (SCALE_B, inverse_left)):
        address = ctypes.c_void_p(inverse.data_ptr())
        _set("cublasLtMatmulDescSetAttribute", plan.operation, attribute, address)
    size = plan.found.workspace
    workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
    right, left, total = (ctypes.c_void_p(tensor.data_ptr()) for tensor in operands)
    one, kept = ctypes.c_float(1), ctypes.c_float(1 if add else 0)
    a, b, c = plan.layouts
    _call(
        "cublasLtMatmul",
        *(_handle(device.index), plan.operation, ctypes.byref(one), right, a, left, b, ctypes.byref(kept)),
        *(total, c, total, c, ctypes.byref(plan.found.algorithm)),
        ctypes.c_void_p(None if workspace is None else workspace.data_ptr()),
        ctypes.c_size_t(size),
        ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream),
    )


def _supports(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cuda" or dtype != torch.float32 or compute.capability(device) < (8, 9):
        return False
    try:
        _library()
    except OSError:
        return False
    return True


def _takes(
    total_OI: Tensor, left_ON: Tensor, right_NI: Tensor, inverse_left: Tensor, inverse_right: Tensor, add: bool
) -> bool:
    codes = left_ON.dtype, right_NI.dtype
    known = TYPES.keys() - {torch.float32}
    return (
        known.issuperset(codes)
        and codes != (torch.float8_e5m2, torch.float8_e5m2)
        and all(t.is_contiguous() for t in (total_OI, left_ON, right_NI.t()))
        and all(side % MULTIPLE == 0 for side in (*left_ON.shape, right_NI.shape[1]))
        and all(_aligned(t) >= MULTIPLE for t in (total_OI, left_ON, right_NI))
    )


def kernel() -> bundles.Kernel:
    """The kernel."""
    return bundles.Kernel(
        op="sum_coded_product",
        name="cublaslt",
        function=sum_coded_product,
        supports=_supports,
        takes=_takes,
        priority=10,
    )
