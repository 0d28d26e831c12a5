"""How the programs of experts are launched. Suffixes as in `surogate_core.kernels.experts`; T tiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from surogate_native.adapters import large
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from surogate_core.plugin import compute, fp8
from surogate_kernels_triton import experts_products_programs as products
from surogate_kernels_triton import experts_programs as programs

LEAST_RANK, MOST_RANK = 16, 128
"""Adapters are padded with zeros to a power of two in this range."""
MOST_EXPERTS = 1024
ROWS = 64
"""Rows of a tile of the skinny products."""
STAGES = 4
"""Tiles of `down` and `factors` that are being loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How `triton-fused` cuts its products: m rows by c columns, b of the inner dimension at a time."""

    m: int
    c: int
    b: int
    warps: int
    stages: int
    copied: bool = False
    """Whether the copy engine of sm_90 and newer brings the tiles."""

    @property
    def name(self) -> str:
        """Such as ``128x256x64w8s3`` or, with the copy engine, ``128x256x64w8s3c``."""
        return f"{self.m}x{self.c}x{self.b}w{self.warps}s{self.stages}" + "c" * self.copied

    def named(self, inputs: int, outputs: int, rank: int) -> dict[str, int]:
        """Sizes of a product as its program takes them."""
        sizes = {"IN": inputs, "OUT": outputs, "L": rank, "M": self.m, "C": self.c, "B": self.b}
        return {**sizes, "num_warps": self.warps, "num_stages": self.stages}

    @classmethod
    def of(cls, name: str) -> Tile:
        """The tile of a name."""
        m, c, b, warps, stages = map(int, re.split("[xws]", name.removesuffix("c")))
        return cls(m=m, c=c, b=b, warps=warps, stages=stages, copied=name.endswith("c"))


HOPPER = Tile(m=128, c=256, b=64, warps=8, stages=3, copied=True)
"""For 227 KiB of shared memory a block (sm_90, sm_100)."""
HOPPER_SHORT = Tile(m=128, c=128, b=64, warps=4, stages=3, copied=True)
"""For inner dimensions up to `SHORT`: of two programs on a multiprocessor one may multiply while the other stores."""
SHORT = 1024
HOPPER_DROPPED = Tile(m=128, c=128, b=64, warps=8, stages=4, copied=True)
"""With dropout, whose masks need registers."""
HOPPER_HIGH = Tile(m=128, c=128, b=64, warps=8, stages=3, copied=True)
"""For adapters of a rank above `HIGH`, whose u and B need shared memory too."""
CODES = Tile(m=128, c=256, b=128, warps=8, stages=3, copied=True)
"""For products of codes on sm_90."""
CODES_SHORT = Tile(m=128, c=128, b=128, warps=4, stages=3, copied=True)
"""For inner dimensions up to `SHORT`."""
CODES_HIGH = Tile(m=128, c=128, b=128, warps=8, stages=3, copied=True)
"""For adapters of a rank above `HIGH`."""
SMALL = Tile(m=64, c=128, b=32, warps=4, stages=3)
"""For the others, which may have 99 KiB."""
SMALL_HIGH = Tile(m=64, c=128, b=32, warps=8, stages=3)
HIGH = 64
LARGE_BLOCK, SMALL_BLOCK = 227 * 1024, 99 * 1024
"""Bytes of shared memory that a block may have where `large` holds, and that it has elsewhere at least."""


def tile_for(device: torch.device, inner: int, *, rank: int, drops: bool = False) -> Tile:
    """The tile for a device, an inner dimension and the rank of the adapters; fixed, because equal inputs must give
    equal bits on every run.
    """
    if not large(device):
        return SMALL_HIGH if rank > HIGH or (drops and rank == HIGH) else SMALL
    if rank > HIGH:
        return HOPPER_HIGH
    if drops:
        return HOPPER_DROPPED
    return HOPPER_SHORT if inner <= SHORT else HOPPER


GOLDEN = 0x1E3779B9
"""What `ops.random_key` multiplies a salt by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropout:
    """The masks of dropout over the sorted rows, one for each projection; see `ops.dropout_mask`."""

    seed: Tensor
    """0-d int32; not read where p is 0."""
    p: float
    salts: tuple[int, ...]

    @classmethod
    def made(cls, seed: Tensor | None, p: float, salts: Sequence[int]) -> Dropout | None:
        """From the arguments of an op; None without a seed."""
        return None if seed is None else cls(seed=seed, p=p, salts=tuple(salts))

    def of(self, number: int) -> Dropout:
        """The mask of one projection."""
        return Dropout(seed=self.seed, p=self.p, salts=self.salts[number : number + 1])

    @property
    def named(self) -> dict[str, Any]:
        """Arguments of the programs."""
        keys = [(salt * GOLDEN + 2**31) % 2**32 - 2**31 for salt in (self.salts[0], self.salts[-1])]
        return {
            "seed": self.seed,
            "key0": keys[0],
            "key1": keys[1],
            "threshold": round(self.p * 2**32) - 2**31,
            "inverse": 1 / (1 - self.p),
            "DROP": self.p > 0,
        }


def masks(
    seed: Tensor | None, adapters: Sequence[compute.ExpertAdapter | None]
) -> tuple[Tensor | None, float, tuple[int, ...]]:
    """(seed, probability, salts) of adapters with one probability; no seed where nothing is dropped."""
    given = [adapter for adapter in adapters if adapter is not None]
    if seed is None or not given or given[0].dropout == 0:
        return None, 0.0, ()
    return seed, given[0].dropout, tuple(adapter.salt for adapter in given)


def no_dropout(like: Tensor) -> Dropout:
    """Keeps everything; `like`: any int32 tensor on the device."""
    return Dropout(seed=like, p=0.0, salts=(0,))


def tile_table(ends_E: Tensor, rows: int, size: int) -> Tensor:
    """[T, 4] the tiles of `size` rows; see `experts_programs`."""
    count = rows // size + len(ends_E)
    table_T4 = ends_E.new_empty(count, 4)
    wide = triton.next_power_of_2(len(ends_E))
    step = 64 if wide <= 256 else 16
    programs.tile_table[triton.cdiv(count, step),](
        ends_E, table_T4, count, len(ends_E), EP=wide, M=size, B=step, num_warps=4
    )
    return table_T4


def _depth(device: torch.device, ranks: int, *, masks: int) -> int:
    """Columns of x that `down` reads at a time, such that its stages fit into the shared memory of a block and its
    masks into registers.
    """
    columns, stages, room = 64 if masks > 1 else 128, STAGES, LARGE_BLOCK
    if not large(device):
        # Elsewhere one stage is in registers.
        columns, stages, room = 32 if masks and ranks > HIGH else 128, STAGES - 1, SMALL_BLOCK
    while stages * columns * (ROWS + ranks) * 2 > room:
        columns //= 2
    return columns


def down(
    x: Tensor,
    order_R: Tensor | None,
    table_T4: Tensor,
    a: Sequence[Tensor],
    u_RL: Tensor,
    *,
    choices: int,
    scale: float = 1.0,
    transposed: bool = False,
    dropout: Dropout | None = None,
) -> None:
    """u of all A's; with `transposed` they are B's [E, O, L] and x is dy."""
    drops = dropout is not None and dropout.p > 0
    inputs, rank = a[0].shape[1:] if transposed else a[0].shape[:0:-1]
    programs.down[len(table_T4),](
        x,
        table_T4 if order_R is None else order_R,
        table_T4,
        a[0],
        a[-1],
        u_RL,
        scale=scale,
        x_row=x.stride(0),
        u_row=u_RL.stride(0),
        **(dropout or no_dropout(table_T4)).named,
        IN=inputs,
        A_L=1 if transposed else inputs,
        A_I=rank if transposed else 1,
        K=0 if order_R is None else choices,
        L=rank,
        S=len(a),
        M=ROWS,
        C=_depth(x.device, rank * len(a), masks=len(a) if drops else 0),
        num_warps=8 if drops else 4,
        num_stages=STAGES,
    )


def up(
    y_RO: Tensor,
    u_RL: Tensor,
    b: Sequence[Tensor],
    table_T4: Tensor,
    scale: float,
    *,
    out_RO: Tensor,
    a: bool = False,
    dropout: Dropout | None = None,
) -> None:
    """out = y + scale · u Bᵀ; with `a`, B's are A's [E, L, O]."""
    outputs, rank = b[0].shape[:0:-1] if a else b[0].shape[1:]
    columns = 128
    drops = dropout is not None and dropout.p > 0
    programs.up[len(table_T4), triton.cdiv(outputs, columns)](
        y_RO,
        out_RO,
        u_RL,
        b[0],
        b[-1],
        table_T4,
        scale=scale,
        y_row=y_RO.stride(0),
        out_row=out_RO.stride(0),
        u_row=u_RL.stride(0),
        **(dropout or no_dropout(table_T4)).named,
        OUT=outputs,
        B_L=outputs if a else 1,
        B_O=1 if a else rank,
        L=rank,
        S=len(b),
        M=ROWS,
        C=columns,
        num_warps=8 if drops else 4,
    )


def factors(
    left: Tensor,
    right_RL: Tensor,
    order_R: Tensor | None,
    ends_E: Tensor,
    out: Tensor,
    *,
    choices: int,
    rank: int,
    scale: float = 1.0,
    dropout: Dropout | None = None,
) -> None:
    """Fills `out`: [E, O, L], or [S, E, L, O] where `right_RL` has S·L columns; elements of `left` are dropped."""
    drops = dropout is not None and dropout.p > 0
    if out.ndim == 4 and len(out) > 1 and (drops or rank > HIGH):
        for number, each in enumerate(right_RL.split(rank, dim=1)):
            mask = None if dropout is None else dropout.of(number)
            named = {"choices": choices, "rank": rank, "scale": scale, "dropout": mask}
            factors(left, each, order_R, ends_E, out[number : number + 1], **named)  # type: ignore[arg-type]
        return
    masks = (dropout or no_dropout(ends_E)).named
    masks.pop("key1")
    outputs, ranks = left.shape[1], right_RL.shape[1]
    first = out.ndim == 4
    columns, wide = min(128, triton.next_power_of_2(outputs)), triton.next_power_of_2(ranks)
    programs.factors[triton.cdiv(outputs, columns), len(ends_E)](
        left,
        right_RL,
        ends_E if order_R is None else order_R,
        ends_E,
        out,
        scale=scale,
        left_row=left.stride(0),
        right_row=right_RL.stride(0),
        E=len(ends_E),
        **masks,
        OUT=outputs,
        OUT_O=1 if first else rank,
        OUT_L=outputs if first else 1,
        K=0 if order_R is None else choices,
        L=rank,
        RANKS=ranks,
        WIDE=wide,
        M=64,
        C=columns,
        num_warps=8 if wide > HIGH else 4,
        num_stages=STAGES,
    )


def grouped_sum(
    x: Sequence[Tensor],
    weights: Sequence[Tensor],
    u_RL: Tensor | None,
    b: Sequence[Tensor],
    order_R: Tensor | None,
    ends_E: Tensor,
    rows: int,
    *,
    choices: int,
    scale: float,
    backward: bool,
    tile: Tile | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """[R, O]: the products of one or two pairs of x and W and, with u, scale · u Bᵀ. `backward`: x is dy, and W's and
    B's, which are A's, are read transposed. Rows are gathered by an order for one pair. The weights of the last experts
    may follow those of the first in tensors of their own.
    """
    assert order_R is None or len(x) == 1
    own = len(weights[0]) if len(weights) > len(x) else 0
    inputs, outputs = weights[0].shape[1:] if backward else weights[0].shape[:0:-1]
    rank = 0 if u_RL is None else b[0].shape[1 if backward else 2]
    drops = dropout is not None and dropout.p > 0
    tile = tile or tile_for(x[0].device, inputs * len(x), rank=rank, drops=drops)
    table_T4 = tile_table(ends_E, rows, tile.m)
    y_RO = x[0].new_empty(rows, outputs)
    unused = y_RO if u_RL is None else u_RL
    every = (weights[0], weights[len(x) - 1], weights[-len(x)], weights[-1])
    operands = (x[0], x[-1], *every)
    copied = tile.copied and inputs % tile.b == 0 and all(map(_copies, (*x, *weights)))
    if copied:
        left = x if order_R is not None else [TensorDescriptor.from_tensor(t, [tile.m, tile.b]) for t in x]
        block = [tile.b, tile.c] if backward else [tile.c, tile.b]
        operands = (left[0], left[-1], *(TensorDescriptor.from_tensor(w.view(-1, w.shape[2]), block) for w in every))
    strides = {
        "W_I": outputs if backward else 1,
        "W_O": 1 if backward else inputs,
        "B_L": outputs if backward else 1,
        "B_O": 1 if backward else rank,
    }
    program = products.product_copied if copied else products.product
    program[len(table_T4) * triton.cdiv(outputs, tile.c),](
        *operands,
        unused,
        b[0] if b else unused,
        b[-1] if b else unused,
        table_T4 if order_R is None else order_R,
        table_T4,
        y_RO,
        scale=scale,
        x_row=x[0].stride(0),
        u_row=unused.stride(0),
        **(dropout or no_dropout(table_T4)).named,
        K=0 if order_R is None else choices,
        S=max(len(b), 1),
        PAIRS=len(x),
        OWN=own,
        **tile.named(inputs, outputs, rank),
        **({"BACKWARD": backward} if copied else strides),
    )
    return y_RO


Operand = Tensor | compute.Codes


def operands(x: Sequence[Tensor], scales: Sequence[Tensor]) -> Sequence[Operand]:
    """Rows as the product reads them: rounded if the weights are codes."""
    return [round_rows(t) for t in x] if scales else x


def paired(weights: Sequence[Tensor], scales: Sequence[Tensor]) -> Sequence[Operand]:
    """Weights as the product reads them."""
    return list(zip(weights, scales, strict=True)) if scales else weights


def multiplied(
    x: Sequence[Any],
    weights: Sequence[Any],
    *rest: Any,
    dtype: torch.dtype,
    dropout: Dropout | None = None,
    **named: Any,
) -> Tensor:
    """[R, O] in a dtype: `grouped_codes` of codes, `grouped_sum` of others."""
    if isinstance(x[0], tuple):
        return grouped_codes(x, weights, *rest, dtype=dtype, **named)
    return grouped_sum(x, weights, *rest, dropout=dropout, **named)


def round_rows(x: Tensor) -> compute.Codes:
    """`fp8_rows.quantise_rows` of a matrix whose columns are adjacent."""
    codes = torch.empty_like(x, dtype=fp8.E4M3, memory_format=torch.contiguous_format)
    inverse = x.new_empty(len(x), dtype=torch.float32)
    wide = triton.next_power_of_2(x.shape[1])
    size = max(8192 // wide, 1)
    products.round_rows[triton.cdiv(len(x), size),](
        x, codes, inverse, len(x), x.stride(0), IN=x.shape[1], WIDE=wide, M=size, num_warps=4
    )
    return codes, inverse


def grouped_codes(
    x: Sequence[compute.Codes],
    weights: Sequence[compute.Codes],
    u_RL: Tensor | None,
    b: Sequence[Tensor],
    order_R: Tensor | None,
    ends_E: Tensor,
    rows: int,
    *,
    choices: int,
    scale: float,
    backward: bool,
    dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """`grouped_sum` of codes. The weights are those of W forward and of Wᵀ backward; the inner dimension is a multiple
    of 128.
    """
    assert order_R is None or len(x) == 1
    _, outputs, inputs = weights[0][0].shape
    rank = 0 if u_RL is None else b[0].shape[1 if backward else 2]
    tile = tile or (CODES_HIGH if rank > HIGH else CODES_SHORT if inputs * len(x) <= SHORT else CODES)
    table_T4 = tile_table(ends_E, rows, tile.m)
    y_RO = torch.empty(rows, outputs, dtype=dtype, device=ends_E.device)
    unused = y_RO if u_RL is None else u_RL
    left = [codes if order_R is not None else TensorDescriptor.from_tensor(codes, [tile.m, tile.b]) for codes, _ in x]
    right = [TensorDescriptor.from_tensor(w.view(-1, inputs), [tile.c, tile.b]) for w, _ in weights]
    products.product_codes[len(table_T4) * triton.cdiv(outputs, tile.c),](
        left[0],
        left[-1],
        right[0],
        right[-1],
        x[0][1],
        x[-1][1],
        weights[0][1],
        weights[-1][1],
        unused,
        b[0] if b else unused,
        b[-1] if b else unused,
        table_T4 if order_R is None else order_R,
        table_T4,
        y_RO,
        scale=scale,
        inverse=1 / scale if scale else 0.0,
        x_row=x[0][0].stride(0),
        u_row=unused.stride(0),
        B_L=outputs if backward else 1,
        B_O=1 if backward else rank,
        K=0 if order_R is None else choices,
        S=max(len(b), 1),
        PAIRS=len(x),
        **tile.named(inputs, outputs, rank),
    )
    return y_RO


def _copies(matrix: Tensor) -> bool:
    """Whether the copy engine can read it."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(-2) * matrix.itemsize % 16 == 0


def rows_apart(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with adjacent columns and one distance between rows."""
    same = len({t.stride(0) for t in tensors}) == 1 and all(t.stride(1) == 1 for t in tensors)
    return list(tensors) if same else [t.contiguous() for t in tensors]


def padded(tensor: Tensor, dim: int) -> Tensor:
    """With zeros in `dim` up to a rank that the programs take."""
    rank = tensor.shape[dim]
    missing = max(LEAST_RANK, triton.next_power_of_2(rank)) - rank
    if missing == 0:
        return tensor
    return torch.nn.functional.pad(tensor, (0, missing) if dim == 2 else (0, 0, 0, missing))
