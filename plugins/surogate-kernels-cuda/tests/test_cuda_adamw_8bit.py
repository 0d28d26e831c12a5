"""8-bit AdamW bit for bit as the reference on the CPU.

The kernel's source is run twice: compiled for the host, where there is a compiler for it, and on a GPU.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import surogate_kernels_cuda
import torch
from surogate_kernels_cuda import adamw_8bit
from torch import Tensor

from surogate_core.plugin import adamw_8bit as rule
from surogate_core.plugin import bundles
from surogate_core.service.kernels import KernelTable, using
from surogate_testing import host_cuda

SHAPES = ((37, 128), (40,), (4095,), (5000,), (96, 80))
"""Large, small, small, large that ends within a block, large."""


@pytest.fixture(params=["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return host_cuda.device_for(request.param, adamw_8bit, "adamw_8bit", surogate_kernels_cuda.unavailable, monkeypatch)


def make_group(device: torch.device, dtype: torch.dtype) -> bundles.ParamGroup:
    shapes: dict[str, tuple[int, tuple[int, ...]]] = {}
    size = 0
    for number, shape in enumerate(SHAPES):
        shapes[str(number)] = (size, shape)
        size += -(-math.prod(shape) // rule.BLOCK) * rule.BLOCK
    return bundles.ParamGroup(
        name="g",
        master=torch.randn(size, generator=torch.Generator().manual_seed(1)).to(device, dtype),
        grad=torch.zeros(size, device=device),
        shapes=shapes,
        weight_decay=0.1,
        seed=None if dtype == torch.float32 else torch.tensor(-77, dtype=torch.int32, device=device),
        number=3,
    )


def step(optimizer: rule.BlockwiseAdamW, lr: float = 1e-2, clip: float = 0.7, skip: float = 0.0) -> None:
    device = optimizer.steps.device
    figures = {name: torch.tensor(x, device=device) for name, x in {"lr": lr, "clip": clip, "skip": skip}.items()}
    optimizer.step(**figures)


def fused(optimizer: rule.BlockwiseAdamW, monkeypatch: pytest.MonkeyPatch, **figures: float) -> None:
    """A step by the kernel."""
    with monkeypatch.context() as patched:
        patched.setattr(rule, "adamw_8bit_update", adamw_8bit.adamw_8bit_update)
        step(optimizer, **figures)


def exactly(optimizer: rule.BlockwiseAdamW, monkeypatch: pytest.MonkeyPatch, **figures: float) -> None:
    """A step by the reference with roots rounded correctly: torch's of fp32 on a CPU may be a unit off."""
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "sqrt", lambda x: x.double().pow(0.5).to(x.dtype))
        step(optimizer, **figures)


def bits(group: bundles.ParamGroup, optimizer: rule.BlockwiseAdamW) -> dict[str, Tensor]:
    tensors = {"master": group.master, **optimizer.state()}
    return {
        name: (t.view(torch.int16) if t.element_size() == 2 else t.view(torch.uint8) if t.ndim else t).cpu().clone()
        for name, t in tensors.items()
    }


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def gradients(kind: str, like: Tensor, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(len(like), generator=generator)
    spread = 10 ** (6 * torch.rand(len(like), generator=generator) - 5)
    return {
        "random": x * spread * (torch.rand(len(like), generator=generator) > 0.1),
        "huge": x * 1e18,
        "tiny": x * 1e-19,  # squares are subnormal
        "smaller": x * 1e-36,  # m is subnormal too, v is 0
        "zero": torch.zeros_like(x),
        "mixed": torch.where(torch.arange(len(x)) // 64 % 3 > 0, x * spread, 1e-30 * x),
    }[kind]


@pytest.mark.slow
@pytest.mark.slow_cases("host-tiny-torch.float32", "host-mixed-torch.float32")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kind",
    ["tiny", "mixed", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("random", "huge", "smaller", "zero"))],
)
def test_bits_of_steps(kind: str, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(rule.CHUNK, device.type, 2048)
    group, twin = make_group(device, dtype), make_group(torch.device("cpu"), dtype)
    betas = {"beta1": 0.85, "beta2": 0.97}
    optimizer, reference = rule.BlockwiseAdamW([group], **betas), rule.BlockwiseAdamW([twin], **betas)
    for number in range(6):
        twin.grad.copy_(gradients(kind, twin.grad, number))
        if number == 3:
            twin.grad[[5, 700, 5300]] = torch.tensor([math.nan, math.inf, -math.inf])
        group.grad.copy_(twin.grad)
        fused(optimizer, monkeypatch)
        exactly(reference, monkeypatch)
        assert_same_bits(bits(group, optimizer), bits(twin, reference))
    assert group.master.isfinite().all()


def test_codes_at_every_border(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without momentum m is the gradient and v its square: values, borders and ends of ranges, and their neighbours."""
    codes = [rule.DynamicCode(signed=signed, device=torch.device("cpu")) for signed in (True, False)]
    patterns = (torch.arange(1 << 16, dtype=torch.int32) << 16).view(torch.float32)
    x = torch.cat([patterns[patterns.abs() <= 1], *(c.values for c in codes), *(c.borders[:-1] for c in codes)])
    x = torch.cat([x, codes[1].borders[:-1].sqrt()])
    x = torch.cat([x, *(torch.nextafter(x, torch.tensor(end)) for end in (-2.0, 2.0))]).clamp(-1, 1)
    x = torch.nn.functional.pad(x, (0, -len(x) % 255)).view(-1, 255)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1).flatten()
    found: list[dict[str, Tensor]] = []
    for where in (device, torch.device("cpu")):
        group = bundles.ParamGroup(
            name="g",
            master=torch.zeros(len(x), device=where),
            grad=x.to(where),
            shapes={"w": (0, (len(x),))},
            weight_decay=0.0,
        )
        optimizer = rule.BlockwiseAdamW([group], beta1=0.0, beta2=0.0)
        (exactly if found else fused)(optimizer, monkeypatch, clip=1.0)
        found.append(bits(group, optimizer))
    assert_same_bits(*found)
    assert len(found[0]["g.first.codes"].unique()) == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_skipped_step_changes_nothing(
    dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = make_group(device, dtype)
    optimizer = rule.BlockwiseAdamW([group])
    for number in range(2):
        group.grad.copy_(gradients("random", group.grad, number))
        fused(optimizer, monkeypatch)
    before = bits(group, optimizer)
    group.grad[3] = math.nan
    fused(optimizer, monkeypatch, clip=math.nan, skip=1.0)
    assert_same_bits(bits(group, optimizer), before)


@pytest.mark.gpu
def test_it_is_chosen_and_the_reference_on_a_gpu_has_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    if reason := surogate_kernels_cuda.unavailable(device):
        pytest.skip(reason)
    table = KernelTable.build(device, [surogate_kernels_cuda.surogate_kernel_pack()])
    for dtype, resident in product((torch.float32, torch.bfloat16), (1, 528)):
        monkeypatch.setattr(adamw_8bit, "_resident", lambda device, count=resident: count)
        groups = [make_group(device, dtype) for _ in range(2)]
        optimizers = [rule.BlockwiseAdamW([group]) for group in groups]
        for number in range(3):
            for group, optimizer, named in zip(groups, optimizers, (True, False), strict=True):
                group.grad.copy_(gradients("random", group.grad.cpu(), number))
                if named:
                    with using(table):
                        step(optimizer)
                else:
                    step(optimizer)
        assert_same_bits(*(bits(g, o) for g, o in zip(groups, optimizers, strict=True)))
    assert table.chosen == {("adamw_8bit_update", "float32"): "cuda"}
