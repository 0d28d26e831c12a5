"""The skinny products of adapters on panels, in Triton; the kernels of several packs launch them.

u and its gradient follow x and dy in their rows, A and B are in the panel. Shape suffixes as in
`surogate_core.kernels.panels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from surogate_core.kernels.building.ahead import noting
from surogate_core.kernels.panels import MOST
from surogate_native import adapters_programs as programs

ROWS = 1024
"""Tokens whose contributions to a gradient one program adds, at most."""
ROOM = 128
"""Columns past x are a multiple of this."""
FEW = 512
"""Most rows for which several programs of `down` share a tile."""
MOST_PARTS = 16
"""As many as share one, at most."""
COLUMNS = 64
"""Inputs of a program of `down_gradient`."""
PROGRAMS = 240
"""As many as keep a large GPU reading; fixed, so that the order of sums depends on shapes alone."""
GOLDEN = 0x1E3779B9
"""What `ops.dropout_mask` multiplies a salt by."""
_salts: dict[tuple[torch.device, tuple[int, ...]], Tensor] = {}
_zeros: dict[torch.device, Tensor] = {}


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _keys(salts: Sequence[int], device: torch.device) -> Tensor:
    """Each projection's share of the dropout key, [S] int32; made once, so that graphs may be captured."""
    key = device, tuple(salts)
    if key in _salts:
        return _salts[key]
    made = torch.tensor([_int32(s * GOLDEN) for s in salts], dtype=torch.int32, device=device)
    return made if noting() else _salts.setdefault(key, made)


def chunk_of(outputs: Sequence[int], most: int) -> int:
    """The largest power of two up to `most` that divides every projection's outputs."""
    size = most
    while any(o % size for o in outputs):
        size //= 2
    return size


def columns_of(y_NQ: Tensor, outputs: Sequence[int]) -> tuple[Tensor, ...]:
    """The columns of each projection. With several, y is viewed as [N, heads, features]: Inductor joins their gradients
    in place only then.
    """
    if len(outputs) == 1:
        return (y_NQ,)
    n, granule = len(y_NQ), chunk_of(outputs, 128)
    parts = y_NQ.view(n, -1, granule).split([o // granule for o in outputs], dim=1)
    return tuple(part.view(n, o) for part, o in zip(parts, outputs, strict=True))


def _cut(outputs: Sequence[int], tokens: int) -> tuple[int, int]:
    """Outputs and tokens of a program of `up_backward`."""
    chunk, rows = chunk_of(outputs, 256), ROWS
    while rows > 256 and sum(outputs) // chunk * triton.cdiv(tokens, rows) < PROGRAMS:
        rows //= 2
    if chunk > 128 and sum(outputs) // chunk * triton.cdiv(tokens, rows) < PROGRAMS:
        chunk //= 2
    return chunk, rows


def _ends(outputs: Sequence[int]) -> list[int]:
    """Where the first three projections end; past the panel where there are fewer."""
    ends = [sum(outputs[: i + 1]) for i in range(min(3, len(outputs) - 1))]
    return ends + [2**30] * (3 - len(ends))


def _named_ends(outputs: Sequence[int]) -> dict[str, int]:
    return dict(zip(("E0", "E1", "E2"), _ends(outputs), strict=True))


def _dropout(p: float, seed: Tensor, salts: Sequence[int]) -> tuple[Any, ...]:
    threshold = round(p * 2**32) - 2**31
    return seed, _keys(salts, seed.device), threshold, 1 / (1 - p)


def down(
    x: Tensor, a_RI: Tensor, u_NR: Tensor, room: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]
) -> None:
    """u = dropout(x) Aᵀ of all projections into `u_NR` and into `room`; x may have more columns than A."""
    n, inputs = x.shape[0], a_RI.shape[1]
    rank = a_RI.shape[0] // slots
    if n <= FEW and p == 0:
        down_few(x, a_RI, u_NR, room, slots)
        return
    tile, step, stages = _down_tile(slots)
    programs.down[triton.cdiv(n, tile) * slots,](
        x,
        a_RI,
        u_NR,
        room,
        *_dropout(p, seed, salts),
        n,
        x.stride(0),
        a_RI.stride(0),
        room.stride(0),
        IN=inputs,
        R=rank,
        S=slots,
        M=tile,
        K=step,
        DROP=p > 0,
        num_warps=4,
        num_stages=_stages(x.device, tile, rank, step, stages, drops=p > 0),
    )


def down_few(
    x: Tensor, a_RI: Tensor, u_NR: Tensor, room: Tensor, slots: int, *, copies: bool = False, largest: bool = False
) -> Tensor:
    """`down` of few rows, as in generation: several programs share a tile, since a single one waits for memory.

    `copies`: x is also written to the columns before `room`. `largest`: the result has the largest absolute values of
    parts of x, int32 bits of bf16; otherwise nothing.
    """
    n, inputs = x.shape[0], a_RI.shape[1]
    rank = a_RI.shape[0] // slots
    # Measured on an H200 at ranks of 16: with these a launch takes 3.2 to 4.8 µs.
    tile = 32 if n > 128 and rank <= 32 else 16
    step = max(64, 128 * tile // max(16, rank))
    part = step * triton.cdiv(triton.cdiv(inputs, step), MOST_PARTS)
    tiles, shared = triton.cdiv(n, tile) * slots, triton.cdiv(inputs, part)
    found = torch.empty((tiles, shared) if largest else (0,), dtype=torch.int32, device=x.device)
    programs.down_split[tiles, shared](
        x,
        a_RI,
        u_NR,
        room,
        torch.empty((tiles, shared, tile, rank), dtype=torch.float32, device=x.device),
        _counters(x.device),
        found,
        n,
        x.stride(0),
        a_RI.stride(0),
        room.stride(0),
        IN=inputs,
        R=rank,
        S=slots,
        M=tile,
        K=step,
        PART=part,
        PARTS=triton.next_power_of_2(shared),
        COPIES=copies,
        LARGEST=largest,
        num_warps=4,
        num_stages=_stages(x.device, tile, rank, step, 3, drops=False),
    )
    return found


def _counters(device: torch.device) -> Tensor:
    """Zeros for `down_split`, which leaves zeros. Kernels that use them run one after the other, on one stream."""
    if device in _zeros:
        return _zeros[device]
    made = torch.zeros(FEW // 16 * MOST, dtype=torch.int32, device=device)
    return made if noting() else _zeros.setdefault(device, made)


def _down_tile(slots: int) -> tuple[int, int, int]:
    """Rows, inner steps and stages of a program of `down`."""
    return (64, 128, 5) if slots > 1 else (32, 256, 5)


def large(device: torch.device) -> bool:
    """Whether it is an sm_90 or sm_100, whose blocks may have 227 KiB of shared memory; others have 99 KiB at least."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _stages(device: torch.device, tile: int, rank: int, step: int, most: int, *, drops: bool) -> int:
    """How many steps `down` loads ahead, within the shared memory of a block. Results do not depend on it."""
    wide = large(device)
    room = (227 if wide else 99) * 1024 - 2 * tile * step * drops  # what is dropped is written once more
    # Only products of 64 rows read all of them from there; others have one in registers.
    return max(1, min(most, room // (2 * (tile + rank) * step) + (not wide or tile < 64)))


def parts_bytes(n: int, outputs: Sequence[int], rank: int) -> int:
    """Bytes of the partial sums of du and dB in `gradients`."""
    chunk, rows = _cut(outputs, n)
    return 4 * sum(outputs) * rank * triton.cdiv(n, rows) + 4 * sum(outputs) // chunk * n * rank


def gradients_bytes(dy: Tensor, outputs: Sequence[int], rank: int, results: int) -> int:
    """Most bytes of what `gradients` allocates; `results`: bytes that its caller has as results only afterwards."""
    n, width = dy.shape[0], sum(outputs)
    room = -(-rank * len(outputs) // ROOM) * ROOM
    copied = n * (width + room) * dy.itemsize if dy.shape[1] == width or dy.stride(1) != 1 else 0
    return copied + max(parts_bytes(n, outputs, rank) - results, 0)


def gradients(
    dy: Tensor,
    u_NR: Tensor,
    b_OR: Tensor,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    *,
    joined: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dy with du past it where `joined`, du, dB, counters of `summed`); dy without room for du is copied then."""
    n, slots, width = u_NR.shape[0], len(outputs), sum(outputs)
    if dy.stride(1) != 1:
        dy = dy.contiguous()
    copy = joined and dy.shape[1] == width
    wide = dy.new_empty(n, width + -(-rank * slots // ROOM) * ROOM) if copy else dy
    chunk, rows = _cut(outputs, n)
    parts = triton.cdiv(n, rows)
    du_parts = dy.new_empty((width // chunk, n, rank), dtype=torch.float32)
    db_parts = dy.new_empty((parts, width, rank), dtype=torch.float32)
    programs.up_backward[width // chunk, parts](
        dy,
        u_NR,
        b_OR,
        du_parts,
        db_parts,
        wide,
        n,
        dy.stride(0),
        b_OR.stride(0),
        wide.stride(0),
        OUT=width,
        **_named_ends(outputs),
        R=rank,
        S=slots,
        M=32 if chunk == 256 else 64,
        C=chunk,
        ROWS=rows,
        COPY=copy,
        num_warps=4,
        num_stages=3 if rank <= 64 or large(dy.device) else 2,
    )
    du_NR, db, counters, _ = summed(
        du_parts, db_parts, wide[:, width:] if joined else None, inputs, outputs, rank, scale, dtype=dy.dtype
    )
    return wide, du_NR, db, counters


def summed(
    du_parts: Tensor,
    db_parts: Tensor,
    room: Tensor | None,
    inputs: int,
    outputs: Sequence[int],
    rank: int,
    scale: float,
    da_parts: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """du [N, R], also into `room` if given; dB [outputs, rank] fp32; counters for `down_gradient`; da's sum."""
    chunks, n, _ = du_parts.shape
    parts, width, _ = db_parts.shape
    slots, tile, block = len(outputs), 64, 1024
    device = du_parts.device
    du_NR = torch.empty((n, slots * rank), dtype=dtype, device=device)
    if room is None:
        room = du_NR  # written twice
    db = torch.empty((width, rank), dtype=torch.float32, device=device)
    counters = torch.empty(triton.next_power_of_2(triton.cdiv(inputs, COLUMNS)), dtype=torch.int32, device=device)
    da = db if da_parts is None else da_parts.new_empty(da_parts.shape[1:])
    others = 0 if da_parts is None else da.numel()
    programs.up_backward_sums[triton.cdiv(n, tile) * slots + triton.cdiv(width, tile) + triton.cdiv(others, block),](
        du_parts,
        db_parts,
        du_NR,
        room,
        db,
        db if da_parts is None else da_parts,
        da,
        counters,
        scale,
        n,
        room.stride(0),
        parts,
        OUT=width,
        **_named_ends(outputs),
        R=rank,
        S=slots,
        C=width // chunks,
        M=tile,
        DA=others,
        COUNTERS=counters.numel(),
        BLOCK=block,
        num_warps=4,
    )
    return du_NR, db, counters, da


def down_gradient(x_NI: Tensor, du_NR: Tensor, counters: Tensor) -> Tensor:
    """dA = duᵀ x, [R, I] fp32; `counters` are those that `summed` made in the same call."""
    n, inputs = x_NI.shape
    ranks = du_NR.shape[1]
    chunks, rows = triton.cdiv(inputs, COLUMNS), ROWS
    while rows > 128 and chunks * triton.cdiv(n, rows) < PROGRAMS:
        rows //= 2
    parts, wide = triton.cdiv(n, rows), triton.next_power_of_2(ranks)
    da = torch.empty((ranks, inputs), dtype=torch.float32, device=x_NI.device)
    programs.down_gradient[chunks, parts](
        x_NI,
        du_NR,
        da.new_empty((parts, ranks, inputs)),
        da,
        counters,
        n,
        x_NI.stride(0),
        IN=inputs,
        RANKS=ranks,
        WIDE=wide,
        M=64,
        C=COLUMNS,
        ROWS=rows,
        num_warps=4,
        num_stages=3 if wide <= 256 or large(x_NI.device) else 2,
    )
    return da


def dropped_gradient(x_NI: Tensor, du_NR: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]) -> Tensor:
    """dA = duᵀ dropout(x), [R, I] fp32."""
    (n, inputs), ranks = x_NI.shape, du_NR.shape[1]
    parts, columns = triton.cdiv(n, 512), 128
    da_parts = torch.empty((parts, ranks, inputs), dtype=torch.float32, device=x_NI.device)
    programs.down_backward[triton.cdiv(inputs, columns) * slots, parts](
        x_NI,
        du_NR,
        da_parts,
        *_dropout(p, seed, salts),
        n,
        x_NI.stride(0),
        IN=inputs,
        R=ranks // slots,
        S=slots,
        M=64,
        C=columns,
        ROWS=512,
        DROP=True,
        num_warps=4,
        num_stages=3,
    )
    return da_parts.sum(0)


def add_dropped(
    dx_NI: Tensor, du_NR: Tensor, a_RI: Tensor, seed: Tensor, slots: int, p: float, salts: Sequence[int]
) -> None:
    """dx += Σ over projections of mask · (du A) / (1 − p), in place."""
    (n, inputs), columns = dx_NI.shape, 128
    programs.dropped_dx[triton.cdiv(n, 64), triton.cdiv(inputs, columns)](
        dx_NI,
        du_NR,
        a_RI,
        *_dropout(p, seed, salts),
        n,
        a_RI.stride(0),
        IN=inputs,
        R=du_NR.shape[1] // slots,
        S=slots,
        M=64,
        C=columns,
        num_warps=4,
    )
