"""Maps, codes and updates against bitsandbytes and a plain Python transcription; skipped steps, state, fp32 AdamW."""

from __future__ import annotations

import bisect
import itertools
import math
import struct
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from surogate_optimizer_adamw_8bit import AdamW8bitOptions, surogate_optimizer
from surogate_optimizer_adamw_8bit.adamw_8bit import build
from torch import Tensor

from surogate_core.plugin import adamw_8bit, bundles
from surogate_core.plugin import adamw_8bit as rule
from surogate_core.service.kernels import rounding

CPU = torch.device("cpu")
SHAPES = {"decayed": ((64, 100), (40,), (4096,), (4095,), (96, 80)), "undecayed": ((33,), (5000,))}
"""6400 = 25 blocks; 5000 ends within a block; two at the border of 4096; small and large alternate."""
DECAY = {"decayed": 0.1, "undecayed": 0.0}


@pytest.fixture
def bnb() -> ModuleType:
    """bitsandbytes, for the tests that compare with it."""
    return pytest.importorskip("bitsandbytes")


def make_groups(seed: int = 0, device: str = "cpu") -> list[bundles.ParamGroup]:
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for name, members in SHAPES.items():
        shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
        offset = 0
        for number, shape in enumerate(members):
            shapes[f"{name}.{number}"] = (offset, shape)
            offset += -(-math.prod(shape) // adamw_8bit.BLOCK) * adamw_8bit.BLOCK
        master = torch.zeros(offset)
        for start, shape in shapes.values():
            master[start : start + math.prod(shape)].normal_(generator=generator)
        grad = torch.zeros(offset, device=device)
        groups.append(
            bundles.ParamGroup(name=name, master=master.to(device), grad=grad, shapes=shapes, weight_decay=DECAY[name])
        )
    return groups


def parts(group: bundles.ParamGroup, flat: Tensor) -> dict[str, Tensor]:
    """The parameters' ranges of a flat tensor by name."""
    return {n: flat[a : a + math.prod(shape)] for n, (a, shape) in group.shapes.items()}


def set_gradients(groups: list[bundles.ParamGroup], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for group in groups:
        for part in parts(group, group.grad).values():
            # Four orders of magnitude within a block, and a tenth of exact zeros.
            scale = 10 ** (4 * torch.rand(part.shape, generator=generator) - 4)
            keep = torch.rand(part.shape, generator=generator) > 0.1
            part.copy_(torch.randn(part.shape, generator=generator) * scale * keep)


def step(optimizer: adamw_8bit.BlockwiseAdamW, lr: float, clip: float = 1.0, skip: float = 0.0) -> None:
    device = optimizer.steps.device
    optimizer.step(
        lr=torch.tensor(lr, device=device),
        clip=torch.tensor(clip, device=device),
        skip=torch.tensor(skip, device=device),
    )


def snapshot(groups: list[bundles.ParamGroup], optimizer: adamw_8bit.BlockwiseAdamW) -> dict[str, Tensor]:
    masters = {f"master {g.name}": g.master.clone() for g in groups}
    return {**masters, **{name: t.clone() for name, t in optimizer.state().items()}}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


# ------------------------------------------------------------------------------ the maps


def fp32(x: float) -> float:
    return struct.unpack("f", struct.pack("f", x))[0]


def transcribed_map(signed: bool) -> list[float]:
    """SPEC: midpoints of linspace(0.1, 1, 2^i + 1), or 2^(i+1) + 1, times 10^(i−6); 0 and 1. In float64."""
    values = [0.0, 1.0]
    for i in range(7):
        n = 2 ** (i if signed else i + 1)
        decade = [10 ** (i - 6) * (0.1 + 0.9 * (k + 0.5) / n) for k in range(n)]
        values += [*decade, *([-v for v in decade] if signed else [])]
    return sorted(values)


@pytest.mark.parametrize("signed", [True, False])
def test_map_is_the_transcribed_one(signed: bool) -> None:
    found = adamw_8bit.dynamic_map(signed=signed)
    assert found.dtype == torch.float32
    assert len(found) == len(set(found.tolist())) == 256
    assert found.tolist() == pytest.approx(transcribed_map(signed), rel=3e-7)


def test_map_at_some_places() -> None:
    """As bitsandbytes 0.50 gives them, to the bit."""
    signed, unsigned = adamw_8bit.dynamic_map(signed=True), adamw_8bit.dynamic_map(signed=False)
    expected = {0: -0.992968738079071, 1: -0.9789062738418579, 126: -5.500000384017767e-07, 127: 0.0}
    expected |= {128: 5.500000384017767e-07, 129: 3.250000190746505e-06, 254: 0.992968738079071, 255: 1.0}
    assert {i: signed[i].item() for i in expected} == expected
    expected = {0: 0.0, 1: 3.2500003044333425e-07, 2: 7.749999895168003e-07, 254: 0.9964843988418579, 255: 1.0}
    assert {i: unsigned[i].item() for i in expected} == expected


@pytest.mark.parametrize("signed", [True, False])
def test_map_equals_that_of_bitsandbytes(bnb: ModuleType, signed: bool) -> None:
    assert torch.equal(adamw_8bit.dynamic_map(signed=signed), bnb.functional.create_dynamic_map(signed=signed))


# ----------------------------------------------------------------------------- the codes


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_the_nearest_at_every_border(signed: bool) -> None:
    """The look-up against a search, for the floats at and next to every border, value and pattern of 16 bits."""
    code = adamw_8bit.DynamicCode(signed=signed, device=CPU)
    patterns = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    values = code.values.double()
    middles = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat((patterns[patterns.abs() <= 1], code.values, middles))
    x = torch.cat((x, *(torch.nextafter(x, torch.tensor(end)) for end in (-2.0, 2.0)))).clamp(-1 if signed else 0, 1)
    x = torch.cat(
        (x, torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * (2 if signed else 1) - int(signed))
    )
    # A block of one beside a 1, so that the absmax is 1.
    codes, absmax = code.quantise(torch.stack((x, torch.ones_like(x)), dim=1))
    assert (absmax == 1).all()
    found = code.values[codes[:, 0].int()].double()
    above = torch.bucketize(x.double(), values).clamp(max=255)
    best = torch.minimum((values[above] - x).abs(), (x - values[(above - 1).clamp(min=0)]).abs())
    negative = x <= -torch.finfo(torch.float32).tiny
    nonzero = ~(negative & (x > -5.6e-7))
    # A border is rounded to fp32: next to it either neighbour is as near as fp32 can tell.
    assert ((found - x).abs() <= best + 1.2e-7 * x.abs())[nonzero].all()
    assert (found[negative] < 0).all(), "m keeps its sign"


def test_blocks_of_zeros_and_of_one_value() -> None:
    code = adamw_8bit.DynamicCode(signed=True, device=CPU)
    x = torch.zeros(4, adamw_8bit.BLOCK)
    x[1, 3], x[2, 5], x[3] = 7.5, -1e-30, -2.0
    codes, absmax = code.quantise(x)
    assert absmax.tolist() == [0.0, 7.5, fp32(1e-30), 2.0]
    back = code.dequantise(codes, absmax)
    assert (back[0] == 0).all()
    assert back[1, 3] == 7.5
    assert (back[1].nonzero() == torch.tensor([[3]])).all()
    assert back[2, 5] == pytest.approx(-0.993e-30, rel=1e-3), "the map ends at -0.993"
    assert (back[3] < 0).all()


def exact_codes(blocks: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and absmax by bitsandbytes' generic rule for a CPU: ``argmin |x / absmax − map|``.

    For fp32 its CPU library (0.50) looks codes up in a table that is too coarse near 0: exact zeros get the code of
    9e-5. Its GPU kernels search exactly.
    """
    rows = blocks.view(-1, adamw_8bit.BLOCK)
    absmax = rows.abs().amax(dim=1)
    scaled = (rows * (1 / absmax)[:, None]).clamp(-1, 1)
    return torch.cat([(row[:, None] - code).abs().argmin(dim=1) for row in scaled]), absmax


@pytest.mark.parametrize("signed", [True, False])
def test_codes_equal_those_of_bitsandbytes(signed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (400, adamw_8bit.BLOCK)
    x = torch.randn(shape, generator=generator) * 10 ** (3 * torch.rand(shape, generator=generator) - 3)
    x = x if signed else x.square()
    code = adamw_8bit.DynamicCode(signed=signed, device=CPU)
    codes, absmax = code.quantise(x)
    theirs, their_absmax = exact_codes(x, code.values)
    assert torch.equal(absmax, their_absmax)
    difference = codes.flatten().int() - theirs.int()
    assert (difference == 0).float().mean() >= 0.9999
    assert difference.abs().max() <= 1


# ---------------------------------------------------------------------------- the updates


class Transcription:
    """One tensor by SPEC section 6 in plain Python: float64 arithmetic, a search over the transcribed map."""

    def __init__(self, p: list[float], *, lr: float, decay: float, betas: tuple[float, float], eps: float):
        self.p, self.lr, self.decay, self.betas, self.eps = p, lr, decay, betas, eps
        self.maps = [[fp32(v) for v in transcribed_map(signed)] for signed in (True, False)]
        self.middles = [[(a + b) / 2 for a, b in itertools.pairwise(m)] for m in self.maps]
        self.blocks = -(-len(p) // 256)
        self.codes = [[0] * len(p), [0] * len(p)]
        self.absmax = [[0.0] * self.blocks, [0.0] * self.blocks]
        self.t = 0

    def step(self, grad: list[float]) -> None:
        self.t += 1
        (b1, b2), size = self.betas, len(self.p)
        c1, c2 = 1 - b1**self.t, 1 - b2**self.t
        m = [self.maps[0][c] * self.absmax[0][i // 256] for i, c in enumerate(self.codes[0])]
        v = [self.maps[1][c] * self.absmax[1][i // 256] for i, c in enumerate(self.codes[1])]
        for i in range(size):
            v[i] = b2 * v[i] + (1 - b2) * grad[i] ** 2
            m[i] = b1 * m[i] + (1 - b1) * grad[i]
            self.p[i] -= self.lr * math.sqrt(c2) / c1 * m[i] / (math.sqrt(v[i]) + math.sqrt(c2) * self.eps)
            self.p[i] *= 1 - self.lr * self.decay
        for which, values in enumerate((m, v)):
            for block in range(self.blocks):
                of_block = range(256 * block, min(256 * block + 256, size))
                top = self.absmax[which][block] = max(abs(values[i]) for i in of_block)
                for i in of_block:
                    code = bisect.bisect_left(self.middles[which], values[i] / top if top else 0.0)
                    if which == 0 and values[i] < 0 and self.maps[0][code] == 0:
                        code -= 1
                    self.codes[which][i] = code


def test_hundred_steps_equal_a_transcription() -> None:
    options = AdamW8bitOptions(beta1=0.85, beta2=0.97, epsilon=1e-7)
    size = 4100
    (group,) = (bundles.ParamGroup(
        name="decayed", master=torch.zeros(4352), grad=torch.zeros(4352), shapes={"w": (0, (size,))}, weight_decay=0.1,
    ),)  # fmt: skip
    group.master[:size].normal_(generator=torch.Generator().manual_seed(0))
    optimizer = build([group], options)
    twin = Transcription(group.master[:size].tolist(), lr=1e-3, decay=0.1, betas=(0.85, 0.97), eps=1e-7)
    for number in range(100):
        set_gradients([group], number)
        step(optimizer, 1e-3)
        twin.step(group.grad[:size].tolist())
    for which, moment in enumerate(("first", "second")):
        codes = optimizer.state()[f"decayed.{moment}.codes"].flatten()[:size].int()
        difference = codes - torch.tensor(twin.codes[which])
        assert (difference == 0).float().mean() >= 0.999, moment
        assert difference.abs().max() <= 1, moment
        absmax = optimizer.state()[f"decayed.{moment}.absmax"].tolist()
        assert absmax == pytest.approx(twin.absmax[which], rel=1e-5)
    error = (group.master[:size].double() - torch.tensor(twin.p, dtype=torch.float64)).abs()
    # A code that is off by one moves its parameter by a share of lr; the others agree to fp32.
    assert error.quantile(0.99) < 1e-5
    assert error.max() < 1e-3
    assert (group.master[size:] == 0).all(), "padding"


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_hundred_steps_equal_bitsandbytes(bnb: ModuleType, decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its CPU optimizer, with the exact search for codes in place of the coarse table; it decays first and then
    steps, which with decay moves the weights by lr · wd of each step."""

    def quantise(blocks: Tensor, code: Tensor, absmax: Tensor, out: Tensor, blocksize: int) -> None:
        codes, found = exact_codes(blocks, code)
        out.copy_(codes.view(out.shape))
        absmax.copy_(found)

    monkeypatch.setattr("bitsandbytes.backends.cpu.ops._quant_blockwise_fp32_direct", quantise)
    generator = torch.Generator().manual_seed(0)
    shape, lr = (20, 256), 1e-3
    group = bundles.ParamGroup(
        name="w",
        master=torch.randn(math.prod(shape), generator=generator),
        grad=torch.zeros(math.prod(shape)),
        shapes={"w": (0, shape)},
        weight_decay=decay,
    )
    optimizer = build([group], AdamW8bitOptions())
    twin = torch.nn.Parameter(group.master.clone())
    reference = bnb.optim.AdamW8bit([twin], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay)
    path = torch.zeros_like(group.master)
    for number in range(100):
        set_gradients([group], number)
        twin.grad = group.grad.clone()
        reference.step()
        before = group.master.clone()
        step(optimizer, lr)
        path += (group.master - before).abs()
    for moment, theirs in (("first", "state1"), ("second", "state2")):
        difference = optimizer.state()[f"w.{moment}.codes"].flatten().int() - reference.state[twin][theirs].int()
        assert (difference == 0).float().mean() >= 0.999, moment
        assert difference.abs().max() <= 1, moment
    error = (group.master - twin.detach()).abs() / (1e-2 + path)
    assert error.quantile(0.99) < 1e-4 + 2 * lr * decay
    assert error.max() < 0.1, "a code that is off by one"


def test_near_fp32_adamw() -> None:
    """Of the distance that AdamW goes in 50 steps, 8 bits change a few per cent; small tensors nothing."""
    groups = make_groups()
    optimizer = build(groups, AdamW8bitOptions())
    before = [g.master.clone() for g in groups]
    twins = [torch.nn.Parameter(g.master.clone()) for g in groups]
    reference = torch.optim.AdamW(
        [{"params": [p], "weight_decay": g.weight_decay} for p, g in zip(twins, groups, strict=True)], foreach=False
    )
    for number in range(50):
        lr = 1e-2 * (1 + math.cos(number / 16)) / 2
        for seed, (twin, group) in enumerate(zip(twins, groups, strict=True)):
            for part in parts(group, group.grad).values():
                part.normal_(generator=torch.Generator().manual_seed(2 * number + seed))
            twin.grad = group.grad * 0.25
        for settings_of in reference.param_groups:
            settings_of["lr"] = lr
        reference.step()
        step(optimizer, lr, clip=0.25)
    for group, twin, old in zip(groups, twins, before, strict=True):
        found, exact, start = (parts(group, t.detach()) for t in (group.master, twin, old))
        for name, (_, shape) in group.shapes.items():
            moved = (exact[name] - start[name]).norm()
            error = (found[name] - exact[name]).norm() / moved
            small = math.prod(shape) < rule.SMALLEST
            # Decay after the step instead of before it: lr · wd of a step's length.
            assert error < (2e-3 if small else 5e-2), name
            assert small or error > 1e-4, f"{name} is not in 8 bits"


# ----------------------------------------------------------------- skipped steps and state


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("done", [0, 3], ids=["at the first step", "later"])
def test_a_skipped_step_changes_nothing(bad: float, done: int) -> None:
    groups = make_groups()
    optimizer = build(groups, AdamW8bitOptions())
    for number in range(done):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    before = snapshot(groups, optimizer)
    set_gradients(groups, 7)
    groups[0].grad[5] = bad
    step(optimizer, 1e-2, clip=bad, skip=1.0)
    assert_equal(snapshot(groups, optimizer), before)
    # And the next good step is as if the bad one had not been.
    set_gradients(groups, 8)
    step(optimizer, 1e-2)
    twins = make_groups()
    twin = build(twins, AdamW8bitOptions())
    for number in [*range(done), 8]:
        set_gradients(twins, number)
        step(twin, 1e-2)
    assert_equal(snapshot(groups, optimizer), snapshot(twins, twin))


def test_a_gradient_that_is_not_finite_reaches_nothing_even_unannounced() -> None:
    groups, twins = make_groups(), make_groups()
    for some, bad in ((groups, True), (twins, False)):
        optimizer = build(some, AdamW8bitOptions())
        for number in range(3):
            set_gradients(some, number)
            for group in some:
                for at, value in ((1, math.nan), (300, math.inf), (4500, -math.inf)):
                    group.grad[at] = value if bad else 0.0
            step(optimizer, 1e-2)
        if bad:
            found = snapshot(some, optimizer)
            assert all(t.float().isfinite().all() for t in found.values())
    assert_equal(found, snapshot(twins, optimizer))


def after_three_steps(groups: list[bundles.ParamGroup]) -> dict[str, Tensor]:
    optimizer = build(groups, AdamW8bitOptions())
    for number in range(3):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    return snapshot(groups, optimizer)


def test_chunks_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (adamw_8bit.BLOCK, 1 << 16):
        monkeypatch.setitem(rule.CHUNK, "cpu", size)
        found.append(after_three_steps(make_groups()))
    assert_equal(*found)


def test_chunks_draw_the_same_bits_for_bf16_masters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their length follows the number of threads, and what elements draw follows their place alone."""
    for module in (rule, rounding):
        monkeypatch.setattr(module, "PERIOD", 8 * adamw_8bit.BLOCK)
    found = []
    for size in (3 * adamw_8bit.BLOCK, 1 << 16):
        monkeypatch.setitem(rule.CHUNK, "cpu", size)
        groups = [replace(group, master=group.master.bfloat16(), seed=torch.tensor(7)) for group in make_groups()]
        found.append(after_three_steps(groups))
    assert_equal(*found)


def test_a_block_never_holds_two_tensors() -> None:
    """A tensor alone has the codes that it has in the group."""
    groups = make_groups()
    optimizer = build(groups, AdamW8bitOptions())
    set_gradients(groups, 0)
    step(optimizer, 1e-2)
    (group, _) = groups
    offset, shape = group.shapes["decayed.4"]
    size = -(-math.prod(shape) // adamw_8bit.BLOCK) * adamw_8bit.BLOCK
    grad, master = (t[offset : offset + size].clone() for t in (group.grad, group.master))
    alone = bundles.ParamGroup(name="decayed", master=master, grad=grad, shapes={"w": (0, shape)}, weight_decay=0.1)
    other = build([alone], AdamW8bitOptions())
    step(other, 1e-2)
    for name in ("decayed.first.codes", "decayed.second.codes", "decayed.first.absmax", "decayed.second.absmax"):
        mine = other.state()[name]
        assert torch.equal(optimizer.state()[name][-len(mine) :], mine), name


def test_state_goes_into_another_optimizer_and_continues_bit_for_bit() -> None:
    groups = make_groups()
    optimizer = build(groups, AdamW8bitOptions())
    for number in range(5):
        set_gradients(groups, number)
        step(optimizer, 1e-2)
    others = make_groups(seed=9)
    other = build(others, AdamW8bitOptions())
    for group, mine in zip(others, groups, strict=True):
        group.master.copy_(mine.master)
    for name, tensor in other.state().items():
        tensor.copy_(optimizer.state()[name].clone())
    for number in range(5, 8):
        for some, that in ((groups, optimizer), (others, other)):
            set_gradients(some, number)
            step(that, 1e-2)
    assert_equal(snapshot(others, other), snapshot(groups, optimizer))


def test_state_is_what_the_plan_is_told() -> None:
    count = 1 << 20
    flat = torch.zeros(count)
    group = bundles.ParamGroup(
        name="w", master=flat, grad=flat.clone(), shapes={"w": (0, (1024, 1024))}, weight_decay=0.0
    )
    state_bytes = sum(t.nbytes for t in build([group], AdamW8bitOptions()).state().values())
    spec = surogate_optimizer()
    assert spec.name == "adamw_8bit"
    assert state_bytes == pytest.approx(spec.state_bytes_per_parameter * count, abs=4)


@pytest.mark.gpu
def test_captured_steps_on_a_gpu_equal_the_cpu() -> None:
    cpu, cuda = make_groups(), make_groups(device="cuda")
    exact = build(cpu, AdamW8bitOptions())
    optimizer = build(cuda, AdamW8bitOptions())
    lr, clip, skip = (torch.tensor(x, device="cuda") for x in (1e-2, 0.5, 1.0))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        optimizer.step(lr=lr, clip=clip, skip=skip)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step(lr=lr, clip=clip, skip=skip)
    skip.zero_()
    for number in range(20):
        set_gradients(cpu, number)
        for group, twin in zip(cuda, cpu, strict=True):
            group.grad.copy_(twin.grad)
        graph.replay()
        step(exact, 1e-2, clip=0.5)
    for group, twin in zip(cuda, cpu, strict=True):
        assert (group.master.cpu() - twin.master).abs().quantile(0.99) < 1e-6
    for name, tensor in exact.state().items():
        found = optimizer.state()[name].cpu()
        if tensor.dtype == torch.uint8:
            difference = found.int() - tensor.int()
            assert (difference == 0).float().mean() >= 0.999, name
            assert difference.abs().max() <= 1, name
