"""8-bit AdamW over flat groups: moments as codes of a dynamic map, blockwise (arXiv 2110.02861).

The numbers are those of bitsandbytes' blockwise AdamW8bit. Here, and not in a plugin, because several
optimizers keep some parameters by this rule and a plugin imports no other. `adamw_8bit_update` is the op
that kernel packs take over; its reference in plain torch is also the CPU path. B is the number of blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from surogate_core.bundles import FLAT_ALIGNMENT, ParamGroup
from surogate_core.kernels.optimizing.rounding import PERIOD, write_master
from surogate_core.kernels.registry import op

BLOCK = 256
"""Elements that share one absmax."""
SMALLEST = 4096
"""Elements of the smallest tensor whose moments are 8-bit; those of smaller ones are fp32."""
CHUNK = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Elements updated at a time: what stays in a core's cache, for each thread, and what bounds the reference's
temporary memory (about half a GiB) while it fills a GPU."""


def dynamic_map(*, signed: bool) -> Tensor:
    """[256] fp32, ascending, from -0.993 (signed) or 0 to 1: more values the nearer to 1, seven decades.

    Decade i of 0…6 has the midpoints of ``linspace(0.1, 1, 2^i + 1)`` times ``10^(i−6)``, of both signs; the
    unsigned map has twice as many, of one. With 0 and 1. Equal to bitsandbytes' ``create_dynamic_map``.
    """
    values = [0.0, 1.0]
    for i in range(7):
        borders = torch.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1, dtype=torch.float32)
        middles = (borders[:-1] + borders[1:]) / 2 * 10 ** (i - 6)
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)


class DynamicCode:
    """Quantises blocks to codes of a dynamic map, each times the inverse of its absmax, to the nearest value.

    A negative number never gets the code of 0 (above 1e-38 of the absmax): m keeps its sign.
    """

    def __init__(self, *, signed: bool, device: torch.device):
        self.signed = signed
        values = dynamic_map(signed=signed)
        borders = (values[:-1] + values[1:]) / 2
        if signed:
            zero = int((values == 0).nonzero())
            borders[zero - 1] = -torch.finfo(torch.float32).tiny
        # The upper 16 bits of a float (sign, exponent, 7 bits of fraction) name a range of numbers that holds at
        # most one border: one look-up and one comparison find the code, 20 times as fast as a binary search.
        patterns = torch.arange(1 << 16, dtype=torch.int32) << 16
        lowest = torch.where(patterns < 0, patterns | 0xFFFF, patterns).view(torch.float32)
        self.values = values.to(device)
        self.borders = torch.cat((borders, torch.tensor([math.inf]))).to(device)
        self.lowest_code = torch.bucketize(lowest, borders, out_int32=True).to(device)

    def quantise(self, x_BK: Tensor) -> tuple[Tensor, Tensor]:
        """(codes_BK uint8, absmax_B fp32) of finite fp32 blocks, none negative if not signed; of zeros absmax is 0."""
        absmax_B = (x_BK.abs() if self.signed else x_BK).amax(dim=1)
        # Subnormal numbers have no inverse; of zeros any will do.
        inverse_B = absmax_B.clamp(min=torch.finfo(torch.float32).tiny).reciprocal()
        scaled_N = (x_BK * inverse_B[:, None]).flatten()
        pattern_N = (scaled_N.view(torch.int32) >> 16).bitwise_and_(0xFFFF)
        code_N = self.lowest_code.index_select(0, pattern_N)
        # Above its border the difference is negative: its sign, −1 as an int32, counts the code up.
        above_N = self.borders.index_select(0, code_N).sub_(scaled_N).view(torch.int32)
        code_N -= above_N.bitwise_right_shift_(31)
        return code_N.to(torch.uint8).view(x_BK.shape), absmax_B

    def dequantise(self, codes_BK: Tensor, absmax_B: Tensor) -> Tensor:
        """The fp32 blocks that the codes represent."""
        values_N = self.values.index_select(0, codes_BK.flatten().int())
        return values_N.view(codes_BK.shape).mul_(absmax_B[:, None])


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNumbers:
    """A step's numbers as 0-d fp32 tensors."""

    clip: Tensor
    """The factor of the gradients."""
    skip: Tensor
    """1 where nothing may change."""
    size: Tensor
    """lr · √c2 / c1."""
    epsilon: Tensor
    """√c2 · ε."""
    lr: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A range of a flat group from element `start` on, in blocks: views into it and into the state."""

    group: ParamGroup
    start: int
    master_BK: Tensor
    grad_BK: Tensor
    first: tuple[Tensor, ...]
    """(codes_BK, absmax_B), or (fp32_BK,) of small tensors."""
    second: tuple[Tensor, ...]


def _read(code: DynamicCode, state: tuple[Tensor, ...]) -> Tensor:
    return code.dequantise(*state) if len(state) == 2 else state[0].clone()


def _write(code: DynamicCode, state: tuple[Tensor, ...], value_BK: Tensor, keep: Tensor) -> None:
    new = code.quantise(value_BK) if len(state) == 2 else (value_BK,)
    for old, tensor in zip(state, new, strict=True):
        old.copy_(tensor if keep.device.type == "cpu" else torch.where(keep, old, tensor))


@op
def adamw_8bit_update(
    grad_BK: Tensor,
    chunk: Range,
    rates: StepNumbers,
    codes: tuple[DynamicCode, DynamicCode],
    *,
    beta1: float,
    beta2: float,
) -> None:
    """A step of `BlockwiseAdamW` on one range, in place; `grad_BK` is its gradients, `codes` those of m and v.

    Every multiply-add has one rounding and nothing else is contracted, so that the state is bit-equal on CPUs and GPUs.
    The masters are bit-equal too, except for torch's square root on a CPU.
    """
    keep = rates.skip > 0
    # On a CPU the host may read the flag and skip the writes; with a GPU it must not wait.
    if keep.device.type == "cpu" and keep:
        return
    group = chunk.group
    grad_BK = torch.nan_to_num(grad_BK * rates.clip, nan=0.0, posinf=0.0, neginf=0.0)
    first_BK = _read(codes[0], chunk.first).mul_(beta1).add_(grad_BK, alpha=1 - beta1)
    second_BK = _read(codes[1], chunk.second).mul_(beta2).add_(grad_BK.mul_(grad_BK), alpha=1 - beta2)
    change_BK = first_BK / second_BK.sqrt().add_(rates.epsilon)
    wide_BK = chunk.master_BK.float()  # fp32 masters themselves
    taken = 1 - rates.skip
    wide_BK.sub_(change_BK.mul_(rates.size * taken))
    if group.weight_decay:
        wide_BK.mul_(1 - rates.lr * taken * group.weight_decay)
    if wide_BK is not chunk.master_BK:
        write_master(group, chunk.start, wide_BK)
    _write(codes[0], chunk.first, first_BK, keep)
    _write(codes[1], chunk.second, second_BK, keep)


def _ranges(group: ParamGroup, chosen: Callable[[str], bool]) -> Iterator[tuple[int, int, bool]]:
    """(start, stop, whether 8-bit) of the longest runs of chosen parameters of one kind, padding included."""
    run: tuple[int, int, bool] | None = None
    for name, (offset, shape) in group.shapes.items():
        if not chosen(name):
            continue
        count = math.prod(shape)
        assert offset % BLOCK == 0, f"{name}: offset {offset} in group {group.name} is no multiple of {BLOCK}"
        stop = offset + -(-count // BLOCK) * BLOCK
        eight = group.elements(name) >= SMALLEST
        if run is not None and run[1] == offset and run[2] == eight:
            run = (run[0], stop, eight)
        else:
            if run is not None:
                yield run
            run = (offset, stop, eight)
    if run is not None:
        yield run


class BlockwiseAdamW:
    """8-bit AdamW of the chosen parameters of flat groups; tensors under 4096 elements have fp32 moments.

    Per step, with ``c = 1 − β^t`` and the moments before they are quantised again::

        v = β2·v + (1−β2)·g²;  m = β1·m + (1−β1)·g
        p −= lr · (√c2/c1) · m / (√v + √c2·ε);  p *= 1 − lr·wd

    A gradient element that is not finite counts as 0, and a skipped step changes nothing.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        chosen: Callable[[str], bool] = lambda name: True,
    ):
        assert FLAT_ALIGNMENT % BLOCK == 0, "a block may not reach into the next parameter"
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        device = groups[0].master.device
        self.codes = (DynamicCode(signed=True, device=device), DynamicCode(signed=False, device=device))
        self.steps = torch.zeros((), dtype=torch.float32, device=device)
        self._state = {"steps": self.steps}
        self._chunks: list[Range] = []
        for group in groups:
            ranges = list(_ranges(group, chosen))
            for small in (False, True):
                self._add(group, [(a, b) for a, b, eight in ranges if eight != small], small=small)

    def _add(self, group: ParamGroup, ranges: list[tuple[int, int]], *, small: bool) -> None:
        blocks = sum(stop - start for start, stop in ranges) // BLOCK
        if not blocks:
            return
        device = group.master.device
        moments: list[tuple[Tensor, ...]] = []
        for moment in ("first", "second"):
            name = f"{group.name}.{moment}"
            if small:
                tensors = {f"{name}.fp32": torch.zeros(blocks, BLOCK, device=device)}
            else:
                codes = torch.zeros(blocks, BLOCK, dtype=torch.uint8, device=device)
                tensors = {f"{name}.codes": codes, f"{name}.absmax": torch.zeros(blocks, device=device)}
            self._state |= tensors
            moments.append(tuple(tensors.values()))
        done, step = 0, CHUNK[device.type] * (torch.get_num_threads() if device.type == "cpu" else 1)
        for start, stop in ranges:
            low = high = start
            while high < stop:
                # No range crosses a PERIOD, from which on masters draw other bits, however long `step` is.
                low, high = high, min(high + step, stop, (high // PERIOD + 1) * PERIOD)
                rows = slice(done, done + (high - low) // BLOCK)
                done = rows.stop
                self._chunks.append(
                    Range(
                        group=group,
                        start=low,
                        master_BK=group.master[low:high].view(-1, BLOCK),
                        grad_BK=group.grad[low:high].view(-1, BLOCK),
                        first=tuple(t[rows] for t in moments[0]),
                        second=tuple(t[rows] for t in moments[1]),
                    )
                )

    def step(self, *, lr: Tensor, clip: Tensor, skip: Tensor) -> None:
        """One update of the chosen ranges of every master, in place; see `surogate_core.bundles.Optimizer`."""
        self.steps += 1 - skip
        # fp64, as 1 − 0.999 has lost four digits in fp32. At step 0 the corrections would be 0/0, and a skipped
        # first step must still change nothing.
        count = self.steps.double().clamp(min=1)
        c1 = 1 - self.beta1**count
        root = (1 - self.beta2**count).sqrt()
        rates = StepNumbers(
            clip=clip,
            skip=skip,
            size=(lr * root / c1).float(),
            epsilon=(root * self.epsilon).float(),
            lr=lr,
        )
        betas = {"beta1": self.beta1, "beta2": self.beta2}
        for chunk in self._chunks:
            adamw_8bit_update(chunk.grad_BK, chunk, rates, self.codes, **betas)

    def state(self) -> dict[str, Tensor]:
        """Live state by name."""
        return dict(self._state)
